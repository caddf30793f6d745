"""One PChannel's follower: reads its log once, runs the chain over what is there, and answers whoever waits for an entry.

The chain is pure, so that what this host finds is what the Spark host will write down. A run takes everything that has
gathered since the last one (up to READ_BYTES): under load the follower wakes once a run, not once an entry, and a message
costs no Python of its own. An error that a retry cannot cure parks the PChannel: every wait for it ends with that error.

Time ticks: the follower appends one when a timer of the state has fallen due by the wall clock (an open transaction's lease,
an idle or old segment), when somebody asks (AppendHost.confirm), and otherwise every `tick_interval` seconds if a message
came since the last. The clock only decides when to append; what follows from a tick is decided by its place in the log.
"""

from __future__ import annotations

import heapq
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import pyarrow as pa

from millrace.errors import ChannelParked, DeadlineExceeded, LogUnavailable, MillraceError
from millrace.log.protocol import Log, LogEntries
from millrace.message.builders import time_tick
from millrace.message.ids import LOGICAL_BITS, LogId, MessageId
from millrace.message.types import MessageType
from millrace.message.wire import decode_entries, encode_entry
from millrace.node.append_host_outcome import (
    CONFIRMED_COLUMNS,
    ID_COLUMNS,
    OUTCOME_SCHEMA,
    AppendOutcome,
    outcome_rows,
)
from millrace.node.ranges import check_not_regressed, process_before_failure, value_bytes
from millrace.node.tail_buffer import TailBuffer, TailLimits
from millrace.wal.chain import Chain, Outcome
from millrace.wal.state import NEVER, ChannelState

READ_BYTES: Final = 4 << 20
_SLICE: Final = 0.25
"""Longest wait for entries in one go, in seconds: how long a stop may take."""
_PAUSE: Final = 0.1
"""Pause after a log that cannot be reached, and between two ticks for the same timer, in seconds."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Decisions:
    """What one run of the chain decided: the answers to entries in [start, following)."""

    start: LogId
    following: LogId
    entries: pa.RecordBatch
    rows: pa.RecordBatch
    last_tick: int
    confirmed_before: MessageId | None
    """The first Begin that was open before the run."""


@dataclass(slots=True, eq=False)
class PendingOutcome:
    """An append that is in the log and waits for its decisions."""

    ids: tuple[LogId, LogId]
    """Its first and last entry; one atomic batch, so nothing stands between them."""
    messages: int
    """How many messages its entries frame, as their headers say."""
    _decided: threading.Lock = field(default_factory=threading.Lock)
    _runs: list[Decisions] = field(default_factory=list)
    _error: MillraceError | None = None
    _settled: bool = False

    def __post_init__(self) -> None:
        self._decided.acquire()

    def outcome(self, *, timeout: float) -> AppendOutcome:
        """The decisions, once they are made; waits up to `timeout` seconds.

        Raises DeadlineExceeded (the entries are in the log, and will be decided) or what parked the PChannel.
        """
        if not self._settled and not self._decided.acquire(timeout=max(0.0, timeout)):
            first, last = self.ids
            raise DeadlineExceeded(
                f"entries {first} to {last} are in the log and not decided yet: append again with the same producer sequences"
            )
        if self._error is not None:
            raise copy(self._error)
        return AppendOutcome(_answer(self._runs, self.ids, self.messages))

    def settle(self, runs: list[Decisions], error: MillraceError | None) -> None:
        """Wake who waits; called once."""
        self._runs, self._error, self._settled = runs, error, True
        self._decided.release()


class Follower:
    """Follows a log from `state` on, in a thread of its own. Thread-safe.

    `open_log` is called for the log, and again where the log could not be reached: a log that stopped after a failed write
    takes appends again once it is opened anew.
    """

    def __init__(
        self,
        open_log: Callable[[], Log],
        state: ChannelState,
        *,
        tail_limits: TailLimits | None = None,
        tick_interval: float = 10.0,
        now_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000,
    ) -> None:
        self.pchannel = state.pchannel
        self.tail = TailBuffer(start_tick=state.last_tick, limits=tail_limits)
        self._open_log = open_log
        self._log = open_log()
        self._state = state
        self._position = state.position
        self._tick_interval = tick_interval
        self._now_ms = now_ms
        self._lock = threading.Lock()
        self._recent: deque[Decisions] = deque()
        self._entered: dict[int, LogId] = {}
        self._numbers = 0
        self._waiting: list[tuple[LogId, int, PendingOutcome, int | None]] = []
        self._error: MillraceError | None = None
        self._stopping = threading.Event()
        self._chain = Chain()
        self._ticked = time.monotonic()
        self._thread = threading.Thread(target=self._run, name=f"follow-{self.pchannel}", daemon=True)
        self._thread.start()

    @property
    def state(self) -> ChannelState:
        """The newest state. Read it only; the follower replaces it and never changes it in place."""
        return self._state

    @property
    def error(self) -> MillraceError | None:
        """What parked the PChannel."""
        return self._error

    def submit_all(self, appends: Sequence[pa.LargeBinaryArray]) -> list[PendingOutcome]:
        """Append several batches of entries as one; each one's decisions can be waited for once this returns.

        Raises what the log's append raises, and what parked the PChannel (then nothing was appended).
        """
        with self._lock:
            self._check()
            self._numbers += 1
            number = self._numbers
            # Decisions from here on are kept: the follower may have made ours before we come to wait for them.
            self._entered[number] = self._position
        try:
            ids = self._log.append(appends[0] if len(appends) == 1 else pa.concat_arrays(appends))
        except BaseException as error:
            with self._lock:
                del self._entered[number]
            if isinstance(error, LogUnavailable) and not self._stopping.is_set():
                self._reopen()
            raise
        pendings: list[PendingOutcome] = []
        start = 0
        for values in appends:
            stop = start + len(values)
            pendings.append(PendingOutcome((ids[start], ids[stop - 1]), message_count(values)))
            start = stop
        with self._lock:
            for place, pending in enumerate(pendings):
                if pending.ids[1] < self._position:
                    pending.settle(self._runs_of(pending), None)
                elif self._error is not None:
                    pending.settle([], self._error)
                else:
                    # The last one to be decided lets the kept decisions go.
                    last = number if place == len(pendings) - 1 else None
                    heapq.heappush(self._waiting, (pending.ids[1], number, pending, last))
                    continue
                if place == len(pendings) - 1:
                    del self._entered[number]
        return pendings

    def _check(self) -> None:
        if self._error is not None:
            raise copy(self._error)

    def _reopen(self) -> None:
        try:
            self._log = self._open_log()
        except LogUnavailable:
            _log.warning("the log of %s cannot be reached", self.pchannel, exc_info=True)

    def tick(self, *, barrier_tick: int = 0, timeout: float) -> int:
        """Append a time tick; the tick up to which everything is decided once it is."""
        return self.submit_all([self._tick_entry(barrier_tick)])[0].outcome(timeout=timeout).last_tick

    def stop(self) -> None:
        """Let the thread end, without waiting for it."""
        self._stopping.set()

    def close(self) -> None:
        """Stop following; who still waits gets LogUnavailable. Idempotent."""
        self.stop()
        self._thread.join(10.0)
        self._fail(
            LogUnavailable(f"the append host stopped following {self.pchannel}: append again with the same sequences")
        )

    # --- the thread -----------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        checked, reached = False, True
        while not self._stopping.is_set():
            try:
                if not reached:
                    self._log = self._open_log()
                    reached = True
                if not checked:
                    check_not_regressed(self._log, self._state)
                    checked = True
                self._step()
            except MillraceError as error:
                if self._stopping.is_set():
                    return
                if not error.retriable:
                    _log.exception("%s is parked at %s", self.pchannel, self._position)
                    self._fail(error)
                    return
                reached = False
                self._stopping.wait(_PAUSE)
            except Exception as error:
                _log.exception("%s is parked at %s", self.pchannel, self._position)
                self._fail(_wrapped(error, self.pchannel, self._position))
                return

    def _step(self) -> None:
        entries = self._log.read(self._position, max_bytes=READ_BYTES, timeout=self._patience())
        if not entries.batch.num_rows:
            self._tick_if_due()
            return
        try:
            self._decided(entries, self._chain.process(self._state, entries))
        except Exception:
            # What stands before the entry that cannot be processed is decided all the same; that entry alone parks.
            outcome, _ = process_before_failure(self._chain, self._state, entries)
            if outcome is not None:
                self._decided(entries, outcome)
            raise

    def _decided(self, entries: LogEntries, outcome: Outcome) -> None:
        before = self._state
        rows = outcome_rows(outcome.messages, outcome.rejections)
        decisions = Decisions(
            start=self._position,
            following=outcome.state.position,
            entries=entries.batch,
            rows=rows,
            last_tick=outcome.state.last_tick,
            confirmed_before=before.first_open_begin(),
        )
        self._publish(decisions, outcome.state)
        self.tail.publish(outcome.messages, confirmed_tick=outcome.state.last_tick, bytes=value_bytes(entries.batch))

    def _publish(self, decisions: Decisions, state: ChannelState) -> None:
        with self._lock:
            self._state = state
            self._position = decisions.following
            self._recent.append(decisions)
            while self._waiting and self._waiting[0][0] < self._position:
                _, _, pending, last = heapq.heappop(self._waiting)
                pending.settle(self._runs_of(pending), None)
                if last is not None:
                    del self._entered[last]
            oldest = min(self._entered.values(), default=self._position)
            while self._recent and self._recent[0].following <= oldest:
                self._recent.popleft()

    def _runs_of(self, pending: PendingOutcome) -> list[Decisions]:
        first, last = pending.ids
        return [run for run in self._recent if run.start <= last and run.following > first]

    def _fail(self, error: MillraceError) -> None:
        with self._lock:
            if self._error is None:
                self._error = error
            waiting, self._waiting = self._waiting, []
            for _, _, pending, last in waiting:
                pending.settle([], self._error)
                if last is not None:
                    del self._entered[last]
        self.tail.fail(error)

    # --- time ticks -----------------------------------------------------------------------------------------------------

    def _patience(self) -> float:
        """Seconds to wait for entries: less where a timer falls due before."""
        deadline = self._state.next_deadline()
        if deadline == NEVER or not self._state.term:
            return _SLICE
        left = ((deadline >> LOGICAL_BITS) + 1 - self._now_ms()) / 1000
        return min(_SLICE, max(left, self._ticked + _PAUSE - time.monotonic(), 0.0))

    def _tick_if_due(self) -> None:
        """Append a tick where one is needed. Nothing is left to read: what the log holds has fired its timers already."""
        state, now = self._state, time.monotonic()
        if not state.term or now - self._ticked < _PAUSE:
            return
        due = (state.next_deadline() >> LOGICAL_BITS) < self._now_ms()
        if due or (state.dirty and now - self._ticked >= self._tick_interval):
            self._ticked = now
            self._log.append(self._tick_entry(0))

    def _tick_entry(self, barrier_tick: int) -> pa.LargeBinaryArray:
        entry = encode_entry([time_tick(term=self._state.term, barrier_tick=barrier_tick)])
        return pa.array([entry], pa.large_binary())


def message_count(values: pa.LargeBinaryArray) -> int:
    """How many messages entries frame, by their headers; an entry that is none counts as one."""
    if len(values) <= 2:
        return sum(_count_of(value.as_buffer()) for value in values)
    offsets = np.frombuffer(values.buffers()[1], np.int64, len(values) + 1, values.offset * 8)
    data = np.frombuffer(values.buffers()[2], np.uint8)
    whole = offsets[:-1][np.diff(offsets) >= _COUNT_END]
    places = whole[:, None] + np.arange(_COUNT_AT, _COUNT_END)
    counts = data[places].view("<u4")[:, 0].astype(np.int64)
    return int(counts.sum()) + len(values) - len(whole)


_COUNT_AT: Final = 12
_COUNT_END: Final = 16
"""Where the header of an entry has its number of messages (docs/wire-form.md)."""


def _count_of(entry: pa.Buffer) -> int:
    head = memoryview(entry)[_COUNT_AT:_COUNT_END]
    return int.from_bytes(head, "little") if len(head) == _COUNT_END - _COUNT_AT else 1


def _answer(runs: list[Decisions], ids: tuple[LogId, LogId], messages: int) -> pa.RecordBatch:
    """The rows of the entries ids[0] .. ids[1] out of `runs`; with those time ticks that became no row."""
    parts = [_between(run.rows, *ids) for run in runs]
    rows = parts[0] if len(parts) == 1 else pa.concat_batches(parts)
    if rows.num_rows == messages:
        return rows
    ticks = [tick for run in runs for tick in _unpersisted(run, ids)]
    if not ticks:
        return rows
    whole = pa.concat_batches([rows, pa.RecordBatch.from_pylist(ticks, schema=OUTCOME_SCHEMA)])
    keys = [whole.column(name).to_numpy() for name in ("index", "entry", "ledger")]
    return whole.take(pa.array(np.lexsort(keys)))


def _between(rows: pa.RecordBatch, first: LogId, last: LogId) -> pa.RecordBatch:
    """Rows of entries first .. last."""
    ledger, entry = rows.column("ledger").to_numpy(), rows.column("entry").to_numpy()
    if first.ledger == last.ledger and len(ledger) and ledger[0] == ledger[-1] == first.ledger:
        start, stop = np.searchsorted(entry, [first.entry, last.entry + 1])
        return rows.slice(int(start), int(stop - start))
    behind = (ledger > first.ledger) | ((ledger == first.ledger) & (entry >= first.entry))
    before = (ledger < last.ledger) | ((ledger == last.ledger) & (entry <= last.entry))
    return rows.filter(pa.array(behind & before))


def _unpersisted(run: Decisions, ids: tuple[LogId, LogId]) -> list[dict[str, object]]:
    """Answers for the time ticks of entries ids[0] .. ids[1] that became no row.

    Theirs is the run's last tick: everything up to there is decided. Their LastConfirmed is one from which nothing is
    missed: no later than any Begin that was open in the run.
    """
    decoded = decode_entries(_between(run.entries, *ids))
    mine = decoded.filter(pa.array(decoded.column("type").to_numpy() == MessageType.TIME_TICK))
    rows = _between(run.rows, *ids)
    known = set(zip(*(rows.column(name).to_pylist() for name in ID_COLUMNS[:3]), strict=True))
    confirmed = [run.confirmed_before] if run.confirmed_before is not None else []
    if run.rows.num_rows:
        columns = [run.rows.column(name).to_pylist() for name in CONFIRMED_COLUMNS]
        confirmed.append(min(MessageId(*place) for place in zip(*columns, strict=True)))
    found: list[dict[str, object]] = []
    for ledger, entry, index in zip(*(mine.column(name).to_pylist() for name in ID_COLUMNS[:3]), strict=True):
        if (ledger, entry, index) in known:
            continue
        own = MessageId(ledger, entry, index, 0)
        earliest = min([own, *confirmed])
        found.append(
            dict(zip(ID_COLUMNS, own, strict=True))
            | dict(zip(CONFIRMED_COLUMNS, earliest, strict=True))
            | {"time_tick": run.last_tick, "txn_id": 0, "reason": "", "detail": ""}
        )
    return found


def _wrapped(error: Exception, pchannel: str, position: LogId) -> ChannelParked:
    parked = ChannelParked(f"{pchannel} is parked at {position}: {type(error).__name__}: {error}")
    parked.__cause__ = error
    return parked
