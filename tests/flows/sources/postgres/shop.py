"""A database of its own on a real PostgreSQL, a table in it, and the capture of that table."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psycopg
from psycopg.rows import dict_row

from millrace.base.settings import Settings
from millrace.brokers.postgres import PostgresServer
from millrace.flows.registry import release
from millrace.flows.sources.postgres.model import PostgresSource
from millrace.flows.sources.postgres.server import Server
from tests import running_brokers
from tests.flows.sources.capture.shops import CapturedShop


class Shop(CapturedShop):
    """The table ``items`` of a new database, and its capture. Not started."""

    def __init__(
        self,
        folder: Path,
        columns: str,
        *,
        server: PostgresServer | None = None,
        before: Sequence[str] = (),
        **more: Any,
    ) -> None:
        self.server = server or running_brokers.postgres()
        self.database = f"shop_{uuid.uuid4().hex[:8]}"
        self.settings, self.group = Settings(data_dir=folder / "data"), f"millrace-{self.database}"
        with self.connect("postgres") as db:
            db.execute(f"create database {self.database}")
        self.execute(*before, f"create table items ({columns})")
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
        self.lane, self.table = "public.items", "items"

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

    def released(self) -> None:
        release(self.declared, self.settings, group=self.group)

    def rows(self) -> dict[str, dict[str, Any]]:
        """The rows of the table, by key, if all of its columns are numbers and texts."""
        with self.connect(row_factory=dict_row) as db:
            return {str(row["id"]): row for row in db.execute(f"select * from {self.table}")}

    def slots(self) -> list[str]:
        """The replication slots of the database."""
        with self.connect() as db:
            found = db.execute("select slot_name from pg_replication_slots where database = current_database()")
            return [name for (name,) in found]
