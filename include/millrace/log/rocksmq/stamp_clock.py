"""The clock that stamps the embedded log: the host's wall clock, checked against its steady clock
(CLOCK_BOOTTIME, which cannot be set).

The wall clock may leap ahead of the steady clock by at most a bound between two readings. A larger leap is held:
stamps follow the steady clock until the wall clock is back within the bound, or an operator accepts the new time.
Idle or suspended time is not a leap. Stamps never decrease. If they are ahead of the wall clock (after an accepted
leap, or a clock set back), they advance at half speed until it has caught up, so that leases and idle seals still
expire.

The clock's state is stored beside the log for the next process, with the id of the machine's boot. If the state is
lost, or after another boot, the wall clock is accepted, but no stamp is older than one in the log; a leap that was
held at shutdown stays held. Only this clock judges time: the chain takes stamps as they are, and a broker's stamps
are the broker's.

The clock also promises (:meth:`StampClock.floor_ms`): no later stamp is before a time that it returned there, not even
after a power loss with the wall clock set back. So the log can promise a reader that nothing earlier will come, without
an entry that says so. The promise is stored ahead, a second at a time, as a timestamp oracle stores its window.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from millrace.base.errors import LogCorrupted
from millrace.base.failpoint import hit
from millrace.base.process import boot_id
from millrace.log.rocksmq.disk import OsDisk
from millrace.log.rocksmq.manifest import read_checksummed, write_checksummed
from millrace.rpc.wire import ClockView

MAX_LEAP_SECONDS: Final = 300.0
"""A wall clock that is further ahead of the steady one than this is ignored until somebody accepts it."""
PERSIST_SECONDS: Final = 5.0
"""Longest time between two writes of the state; the begin and the end of a held leap are written at once."""

PROMISE_SECONDS: Final = 1.0
"""Time ahead of the wall clock up to which a promise is stored: one durable write in this time, while floors are
needed.

After a kill, stamps go on from the promise. So one that is ahead already gets less, down to MIN_PROMISE_SECONDS, or a
process that is killed again and again would take log time ahead by as much each time.
"""
MIN_PROMISE_SECONDS: Final = 0.05

_VERSION: Final = 1
_PROMISE_VERSION: Final = 2
"""The version of a state with a promise. An older build would not keep it."""
_MS: Final = 1_000_000
_SECOND: Final = 1_000_000_000
_NO_BOUND: Final = 1 << 62
"""Nanoseconds beyond any leap: every leap is accepted."""

_log = logging.getLogger(__name__)


def boottime_ns() -> int:
    """Return nanoseconds since the machine's boot, including suspended time."""
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME)


@dataclass(frozen=True, slots=True)
class _ClockState:
    """The state that one process leaves to the next: its last reading, in nanoseconds."""

    boot_id: str
    steady: int
    wall: int
    believed: int
    stamp: int
    held_since: int | None
    promised: int = 0
    """No stamp at or below it may be given after this state was read; 0: nothing was promised."""


class StampClock:
    """Gives stamps, which never decrease. Thread-safe.

    `path`: the state file. `max_leap_seconds`: the bound (0: accept every leap).
    """

    def __init__(
        self,
        path: Path,
        *,
        max_leap_seconds: float = MAX_LEAP_SECONDS,
        wall: Callable[[], int] = time.time_ns,
        steady: Callable[[], int] = boottime_ns,
        boot: str | None = None,
    ) -> None:
        self._path = path
        self._leap_seconds = max_leap_seconds
        self._leap = round(max_leap_seconds * _SECOND) if max_leap_seconds else _NO_BOUND
        self._wall = wall
        self._steady = steady
        self._boot = boot_id() if boot is None else boot
        self._lock = threading.Lock()
        self._keeping = threading.Lock()
        self._keep_at = 0
        self._promised = 0
        # The last reading: steady clock, wall clock, and the resulting stamp.
        self._now, self._shown = steady(), wall()
        self._given = 0
        self._offset = self._shown - self._now  # what is believed, less the steady clock
        self._base, self._since = 0, self._now  # the last stamp that was what is believed, and when
        self._held_since: int | None = None
        self._turned = False
        state = self._load()
        if state is not None:
            self._go_on_from(state)
            self._promised = state.promised
            self._give_from(state.promised)
        self.now_ms()

    def _go_on_from(self, state: _ClockState) -> None:
        self._base, self._held_since = state.stamp, state.held_since
        # The same boot: the steady clock continued, so the previous process's line is extended, whatever the wall clock
        # did meanwhile.
        if self._boot and state.boot_id == self._boot and state.steady <= self._now:
            self._offset, self._since = state.believed - state.steady, state.steady
            return
        if state.held_since is not None and state.wall <= self._shown:
            # The wall clock was not set back since: its advance counts, its earlier leap does not.
            self._offset -= state.wall - state.believed
        self._believe_stamp()

    def now_ms(self) -> int:
        """Return the current stamp in Unix milliseconds."""
        with self._lock:
            stamp = self._look()
            # The state is written outside of the lock: a slow disk must not delay stamps.
            due = self._now >= self._keep_at
        if due:
            self._keep()
        return stamp // _MS

    def observe(self, stamp_ms: int) -> None:
        """Record that the log holds this stamp: no earlier one is given from now on."""
        with self._lock:
            # Recovery calls this with the newest stamp of the log: the state file may be older than that, or lost.
            self._give_from(stamp_ms * _MS)

    def _give_from(self, stamp: int) -> None:
        """Give no earlier stamp from now on. Called with the lock held, or by the constructor."""
        if stamp > self._look():
            self._base, self._since = stamp, self._now
            self._believe_stamp()

    def floor_ms(self) -> int:
        """Return the current stamp and promise that no later one is earlier, whatever happens to process and machine.

        Stores the promise first, at most once in PROMISE_SECONDS. Raises OSError if it cannot be stored.
        """
        with self._lock:
            stamp = self._look()
            if stamp <= self._promised:
                return stamp // _MS
        with self._keeping:
            with self._lock:
                stamp = self._look()
                held = self._held_since is not None  # then the wall clock says nothing
                ahead = round(PROMISE_SECONDS * _SECOND) if held else max(0, stamp - self._shown)
                window = max(round(MIN_PROMISE_SECONDS * _SECOND), round(PROMISE_SECONDS * _SECOND) - ahead)
                promised = max(self._promised, stamp + window)
                state = self._state(promised)
            # Only once it is on the disk may a stamp up to it be given as a floor.
            self._store(state, durable=True)
            with self._lock:
                self._promised = promised
            hit("clock.promised")
        return stamp // _MS

    def _believe_stamp(self) -> None:
        """Keep the accepted time at or after the last stamp, so that a wall clock that recovers from being set back is
        no leap.
        """
        self._offset = max(self._offset, self._base - self._now)

    def accept(self) -> ClockView:
        """Accept the wall clock as it is now, however far it leapt."""
        with self._lock:
            self._offset = max(self._offset, self._wall() - self._steady())
        return self.view()

    def view(self) -> ClockView:
        """Return the clock's current state."""
        self.now_ms()
        with self._lock:
            held = None if self._held_since is None else self._held_since // _MS
            return ClockView(self._shown // _MS, self._given // _MS, held, self._leap_seconds)

    def close(self) -> None:
        """Store the state. Idempotent."""
        with self._lock:
            self._promised = min(self._promised, self._look())
        self._keep()

    def _look(self) -> int:
        """Read and judge the wall clock; return the stamp in nanoseconds. Called with the lock held."""
        self._now, self._shown = now, shown = self._steady(), self._wall()
        line = now + self._offset
        # Only leaps ahead are held. A wall clock that steps back is slowed by the next lines, since stamps cannot
        # decrease.
        held = shown - line > self._leap
        believed = line if held else shown
        # The least possible stamp: half the steady clock's speed, so that log time advances while the stamps are ahead
        # of the wall clock, which catches up meanwhile.
        stamp = self._base + ((now - self._since) >> 1)
        if believed >= stamp:
            self._base, self._since, self._offset = believed, now, believed - now
            stamp = believed
        if held != (self._held_since is not None):
            self._turn(held, stamp)
        self._given = stamp
        return stamp

    def _turn(self, held: bool, stamp: int) -> None:
        """Begin or end holding a leap."""
        self._held_since = stamp if held else None
        # Write the state at once, durably: a restart must not accept a leap that this process refused.
        self._turned, self._keep_at = True, 0
        if held:
            _log.warning(
                "the wall clock leapt %.0f s ahead: ignoring it, stamps follow the steady clock"
                " (docs/operating.md, When the clock is wrong)",
                (self._shown - stamp) / _SECOND,
            )
        else:
            _log.warning(
                "the wall clock is accepted again; stamps are %.1f s ahead of it", (stamp - self._shown) / _SECOND
            )

    # --- persistence --------------------------------------------------------------------------------------------------

    def _keep(self) -> None:
        """Replace the state file. A failed write is retried when the next one is due."""
        # One writer at a time, without waiting: the state that it writes is as new as ours.
        if not self._keeping.acquire(blocking=False):
            return  # another thread writes it
        try:
            with self._lock:
                state = self._state(self._promised)
                # Begin and end of a held leap must survive a power loss, and so must a promise: this replaces its file.
                durable = self._turned or self._held_since is not None or self._promised > 0
                self._turned = False
            self._store(state, durable=durable)
            hit("clock.kept")
        except OSError as error:
            self._turned = True
            _log.warning("cannot store the clock's state in %s: %s", self._path, error)
        finally:
            self._keeping.release()

    def _state(self, promised: int) -> _ClockState:
        """Return the state to store now. Called with the lock held."""
        self._keep_at = self._now + round(PERSIST_SECONDS * _SECOND)
        believed = self._now + self._offset
        return _ClockState(self._boot, self._now, self._shown, believed, self._given, self._held_since, promised)

    def _store(self, state: _ClockState, *, durable: bool) -> None:
        fields = {"version": _PROMISE_VERSION, **asdict(state)}
        if not state.promised:
            fields["version"] = _VERSION
            del fields["promised"]
        write_checksummed(self._path, json.dumps(fields, sort_keys=True).encode(), OsDisk(), durable=durable)

    def _load(self) -> _ClockState | None:
        """Read the state file; None if there is none, or if this build cannot read it."""
        try:
            fields = json.loads(read_checksummed(self._path))
            if (version := fields.pop("version")) not in (_VERSION, _PROMISE_VERSION):
                _log.warning(
                    "%s has version %s, which this build cannot read: accepting the wall clock", self._path, version
                )
                return None
            return _ClockState(**fields)
        except FileNotFoundError:
            return None
        except (OSError, LogCorrupted, ValueError, KeyError, TypeError, AttributeError) as error:
            _log.warning("cannot read %s (%s): accepting the wall clock", self._path, error)
            return None
