"""The 128-bit hash by which the key index finds a key: XXH3-128 of the key's bytes, with seed 0.

The bytes are those of :mod:`millrace.message.keys`: an int64's 8 bytes, little-endian; a string's UTF-8; otherwise the
canonical bytes. Keys of 8 bytes (every integer, date and timestamp that is a key by itself) are hashed column by
column. For inputs of one length from 4 to 8 bytes, each step of XXH3-128 can be reversed. So two keys of 8 bytes with
the same hash are the same key, and a hit needs no look at the key itself (:func:`identifies_keys`).
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import xxhash

UInt64s = npt.NDArray[np.uint64]

HASH_NAME: Final = "xxh3_128"

_BITFLIP: Final = np.uint64(0xDB979083E96DD4DE ^ 0x1F67B3B7A4A44072)
"""Bytes 16 to 23 and 24 to 31 of XXH3's default secret."""
_MULTIPLIER: Final = (0x9E3779B185EBCA87 + (8 << 2)) & 0xFFFFFFFFFFFFFFFF
_LOW_MIX: Final = np.uint64(0x9FB21C651E98DF25)
_HIGH_MIX: Final = np.uint64(0x165667919E3779F9)
_HALF: Final = np.uint64(32)
_HALF_MASK: Final = np.uint64(0xFFFFFFFF)


class KeyHashes(NamedTuple):
    """Hashes of keys, each shaped ``(keys,)``."""

    high: UInt64s
    low: UInt64s


def identifies_keys(key: pa.Schema) -> bool:
    """Return whether keys of these columns with equal hashes are equal: each has 8 bytes."""
    kinds = [each.type for each in key]
    return len(kinds) == 1 and (
        pa.types.is_signed_integer(kinds[0]) or pa.types.is_date32(kinds[0]) or pa.types.is_timestamp(kinds[0])
    )


def hash_keys(keys: pa.Array | pa.ChunkedArray) -> KeyHashes:
    """Return the hashes of keys, given as :func:`millrace.message.keys.key_column` returns them.

    Takes about 0.02 µs for a key of 8 bytes and 0.4 µs for another one.
    """
    if isinstance(keys, pa.ChunkedArray):
        parts = [hash_keys(chunk) for chunk in keys.chunks]
        nothing = np.zeros(0, dtype=np.uint64)
        high = np.concatenate([nothing, *(each.high for each in parts)])
        low = np.concatenate([nothing, *(each.low for each in parts)])
        return KeyHashes(high, low)
    if pa.types.is_dictionary(keys.type):
        keys = keys.dictionary_decode()
    if pa.types.is_int64(keys.type):
        return _of_numbers(keys.to_numpy().view(np.uint64))
    keys = keys.cast(pa.large_binary())
    _, offset_buffer, data = keys.buffers()
    if len(keys) == 0:
        return KeyHashes(np.zeros(0, dtype=np.uint64), np.zeros(0, dtype=np.uint64))
    offsets = np.frombuffer(offset_buffer, dtype=np.int64)[keys.offset : keys.offset + len(keys) + 1]
    if (np.diff(offsets) == 8).all():
        return _of_numbers(np.frombuffer(data, "<u8", count=len(keys), offset=int(offsets[0])))
    view = memoryview(data if data is not None else b"")
    places = offsets.tolist()
    values = map(view.__getitem__, map(slice, places, places[1:]))
    both: Any = np.frombuffer(b"".join(map(xxhash.xxh3_128_digest, values)), ">u8").reshape(-1, 2)
    return KeyHashes(both[:, 0].astype(np.uint64), both[:, 1].astype(np.uint64))


def _of_numbers(values: UInt64s) -> KeyHashes:
    """Return XXH3-128 of values of 8 bytes."""
    keyed = values ^ _BITFLIP
    low, high = keyed * np.uint64(_MULTIPLIER), _high_product(keyed, _MULTIPLIER)
    high += low << np.uint64(1)
    low ^= high >> np.uint64(3)
    low ^= low >> np.uint64(35)
    low *= _LOW_MIX
    low ^= low >> np.uint64(28)
    high ^= high >> np.uint64(37)
    high *= _HIGH_MIX
    high ^= high >> np.uint64(32)
    return KeyHashes(high, low)


def _high_product(values: UInt64s, factor: int) -> UInt64s:
    """Return the upper 64 bits of each product."""
    low, high = values & _HALF_MASK, values >> _HALF
    factor_low, factor_high = np.uint64(factor & 0xFFFFFFFF), np.uint64(factor >> 32)
    middle = high * factor_low + ((low * factor_low) >> _HALF)
    other = low * factor_high + (middle & _HALF_MASK)
    return high * factor_high + (middle >> _HALF) + (other >> _HALF)
