"""Flow control of appends: from readings of this host to a mode, and from the mode to a wait or a typed refusal.

    normal ──a watermark's `slow` passed──▶ slowdown ──its `reject` passed──▶ reject
       ▲                                                                        │
       └── the rate has grown back ── recovery ◀── every watermark is calm ─────┘   (from slowdown too)

In slowdown appends are admitted at a rate that shrinks while the cause stays; in recovery it grows until it no longer
matters. Only what changes rows is slowed or refused: ticks, flushes, DDL and the ends of transactions always pass, since they
are what relieves a host. Nothing here touches the log: a refused append was not appended, and its caller may send it again.
Modes and their order are Milvus' (anchors: WAL/adaptor/rate); the readings are handed in, so that this is a pure machine.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final

from millrace.base.errors import InvalidSettings, RateLimited

STEP_SECONDS: Final = 5.0
"""How long a rate stands before it shrinks or grows once more."""
SHRINK_FACTOR: Final = 0.8
GROWTH_FACTOR: Final = 1.5
CALM_FACTOR: Final = 0.95
"""A watermark that was passed counts as calm again below this part of it (for a falling one: above its inverse)."""
MAX_WAIT_SECONDS: Final = 5.0
"""An append that would have to wait longer is refused instead, so that no caller's deadline passes in here."""


class Mode(StrEnum):
    """What flow control does with appends that change rows."""

    NORMAL = "normal"
    SLOWDOWN = "slowdown"
    REJECT = "reject"
    RECOVERY = "recovery"


class Level:
    """How far a reading has come."""

    CALM: Final = 0
    SLOW: Final = 1
    REJECT: Final = 2


@dataclass(frozen=True, slots=True)
class FlowWatermark:
    """Where a reading slows appends and where it stops them. `falling`: the reading is what is left, not what is used."""

    name: str
    slow: float
    reject: float
    falling: bool = False

    def __post_init__(self) -> None:
        if (self.slow < self.reject) if self.falling else (self.slow > self.reject):
            raise InvalidSettings(
                f"flow control, {self.name}: appends are slowed at {self.slow:g}, which must come before the {self.reject:g} "
                "at which they are refused"
            )

    def level(self, reading: float, before: int) -> int:
        """The level of `reading`, where the one before it was at level `before`."""
        return next((each for each in (Level.REJECT, Level.SLOW) if self._passed(reading, each, before)), Level.CALM)

    def _passed(self, reading: float, level: int, before: int) -> bool:
        mark = self.reject if level == Level.REJECT else self.slow
        slack = CALM_FACTOR if before >= level else 1.0
        return reading < mark / slack if self.falling else reading >= mark * slack


@dataclass(frozen=True, slots=True)
class FlowLimits:
    """The watermarks, and the rates (bytes/s) between which a slowdown moves."""

    watermarks: Sequence[FlowWatermark] = ()
    start_rate: float = 64 << 20
    least_rate: float = 256 << 10

    def __post_init__(self) -> None:
        if not 0 < self.least_rate <= self.start_rate:
            raise InvalidSettings(
                f"flow control: the least rate ({self.least_rate:g} bytes/s) must be above 0 and at most the rate that a "
                f"slowdown starts with ({self.start_rate:g})"
            )


@dataclass(slots=True)
class _Bucket:
    """What has been admitted beyond the rate, in bytes; paid off as time goes by."""

    debt: float = 0.0
    at: float = 0.0

    def pay(self, rate: float, now: float) -> None:
        self.debt = max(0.0, self.debt - rate * max(0.0, now - self.at))
        self.at = now


@dataclass(slots=True)
class FlowControl:
    """The machine. Thread-safe; `now` is any monotonic clock's seconds."""

    limits: FlowLimits = field(default_factory=FlowLimits)
    mode: Mode = Mode.NORMAL
    rate: float = 0.0
    """Bytes/s that are admitted; meaningful in slowdown and recovery alone."""
    _levels: dict[str, int] = field(default_factory=dict)
    _readings: dict[str, float] = field(default_factory=dict)
    _stepped: float = 0.0
    _bucket: _Bucket = field(default_factory=_Bucket)
    _delayed: int = 0
    _refused: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def observe(self, readings: Mapping[str, float], *, now: float) -> Mode:
        """Take new readings, by watermark; one that is missing keeps its level. The mode from here on."""
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
        """Seconds that an append of `size` bytes of row changes has to wait now; it counts as sent.

        Raises RateLimited (nothing was appended) in reject mode, and where the wait would exceed LONGEST_WAIT.
        """
        if self.is_unrestricted():  # the usual case takes no lock
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
        """Whether nothing is slowed or refused."""
        return self.mode is Mode.NORMAL

    def describe(self) -> dict[str, Any]:
        """The state, for people and metrics: mode, rate (bytes/s, None where it does not bind), readings, levels, counts."""
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
        """The level of one watermark."""
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
        """What stands behind the mode, in words with the figures."""
        passed = [mark for mark in self.limits.watermarks if self._levels.get(mark.name, Level.CALM)]
        if not passed:
            return "the host recovers"
        return ", ".join(
            f"{mark.name} is {self._readings[mark.name]:.6g} (slow from {mark.slow:g}, refused from {mark.reject:g})"
            for mark in passed
        )
