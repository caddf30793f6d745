"""Rows in a message: one encapsulated Arrow IPC record-batch message without schema (docs/wire-form.md, "Payloads").

Any bytes give rows of exactly the schema, fully validated, or Malformed with a text that depends on those bytes and the
schema only. Memory is a small multiple of the given bytes. :func:`decode_many` gives for each payload the result of
:func:`decode_rows`, at a fraction of the cost.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from millrace.base.errors import InvalidArgument, Malformed
from millrace.message.payload.join import PayloadParts, join_payloads
from millrace.message.payload.layout import (
    CONTINUATION,
    PREFIX_BYTES,
    ExpectedShape,
    check_payload,
    parse_layout,
    read_values,
)

Int64s = npt.NDArray[np.int64]

MAX_TOTAL_BYTES: Final = 1 << 30
"""Maximum bytes of payloads in one :func:`decode_many`: offsets of the joined columns have 32 bits."""

_MAX_LAYOUTS: Final = 8
"""Layouts tried for payloads with metadata of one length; a payload with yet another is decoded alone."""


_REFUSALS: Final = (pa.ArrowException, ValueError, OSError)
"""Arrow's exceptions for invalid bytes."""

_FEW: Final = 8
"""Up to this many payloads are decoded one by one: joining has a fixed cost."""

_LARGE: Final = 16 << 10
"""Payloads above this mean size are decoded one by one: Arrow's cost per message is then small."""


@dataclass(frozen=True, slots=True)
class DecodedRows:
    """Rows of many payloads: those of the valid ones in order, the count of each (0 if invalid), and the errors by
    index.
    """

    rows: pa.RecordBatch
    counts: npt.NDArray[np.int64]
    errors: dict[int, str]


def encode_rows(batch: pa.RecordBatch) -> memoryview:
    """Return the payload of `batch`: one record-batch message, uncompressed, 8-byte aligned, in memory of its own.

    Raises InvalidArgument for an empty batch, and for column types that no field has (such as dictionaries).
    """
    if batch.num_rows == 0:
        raise InvalidArgument("a payload carries at least one row")
    for field in batch.schema:
        if not _is_plain(field.type):
            raise InvalidArgument(
                f"column {field.name!r} has type {field.type}; cast the batch to the collection's schema"
            )
    return memoryview(batch.serialize()).cast("B")


def decode_rows(payload: bytes | memoryview | pa.Buffer, schema: pa.Schema) -> pa.RecordBatch:
    """Return the rows of one payload as `schema`, over the payload's own bytes if they are aligned.

    Raises Malformed for an invalid payload.
    """
    check_payload(memoryview(payload), _shape_and_columns(schema, None)[0])
    return _read(payload if isinstance(payload, pa.Buffer) else pa.py_buffer(payload), schema)


def _read(buffer: pa.Buffer, schema: pa.Schema) -> pa.RecordBatch:
    """Read a payload whose metadata was checked, and validate it fully. Raises Malformed."""
    if buffer.address % 8:
        # Arrow's arrays point into these bytes, and some readers of Arrow arrays require alignment.
        try:
            return _validated([_aligned(column) for column in pa.ipc.read_record_batch(buffer, schema).columns], schema)
        except _REFUSALS:
            buffer = pa.py_buffer(buffer.to_pybytes())  # the error text must equal that for an aligned payload
    try:
        return _validated(pa.ipc.read_record_batch(buffer, schema).columns, schema)
    except _REFUSALS as error:
        raise Malformed(f"the payload is no Arrow record batch of its schema: {error}") from None


def _validated(columns: list[pa.Array], schema: pa.Schema) -> pa.RecordBatch:
    batch = pa.RecordBatch.from_arrays(columns, schema=schema)
    batch.validate(full=True)
    return batch


def _aligned(array: pa.Array) -> pa.Array:
    """Return `array` with values wider than a byte copied to aligned memory; bytes and text stay in place."""
    kind = array.type
    if pa.types.is_struct(kind):
        own, children = array.buffers()[:1], [_aligned(array.field(place)) for place in range(kind.num_fields)]
    elif pa.types.is_map(kind):
        fields = [kind.key_field, kind.item_field]
        entries = [_aligned(array.keys), _aligned(array.items)]
        own, children = array.buffers()[:2], [pa.StructArray.from_arrays(entries, fields=fields)]
    elif pa.types.is_list(kind):
        own, children = array.buffers()[:2], [_aligned(array.values)]
    else:
        own, children = array.buffers(), None
    keeps = 2 if pa.types.is_string(kind) or pa.types.is_binary(kind) else len(own)
    copied = [part and pa.py_buffer(part.to_pybytes()) for part in own[:keeps]]
    return pa.Array.from_buffers(kind, len(array), copied + own[keeps:], array.null_count, array.offset, children)


def decode_many(
    payloads: pa.LargeBinaryArray, schema: pa.Schema, *, columns: Sequence[str] | None = None
) -> DecodedRows:
    """Return the rows of many payloads, in order, as one batch of `schema`. Never raises for a payload's content.

    `columns` selects the columns to return (at least one; default: all). All columns are validated, but those that need
    no inspection are then not copied.
    Raises InvalidArgument above 1 GiB of payloads in total.
    """
    expected, nothing = _shape_and_columns(schema, None if columns is None else tuple(columns))
    wanted = nothing.schema
    count = len(payloads)
    counts = np.zeros(count, dtype=np.int64)
    errors: dict[int, str] = {}
    if count == 0:
        return DecodedRows(nothing, counts, errors)
    _, offsets_buffer, buffer = payloads.buffers()
    if buffer is None:
        buffer = pa.py_buffer(b"")
    offsets = np.frombuffer(offsets_buffer, dtype=np.int64, count=count + 1, offset=payloads.offset * 8)
    total = int(offsets[-1] - offsets[0])
    if total > MAX_TOTAL_BYTES:
        raise InvalidArgument(f"decode at most {MAX_TOTAL_BYTES} bytes of payloads at once")
    plain, joined = np.zeros(count, dtype=bool), np.zeros(count, dtype=bool)
    rows = nothing
    if count > _FEW:
        which, parts = _scan(buffer, offsets, expected)
        plain[which] = True
        # Payloads with less than two bytes per value are not joined: joining unpacks bits, and 16 MB hold many.
        joinable = parts.lengths.sum(axis=0) * 2 <= np.diff(offsets)[which]
        if total <= count * _LARGE and joinable.any():
            which, parts = which[joinable], parts.take(joinable)
            rows, good = join_payloads(parts, schema, wanted)
            joined[which[good]] = True
            counts[which[good]] = parts.lengths[0, good]

    # Decode the remaining payloads one by one, and insert their rows in order.
    pieces: list[pa.RecordBatch] = []
    ends = np.cumsum(counts)
    taken = 0
    for index in np.flatnonzero(~joined).tolist():
        start, stop = int(offsets[index]), int(offsets[index + 1])
        piece = buffer.slice(start, stop - start)
        try:
            if not plain[index]:
                check_payload(memoryview(piece), expected)
            batch = _read(piece, schema)
        except Malformed as error:
            errors[index] = str(error)
            continue
        if ends[index] > taken:
            pieces.append(rows.slice(taken, int(ends[index]) - taken))
            taken = int(ends[index])
        pieces.append(batch.select(wanted.names))
        counts[index] = batch.num_rows
    if not pieces:
        return DecodedRows(rows, counts, errors)
    if rows.num_rows > taken:
        pieces.append(rows.slice(taken))
    return DecodedRows(pieces[0] if len(pieces) == 1 else pa.concat_batches(pieces), counts, errors)


@lru_cache(maxsize=256)
def _shape_and_columns(schema: pa.Schema, columns: tuple[str, ...] | None) -> tuple[ExpectedShape, pa.RecordBatch]:
    """Return the expected shape of payloads of `schema`, and an empty batch of the columns to return."""
    wanted = schema if columns is None else pa.schema([schema.field(name) for name in columns])
    nothing = pa.RecordBatch.from_arrays([pa.array([], field.type) for field in wanted], schema=wanted)
    return ExpectedShape.of(schema), nothing


def _is_plain(arrow: pa.DataType) -> bool:
    if pa.types.is_list(arrow) or pa.types.is_map(arrow) or pa.types.is_struct(arrow):
        return arrow.num_fields > 0 and all(_is_plain(arrow.field(place).type) for place in range(arrow.num_fields))
    return bool(
        pa.types.is_primitive(arrow)
        or pa.types.is_boolean(arrow)
        or pa.types.is_decimal128(arrow)
        or pa.types.is_string(arrow)
        or pa.types.is_binary(arrow)
    )


def _scan(buffer: pa.Buffer, offsets: Int64s, expected: ExpectedShape) -> tuple[Int64s, PayloadParts]:
    """Return payloads that certainly pass check_payload, in ascending order, and the positions of their parts.

    Metadata of one writer and schema differs in values only, so one walk through its tables serves all. Excluded are
    payloads whose values are not aligned words, and those with one layout too many.
    """
    starts, lengths = offsets[:-1], np.diff(offsets)
    found: list[tuple[Int64s, PayloadParts]] = []
    candidates = np.flatnonzero(lengths > PREFIX_BYTES + expected.min_metadata_bytes)
    prefix = _words(buffer, starts[candidates], PREFIX_BYTES)[0].view(np.uint64)
    sizes = (prefix >> np.uint64(32)).astype(np.int64)
    right = (prefix & np.uint64(CONTINUATION) == CONTINUATION) & (sizes > 0) & (sizes % 8 == 0)
    right &= PREFIX_BYTES + sizes <= lengths[candidates]
    candidates, sizes = candidates[right], sizes[right]
    for size in np.unique(sizes).tolist():
        rest = candidates[sizes == size]
        words = _words(buffer, starts[rest] + PREFIX_BYTES, size)
        for _ in range(_MAX_LAYOUTS):
            if not rest.size:
                break
            try:
                layout = parse_layout(words[:, 0].tobytes(), expected)
            except Malformed:
                layout = None
            if layout is None or not layout.is_aligned(expected):
                rest, words = rest[1:], words[:, 1:]
                continue
            structure = np.ones(size >> 3, dtype=bool)
            for start, stop in layout.values(expected):
                structure[start >> 3 : stop >> 3] = False
            alike = (words[structure] == words[structure, :1]).all(axis=0)
            same, rest = _divide(rest, alike)
            mine, words = _divide(words, alike)
            bodies = starts[same] + PREFIX_BYTES + size
            values = read_values(mine, layout, expected)
            good = values.valid_for(offsets[same + 1] - bodies, expected)
            parts = PayloadParts(buffer, values.lengths, values.nulls, values.offsets + bodies, values.sizes)
            found.append((same[good], parts.take(good)))
    return _merged(found, buffer, expected)


def _words(buffer: pa.Buffer, starts: Int64s, size: int) -> Int64s:
    """Return the `size` bytes (a multiple of 8) after each start, as little-endian words, shaped (words, starts)."""
    if not starts.size:
        return np.zeros((size >> 3, 0), dtype=np.int64)
    # A view with a record at every byte offset, so that taking one copies its bytes once.
    records: npt.NDArray[np.void] = np.ndarray(
        (buffer.size - size + 1,), dtype=np.dtype((np.void, size)), buffer=buffer, strides=(1,)
    )
    return np.ascontiguousarray(records[starts].view("<i8").reshape(len(starts), -1).T)


def _divide(values: Int64s, which: npt.NDArray[np.bool_]) -> tuple[Int64s, Int64s]:
    """Split `values` along the last axis into the selected ones and the others."""
    if which.all():
        return values, values[..., :0]
    return values[..., which], values[..., ~which]


def _merged(
    found: list[tuple[Int64s, PayloadParts]], buffer: pa.Buffer, expected: ExpectedShape
) -> tuple[Int64s, PayloadParts]:
    """Merge payloads of several layouts, in their order."""
    if len(found) == 1:
        return found[0]
    nodes, buffers = (np.zeros((count, 0), dtype=np.int64) for count in (expected.nodes, expected.buffers))
    parts = [each for _, each in found]
    which = np.concatenate([np.zeros(0, dtype=np.int64), *(each for each, _ in found)])
    order = np.argsort(which)
    merged = PayloadParts(
        buffer,
        np.concatenate([nodes, *(each.lengths for each in parts)], axis=1),
        np.concatenate([nodes, *(each.nulls for each in parts)], axis=1),
        np.concatenate([buffers, *(each.offsets for each in parts)], axis=1),
        np.concatenate([buffers, *(each.sizes for each in parts)], axis=1),
    )
    return which[order], merged.take(order)
