"""Segment files: naming, creation, recycling, and scanning of their records.

A segment's first record is its header: count 0, the base of the first batch, and a JSON body with the channel's name
and the end of the previous segment. So a closed segment needs no footer (nothing is written after the last
acknowledged byte), and damage at its end cannot be mistaken for its end.

Files have a fixed size and are preallocated. Files freed by truncation are kept as spares and renamed when a new
segment is needed: overwriting a file with cached pages is several times faster than growing one.
"""

from __future__ import annotations

import json
import os
import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NamedTuple

from crc32c import crc32c

from millrace.base.errors import LogCorrupted
from millrace.base.files import sync
from millrace.log.rocksmq.disk import Disk
from millrace.log.rocksmq.record import (
    HEADER_BYTES,
    FramedBatch,
    RecordHeader,
    frame_segment_header,
    header_pattern,
    parse_header,
)

_SUFFIX: Final = ".log"
_SPARE: Final = "spare-"
_IS_SEGMENT: Final = re.compile(r"\d{20}\.log", re.ASCII)
_IS_SPARE: Final = re.compile(r"spare-\d{1,18}", re.ASCII)
"""Files with other names in a channel's folder are neither read nor removed."""
_WINDOW: Final = 256 << 10
"""Bytes per read while walking headers: enough for many small records, little waste before large ones."""
_SEARCH_WINDOW: Final = 4 << 20
"""Bytes per read while verifying a large payload or searching for headers."""


class SegmentHeader(NamedTuple):
    """Contents of a segment's first record."""

    first: int
    previous_segment: int
    previous_end: int
    previous_last: int
    size: int


@dataclass(slots=True, eq=False)
class Segment:
    """One segment file of a channel, up to its durable end."""

    number: int
    salt: int
    path: Path
    first: int
    last: int
    end: int
    pins: int = 0
    dropped: bool = False
    # While it is the active one: bases and offsets of records, about one for each 64 KiB.
    bases: list[int] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)


def segment_header_record(channel: str, previous: Segment | None) -> FramedBatch:
    """Return the header record of the segment after `previous`."""
    body = {
        "channel": channel,
        "previous_segment": previous.number if previous else 0,
        "previous_end": previous.end if previous else 0,
        "previous_last": previous.last if previous else -1,
    }
    return frame_segment_header(json.dumps(body, sort_keys=True).encode())


def read_segment_header(fd: int, salt: int, channel: str) -> SegmentHeader | None:
    """Read the header of a segment file; None if it has no complete one with this salt."""
    # The header's body is short JSON: the channel's name and three numbers.
    data = os.pread(fd, 4096, 0)
    header = parse_header(data, 0, salt=salt, offset=0)
    if header is None or header.entries or header.size > len(data):
        return None
    body = data[HEADER_BYTES : header.size]
    if crc32c(body) != header.payload_crc:
        return None
    fields = json.loads(body)
    if fields["channel"] != channel:
        raise LogCorrupted(f"a segment file of channel {fields['channel']!r} is in the folder of {channel!r}")
    return SegmentHeader(
        header.base, fields["previous_segment"], fields["previous_end"], fields["previous_last"], header.size
    )


def walk_records(fd: int, salt: int, offset: int, end: int, *, payloads: bool) -> Iterator[tuple[int, RecordHeader]]:
    """Yield records from `offset` on as (offset, header), up to the first incomplete one before `end`.

    With `payloads`, the checksums of lengths and values are verified too, and the scan stops at the first mismatch.
    """
    window, start = b"", offset
    while True:
        at = offset - start
        if at + HEADER_BYTES > len(window):
            window, start, at = os.pread(fd, min(_WINDOW, max(0, end - offset)), offset), offset, 0
        header = parse_header(window, at, salt=salt, offset=offset)
        if header is None or offset + header.size > end:
            return
        if payloads and not _payload_holds(fd, header, offset, window, at):
            return
        yield offset, header
        offset += header.size


def _payload_holds(fd: int, header: RecordHeader, offset: int, window: bytes, at: int) -> bool:
    if at + header.size <= len(window):
        return bool(crc32c(memoryview(window)[at + HEADER_BYTES : at + header.size]) == header.payload_crc)
    crc, position, stop = 0, offset + HEADER_BYTES, offset + header.size
    while position < stop:
        piece = os.pread(fd, min(_SEARCH_WINDOW, stop - position), position)
        if not piece:
            return False
        crc = crc32c(piece, crc)
        position += len(piece)
    return crc == header.payload_crc


def find_durable_end(fd: int, salt: int, offset: int) -> int:
    """Return the largest ``durable`` of any header with this salt at or after `offset`; 0 if there is none."""
    wanted = header_pattern(salt)
    size = os.fstat(fd).st_size
    proven = 0
    while offset < size:
        window = os.pread(fd, _SEARCH_WINDOW + HEADER_BYTES, offset)
        at = window.find(wanted)
        while at >= 0:
            header = parse_header(window, at - 4, salt=salt, offset=offset + at - 4) if at >= 4 else None
            if header is not None:
                proven = max(proven, header.durable)
            at = window.find(wanted, at + 1)
        if len(window) <= HEADER_BYTES:
            break
        # Overlap the windows by a header, so that one across the border is found.
        offset += len(window) - HEADER_BYTES
    return proven


class SegmentFiles:
    """The segment files and spares in one channel's directory."""

    def __init__(
        self, directory: Path, disk: Disk, *, segment_bytes: int, spare_files: int, repair: bool = True
    ) -> None:
        """Without `repair` no file is changed."""
        self._directory = directory
        self._disk = disk
        self._segment_bytes = segment_bytes
        self._spare_files = spare_files
        self._spares = sorted(each for each in directory.iterdir() if _IS_SPARE.fullmatch(each.name))
        self._lock = threading.Lock()
        self._next_spare = 1 + max((int(path.name[len(_SPARE) :]) for path in self._spares), default=0)
        if repair:
            self._trim()

    @staticmethod
    def list_files(directory: Path) -> dict[int, Path]:
        """Return the segment files of a channel's directory, by number."""
        return {int(path.stem): path for path in directory.iterdir() if _IS_SEGMENT.fullmatch(path.name)}

    def numbers(self) -> list[int]:
        """Return the numbers of existing segment files, in order."""
        return sorted(self.list_files(self._directory))

    def path(self, number: int) -> Path:
        return self._directory / f"{number:020d}{_SUFFIX}"

    def create(self, number: int, size: int) -> int:
        """Create a preallocated file of `size` bytes for segment `number`; return its descriptor. Its name is durable.

        Raises OSError. Then at most a spare file remains.
        """
        path = self.path(number)
        with self._lock:
            spare = self._spares.pop() if self._spares and size == self._segment_bytes else None
        if spare is not None:
            fd = os.open(spare, os.O_RDWR)
            # A recycled file still has its old records. Their salt is another segment's, so they are never taken for
            # new ones.
            spare.rename(path)
        else:
            draft = self._directory / "segment.new"
            fd = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
            try:
                # Preallocated and synced once, so that an append does not change the file's size.
                self._disk.allocate(fd, size)
                sync(fd)
                draft.rename(path)
            except BaseException:
                os.close(fd)
                draft.unlink(missing_ok=True)
                raise
        try:
            self._disk.sync_directory(self._directory)
        except BaseException:
            os.close(fd)
            raise
        return fd

    def truncate(self, number: int, end: int) -> None:
        """Cut a segment file at `end`, durably."""
        fd = os.open(self.path(number), os.O_RDWR)
        try:
            if os.fstat(fd).st_size > end:
                os.ftruncate(fd, end)
                sync(fd)
        finally:
            os.close(fd)

    def remove(self, number: int) -> None:
        """Unlink a segment file, durably."""
        self.path(number).unlink(missing_ok=True)
        self._disk.sync_directory(self._directory)

    def recycle(self, number: int) -> None:
        """Free a segment file: keep it as a spare, or remove it if there are enough spares or its size differs."""
        path = self.path(number)
        with self._lock:
            if not path.exists():  # the channel was dropped while it was read
                return
            if len(self._spares) < self._spare_files and path.stat().st_size == self._segment_bytes:
                spare = self._directory / f"{_SPARE}{self._next_spare}"
                self._next_spare += 1
                # Not synced: a power loss may undo the rename, and recovery then recycles the file again.
                path.rename(spare)
                self._spares.append(spare)
            else:
                path.unlink()

    def _trim(self) -> None:
        spares: list[Path] = []
        for path in self._spares:
            if len(spares) < self._spare_files and path.stat().st_size == self._segment_bytes:
                spares.append(path)
            else:
                path.unlink()
        self._spares = spares
        (self._directory / "segment.new").unlink(missing_ok=True)
