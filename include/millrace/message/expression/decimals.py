"""Decimals in expressions as exact unscaled integers: numpy int64 if all fit, else Python integers."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from millrace.message.field_types import FieldType

Unscaled = npt.NDArray[Any]
"""Values as int64 without its minimum, or as an object array of integers."""
Bools = npt.NDArray[np.bool_]

_MOST: Final = (1 << 63) - 1
_LOW: Final = (1 << 64) - 1


def from_arrow(column: pa.Array) -> Unscaled:
    """Return the unscaled values of a decimal128 column, 0 for nulls."""
    if not len(column):
        return np.zeros(0, dtype=np.int64)
    words = np.frombuffer(column.buffers()[1], np.int64, count=2 * len(column), offset=16 * column.offset).reshape(
        -1, 2
    )
    if column.null_count:
        words = np.where(column.is_valid().to_numpy(zero_copy_only=False)[:, None], words, 0)
    low, high = words[:, 0], words[:, 1]
    if (high == low >> 63).all() and (low != -_MOST - 1).all():
        return low.copy()
    return high.astype(object) * (_LOW + 1) + low.astype(np.uint64).astype(object)


def to_arrow(values: Unscaled, kind: FieldType, mask: Bools | None) -> pa.Array:
    """Return unscaled values that fit as a decimal128 column; null where `mask`."""
    words = np.empty((len(values), 2), dtype=np.uint64)
    if values.dtype == object:
        words[:, 0] = (values & _LOW).astype(np.uint64)
        words[:, 1] = ((values >> 64) & _LOW).astype(np.uint64)
    else:
        words[:, 0], words[:, 1] = values.view(np.uint64), (values >> 63).view(np.uint64)
    validity = None if mask is None else pa.array(~mask).buffers()[1]
    return pa.Array.from_buffers(kind.arrow, len(values), [validity, pa.py_buffer(words)])


def constant(unscaled: int, rows: int) -> Unscaled:
    """Return one value for each row."""
    return np.full(rows, unscaled, dtype=np.int64 if abs(unscaled) <= _MOST else object)


def from_integers(values: npt.NDArray[np.int64]) -> Unscaled:
    """Return integers as unscaled values of scale 0."""
    return values.astype(object) if len(values) and values.min() == -_MOST - 1 else values


def apply_operator(op: str, one: Unscaled, other: Unscaled) -> Unscaled:
    """Apply ``+``, ``-`` or ``*`` to values of one scale (any scales for a product)."""
    most, also = _bound(one), _bound(other)
    if (most * also if op == "*" else most + also) > _MOST:
        one, other = one.astype(object), other.astype(object)
    found: Unscaled = one + other if op == "+" else one - other if op == "-" else one * other
    return found


def raise_scale(values: Unscaled, digits: int) -> Unscaled:
    """Add `digits` digits after the point."""
    return values if digits == 0 else apply_operator("*", values, constant(10**digits, len(values)))


def lower_scale(values: Unscaled, digits: int, *, halves_up: bool = False) -> Unscaled:
    """Remove `digits` digits after the point, truncating or, with `halves_up`, rounding half away from zero."""
    if digits == 0:
        return values
    unit = 10**digits
    if unit > _MOST // 4 or _bound(values) > _MOST - unit:
        values = values.astype(object)
    sizes = np.abs(values)
    found: Unscaled = (sizes + unit // 2 if halves_up else sizes) // unit
    return np.where(values < 0, -found, found)


def rescale(values: Unscaled, have: FieldType, want: FieldType) -> tuple[Unscaled, Bools | None]:
    """Convert values between decimal types.

    Returns them and where one does not fit: it would lose digits or is too large.
    """
    more = want.scale - have.scale
    if more >= 0:
        found, wrong = raise_scale(values, more), None
    else:
        found = lower_scale(values, -more)
        wrong = (raise_scale(found, -more) != values).astype(bool)
    if want.precision - want.scale < have.precision - have.scale:
        beyond = (np.abs(found) >= 10**want.precision).astype(bool)
        wrong = beyond if wrong is None else wrong | beyond
    return (found if wrong is None else np.where(wrong, 0, found)), wrong


def _bound(values: Unscaled) -> int:
    return max(abs(int(values.min())), abs(int(values.max()))) if len(values) else 0
