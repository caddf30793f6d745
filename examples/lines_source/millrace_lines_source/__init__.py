"""A source of your own: a folder of files of JSON lines, one lane a file; a line's position is its first byte.

source: {kind: lines, folder: /var/log/app}
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from millrace.base.errors import ChannelNotFound, LogRegressed
from millrace.flows.batch import Batch
from millrace.flows.declare.part import Part, words
from millrace.flows.records import Record
from millrace.flows.registry import SourceKind
from millrace.flows.sources.source import Ends, LaneReader, Limits, Source, task_of


class LinesSource(Part):
    """Lines of the files of a folder, which only grow."""

    kind: Literal["lines"] = "lines"
    folder: str = words("where the files are, <name>.jsonl each", min_length=1, max_length=4096)
    start: Literal["earliest", "latest"] = words("where a file begins that has no position yet", default="earliest")


class Folder(Source):
    """The files of a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def partitions(self) -> list[tuple[str, int]]:
        """Return the name of each file, and 0. Raises ChannelNotFound."""
        if not self._folder.is_dir():
            raise ChannelNotFound(f"there is no folder {self._folder}: create it")
        return sorted((path.stem, 0) for path in self._folder.glob("*.jsonl"))

    def ends(self) -> dict[str, Ends]:
        """Return where each file's last whole line ends."""
        return {task_of(name, 0): Ends(0, _end(self._folder / f"{name}.jsonl")) for name, _ in self.partitions()}

    def at(self, milliseconds: int) -> dict[str, int]:
        """Return the beginning of each file: lines have no time, and none may be left out."""
        return dict.fromkeys(self.ends(), 0)


class Lines(LaneReader):
    """Reads one file."""

    def __init__(self, path: Path) -> None:
        self._path, self._lane = path, task_of(path.stem, 0)

    def batches(self, start: int, end: int, limits: Limits, /) -> Iterator[Batch]:
        """Yield one batch. Raises LogRegressed if the file is shorter than a position."""
        if start > _end(self._path):
            raise LogRegressed(f"{self._path}: position {start} lies beyond the end: the file was written anew")
        records, place = list[Record](), start
        with self._path.open("rb") as file:
            file.seek(start)
            while place < end and len(records) < limits.records and place - start < limits.size:
                line = file.readline()
                records.append(Record(self._path.stem, 0, place, None, line.rstrip(b"\r\n"), 0))
                place += len(line)
        yield Batch(self._lane, start, place, records=records)


def _end(path: Path) -> int:
    if not path.stat().st_size:
        return 0
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as text:
        return text.rfind(b"\n") + 1


def source_of(declared: LinesSource, *_: Any, **__: Any) -> Folder:
    """Return the lanes of the source that is declared."""
    return Folder(Path(declared.folder))


def reader_of(declared: LinesSource, *_: Any, topic: str, **__: Any) -> Lines:
    """Return a reader of one file."""
    return Lines(Path(declared.folder) / f"{topic}.jsonl")


KIND = SourceKind("lines", LinesSource, f"{__name__}:source_of", f"{__name__}:reader_of", ordered_by_key=False)
