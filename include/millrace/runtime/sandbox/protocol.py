"""What the two sides say to each other, over a pipe each way: a kind, a length, and JSON; the question alone, which comes from us, is pickled."""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import Final

FRAME_HEADER: Final = struct.Struct(">BI")
POSITION_BYTES: Final = 500
"""Where the work is, in words, in a file in memory: looked at when the process was killed, by nobody before."""


class FrameKind(IntEnum):
    """Of a frame."""

    REQUEST = 0
    RESULT = 1
    READY = 2
    """It has loaded what it needs."""
    CALLBACK = 3
    """The process apart wants to know something of the one that asked."""
    CALLBACK_RESULT = 4
    """The reply to that."""
    LIMIT = 5
    """A limit that the process apart saw itself: its name, and in words how it was hit."""
    FAILURE = 6
    """A fault of ours, in words."""
