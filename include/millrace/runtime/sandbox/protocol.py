"""The frames between a sandbox and its workers: a kind, a length and a JSON body, over one pipe in each direction.

Only a request, which comes from the trusted side, is pickled.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import Final

FRAME_HEADER: Final = struct.Struct(">BI")
POSITION_BYTES: Final = 500
"""Size of the position record, in a memory file that is read only after a worker was killed."""


class FrameKind(IntEnum):
    """The kinds of frames."""

    REQUEST = 0
    RESULT = 1
    READY = 2
    """The worker has loaded its imports."""
    CALLBACK = 3
    """The worker asks its caller."""
    CALLBACK_RESULT = 4
    """The caller's answer to a callback."""
    LIMIT = 5
    """A limit that the worker itself detected: its name, and a message."""
    FAILURE = 6
    """A bug on the worker's side, as a message."""
