"""One PChannel's follower: reads its log once, runs the chain over what is there, and answers whoever waits for an entry.

The chain is pure, so that what this host finds is what the Spark host will write down. A run takes everything that has
gathered since the last one (up to READ_BYTES): under load the follower wakes once a run, not once an entry, and a message
costs no Python of its own. An error that a retry cannot cure parks the PChannel: every wait for it ends with that error.

Time ticks: the follower appends one when a timer of the state has fallen due by the log's clock (an open transaction's lease,
an idle or old segment), when somebody asks (AppendHost.confirm), and otherwise every `tick_interval` seconds if a message
came since the last. The clock only decides when to append; what follows from a tick is decided by its place in the log.

Where a newer writer took the log over (LogFenced, on a backend with one writer), it follows on and appends nothing, until
somebody opens a term through it: that takes the log back. Who is fenced otherwise is no owner any more. Where the nodes of a
cluster take appends (`idle`), the follower of the log's server appends no ticks either.
"""

from __future__ import annotations

import heapq
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from copy import copy
from typing import Final

import pyarrow as pa

from millrace.base.deadline import Deadline
from millrace.base.errors import ChannelParked, DeadlineExceeded, LogFenced, LogUnavailable, MillraceError
from millrace.base.metrics import Metrics
from millrace.log.clock import wall_clock_ms
from millrace.log.protocol import Log, Switchable
from millrace.message.builders import time_tick
from millrace.message.ids import EARLIEST, LOGICAL_BITS, LogId
from millrace.message.log_entries import ENTRY_SCHEMA, LogEntries, value_bytes
from millrace.message.types import MessageType
from millrace.message.wire.decode import decode_entries
from millrace.message.wire.encode import encode_entry
from millrace.node.append.metrics import HostMetrics
from millrace.node.append.pending import ChainDecisions, PendingOutcome, message_count
from millrace.node.append.tail_buffer import TailBuffer, TailLimits
from millrace.node.ingest.ingester import check_not_regressed, process_until_failure
from millrace.rpc.outcome import outcome_rows
from millrace.wal.chain import Chain, ChainOutcome
from millrace.wal.entry_chunks import chunk_entries
from millrace.wal.segments.segment import NEVER
from millrace.wal.state import ChannelState

READ_BYTES: Final = 4 << 20
_SLICE: Final = 0.25
"""Longest wait for entries in one go, in seconds: how long a stop may take."""
_PAUSE: Final = 0.1
"""Pause after a log that cannot be reached, and between two ticks for the same timer, in seconds."""

_log = logging.getLogger(__name__)


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
        metrics: Metrics | None = None,
        now_ms: Callable[[], int] = wall_clock_ms,
        suppress_ticks: Callable[[], bool] = lambda: False,
        on_fenced: Callable[[], None] = lambda: None,
    ) -> None:
        """`idle`: whether ticks are somebody else's to append; `on_fenced` is called whenever it turns out that a newer
        writer has taken the log over."""
        self.pchannel = state.pchannel
        self._idle = suppress_ticks
        self._on_fenced = on_fenced
        self._metrics = None if metrics is None else HostMetrics(metrics, state.pchannel)
        self.tail = TailBuffer(start_tick=state.last_tick, limits=tail_limits)
        self._open_log = open_log
        self._log = open_log()
        self._state = state
        self._position = state.position
        self._tick_interval = tick_interval
        self._now_ms = now_ms
        self._lock = threading.Lock()
        self._recent: deque[ChainDecisions] = deque()
        self._entered: dict[int, LogId] = {}
        self._numbers = 0
        if self._metrics is not None:
            self._metrics.export_time_ahead(lambda: self._state.last_tick)
        self._waiting: list[tuple[LogId, int, PendingOutcome, int | None]] = []
        self._ends: dict[int, LogId] = {}
        """By generation of the log that was left, its last entry: what came behind it is outside of the log."""
        self._unrecorded = _ended(state)
        self._error: MillraceError | None = None
        self._fenced: LogFenced | None = None
        self._stopping = threading.Event()
        self._chain = Chain() if self._metrics is None else Chain(wrap=self._metrics.wrap_interceptor)
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
        values = appends[0] if len(appends) == 1 else pa.concat_arrays(appends)
        with self._lock:
            self._check()
            self._numbers += 1
            number = self._numbers
            # Decisions from here on are kept: the follower may have made ours before we come to wait for them.
            self._entered[number] = self._position
        begun = time.perf_counter()
        try:
            ids = self._append(values)
        except BaseException as error:
            with self._lock:
                del self._entered[number]
            if isinstance(error, LogUnavailable) and not self._stopping.is_set():
                self._reopen()
            raise
        if self._metrics is not None:
            self._metrics.record_append(time.perf_counter() - begun, bytes=int(values.nbytes))
        pendings: list[PendingOutcome] = []
        start = 0
        for values in appends:
            stop = start + len(values)
            pendings.append(PendingOutcome((ids[start], ids[stop - 1]), message_count(values), begun))
            start = stop
        with self._lock:
            for place, pending in enumerate(pendings):
                if self._metrics is not None:
                    self._metrics.unconfirmed.inc(pending.messages)
                if pending.ids[1] < self._position:
                    self._settle(pending)
                elif self._error is not None:
                    self._settle_with(pending, [], self._error)
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

    def _append(self, values: pa.LargeBinaryArray) -> Sequence[LogId]:
        """Append to the log; a term's opening takes it back from a newer writer. Raises what the log's append raises."""
        for taken in (False, True):
            fenced = self._fenced
            if fenced is not None:
                if not _opens_term(values):
                    self._on_fenced()
                    raise copy(fenced)
                self._log = self._open_log()
                self._fenced = None
            log = self._log
            try:
                return log.append(values)
            except LogFenced as error:
                if self._log is not log and not taken:
                    continue  # another thread took it back meanwhile
                _log.warning("a newer writer took the log of %s over", self.pchannel)
                self._fenced = error
                self._on_fenced()
                if taken:
                    raise
        raise AssertionError("the second attempt returns or raises")

    def _reopen(self) -> None:
        try:
            self._log = self._open_log()
        except MillraceError:
            # The thread comes upon the same and settles what it means for the PChannel.
            _log.warning("the log of %s cannot be reached", self.pchannel, exc_info=True)

    def tick(self, *, barrier_tick: int = 0, timeout: float) -> int:
        """Append a time tick; the tick up to which everything is decided once it is."""
        self._note_tick("asked")
        return self.submit_all([self._tick_entry(barrier_tick)])[0].outcome(timeout=timeout).last_tick

    def _note_tick(self, reason: str) -> None:
        if self._metrics is not None:
            self._metrics.record_tick(reason)

    def log_end(self) -> LogId:
        """Where the log ends now."""
        return self._log.end()

    def reach_end(self, *, timeout: float) -> None:
        """Wait until everything that the log holds now is decided. Raises DeadlineExceeded, and what parked the PChannel."""
        end, deadline = self._log.end(), Deadline.after(timeout)
        while self._position < end:
            if deadline.expired():
                raise DeadlineExceeded(f"{self.pchannel} was followed to {self._position}, not yet to {end}: ask again")
            self.tail.tail(self.tail.confirmed_tick, timeout=deadline.remaining(maximum=_SLICE))
        self._check()

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
                self._record_end()
                if not checked:
                    check_not_regressed(self._log, self._state)
                    if self._metrics is not None:
                        self._metrics.start_recovery(self._position, end=self._log.end())
                    checked = True
                self._step()
            except MillraceError as error:
                if self._stopping.is_set():
                    return
                if not error.retriable:
                    _log.exception("%s is parked at %s", self.pchannel, self._position)
                    self._park(error)
                    return
                reached = False
                self._stopping.wait(_PAUSE)
            except Exception as error:
                _log.exception("%s is parked at %s", self.pchannel, self._position)
                self._park(_wrapped(error, self.pchannel, self._position))
                return

    def _record_end(self) -> None:
        """Keep where the log ended that was left for another backend: the switch itself may have died before it could."""
        ended, log = self._unrecorded, self._log
        if ended is not None and (not isinstance(log, Switchable) or log.record_end(ended.following())):
            self._unrecorded = None

    def _step(self) -> None:
        entries = self._log.read(self._position, max_bytes=READ_BYTES, timeout=self._patience())
        if not entries.batch.num_rows:
            if self._position < entries.next and self._position.generation == entries.next.generation:
                # No entries (a broker's markers), but places of the log all the same: who waits for its end waits for them too.
                self._decided(entries, self._chain.process(self._state, entries))
            self._tick_if_due()
            return
        for portion in chunk_entries(entries):
            if self._stopping.is_set():
                return
            try:
                self._decided(portion, self._chain.process(self._state, portion))
            except Exception:
                # What stands before the entry that cannot be processed is decided all the same; that entry alone parks.
                outcome, _ = process_until_failure(self._chain, self._state, portion)
                if outcome is not None:
                    self._decided(portion, outcome)
                raise

    def _decided(self, entries: LogEntries, outcome: ChainOutcome) -> None:
        before = self._state
        rows = outcome_rows(outcome.messages, outcome.rejections)
        decisions = ChainDecisions(
            start=self._position,
            end=outcome.state.position,
            entries=entries.batch,
            rows=rows,
            last_tick=outcome.state.last_tick,
            confirmed_before=before.first_open_begin(),
        )
        if self._metrics is not None and entries.batch.num_rows:
            stamp = entries.batch.column("physical_ms")[-1].as_py()
            self._metrics.record_decisions(outcome, before, age=(self._now_ms() - stamp) / 1000)
        # First to the tail: a message whose result is known can be tailed.
        self.tail.publish(outcome.messages, confirmed_tick=outcome.state.last_tick, bytes=value_bytes(entries.batch))
        self._publish(decisions, outcome.state)

    def _publish(self, decisions: ChainDecisions, state: ChannelState) -> None:
        with self._lock:
            if state.position.generation > self._position.generation and (ended := _ended(state)) is not None:
                self._ends[ended.generation] = self._unrecorded = ended
            self._state = state
            self._position = decisions.end
            self._recent.append(decisions)
            while self._waiting and self._waiting[0][0] < self._position:
                _, _, pending, last = heapq.heappop(self._waiting)
                self._settle(pending)
                if last is not None:
                    del self._entered[last]
            oldest = min(self._entered.values(), default=self._position)
            while self._recent and self._recent[0].end <= oldest:
                self._recent.popleft()

    def _settle(self, pending: PendingOutcome) -> None:
        first, last = pending.ids
        generation = self._position.generation
        if last.generation < generation and last > self._ends.get(last.generation, EARLIEST):
            switched = LogUnavailable(
                f"the log of {self.pchannel} was switched to another backend before this append: append again, with the"
                " same producer sequences"
            )
            self._settle_with(pending, [], switched)
            return
        self._settle_with(pending, [run for run in self._recent if run.start <= last and run.end > first], None)
        if self._metrics is not None:
            self._metrics.record_answer(time.perf_counter() - pending.begun)

    def _settle_with(self, pending: PendingOutcome, runs: list[ChainDecisions], error: MillraceError | None) -> None:
        pending.settle(runs, error)
        if self._metrics is not None:
            self._metrics.unconfirmed.dec(pending.messages)

    def _park(self, error: MillraceError) -> None:
        if self._metrics is not None:
            self._metrics.record_parked()
        self._fail(error)

    def _fail(self, error: MillraceError) -> None:
        with self._lock:
            if self._error is None:
                self._error = error
            waiting, self._waiting = self._waiting, []
            for _, _, pending, last in waiting:
                self._settle_with(pending, [], self._error)
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
        if not state.term or now - self._ticked < _PAUSE or self._idle():
            return
        due = (state.next_deadline() >> LOGICAL_BITS) < self._now_ms()
        if due or (state.dirty and now - self._ticked >= self._tick_interval):
            self._ticked = now
            if self._fenced is not None:
                self._on_fenced()
                return  # whoever took the log over ticks it
            self._note_tick("timer" if due else "idle")
            with suppress(LogFenced):
                self._append(self._tick_entry(0))

    def _tick_entry(self, barrier_tick: int) -> pa.LargeBinaryArray:
        entry = encode_entry([time_tick(term=self._state.term, barrier_tick=barrier_tick)])
        return pa.array([entry], pa.large_binary())


def _ended(state: ChannelState) -> LogId | None:
    """The AlterWAL entry where `state` stands right behind one, at the beginning of a generation."""
    last, position = state.last_entry, state.position
    return last if last is not None and last.generation < position.generation else None


def _opens_term(values: pa.LargeBinaryArray) -> bool:
    """Whether one of these entries' messages is a term's opening."""
    zeros = pa.array([0] * len(values), pa.int64())
    entries = pa.RecordBatch.from_arrays([zeros, zeros, zeros, values], schema=ENTRY_SCHEMA)
    return MessageType.TERM_OPENING in decode_entries(entries).column("type").to_pylist()


def _wrapped(error: Exception, pchannel: str, position: LogId) -> ChannelParked:
    parked = ChannelParked(f"{pchannel} is parked at {position}: {type(error).__name__}: {error}")
    parked.__cause__ = error
    return parked
