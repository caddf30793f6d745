"""Assignment of keys to shards: by a fixed hash, so that every process sends a row to the same shard."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import xxhash

from millrace.streams.patterns.sorted_rows import column_of, key_codes, one_chunk, one_value_each


def shard_numbers(rows: pa.Table, keys: Sequence[str], shards: int) -> npt.NDArray[np.int64]:
    """Return each row's shard: xxh64 of its keys' texts, computed once for each distinct key."""
    if shards == 1 or not keys or not rows.num_rows:
        return np.zeros(rows.num_rows, dtype=np.int64)
    names = [column_of(rows.schema, each) for each in keys]
    codes = key_codes(rows, names)
    _, first = np.unique(codes, return_index=True)
    chosen = rows.select(names).take(pa.array(first))
    distinct = pa.table([one_value_each(one_chunk(each)) for each in chosen.columns], names=names).to_pylist()
    hashed = [xxhash.xxh64_intdigest(repr(tuple(each.values())).encode()) % shards for each in distinct]
    return np.array(hashed, dtype=np.int64)[codes]


def shards_of(rows: pa.Table, keys: Sequence[str], shards: int) -> list[pa.Table]:
    """Return the rows of each shard."""
    if shards == 1:
        return [rows]
    numbers = shard_numbers(rows, keys, shards)
    return [rows.filter(pa.array(numbers == each)) for each in range(shards)]
