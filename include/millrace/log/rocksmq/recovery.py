"""Opens a channel's directory after a crash: keeps what was acknowledged, cuts a torn tail, reports damage.

Only the last segment is scanned, from the last record in the pointer index; the end of a closed segment is recorded
in the header of the next one. The log is cut at the first incomplete record, unless something proves that the broken
region was acknowledged: a later record whose ``durable`` lies beyond it, a pointer in the index, or a later segment.
In that case LogCorrupted is raised, and nothing is changed.

The tail that no later record proves is rewritten before it is synced: after a failed fsync, the page cache can mark
as clean what the medium never received. Then the file is cut at its end, and appends continue in a new segment with a
new salt, so that no stale record after the cut can become valid again.
"""

from __future__ import annotations

import os
from itertools import pairwise
from typing import Final

from millrace.base.errors import LogCorrupted
from millrace.log.rocksmq.disk import Disk
from millrace.log.rocksmq.manifest import ChannelManifest
from millrace.log.rocksmq.pointer_index import PointerIndex, RecordPointer
from millrace.log.rocksmq.segment import (
    Segment,
    SegmentFiles,
    SegmentHeader,
    find_durable_end,
    read_segment_header,
    walk_records,
)

_REWRITE: Final = 4 << 20
"""Bytes per write while the tail is made durable."""
_LAST_ID: Final = (1 << 63) - 1
"""The greatest id: `at_or_before` of it is the newest pointer."""


def recover(
    manifest: ChannelManifest, files: SegmentFiles, index: PointerIndex, disk: Disk, *, repair: bool = True
) -> list[Segment]:
    """Return the channel's segments, all closed, complete and durable, in order; without `repair` no file is changed.

    Raises LogCorrupted.
    """
    channel = manifest.channel
    numbers = files.numbers()
    for number in [number for number in numbers if repair and number < manifest.first_segment]:
        files.recycle(number)  # a truncation was interrupted after its manifest
    numbers = [number for number in numbers if number >= manifest.first_segment]
    _check_present(manifest, numbers, files)
    # A broken header is only acceptable in the last file, and only if nothing in it was acknowledged: its first write
    # was torn.
    openings: dict[int, SegmentHeader] = {}
    for number in numbers:
        opening = _opening(manifest, number, files)
        if opening is not None:
            openings[number] = opening
        elif number != numbers[-1] or _acknowledged(manifest, number, files, index):
            raise LogCorrupted(f"{files.path(number)}: its header is broken, although later entries were acknowledged")
        elif repair:
            files.remove(number)
    numbers = [number for number in numbers if number in openings]
    # The next segment's header states where the previous one ended, so closed files need no scan.
    segments: list[Segment] = []
    for number, following in pairwise(numbers):
        segments.append(_closed(manifest, number, openings[number], openings[following], files))
    if numbers:
        tail = _tail(manifest, numbers[-1], openings[numbers[-1]], files, index, disk if repair else None)
        if tail is not None:
            segments.append(tail)
    last = max(manifest.floor, segments[-1].last if segments else -1)
    # The index is written after the acknowledgement, so it may lag the files but never lead them.
    if index.end(channel, manifest.incarnation) > last + 1:
        raise LogCorrupted(
            f"channel {channel!r} ends at 0:{last}, but the index proves that later entries were acknowledged"
        )
    return segments


def rebuild_index(manifest: ChannelManifest, segments: list[Segment], index: PointerIndex) -> None:
    """Add missing pointers to the index. An unreadable record is left to its readers."""
    known = index.end(manifest.channel, manifest.incarnation)
    # Nothing is known of this incarnation: what the index has belongs to a dropped channel of the same name.
    if not known:
        index.drop_channel(manifest.channel)
    for segment in segments:
        if segment.last < known:
            continue
        pointer = index.at_or_before(manifest.channel, segment.last)
        start = pointer.offset if pointer is not None and pointer.salt == segment.salt else 0
        fd = os.open(segment.path, os.O_RDONLY)
        try:
            found = [
                RecordPointer(header.base, segment.salt, offset, header.size, header.entries)
                for offset, header in walk_records(fd, segment.salt, start, segment.end, payloads=False)
                if header.entries
            ]
        finally:
            os.close(fd)
        index.put(manifest.channel, manifest.incarnation, found, segment.last + 1)


def _check_present(manifest: ChannelManifest, numbers: list[int], files: SegmentFiles) -> None:
    expected = list(range(manifest.first_segment, manifest.first_segment + len(numbers)))
    if numbers != expected:
        missing = min(set(range(manifest.first_segment, numbers[-1])) - set(numbers))
        raise LogCorrupted(f"{files.path(missing)} is missing: restore it")
    if not numbers and manifest.begin <= manifest.floor:
        raise LogCorrupted(f"{files.path(manifest.first_segment)} is missing: restore it")


def _opening(manifest: ChannelManifest, number: int, files: SegmentFiles) -> SegmentHeader | None:
    fd = os.open(files.path(number), os.O_RDONLY)
    try:
        return read_segment_header(fd, manifest.salt(number), manifest.channel)
    finally:
        os.close(fd)


def _acknowledged(manifest: ChannelManifest, number: int, files: SegmentFiles, index: PointerIndex) -> bool:
    """Return whether the index or the segment's durable end proves that records of it were acknowledged."""
    pointer = index.at_or_before(manifest.channel, _LAST_ID)
    if pointer is not None and pointer.salt == manifest.salt(number):
        return True
    fd = os.open(files.path(number), os.O_RDONLY)
    try:
        return find_durable_end(fd, manifest.salt(number), 0) > 0
    finally:
        os.close(fd)


def _closed(
    manifest: ChannelManifest, number: int, opening: SegmentHeader, following: SegmentHeader, files: SegmentFiles
) -> Segment:
    path = files.path(number)
    if following.previous_segment != number or path.stat().st_size < following.previous_end:
        raise LogCorrupted(f"{path} is shorter than the next segment says: restore it")
    return Segment(number, manifest.salt(number), path, opening.first, following.previous_last, following.previous_end)


def _tail(
    manifest: ChannelManifest,
    number: int,
    opening: SegmentHeader,
    files: SegmentFiles,
    index: PointerIndex,
    disk: Disk | None,
) -> Segment | None:
    path, salt = files.path(number), manifest.salt(number)
    fd = os.open(path, os.O_RDONLY if disk is None else os.O_RDWR)
    try:
        size = os.fstat(fd).st_size
        pointer = index.at_or_before(manifest.channel, _LAST_ID)
        acknowledged, start = 0, opening.size
        if pointer is not None and pointer.salt == salt:
            acknowledged, start = pointer.offset + pointer.size, pointer.offset
        end, last, durable = start, -1, 0
        for offset, header in walk_records(fd, salt, start, size, payloads=True):
            end, last, durable = offset + header.size, header.last, header.durable
        # A torn tail may be cut, an acknowledged record may not. Two things prove acknowledgement: a pointer in the
        # index, or a later record whose header says how far the file was synced.
        if end < acknowledged or find_durable_end(fd, salt, end) > end:
            raise LogCorrupted(
                f"{path}: the record at offset {end} is broken, although later entries were acknowledged: restore the"
                " file"
            )
        if last < 0:  # no complete batch: the file's first write was torn and never acknowledged
            if disk is not None:
                files.remove(number)
            return None
        if disk is not None:
            # Complete records after `durable` may be in the page cache only: a reader could see them, and a power loss
            # remove them afterwards. Write them again and sync before they are served.
            for at in range(durable, end, _REWRITE):
                disk.write(fd, [os.pread(fd, min(_REWRITE, end - at), at)], at)
            os.ftruncate(fd, end)
            disk.sync(fd)
        return Segment(number, salt, path, opening.first, last, end)
    finally:
        os.close(fd)
