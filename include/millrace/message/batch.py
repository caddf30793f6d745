"""The Arrow batch form of a run of messages: what the chain works on.

One row is one message of one log entry, in log order. Fixed-width columns are never null (the default value stands for
"absent"), so that ``column.to_numpy()`` is a view and not a copy.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

MESSAGE_SCHEMA: Final = pa.schema(
    [
        pa.field("ledger", pa.int64(), nullable=False),  # log id of the entry
        pa.field("entry", pa.int64(), nullable=False),
        pa.field("index", pa.int32(), nullable=False),  # place inside the entry
        pa.field("physical_ms", pa.int64(), nullable=False),  # the entry's append stamp, Unix ms
        pa.field("type", pa.uint16(), nullable=False),  # MessageType; 0 (UNDEFINED) marks an entry that did not decode
        pa.field("vchannel", pa.dictionary(pa.int32(), pa.utf8()), nullable=False),  # "" is the whole PChannel
        pa.field("term", pa.int64(), nullable=False),  # WAL term it was appended under
        pa.field("collection_id", pa.int64(), nullable=False),  # 0: none
        pa.field("partition_id", pa.int64(), nullable=False),  # 0: none (a delete: all partitions)
        pa.field("schema_version", pa.int32(), nullable=False),
        pa.field("rows", pa.int64(), nullable=False),  # rows of an insert, keys of a delete, as the producer says
        pa.field("txn_id", pa.int64(), nullable=False),  # chosen by the producer; 0: outside any transaction
        pa.field("producer_id", pa.int64(), nullable=False),  # 0: not idempotent
        pa.field("epoch", pa.int32(), nullable=False),  # of the producer
        pa.field("sequence", pa.int64(), nullable=False),  # per (producer, epoch, VChannel), from 0
        pa.field("barrier_tick", pa.int64(), nullable=False),  # its time tick must be greater; 0: none
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


def numbers(values: npt.NDArray[Any]) -> pa.Array:
    """Integers as an Arrow array over the same memory; `pa.array` takes thrice the time, which a run of one message is made of."""
    data = pa.py_buffer(np.ascontiguousarray(values))
    return pa.Array.from_buffers(_ARROW_TYPES[values.dtype], len(values), [None, data])
