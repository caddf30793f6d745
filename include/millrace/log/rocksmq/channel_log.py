"""One channel's log over its segment files: append, read, truncate, enforce retention, verify.

Entries are neither readable nor indexed before they are synced. A batch is framed outside of the lock; the leader of
a group (millrace.log.rocksmq.group_commit) assigns ids and position. Ids are ``max(last + 1, now_ms << 18)`` and then
consecutive, so they never decrease, whatever the clock does. An entry's append stamp is ``id >> 18``.

A reader pins a segment while it copies from it: truncation recycles a file only when nobody reads it.
"""

from __future__ import annotations

import os
import threading
from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Final

import pyarrow as pa

from millrace.base.deadline import Deadline
from millrace.base.errors import InvalidArgument, LogCorrupted, LogUnavailable, PositionTruncated
from millrace.log.rocksmq.disk import Buffer, Disk, unavailable_on_failure
from millrace.log.rocksmq.group_commit import DiskFull, GroupCommit, IdsUnavailable, PendingAppend
from millrace.log.rocksmq.id_allocator import IdAllocator
from millrace.log.rocksmq.manifest import DISK_FULL_ERRNOS, ChannelManifest, keep_reserve
from millrace.log.rocksmq.pointer_index import PointerIndex, RecordPointer
from millrace.log.rocksmq.reader import SegmentRange, SegmentRun, empty_batch, read_run
from millrace.log.rocksmq.recent_batches import RecentBatches, run_from_batches
from millrace.log.rocksmq.record import frame_batch
from millrace.log.rocksmq.recovery import rebuild_index, recover
from millrace.log.rocksmq.segment import Segment, SegmentFiles, segment_header_record, walk_records
from millrace.log.rocksmq.settings import RocksMQSettings
from millrace.message.ids import LOGICAL_BITS, LogId
from millrace.message.log_entries import LogDescription, LogEntries, StampFloor, VerifyReport

_SPARSE_BYTES: Final = 64 << 10
"""Distance of two indexed records of the active segment: a reader scans at most this far from one of them."""
_FIRST_BYTES: Final = 1 << 20
_FACTOR: Final = 4
"""A file is preallocated with this many times the bytes of the one before, from _FIRST_BYTES to `segment_bytes`."""
_POINTERS_PENDING: Final = 256
"""Pointers that are collected before one write to RocksDB. After a crash, recovery rebuilds lost ones."""
_CURSORS: Final = 64
"""Places at which readers stopped and will continue; the oldest is forgotten."""


class ChannelLog:
    """The open log of one channel; one object per process. Thread-safe."""

    def __init__(
        self,
        directory: Path,
        index: PointerIndex,
        disk: Disk,
        *,
        settings: RocksMQSettings,
        now_ms: Callable[[], int],
        id_allocator: IdAllocator | None = None,
        floor_ms: Callable[[], int] | None = None,
        read_only_guard: Callable[[], None] | None = None,
    ) -> None:
        """Recover the channel in `directory`.

        With `read_only_guard`, which is called at each step, the channel is only read and its files stay unchanged.
        Raises LogCorrupted, UnsupportedVersion.
        """
        manifest = ChannelManifest.load(directory)
        if read_only_guard is None:
            keep_reserve(directory)
        self._look = read_only_guard
        self._directory = directory
        self._files = SegmentFiles(
            directory,
            disk,
            segment_bytes=settings.segment_bytes,
            spare_files=settings.spare_files,
            repair=read_only_guard is None,
        )
        self._segments = recover(manifest, self._files, index, disk, repair=read_only_guard is None)
        if read_only_guard is None:
            rebuild_index(manifest, self._segments, index)
        self._manifest = manifest
        self._channel = manifest.channel
        self._index = index
        self._disk = disk
        self._settings = settings
        self._now_ms = now_ms
        self._ids = id_allocator
        self._floor_ms = floor_ms if id_allocator is None else None
        self._last = max(manifest.floor, self._segments[-1].last if self._segments else -1)
        self._next_number = self._segments[-1].number + 1 if self._segments else manifest.first_segment
        self._lock = threading.Lock()
        self._grown = threading.Condition(self._lock)
        self._wakes = 0
        self._truncating = threading.Lock()
        self._commit = GroupCommit(
            self._lock, name=self._channel, group_bytes=settings.group_bytes, commit=self._commit_group
        )
        self._writing: int | None = None
        """The first id of the group that is being written."""
        self._closed = False
        self._fd = -1  # of the active segment, the last one; -1: none, the next append creates one
        self._capacity = 0  # of the active segment's file
        self._pending: list[RecordPointer] = []
        self._indexing = True
        self._cursors: OrderedDict[int, tuple[Segment, int]] = OrderedDict()
        self._recent = RecentBatches(settings.recent_bytes)

    # Appending

    def append(self, values: Sequence[bytes] | pa.LargeBinaryArray) -> range:
        """Append `values` as one atomic batch; return their entry numbers when all are durable.

        Raises EntryTooLarge and InvalidArgument (nothing was appended), LogUnavailable (ambiguous).
        """
        if len(values) == 0:
            return range(0)
        framed = frame_batch(values, max_entry_bytes=self._settings.max_entry_bytes)
        base = self._commit.append(framed)
        return range(base, base + framed.count)

    def _first_id(self, count: int) -> int:
        """Return the first of `count` entry numbers.

        Raises IdsUnavailable.
        """
        if self._ids is None:
            # The clock may step back; ids never do, because a time tick is derived from them.
            return max(self._last + 1, self._now_ms() << LOGICAL_BITS)
        try:
            begin, end = self._ids.alloc(count)
            if begin <= self._last:
                # Another log of the folder, or a clock that stepped back, has used these ids: skip ahead once.
                self._ids.update_id()
                begin, end = self._ids.alloc(count)
        except Exception as error:
            raise IdsUnavailable(f"the id allocator failed ({error})") from error
        if begin <= self._last or end - begin != count:
            raise IdsUnavailable(
                f"the id allocator returned {begin} to {end} for {count} entries after {self._last}: its ids must begin"
                " above those in the folder"
            )
        return begin

    def _commit_group(self, group: list[PendingAppend]) -> None:
        """Assign ids and position to the group, write, sync and publish it. The lock is free during disk I/O."""
        size = sum(append.framed.size for append in group)
        previous = self._segments[-1] if self._segments else None
        rolls = self._fd < 0 or previous is None or previous.end + size > self._capacity
        base = self._writing = self._first_id(sum(append.framed.count for append in group))
        for append in group:
            append.base = base
            base += append.framed.count
        if previous is None or rolls:
            number = self._next_number
            segment = Segment(
                number, self._manifest.salt(number), self._files.path(number), group[0].base, group[0].base - 1, 0
            )
        else:
            segment = previous
        # The leader writes without the lock, so that readers go on and the next group can queue. No other append
        # writes: there is one leader at a time.
        self._lock.release()
        try:
            fd, pointers, end = self._write(group, segment, previous if rolls else None, size, rolls=rolls)
        except DiskFull:
            self._writing = None  # nothing was written: the next group takes its ids anew
            raise
        finally:
            self._lock.acquire()
        if rolls:
            # Only now that the new file's first group is durable: if that fails, the previous segment stays active.
            self._roll(fd, segment)
        self._publish(group, segment, pointers, end)

    def _write(
        self, group: list[PendingAppend], segment: Segment, previous: Segment | None, size: int, *, rolls: bool
    ) -> tuple[int, list[RecordPointer], int]:
        buffers: list[Buffer] = []
        # `durable` of each record is the position before this group: everything below was synced, so a broken record
        # there is damage and not a torn tail (recovery.py).
        start = offset = segment.end
        if rolls:
            opening = segment_header_record(self._channel, previous)
            buffers += [opening.header(salt=segment.salt, base=segment.first, durable=0, offset=0), *opening.parts]
            offset = opening.size
        pointers = []
        for append in group:
            framed = append.framed
            header = framed.header(salt=segment.salt, base=append.base, durable=start, offset=offset)
            buffers += (header, *framed.parts)
            pointers.append(RecordPointer(append.base, segment.salt, offset, framed.size, framed.count))
            offset += framed.size
        fd = self._make(segment.number, max(offset, self._next_capacity(previous))) if rolls else self._fd
        try:
            self._disk.write(fd, buffers, start)
            # One sync for the whole group. An append is acknowledged only after it, in _publish.
            self._disk.sync(fd)
        except BaseException:
            if rolls:
                os.close(fd)
            raise
        return fd, pointers, offset

    def _next_capacity(self, previous: Segment | None) -> int:
        """Return the size of the file after `previous`: a PChannel with little traffic needs little disk."""
        wanted = _FIRST_BYTES if previous is None else max(_FIRST_BYTES, _FACTOR * previous.end)
        return min(self._settings.segment_bytes, wanted)

    def _make(self, number: int, size: int) -> int:
        try:
            return self._files.create(number, size)
        except OSError as error:
            if error.errno in DISK_FULL_ERRNOS:
                raise DiskFull(error.errno, f"no room for a new segment file ({error})") from error
            raise

    def _roll(self, fd: int, segment: Segment) -> None:
        self._flush_pointers()
        self._retire()
        self._fd = fd
        self._capacity = os.fstat(fd).st_size
        self._segments.append(segment)
        self._next_number = segment.number + 1

    def _retire(self) -> None:
        """Close the active segment. Readers find its records through the pointer index from now on."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
            # Only the active segment has its sparse index in memory; a closed one is found through RocksDB.
            self._segments[-1].bases, self._segments[-1].offsets = [], []

    def _publish(self, group: list[PendingAppend], segment: Segment, pointers: list[RecordPointer], end: int) -> None:
        for pointer in pointers:
            if not segment.offsets or pointer.offset - segment.offsets[-1] >= _SPARSE_BYTES:
                segment.bases.append(pointer.base)
                segment.offsets.append(pointer.offset)
        segment.end = end
        for append in group:
            framed = append.framed
            # `previous` is the last entry before this batch, so this comes before `_last` moves.
            self._recent.add(previous=self._last, base=append.base, values=framed.values, bytes=framed.body)
            self._last = append.base + framed.count - 1
            append.done = True
        segment.last = self._last
        self._writing = None
        self._grown.notify_all()
        self._pending += pointers
        if len(self._pending) >= _POINTERS_PENDING:
            self._flush_pointers()

    def _flush_pointers(self) -> None:
        """Write collected pointers to RocksDB. If that fails, readers scan segments and the next open rebuilds the
        index.
        """
        pending, self._pending = self._pending, []
        if pending and self._indexing:
            try:
                self._index.put(
                    self._channel, self._manifest.incarnation, pending, pending[-1].base + pending[-1].entries
                )
            except Exception:
                self._indexing = False

    # Reading

    def read(self, position: LogId, *, end: LogId | None, max_bytes: int, timeout: float) -> LogEntries:
        """See :meth:`millrace.log.protocol.Log.read`.

        Raises LogCorrupted if a stored record fails verification.
        """
        limit = None if end is None else _entry(end)
        run = self._read_segment(_entry(position), limit, max_bytes, timeout)
        batches, size = [run.batch], run.bytes
        # A short run at a file's end (each restart begins a file) is extended from the next file: that copies little.
        while batches[0].num_rows and size < max_bytes // 4 and run.following <= self._last:
            try:
                more = self._read_segment(run.following, limit, max_bytes - size, 0.0)
            except (LogCorrupted, PositionTruncated, LogUnavailable):
                break  # the read that starts there reports it
            if not more.batch.num_rows or size + more.bytes > max_bytes:
                break
            run = more
            batches.append(run.batch)
            size += run.bytes
        batch = batches[0] if len(batches) == 1 else pa.concat_batches(batches)
        return LogEntries(batch, LogId(0, run.following))

    def wake(self) -> None:
        """Have the reads that wait for entries return without any."""
        with self._lock:
            self._wakes += 1
            self._grown.notify_all()

    def _read_segment(self, start: int, limit: int | None, max_bytes: int, timeout: float) -> SegmentRun:
        """Read as `read`, but not across the end of a file."""
        deadline = Deadline.after(timeout)
        with self._lock:
            self._check_readable(start)
            wakes = self._wakes
            while start > self._last:
                if deadline.expired() or wakes != self._wakes or (limit is not None and limit <= start):
                    return SegmentRun(empty_batch(), start, None, 0)
                deadline.wait(self._grown)
                self._check_readable(start)
            recent = self._recent.run_batches(start, limit, max_bytes)
            if not recent:
                segment = self._segments[bisect_left(self._segments, start, key=lambda candidate: candidate.last)]
                if limit is not None and limit <= max(start, segment.first):
                    return SegmentRun(empty_batch(), max(start, limit), None, 0)
                stop = self._stop(segment, limit)
                offset, hint = self._place(segment, start)
                segment.pins += 1
        if recent:
            return run_from_batches(recent, start=start, limit=limit, max_bytes=max_bytes)
        try:
            # The pin, taken under the lock, keeps the file from being recycled while it is read without the lock.
            with unavailable_on_failure(f"reading {self._channel!r}"), _opened(segment.path) as fd:
                if offset is None:
                    offset = self._locate(fd, segment, start, hint)
                if limit is not None and offset >= stop:
                    return SegmentRun(empty_batch(), max(start, limit), None, 0)
                place = SegmentRange(str(segment.path), segment.salt, offset, stop)
                run = read_run(fd, place, position=start, limit=limit, max_bytes=max_bytes)
        finally:
            with self._lock:
                self._unpin(segment)
        if run.offset is not None:  # a tailing reader continues there, even before the next record is written
            with self._lock:
                self._cursors[run.following] = (segment, run.offset)
                if len(self._cursors) > _CURSORS:
                    self._cursors.popitem(last=False)
        return run

    def _check_readable(self, start: int) -> None:
        self._check_open()
        if start < self._manifest.begin:
            raise PositionTruncated(
                f"position 0:{start} of {self._channel!r} was truncated: the earliest is 0:{self._manifest.begin}",
                earliest=(0, self._manifest.begin),
            )

    def _stop(self, segment: Segment, limit: int | None) -> int:
        """Return the latest offset to read to: the durable end, or the first indexed record of the active segment >=
        `limit`.
        """
        if limit is not None:
            at = bisect_left(segment.bases, limit)
            if at < len(segment.bases):
                return segment.offsets[at]
        return segment.end

    def _place(self, segment: Segment, entry: int) -> tuple[int | None, int]:
        """Return the offset of the record of `entry` if a reader just stopped there; otherwise one to scan from (-1:
        unknown).
        """
        # Each cursor serves one reader once; it leaves a new one where it stops.
        cursor = self._cursors.pop(entry, None)
        if cursor is not None and cursor[0] is segment:
            return cursor[1], 0
        at = bisect_right(segment.bases, entry) - 1
        return None, segment.offsets[at] if at >= 0 else -1

    def _locate(self, fd: int, segment: Segment, entry: int, hint: int) -> int:
        """Return the offset of the record that holds the first entry >= `entry`."""
        if hint < 0:
            hint = self._pointer(segment, entry)
        reached = hint
        for offset, header in walk_records(fd, segment.salt, hint, segment.end, payloads=False):
            if header.entries and header.last >= entry:
                return offset
            reached = offset + header.size
        raise LogCorrupted(
            f"{segment.path}: the record at offset {reached} has no valid header: restore the file from a copy"
        )

    def _pointer(self, segment: Segment, entry: int) -> int:
        try:
            pointer = self._index.at_or_before(self._channel, entry)
        except Exception:  # a failing index costs a longer scan, never a result
            return 0
        return pointer.offset if pointer is not None and pointer.salt == segment.salt else 0

    def _unpin(self, segment: Segment) -> None:
        segment.pins -= 1
        if segment.dropped and not segment.pins:
            self._files.recycle(segment.number)

    # Truncation, verification, closing

    def truncate(self, position: LogId) -> int:
        """Discard everything before `position`; return the bytes of freed files.

        Raises InvalidArgument beyond the end.
        """
        entry = _entry(position)
        with self._truncating:
            with self._lock:
                self._check_open()
                if entry > self._last + 1:
                    raise InvalidArgument(f"cannot truncate at 0:{entry}: the log ends at 0:{self._last + 1}")
                if entry <= self._manifest.begin:
                    return 0
                # Whole files only: entries before `entry` in the first kept file stay on disk, and `begin` hides them.
                boundary = bisect_left(self._segments, entry, key=lambda candidate: candidate.last)
                if boundary == len(self._segments) and self._fd >= 0:
                    boundary -= 1  # the active segment stays until it is closed
                first = self._segments[boundary].number if boundary < len(self._segments) else self._next_number
                manifest = replace(self._manifest, begin=entry, floor=self._last, first_segment=first)
            # The new beginning must be durable before any file goes: a crash in between then leaves extra
            # files, not too few.
            with unavailable_on_failure(f"truncating {self._channel!r}"):
                manifest.store(self._directory, self._disk)
            with self._lock:
                self._manifest = manifest
                doomed, self._segments = self._segments[:boundary], self._segments[boundary:]
                for segment in doomed:
                    # A pinned file is recycled by its last reader (_unpin).
                    segment.dropped = True
                idle = [segment.number for segment in doomed if not segment.pins]
                self._grown.notify_all()
            for number in idle:
                self._files.recycle(number)
            keep_reserve(self._directory)
            # The index is only a copy of the manifest here: it comes last, and its failure is no error.
            self._mirror_begin(entry, doomed[-1].last + 1 if doomed else 0)
        return sum(segment.end for segment in doomed)

    def _mirror_begin(self, begin: int, drop_below: int) -> None:
        try:
            self._index.set_begin(self._channel, begin, drop_below=drop_below)
        except Exception:  # the manifest has it; pointers into removed files are ignored
            with self._lock:
                self._indexing = False

    def enforce_retention(
        self, *, allowed: LogId, retention_bytes: int | None = None, retention_ms: int | None = None
    ) -> int:
        """Discard whole files beyond the retention, never past `allowed` (the checkpoint's position); return the bytes
        freed.

        `retention_bytes` and `retention_ms` override the settings of these names.
        """
        settings = self._settings
        most = settings.retention_bytes if retention_bytes is None else retention_bytes
        longest = settings.retention_ms if retention_ms is None else retention_ms
        with self._lock:
            self._check_open()
            target = self._manifest.begin
            stored_bytes = sum(segment.end for segment in self._segments)
            oldest = self._now_ms() - longest
            for segment in self._segments[: -1 if self._fd >= 0 else None]:
                # From the oldest file on, and never the active one: what remains is always one contiguous range.
                above = most and stored_bytes > most
                old = longest and segment.last >> LOGICAL_BITS < oldest
                if not (above or old):
                    break
                target = segment.last + 1
                stored_bytes -= segment.end
        return self.truncate(LogId(0, min(target, _entry(allowed))))

    def describe(self) -> LogDescription:
        with self._lock:
            self._check_open()
            stored_bytes = sum(segment.end for segment in self._segments)
            return LogDescription(LogId(0, self._manifest.begin), LogId(0, self._last + 1), stored_bytes)

    def stamp_floor(self) -> StampFloor | None:
        """See :meth:`millrace.log.protocol.StampPromising.stamp_floor`."""
        if self._floor_ms is None:
            return None
        try:
            # Before the lock: a group that takes its ids later has a later stamp, one that has them is seen below.
            floor = self._floor_ms()
        except OSError:
            return None  # the promise could not be stored
        with self._lock:
            self._check_open()
            if self._commit.failure is not None:
                return None  # recovery decides what the failed write left
            if self._writing is not None:
                floor = min(floor, self._writing >> LOGICAL_BITS)
            return StampFloor(LogId(0, self._last + 1), floor)

    def verify(self) -> VerifyReport:
        """Read everything and verify each checksum."""
        records = entries = size = 0
        first_bad: LogId | None = None
        detail = "every checksum holds"
        for segment, stop in self._pinned():
            offset, following = 0, segment.first
            with _opened(segment.path) as fd:
                for offset, header in walk_records(fd, segment.salt, 0, stop, payloads=True):
                    records += 1 if header.entries else 0
                    entries += header.entries
                    size += header.size
                    offset, following = offset + header.size, header.last + 1
            if offset != stop and first_bad is None:
                first_bad = LogId(0, following)
                detail = f"{segment.path}: the record at offset {offset} fails its checksum"
        return VerifyReport(records, entries, size, first_bad, detail)

    def _pinned(self) -> Iterator[tuple[Segment, int]]:
        with self._lock:
            self._check_open()
            snapshot = [(segment, segment.end) for segment in self._segments]
        for segment, stop in snapshot:
            with self._lock:
                self._check_open()
                if segment.dropped:
                    continue
                segment.pins += 1
            try:
                yield segment, stop
            finally:
                with self._lock:
                    self._unpin(segment)

    def reopen(self) -> None:
        """Accept appends again after a failed write. Unacknowledged bytes are cut.

        Raises LogUnavailable.
        """
        with self._lock:
            self._check_open()
            if self._commit.failure is None:
                return
            with unavailable_on_failure(f"reopening {self._channel!r}"):
                self._flush_pointers()
                # Cut unacknowledged bytes, and remove the file of a failed roll: its number is used again.
                active = self._segments[-1] if self._fd >= 0 else None
                self._retire()
                if active is not None:
                    self._files.truncate(active.number, active.end)
                self._files.remove(self._next_number)
            self._writing = None
            self._commit.resume()

    def close(self) -> None:
        """Finish the append in progress, wake readers, trim the active file. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._commit.close()
            self._grown.notify_all()
            self._flush_pointers()
            active = self._segments[-1] if self._fd >= 0 else None
            self._retire()
            if active is not None and self._commit.failure is None:
                self._files.truncate(active.number, active.end)

    def _check_open(self) -> None:
        if self._look is not None:
            self._look()
        if self._closed:
            raise LogUnavailable(f"the log of {self._channel!r} is closed: open it again")


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    fd = os.open(path, os.O_RDONLY)
    try:
        yield fd
    finally:
        os.close(fd)


def _entry(position: LogId) -> int:
    ledger, entry = position
    if ledger != 0 or not 0 <= entry < 1 << 63:
        raise InvalidArgument(f"{ledger}:{entry} is not a position of this log: its ledger is 0")
    return entry
