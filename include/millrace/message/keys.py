"""Which VChannel a primary key goes to: a fixed, versioned hash that producers and the chain compute alike.

Version 1: FNV-1a 64 over the key's bytes (an int64 as 8 bytes, little-endian, two's complement; a string as its UTF-8),
folded ``h ^ (h >> 32)``, modulo the number of VChannels. docs/wire-form.md specifies it for other clients. The result is
stored (rows lie in the VChannel of their key), so a change is a new version, never an edit.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from millrace.base.errors import InvalidArgument

KEY_HASH_VERSION: Final = 1

_OFFSET_BASIS: Final = 0xCBF29CE484222325
_PRIME: Final = 0x100000001B3
_MASK: Final = 0xFFFFFFFFFFFFFFFF

_FEW: Final = 64
"""Below this many keys still being hashed, a Python loop over their bytes beats one numpy pass a byte position."""

UInt64s = npt.NDArray[np.uint64]


def key_hash(key: int | str) -> int:
    """The unsigned 64-bit hash of one key: the reference that :func:`vchannel_index` equals, bit for bit.

    Raises InvalidArgument for an integer outside int64, for a string that is no Unicode text, for any other type.
    """
    if isinstance(key, str):
        try:
            data = key.encode("utf-8")
        except UnicodeEncodeError:
            raise InvalidArgument("a string key must be encodable as UTF-8") from None
    elif type(key) is int:
        try:
            data = key.to_bytes(8, "little", signed=True)
        except OverflowError:
            raise InvalidArgument(f"{key} does not fit an int64 key") from None
    else:
        raise InvalidArgument(f"a key is an int or a str, not {type(key).__name__}")
    value = _fnv(_OFFSET_BASIS, data)
    return value ^ (value >> 32)


def vchannel_index(keys: pa.Array | pa.ChunkedArray, count: int) -> npt.NDArray[np.int32]:
    """The VChannel (0 to `count` - 1) of each key, in order: shape ``(len(keys),)``.

    Takes int64, string, large_string, dictionary (of those) and chunked arrays. Raises InvalidArgument for nulls, other
    types, or a count outside 1..2**31-1.
    """
    if not 1 <= count < 1 << 31:
        raise InvalidArgument(f"a collection has 1 or more VChannels, not {count}")
    return np.asarray(key_hashes(keys) % np.uint64(count), dtype=np.int32)


def key_hashes(keys: pa.Array | pa.ChunkedArray) -> UInt64s:
    """:func:`key_hash` of each key, in order: shape ``(len(keys),)``. Raises as :func:`vchannel_index` does."""
    if isinstance(keys, pa.ChunkedArray):
        parts = [key_hashes(chunk) for chunk in keys.chunks]
        return np.concatenate(parts) if parts else np.zeros(0, dtype=np.uint64)
    if keys.null_count:
        raise InvalidArgument("a primary key is never null")
    if pa.types.is_dictionary(keys.type):
        if len(keys) == 0:
            return np.zeros(0, dtype=np.uint64)
        values = keys.dictionary
        if values.null_count:
            # An unused null of the dictionary hashes as "" and is never taken; a used one is a null key.
            indices = keys.indices.to_numpy(zero_copy_only=False)
            if not values.is_valid().to_numpy(zero_copy_only=False)[indices].all():
                raise InvalidArgument("a primary key is never null")
            values = values.fill_null(0 if pa.types.is_integer(values.type) else "")
        return key_hashes(values)[keys.indices.to_numpy(zero_copy_only=False)]
    if pa.types.is_int64(keys.type):
        return _fold(_integers(keys.to_numpy()))
    if pa.types.is_string(keys.type) or pa.types.is_large_string(keys.type):
        return _fold(_strings(keys))
    raise InvalidArgument(f"a primary key is int64 or string, not {keys.type}")


def _fold(hashes: UInt64s) -> UInt64s:
    return hashes ^ (hashes >> np.uint64(32))


def _integers(values: npt.NDArray[np.int64]) -> UInt64s:
    bits = values.astype(np.int64, copy=False).view(np.uint64)
    hashes = np.full(len(bits), _OFFSET_BASIS, dtype=np.uint64)
    for shift in range(0, 64, 8):
        hashes ^= (bits >> np.uint64(shift)) & np.uint64(0xFF)
        hashes *= np.uint64(_PRIME)
    return hashes


def _strings(keys: pa.Array) -> UInt64s:
    count = len(keys)
    hashes = np.full(count, _OFFSET_BASIS, dtype=np.uint64)
    if count == 0:
        return hashes
    _, offsets_buffer, data_buffer = keys.buffers()
    width: Any = np.int64 if pa.types.is_large_string(keys.type) else np.int32
    offsets = np.frombuffer(offsets_buffer, dtype=width, count=count + 1, offset=keys.offset * width().itemsize)
    data = (
        np.frombuffer(data_buffer, dtype=np.uint8)
        if data_buffer is not None and data_buffer.size
        else np.zeros(1, np.uint8)
    )
    lengths = np.diff(offsets)
    # Longest first: the keys that still have a byte at a position are then a prefix, and a pass touches them alone.
    order = np.argsort(-lengths, kind="stable")
    starts = offsets[:-1][order].astype(np.int64)
    ascending = np.sort(lengths)
    running = np.full(count, _OFFSET_BASIS, dtype=np.uint64)
    longest = int(ascending[-1])
    position = 0
    while position < longest:
        active = count - int(np.searchsorted(ascending, position, side="right"))
        if active < _FEW:
            for place in range(active):
                start = int(starts[place])
                stop = start + int(lengths[order[place]])
                running[place] = _fnv(int(running[place]), data[start + position : stop].tobytes())
            break
        front = running[:active]
        front ^= data[starts[:active] + position]
        front *= np.uint64(_PRIME)
        position += 1
    hashes[order] = running
    return hashes


def _fnv(value: int, data: bytes) -> int:
    for byte in data:
        value = ((value ^ byte) * _PRIME) & _MASK
    return value
