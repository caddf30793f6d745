"""Batch decoding of small messages: one call decodes all of a batch when the rows of the first are requested.

For a small message, the fixed cost of a decode call dominates. Memory: the rows of about DECODE_BYTES of payloads of
each kind, while one of the deliveries exists.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Final, TypeAlias

import numpy as np
import pyarrow as pa

from millrace.base.errors import Malformed
from millrace.message.model import ImmutableMessage
from millrace.message.payload.rows import DecodedRows, decode_many, decode_rows
from millrace.message.types import MessageType

DECODE_BYTES: Final = 256 << 10
"""Approximate size of the payloads that one call decodes."""

MAX_BATCHED_PAYLOAD_BYTES: Final = 16 << 10
"""Larger payloads are decoded alone, without copying."""

_ROWS: Final = frozenset({MessageType.INSERT, MessageType.UPSERT, MessageType.DELETE})

_Kind: TypeAlias = tuple[int, int, bool]
"""Collection, schema version, and whether the rows are keys: payloads of one kind have one schema."""


@dataclass(slots=True)
class _Chunk:
    payloads: list[bytes] = field(default_factory=list)
    bytes: int = 0


class BatchDecoder:
    """Decoder of the messages of some deliveries of one PChannel. Add all messages before requesting rows.

    Thread-safe.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._chunks: dict[_Kind, list[_Chunk]] = {}
        self._places: dict[int, tuple[int, int]] = {}
        """The chunk of its kind and the place in it, by a message's tick, which is unique in its PChannel."""
        self._decoded: dict[_Kind, tuple[int, DecodedRows, list[int]]] = {}
        """The last decoded chunk of each kind: its number, its rows, and the offsets of each payload's rows."""

    def add(self, message: ImmutableMessage) -> None:
        """Add a message if it is small and has rows."""
        size = len(message.payload)
        if message.type not in _ROWS or size > MAX_BATCHED_PAYLOAD_BYTES:
            return
        chunks = self._chunks.setdefault(_kind(message), [])
        if not chunks or chunks[-1].bytes + size > DECODE_BYTES:
            chunks.append(_Chunk())
        self._places[message.time_tick] = (len(chunks) - 1, len(chunks[-1].payloads))
        chunks[-1].payloads.append(message.payload)
        chunks[-1].bytes += size

    def rows(self, message: ImmutableMessage, schema: pa.Schema) -> pa.RecordBatch:
        """Return the rows or keys of a message, which have `schema`; repeated calls are allowed. Raises Malformed."""
        found = self._places.get(message.time_tick)
        if found is None:
            return decode_rows(message.payload, schema)
        kind, (chunk, place) = _kind(message), found
        with self._lock:
            known = self._decoded.get(kind)
            if known is None or known[0] != chunk:
                known = self._decoded[kind] = (chunk, *self._decode(kind, chunk, schema))
        _, decoded, starts = known
        if place in decoded.errors:
            raise Malformed(decoded.errors[place])
        return decoded.rows.slice(starts[place], starts[place + 1] - starts[place])

    def _decode(self, kind: _Kind, chunk: int, schema: pa.Schema) -> tuple[DecodedRows, list[int]]:
        decoded = decode_many(pa.array(self._chunks[kind][chunk].payloads, pa.large_binary()), schema)
        return decoded, [0, *np.cumsum(decoded.counts).tolist()]


def _kind(message: ImmutableMessage) -> _Kind:
    return message.collection_id, message.schema_version, message.type == MessageType.DELETE
