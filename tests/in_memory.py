"""A folder in memory, where the machine has such a one.

For tests whose calls sync each time, and which are not about what survives.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

MEMORY = "/dev/shm"


@contextmanager
def folder_in_memory() -> Iterator[Path]:
    """Empty, and gone with the block."""
    with tempfile.TemporaryDirectory(dir=MEMORY if os.access(MEMORY, os.W_OK) else None) as folder:
        yield Path(folder)
