"""Documents as messages with the positions of the rows' documents, and the handling of rows that do not fit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Final, NamedTuple, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from millrace.base.errors import InvalidArgument
from millrace.catalog.collection import CollectionInfo
from millrace.client.produce.rows import (
    conform,
    delete_message,
    insert_message,
    key_rows,
    last_of_each_key,
    split_keys,
    split_rows,
)
from millrace.flows.conversion import DOCUMENT_ERRORS, KeyedRow, columns_of, removed_keys
from millrace.flows.plain import bodies, offsets
from millrace.flows.records import TASK_PUT, Action, Failure
from millrace.flows.sinks.collection.journal import PlacedMessage
from millrace.flows.sinks.collection.poison import parts_that_fit
from millrace.message.model import MESSAGE_FIELDS, MutableMessage
from millrace.message.payload.rows import decode_rows, encode_rows
from millrace.message.types import MessageType

Rows = list[tuple[Action, KeyedRow]]
_T = TypeVar("_T")
PLACE: Final = "_place"
"""A column with the positions of rows. No field has this name."""
_STEP: Final = "collection"


def placed_messages(rows: Sequence[tuple[Action, KeyedRow]], collection: CollectionInfo) -> list[PlacedMessage]:
    """Return messages that replace the rows of these keys, or delete them. The last row of each key counts.

    Raises InvalidArgument if a row does not fit.
    """
    last = {each.key: (each.key, each.row, action.record.offset) for action, each in rows}
    return _messages(list(last.values()), collection)


def replaced_messages(rows: Rows, collection: CollectionInfo) -> list[PlacedMessage]:
    """Return messages with the fitting rows that later ones of their keys replace. They are not for sending."""
    last = {each.key: action.record.offset for action, each in rows}
    if len(last) == len(rows):
        return []

    def made(part: Sequence[tuple[Action, KeyedRow]]) -> list[PlacedMessage]:
        return _messages([(each.key, each.row, action.record.offset) for action, each in part], collection, True)

    earlier = [(action, each) for action, each in rows if last[each.key] != action.record.offset]
    good, _ = separate(earlier, made)
    return made(good)


def _messages(
    rows: Sequence[tuple[Any, dict[str, Any] | None, int]], collection: CollectionInfo, every_row: bool = False
) -> list[PlacedMessage]:
    """Return messages of keys, rows and places. With `every_row`, a key may occur several times."""
    new = [(row, place) for _, row, place in rows if row is not None]
    gone = [(key, place) for key, row, place in rows if row is None]
    found: list[PlacedMessage] = []
    if new:
        table = conform([row for row, _ in new], collection)
        table = table.append_column(PLACE, pa.array([place for _, place in new], pa.int64()))
        found += placed_rows(table, collection, upsert=True, every_row=every_row)
    if gone:
        keys = key_rows([key for key, _ in gone], collection)
        found += placed_deletes(keys, [place for _, place in gone], collection)
    return found


class Placed(NamedTuple):
    """The messages of documents."""

    messages: list[PlacedMessage]
    replaced: list[PlacedMessage]
    """Messages of documents that later ones of their keys replace. They are not for sending."""


def placed_documents(documents: Sequence[Action], collection: CollectionInfo) -> Placed | None:
    """Return the messages of all `documents`, built by columns; None if one of them does not fit (see `fitting`)."""
    removed = np.fromiter((each is None for each in bodies(documents)), bool, len(documents))
    places = np.array(offsets(documents), np.int64)
    names = collection.schema.key_names
    try:
        rows = conform(columns_of(documents, collection.schema), collection)
        keys = key_rows(removed_keys(documents, collection.schema), collection)
    except DOCUMENT_ERRORS:
        return None
    put, gone = np.flatnonzero(~removed), np.flatnonzero(removed)
    order = np.concatenate([put, gone])
    # The last document of a key counts, whether it has a row or removes it.
    both = pa.concat_tables([rows.select(names).cast(keys.schema), pa.Table.from_batches([keys])])
    both = both.append_column(PLACE, pa.array(order)).take(pa.array(np.argsort(order)))
    last = np.isin(order, last_of_each_key(both, names)[PLACE].to_numpy())
    rows = rows.append_column(PLACE, pa.array(places[put]))

    def made(chosen: np.ndarray, *, every_row: bool) -> list[PlacedMessage]:
        of_rows, of_keys = chosen[: len(put)], chosen[len(put) :]
        found: list[PlacedMessage] = []
        if of_rows.any():
            found += placed_rows(rows.filter(pa.array(of_rows)), collection, upsert=True, every_row=every_row)
        if of_keys.any():
            found += placed_deletes(keys.filter(pa.array(of_keys)), places[gone[of_keys]].tolist(), collection)
        return found

    return Placed(made(last, every_row=False), made(~last, every_row=True))


def placed_deletes(keys: pa.RecordBatch, places: Sequence[int], collection: CollectionInfo) -> list[PlacedMessage]:
    """Return messages that delete the rows of `keys`, each with its document's position."""
    names = keys.schema.names
    whole = pa.RecordBatch.from_arrays([*keys.columns, pa.array(places, pa.int64())], names=[*names, PLACE])
    return [
        _placed(delete_message(part.select(names), collection, vchannel=vchannel), part)
        for vchannel, part in split_keys(whole, collection)
    ]


def placed_upserts(rows: pa.Table, places: Sequence[int], collection: CollectionInfo) -> list[PlacedMessage]:
    """Return messages that upsert conforming `rows`, each with its document's position."""
    return placed_rows(rows.append_column(PLACE, pa.array(places, pa.int64())), collection, upsert=True)


def placed_rows(
    rows: pa.Table,
    collection: CollectionInfo,
    *,
    upsert: bool,
    partitions: tuple[str | None, str | None] = (None, None),
    every_row: bool = False,
) -> list[PlacedMessage]:
    """Return messages that insert or upsert rows that conform to the collection except for their column PLACE.

    `partitions` are the partition of all rows, and the column with the name of a row's partition. With `every_row`, a
    message may have several rows of a key and is not for sending.
    """
    names = [name for name in rows.column_names if name != PLACE]
    return [
        _placed(insert_message(part.select(names), collection, vchannel=home, partition_id=number, upsert=upsert), part)
        for home, number, part in split_rows(rows, collection, *partitions, every_row=every_row)
    ]


def fitting(rows: Rows, collection: CollectionInfo) -> tuple[Rows, list[PlacedMessage], list[Failure]]:
    """Return the rows that fit with their messages, and a failure for each other row."""
    try:
        return rows, placed_messages(rows, collection), []
    except InvalidArgument:
        good, failures = separate(rows, lambda part: placed_messages(part, collection))
        return good, placed_messages(good, collection), failures


def separate(
    rows: Sequence[tuple[Action, _T]], fits: Callable[[Sequence[tuple[Action, _T]]], Any]
) -> tuple[list[tuple[Action, _T]], list[Failure]]:
    """Return the rows that `fits` accepts without InvalidArgument, in order, and a failure for each other one."""
    good: list[tuple[Action, _T]] = []
    failures: list[Failure] = []
    for part, error in parts_that_fit(rows, fits):
        if error is None:
            good += part
        else:
            failures.append(Failure(part[0][0].record, TASK_PUT, _STEP, error.code, str(error)[:500]))
    return good, failures


def rows_in(message: MutableMessage, collection: CollectionInfo) -> pa.RecordBatch:
    """Return the rows of a message of `collection`, or the keys that it deletes."""
    schema = collection.schemas[message.schema_version - 1]
    return decode_rows(message.payload, schema.key_arrow() if message.type == MessageType.DELETE else schema.arrow())


def earlier_row(
    message: PlacedMessage, held: Sequence[MutableMessage], collection: CollectionInfo
) -> list[PlacedMessage]:
    """Return a message with the last row in `held` that has the key of the one row of `message` and is before it.

    It is in the transaction of `message`. The list is empty if there is no such row.
    """
    names = collection.schemas[message.schema_version - 1].key_names
    key = rows_in(message, collection).select(names)
    newest: PlacedMessage | None = None
    for each in held:
        if not isinstance(each, PlacedMessage) or each.vchannel != message.vchannel:
            continue
        rows = rows_in(each, collection)
        same = np.logical_and.reduce(
            [pc.equal(rows[name], key[name][0]).to_numpy(zero_copy_only=False) for name in names]
        )
        for number in np.flatnonzero(same).tolist():
            place = each.places[number]
            if place < message.places[0] and (newest is None or place > newest.places[0]):
                newest = _part(each, rows, number, number + 1)
    return [] if newest is None else [replace(newest, txn_id=message.txn_id)]


def halves(message: PlacedMessage, collection: CollectionInfo) -> Iterator[PlacedMessage]:
    """Yield two messages with the rows of `message`."""
    rows = rows_in(message, collection)
    middle = rows.num_rows // 2
    yield _part(message, rows, 0, middle)
    yield _part(message, rows, middle, rows.num_rows)


def _part(message: PlacedMessage, rows: pa.RecordBatch, first: int, last: int) -> PlacedMessage:
    payload = encode_rows(rows.slice(first, last - first))
    return replace(message, rows=last - first, payload=payload, places=message.places[first:last])


def _placed(message: MutableMessage, rows: pa.RecordBatch) -> PlacedMessage:
    fields = {name: getattr(message, name) for name in MESSAGE_FIELDS}
    return PlacedMessage(**fields, places=tuple(rows[PLACE].to_pylist()))
