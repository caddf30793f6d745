"""What the two sides say to each other, over a pipe each way: a kind, a length, and JSON; the question alone, which comes from us, is pickled."""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import Final

HEAD: Final = struct.Struct(">BI")
WHERE_BYTES: Final = 500
"""Where the work is, in words, in a file in memory: looked at when the process was killed, by nobody before."""


class Kind(IntEnum):
    """Of a frame."""

    QUESTION = 0
    ANSWER = 1
    READY = 2
    """It has loaded what it needs."""
    ASKS = 3
    """The process apart wants to know something of the one that asked."""
    TOLD = 4
    """The reply to that."""
    LIMIT = 5
    """A limit that the process apart saw itself: its name, and in words how it was hit."""
    FAILED = 6
    """A fault of ours, in words."""
