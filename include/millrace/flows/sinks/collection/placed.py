"""Documents as messages whose rows know the positions of their documents, and what to do with those that do not fit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Final, TypeVar

import pyarrow as pa

from millrace.base.errors import InvalidArgument
from millrace.catalog.collection import CollectionInfo
from millrace.client.produce.rows import conform, delete_message, insert_message, key_rows, split_keys, split_rows
from millrace.flows.conversion import KeyedRow
from millrace.flows.records import TASK_PUT, Action, Failure
from millrace.flows.sinks.collection.journal import PlacedMessage
from millrace.message.model import MESSAGE_FIELDS, MutableMessage
from millrace.message.payload.rows import decode_rows, encode_rows
from millrace.message.types import MessageType

Rows = list[tuple[Action, KeyedRow]]
_T = TypeVar("_T")
_PLACE: Final = "_place"
_STEP: Final = "collection"


def placed_messages(rows: Sequence[tuple[Action, KeyedRow]], collection: CollectionInfo) -> list[PlacedMessage]:
    """Return messages that replace the rows of these keys, or delete them: the last of each key counts.

    Raises InvalidArgument if a row does not fit.
    """
    last = {each.key: (each.row, action.record.offset) for action, each in rows}
    new = [(row, place) for row, place in last.values() if row is not None]
    gone = [(key, place) for key, (row, place) in last.items() if row is None]
    found: list[PlacedMessage] = []
    if new:
        found += placed_upserts(conform([row for row, _ in new], collection), [place for _, place in new], collection)
    if gone:
        keys = key_rows([key for key, _ in gone], collection)
        names = keys.schema.names
        places = pa.array([place for _, place in gone], pa.int64())
        whole = pa.RecordBatch.from_arrays([*keys.columns, places], names=[*names, _PLACE])
        for vchannel, part in split_keys(whole, collection):
            found.append(_placed(delete_message(part.select(names), collection, vchannel=vchannel), part))
    return found


def placed_upserts(rows: pa.Table, places: Sequence[int], collection: CollectionInfo) -> list[PlacedMessage]:
    """Return messages that upsert `rows` that conform to the collection, each from the document at its place."""
    found: list[PlacedMessage] = []
    names = rows.column_names
    placed = rows.append_column(_PLACE, pa.array(places, pa.int64()))
    for vchannel, partition, part in split_rows(placed, collection, None, None):
        made = insert_message(part.select(names), collection, vchannel=vchannel, partition_id=partition, upsert=True)
        found.append(_placed(made, part))
    return found


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
    """Return the rows that `fits` takes without InvalidArgument, in their order, and a failure for each other one.

    If few of n rows do not fit, `fits` is called about log n times for each.
    """
    parts: list[Sequence[tuple[Action, _T]]] = [rows] if rows else []
    good: list[tuple[Action, _T]] = []
    failures: list[Failure] = []
    while parts:
        part = parts.pop()
        try:
            fits(part)
        except InvalidArgument as error:
            if len(part) == 1:
                failures.append(Failure(part[0][0].record, TASK_PUT, _STEP, error.code, str(error)[:500]))
                continue
            middle = len(part) // 2
            parts += [part[middle:], part[:middle]]
        else:
            good += part
    return good, failures


def halves(message: PlacedMessage, collection: CollectionInfo) -> Iterator[PlacedMessage]:
    """Yield two messages with the rows of `message`."""
    schema = collection.schemas[message.schema_version - 1]
    rows = decode_rows(message.payload, schema.key_arrow() if message.type == MessageType.DELETE else schema.arrow())
    middle = rows.num_rows // 2
    for first, last in ((0, middle), (middle, rows.num_rows)):
        payload = encode_rows(rows.slice(first, last - first))
        yield replace(message, rows=last - first, payload=payload, places=message.places[first:last])


def _placed(message: MutableMessage, rows: pa.RecordBatch) -> PlacedMessage:
    fields = {name: getattr(message, name) for name in MESSAGE_FIELDS}
    return PlacedMessage(**fields, places=tuple(rows[_PLACE].to_pylist()))
