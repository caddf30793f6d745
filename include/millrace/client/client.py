"""Client of one deployment, in a local data folder or on a remote server: collections, producers, consumers.

    with Client.connect() as client:    # or Client.at("grpc+tls://log.example.net:7700", roots="ca.pem")
        client.catalog.create_collection("users", schema, partitions=["eu", "us"])
        client.producer().insert(client.collection("users"), batch, partition="eu")

Catalog calls, DDL, appends and new messages always go through the server. Table data is read from local files if the
data folder is on this machine, and through the server otherwise (Tables).
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

if TYPE_CHECKING:  # not needed by producers and consumers
    import pyarrow.dataset as ds

    from millrace.client.consume.changes import ChangeStream
    from millrace.client.dataset import CollectionDataset
    from millrace.client.produce.producer_recovery import AppliedMessage
    from millrace.wal.visible.changes import ChangePosition, ChangeStart


class Tables(Protocol):
    """Source of a client's reads."""

    def wal_opener(self, channels: Sequence[str]) -> WalOpener:
        """Return a function that opens the newest version of the ``wal`` table for a reader of these channels."""
        ...

    def uncommitted(self) -> UncommittedReader | None:
        """Return a reader of the messages that the log has after the ``wal`` table; None if it cannot be read."""
        ...

    def imports(self) -> ImportSource:
        """Return the source of the rows of Import messages."""
        ...

    def changes_start(self, pchannel: str, collection_id: int, after: ChangePosition) -> ChangeStart:
        """Return where a reader of changes after `after` starts on a PChannel, with the state it needs."""
        ...

    def group_positions(self) -> GroupPositions:
        """Open the positions of consumer groups; the caller closes it."""
        ...

    def read(self, collection: CollectionInfo, *, at: int | None, seconds: float, selection: Selection) -> pa.Table:
        """Read the rows of a collection at a tick, or, without one, all that was decided before the call.

        Waits up to `seconds` for the tables to reach the tick.
        """
        ...

    def stream(
        self, collection: CollectionInfo, *, at: int | None, seconds: float, selection: Selection
    ) -> pa.RecordBatchReader:
        """Read like :meth:`read`, batch by batch."""
        ...

    def dataset(self, collection: CollectionInfo, *, at: int | None, seconds: float) -> CollectionDataset:
        """Return the rows that :meth:`read` reads as a pinned dataset."""
        ...

    def count(self, collection: CollectionInfo, *, at: int | None, seconds: float, where: str | None) -> int:
        """Count the rows that :meth:`read` would return."""
        ...

    def table(self, name: str) -> ds.Dataset:
        """Return one of the deployment's own Delta tables at its current version."""
        ...


class Client(Closeable):
    """A connection to a deployment's server. Thread-safe."""

    def __init__(self, settings: Settings, append: AppendClient, *, here: bool = True) -> None:
        """Initialize the client. With `local`, the deployment is in ``settings.data_dir``."""
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
        """Connect to the deployment in ``settings.data_dir``.

        With `start`, start the log server if none runs. Without `eager`, the first call that needs the server looks for
        it: a producer with a spool can start while the server is down.

        Raises LogUnavailable if the server cannot be reached or must not be started.
        Raises InvalidSettings if it starts a server and the settings name another log than the deployment's.
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
        """Connect to ``grpc://host:port`` or ``grpc+tls://host:port``.

        `roots` is a PEM file of trusted certificates. The default `token` is MILLRACE_SERVER_TOKEN from the
        environment. `settings` provide attempts and deadlines of appends.

        Raises InvalidSettings without a token. Raises LogUnavailable if the server cannot be reached or refuses the
        token.
        """
        token = token or (os.environ if env is None else env).get(TOKEN_VARIABLE, "")
        if not token:
            raise InvalidSettings(
                f"{TOKEN_VARIABLE} is not set: set it to the token that the server has in its own {TOKEN_VARIABLE}"
            )
        service = RemoteLogService.at(address, token=token, roots=roots, tls_name=tls_name, deadline=deadline)
        return cls(settings or Settings.load(env=env), AppendClient(service), here=False)

    def close(self) -> None:
        """Close the client's consumers and producers, then the connection.

        Raises DeadlineExceeded if rows could not be sent.
        """
        with ExitStack() as closing:
            closing.callback(self.append.close)
            for producer in self._producers:
                closing.callback(producer.close)
            for consumer in self._consumers:
                closing.callback(consumer.close)

    def collection(self, name: str) -> CollectionInfo:
        """Return the definition of a collection. Raises CollectionNotFound.

        While the server is down, the definition comes from a local data folder, so that a producer with a spool can
        start.
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
        """Return the current definition of a collection, given by name or by an earlier definition.

        Raises CollectionNotFound, also if `source` was dropped and another collection has its name.
        """
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
        """Create an idempotent producer, which is closed with the client.

        With a folder `spool`, the producer stores rows there (at most `spool_bytes`) while the log is unreachable, and
        calls `on_rejected` for each stored message that the chain rejects.

        Raises SpoolBusy.
        """
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
        """Create a consumer of a collection (or its name) or of channels, which is closed with the client.

        A `group` continues from its committed position; `policy` (default: everything) applies only to its first start.
        `filters` select units. The consumer runs until it is closed or has delivered everything up to `until_tick`.
        Rows have the schema that they were written with, or, with `schema` "current", the collection's newest.

        Raises GroupBusy, CollectionNotFound, InvalidArgument, and what the scan raises.
        """
        if schema == "current":
            self._definitions = {}  # forces a fetch of the newest definitions
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
        """Delete a consumer group with its positions; its next consumer starts as a new group. Idempotent.

        Raises GroupBusy while a consumer of the group runs anywhere.
        """
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
        """Create a stream of a collection's changes as Arrow batches, which is closed with the client.

        The stream starts at the collection's beginning, after a tick or moment, or at an earlier stream's `positions`
        (as they were, or parsed from JSON). It runs until it is closed or has returned everything up to `until_tick`.
        With a `schema`, a version of the collection's, all batches have it; otherwise a batch has the schema at the
        tick of its last row. `channels` restricts the stream to these VChannels or PChannels; empty means all.

        Raises CollectionNotFound, InvalidArgument. A poll raises PositionTruncated if the WAL was trimmed after
        `after`.
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
        """Return a collection, dropped or not, that has a schema version. Raises CollectionNotFound."""
        found = self._definitions.get(collection_id)
        if found is None or found.schema_version < version:
            self._definitions = {each.id: each for each in self.catalog.collections(dropped=True)}
            found = self._definitions.get(collection_id)
        if found is None or found.schema_version < version:
            raise CollectionNotFound(f"the catalog has no schema version {version} of collection {collection_id}")
        return found

    def _open(self, made: Consumer | ChangeStream) -> None:
        """Close `made` with this client. Those that their users closed are not kept."""
        self._consumers = [*(each for each in self._consumers if not each.closed), made]

    def current_tick(self, pchannels: Iterable[str]) -> int:
        """Return a tick after every acknowledged append to these PChannels."""
        return max(self.append.tick(name) for name in pchannels)

    def _stood(self, pchannel: str, producer_id: int, after: int) -> Iterable[AppliedMessage]:
        """Return a producer's messages in the WAL after a tick, up to now (AppliedLookup)."""
        from millrace.client.local_tables import applied_messages

        return applied_messages(self.settings, self.append, pchannel, producer_id, after)

    def _read_for(self, collection: CollectionInfo, at: int | None) -> tuple[int, pa.Table]:
        """Read a collection at a tick, or at the current tick, which is after every acknowledged append."""
        if at is None:
            at = self.current_tick(collection.pchannels)
        return at, self.read(collection, at=at)

    def read(
        self, source: str | CollectionInfo, *, metrics: Metrics | None = None, **options: Unpack[ReadOptions]
    ) -> pa.Table:
        """Read the rows of a collection as :meth:`millrace.client.database.Collection.read` does.

        The default `deadline` is ``read_deadline``. Appends a tick on each PChannel of the collection, so that an idle
        one does not delay the read. Needs no JVM. `metrics` record the duration. :func:`millrace.spark.read` does the
        same for Spark.

        Raises TickNotReached, TickTooOld, CollectionNotFound, InvalidArgument.
        """
        began = time.perf_counter()
        tick, seconds, selection = self._asked(**options)
        rows = self._tables.read(self.current_definition(source), at=tick, seconds=seconds, selection=selection)
        if metrics is not None:
            metrics.read_duration_seconds.observe(time.perf_counter() - began)
        return rows

    def stream(self, source: str | CollectionInfo, **options: Unpack[ReadOptions]) -> pa.RecordBatchReader:
        """Read like :meth:`read`, batch by batch, in bounded memory: for collections larger than memory."""
        tick, seconds, selection = self._asked(**options)
        return self._tables.stream(self.current_definition(source), at=tick, seconds=seconds, selection=selection)

    def dataset(
        self, source: str | CollectionInfo, *, at: Moment | None = None, deadline: float | None = None
    ) -> CollectionDataset:
        """Return the rows as a pyarrow dataset, pinned to its tick; each query reads when it runs."""
        tick, seconds, _ = self._asked(at=at, deadline=deadline)
        return self._tables.dataset(self.current_definition(source), at=tick, seconds=seconds)

    def table(self, name: str) -> ds.Dataset:
        """Return one of the deployment's own Delta tables, as :meth:`millrace.client.database.Database.table` does."""
        return self._tables.table(name)

    def count(
        self,
        source: str | CollectionInfo,
        *,
        at: Moment | None = None,
        where: str | None = None,
        deadline: float | None = None,
    ) -> int:
        """Count the rows that :meth:`read` would return.

        Reads no rows if the tables' logs have the number and no delete hides a row.
        """
        tick, seconds, selection = self._asked(at=at, where=where, deadline=deadline)
        return self._tables.count(self.current_definition(source), at=tick, seconds=seconds, where=selection.where)

    def _asked(
        self, *, at: Moment | None = None, deadline: float | None = None, **selected: Unpack[SelectionOptions]
    ) -> tuple[int | None, float, Selection]:
        """Return the tick, the seconds to wait and the selection. Raises InvalidArgument."""
        seconds = self.settings.read_deadline if deadline is None else deadline
        return None if at is None else resolve_tick(at), seconds, Selection.of(**selected)
