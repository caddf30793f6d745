"""Combine the crc32c of parts into that of their concatenation, without reading the bytes again.

Appending n bytes multiplies a checksum by x**(8 n), in the field of polynomials over GF(2) modulo Castagnoli's (zlib's
crc32_combine does the same for its own).
"""

from __future__ import annotations

from functools import lru_cache
from typing import Final

import crc32c

_CASTAGNOLI: Final = 0x82F63B78  # reflected: the highest bit is x**0
_ONE: Final = 1 << 31


def combine_crc32c(first: int, second: int, length: int) -> int:
    """Return the crc32c of A + B from those of A and B, and the length of B in bytes."""
    return _product(_zeros(length), first) ^ second


def linear_crc32c(data: bytes, length: int) -> int:
    """Return what the crc32c of a value changes by if `data` is added (xor) to it, with `length` bytes after `data`."""
    return _product(_zeros(length), crc32c.crc32c(data) ^ crc32c.crc32c(bytes(len(data))))


def shift_crc32c(crc: int, length: int) -> int:
    """Return the part that a crc32c has in that of a value with `length` more bytes, few of them different."""
    first, second, third, fourth = _tables(length)
    return first[crc & 0xFF] ^ second[crc >> 8 & 0xFF] ^ third[crc >> 16 & 0xFF] ^ fourth[crc >> 24]


def _product(a: int, b: int) -> int:
    product = 0
    bit = _ONE
    while a:
        if a & bit:
            product ^= b
            a ^= bit
        bit >>= 1
        b = (b >> 1) ^ _CASTAGNOLI if b & 1 else b >> 1
    return product


def _squares(count: int) -> tuple[int, ...]:
    """Return x**(2**k) for k below `count`."""
    found = [_ONE >> 1]
    while len(found) < count:
        found.append(_product(found[-1], found[-1]))
    return tuple(found)


_SQUARES: Final = _squares(64)


@lru_cache(maxsize=1024)
def _zeros(length: int) -> int:
    """Return x**(8 * length)."""
    power = _ONE
    for place in range(length.bit_length()):
        if length >> place & 1:
            power = _product(_SQUARES[place + 3], power)
    return power


@lru_cache(maxsize=64)
def _tables(length: int) -> tuple[tuple[int, ...], ...]:
    """Return the products of x**(8 * length) with each value of each byte of a checksum."""
    power = _zeros(length)
    return tuple(tuple(_product(power, byte << place) for byte in range(256)) for place in (0, 8, 16, 24))
