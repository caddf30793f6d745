"""The databases of the demo: flights and planes that change in transactions, airports, and airlines.

Each database is written to by a thread of its own. All of its choices come from a seed, so that a run can be repeated;
where the faults meet them depends on the machine.
"""

from __future__ import annotations

import random
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import csv

from millrace.brokers.mariadb import DATABASE, MariaDbServer
from millrace.brokers.postgres import DATABASE as POSTGRES
from millrace.brokers.postgres import PostgresServer
from millrace.brokers.server import LocalServer
from millrace.demo.flights import data_file, flights
from millrace.flows.sources.sql.connection import SqlConnection
from millrace.flows.sources.triggers.model import TriggersSource
from millrace.flows.sources.triggers.statements import statements

Row = tuple[Any, ...]
ALTERED: Final = "alter table planes add column inspected date not null default '2013-01-01'"
"""Statement that changes a table in the middle of the writing. Rows that get the value are not in its log."""
MARKED: Final = "update planes set seats = seats + 1 where tailnum = 'N10156'"
"""Statement that marks a row by a change."""
REPEATED: Final = "update planes set seats = seats where tailnum = 'N10156'"
"""A change that leaves the row as it is."""
_BATCH: Final = 100
"""Rows of an INSERT statement."""
_PAUSE_SECONDS: Final = 0.02
"""Between two transactions."""
_AGAIN_SECONDS: Final = 0.2
"""Before a writer looks again for its server, which was killed."""


@dataclass(frozen=True, slots=True)
class CapturedTable:
    """A table of a database. The first column is its key."""

    name: str
    columns: dict[str, str]
    """The SQL type of each."""

    @property
    def key(self) -> str:
        return next(iter(self.columns))


FLIGHTS: Final = CapturedTable(
    "flights",
    {
        "id": "varchar(40)",
        "day": "date",
        "carrier": "varchar(2)",
        "flight": "integer",
        "tailnum": "varchar(8)",
        "origin": "varchar(3)",
        "dest": "varchar(3)",
        "dep_delay": "smallint",
        "distance": "integer",
    },
)
PLANES: Final = CapturedTable(
    "planes",
    {
        "tailnum": "varchar(8)",
        "year": "smallint",
        "manufacturer": "varchar(40)",
        "model": "varchar(40)",
        "seats": "smallint",
        "flights": "integer",
    },
)
AIRPORTS: Final = CapturedTable(
    "airports",
    {
        "faa": "varchar(4)",
        "name": "varchar(80)",
        "lat": "double precision",
        "lon": "double precision",
        "alt": "integer",
    },
)
AIRLINES: Final = CapturedTable(
    "airlines", {"carrier": "varchar(2)", "name": "varchar(40)", "passengers": "bigint", "version": "bigint"}
)
TABLES: Final = (FLIGHTS, PLANES, AIRPORTS, AIRLINES)


class SourceDatabase(ABC):
    """A database with the tables of the demo on a server that runs. One thread writes; any thread reads."""

    kind: str
    prepared: tuple[str, ...] = ()
    """Statements that each table needs before it can be captured."""

    def __init__(self, server: LocalServer, rows: int | None, seed: int) -> None:
        self.server = server
        self.between = threading.Lock()
        """Lock held during a transaction, so that its holder sees the database between two."""
        self.transactions = 0
        self.altered = False
        self._random = random.Random(seed)
        self._rows = _flights(rows)
        self._next = 0
        self._ended = threading.Event()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._write, name=f"demo-{self.kind}", daemon=True)

    @property
    @abstractmethod
    def password(self) -> str:
        """Password of the user who captures."""

    @property
    def password_name(self) -> str:
        """The environment variable by which declarations name the password."""
        return f"{self.kind}_password".upper()

    @abstractmethod
    def sources(self) -> dict[str, tuple[dict[str, Any], tuple[CapturedTable, ...]]]:
        """Declare the sources of the database's flows with their tables, by the way of capture."""

    @abstractmethod
    def mark(self) -> str:
        """Change a plane, and return the name of that transaction, as recorded ticks have it."""

    @abstractmethod
    def connect(self) -> Any:
        """Return a DB-API connection, without autocommit."""

    @abstractmethod
    def lost(self, error: BaseException) -> bool:
        """Return whether an error says that the server is gone."""

    def fill(self) -> None:
        """Make the tables, and put half of the flights and all of the rest into them."""
        with self.connected() as cursor:
            for table in TABLES:
                columns = ", ".join(f"{name} {kind}" for name, kind in table.columns.items())
                cursor.execute(f"create table {table.name} ({columns}, primary key ({table.key}))")
                for statement in self.prepared:
                    cursor.execute(statement.format(table.name))
        for table, rows in ((PLANES, _planes()), (AIRPORTS, _airports()), (AIRLINES, _airlines())):
            with self.connected() as cursor:
                self._insert(cursor, table, rows)
        self._next = len(self._rows) // 2
        with self.connected() as cursor:
            self._insert(cursor, FLIGHTS, self._rows[: self._next])

    def install_triggers(self) -> None:
        """Make the triggers of the tables that are captured so."""
        source, _ = self.sources()["triggers"]
        declared = TriggersSource.model_validate({**source, "password": self.password})
        with SqlConnection(declared) as connection:
            found = statements(connection, declared)
        with self.connected() as cursor:
            for each in found:
                cursor.execute(each)

    def alter(self) -> None:
        """Give a table another column, between two transactions of the writer."""
        with self.between, self.connected() as cursor:
            cursor.execute(ALTERED)
            self.altered = True

    def start(self) -> None:
        """Begin to write."""
        self._thread.start()

    def stop(self) -> None:
        """End the writing after its transaction. Raises what ended it before."""
        self._ended.set()
        if self._thread.ident is not None:
            self._thread.join()
        if self._failure is not None:
            raise self._failure

    def rows(self, table: CapturedTable) -> tuple[list[str], list[Row]]:
        """Return the names of a table's columns, and its rows in the order of the key."""
        with self.connected() as cursor:
            cursor.execute(f"select * from {table.name} order by {table.key}")
            return [each[0] for each in cursor.description], sorted(tuple(row) for row in cursor.fetchall())

    @contextmanager
    def connected(self) -> Iterator[Any]:
        """Yield a cursor; its work is committed at the end."""
        connection = self.connect()
        try:
            with connection.cursor() as cursor:
                yield cursor
            connection.commit()
        finally:
            connection.close()

    def _write(self) -> None:
        connection = None
        try:
            while not self._ended.wait(_PAUSE_SECONDS):
                try:
                    with self.between:
                        connection = connection or self.connect()
                        with connection.cursor() as cursor:
                            self._transaction()(cursor)
                        connection.commit()
                        self.transactions += 1
                except Exception as error:
                    if not self.lost(error):
                        raise
                    connection = None
                    self._ended.wait(_AGAIN_SECONDS)
        except BaseException as error:
            self._failure = error
        finally:
            if connection is not None:
                connection.close()

    def _transaction(self) -> Callable[[Any], None]:
        return self._random.choices((self._depart, self._correct, self._cancel, self._survey), (6, 4, 2, 1))[0]

    def _depart(self, cursor: Any) -> None:
        """New flights, each counted with its plane: two tables in one transaction."""
        count = self._random.randint(1, 200)
        rows = self._rows[self._next : self._next + count]
        self._next += len(rows)
        known = [row for row in rows if not self._exists(cursor, row[0])]  # a commit whose answer was lost
        self._insert(cursor, FLIGHTS, known)
        for row in known[:20]:
            cursor.execute("update planes set flights = flights + 1 where tailnum = %s", (row[4],))
        cursor.execute(
            "update airlines set passengers = passengers + %s, version = %s where carrier = %s",
            (count, self.transactions + 1, self._random.choice(self._rows)[2]),
        )

    def _correct(self, cursor: Any) -> None:
        for row in self._some(50):
            cursor.execute("update flights set dep_delay = %s where id = %s", (self._random.randint(-9, 400), row[0]))

    def _cancel(self, cursor: Any) -> None:
        for row in self._some(20):
            cursor.execute("delete from flights where id = %s", (row[0],))
        plane = self._random.choice(self._rows)[4]
        cursor.execute("update planes set seats = seats + 1 where tailnum = %s", (plane,))
        if self.altered:
            cursor.execute("update planes set inspected = '2013-12-31' where tailnum = %s", (plane,))

    def _survey(self, cursor: Any) -> None:
        airport = self._random.choice(self._rows)[6]
        if self._random.random() < 0.2:
            cursor.execute("delete from airports where faa = %s", (airport,))
        else:
            cursor.execute("update airports set alt = alt + 1 where faa = %s", (airport,))

    def _some(self, most: int) -> Sequence[Row]:
        return self._random.sample(self._rows[: self._next], min(self._next, self._random.randint(1, most)))

    def _exists(self, cursor: Any, key: str) -> bool:
        cursor.execute("select 1 from flights where id = %s", (key,))
        return cursor.fetchone() is not None

    def _insert(self, cursor: Any, table: CapturedTable, rows: Sequence[Row]) -> None:
        marks = "(" + ", ".join(["%s"] * len(table.columns)) + ")"
        for first in range(0, len(rows), _BATCH):
            few = rows[first : first + _BATCH]
            cursor.execute(
                f"insert into {table.name} ({', '.join(table.columns)}) values {', '.join([marks] * len(few))}",
                [value for row in few for value in row],
            )


class MariaDb(SourceDatabase):
    """MariaDB, captured by its binary log."""

    kind = "mariadb"
    server: MariaDbServer

    @property
    def password(self) -> str:
        return self.server.credentials.password

    def sources(self) -> dict[str, tuple[dict[str, Any], tuple[CapturedTable, ...]]]:
        return _sources("mariadb", self._login() | {"password": f"${{env:{self.password_name}}}"})

    def mark(self) -> str:
        with self.connected() as cursor:
            cursor.execute(MARKED)
            cursor.connection.commit()
            cursor.execute("select @@last_gtid")
            return str(cursor.fetchone()[0])

    def connect(self) -> Any:
        import pymysql

        return pymysql.connect(password=self.password, **self._login())

    def lost(self, error: BaseException) -> bool:
        import pymysql

        return isinstance(error, pymysql.err.OperationalError | pymysql.err.InterfaceError | OSError)

    def _login(self) -> dict[str, Any]:
        user, port = self.server.credentials.username, self.server.port["client"]
        return {"host": "127.0.0.1", "port": port, "user": user, "database": DATABASE}


class Postgres(SourceDatabase):
    """PostgreSQL, captured by logical decoding."""

    kind = "postgres"
    prepared = ("alter table {} replica identity full",)
    server: PostgresServer

    @property
    def password(self) -> str:
        return self.server.credentials.password

    def sources(self) -> dict[str, tuple[dict[str, Any], tuple[CapturedTable, ...]]]:
        return _sources("postgres", self._login() | {"password": f"${{env:{self.password_name}}}"})

    def mark(self) -> str:
        with self.connected() as cursor:
            cursor.execute(MARKED)
            cursor.connection.commit()
            # What commits after this place holds the change, also a heartbeat; one follows that changes no value.
            cursor.execute("select txid_current(), pg_current_wal_insert_lsn() - '0/0'::pg_lsn")
            number, place = cursor.fetchone()
            cursor.execute(REPEATED)
        return f"{number}:{place}"

    def connect(self) -> Any:
        import psycopg

        login = self._login()
        return psycopg.connect(dbname=login.pop("database"), password=self.password, **login)

    def lost(self, error: BaseException) -> bool:
        import psycopg

        return isinstance(error, psycopg.OperationalError | psycopg.InterfaceError)

    def _login(self) -> dict[str, Any]:
        user, port = self.server.credentials.username, self.server.port["client"]
        return {"host": "127.0.0.1", "port": port, "user": user, "database": POSTGRES}


def _sources(engine: str, login: dict[str, Any]) -> dict[str, tuple[dict[str, Any], tuple[CapturedTable, ...]]]:
    logged = (FLIGHTS, PLANES)
    polled = {"engine": engine, "column": "version", "overlap": 1_000, "every_seconds": 0.5}
    return {
        "log": ({"kind": engine, **login, "tables": [each.name for each in logged]}, logged),
        "triggers": ({"kind": "triggers", **login, "engine": engine, "table": AIRPORTS.name}, (AIRPORTS,)),
        "query": ({"kind": "query", **login, "table": AIRLINES.name, **polled}, (AIRLINES,)),
    }


def _flights(count: int | None) -> list[Row]:
    table = flights().slice(0, count)
    table = table.append_column("day_", table["time_hour"].cast(pa.date32()))
    names = ["day_" if name == "day" else name for name in FLIGHTS.columns]
    return _rows_of(table.select(names))


def _planes() -> list[Row]:
    table = _csv("planes.csv", {"year": pa.int16(), "seats": pa.int16()})
    table = table.append_column("flights", pa.array([0] * len(table), pa.int32()))
    return _rows_of(table.select(list(PLANES.columns)))


def _airports() -> list[Row]:
    table = _csv("airports.csv", {"lat": pa.float64(), "lon": pa.float64(), "alt": pa.int32()})
    return _rows_of(table.select(list(AIRPORTS.columns)))


def _airlines() -> list[Row]:
    return [(*row, 0, 0) for row in _rows_of(_csv("airlines.csv", {}))]


def _csv(name: str, types: dict[str, pa.DataType]) -> pa.Table:
    options = csv.ConvertOptions(column_types=types, null_values=["", "NA"], strings_can_be_null=True)
    table = csv.read_csv(data_file(name), convert_options=options)
    return table.filter(pc.is_valid(table[0]))


def _rows_of(table: pa.Table) -> list[Row]:
    return list(zip(*(column.to_pylist() for column in table.columns), strict=True))
