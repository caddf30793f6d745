"""The follower of one PChannel: reads its log once, runs the chain, and answers callers that wait for an entry.

The chain is pure, so this host computes what the Spark host will write. Each run takes everything that arrived since
the last one, up to READ_BYTES. Appenders of the embedded log run the chain themselves, one at a time (`_turn`): a group
of appends has one leader, one sync and one run. The follower's thread does the rest: pipelined appends, entries that
came another way, brokers, ticks, errors. An error that a retry cannot cure parks the PChannel: every wait for it ends
with that error.

Time ticks: the follower appends one when a timer of the state is due by the log's clock (the lease of an open
transaction, an idle or old segment), on request (AppendHost.tick), and otherwise every `tick_interval` seconds if
messages arrived since the last. The clock only decides when to append. The effect of a tick depends on its position in
the log alone. Readers that wait for time to pass need no entry where the log promises its later stamps
(:meth:`Follower.confirm_time`).

If a newer writer takes the log over (LogFenced, on a backend with a single writer), the follower keeps reading and
appends nothing until a term is opened through it, which takes the log back. If the nodes of a cluster take the appends
(`suppress_ticks`), the follower of the log's server appends no ticks either.
"""

from __future__ import annotations

import heapq
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from copy import copy
from typing import Final, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from millrace.base import failpoint
from millrace.base.backoff import jittered
from millrace.base.deadline import Deadline
from millrace.base.errors import (
    AppendRejected,
    ChannelParked,
    DeadlineExceeded,
    LogFenced,
    LogUnavailable,
    MillraceError,
)
from millrace.base.metrics import Metrics
from millrace.log.clock import wall_clock_ms
from millrace.log.protocol import Log, Switchable, is_local, stamp_floor
from millrace.message.builders import time_tick
from millrace.message.ids import EARLIEST, LOGICAL_BITS, LogId
from millrace.message.log_entries import ENTRY_SCHEMA, LogEntries, value_bytes
from millrace.message.types import MessageType
from millrace.message.wire.decode import decode_entries, decode_header_summary, framed_counts
from millrace.message.wire.encode import encode_entry
from millrace.node.append.metrics import HostMetrics
from millrace.node.append.pending import ChainDecisions, PendingOutcome
from millrace.node.append.tail_buffer import TailBuffer, TailLimits
from millrace.node.ingest.ingester import check_not_regressed, process_until_failure
from millrace.rpc.outcome import AppendOutcome, accepted_rows, outcome_rows
from millrace.rpc.tail import TimeTick
from millrace.wal.chain import Chain, ChainOutcome, last_confirmed
from millrace.wal.entry_chunks import chunk_entries
from millrace.wal.segments import NEVER
from millrace.wal.state import ChannelState

READ_BYTES: Final = 4 << 20
GROUP_BYTES: Final = 1 << 20
"""Waiting appends are appended together up to this size. Beyond it, the copy costs more than a disk sync."""
BACKLOG_BYTES: Final = 8 << 20
"""Most undecided bytes whose headers a read looks at; it waits for longer ones."""
_HELPED: Final = 0.05
"""Seconds after an appender judged its own append in which the thread leaves the log to appenders."""
_SLICE: Final = 0.25
"""Longest single wait in seconds for entries of a log that is not local: the time that a stop may take."""
_IDLE_SLICE: Final = 30.0
"""Longest single wait in seconds for entries of a local log, which wakes the thread."""
_PAUSE: Final = 0.1
"""Pause in seconds after a log cannot be reached, and between two ticks for the same timer."""

_STOP: Final = 10.0
"""Longest time in seconds that `close` waits for the thread."""

_log = logging.getLogger(__name__)


class Unconfirmed(NamedTuple):
    """Undecided entries of some VChannels."""

    tick: int
    """The least tick that it can have."""
    in_log: bool
    """Whether the log has an entry of it; False: it may come."""


class Follower:
    """Follows a log from `state` in its own thread. Thread-safe.

    `open_log` opens the log, and reopens it after it could not be reached: a log that stopped after a failed write
    accepts appends again once it is reopened.
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
        """Start to follow the log.

        `suppress_ticks`: whether another process appends the ticks. `on_fenced` is called each time that a newer writer
        turns out to have taken the log over.
        """
        self.pchannel = state.pchannel
        self._idle = suppress_ticks
        self._on_fenced = on_fenced
        self._metrics = None if metrics is None else HostMetrics(metrics, state.pchannel)
        self.tail = TailBuffer(start_tick=state.last_tick, limits=tail_limits)
        self._open_log = open_log
        self._log = open_log()
        self._local = is_local(self._log)
        self._state = state
        self._position = state.position
        self._news_end = state.position
        self._tick_interval = tick_interval
        self._now_ms = now_ms
        self._lock = threading.Lock()
        self._recent: deque[ChainDecisions] = deque()
        self._entered: dict[int, LogId] = {}
        self._numbers = 0
        if self._metrics is not None:
            self._metrics.export_state(lambda: self._state)
        self._waiting: list[tuple[LogId, LogId, PendingOutcome, int | None]] = []
        """Appends that wait for their decisions, by last and first entry; the number in `_entered` that each frees."""
        self._inbox: deque[PendingOutcome] = deque()
        self._led = False
        """Whether a caller appends a group, or was woken to do so."""
        self._ends: dict[int, LogId] = {}
        """Last entry of each generation of a log that was switched away from. Later entries do not count."""
        self._unrecorded = _ended(state)
        self._error: MillraceError | None = None
        self._fenced: LogFenced | None = None
        self._stopping = threading.Event()
        self._awake = threading.Event()
        """Wakes the thread while it waits for appenders."""
        self._turn = threading.Lock()
        """Lock held by the thread that reads the log and judges. No other thread has it before the first check of the
        log."""
        self._turn.acquire()
        self._helped = 0.0
        """Time at which an appender last judged its own appends."""
        self._updates: dict[str, int] = {}
        """Number of moves of each VChannel's MVCC tick."""
        self._counted = state
        """The state up to which they are counted."""
        self._chain = Chain() if self._metrics is None else Chain(wrap=self._metrics.wrap_interceptor)
        self._ticked = time.monotonic()
        self._thread = threading.Thread(target=self._run, name=f"follow-{self.pchannel}", daemon=True)
        self._thread.start()

    @property
    def state(self) -> ChannelState:
        """The newest state. Read-only: the follower replaces it and never changes it in place."""
        return self._state

    @property
    def news_end(self) -> LogId:
        """A position after which this follower met nothing but time ticks."""
        return self._news_end

    @property
    def error(self) -> MillraceError | None:
        """The error that parked the PChannel, if any."""
        return self._error

    def append(self, values: pa.LargeBinaryArray, *, timeout: float) -> AppendOutcome:
        """Append a batch of entries and return its decisions, at most `timeout` seconds later.

        Of concurrent callers one leads: it appends what has arrived, up to GROUP_BYTES, as one batch with one sync,
        hands over to the first caller that arrived meanwhile, and runs the chain over the group. So a lone append
        needs no other thread, and the next group is written while this one is judged.

        Raises DeadlineExceeded, errors of the log's append, and the error that parked the PChannel.
        """
        end = Deadline.after(timeout)
        pending = PendingOutcome(values)
        with self._lock:
            self._check()
            self._inbox.append(pending)
            leads, self._led = not self._led, True
        if not leads:
            pending.wait(timeout=end.remaining())
            with self._lock:
                leads = pending.take_lead()
                if not leads and pending in self._inbox:
                    self._inbox.remove(pending)
                    raise DeadlineExceeded(f"{self.pchannel} did not take the append in {timeout:g} s: append again")
        if leads:
            self._append_group()
            self.follow()
        return pending.outcome(timeout=end.remaining())

    def _append_group(self) -> None:
        """Append what has arrived, and hand over to the next leader."""
        group: list[PendingOutcome] = []
        try:
            with self._lock:
                size = 0
                while self._inbox and (not group or size + self._inbox[0].values.nbytes <= GROUP_BYTES):
                    group.append(self._inbox.popleft())
                    size += group[-1].values.nbytes
                    if self._fenced is not None:
                        break  # only the opening of a term may take the log back, and nothing else with it
            self._append_batch(group)
        finally:
            with self._lock:
                self._led = bool(self._inbox)
                if self._led:
                    self._inbox[0].lead()

    def _append_batch(self, group: list[PendingOutcome]) -> None:
        """Append a group as one batch, or each by itself if the log refuses a part of it. Errors settle the appends."""
        try:
            self._submit(group)
        except MillraceError as error:
            if error.retriable or len(group) == 1:
                self._refuse(group, error)
                return
            for pending in group:  # one of them is too large: nothing was appended
                self._append_batch([pending])
        except BaseException as error:
            words = f"an append to {self.pchannel} failed ({type(error).__name__}: {error})"
            self._refuse(group, LogUnavailable(words))
            raise

    @staticmethod
    def _refuse(group: Sequence[PendingOutcome], error: MillraceError) -> None:
        for pending in group:
            pending.settle([], error)

    def submit_all(self, appends: Sequence[pa.LargeBinaryArray]) -> list[PendingOutcome]:
        """Append several batches of entries as one. Returns the pending outcome of each, once they are durable.

        Raises errors of the log's append, and the error that parked the PChannel (then nothing was appended).
        """
        pendings = [PendingOutcome(values) for values in appends]
        self._submit(pendings)
        self._awake.set()
        return pendings

    def _submit(self, pendings: Sequence[PendingOutcome]) -> None:
        """Append batches of entries as one, and have them settled once they are decided."""
        values = pendings[0].values if len(pendings) == 1 else pa.concat_arrays([each.values for each in pendings])
        with self._lock:
            self._check()
            self._numbers += 1
            number = self._numbers
            # Keep decisions from here on: the follower may make ours before we wait for them.
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
        failpoint.hit("append.durable")
        if self._metrics is not None:
            self._metrics.record_append(time.perf_counter() - begun, bytes=int(values.nbytes))
        start = 0
        with self._lock:
            for place, pending in enumerate(pendings):
                stop = start + len(pending.values)
                first, last = pending.ids = ids[start], ids[stop - 1]
                start = stop
                if self._metrics is not None:
                    self._metrics.unconfirmed.inc(pending.messages)
                if last < self._position:
                    self._settle(pending)
                elif self._error is not None:
                    self._settle_with(pending, [], self._error)
                else:
                    # The last one to be decided releases the kept decisions.
                    releases = number if place == len(pendings) - 1 else None
                    heapq.heappush(self._waiting, (last, first, pending, releases))
                    continue
                if place == len(pendings) - 1:
                    del self._entered[number]

    def _check(self) -> None:
        if self._error is not None:
            raise copy(self._error)

    def _append(self, values: pa.LargeBinaryArray) -> Sequence[LogId]:
        """Append to the log. The opening of a term takes it back from a newer writer. Raises errors of the log's
        append.
        """
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
                    continue  # another thread took it back in the meantime
                _log.warning("a newer writer took over the log of %s", self.pchannel)
                self._fenced = error
                self._on_fenced()
                if taken:
                    raise
        raise AssertionError("the second attempt returns or raises")

    def _reopen(self) -> None:
        try:
            self._log = self._open_log()
        except MillraceError:
            # The thread hits the same error and decides what it means for the PChannel.
            _log.warning("cannot reach the log of %s", self.pchannel, exc_info=True)

    def tick(self, *, barrier_tick: int = 0, source_id: int = 0, timeout: float) -> TimeTick:
        """Append a time tick. Returns it, with the tick up to which everything is decided after it."""
        self._note_tick("asked")
        answer = self.append(self._tick_entry(barrier_tick, source_id), timeout=timeout)
        own = next(answer.message_outcomes())
        if isinstance(own, AppendRejected):  # of a term that has ended: the answer tells the tick all the same
            return self.confirmed()
        return TimeTick(answer.last_tick, own.last_confirmed or own.message_id, own.message_id, True, self._state.term)

    def confirmed(self) -> TimeTick:
        """Return the tick up to which everything is decided, as a time tick that is not persisted."""
        # The state first: the tail is never behind it, so the later tick needs no earlier place in the log.
        state = self._state
        place = last_confirmed(state)
        return TimeTick(self.tail.confirmed_tick, place, place, False, state.term)

    def confirm_time(self, *, timeout: float) -> int | None:
        """Confirm, without an entry, the time that has passed in the log: a time tick that is not persisted.

        Waits until all current entries are decided. The log's promise about later stamps then excludes any message
        with a tick at or below the confirmed one. Returns that tick; None if the log promises nothing (a broker's), or
        has moved to another backend just now. Raises as :meth:`reach_end`.
        """
        # The promise first, then the wait: entries that are in the log before the promise may have earlier stamps.
        floor = stamp_floor(self._log)
        if floor is None or not self._state.term:
            return None
        self._reach(floor.end, timeout=timeout)
        if self._position.generation != floor.end.generation:
            return None
        self.tail.confirm((floor.ms << LOGICAL_BITS) - 1)
        return self.tail.confirmed_tick

    def least_unconfirmed(self, vchannels: Collection[str]) -> Unconfirmed | None:
        """Return the least tick that a message on these VChannels can have which is not decided yet.

        Everything below is decided there, although other VChannels' entries may wait. None if that cannot be determined
        without waiting: the log is in another process, promises nothing, or holds more than BACKLOG_BYTES undecided.
        Costs a look at the headers of what is undecided.
        """
        log = self._log
        floor = stamp_floor(log) if self._local else None
        if floor is None:
            return None
        with self._lock:  # one state and its position
            position, last = self._position, self._state.last_tick
        size = 0
        while position < floor.end:
            if position.generation != floor.end.generation or size >= BACKLOG_BYTES:
                return None
            run = log.read(position, end=floor.end, max_bytes=READ_BYTES)
            if not run.batch.num_rows:
                return None
            first = _first_entry_of(run.batch, vchannels)
            if first is not None:
                stamp = run.batch.column("physical_ms")[first].as_py()
                return Unconfirmed(max(last + 1, stamp << LOGICAL_BITS), True)
            size += value_bytes(run.batch)
            position = run.next
        if position.generation != floor.end.generation:
            return None
        return Unconfirmed(max(last + 1, floor.ms << LOGICAL_BITS), False)

    def updates(self, vchannel: str) -> int:
        """Return how often a VChannel's MVCC tick moved since the follower began. Costs what changed since it was asked
        last, of all VChannels.
        """
        with self._lock:
            before, self._counted = self._counted, self._state
            for name in self._counted.vchannels.changed_keys(before.vchannels):
                old, new = before.vchannels.get(name), self._counted.vchannels.get(name)
                if new is None:
                    self._updates.pop(name, None)
                elif old is None or new.mvcc > old.mvcc:
                    self._updates[name] = self._updates.get(name, 0) + 1
            return self._updates.get(vchannel, 0)

    def _note_tick(self, reason: str) -> None:
        if self._metrics is not None:
            self._metrics.record_tick(reason)

    def log_end(self) -> LogId:
        """Return the current end of the log."""
        return self._log.end()

    def reach_end(self, *, timeout: float) -> None:
        """Wait until all current entries are decided.

        Raises DeadlineExceeded, and the error that parked the PChannel.
        """
        self._reach(self._log.end(), timeout=timeout)

    def _reach(self, end: LogId, *, timeout: float) -> None:
        deadline = Deadline.after(timeout)
        while self._position < end:
            if deadline.expired():
                raise DeadlineExceeded(f"{self.pchannel} was followed to {self._position}, not yet to {end}: retry")
            self._awake.set()
            self.tail.tail(self.tail.confirmed_tick, timeout=deadline.remaining(maximum=_SLICE))
        self._check()

    def stop(self) -> None:
        """Ask the thread to end, without waiting for it."""
        self._stopping.set()
        self._awake.set()
        log = self._log
        if is_local(log):
            with suppress(MillraceError):  # it is closed
                log.wake()

    def close(self) -> None:
        """Stop following. Pending appends get LogUnavailable. Idempotent."""
        end = Deadline.after(_STOP)
        while self._thread.is_alive() and not end.expired():
            self.stop()  # again, if the thread was about to wait
            self._thread.join(end.remaining(maximum=_PAUSE))
        self._fail(
            LogUnavailable(f"the append host stopped following {self.pchannel}: append again with the same sequences")
        )

    # --- the thread -------------------------------------------------------------------------------------------------

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
                    self._turn.release()
                self._step()
            except MillraceError as error:
                if self._stopping.is_set():
                    return
                if not error.retriable:
                    _log.exception("%s is parked at %s", self.pchannel, self._position)
                    self._park(error)
                    return
                reached = False
                self._stopping.wait(jittered(_PAUSE))
            except Exception as error:
                _log.exception("%s is parked at %s", self.pchannel, self._position)
                self._park(_wrapped(error, self.pchannel, self._position))
                return

    def _record_end(self) -> None:
        """Record the end of a log that was switched to another backend: the switch may have died before it did."""
        ended, log = self._unrecorded, self._log
        if ended is not None and (not isinstance(log, Switchable) or log.record_end(ended.following())):
            self._unrecorded = None

    def _step(self) -> None:
        """Wait for entries that no appender judges, judge them, and append a tick if one is due."""
        self._local = is_local(self._log)  # a switch of the backend may have changed it
        timeout = self._patience()
        if time.monotonic() - self._helped < _HELPED:
            # Appenders follow the log themselves. Reading it here, too, would wake this thread for each append.
            self._awake.wait(min(timeout, _HELPED))
            timeout = 0.0
        self._awake.clear()
        position = self._position
        entries = self._log.read(position, max_bytes=READ_BYTES, timeout=timeout)
        with self._turn:
            if self._position == position:
                self._judge(entries)
        self.follow()
        if not entries.batch.num_rows:
            self._tick_if_due()

    def follow(self) -> None:
        """Judge what the log holds for callers that wait, in this thread, unless another thread does.

        Only for a log of this process: what was appended to it is readable at once. An error is left to the thread,
        which meets it too and decides what it means.
        """
        while self._waiting and self._local and self._turn.acquire(blocking=False):
            try:
                before = self._position
                self._judge(self._log.read(before, max_bytes=READ_BYTES))
                self._helped = time.monotonic()
                if self._position == before:
                    self._awake.set()
                    return
            except Exception:
                self._awake.set()
                return
            finally:
                self._turn.release()

    def _judge(self, entries: LogEntries) -> None:
        """Run the chain over the entries from the position on. The caller has the turn."""
        if not entries.batch.num_rows:
            if self._position < entries.next and self._position.generation == entries.next.generation:
                # No entries (a broker's markers), but positions of the log: a caller that waits for its end must pass
                # them.
                self._decided(entries, self._chain.process(self._state, entries))
            return
        for portion in chunk_entries(entries):
            if self._stopping.is_set():
                return
            try:
                self._decided(portion, self._chain.process(self._state, portion))
            except Exception:
                # The entries before the failing one are decided; only that entry parks the PChannel.
                outcome, _ = process_until_failure(self._chain, self._state, portion)
                if outcome is not None:
                    self._decided(portion, outcome)
                raise

    def _decided(self, entries: LogEntries, outcome: ChainOutcome) -> None:
        before = self._state
        begin = before.first_open_begin()
        if outcome.plain is not None:
            rows = accepted_rows(outcome.plain, begin)
        else:
            rows = outcome_rows(outcome.messages, outcome.rejections)
        if outcome.plain is not None or has_news(outcome):
            self._news_end = outcome.state.position
        decisions = ChainDecisions(
            start=self._position,
            end=outcome.state.position,
            entries=entries.batch,
            rows=rows,
            last_tick=outcome.state.last_tick,
            confirmed_before=begin,
        )
        if self._metrics is not None and entries.batch.num_rows:
            stamp = entries.batch.column("physical_ms")[-1].as_py()
            self._metrics.record_decisions(outcome, before, age=(self._now_ms() - stamp) / 1000)
        # Publish to the tail first: a message whose result is known must be in the tail.
        self.tail.publish(
            lambda: outcome.messages,
            rows=outcome.accepted,
            confirmed_tick=outcome.state.last_tick,
            bytes=value_bytes(entries.batch),
        )
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
        assert pending.ids is not None
        first, last = pending.ids
        generation = self._position.generation
        if last.generation < generation and last > self._ends.get(last.generation, EARLIEST):
            switched = LogUnavailable(
                f"the log of {self.pchannel} was switched to another backend before this append: append again with the"
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

    # --- time ticks -------------------------------------------------------------------------------------------------

    def _patience(self) -> float:
        """Return the seconds to wait for entries: less if a timer is due earlier."""
        state, now = self._state, time.monotonic()
        longest = _IDLE_SLICE if self._local else _SLICE
        if not state.term:
            return longest
        if self._idle():
            return _SLICE  # there is no signal when the ticks become this host's again
        if state.dirty:
            longest = min(longest, self._ticked + self._tick_interval - now)
        if (deadline := state.next_deadline()) != NEVER:
            longest = min(longest, ((deadline >> LOGICAL_BITS) + 1 - self._now_ms()) / 1000)
        return max(longest, self._ticked + _PAUSE - now, 0.0)

    def _tick_if_due(self) -> None:
        """Append a tick if one is due. All entries are read, so their timers have fired already."""
        state, now = self._state, time.monotonic()
        if not state.term or now - self._ticked < _PAUSE or self._idle():
            return
        due = (state.next_deadline() >> LOGICAL_BITS) < self._now_ms()
        if due or (state.dirty and now - self._ticked >= self._tick_interval):
            self._ticked = now
            if self._fenced is not None:
                self._on_fenced()
                return  # the new writer appends the ticks
            self._note_tick("timer" if due else "idle")
            with suppress(LogFenced):
                self._append(self._tick_entry(0))

    def _tick_entry(self, barrier_tick: int, source_id: int = 0) -> pa.LargeBinaryArray:
        entry = encode_entry([time_tick(term=self._state.term, barrier_tick=barrier_tick, source_id=source_id)])
        return pa.array([entry], pa.large_binary())


def _ended(state: ChannelState) -> LogId | None:
    """Return the AlterWAL entry if `state` is right after one, at the beginning of a generation."""
    last, position = state.last_entry, state.position
    return last if last is not None and last.generation < position.generation else None


def _first_entry_of(entries: pa.RecordBatch, vchannels: Collection[str]) -> int | None:
    """Return the place of the first entry with a message of these VChannels, or that ends the log's generation."""
    values = entries.column("value")
    heads = decode_header_summary(values)
    if isinstance(heads, str):
        return 0  # the chain says which entry is invalid
    wanted = [place for place, name in enumerate(heads.names) if name in vchannels]
    found = np.flatnonzero(np.isin(heads.vchannels, wanted) | (heads.types == MessageType.ALTER_WAL))
    return int(np.searchsorted(np.cumsum(framed_counts(values)), found[0], side="right")) if len(found) else None


def _opens_term(values: pa.LargeBinaryArray) -> bool:
    """Return whether a message of these entries opens a term."""
    zeros = pa.array([0] * len(values), pa.int64())
    entries = pa.RecordBatch.from_arrays([zeros, zeros, zeros, values], schema=ENTRY_SCHEMA)
    return MessageType.TERM_OPENING in decode_entries(entries).column("type").to_pylist()


def _wrapped(error: Exception, pchannel: str, position: LogId) -> ChannelParked:
    parked = ChannelParked(f"{pchannel} is parked at {position}: {type(error).__name__}: {error}")
    parked.__cause__ = error
    return parked


def has_news(outcome: ChainOutcome) -> bool:
    """Return whether the outcome has a rejection, or a message that is no time tick."""
    types = outcome.messages["type"].cast(pa.utf8())
    return bool(outcome.rejections.num_rows or pc.any(pc.not_equal(types, MessageType.TIME_TICK.name)).as_py())
