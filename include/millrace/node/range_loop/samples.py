"""Samples of a streaming query over time, one per micro-batch, for charts. No decision uses them.

A sample is a JSON line of ``<data_dir>/run/history/<query>.jsonl``: counters since the start of the process, and
current lags. Readers take differences and start over where the process id changes. The file is bounded: at most one
sample a second is written, all but the newest are thinned to one every five seconds, and samples older than a day are
removed. Losing the file, or a torn last line after a crash, costs part of a chart.
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
"""Minimum time between two samples."""
THIN_SECONDS: Final = 5.0
"""Minimum time between two samples after thinning."""
RETENTION_SECONDS: Final = 24 * 3600.0
UNTHINNED_SECONDS: Final = 900.0
"""Age up to which samples keep their full resolution."""
THIN_AFTER: Final = 1800
"""Samples between two thinnings: about half an hour of work."""

_logger = logging.getLogger(__name__)


def samples_file(settings: Settings, query: str) -> Path:
    """Return the file with the samples of a streaming query."""
    return settings.node_run_path / "history" / f"{query}.jsonl"


class SampleFile:
    """Appends samples to one file. One writer; any number of readers."""

    def __init__(self, path: Path, *, clock: Callable[[], float] = time.time) -> None:
        self._path = path
        self._clock = clock
        self._last = 0.0
        self._written = THIN_AFTER  # the first sample of a process thins its predecessor's file

    def add(self, sample: Mapping[str, Any]) -> None:
        """Append `sample` with the time and this process's id, unless the last sample is too recent.

        Never raises OSError: a chart is not worth a micro-batch.
        """
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
            _logger.warning("cannot write a sample: %s", error)

    def _thin(self, now: float) -> None:
        """Rewrite the file: drop samples that are too old, and thin those that are not recent."""
        retained: list[str] = []
        last = 0.0
        for line, at in _lines(self._path):
            if at < now - RETENTION_SECONDS or (at < now - UNTHINNED_SECONDS and 0 <= at - last < THIN_SECONDS):
                continue
            last = at
            retained.append(line)
        replace_file(self._path, "".join(line + "\n" for line in retained))


def _lines(path: Path) -> list[tuple[str, float]]:
    """Return the file's complete lines with their times."""
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
    """Return the seconds from a time tick to `now`: the age of a batch's newest message at its commit."""
    return round(max(0.0, now - (tick >> 18) / 1000), 3)
