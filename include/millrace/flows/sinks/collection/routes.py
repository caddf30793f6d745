"""The collections of a flow: one, or one for each topic; and the ticks at which they can be read consistently."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pyarrow as pa

from millrace.base.closeable import Closeable
from millrace.base.errors import CollectionNotFound
from millrace.base.settings import Settings
from millrace.client.database import Database, connect
from millrace.flows.batch import Batch
from millrace.flows.sinks.collection.model import CollectionSink as Declared
from millrace.flows.sinks.collection.sink import CollectionSink
from millrace.flows.sinks.models import Flush
from millrace.flows.sinks.sink import Sink, Ticks, Verdicts


def made(declared: Declared, settings: Settings, *, flow: str, flush: Flush) -> Sink:
    """Return the sink that flow `flow` declares."""
    if declared.divided:
        return RoutedCollections(settings, declared, flow=flow)
    return _one(declared, settings, declared.collection, flow)


def _one(declared: Declared, settings: Settings, name: str, flow: str) -> CollectionSink:
    return CollectionSink(
        settings,
        name,
        flow=flow,
        history=declared.history,
        create=declared.create,
        on_schema_change=declared.on_schema_change,
    )


class RoutedCollections(Closeable):
    """Writes documents into the collection of their topic. A batch has one topic."""

    def __init__(self, settings: Settings, declared: Declared, *, flow: str) -> None:
        self._settings, self._declared, self._flow = settings, declared, flow
        self._sinks: dict[str, CollectionSink] = {}

    def check(self, schema: pa.Schema, /) -> None:
        """Do nothing: rows have no topics, so only documents are written here."""

    def open(self) -> None:
        """Do nothing: each collection is opened with its first documents."""

    def standing(self, lanes: Sequence[str], /) -> Mapping[str, int]:
        return {lane: place for sink in self._sinks.values() for lane, place in sink.standing(lanes).items()}

    def write(self, batch: Batch, /) -> Verdicts:
        """Write the batch into its topic's collection. Raises as millrace.flows.sinks.sink.Sink."""
        topic = batch.lane.rpartition("-")[0]
        if topic not in self._sinks:
            self._sinks[topic] = _one(self._declared, self._settings, self._declared.of(topic), self._flow)
        return self._sinks[topic].write(batch)

    def close(self) -> None:
        """Idempotent."""
        while self._sinks:
            self._sinks.popitem()[1].close()


class CollectionTicks(Closeable):
    """Ticks of several collections."""

    def __init__(self, settings: Settings, names: Sequence[str]) -> None:
        self._settings, self._names = settings, names
        self._database: Database | None = None

    def now(self) -> int:
        """Return a tick after all acknowledged documents.

        Raises LogUnavailable, CollectionNotFound, DeadlineExceeded.
        """
        if self._database is None:
            self._database = connect(settings=self._settings)
        log = self._database.connection
        made = [name for name in self._names if name in self._database]  # the others have no rows yet
        channels = {each for name in made for each in self._database.definition(name, cached=True).pchannels}
        if not channels:
            raise CollectionNotFound(f"there is no collection {', '.join(self._names)} yet")
        newest = max(log.tick(each, persist=False) for each in sorted(channels))
        for each in sorted(channels):
            log.confirm(each, newest)  # later appends get a later tick, on each of them
        return newest

    def close(self) -> None:
        """Idempotent."""
        if self._database is not None:
            self._database.close()
        self._database = None


def ticks_of(declared: Declared, settings: Settings, topics: Sequence[str]) -> Ticks:
    """Return the ticks of the collections of `topics`."""
    return CollectionTicks(settings, list(dict.fromkeys(declared.of(each) for each in topics)))
