"""The Arrow batch form of a run of messages: what the chain works on.

One row is one message of one log entry, in log order. Fixed-width columns are never null (the default value stands for
"absent"), so that ``column.to_numpy()`` is a view and not a copy.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from millrace.message.header import HEADER, header_fields

MESSAGE_SCHEMA: Final = pa.schema(
    [
        pa.field("ledger", pa.int64(), nullable=False),  # log id of the entry
        pa.field("entry", pa.int64(), nullable=False),
        pa.field("index", pa.int32(), nullable=False),  # place inside the entry
        pa.field("physical_ms", pa.int64(), nullable=False),  # the entry's append stamp, Unix ms
        *header_fields(*HEADER),
        pa.field("payload", pa.large_binary(), nullable=False),
        pa.field("detail", pa.utf8()),  # why an UNDEFINED row did not decode; null otherwise
    ]
)
"""Columns of a decoded run of messages."""

_ARROW_TYPES: Final = {
    np.dtype(np.int64): pa.int64(),
    np.dtype(np.int32): pa.int32(),
    np.dtype(np.uint16): pa.uint16(),
}


def integer_array(values: npt.NDArray[Any]) -> pa.Array:
    """Integers as an Arrow array over the same memory; `pa.array` takes thrice the time, which a run of one message is made of."""
    data = pa.py_buffer(np.ascontiguousarray(values))
    return pa.Array.from_buffers(_ARROW_TYPES[values.dtype], len(values), [None, data])


def string_array(values: Iterable[str]) -> pa.StringArray:
    """Strings as Arrow holds them, built from buffers: `pa.array` would import pandas, which a program may well do without."""
    data = [value.encode() for value in values]
    ends = np.zeros(len(data) + 1, dtype=np.int32)
    np.cumsum([len(each) for each in data], out=ends[1:])
    return pa.StringArray.from_buffers(len(data), pa.py_buffer(ends), pa.py_buffer(b"".join(data)))
