"""Flow control of appends: readings of the host determine a mode, and the mode determines a wait or a refusal.

    normal ──a watermark's `slow` passed──▶ slowdown ──its `reject` passed──▶ reject
       ▲                                                                        │
       └── the rate has grown back ── recovery ◀── every watermark is calm ─────┘   (from slowdown too)

In slowdown, appends are admitted at a rate that shrinks while the cause lasts. In recovery, the rate grows until it no
longer matters. Only changes of rows are slowed or refused. Ticks, flushes, DDL and transaction ends always pass,
because they relieve the host. Nothing here touches the log: a refused append was not appended, and its caller may retry
it. Modes and their order follow Milvus (WAL/adaptor/rate). Readings are arguments, so this is a pure state machine.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final

from millrace.base.errors import InvalidSettings, RateLimited

STEP_SECONDS: Final = 5.0
"""Time until the rate shrinks or grows again."""
SHRINK_FACTOR: Final = 0.8
GROWTH_FACTOR: Final = 1.5
CALM_FACTOR: Final = 0.95
"""A passed watermark counts as calm below this fraction of it; a falling one above its inverse."""
MAX_WAIT_SECONDS: Final = 5.0
"""An append that would wait longer is refused, so that no caller's deadline passes here."""


class Mode(StrEnum):
    """The ways in which flow control treats appends that change rows."""

    NORMAL = "normal"
    SLOWDOWN = "slowdown"
    REJECT = "reject"
    RECOVERY = "recovery"


class Level:
    """The level of a reading."""

    CALM: Final = 0
    SLOW: Final = 1
    REJECT: Final = 2


@dataclass(frozen=True, slots=True)
class FlowWatermark:
    """Limits at which a reading slows and refuses appends. `falling`: the reading is what is left, not what is used."""

    name: str
    slow: float
    reject: float
    falling: bool = False

    def __post_init__(self) -> None:
        if (self.slow < self.reject) if self.falling else (self.slow > self.reject):
            raise InvalidSettings(
                f"flow control, {self.name}: appends are slowed at {self.slow:g}, which must be passed before "
                f"{self.reject:g}, "
                "where they are refused"
            )

    def level(self, reading: float, before: int) -> int:
        """Return the level of `reading`, given the previous level `before`."""
        return next((each for each in (Level.REJECT, Level.SLOW) if self._passed(reading, each, before)), Level.CALM)

    def _passed(self, reading: float, level: int, before: int) -> bool:
        mark = self.reject if level == Level.REJECT else self.slow
        slack = CALM_FACTOR if before >= level else 1.0
        return reading < mark / slack if self.falling else reading >= mark * slack


@dataclass(frozen=True, slots=True)
class FlowLimits:
    """The watermarks, and the bounds of the rate in a slowdown (bytes/s)."""

    watermarks: Sequence[FlowWatermark] = ()
    start_rate: float = 64 << 20
    least_rate: float = 256 << 10

    def __post_init__(self) -> None:
        if not 0 < self.least_rate <= self.start_rate:
            raise InvalidSettings(
                f"flow control: the least rate ({self.least_rate:g} bytes/s) must be above 0 and at most the "
                "rate that a "
                f"slowdown starts with ({self.start_rate:g})"
            )


@dataclass(slots=True)
class _Bucket:
    """Bytes admitted beyond the rate. They are paid off over time."""

    debt: float = 0.0
    at: float = 0.0

    def pay(self, rate: float, now: float) -> None:
        self.debt = max(0.0, self.debt - rate * max(0.0, now - self.at))
        self.at = now


@dataclass(slots=True)
class FlowControl:
    """The state machine. Thread-safe. `now` is in seconds of any monotonic clock."""

    limits: FlowLimits = field(default_factory=FlowLimits)
    mode: Mode = Mode.NORMAL
    rate: float = 0.0
    """Admitted bytes/s. Meaningful in slowdown and recovery only."""
    _levels: dict[str, int] = field(default_factory=dict)
    _readings: dict[str, float] = field(default_factory=dict)
    _stepped: float = 0.0
    _bucket: _Bucket = field(default_factory=_Bucket)
    _delayed: int = 0
    _refused: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def change_limits(self, limits: FlowLimits) -> None:
        """Use other limits from the next readings on. A watermark that is off now is calm at once."""
        with self._lock:
            self.limits = limits
            there = {mark.name for mark in limits.watermarks}
            self._levels = {name: level for name, level in self._levels.items() if name in there}
            self._readings = {name: reading for name, reading in self._readings.items() if name in there}

    def observe(self, readings: Mapping[str, float], *, now: float) -> Mode:
        """Take new readings by watermark and return the new mode. A missing reading keeps its level."""
        with self._lock:
            for mark in self.limits.watermarks:
                if mark.name in readings:
                    self._readings[mark.name] = readings[mark.name]
                    self._levels[mark.name] = mark.level(readings[mark.name], self._levels.get(mark.name, Level.CALM))
            self._bucket.pay(self.rate, now)
            worst = max(self._levels.values(), default=Level.CALM)
            if worst == Level.REJECT:
                self._enter(Mode.REJECT, self.limits.least_rate, now)
            elif worst == Level.SLOW:
                self._slow(now)
            elif self.mode is not Mode.NORMAL:
                self._recover(now)
            return self.mode

    def admit(self, size: int, *, now: float) -> float:
        """Return the seconds that an append of `size` bytes of row changes must wait now. It counts as sent.

        Raises RateLimited in reject mode and if the wait would exceed MAX_WAIT_SECONDS. Then nothing was appended.
        """
        if self.is_unrestricted():  # no lock in the common case
            return 0.0
        with self._lock:
            if self.is_unrestricted():
                return 0.0
            if self.mode is Mode.REJECT:
                self._refused += 1
                raise RateLimited(f"appends are refused: {self._why()}", retry_after=STEP_SECONDS)
            self._bucket.pay(self.rate, now)
            wait = self._bucket.debt / self.rate
            if wait > MAX_WAIT_SECONDS:
                self._refused += 1
                raise RateLimited(
                    f"appends are slowed to {self.rate / 2**20:.2f} MiB/s: {self._why()}",
                    retry_after=wait - MAX_WAIT_SECONDS,
                )
            self._bucket.debt += size
            self._delayed += wait > 0
            return wait

    def is_unrestricted(self) -> bool:
        """Return whether nothing is slowed or refused."""
        return self.mode is Mode.NORMAL

    def describe(self) -> dict[str, Any]:
        """Return the state for people and metrics: mode, rate (bytes/s; None if it does not apply), readings, levels,
        counts.
        """
        with self._lock:
            return {
                "mode": str(self.mode),
                "rate": self.rate if self.mode in (Mode.SLOWDOWN, Mode.RECOVERY) else None,
                "why": self._why() if any(self._levels.values()) else "",
                "readings": dict(self._readings),
                "levels": dict(self._levels),
                "delayed": self._delayed,
                "refused": self._refused,
            }

    def level(self, name: str) -> int:
        """Return the level of one watermark."""
        return self._levels.get(name, Level.CALM)

    def _enter(self, mode: Mode, rate: float, now: float) -> None:
        if self.mode is not mode:
            self.mode, self._stepped = mode, now
        self.rate = rate

    def _slow(self, now: float) -> None:
        if self.mode is Mode.NORMAL:
            self._bucket = _Bucket(at=now)
            self._enter(Mode.SLOWDOWN, self.limits.start_rate, now)
        elif self.mode is not Mode.SLOWDOWN:
            self._enter(Mode.SLOWDOWN, max(self.rate, self.limits.least_rate), now)
        elif now - self._stepped >= STEP_SECONDS:
            self._stepped = now
            self.rate = max(self.limits.least_rate, self.rate * SHRINK_FACTOR)

    def _recover(self, now: float) -> None:
        if self.mode is not Mode.RECOVERY:
            self._enter(Mode.RECOVERY, self.rate, now)
        elif now - self._stepped >= STEP_SECONDS:
            self._stepped = now
            self.rate *= GROWTH_FACTOR
            if self.rate >= self.limits.start_rate:
                self.mode = Mode.NORMAL

    def _why(self) -> str:
        """Return the reasons of the mode, with figures."""
        passed = [mark for mark in self.limits.watermarks if self._levels.get(mark.name, Level.CALM)]
        if not passed:
            return "the host is recovering"
        return ", ".join(
            f"{mark.name} is {self._readings[mark.name]:.6g} (slow from {mark.slow:g}, refused from {mark.reject:g})"
            for mark in passed
        )
