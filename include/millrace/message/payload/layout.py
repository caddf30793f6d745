"""Check the metadata of an Arrow IPC record-batch message against a schema before Arrow reads it.

Arrow's reader trusts much of that metadata: it fills in missing validity, ignores trailing bytes, allocates declared
lengths, and lets buffers overlap (so that a few bytes become many columns). A payload that passes here has exactly the
schema's nodes and buffers, all inside its body, in order and without overlap, and fills its bytes exactly. To check
that, the flatbuffer tables are read by hand:
https://arrow.apache.org/docs/format/Columnar.html#encapsulated-message-format, format/Message.fbs.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from millrace.base.errors import Malformed

Int64s = npt.NDArray[np.int64]

PREFIX_BYTES: Final = 8
"""The continuation marker and the metadata length, before the metadata."""
CONTINUATION: Final = 0xFFFFFFFF
MAX_ROWS: Final = (1 << 31) - 1
ROWS: Final = -1
OWN: Final = -2

_METADATA_VERSIONS: Final = (3, 4)  # V4 and V5: the same layout for the types that a payload can hold
_RECORD_BATCH: Final = 3
_U16: Final = struct.Struct("<H")
_I32: Final = struct.Struct("<i")
_U32: Final = struct.Struct("<I")
_I64: Final = struct.Struct("<q")


@dataclass(frozen=True, slots=True)
class ExpectedShape:
    """The nodes and buffers of a schema's record batch."""

    nodes: int
    buffers: int
    length_from: tuple[int, ...]
    """Source of each node's length: the node with this index, the batch's rows (ROWS), or its own (OWN: list items)."""
    required: tuple[int, ...]
    """Indexes of the nodes without nulls: fields that are not nullable, a map's entries and keys."""

    @property
    def min_metadata_bytes(self) -> int:
        """The minimum bytes of metadata of this shape, which bounds what reading it allocates."""
        return 16 * (self.nodes + self.buffers)

    @classmethod
    def of(cls, schema: pa.Schema) -> ExpectedShape:
        """Return the shape of `schema`."""
        like: list[int] = []
        required: list[int] = []
        buffers = sum(_add(field, ROWS, like, required) for field in schema)
        return cls(len(like), buffers, tuple(like), tuple(required))


def _add(field: pa.Field, length: int, like: list[int], required: list[int]) -> int:
    """Append the nodes of a field whose own node has that `length`; return the number of their buffers."""
    place, kind = len(like), field.type
    like.append(length)
    if not field.nullable:
        required.append(place)
    if pa.types.is_struct(kind):
        return 1 + sum(_add(kind.field(number), place, like, required) for number in range(kind.num_fields))
    if pa.types.is_list(kind) or pa.types.is_map(kind):
        return 2 + _add(kind.field(0), OWN, like, required)  # a map is a list of structs: key and value
    return 3 if pa.types.is_string(kind) or pa.types.is_binary(kind) else 2


@dataclass(frozen=True, slots=True)
class Layout:
    """The offsets of the values in one metadata block; all its other bytes are structure."""

    body_length: int
    rows: int
    nodes: int
    buffers: int

    def values(self, expected: ExpectedShape) -> list[tuple[int, int]]:
        """Return the (start, stop) ranges of the values, which may differ between metadata blocks of this layout."""
        return [
            (self.body_length, self.body_length + 8),
            (self.rows, self.rows + 8),
            (self.nodes, self.nodes + 16 * expected.nodes),
            (self.buffers, self.buffers + 16 * expected.buffers),
        ]

    def is_aligned(self, expected: ExpectedShape) -> bool:
        """Return whether every value is an aligned word, as all flatbuffer writers place them."""
        return all(start % 8 == 0 for start, _ in self.values(expected))


class _Table:
    """A flatbuffer table at `start` of `data`, with every access checked."""

    __slots__ = ("data", "fields", "start", "vtable")

    def __init__(self, data: bytes, start: int) -> None:
        if not 0 <= start <= len(data) - 4:
            raise Malformed("the Arrow metadata points outside itself")
        self.data, self.start = data, start
        self.vtable = start - _I32.unpack_from(data, start)[0]
        if not 0 <= self.vtable <= len(data) - 4:
            raise Malformed("the Arrow metadata points outside itself")
        size = _U16.unpack_from(data, self.vtable)[0]
        if size < 4 or size % 2 or self.vtable + size > len(data):
            raise Malformed("the Arrow metadata points outside itself")
        self.fields = (size - 4) // 2

    def place(self, field: int, width: int) -> int | None:
        """Return the position of a field's value of `width` bytes; None if it has the default."""
        if field >= self.fields:
            return None
        offset = _U16.unpack_from(self.data, self.vtable + 4 + 2 * field)[0]
        if offset == 0:
            return None
        place = self.start + int(offset)
        if place + width > len(self.data):
            raise Malformed("the Arrow metadata points outside itself")
        return place

    def target(self, field: int) -> int | None:
        """Return the position of the table or vector that a field refers to."""
        place = self.place(field, 4)
        return None if place is None else place + int(_U32.unpack_from(self.data, place)[0])

    def structs(self, field: int, count: int, what: str) -> int:
        """Return the position of the first element of a vector of exactly `count` 16-byte structs."""
        target = self.target(field)
        if target is None or target > len(self.data) - 4:
            raise Malformed(f"the Arrow metadata has no {what}")
        found = _U32.unpack_from(self.data, target)[0]
        if found != count:
            raise Malformed(f"the Arrow batch has {found} {what}, its schema calls for {count}")
        if target + 4 + 16 * count > len(self.data):
            raise Malformed("the Arrow metadata points outside itself")
        return target + 4


def parse_layout(metadata: bytes, expected: ExpectedShape) -> Layout:
    """Parse the layout of one metadata block. Raises Malformed unless it is a plain record batch of this shape."""
    if len(metadata) < 4:
        raise Malformed("the Arrow metadata is cut short")
    message = _Table(metadata, _U32.unpack_from(metadata, 0)[0])
    version = message.place(0, 2)
    if version is None or _U16.unpack_from(metadata, version)[0] not in _METADATA_VERSIONS:
        raise Malformed("the Arrow metadata is not of version 4 or 5")
    kind = message.place(1, 1)
    if kind is None or metadata[kind] != _RECORD_BATCH:
        raise Malformed("the payload is no Arrow record batch")
    body_length = message.place(3, 8)
    header = message.target(2)
    if header is None or body_length is None:
        raise Malformed("the payload is an Arrow record batch without rows")
    if message.place(4, 4) is not None:
        raise Malformed("the Arrow message carries custom metadata")
    batch = _Table(metadata, header)
    rows = batch.place(0, 8)
    if rows is None:
        raise Malformed("the payload is an Arrow record batch without rows")
    if batch.place(3, 4) is not None:
        raise Malformed("the Arrow batch is compressed; a payload's buffers are not")
    if batch.place(4, 4) is not None:
        raise Malformed("the Arrow batch has variadic buffers, which no field type has")
    nodes = batch.structs(1, expected.nodes, "nodes")
    layout = Layout(body_length, rows, nodes, batch.structs(2, expected.buffers, "buffers"))
    ranges = sorted(layout.values(expected))
    if any(ranges[place][1] > ranges[place + 1][0] for place in range(3)):
        raise Malformed("parts of the Arrow metadata lie over each other")
    return layout


def check_payload(payload: memoryview, expected: ExpectedShape) -> None:
    """Check that `payload` is one record-batch message with the expected nodes and buffers, exactly filled. Raises
    Malformed.
    """
    if len(payload) < PREFIX_BYTES:
        raise Malformed("the payload is shorter than an Arrow message's prefix")
    marker, size = _U32.unpack_from(payload, 0)[0], _I32.unpack_from(payload, 4)[0]
    if marker != CONTINUATION or size <= 0 or size % 8 or PREFIX_BYTES + size > len(payload):
        raise Malformed("the payload does not begin as an encapsulated Arrow message")
    metadata = bytes(payload[PREFIX_BYTES : PREFIX_BYTES + size])
    layout = parse_layout(metadata, expected)
    body = len(payload) - PREFIX_BYTES - size
    if _I64.unpack_from(metadata, layout.body_length)[0] != body:
        raise Malformed("the Arrow message's body is not as long as it says, or has bytes behind it")
    rows = _I64.unpack_from(metadata, layout.rows)[0]
    if not 1 <= rows <= MAX_ROWS:
        raise Malformed("the Arrow batch has no rows, or more than 2**31-1")
    nodes = struct.unpack_from(f"<{2 * expected.nodes}q", metadata, layout.nodes)
    for place in range(expected.nodes):
        if not 0 <= nodes[2 * place + 1] <= nodes[2 * place] <= MAX_ROWS:
            raise Malformed("a column's length or null count cannot be")
    for place, like in enumerate(expected.length_from):
        if like != OWN and nodes[2 * place] != (rows if like == ROWS else nodes[2 * like]):
            raise Malformed("a column's length is not the batch's")
    if any(nodes[2 * place + 1] for place in expected.required):
        raise Malformed("a field that is not nullable has a null")
    buffers = struct.unpack_from(f"<{2 * expected.buffers}q", metadata, layout.buffers)
    end = 0
    for offset, length in zip(buffers[::2], buffers[1::2], strict=True):
        if not 0 <= length <= body or not 0 <= offset <= body - length or offset % 8:
            raise Malformed("a buffer of the Arrow batch lies outside its body, or unaligned")
        if length:
            if offset < end:
                raise Malformed("buffers of the Arrow batch lie over each other")
            end = offset + length


@dataclass(frozen=True, slots=True)
class MetadataValues:
    """The values of n metadata blocks of one layout, by column: (n,), or (nodes, n) and (buffers, n)."""

    body_lengths: Int64s
    rows: Int64s
    lengths: Int64s
    nulls: Int64s
    offsets: Int64s
    sizes: Int64s

    def valid_for(self, bodies: Int64s, expected: ExpectedShape) -> npt.NDArray[np.bool_]:
        """Return which blocks :func:`check_payload` accepts, for bodies of these lengths."""
        good = (self.body_lengths == bodies) & (self.rows >= 1) & (self.rows <= MAX_ROWS)
        for place, (length, nulls) in enumerate(zip(self.lengths, self.nulls, strict=True)):
            like = expected.length_from[place]
            if like == OWN:
                good &= (length >= 0) & (length <= MAX_ROWS)
            else:
                good &= length == (self.rows if like == ROWS else self.lengths[like])
            good &= nulls == 0 if place in expected.required else (nulls >= 0) & (nulls <= length)
        end = np.zeros_like(bodies)
        for offset, size in zip(self.offsets, self.sizes, strict=True):
            good &= (size >= 0) & (size <= bodies) & (offset >= 0) & (offset <= bodies - size) & (offset & 7 == 0)
            # (Sums of values that failed above may wrap; they are already excluded.)
            some = size > 0
            good &= ~some | (offset >= end)
            end = np.where(some, offset + size, end)
        return good


def read_values(words: Int64s, layout: Layout, expected: ExpectedShape) -> MetadataValues:
    """Return the values of blocks of an aligned layout; `words` is shaped (words per block, blocks)."""
    body_lengths, rows, nodes, buffers = (words[start >> 3 : stop >> 3] for start, stop in layout.values(expected))
    return MetadataValues(body_lengths[0], rows[0], nodes[::2], nodes[1::2], buffers[::2], buffers[1::2])
