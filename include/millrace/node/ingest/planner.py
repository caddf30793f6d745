"""Plans the next ranges of ingest: positions come from one version of the ``wal`` table, ends from the logs.

A PChannel is idle if only time ticks without rows follow its position. The planner runs the chain over such entries,
without writing, to find out. So an idle node runs no micro-batch, and a tick that fires a timer starts one.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from millrace.base.errors import InvalidArgument, MillraceError, StateDamaged
from millrace.log.protocol import Log, LogService
from millrace.message.ids import EARLIEST, LogId
from millrace.message.log_entries import value_bytes
from millrace.message.types import DML, MessageType
from millrace.message.wire.decode import decode_entries
from millrace.node.ingest.ingester import IngestPlan
from millrace.node.range_loop.definition import PendingRange, Planner
from millrace.node.range_loop.failure import RangeFailure
from millrace.node.range_loop.parking import Parked, park
from millrace.rpc.remote_log import RemoteLogService
from millrace.tables.wal.state_check import check_state
from millrace.tables.wal.table import WalPosition, WalTable
from millrace.wal.chain import Chain
from millrace.wal.state import ChannelState

PEEK_BYTES: Final = 64 << 10
"""Limit for running the chain over new entries. A larger read always counts as work."""

_TXN: Final = (MessageType.BEGIN_TXN, MessageType.COMMIT_TXN, MessageType.ROLLBACK_TXN, MessageType.KEEP_ALIVE)
_PATIENT: Final = [*DML, *_TXN]
"""Messages that may wait for more. A reader that waits appends a time tick, and that does not."""

MAX_RANGES: Final = 32
"""PChannels in a micro-batch, at most: a read of another one waits until the batch has ended."""

_URGENT_SECONDS: Final = 10.0
"""Head start, in seconds of waiting, of rows that a caller waits for over other rows."""

_NAMES_SECONDS: Final = 1.0
"""Maximum time until a new PChannel is noticed. In between, a poll asks each log for its end only."""
_logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Peek:
    """Findings on a PChannel after its position."""

    commits: int
    state: ChannelState
    """The state before the first entry that becomes a row, as far as it is known."""
    end: LogId = EARLIEST
    """Start of the entries that were not examined."""
    bytes: int = 0
    rows: bool = False
    """Whether anything becomes a row."""
    urgent: bool = False
    """Whether it is too much to wait for more, or something that must not wait."""
    since: float = 0.0
    """Time at which the first row was found."""


class LogPlanner(Planner[IngestPlan, LogId]):
    """Plans ranges over all PChannels of a log service. Ends are the ends of the logs.

    `service` is called for each poll. If it returns another service, because the log was switched to another backend,
    the planner forgets what it knew of the old one. `on_close` is called at the end and releases the service.
    """

    def __init__(
        self,
        service: Callable[[], LogService],
        table: WalTable,
        *,
        parked: Path,
        linger: float = 0.0,
        is_followed: Callable[[], bool] = lambda: True,
        generations: Callable[[], bytes] = bytes,
        clock: Callable[[], float] = time.monotonic,
        on_close: Callable[[], None] = lambda: None,
    ) -> None:
        """Plan over the logs of `service`. Few rows wait up to `linger` seconds for more, unless `is_followed()`.

        `generations` returns the list of the log's backends that goes with each plan.
        """
        self._linger = linger
        self._is_followed = is_followed
        self._generations = generations
        self._connect = service
        self._service: LogService | None = None
        self._table = table
        self._parked = parked
        self._clock = clock
        self._closes = on_close
        self._chain = Chain()
        self._logs: dict[str, Log] = {}
        self._peeks: dict[str, _Peek] = {}
        self._proved: dict[str, int] = {}
        """For each PChannel, the commit whose state row without a checksum was proved by a replay."""
        self._names: set[str] = set()
        self._names_until = -math.inf
        self._found: dict[str, LogId] = {}
        self._quiet: tuple[int, dict[str, LogId]] | None = None
        """The version of the table and the ends at which no PChannel had rows to come."""

    def ends(self) -> dict[str, LogId]:
        return {pchannel: self._log(pchannel).end() for pchannel in self._looked().names()}

    def seen(self) -> Mapping[str, LogId]:
        return self._found

    def read_end(self, text: str) -> LogId:
        return LogId.parse(text)

    def pending(
        self,
        *,
        without: AbstractSet[str],
        only: AbstractSet[str] | None = None,
        target: Mapping[str, LogId] | None,
        max_bytes: int,
    ) -> Iterator[PendingRange[LogId]]:
        """Yield the PChannels that have rows to come."""
        service = self._looked()
        if self._clock() >= self._names_until:
            self._names, self._names_until = set(service.names()), self._clock() + _NAMES_SECONDS
        names = self._names - without
        if only is not None:
            names &= only
        if target is not None:
            names &= set(target)
        if target is None:
            self._table.poll()
        else:
            self._table.refresh()
        self._found = self._ends(service, names)
        looked = self._table.version, self._found
        if target is None and looked == self._quiet:
            return
        self._quiet = None
        bases = self._bases(sorted(names))
        followed = target is None and self._is_followed()
        patience: dict[str, float] = {}
        ranges: dict[str, PendingRange[LogId]] = {}
        for name, base in bases.items():
            found = self._found[name]
            end = found if target is None else min(found, target[name])
            position = base.position or EARLIEST
            # A log that ends before the committed position is work too: the task reports LogRegressed, which parks
            # the PChannel.
            if found < position or (position < end and self._has_rows(base, end)):
                ranges[name] = PendingRange(name, base.commits, end)
                patience[name] = self._patience(name, followed=followed)
        if target is not None:
            yield from ranges.values()
        elif not ranges and len(bases) == len(names):
            self._quiet = looked
        elif any(seconds <= 0 for seconds in patience.values()):
            # Those that have waited half as long go along.
            due = sorted((name for name in ranges if patience[name] <= self._linger / 2), key=patience.__getitem__)
            yield from (ranges[name] for name in due[:MAX_RANGES])

    def plan(self, ends: Mapping[str, LogId], *, max_bytes: int) -> list[IngestPlan]:
        self._looked()
        self._table.refresh()
        plans = []
        generations = self._generations()
        for name, base in self._bases(ends).items():
            position = base.position or EARLIEST
            if position < ends[name] or (ends[name] < position and self._regressed(name, position)):
                peek = self._peeks.get(name)
                known = peek is not None and peek.commits == base.commits and peek.end >= ends[name]
                peeked = peek.bytes if peek is not None and known else None
                plans.append(IngestPlan(base, ends[name], max_bytes, peeked, generations))
        return plans

    def _bases(self, names: Iterable[str]) -> dict[str, WalPosition]:
        """Return positions at the handle's version. A PChannel with a damaged state is parked; the others go on."""
        found = self._table.valid_positions(names, on_damaged=self._park)
        return {name: base for name, base in found.items() if base.has_checksum or self._is_proved(base)}

    def _is_proved(self, base: WalPosition) -> bool:
        """Return whether a replay confirms a state without a checksum, of an earlier build. Done once per commit."""
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
            _logger.warning("the state of %s cannot be proved yet: %s: %s", name, error.code, error)
            return False
        self._proved[name] = base.commits
        return True

    def _park(self, name: str, error: StateDamaged) -> None:
        _logger.error("%s is parked: %s: %s", name, error.code, error)
        park(self._parked, Parked.of(name, RangeFailure.of(error)))

    def _regressed(self, pchannel: str, position: LogId) -> bool:
        """Return whether a log ends before the committed position. A merely outdated `end` does not count."""
        try:
            return self._log(pchannel).end() < position
        except MillraceError:
            return False  # the next micro-batch asks again

    def _has_rows(self, base: WalPosition, end: LogId) -> bool:
        """Return whether anything after the position becomes a row. If that is expensive to tell, return True."""
        peek = self._peeks.get(base.pchannel)
        if peek is None or peek.commits != base.commits:
            state = base.state or ChannelState.new(base.pchannel)
            peek = self._peeks[base.pchannel] = _Peek(base.commits, state, state.position, since=self._clock())
        try:
            self._look(self._log(base.pchannel), peek, end)
        except Exception:  # the task will hit the same error and report it
            peek.urgent = True
            return True
        return peek.rows

    def _patience(self, name: str, *, followed: bool) -> float:
        """Return how many seconds the rows of a PChannel may still wait for more; negative if they have waited."""
        peek = self._peeks.get(name)
        if peek is None:
            return 0.0
        waited = self._clock() - peek.since
        if peek.urgent:
            return -waited - _URGENT_SECONDS
        left = self._linger - waited
        return min(left, 0.0) if followed else left

    def _look(self, log: Log, peek: _Peek, end: LogId) -> None:
        """Read on up to `end`, until it is clear that nothing need wait. What was read is not read again."""
        while peek.end < end and not peek.urgent:
            entries = log.read(peek.end, end=end, max_bytes=PEEK_BYTES)
            if entries.batch.num_rows == 0:
                return
            types = decode_entries(entries.batch).column("type").to_numpy()
            if not peek.rows and bool((types == MessageType.TIME_TICK).all()):
                outcome = self._chain.process(peek.state, entries)
                if outcome.messages.num_rows or outcome.rejections.num_rows:
                    peek.rows, peek.urgent, peek.since = True, True, self._clock()  # a timer fires
                else:
                    peek.state = outcome.state
            else:
                if not peek.rows:
                    peek.rows, peek.since = True, self._clock()
                peek.bytes += value_bytes(entries.batch)
                peek.urgent = peek.bytes > PEEK_BYTES or not bool(np.isin(types, _PATIENT).all())
            peek.end = entries.next

    def _looked(self) -> LogService:
        """Return the current service."""
        service = self._connect()
        if service is not self._service:
            self._forget()
            self._service = service
        return service

    def _ends(self, service: LogService, names: Collection[str]) -> dict[str, LogId]:
        """Return the logs' ends: by one call if a server has them all, because an idle node asks for nothing else."""
        if names and isinstance(service, RemoteLogService):
            try:
                return service.ends(names)
            except InvalidArgument:
                pass  # the server is an earlier build
        return {name: self._log(name).end() for name in names}

    def _log(self, pchannel: str) -> Log:
        log = self._logs.get(pchannel)
        if log is None:
            log = self._logs[pchannel] = (self._service or self._looked()).open(pchannel)
        return log

    def _forget(self) -> None:
        for log in self._logs.values():
            log.close()
        self._logs.clear()
        self._peeks.clear()
        self._quiet = None

    def close(self) -> None:
        self._forget()
        self._closes()
