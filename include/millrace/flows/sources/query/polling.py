"""Poll a table by a growing column: pages in the order of the column and the key, starting before the overlap.

A transaction takes its value when it writes and becomes visible when it commits. So each poll begins `overlap` below
the largest value that was read. Rows that were already read are recognised: the spool's file has the digest of each row
in the overlap, updated in one transaction with each append.
"""

from __future__ import annotations

import hashlib
import sqlite3
from collections.abc import Callable, Mapping, Sequence
from datetime import date
from typing import Any, Final

from millrace.base.errors import InvalidSettings
from millrace.base.settings import Settings
from millrace.flows.sources.capture.lane import CapturedTables
from millrace.flows.sources.capture.polling import (
    UNREAD_ROWS,
    PolledRows,
    Poller,
    PollingFeeder,
    append,
    encode,
    line_of,
)
from millrace.flows.sources.capture.shared_spool import shared_spool
from millrace.flows.sources.capture.spool import Spool
from millrace.flows.sources.capture.ticks import remove_spool, spool_folder
from millrace.flows.sources.query.model import QuerySource
from millrace.flows.sources.sql.connection import SqlConnection
from millrace.flows.sources.sql.values import (
    Column,
    Form,
    before,
    form_of,
    from_json,
    order_of,
    to_json,
    value_of,
)

_SEEN: Final = (
    "create table if not exists seen (key text primary key, version, digest blob not null)",
    "create index if not exists seen_version on seen (version)",
)
VARIABLES: Final = 500
"""Keys of one lookup."""


class QueryPoller(Poller[SqlConnection]):
    """Reads the rows of `declared`."""

    def __init__(self, declared: QuerySource) -> None:
        self._declared = declared
        self._columns: list[tuple[Column, Form]] = []
        self._key: tuple[str, ...] = ()
        self._largest: Any = None
        """The largest value of the column that was read, or None."""
        self._inside = False
        """Whether the spool ends with a page that is not the last of its poll."""

    def begin(self, connection: SqlConnection, spool: Spool) -> None:
        """Check the table and load the state from the spool. Raises InvalidSettings, LogUnavailable."""
        declared = self._declared
        self.check(connection)
        now = spool.standing()
        largest = None if now.offset is None else now.offset["largest"]
        self._largest = None if largest is None else from_json(largest)
        if now.offset is None:
            spool.begin_epoch()
            if declared.start == "latest":
                column = connection.name(declared.column)
                ((largest,),) = connection.rows(f"select max({column}) from {connection.table(declared.table)}")
                self._largest = largest
        newest = spool.mark(-1, now.next)
        self._inside = newest is not None and not newest.whole
        append(spool, (), (), self._offset(), also=_tables)
        if now.offset is None and self._largest is not None:
            self._pages(connection, spool, lambda: True, silent=True)

    def check(self, connection: SqlConnection) -> None:
        """Check the table's key and columns. Raises InvalidSettings, LogUnavailable."""
        declared = self._declared
        columns = connection.columns(declared.table)
        names = [each.name for each in columns]
        self._key = declared.key or tuple(connection.key(declared.table))
        if not self._key:
            raise InvalidSettings(
                f"{declared.words}: {declared.table} has no primary key: set key to the columns that identify a row"
            )
        for name in (declared.column, *self._key):
            if name not in names:
                raise InvalidSettings(f"{declared.words}: {declared.table} has no column {name!r}")
        self._columns = [(each, form_of(connection.engine, each)) for each in columns]

    def poll(self, connection: SqlConnection, spool: Spool, room: Callable[[], bool], /) -> None:
        """Read all rows from the overlap on, in pages."""
        self._pages(connection, spool, room, silent=False)

    def unread(self, connection: SqlConnection, spool: Spool, /) -> int:
        """Return the bytes of rows above the largest value."""
        declared = self._declared
        largest = (spool.standing().offset or {}).get("largest")
        column = f"r.{connection.name(declared.column)}"
        where = f"{column} is not null" if largest is None else f"{column} > {connection.mark}"
        source = f"{connection.table(declared.table)} r where {where}"
        values = () if largest is None else (from_json(largest),)
        return connection.size(connection.columns(declared.table), source, values, most=UNREAD_ROWS)

    def _pages(self, connection: SqlConnection, spool: Spool, room: Callable[[], bool], *, silent: bool) -> None:
        """Read pages. With `silent`, record that their rows were seen, without appending them."""
        declared = self._declared
        low = None if self._largest is None else before(self._largest, declared.overlap)
        after: tuple[Any, ...] | None = None
        while room():
            rows, asked = self._page(connection, low, after)
            last = len(rows) < asked
            self._append(spool, rows, silent=silent, last=last)
            if last:
                if self._inside:  # earlier pages had rows, and this one has none
                    append(spool, (), [0], self._offset(), source=self._place())
                    self._inside = False
                return
            after = tuple(rows[-1][: 1 + len(self._key)])

    def _page(
        self, connection: SqlConnection, low: Any, after: tuple[Any, ...] | None
    ) -> tuple[list[tuple[Any, ...]], int]:
        """Return rows (the column and the key in the driver's form, then all columns), and the requested number."""
        declared, mark = self._declared, connection.mark
        order = [f"r.{connection.name(each)}" for each in (declared.column, *self._key)]
        shown = [form.expression.format(connection.name(each.name)) for each, form in self._columns]
        where, values = [f"{order[0]} is not null"], list[Any]()
        if after is not None:  # the first condition lets an index find the page
            where = [f"{order[0]} >= {mark}", f"({', '.join(order)}) > ({', '.join([mark] * len(order))})"]
            values = [after[0], *after]
        elif low is not None:
            where, values = [f"{order[0]} >= {mark}"], [low]
        source, by = f"{connection.table(declared.table)} r where {' and '.join(where)}", ", ".join(order)
        read = [each for each, _ in self._columns]
        asked = connection.fitting(read, source, values, order=by, most=declared.page_rows)
        rows = connection.rows(
            f"select {', '.join([*order, *shown])} from {source} order by {by} limit {asked}", values
        )
        return rows, asked

    def _append(self, spool: Spool, rows: Sequence[tuple[Any, ...]], *, silent: bool, last: bool) -> None:
        """Append those of `rows` that are new or changed. Only the `last` page of a poll has a tick."""
        first = 1 + len(self._key)
        found: dict[bytes, tuple[Any, bytes, dict[str, Any], dict[str, Any]]] = {}
        for row in rows:
            after = {
                each.name: value_of(form, raw) for (each, form), raw in zip(self._columns, row[first:], strict=True)
            }
            key = {name: after[name] for name in self._key}
            digest = hashlib.blake2b(encode(after), digest_size=16).digest()
            found[encode(key)] = row[0], digest, key, after
        known = self._seen(spool, list(found))
        new = {text: each for text, each in found.items() if known.get(text) != each[1]}
        if not new:
            return
        binary = [each.name for each, form in self._columns if form.binary]
        lines = [
            (self._declared.name, line_of("r", key=key, after=after, milliseconds=_moment(version), binary=binary))
            for version, _, key, after in new.values()
        ]
        largest = max((each[0] for each in new.values()), key=order_of)
        if self._largest is None or order_of(largest) > order_of(self._largest):
            self._largest = largest
        low = order_of(before(self._largest, self._declared.overlap))
        records = [(text.decode(), order_of(each[0]), each[1]) for text, each in new.items()]

        def note(base: sqlite3.Connection) -> None:
            base.executemany(
                "insert into seen values (?, ?, ?)"
                " on conflict (key) do update set version = excluded.version, digest = excluded.digest",
                records,
            )
            base.execute("delete from seen where version < ?", (low,))

        appended = [] if silent else lines
        marks = [len(appended)] if appended else []
        append(spool, appended, marks, self._offset(), source=self._place(), whole=last, also=note)
        if appended:
            self._inside = not last

    def _place(self) -> str:
        """Return the largest value of the column that was read, as a position."""
        return f"{self._declared.column} {to_json(self._largest)[1]}"

    def _seen(self, spool: Spool, keys: Sequence[bytes]) -> dict[bytes, bytes]:
        found: dict[bytes, bytes] = {}
        for place in range(0, len(keys), VARIABLES):
            part = [each.decode() for each in keys[place : place + VARIABLES]]
            marks = ", ".join("?" * len(part))
            rows = spool.rows_of(f"select key, digest from seen where key in ({marks})", part)
            found |= {key.encode(): digest for key, digest in rows}
        return found

    def _offset(self) -> dict[str, Any]:
        return {"largest": None if self._largest is None else to_json(self._largest)}


def _tables(base: sqlite3.Connection) -> None:
    for statement in _SEEN:
        base.execute(statement)


def _moment(version: Any) -> int:
    """Return a time in milliseconds since 1970; 0 for any other value."""
    return int(order_of(version)) // 1000 if isinstance(version, date) else 0


def source_of(declared: QuerySource, settings: Settings, *, group: str, standing: Mapping[str, int]) -> CapturedTables:
    """Return the declared source."""
    return CapturedTables(spool_folder(settings, group), declared.names)


def reader_of(declared: QuerySource, settings: Settings, *, group: str, topic: str, partition: int) -> PolledRows:
    """Return a reader of the declared source."""
    return PolledRows(spool_folder(settings, group), topic)


def feeder_of(declared: QuerySource, settings: Settings, *, group: str) -> PollingFeeder:
    """Check the table, and start its feeder. Raises InvalidSettings, LogUnavailable, StreamBusy."""
    with SqlConnection(declared) as connection:
        QueryPoller(declared).check(connection)
    return PollingFeeder(
        lambda: SqlConnection(declared),
        declared.words,
        spool_folder(settings, group),
        QueryPoller(declared),
        every_seconds=declared.every_seconds,
        max_bytes=declared.spool_mib << 20,
        shared=shared_spool(settings, group),
    )


def release(declared: QuerySource, settings: Settings, *, group: str) -> None:
    """Remove the spool of a flow. The database stores nothing of it."""
    remove_spool(settings, group)
