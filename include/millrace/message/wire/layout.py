"""The layout of a log entry, versions 1 and 2: only the constants that docs/wire-form.md specifies."""

from __future__ import annotations

import struct
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from millrace.message.header import HEADER

MAGIC: Final = b"MLRW"
UNSTAMPED: Final = 1
"""Version of an entry without a stamp."""
STAMPED: Final = 2
"""Version of an entry with a stamp, which names the principal that appended it."""
VERSIONS: Final = (UNSTAMPED, STAMPED)

PREFIX: Final = struct.Struct("<4sIBBHIIII")
"""magic, crc32c of all that follows it, version, flags, length of the stamp (version 1: reserved), count, lengths of
columns, dictionary and body."""
CRC_START: Final = 8
TAGS_START: Final = PREFIX.size

MAX_MESSAGES: Final = 1 << 16
MAX_NAME_BYTES: Final = 255
MAX_STAMP_BYTES: Final = 255
"""Bytes of a stamp, which is at the end of an entry, after its body."""
ASSERTED: Final = 1
"""Flag of a stamp that the producer wrote itself, and that no server checked."""
ASSERTED_PREFIX: Final = "asserted:"
"""Prefix of the name of an asserted stamp wherever a principal is shown. No token's name can begin with it."""
BYTES_PER_MESSAGE: Final = 16
"""An entry of n messages has at least n times this many bytes, so that decoding cannot expand a few bytes into many
rows."""

UNDECODED_PAYLOAD_BYTES: Final = 64 << 10
"""Bytes of an undecodable entry that are kept as its row's payload."""

ABSENT: Final = 0
CONSTANT: Final = 1
ARRAY: Final = 2
RAMP: Final = 3


class HeaderColumn(NamedTuple):
    """A header column: its name, its struct code, its width, and its maximum value (the minimum is always 0)."""

    name: str
    code: str
    width: int
    max_value: int

    @property
    def dtype(self) -> np.dtype[np.generic]:
        return np.dtype("<" + {"H": "u2", "I": "u4", "i": "i4", "q": "i8"}[self.code])


_CODES: Final = {pa.uint16(): "H", pa.int32(): "i", pa.int64(): "q"}


def _column(name: str, kind: pa.DataType) -> HeaderColumn:
    stored = pa.uint16() if pa.types.is_dictionary(kind) else kind  # an index in the entry's dictionary
    return HeaderColumn(name, _CODES[stored], stored.byte_width, int(np.iinfo(stored.to_pandas_dtype()).max))


COLUMNS: Final = (
    *(_column(name, kind) for name, kind in HEADER.items()),
    HeaderColumn("payload_length", "I", 4, (1 << 32) - 1),
)
"""The header columns in the order of the wire form."""

COLUMNS_START: Final = TAGS_START + len(COLUMNS)
"""Bytes of the fixed part (prefix and tags), also the minimum length of an entry."""

WIDTHS: Final[npt.NDArray[np.int64]] = np.array([column.width for column in COLUMNS], dtype=np.int64)
