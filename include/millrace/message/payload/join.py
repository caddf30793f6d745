"""Join the columns of many record-batch messages into one batch, without an Arrow object per message.

Reading a one-row message through Arrow costs more than its bytes; here each column of all messages is gathered at once.
A payload with any irregularity is not judged here but reported, and rows.decode_rows decodes it alone, so both ways
accept the same payloads. This module accepts a subset, checked as Arrow's full validation checks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

Int64s = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
Bytes = npt.NDArray[np.uint8]

_ALONE: Final = 32
"""Maximum length of a run whose payloads are all decoded alone if the run fails validation."""

_ATTEMPTS: Final = 4
"""Passes over the columns that may exclude payloads; after that, all remaining ones are decoded alone."""


class _Suspects(Exception):
    """Raised with the payloads that have irregular parts."""

    def __init__(self, which: Bools) -> None:
        super().__init__()
        self.which = which


@dataclass(frozen=True, slots=True)
class PayloadParts:
    """The positions of the parts of n payloads.

    Node values are shaped (nodes, n); buffer offsets in the shared data, and sizes, are shaped (buffers, n).
    """

    buffer: pa.Buffer
    lengths: Int64s
    nulls: Int64s
    offsets: Int64s
    sizes: Int64s

    def __len__(self) -> int:
        return self.lengths.shape[1]

    def take(self, which: Int64s | Bools) -> PayloadParts:
        """Return some of them, in order."""
        if which.dtype == np.bool_ and which.all():
            return self
        lengths, nulls, places, sizes = (
            each[:, which] for each in (self.lengths, self.nulls, self.offsets, self.sizes)
        )
        return PayloadParts(self.buffer, lengths, nulls, places, sizes)


def join_payloads(payloads: PayloadParts, schema: pa.Schema, wanted: pa.Schema) -> tuple[pa.RecordBatch, Bools]:
    """Return the `wanted` columns of the payloads that are certainly valid in all of `schema`, and which payloads those
    are.
    """
    good = np.ones(len(payloads), dtype=bool)
    for _ in range(_ATTEMPTS):
        if not good.any():
            break
        try:
            batch = _Join(payloads.take(good), schema, wanted).batch()
        except _Suspects as found:
            good[np.flatnonzero(good)[found.which]] = False
            continue
        if _is_valid(batch):
            return batch.select(wanted.names), good
        good[_invalid(payloads, np.flatnonzero(good), schema, wanted)] = False
    nothing = pa.RecordBatch.from_arrays([pa.array([], field.type) for field in wanted], schema=wanted)
    return nothing, np.zeros_like(good)


def _is_valid(batch: pa.RecordBatch) -> bool:
    try:
        batch.validate(full=True)
    except pa.ArrowException:
        return False
    return True


def _invalid(payloads: PayloadParts, places: Int64s, schema: pa.Schema, wanted: pa.Schema) -> list[int]:
    """Return the runs of at most `_ALONE` payloads that fail validation, found by bisection."""
    if _is_valid(_Join(payloads.take(places), schema, wanted).batch()):
        return []
    if len(places) <= _ALONE:
        return [int(place) for place in places]
    half = len(places) // 2
    return _invalid(payloads, places[:half], schema, wanted) + _invalid(payloads, places[half:], schema, wanted)


class _Join:
    """One pass over the columns. Raises _Suspects as soon as a column has irregular parts.

    A column that is not wanted is built only if it holds text or decimals, which Arrow must validate. For the others
    any bytes are values, so it suffices to check buffer sizes and the order of offsets.
    """

    def __init__(self, payloads: PayloadParts, schema: pa.Schema, wanted: pa.Schema) -> None:
        names = set(wanted.names)
        self.payloads, self.schema = payloads, schema
        self.made = [field.name in names or _is_read(field.type) for field in schema]
        self.node = self.slot = 0

    def batch(self) -> pa.RecordBatch:
        """Return the columns that are built, in schema order."""
        columns = [self._column(field.type, make) for field, make in zip(self.schema, self.made, strict=True)]
        fields = [field for field, make in zip(self.schema, self.made, strict=True) if make]
        return pa.RecordBatch.from_arrays(
            [column for column in columns if column is not None], schema=pa.schema(fields)
        )

    def _next_node(self) -> tuple[Int64s, pa.Buffer | None, int]:
        """Return the lengths of the next node, its validity bitmap and its null count."""
        place, self.node = self.node, self.node + 1
        lengths, nulls = self.payloads.lengths[place], self.payloads.nulls[place]
        places, sizes = self._next_buffer()
        total = int(nulls.sum())
        if total == 0:
            return lengths, None, 0
        some = nulls > 0
        spans = np.where(some, (lengths + 7) >> 3, 0)
        valid = np.ones(int(lengths.sum()), dtype=bool)
        valid[np.repeat(some, lengths)] = self._bits(places, sizes, spans, np.where(some, lengths, 0))
        # Arrow's own validation also rejects a null count that contradicts the bitmap.
        found = lengths - _sums(valid, lengths)
        _suspect(found != nulls)
        return lengths, _bitmap(valid), total

    def _next_buffer(self) -> tuple[Int64s, Int64s]:
        slot, self.slot = self.slot, self.slot + 1
        return self.payloads.offsets[slot], self.payloads.sizes[slot]

    def _column(self, arrow: pa.DataType, make: bool) -> pa.Array | None:
        """Return the next column, or None if it is only checked."""
        lengths, validity, nulls = self._next_node()
        count = int(lengths.sum())
        if pa.types.is_struct(arrow):
            children = [self._column(arrow.field(place).type, make) for place in range(arrow.num_fields)]
            return pa.Array.from_buffers(arrow, count, [validity], nulls, children=children) if make else None
        if pa.types.is_list(arrow) or pa.types.is_map(arrow):
            offsets, starts, stops = self._offsets(lengths)
            # Items outside all lists would not be validated; such a payload is decoded alone.
            _suspect((starts != 0) | (stops != self.payloads.lengths[self.node]))
            items = self._column(arrow.field(0).type, make)
            return pa.Array.from_buffers(arrow, count, [validity, offsets], nulls, children=[items]) if make else None
        if pa.types.is_string(arrow) or pa.types.is_binary(arrow):
            offsets, starts, stops = self._offsets(lengths)
            places, sizes = self._next_buffer()
            _suspect(stops > sizes)
            if not make:
                return None
            data = self._gather(places + starts, stops - starts)
            return pa.Array.from_buffers(arrow, count, [validity, offsets, data], nulls)
        places, sizes = self._next_buffer()
        spans = (lengths * arrow.bit_width + 7) >> 3
        _suspect(sizes < spans)
        if not make:
            return None
        if pa.types.is_boolean(arrow):
            values = _bitmap(self._bits(places, sizes, spans, lengths))
        else:
            values = self._gather(places, spans)
        return pa.Array.from_buffers(arrow, count, [validity, values], nulls)

    def _offsets(self, lengths: Int64s) -> tuple[pa.Buffer, Int64s, Int64s]:
        """Return the joined 32-bit offsets of a variable-width column, and each payload's start and stop in its
        data.
        """
        places, sizes = self._next_buffer()
        present = lengths > 0
        _suspect(~present & (sizes > 0) & (sizes < 4))  # Arrow accepts no offset at all or a whole one, nothing between
        counts = np.where(present, lengths + 1, 0)
        given = np.frombuffer(self._sized(places, sizes, counts * 4), dtype="<i4")
        starts, stops = np.zeros(len(lengths), dtype=np.int64), np.zeros(len(lengths), dtype=np.int64)
        ends = np.cumsum(counts)
        starts[present], stops[present] = given[(ends - counts)[present]], given[ends[present] - 1]
        steps = np.ones(len(given), dtype=bool)
        steps[(ends - counts)[present]] = False
        upper = np.flatnonzero(steps)
        low, high = given[upper - 1], given[upper]
        falling = (low < 0) | (high < low)
        if falling.any():
            which = np.zeros(len(lengths), dtype=bool)
            which[np.repeat(np.arange(len(lengths)), lengths)[falling]] = True
            raise _Suspects(which)
        joined = np.zeros(len(upper) + 1, dtype=np.int64)
        np.cumsum(high - low, out=joined[1:])
        return pa.py_buffer(joined.astype(np.int32)), starts, stops

    def _sized(self, places: Int64s, sizes: Int64s, spans: Int64s) -> pa.Buffer:
        """Return the first `spans` bytes of each payload's buffer; payloads with a shorter buffer are suspects."""
        _suspect(sizes < spans)
        return self._gather(places, spans)

    def _bits(self, places: Int64s, sizes: Int64s, spans: Int64s, lengths: Int64s) -> Bools:
        data = np.frombuffer(self._sized(places, sizes, spans), dtype=np.uint8)
        if int(lengths.max()) <= 1:
            return (data & 1).astype(bool)
        bits = np.unpackbits(data, bitorder="little").astype(bool)
        shift = np.repeat((np.cumsum(spans) - spans) * 8 - (np.cumsum(lengths) - lengths), lengths)
        return np.asarray(bits[np.arange(len(shift)) + shift])

    def _gather(self, places: Int64s, spans: Int64s) -> pa.Buffer:
        """Return the bytes of all ranges, joined.

        Ranges and the gaps between them form one array; taking every other element is one copy.
        """
        if not spans.any():
            return pa.py_buffer(b"")
        bounds = np.empty(2 * len(places), dtype=np.int64)
        bounds[::2] = places
        bounds[1::2] = places + spans
        pieces = pa.LargeBinaryArray.from_buffers(
            pa.large_binary(), len(bounds) - 1, [None, pa.py_buffer(bounds), self.payloads.buffer]
        )
        return pieces.take(pa.array(np.arange(0, len(bounds), 2))).buffers()[2]


def _is_read(arrow: pa.DataType) -> bool:
    """Return whether some bytes are not valid values of the type, or of one inside it."""
    if arrow.num_fields:
        return any(_is_read(arrow.field(place).type) for place in range(arrow.num_fields))
    return bool(pa.types.is_string(arrow) or pa.types.is_decimal(arrow))


def _suspect(which: Bools) -> None:
    if which.any():
        raise _Suspects(which)


def _sums(values: Bools, lengths: Int64s) -> Int64s:
    """Return how many values of each run of `lengths` are true."""
    running = np.zeros(len(values) + 1, dtype=np.int64)
    np.cumsum(values, out=running[1:])
    ends = np.cumsum(lengths)
    return running[ends] - running[ends - lengths]


def _bitmap(values: Bools) -> pa.Buffer:
    return pa.py_buffer(np.packbits(values, bitorder="little"))
