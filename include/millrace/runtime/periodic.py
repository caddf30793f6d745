"""A maintenance task that a thread runs at an interval. A failed run is logged and repeated after the same interval."""

from __future__ import annotations

import logging
import threading
from abc import abstractmethod
from typing import Final

import pyarrow as pa

from millrace.base.closeable import Closeable
from millrace.base.errors import MillraceError

MAINTENANCE_ERRORS: Final = (MillraceError, OSError, pa.ArrowException)
"""Errors of tables, log and disk. None of them may end the thread."""

_log = logging.getLogger(__name__)


class PeriodicTask(Closeable):
    """Calls :meth:`run_once` every `interval` seconds between :meth:`start` and :meth:`close`.

    With `run_at_start` the first run is at the start.
    """

    def __init__(self, *, name: str, interval: float, run_at_start: bool = False) -> None:
        self._name = name
        self._pause = interval
        self._first = 0.0 if run_at_start else interval
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    @abstractmethod
    def run_once(self) -> None:
        """Run the task once."""

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Stop the thread after the current run. Idempotent."""
        self._closed.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        pause = self._first
        while not self._closed.wait(pause):
            pause = self._pause
            try:
                self.run_once()
            except Exception:  # a thread that ended would leave its work undone without a word
                _log.exception("%s failed; retrying in %.0f s", self._name, self._pause)
