"""The columns of the ``wal`` table: messages, rejections and channel state of every PChannel.

``kind``, ``pchannel`` and ``date`` are the table's partition columns, which are in directory names, not in files.
A PChannel's rows are ordered by (ledger, entry, index, ordinal); messages have the same order by ``time_tick``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Literal

import pyarrow as pa

from millrace.message.columns import PRINCIPAL_TYPE
from millrace.message.header import header_fields

KIND_MESSAGE: Final = "message"
KIND_REJECTION: Final = "rejection"
KIND_STATE: Final = "state"

RowKind = Literal["message", "rejection"]
"""Kinds of rows that represent a message."""

PARTITION_COLUMNS: Final = ("kind", "pchannel", "date")

ROW_SCHEMA: Final = pa.schema(
    [
        pa.field("time_tick", pa.int64(), nullable=False),  # rejection: the PChannel's last tick when it was judged
        pa.field("ledger", pa.int64(), nullable=False),  # message id: log id, index, ordinal
        pa.field("entry", pa.int64(), nullable=False),  # (a state row: its position, index = ordinal = 0)
        pa.field("index", pa.int32(), nullable=False),
        pa.field("ordinal", pa.int32(), nullable=False),
        pa.field("physical_ms", pa.int64(), nullable=False),  # the log's append stamp, Unix ms
        pa.field("type", pa.dictionary(pa.int32(), pa.utf8()), nullable=False),  # MessageType name
        *header_fields("vchannel"),
        *header_fields("term"),
        pa.field("lc_ledger", pa.int64(), nullable=False),  # LastConfirmed, a message id
        pa.field("lc_entry", pa.int64(), nullable=False),
        pa.field("lc_index", pa.int32(), nullable=False),
        pa.field("lc_ordinal", pa.int32(), nullable=False),
        *header_fields("collection_id", "partition_id"),
        # 0: none; unique within its PChannel (the tick of its CreateSegment)
        pa.field("segment_id", pa.int64(), nullable=False),
        *header_fields("schema_version", "rows", "txn_id", "producer_id", "epoch", "sequence"),
        pa.field("reason", pa.dictionary(pa.int32(), pa.utf8())),  # a rejection's Reason; null on accepted messages
        pa.field("detail", pa.utf8()),  # text of a rejection; the original's id for a DUPLICATE; null otherwise
        pa.field("payload", pa.large_binary()),
        # who appended it (millrace.message.columns); null without a stamp, of emitted messages, and in older files
        pa.field("principal", PRINCIPAL_TYPE),
    ]
)
"""Columns of message, rejection and state rows, without the partition columns."""


def complete_rows(rows: pa.Table, names: Sequence[str] = ROW_SCHEMA.names) -> pa.Table:
    """Return rows of a file with columns of ROW_SCHEMA; one that an earlier build did not write is null."""
    schema = pa.schema([ROW_SCHEMA.field(name) for name in names])
    for field in schema:
        if field.nullable and field.name not in rows.schema.names:
            rows = rows.append_column(field, pa.nulls(rows.num_rows, field.type))
    return rows.select(schema.names).cast(schema)
