"""The public API of a deployment: a database of collections, local or remote.

    import millrace

    with millrace.connect() as db:
        users = db.create_collection("users", {"id": "int64", "name": "string?"}, key="id")
        users.insert([{"id": 1, "name": "Ada"}])
        print(users.read())

Catalog calls, DDL, appends and new messages always go through the server. Table data is read from local files if the
data folder is on this machine, and through the server otherwise (Tables). :mod:`millrace.client.collection` has the
methods of one collection.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, Self, Unpack, overload

import pyarrow as pa

from millrace.base.closeable import Closeable
from millrace.base.data_folder import require_deployment
from millrace.base.errors import (
    CollectionNotFound,
    InvalidArgument,
    InvalidSettings,
    LogUnavailable,
    MillraceError,
    PermissionDenied,
    PositionTruncated,
)
from millrace.base.metrics import Metrics
from millrace.base.settings import Settings, following
from millrace.catalog.broadcast import MESSAGE_KIND
from millrace.catalog.calls import RemoteCatalog
from millrace.catalog.collection import DEFAULT_PARTITION, CollectionInfo, require_distinct_sql_names
from millrace.catalog.protocol import Catalog
from millrace.client.append_client import AppendClient
from millrace.client.collection import Collection
from millrace.client.consume.consumer import COMMIT_INTERVAL, Consumer, LaneCallback, StreamOptions
from millrace.client.consume.consumer_threads import HEARTBEAT_CALL_SECONDS, ConsumerThreads
from millrace.client.consume.dead_letters import TaskLetters, discard_tasks, redrive_tasks
from millrace.client.consume.delivery import SchemaMode
from millrace.client.consume.membership import ExclusivePositions, GroupMember, require_group
from millrace.client.consume.queue_consumer import LEASE_SECONDS, PREFETCH, QueueConsumer, QueueOptions
from millrace.client.consume.scan import UncommittedReader, WalOpener
from millrace.client.consume.shared_tail import SharedTail
from millrace.client.consume.task_session import TaskSession
from millrace.client.display import database_html
from millrace.client.produce.producer import Producer
from millrace.client.remote_tables import RemoteTables
from millrace.client.schemas import SchemaSource, schema
from millrace.client.spool.queue import DEFAULT_BYTES
from millrace.client.spool.sender import OnRejected, SpoolSender
from millrace.log.protocol import LogService
from millrace.message.bodies import ImportSource
from millrace.message.ids import Moment, resolve_tick, split_channel
from millrace.message.types import OnDuplicate
from millrace.rpc import calls
from millrace.rpc.launch import launch_of
from millrace.rpc.remote_log import RemoteLogService
from millrace.rpc.selection import Selection
from millrace.rpc.wire import DEFAULT_DEADLINE, TOKEN_VARIABLE
from millrace.wal.scanner import All, DeliverPolicy, Filter, Latest, StartAfterTick

if TYPE_CHECKING:  # not needed by producers and consumers
    import duckdb
    import pyarrow.dataset as ds

    from millrace.client.client import Client
    from millrace.client.consume.changes import ChangeStream
    from millrace.client.dataset import CollectionDataset
    from millrace.client.produce.broadcast import Broadcast
    from millrace.client.produce.producer_recovery import AppliedMessage
    from millrace.wal.visible.changes import ChangePosition, ChangeStart


def connect(
    where: str | Path | None = None,
    *,
    token: str = "",
    roots: str | Path = "",
    tls_name: str = "",
    start: bool = True,
    eager: bool = True,
    create: bool = False,
    deadline: float | None = None,
    settings: Settings | None = None,
) -> Database:
    """Connect to a deployment.

    `where` is a data folder (default: that of `settings`) or a server, ``grpc://host:port`` or
    ``grpc+tls://host:port``. `settings` override those of the environment ($MILLRACE_DATA, or the user's own folder).

    For a data folder, `start` starts the log server if none runs. `create` makes a deployment in a folder that does not
    exist or holds something else; an empty folder and the default folder need no `create`. Without `eager`, the first
    call that needs the server looks for it, so that a producer with a spool can start while the server is down.

    A server needs a `token` (default: $MILLRACE_SERVER_TOKEN); `roots` is a PEM file with trusted certificates, and
    `tls_name` the name in the server's certificate, if it is not its host. Close the database, or use it in a ``with``
    block.

    `deadline` bounds a call to the server, in seconds (default: ``start_deadline`` of the settings for a data folder).

    Raises LogUnavailable if the server cannot be reached, refuses the token, or must not be started.
    Raises InvalidArgument if `where` is not a deployment.
    Raises InvalidSettings without a token, and if a server is to be started with another log than the deployment's.
    Raises UnsafeDataFolder.
    """
    if isinstance(where, str) and where.startswith(("grpc://", "grpc+tls://", "grpc+tcp://")):
        return Database.at_server(
            where, token=token, roots=roots, tls_name=tls_name, settings=settings, deadline=deadline
        )
    if isinstance(where, str) and "://" in where:
        raise InvalidArgument(
            f"{where!r} is neither a folder nor a server: give a path, grpc://host:port or grpc+tls://host:port"
        )
    if token or roots or tls_name:
        raise InvalidArgument("a token and roots are for a server: give its address, grpc+tls://host:port")
    found = settings or Settings.load()
    if where is not None:
        found = replace(found, data_dir=Path(where).expanduser().absolute())
        if start and not create:
            require_deployment(found.data_dir)
    return Database.in_folder(found, start=start, eager=eager, deadline=deadline)


class Tables(Protocol):
    """Source of a database's reads."""

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

    def get(
        self,
        collection: CollectionInfo,
        keys: pa.RecordBatch,
        *,
        at: int | None,
        seconds: float,
        columns: Sequence[str] | None,
    ) -> pa.Table:
        """Read the rows of primary keys, given as the key's fields in order, at a tick as :meth:`read` does."""
        ...

    def history(
        self,
        collection: CollectionInfo,
        keys: pa.RecordBatch,
        *,
        after: int | None,
        until: int | None,
        seconds: float,
        columns: Sequence[str] | None,
    ) -> pa.Table:
        """Read the changes of the rows of primary keys after a tick, up to another as :meth:`read` does."""
        ...

    def count(self, collection: CollectionInfo, *, at: int | None, seconds: float, where: str | None) -> int:
        """Count the rows that :meth:`read` would return."""
        ...

    def table(self, name: str) -> ds.Dataset:
        """Return one of the deployment's own Delta tables at its current version."""
        ...

    def published_uri(self, collection: CollectionInfo) -> str:
        """Return the URI of a collection's published table. Raises TableNotFound without one."""
        ...


class Database(Closeable):
    """A deployment and its collections. Thread-safe. Made by :func:`connect`."""

    def __init__(self, settings: Settings, append: AppendClient, *, address: str = "") -> None:
        """Initialize the database: the deployment in ``settings.data_dir``, or that of the server at `address`."""
        self.settings = following(settings) if not address else settings
        self.connection = append
        """The connection to the server."""
        self.shared_tail = SharedTail(append)
        """New messages, for all consumers and streams of this database."""
        self.task_session = TaskSession(append)
        """What all consumers of work queues of this database share."""
        self.consumer_threads = ConsumerThreads(partial(append.group_heartbeats, seconds=HEARTBEAT_CALL_SECONDS))
        """What all consumers of streams of this database share."""
        self.log: LogService = append.service
        catalog = RemoteCatalog(append, pchannels=None if address else settings.pchannels)
        self.catalog: Catalog = catalog
        self._names = catalog.definitions
        self.address = address
        self.local = not address
        """Whether the deployment's files are on this machine."""
        self._producer: Producer | None = None
        self._producers: list[Producer] = []
        self._consumers: list[Consumer | QueueConsumer | ChangeStream] = []
        self._definitions: dict[int, CollectionInfo] = {}

    @classmethod
    def in_folder(
        cls, settings: Settings, *, start: bool = True, eager: bool = True, deadline: float | None = None
    ) -> Self:
        """Connect to the deployment in ``settings.data_dir``; see :func:`connect`."""
        append = AppendClient.connect(
            settings.data_dir,
            start=start,
            now=eager,
            deadline=settings.start_deadline if deadline is None else deadline,
            launch=launch_of(settings),
        )
        return cls(settings, append)

    @classmethod
    def at_server(
        cls,
        address: str,
        *,
        token: str = "",
        roots: str | Path = "",
        tls_name: str = "",
        settings: Settings | None = None,
        deadline: float | None = None,
    ) -> Self:
        """Connect to the server at `address`; see :func:`connect`."""
        token = token or os.environ.get(TOKEN_VARIABLE, "")
        if not token:
            raise InvalidSettings(
                f"{TOKEN_VARIABLE} is not set: set it to the token that the server has in its own {TOKEN_VARIABLE}"
            )
        seconds = DEFAULT_DEADLINE if deadline is None else deadline
        service = RemoteLogService.at(address, token=token, roots=roots, tls_name=tls_name, deadline=seconds)
        return cls(settings or Settings.load(), AppendClient(service), address=address)

    def __repr__(self) -> str:
        return f"<Database {self.address or self.settings.data_dir}>"

    def _repr_html_(self) -> str:
        try:
            return database_html(repr(self)[1:-1], self.catalog.collections())
        except MillraceError as error:
            return database_html(f"{repr(self)[1:-1]}: {error}", [])

    @property
    def append(self) -> AppendClient:
        """Deprecated name of `connection`."""
        warnings.warn("Database.append is deprecated: use Database.connection", DeprecationWarning, stacklevel=2)
        return self.connection

    @property
    def client(self) -> Client:
        """Deprecated: its methods are the database's."""
        from millrace.client.client import Client

        return Client(self)

    def close(self) -> None:
        """Close the producers, the consumers and the connection. Idempotent.

        Raises DeadlineExceeded if rows could not be sent.
        """
        with ExitStack() as closing:
            closing.callback(self.connection.close)
            closing.callback(self.task_session.close)
            closing.callback(self.consumer_threads.close)
            for producer in self._producers:
                closing.callback(producer.close)
            for consumer in self._consumers:
                closing.callback(consumer.close)

    # --- collections --------------------------------------------------------------------------------------------------

    def collections(self) -> list[str]:
        """Return the names of the collections, sorted."""
        return sorted(each.name for each in self.catalog.collections())

    def __contains__(self, name: object) -> bool:
        if not isinstance(name, str):
            return False
        try:
            self.catalog.collection(name)
        except (CollectionNotFound, PermissionDenied):
            return False
        return True

    def __iter__(self) -> Iterator[str]:
        return iter(self.collections())

    def __len__(self) -> int:
        return len(self.collections())

    def __bool__(self) -> bool:
        return True  # without collections too

    def _ipython_key_completions_(self) -> list[str]:
        return self.collections()

    def __getitem__(self, name: str) -> Collection:
        return self.collection(name)

    def collection(self, source: str | CollectionInfo) -> Collection:
        """Return a collection by name or alias, or of a definition that is known already. Raises CollectionNotFound."""
        return Collection(self, self.definition(source) if isinstance(source, str) else source)

    def definition(self, source: str | CollectionInfo, *, cached: bool = False) -> CollectionInfo:
        """Return the current definition of a collection, given by name or by an earlier definition.

        With `cached`, it may be a few seconds old, and usually takes no request. Only a local deployment is read by a
        collection's id; at a server, the name may be another collection's by then, so it is asked for in any case.
        While the server is down, the definition of a name comes from a local data folder, so that a producer with a
        spool can start.

        Raises CollectionNotFound, also if `source` was dropped and another collection has its name.
        """
        if not isinstance(source, str):
            return source.require_same_id(self.definition(source.name, cached=cached))
        try:
            return self._names.get(source) if cached and self.local else self.catalog.collection(source)
        except LogUnavailable:
            if not self.local:
                raise
            from millrace.catalog.sqlite_file import read_collection

            known = read_collection(self.settings.data_dir, source)
            if known is None or known.state != "active":
                raise
            return known

    def create_collection(
        self,
        name: str,
        schema_of: SchemaSource,
        *,
        key: str | Sequence[str] | None = None,
        event_time: str | None = None,
        on_duplicate: OnDuplicate = "keep",
        generated_key: str | None = None,
        defaults: Mapping[str, Any] | None = None,
        computed: Mapping[str, str] | None = None,
        checks: Mapping[str, str] | None = None,
        partitions: Sequence[str] = (DEFAULT_PARTITION,),
        vchannels: int = 1,
        exist_ok: bool = False,
    ) -> Collection:
        """Create a collection and return it once it accepts rows.

        `schema_of` and the options from `key` to `checks` are those of :func:`schema`. Rows are distributed over
        `vchannels` VChannels by key, which can be written in parallel. With `exist_ok`, return an existing collection
        of that name if it has this schema, or had it before fields were added.

        Raises CollectionExists, InvalidArgument.
        """
        made = self.catalog.create_collection(
            name,
            schema(
                schema_of,
                key=key,
                event_time=event_time,
                on_duplicate=on_duplicate,
                generated_key=generated_key,
                defaults=defaults,
                computed=computed,
                checks=checks,
            ),
            vchannels=vchannels,
            partitions=partitions,
            exist_ok=exist_ok,
        )
        return Collection(self, made)

    def drop_collection(self, name: str) -> None:
        """Drop a collection with all its rows. This cannot be undone.

        Raises CollectionNotFound; CollectionHasAliases if aliases point to it; InvalidArgument for an alias.
        """
        self.catalog.drop_collection(name)

    def broadcast(
        self, *, kind: str = MESSAGE_KIND, data: Mapping[str, Any] | None = None, request: str = ""
    ) -> Broadcast:
        """Begin a broadcast: messages for VChannels of one or more collections, appended atomically.

            with db.broadcast() as messages:
                messages.upsert("orders", {"id": [7], "state": ["paid"]})
                messages.delete("carts", ["ada"])

        The block's end submits it. Messages become visible one by one, each at its own tick: readers may see some
        before others, but every VChannel gets its message, even if this client or a server is killed meanwhile.
        Requires the role operate on the collections. At most 1,024 messages of 256 KiB together, one for each VChannel.

        Args:
            kind: The kind whose callbacks the server runs (docs/broadcasts.md).
            data: What these callbacks get, a JSON object.
            request: A name under which it takes effect once, however often it is submitted. Default: a random one.

        Raises InvalidArgument.
        """
        from millrace.client.produce.broadcast import Broadcast

        return Broadcast(self.catalog, kind=kind, data=data, request=request)

    def create_alias(self, alias: str, collection: str) -> None:
        """Give a collection another name, which serves wherever a collection is named: in reads, writes and DDL.

        An alias that points to this collection already is no error. A handle stays with the collection that it was
        opened for; look the alias up again (``db["alias"]``) to follow it.

        Raises AliasExists if a collection has the name, or another collection has the alias.
        Raises CollectionNotFound, InvalidArgument.
        """
        self.catalog.create_alias(alias, collection)

    def alter_alias(self, alias: str, collection: str) -> None:
        """Point an alias to another collection: every lookup finds the one or the other, and none finds nothing.

        Raises AliasNotFound, CollectionNotFound.
        """
        self.catalog.alter_alias(alias, collection)

    def drop_alias(self, alias: str) -> None:
        """Drop an alias; the collection stays. Raises AliasNotFound."""
        self.catalog.drop_alias(alias)

    def aliases(self, collection: str | None = None) -> dict[str, str]:
        """Return the names of collections by alias, sorted, or the aliases of one collection.

        Raises CollectionNotFound.
        """
        return self.catalog.aliases(collection)

    def attach(
        self,
        connection: duckdb.DuckDBPyConnection,
        names: Sequence[str] | None = None,
        *,
        at: Moment | None = None,
        deadline: float | None = None,
    ) -> int:
        """Register a DuckDB view for each collection (or for those in `names`), all at one tick, and return the tick.

        The tick is `at`, or now. A query reads only the columns and row groups that it needs, with deletes applied.
        Attach again to see newer rows.

        Raises the errors of :meth:`Collection.read`, and InvalidArgument if two names differ only in case.
        """
        chosen = require_distinct_sql_names(
            self.definition(name) for name in (self.collections() if names is None else names)
        )
        if at is None:
            tick = self.current_tick({name for each in chosen for name in each.pchannels}) if chosen else 0
        else:
            tick = resolve_tick(at)
        from millrace.client.dataset import register_in_duckdb  # imports pyarrow.dataset

        for each in chosen:
            register_in_duckdb(connection, each.name, self.collection(each).dataset(at=tick, deadline=deadline))
        return tick

    def table(self, name: str) -> ds.Dataset:
        """Return one of the deployment's own Delta tables as a pyarrow dataset at its current version.

        Names are ``wal``, ``segments``, ``tables/3/_rows`` and so on (docs/tables.md). DuckDB, Polars and pandas read
        the dataset. A collection's table holds the rows that the flusher has written, including deleted ones;
        :meth:`attach` and :meth:`Collection.read` apply the deletes.

        Raises TableNotFound. Raises InvalidArgument if the deployment is on a remote server.
        """
        return self.tables.table(name)

    # --- producers and consumers --------------------------------------------------------------------------------------

    @property
    def producer(self) -> Producer:
        """The producer that this database's collections write with."""
        if self._producer is None:
            self._producer = self.new_producer()
        return self._producer

    def new_producer(
        self,
        *,
        producer_id: int | None = None,
        resumed: int | None = None,
        spool: Path | None = None,
        spool_bytes: int = DEFAULT_BYTES,
        on_rejected: OnRejected | None = None,
        metrics: Metrics | None = None,
    ) -> Producer:
        """Create an idempotent producer, which is closed with the database.

        A producer with a `producer_id` takes over that id and fences its former owner. `resumed` is the id of a former
        producer whose numbers this one takes over (:meth:`Producer.resume`). With a folder `spool`, the producer stores
        rows there, at most `spool_bytes`, while the log is unreachable, and calls `on_rejected` for each stored message
        that the chain rejects.

        Raises SpoolBusy.
        """
        sender = SpoolSender.for_producer(
            spool, self.settings, max_bytes=spool_bytes, on_rejected=on_rejected, metrics=metrics
        )
        producer = Producer(
            self.connection,
            self.catalog,
            self.settings,
            definitions=self._names,
            producer_id=producer_id,
            resumed=resumed,
            reader=self._read_for,
            standing=self._applied_messages if self.local and resumed is not None else None,
            spool=sender,
            metrics=metrics,
        )
        self._producers = [*(each for each in self._producers if not each.closed), producer]
        return producer

    def _applied_messages(self, pchannel: str, producer_id: int, after: int) -> Iterable[AppliedMessage]:
        """Return a producer's messages in the WAL after a tick, up to now (AppliedLookup)."""
        from millrace.client.local_tables import applied_messages

        return applied_messages(self.settings, self.connection, pchannel, producer_id, after)

    def _read_for(self, collection: CollectionInfo, at: int | None) -> tuple[int, pa.Table]:
        """Read a collection at a tick, or at the current tick, which is after every acknowledged append."""
        if at is None:
            at = self.current_tick(collection.pchannels)
        return at, self.collection(collection).read(at=at)

    @overload
    def consumer(
        self, source: str | CollectionInfo, *, mode: Literal["queue"], **options: Unpack[QueueOptions]
    ) -> QueueConsumer: ...

    @overload
    def consumer(
        self,
        source: str | CollectionInfo | Sequence[str],
        *,
        mode: Literal["stream"] = "stream",
        **options: Unpack[StreamOptions],
    ) -> Consumer: ...

    def consumer(
        self,
        source: str | CollectionInfo | Sequence[str],
        *,
        mode: Literal["stream", "queue"] = "stream",
        **options: Any,
    ) -> Consumer | QueueConsumer:
        """Create a consumer of a collection, by name or definition, or of channels; it is closed with the database.

        A `group` continues from its committed position; `start` (default: everything) applies only to its first start.
        All consumers of a group divide its channels, in this process and elsewhere; one that is silent for longer than
        `lease` (default: 15 s) loses them to the others. `poll` calls `on_assigned` with channels that came, before it
        delivers any of them, `on_revoked` with channels that it is about to commit and give up, and `on_lost` with
        channels that others may have already. With `exclusive`, the consumer takes all channels for itself or raises
        GroupBusy.

        The consumer runs until it is closed or has delivered everything up to `until`. `filters` select units. Rows
        have the schema that they were written with, or, with `schema` "current", the collection's newest. A group's
        progress is committed every `commit_interval` seconds (default: 0.2). `metrics` counts what is delivered.

        With `mode` "queue", the consumers of the group compete for single tasks, the collection's rows, and acknowledge
        each by itself (docs/queues.md). A task is leased for `lease` seconds (default: 30) and then delivered again.
        The consumer has up to `prefetch` tasks at a time. With `order` "key", a row is delivered once all earlier rows
        of its primary key are done. After `max_deliveries` (default: 5), a task goes into the collection
        `dead_letters`, created if needed; without one, it is delivered until it is acknowledged. `start` is All,
        Latest or StartAfterTick. The other options are a stream's.

        Raises GroupBusy, CollectionNotFound, InvalidArgument, and what the scan raises.
        """
        options = {name: value for name, value in options.items() if value is not None}
        if mode == "queue":
            if others := options.keys() & StreamOptions.__annotations__.keys() - QueueOptions.__annotations__.keys():
                raise InvalidArgument(f"a work queue has no option {min(others)}: leave it out, or consume as a stream")
            return self._queue_consumer(source, **options)
        if mode != "stream":
            raise InvalidArgument(f"mode is 'stream' or 'queue', not {mode!r}")
        if others := options.keys() & QueueOptions.__annotations__.keys() - StreamOptions.__annotations__.keys():
            raise InvalidArgument(f'{min(others)} is an option of mode="queue": add it, or leave the option out')
        return self._stream_consumer(source, **options)

    def _stream_consumer(
        self,
        source: str | CollectionInfo | Sequence[str],
        *,
        group: str | None = None,
        start: DeliverPolicy | None = None,
        until: Moment | None = None,
        filters: Sequence[Filter] = (),
        schema: SchemaMode = "written",
        metrics: Metrics | None = None,
        commit_interval: float = COMMIT_INTERVAL,
        exclusive: bool = False,
        lease: float | None = None,
        on_assigned: LaneCallback | None = None,
        on_revoked: LaneCallback | None = None,
        on_lost: LaneCallback | None = None,
    ) -> Consumer:
        if group is not None:
            require_group(group)
        if schema == "current":
            self._definitions = {}  # forces a fetch of the newest definitions
        if isinstance(source, str):
            source = self.definition(source)
        channels = source.vchannels if isinstance(source, CollectionInfo) else source
        end = None if until is None else resolve_tick(until)
        positions: ExclusivePositions | None = None
        member: GroupMember | None = None
        if group is not None and exclusive:
            positions = ExclusivePositions(self._group_call)
        elif group is not None:
            member = GroupMember(self._group_call, group, channels, lease=lease, until=end)
        try:
            made = Consumer(
                channels,
                wal=self.tables.wal_opener(channels),
                tail=self.shared_tail,
                group=group,
                positions=positions,
                member=member,
                on_assigned=on_assigned,
                on_revoked=on_revoked,
                on_lost=on_lost,
                policy=start,
                filters=filters,
                until_tick=end,
                definitions=self._definition,
                imports=self.tables.imports(),
                schema=schema,
                metrics=metrics,
                commit_interval=commit_interval,
                log=self.tables.uncommitted(),
                stall_timeout=self.settings.read_deadline,
                threads=self.consumer_threads,
            )
        except BaseException:
            if positions is not None:
                positions.close()
            if member is not None:
                member.leave()
            raise
        self._opened(made)
        return made

    def _queue_consumer(
        self,
        source: str | CollectionInfo | Sequence[str],
        *,
        group: str | None = None,
        start: DeliverPolicy | None = None,
        lease: float | None = None,
        prefetch: int = PREFETCH,
        order: Literal["key"] | None = None,
        dead_letters: str | None = None,
        max_deliveries: int | None = None,
    ) -> QueueConsumer:
        if group is None:
            raise InvalidArgument("a work queue needs a group: its consumers compete for the tasks")
        require_group(group)
        if isinstance(source, str):
            source = self.definition(source)
        if not isinstance(source, CollectionInfo):
            raise InvalidArgument("a work queue is of a collection, not of channels: name the collection")
        match start:
            case None | All():
                first: str | int = "earliest"
            case Latest():
                first = "latest"
            case StartAfterTick(tick):
                first = tick
            case _:
                raise InvalidArgument(f"a work queue starts at All, Latest or StartAfterTick, not {start!r}")
        made = QueueConsumer(
            self.connection,
            collection=source.name,
            lanes=source.vchannels,
            group=group,
            lease=LEASE_SECONDS if lease is None else lease,
            prefetch=prefetch,
            order=order,
            start=first,
            letters=None if dead_letters is None else TaskLetters.of(self, dead_letters, group, source),
            max_deliveries=max_deliveries,
            session=self.task_session,
        )
        self._opened(made)
        return made

    def redrive_tasks(self, letters: str, *, group: str, into: str, reason: str = "") -> int:
        """Send the dead letters of a work queue again, as new tasks of the collection `into`; return how many.

        `letters` is the collection that its consumers named as `dead_letters`, `reason` a part of the reason of those
        that are meant. A letter is deleted once its row is in the collection; if this is interrupted, some rows are
        sent twice.
        """
        return redrive_tasks(self, letters, group=group, into=into, reason=reason)

    def discard_tasks(self, letters: str, *, group: str, reason: str = "") -> int:
        """Delete the dead letters of a work queue, those whose reason contains `reason`; return how many."""
        return discard_tasks(self, letters, group=group, reason=reason)

    def drop_group(self, group: str) -> None:
        """Delete a consumer group with its positions; an unknown group is not an error.

        Raises GroupBusy while a consumer of the group runs anywhere.
        """
        self.connection.call(calls.DROP_CONSUMER_GROUP, {"group": group})

    def consumer_groups(self) -> list[dict[str, Any]]:
        """Return the consumer groups: ``group``, ``positions`` by channel, ``claims`` by channel, and ``members``.

        A member has ``member`` (its id), ``client`` (host and process), ``since`` (Unix seconds), ``wanted`` (number of
        channels that it reads), ``lanes`` (those that it has now) and ``reason`` (why it has none).
        """
        found: list[dict[str, Any]] = self.connection.call(calls.CONSUMER_GROUPS, {})["groups"]
        return found

    def reset_group(
        self,
        group: str,
        *,
        to: Moment | Literal["earliest", "latest"],
        collection: str | CollectionInfo | None = None,
        dry_run: bool = False,
    ) -> dict[str, int]:
        """Move a consumer group: its next consumer starts after `to`, a tick, a time, or one end of the WAL.

        This concerns the channels of `collection`, or all that the group has positions on. Returns the new ticks by
        channel; with `dry_run` nothing changes.

        Raises GroupBusy while a consumer of the group runs anywhere: close it first.
        Raises InvalidArgument for a moment in the future, and for a group without positions if no collection is named.
        Raises PositionTruncated for a moment whose messages retention has removed.
        """
        known = {each["group"]: each["positions"] for each in self.consumer_groups()}
        if collection is not None:
            found = self.definition(collection) if isinstance(collection, str) else collection
            lanes = sorted(found.vchannels)
        else:
            lanes = sorted(known.get(group, ()))
        if not lanes:
            raise InvalidArgument(f"group {group[:100]!r} has no positions: name a collection whose channels are meant")
        ticks = {lane: self._reset_tick(lane, to) for lane in lanes}
        if not dry_run:
            self.connection.call(calls.RESET_CONSUMER_GROUP, {"group": group, "ticks": ticks})
        return ticks

    def _reset_tick(self, lane: str, to: Moment | Literal["earliest", "latest"]) -> int:
        pchannel = split_channel(lane)[0]
        now = self.connection.tick(pchannel, persist=False)
        if to == "latest":
            return now
        wal = self.tables.wal_opener([lane])()
        first, earliest = (0, (0, 0)) if wal is None else wal.trimmed(pchannel)
        if to == "earliest":
            return first
        tick = resolve_tick(to)
        if tick > now:
            raise InvalidArgument(f"{to} is in the future of {pchannel}, whose newest tick is {now}: use latest")
        if tick < first:
            raise PositionTruncated(
                f"retention has removed the messages of {pchannel} up to tick {first}: use earliest or a later moment",
                earliest=(earliest[0], earliest[1]),
            )
        return tick

    def _group_call(self, request: dict[str, Any]) -> dict[str, Any]:
        return self.connection.call(calls.GROUP, request)

    def _opened(self, made: Consumer | QueueConsumer | ChangeStream) -> None:
        """Close `made` with this database. Those that their users closed are not kept."""
        self._consumers = [*(each for each in self._consumers if not each.closed), made]

    def current_tick(self, pchannels: Iterable[str]) -> int:
        """Return a tick after every acknowledged append to these PChannels."""
        return max(self.connection.tick(name, persist=False) for name in pchannels)

    @cached_property
    def tables(self) -> Tables:
        """The source of reads."""
        if not self.local:
            return RemoteTables(self.connection)
        from millrace.client.local_tables import LocalTables

        return LocalTables(self.settings, self.connection)

    def _definition(self, collection_id: int, version: int) -> CollectionInfo:
        """Return a collection, dropped or not, that has a schema version. Raises CollectionNotFound."""
        found = self._definitions.get(collection_id)
        if found is None or found.schema_version < version:
            found = self.catalog.collections_by_id([collection_id]).get(collection_id)
            if found is not None:
                self._definitions[collection_id] = found
        if found is None or found.schema_version < version:
            raise CollectionNotFound(f"the catalog has no schema version {version} of collection {collection_id}")
        return found
