"""A collection's rows as records: what became visible on a VChannel, with a tombstone for each deleted row.

A lane is a VChannel, named ``<collection>-<its place among the collection's VChannels>``; each key is on one VChannel.
A record's offset is its row's time tick, which is its version in the sink: rows of one message share it, so ids are by
key. A position is a tick: everything up to it was read, and no position splits the rows of a tick.

The rows are planned and read by :mod:`millrace.flows.sources.collection.rows`, like those of Spark's streams.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import msgspec
import pyarrow as pa

from millrace.base.errors import ChangesRefused
from millrace.base.settings import Settings
from millrace.client.database import connect
from millrace.flows.batch import Batch
from millrace.flows.records import BINARY, OPERATION, Record
from millrace.flows.sources.collection.model import CollectionSource
from millrace.flows.sources.collection.rows import RowsOf, RowsPlanner, find_collection, rows_of
from millrace.flows.sources.source import Ends, LaneReader, Limits, Source, task_of
from millrace.message.ids import compose_tick, pchannel_of, tick_physical_ms
from millrace.tables.read.freshness import require_confirmed_ticks
from millrace.tables.wal.reader import follow

_LOOK_SECONDS: Final = 0.1
_INSERT: Final = (OPERATION, b"c")
_UPSERT: Final = (OPERATION, b"u")
_DELETE: Final = (OPERATION, b"d")
_PART: Final = 10_000
"""Rows of an import that are returned before the end of its tick."""


class Rows(Source):
    """The lanes of a collection and their ends in the ``wal`` table, for repeated reads."""

    def __init__(self, settings: Settings, source: CollectionSource, standing: Mapping[str, int]) -> None:
        """`standing` has the stored positions, by lane."""
        self._settings, self._source, self._standing = settings, source, standing
        self._planner: RowsPlanner | None = None
        self._lanes: dict[str, str] = {}
        """The newest change by VChannel that is read."""
        self._high: dict[str, int] = {}
        """By lane."""
        self._scanned: dict[str, int] = {}
        """The tick, by PChannel, up to which `_high` is known."""
        self._looked = 0.0

    def partitions(self) -> list[tuple[str, int]]:
        """Return the collection's name and the VChannel's place. Raises as `ends`."""
        self._begin()
        name = self._source.collection
        return [(name, int(lane.removeprefix(f"{name}-"))) for lane in self._lanes.values()]

    def ends(self) -> dict[str, Ends]:
        """Return the tick of the newest message that may change rows, by lane. A tick without one is no work.

        The first call waits until the ``wal`` table has everything that was acknowledged before it.

        Raises CollectionNotFound, LogUnavailable, TickNotReached, PositionTruncated, and InvalidArgument for a channel
        of another collection.
        """
        planner = self._begin()
        if not self._looked or time.monotonic() - self._looked >= _LOOK_SECONDS:
            follow(self._settings)
            for pchannel, end in planner.ends(exact=False).items():
                for vchannel, tick in planner.newest(pchannel, self._scanned[pchannel], end).items():
                    lane = self._lanes.get(vchannel)
                    if lane is not None:
                        self._high[lane] = max(self._high[lane], tick)
                self._scanned[pchannel] = max(self._scanned[pchannel], end)
            self._looked = time.monotonic()
        return {lane: Ends(0, self._high[lane]) for lane in self._lanes.values()}

    def at(self, milliseconds: int) -> dict[str, int]:
        """Return the tick before a moment, so that earlier rows are left out."""
        self._begin()
        return dict.fromkeys(self._lanes.values(), max(0, compose_tick(milliseconds, 0) - 1))

    def inherited(self, standing: Mapping[str, int]) -> Mapping[str, int]:
        """Return the positions of VChannels without one: the least position of the collection's lanes.

        An earlier build read all VChannels in the lane ``<collection>-0``.
        """
        self._begin()
        known = [each for lane, each in standing.items() if lane.rpartition("-")[0] == self._source.collection]
        return {lane: min(known) for lane in self._lanes.values() if known and lane not in standing}

    def _begin(self) -> RowsPlanner:
        if self._planner is not None:
            return self._planner
        settings, source = self._settings, self._source
        vchannels = find_collection(settings, source.collection).vchannels
        rows = RowsOf.find(settings, source.collection, channels=source.channels)
        with connect(settings=settings) as db:
            newest = db.current_tick(rows.read_pchannels)
            deadline = settings.read_deadline
            require_confirmed_ticks(settings, rows.name, rows.read_pchannels, db.connection, None, deadline)
        self._lanes = {each: task_of(rows.name, vchannels.index(each)) for each in rows.vchannels or vchannels}
        self._planner = RowsPlanner(rows)
        standing = {**self.inherited(self._standing), **self._standing}
        start = newest if source.start == "latest" else 0
        for vchannel, lane in self._lanes.items():
            self._high[lane] = standing.get(lane, start)
            pchannel = pchannel_of(vchannel)
            self._scanned[pchannel] = min(self._high[lane], self._scanned.get(pchannel, self._high[lane]))
        return self._planner


class RowsReader(LaneReader):
    """The records of one lane."""

    def __init__(self, settings: Settings, source: CollectionSource, partition: int) -> None:
        """`partition` is the VChannel's place among those of the collection."""
        self._settings, self._name, self._partition = settings, source.collection, partition
        self._lane = task_of(source.collection, partition)
        self._planned: tuple[int, RowsPlanner] | None = None
        """Key names and headers, with the id of the collection."""
        self._open: tuple[int, int, Iterator[_Part]] | None = None
        """The last batch's end, the end of what follows, and an iterator of what follows."""

    def batches(self, start: int, end: int, limits: Limits, /) -> Iterator[Batch]:
        """Yield batches of about `limits`, up to the end of a tick.

        An upsert is one record, not a tombstone and a row. All rows of an import have one tick, so they come in parts
        that move no position. Raises PositionTruncated, ChangesRefused, SchemaChanged, LogUnavailable.
        """
        if self._open is None or self._open[0] != start or self._open[1] > end:
            self._open = (start, *self._read(start, end))
        _, end, parts = self._open
        self._open = None
        records: list[Record] = []
        size = 0
        for part in parts:
            records += part.records
            size += sum(len(each.value or b"") + len(each.key or b"") for each in part.records)
            if len(records) < limits.records and size < limits.size:
                continue
            if part.tick is not None and part.tick < end:
                self._open = (part.tick, end, parts)
                yield Batch(self._lane, start, part.tick, records=records)
                return
            yield Batch(self._lane, start, start, records=records)
            records, size = [], 0
        yield Batch(self._lane, start, end, records=records)

    def close(self) -> None:
        """Close the open files. Idempotent."""
        self._open = None

    def _read(self, start: int, end: int) -> tuple[int, Iterator[_Part]]:
        """Return the end of the range, which is within the ``wal`` table, and its parts."""
        vchannel = find_collection(self._settings, self._name).vchannels[self._partition]
        rows = RowsOf.find(self._settings, self._name, channels=(vchannel,))
        if self._planned is None or self._planned[0] != rows.collection_id:
            self._planned = (rows.collection_id, RowsPlanner(rows))
        planner, pchannel = self._planned[1], pchannel_of(vchannel)
        end = max(start, min(end, planner.ends()[pchannel]))
        stretches = planner.stretches({pchannel: start}, {pchannel: end})
        return end, self._parts(rows, (batch for each in stretches for batch in rows_of(rows, each)))

    def _parts(self, rows: RowsOf, batches: Iterator[pa.RecordBatch]) -> Iterator[_Part]:
        """Yield the records of each tick; records of an import, which has no key twice, as they are read."""
        keys, names = rows.schema.key_names, [field.name for field in rows.schema.fields]
        binary = ",".join(each.name for each in rows.schema.fields if each.type == "binary")
        headers = [(BINARY, binary.encode())] if binary else []
        held: dict[bytes | None, Record] = {}
        tick, plain = 0, True
        for batch in batches:
            for row in batch.to_pylist():
                if row["_time_tick"] != tick:
                    if held:
                        yield _Part(tick, list(held.values()))
                    tick, plain, held = row["_time_tick"], True, {}
                # A separate message with inserts only: nothing later at this tick changes one of its rows.
                plain = plain and row["_change"] == "insert" and row["_write_tick"] == tick
                made = _record(row, rows.name, self._partition, keys, names, headers)
                before = held.get(made.key)
                if before is not None and before.value is None and made.value is not None:  # an upsert
                    made = made._replace(headers=[_UPSERT, *headers])
                held[made.key] = made
            if plain and len(held) >= _PART:
                yield _Part(None, list(held.values()))
                held = {}
        if held:
            yield _Part(tick, list(held.values()))


class _Part(msgspec.Struct, frozen=True, gc=False):
    """Records of one tick."""

    tick: int | None
    """The tick, if these are its last records."""
    records: list[Record]


def source_of(declared: CollectionSource, settings: Settings, *, group: str, standing: Mapping[str, int]) -> Rows:
    """Return the declared source."""
    return Rows(settings, declared, standing)


def reader_of(declared: CollectionSource, settings: Settings, *, group: str, topic: str, partition: int) -> RowsReader:
    """Return a reader of one lane of the declared source."""
    return RowsReader(settings, declared, partition)


def _record(
    row: dict[str, Any],
    name: str,
    partition: int,
    keys: tuple[str, ...],
    names: list[str],
    headers: Sequence[tuple[str, bytes | None]],
) -> Record:
    kind, tick = row["_change"], row["_time_tick"]
    if kind not in ("insert", "delete"):
        raise ChangesRefused(
            f"collection {name}: a {kind} at tick {tick} cannot be processed by a pipeline: start a new one"
        )
    parts = [row[key] for key in keys]
    key = (
        parts[0]
        if len(parts) == 1 and isinstance(parts[0], str)
        else msgspec.json.encode(parts[0] if len(parts) == 1 else parts).decode()
    )
    if kind == "delete":
        return Record(name, partition, tick, str(key).encode(), None, tick_physical_ms(tick), (_DELETE,))
    value = msgspec.json.encode({each: row[each] for each in names})
    return Record(name, partition, tick, str(key).encode(), value, tick_physical_ms(tick), [_INSERT, *headers])
