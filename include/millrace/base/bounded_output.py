"""What a process of ours prints into a file stays bounded."""

from __future__ import annotations

import os
import shutil
from pathlib import Path


def rotate_log(log: Path, most: int) -> None:
    """Put a log aside that has grown beyond `most` bytes. Who writes it appends, and so goes on at its new end."""
    if log.stat().st_size > most:
        shutil.copyfile(log, log.with_name(f"{log.name}.1"))
        os.truncate(log, 0)
