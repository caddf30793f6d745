"""What a streaming query did over time: one small sample behind its micro-batches, for charts. Nothing decides by it.

A sample is a JSON line of ``<data_dir>/run/history/<query>.jsonl``: counters since the start of the process (a reader takes
differences, and begins anew where the process id changes) and lags at that moment. Bounded: at most one sample a second is
written, all but the newest are thinned to one every five seconds, and what is older than a day goes. Losing the file, or a
torn last line after a crash, costs a piece of a chart.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from millrace.base.files import replace_file
from millrace.base.settings import Settings

SAMPLE_SECONDS: Final = 1.0
"""The least time between two samples."""
THIN_SECONDS: Final = 5.0
"""The least time between two samples that were thinned."""
RETENTION_SECONDS: Final = 24 * 3600.0
UNTHINNED_SECONDS: Final = 900.0
"""How long samples stay as they were written."""
THIN_AFTER: Final = 1800
"""Samples that are written between two thinnings: about half an hour of work."""

_logger = logging.getLogger(__name__)


def samples_file(settings: Settings, query: str) -> Path:
    """The file with the samples of a streaming query."""
    return settings.node_run_path / "history" / f"{query}.jsonl"


class SampleFile:
    """Appends samples to one file. One writer; readers take what is there."""

    def __init__(self, path: Path, *, clock: Callable[[], float] = time.time) -> None:
        self._path = path
        self._clock = clock
        self._last = 0.0
        self._written = THIN_AFTER  # the first sample of a process thins what its predecessor left

    def add(self, sample: Mapping[str, Any]) -> None:
        """Append `sample` with the time and this process's id, where the last one is old enough. Never raises OSError:
        a chart is not worth a micro-batch."""
        now = self._clock()
        if now - self._last < SAMPLE_SECONDS:
            return
        self._last = now
        line = json.dumps({"at": round(now, 3), "pid": os.getpid(), **sample}, separators=(",", ":"))
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            if self._written >= THIN_AFTER:
                self._thin(now)
                self._written = 0
            with self._path.open("a", encoding="utf-8") as file:
                file.write(line + "\n")
            self._written += 1
        except OSError as error:
            _logger.warning("no history sample: %s", error)

    def _thin(self, now: float) -> None:
        """Rewrite the file without what is old, and with a sample every few seconds of what is not quite new."""
        kept: list[str] = []
        last = 0.0
        for line, at in _lines(self._path):
            if at < now - RETENTION_SECONDS or (at < now - UNTHINNED_SECONDS and 0 <= at - last < THIN_SECONDS):
                continue
            last = at
            kept.append(line)
        replace_file(self._path, "".join(line + "\n" for line in kept))


def _lines(path: Path) -> list[tuple[str, float]]:
    """The whole lines of the file with their times; what a crash left of a line is left out."""
    found = []
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return []
    for line in text.splitlines():
        try:
            found.append((line, float(json.loads(line)["at"])))
        except (ValueError, KeyError, TypeError):
            continue
    return found


def tick_lag(tick: int, *, now: float) -> float:
    """Seconds from a time tick's moment to `now`: how old the newest message of a batch was when it was committed."""
    return round(max(0.0, now - (tick >> 18) / 1000), 3)
