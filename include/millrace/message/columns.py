"""A run of messages as an Arrow batch and as numpy columns, which the chain works on.

A row is one message of one log entry, in log order. Fixed-width columns are never null (the default value means
"absent"), so that ``column.to_numpy()`` is a view and not a copy. The numpy form avoids the cost of Arrow arrays.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from millrace.message.header import HEADER, NUMERIC_FIELDS, header_fields

PRINCIPAL_TYPE: Final = pa.dictionary(pa.int32(), pa.utf8())
"""A column of the principals that appended messages: their names, "asserted:NAME" for those that nobody checked."""

MESSAGE_SCHEMA: Final = pa.schema(
    [
        pa.field("ledger", pa.int64(), nullable=False),  # log id of the entry
        pa.field("entry", pa.int64(), nullable=False),
        pa.field("index", pa.int32(), nullable=False),  # index inside the entry
        pa.field("physical_ms", pa.int64(), nullable=False),  # the entry's append timestamp, Unix ms
        *header_fields(*HEADER),
        pa.field("payload", pa.large_binary(), nullable=False),
        pa.field("detail", pa.utf8()),  # why an UNDEFINED row could not be decoded; else null
        pa.field("principal", PRINCIPAL_TYPE),  # who appended the entry; null without a stamp
    ]
)
"""Columns of a decoded run of messages."""

_ARROW_TYPES: Final = {
    np.dtype(np.int64): pa.int64(),
    np.dtype(np.int32): pa.int32(),
    np.dtype(np.uint16): pa.uint16(),
}


def integer_array(values: npt.NDArray[Any]) -> pa.Array:
    """Return integers as an Arrow array over the same memory.

    `pa.array` takes three times as long, which dominates a run of one message.
    """
    data = pa.py_buffer(np.ascontiguousarray(values))
    return pa.Array.from_buffers(_ARROW_TYPES[values.dtype], len(values), [None, data])


def string_array(values: Iterable[str]) -> pa.StringArray:
    """Build an Arrow string array from buffers: `pa.array` would import pandas, which many programs do not need."""
    data = [value.encode() for value in values]
    ends = np.zeros(len(data) + 1, dtype=np.int32)
    np.cumsum([len(each) for each in data], out=ends[1:])
    return pa.StringArray.from_buffers(len(data), pa.py_buffer(ends), pa.py_buffer(b"".join(data)))


def principal_array(indices: npt.NDArray[np.int32] | None, principals: Sequence[str], count: int) -> pa.DictionaryArray:
    """Return `count` principals as a column of PRINCIPAL_TYPE, from MessageColumns' form."""
    if indices is None:
        return pa.DictionaryArray.from_arrays(pa.nulls(count, pa.int32()), _NOBODY)
    unknown = indices < 0
    codes = pa.array(indices, mask=unknown) if unknown.any() else integer_array(indices)
    return pa.DictionaryArray.from_arrays(codes, string_array(principals), safe=False)


_NOBODY: Final = string_array(())

Int64s = npt.NDArray[np.int64]

_OTHERS: Final = ("vchannel", "payload", "detail", "principal")
"""Columns of MESSAGE_SCHEMA that are not plain numbers."""


@dataclass(slots=True, kw_only=True)
class HeaderColumns:
    """Ids and headers of messages in log order, by column, without `barrier_tick`, which ends with the tick."""

    ledger: Int64s
    entry: Int64s
    index: npt.NDArray[np.int32]
    type: npt.NDArray[np.uint16]
    vchannel: npt.NDArray[np.int32]
    """Indexes into `names`."""
    names: list[str]
    term: Int64s
    collection_id: Int64s
    partition_id: Int64s
    schema_version: npt.NDArray[np.int32]
    rows: Int64s
    txn_id: Int64s
    producer_id: Int64s
    epoch: npt.NDArray[np.int32]
    sequence: Int64s
    size: Int64s
    """Bytes of each payload."""

    def __len__(self) -> int:
        return len(self.entry)

    def vchannel_name(self, row: int) -> str:
        return self.names[self.vchannel[row]]

    def slice_arrays(self, start: int, stop: int) -> dict[str, Any]:
        """Return these columns for messages start .. stop - 1, as keyword arguments of a column class."""
        found = {name: values[start:stop] for name, values in zip(_ARRAYS, _arrays(self), strict=True)}
        return {"names": self.names, **found}

    def header_numbers(self, row: int) -> list[int]:
        """Return one message's numbers: NUMERIC_FIELDS, 0 for the barrier, then ledger, entry and index."""
        return [*[int(values[row]) for values in _numbers(self)], 0, *[int(values[row]) for values in _place(self)]]


_PLACE: Final = ("ledger", "entry", "index")
_ARRAYS: Final = ("type", "vchannel", *NUMERIC_FIELDS, *_PLACE, "size")
_numbers: Final = attrgetter(*NUMERIC_FIELDS)
_place: Final = attrgetter(*_PLACE)
_arrays: Final = attrgetter(*_ARRAYS)


@dataclass(slots=True, kw_only=True)
class MessageColumns(HeaderColumns):
    """Messages in log order: the columns of MESSAGE_SCHEMA, one value per message."""

    physical_ms: Int64s
    barrier_tick: Int64s
    payloads: pa.LargeBinaryArray
    details: dict[int, str]
    """For each index, the reason that a message of type 0 (UNDEFINED) could not be decoded."""
    principal: npt.NDArray[np.int32] | None
    """Indexes into `principals`, -1 for a message without a stamp; None if none has one."""
    principals: list[str]

    def payload(self, row: int) -> bytes:
        return self.payloads[row].as_py() or b""

    def batch(self) -> pa.RecordBatch:
        """Return the same as a batch of MESSAGE_SCHEMA, over the same memory."""
        count = len(self)
        if self.details:
            rows = list(self.details)
            places, missing = np.zeros(count, dtype=np.int64), np.ones(count, dtype=bool)
            places[rows], missing[rows] = np.arange(len(rows)), False
            detail = pa.array(list(self.details.values()), pa.utf8()).take(pa.array(places, mask=missing))
        else:
            detail = pa.nulls(count, pa.utf8())
        names = pa.array(self.names, pa.utf8())
        arrays: dict[str, pa.Array] = {
            "vchannel": pa.DictionaryArray.from_arrays(integer_array(self.vchannel), names, safe=False),
            "payload": self.payloads,
            "detail": detail,
            "principal": principal_array(self.principal, self.principals, count),
        }
        plain: dict[str, npt.NDArray[Any]] = {
            name: getattr(self, name) for name in MESSAGE_SCHEMA.names if name not in _OTHERS
        }
        arrays |= {name: integer_array(values) for name, values in plain.items()}
        return pa.RecordBatch.from_arrays([arrays[name] for name in MESSAGE_SCHEMA.names], schema=MESSAGE_SCHEMA)
