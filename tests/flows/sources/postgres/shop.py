"""A database of its own on a real PostgreSQL, a table in it, and the capture of that table."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg
from psycopg.rows import dict_row

from millrace.base.settings import Settings
from millrace.brokers.postgres import PostgresServer
from millrace.flows.records import Record, is_truncation
from millrace.flows.registry import feeder_of, reader_of, release, source_of
from millrace.flows.sources.capture.feeder import Feeder
from millrace.flows.sources.capture.spool import Spool, Standing
from millrace.flows.sources.capture.ticks import spool_folder
from millrace.flows.sources.postgres.model import PostgresSource
from millrace.flows.sources.postgres.server import Server
from millrace.flows.sources.source import Limits
from tests import running_brokers
from tests.waiting import until

LIMITS = Limits(500, 1 << 20, 0.1)


class Shop:
    """The table ``items`` of a new database, and its capture. Not started."""

    def __init__(self, folder: Path, columns: str, *, server: PostgresServer | None = None, **more: Any) -> None:
        self.server = server or running_brokers.postgres()
        self.database = f"shop_{uuid.uuid4().hex[:8]}"
        self.settings, self.group = Settings(data_dir=folder / "data"), f"millrace-{self.database}"
        with self.connect("postgres") as db:
            db.execute(f"create database {self.database}")
        self.execute(f"create table items ({columns})")
        user, password = self.server.credentials
        self.declared = PostgresSource(
            host="127.0.0.1",
            port=self.server.port["client"],
            user=user,
            password=password,
            database=self.database,
            table="items",
            **more,
        )
        self.lane = "public.items"

    @property
    def folder(self) -> Path:
        """Of the spool."""
        return spool_folder(self.settings, self.group)

    @property
    def slot(self) -> str:
        return self.server_of().slot

    def server_of(self) -> Server:
        """The server as the capture sees it."""
        return Server(self.declared, self.group)

    def connect(self, database: str = "", **more: Any) -> psycopg.Connection[Any]:
        user, password = self.server.credentials
        return psycopg.connect(
            host="127.0.0.1",
            port=self.server.port["client"],
            user=user,
            password=password,
            dbname=database or self.database,
            autocommit=True,
            **more,
        )

    def execute(self, *statements: str) -> list[tuple[Any, ...]]:
        with self.connect() as db:
            for each in statements:
                cursor = db.execute(each)
            return cursor.fetchall() if cursor.description else []

    @contextmanager
    def captured(self) -> Iterator[Feeder]:
        feeder = feeder_of(self.declared, self.settings, group=self.group)
        assert isinstance(feeder, Feeder)
        try:
            yield feeder
        finally:
            feeder.close()

    def released(self) -> None:
        release(self.declared, self.settings, group=self.group)

    def standing(self) -> Standing:
        with Spool(self.folder) as spool:
            return spool.standing()

    def records(self, start: int = 0) -> list[Record]:
        """All records that readers see from `start` on, read in batches."""
        source = source_of(self.declared, self.settings, group=self.group)
        reader = reader_of(self.declared, self.settings, group=self.group, topic=self.lane, partition=0)
        try:
            end, found = source.ends()[f"{self.lane}-0"].high, []
            while start < end:
                for batch in reader.batches(start, end, LIMITS):
                    assert batch.start == start < batch.end
                    found += batch.records or ()
                    start = batch.end
            return found
        finally:
            source.close()
            reader.close()

    def replayed(self) -> dict[str, dict[str, Any]]:
        """The rows that the records come to, by key."""
        rows: dict[str, dict[str, Any]] = {}
        for each in self.records():
            if is_truncation(each):
                rows.clear()
            elif each.value is None:
                rows.pop((each.key or b"").decode(), None)
            else:
                rows[(each.key or b"").decode()] = json.loads(each.value)
        return rows

    def rows(self) -> dict[str, dict[str, Any]]:
        """The rows of the table, by key, if all of its columns are numbers and texts."""
        with self.connect(row_factory=dict_row) as db:
            return {str(row["id"]): row for row in db.execute("select * from items")}

    def reaches(self) -> None:
        """Wait until the records come to the table's rows."""
        until(lambda: self.replayed() == self.rows(), f"the lane has the table's {len(self.rows())} rows", seconds=60)

    def slots(self) -> list[str]:
        """The replication slots of the database."""
        with self.connect() as db:
            found = db.execute("select slot_name from pg_replication_slots where database = current_database()")
            return [name for (name,) in found]
