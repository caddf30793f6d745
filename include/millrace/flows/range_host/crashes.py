"""Find the record that ends worker processes, whichever part of the worker it crashes: a step, a sink, a reader.

While a task works on a range, the range is noted in a file that outlives the process. The next process that opens the
lane finds it, and works on the range in parts of an eighth, until the parts with the record have passed or one record
is left. A record that ended a process `errors.tries` times while it was processed alone is put aside with the kind
``CRASHED``. Until then the lane's status names the range.

    <data>/pipelines/<id>/in-range/<lane>       the range that a process works on now
    <data>/pipelines/<id>/suspects/<lane>.json  the range in which processes ended (documents.py)

Any end within a range counts, since a crash cannot be told from a kill. A kill costs small ranges for a while, but no
record: it would have to hit the same record alone, several times.
"""

from __future__ import annotations

import json
import logging
import mmap
import os
import struct
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote, unquote

from millrace.base.closeable import Closeable
from millrace.base.errors import MillraceError
from millrace.base.settings import Settings
from millrace.flows.range_host.documents import SUSPECTS, change_document
from millrace.flows.range_host.status import flow_folder
from millrace.flows.status import process_began

_MARK: Final = struct.Struct("<qqqqd")
"""Start plus one, end, records, process id, and start time of the process: a container reuses process ids."""
_PARTS: Final = 8

_logger: Final = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Suspect:
    """A range in which worker processes ended."""

    start: int
    end: int
    records: int
    """Records that the next range takes."""
    crashes: int
    """Processes that ended here, in successively smaller ranges."""
    alone: int = 0
    """How many of them were processing the record at `start` alone."""

    def words(self, flow: str, lane: str) -> str:
        """Describe where the record is and what to do."""
        if self.alone:
            return (
                f"the worker ended {self.crashes} times, {self.alone} of them while it processed the record at"
                f" {self.start} alone: put it aside with `millrace flows skip {flow} {lane} {self.start}`"
            )
        return (
            f"the worker ended {self.crashes} times in the range from {self.start} to"
            f" {self.end}, which is being narrowed"
        )


class RangeWatch(Closeable):
    """Stores the range that a task works on. One thread at a time."""

    def __init__(self, settings: Settings, flow: str, lane: str) -> None:
        folder, name = flow_folder(settings, flow), quote(lane, safe="")
        path = folder / "in-range" / name
        self._settings, self._flow, self._document = settings, flow, f"{SUSPECTS}/{name}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            os.ftruncate(file, _MARK.size)
            self._map = mmap.mmap(file, _MARK.size)
        finally:
            os.close(file)
        self.suspect = _read(folder / self._document)
        """The range in which processes ended before, until the lane has passed it."""
        self._process = (os.getpid(), process_began(os.getpid()) or 0.0)
        start, end, records, pid, began = _MARK.unpack_from(self._map)
        if start and process_began(pid) != began:
            self._crashed(start - 1, end, records)
            self.leave()

    def limit(self, position: int, most: int) -> int:
        """Return how many records, at most `most`, to take at `position`."""
        known = self.suspect
        return min(most, known.records) if known is not None and position < known.end else most

    def condemned(self, position: int, tries: int) -> bool:
        """Return whether the record at `position` alone ended at least `tries` processes."""
        return self.suspect is not None and self.suspect.start == position and self.suspect.alone >= tries

    def enter(self, start: int, end: int, records: int) -> None:
        """Store the range that the task works on now."""
        _MARK.pack_into(self._map, 0, start + 1, max(end, start + 1), records, *self._process)

    def leave(self) -> None:
        """Store that the task works on no range."""
        _MARK.pack_into(self._map, 0, 0, 0, 0, 0, 0.0)

    def passed(self, position: int) -> None:
        """Remove the suspect if it is before `position`."""
        if self.suspect is not None and position >= self.suspect.end:
            self.suspect = None
            self._store()

    def close(self) -> None:
        self._map.close()

    def _crashed(self, start: int, end: int, records: int) -> None:
        known = self.suspect
        crashes = 1 + (0 if known is None else known.crashes)
        alone = 0
        if records == 1:
            alone = 1 + (known.alone if known is not None and known.start == start else 0)
        self.suspect = Suspect(start, end, max(1, records // _PARTS), crashes, alone)
        self._store()

    def _store(self) -> None:
        body = None if self.suspect is None else json.dumps(asdict(self.suspect)).encode() + b"\n"
        try:
            change_document(self._settings, self._flow, self._document, lambda _: body)
        except MillraceError as error:  # the meta store failed; this process still knows the suspect
            _logger.warning("%s of %s is not stored: %s", self._document, self._flow, error)


def suspects_of(settings: Settings, flow: str) -> dict[str, Suspect]:
    """Return, by lane, the ranges of `flow` in which worker processes ended and that it has not passed."""
    folder = flow_folder(settings, flow) / SUSPECTS
    if not folder.is_dir():
        return {}
    found = {unquote(path.stem): _read(path) for path in folder.glob("*.json")}
    return {lane: each for lane, each in found.items() if each is not None}


def _read(path: Path) -> Suspect | None:
    try:
        value: Any = json.loads(path.read_text(encoding="utf-8"))
        return Suspect(**{name: int(each) for name, each in value.items()})
    except (FileNotFoundError, ValueError, TypeError, AttributeError):
        return None
