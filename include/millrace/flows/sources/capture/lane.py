"""A captured table as a lane: the changes that its spool has, as records.

A record's key is the row's primary key: the text of one column's value, or a JSON list of several. Its value is the
row after the change as JSON, or None for a delete. Headers have the operation (`millrace.op`: c, u, d, r, t) and the
transaction of the database. A truncation of the table, or a snapshot that replaces an earlier one, is a record of
operation ``t`` without key and value.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final

import msgspec

from millrace.base.errors import LogRegressed, PositionTruncated
from millrace.flows.batch import Batch
from millrace.flows.records import BINARY, OPERATION, Record, is_truncation
from millrace.flows.sources.capture.engine import Event
from millrace.flows.sources.capture.spool import Change, Spool
from millrace.flows.sources.source import Ends, LaneReader, Limits, Source, task_of

TRANSACTION: Final = "millrace.transaction"
_event: Final = msgspec.json.Decoder(Event)
_values: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])


class CapturedTable(Source):
    """The one lane of a captured table."""

    def __init__(self, folder: Path, table: str) -> None:
        self._spool = Spool(folder)
        self._table = table

    def partitions(self) -> list[tuple[str, int]]:
        return [(self._table, 0)]

    def ends(self) -> dict[str, Ends]:
        found = self._spool.standing()
        return {task_of(self._table, 0): Ends(found.low, found.high)}

    def at(self, milliseconds: int) -> dict[str, int]:
        """A capture has no index by time: a moment is after all changes if it is after the newest, else before all."""
        found = self._spool.standing()
        return {task_of(self._table, 0): found.high if milliseconds > found.moment else found.low}

    def mirror(self, offsets: Iterable[tuple[str, int, int]]) -> None:
        """Let the spool forget what the flow has passed."""
        for _, _, position in offsets:
            self._spool.trim(position)

    def close(self) -> None:
        self._spool.close()


class CapturedRows(LaneReader):
    """Reads a captured table's changes."""

    def __init__(self, folder: Path, table: str) -> None:
        self._spool = Spool(folder)
        self._table = table

    def batches(self, start: int, end: int, limits: Limits, /) -> Iterator[Batch]:
        """As millrace.flows.sources.source.LaneReader says. A batch ends with a source transaction, if one fits."""
        now = self._spool.standing()
        if start < now.low:
            raise PositionTruncated(
                f"{self._table}: the change {start} was passed and removed; the earliest is {now.low}: take a new"
                " snapshot (`millrace flows offsets` shows the position)",
                earliest=(now.low, 0),
            )
        if start > now.high:
            raise LogRegressed(f"{self._table}: the position {start} is after the newest change {now.high}")
        end = min(end, now.high)
        binary = _binary(self._spool.columns())
        found: list[Change] = []
        size, boundary = 0, 0
        for changes, at in self._spool.read(start, end):
            found += changes
            size += sum(len(each.line) for each in changes)
            boundary = at if start < at <= end else boundary
            if len(found) >= limits.records or size >= limits.size:
                break
        else:
            boundary = end  # everything up to the end, which readers see because a transaction ends there
        if not boundary:
            boundary = found[-1].number + 1 if found else end  # a part of a transaction that is larger than a batch
        records = [self._record(each, binary) for each in found if each.number < boundary]
        for place, each in enumerate(records):
            if place and is_truncation(each):  # the first of a batch, as a sink wants it
                records, boundary = records[:place], each.offset
                break
        yield Batch(task_of(self._table, 0), start, boundary, records=records)

    def close(self) -> None:
        self._spool.close()

    def _record(self, change: Change, binary: bytes) -> Record:
        event = _event.decode(change.line)
        headers = [(OPERATION, event.operation.encode())]
        if event.transaction is not None:
            headers.append((TRANSACTION, event.transaction.encode()))
        if binary:
            headers.append((BINARY, binary))
        key = _key(event.key) if len(bytes(event.key)) else None
        value = None if event.operation in ("d", "t") else bytes(event.after)
        return Record(self._table, 0, change.number, key, value, event.milliseconds, headers)


def _binary(columns: dict[str, Any] | None) -> bytes:
    """The columns whose values are base64, with commas: bytes without another meaning, as a decimal has."""
    found = (columns or {}).get("columns", ())
    return ",".join(each["name"] for each in found if each["type"] == "bytes" and each["meaning"] is None).encode()


def _key(row: msgspec.Raw) -> bytes:
    values = list(_values.decode(row).values())
    if len(values) > 1:
        return b"[" + b",".join(bytes(each) for each in values) + b"]"
    only: Any = msgspec.json.decode(values[0])
    return only.encode() if isinstance(only, str) else bytes(values[0])
