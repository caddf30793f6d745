"""Watch a folder, and read each complete file once.

A file is identified by its path, size and time. It is complete when these have not changed for `settle_seconds`, and
files are read in the order of their times and names. Rows go into the spool in pages, each in one synced transaction
with the number of rows that were read, so after a kill the rest of the file is read. A file that was read is remembered
while it is in the folder.
"""

from __future__ import annotations

import os
import sqlite3
import stat
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

from millrace.base.errors import InvalidArgument, InvalidSettings
from millrace.base.failpoint import hit
from millrace.base.settings import Settings
from millrace.client.produce.files.formats import COMPRESSED_SUFFIXES, format_of
from millrace.flows.documents import decoded
from millrace.flows.sources.capture.lane import CapturedTables
from millrace.flows.sources.capture.polling import PolledRows, Poller, PollingFeeder, append, line_of
from millrace.flows.sources.capture.shared_spool import shared_spool
from millrace.flows.sources.capture.spool import Spool
from millrace.flows.sources.capture.ticks import spool_folder
from millrace.flows.sources.files.model import FilesSource
from millrace.flows.sources.files.rows import Page, Row, pages

_TABLE: Final = (
    "create table if not exists files"
    " (path text primary key, size integer not null, time integer not null, sound integer not null)"
)
_UNFINISHED: Final = (".tmp", ".temp", ".part", ".partial", ".crdownload", ".filepart", ".swp")
"""Suffixes of unfinished files, before a suffix of compression."""
_LOOK_SECONDS: Final = 0.05


class Found(NamedTuple):
    """A file in the folder."""

    path: str
    """Its path below the folder."""
    size: int
    time: int
    """Its last change, in nanoseconds since 1970."""


class FilesPoller(Poller[None]):
    """Reads the files of `declared`."""

    def __init__(self, declared: FilesSource) -> None:
        self._declared = declared
        self._folder = Path(declared.folder)
        self._done: dict[str, Found] = {}
        """Files that were read and still exist, by path."""
        self._sound: set[str] = set()
        """Those of them whose rows were all readable."""
        self._since: dict[str, tuple[Found, float]] = {}
        """Unread files, with their state and since when it has not changed."""
        self._types: dict[str, str] = {}
        self._odd: dict[str, Path] = {}
        """Files whose names are not UTF-8, by the path that :class:`Found` has."""

    def begin(self, connection: None, spool: Spool) -> None:
        """Check the folder and load the state from the spool. Raises InvalidSettings."""
        require_folder(self._declared)
        now = spool.standing()
        if now.offset is None:
            spool.begin_epoch()
        old = list(self._listed()) if now.offset is None and self._declared.start == "latest" else []

        def prepare(base: sqlite3.Connection) -> None:
            base.execute(_TABLE)
            base.executemany("insert into files values (?, ?, ?, 0)", old)

        append(spool, (), (), {"types": {}} if now.offset is None else now.offset, also=prepare)
        self._types = dict(spool.standing().offset["types"])
        self._done = {row[0]: Found(*row) for row in spool.rows_of("select path, size, time from files")}
        self._sound = {path for (path,) in spool.rows_of("select path from files where sound")}

    def poll(self, connection: None, spool: Spool, room: Callable[[], bool], /) -> None:
        """Read all complete files. Waits once for each file that may be complete within `settle_seconds`."""
        until = time.monotonic() + 2 * self._declared.settle_seconds
        while room():
            listed = {each.path: each for each in self._listed()}
            self._resume(spool, listed, room)
            unlisted = [each for path, each in self._done.items() if path not in listed]
            self._forget(spool, [each for each in unlisted if self._is_gone(each)])
            self._since = {path: each for path, each in self._since.items() if path in listed}
            unsettled = False
            for each in sorted(listed.values(), key=lambda found: (found.time, found.path)):
                known = self._done.get(each.path)
                if known == each:
                    self._finish(spool, each)
                elif not self._is_whole(each):
                    unsettled = True
                elif room():
                    self._read(spool, each, room, again=known is not None)
            if not unsettled or time.monotonic() > until:
                return
            time.sleep(_LOOK_SECONDS)

    def wait(self, stop: threading.Event, seconds: float, /) -> None:
        """Wait for a notification of the system, or for `seconds` without them."""
        try:
            import watchfiles
        except ModuleNotFoundError:
            stop.wait(seconds)
            return
        watched = watchfiles.watch(
            self._folder, stop_event=stop, rust_timeout=max(50, int(seconds * 1000)), yield_on_timeout=True,
            raise_interrupt=False, debounce=50, step=20,
        )  # fmt: skip
        next(iter(watched), None)

    # --- the folder --------------------------------------------------------------------------------------------------

    def _listed(self) -> Iterator[Found]:
        """Yield the files that have rows. Raises InvalidSettings if the folder does not exist."""
        require_folder(self._declared)
        root = self._folder.resolve()
        inside: dict[Path, bool] = {self._folder: True}
        self._odd.clear()
        for path in self._folder.glob(self._declared.pattern):
            below = path.relative_to(self._folder)
            if any(part.startswith((".", "_")) for part in below.parts) or not self._has_rows(path):
                continue
            try:
                if path.parent not in inside:  # a folder may be a link, too
                    inside[path.parent] = path.parent.resolve().is_relative_to(root)
                facts = path.stat()
                if not inside[path.parent] or not path.is_file():
                    continue
                if path.is_symlink() and not path.resolve().is_relative_to(root):
                    continue
            except OSError:  # it was removed, or is a dangling link
                continue
            name = os.fsencode(below).decode(errors="backslashreplace")
            if name != str(below):
                self._odd[name] = path
            yield Found(name, facts.st_size, facts.st_mtime_ns)

    def _path(self, found: Found) -> Path:
        return self._odd.get(found.path) or self._folder / found.path

    def _has_rows(self, path: Path) -> bool:
        name = path.name.lower()
        for suffix in COMPRESSED_SUFFIXES:
            name = name.removesuffix(suffix)
        if name.endswith((*_UNFINISHED, "~")):
            return False
        try:
            format_of(path, self._declared.format)
        except InvalidArgument:
            return False
        return True

    def _is_whole(self, found: Found) -> bool:
        now = time.monotonic()
        last = self._since.get(found.path)
        if last is None or last[0] != found:
            self._since[found.path] = last = (found, now)
        return now - last[1] >= self._declared.settle_seconds

    def _unlisted(self, found: Found) -> Found | None:
        """Return a file that is not listed as it is now; None if it was removed. Raises OSError if that is unknown."""
        try:
            facts = self._path(found).lstat()
        except (FileNotFoundError, NotADirectoryError):
            return None
        return Found(found.path, facts.st_size, facts.st_mtime_ns) if stat.S_ISREG(facts.st_mode) else None

    def _is_gone(self, found: Found) -> bool:
        try:
            return self._unlisted(found) is None
        except OSError:  # a folder that may not be read at present: it is the same file later
            return False

    def _forget(self, spool: Spool, files: Sequence[Found]) -> None:
        """Forget files that are no longer in the folder."""
        if not files:
            return

        def remove(base: sqlite3.Connection) -> None:
            base.executemany("delete from files where path = ?", [(each.path,) for each in files])

        append(spool, (), (), spool.standing().offset, also=remove)
        for each in files:
            del self._done[each.path]
            self._sound.discard(each.path)

    def _letter(self, found: Found, row: int, words: str) -> tuple[str, bytes]:
        return self._declared.names[0], self._line(found, Row(row, b"", words))[0]

    def _remember(self, spool: Spool, found: Found, *letters: tuple[str, bytes], sound: bool = False) -> None:
        """Record that a file was read, with letters for its faults."""

        def note(base: sqlite3.Connection) -> None:
            base.execute("insert or replace into files values (?, ?, ?, ?)", (*found, sound))

        append(spool, letters, [len(letters)] if letters else [], {"types": self._types}, also=note)
        self._done[found.path] = found
        (self._sound.add if sound else self._sound.discard)(found.path)
        self._since.pop(found.path, None)

    def _finish(self, spool: Spool, found: Found) -> None:
        """Delete or keep a completely read file as declared, if it has not changed."""
        if self._declared.after != "delete" or found.path not in self._sound:
            return
        path = self._path(found)
        try:
            facts = path.stat()
            if (facts.st_size, facts.st_mtime_ns) == found[1:]:
                path.unlink()
                self._forget(spool, [found])
        except FileNotFoundError:
            pass  # the next scan forgets it

    # --- a file ------------------------------------------------------------------------------------------------------

    def _resume(self, spool: Spool, listed: Mapping[str, Found], room: Callable[[], bool]) -> None:
        """Read the rest of the file that the last process was reading, before any other file."""
        offset = spool.standing().offset
        if offset.get("file") is None:
            return
        found = Found(*offset["file"])
        there = listed.get(found.path) or self._unlisted(found)
        if there == found:
            self._read(spool, found, room, again=False)
            return
        how = "removed" if there is None else "changed"
        self._remember(
            spool,
            there or found,
            self._letter(found, offset["rows"], f"the file was {how} when {offset['rows']} of its rows were read"),
        )

    def _read(self, spool: Spool, found: Found, room: Callable[[], bool], *, again: bool) -> None:
        declared, path = self._declared, self._path(found)
        offset = spool.standing().offset
        skip = int(offset["rows"]) if offset.get("file") == list(found) else 0
        if again and declared.changed == "letter" and not skip:
            self._remember(
                spool,
                found,
                self._letter(
                    found,
                    0,
                    "the file changed after it was read: write new rows to another file, or set changed to read",
                ),
            )
            return
        rows, sound = skip, not (skip and offset["faults"])
        try:
            left = skip
            for page in pages(
                path, format_of(path, declared.format), declared.csv.options(path.name), declared=declared.columns,
                known=self._types, size=declared.page_rows,
            ):  # fmt: skip
                if left >= len(page.rows):
                    left -= len(page.rows)
                    continue
                if not room():
                    return
                part, left = page.rows[left:], 0
                rows += len(part)
                lines = [self._line(found, each) for each in part]
                sound = sound and not any(faulty for _, faulty in lines)
                self._append(spool, found, page, [line for line, _ in lines], {"rows": rows, "faults": not sound})
            if self._as_it_is(path) != found[1:]:
                raise InvalidArgument("it changed while it was read")
        except (InvalidArgument, OSError) as error:
            if isinstance(error, FileNotFoundError) and not rows:
                return
            self._remember(spool, found, self._letter(found, rows, f"the file was read only up to row {rows}: {error}"))
        else:
            self._remember(spool, found, sound=sound)
        hit("capture.file")
        self._finish(spool, found)

    def _append(self, spool: Spool, found: Found, page: Page, lines: list[bytes], progress: Mapping[str, Any]) -> None:
        topic, keys = self._declared.names[0], self._declared.key
        self._types = dict(page.types)
        description = {"key": list(keys), "types": {**dict.fromkeys(keys, "string"), **self._types}}
        offset = {"file": list(found), "types": self._types, **progress}
        changes = [(topic, each) for each in lines]
        append(spool, changes, [len(changes)], offset, columns=[(topic, description, 0)])

    def _line(self, found: Found, row: Row) -> tuple[bytes, bool]:
        """Return a row as a line of the spool, and whether it is a fault."""
        place, fault, key, milliseconds = f"{found.path}:{row.line}", row.fault, None, found.time // 1_000_000
        if not fault and self._declared.key:
            document = decoded(row.value)
            key = {each: document.get(each) for each in self._declared.key} if isinstance(document, dict) else {}
            missing = [each for each in self._declared.key if key.get(each) is None]
            if missing:
                fault, key = f"the row has no {missing[0]}, which is part of the key", None
        if fault:
            text = row.value.decode(errors="replace")
            return line_of("c", milliseconds=milliseconds, place=place, fault=f"{place}: {fault}", text=text), True
        return line_of("c", key=key, after=msgspec.Raw(row.value), milliseconds=milliseconds, place=place), False

    @staticmethod
    def _as_it_is(path: Path) -> tuple[int, int] | None:
        try:
            facts = path.stat()
        except FileNotFoundError:
            return None
        return facts.st_size, facts.st_mtime_ns


def require_folder(declared: FilesSource) -> None:
    """Raise InvalidSettings if the folder does not exist or cannot be read."""
    if not os.path.isdir(declared.folder):
        raise InvalidSettings(f"there is no folder {declared.folder}")
    if not os.access(declared.folder, os.R_OK | os.X_OK):
        raise InvalidSettings(f"{declared.folder} cannot be read by this user")


def source_of(declared: FilesSource, settings: Settings, *, group: str, standing: Mapping[str, int]) -> CapturedTables:
    """Return the declared source."""
    return CapturedTables(spool_folder(settings, group), declared.names)


def reader_of(declared: FilesSource, settings: Settings, *, group: str, topic: str, partition: int) -> PolledRows:
    """Return a reader of the declared source."""
    return PolledRows(spool_folder(settings, group), topic)


def feeder_of(declared: FilesSource, settings: Settings, *, group: str) -> PollingFeeder:
    """Check the folder, and start its feeder. Raises InvalidSettings, StreamBusy."""
    require_folder(declared)
    return PollingFeeder(
        nullcontext, declared.words, spool_folder(settings, group), FilesPoller(declared),
        every_seconds=declared.every_seconds, max_bytes=declared.spool_mib << 20,
        shared=shared_spool(settings, group),
    )  # fmt: skip
