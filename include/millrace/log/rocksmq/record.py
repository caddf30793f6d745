"""The record of a segment file: one atomic batch of entries after a checksummed, stamped header.

    header (48 bytes, little-endian)
      u32  crc32c of the rest of the header, seeded with the record's offset in its file (a moved copy is no record)
      4s   magic "RMQ1"
      u64  salt: the channel's incarnation and the segment's number, so that old records in a recycled file are never
           taken for valid ones
      u64  base: id of the first entry; the others follow consecutively
      u64  durable: how far this file was synced before this record was written. If a record before that offset is
           broken, this proves that it is damage and not a torn tail
      u64  body: bytes of all values
      u32  count of entries; 0 marks a segment's header (its body is JSON, see millrace.log.rocksmq.segment)
      u32  crc32c of lengths and values
    u32 length of each entry
    values, contiguous

The header has its own checksum, so that no length is used before it is verified. Entries cost no Python code except
``len`` and ``join``; an Arrow array's data buffer is written to the file directly.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
import pyarrow as pa
from crc32c import crc32c

from millrace.base.errors import EntryTooLarge, InvalidArgument
from millrace.log.rocksmq.disk import Buffer

MAGIC: Final = b"RMQ1"
HEADER_BYTES: Final = 48
LENGTH_BYTES: Final = 4

_HEADER: Final = struct.Struct("<I4sQQQQII")
_UNCHECKED: Final = struct.Struct("<4sQQQQII")
_LENGTH: Final = struct.Struct("<I")
_SEED_MASK: Final = 0xFFFFFFFF
"""Mask of offsets as seeds of crc32c, which takes 32 bits."""

_MAX_COUNT: Final = (1 << 32) - 1
"""The record's count is a u32."""
_JOIN_BELOW: Final = 4096
"""Mean value size from which values are written as separate vectors: joining them would cost a copy."""
_MAX_VECTORS: Final = 256
"""Values per record that are written as separate vectors; the system call takes at most 1,024 (IOV_MAX)."""


class RecordHeader(NamedTuple):
    """A verified record header."""

    salt: int
    base: int
    durable: int
    body: int
    entries: int
    payload_crc: int

    @property
    def size(self) -> int:
        """Bytes of the whole record."""
        return HEADER_BYTES + LENGTH_BYTES * self.entries + self.body

    @property
    def last(self) -> int:
        """Id of the last entry (of a segment header: base - 1)."""
        return self.base + self.entries - 1


@dataclass(frozen=True, slots=True)
class FramedBatch:
    """A batch prepared outside of any lock: only its offset and ids are missing."""

    parts: tuple[Buffer, ...]
    count: int
    body: int
    payload_crc: int
    size: int
    values: pa.LargeBinaryArray | None = None
    """The batch itself, if it was an Arrow array."""

    def header(self, *, salt: int, base: int, durable: int, offset: int) -> bytes:
        """Return the header of this batch as a record at `offset`."""
        rest = _UNCHECKED.pack(MAGIC, salt, base, durable, self.body, self.count, self.payload_crc)
        return crc32c(rest, offset & _SEED_MASK).to_bytes(4, "little") + rest


def header_pattern(salt: int) -> bytes:
    """Return the bytes at offset 4 of every header with this salt, for a search for records."""
    return MAGIC + salt.to_bytes(8, "little")


def parse_header(data: Buffer, at: int, *, salt: int, offset: int) -> RecordHeader | None:
    """Parse the header at `at` of `data`, which is at `offset` of its file; None if it is not valid."""
    if len(data) - at < HEADER_BYTES:
        return None
    crc, magic, found, base, durable, body, count, payload_crc = _HEADER.unpack_from(data, at)
    if (
        magic != MAGIC
        or found != salt
        or crc32c(memoryview(data)[at + 4 : at + HEADER_BYTES], offset & _SEED_MASK) != crc
    ):
        return None
    return RecordHeader(found, base, durable, body, count, payload_crc)


def frame_segment_header(body: bytes) -> FramedBatch:
    """Frame the record that opens a segment."""
    return FramedBatch((body,), 0, len(body), crc32c(body), HEADER_BYTES + len(body))


def frame_batch(values: Sequence[bytes] | pa.LargeBinaryArray, *, max_entry_bytes: int) -> FramedBatch:
    """Frame `values`, at least one.

    Raises EntryTooLarge, InvalidArgument for nulls and for values that are not bytes.
    """
    if isinstance(values, pa.LargeBinaryArray):
        return _frame_array(values, max_entry_bytes)
    if isinstance(values, bytes | bytearray | memoryview | str):
        raise InvalidArgument("append takes a sequence of values, not one value: wrap it in a list")
    count = len(values)
    # The common case of a single append needs no numpy.
    if count == 1:
        value = values[0]
        _check_lengths(1, len(value), max_entry_bytes)
        lengths = _LENGTH.pack(len(value))
        crc = crc32c(value, crc32c(lengths))
        return FramedBatch((lengths, value), 1, len(value), crc, HEADER_BYTES + LENGTH_BYTES + len(value))
    sizes = np.fromiter(map(len, values), dtype=np.int64, count=count)
    body = int(sizes.sum())
    _check_lengths(count, int(sizes.max()), max_entry_bytes)
    lengths = sizes.astype("<u4").tobytes()
    parts: tuple[Buffer, ...]
    if count <= _MAX_VECTORS and body >= _JOIN_BELOW * count:
        parts = (lengths, *values)
    else:
        parts = (lengths, b"".join(values))
    return _framed(parts, count, body)


def _frame_array(values: pa.LargeBinaryArray, max_entry_bytes: int) -> FramedBatch:
    if values.null_count:
        raise InvalidArgument("a log entry cannot be null")
    count = len(values)
    _, offset_buffer, data = values.buffers()
    offsets = np.frombuffer(offset_buffer, dtype=np.int64, count=count + 1, offset=8 * values.offset)
    sizes = np.diff(offsets)
    _check_lengths(count, int(sizes.max()), max_entry_bytes)
    start, stop = int(offsets[0]), int(offsets[-1])
    # A slice of an Arrow array starts in mid-buffer. An array of empty values may have no data buffer at all.
    body = memoryview(data)[start:stop] if data is not None else memoryview(b"")
    return _framed((sizes.astype("<u4").tobytes(), body), count, stop - start, values)


def _framed(parts: tuple[Buffer, ...], count: int, body: int, values: pa.LargeBinaryArray | None = None) -> FramedBatch:
    crc = 0
    for part in parts:
        crc = crc32c(part, crc)
    return FramedBatch(parts, count, body, crc, HEADER_BYTES + LENGTH_BYTES * count + body, values)


def _check_lengths(count: int, longest: int, max_entry_bytes: int) -> None:
    if longest > max_entry_bytes:
        raise EntryTooLarge(
            f"an entry of {longest} bytes exceeds the log's limit of {max_entry_bytes}: split the batch"
        )
    if count > _MAX_COUNT:
        raise EntryTooLarge(f"a batch holds at most {_MAX_COUNT} entries, not {count}")
