"""Small messages that a consumer is handed together, whose rows are decoded by one call when the first of them is asked for.

A call of its own is most of what a small message costs its reader. Memory: the rows of about TOGETHER_BYTES of payloads of each kind,
for as long as one of the deliveries is there.
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
"""Of payloads that are decoded by one call, about."""

MAX_BATCHED_PAYLOAD_BYTES: Final = 16 << 10
"""A larger payload is decoded alone, over its own bytes."""

_ROWS: Final = frozenset({MessageType.INSERT, MessageType.UPSERT, MessageType.DELETE})

_Kind: TypeAlias = tuple[int, int, bool]
"""Collection, schema version, and whether they are keys: what lies in payloads of one shape."""


@dataclass(slots=True)
class _Chunk:
    payloads: list[bytes] = field(default_factory=list)
    bytes: int = 0


class BatchDecoder:
    """The messages of some deliveries of one PChannel, all of which are added before rows of any are asked for. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._chunks: dict[_Kind, list[_Chunk]] = {}
        self._places: dict[int, tuple[int, int]] = {}
        """By the tick of a message, which no other of its PChannel has: which chunk of its kind, and where in that."""
        self._decoded: dict[_Kind, tuple[int, DecodedRows, list[int]]] = {}
        """Of each kind the chunk that was asked for last: its number, its rows, and where those of each payload begin."""

    def add(self, message: ImmutableMessage) -> None:
        """Take a message, where it is a small one with rows."""
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
        """The rows or keys of a message, which are of `schema`, whoever asks how often. Raises Malformed."""
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
