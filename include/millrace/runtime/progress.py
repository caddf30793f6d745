"""The progress file of a running operation."""

from __future__ import annotations

import os
import time
from pathlib import Path

from millrace.base.files import replace_json


class Progress:
    """Progress of a running operation, written to one file that is replaced atomically.

    Without a path it does nothing.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._path = path

    def update(self, words: str, *, done: float | None = None, **figures: float | int | str) -> None:
        """Publish `words` for people, `done` as a fraction of 1 if known, and named figures."""
        if self._path is None:
            return
        replace_json(
            self._path, {"words": words, "done": done, "figures": figures, "at": time.time(), "pid": os.getpid()}
        )
