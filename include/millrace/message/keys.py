"""Primary keys as one column, and the VChannel of each: a fixed, versioned hash, computed alike by producers and the
chain.

A key of one int64 or string is its own column (version 1). Any other key is its canonical bytes (version 2): those of
its fields, concatenated in the order of the schema:

- an int8, int16, int32 or int64, a date (days) and a timestamp (microseconds): 8 bytes, big-endian, with the sign bit
  flipped;
- a decimal: its unscaled value in the same way, in 16 bytes;
- a string or uuid: its UTF-8 with 00 FF for each 00, then 00 01.

The bytes compare as the keys do, field by field, and different keys have different bytes.

The hash is FNV-1a 64 over the key's bytes (an int64: its 8 bytes, little-endian; a string: its UTF-8; otherwise the
canonical bytes), folded ``h ^ (h >> 32)``, modulo the number of VChannels. docs/wire-form.md specifies both for other
clients, with test vectors. The result is stored (rows are in the VChannel of their key), so a change is a new version,
never an edit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from millrace.base.errors import InvalidArgument

KEY_HASH_VERSION: Final = 1

_OFFSET_BASIS: Final = 0xCBF29CE484222325
_PRIME: Final = 0x100000001B3
_MASK: Final = 0xFFFFFFFFFFFFFFFF

_FEW: Final = 64
"""Below this many unfinished keys, a Python loop over their bytes beats a numpy pass per byte position."""

UInt64s = npt.NDArray[np.uint64]

_PLAIN: Final = (pa.int64(), pa.utf8(), pa.large_utf8())
"""Types that are compared and hashed directly if the key has one field: version 1."""


def key_column(rows: pa.Table | pa.RecordBatch, names: Sequence[str]) -> Any:
    """Return the keys of `rows` as one array (chunked for a Table) that compares and orders as the keys do.

    `names` are the key's fields in order. Raises InvalidArgument for a null or an unsupported type.
    """
    if len(names) == 1 and _is_plain(rows.schema.field(names[0]).type):
        return rows.column(names[0])
    if isinstance(rows, pa.RecordBatch):
        return encode_keys([rows.column(name) for name in names])
    parts = [encode_keys([batch.column(name) for name in names]) for batch in rows.select(list(names)).to_batches()]
    return pa.chunked_array(parts, pa.large_binary())


def encode_keys(columns: Sequence[pa.Array]) -> pa.LargeBinaryArray:
    """Return the canonical bytes of keys, given as a column per field. Raises as :func:`key_column` does."""
    parts: list[Any] = []
    for column in columns:
        if column.null_count:
            raise InvalidArgument("a primary key is never null")
        if pa.types.is_string(column.type) or pa.types.is_large_string(column.type):
            parts += [_escaped(column.cast(pa.large_binary())), pa.scalar(b"\x00\x01", pa.large_binary())]
        elif pa.types.is_decimal128(column.type):
            parts.append(_decimals(column))
        else:
            parts.append(_encoded_integers(column))
    return parts[0] if len(parts) == 1 else pc.binary_join_element_wise(*parts, pa.scalar(b"", pa.large_binary()))


def _is_plain(kind: pa.DataType) -> bool:
    return (kind.value_type if pa.types.is_dictionary(kind) else kind) in _PLAIN


def _escaped(values: pa.LargeBinaryArray) -> pa.LargeBinaryArray:
    return pc.replace_substring(values, b"\x00", b"\x00\xff")


def _encoded_integers(column: pa.Array) -> pa.LargeBinaryArray:
    kind = column.type
    if pa.types.is_date32(kind):
        column = column.view(pa.int32())
    elif pa.types.is_timestamp(kind) and kind.unit == "us":
        column = column.view(pa.int64())
    elif not pa.types.is_signed_integer(kind):
        raise InvalidArgument(f"a primary key has no field of type {kind}")
    numbers: npt.NDArray[Any] = column.to_numpy().astype(np.int64)
    return _fixed((numbers.view(np.uint64) ^ np.uint64(1 << 63)).astype(">u8").view(np.uint8), len(column), 8)


def _decimals(column: pa.Array) -> pa.LargeBinaryArray:
    little = np.frombuffer(column.buffers()[1], np.uint8, count=16 * len(column), offset=16 * column.offset)
    turned = little.reshape(-1, 16)[:, ::-1].copy()
    turned[:, 0] ^= 0x80
    return _fixed(turned, len(column), 16)


def _fixed(data: npt.NDArray[np.uint8], count: int, width: int) -> pa.LargeBinaryArray:
    offsets = np.arange(0, (count + 1) * width, width, dtype=np.int64)
    return pa.LargeBinaryArray.from_buffers(pa.large_binary(), count, [None, pa.py_buffer(offsets), pa.py_buffer(data)])


def key_hash(key: int | str | bytes) -> int:
    """Return the unsigned 64-bit hash of one key (bytes: already encoded), the reference for :func:`vchannel_index`.

    Raises InvalidArgument for an integer outside int64, a string that is not valid Unicode, or another type.
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
    elif isinstance(key, bytes):
        data = key
    else:
        raise InvalidArgument(f"a key is an int, a str or bytes, not {type(key).__name__}")
    value = _fnv(_OFFSET_BASIS, data)
    return value ^ (value >> 32)


def vchannel_index(keys: pa.Array | pa.ChunkedArray, count: int) -> npt.NDArray[np.int32]:
    """Return the VChannel (0 to `count` - 1) of each key, shaped ``(len(keys),)``.

    Accepts int64, string, large_string, encoded keys, dictionaries of those, and chunked arrays: the results of
    :func:`~millrace.message.keys.key_column`.
    Raises InvalidArgument for nulls, other types, or a count outside 1..2**31-1.
    """
    if not 1 <= count < 1 << 31:
        raise InvalidArgument(f"a collection has 1 or more VChannels, not {count}")
    return np.asarray(key_hashes(keys) % np.uint64(count), dtype=np.int32)


def key_hashes(keys: pa.Array | pa.ChunkedArray) -> UInt64s:
    """Return :func:`key_hash` of each key, shaped ``(len(keys),)``. Raises as :func:`vchannel_index` does."""
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
        if len(keys) == 1:  # fast path for a single row
            return np.array([key_hash(keys[0].as_py())], dtype=np.uint64)
        return _fold(_integers(keys.to_numpy()))
    if pa.types.is_string(keys.type) or pa.types.is_large_string(keys.type) or pa.types.is_large_binary(keys.type):
        return _fold(_strings(keys))
    raise InvalidArgument(f"a primary key's column is int64, string or its encoding, not {keys.type}")


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
    width: Any = np.int32 if pa.types.is_string(keys.type) else np.int64
    offsets = np.frombuffer(offsets_buffer, dtype=width, count=count + 1, offset=keys.offset * width().itemsize)
    data = (
        np.frombuffer(data_buffer, dtype=np.uint8)
        if data_buffer is not None and data_buffer.size
        else np.zeros(1, np.uint8)
    )
    lengths = np.diff(offsets)
    # Longest first: keys with a byte at a position are then a prefix, and a pass touches only them.
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
