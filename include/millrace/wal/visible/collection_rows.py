"""Rows and deletes of collections from visible WAL messages, column by column.

The flusher writes them into the Delta tables. A read at a time tick adds those of the WAL's tail to the rows in the
tables.
Both use this module, so that a row is the same wherever it is read.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, date, datetime
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from millrace.base.errors import Malformed
from millrace.message.bodies import ImportSource, VChannelImport, parse_body
from millrace.message.ids import tick_physical_ms
from millrace.message.payload.rows import decode_many
from millrace.message.schema import CollectionSchema
from millrace.message.stored_columns import all_columns, key_schema, needed_columns, written_columns
from millrace.message.types import KEY_DELETING_TYPES, ROW_CARRYING_TYPES, MessageType
from millrace.wal.message_run import group_indices, payload_sizes
from millrace.wal.txn_buffer import VISIBLE_TICK
from millrace.wal.visible.catalog import WalCatalog, import_segments

ROW_COLUMNS: Final = pa.schema(
    [
        pa.field("_partition", pa.utf8()),  # the partition's name
        pa.field("_partition_id", pa.int64()),
        pa.field("_vchannel", pa.utf8()),
        pa.field("_segment_id", pa.int64()),
        pa.field("_time_tick", pa.int64()),  # from which on the row is visible
        pa.field("_write_tick", pa.int64()),  # the message's own: the order inside a transaction
    ]
)
"""Columns beside the fields in the rows table (and ``_date``)."""

DELETE_COLUMNS: Final = pa.schema(
    [
        pa.field("_partition_id", pa.int64()),  # 0: all partitions
        pa.field("_vchannel", pa.utf8()),
        pa.field("_time_tick", pa.int64()),
        pa.field("_write_tick", pa.int64()),
    ]
)
"""Columns beside the key in the deletes table (and ``_date``)."""

DECODE_BYTES: Final = 64 << 20
"""Payload bytes that are decoded at once. Bounds memory when a large transaction becomes visible."""

_ROWS: Final = tuple(kind.name for kind in ROW_CARRYING_TYPES)
_DELETES: Final = tuple(kind.name for kind in KEY_DELETING_TYPES)


def rows_file_schema(schema: CollectionSchema) -> pa.Schema:
    """Return the columns of rows-table files to which rows of this schema are written, in the order of its fields."""
    return pa.schema([*written_columns(schema), *ROW_COLUMNS])


def rows_read_schema(schema: CollectionSchema) -> pa.Schema:
    """Return the rows-table columns from which rows of this and earlier schemas are read."""
    return pa.schema([*needed_columns(schema), *ROW_COLUMNS])


def rows_table_schema(schema: CollectionSchema) -> pa.Schema:
    """Return all columns of the rows table, including those that no field uses any more."""
    return pa.schema([*all_columns(schema), *ROW_COLUMNS])


def deletes_file_schema(schema: CollectionSchema) -> pa.Schema:
    """Return the columns of the deletes table's files."""
    return pa.schema([*key_schema(schema), *DELETE_COLUMNS])


def tick_date(tick: int) -> date:
    """Return the UTC day of a time tick: the value of ``_date``."""
    return datetime.fromtimestamp(tick_physical_ms(tick) / 1000, UTC).date()


@dataclass(frozen=True, slots=True)
class VisibleRows:
    """Rows (or deletes) of one collection, in the order they became visible inside each VChannel."""

    collection_id: int
    is_delete: bool
    schema: CollectionSchema
    """The schema that the rows were written with."""
    rows: pa.Table
    """Columns of rows_file_schema(schema) or deletes_file_schema(schema): table columns, not fields."""


def collection_rows(
    stretch: pa.Table, catalog: WalCatalog, *, imports: ImportSource, deletes: bool | None = None
) -> Iterator[VisibleRows]:
    """Yield the rows (`deletes` False), the deletes (True) or both (None) of `stretch`, a slice from WalCatalog.apply.

    Ignores other message types. `imports` has the rows of imports. An Upsert is a delete of its keys in all partitions
    followed, with the same ticks, by its rows. Raises Malformed for a payload that the chain cannot have accepted (the
    WAL was altered), and StagedFileDamaged.
    """
    if not deletes and stretch.num_rows and stretch["type"][0].as_py() == MessageType.IMPORT.name:
        yield from imported_rows(stretch.slice(0, 1).to_pylist()[0], catalog, imports)
    wanted = {None: _ROWS + _DELETES, False: _ROWS, True: _DELETES}[deletes]
    dml = stretch.filter(pc.is_in(stretch["type"].cast(pa.utf8()), pa.array(wanted)))
    if dml.num_rows == 0:
        return
    dml = dml.unify_dictionaries().combine_chunks()
    kind = pc.dictionary_encode(dml["type"].cast(pa.utf8())).combine_chunks()
    version: npt.NDArray[np.int32] = dml["schema_version"].to_numpy()
    collection: npt.NDArray[np.int64] = dml["collection_id"].to_numpy()
    codes: npt.NDArray[Any] = kind.indices.to_numpy(zero_copy_only=False)
    for places in group_indices(collection, version, codes):
        part = dml if len(places) == dml.num_rows else dml.take(pa.array(places))
        collection_id = int(collection[places[0]])
        info = catalog.vchannels[part["vchannel"][0].as_py()]
        schema = info.schemas[int(version[places[0]]) - 1][1]
        kind_here = part["type"][0].as_py()
        wholly = kind_here in _ROWS
        keys_alone = deletes is True or not wholly
        for newest, piece in _as_of(part, catalog, schema, keys_alone=keys_alone):
            rows = _decode(piece, schema, catalog, rows=wholly, keys_alone=keys_alone, newest=newest)
            if deletes is not False and kind_here in _DELETES:
                yield VisibleRows(collection_id, True, schema, _keys(rows, schema) if wholly else rows)
            if deletes is not True and wholly:
                yield VisibleRows(collection_id, False, schema, rows)


def _as_of(
    part: pa.Table, catalog: WalCatalog, schema: CollectionSchema, *, keys_alone: bool
) -> Iterator[tuple[CollectionSchema | None, pa.Table]]:
    """Yield pieces of `part`, each with the later schema, if any, that has values for fields which `schema` lacks."""
    if keys_alone or catalog.vchannels[part["vchannel"][0].as_py()].newest_schema == schema:
        yield from ((None, piece) for piece in split_by_bytes(part, DECODE_BYTES))
        return
    from millrace.message.expression.rule_evaluation import missing_fields

    names = part["vchannel"].cast(pa.utf8())
    for name in pc.unique(names).to_pylist():  # a change may have reached only some of them
        mine = part.filter(pc.equal(names, name))
        newest = catalog.vchannels[name].schema_at(mine[VISIBLE_TICK][0].as_py())
        yield from (
            (newest if missing_fields(schema, newest) else None, piece) for piece in split_by_bytes(mine, DECODE_BYTES)
        )


def imported_rows(row: dict[str, Any], catalog: WalCatalog, imports: ImportSource) -> Iterator[VisibleRows]:
    """Yield the rows of an Import (a visible message as a dictionary) in the order of its files. Raises
    StagedFileDamaged.
    """
    body, info = parse_body(MessageType.IMPORT, row["payload"]), catalog.vchannels[row["vchannel"]]
    schema = info.schemas[row["schema_version"] - 1][1]
    segments = import_segments(row["segment_id"], body)
    newest = info.schema_at(row[VISIBLE_TICK])
    target = rows_file_schema(schema)
    named = VChannelImport(row["vchannel"], row["time_tick"], body["files"], schema, info.vchannels)
    for partition_id, rows in imports.rows(named):
        placed = {
            "_partition": info.partitions[partition_id],
            "_partition_id": partition_id,
            "_vchannel": row["vchannel"],
            "_segment_id": segments[partition_id],
            "_time_tick": row[VISIBLE_TICK],
            "_write_tick": row["time_tick"],
        }
        places = [pa.repeat(pa.scalar(placed[each.name], each.type), rows.num_rows) for each in ROW_COLUMNS]
        found = pa.Table.from_arrays([*rows.columns, *places], schema=target)
        if newest is not schema:
            found = _filled(found, rows, schema, newest, row["physical_ms"] * 1_000)
        yield VisibleRows(row["collection_id"], False, schema, found)


def _filled(
    found: pa.Table, rows: pa.RecordBatch, schema: CollectionSchema, newest: CollectionSchema, now: Any
) -> pa.Table:
    """Return `found` with columns for fields of `newest` that `schema` lacks. `rows` has the fields of `found`."""
    from millrace.message.expression.rule_evaluation import fill_values, missing_fields

    fields = missing_fields(schema, newest)
    for field, column in zip(fields, fill_values(rows, schema, newest, now, fields), strict=True):
        spec = pa.field(field.stored_columns[-1].name, column.type)
        found = found.add_column(found.num_columns - len(ROW_COLUMNS), spec, column)
    return found


def split_by_date(rows: pa.Table) -> Iterator[tuple[str, pa.Table]]:
    """Yield `rows` split by the UTC day of their visible tick, as (ISO date, rows)."""
    ticks: npt.NDArray[np.int64] = rows["_time_tick"].to_numpy()
    least, most = int(ticks.min()), int(ticks.max())
    if tick_date(least) == tick_date(most):
        yield tick_date(least).isoformat(), rows
        return
    days = (ticks >> 18) // 86_400_000
    for day in np.unique(days).tolist():
        chosen = rows.filter(pa.array(days == day))
        yield tick_date(chosen["_time_tick"][0].as_py()).isoformat(), chosen


def align_to_schema(rows: pa.Table, schema: pa.Schema) -> pa.Table:
    """Return `rows` with the columns of `schema`: missing ones are null, additional ones are dropped."""
    if rows.schema.names == schema.names:
        return rows.cast(schema)
    have = set(rows.column_names)
    columns = [
        rows[field.name].cast(field.type) if field.name in have else pa.nulls(rows.num_rows, field.type)
        for field in schema
    ]
    return pa.table(columns, schema=schema)


def union_schema(have: pa.Schema, more: pa.Schema) -> pa.Schema:
    """Return the columns of files that take rows of both: `have` itself if it has all of `more`."""
    if have.equals(more):
        return have
    lacking = [each for each in more if each.name not in have.names]
    places = [each for each in have if each.name in ROW_COLUMNS.names or each.name in DELETE_COLUMNS.names]
    fields = [each for each in have if each not in places]

    def of_both(each: pa.Field) -> pa.Field:
        there = each.name in more.names and each.name in have.names
        return each.with_nullable(not there or have.field(each.name).nullable or more.field(each.name).nullable)

    return pa.schema([*(of_both(each) for each in (*fields, *lacking)), *places])


def split_by_bytes(part: pa.Table, max_bytes: int) -> Iterator[pa.Table]:
    """Yield messages in pieces of at most `max_bytes` of payload, at least one message each."""
    if part["payload"].nbytes <= max_bytes:
        yield part
        return
    ends = np.cumsum(payload_sizes(part["payload"].combine_chunks()))
    start = 0
    while start < part.num_rows:
        before = int(ends[start - 1]) if start else 0
        stop = max(start + 1, int(np.searchsorted(ends, before + max_bytes, side="right")))
        yield part.slice(start, stop - start)
        start = stop


def _decode(
    part: pa.Table,
    schema: CollectionSchema,
    catalog: WalCatalog,
    *,
    rows: bool,
    keys_alone: bool,
    newest: CollectionSchema | None,
) -> pa.Table:
    """Decode messages of whole rows (`rows`) or of keys, with the columns that locate them: rows, or keys alone.

    With `newest`, fields that these rows lack get its values.
    """
    payloads = part["payload"].combine_chunks()
    if isinstance(payloads, pa.ChunkedArray):
        payloads = payloads.chunk(0)
    arrow = schema.arrow() if rows else schema.key_arrow()
    decoded = decode_many(payloads, arrow, columns=schema.key_arrow().names if keys_alone else None)
    if decoded.errors:
        place, words = next(iter(decoded.errors.items()))
        raise Malformed(f"the message at tick {part['time_tick'][place]} of the WAL does not decode: {words}")
    counts = decoded.counts
    single = bool((counts == 1).all())
    owner = None if single else np.repeat(np.arange(part.num_rows), counts)

    def spread(name: str) -> npt.NDArray[Any]:
        values: npt.NDArray[Any] = part[name].to_numpy()
        return values if owner is None else values[owner]

    channel = part["vchannel"].combine_chunks()
    channel = channel.chunk(0) if isinstance(channel, pa.ChunkedArray) else channel
    if not pa.types.is_dictionary(channel.type):
        channel = channel.dictionary_encode()
    indices = channel.indices.to_numpy(zero_copy_only=False)
    placed = {
        "_partition_id": pa.array(spread("partition_id")),
        "_vchannel": pa.DictionaryArray.from_arrays(
            pa.array(indices if owner is None else indices[owner]), channel.dictionary
        ).cast(pa.utf8()),
        "_time_tick": pa.array(spread(VISIBLE_TICK)),
        "_write_tick": pa.array(spread("time_tick")),
    }
    if not keys_alone:
        placed["_segment_id"] = pa.array(spread("segment_id"))
        placed["_partition"] = _partition_names(part, catalog, owner)
    target = deletes_file_schema(schema) if keys_alone else rows_file_schema(schema)
    fields = schema.key_arrow().names if keys_alone else schema.arrow().names
    places = [placed[name] for name in target.names[len(fields) :]]
    found = pa.Table.from_arrays([*(decoded.rows.column(name) for name in fields), *places], schema=target)
    if newest is None:
        return found
    return _filled(found, decoded.rows, schema, newest, spread("physical_ms") * 1_000)


def _keys(rows: pa.Table, schema: CollectionSchema) -> pa.Table:
    """Return the deletes that upserted rows imply: of their keys, in all partitions."""
    target = deletes_file_schema(schema)
    everywhere = pa.repeat(pa.scalar(0, pa.int64()), rows.num_rows)
    columns = [everywhere if field.name == "_partition_id" else rows[field.name] for field in target]
    return pa.Table.from_arrays(columns, schema=target)


def _partition_names(part: pa.Table, catalog: WalCatalog, owner: npt.NDArray[Any] | None) -> pa.Array:
    """Return the partition name of each row. All VChannels of a collection have the same names."""
    ids: npt.NDArray[np.int64] = part["partition_id"].to_numpy()
    unique, inverse = np.unique(ids, return_inverse=True)
    known: dict[int, str] = {}
    for channel in pc.unique(part["vchannel"].cast(pa.utf8())).to_pylist():
        known.update(catalog.vchannels[channel].partitions)
    names = pa.array([known[number] for number in unique.tolist()], pa.utf8())
    places = inverse if owner is None else inverse[owner]
    return names.take(pa.array(places))
