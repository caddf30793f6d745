"""The failed records of a flow on Spark that `errors.limit` counts, in windows.

    <checkpoint>/millrace-sink/window.json    the newest micro-batch, and the present window
    <checkpoint>/millrace-sink/reset.json     how often the count was reset

A repeated micro-batch counts once. The batch that exceeds the limit is in the sink and its letters are durable before
the flow stops; it is repeated when the flow is started, without a second effect. A reset may happen while the query
runs, so it writes its own file.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Final

from millrace.base.settings import Settings
from millrace.flows.declare.errors import require_within
from millrace.flows.declare.flow import Flow, letters_place
from millrace.flows.sinks.memory import Folder, below, create_folder, keep_note, read_note
from millrace.flows.spark_host.incarnations import Incarnations, sink_folder

FILE: Final = "window.json"
LATE: Final = "late"
"""The folder of the late rows' sink, in the memory of the stream's sink."""
_RESETS: Final = "reset.json"


@dataclass(frozen=True, slots=True)
class Window:
    """The counts of the query's single lane."""

    batch: int = -1
    """The newest counted micro-batch."""
    records: int = 0
    errors: int = 0
    resets: int = 0
    """Resets of the count before this window."""


class ErrorWindow:
    """The window of one incarnation of a stream."""

    def __init__(self, stream: Flow, folder: Folder) -> None:
        """`folder` is the folder of the sink's memory."""
        self._stream, self._folder = stream, folder

    def require_within(self) -> None:
        """Raise ErrorLimitExceeded if more records failed than `errors.limit` allows."""
        self._require(self._now())

    def count(self, batch: int, *, records: int, errors: int) -> None:
        """Count a micro-batch's records and failures. Raises ErrorLimitExceeded, after the counts are durable."""
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
    incarnations = Incarnations(settings, stream.name)
    return ErrorWindow(stream, sink_folder(incarnations.checkpoint(incarnations.state)))


def reset_window(settings: Settings, stream: Flow) -> None:
    """Reset the counts of the stream's failed records and of rows refused in a row. The stream may run."""
    incarnations = Incarnations(settings, stream.name)
    folder = sink_folder(incarnations.checkpoint(incarnations.state))
    for each in (folder, below(folder, LATE)) if stream.late is not None else (folder,):
        create_folder(each)
        keep_note(each, _RESETS, {"resets": resets_of(each) + 1})


def resets_of(folder: Folder) -> int:
    """Return how often the counts of the sink with its memory in `folder` were reset."""
    return int((read_note(folder, _RESETS) or {}).get("resets", 0))
