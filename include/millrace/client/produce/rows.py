"""Rows to messages to entries: conversion to a schema, splitting by VChannel and partition, framing."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import date
from decimal import Decimal
from itertools import pairwise
from typing import Any, Final, TypeAlias, TypeVar
from uuid import UUID

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from millrace.base.errors import InvalidArgument
from millrace.catalog.collection import DEFAULT_PARTITION, CollectionInfo
from millrace.client.produce.column_conversion import (
    CONVERSION_ERRORS,
    array_of,
    from_arrow,
    from_python,
    needs_declared_type,
    object_fields,
)
from millrace.client.produce.frames import Frame, batches_of, is_from_library, reader_of
from millrace.message import builders
from millrace.message.keys import key_column, vchannel_index
from millrace.message.model import MutableMessage
from millrace.message.schema import CollectionSchema, FieldSpec

MESSAGE_BYTES: Final = 1 << 20
"""Approximate size of a message's rows."""

MESSAGE_ROWS: Final = 65_536

Rows: TypeAlias = Frame | Mapping[str, Sequence[Any]] | Sequence[Mapping[str, Any]] | Sequence[Any]
"""Rows in user types.

A DataFrame of any library, Arrow data, a dict of columns, or a list of dicts, dataclass instances or pydantic models.
"""

Keys: TypeAlias = pa.Array | pa.ChunkedArray | Sequence[Any] | Rows
"""Primary keys: values if the key has one field, else tuples in the key's order; or rows with the key's columns."""


def require_collection(collection: CollectionInfo) -> None:
    """Raise InvalidArgument if `collection` is not a definition, for example if it is a name."""
    if not isinstance(collection, CollectionInfo):
        raise InvalidArgument(
            f"a collection is a name or a definition, not {type(collection).__name__} ({collection!r:.80}): use"
            " client.collection(name)"
        )


def table_of(rows: Rows, schema: CollectionSchema | None = None) -> pa.Table:
    """Return all `rows` as one Arrow table with the columns that they have.

    `schema` gives the types that objects do not imply: whether a dict is a struct or a map, for example.

    Raises InvalidArgument if `rows` are not rows.
    """
    if isinstance(rows, pa.Table):
        return rows
    if isinstance(rows, pa.RecordBatch):
        return pa.Table.from_batches([rows])
    if isinstance(rows, Mapping):
        return _columns(rows, schema)
    if isinstance(rows, list | tuple) and not any(isinstance(each, pa.RecordBatch | pa.Table) for each in rows):
        return _columns(rows_to_columns(rows, schema), schema)
    batches = list(batches_of(rows, schema))
    if not batches and hasattr(rows, "__arrow_c_stream__"):
        return reader_of(rows).schema.empty_table()  # an empty frame still has columns
    if not batches:
        raise InvalidArgument("the stream of Arrow batches is empty, so its columns are unknown")
    return pa.Table.from_batches(batches)


def is_in_memory(rows: Rows) -> bool:
    """Return whether rows are in memory, and so converted as a whole; otherwise they are read batch by batch."""
    held = pa.Table | pa.RecordBatch | Mapping | list | tuple
    return isinstance(rows, held) or is_from_library(rows, "pandas") or is_from_library(rows, "polars")


def rows_to_columns(rows: Sequence[Any], schema: CollectionSchema | None = None) -> dict[str, list[Any]]:
    """Turn a list of rows into columns. A value that a row lacks is null, or the default in `schema`."""
    found: list[Mapping[str, Any]] = []
    for place, row in enumerate(rows):
        mapping = object_fields(row)
        if mapping is None:
            raise InvalidArgument(
                f"row {place} is {type(row).__name__}: rows are dicts, dataclass instances or pydantic models, a dict"
                " of columns, or a"
                " DataFrame (pandas, Polars, Spark, pyarrow, any object with __arrow_c_stream__)"
            )
        found.append(mapping)
    names = dict.fromkeys(name for row in found for name in row)
    absent = _defaults(schema, names) if schema is not None and schema.has_fill_values else {}
    return {name: [row.get(name, absent.get(name)) for row in found] for name in names}


def _defaults(schema: CollectionSchema, names: Iterable[str]) -> dict[str, Any]:
    from millrace.client.produce.defaults_and_checks import default_value

    return {each.name: default_value(each) for each in schema.fields if each.default is not None and each.name in names}


def _columns(columns: Mapping[str, Sequence[Any]], schema: CollectionSchema | None) -> pa.Table:
    wanted = {field.name: field.parsed_type for field in schema.fields} if schema else {}
    arrays: dict[str, pa.Array] = {}
    for name, values in columns.items():
        kind = wanted.get(name)
        try:
            if kind is not None and needs_declared_type(kind) and not isinstance(values, pa.Array | pa.ChunkedArray):
                arrays[name] = from_python(values, kind)
            else:
                arrays[name] = values if isinstance(values, pa.ChunkedArray) else array_of(values)
        except CONVERSION_ERRORS as error:
            if kind is not None and needs_declared_type(kind):
                raise InvalidArgument(f"the column {name!r} is not {kind.text}: {error}") from None
            raise InvalidArgument(f"the column {name!r} is not a list of values of one type: {error}") from None
    try:
        return pa.table(arrays)
    except (pa.ArrowException, TypeError, ValueError) as error:
        raise InvalidArgument(f"these columns make no table: {error}") from None


def conform(rows: Rows, collection: CollectionInfo, *, ruled: bool = True) -> pa.Table:
    """Return `rows` with the collection's columns, in its order and types.

    A missing column gets its default or computed value, else null; a generated key is created. Without `apply_rules`,
    for rows that were stored before, defaults and computed values are null, and checks are not applied.

    Raises InvalidArgument, which names the column or says what is accepted; CheckViolated.
    """
    require_collection(collection)
    table = table_of(rows, collection.schema)
    schema = collection.schema.arrow()
    if not table.num_columns and not table.num_rows:  # an empty list of rows has no columns
        return schema.empty_table()
    given, known = table.column_names, frozenset(schema.names)
    if len(given) > len(set(given)):
        twice = [name for name, times in Counter(given).items() if times > 1]
        raise InvalidArgument(f"the rows have two columns {twice[0]!r}: give each column once")
    unknown = [name for name in given if name not in known]
    if unknown:
        raise InvalidArgument(
            f"collection {collection.name!r} has no column {unknown[0]!r}; it has {', '.join(schema.names)}"
        )
    table = with_generated_keys(table, collection.schema)
    if ruled and collection.schema.has_fill_values:
        from millrace.client.produce.defaults_and_checks import with_defaults

        table = with_defaults(table, collection.schema)
    columns: list[Any] = []
    there = frozenset(table.column_names)
    for column, field in zip(schema, collection.schema.fields, strict=True):
        if column.name not in there:
            if not column.nullable and field.computed is None:
                raise InvalidArgument(f"the column {column.name!r} is missing, and it is not nullable")
            columns.append(pa.nulls(len(table), column.type))
            continue
        columns.append(_fitted(table.column(column.name), field))
    found = pa.Table.from_arrays(columns, schema=schema)
    if ruled and collection.schema.has_row_rules:
        from millrace.client.produce.defaults_and_checks import compute_and_check

        return compute_and_check(found, collection.schema, set(there))
    return found


def with_generated_keys(table: pa.Table, schema: CollectionSchema) -> pa.Table:
    """Return `table` with a key for each row without one, if the collection's key is generated.

    The key is a UUID of version 7 (RFC 9562).

    The key is created before the row is appended, so a repeated append has the same key.
    """
    if not schema.generated_key:
        return table
    [name] = schema.key_names
    if name not in table.column_names:
        return table.append_column(name, _uuids(len(table)))
    values = table[name]
    if not values.null_count:
        return table
    made = pc.if_else(pc.is_null(values), _uuids(len(table)), values.cast(pa.utf8()))
    return table.set_column(table.column_names.index(name), name, made)


def _uuids(count: int) -> pa.StringArray:
    octets = np.frombuffer(os.urandom(16 * count), np.uint8).reshape(count, 16).copy()
    octets[:, :6] = np.frombuffer((time.time_ns() // 1_000_000).to_bytes(6, "big"), np.uint8)
    octets[:, 6] = 0x70 | (octets[:, 6] & 0x0F)
    octets[:, 8] = 0x80 | (octets[:, 8] & 0x3F)
    digits = np.frombuffer(octets.tobytes().hex().encode(), np.uint8).reshape(count, 32)
    text = np.insert(digits, (8, 12, 16, 20), ord("-"), axis=1)
    offsets = np.arange(0, 36 * (count + 1), 36, dtype=np.int32)
    return pa.StringArray.from_buffers(count, pa.py_buffer(offsets), pa.py_buffer(text.tobytes()))


def _fitted(values: pa.ChunkedArray, field: FieldSpec) -> Any:
    try:
        found = from_arrow(values, field.parsed_type)
    except CONVERSION_ERRORS as error:
        raise InvalidArgument(f"the column {field.name!r} is not {field.type}: {error}") from None
    if not field.nullable and values.null_count and field.computed is None:
        raise InvalidArgument(f"the column {field.name!r} has nulls, and it is not nullable")
    return found


def last_of_each_key(table: pa.Table, key: Sequence[str]) -> pa.Table:
    """Return the last row of each key (of the fields `key`), in the order of the rows."""
    if len(table) < 2:
        return table
    codes = key_column(table, key).combine_chunks().dictionary_encode()
    codes = codes.chunk(0) if isinstance(codes, pa.ChunkedArray) else codes
    places = codes.indices.to_numpy(zero_copy_only=False)
    if len(codes.dictionary) == len(places):
        return table
    last = np.zeros(len(codes.dictionary), dtype=np.int64)
    last[places] = np.arange(len(places))  # for equal indexes, the last assignment wins
    return table.take(pa.array(np.sort(last)))


def partition_id(collection: CollectionInfo, name: str) -> int:
    """Return the id of a partition by name. Raises InvalidArgument, which lists the partitions."""
    try:
        return collection.partitions[name]
    except KeyError:
        known = ", ".join(collection.partitions)
        raise InvalidArgument(f"collection {collection.name!r} has no partition {name!r}; it has {known}") from None


def partition_of(collection: CollectionInfo, name: str | None) -> int:
    """Return the id of the partition `name`, or of the one for rows that name none. Raises InvalidArgument."""
    chosen = collection.default_partition if name is None else name
    if chosen is None:
        raise InvalidArgument(
            f"name the partition: collection {collection.name!r} has no {DEFAULT_PARTITION}, but"
            f" {', '.join(collection.partitions) or 'none'}"
        )
    return partition_id(collection, chosen)


def split_rows(
    table: pa.Table,
    collection: CollectionInfo,
    partition: str | None,
    partition_by: str | None,
    *,
    every_row: bool = False,
) -> Iterator[tuple[str, int, pa.RecordBatch]]:
    """Yield the rows of each VChannel and partition, in their order, in batches of about MESSAGE_BYTES.

    For a collection that replaces, only the last of a call's rows with one key is kept: no message has a key twice.
    With `every_row`, all are kept.
    """
    if not len(table):
        return
    if collection.schema.replaces_duplicates and not every_row:
        table = last_of_each_key(table, collection.schema.key_names)
    homes = vchannel_index(key_column(table, collection.schema.key_names), len(collection.vchannels)).astype(np.int64)
    if partition_by is not None:
        if partition is not None:
            raise InvalidArgument("partition and partition_by: give one of them")
        if partition_by not in table.column_names:
            raise InvalidArgument(
                f"partition_by names no column of collection {collection.name!r}: {partition_by!r}; it has"
                f" {', '.join(table.column_names)}"
            )
        names = pc.dictionary_encode(table.column(partition_by)).combine_chunks()
        names = names.chunk(0) if isinstance(names, pa.ChunkedArray) else names
        if names.null_count:
            raise InvalidArgument(
                f"the column {partition_by!r} is null in {names.null_count} rows, which have no partition"
            )
        ids = np.array([partition_id(collection, name) for name in names.dictionary.to_pylist()], dtype=np.int64)
        partitions = ids[names.indices.to_numpy(zero_copy_only=False)]
    else:
        number = partition_of(collection, partition)
        if len(table) == 1:
            yield collection.vchannels[int(homes[0])], number, _one_batch(table)
            return
        partitions = np.full(len(table), number, dtype=np.int64)
    code = homes * (int(partitions.max()) + 1) + partitions
    order = np.argsort(code, kind="stable")
    bounds = [0, *(np.flatnonzero(np.diff(code[order])) + 1).tolist(), len(order)]
    batch = _one_batch(table)
    if len(bounds) > 2:
        batch = batch.take(pa.array(order))
    step = max(1, min(MESSAGE_ROWS, MESSAGE_BYTES * len(table) // max(table.nbytes, 1)))
    for start, stop in pairwise(bounds):
        row = int(order[start])
        for first in range(start, stop, step):
            part = batch.slice(first, min(step, stop - first))
            yield collection.vchannels[int(homes[row])], int(partitions[row]), part


def _one_batch(table: pa.Table) -> pa.RecordBatch:
    return table.combine_chunks().to_batches()[0]


def key_rows(keys: Keys, collection: CollectionInfo) -> pa.RecordBatch:
    """Return primary keys as rows of the key's fields, of shape ``(keys, fields)``.

    Raises InvalidArgument if they are not keys.
    """
    require_collection(collection)
    schema = collection.schema
    if isinstance(keys, str | bytes):
        raise InvalidArgument(f"keys are a list or an Arrow array, not {type(keys).__name__}: give [{keys!r}]")
    try:
        table = _key_table(keys, schema)
        missing = [name for name in schema.key_names if name not in table.column_names]
        if missing:
            raise InvalidArgument(f"the column {missing[0]!r} is missing")
        columns = [_fitted(table.column(field.name), field) for field in schema.key_fields]
    except InvalidArgument as error:
        wanted = ", ".join(f"{field.name} {field.type}" for field in schema.key_fields)
        raise InvalidArgument(f"these are not keys of collection {collection.name!r} ({wanted}): {error}") from None
    found = pa.Table.from_arrays(columns, schema=schema.key_arrow()).combine_chunks().to_batches()
    return found[0] if found else pa.RecordBatch.from_pylist([], schema.key_arrow())


def one_or_more_keys(keys: Any, schema: CollectionSchema) -> Any:
    """Return a single key as a list of one, and anything else as it is."""
    if len(schema.key_names) == 1:
        return [keys] if isinstance(keys, str | bytes | int | date | UUID | Decimal) else keys
    alone = isinstance(keys, tuple) and not any(isinstance(each, tuple | list | Mapping) for each in keys)
    return [keys] if alone else keys


def _key_table(keys: Keys, schema: CollectionSchema) -> pa.Table:
    """Return the keys as columns by name: from rows, from tuples, or from values if the key has one field."""
    names = schema.key_names
    if isinstance(keys, Mapping | pa.Table | pa.RecordBatch) or hasattr(keys, "columns"):
        return table_of(keys, schema)
    if isinstance(keys, pa.Array | pa.ChunkedArray):
        if len(names) == 1:
            return pa.table({names[0]: keys})
        if pa.types.is_struct(keys.type):
            chunks = keys.chunks if isinstance(keys, pa.ChunkedArray) else [keys]
            return pa.Table.from_batches([pa.RecordBatch.from_struct_array(each) for each in chunks])
    given: Any = keys
    try:
        values: list[Any] = list(given)
    except TypeError:
        raise InvalidArgument(f"{type(keys).__name__} is not a list of keys") from None
    if values and all(isinstance(each, Mapping) for each in values):
        return table_of(values, schema)
    if len(names) > 1:
        if not all(isinstance(each, tuple) and len(each) == len(names) for each in values):
            raise InvalidArgument(f"a key is a tuple of {len(names)} values ({', '.join(names)}), or a dict of them")
        return _columns({name: [each[place] for each in values] for place, name in enumerate(names)}, schema)
    return _columns({names[0]: given if hasattr(given, "__len__") else values}, schema)


def split_keys(keys: pa.RecordBatch, collection: CollectionInfo) -> Iterator[tuple[str, pa.RecordBatch]]:
    """Yield the keys of each VChannel, in their order, in batches of about MESSAGE_BYTES."""
    homes = vchannel_index(key_column(keys, collection.schema.key_names), len(collection.vchannels))
    step = max(1, min(MESSAGE_ROWS, MESSAGE_BYTES * len(keys) // max(keys.nbytes, 1)))
    for home in np.unique(homes).tolist():
        mine = keys.take(pa.array(np.flatnonzero(homes == home)))
        for first in range(0, len(mine), step):
            yield collection.vchannels[home], mine.slice(first, step)


def insert_message(
    rows: pa.RecordBatch,
    collection: CollectionInfo,
    *,
    vchannel: str,
    partition_id: int,
    txn_id: int = 0,
    upsert: bool = False,
) -> MutableMessage:
    """Build an Insert (or Upsert) of `rows`, without stamps."""
    return builders.insert(
        rows,
        vchannel=vchannel,
        collection_id=collection.id,
        partition_id=partition_id,
        schema_version=collection.schema_version,
        term=0,
        txn_id=txn_id,
        upsert=upsert,
    )


def delete_message(
    keys: pa.RecordBatch, collection: CollectionInfo, *, vchannel: str, partition_id: int = 0, txn_id: int = 0
) -> MutableMessage:
    """Build a Delete of `keys` (partition 0: in all partitions), without stamps."""
    return builders.delete(
        keys,
        schema=collection.schema,
        vchannel=vchannel,
        collection_id=collection.id,
        partition_id=partition_id,
        schema_version=collection.schema_version,
        term=0,
        txn_id=txn_id,
    )


ENTRY_BYTES: Final = 4 << 20
"""Approximate size of an entry."""

MAX_ENTRY_MESSAGES: Final = 1_000

_T = TypeVar("_T")


def group_into_entries(items: Iterable[_T], size: Callable[[_T], int]) -> Iterator[list[_T]]:
    """Yield runs of `items`, in order, that make one entry each: about ENTRY_BYTES and at most MAX_ENTRY_MESSAGES."""
    run: list[_T] = []
    held = 0
    for item in items:
        bytes_ = size(item)
        if run and (held + bytes_ > ENTRY_BYTES or len(run) == MAX_ENTRY_MESSAGES):
            yield run
            run, held = [], 0
        run.append(item)
        held += bytes_
    if run:
        yield run


def group_messages(messages: Iterable[MutableMessage]) -> Iterator[list[MutableMessage]]:
    """Yield runs of messages that make one entry each, by payload size."""
    return group_into_entries(messages, lambda message: len(message.payload))
