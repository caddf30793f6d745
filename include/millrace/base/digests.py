"""Digests of files."""

from __future__ import annotations

import hashlib
from pathlib import Path


def sha256_file(path: Path) -> str:
    """The sha256 of a file's bytes, as 64 lower-case hexadecimal digits. Memory does not grow with the file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
