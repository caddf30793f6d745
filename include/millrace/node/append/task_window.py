"""The tasks of one VChannel that a work queue has in hand: which are done, which are leased, and until when.

A task is a row that was inserted, named by its unit's tick and its number in the unit. The window begins at the first
task that is not done, and has at most WINDOW_TASKS tasks: while it is full, no more are read. What is durable of it
(:meth:`TaskWindow.encoded`) is a bit and a delivery count for each task, relative to a position: everything up to
`tick`, and the first `skip` tasks after it, is done. The log has the same tasks in the same order after every restart,
so the bits find their tasks again.

`reserved` says how far deliveries may have gone. It is durable before a task beyond it is delivered. A new owner of the
VChannel therefore knows which tasks may be in someone's hands: it leaves them alone for one lease (orphans), in which
their holders renew or acknowledge them, and delivers the others at once.

A delivery is identified by its holder and the task's delivery count. Once a task is delivered again, earlier deliveries
of it can no longer acknowledge it.

Pure: time is an argument, and nothing here reads or writes anything.
"""

from __future__ import annotations

import math
import struct
import zlib
from bisect import bisect_right
from collections import deque
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from millrace.base.errors import UnsupportedVersion

WINDOW_TASKS: Final = 8192
"""Most tasks from the first that is not done to the last that was read."""
RESERVE_TASKS: Final = 1024
"""How far `reserved` is ahead of the deliveries: one durable write for so many."""
STATE_VERSION: Final = 1
"""Version of the durable state. Raise it with a change of `encoded`; older ones stay readable."""
MAX_DELIVERIES: Final = 255
"""Greatest delivery count; it stays there."""
DEFAULT_GRACE: Final = 30.0
PROMISE_SECONDS: Final = 60.0
"""After so long without longer leases, a restart waits only for those that are given now."""
TASK_BYTES: Final = 80
"""Approximate memory for each task beside its row: the columns of a window that has twice as many places as tasks."""
KEY_BYTES: Final = 250
"""The same for the order by key."""

_FEW: Final = 256
"""Places of a window's columns at first."""
_COLUMNS: Final = ("_state", "_until", "_holder", "_count", "_ticks", "_ordinals", "_weight", "_follower")

_READY, _BLOCKED, _LEASED, _DONE = range(4)
_HEADER: Final = struct.Struct("<BQIIf")
_NOBODY: Final = -1
_ORPHAN: Final = 0
"""Holder of a task that an earlier owner of the VChannel may have delivered."""

Numbers = npt.NDArray[np.int64]


class Position(NamedTuple):
    """Everything up to `tick` is done, and the first `skip` tasks after it."""

    tick: int
    skip: int


@dataclass(frozen=True, slots=True)
class TaskNames:
    """Names of tasks of one VChannel, as columns; `deliveries` says which delivery of each is meant."""

    ticks: Numbers
    ordinals: Numbers
    deliveries: Numbers


@dataclass(frozen=True, slots=True)
class Outcomes:
    """Outcomes of a call about deliveries, as places in its names."""

    lost: list[int]
    """The task was delivered again, or its delivery was released: it is another's."""
    unread: list[int]
    """The owner of the VChannel has not read so far yet: call again."""
    changed: int = 0
    """Tasks that the call changed."""


class Counts(NamedTuple):
    """Tasks of a window by state."""

    ready: int
    """To be delivered now, or after their delay."""
    in_flight: int
    blocked: int
    """They wait for an earlier task of their key."""
    done: int
    """Done, while an earlier one is not."""
    redelivered: int
    """Not done, and delivered more than once."""


@dataclass(slots=True)
class _Segment:
    """Rows that were added together."""

    first: int
    """Place of the first row."""
    rows: pa.RecordBatch
    bytes: int
    """Approximate memory of them, with what the window keeps of each."""


class TaskWindow:
    """Tasks of one VChannel, from the first that is not done. Not thread-safe.

    Places count tasks since the window was made; array index = place - origin.
    """

    def __init__(
        self,
        tick: int,
        saved: bytes | None = None,
        *,
        now: float = 0.0,
        ordered: bool = False,
        size: int = WINDOW_TASKS,
    ) -> None:
        """`tick` is the group's position, `saved` what :meth:`encoded` returned with it.

        Raises UnsupportedVersion if a newer build wrote the state.
        """
        self.size = size
        self.lease = 0.0
        """Seconds for which a lease may still run; part of the state. It falls once long leases are over."""
        self._tick = tick
        self._skipped = self._skip = 0
        self._bits: npt.NDArray[np.bool_] = np.zeros(0, bool)
        self._counts_saved: npt.NDArray[np.uint8] = np.zeros(0, np.uint8)
        self._reserved = 0
        if saved is not None:
            skip, self._reserved, self._bits, self._counts_saved, self.lease = _decoded(saved)
            self._skipped = self._skip = skip
        self._handed_until = self._reserved
        """Tasks before this place may be in hands that an earlier owner gave them to."""
        self._grace = now + (self.lease or DEFAULT_GRACE)
        self._given = 0.0
        """Longest lease that was given since `_counted_from`."""
        self._counted_from = now
        capacity = min(2 * size, _FEW)  # most queues are idle
        self._origin = 0
        self._base = 0
        self._end = 0
        self._state = np.zeros(capacity, np.uint8)
        self._until = np.zeros(capacity, np.float64)
        """End of the lease of a leased task; when a ready one may be delivered."""
        self._holder = np.zeros(capacity, np.int32)
        self._count = np.zeros(capacity, np.uint8)
        self._ticks = np.zeros(capacity, np.int64)
        self._ordinals = np.zeros(capacity, np.int64)
        self._weight = np.zeros(capacity, np.float32)
        self._follower = np.full(capacity, -1, np.int64) if ordered else None
        """Place of the next task of the same key, which waits for this one."""
        self._last: dict[int, int] = {}
        """Place of the last task of each key."""
        self._segments: deque[_Segment] = deque()
        self._ended: deque[tuple[int, int]] = deque()
        """(place after it, tick) of units that were added whole."""
        self._open = 0
        """Rows that were added of a unit that is not complete."""
        self._read = tick
        self._newest = (tick, -1)
        """Name of the last task that was added or passed."""
        self.bytes = 0
        """Approximate memory of the tasks."""

    # --- reading ------------------------------------------------------------------------------------------------------

    @property
    def position(self) -> Position:
        return Position(self._tick, self._skip)

    @property
    def read_tick(self) -> int:
        """Tick up to which everything was read."""
        return self._read

    @property
    def room(self) -> int:
        """Tasks that may be added."""
        return self.size - (self._end - self._base)

    @property
    def oldest_tick(self) -> int | None:
        """Tick of the first task that is not done, if there is one."""
        return int(self._ticks[self._base - self._origin]) if self._base < self._end else None

    def add(
        self,
        ticks: Numbers,
        rows: pa.RecordBatch,
        *,
        last: bool = True,
        keys: npt.NDArray[np.uint64] | None = None,
    ) -> None:
        """Add rows of units in order, at most `room` many.

        `ticks` has each row's unit, `last` says whether the last of them is complete, and `keys` are hashes of the
        rows' keys, for an ordered window. Rows that are done already are left out, so reading begins at the position.
        """
        count = rows.num_rows
        assert count, "there is nothing to add"
        starts = np.concatenate([[0], np.flatnonzero(ticks[1:] != ticks[:-1]) + 1, [count]])
        ordinals = np.arange(count) - np.repeat(starts[:-1], np.diff(starts))
        ordinals[: starts[1]] += self._open
        all_ticks, newest = ticks, (int(ticks[-1]), int(ordinals[-1]))
        passed = min(self._skipped, int(starts[1]))
        self._skipped -= passed
        if passed:
            ticks, ordinals, rows = ticks[passed:], ordinals[passed:], rows.slice(passed)
            keys = None if keys is None else keys[passed:]
        assert rows.num_rows <= self.room, "the window is full"
        begin = self._end - passed
        if rows.num_rows:
            self._append(ticks, ordinals, rows, keys)
        complete = starts[1:] if last else starts[1:-1]
        self._ended.extend(zip((begin + complete).tolist(), all_ticks[complete - 1].tolist(), strict=True))
        if len(complete):
            self._skipped = 0
            self._read = max(self._read, int(all_ticks[complete[-1] - 1]))
        self._open = 0 if last else int(newest[1]) + 1
        self._newest = newest
        self._advance()

    def _append(
        self,
        ticks: Numbers,
        ordinals: Numbers,
        rows: pa.RecordBatch,
        keys: npt.NDArray[np.uint64] | None,
    ) -> None:
        self._make_room(rows.num_rows)
        first, count = self._end, rows.num_rows
        place = slice(first - self._origin, first - self._origin + count)
        self._state[place] = _READY
        self._until[place] = 0.0
        self._holder[place] = _NOBODY
        self._count[place] = 0
        self._ticks[place] = ticks
        self._ordinals[place] = ordinals
        self._weight[place] = rows.nbytes / count
        self._recall(first, place)
        self._end += count
        size = rows.nbytes + count * (TASK_BYTES if self._follower is None else TASK_BYTES + KEY_BYTES)
        self._segments.append(_Segment(first, rows, size))
        self.bytes += size
        if self._follower is not None:
            self._follower[place] = -1
            if keys is not None:
                self._line_up(first, keys)

    def _recall(self, first: int, place: slice) -> None:
        """Apply the saved state to tasks that were just added."""
        end = first + (place.stop - place.start)
        if first < self._handed_until:
            handed = slice(place.start, min(place.stop, self._handed_until - self._origin))
            self._state[handed] = _LEASED
            self._holder[handed] = _ORPHAN
            self._until[handed] = self._grace
            self._count[handed] = 1
        if first < len(self._counts_saved):
            known = self._counts_saved[first:end]
            part = slice(place.start, place.start + len(known))
            self._count[part] = np.maximum(self._count[part], known)
        if first < len(self._bits):
            bits = self._bits[first:end]
            part = slice(place.start, place.start + len(bits))
            self._state[part][bits] = _DONE

    def _line_up(self, first: int, keys: npt.NDArray[np.uint64]) -> None:
        assert self._follower is not None
        origin, state, last = self._origin, self._state, self._last
        for place, key in enumerate(keys.tolist(), first):
            if state[place - origin] == _DONE:
                continue
            before = last.get(key)
            last[key] = place
            if before is not None and before >= self._base and state[before - origin] != _DONE:
                state[place - origin] = _BLOCKED  # an orphan too: it was not delivered before the first of its key
                self._follower[before - origin] = place
        if len(last) > 2 * self.size:
            self._last = {key: place for key, place in last.items() if place >= self._base}

    def forget_open_unit(self) -> None:
        """Note that reading begins again after :attr:`read_tick`: what is here of the unit after it comes again."""
        self._skipped += self._open
        self._open = 0

    def confirm(self, tick: int) -> None:
        """Note that all units up to `tick` were added."""
        self._read = max(self._read, tick)
        self._advance()

    def _make_room(self, count: int) -> None:
        """Move what is in hand to the beginning of the columns, which grow up to twice the window's size."""
        places = len(self._state)
        if self._end - self._origin + count <= places:
            return
        in_hand = slice(self._base - self._origin, self._end - self._origin)
        held = in_hand.stop - in_hand.start
        while places < 2 * self.size and places < 2 * (held + count):
            places = min(2 * places, 2 * self.size)
        for name in _COLUMNS:
            column = getattr(self, name)
            if column is not None:
                moved = column if places == len(column) else np.zeros(places, column.dtype)
                moved[:held] = column[in_hand].copy()
                setattr(self, name, moved)
        self._origin = self._base

    def _advance(self) -> None:
        """Move the beginning past what is done."""
        low, high = self._base - self._origin, self._end - self._origin
        pending = np.flatnonzero(self._state[low:high] != _DONE)
        self._base += int(pending[0]) if len(pending) else high - low
        while self._ended and self._ended[0][0] <= self._base:
            self._tick = max(self._tick, self._ended.popleft()[1])
        while self._segments and self._segments[0].first + self._segments[0].rows.num_rows <= self._base:
            self.bytes -= self._segments.popleft().bytes
        if self._base < self._end:
            self._skip = int(self._ordinals[self._base - self._origin])
        elif self._open:
            self._skip = self._open + self._skipped
        else:
            self._tick = max(self._tick, self._read)
            self._skip = self._skipped

    # --- deliveries ---------------------------------------------------------------------------------------------------

    def ready(self, now: float) -> int:
        """Return how many tasks can be delivered now."""
        return len(self._deliverable(now))

    def _deliverable(self, now: float) -> Numbers:
        low, high = self._base - self._origin, self._end - self._origin
        return np.flatnonzero((self._state[low:high] == _READY) & (self._until[low:high] <= now)) + self._base

    def take(self, now: float, *, holder: int, lease: float, most: int, max_bytes: int) -> tuple[Numbers, bool]:
        """Lease up to `most` tasks to `holder`, in order; the first may exceed `max_bytes`.

        Returns their places, and whether the state must be durable before they are delivered.
        """
        assert holder > 0
        found = self._deliverable(now)[:most]
        if len(found):
            weights = np.cumsum(self._weight[found - self._origin])
            found = found[: max(1, int(np.searchsorted(weights, max_bytes, side="right")))]
        if not len(found):
            return found, False
        index = found - self._origin
        self._state[index] = _LEASED
        self._holder[index] = holder
        self._until[index] = now + lease
        counted = self._count[index]
        self._count[index] = np.minimum(counted, MAX_DELIVERIES - 1) + 1
        must = bool((counted > 0).any())
        must = self.promise(now, lease) or must
        if int(found[-1]) >= self._reserved:
            self._reserved = int(found[-1]) + 1 + RESERVE_TASKS
            must = True
        return found, must

    def promise(self, now: float, lease: float) -> bool:
        """Note that a lease is given. Returns whether the state must be durable first: it is longer than promised."""
        if now >= self._counted_from + PROMISE_SECONDS:
            low, high = self._base - self._origin, self._end - self._origin
            runs = self._until[low:high][self._state[low:high] == _LEASED]
            longest = max(
                float(runs.max()) if len(runs) else 0.0, self._grace if self._handed_until > self._end else 0.0
            )
            self.lease = max(self._given, min(self.lease, longest - now))
            self._counted_from, self._given = now, 0.0
        self._given = max(self._given, lease)
        if lease <= self.lease:
            return False
        self.lease = lease
        return True

    def names(self, places: Numbers) -> TaskNames:
        """Return the names of tasks, with their newest deliveries."""
        index = places - self._origin
        return TaskNames(self._ticks[index], self._ordinals[index], self._count[index].astype(np.int64))

    def rows(self, places: Numbers) -> list[tuple[pa.RecordBatch, Numbers]]:
        """Return the rows of tasks in pieces, each with the places of its rows."""
        found: list[tuple[pa.RecordBatch, Numbers]] = []
        firsts = [each.first for each in self._segments]
        start = 0
        while start < len(places):
            segment = self._segments[bisect_right(firsts, int(places[start])) - 1]
            stop = int(np.searchsorted(places, segment.first + segment.rows.num_rows))
            part = places[start:stop]
            begin, count = int(part[0]) - segment.first, len(part)
            whole = int(part[-1]) - int(part[0]) + 1 == count
            taken = segment.rows.slice(begin, count) if whole else segment.rows.take(pa.array(part - segment.first))
            found.append((taken, part))
            start = stop
        return found

    def acknowledge(self, names: TaskNames, holder: int) -> Outcomes:
        """Mark tasks as done; one that is done already stays so."""
        places, done, unread = self._find(names, holder)
        own = places >= 0
        index = places[own] - self._origin
        if len(index):
            self._state[index] = _DONE
            if self._follower is not None:
                following = self._follower[index]
                following = following[following >= self._base] - self._origin
                self._state[following[self._state[following] == _BLOCKED]] = _READY
            self._advance()
        return _outcomes(own | done, unread, len(index))

    def renew(self, names: TaskNames, holder: int, until: float) -> Outcomes:
        """Let leases end at `until`, if they would end earlier."""
        places, _, unread = self._find(names, holder)
        own = places >= 0
        index = places[own] - self._origin
        self._state[index] = _LEASED
        self._holder[index] = holder
        self._until[index] = np.maximum(self._until[index], until)
        return _outcomes(own, unread)

    def release(self, names: TaskNames, holder: int, *, at: float, unused: bool = False) -> Outcomes:
        """Give tasks back, to be delivered again from the time `at`; a delivery that was `unused` does not count."""
        places, _, unread = self._find(names, holder)
        own = places >= 0
        index = places[own] - self._origin
        self._state[index] = _READY
        self._holder[index] = _NOBODY
        self._until[index] = at
        if unused:
            self._count[index] = np.maximum(self._count[index], 1) - 1
        return _outcomes(own, unread)

    def _find(self, names: TaskNames, holder: int) -> tuple[Numbers, npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
        """Return the place of each delivery that is still the holder's (else -1), and which are done, and not read yet.

        A lease that is over is still the holder's as long as nobody else has the task.
        """
        low, count = self._base - self._origin, self._end - self._base
        places = np.full(len(names.ticks), -1, np.int64)
        beyond = (names.ticks > self._read) & (
            (names.ticks > self._newest[0]) | ((names.ticks == self._newest[0]) & (names.ordinals > self._newest[1]))
        )
        if not count:
            return places, ~beyond, beyond
        ticks, ordinals = self._ticks[low : low + count], self._ordinals[low : low + count]
        first = np.searchsorted(ticks, names.ticks)
        near = np.minimum(first, count - 1)
        at = first + names.ordinals - ordinals[near]  # of the oldest unit, the beginning may be done
        near = np.clip(at, 0, count - 1)
        here = (at == near) & (ticks[near] == names.ticks) & (ordinals[near] == names.ordinals)
        state, last = self._state[near + low], self._holder[near + low]
        own = here & ((last == holder) | (last == _ORPHAN)) & (self._count[near + low] == names.deliveries)
        own &= (state == _LEASED) | (state == _READY)
        places[own] = near[own] + self._base
        return places, (~here & ~beyond) | (here & (state == _DONE)), beyond

    def free(self, holder: int, now: float) -> int:
        """Give back all tasks of a holder that is gone; return how many.

        Their delivery counts: a task whose processing fails leaves its holder in this way too.
        """
        low, high = self._base - self._origin, self._end - self._origin
        index = np.flatnonzero((self._state[low:high] == _LEASED) & (self._holder[low:high] == holder)) + low
        self._state[index] = _READY
        self._holder[index] = _NOBODY
        self._until[index] = now
        return len(index)

    def expire(self, now: float) -> int:
        """End the leases that are over; return how many."""
        if self._base == self._end:
            return 0
        low, high = self._base - self._origin, self._end - self._origin
        index = np.flatnonzero((self._state[low:high] == _LEASED) & (self._until[low:high] <= now)) + low
        self._state[index] = _READY
        return len(index)

    def next_time(self, now: float) -> float:
        """Return when the next lease or delay ends; infinity if none runs."""
        if self._base == self._end:
            return math.inf
        low, high = self._base - self._origin, self._end - self._origin
        state, until = self._state[low:high], self._until[low:high]
        waits = until[(state == _LEASED) | ((state == _READY) & (until > now))]
        return float(waits.min()) if len(waits) else math.inf

    def held_by(self, holder: int) -> int:
        """Return how many tasks a holder has."""
        low, high = self._base - self._origin, self._end - self._origin
        return int(np.count_nonzero((self._state[low:high] == _LEASED) & (self._holder[low:high] == holder)))

    def counts(self) -> Counts:
        """Return the tasks by state."""
        if self._base == self._end:
            return Counts(0, 0, 0, 0, 0)
        low, high = self._base - self._origin, self._end - self._origin
        state = self._state[low:high]
        by = np.bincount(state, minlength=4).tolist()
        again = int(np.count_nonzero((self._count[low:high] > 1) & (state != _DONE)))
        return Counts(by[_READY], by[_LEASED], by[_BLOCKED], by[_DONE], again)

    def end_reserve(self) -> None:
        """Note that nothing more is delivered from here: what nobody has now, the next owner delivers at once."""
        low, high = self._base - self._origin, self._end - self._origin
        leased = np.flatnonzero(self._state[low:high] == _LEASED)
        self._reserved = self._base + (int(leased[-1]) + 1 if len(leased) else 0)
        if self._handed_until > self._end:  # what was not read since an earlier owner had it
            self._reserved = max(self._reserved, self._handed_until)

    # --- the durable state --------------------------------------------------------------------------------------------

    def encoded(self) -> bytes:
        """Return the state to be made durable with :attr:`position`."""
        low, high = self._base - self._origin, self._end - self._origin
        bits = np.concatenate([self._state[low:high] == _DONE, self._bits[self._end :]])
        last = np.flatnonzero(bits)
        bits = bits[: int(last[-1]) + 1] if len(last) else bits[:0]
        counts = np.concatenate([self._count[low:high], self._counts_saved[self._end :]])
        counts[: max(0, self._reserved - self._base)][counts[: max(0, self._reserved - self._base)] == 1] = 0
        counts[np.flatnonzero(bits[: len(counts)])] = 0
        again = np.flatnonzero(counts)
        counts = counts[: int(again[-1]) + 1] if len(again) else counts[:0]
        head = _HEADER.pack(STATE_VERSION, self._skip, max(0, self._reserved - self._base), len(bits), self.lease)
        return head + zlib.compress(np.packbits(bits).tobytes() + counts.tobytes(), 1)


def _outcomes(settled: npt.NDArray[np.bool_], unread: npt.NDArray[np.bool_], changed: int = 0) -> Outcomes:
    return Outcomes(np.flatnonzero(~settled & ~unread).tolist(), np.flatnonzero(~settled & unread).tolist(), changed)


def _decoded(saved: bytes) -> tuple[int, int, npt.NDArray[np.bool_], npt.NDArray[np.uint8], float]:
    """Return what `encoded` wrote: skip, reserved, bits, delivery counts and the longest lease."""
    if saved[0] != STATE_VERSION:
        raise UnsupportedVersion(
            f"the state of this work queue has version {saved[0]}, and this build reads version {STATE_VERSION}: use a"
            " newer build"
        )
    _, skip, reserved, bits, lease = _HEADER.unpack_from(saved)
    rest = np.frombuffer(zlib.decompress(saved[_HEADER.size :]), np.uint8)
    packed = -(-bits // 8)
    return skip, reserved, np.unpackbits(rest[:packed], count=bits).astype(bool), rest[packed:], lease
