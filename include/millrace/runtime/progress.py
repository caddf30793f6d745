"""Progress of a running operation in one small file, for who watches it."""

from __future__ import annotations

import os
import time
from pathlib import Path

from millrace.base.files import replace_json


class Progress:
    """Progress of a running operation in one small file, replaced whole; without a path it is kept to itself."""

    def __init__(self, path: Path | None = None) -> None:
        self._path = path

    def update(self, words: str, *, done: float | None = None, **figures: float | int | str) -> None:
        """`words` for a person, `done` as a share of 1 where it is known, and figures by name."""
        if self._path is None:
            return
        replace_json(
            self._path, {"words": words, "done": done, "figures": figures, "at": time.time(), "pid": os.getpid()}
        )
