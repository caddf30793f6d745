"""Joins the columns of many record-batch messages into one batch, without an Arrow object for each message.

Reading a one-row message through Arrow costs more than its bytes do; here each column of all messages is gathered at
once. Whatever is not exactly as it should be is not judged here but named, and decoded alone by payload.decode_rows, so
that both ways accept the same payloads: what this module accepts is a subset, checked as Arrow's full validation checks.
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
"""Where a run of at most this many payloads fails validation, all of them are decoded alone."""

_ATTEMPTS: Final = 4
"""Passes over the columns that may end with some payloads put aside; after that all that are left are decoded alone."""


class _Suspects(Exception):
    """Payloads whose parts are not as they should be."""

    def __init__(self, which: Bools) -> None:
        super().__init__()
        self.which = which


@dataclass(frozen=True, slots=True)
class Payloads:
    """Where the parts of n payloads lie: node values (n, nodes), buffer places in the shared data and sizes (n, buffers)."""

    buffer: pa.Buffer
    lengths: Int64s
    nulls: Int64s
    places: Int64s
    sizes: Int64s

    def at(self, which: Int64s | Bools) -> Payloads:
        """Some of them, in order."""
        return Payloads(self.buffer, self.lengths[which], self.nulls[which], self.places[which], self.sizes[which])


def join(payloads: Payloads, schema: pa.Schema) -> tuple[pa.RecordBatch, Bools]:
    """One batch of the rows of those payloads that surely are right, and which of them these are."""
    good = np.ones(len(payloads.lengths), dtype=bool)
    for _ in range(_ATTEMPTS):
        if not good.any():
            break
        places = np.flatnonzero(good)
        try:
            batch = _Join(payloads.at(places), schema).batch()
        except _Suspects as found:
            good[places[found.which]] = False
            continue
        if _is_valid(batch):
            return batch, good
        good[_invalid(payloads, places, schema)] = False
    return pa.RecordBatch.from_arrays([pa.array([], field.type) for field in schema], schema=schema), np.zeros_like(
        good
    )


def _is_valid(batch: pa.RecordBatch) -> bool:
    try:
        batch.validate(full=True)
    except pa.ArrowException:
        return False
    return True


def _invalid(payloads: Payloads, places: Int64s, schema: pa.Schema) -> list[int]:
    """The runs of at most `_ALONE` payloads that do not validate, found by halving."""
    if _is_valid(_Join(payloads.at(places), schema).batch()):
        return []
    if len(places) <= _ALONE:
        return [int(place) for place in places]
    half = len(places) // 2
    return _invalid(payloads, places[:half], schema) + _invalid(payloads, places[half:], schema)


class _Join:
    """One pass over the columns. Raises _Suspects as soon as a column shows some."""

    def __init__(self, payloads: Payloads, schema: pa.Schema) -> None:
        self.payloads, self.schema = payloads, schema
        self.node = self.slot = 0

    def batch(self) -> pa.RecordBatch:
        columns = [self._column(field.type) for field in self.schema]
        return pa.RecordBatch.from_arrays(columns, schema=self.schema)

    def _next_node(self) -> tuple[Int64s, pa.Buffer | None, int]:
        """Lengths of the next node, and its validity: bitmap and null count."""
        place, self.node = self.node, self.node + 1
        lengths, nulls = self.payloads.lengths[:, place], self.payloads.nulls[:, place]
        places, sizes = self._next_buffer()
        total = int(nulls.sum())
        if total == 0:
            return lengths, None, 0
        some = nulls > 0
        spans = np.where(some, (lengths + 7) >> 3, 0)
        valid = np.ones(int(lengths.sum()), dtype=bool)
        valid[np.repeat(some, lengths)] = self._bits(places, sizes, spans, np.where(some, lengths, 0))
        # Where a count is not what the bitmap says, Arrow's own validation would refuse it too.
        found = lengths - _sums(valid, lengths)
        _suspect(found != nulls)
        return lengths, _bitmap(valid), total

    def _next_buffer(self) -> tuple[Int64s, Int64s]:
        slot, self.slot = self.slot, self.slot + 1
        return self.payloads.places[:, slot], self.payloads.sizes[:, slot]

    def _column(self, arrow: pa.DataType) -> pa.Array:
        lengths, validity, nulls = self._next_node()
        count = int(lengths.sum())
        if pa.types.is_list(arrow):
            offsets, starts, stops = self._offsets(lengths)
            # Items outside the lists' own would go unchecked; such a payload is decoded alone.
            _suspect((starts != 0) | (stops != self.payloads.lengths[:, self.node]))
            items = self._column(arrow.value_type)
            return pa.Array.from_buffers(arrow, count, [validity, offsets], nulls, children=[items])
        if pa.types.is_string(arrow) or pa.types.is_binary(arrow):
            offsets, starts, stops = self._offsets(lengths)
            places, sizes = self._next_buffer()
            _suspect(stops > sizes)
            data = self._gather(places + starts, stops - starts)
            return pa.Array.from_buffers(arrow, count, [validity, offsets, data], nulls)
        places, sizes = self._next_buffer()
        if pa.types.is_boolean(arrow):
            values = _bitmap(self._bits(places, sizes, (lengths + 7) >> 3, lengths))
        else:
            values = self._sized(places, sizes, lengths * (arrow.bit_width // 8))
        return pa.Array.from_buffers(arrow, count, [validity, values], nulls)

    def _offsets(self, lengths: Int64s) -> tuple[pa.Buffer, Int64s, Int64s]:
        """Joined 32-bit offsets of a variable-width column, and where each payload's values start and stop in its data."""
        places, sizes = self._next_buffer()
        present = lengths > 0
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
        """The first `spans` bytes of each payload's buffer; payloads whose buffer is shorter are suspects."""
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
        """The bytes of all ranges, joined: with the gaps between them they are one array, of which every other is taken."""
        if not spans.any():
            return pa.py_buffer(b"")
        bounds = np.empty(2 * len(places), dtype=np.int64)
        bounds[::2] = places
        bounds[1::2] = places + spans
        pieces = pa.LargeBinaryArray.from_buffers(
            pa.large_binary(), len(bounds) - 1, [None, pa.py_buffer(bounds), self.payloads.buffer]
        )
        return pieces.take(pa.array(np.arange(0, len(bounds), 2))).buffers()[2]


def _suspect(which: Bools) -> None:
    if which.any():
        raise _Suspects(which)


def _sums(values: Bools, lengths: Int64s) -> Int64s:
    """How many of each run of `lengths` values are true."""
    running = np.zeros(len(values) + 1, dtype=np.int64)
    np.cumsum(values, out=running[1:])
    ends = np.cumsum(lengths)
    return running[ends] - running[ends - lengths]


def _bitmap(values: Bools) -> pa.Buffer:
    return pa.py_buffer(np.packbits(values, bitorder="little"))
