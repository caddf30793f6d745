"""A durable queue on the local disk, one a PChannel: where a producer keeps its messages while the log cannot be reached.

    <folder>/lock                                  held by the one process that uses the spool
    <folder>/<PChannel>/<number>.spool             frames from that number on
    <folder>/<PChannel>/progress                   how many frames were settled
    <folder>/<PChannel>/attempted                  how many were perhaps sent: the others never were, whatever died when
    <folder>/rejected.jsonl                        what the chain rejected of it, with its bytes (millrace.client.spool.sender)

A frame is (length, crc32c, number, time in ns) and an entry of the wire form; it is on the disk when `append` returns, before
the next one is begun. So after a crash at most the last frame is torn, and it was acknowledged to nobody: it is cut off (and
kept in `torn`, with a warning: were it damaged instead, it would look the same). A frame that fails its checksum with others behind it is damage, and is said (SpoolCorrupted), never skipped. The spool holds at
most `max_bytes`, all PChannels together: one frame more raises SpoolFull and changes nothing. (What was on
its way when the log was lost is taken beyond that.)
"""

from __future__ import annotations

import fcntl
import logging
import os
import struct
import threading
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import quote, unquote

import crc32c

from millrace.base.closeable import Closeable
from millrace.base.errors import SpoolBusy, SpoolCorrupted, SpoolFull
from millrace.base.files import make_folder, replace_file, sync, sync_data

DEFAULT_BYTES: Final = 1 << 30
SEGMENT_BYTES: Final = 8 << 20

_HEADER: Final = struct.Struct("<IIQQ")
_PROGRESS: Final = struct.Struct("<QI")
_PROGRESS_BYTES: Final = 64 << 10
_log = logging.getLogger(__name__)
_LOOK_AHEAD: Final = 16
"""Frames behind a bad one that are looked for, to tell damage from a torn end."""


@dataclass(frozen=True, slots=True)
class SpoolFrame:
    """One entry of a spool; `time_ns` is when it was spooled."""

    number: int
    time_ns: int
    entry: bytes


@dataclass(slots=True)
class _Segment:
    path: Path
    first: int
    last: int
    bytes: int


class Spool(Closeable):
    """The spool in `folder`, locked for this process. Raises SpoolBusy, SpoolCorrupted."""

    def __init__(self, folder: Path, *, max_bytes: int = DEFAULT_BYTES, segment_bytes: int = SEGMENT_BYTES) -> None:
        self.folder = folder
        self.max_bytes = max_bytes
        self._segment_bytes = segment_bytes
        self._guard = threading.Lock()
        self._bytes = 0
        make_folder(folder, 0o700)
        self._lock_file = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(self._lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._lock_file)
            raise SpoolBusy(f"the spool in {folder} belongs to another process: give each producer its own") from None
        try:
            self._channels = {
                unquote(each.name): SpoolChannel(self, each) for each in sorted(folder.iterdir()) if each.is_dir()
            }
        except BaseException:
            os.close(self._lock_file)
            raise

    @property
    def bytes(self) -> int:
        """What it holds on the disk."""
        return self._bytes

    @property
    def entries(self) -> int:
        """Frames that are not settled."""
        return sum(channel.entries for channel in self.channels().values())

    @property
    def oldest_ns(self) -> int | None:
        """When the oldest frame that is not settled was spooled."""
        return min((each for channel in self.channels().values() if (each := channel.oldest_ns)), default=None)

    def channels(self) -> dict[str, SpoolChannel]:
        """By PChannel its queue: those that were ever used."""
        with self._guard:
            return dict(self._channels)

    def channel(self, pchannel: str) -> SpoolChannel:
        """The queue of a PChannel."""
        with self._guard:
            if pchannel not in self._channels:
                path = self.folder / quote(pchannel, safe="")
                path.mkdir(mode=0o700, exist_ok=True)
                sync(self.folder)
                self._channels[pchannel] = SpoolChannel(self, path)
            return self._channels[pchannel]

    def reserve(self, size: int, *, force: bool) -> None:
        """Count bytes in. Raises SpoolFull, unless they must be taken."""
        with self._guard:
            if not force and self._bytes + size > self.max_bytes:
                raise SpoolFull(
                    f"the log cannot be reached, and the spool in {self.folder} holds {self._bytes} of {self.max_bytes} bytes:"
                    f" these {size} were not taken. Append them again when the log is back, or give the spool more room"
                )
            self._bytes += size

    def release(self, size: int) -> None:
        """Count bytes out, or (at its opening) those in that are there already."""
        with self._guard:
            self._bytes -= size

    def close(self) -> None:
        """Release the files and the lock; what is held stays. Idempotent."""
        for channel in self.channels().values():
            channel.close()
        if self._lock_file >= 0:
            os.close(self._lock_file)
            self._lock_file = -1


class SpoolChannel:
    """One PChannel's queue. Thread-safe."""

    def __init__(self, spool: Spool, path: Path) -> None:
        self._spool = spool
        self.path = path
        self._guard = threading.RLock()
        self._segments: deque[_Segment] = deque()
        self._times: deque[int] = deque()
        self._file = -1
        self._settled = _read_progress(path / "progress")
        self._progress = os.open(path / "progress", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._recover()
        self._attempted = -1
        if (path / "attempted").exists():
            self._attempted = _read_progress(path / "attempted")
        else:
            self.mark_attempted(self._next - 1)  # what an earlier build left may have been sent
        sync(path)

    @property
    def entries(self) -> int:
        return self._next - self._settled

    @property
    def oldest_ns(self) -> int | None:
        with self._guard:
            return self._times[0] if self._times else None

    def append(self, entry: bytes, *, force: bool = False) -> int:
        """Put an entry at the end, durably; its number. Raises SpoolFull, unless it must be taken; OSError."""
        with self._guard:
            size = _HEADER.size + len(entry)
            self._spool.reserve(size, force=force)
            try:
                number, now = self._next, time.time_ns()
                frame = _framed(number, now, entry)
                if self._file < 0 or self._segments[-1].bytes >= self._spool_segment_bytes:
                    self._roll(number)
                segment = self._segments[-1]
                try:
                    _write(self._file, frame)
                    sync_data(self._file)
                except OSError:
                    os.ftruncate(self._file, segment.bytes)  # a torn frame in the middle would look like damage
                    raise
            except BaseException:
                self._spool.release(size)
                raise
            segment.bytes += size
            segment.last = number
            self._next += 1
            self._times.append(now)
            return number

    def frames(self) -> Iterator[SpoolFrame]:
        """What is not settled, from the oldest on, as it is now."""
        with self._guard:
            segments, settled, end = [*self._segments], self._settled, self._next
        for segment in segments:
            if segment.last >= settled:
                for frame, _ in _read(segment.path):
                    if settled <= frame.number < end:
                        yield frame

    @property
    def attempted(self) -> int:
        """Frames with a smaller number were perhaps sent."""
        return self._attempted

    def mark_attempted(self, number: int) -> None:
        """Everything up to `number` is about to be sent, or was: durable when it returns."""
        with self._guard:
            if self._attempted <= number:
                replace_file(self.path / "attempted", _progress_record(number + 1), synced=True)
                self._attempted = number + 1

    def settle(self, number: int) -> None:
        """Everything up to `number` is settled: durable when it returns; what no frame needs any more is removed."""
        with self._guard:
            self._settled = number + 1
            os.write(self._progress, _progress_record(self._settled))
            sync_data(self._progress)
            if os.fstat(self._progress).st_size > _PROGRESS_BYTES:
                self._rewrite_progress()
            while self._times and len(self._times) > self.entries:
                self._times.popleft()
            while self._segments and self._segments[0].last < self._settled:
                segment = self._segments.popleft()
                if not self._segments and self._file >= 0:
                    os.close(self._file)
                    self._file = -1
                segment.path.unlink()
                self._spool.release(segment.bytes)

    def close(self) -> None:
        with self._guard:
            for name in ("_file", "_progress"):
                if getattr(self, name) >= 0:
                    os.close(getattr(self, name))
                    setattr(self, name, -1)

    @property
    def _spool_segment_bytes(self) -> int:
        return self._spool._segment_bytes

    def _roll(self, number: int) -> None:
        path = self.path / f"{number:020d}.spool"
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            sync(self.path)
        except OSError:
            os.close(file)
            raise
        if self._file >= 0:
            os.close(self._file)
        self._file = file
        self._segments.append(_Segment(path, number, number - 1, 0))

    def _recover(self) -> None:
        """Find what is there; cut a torn last frame off."""
        self._next = self._settled
        paths = sorted(self.path.glob("*.spool"))
        for path in paths:
            segment = _Segment(path, int(path.stem), int(path.stem) - 1, 0)
            for frame, end in _read(path, torn=path == paths[-1]):
                if frame.number != segment.last + 1:
                    raise SpoolCorrupted(f"{path}: frame {frame.number} follows {segment.last}; keep the file and look")
                segment.last, segment.bytes = frame.number, end
                if frame.number >= self._settled:
                    self._times.append(frame.time_ns)
            if segment.bytes < path.stat().st_size:
                self._keep_torn(path, segment.bytes)
                with path.open("r+b") as file:
                    file.truncate(segment.bytes)
                    sync(file.fileno())
            if segment.last < self._settled:
                path.unlink()
                continue
            if self._segments and segment.first != self._segments[-1].last + 1:
                raise SpoolCorrupted(f"{path}: frames before it are missing; keep the folder and look")
            self._segments.append(segment)
            self._spool.release(-segment.bytes)
            self._next = segment.last + 1
        if self._segments:
            self._file = os.open(self._segments[-1].path, os.O_WRONLY | os.O_APPEND)

    def _keep_torn(self, path: Path, end: int) -> None:
        """Keep what is about to be cut off, until the next time: a frame that was damaged later looks as one that was torn."""
        torn = self.path / "torn"
        replace_file(torn, path.read_bytes()[end:])
        _log.warning("%s: the last frame, at byte %d, is not whole; it is cut off, and kept in %s", path, end, torn)

    def _rewrite_progress(self) -> None:
        replace_file(self.path / "progress", _progress_record(self._settled), synced=True)
        file = os.open(self.path / "progress", os.O_WRONLY | os.O_APPEND)
        os.close(self._progress)
        self._progress = file


def _framed(number: int, time_ns: int, entry: bytes) -> bytes:
    body = struct.pack("<QQ", number, time_ns) + entry
    return struct.pack("<II", len(entry), crc32c.crc32c(body)) + body


def _write(file: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(file, view) :]


def _read(path: Path, *, torn: bool = True) -> Iterator[tuple[SpoolFrame, int]]:
    """The frames of a segment, each with the offset behind it; a torn end is where it stops, if it may be there."""
    data = path.read_bytes()
    place, expected = 0, int(path.stem)
    while place < len(data):
        whole = False
        if len(data) - place >= _HEADER.size:
            length, crc, number, time_ns = _HEADER.unpack_from(data, place)
            end = place + _HEADER.size + length
            whole = end <= len(data) and crc32c.crc32c(memoryview(data)[place + 8 : end]) == crc
        if not whole:
            if not torn or _goes_on(data, place, expected):
                raise SpoolCorrupted(f"{path}: the frame at byte {place} fails its checksum; keep the file and look")
            return
        yield SpoolFrame(number, time_ns, data[place + _HEADER.size : end]), end
        place, expected = end, number + 1


def _goes_on(data: bytes, place: int, number: int) -> bool:
    """Whether a whole frame lies behind the bad one of this number: a frame is only begun once the one before is on the disk."""
    for following in range(number + 1, number + _LOOK_AHEAD):
        mark = struct.pack("<Q", following)
        found = data.find(mark, place)
        while found >= 0:
            start = found - 8
            if start >= 0:
                length, crc = struct.unpack_from("<II", data, start)
                end = start + _HEADER.size + length
                if end <= len(data) and crc32c.crc32c(memoryview(data)[start + 8 : end]) == crc:
                    return True
            found = data.find(mark, found + 1)
    return False


def _progress_record(settled: int) -> bytes:
    return _PROGRESS.pack(settled, crc32c.crc32c(settled.to_bytes(8, "little")))


def _read_progress(path: Path) -> int:
    """The newest whole record: a torn one was acknowledged to nobody, and what it said is only done again."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return 0
    newest = 0
    for place in range(0, len(data) - _PROGRESS.size + 1, _PROGRESS.size):
        settled, crc = _PROGRESS.unpack_from(data, place)
        if crc32c.crc32c(settled.to_bytes(8, "little")) == crc:
            newest = max(newest, settled)
    if len(data) % _PROGRESS.size:
        os.truncate(path, len(data) - len(data) % _PROGRESS.size)
    return newest
