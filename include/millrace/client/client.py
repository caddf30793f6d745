"""The client of a deployment: collections, producers, all from one data folder.

with Client.connect() as client:
    client.coordinator.create_collection("users", schema, partitions=["eu", "us"])
    client.producer().insert(client.collection("users"), batch, partition="eu")
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

import pyarrow as pa

from millrace.client.append_client import AppendClient
from millrace.client.changes import ChangeStream
from millrace.client.consumer import COMMIT_INTERVAL, Consumer
from millrace.client.freshness import confirm
from millrace.client.positions import Positions
from millrace.client.producer import Producer
from millrace.client.spool import DEFAULT_BYTES
from millrace.client.spooling import OnRejected, SpoolSender
from millrace.closing import Closing
from millrace.coord.coordinator import Coordinator
from millrace.coord.store import Collection, pchannel_of
from millrace.errors import CollectionNotFound, InvalidArgument, TickNotReached
from millrace.log.protocol import LogService
from millrace.message.ids import Moment, resolve_tick
from millrace.metrics import Metrics
from millrace.node.append_host_server import launch_of
from millrace.node.catalog_calls import OneByOne
from millrace.settings import Settings
from millrace.tables.arrow_read import read_arrow
from millrace.tables.changes import Position
from millrace.wal.scanner import DeliverPolicy, Filter


class Client(Closing):
    """A connection to the log's server and its append host, which it starts where none runs."""

    def __init__(self, settings: Settings, append: AppendClient) -> None:
        self.settings = settings
        self.append = append
        self.log: LogService = append.service
        self.coordinator = Coordinator(settings, log=self.log, append=OneByOne(append, settings.append_deadline))
        self._producers: list[Producer] = []
        self._consumers: list[Consumer | ChangeStream] = []
        self._definitions: dict[int, Collection] = {}

    @classmethod
    def connect(cls, settings: Settings | None = None, *, start: bool = True, now: bool = True) -> Self:
        """Connect to the deployment in ``settings.data_dir``; `start` lets it start the log's server. Without `now` the server
        is looked for by the first call that needs it: for a producer with a spool, which can do without for a while.

        Raises LogUnavailable where it cannot be reached (or must not be started).
        """
        settings = settings or Settings.load()
        append = AppendClient.connect(
            settings.data_dir, start=start, now=now, deadline=settings.start_deadline, launch=launch_of(settings)
        )
        return cls(settings, append)

    def close(self) -> None:
        """Close its consumers and producers, then the connection. Raises DeadlineExceeded where rows could not be sent."""
        with ExitStack() as closing:
            for close in (self.log.close, self.append.close, self.coordinator.close):
                closing.callback(close)
            for producer in self._producers:
                closing.callback(producer.close)
            for consumer in self._consumers:
                closing.callback(consumer.close)

    def collection(self, name: str) -> Collection:
        """The definition of a collection. Raises CollectionNotFound."""
        return self.coordinator.collection(name)

    def producer(
        self,
        *,
        producer_id: int | None = None,
        spool: Path | None = None,
        spool_bytes: int = DEFAULT_BYTES,
        on_rejected: OnRejected | None = None,
        metrics: Metrics | None = None,
    ) -> Producer:
        """A new idempotent producer, closed with the client. With a folder `spool`, rows are kept there (at most `spool_bytes`)
        while the log cannot be reached; `on_rejected` hears what the chain rejects of them. Raises SpoolBusy."""
        sender = SpoolSender.wanted(
            spool, self.settings, max_bytes=spool_bytes, on_rejected=on_rejected, metrics=metrics
        )
        producer = Producer(
            self.append,
            self.coordinator,
            self.settings,
            producer_id=producer_id,
            reader=self._read_for,
            spool=sender,
            metrics=metrics,
        )
        self._producers.append(producer)
        return producer

    def consumer(
        self,
        source: str | Collection | Sequence[str],
        *,
        group: str | None = None,
        policy: DeliverPolicy | None = None,
        filters: Sequence[Filter] = (),
        until_tick: int | None = None,
        metrics: Metrics | None = None,
        commit_interval: float = COMMIT_INTERVAL,
    ) -> Consumer:
        """A consumer of a collection (or its name), or of channels; closed with the client.

        A `group` goes on where it was, and `policy` (default: everything) counts for its first start alone. `filters` choose
        among units. It goes on until it is closed, or has delivered everything up to `until_tick`. Raises GroupBusy,
        CollectionNotFound, and what the scan raises.
        """
        if isinstance(source, str):
            source = self.collection(source)
        channels = source.vchannels if isinstance(source, Collection) else source
        positions = None if group is None else Positions(self.settings.data_dir / "coord")
        try:
            made = Consumer(
                channels,
                wal=self.settings.wal_path,
                tail=self.append,
                group=group,
                positions=positions,
                policy=policy,
                filters=filters,
                until_tick=until_tick,
                definitions=self._definition,
                staged=self.settings.staged_path,
                metrics=metrics,
                commit_interval=commit_interval,
            )
        except BaseException:
            if positions is not None:
                positions.close()
            raise
        self._consumers.append(made)
        return made

    def changes(
        self,
        source: str | Collection,
        *,
        after: Moment | Mapping[str, Sequence[int]] | None = None,
        until_tick: int | None = None,
        metrics: Metrics | None = None,
    ) -> ChangeStream:
        """The changes of a collection (or its name) as Arrow batches; closed with the client.

        They begin at its beginning, behind a tick or moment, or where the positions of an earlier stream say (as they were,
        or back from JSON), and go on until the stream is closed or has given everything up to `until_tick`.
        Raises CollectionNotFound, InvalidArgument; a poll raises PositionTruncated where the WAL has been trimmed behind `after`.
        """
        collection = self.collection(source) if isinstance(source, str) else source
        by_pchannel: dict[str, list[str]] = {}
        for vchannel in collection.vchannels:
            by_pchannel.setdefault(pchannel_of(vchannel), []).append(vchannel)
        made = ChangeStream(
            collection.id,
            by_pchannel,
            settings=self.settings,
            tail=self.append,
            after=_positions(after, by_pchannel),
            until_tick=until_tick,
            metrics=metrics,
        )
        self._consumers.append(made)
        return made

    def _definition(self, collection_id: int, version: int) -> Collection:
        """A collection that has a schema version, a dropped one too. Raises CollectionNotFound."""
        found = self._definitions.get(collection_id)
        if found is None or found.schema_version < version:
            self._definitions = {each.id: each for each in self.coordinator.collections(dropped=True)}
            found = self._definitions.get(collection_id)
        if found is None or found.schema_version < version:
            raise CollectionNotFound(f"the coordinator knows no schema version {version} of collection {collection_id}")
        return found

    def _read_for(self, collection: Collection, at: int | None) -> tuple[int, pa.Table]:
        """A collection at a tick; without one at a tick of now, which lies behind every append that was answered."""
        if at is None:
            at = max(self.append.tick(name) for name in {pchannel_of(vchannel) for vchannel in collection.vchannels})
        return at, self.read(collection.name, at=at)

    def read(
        self,
        name: str,
        *,
        at: Moment | None = None,
        deadline: float | None = None,
        metrics: Metrics | None = None,
    ) -> pa.Table:
        """The rows of a collection at `at` (a time tick, a datetime, ISO 8601 text); without one everything that was decided before the call.

        Has a tick appended on each PChannel of the collection, so that one on which nothing happens does not hold the read
        back, and waits up to `deadline` seconds (default: ``read_deadline``) for the streaming node to have come that far.
        No JVM. `metrics` are told how long it took. Raises TickNotReached, TickTooOld, CollectionNotFound;
        :func:`millrace.tables.reader.read` is the same for Spark.
        """
        began = time.perf_counter()
        collection = self.collection(name)
        tick = None if at is None else resolve_tick(at)
        seconds = self.settings.read_deadline if deadline is None else deadline
        confirmed, whole = confirm(self.settings, collection, self.append, at=tick, seconds=seconds)
        if not whole:
            raise TickNotReached(
                f"the wal table does not hold all of {name!r} after {seconds:.1f} s: is the streaming node running"
                " (`millrace status`)? Or read at an older tick"
            )
        rows = read_arrow(self.settings, collection.id, at=tick, deadline=0.0, confirmed=confirmed)
        if metrics is not None:
            metrics.read_duration_seconds.observe(time.perf_counter() - began)
        return rows


def _positions(
    after: Moment | Mapping[str, Sequence[Any]] | None, pchannels: Mapping[str, object]
) -> dict[str, Position]:
    """By PChannel where changes begin. Raises InvalidArgument for what is no position."""
    if after is None:
        return {}
    if not isinstance(after, Mapping):
        return dict.fromkeys(pchannels, Position(resolve_tick(after)))
    for name, place in after.items():
        if name not in pchannels:
            raise InvalidArgument(f"the collection has no VChannel on {name!r}: these are positions of another one")
        if not 1 <= len(place) <= 2 or any(not isinstance(part, int) or part < 0 for part in place):
            raise InvalidArgument(f"a position is [tick, rows], as the stream's positions have it, not {place!r}")
    return {name: Position(*place) for name, place in after.items()}
