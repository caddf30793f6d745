"""A collection's rows as records: what became visible between two time ticks, and a tombstone for each deleted row.

There is one task for each collection, named ``<collection>-0``. A record's offset is its row's time tick, which is its
version in the sink: rows of one message share it, so ids are by key. A range is everything between two ticks, passed on
in parts; its position moves when all of it is done.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

import msgspec

from millrace.base.errors import ChangesRefused
from millrace.base.settings import Settings
from millrace.client.collection import Collection
from millrace.client.database import Database, connect
from millrace.flows.batch import Batch
from millrace.flows.records import Record
from millrace.flows.sources.collection.model import CollectionSource
from millrace.flows.sources.source import Ends, Limits, task_of
from millrace.message.ids import compose_tick, tick_physical_ms

_LOOK_SECONDS: Final = 0.5


class _Connected:
    """A collection that is connected to when it is first needed."""

    def __init__(self, settings: Settings, source: CollectionSource) -> None:
        self._settings, self._source = settings, source
        self._database: Database | None = None
        self._found: Collection | None = None

    def collection(self) -> Collection:
        """Raises CollectionNotFound, LogUnavailable."""
        if self._found is None:
            self._database = connect(self._settings.data_dir, settings=self._settings)
            self._found = self._database.collection(self._source.collection)
        return self._found

    def close(self) -> None:
        """Idempotent."""
        if self._database is not None:
            self._database.close()
        self._database = self._found = None


class Rows:
    """Where a collection's rows end, looked at again and again; what Topics is for topics."""

    def __init__(self, settings: Settings, source: CollectionSource, *, after: int | None = None) -> None:
        """`after`: where its task stands; None: nowhere yet."""
        self._connected, self._name, self._channels = _Connected(settings, source), source.collection, source.channels
        self._scanned = self._high = after or 0
        self._at_the_end = after is None and source.start == "latest"
        self._looked = 0.0

    def partitions(self) -> list[tuple[str, int]]:
        """The one task's."""
        return [(self._name, 0)]

    def ends(self) -> dict[str, Ends]:
        """The end moves when there is a row behind it: a tick that nothing came to is no work."""
        if not self._looked or time.monotonic() - self._looked >= _LOOK_SECONDS:
            collection = self._connected.collection()
            definition = collection.definition.restricted_to(self._channels)
            now = collection.database.current_tick(definition.pchannels)
            if self._at_the_end:
                self._at_the_end, self._scanned, self._high = False, now, now
            stream = collection.changes(after=self._scanned, until=now, channels=self._channels)
            try:
                if next(iter(stream.reader(definition.schema)), None) is not None:
                    self._high = now
            finally:
                stream.close()
            self._scanned, self._looked = now, time.monotonic()
        return {task_of(self._name, 0): Ends(0, self._high)}

    def ids(self) -> dict[str, str]:
        """None: a collection is known by its own id already."""
        return {}

    def at(self, milliseconds: int) -> dict[str, int]:
        """What became visible before that moment is left out."""
        return {task_of(self._name, 0): max(0, compose_tick(milliseconds, 0) - 1)}

    def mirror(self, offsets: Iterable[tuple[str, int, int]]) -> None:
        """No consumer group is told."""

    def close(self) -> None:
        """Idempotent."""
        self._connected.close()


class RowsReader:
    """The records between two ticks."""

    def __init__(self, settings: Settings, source: CollectionSource) -> None:
        self._connected, self._channels = _Connected(settings, source), source.channels
        self._lane = task_of(source.collection, 0)

    def chunks(self, start: int, end: int, *, items: int) -> Iterator[list[Record]]:
        """Yield everything after tick `start` up to `end`, about `items` at a time, in the order of each VChannel.

        An upsert is one record, not a tombstone and a row. Raises PositionTruncated, ChangesRefused, LogUnavailable,
        and InvalidArgument for a channel of another collection.
        """
        collection = self._connected.collection()
        collection.refresh()
        definition = collection.definition.restricted_to(self._channels)
        keys = definition.schema.key_names
        names = [field.name for field in definition.schema.fields]
        stream = collection.changes(after=start, until=end, channels=self._channels, schema=definition.schema)
        held: dict[str, tuple[int, dict[str, Record]]] = {}
        ready: list[Record] = []
        try:
            for batch in stream.reader(definition.schema):
                for row in batch.to_pylist():
                    channel, tick = row["_vchannel"], row["_time_tick"]
                    known = held.get(channel)
                    if known is None or known[0] != tick:
                        ready += () if known is None else known[1].values()
                        known = held[channel] = (tick, {})
                    made = _record(row, definition.name, keys, names)
                    known[1][(made.key or b"").decode()] = made
                if len(ready) >= items:
                    yield ready
                    ready = []
        finally:
            stream.close()
        ready += [record for _, records in held.values() for record in records.values()]
        if ready:
            yield ready

    def batches(self, start: int, end: int, limits: Limits, /) -> Iterator[Batch]:
        """As millrace.flows.sources.source.LaneReader says: rows of one tick may lie in several batches."""
        for records in self.chunks(start, end, items=limits.records):
            yield Batch(self._lane, start, start, records=records)
        yield Batch(self._lane, start, end, records=())

    def close(self) -> None:
        """Idempotent."""
        self._connected.close()


def source_of(declared: CollectionSource, settings: Settings, *, group: str, standing: Mapping[str, int]) -> Rows:
    """The lane that is declared."""
    return Rows(settings, declared, after=standing.get(task_of(declared.collection, 0)))


def reader_of(declared: CollectionSource, settings: Settings, *, group: str, topic: str, partition: int) -> RowsReader:
    """A reader of it."""
    return RowsReader(settings, declared)


def _record(row: dict[str, Any], name: str, keys: tuple[str, ...], names: list[str]) -> Record:
    kind, tick = row["_change"], row["_time_tick"]
    if kind not in ("insert", "delete"):
        raise ChangesRefused(
            f"collection {name}: a {kind} at tick {tick} cannot be followed by a pipeline: begin a new one"
        )
    parts = [row[key] for key in keys]
    key = (
        parts[0]
        if len(parts) == 1 and isinstance(parts[0], str)
        else msgspec.json.encode(parts[0] if len(parts) == 1 else parts).decode()
    )
    value = None if kind == "delete" else msgspec.json.encode({each: row[each] for each in names})
    return Record(name, 0, tick, str(key).encode(), value, tick_physical_ms(tick))
