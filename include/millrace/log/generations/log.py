"""One PChannel's log across the generations of its backend (millrace.log.generations.service): the Log protocol.

A position of the whole log holds the generation in the high bits of its ledger.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pyarrow as pa

from millrace.base.deadline import Deadline
from millrace.base.errors import ChannelExists, ChannelNotFound, InvalidArgument, LogUnavailable, PositionTruncated
from millrace.log.generations.generation_file import Generations, GenerationSpan
from millrace.log.protocol import Log, is_local, stamp_floor
from millrace.message.ids import EARLIEST, LogId, LogIds, generation_start
from millrace.message.log_entries import ENTRY_SCHEMA, LogDescription, LogEntries, StampFloor
from millrace.message.tombstones import TombstoneMap, apply_tombstones
from millrace.message.types import MessageType
from millrace.message.wire.decode import decode_entries

if TYPE_CHECKING:
    from millrace.log.generations.service import GenerationsService

import pyarrow.compute as pc

from millrace.message.ids import GENERATION_BITS

_LEDGERS: Final = (1 << GENERATION_BITS) - 1


def backend_position(position: LogId) -> LogId:
    """Return a position of the whole log as its backend numbers it."""
    return LogId(position.ledger & _LEDGERS, position.entry)


def log_position(position: LogId, generation: int, *, origin: int) -> LogId:
    """Return a backend's position as one of the whole log. The log begins at 0:0 in whichever generation it began."""
    if position == EARLIEST and generation == origin:
        return EARLIEST
    return LogId(position.ledger | generation << GENERATION_BITS, position.entry)


def log_batch(batch: pa.RecordBatch, generation: int) -> pa.RecordBatch:
    """Return a generation's entries with ids of the whole log."""
    if not generation or not batch.num_rows:
        return batch
    ledger = pc.add(batch.column("ledger"), pa.scalar(generation << GENERATION_BITS, pa.int64()))
    return pa.RecordBatch.from_arrays([ledger, *batch.columns[1:]], schema=ENTRY_SCHEMA)


WAIT_SLICE: Final = 0.25
"""Longest wait in one backend, in seconds: how late a waiting reader notices a switch."""

LOCAL_WAIT_SLICE: Final = 5.0
"""The same in a local log, where the message that ends a generation wakes its readers."""

_PAUSE: Final = 0.02
_SEALED_SECONDS: Final = 10.0
_SCAN_BYTES: Final = 8 << 20


class GenerationLog:
    """A handle. Thread-safe."""

    def __init__(self, service: GenerationsService, pchannel: str) -> None:
        self._open: GenerationsService | None = service
        self.pchannel = pchannel
        self._lock = threading.Lock()
        self._handles: dict[int, Log] = {}
        self._known: tuple[Generations, GenerationSpan] | None = None
        self._sealed: dict[int, tuple[float, LogDescription]] = {}
        self._clean: tuple[int, LogId] | None = None

    @property
    def is_local(self) -> bool:
        """See :func:`millrace.log.protocol.is_local`."""
        return is_local(self.backend_log(self._span().current))

    def wake(self) -> None:
        """See :meth:`millrace.log.protocol.LocalLog.wake`."""
        current = self.backend_log(self._span().current)
        if is_local(current):
            current.wake()

    def append(self, values: Sequence[bytes] | pa.LargeBinaryArray) -> Sequence[LogId]:
        """See :meth:`millrace.log.protocol.Log.append`.

        Raises LogUnavailable also if a switch of the backend overtook it.
        """
        span = self._span()
        ids = self.backend_log(span.current).append(values)
        if ids:
            self._check_inside(span, ids[-1])
        if not span.current:
            return ids
        if isinstance(ids, LogIds):
            return LogIds(log_position(LogId(ids.ledger, 0), span.current, origin=-1).ledger, ids.entries)
        return [log_position(each, span.current, origin=-1) for each in ids]

    def read(
        self, position: LogId, *, end: LogId | None = None, max_bytes: int = 64 << 20, timeout: float = 0.0
    ) -> LogEntries:
        """See :meth:`millrace.log.protocol.Log.read`.

        A position in a generation that is not in the list yet raises LogUnavailable.
        """
        asked, deadline = position, Deadline.after(timeout)
        while True:
            span = self._span()
            if end is not None and end <= position:
                return LogEntries(_EMPTY, position)
            left = deadline.remaining()
            number = position.generation
            if number > span.current:
                self._await_generation(position, span, deadline)
                continue
            if number < span.first:
                if span.first > span.origin:
                    raise self._truncated(position)
                number = span.origin
                if end is not None and end.generation < number:
                    return LogEntries(_EMPTY, end)
            stop = span.ends.get(number)
            start = backend_position(position) if position.generation == number else EARLIEST
            if stop is not None and start >= stop:
                position = generation_start(number + 1)
                continue
            bound = backend_position(end) if end is not None and end.generation == number else None
            limit = min(each for each in (stop, bound) if each is not None) if stop or bound else None
            local = is_local(self.backend_log(number))
            wait = 0.0 if stop is not None else min(left, LOCAL_WAIT_SLICE if local else WAIT_SLICE)
            run = self._read(number, start, limit, max_bytes, wait)
            if run.batch.num_rows:
                inside = self._inside(run, number)
                if inside.batch.num_rows:
                    following = log_position(inside.next, number, origin=span.origin)
                    return LogEntries(log_batch(inside.batch, number), following)
                continue
            following = max(asked, log_position(run.next, number, origin=span.origin))
            if bound is not None and run.next >= bound:
                return LogEntries(_EMPTY, following)
            if stop is not None:
                position = generation_start(number + 1)
            elif deadline.expired() or (local and left - deadline.remaining() < wait):  # or woken
                return LogEntries(_EMPTY, max(following, position))

    def truncate(self, position: LogId) -> int:
        """See :meth:`millrace.log.protocol.Log.truncate`. Older generations are discarded whole and not read again."""
        span = self._span()
        if position > (end := self.end()):
            raise InvalidArgument(f"cannot truncate at {position}: the log ends at {end}")
        number = position.generation
        if number < span.first:
            return 0
        freed = 0
        service = self._service
        if number > span.first:
            descriptions = [self._sealed_description(each) for each in range(span.first, number)]
            service.file.change(lambda list_: list_.with_first(self.pchannel, number))
            for older, described in zip(range(span.first, number), descriptions, strict=True):
                if described is not None:
                    freed += described.bytes
                    self.backend_log(older).truncate(described.end)
            self._sealed.clear()
        if backend_position(position) > EARLIEST:
            freed += self.backend_log(number).truncate(backend_position(position))
            self._sealed.pop(number, None)
        self._forget_tombstones()
        return freed

    def describe(self) -> LogDescription:
        """See :meth:`millrace.log.protocol.Log.describe`. A switched log without new entries ends where the new
        generation begins.
        """
        span = self._span()
        newest = self.backend_log(span.current).describe()
        end = log_position(newest.end, span.current, origin=span.origin)
        if span.first == span.current:
            return LogDescription(log_position(newest.begin, span.current, origin=span.origin), end, newest.bytes)
        begin, size = None, newest.bytes
        for number in range(span.first, span.current):
            described = self._sealed_description(number)
            # A generation that cannot be queried counts as complete; reading there raises its error.
            size += 0 if described is None else described.bytes
            if begin is None and (described is None or described.begin < span.ends[number]):
                begin = log_position(EARLIEST if described is None else described.begin, number, origin=span.origin)
        return LogDescription(begin or log_position(newest.begin, span.current, origin=span.origin), end, size)

    def end(self) -> LogId:
        """See :meth:`millrace.log.protocol.Log.end`."""
        span = self._span()
        return log_position(self.backend_log(span.current).end(), span.current, origin=span.origin)

    def stamp_floor(self) -> StampFloor | None:
        """See :meth:`millrace.log.protocol.StampPromising.stamp_floor`.

        A switch ends a generation with an entry of its own, whose stamp holds what was promised before: the entries
        of the next one have later ticks than it, whatever their stamps.
        """
        span = self._span()
        floor = stamp_floor(self.backend_log(span.current))
        return floor and floor._replace(end=log_position(floor.end, span.current, origin=span.origin))

    def enforce_retention(
        self, *, allowed: LogId, retention_bytes: int | None = None, retention_ms: int | None = None
    ) -> int:
        """Apply retention limits as the embedded log does. Skips generations whose backend has its own."""
        span, freed = self._span(), 0
        limits = {"retention_bytes": retention_bytes, "retention_ms": retention_ms}
        given = {name: value for name, value in limits.items() if value is not None}
        for number in range(span.first, min(allowed.generation, span.current) + 1):
            handle: Any = self.backend_log(number)
            if hasattr(handle, "enforce_retention"):
                place = backend_position(allowed) if number == allowed.generation else span.ends[number]
                freed += handle.enforce_retention(allowed=place, **given)
                self._sealed.pop(number, None)
        self._forget_tombstones()
        return freed

    def read_stored(self, entry: LogId) -> tuple[bytes, int]:
        """Return what the backend holds at `entry`, regardless of tombstones, and its append stamp (Unix ms).

        Raises InvalidArgument if no entry has that id, PositionTruncated.
        """
        span, number, at = self._span(), entry.generation, backend_position(entry)
        if span.first <= number <= span.current and at < span.ends.get(number, at.following()):
            try:
                found = self.backend_log(number).read(at, end=at.following(), max_bytes=1).batch
            except PositionTruncated:
                raise self._truncated(entry) from None
            if found.num_rows and (found["ledger"][0].as_py(), found["entry"][0].as_py()) == at:
                return found["value"][0].as_py(), found["physical_ms"][0].as_py()
        raise InvalidArgument(f"the log of {self.pchannel} has no entry {entry}")

    def verify(self) -> Any:
        """Verify the newest backend's checksums.

        Raises InvalidArgument if it has none.
        """
        handle: Any = self.backend_log(self._span().current)
        if not hasattr(handle, "verify"):
            raise InvalidArgument("this log has no checksums of its own: its broker keeps them")
        return handle.verify()

    def record_end(self, end: LogId) -> bool:
        """See :meth:`millrace.log.protocol.Switchable.record_end`: a host found the AlterWAL message before `end`."""
        number, file = end.generation, self._service.file
        if file.refresh().newest <= number:
            return False
        file.change(lambda list_: list_.with_end(number, self.pchannel, backend_position(end)))
        return True

    def close(self) -> None:
        """See :meth:`millrace.log.protocol.Log.close`."""
        with self._lock:
            self._open = None
            handles, self._handles = self._handles, {}
        for handle in handles.values():
            handle.close()

    # --- inside -----------------------------------------------------------------------------------------------------

    @property
    def _service(self) -> GenerationsService:
        service = self._open
        if service is None:
            raise LogUnavailable("this handle is closed: open the log again")
        return service

    def backend_log(self, generation: int) -> Log:
        """Return the backend's log of one generation."""
        found = self._handles.get(generation)
        if found is not None:
            return found
        with self._lock:
            service = self._service
            found = self._handles.get(generation)
            if found is None:
                found = self._handles[generation] = self._opened(service, generation)
            return found

    def _opened(self, service: GenerationsService, generation: int) -> Log:
        backend = service.backend(generation)
        try:
            return backend.open(self.pchannel)
        except ChannelNotFound:
            before = service.file.generations.items[generation - 1] if generation else None
            if before is None or before.closed or self.pchannel not in before.ends:
                raise
        # It moved in a switch in progress, and was created after the switch had created the logs at its target.
        with suppress(ChannelExists):
            backend.create(self.pchannel)
        return backend.open(self.pchannel)

    def _span(self) -> GenerationSpan:
        generations = self._service.file.refresh()
        known = self._known
        if known is not None and known[0] is generations:
            return known[1]
        span = self._service.span(self.pchannel, generations)
        self._known = (generations, span)
        return span

    def _read(self, number: int, start: LogId, limit: LogId | None, max_bytes: int, timeout: float) -> LogEntries:
        """Read entries of one generation as readers see them. Every read of a log goes through here."""
        try:
            run = self.backend_log(number).read(start, end=limit, max_bytes=max_bytes, timeout=timeout)
        except PositionTruncated:
            raise self._truncated(log_position(start, number, origin=-1)) from None
        if not run.batch.num_rows:
            return run
        # Only after the read: an entry returned unchanged was read before a tombstone for it was proposed.
        standing = self._service.file.refresh().tombstones.get(self.pchannel)
        return run if not standing else _laid_over(run, number, standing)

    def _forget_tombstones(self) -> None:
        """Remove tombstones of truncated entries: the rejection in the WAL has the information."""
        file = self._service.file
        if self.pchannel in file.refresh().tombstones:
            begin = self.describe().begin
            file.change(lambda list_: list_.without_tombstones_before(self.pchannel, begin))

    def _truncated(self, position: LogId) -> PositionTruncated:
        self._sealed.clear()
        begin = self.describe().begin
        return PositionTruncated(
            f"position {position} of {self.pchannel} was truncated: the earliest is {begin}",
            earliest=(begin.ledger, begin.entry),
        )

    def _inside(self, run: LogEntries, number: int) -> LogEntries:
        """Return `run` without entries after the end of its generation, which may have become known during the read."""
        stop = self._span().ends.get(number)
        if stop is None or run.next <= stop:
            return run
        ledger, entry = (run.batch.column(name).to_numpy() for name in ("ledger", "entry"))
        count = int(np.count_nonzero((ledger < stop.ledger) | ((ledger == stop.ledger) & (entry < stop.entry))))
        return LogEntries(run.batch.slice(0, count), min(run.next, stop))

    def _await_generation(self, position: LogId, span: GenerationSpan, deadline: Deadline) -> None:
        if not deadline.pause(_PAUSE):
            raise LogUnavailable(
                f"{self.pchannel} continues at {position}, but the list of the log's generations"
                f" ({self._service.file.folder}) ends with {span.current}: a switch of the backend is in progress, or"
                " was"
                " interrupted (run `millrace log switch` again); retry"
            )

    def _check_inside(self, before: GenerationSpan, last: LogId) -> None:
        """Check that an append to `before.current` that ends with `last` is in the log.

        Raises LogUnavailable.
        """
        after, number = self._span(), before.current
        stop = after.ends.get(number)
        if stop is None and after.pending and after.current == number:
            stop = self._barrier(number, last)
        if stop is not None and last >= stop:
            raise LogUnavailable(
                f"the log of {self.pchannel} was switched to another backend during this append:"
                " append again with the same producer sequences"
            )

    def _barrier(self, number: int, last: LogId) -> LogId | None:
        """Return the position after an AlterWAL entry before `last`, in a generation whose end is not recorded yet."""
        since = self._service.file.generations.items[number].since.get(self.pchannel, EARLIEST)
        clean = self._clean
        position = max(since, clean[1]) if clean is not None and clean[0] == number else since
        while position < last:
            run = self._read(number, position, last, _SCAN_BYTES, 0.0)
            if not run.batch.num_rows:
                break
            decoded = decode_entries(run.batch)
            found = np.flatnonzero(decoded.column("type").to_numpy() == MessageType.ALTER_WAL)
            if len(found):
                ledger, entry = (decoded.column(name)[int(found[0])].as_py() for name in ("ledger", "entry"))
                return LogId(ledger, entry).following()
            position = run.next
        self._clean = (number, position)
        return None

    def _sealed_description(self, number: int) -> LogDescription | None:
        """Describe an older generation, at most some seconds old: it hardly changes."""
        now = time.monotonic()
        known = self._sealed.get(number)
        if known is not None and now - known[0] < _SEALED_SECONDS:
            return known[1]
        found = self._service.describe_sealed(number, self.pchannel)
        if found is None:
            return known[1] if known is not None else None
        self._sealed[number] = (now, found)
        return found


def _laid_over(run: LogEntries, number: int, standing: TombstoneMap) -> LogEntries:
    """Return entries of generation `number`, with its own ids, with the tombstones of the whole log applied."""
    batch = apply_tombstones(
        run.batch, {backend_position(entry): each for entry, each in standing.items() if entry.generation == number}
    )
    cut = batch.num_rows < run.batch.num_rows
    ids = [run.batch.column(name) for name in ("ledger", "entry")]
    return LogEntries(batch, LogId(*(each[batch.num_rows].as_py() for each in ids)) if cut else run.next)


_EMPTY: Final = pa.RecordBatch.from_arrays([pa.nulls(0, field.type) for field in ENTRY_SCHEMA], schema=ENTRY_SCHEMA)
