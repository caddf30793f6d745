"""The client of a deployment, which lies in a data folder here or behind a server elsewhere: collections, producers, consumers.

    with Client.connect() as client:                    # or Client.at("grpc+tls://log.example.net:7700", roots="ca.pem")
        client.catalog.create_collection("users", schema, partitions=["eu", "us"])
        client.producer().insert(client.collection("users"), batch, partition="eu")

Catalog, DDL, appends and new messages go through the server wherever it is; what the tables hold is read from the files where they
are here, and through the server where they are not (Tables).
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, Self, Unpack

import pyarrow as pa

from millrace.base.closeable import Closeable
from millrace.base.errors import CollectionNotFound, InvalidSettings, LogUnavailable
from millrace.base.metrics import Metrics
from millrace.base.settings import Settings
from millrace.catalog.calls import RemoteCatalog
from millrace.catalog.collection import CollectionInfo
from millrace.catalog.protocol import Catalog
from millrace.client.append_client import AppendClient
from millrace.client.consume.consumer import COMMIT_INTERVAL, Consumer, GroupPositions
from millrace.client.consume.delivery import SchemaMode
from millrace.client.consume.scan import UncommittedReader, WalOpener
from millrace.client.produce.producer import Producer
from millrace.client.remote_tables import RemoteTables
from millrace.client.spool.queue import DEFAULT_BYTES
from millrace.client.spool.sender import OnRejected, SpoolSender
from millrace.log.protocol import LogService
from millrace.message.bodies import ImportSource
from millrace.message.ids import Moment, resolve_tick
from millrace.message.schema import CollectionSchema
from millrace.rpc.launch import launch_of
from millrace.rpc.remote_log import RemoteLogService
from millrace.rpc.selection import ReadOptions, Selection, SelectionOptions
from millrace.rpc.wire import DEFAULT_DEADLINE, TOKEN_VARIABLE
from millrace.wal.scanner import DeliverPolicy, Filter

if TYPE_CHECKING:  # what a producer and a consumer do without
    import pyarrow.dataset as ds

    from millrace.client.consume.changes import ChangeStream
    from millrace.client.dataset import CollectionDataset
    from millrace.client.produce.producer_recovery import AppliedMessage
    from millrace.wal.visible.changes import ChangePosition, ChangeStart


class Tables(Protocol):
    """Where a client's reads come from."""

    def wal_opener(self, channels: Sequence[str]) -> WalOpener:
        """Who opens the newest version of the ``wal`` table for a reader of these channels."""
        ...

    def uncommitted(self) -> UncommittedReader | None:
        """What the log has after the ``wal`` table, for one reader; None where the log cannot be read."""
        ...

    def imports(self) -> ImportSource:
        """Where the rows of Import messages are found."""
        ...

    def changes_start(self, pchannel: str, collection_id: int, after: ChangePosition) -> ChangeStart:
        """Where a reader of a collection's changes behind `after` begins on a PChannel, and what it has to know there."""
        ...

    def group_positions(self) -> GroupPositions:
        """Where consumer groups stand; the caller closes it."""
        ...

    def read(self, collection: CollectionInfo, *, at: int | None, seconds: float, selection: Selection) -> pa.Table:
        """The rows of a collection at a tick; without one, all that was decided before the call. Waits up to `seconds` for it."""
        ...

    def stream(
        self, collection: CollectionInfo, *, at: int | None, seconds: float, selection: Selection
    ) -> pa.RecordBatchReader:
        """The same, batch by batch."""
        ...

    def dataset(self, collection: CollectionInfo, *, at: int | None, seconds: float) -> CollectionDataset:
        """The same as a dataset, pinned."""
        ...

    def count(self, collection: CollectionInfo, *, at: int | None, seconds: float, where: str | None) -> int:
        """How many there are."""
        ...

    def table(self, name: str) -> ds.Dataset:
        """One of the deployment's own Delta tables, as it is now."""
        ...


class Client(Closeable):
    """A connection to a deployment's server. Thread-safe."""

    def __init__(self, settings: Settings, append: AppendClient, *, here: bool = True) -> None:
        """`here`: the deployment lies in ``settings.data_dir``."""
        self.settings = settings
        self.append = append
        self.log: LogService = append.service
        self.catalog: Catalog = RemoteCatalog(append, pchannels=settings.pchannels if here else None)
        self._here = here
        self._producers: list[Producer] = []
        self._consumers: list[Consumer | ChangeStream] = []
        self._definitions: dict[int, CollectionInfo] = {}

    @classmethod
    def connect(cls, settings: Settings | None = None, *, start: bool = True, now: bool = True) -> Self:
        """Connect to the deployment in ``settings.data_dir``; `start` lets it start the log's server. Without `now` the server
        is looked for by the first call that needs it: for a producer with a spool, which can do without for a while.

        Raises LogUnavailable where it cannot be reached (or must not be started), InvalidSettings where it starts a server and the
        settings name another log than the deployment's.
        """
        settings = settings or Settings.load()
        append = AppendClient.connect(
            settings.data_dir, start=start, now=now, deadline=settings.start_deadline, launch=launch_of(settings)
        )
        return cls(settings, append)

    @classmethod
    def at(
        cls,
        address: str,
        *,
        token: str = "",
        roots: str | Path = "",
        tls_name: str = "",
        settings: Settings | None = None,
        env: Mapping[str, str] | None = None,
        deadline: float = DEFAULT_DEADLINE,
    ) -> Self:
        """Connect to ``grpc://host:port`` or ``grpc+tls://host:port``; `roots` is a PEM file of trusted certificates.

        The token is MILLRACE_SERVER_TOKEN in the environment (of both sides) unless it is given; `settings` give attempts and
        deadlines of appends. Raises InvalidSettings without a token, and LogUnavailable where the server cannot be reached or
        refuses it.
        """
        token = token or (os.environ if env is None else env).get(TOKEN_VARIABLE, "")
        if not token:
            raise InvalidSettings(f"{TOKEN_VARIABLE} is not set: give it the token that the server has under that name")
        service = RemoteLogService.at(address, token=token, roots=roots, tls_name=tls_name, deadline=deadline)
        return cls(settings or Settings.load(env=env), AppendClient(service), here=False)

    def close(self) -> None:
        """Close its consumers and producers, then the connection. Raises DeadlineExceeded where rows could not be sent."""
        with ExitStack() as closing:
            closing.callback(self.append.close)
            for producer in self._producers:
                closing.callback(producer.close)
            for consumer in self._consumers:
                closing.callback(consumer.close)

    def collection(self, name: str) -> CollectionInfo:
        """The definition of a collection. Raises CollectionNotFound.

        While the server is away: as the data folder has it, if that is here, so that a producer with a spool can begin.
        """
        try:
            return self.catalog.collection(name)
        except LogUnavailable:
            if not self._here:
                raise
            from millrace.catalog.sqlite_file import read_collections

            for each in read_collections(self.settings.data_dir):
                if each.name == name and each.state == "active":
                    return each
            raise

    def current_definition(self, source: str | CollectionInfo) -> CollectionInfo:
        """The definition as it is now of the collection of that name, or of that very collection. Raises CollectionNotFound, also
        where `source` was dropped and another collection has its name."""
        if isinstance(source, str):
            return self.collection(source)
        return source.require_same_id(self.collection(source.name))

    def producer(
        self,
        *,
        producer_id: int | None = None,
        resumed: int | None = None,
        spool: Path | None = None,
        spool_bytes: int = DEFAULT_BYTES,
        on_rejected: OnRejected | None = None,
        metrics: Metrics | None = None,
    ) -> Producer:
        """A new idempotent producer, closed with the client. With a folder `spool`, rows are kept there (at most `spool_bytes`)
        while the log cannot be reached; `on_rejected` hears what the chain rejects of them. Raises SpoolBusy."""
        sender = SpoolSender.for_producer(
            spool, self.settings, max_bytes=spool_bytes, on_rejected=on_rejected, metrics=metrics
        )
        producer = Producer(
            self.append,
            self.catalog,
            self.settings,
            producer_id=producer_id,
            resumed=resumed,
            reader=self._read_for,
            standing=self._stood if self._here and resumed is not None else None,
            spool=sender,
            metrics=metrics,
        )
        self._producers = [*(each for each in self._producers if not each.closed), producer]
        return producer

    def consumer(
        self,
        source: str | CollectionInfo | Sequence[str],
        *,
        group: str | None = None,
        policy: DeliverPolicy | None = None,
        filters: Sequence[Filter] = (),
        until_tick: int | None = None,
        schema: SchemaMode = "written",
        metrics: Metrics | None = None,
        commit_interval: float = COMMIT_INTERVAL,
    ) -> Consumer:
        """A consumer of a collection (or its name), or of channels; closed with the client.

        A `group` goes on where it was, and `policy` (default: everything) counts for its first start alone. `filters` choose
        among units. It goes on until it is closed, or has delivered everything up to `until_tick`. Rows have the schema that they were
        written with, or, with `schema` "current", the collection's newest. Raises GroupBusy, CollectionNotFound, InvalidArgument, and
        what the scan raises.
        """
        if schema == "current":
            self._definitions = {}  # whoever asks next hears of the newest
        if isinstance(source, str):
            source = self.collection(source)
        channels = source.vchannels if isinstance(source, CollectionInfo) else source
        positions = None if group is None else self._tables.group_positions()
        try:
            made = Consumer(
                channels,
                wal=self._tables.wal_opener(channels),
                tail=self.append,
                group=group,
                positions=positions,
                policy=policy,
                filters=filters,
                until_tick=until_tick,
                definitions=self._definition,
                imports=self._tables.imports(),
                schema=schema,
                metrics=metrics,
                commit_interval=commit_interval,
                log=self._tables.uncommitted(),
                patience=self.settings.read_deadline,
            )
        except BaseException:
            if positions is not None:
                positions.close()
            raise
        self._open(made)
        return made

    def drop_group(self, group: str) -> None:
        """Forget a consumer group and where it stands: who consumes for it next begins as for a new one. Idempotent. Raises
        GroupBusy while a consumer has a place of it, here or elsewhere."""
        self.append.drop_group(group)

    def changes(
        self,
        source: str | CollectionInfo,
        *,
        channels: Iterable[str] = (),
        after: Moment | Mapping[str, Sequence[int]] | None = None,
        until_tick: int | None = None,
        schema: CollectionSchema | None = None,
        metrics: Metrics | None = None,
    ) -> ChangeStream:
        """The changes of a collection (or its name) as Arrow batches; closed with the client.

        They begin at its beginning, behind a tick or moment, or where the positions of an earlier stream say (as they were,
        or back from JSON), and go on until the stream is closed or has given everything up to `until_tick`. With a `schema`, a
        version of the collection's, all batches have it; else each that of its last row's tick. Of `channels` alone, which are
        VChannels of it or PChannels; of all where none is named.
        Raises CollectionNotFound, InvalidArgument; a poll raises PositionTruncated where the WAL has been trimmed behind `after`.
        """
        from millrace.client.consume.changes import ChangeSources, ChangeStream

        collection = self.collection(source) if isinstance(source, str) else source
        collection = collection.restricted_to(channels)
        tables = self._tables
        sources = ChangeSources(
            tables.wal_opener(collection.vchannels),
            self.append,
            tables.imports(),
            tables.changes_start,
            tables.uncommitted(),
            self.settings.read_deadline,
        )
        made = ChangeStream(collection, sources, after=after, until_tick=until_tick, schema=schema, metrics=metrics)
        self._open(made)
        return made

    @cached_property
    def _tables(self) -> Tables:
        if not self._here:
            return RemoteTables(self.append)
        from millrace.client.local_tables import LocalTables

        return LocalTables(self.settings, self.append)

    def _definition(self, collection_id: int, version: int) -> CollectionInfo:
        """A collection that has a schema version, a dropped one too. Raises CollectionNotFound."""
        found = self._definitions.get(collection_id)
        if found is None or found.schema_version < version:
            self._definitions = {each.id: each for each in self.catalog.collections(dropped=True)}
            found = self._definitions.get(collection_id)
        if found is None or found.schema_version < version:
            raise CollectionNotFound(f"the catalog has no schema version {version} of collection {collection_id}")
        return found

    def _open(self, made: Consumer | ChangeStream) -> None:
        """Close it with this client, unless its user does: who opens many, one after another, has none of them held here."""
        self._consumers = [*(each for each in self._consumers if not each.closed), made]

    def current_tick(self, pchannels: Iterable[str]) -> int:
        """A tick behind every append to these PChannels that was answered."""
        return max(self.append.tick(name) for name in pchannels)

    def _stood(self, pchannel: str, producer_id: int, after: int) -> Iterable[AppliedMessage]:
        """What a producer has in the WAL behind a tick, all of it up to now (millrace.client.produce.producer_recovery.AppliedLookup)."""
        from millrace.client.local_tables import applied_messages

        return applied_messages(self.settings, self.append, pchannel, producer_id, after)

    def _read_for(self, collection: CollectionInfo, at: int | None) -> tuple[int, pa.Table]:
        """A collection at a tick; without one at a tick of now, which lies behind every append that was answered."""
        if at is None:
            at = self.current_tick(collection.pchannels)
        return at, self.read(collection, at=at)

    def read(
        self, source: str | CollectionInfo, *, metrics: Metrics | None = None, **options: Unpack[ReadOptions]
    ) -> pa.Table:
        """The rows of a collection (or the one of that name), as :meth:`millrace.client.database.CollectionInfo.read` has it; `deadline` is ``read_deadline`` by default.

        Has a tick appended on each PChannel of the collection, so that one on which nothing happens does not hold the read
        back. No JVM. `metrics` are told how long it took. Raises TickNotReached, TickTooOld, CollectionNotFound, InvalidArgument;
        :func:`millrace.spark.read` is the same for Spark.
        """
        began = time.perf_counter()
        tick, seconds, selection = self._asked(**options)
        rows = self._tables.read(self.current_definition(source), at=tick, seconds=seconds, selection=selection)
        if metrics is not None:
            metrics.read_duration_seconds.observe(time.perf_counter() - began)
        return rows

    def stream(self, source: str | CollectionInfo, **options: Unpack[ReadOptions]) -> pa.RecordBatchReader:
        """:meth:`read`, batch by batch, in bounded memory: of collections that are larger than it."""
        tick, seconds, selection = self._asked(**options)
        return self._tables.stream(self.current_definition(source), at=tick, seconds=seconds, selection=selection)

    def dataset(
        self, source: str | CollectionInfo, *, at: Moment | None = None, deadline: float | None = None
    ) -> CollectionDataset:
        """:meth:`read` as a dataset of pyarrow, pinned to its tick; what is asked of it later is read then."""
        tick, seconds, _ = self._asked(at=at, deadline=deadline)
        return self._tables.dataset(self.current_definition(source), at=tick, seconds=seconds)

    def table(self, name: str) -> ds.Dataset:
        """One of the deployment's own Delta tables, as :meth:`millrace.client.database.Database.table` has it."""
        return self._tables.table(name)

    def count(
        self,
        source: str | CollectionInfo,
        *,
        at: Moment | None = None,
        where: str | None = None,
        deadline: float | None = None,
    ) -> int:
        """How many rows :meth:`read` would give. Reads none where the tables' logs say it and nothing hides one."""
        tick, seconds, selection = self._asked(at=at, where=where, deadline=deadline)
        return self._tables.count(self.current_definition(source), at=tick, seconds=seconds, where=selection.where)

    def _asked(
        self, *, at: Moment | None = None, deadline: float | None = None, **selected: Unpack[SelectionOptions]
    ) -> tuple[int | None, float, Selection]:
        """The tick, the seconds to wait and the selection. Raises InvalidArgument."""
        seconds = self.settings.read_deadline if deadline is None else deadline
        return None if at is None else resolve_tick(at), seconds, Selection.of(**selected)
