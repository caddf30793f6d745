"""The public API of a deployment: a database of collections, local or remote.

    import millrace

    with millrace.connect() as db:
        users = db.create_collection("users", {"id": "int64", "name": "string?"}, key="id")
        users.insert([{"id": 1, "name": "Ada"}])
        print(users.read())

:mod:`millrace.client.client` does the work.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

import pyarrow as pa
import pyarrow.compute as pc

from millrace.base.closeable import Closeable
from millrace.base.data_folder import require_deployment
from millrace.base.errors import InvalidArgument, InvalidSettings
from millrace.base.settings import Settings
from millrace.catalog.collection import DEFAULT_PARTITION, require_distinct_sql_names
from millrace.catalog.collection import CollectionInfo as Definition
from millrace.client.client import Client
from millrace.client.consume.consumer import Consumer
from millrace.client.consume.delivery import Change, SchemaMode
from millrace.client.produce.producer import Producer
from millrace.client.produce.rows import Keys, Rows
from millrace.client.produce.transaction import Transaction
from millrace.client.produce.written import Deleted, Written
from millrace.client.schemas import SchemaSource, alter_changes, schema
from millrace.client.spool.queue import DEFAULT_BYTES
from millrace.client.spool.sender import OnRejected
from millrace.message.datetime_range import check_datetime_columns
from millrace.message.ids import Moment, resolve_tick
from millrace.message.schema import CollectionSchema
from millrace.message.types import OnDuplicate
from millrace.rpc.selection import ColumnNames, ReadOptions
from millrace.wal.scanner import DeliverPolicy

if TYPE_CHECKING:
    import duckdb
    import pandas as pd
    import polars as pl
    import pyarrow.dataset as ds

    from millrace.client.consume.changes import ChangeStream
    from millrace.client.dataset import CollectionDataset
    from millrace.client.produce.batch_appender import BatchLimits, CollectionBatch


def connect(
    where: str | Path | None = None,
    *,
    token: str = "",
    roots: str | Path = "",
    start: bool = True,
    create: bool = False,
    settings: Settings | None = None,
) -> Database:
    """Connect to a deployment.

    `where` is a data folder (default: $MILLRACE_DATA, or the user's own) or a server, ``grpc://host:port`` or
    ``grpc+tls://host:port``.

    For a data folder, `start` starts the log server if none runs. `create` makes a deployment in a folder that does not
    exist or holds something else; an empty folder and the default folder need no `create`. A server needs a `token`
    (default: $MILLRACE_SERVER_TOKEN); `roots` is a PEM file with trusted certificates. `settings` override those of the
    environment. Close the database, or use it in a ``with`` block.

    Raises LogUnavailable if the server cannot be reached or must not be started.
    Raises InvalidArgument if `where` is not a deployment.
    Raises InvalidSettings, UnsafeDataFolder.
    """
    if isinstance(where, str) and where.startswith(("grpc://", "grpc+tls://", "grpc+tcp://")):
        return Database(Client.at(where, token=token, roots=roots, settings=settings))
    if isinstance(where, str) and "://" in where:
        raise InvalidArgument(
            f"{where!r} is neither a folder nor a server: give a path, grpc://host:port or grpc+tls://host:port"
        )
    if token or roots:
        raise InvalidArgument("a token and roots are for a server: give its address, grpc+tls://host:port")
    found = settings or Settings.load()
    if where is not None:
        found = replace(found, data_dir=Path(where).expanduser().absolute())
        if start and not create:
            require_deployment(found.data_dir)
    return Database(Client.connect(found, start=start))


class Database(Closeable):
    """A deployment and its collections. Thread-safe. Made by :func:`connect`."""

    def __init__(self, client: Client) -> None:
        self.client = client
        """The underlying client, for calls that this class does not expose."""
        self._producer: Producer | None = None

    def close(self) -> None:
        """Close the producers, the consumers and the connection. Idempotent.

        Raises DeadlineExceeded if rows could not be sent.
        """
        self.client.close()

    # --- collections --------------------------------------------------------------------------------------------------

    def collections(self) -> list[str]:
        """Return the names of the collections, sorted."""
        return sorted(each.name for each in self.client.catalog.collections())

    def __contains__(self, name: object) -> bool:
        return name in self.collections()

    def __getitem__(self, name: str) -> Collection:
        return self.collection(name)

    def collection(self, name: str) -> Collection:
        """Return a collection by name. Raises CollectionNotFound."""
        return Collection(self, self.client.collection(name))

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
        made = self.client.catalog.create_collection(
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
        """Drop a collection with all its rows. This cannot be undone. Raises CollectionNotFound."""
        self.client.catalog.drop_collection(name)

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
            self.client.collection(name) for name in (self.collections() if names is None else names)
        )
        if at is None:
            tick = self.client.current_tick({name for each in chosen for name in each.pchannels}) if chosen else 0
        else:
            tick = resolve_tick(at)
        for each in chosen:
            connection.register(each.name, self.client.dataset(each.name, at=tick, deadline=deadline))
        return tick

    def table(self, name: str) -> ds.Dataset:
        """Return one of the deployment's own Delta tables as a pyarrow dataset at its current version.

        Names are ``wal``, ``segments``, ``collections/3`` and so on (docs/tables.md). DuckDB, Polars and pandas read
        the dataset. A collection's table holds the rows that the flusher has written, including deleted ones;
        :meth:`attach` and :meth:`Collection.read` apply the deletes.

        Raises TableNotFound. Raises InvalidArgument if the deployment is on a remote server.
        """
        return self.client.table(name)

    # --- producers and consumers --------------------------------------------------------------------------------------

    @property
    def producer(self) -> Producer:
        """The producer that this database's collections write with."""
        if self._producer is None:
            self._producer = self.client.producer()
        return self._producer

    def new_producer(
        self,
        *,
        producer_id: int | None = None,
        spool: Path | None = None,
        spool_bytes: int = DEFAULT_BYTES,
        on_rejected: OnRejected | None = None,
    ) -> Producer:
        """Create a producer.

        A producer with a `producer_id` takes over that id and fences its former owner. With a folder `spool`, the
        producer stores rows there, at most `spool_bytes`, while the log is unreachable.

        Raises SpoolBusy.
        """
        return self.client.producer(
            producer_id=producer_id, spool=spool, spool_bytes=spool_bytes, on_rejected=on_rejected
        )

    def consumer(
        self,
        names: str | Sequence[str],
        *,
        group: str | None = None,
        start: DeliverPolicy | None = None,
        schema: SchemaMode = "written",
    ) -> Consumer:
        """Create a consumer of a collection by name, or of channels; see :meth:`Collection.consume`."""
        return self.client.consumer(names, group=group, policy=start, schema=schema)

    def drop_group(self, group: str) -> None:
        """Delete a consumer group with its positions; an unknown group is not an error.

        Raises GroupBusy while a consumer of the group runs.
        """
        self.client.drop_group(group)


class Collection:
    """A collection of a :class:`Database`: writes, reads and schema changes. Thread-safe."""

    def __init__(self, database: Database, definition: Definition) -> None:
        self.database = database
        self.definition = definition
        """Schema versions, partitions and VChannels as of the last refresh, or the last change through this object."""

    def __repr__(self) -> str:
        columns = ", ".join(f"{each.name}: {each.type}{'?' * each.nullable}" for each in self.schema.fields)
        return f"<Collection {self.name!r} ({columns}), key {self.schema.primary_key!r}>"

    @property
    def name(self) -> str:
        return self.definition.name

    @property
    def id(self) -> int:
        """The collection's number, which names its table folders."""
        return self.definition.id

    @property
    def schema(self) -> CollectionSchema:
        """The newest schema that this object knows."""
        return self.definition.schema

    @property
    def partitions(self) -> list[str]:
        return list(self.definition.partitions)

    def refresh(self) -> Collection:
        """Fetch the current definition, which others may have changed.

        Raises CollectionNotFound, also if the collection was dropped and another has its name.
        """
        self.definition = self.database.client.current_definition(self.definition)
        return self

    # --- writing ------------------------------------------------------------------------------------------------------

    def insert(
        self,
        rows: Rows,
        *,
        partition: str | None = None,
        partition_by: str | None = None,
        raise_rejected: bool = True,
        evolve: bool = False,
    ) -> Written:
        """Append rows; they are durable and decided when the call returns.

        `rows` are a DataFrame or relation of any library, Arrow data, a dict of columns, or a list of dicts, dataclass
        instances or pydantic models. `insert` never replaces a row; use :meth:`upsert` for that. With `evolve`, the
        schema is changed first, for all users: missing columns are added and types that are too narrow are widened.

        Raises the errors of :meth:`millrace.client.produce.producer.Producer.insert`.
        """
        written = self.database.producer.insert(
            self.definition,
            rows,
            partition=partition,
            partition_by=partition_by,
            raise_rejected=raise_rejected,
            evolve=evolve,
        )
        if evolve:
            self.refresh()
        return written

    def upsert(
        self, rows: Rows, *, partition: str | None = None, partition_by: str | None = None, evolve: bool = False
    ) -> Written:
        """Replace the rows of these keys and insert new ones; a reader sees the old or the new row at any time.

        `evolve` is that of :meth:`insert`.
        """
        written = self.database.producer.upsert(
            self.definition, rows, partition=partition, partition_by=partition_by, evolve=evolve
        )
        if evolve:
            self.refresh()
        return written

    def delete(self, keys: Keys, *, partition: str | None = None) -> Written:
        """Delete rows by key; a key without a row is not an error."""
        return self.database.producer.delete(self.definition, keys, partition=partition)

    def delete_where(self, predicate: str | pc.Expression, *, at: Moment | None = None) -> Deleted:
        """Delete the rows that match `predicate` at `at` (default: now), such as ``"age > 30 and city == 'Oslo'"``."""
        return self.database.producer.delete_where(self.definition, predicate, at=at)

    def transaction(self, *, vchannel: int = 0, keepalive_ms: int | None = None) -> Transaction:
        """Open a transaction block on one VChannel: its writes become visible at once or never."""
        return self.database.producer.transaction(self.definition, vchannel=vchannel, keepalive_ms=keepalive_ms)

    def batch(self, *, limits: BatchLimits | None = None) -> CollectionBatch:
        """Create an appender that batches small appends by size and time and returns a future for each."""
        from millrace.client.produce.batch_appender import CollectionBatch

        return CollectionBatch(self.definition, self.database.producer.batch(limits=limits))

    # --- reading ------------------------------------------------------------------------------------------------------

    def read(
        self,
        *,
        at: Moment | None = None,
        columns: ColumnNames | None = None,
        where: str | None = None,
        limit: int | None = None,
        order_by: ColumnNames | None = None,
        deadline: float | None = None,
    ) -> pa.Table:
        """Read the rows at `at`, or, without it, everything decided before the call.

        `at` is a time tick, a datetime or ISO 8601 text. `columns` selects columns, in that order. `where` is a
        predicate (``"city = 'Oslo' AND age >= 18"``), which also skips files and row groups. `order_by` sorts (``["age
        desc", "id"]``, nulls last); otherwise rows have no order. `limit` bounds the number of rows. Waits up to
        `deadline` seconds for the streaming node.

        Raises TickNotReached, TickTooOld, CollectionNotFound. Raises InvalidArgument if an option does not fit the
        columns.
        """
        return self.database.client.read(
            self.definition, at=at, columns=columns, where=where, limit=limit, order_by=order_by, deadline=deadline
        )

    def stream(self, **options: Unpack[ReadOptions]) -> pa.RecordBatchReader:
        """Read like :meth:`read`, batch by batch, in bounded memory: for collections larger than memory.

        DuckDB, Polars and pandas accept the reader. Close it, or read it to the end. Its batches raise TableDamaged,
        and LogUnavailable if the answer breaks off.
        """
        return self.database.client.stream(self.definition, **options)

    def count(self, *, at: Moment | None = None, where: str | None = None, deadline: float | None = None) -> int:
        """Count the rows. Reads none if the tables' logs have the number and no delete hides a row."""
        return self.database.client.count(self.definition, at=at, where=where, deadline=deadline)

    def to_pandas(self, **options: Unpack[ReadOptions]) -> pd.DataFrame:
        """Read into a pandas DataFrame without changing values (docs/types.md).

        Integers stay integers, and null is not NaN.

        Raises InvalidArgument for dates and timestamps beyond the years 1 to 9999.
        """
        from millrace.client.pandas_frame import pandas_frame

        return pandas_frame(self.read(**options))

    def to_polars(self, **options: Unpack[ReadOptions]) -> pl.DataFrame:
        """Read into a Polars DataFrame.

        Raises InvalidSettings if Polars is not installed, InvalidArgument for dates and timestamps beyond the years 1
        to 9999.
        """
        rows = self.read(**options)
        check_datetime_columns(rows, "Polars")
        return _library("polars", "to_pandas()").DataFrame(rows)

    def to_duckdb(
        self, connection: duckdb.DuckDBPyConnection | None = None, **options: Unpack[ReadOptions]
    ) -> duckdb.DuckDBPyRelation:
        """Read into a DuckDB relation of `connection`, or of DuckDB's default connection.

        Repeated queries see the same rows.

        Raises InvalidSettings if DuckDB is not installed.
        """
        found = _library("duckdb", "read()")
        return (found.default_connection() if connection is None else connection).from_arrow(self.read(**options))

    def dataset(self, *, at: Moment | None = None, deadline: float | None = None) -> CollectionDataset:
        """Return the rows as a pyarrow dataset, pinned to its tick.

        DuckDB and Polars ask it for the columns and rows of each query; repeated queries see the same rows. A query
        raises TableDamaged if VACUUM has removed a file since.
        """
        return self.database.client.dataset(self.definition, at=at, deadline=deadline)

    def scan_polars(self, *, at: Moment | None = None, deadline: float | None = None) -> pl.LazyFrame:
        """Return :meth:`dataset` as a Polars LazyFrame.

        Columns and filters are pushed down, except filters on floats and nested columns.

        Raises InvalidSettings if Polars is not installed.
        """
        from millrace.client.dataset import polars_scan

        lazy: pl.LazyFrame = polars_scan(_library("polars", "stream()"), self.dataset(at=at, deadline=deadline))
        return lazy

    def scan(
        self, *, start: DeliverPolicy | None = None, until: Moment | None = None, schema: SchemaMode = "written"
    ) -> Iterator[Change]:
        """Iterate over the inserts and deletes in the order in which they took effect on each VChannel.

        Starts at the beginning, or at `start` (:class:`All`, :class:`Latest`, :class:`StartAfterTick`), and continues
        with new changes until the iterator is closed or `until` is reached. Rows have the schema that they were written
        with; with `schema` "current" they have the collection's current fields and types. If the schema changes
        meanwhile, rows have the newer one from the first row that was written with it.
        """
        with self.database.client.consumer(
            self.definition,
            policy=start,
            until_tick=None if until is None else resolve_tick(until),
            schema=schema,
        ) as consumer:
            for delivery in consumer:
                yield from delivery.changes()
                consumer.acknowledge(delivery)

    def consume(
        self,
        *,
        group: str | None = None,
        start: DeliverPolicy | None = None,
        until: Moment | None = None,
        schema: SchemaMode = "written",
    ) -> Consumer:
        """Create a consumer of this collection's units.

        A `group` continues after what it has acknowledged; `start` applies only to its first start. `schema` is that of
        :meth:`scan`.

        Raises GroupBusy.
        """
        return self.database.client.consumer(
            self.definition,
            group=group,
            policy=start,
            until_tick=None if until is None else resolve_tick(until),
            schema=schema,
        )

    def changes(
        self,
        *,
        after: Moment | Mapping[str, Sequence[int]] | None = None,
        until: Moment | None = None,
        channels: Sequence[str] = (),
    ) -> ChangeStream:
        """Stream the changes as Arrow batches, each change exactly once.

        Store the stream's positions with the results to continue after a crash. `channels` restricts the stream to
        these VChannels or PChannels.
        """
        return self.database.client.changes(
            self.definition,
            channels=channels,
            after=after,
            until_tick=None if until is None else resolve_tick(until),
        )

    def changes_between(
        self, after: Moment | None = None, until: Moment | None = None, *, channels: Sequence[str] = ()
    ) -> pa.RecordBatchReader:
        """Read the changes after `after` (default: the beginning) up to `until` (default: now) as one finite stream.

        All batches have the collection's newest schema: use ``read_all()``, ``read_pandas()``, or pass the reader to
        DuckDB or Polars. Changes keep the order of each VChannel. `channels` is that of :meth:`changes`.

        The batches raise PositionTruncated if the WAL was trimmed after `after`.
        """
        definition = self.refresh().definition.restricted_to(channels)
        tick = self.database.client.current_tick(definition.pchannels) if until is None else resolve_tick(until)
        stream = self.database.client.changes(definition, after=after, until_tick=tick, schema=definition.schema)
        return stream.reader(definition.schema)

    # --- schema changes -----------------------------------------------------------------------------------------------

    def add_field(self, name: str, kind: str) -> None:
        """Add a nullable column, such as ``"int64?"``; existing rows have null in it.

        Raises InvalidArgument for other types.
        """
        self.alter(add={name: kind})

    def alter(
        self,
        *,
        drop_check: ColumnNames = (),
        drop_default: ColumnNames = (),
        drop: ColumnNames = (),
        rename: Mapping[str, str] | None = None,
        widen: Mapping[str, str] | None = None,
        relax: ColumnNames = (),
        add: SchemaSource | None = None,
        computed: Mapping[str, str] | None = None,
        order: ColumnNames = (),
        set_default: Mapping[str, Any] | None = None,
        add_check: Mapping[str, str] | None = None,
    ) -> int:
        """Change the schema at one tick and return its new version.

        The changes apply in the order of the parameters. `rename` and `widen` map a column to its new name and type,
        `relax` makes columns nullable, `add` takes what :func:`schema` takes, `computed` gives the expression of an
        added field, `order` names the first columns. A field inside a struct has a path: ``add={"address.zip":
        "string"}``, ``rename={"address.zip": "code"}``.

        Raises InvalidArgument if a change is not possible.
        """
        from millrace.client.nested_changes import resolve_paths

        made = alter_changes(
            drop_check=drop_check,
            drop_default=drop_default,
            drop=drop,
            rename=rename,
            widen=widen,
            relax=relax,
            add=add,
            computed=computed,
            order=order,
            set_default=set_default,
            add_check=add_check,
        )
        made = resolve_paths(made, lambda: self.refresh().schema)
        version = self.database.client.catalog.alter(self.refresh().name, made)
        self.refresh()
        return version

    def create_partition(self, name: str) -> None:
        """Add a partition. Raises AppendRejected (PARTITION_EXISTS)."""
        self.database.client.catalog.create_partition(self.refresh().name, name)
        self.refresh()

    def drop_partition(self, name: str) -> None:
        """Drop a partition with its rows. This cannot be undone."""
        self.database.client.catalog.drop_partition(self.refresh().name, name)
        self.refresh()

    def flush(self) -> dict[str, int]:
        """Seal and flush the growing segments. Returns by VChannel the tick of the flush, 0 if nothing grew."""
        return self.database.client.catalog.flush(self.refresh().name)


def _library(name: str, instead: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        raise InvalidSettings(f"{name} is not installed: pip install {name}, or use {instead}") from None
