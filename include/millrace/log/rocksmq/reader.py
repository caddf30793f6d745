"""Reads a run of entries from a segment file: one read, verified checksums, all values in one buffer.

A run of one record is returned without a copy: the Arrow array uses the buffer that was read into. Several records
are moved over their headers, since an Arrow array has no gaps. No Python code runs per entry.
"""

from __future__ import annotations

import ctypes
import os
from typing import Any, Final, NamedTuple

import numpy as np
import pyarrow as pa
from crc32c import crc32c

from millrace.base.errors import LogCorrupted
from millrace.log.rocksmq.record import HEADER_BYTES, LENGTH_BYTES, RecordHeader, parse_header
from millrace.message.columns import integer_array
from millrace.message.ids import LOGICAL_BITS
from millrace.message.log_entries import ENTRY_OVERHEAD_BYTES, ENTRY_SCHEMA

_SLACK: Final = 64 << 10
_MOVE_FROM: Final = 16 << 10
"""Mean size of a record's values from which they are moved in place; smaller ones are copied into new memory."""


class SegmentRun(NamedTuple):
    """Entries of one segment.

    `following`: the id after the last entry. `offset`: offset of the next record (None: the run ends inside a
    record). `bytes`: size as a bounded read counts it (millrace.log.protocol.weight).
    """

    batch: pa.RecordBatch
    following: int
    offset: int | None
    bytes: int


class _Placed(NamedTuple):
    at: int
    header: RecordHeader


def empty_batch() -> pa.RecordBatch:
    """Return a run without entries."""
    return pa.RecordBatch.from_arrays([pa.array([], field.type) for field in ENTRY_SCHEMA], schema=ENTRY_SCHEMA)


def entry_batch(ids: np.ndarray[Any, np.dtype[np.int64]], values: pa.LargeBinaryArray) -> pa.RecordBatch:
    """Return entries (ENTRY_SCHEMA) from their numbers and values."""
    return pa.RecordBatch.from_arrays(
        [*map(integer_array, (np.zeros(len(ids), dtype=np.int64), ids, ids >> LOGICAL_BITS)), values],
        schema=ENTRY_SCHEMA,
    )


class SegmentRange(NamedTuple):
    """A range of a segment file (its name is for errors) with its salt: from a record's offset to an offset after a
    record.
    """

    name: str
    salt: int
    offset: int
    end: int


def read_run(fd: int, place: SegmentRange, *, position: int, limit: int | None, max_bytes: int) -> SegmentRun:
    """Read entries from `position` on, which is in the first record of `place` or before it, below `limit`.

    Reads about `max_bytes`, but at least one entry.
    Raises LogCorrupted if a record is incomplete.
    """
    name, salt, offset, end = place
    buffer = _load(fd, offset, min(end - offset, max(max_bytes, 0) + _SLACK))
    header = _header(buffer, 0, salt, offset, name)
    if limit is not None and limit <= max(position, header.base):
        return SegmentRun(empty_batch(), max(position, limit), None, 0)
    if header.size > buffer.size:
        if offset + header.size > end:
            raise _corrupted(name, offset, header.base)
        buffer = _load(fd, offset, header.size)
    view = memoryview(buffer)
    records: list[_Placed] = []
    at = total = 0
    while True:
        if crc32c(view[at + HEADER_BYTES : at + header.size]) != header.payload_crc:
            raise _corrupted(name, offset + at, header.base)
        records.append(_Placed(at, header))
        total += _weight(header)
        at += header.size
        if total >= max_bytes or at + HEADER_BYTES > buffer.size:
            break
        header = _header(buffer, at, salt, offset + at, name)
        if total + _weight(header) > max_bytes or at + header.size > buffer.size:
            break
        if limit is not None and header.base >= limit:
            break
    return _assemble(buffer, records, offset, position, limit, max_bytes)


def _load(fd: int, offset: int, size: int) -> pa.Buffer:
    buffer = pa.allocate_buffer(size)
    view = memoryview(buffer)
    got = 0
    while got < size:
        piece = os.preadv(fd, [view[got:]], offset + got)
        if not piece:
            return buffer.slice(0, got)
        got += piece
    return buffer


def _header(buffer: pa.Buffer, at: int, salt: int, offset: int, name: str) -> RecordHeader:
    header = parse_header(memoryview(buffer), at, salt=salt, offset=offset)
    if header is None or not header.entries:
        raise _corrupted(name, offset, None)
    return header


def _corrupted(name: str, offset: int, base: int | None) -> LogCorrupted:
    entry = "" if base is None else f" (entries from 0:{base})"
    return LogCorrupted(
        f"{name}: the record at offset {offset}{entry} fails its checksum: restore the file from a copy"
    )


def _assemble(
    buffer: pa.Buffer, records: list[_Placed], offset: int, position: int, limit: int | None, max_bytes: int
) -> SegmentRun:
    last = records[-1].header
    counts = np.fromiter((header.entries for _, header in records), dtype=np.int64, count=len(records))
    bases = np.fromiter((header.base for _, header in records), dtype=np.int64, count=len(records))
    lengths, data = _values(buffer, records)
    total = int(lengths.size)
    offsets = np.zeros(total + 1, dtype=np.int64)
    np.cumsum(lengths, out=offsets[1:])
    starts = np.zeros(len(records), dtype=np.int64)
    np.cumsum(counts[:-1], out=starts[1:])
    ids = np.arange(total, dtype=np.int64) + np.repeat(bases - starts, counts)
    first = max(0, position - records[0].header.base)
    stop = total
    if limit is not None and limit <= last.last:
        stop = total - (last.last + 1 - max(limit, last.base))
    if len(records) == 1:  # a record larger than requested is cut between entries, after at least one
        stop = min(stop, stop_within_bytes(offsets, first, max_bytes))
    ids = ids[first:stop]
    values = pa.LargeBinaryArray.from_buffers(
        pa.large_binary(), stop - first, [None, pa.py_buffer(offsets[first : stop + 1]), data]
    )
    batch = entry_batch(ids, values)
    offset_after = offset + records[-1].at + last.size if stop == total else None
    return SegmentRun(
        batch, int(ids[-1]) + 1, offset_after, int(offsets[stop] - offsets[first]) + ENTRY_OVERHEAD_BYTES * len(ids)
    )


def stop_within_bytes(offsets: np.ndarray[Any, np.dtype[np.int64]], first: int, max_bytes: int) -> int:
    """Return the index after which a read from entry `first` ends, for entries that begin at `offsets`. At least one is
    read.
    """
    counted = offsets + ENTRY_OVERHEAD_BYTES * np.arange(len(offsets))
    return max(int(np.searchsorted(counted, int(counted[first]) + max_bytes, side="right")) - 1, first + 1)


def _weight(header: RecordHeader) -> int:
    return header.body + ENTRY_OVERHEAD_BYTES * header.entries


def _values(buffer: pa.Buffer, records: list[_Placed]) -> tuple[np.ndarray[Any, np.dtype[np.uint32]], pa.Buffer]:
    """Return the lengths of all entries, and their values in one buffer."""
    if len(records) == 1:
        at, header = records[0]
        start = at + HEADER_BYTES
        lengths = np.frombuffer(buffer, dtype="<u4", count=header.entries, offset=start)
        return lengths, buffer.slice(start + LENGTH_BYTES * header.entries, header.body)
    view = memoryview(buffer)
    lengths = np.frombuffer(
        b"".join([view[at + HEADER_BYTES : at + HEADER_BYTES + LENGTH_BYTES * h.entries] for at, h in records]),
        dtype="<u4",
    )
    bodies = [(at + HEADER_BYTES + LENGTH_BYTES * h.entries, h.body) for at, h in records]
    if sum(body for _, body in bodies) < _MOVE_FROM * len(bodies):
        return lengths, pa.py_buffer(b"".join([view[start : start + body] for start, body in bodies]))
    # The buffer is not shared yet: close the gaps in place.
    to = bodies[0][0]
    target = to
    for start, body in bodies:
        if start != target:
            ctypes.memmove(buffer.address + target, buffer.address + start, body)
        target += body
    return lengths, buffer.slice(to, target - to)
