"""The rule for which deletes hit which rows.

A delete at (t, w) hits the rows of its key, in its partition if it names one, whose (visible tick, write tick) is
smaller. Inside a transaction, where visible ticks are equal, the order of writing decides.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from millrace.message.keys import key_column

TICKS: Final = ("_time_tick", "_write_tick")
PLACE: Final = ("_partition_id", *TICKS)
"""Columns by which, beside the key, a delete hits a row."""

_SPREAD: Final = 4
"""Integer keys need no hash table if their range is at most this many times their number."""

Int64s = npt.NDArray[np.int64]


def deleted_mask(rows: pa.Table, deletes: pa.Table, key: Sequence[str]) -> npt.NDArray[np.bool_]:
    """Return a mask of `rows` that `deletes` hit by the fields `key`: shape ``(rows,)``."""
    place, delete_key, span = _numbered(key_column(rows, key), key_column(deletes, key))
    result = np.zeros(rows.num_rows, dtype=bool)
    hit = np.flatnonzero(place >= 0)
    if len(hit) == 0:
        return result
    some = len(hit) < rows.num_rows

    def of_rows(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        return values[hit] if some else values

    row_key = of_rows(place)
    d_partition, d_time, d_write = (deletes[name].to_numpy() for name in PLACE)
    r_time, r_write = (of_rows(rows[name].to_numpy()) for name in TICKS)
    # For each (key, partition), the last delete hits whatever any of them hits.
    order = _in_order(d_time, d_write)
    order = np.arange(len(delete_key)) if order is None else order
    last = np.full(span, -1, dtype=np.int64)
    struck = np.zeros(len(hit), dtype=bool)
    groups = {} if name_no_partition(deletes) else _by_value(of_rows(rows["_partition_id"].to_numpy()))
    alone = bool((d_partition == d_partition[0]).all())
    for number, mine in _by_value(d_partition[:1] if alone else d_partition[order]).items():
        among = slice(None) if number == 0 else groups.get(number)
        if among is None:
            continue
        places = order[mine]
        theirs = delete_key[places]
        last[theirs] = places  # the last delete of a repeated key wins
        found = last[row_key[among]]
        time, written = d_time[found], r_time[among]
        later = time > written
        if (same := time == written).any():
            later |= same & (d_write[found] > r_write[among])
        struck[among] |= (found >= 0) & later
        last[theirs] = -1
    result[hit] = struck
    return result


def name_no_partition(deletes: pa.Table) -> bool:
    """Return whether all deletes apply to every partition, so that the partition of a row does not matter."""
    return not deletes["_partition_id"].to_numpy().any()


def _numbered(row_keys: Any, delete_keys: Any) -> tuple[Int64s, Int64s, int]:
    """Number the keys. Returns the rows' numbers (-1 without a delete), the deletes' numbers, and their upper bound."""
    if pa.types.is_int64(delete_keys.type) and len(delete_keys):
        theirs = delete_keys.to_numpy()
        low, high = int(theirs.min()), int(theirs.max())
        if high - low < _SPREAD * (len(row_keys) + len(theirs)):  # dense numbers are their own indices
            mine = row_keys.to_numpy()
            inside = (mine >= low) & (mine <= high)
            return (mine - low if inside.all() else np.where(inside, mine - low, -1)), theirs - low, high - low + 1
    keys = pc.unique(delete_keys)
    place, number = pc.index_in(row_keys, keys), pc.index_in(delete_keys, keys)
    return pc.fill_null(place, -1).to_numpy().astype(np.int64), number.to_numpy().astype(np.int64), len(keys)


def _in_order(times: Int64s, writes: Int64s) -> Int64s | None:
    """Return the order by time and write; None if they are sorted, as a deletes table usually is."""
    ascending = (times[1:] > times[:-1]) | ((times[1:] == times[:-1]) & (writes[1:] >= writes[:-1]))
    return None if ascending.all() else np.lexsort((writes, times))


def _by_value(values: Int64s) -> dict[int, slice | Int64s]:
    """Return the indices of each value, in order."""
    if len(values) and (values == values[0]).all():
        return {int(values[0]): slice(None)}
    order = np.argsort(values, kind="stable")
    found, begins = np.unique(values[order], return_index=True)
    return dict(zip(found.tolist(), np.split(order, begins[1:]), strict=True))
