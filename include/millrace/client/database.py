"""The public face of a deployment: a database of collections, here or behind a server.

    import millrace

    with millrace.connect() as db:
        users = db.create_collection("users", {"id": "int64", "name": "string?"}, key="id")
        users.insert([{"id": 1, "name": "Ada"}])
        print(users.read())

What it does is the client's (:mod:`millrace.client.client`): this is where a program begins, with one name for each thing.
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
    from millrace.client.produce.batch_appender import BatchLimits
    from millrace.client.produce.collection_batch import CollectionBatch


def connect(
    where: str | Path | None = None,
    *,
    token: str = "",
    roots: str | Path = "",
    start: bool = True,
    create: bool = False,
    settings: Settings | None = None,
) -> Database:
    """Connect to a deployment: the data folder `where` (default: $MILLRACE_DATA, or the user's own), or the server at
    ``grpc://host:port`` or ``grpc+tls://host:port``.

    A data folder's log server is started where none runs, unless `start` is False. `create` makes a deployment in a folder `where` that
    does not exist or holds something else; an empty folder and the default one need no `create`. A server asks for a `token` (default:
    $MILLRACE_SERVER_TOKEN); `roots` is a PEM file with the certificates to trust. `settings` go over those of the environment.
    Close it, or use it in a ``with`` block. Raises LogUnavailable where the server cannot be reached or must not be started,
    InvalidArgument if `where` is no deployment, InvalidSettings, UnsafeDataFolder.
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
        """What this stands upon, for who needs more than the face has."""
        self._producer: Producer | None = None

    def close(self) -> None:
        """Close what was opened of it: producers, consumers, the connection. Idempotent. Raises DeadlineExceeded where rows
        could not be sent."""
        self.client.close()

    # --- collections ------------------------------------------------------------------------------------------------------

    def collections(self) -> list[str]:
        """The names of the collections, sorted."""
        return sorted(each.name for each in self.client.catalog.collections())

    def __contains__(self, name: object) -> bool:
        return name in self.collections()

    def __getitem__(self, name: str) -> Collection:
        return self.collection(name)

    def collection(self, name: str) -> Collection:
        """The collection of that name. Raises CollectionNotFound."""
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
        """Make a collection; done when it can be written to. `schema_of` and what follows it up to `checks` are what
        :func:`schema` takes.

        Its rows are spread over `vchannels` by key: as many can be written beside each other. With `exist_ok` one of that name
        that has this schema, or had it before fields were added, is given as it is. Raises CollectionExists, InvalidArgument.
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
        """Drop a collection with all its rows, for good. Raises CollectionNotFound."""
        self.client.catalog.drop_collection(name)

    def attach(
        self,
        connection: duckdb.DuckDBPyConnection,
        names: Sequence[str] | None = None,
        *,
        at: Moment | None = None,
        deadline: float | None = None,
    ) -> int:
        """Give a DuckDB connection a view of each collection (or of those in `names`) under its name, all at one tick, which is
        returned: `at`, or now. A query reads the columns and row groups that it needs, with deletes applied; attach again for
        newer rows. Raises as :meth:`Collection.read`, and InvalidArgument for names that differ by case alone."""
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
        """Return one of the deployment's own Delta tables as a dataset of pyarrow, as it is now: ``wal``, ``segments``, ``collections/3``
        (docs/tables.md). For DuckDB, Polars and pandas.

        A collection's rows are those that the flusher has brought, deleted ones among them; :meth:`attach` and
        :meth:`Collection.read` apply the deletes. Raises TableNotFound, InvalidArgument if the deployment is behind a server elsewhere.
        """
        return self.client.table(name)

    # --- producers and consumers ------------------------------------------------------------------------------------------

    @property
    def producer(self) -> Producer:
        """The producer that the collections of this database write with."""
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
        """A producer of its own. One with a `producer_id` takes over from, and fences, who had that id before; with a folder
        `spool` rows wait there, at most `spool_bytes` of them, while the log cannot be reached. Raises SpoolBusy."""
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
        """A consumer of a collection by name, or of channels; see :meth:`Collection.consume`."""
        return self.client.consumer(names, group=group, policy=start, schema=schema)

    def drop_group(self, group: str) -> None:
        """Forget a consumer group and where it stands; one that nobody has is no error. Raises GroupBusy while a consumer has it."""
        self.client.drop_group(group)


class Collection:
    """A collection of a :class:`Database`: its rows in and out. Thread-safe."""

    def __init__(self, database: Database, definition: Definition) -> None:
        self.database = database
        self.definition = definition
        """Schema versions, partitions and VChannels, as they were when this was asked for or last changed through it."""

    def __repr__(self) -> str:
        columns = ", ".join(f"{each.name}: {each.type}{'?' * each.nullable}" for each in self.schema.fields)
        return f"<Collection {self.name!r} ({columns}), key {self.schema.primary_key!r}>"

    @property
    def name(self) -> str:
        return self.definition.name

    @property
    def id(self) -> int:
        """Its number: the name of its tables' folders."""
        return self.definition.id

    @property
    def schema(self) -> CollectionSchema:
        """The newest schema that is known here."""
        return self.definition.schema

    @property
    def partitions(self) -> list[str]:
        return list(self.definition.partitions)

    def refresh(self) -> Collection:
        """Ask for the definition anew: somebody else may have changed it. Raises CollectionNotFound, also if it was dropped
        and another has its name."""
        self.definition = self.database.client.current_definition(self.definition)
        return self

    # --- writing ----------------------------------------------------------------------------------------------------------

    def insert(
        self,
        rows: Rows,
        *,
        partition: str | None = None,
        partition_by: str | None = None,
        raise_rejected: bool = True,
        evolve: bool = False,
    ) -> Written:
        """Append rows: a DataFrame or relation of any library, Arrow, a list of dicts, dataclass instances or models of pydantic, a
        dict of columns.

        Durable and judged when it returns; a key that is there already gets a second row (:meth:`upsert` replaces it). Raises
        as :meth:`millrace.client.produce.producer.Producer.insert`. With `evolve` the collection gets the columns that it does
        not have, and wider types where values do not fit, first: for everybody.
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
        """Replace the rows of these keys, and insert those that are new; a reader sees the old or the new row at any time. `evolve` as
        for :meth:`insert`."""
        written = self.database.producer.upsert(
            self.definition, rows, partition=partition, partition_by=partition_by, evolve=evolve
        )
        if evolve:
            self.refresh()
        return written

    def delete(self, keys: Keys, *, partition: str | None = None) -> Written:
        """Delete rows by key; a key without a row is no error."""
        return self.database.producer.delete(self.definition, keys, partition=partition)

    def delete_where(self, predicate: str | pc.Expression, *, at: Moment | None = None) -> Deleted:
        """Delete the rows that `predicate` hits at `at` (default: now), such as ``"age > 30 and city == 'Oslo'"``."""
        return self.database.producer.delete_where(self.definition, predicate, at=at)

    def transaction(self, *, vchannel: int = 0, keepalive_ms: int | None = None) -> Transaction:
        """A block whose inserts, upserts and deletes, on one VChannel, become visible together or never."""
        return self.database.producer.transaction(self.definition, vchannel=vchannel, keepalive_ms=keepalive_ms)

    def batch(self, *, limits: BatchLimits | None = None) -> CollectionBatch:
        """An appender that gathers many small appends by size and time and gives a future each."""
        from millrace.client.produce.collection_batch import CollectionBatch

        return CollectionBatch(self.definition, self.database.producer.batch(limits=limits))

    # --- reading ----------------------------------------------------------------------------------------------------------

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
        """The rows at `at` (a time tick, a datetime, ISO 8601 text); without one everything that was decided before the call.

        `columns` to give, in that order; rows for which `where` holds (``"city = 'Oslo' AND age >= 18"``), which files and row groups
        are left out by; in the order of `order_by` (``["age desc", "id"]``, nulls last), else in none; at most `limit`. Waits up to
        `deadline` seconds for the streaming node to have come that far. Raises TickNotReached, TickTooOld, CollectionNotFound,
        InvalidArgument for what the columns do not fit.
        """
        return self.database.client.read(
            self.definition, at=at, columns=columns, where=where, limit=limit, order_by=order_by, deadline=deadline
        )

    def stream(self, **options: Unpack[ReadOptions]) -> pa.RecordBatchReader:
        """:meth:`read`, batch by batch, in bounded memory: for collections that are larger than it. Close it, or take all of it.

        DuckDB, Polars and pandas take it as it is. Its batches raise TableDamaged, and LogUnavailable where the answer breaks off.
        """
        return self.database.client.stream(self.definition, **options)

    def count(self, *, at: Moment | None = None, where: str | None = None, deadline: float | None = None) -> int:
        """How many rows there are; none is read where the tables' logs say it and nothing hides one."""
        return self.database.client.count(self.definition, at=at, where=where, deadline=deadline)

    def to_pandas(self, **options: Unpack[ReadOptions]) -> pd.DataFrame:
        """:meth:`read` as a pandas DataFrame that says the same (docs/types.md): integers stay integers, and what is null is not NaN.

        Raises InvalidArgument for days and moments beyond the years 1 to 9999."""
        from millrace.client.pandas_frame import pandas_frame

        return pandas_frame(self.read(**options))

    def to_polars(self, **options: Unpack[ReadOptions]) -> pl.DataFrame:
        """:meth:`read` as a Polars DataFrame. Raises InvalidSettings where Polars is not installed, InvalidArgument for days and moments
        beyond the years 1 to 9999."""
        rows = self.read(**options)
        check_datetime_columns(rows, "Polars")
        return _library("polars", "to_pandas()").DataFrame(rows)

    def to_duckdb(
        self, connection: duckdb.DuckDBPyConnection | None = None, **options: Unpack[ReadOptions]
    ) -> duckdb.DuckDBPyRelation:
        """:meth:`read` as a DuckDB relation, of `connection` or of DuckDB's default one; as often as it is asked, it says the same.
        Raises InvalidSettings where DuckDB is not installed."""
        found = _library("duckdb", "read()")
        return (found.default_connection() if connection is None else connection).from_arrow(self.read(**options))

    def dataset(self, *, at: Moment | None = None, deadline: float | None = None) -> CollectionDataset:
        """:meth:`read` as a dataset of pyarrow, pinned to its tick: what takes such ones (DuckDB, Polars) asks it for the columns and
        rows of each query, and as often as it is asked, it says the same. A file that VACUUM took since is TableDamaged."""
        return self.database.client.dataset(self.definition, at=at, deadline=deadline)

    def scan_polars(self, *, at: Moment | None = None, deadline: float | None = None) -> pl.LazyFrame:
        """:meth:`dataset` as a Polars LazyFrame: its columns and filters are pushed down, but for filters of floats and nested columns.
        Raises InvalidSettings where Polars is not installed."""
        from millrace.client.dataset import polars_scan

        lazy: pl.LazyFrame = polars_scan(_library("polars", "stream()"), self.dataset(at=at, deadline=deadline))
        return lazy

    def scan(
        self, *, start: DeliverPolicy | None = None, until: Moment | None = None, schema: SchemaMode = "written"
    ) -> Iterator[Change]:
        """What was inserted and deleted, in the order in which it took effect a VChannel: everything, or from `start` on
        (:class:`All`, :class:`Latest`, :class:`StartAfterTick`). Goes on with what comes until it is closed, or up to `until`.

        Rows have the fields of the schema that they were written with; with `schema` "current" those that the collection has now, by
        their names and types of now. Where it changes meanwhile, from the first row on that is written with a newer one."""
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
        """A consumer of its units. A `group` goes on behind what it has acknowledged; `start` counts for its first time alone; `schema`
        as for :meth:`scan`. Raises GroupBusy."""
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
        """Its changes as Arrow batches, with positions to keep beside the results: each change once, across kills. Of `channels`
        alone, which are VChannels of it or PChannels, where some are named."""
        return self.database.client.changes(
            self.definition,
            channels=channels,
            after=after,
            until_tick=None if until is None else resolve_tick(until),
        )

    def changes_between(
        self, after: Moment | None = None, until: Moment | None = None, *, channels: Sequence[str] = ()
    ) -> pa.RecordBatchReader:
        """:meth:`changes` behind `after` (default: from the beginning) up to `until` (default: now) as one stream of batches that
        ends, all in the collection's newest schema: ``read_all()``, ``read_pandas()``, or what DuckDB and Polars take. In the order of
        each VChannel; of `channels` alone, as :meth:`changes`. Its batches raise PositionTruncated where the WAL was trimmed behind `after`."""
        definition = self.refresh().definition.restricted_to(channels)
        tick = self.database.client.current_tick(definition.pchannels) if until is None else resolve_tick(until)
        stream = self.database.client.changes(definition, after=after, until_tick=tick, schema=definition.schema)
        return stream.reader(definition.schema)

    # --- changing ---------------------------------------------------------------------------------------------------------

    def add_field(self, name: str, kind: str) -> None:
        """Add a column that may be null, such as ``"int64?"``: rows that are there have null in it. Raises InvalidArgument for others."""
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
        """Change the schema, all of it at one tick, in the order of these names; the new version. `rename` and `widen` map a column
        to its new name and type, `relax` lets columns be null, `add` takes what :func:`schema` does, `order` names the first columns.
        A field inside of a struct goes by its path: ``add={"address.zip": "string"}``, ``rename={"address.zip": "code"}``; `computed`
        says of what an added field is made. Checks and defaults go first, and come last. Raises InvalidArgument for what cannot be."""
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
        """Drop a partition with its rows, for good."""
        self.database.client.catalog.drop_partition(self.refresh().name, name)
        self.refresh()

    def flush(self) -> dict[str, int]:
        """Seal and flush what grows; by VChannel the tick of it, 0 where nothing grew."""
        return self.database.client.catalog.flush(self.refresh().name)


def _library(name: str, instead: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        raise InvalidSettings(f"{name} is not installed: pip install {name}, or take {instead}") from None
