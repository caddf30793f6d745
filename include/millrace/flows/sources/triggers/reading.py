"""Read the table of changes in order, and remove changes that are in the spool.

A change is read once it is committed, and removed once it is durable in the spool. No position is stored, so a change
whose number was assigned early and committed late is read when it appears, however late.

- Numbers order the changes of one row: its second change waits for the first one's commit.
- One snapshot of the database shows whole transactions, so a part ends with one. If there is more than a part's worth,
  it extends to the end of the transactions that it began.
- The spool's offset has the numbers to be removed. After a crash they are removed before anything is read.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import msgspec

from millrace.base.errors import LogUnavailable
from millrace.base.failpoint import hit
from millrace.base.settings import Settings
from millrace.flows.sources.capture.lane import CapturedTables
from millrace.flows.sources.capture.polling import UNREAD_ROWS, PolledRows, Poller, PollingFeeder, append, line_of
from millrace.flows.sources.capture.shared_spool import shared_spool
from millrace.flows.sources.capture.spool import Spool
from millrace.flows.sources.capture.ticks import remove_spool, spool_folder
from millrace.flows.sources.sql.connection import SqlConnection
from millrace.flows.sources.sql.values import Column, is_number, value_of
from millrace.flows.sources.triggers.model import TriggersSource
from millrace.flows.sources.triggers.statements import Shape, check, remove

PART_PAGES: Final = 20
"""Pages of one part."""
MOST_PAGES: Final = 200
"""The most pages of a part whose transactions do not end."""
PART_BYTES: Final = 16 << 20
"""About the bytes of one part."""
MOST_BYTES: Final = 64 << 20
"""The most bytes of a part whose transactions do not end."""
_TEXTS: Final = [Column("key", "text"), Column("after", "text")]
"""The columns of a change that may be long."""
CHECK_SECONDS: Final = 60.0
"""Seconds between two checks of the triggers."""
_image: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])


class TriggersPoller(Poller[SqlConnection]):
    """Reads the changes of `declared`."""

    def __init__(self, declared: TriggersSource) -> None:
        self._declared = declared
        self._shapes: dict[str, Shape] = {}
        self._checked = 0.0

    def begin(self, connection: SqlConnection, spool: Spool) -> None:
        """Check the database and load the state from the spool; take a snapshot if there is none.

        Raises InvalidSettings, LogUnavailable.
        """
        self._check(connection)
        lock_changes(connection, self._declared)
        now = spool.standing()
        if now.offset is None or not now.complete:
            spool.begin_epoch()
            self._snapshot(connection, spool, replaces=now.epoch > 0)
        self._remove(connection, spool.standing().offset["remove"])

    def poll(self, connection: SqlConnection, spool: Spool, room: Callable[[], bool], /) -> None:
        """Read and remove all committed changes."""
        if time.monotonic() - self._checked > CHECK_SECONDS:
            self._check(connection)
        while room():
            changes, numbers, whole = self._part(connection)
            if not numbers:
                return
            runs = _runs(numbers)
            append(spool, changes, [len(changes)], {"remove": runs}, source=f"change {numbers[-1]}", whole=whole)
            self._remove(connection, runs)
            hit("capture.removed")

    def unread(self, connection: SqlConnection, spool: Spool, /) -> int:
        """Return the bytes in the table of changes."""
        changes = connection.table(self._declared.changes)
        return connection.size(_TEXTS, f"{changes} r", (), most=UNREAD_ROWS)

    def _check(self, connection: SqlConnection) -> None:
        self._shapes = {each.table: each for each in check(connection, self._declared)}
        self._checked = time.monotonic()

    # --- changes -----------------------------------------------------------------------------------------------------

    def _part(self, connection: SqlConnection) -> tuple[list[tuple[str, bytes]], list[int], bool]:
        """Return the changes of one snapshot up to the end of transactions, their numbers, and whether they are whole.

        A part of the most pages or bytes may end inside transactions.
        """
        declared, name = self._declared, connection.name
        changes, mark = connection.table(declared.changes), connection.mark
        texts = "::text" if declared.engine == "postgres" else ""
        moment = {
            "mariadb": "unix_timestamp(made_at)", "postgres": "extract(epoch from made_at)",
            "sqlite": "unixepoch(made_at)",
        }[declared.engine]  # fmt: skip
        columns = f"id, source, op, {name('key')}{texts}, {name('after')}{texts}, txid, {moment}"
        found: list[tuple[str, bytes]] = []
        numbers: list[int] = []
        last = 0
        size = 0
        whole = False
        with connection.snapshot():
            for page in range(MOST_PAGES):
                if (page >= PART_PAGES or size >= PART_BYTES) and not self._begun(connection, last):
                    whole = True
                    break
                if size >= MOST_BYTES:
                    break
                source = f"{changes} r where id > {mark}"
                asked = connection.fitting(_TEXTS, source, [last], order="id", most=declared.page_rows)
                rows = connection.rows(f"select {columns} from {source} order by id limit {asked}", [last])
                for _, table, operation, key, after, transaction, seconds in rows:
                    shape = self._shapes.get(table)
                    if shape is not None:  # else the table was removed from the flow in the meantime
                        found.append(self._change(shape, operation, key, after, transaction, seconds))
                numbers += [int(row[0]) for row in rows]
                size += sum(len(row[3] or "") + len(row[4] or "") for row in rows)
                if len(rows) < asked:
                    whole = True
                    break
                last = numbers[-1]
        return found, numbers, whole

    def _begun(self, connection: SqlConnection, last: int) -> bool:
        """Return whether a transaction has changes up to `last` and after it."""
        changes, mark = connection.table(self._declared.changes), connection.mark
        return bool(
            connection.rows(
                f"select 1 from {changes} a where a.id > {mark} and exists"
                f" (select 1 from {changes} b where b.txid = a.txid and b.id <= {mark}) limit 1",
                [last, last],
            )
        )

    def _change(
        self, shape: Shape, operation: str, key: str | None, after: str | None, transaction: Any, seconds: Any
    ) -> tuple[str, bytes]:
        named = str(transaction) if self._declared.engine == "postgres" else None
        line = line_of(
            operation,
            key=None if key is None else self._values(shape, key),
            after=None if after is None else self._values(shape, after),
            milliseconds=int(seconds * 1000),
            transaction=named,
            binary=_binary(shape),
        )
        return f"{self._declared.place}.{shape.table}", line

    def _values(self, shape: Shape, text: str) -> dict[str, Any]:
        """Return the values that a trigger wrote, with all digits of numbers."""
        image = _image.decode(text)
        found: dict[str, Any] = {}
        for column, form in shape.columns:
            raw = image.get(column.name)
            if raw is None:
                continue
            if is_number(form) and bytes(raw)[:1] not in b'"n':
                found[column.name] = raw
            else:
                found[column.name] = value_of(form, msgspec.json.decode(raw))
        return found

    def _remove(self, connection: SqlConnection, runs: Sequence[Sequence[int]]) -> None:
        changes, mark = connection.table(self._declared.changes), connection.mark
        for first, last in runs:
            connection.rows(f"delete from {changes} where id between {mark} and {mark}", [first, last])

    # --- the snapshot ------------------------------------------------------------------------------------------------

    def _snapshot(self, connection: SqlConnection, spool: Spool, *, replaces: bool) -> None:
        """Read the tables at one moment. Changes that are committed by then are included."""
        declared = self._declared
        topics = [f"{declared.place}.{each}" for each in declared.relations]
        changes = [(topic, line_of("t")) for topic in topics] if replaces and declared.start == "earliest" else []
        with connection.snapshot():
            rows = connection.rows(f"select id from {connection.table(declared.changes)} order by id")
            runs = _runs([int(number) for (number,) in rows])
            for table in declared.relations if declared.start == "earliest" else ():
                for page in self._pages(connection, self._shapes[table]):
                    append(spool, [*changes, *page], (), {"remove": []}, complete=False)
                    changes = []
                    hit("capture.snapshot")
        append(spool, changes, [len(changes)], {"remove": runs})

    def _pages(self, connection: SqlConnection, shape: Shape) -> Iterator[list[tuple[str, bytes]]]:
        declared, name, mark = self._declared, connection.name, connection.mark
        key = [f"r.{name(each)}" for each in shape.key]
        shown = [form.expression.format(name(column.name)) for column, form in shape.columns]
        topic, binary = f"{declared.place}.{shape.table}", _binary(shape)
        after: Sequence[Any] = ()
        while True:
            where = f" where ({', '.join(key)}) > ({', '.join([mark] * len(key))})" if after else ""
            source, by = f"{connection.table(shape.table)} r{where}", ", ".join(key)
            read = [column for column, _ in shape.columns]
            asked = connection.fitting(read, source, after, order=by, most=declared.page_rows)
            rows = connection.rows(
                f"select {', '.join([*key, *shown])} from {source} order by {by} limit {asked}", after
            )
            found = []
            for row in rows:
                values = {
                    column.name: value_of(form, raw)
                    for (column, form), raw in zip(shape.columns, row[len(key) :], strict=True)
                }
                its = {each: values[each] for each in shape.key}
                found.append((topic, line_of("r", key=its, after=values, binary=binary)))
            if found:
                yield found
            if len(rows) < asked:
                return
            after = rows[-1][: len(key)]


def lock_changes(connection: SqlConnection, declared: TriggersSource) -> None:
    """Lock the table of changes against other readers, which would remove changes. Raises LogUnavailable."""
    name = f"millrace {declared.database}.{declared.namespace}.{declared.changes}"
    held: Any = 1
    if declared.engine == "mariadb":
        ((held,),) = connection.rows(f"select get_lock(sha1({connection.mark}), 0)", [name])
    elif declared.engine == "postgres":
        ((held,),) = connection.rows(f"select pg_try_advisory_lock(hashtextextended({connection.mark}, 0))", [name])
    if not held:
        raise LogUnavailable(f"{declared.words}: another session reads {declared.changes}: use one table for each flow")


def _binary(shape: Shape) -> list[str]:
    return [column.name for column, form in shape.columns if form.binary]


def _runs(numbers: Sequence[int]) -> list[list[int]]:
    """Return ascending numbers as runs without gaps, each its first and last number.

    A gap may be the number of a transaction that is still open.
    """
    found: list[list[int]] = []
    for each in numbers:
        if found and found[-1][1] + 1 == each:
            found[-1][1] = each
        else:
            found.append([each, each])
    return found


def source_of(
    declared: TriggersSource, settings: Settings, *, group: str, standing: Mapping[str, int]
) -> CapturedTables:
    """Return the declared source."""
    return CapturedTables(spool_folder(settings, group), declared.names)


def reader_of(declared: TriggersSource, settings: Settings, *, group: str, topic: str, partition: int) -> PolledRows:
    """Return a reader of one lane of the declared source."""
    return PolledRows(spool_folder(settings, group), topic)


def feeder_of(declared: TriggersSource, settings: Settings, *, group: str) -> PollingFeeder:
    """Check the triggers, and start the feeder. Raises InvalidSettings, LogUnavailable, StreamBusy."""
    with SqlConnection(declared) as connection:
        check(connection, declared)
    return PollingFeeder(
        lambda: SqlConnection(declared),
        declared.words,
        spool_folder(settings, group),
        TriggersPoller(declared),
        every_seconds=declared.every_seconds,
        max_bytes=declared.spool_mib << 20,
        shared=shared_spool(settings, group),
    )


def release(declared: TriggersSource, settings: Settings, *, group: str) -> None:
    """Remove the triggers, the table of changes, and the spool of a flow.

    Raises InvalidSettings with the statements to run if the user may not remove them, LogUnavailable.
    """
    with SqlConnection(declared) as connection:
        lock_changes(connection, declared)  # another flow may use them, against the rules
        remove(connection, declared)
    remove_spool(settings, group)
