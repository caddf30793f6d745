"""Databases with a table for tests of what reads them by SQL."""

from __future__ import annotations

import sqlite3
import uuid
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pymysql

from millrace.base.settings import Settings
from millrace.flows.records import Record
from millrace.flows.registry import Source as Declared
from millrace.flows.registry import feeder_of
from tests import running_brokers
from tests.flows.sources.capture.shops import records_of, replayed


class Base:
    """A database of its own, and a capture of what is declared in it."""

    def __init__(self, folder: Path, engine: str) -> None:
        self.engine, self.settings = engine, Settings(data_dir=folder / "data")
        self.group = f"millrace-{uuid.uuid4().hex[:8]}"
        self.database = f"sql_{uuid.uuid4().hex[:8]}"
        self.place: dict[str, Any] = {"engine": engine, "database": self.database}
        self.password = ""
        if engine == "sqlite":
            self.place["database"] = str(folder / f"{self.database}.db")
            with closing(sqlite3.connect(self.place["database"])) as made:
                made.execute("pragma journal_mode = wal")
        else:
            server = running_brokers.mariadb() if engine == "mariadb" else running_brokers.postgres()
            host, port = server.address.split(":")
            user, self.password = server.credentials
            with closing(self._connect(host, int(port), user, None)) as made:
                made.cursor().execute(f"create database {self.database}")
            self.place |= {"host": host, "port": int(port), "user": user}

    def connect(self, *, autocommit: bool = True) -> Any:
        if self.engine == "sqlite":
            return sqlite3.connect(self.place["database"], isolation_level=None)
        made = self._connect(self.place["host"], self.place["port"], self.place["user"], self.database)
        if not autocommit:
            made.autocommit(False) if self.engine == "mariadb" else setattr(made, "autocommit", False)
        return made

    def _connect(self, host: str, port: int, user: str, database: str | None) -> Any:
        if self.engine == "mariadb":
            return pymysql.connect(
                host=host, port=port, user=user, password=self.password, database=database, autocommit=True
            )
        import psycopg

        return psycopg.connect(
            host=host, port=port, user=user, password=self.password, dbname=database or "postgres", autocommit=True
        )

    def execute(self, *statements: str) -> list[tuple[Any, ...]]:
        with closing(self.connect()) as connection:
            cursor = connection.cursor()
            for each in statements:
                cursor.execute(each)
            return [tuple(row) for row in cursor.fetchall()] if cursor.description else []

    def declared(self, make: Callable[..., Any], **more: Any) -> Any:
        return make(**self.place, password=self.password, **more)

    @contextmanager
    def captured(self, declared: Declared) -> Iterator[Any]:
        feeder = feeder_of(declared, self.settings, group=self.group)
        assert feeder is not None
        try:
            yield feeder
        finally:
            feeder.close()

    def once(self, declared: Declared) -> None:
        """Read all that there is now."""
        with self.captured(declared) as feeder:
            feeder.wait_complete(30)

    def records(self, declared: Any, name: str = "") -> list[Record]:
        """All records of a lane that readers see."""
        return records_of(declared, self.settings, self.group, name or declared.names[0])

    def replayed(self, declared: Any, name: str = "") -> dict[str, dict[str, Any]]:
        """The rows that the records come to, by key."""
        return replayed(self.records(declared, name))


def administer(*statements: str) -> None:
    """Run statements on MariaDB as its administrator, who may grant rights."""
    server = running_brokers.mariadb()
    with closing(pymysql.connect(unix_socket=str(server.socket), user="root", autocommit=True)) as connection:
        for each in statements:
            connection.cursor().execute(each)
