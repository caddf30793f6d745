"""A durable queue on the local disk, one per PChannel, for messages while the log is unreachable.

    <folder>/lock                                  locked by the one process that uses the spool
    <folder>/<PChannel>/<number>.spool             frames from that number on
    <folder>/<PChannel>/progress                   how many frames are settled
    <folder>/<PChannel>/attempted                  how many may have been sent; the others certainly were not
    <folder>/rejected.jsonl                        rejected messages, with payloads (millrace.client.spool.sender)

A frame is (length, crc32c, number, time in ns) and an entry in wire form. It is on disk when `append` returns, before
the next frame is started. So after a crash at most the last frame is torn, and it was not acknowledged: it is cut off
and kept in `torn`, with a warning, because a damaged last frame looks the same. A frame with a wrong checksum and
others after it is damage; it raises SpoolCorrupted and is never skipped.

The spool holds at most `max_bytes`, all PChannels combined; a frame beyond that raises SpoolFull and changes nothing.
(Messages that were in flight when the log was lost are accepted beyond the limit.)
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
"""Number of frames to search for after a bad one, to distinguish damage from a torn end."""


@dataclass(frozen=True, slots=True)
class SpoolFrame:
    """One entry of a spool; `time_ns` is when it was stored."""

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
        self._channels: dict[str, SpoolChannel] = {}
        try:
            for each in sorted(folder.iterdir()):
                if each.is_dir():
                    self._channels[unquote(each.name)] = SpoolChannel(self, each)
        except BaseException:
            self.close()
            raise

    @property
    def bytes(self) -> int:
        """Bytes on disk."""
        return self._bytes

    @property
    def entries(self) -> int:
        """Number of frames that are not settled."""
        return sum(channel.entries for channel in self.channels().values())

    @property
    def oldest_ns(self) -> int | None:
        """Time at which the oldest unsettled frame was stored."""
        return min((each for channel in self.channels().values() if (each := channel.oldest_ns)), default=None)

    def channels(self) -> dict[str, SpoolChannel]:
        """Return the queues by PChannel, for all PChannels ever used."""
        with self._guard:
            return dict(self._channels)

    def channel(self, pchannel: str) -> SpoolChannel:
        """Return the queue of a PChannel."""
        with self._guard:
            if pchannel not in self._channels:
                path = self.folder / quote(pchannel, safe="")
                path.mkdir(mode=0o700, exist_ok=True)
                sync(self.folder)
                self._channels[pchannel] = SpoolChannel(self, path)
            return self._channels[pchannel]

    def reserve(self, size: int, *, force: bool) -> None:
        """Reserve bytes. Raises SpoolFull, unless `force`."""
        with self._guard:
            if not force and self._bytes + size > self.max_bytes:
                raise SpoolFull(
                    f"the log cannot be reached, and the spool in {self.folder} holds {self._bytes} of"
                    f" {self.max_bytes} bytes:"
                    f" these {size} were not taken. Append them again when the log is back, or give the spool more room"
                )
            self._bytes += size

    def release(self, size: int) -> None:
        """Release bytes, or (with a negative size, when opening) count those that exist."""
        with self._guard:
            self._bytes -= size

    def close(self) -> None:
        """Close the files and release the lock; frames stay. Idempotent."""
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
        try:
            self._recover()
            self._attempted = -1
            if (path / "attempted").exists():
                self._attempted = _read_progress(path / "attempted")
            else:
                self.mark_attempted(self._next - 1)  # entries of an earlier build may have been sent
            sync(path)
        except BaseException:
            self.close()
            raise

    @property
    def entries(self) -> int:
        return self._next - self._settled

    @property
    def oldest_ns(self) -> int | None:
        with self._guard:
            return self._times[0] if self._times else None

    def append(self, entry: bytes, *, force: bool = False) -> int:
        """Append an entry durably and return its number. Raises SpoolFull, unless `force`; OSError."""
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
        """Yield the frames that are not settled, from the oldest on, as of now."""
        with self._guard:
            segments, settled, end = [*self._segments], self._settled, self._next
        for segment in segments:
            if segment.last >= settled:
                for frame, _ in _read(segment.path):
                    if settled <= frame.number < end:
                        yield frame

    @property
    def attempted(self) -> int:
        """Frames with a smaller number may have been sent."""
        return self._attempted

    def mark_attempted(self, number: int) -> None:
        """Record that everything up to `number` is about to be sent, or was; durable when it returns."""
        with self._guard:
            if self._attempted <= number:
                replace_file(self.path / "attempted", _progress_record(number + 1), synced=True)
                self._attempted = number + 1

    def settle(self, number: int) -> None:
        """Record that everything up to `number` is settled; durable when it returns.

        Removes files that no frame needs.
        """
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
        """Read the existing frames and cut off a torn last one."""
        self._next = self._settled
        paths = sorted(self.path.glob("*.spool"))
        for path in paths:
            segment = _Segment(path, int(path.stem), int(path.stem) - 1, 0)
            for frame, end in _read(path, torn=path == paths[-1]):
                if frame.number != segment.last + 1:
                    raise SpoolCorrupted(
                        f"{path}: frame {frame.number} follows {segment.last}; keep the file for inspection"
                    )
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
                raise SpoolCorrupted(f"{path}: frames before it are missing; keep the folder for inspection")
            self._segments.append(segment)
            self._spool.release(-segment.bytes)
            self._next = segment.last + 1
        if self._segments:
            self._file = os.open(self._segments[-1].path, os.O_WRONLY | os.O_APPEND)

    def _keep_torn(self, path: Path, end: int) -> None:
        """Keep what is about to be cut off until the next time: a damaged frame looks like a torn one."""
        torn = self.path / "torn"
        replace_file(torn, path.read_bytes()[end:])
        _log.warning("%s: the last frame, at byte %d, is incomplete; it is cut off and kept in %s", path, end, torn)

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
    """Yield the frames of a segment, each with the offset after it; stop at a torn end, if one is possible here."""
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
                raise SpoolCorrupted(
                    f"{path}: the frame at byte {place} fails its checksum; keep the file for inspection"
                )
            return
        yield SpoolFrame(number, time_ns, data[place + _HEADER.size : end]), end
        place, expected = end, number + 1


def _goes_on(data: bytes, place: int, number: int) -> bool:
    """Return whether a complete frame follows the bad one of this number.

    Then it is damage: a frame is written only after the one before it is on disk.
    """
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
    """Return the newest complete record. A torn one was not acknowledged; what it recorded is only repeated."""
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
