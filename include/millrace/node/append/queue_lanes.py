"""The VChannels that this server dispatches of one work queue: what it reads ahead of each, and what is durable of it.

The group's division says which they are (millrace.node.append.consumer_groups). For each, tasks are read ahead into a
window (millrace.node.append.task_window). Its state is written with the group's position, under the claim to the
VChannel: of two servers that both take themselves for the owner, only one can write. Callers that wait for a write
share the next one. A VChannel that another server shall have delivers nothing more, and is given up when its leases
are over, or after DRAIN_SECONDS.

Bounds: LANE_BYTES and WINDOW_TASKS tasks for each VChannel, and QUEUE_BYTES for all windows of the server; a VChannel
without any row in memory may always read one message. Beyond that, reading waits.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from millrace.base.backoff import jittered
from millrace.base.errors import LogUnavailable, MetaAmbiguous, MillraceError
from millrace.base.job_pool import Job, JobPool
from millrace.client.consume.membership import GroupMember
from millrace.message.keys import key_column, key_hashes
from millrace.node.append.consumer_groups import ConsumerGroups, QueueMove
from millrace.node.append.task_window import WINDOW_TASKS, TaskWindow

LANE_BYTES: Final = 16 << 20
"""Approximate memory of the tasks that a VChannel's window holds."""
QUEUE_BYTES: Final = 256 << 20
"""The same for all windows of this server."""
DRAIN_SECONDS: Final = 5.0
"""How long a VChannel that another server shall have waits for its leases."""
PROGRESS_SECONDS: Final = 5.0
"""Seconds between two writes of what no caller waits for: the position passes messages that are no tasks."""
_ROOM_WAIT: Final = 0.5
_PAUSE: Final = 0.2
_LONGEST_PAUSE: Final = 1.0
_BROKEN_PAUSE: Final = 30.0
"""Longest pause before a VChannel is read again whose error needs somebody to act."""

_log: Final = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TaskRows:
    """Rows of one or more units, with one schema."""

    ticks: npt.NDArray[np.int64]
    """The unit of each row."""
    rows: pa.RecordBatch
    key: str | tuple[str, ...]
    """Names of the primary key's columns."""
    last: bool
    """Whether the last unit is complete."""


class TaskReader(Protocol):
    """Reads the tasks of one VChannel in order. One thread reads; any may close it."""

    @property
    def confirmed_tick(self) -> int:
        """Tick up to which `poll` has returned everything."""
        ...

    def poll(self) -> Iterator[TaskRows] | None:
        """Return an iterator of the next rows, perhaps of none; None without waiting if nothing is there now."""
        ...

    def on_news(self, call: Callable[[], None]) -> float | None:
        """Call `call` once, from any thread, when a poll may find more; else return the seconds until the next poll."""
        ...

    def close(self) -> None: ...


class TaskSource(Protocol):
    """Where a queue reads its tasks."""

    def open(self, lane: str, after_tick: int) -> TaskReader: ...

    def start_tick(self, lane: str, start: str | int) -> int:
        """Return the tick after which a queue begins: "earliest", "latest" or a tick."""
        ...

    def require(self, lane: str) -> None:
        """Raise CollectionNotFound if the collection of a VChannel was dropped."""
        ...


@dataclass(slots=True, eq=False)
class Lane:
    name: str
    claim: int
    window: TaskWindow
    generation: int = 0
    """Counts what happened to the window that must become durable."""
    saved: int = 0
    promised: int = 0
    """The generation that must be durable before anything is delivered."""
    moved: bool = False
    """Whether there is progress that no caller waits for."""
    gone: bool = False
    drain_until: float | None = None
    error: MillraceError | None = None
    reader: TaskReader | None = None
    weighed: int = 0
    """Bytes of the window that are counted in those of all queues."""
    job: Job | None = None
    """Reads ahead."""
    caught_up: bool = False
    """Whether everything in the log was read."""
    full: bool = False
    """Whether it waits for room."""
    pause: float = 0.0
    """Seconds until it is read again after an error."""
    pieces: Iterator[TaskRows] | None = None
    """The rest of the last poll."""
    rest: tuple[TaskRows, int] | None = None
    """A piece for which there was no room, and how many of its rows were added."""

    def is_gone(self) -> bool:
        """Return whether another server has the VChannel by now. Another thread may have noticed it."""
        return self.gone


class WindowMemory:
    """Approximate memory of the tasks in all windows of a server. Thread-safe."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._bytes = 0

    @property
    def bytes(self) -> int:
        return self._bytes

    def grow(self, delta: int) -> None:
        """Note that windows have grown by so many bytes."""
        with self._guard:
            self._bytes += delta


class QueueLanes:
    """The VChannels of one queue at this server. Thread-safe.

    Holders of `changed` may use lanes and their windows.
    """

    def __init__(
        self,
        group: str,
        member: GroupMember,
        groups: ConsumerGroups,
        source: TaskSource,
        *,
        ordered: bool,
        start: str | int,
        clock: Callable[[], float],
        memory: WindowMemory,
        pool: JobPool,
    ) -> None:
        """`start`: where a queue without a position begins. `pool` runs the reading ahead."""
        self._group = group
        self._member = member
        self._groups = groups
        self._source = source
        self._ordered = ordered
        self._start = start
        self._clock = clock
        self._memory = memory
        self._pool = pool
        guard = threading.RLock()
        self.changed = threading.Condition(guard)
        self.available = threading.Condition(guard)
        """Takes wait here for tasks, so that an acknowledgement does not wake them."""
        self.on_offer: Callable[[int | None], None] = lambda count: None
        """Tells the consumers that wait without a thread; called under `changed`."""
        self.reason = ""
        """Why this server has no VChannel of the queue, "" if it has one."""
        self._held: dict[str, Lane] = {}
        self._saving = threading.Lock()
        self._syncing = threading.Lock()
        self._joined = False
        self._closed = False
        self._progress = clock()

    def __len__(self) -> int:
        return len(self._held)

    def __iter__(self) -> Iterator[Lane]:
        """Iterate over the VChannels of this moment, by name."""
        return iter(sorted(self._held.values(), key=lambda lane: lane.name))

    def get(self, name: str) -> Lane | None:
        """Return a VChannel if this server dispatches it."""
        return self._held.get(name)

    def offer(self, count: int | None = None) -> None:
        """Wake consumers that wait, as many as there are new tasks; None: all. The caller holds `changed`."""
        if count is None:
            self.available.notify_all()
        else:
            self.available.notify(count)
        self.on_offer(count)

    # --- membership ---------------------------------------------------------------------------------------------------

    def join(self) -> bool:
        """Join the group and read, once; return whether it did. Raises what the group's server raises."""
        with self._syncing:
            if self._joined or self._closed:
                return False
            self._joined = True
        try:
            with repeatable():
                self.sync()
        except BaseException:
            self._joined = False
            raise
        return True

    def tend(self) -> None:
        """Do what time asks for: renew the membership, give up what is drained, write progress."""
        if self._clock() >= self._member.next_call:
            self.sync()
        self._release_drained()
        if self._clock() - self._progress >= PROGRESS_SECONDS:
            self._progress = self._clock()
            self.save([lane for lane in self if lane.moved], progress=True)

    def require(self) -> None:
        """Raise CollectionNotFound if the collection was dropped and none of its tasks is left here."""
        with self.changed:
            lanes = list(self)
            if not lanes or not all(lane.caught_up and lane.window.oldest_tick is None for lane in lanes):
                return
        self._source.require(lanes[0].name)

    def pause(self) -> float:
        """Return the seconds until time asks for something."""
        with self.changed:
            now = self._clock()
            following = min((lane.window.next_time(now) for lane in self), default=now + 1.0)
            if any(lane.drain_until is not None for lane in self):
                return 0.1
        return max(0.02, min(self._member.heartbeat, following - now))

    def close(self) -> None:
        """Make durable what is not, and leave the group. Idempotent."""
        with self.changed:
            if self._closed:
                return
            self._closed = True
            lanes = list(self)
            for lane in lanes:
                lane.window.end_reserve()
                lane.generation += 1
            self.changed.notify_all()
            self.offer()
        try:
            self.save(lanes)
        except MillraceError as error:
            _log.warning("queue %r: its last progress is not written: %s: %s", self._group, error.code, error)
        finally:
            with self.changed:
                for lane in lanes:
                    self._drop(lane)
            self._member.leave()

    @property
    def closed(self) -> bool:
        return self._closed

    def sync(self) -> None:
        """Renew the membership; take VChannels that are new, drop the lost, drain those that another shall have."""
        with self._syncing:
            share = self._member.sync({lane.name: lane.claim for lane in self})
            known = {lane.name: lane.claim for lane in self}
            new = [name for name, held in share.held.items() if known.get(name) != held.claim]
            states = self._groups.queue_states(self._group, new) if new else {}
            starts = {
                name: self._source.start_tick(name, self._start) for name in new if share.held[name].start is None
            }
            opened: list[Lane] = []
            with self.changed:
                for lane in self:
                    held = share.held.get(lane.name)
                    if held is None or held.claim != lane.claim:
                        self._drop(lane)
                for name, held in share.held.items():
                    if name not in self._held and not self._closed:
                        tick = starts.get(name) if held.start is None else held.start
                        # A state belongs to the position that it was written with.
                        saved = states.get(name) if held.tick is not None else None
                        window = TaskWindow(
                            tick or 0, saved, now=self._clock(), ordered=self._ordered, size=WINDOW_TASKS
                        )
                        lane = self._held[name] = Lane(name, held.claim, window, generation=1)
                        opened.append(lane)
                now = self._clock()
                for lane in self:
                    if lane.name in share.share:
                        lane.drain_until = None
                    elif lane.drain_until is None:
                        lane.drain_until = now + DRAIN_SECONDS
                if self.reason != share.reason:
                    self.reason = share.reason
                    self.offer()  # consumers show it
                self.changed.notify_all()
        try:
            if opened:
                # A queue's start is durable before its first delivery, and the group is a queue from now.
                self.save(opened)
        finally:
            for lane in opened:  # also after a failed write, which the next one makes up for
                lane.job = self._pool.start(partial(self.read_on, lane), name=f"queue {self._group!r} at {lane.name}")
                if lane.is_gone():
                    lane.job.stop()

    def _drop(self, lane: Lane) -> None:
        lane.gone = True
        if self._held.get(lane.name) is lane:
            del self._held[lane.name]
        if lane.job is not None:
            lane.job.stop()
        if lane.reader is not None:
            lane.reader.close()
        self.weigh(lane)
        self.changed.notify_all()

    def _release_drained(self) -> None:
        now = self._clock()
        with self.changed:
            lanes = [
                lane
                for lane in self
                if lane.drain_until is not None and (now >= lane.drain_until or not lane.window.counts().in_flight)
            ]
            for lane in lanes:
                lane.window.end_reserve()
                lane.generation += 1
        if lanes:
            self.save(lanes)
            self._member.release([lane.name for lane in lanes])
            with self.changed:
                for lane in lanes:
                    self._drop(lane)

    # --- reading ------------------------------------------------------------------------------------------------------

    def read_on(self, lane: Lane) -> float | None:
        """Read ahead on one VChannel once; return the seconds until the next time, None: once something wakes it."""
        try:
            more = self.read(lane)
        except MillraceError as error:
            found = error
            if lane.error is None and not error.retriable:
                _log.warning("queue %r waits at %s: %s: %s", self._group, lane.name, error.code, error)
        except Exception as error:
            found = LogUnavailable(f"reading {lane.name} failed: {type(error).__name__}: {error}")
            if lane.error is None:
                _log.exception("queue %r waits at %s", self._group, lane.name)
        else:
            lane.pause = 0.0
            with self.changed:
                if lane.is_gone():
                    return None
                lane.full = not self.has_room(lane)
                if lane.full:
                    return _ROOM_WAIT
                reader, job = lane.reader, lane.job
            if more or reader is None or job is None:
                return 0.0
            pause = reader.on_news(job.wake)
            lane.caught_up = pause is None
            return pause
        with self.changed:
            lane.error = found
            self.offer()
        # What needs somebody to act is tried again too: they may have acted.
        lane.pause = min(2 * lane.pause or _PAUSE, _LONGEST_PAUSE if found.retriable else _BROKEN_PAUSE)
        return None if lane.is_gone() else jittered(lane.pause)

    def read(self, lane: Lane) -> bool:
        """Read ahead on one VChannel once, as far as there is room; return whether there may be more at once."""
        with self.changed:
            if lane.is_gone() or not self.has_room(lane):
                return False
            reader = lane.reader
        if reader is None:
            reader = self._source.open(lane.name, lane.window.read_tick)
            with self.changed:
                lane.reader = reader
                gone = lane.is_gone()
            if gone:
                reader.close()
                return False
        try:
            if lane.pieces is None:
                lane.pieces = reader.poll()
            found = lane.pieces is not None
            if lane.rest is not None and not self._add(lane, *lane.rest):
                return False
            for piece in lane.pieces or ():
                if not self._add(lane, piece, 0):
                    return False
        except BaseException:
            # The reader is past what it yielded, perhaps within a unit: restart at the last whole unit.
            reader.close()
            with self.changed:
                lane.reader = lane.pieces = lane.rest = None
                lane.window.forget_open_unit()
            raise
        lane.pieces = None
        with self.changed:
            if not lane.is_gone():
                lane.error = None
                before = lane.window.position
                lane.window.confirm(reader.confirmed_tick)
                lane.moved = lane.moved or lane.window.position != before
        return found

    def wake_readers(self) -> None:
        """Read on where there is room again."""
        for lane in self:
            if lane.full and lane.job is not None and self.has_room(lane):
                lane.full = False
                lane.job.wake()

    def weigh(self, lane: Lane) -> None:
        """Count what a lane's window holds now."""
        size = 0 if lane.gone else lane.window.bytes
        if size != lane.weighed:
            self._memory.grow(size - lane.weighed)
            lane.weighed = size

    def has_room(self, lane: Lane) -> bool:
        """Return whether one more task may be read into the lane's window."""
        window = lane.window
        return bool(window.room) and (
            not window.bytes or (window.bytes < LANE_BYTES and self._memory.bytes < QUEUE_BYTES)
        )

    def _add(self, lane: Lane, piece: TaskRows, first: int) -> bool:
        """Add the rows of a piece from `first` on; return whether there was room for all of them."""
        keys = None
        if self._ordered:
            names = (piece.key,) if isinstance(piece.key, str) else piece.key
            keys = key_hashes(key_column(piece.rows, names))
        count = piece.rows.num_rows
        with self.changed:
            while first < count:
                if lane.is_gone() or not self.has_room(lane):
                    lane.rest = piece, first
                    return False
                stop = first + min(lane.window.room, count - first)
                lane.window.add(
                    piece.ticks[first:stop],
                    piece.rows.slice(first, stop - first),
                    last=piece.last if stop == count else bool(piece.ticks[stop] != piece.ticks[stop - 1]),
                    keys=None if keys is None else keys[first:stop],
                )
                self.offer(stop - first)
                first, lane.moved, lane.error = stop, True, None
                self.weigh(lane)
            lane.rest = None
        return True

    # --- the durable state --------------------------------------------------------------------------------------------

    def save(self, lanes: Sequence[Lane], *, progress: bool = False) -> set[str]:
        """Make the present state of lanes durable, with others that wait; return the lanes that are another's.

        Raises what the store raises; a later call writes what this one could not.
        """
        with self.changed:
            needed = {lane: lane.generation for lane in lanes}
        with self._saving:
            with self.changed:
                if all(lane.gone or lane.saved >= wanted for lane, wanted in needed.items()) and not progress:
                    return {lane.name for lane in needed if lane.gone}
                dirty = [
                    lane
                    for lane in self
                    if lane.generation > lane.saved or (lane.moved and (progress or lane in needed))
                ]
                moves = {
                    lane.name: (
                        lane,
                        lane.generation,
                        QueueMove(lane.claim, lane.window.position.tick, lane.window.encoded()),
                    )
                    for lane in dirty
                }
                for lane in dirty:
                    lane.moved = False
            lost: set[str] = set()
            if moves:
                try:
                    with repeatable():
                        lost = self._groups.move_queue(
                            self._group, self._member.name, {name: move for name, (_, _, move) in moves.items()}
                        )
                except BaseException:
                    for lane in dirty:
                        lane.moved = True
                    raise
            with self.changed:
                for name, (lane, generation, _) in moves.items():
                    if name in lost:
                        self._drop(lane)
                    else:
                        lane.saved = max(lane.saved, generation)
                return {lane.name for lane in needed if lane.gone}

    def owns(self, lane: Lane) -> bool:
        """Return whether a VChannel certainly belongs to this server: only then may a task get a new lease.

        Acknowledgements need no such check, because their write is bound to the claim.
        """
        return not self._member.expired and self._clock() < self._groups.locked_until(self._group, lane.name)


@contextmanager
def repeatable() -> Iterator[None]:
    """Raise LogUnavailable where the store's answer was lost: the consumer calls again, which is idempotent."""
    try:
        yield
    except MetaAmbiguous as error:
        raise LogUnavailable(f"the meta store did not answer: call again ({error})") from error
