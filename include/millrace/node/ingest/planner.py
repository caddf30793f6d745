"""What the next micro-batch reads: positions from one version of the ``wal`` table, ends from the logs.

Knows no Spark. Spark keeps the offsets that :meth:`Planner.latest` returns and hands them back, but nothing is
believed of them besides how far a batch may go at most: a lost or stale Spark checkpoint costs nothing.

A PChannel with nothing behind its position but ticks that become no rows is idle. Whether that is so of ticks is computed by
the chain itself, on the few new entries and without writing, so that an idle node runs no micro-batch and a tick that fires
a timer runs one.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypedDict

from millrace.base.errors import MillraceError, StateDamaged
from millrace.log.protocol import Log, LogService
from millrace.message.ids import EARLIEST, LogId
from millrace.message.log_entries import LogEntries, value_bytes
from millrace.message.types import MessageType
from millrace.message.wire.decode import decode_entries
from millrace.node.ingest.ranges import Failure, RangePlan
from millrace.node.range.parking import Parked, park, parked_names
from millrace.tables.wal.state_check import check_state
from millrace.tables.wal.table import WalPosition, WalTable
from millrace.wal.chain import Chain
from millrace.wal.state import ChannelState

PEEK_BYTES: Final = 64 << 10
"""Entries of at most so many bytes are run through the chain to see whether they make rows; more of them always do."""

UNBOUNDED: Final = 1 << 62
_BACKOFF: Final = (0.1, 5.0)
_BOUNDED_TRIES: Final = 8
_NAMES_SECONDS: Final = 1.0
"""How long a new PChannel may go unnoticed: a poll asks each log where it ends, and no more."""
_logger = logging.getLogger(__name__)


class Offset(TypedDict):
    """Spark's offset: a number that grows with each micro-batch, and how far that one may go."""

    batch: int
    max_bytes: int
    """Of one PChannel's log."""
    ends: dict[str, str]


START: Final[Offset] = {"batch": 0, "max_bytes": 0, "ends": {}}


@dataclass(slots=True)
class _Peek:
    """How far a PChannel was looked into beyond its position without finding a row."""

    commits: int
    state: ChannelState


@dataclass(slots=True)
class _Stall:
    """A PChannel that was planned and did not move: planned again later and later."""

    commits: int
    pause: float
    until: float
    times: int


class Planner:
    """Plans micro-batches over all PChannels of a log service. One thread at a time."""

    def __init__(
        self,
        service: LogService,
        table: WalTable,
        *,
        parked: Path,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._service = service
        self._table = table
        self._parked = parked
        self._clock = clock
        self._sleep = sleep
        self._logs: dict[str, Log] = {}
        self._peeks: dict[str, _Peek] = {}
        self._proved: dict[str, int] = {}
        """By PChannel the commit whose state row, without a checksum, a replay has confirmed."""
        self._stalls: dict[str, _Stall] = {}
        self._target: dict[str, LogId] | None = None
        self._names: set[str] = set()
        self._names_until = -math.inf
        self.found_ends: dict[str, LogId] = {}
        """Where the logs ended when they were last looked at."""

    def fix_target(self) -> None:
        """Take where the logs end now as the end of all (Trigger.AvailableNow)."""
        self._target = self.log_ends()

    def log_ends(self) -> dict[str, LogId]:
        """Where each PChannel's log ends now."""
        return {pchannel: self._log(pchannel).end() for pchannel in self._service.names()}

    def latest(self, start: Offset, *, max_bytes: int = UNBOUNDED) -> Offset:
        """The offset of the next micro-batch, or `start` itself where there is nothing to do (now).

        A log that cannot be reached counts as nothing to do.
        """
        try:
            ends = self._pending()
        except MillraceError as error:
            if not error.retriable:
                raise
            _logger.warning("no micro-batch is planned: %s: %s", error.code, error)
            return start
        if not ends:
            return start
        return {
            "batch": start["batch"] + 1,
            "max_bytes": max_bytes,
            "ends": {name: str(end) for name, end in ends.items()},
        }

    def plan(self, end: Offset) -> list[RangePlan]:
        """The ranges of the micro-batch up to `end`, from the positions of one table version, the newest.

        A PChannel that stands at its end already, or is parked, has none.
        """
        self._table.refresh()
        parked = parked_names(self._parked)
        ends = {name: LogId.parse(text) for name, text in end["ends"].items() if name not in parked}
        plans = []
        for name, base in self._bases(ends).items():
            stands = base.position or LogId(0, 0)
            if stands < ends[name] or (ends[name] < stands and self._regressed(name, stands)):
                plans.append(RangePlan(base=base, end=ends[name], max_bytes=end["max_bytes"]))
        return plans

    def _pending(self) -> dict[str, LogId]:
        """The ends of the PChannels that have rows to come; the stalled ones after their pause."""
        if self._clock() >= self._names_until:
            self._names, self._names_until = set(self._service.names()), self._clock() + _NAMES_SECONDS
        names = self._names - parked_names(self._parked)
        if self._target is not None:
            names &= set(self._target)
        self._table.refresh()
        pending: dict[str, LogId] = {}
        self.found_ends = {}
        for name, base in self._bases(sorted(names)).items():
            found = end = self.found_ends[name] = self._log(name).end()
            if self._target is not None:
                end = min(end, self._target[name])
            stands = base.position or LogId(0, 0)
            # A log that ends before what is committed is a task too: it says LogRegressed, and parks the PChannel.
            if (found < stands or (stands < end and self._has_rows(base, end))) and self._may_run(base):
                pending[name] = end
                self._note_planned(base)
        return pending

    def _bases(self, names: Iterable[str]) -> dict[str, WalPosition]:
        """Where PChannels stand, at the handle's version. One whose state is damaged is parked; the others go on."""
        found = self._table.sound_positions(names, damaged=self._park)
        return {name: base for name, base in found.items() if base.checked or self._is_proved(base)}

    def _is_proved(self, base: WalPosition) -> bool:
        """Whether a replay confirms a state of an earlier build, which has no checksum: asked once for each commit."""
        name = base.pchannel
        if self._proved.get(name) == base.commits:
            return True
        try:
            check_state(self._table, self._log(name), name)
        except StateDamaged as error:
            self._park(name, error)
            return False
        except MillraceError as error:
            if not error.retriable:
                raise
            _logger.warning("the state of %s is not proved yet: %s: %s", name, error.code, error)
            return False
        self._proved[name] = base.commits
        return True

    def _park(self, name: str, error: StateDamaged) -> None:
        _logger.error("%s is parked: %s: %s", name, error.code, error)
        park(self._parked, Parked.of(name, Failure(error.code, str(error), False, EARLIEST)))

    def _regressed(self, pchannel: str, stands: LogId) -> bool:
        """Whether a log ends before what is committed; an end that is merely old, after a repeat, is none."""
        try:
            return self._log(pchannel).end() < stands
        except MillraceError:
            return False  # asked again with the next micro-batch

    def _may_run(self, base: WalPosition) -> bool:
        stall = self._stalls.get(base.pchannel)
        if stall is not None and stall.commits != base.commits:
            del self._stalls[base.pchannel]
            stall = None
        if stall is None or self._target is None:
            return stall is None or self._clock() >= stall.until
        # A bounded run has no later poll: it waits here, and gives up in the end, which leaves a lag that `status` shows.
        self._sleep(max(0.0, stall.until - self._clock()))
        return stall.times < _BOUNDED_TRIES

    def _note_planned(self, base: WalPosition) -> None:
        """Should the batch not move this PChannel, the next one waits twice as long."""
        stall = self._stalls.get(base.pchannel)
        pause = _BACKOFF[0] if stall is None else min(stall.pause * 2, _BACKOFF[1])
        times = 1 if stall is None else stall.times + 1
        self._stalls[base.pchannel] = _Stall(base.commits, pause, self._clock() + pause, times)

    def _has_rows(self, base: WalPosition, end: LogId) -> bool:
        """Whether anything behind the position becomes a row. Where that cannot be told cheaply, yes: a task will see."""
        peek = self._peeks.get(base.pchannel)
        if peek is None or peek.commits != base.commits:
            peek = _Peek(base.commits, base.state or ChannelState.new(base.pchannel))
            self._peeks[base.pchannel] = peek
        log = self._log(base.pchannel)
        while peek.state.position < end:
            try:
                entries = log.read(peek.state.position, end=end, max_bytes=PEEK_BYTES)
                if entries.batch.num_rows == 0:
                    return False
                if value_bytes(entries.batch) > PEEK_BYTES or _has_message(entries):
                    return True
                outcome = Chain().process(peek.state, entries)
            except Exception:  # the task meets it again and says what it is
                return True
            if outcome.messages.num_rows or outcome.rejections.num_rows:
                return True
            peek.state = outcome.state
        return False

    def _log(self, pchannel: str) -> Log:
        log = self._logs.get(pchannel)
        if log is None:
            log = self._logs[pchannel] = self._service.open(pchannel)
        return log

    def close(self) -> None:
        """Release the logs and their service. Idempotent."""
        for log in self._logs.values():
            log.close()
        self._logs.clear()
        self._service.close()


def _has_message(entries: LogEntries) -> bool:
    """Whether something else than a time tick is there: accepted or rejected, it becomes a row."""
    types = decode_entries(entries.batch).column("type").to_numpy()
    return bool((types != MessageType.TIME_TICK).any())
