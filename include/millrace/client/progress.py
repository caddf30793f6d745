"""Progress of a long call, in one line of a terminal or a notebook: the share done, and the time left."""

from __future__ import annotations

import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:  # a DAG's trigger shows progress and loads no Arrow
    import pyarrow as pa

MIN_SECONDS: Final = 1.0
"""Time from which on the past speed says something about the rest. A shorter call shows nothing."""
REFRESH_SECONDS: Final = 0.25

_LINE: Final = threading.Lock()
"""Lock of the call that shows its progress: two calls would overwrite each other's line."""


def progress_words(done: float, total: float, seconds: float) -> str:
    """Return ``43 %, 1 min 20 s left`` for `done` of `total` units in so many `seconds`.

    Without the time left if too little is done to say. Empty if there is no total.
    """
    if total <= 0:
        return ""
    share = min(max(done / total, 0.0), 1.0)
    words = f"{int(share * 100)} %"
    if share and seconds >= MIN_SECONDS:
        words += f", {duration_words(seconds / share - seconds)} left"
    return words


def operation_words(progress: Mapping[str, Any]) -> str:
    """Return the progress of an operation (its file) in one line: what it does, the share, the time left."""
    done, at = progress.get("done"), float(progress.get("at") or 0)
    seconds = at - float(progress.get("since") or at)
    share = progress_words(done, 1.0, seconds) if isinstance(done, int | float) else ""
    return ", ".join(filter(None, (str(progress.get("words") or ""), share)))


def duration_words(seconds: float) -> str:
    """Return ``8 s``, ``1 min 20 s`` or ``2 h 5 min``."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


@contextmanager
def progress_line(first: str = "") -> Iterator[Callable[[str], None]]:
    """Show words in one line on stderr, which each call of the result rewrites and the end erases.

    Shows `first` at once, and nothing else before MIN_SECONDS. Shows nothing if stderr is neither a terminal nor a
    notebook, or if another call has the line.
    """
    stream = sys.stderr
    if not _shows_lines(stream) or not _LINE.acquire(blocking=False):
        yield lambda words: None
        return
    shown, due = 0, time.monotonic() + MIN_SECONDS

    def show(words: str) -> None:
        nonlocal shown, due
        now = time.monotonic()
        if now < due:
            return
        due = now + REFRESH_SECONDS
        shown = _rewrite(stream, words, shown)

    try:
        if first:
            shown = _rewrite(stream, first, shown)
        yield show
    finally:
        _rewrite(stream, "", shown)
        _LINE.release()


def report_rows(batches: Iterable[pa.RecordBatch], total: int = 0) -> Iterator[pa.RecordBatch]:
    """Yield `batches`, and show the number of rows that were yielded, of `total` if it is known."""
    began, rows = time.monotonic(), 0
    with progress_line() as show:
        for batch in batches:
            yield batch
            rows += batch.num_rows
            seconds = time.monotonic() - began
            show(", ".join(filter(None, (progress_words(rows, total, seconds), rows_words(rows, seconds)))))


def rows_words(rows: int, seconds: float) -> str:
    """Return ``1,000,000 rows, 250,000 rows/s``."""
    return f"{rows:,} rows, {rows / max(seconds, 1e-3):,.0f} rows/s"


def _shows_lines(stream: Any) -> bool:
    """Return whether a line of `stream` can be rewritten. A notebook's stream does that, and is no terminal."""
    if stream is None or stream.closed:
        return False
    return bool(stream.isatty()) or type(stream).__module__.startswith("ipykernel")


def _rewrite(stream: Any, words: str, shown: int) -> int:
    """Write `words` over a line of `shown` characters, and return its new length."""
    words = words[: shutil.get_terminal_size().columns - 1]  # a longer one would wrap, and stay
    if words or shown:
        stream.write(f"\r{words.ljust(shown)}" if words else f"\r{' ' * shown}\r")
        stream.flush()
    return len(words)
