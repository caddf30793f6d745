"""The progress of a load in a file: an interrupted load continues without duplicate rows.

A load is a producer with its own numbers (law 8). The journal stores them, and the position in the files, after each
acknowledged batch. A restarted load sends the next batch with the same numbers, by which the chain recognizes it if it
is in the log already. So the batches must be the same: files, batch size and schema version must be those in the
journal, or nothing is sent.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

import xxhash

from millrace.base.deadline import Deadline
from millrace.base.errors import InvalidArgument, Malformed, UnsupportedVersion
from millrace.base.file_lock import exclusive_lock
from millrace.base.files import replace_json

VERSION: Final = 1
"""Version of the journal file."""
_EDGE = 1 << 20


@dataclass(slots=True)
class LoadPosition:
    """Progress of a load."""

    file: int = 0
    batches: int = 0
    """Acknowledged batches of that file."""
    numbers: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Epoch and next sequence of each VChannel."""
    ticks: dict[str, int] = field(default_factory=dict)
    """For each PChannel, a tick before everything that is sent from this position on."""
    bad_bytes: int = 0
    """Size of the file of bad rows."""
    counts: dict[str, Any] = field(default_factory=dict)
    """The caller's totals."""


class LoadJournal:
    """One load's journal. Made by :func:`open_journal`."""

    def __init__(self, path: Path, load: dict[str, Any]) -> None:
        self._path = path
        self.producer_id, self.position = self._read(load)
        self._load = load
        self.save()

    def save(self) -> None:
        """Save the position durably: everything before it was acknowledged."""
        value = {"version": VERSION, "producer": self.producer_id, "load": self._load, "place": asdict(self.position)}
        replace_json(self._path, value, synced=True)

    def _read(self, load: dict[str, Any]) -> tuple[int, LoadPosition]:
        try:
            text = self._path.read_text(encoding="utf-8")
        except FileNotFoundError:
            return secrets.randbits(62) + 1, LoadPosition()
        try:
            value = json.loads(text)
            if value["version"] > VERSION:
                raise UnsupportedVersion(
                    f"{self._path} has version {value['version']}, and this build supports {VERSION}: continue with"
                    " the build that started the load"
                )
            producer, place, known = int(value["producer"]), LoadPosition(**value["place"]), value["load"]
            place.numbers = {name: (int(epoch), int(number)) for name, (epoch, number) in place.numbers.items()}
        except (ValueError, KeyError, TypeError) as error:
            raise Malformed(
                f"{self._path} is not a journal of a load ({error}): give the file that the load was started with"
            ) from None
        differing = [name for name, each in load.items() if known.get(name) != json.loads(json.dumps(each))]
        if differing:
            raise InvalidArgument(
                f"{self._path} belongs to another load: {differing[0]} was {known.get(differing[0])!r:.200}."
                " Use the same options, or start a new load with another file"
            )
        return producer, place


@contextmanager
def open_journal(path: Path, load: dict[str, Any]) -> Iterator[LoadJournal]:
    """Open the journal at `path` and lock it while the block runs.

    `load` describes what is loaded and how; it must match the file, or the file is new.

    Raises InvalidArgument, Malformed.
    """
    busy = InvalidArgument(f"another process runs this load: {path} is in use")
    try:
        with exclusive_lock(path.with_name(path.name + ".lock"), deadline=Deadline.after(0.0), busy=busy):
            yield LoadJournal(path, load)
    except FileNotFoundError:
        raise InvalidArgument(f"there is no folder {path.parent}") from None


def file_fingerprints(files: Sequence[Path]) -> list[list[Any]]:
    """Return path, size, and digest of the first and last MiB of each file, by which a load knows its files."""
    found: list[list[Any]] = []
    for path in files:
        try:
            with path.open("rb") as file:
                size = file.seek(0, 2)
                file.seek(0)
                digest = xxhash.xxh3_128(file.read(_EDGE))
                file.seek(max(0, size - _EDGE))
                digest.update(file.read(_EDGE))
        except OSError as error:
            raise InvalidArgument(f"{path} cannot be read: {error.strerror}") from None
        found.append([str(path.resolve()), size, digest.hexdigest()])
    return found
