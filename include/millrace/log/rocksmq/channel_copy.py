"""Copies a channel of the embedded log while it takes appends, and verifies the copy.

Segment files are append-only up to their durable end, so the bytes before an acknowledged entry's end never change.
Truncation recycles files, so nothing may be truncated during a copy (millrace.node.retention.removal), and a copy is
never a hard link. A copy begins and ends at chosen entries: it is a channel that was truncated there and ends there.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from millrace.base.errors import LogCorrupted, PositionTruncated
from millrace.log.rocksmq.disk import OsDisk
from millrace.log.rocksmq.manifest import ChannelManifest
from millrace.log.rocksmq.segment import SegmentFiles, SegmentHeader, read_segment_header, walk_records

_ALL: Final = (1 << 63) - 1


@dataclass(frozen=True, slots=True)
class FilePrefix:
    """The first `bytes` of one segment file."""

    path: Path
    bytes: int


@dataclass(frozen=True, slots=True)
class CopyPlan:
    """The contents of a copy."""

    manifest: ChannelManifest
    """Manifest of the copy."""
    files: tuple[FilePrefix, ...]


def plan_copy(directory: Path, *, begin: int | None, end: int) -> CopyPlan:
    """Plan a copy of the channel in `directory` with the entries from `begin` (None: its beginning) up to before `end`.

    All entries before `end` must be acknowledged.
    Raises PositionTruncated, LogCorrupted.
    """
    manifest = ChannelManifest.load(directory)
    first = manifest.begin if begin is None else begin
    if first < manifest.begin:
        raise PositionTruncated(
            f"the log of {manifest.channel} begins at 0:{manifest.begin}, after 0:{first}: nothing may be truncated"
            " during a copy",
            earliest=(0, manifest.begin),
        )
    found = _openings(manifest, directory)
    parts: list[FilePrefix] = []
    numbers: list[int] = []
    for place, (number, path, opening) in enumerate(found):
        following = found[place + 1][2] if place + 1 < len(found) else None
        last = following.previous_last if following is not None else _ALL
        if last < first or opening.first >= end:
            continue
        closed = following is not None and last < end
        size = following.previous_end if closed and following is not None else _end(manifest, number, path, end)
        parts.append(FilePrefix(path, size))
        numbers.append(number)
    following_number = found[-1][0] + 1 if found else manifest.first_segment
    made = replace(
        manifest,
        begin=first,
        floor=max(manifest.floor, end - 1) if end else manifest.floor,
        first_segment=numbers[0] if numbers else following_number,
    )
    return CopyPlan(made, tuple(parts))


def write_copy_manifest(directory: Path, copy: CopyPlan) -> Path:
    """Write the copy's manifest into its folder, durably; return its path."""
    copy.manifest.store(directory, OsDisk())
    return directory / "manifest"


def verify_copy(directory: Path, copy: CopyPlan) -> None:
    """Read the copy in `directory` and check each record.

    Raises LogCorrupted.
    """
    for part in copy.files:
        path = directory / part.path.name
        salt, reached = copy.manifest.salt(int(part.path.stem)), 0
        fd = os.open(path, os.O_RDONLY)
        try:
            for offset, header in walk_records(fd, salt, 0, part.bytes, payloads=True):
                reached = offset + header.size
        finally:
            os.close(fd)
        if reached != part.bytes:
            raise LogCorrupted(
                f"the copy of {part.path} has no valid record at offset {reached}: the file is damaged, or was"
                " recycled during"
                " the copy"
            )


def _openings(manifest: ChannelManifest, directory: Path) -> list[tuple[int, Path, SegmentHeader]]:
    files = SegmentFiles.list_files(directory)
    found = []
    for number in (each for each in sorted(files) if each >= manifest.first_segment):
        fd = os.open(files[number], os.O_RDONLY)
        try:
            opening = read_segment_header(fd, manifest.salt(number), manifest.channel)
        finally:
            os.close(fd)
        if opening is None:
            if number != max(files):
                raise LogCorrupted(
                    f"{files[number]}: its beginning is damaged, although later entries were acknowledged"
                )
            break  # it is being created: it has no acknowledged entry yet
        found.append((number, files[number], opening))
    return found


def _end(manifest: ChannelManifest, number: int, path: Path, end: int) -> int:
    """Return the offset after the record that ends before entry `end`."""
    reached, last = 0, -1
    fd = os.open(path, os.O_RDONLY)
    try:
        for offset, header in walk_records(fd, manifest.salt(number), 0, os.fstat(fd).st_size, payloads=False):
            if header.entries and header.base >= end:
                break
            reached, last = offset + header.size, header.last if header.entries else last
    finally:
        os.close(fd)
    if last != end - 1:
        raise LogCorrupted(f"{path} ends at entry {last}, and entry {end - 1} was acknowledged")
    return reached
