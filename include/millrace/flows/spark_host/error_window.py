"""The failed records of a flow on Spark that `errors.limit` counts, in windows.

    <checkpoint>/millrace-sink/window.json    the newest micro-batch, and the present window
    <checkpoint>/millrace-sink/reset.json     how often somebody began the count anew

A micro-batch that comes again counts once. The batch that exceeds the limit is in the sink and its letters are durable
before the flow stops; it comes again once the flow is started, and has no second effect. A reset may come while the
query runs, so it writes a file of its own.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Final

from millrace.base.settings import Settings
from millrace.flows.declare.errors import require_within
from millrace.flows.declare.flow import Flow, letters_place
from millrace.flows.sinks.memory import Folder, below, create_folder, keep_note, read_note
from millrace.flows.spark_host.incarnations import Kept, sink_folder

FILE: Final = "window.json"
LATE: Final = "late"
"""Folder of the memory of the sink of late rows, in that of the stream's sink."""
_RESETS: Final = "reset.json"


@dataclass(frozen=True, slots=True)
class Window:
    """The counts of the one lane that a query is."""

    batch: int = -1
    """The newest micro-batch that is counted."""
    records: int = 0
    errors: int = 0
    resets: int = 0
    """How often the count had begun anew."""


class ErrorWindow:
    """The window of one incarnation of a stream."""

    def __init__(self, stream: Flow, folder: Folder) -> None:
        """`folder` is that of the sink's memory."""
        self._stream, self._folder = stream, folder

    def require_within(self) -> None:
        """Raise ErrorLimitExceeded if more records failed than `errors.limit` allows."""
        self._require(self._now())

    def count(self, batch: int, *, records: int, errors: int) -> None:
        """Count a micro-batch's records, and those of them that failed. Raises ErrorLimitExceeded, durably."""
        limit = self._stream.errors.limit
        if limit is None:
            return
        window = self._now()
        if batch > window.batch:
            if window.records >= limit.over:
                window = replace(window, records=0, errors=0)
            window = replace(window, batch=batch, records=window.records + records, errors=window.errors + errors)
            create_folder(self._folder)
            keep_note(self._folder, FILE, asdict(window))
        self._require(window)

    def _require(self, window: Window) -> None:
        name, place = self._stream.name, letters_place(self._stream)
        require_within(self._stream.errors.limit, [(window.records, window.errors)], flow=name, place=place)

    def _now(self) -> Window:
        found, resets = read_note(self._folder, FILE), resets_of(self._folder)
        window = Window(**found) if found else Window()
        return window if window.resets == resets else Window(window.batch, resets=resets)


def window_of(settings: Settings, stream: Flow) -> ErrorWindow:
    """Return the window of the stream's present incarnation."""
    kept = Kept(settings, stream.name)
    return ErrorWindow(stream, sink_folder(kept.checkpoint(kept.state)))


def reset_window(settings: Settings, stream: Flow) -> None:
    """Begin the count of the stream's failed records anew, and that of rows refused in a row. The stream may run."""
    kept = Kept(settings, stream.name)
    folder = sink_folder(kept.checkpoint(kept.state))
    for each in (folder, below(folder, LATE)) if stream.late is not None else (folder,):
        create_folder(each)
        keep_note(each, _RESETS, {"resets": resets_of(each) + 1})


def resets_of(folder: Folder) -> int:
    """Return how often the count of the sink with its memory in `folder` began anew."""
    return int((read_note(folder, _RESETS) or {}).get("resets", 0))
