"""The list of backends that have held a deployment's log: a small durable file beside the log's server record.

    <data folder>/log/generations.json

Without a file there is no log yet, and the first one will be where the settings say. Creating the first PChannel
writes the list, so that settings which later name another location are refused: otherwise the old log would be lost
silently. A switch of the backend (millrace.coord.switch_log) adds a generation, and each PChannel moves to it at its
AlterWAL message: the file records the position after that message. It is written under a lock and atomically (a new
file, synced, renamed over the old one), with a version and a checksum; readers notice a new one by its stat. It holds
no secrets: a log's URL has no credentials.

If the tables lie in an object store, the list is there as well (millrace.log.generations.shared_list), and the file is
a copy of it.

It also holds the tombstones of the whole log (millrace.message.tombstones). A file with tombstones has the next
version: a build that does not know them would read different entries, and must not.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, Self
from urllib.parse import urlsplit

from millrace.base.deadline import Deadline
from millrace.base.errors import (
    InvalidArgument,
    InvalidSettings,
    LogBusy,
    LogCorrupted,
    LogUnavailable,
    TombstoneRefused,
    UnsupportedVersion,
)
from millrace.base.failpoint import hit
from millrace.base.file_lock import exclusive_lock
from millrace.base.files import make_folder, replace_file
from millrace.base.log_backends import EMBEDDED
from millrace.log.generations.shared_list import SharedList
from millrace.message.ids import EARLIEST, LogId
from millrace.message.tombstones import MAX_TOMBSTONES, Tombstone, TombstoneMap

FILE: Final = "generations.json"
LOCK: Final = "generations.lock"

_VERSION: Final = 1
_TOMBSTONES_VERSION: Final = 2
_LOCK_SECONDS: Final = 10.0

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Generation:
    """One backend's turn. Positions in it are the backend's own."""

    url: str
    ends: Mapping[str, LogId] = field(default_factory=dict)
    """Final end of each PChannel's log in this generation: the position after its AlterWAL entry."""
    since: Mapping[str, LogId] = field(default_factory=dict)
    """End of each PChannel's log here when the next generation was added. The AlterWAL entry comes after it."""
    closed: bool = False
    """Whether every PChannel has moved to the next generation. New PChannels are then created there."""


@dataclass(frozen=True, slots=True)
class GenerationSpan:
    """The generations of one PChannel's log, from `first` (the earliest with data left) to `current`."""

    origin: int
    first: int
    current: int
    ends: Mapping[int, LogId]
    pending: bool
    """Whether a switch is in progress and this PChannel has not moved yet, as far as is known."""


@dataclass(frozen=True, slots=True)
class Generations:
    """The list of generations."""

    items: tuple[Generation, ...]
    first: Mapping[str, int] = field(default_factory=dict)
    """Earliest generation of each PChannel that truncation has left."""
    tombstones: Mapping[str, TombstoneMap] = field(default_factory=dict)
    """Tombstones of each PChannel that has some."""

    def span(self, pchannel: str) -> GenerationSpan | None:
        """Return the span of a PChannel that moved to another generation, or began here; None if the list does not know
        it.
        """
        members = [number for number, item in enumerate(self.items) if pchannel in item.ends]
        if not members:
            return None
        current = members[-1] + 1
        return GenerationSpan(
            origin=members[0],
            first=max(members[0], self.first.get(pchannel, 0)),
            current=current,
            ends={number: self.items[number].ends[pchannel] for number in members},
            pending=current < len(self.items) - 1,
        )

    @property
    def newest(self) -> int:
        return len(self.items) - 1

    def open_generations(self) -> list[int]:
        """Return the generations that may still hold PChannels missing from the list: those not closed,
        oldest first.
        """
        return [number for number, item in enumerate(self.items) if not item.closed]

    def with_end(self, generation: int, pchannel: str, end: LogId) -> Self:
        """Return the list in which `pchannel` left `generation` at `end`. The first recorded end counts."""
        item = self.items[generation]
        if pchannel in item.ends:
            return self
        return self._with(generation, replace(item, ends={**item.ends, pchannel: end}))

    def with_next(self, url: str, since: Mapping[str, LogId]) -> Self:
        """Return the list with another generation, to which PChannels move from now on."""
        last = replace(self.items[-1], since=dict(since))
        return replace(self, items=(*self.items[:-1], last, Generation(url)))

    def with_closed(self, generation: int) -> Self:
        """Return the list in which every PChannel has left `generation`."""
        return self._with(generation, replace(self.items[generation], closed=True, since={}))

    def with_first(self, pchannel: str, generation: int) -> Self:
        """Return the list in which truncation left nothing of `pchannel` before `generation`."""
        return replace(self, first={**self.first, pchannel: max(generation, self.first.get(pchannel, 0))})

    def with_tombstone(self, tombstone: Tombstone) -> Self:
        """Return the list with `tombstone`, replacing one of the same entry.

        Raises TombstoneRefused if there are too many.
        """
        standing = self.tombstones.get(tombstone.pchannel, {})
        if len({*standing, tombstone.entry}) > MAX_TOMBSTONES:
            raise TombstoneRefused(
                f"{tombstone.pchannel} has {len(standing)} tombstones after its log's beginning, the maximum: find"
                " the writer of such entries, and truncate the log before you add another"
            )
        return self._with_standing(tombstone.pchannel, {**standing, tombstone.entry: tombstone})

    def without_proposal(self, pchannel: str, entry: LogId) -> Self:
        """Return the list without the tombstone of one entry, unless it is placed: placed tombstones are permanent."""
        standing = self.tombstones.get(pchannel, {})
        return self._with_standing(pchannel, {at: each for at, each in standing.items() if at != entry or each.placed})

    def without_tombstones_before(self, pchannel: str, begin: LogId) -> Self:
        """Return the list without tombstones of truncated entries."""
        standing = self.tombstones.get(pchannel, {})
        return self._with_standing(pchannel, {at: each for at, each in standing.items() if at >= begin})

    def _with_standing(self, pchannel: str, standing: TombstoneMap) -> Self:
        if standing == self.tombstones.get(pchannel, {}):
            return self
        others = _but(self.tombstones, pchannel)
        return replace(self, tombstones={**others, pchannel: standing} if standing else others)

    def knows(self, pchannel: str) -> bool:
        """Return whether the list has any entry for a PChannel."""
        return self.span(pchannel) is not None or pchannel in self.tombstones

    def without(self, pchannel: str) -> Self:
        """Return the list without a PChannel of this name."""
        items = tuple(
            replace(item, ends=_but(item.ends, pchannel), since=_but(item.since, pchannel)) for item in self.items
        )
        tombstones = _but(self.tombstones, pchannel)
        return replace(self, items=items, first=_but(self.first, pchannel), tombstones=tombstones)

    def _with(self, generation: int, item: Generation) -> Self:
        return replace(self, items=(*self.items[:generation], item, *self.items[generation + 1 :]))


def _but(values: Mapping[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in values.items() if key != name}


def span_of(generations: Generations, pchannel: str, *, found: int) -> GenerationSpan:
    """Return the span of `pchannel`. If the list does not know it, it was found in generation `found`."""
    known = generations.span(pchannel)
    return known or GenerationSpan(found, found, found, {}, pending=found < generations.newest)


def same_log(one: str, other: str) -> bool:
    """Return whether two URLs name the same log, regardless of connection options."""
    return _place(one) == _place(other)


def _place(url: str) -> str:
    place = url.partition("?")[0].rstrip("/")
    return place or EMBEDDED


def _moved(one: str, other: str) -> bool:
    """Return whether two URLs name the same log on brokers whose addresses changed."""
    a, b = urlsplit(_place(one)), urlsplit(_place(other))
    return bool(a.netloc and b.netloc) and (a.scheme, a.path) == (b.scheme, b.path)


class GenerationFile:
    """The list of one folder, as it is on disk now. Thread-safe."""

    def __init__(self, folder: Path, url: str, *, shared: SharedList | None = None) -> None:
        """`url`: the backend in the settings ("" or "rocksmq": the embedded log in `folder`).

        With `shared`, the file is a copy of that list, which is read now and before each change.
        Raises InvalidSettings if the list has no such backend, LogCorrupted, UnsupportedVersion, LogUnavailable.
        """
        self.folder = folder
        self._shared = shared
        self._path = folder / FILE
        self._lock = threading.Lock()
        self._alone = Generations((Generation(url or EMBEDDED),))
        self._seen: tuple[int, ...] | None = None
        self._generations = self._alone
        if shared is not None and shared.is_there():
            make_folder(folder)
            with exclusive_lock(folder / LOCK, deadline=Deadline.after(_LOCK_SECONDS)):
                try:
                    self._pull(shared)
                except LogUnavailable as error:
                    if not self._path.exists():
                        raise
                    _log.warning("%s. The copy in %s is used meanwhile", error, self._path)
        self.refresh()

    def _pull(self, shared: SharedList) -> int:
        """Take the shared list if it is newer than the file; give it the file's if there is none, or an older one as
        after a move of the tables. Return its number.
        """
        mine = _read_number(self._path)
        number, data = shared.newest()
        if number > mine:
            _parsed(data, f"list {number} of the log's backends in the tables' store")
            replace_file(self._path, data, synced=True)
        elif number < max(mine, 1) and self._path.exists():
            self._store_both(shared, max(mine, 1), _load(self._path))
        return max(number, _read_number(self._path))

    def _store_both(self, shared: SharedList, number: int, generations: Generations) -> bool:
        """Put the list into the store, which decides, and then into the file. Returns False if the number is taken."""
        data = _document(generations, number)
        if not shared.put(number, data):
            return False
        hit("generations.shared")
        replace_file(self._path, data, synced=True)
        return True

    @property
    def generations(self) -> Generations:
        """The list as last read; the same object until it changes."""
        return self._generations

    def refresh(self) -> Generations:
        """Return the current list: one stat, and a read if the file changed."""
        try:
            found = os.stat(self._path)
            stamp: tuple[int, ...] | None = (found.st_mtime_ns, found.st_size, found.st_ino)
        except FileNotFoundError:
            stamp = None
        if stamp != self._seen:
            with self._lock:
                # If a writer came in between, a newer list is read than the stat was of, and read again later.
                self._generations = self._alone if stamp is None else self._checked(_load(self._path))
                self._seen = stamp
        return self._generations

    def ensure_written(self) -> None:
        """Write the list if there is no file.

        Raises InvalidSettings if another process wrote a list of another location meanwhile.
        """
        if self._seen is None:
            self.change(lambda list_: list_ if self._seen else replace(list_))  # a new object is always written

    def change(self, make: Callable[[Generations], Generations], *, timeout: float = 10.0) -> Generations:
        """Replace the list by ``make(list)``, durably; write nothing if it is the same object.

        Raises LogBusy, LogUnavailable.
        """
        make_folder(self.folder)
        deadline = Deadline.after(timeout)
        with exclusive_lock(self.folder / LOCK, deadline=deadline):
            while True:
                shared = self._shared if self._shared is not None and self._shared.is_there() else None
                number = 0 if shared is None else self._pull(shared)
                before = self.refresh()
                after = make(before)
                if after is before:
                    break
                if shared is None:
                    replace_file(self._path, _document(after, _read_number(self._path)), synced=True)
                    break
                if self._store_both(shared, number + 1, after):
                    break
                if deadline.expired():
                    raise LogBusy("other machines change the list of the log's backends all the time: retry")
        return self.refresh()

    def _checked(self, generations: Generations) -> Generations:
        wanted = self._alone.items[0].url
        for number, item in enumerate(generations.items):
            if same_log(item.url, wanted):
                # The location is the same; the settings have the current connection options.
                return generations._with(number, replace(item, url=wanted)) if "?" in wanted else generations
        moved = [number for number, item in enumerate(generations.items) if _moved(item.url, wanted)]
        if len(moved) == 1:
            return generations._with(moved[0], replace(generations.items[moved[0]], url=wanted))
        newest = generations.items[-1].url
        raise InvalidSettings(
            f"the setting log (MILLRACE_LOG) names {wanted}, but the log of this deployment is at {newest}"
            f" ({self._path}):"
            f" set MILLRACE_LOG={newest}, or switch the backend with `millrace log switch`"
        )


def _load(path: Path) -> Generations:
    return _parsed(path.read_bytes(), str(path))


def _read_number(path: Path) -> int:
    """Return the number of the shared list that the file is a copy of; 0 if it never was."""
    try:
        return int(json.loads(path.read_bytes()).get("shared", 0))
    except (FileNotFoundError, ValueError, AttributeError):
        return 0  # a damaged file is an error of `_load`


def _parsed(data: bytes, path: str) -> Generations:
    try:
        document = json.loads(data.decode())
        body, version = document["body"], document["version"]
        if version not in (_VERSION, _TOMBSTONES_VERSION):
            raise UnsupportedVersion(
                f"{path} has version {version}, this build reads up to {_TOMBSTONES_VERSION}: run a newer build"
            )
        if zlib.crc32(_canonical(body)) != document["crc32"]:
            raise ValueError("its checksum differs")
        items = tuple(
            Generation(item["url"], _positions(item["ends"]), _positions(item["since"]), bool(item["closed"]))
            for item in body["generations"]
        )
        if not items:
            raise ValueError("it is empty")
        first = {name: int(number) for name, number in body["first"].items()}
        return Generations(items, first, _tombstones(body.get("tombstones", {})))
    except (ValueError, KeyError, TypeError, AttributeError, InvalidArgument) as error:
        raise LogCorrupted(
            f"cannot read {path}, the list of the log's backends ({error}): restore it from a copy, do not remove it"
        ) from error


def _document(generations: Generations, number: int) -> bytes:
    body: dict[str, Any] = {
        "generations": [
            {"url": item.url, "ends": dict(item.ends), "since": dict(item.since), "closed": item.closed}
            for item in generations.items
        ],
        "first": dict(generations.first),
    }
    if generations.tombstones:
        body["tombstones"] = {
            name: [standing[entry].to_json() for entry in sorted(standing)]
            for name, standing in generations.tombstones.items()
        }
    version = _TOMBSTONES_VERSION if generations.tombstones else _VERSION
    document = {"version": version, "crc32": zlib.crc32(_canonical(body)), "body": body}
    if number:
        document["shared"] = number
    return json.dumps(document, sort_keys=True, indent=1).encode()


def _canonical(body: object) -> bytes:
    return json.dumps(body, sort_keys=True, separators=(",", ":")).encode()


def _tombstones(values: Mapping[str, list[dict[str, Any]]]) -> dict[str, TombstoneMap]:
    found = {name: [Tombstone.from_json(name, each) for each in items] for name, items in values.items()}
    return {name: {each.entry: each for each in items} for name, items in found.items() if items}


def _positions(values: Mapping[str, list[int]]) -> dict[str, LogId]:
    found = {name: LogId(int(ledger), int(entry)) for name, (ledger, entry) in values.items()}
    if any(position < EARLIEST for position in found.values()):
        raise ValueError("a position is negative")
    return found
