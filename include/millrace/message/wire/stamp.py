"""Stamp entries with the principal that appends them, before they are in a log.

A server replaces whatever stamp an entry has, so that a client cannot write another one's name. The checksum follows
from the client's own without reading the entry again: an entry that was damaged on its way stays damaged.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Final

import crc32c
import numpy as np
import pyarrow as pa

from millrace.message.wire.crc import linear_crc32c, shift_crc32c
from millrace.message.wire.encode import stamp_bytes
from millrace.message.wire.layout import CRC_START, MAGIC, PREFIX, STAMPED, UNSTAMPED

_WORD_END: Final = CRC_START + 4
"""The word of version, flags and the stamp's length ends here."""
_CRC_AT: Final = len(MAGIC)
_VERSION_AT: Final = CRC_START


def stamp_entries(values: pa.LargeBinaryArray, principal: str) -> pa.LargeBinaryArray:
    """Return entries with valid framing (millrace.message.wire.framing), each with the stamp of `principal` alone.

    An empty `principal` removes stamps. Takes one copy of the entries, and about 2 µs for each.
    Raises InvalidArgument for a name that does not fit a stamp.
    """
    stamp = stamp_bytes(principal)
    offsets = np.frombuffer(values.buffers()[1], np.int64, len(values) + 1, values.offset * 8)
    data = values.buffers()[2]
    if data is None:
        return values
    whole = memoryview(data)
    word = _word(len(stamp))
    parts: list[bytes | memoryview] = []
    sizes = np.empty(len(values), dtype=np.int64)
    changed = False
    for place, (start, end) in enumerate(zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True)):
        entry: bytes | memoryview = whole[start:end]
        if entry[_VERSION_AT] == STAMPED:
            entry, changed = _unstamped(bytes(entry)), True
        if stamp:
            crc = _stamped_crc(int.from_bytes(entry[_CRC_AT:CRC_START], "little"), len(entry), stamp)
            parts += (MAGIC, crc.to_bytes(4, "little"), word, entry[_WORD_END:], stamp)
        else:
            parts.append(entry)
        sizes[place] = len(entry) + len(stamp)
    if not stamp and not changed:
        return values
    ends = np.zeros(len(values) + 1, dtype=np.int64)
    np.cumsum(sizes, out=ends[1:])
    return pa.LargeBinaryArray.from_buffers(
        pa.large_binary(), len(values), [None, pa.py_buffer(ends), pa.py_buffer(b"".join(parts))]
    )


def _word(length: int) -> bytes:
    return (STAMPED | length << 16).to_bytes(4, "little")


def _stamped_crc(crc: int, size: int, stamp: bytes) -> int:
    """Return the checksum of an entry of `size` bytes without a stamp, whose own is `crc`, once it has the stamp."""
    changed, own = _stamping(size, stamp)
    return shift_crc32c(crc ^ changed, len(stamp)) ^ own


@lru_cache(maxsize=1024)
def _stamping(size: int, stamp: bytes) -> tuple[int, int]:
    """Return what the new word changes in an entry's checksum, and the checksum of the stamp."""
    difference = UNSTAMPED ^ int.from_bytes(_word(len(stamp)), "little")
    return linear_crc32c(difference.to_bytes(4, "little"), size - _WORD_END), int(crc32c.crc32c(stamp))


def _unstamped(entry: bytes) -> bytes:
    """Return an entry without its stamp. One whose checksum does not match gets another that does not."""
    magic, crc, _, _, length, *sections = PREFIX.unpack_from(entry)
    right = crc == crc32c.crc32c(memoryview(entry)[CRC_START:])
    rest = PREFIX.pack(magic, 0, UNSTAMPED, 0, 0, *sections)[CRC_START:] + entry[PREFIX.size : len(entry) - length]
    found = int(crc32c.crc32c(rest))
    return MAGIC + (found if right else found ^ 1).to_bytes(4, "little") + rest
