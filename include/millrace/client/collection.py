"""A collection of a database: writes, reads and schema changes. Made by :class:`millrace.client.database.Database`."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final, Unpack

import pyarrow as pa
import pyarrow.compute as pc

from millrace.base.errors import InvalidArgument
from millrace.base.extras import import_optional
from millrace.base.metrics import Metrics
from millrace.catalog.collection import CollectionInfo
from millrace.client.consume.consumer import Consumer, StreamOptions
from millrace.client.consume.delivery import Change, SchemaMode
from millrace.client.consume.queue_consumer import QueueConsumer, QueueOptions
from millrace.client.display import collection_html, collection_line, fields_table
from millrace.client.produce.rows import Keys, Rows, key_rows, one_or_more_keys
from millrace.client.produce.transaction import Transaction
from millrace.client.produce.written import Deleted, Written
from millrace.client.schemas import SchemaSource, alter_changes
from millrace.message.bodies import parse_body
from millrace.message.datetime_range import check_datetime_columns
from millrace.message.ids import Moment, resolve_span, resolve_tick, tick_physical_ms
from millrace.message.model import ImmutableMessage
from millrace.message.schema import CollectionSchema
from millrace.message.types import MessageType
from millrace.rpc.selection import ColumnNames, ReadOptions, Selection, SelectionOptions
from millrace.wal.scanner import DeliverPolicy, StartAfterTick, TypeFilter

if TYPE_CHECKING:
    import duckdb
    import pandas as pd
    import polars as pl

    from millrace.client.consume.changes import ChangeStream
    from millrace.client.database import Database
    from millrace.client.dataset import CollectionDataset
    from millrace.client.produce.batch_appender import BatchAppender, BatchLimits

_OPERATION_NAMES: Final = {
    MessageType.CREATE_COLLECTION: "create",
    MessageType.SCHEMA_CHANGE: "alter",
    MessageType.CREATE_PARTITION: "create partition",
    MessageType.DROP_PARTITION: "drop partition",
    MessageType.IMPORT: "import",
    MessageType.MANUAL_FLUSH: "flush",
}
_OPERATIONS: Final = TypeFilter(frozenset(_OPERATION_NAMES))
_HISTORY: Final = pa.schema(
    [
        ("tick", pa.int64()),
        ("time", pa.timestamp("ms", "UTC")),
        ("operation", pa.string()),
        ("details", pa.string()),
    ]
)


class Collection:
    """A collection of a :class:`Database`: writes, reads and schema changes. Thread-safe."""

    def __init__(self, database: Database, definition: CollectionInfo) -> None:
        self.database = database
        self.definition = definition
        """Schema versions, partitions and VChannels as of the last refresh, or the last change through this object."""

    def __repr__(self) -> str:
        return collection_line(self.name, self.schema)

    def _repr_html_(self) -> str:
        return collection_html(self.definition)

    def __len__(self) -> int:
        """Count the rows, as :meth:`count` does now."""
        return self.count()

    def __bool__(self) -> bool:
        return True  # without rows too: a test of a handle must not read

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
        self.definition = self._current()
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

    def batch(self, *, limits: BatchLimits | None = None) -> BatchAppender:
        """Create an appender that batches small appends by size and time and returns a future for each."""
        return self.database.producer.batch(collection=self.definition, limits=limits)

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
        metrics: Metrics | None = None,
    ) -> pa.Table:
        """Read the rows at `at`, or, without it, everything decided before the call.

        `at` is a time tick, a datetime or ISO 8601 text. `columns` selects columns, in that order. `where` is a
        predicate (``"city = 'Oslo' AND age >= 18"``), which also skips files and row groups. `order_by` sorts (``["age
        desc", "id"]``, nulls last); otherwise rows have no order. `limit` bounds the number of rows. Waits up to
        `deadline` seconds (default: ``read_deadline``) for the streaming node. `metrics` record the duration.

        What the ``wal`` table lacks comes from the append host, which has judged it already, if its buffer of the last
        seconds has it: at most 32 MiB. Otherwise the read waits for the streaming node. If none runs on this host, a
        read of a data folder takes the rest from the log, in this process: it judges all entries of the collection's
        PChannels after the ``wal`` table again, at about the speed of the streaming node, and holds the collection's
        messages among them in memory, at most 1 GiB.

        Appends a tick to each PChannel of the collection, so that an idle one does not delay the read. Needs no JVM;
        :func:`millrace.spark.read` does the same for Spark.

        Raises TickNotReached, TickTooOld, CollectionNotFound. Raises InvalidArgument if an option does not fit the
        columns.
        """
        began = time.perf_counter()
        tick, seconds, selection = self._selection(
            at=at, columns=columns, where=where, limit=limit, order_by=order_by, deadline=deadline
        )
        rows = self.database.tables.read(self._current(), at=tick, seconds=seconds, selection=selection)
        if metrics is not None:
            metrics.read_duration_seconds.observe(time.perf_counter() - began)
        return rows

    def get(
        self,
        keys: Any,
        *,
        at: Moment | None = None,
        columns: ColumnNames | None = None,
        deadline: float | None = None,
    ) -> pa.Table:
        """Read the rows of primary keys at `at`, or, without it, everything decided before the call.

        `keys` is one key (``17``, ``"LX318"``; a tuple if the key has several fields) or a list of them, an Arrow
        array, or rows with the key's columns. Returns what :meth:`read` with a predicate on the key returns, in no
        order: a key may have several rows, or none. The cost follows the keys, not the collection: the key index of a
        published collection says where their rows are. `at`, `columns` and `deadline` are
        those of :meth:`read`.

        Raises the errors of :meth:`read`, and InvalidArgument if `keys` are not keys of this collection.
        """
        tick, seconds, selection = self._selection(at=at, columns=columns, deadline=deadline)
        definition = self.database.definition(self.definition, cached=True)
        found = key_rows(one_or_more_keys(keys, definition.schema), definition)
        return self.database.tables.get(definition, found, at=tick, seconds=seconds, columns=selection.columns)

    def stream(self, **options: Unpack[ReadOptions]) -> pa.RecordBatchReader:
        """Read like :meth:`read`, batch by batch, in bounded memory: for collections larger than memory.

        DuckDB, Polars and pandas accept the reader. Close it, or read it to the end. Its batches raise TableDamaged,
        and LogUnavailable if the answer breaks off.
        """
        tick, seconds, selection = self._selection(**options)
        return self.database.tables.stream(self._current(), at=tick, seconds=seconds, selection=selection)

    def count(self, *, at: Moment | None = None, where: str | None = None, deadline: float | None = None) -> int:
        """Count the rows. Reads none if the tables' logs have the number and no delete hides a row."""
        tick, seconds, selection = self._selection(at=at, where=where, deadline=deadline)
        return self.database.tables.count(self._current(), at=tick, seconds=seconds, where=selection.where)

    def delta_uri(self) -> str:
        """Return the URI of the published table: plain Delta, for every engine that reads deletion vectors.

        It has the rows that were visible at its tick (docs/published-tables.md); :meth:`read` has newer ones. It
        belongs to this collection: one that is dropped and created again has another.

        Raises TableNotFound while it is not published, StoreCannotPublish, CollectionNotFound. Raises InvalidArgument
        if the deployment is on a remote server.
        """
        return self.database.tables.published_uri(self._current())

    def head(self, rows: int = 5) -> pa.Table:
        """Read a few rows, in no order; :meth:`read` with a `limit` says more."""
        return self.read(limit=rows)

    def describe(self) -> pa.Table:
        """Return one row for each field of the schema: field, type, nullable, key, default, computed."""
        return fields_table(self.refresh().schema)

    def history(
        self,
        keys: Any = None,
        *,
        after: Moment | None = None,
        until: Moment | None = None,
        columns: ColumnNames | None = None,
        deadline: float | None = None,
    ) -> pa.Table:
        """Return what happened to the rows of primary keys, or without `keys` to the collection as a whole.

        `keys` are those of :meth:`get`. Their history has a row for each change, oldest first: the fields (`columns`
        selects some), ``_change`` (``insert``, ``upsert``; ``delete`` and ``retract`` have only the key), ``_time``
        (UTC), ``_partition_id``, ``_vchannel``, ``_time_tick``, ``_write_tick``. ``retract`` is DDL that removed rows
        of the key: a dropped partition, a replacing import.

        The collection's history has a row for each operation, oldest first: tick, time (UTC), operation (``create``,
        ``alter``, ``create partition``, ``drop partition``, ``import``, ``flush``) and details (JSON). An operation has
        a tick on each VChannel; this is that of the first.

        Both are of after `after` up to `until` (default: all, up to now). :meth:`get` with `at` reads the rows as of a
        moment.

        Cost: with keys, that of :meth:`get`, and files whose ticks lie outside the bounds cost nothing. Without, a scan
        of the first VChannel's messages in the WAL; no rows are decoded.

        Raises TickTooOld if compaction or retention removed changes of keys after `after`; the message names the
        earliest tick that works. Without keys, raises PositionTruncated if the WAL was trimmed after `after`. Raises
        InvalidArgument, and the errors of :meth:`get`.
        """
        if keys is not None:
            begin, end = resolve_span(after, until)
            tick, seconds, selection = self._selection(at=end, columns=columns, deadline=deadline)
            definition = self.database.definition(self.definition, cached=True)
            found = key_rows(one_or_more_keys(keys, definition.schema), definition)
            return self.database.tables.history(
                definition, found, after=begin, until=tick, seconds=seconds, columns=selection.columns
            )
        if columns is not None or deadline is not None:
            raise InvalidArgument("columns and deadline are for the history of keys: give keys")
        definition = self.refresh().definition
        last = self.database.current_tick(definition.pchannels) if until is None else resolve_tick(until)
        start = None if after is None else StartAfterTick(resolve_tick(after))
        with self.database.consumer(
            definition.vchannels[:1], start=start, until=last, filters=[_OPERATIONS]
        ) as consumer:
            operations = [_operation(message) for delivery in consumer for message in delivery.bodies]
        return pa.Table.from_pylist(operations, schema=_HISTORY)

    def _current(self) -> CollectionInfo:
        """Return the current definition. Raises CollectionNotFound, also if the name is another collection's now."""
        return self.database.definition(self.definition)

    def _selection(
        self, *, at: Moment | None = None, deadline: float | None = None, **selected: Unpack[SelectionOptions]
    ) -> tuple[int | None, float, Selection]:
        """Return the tick, the seconds to wait and the selection. Raises InvalidArgument."""
        seconds = self.database.settings.read_deadline if deadline is None else deadline
        return None if at is None else resolve_tick(at), seconds, Selection.of(**selected)

    def to_pandas(self, **options: Unpack[ReadOptions]) -> pd.DataFrame:
        """Read into a pandas DataFrame without changing values (docs/types.md).

        Integers stay integers, and null is not NaN.

        Raises InvalidSettings if pandas is not installed, InvalidArgument for dates and timestamps beyond the years 1
        to 9999.
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
        return import_optional("polars").DataFrame(rows)

    def to_duckdb(
        self, connection: duckdb.DuckDBPyConnection | None = None, **options: Unpack[ReadOptions]
    ) -> duckdb.DuckDBPyRelation:
        """Read into a DuckDB relation of `connection`, or of DuckDB's default connection.

        Repeated queries see the same rows.

        Raises InvalidSettings if DuckDB is not installed.
        """
        found = import_optional("duckdb")
        from millrace.client.dataset import duckdb_columns

        rows = self.read(**options)
        relation = (found.default_connection() if connection is None else connection).from_arrow(rows)
        columns = duckdb_columns(rows.schema)
        return relation if columns == "*" else relation.project(columns)

    def dataset(self, *, at: Moment | None = None, deadline: float | None = None) -> CollectionDataset:
        """Return the rows as a pyarrow dataset, pinned to its tick.

        DuckDB and Polars ask it for the columns and rows of each query; repeated queries see the same rows. A query
        raises FileReplaced if its files were replaced for longer than ``file_retention``.
        """
        tick, seconds, _ = self._selection(at=at, deadline=deadline)
        return self.database.tables.dataset(self._current(), at=tick, seconds=seconds)

    def scan_polars(self, *, at: Moment | None = None, deadline: float | None = None) -> pl.LazyFrame:
        """Return :meth:`dataset` as a Polars LazyFrame.

        Columns and filters are pushed down, except filters on floats and nested columns.

        Raises InvalidSettings if Polars is not installed.
        """
        from millrace.client.dataset import polars_scan

        lazy: pl.LazyFrame = polars_scan(import_optional("polars"), self.dataset(at=at, deadline=deadline))
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
        with self.consume(start=start, until=until, schema=schema) as consumer:
            for delivery in consumer:
                yield from delivery.changes()
                consumer.acknowledge(delivery)

    def consume(self, **options: Unpack[StreamOptions]) -> Consumer:
        """Create a consumer of this collection's units.

        A `group` continues after what it has acknowledged; `start` applies only to its first start. The consumers of a
        group divide the collection's VChannels. :meth:`Database.consumer` explains the options.

        Raises GroupBusy if `exclusive` and another consumer of the group runs.
        """
        return self.database.consumer(self.definition, **options)

    def queue(self, **options: Unpack[QueueOptions]) -> QueueConsumer:
        """Create a consumer that competes with the others of its `group` for this collection's rows, as tasks.

        :meth:`Database.consumer` with ``mode="queue"`` explains the options.
        """
        return self.database.consumer(self.definition, mode="queue", **options)

    def changes(
        self,
        *,
        after: Moment | Mapping[str, Sequence[int]] | None = None,
        until: Moment | None = None,
        channels: Iterable[str] = (),
        schema: CollectionSchema | None = None,
        metrics: Metrics | None = None,
        principals: bool = False,
    ) -> ChangeStream:
        """Stream the changes as Arrow batches, each change exactly once; the stream is closed with the database.

        The stream starts at the collection's beginning, after a tick or moment, or at an earlier stream's `positions`
        (as they were, or parsed from JSON): store them with the results to continue after a crash. It runs until it is
        closed or has returned everything up to `until`. `channels` restricts the stream to these VChannels or
        PChannels. With a `schema`, a version of the collection's, all batches have it; otherwise a batch has the schema
        at the tick of its last row. With `principals`, batches end with the column `_principal`: the name of the token
        that wrote the change, null if its entry has no name.

        Raises InvalidArgument. A poll raises PositionTruncated if the WAL was trimmed after `after`.
        """
        from millrace.client.consume.changes import ChangeSources, ChangeStream

        definition = self.definition.restricted_to(channels)
        tables = self.database.tables
        sources = ChangeSources(
            tables.wal_opener(definition.vchannels),
            self.database.shared_tail,
            tables.imports(),
            tables.changes_start,
            tables.uncommitted(),
            self.database.settings.read_deadline,
        )
        tick = None if until is None else resolve_tick(until)
        made = ChangeStream(
            definition, sources, after=after, until_tick=tick, schema=schema, metrics=metrics, principals=principals
        )
        self.database._opened(made)
        return made

    def changes_between(
        self,
        after: Moment | None = None,
        until: Moment | None = None,
        *,
        channels: Sequence[str] = (),
        principals: bool = False,
    ) -> pa.RecordBatchReader:
        """Read the changes after `after` (default: the beginning) up to `until` (default: now) as one finite stream.

        All batches have the collection's newest schema: use ``read_all()``, ``read_pandas()``, or pass the reader to
        DuckDB or Polars. Changes keep the order of each VChannel. `channels` and `principals` are as in
        :meth:`changes`.

        The batches raise PositionTruncated if the WAL was trimmed after `after`.
        """
        definition = self.refresh().definition.restricted_to(channels)
        tick = self.database.current_tick(definition.pchannels) if until is None else resolve_tick(until)
        stream = self.changes(
            after=after, until=tick, channels=channels, schema=definition.schema, principals=principals
        )
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
        version = self.database.catalog.alter(self.refresh().name, made)
        self.refresh()
        return version

    def create_partition(self, name: str) -> None:
        """Add a partition. Raises AppendRejected (PARTITION_EXISTS)."""
        self.database.catalog.create_partition(self.refresh().name, name)
        self.refresh()

    def drop_partition(self, name: str) -> None:
        """Drop a partition with its rows. This cannot be undone."""
        self.database.catalog.drop_partition(self.refresh().name, name)
        self.refresh()

    def flush(self) -> dict[str, int]:
        """Seal and flush the growing segments. Returns by VChannel the tick of the flush, 0 if nothing grew."""
        return self.database.catalog.flush(self.refresh().name)


def _operation(message: ImmutableMessage) -> dict[str, Any]:
    """Return a row of :meth:`Collection.history`."""
    kind = MessageType(message.type)
    body = parse_body(kind, message.payload)
    details: dict[str, Any] = {}
    match kind:
        case MessageType.CREATE_COLLECTION:
            details = {"fields": [each.name for each in body["schema"].fields], "partitions": list(body["partitions"])}
        case MessageType.SCHEMA_CHANGE:
            details = json.loads(message.payload)
        case MessageType.IMPORT:
            files = body["files"]
            rows = sum(each["rows"] for each in files)
            details = {"id": body["import_id"], "files": len(files), "rows": rows, "replace": body["replace"]}
        case MessageType.CREATE_PARTITION:
            details = {"partition": body["name"]}
        case MessageType.DROP_PARTITION:
            details = {"partition_id": message.partition_id}
    return {
        "tick": message.time_tick,
        "time": datetime.fromtimestamp(tick_physical_ms(message.time_tick) / 1000, UTC),
        "operation": _OPERATION_NAMES[kind],
        "details": json.dumps(details),
    }
