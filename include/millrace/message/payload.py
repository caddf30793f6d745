"""Rows in a message: one encapsulated Arrow IPC record-batch message without schema (docs/wire-form.md, "Payloads").

Promises: any bytes give rows of exactly the schema, fully validated, or Malformed with words that depend on those bytes
and the schema alone; memory stays within a small multiple of the bytes given; :func:`decode_many` says of each payload
what :func:`decode_rows` says of it, at a fraction of the cost.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from millrace.errors import InvalidArgument, Malformed
from millrace.message.payload_join import Payloads, join
from millrace.message.payload_layout import (
    CONTINUATION,
    PREFIX_BYTES,
    Expected,
    check_payload,
    parse_layout,
    read_values,
)

Int64s = npt.NDArray[np.int64]
Bytes = npt.NDArray[np.uint8]

MAX_TOTAL_BYTES: Final = 1 << 30
"""Bytes of payloads that one :func:`decode_many` takes: offsets of the joined columns have 32 bits."""

_MAX_LAYOUTS: Final = 8
"""Layouts tried for payloads with metadata of one length; whatever has yet another is decoded alone."""


_FEW: Final = 8
"""Up to this many payloads are decoded one by one: joining has a cost of its own."""

_LARGE: Final = 16 << 10
"""Payloads above this mean size are decoded one by one: Arrow's price a message is small beside their bytes."""


@dataclass(frozen=True, slots=True)
class DecodedRows:
    """Rows of many payloads: the good ones' rows in order, how many each gave (0 for a bad one), and why the bad ones are."""

    rows: pa.RecordBatch
    counts: npt.NDArray[np.int64]
    errors: dict[int, str]


def encode_rows(batch: pa.RecordBatch) -> bytes:
    """The payload that carries `batch`: one record-batch message, uncompressed, 8-byte aligned.

    Raises InvalidArgument for an empty batch and for columns of types that no field has (dictionaries, say).
    """
    if batch.num_rows == 0:
        raise InvalidArgument("a payload carries at least one row")
    for field in batch.schema:
        if not _is_plain(field.type):
            raise InvalidArgument(
                f"column {field.name!r} has type {field.type}; cast the batch to the collection's schema"
            )
    return bytes(batch.serialize().to_pybytes())


def decode_rows(payload: bytes | memoryview | pa.Buffer, schema: pa.Schema) -> pa.RecordBatch:
    """The rows of one payload, as `schema`, over the payload's own bytes where they are aligned. Raises Malformed for anything else."""
    check_payload(memoryview(payload), _expected(schema))
    return _read(payload if isinstance(payload, pa.Buffer) else pa.py_buffer(payload), schema)


def _read(buffer: pa.Buffer, schema: pa.Schema) -> pa.RecordBatch:
    """What Arrow's reader makes of a payload whose metadata was checked, fully validated. Raises Malformed."""
    if buffer.address % 8:
        # Arrow's arrays are over these bytes, and not every reader of Arrow arrays bears unaligned ones.
        buffer = pa.py_buffer(buffer.to_pybytes())
    try:
        batch = pa.ipc.read_record_batch(buffer, schema)
        batch.validate(full=True)
    except (pa.ArrowException, ValueError, OSError) as error:
        raise Malformed(f"the payload is no Arrow record batch of its schema: {error}") from None
    return batch


def decode_many(payloads: pa.LargeBinaryArray, schema: pa.Schema) -> DecodedRows:
    """The rows of many payloads, in order, in one batch of `schema`; never raises for what stands in them.

    Raises InvalidArgument above 1 GiB of payloads in sum.
    """
    count = len(payloads)
    counts = np.zeros(count, dtype=np.int64)
    errors: dict[int, str] = {}
    if count == 0:
        return DecodedRows(_no_rows(schema), counts, errors)
    _, offsets_buffer, buffer = payloads.buffers()
    if buffer is None:
        buffer = pa.py_buffer(b"")
    offsets = np.frombuffer(offsets_buffer, dtype=np.int64, count=count + 1, offset=payloads.offset * 8)
    if int(offsets[-1] - offsets[0]) > MAX_TOTAL_BYTES:
        raise InvalidArgument(f"decode at most {MAX_TOTAL_BYTES} bytes of payloads at once")
    plain = joined = np.zeros(count, dtype=bool)
    rows = _no_rows(schema)
    if count > _FEW:
        plain, parts = _scan(np.frombuffer(buffer, dtype=np.uint8), buffer, offsets, _expected(schema))
        # Payloads that pack their values below two bytes each are left out: joining unpacks bits, and 16 MB of them are many.
        joinable = plain & (parts.lengths.sum(axis=1) * 2 <= np.diff(offsets))
        if joinable.any() and int(offsets[-1] - offsets[0]) <= count * _LARGE:
            places = np.flatnonzero(joinable)
            rows, good = join(parts.at(places), schema)
            joined = np.zeros(count, dtype=bool)
            joined[places[good]] = True
            counts[joined] = parts.lengths[joined, 0]

    # What was not joined is decoded alone; its rows go between those that were.
    pieces: list[pa.RecordBatch] = []
    ends = np.cumsum(counts)
    taken = 0
    for index in np.flatnonzero(~joined).tolist():
        start, stop = int(offsets[index]), int(offsets[index + 1])
        piece = buffer.slice(start, stop - start)
        try:
            batch = _read(piece, schema) if plain[index] else decode_rows(piece, schema)
        except Malformed as error:
            errors[index] = str(error)
            continue
        if ends[index] > taken:
            pieces.append(rows.slice(taken, int(ends[index]) - taken))
            taken = int(ends[index])
        pieces.append(batch)
        counts[index] = batch.num_rows
    if not pieces:
        return DecodedRows(rows, counts, errors)
    if rows.num_rows > taken:
        pieces.append(rows.slice(taken))
    return DecodedRows(pieces[0] if len(pieces) == 1 else pa.concat_batches(pieces), counts, errors)


@lru_cache(maxsize=256)
def _expected(schema: pa.Schema) -> Expected:
    return Expected.of(schema)


def _is_plain(arrow: pa.DataType) -> bool:
    if pa.types.is_list(arrow):
        arrow = arrow.value_type
    return bool(
        pa.types.is_primitive(arrow)
        or pa.types.is_boolean(arrow)
        or pa.types.is_string(arrow)
        or pa.types.is_binary(arrow)
    )


def _no_rows(schema: pa.Schema) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays([pa.array([], field.type) for field in schema], schema=schema)


def _scan(
    data: Bytes, buffer: pa.Buffer, offsets: Int64s, expected: Expected
) -> tuple[npt.NDArray[np.bool_], Payloads]:
    """Which payloads surely pass check_payload, and where their parts lie (rows of the others hold zeros).

    Metadata of one writer and schema differs in its values alone, so that one walk through its tables serves for all.
    """
    starts, lengths = offsets[:-1], np.diff(offsets)
    count = len(starts)
    plain = np.zeros(count, dtype=bool)
    parts = Payloads(
        buffer,
        np.zeros((count, expected.nodes), dtype=np.int64),
        np.zeros((count, expected.nodes), dtype=np.int64),
        np.zeros((count, expected.buffers), dtype=np.int64),
        np.zeros((count, expected.buffers), dtype=np.int64),
    )
    candidates = np.flatnonzero(lengths > PREFIX_BYTES + expected.least_metadata)
    if not candidates.size:
        return plain, parts
    prefix = data[starts[candidates, None] + np.arange(PREFIX_BYTES)].view("<u4").astype(np.int64)
    sizes = prefix[:, 1]
    right = (
        (prefix[:, 0] == CONTINUATION) & (sizes > 0) & (sizes % 8 == 0) & (PREFIX_BYTES + sizes <= lengths[candidates])
    )
    candidates, sizes = candidates[right], sizes[right]
    for size in np.unique(sizes).tolist():
        rest = candidates[sizes == size]
        metadata = data[starts[rest, None] + np.arange(PREFIX_BYTES, PREFIX_BYTES + size)]
        for _ in range(_MAX_LAYOUTS):
            if not rest.size:
                break
            try:
                layout = parse_layout(metadata[0].tobytes(), expected)
            except Malformed:
                rest, metadata = rest[1:], metadata[1:]
                continue
            structure = np.ones(size, dtype=bool)
            for start, stop in layout.values(expected):
                structure[start:stop] = False
            alike = (metadata[:, structure] == metadata[0, structure]).all(axis=1)
            same = rest[alike]
            values = read_values(metadata[alike], layout, expected)
            good = values.pass_for(lengths[same] - PREFIX_BYTES - size, expected)
            same = same[good]
            plain[same] = True
            parts.lengths[same], parts.nulls[same] = values.lengths[good], values.nulls[good]
            parts.places[same] = values.offsets[good] + (starts[same] + PREFIX_BYTES + size)[:, None]
            parts.sizes[same] = values.sizes[good]
            rest, metadata = rest[~alike], metadata[~alike]
    return plain, parts
