"""Captured tables as lanes: the changes in their spool, as records.

A record's key is the row's primary key: the text of one column's value, or a JSON list of several. Its value is the row
after the change as JSON, or None for a delete. Headers have the operation (`millrace.op`: c, u, d, r, t) and the
database's transaction. A truncation of the table, or a snapshot that replaces an earlier one, is a record of operation
``t`` without key and value.
"""

from __future__ import annotations

import logging
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, Final

import msgspec

from millrace.base.errors import CollectionNotFound, LogRegressed, MillraceError, PositionTruncated
from millrace.flows.batch import Batch
from millrace.flows.plain import PlainRecords
from millrace.flows.records import BINARY, DIGITS, OPERATION, Record
from millrace.flows.sources.capture.columns import has_any_digits, table_columns
from millrace.flows.sources.capture.spool import Changes, Spool
from millrace.flows.sources.source import Ends, LaneReader, Limits, Source, SourceLag, task_of

TRANSACTION: Final = "millrace.transaction"
LONGEST_WAIT: Final = 30.0
"""Longest time, in seconds, that lanes wait for another one at a mark."""


class Change(msgspec.Struct, gc=False, rename={"operation": "o", "key": "k", "after": "a"}):
    """The fields of :class:`millrace.flows.sources.capture.engine.Event` that a record needs."""

    operation: str
    key: msgspec.Raw = msgspec.Raw()
    after: msgspec.Raw = msgspec.Raw()
    milliseconds: int = msgspec.field(name="m", default=0)
    transaction: str | None = msgspec.field(name="g", default=None)

    @property
    def record_key(self) -> bytes | None:
        return _key(self.key) if bytes(self.key) else None

    @property
    def value(self) -> bytes | None:
        return None if self.operation in ("d", "t") else bytes(self.after)


_changes: Final = msgspec.json.Decoder(list[Change])
_values: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])
_logger: Final = logging.getLogger(__name__)


class CapturedTables(Source):
    """The lanes of captured tables, one for each table."""

    def __init__(self, folder: Path, tables: Sequence[str]) -> None:
        self._spool = Spool(folder)
        self._tables = tuple(tables)
        self._seen: tuple[tuple[int, int], dict[str, Ends]] | None = None
        self._since = time.monotonic()
        """When the lanes got their target."""
        self._left: int | None = None
        """The mark that not all lanes reached in time; None if no lane lags."""
        self._limits: dict[str, int] = {}
        self._asked: Any = None
        """The state in which `settle` has nothing to do."""

    def partitions(self) -> list[tuple[str, int]]:
        return [(table, 0) for table in self._tables]

    def ids(self) -> dict[str, str]:
        """Return the spool's identity by table: positions in a lost spool are not valid in the next one."""
        identity = self._spool.standing().identity
        return dict.fromkeys(self._tables, identity) if identity else {}

    def ends(self) -> dict[str, Ends]:
        version = self._spool.version()
        if self._seen is None or self._seen[0] != version:
            self._seen = version, self._ends(self._spool.standing().high)
        return dict(self._seen[1])

    def _ends(self, until: int) -> dict[str, Ends]:
        found = {}
        for table in self._tables:
            low = self._spool.low(table)
            found[task_of(table, 0)] = Ends(low, max(low, self._spool.end_of(table, until)))
        return found

    def at(self, milliseconds: int) -> dict[str, int]:
        """Return positions for a moment.

        A capture has no index by time: a moment is after all changes if it is after the newest, else before all.
        """
        moment = self._spool.standing().moment
        return {task: each.high if milliseconds > moment else each.low for task, each in self.ends().items()}

    def lag(self) -> SourceLag:
        now = self._spool.standing()
        return SourceLag(now.lag_bytes, now.lag_seconds, now.error)

    def mirror(self, offsets: Iterable[tuple[str, int, int]]) -> None:
        """Let the spool remove the changes that the flow has passed."""
        for table, _, position in offsets:
            self._spool.trim(table, position)

    def settle(self, positions: Mapping[str, int], tick: Callable[[], int], *, wait: bool = True) -> Mapping[str, int]:
        """Return the limits of lanes that must stop at a mark, their target, until all lanes reach it.

        A lane that others have waited for during LONGEST_WAIT is not waited for until it has passed that mark. See
        millrace.flows.sources.source.Source.
        """
        asked = self._spool.version(), tuple(sorted(positions.items()))
        if asked != self._asked:
            self._move(positions, tick, wait)
            self._asked = self._spool.version(), asked[1]
            target = self._spool.target()
            self._limits = {} if target is None else {task: each.high for task, each in self._ends(target).items()}
        elif self._limits and self._waited():
            self._asked = None
        return self._limits

    def _move(self, positions: Mapping[str, int], tick: Callable[[], int], wait: bool) -> None:
        high, target = self._spool.standing().high, self._spool.target()
        if target is None:
            if self._left is None or self._reached(self._left, positions):
                self._go(high)
            return
        ends = self._ends(target)
        if any(positions.get(task, 0) > each.high for task, each in ends.items()):  # positions set by hand
            self._go(high)
        elif all(positions.get(task) == each.high for task, each in ends.items()):
            if self._recorded(target, tick, wait) and target < high:
                self._go(high)
        elif target < high and self._waited():
            behind = [task for task, each in ends.items() if positions.get(task, 0) < each.high]
            _logger.warning("no longer waiting for %s: no ticks are recorded until it catches up", ", ".join(behind))
            self._go(None)
            self._left = target

    def _reached(self, number: int, positions: Mapping[str, int]) -> bool:
        return all(positions.get(task, 0) >= each.high for task, each in self._ends(number).items())

    def _recorded(self, target: int, tick: Callable[[], int], wait: bool) -> bool:
        """Record a tick for the mark at `target`, once. Return False if that failed, to be retried."""
        mark, newest = self._spool.mark(target - 1, target), self._spool.ticks(limit=1)
        if mark is None or not mark.whole:
            return True
        if newest and newest[-1].mark.number == target:  # later transactions changed no captured table
            if newest[-1].mark != mark:
                self._spool.record(newest[-1].tick, mark)
            return True
        try:
            self._spool.record(tick(), mark)
        except CollectionNotFound:  # no collection is created yet, so nothing can be read at a tick
            return True
        except MillraceError as error:
            if wait and not self._waited():
                return False
            _logger.warning("no tick is recorded for %s: %s", mark.source or mark.number, error)
        return True

    def _waited(self) -> bool:
        return time.monotonic() - self._since > LONGEST_WAIT

    def _go(self, target: int | None) -> None:
        self._spool.aim(target)
        self._since, self._left = time.monotonic(), None

    def close(self) -> None:
        self._spool.close()


class CapturedRows(LaneReader):
    """Reads a captured table's changes."""

    def __init__(self, folder: Path, table: str) -> None:
        self._spool = Spool(folder)
        self._table = table

    def batches(self, start: int, end: int, limits: Limits, /) -> Iterator[Batch]:
        """Yield one batch, which ends with a source transaction if one fits the limits."""
        yield self._batch(start, end, limits)

    def _batch(self, start: int, end: int, limits: Limits) -> Batch:
        low = self._spool.low(self._table)
        if start < low:
            raise PositionTruncated(
                f"{self._table}: the change {start} was passed and removed; the earliest is {low}: take a new"
                " snapshot (`millrace flows offsets` shows the position)",
                earliest=(low, 0),
            )
        high = self._spool.end_of(self._table, self._spool.standing().high)
        if start > max(low, high):
            raise LogRegressed(f"{self._table}: the position {start} is after the newest change {high}: set the offset")
        end = min(end, high)
        columns, changed = self._spool.columns(self._table, start)
        if changed is not None and self._spool.end_of(self._table, changed) <= start:  # no change is before that
            columns, changed = self._spool.columns(self._table, changed)
        found, after = self._within(start, end if changed is None else min(end, changed), end, limits)
        atomic = self._spool.is_marked(self._table, after)
        # The lines are JSON as the spool received it: joined, they form a list.
        events = _changes.decode(b"[" + b",".join(found.lines) + b"]")
        for place, each in enumerate(events):
            if place and each.operation == "t":  # the first of a batch, as sinks require
                after, atomic = found.numbers[place], False
                found, events = Changes(found.numbers[:place], found.lines[:place]), events[:place]
                break
        records = self._records(found, events, _lists(columns))
        shape = None if columns is None else table_columns(columns)
        return Batch(task_of(self._table, 0), start, after, records=records, columns=shape, atomic=atomic)

    def _within(self, start: int, stop: int, end: int, limits: Limits) -> tuple[Changes, int]:
        """Return changes from `start` on, up to the end of a transaction within `limits`, and the position after them.

        All are before `stop`. A transaction that exceeds both a batch and `limits` is split.
        """
        numbers, lines, size, cut = list[int](), list[bytes](), 0, None
        for part in self._spool.read(self._table, start, stop):
            sizes = list(accumulate(map(len, part.lines), initial=size))
            fit = max(min(bisect_left(sizes, limits.size), limits.records - len(numbers)), 0 if numbers else 1)
            numbers += part.numbers[:fit]
            lines += part.lines[:fit]
            size = sizes[-1]
            if fit < len(part.numbers):
                cut = part.numbers[fit]
                break
        if cut is None:
            return Changes(numbers, lines), end if stop == end else stop
        mark = self._spool.mark(start, cut)
        if mark is not None and mark.number > numbers[0]:
            fitting = bisect_left(numbers, mark.number)
            numbers, lines = numbers[:fitting], lines[:fitting]
        elif (whole := self._spool.transaction_end(self._table, numbers[0], stop, limits.whole)) is not None:
            parts = list(self._spool.read(self._table, start, whole))
            numbers = [each for part in parts for each in part.numbers]
            lines = [each for part in parts for each in part.lines]
        return Changes(numbers, lines), numbers[-1] + 1

    def close(self) -> None:
        self._spool.close()

    def _records(
        self, found: Changes, events: Sequence[Change], lists: Sequence[tuple[str, bytes]]
    ) -> Sequence[Record]:
        numbers = found.numbers

        def record(place: int) -> Record:
            event = events[place]
            headers = [(OPERATION, event.operation.encode())]
            if event.transaction is not None:
                headers.append((TRANSACTION, event.transaction.encode()))
            headers += lists
            return Record(self._table, 0, numbers[place], event.record_key, values[place], event.milliseconds, headers)

        values = [each.value for each in events]
        keys = [
            (each.record_key or b"").decode() if value is None else ""
            for each, value in zip(events, values, strict=True)
        ]
        first = 1 if events and events[0].operation == "t" else 0  # a truncation has no key
        if all(
            key if value is None else value.startswith(b"{")
            for value, key in zip(values[first:], keys[first:], strict=True)
        ):
            return PlainRecords(numbers, values, keys, record)
        return [record(each) for each in range(len(events))]


def _lists(columns: dict[str, Any] | None) -> list[tuple[str, bytes]]:
    """Return headers that list columns whose values are base64 (bytes, also of decimals), or numbers with unlimited
    digits."""
    found = (columns or {}).get("columns", ())
    lists = {
        BINARY: [each["name"] for each in found if each["type"] == "bytes" and each["meaning"] is None],
        DIGITS: [each["name"] for each in found if has_any_digits(each.get("parameters", {}))],
    }
    return [(header, ",".join(names).encode()) for header, names in lists.items() if names]


def _key(row: msgspec.Raw) -> bytes:
    values = list(_values.decode(row).values())
    if len(values) > 1:
        return b"[" + b",".join(bytes(each) for each in values) + b"]"
    only: Any = msgspec.json.decode(values[0])
    return only.encode() if isinstance(only, str) else bytes(values[0])
