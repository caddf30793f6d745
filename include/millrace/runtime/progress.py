"""The progress file of a running operation."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from millrace.base.files import replace_json


class Progress:
    """Progress of a running operation, written to one file that is replaced atomically, or shown to a person.

    Without a path or `show` it does nothing. millrace.client.progress.operation_words says it in words.
    """

    def __init__(self, path: Path | None = None, *, show: Callable[[Mapping[str, Any]], None] | None = None) -> None:
        self._path = path
        self._show = show
        self._since = time.time()
        self._done: float | None = None

    def update(self, words: str, *, done: float | None = None, **figures: float | int | str) -> None:
        """Publish `words` for people, `done` as a fraction of 1 if known, and named figures.

        The file also says since when `done` has grown, from which readers estimate the time left.
        """
        if self._path is None and self._show is None:
            return
        now = time.time()
        if done is None or self._done is None or done < self._done:
            self._since = now
        self._done = done
        value = {"words": words, "done": done, "figures": figures, "at": now, "since": self._since, "pid": os.getpid()}
        if self._path is not None:
            replace_json(self._path, value)
        if self._show is not None:
            self._show(value)

    def step(self, words: str, number: int, total: int, **figures: float | int | str) -> None:
        """Publish that `number` of `total` units are done and what the next one is."""
        self.update(f"{words} ({number:,} of {total:,} done)", done=number / total if total else None, **figures)
