"""The append host: follows each PChannel's log once for all clients and answers appends in milliseconds.

    host = AppendHost(service, load_state)
    result = host.append("p0", encode_entry([message]), deadline=5.0).result()

It runs the same chain over the same log as the Spark host, starting from the newest committed (position, state). Both
compute the same answer without coordination, and the host may be killed at any time. An append is one atomic batch in
the log. Concurrent callers share one disk sync (the log's group commit) and one run of the chain. An append whose
answer was lost is retried with the same producer sequence; it has one effect and gets the first result (law 8).

The host also keeps each PChannel's newest rows for tailing readers (:mod:`millrace.node.append.tail_buffer`) and
appends time ticks when needed (:mod:`millrace.node.append.follower`).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from copy import copy
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, Protocol

import pyarrow as pa

from millrace.base.closeable import Closeable
from millrace.base.deadline import Deadline
from millrace.base.errors import (
    ChannelNotFound,
    DeadlineExceeded,
    InvalidArgument,
    LogUnavailable,
    Malformed,
    MillraceError,
    UnsupportedVersion,
)
from millrace.base.metrics import Metrics
from millrace.log.clock import log_or_wall_time_ms
from millrace.log.protocol import LogService
from millrace.message.ids import LOGICAL_BITS, collection_id_of, pchannel_of
from millrace.message.log_entries import ENTRY_SCHEMA, LogEntries
from millrace.message.wire.framing import check_framing
from millrace.message.wire.stamp import stamp_entries
from millrace.node.append.follower import Follower
from millrace.node.append.metrics import export_clock
from millrace.node.append.pending import PendingOutcome
from millrace.node.append.tail_buffer import TailLimits
from millrace.rpc.append_pipeline import Entries, as_values
from millrace.rpc.outcome import AppendOutcome, outcome_rows
from millrace.rpc.tail import DecidedMessages, Evicted, Mvcc, TailBatch, TimeTick, messages_of
from millrace.rpc.wire import DEFAULT_DEADLINE
from millrace.wal.chain import Chain
from millrace.wal.definitions import OpenFigures, PChannelDefinitions
from millrace.wal.state import ChannelState
from millrace.wal.versions import VERSION_5

_log: Final = logging.getLogger(__name__)

MAX_TICK_AHEAD_MS: Final = 1_000
"""Time by which a tick that is appended may be ahead of the clock."""
_MILLISECOND: Final = 0.001

_NAMES_SECONDS: Final = 1.0
"""Time for which the deployment's PChannel names are cached. Logs of message streams are not among them, and get
frequent appends."""


@dataclass(frozen=True, slots=True)
class HostSettings:
    """`tick_interval`: seconds after which a PChannel with new messages gets a time tick if nobody asked for one."""

    tick_interval: float = 10.0
    tail: TailLimits = field(default_factory=TailLimits)


class AppendForwarder(Protocol):
    """Appends for a host that shares its logs: the nodes of a cluster, while some have the append role."""

    def is_local(self, pchannel: str) -> bool:
        """Return whether this host appends by itself now. If nodes did before, take the log back first.

        Raises errors of taking it back, and LogUnavailable if ownership is unknown.
        """
        ...

    def append(self, pchannel: str, entries: Entries, *, deadline: float, principal: str = "") -> AppendOutcome:
        """Append through the PChannel's owner, in the name of `principal`, if any. Raises as
        :meth:`AppendHost.append`.
        """
        ...

    def tick(self, pchannel: str, *, tick: int = 0, source_id: int = 0, deadline: float) -> None:
        """Have the PChannel's owner append a time tick, as :meth:`AppendHost.time_tick` does. Returns when it is
        decided there.
        """
        ...

    def suppress_ticks(self) -> bool:
        """Return whether this host must not append ticks on its own."""
        ...


class AppendHost(Closeable):
    """Answers appends to the logs of `service`. Thread-safe.

    `load_state(pchannel)` returns the state to follow from: the newest committed one, or
    ``ChannelState.new(pchannel)``. `pchannels` returns the deployment's PChannels, so that appends past the host into
    one that is not followed yet are checked too. Timers use the clock that stamps the log (`now_ms` replaces it), so
    that log time reaches their deadlines.
    """

    def __init__(
        self,
        service: LogService,
        load_state: Callable[[str], ChannelState],
        *,
        pchannels: Callable[[], Collection[str]] = tuple,
        settings: HostSettings | None = None,
        metrics: Metrics | None = None,
        now_ms: Callable[[], int] | None = None,
        owners: AppendForwarder | None = None,
        on_fenced: Callable[[str], None] = lambda pchannel: None,
    ) -> None:
        """Create the host. It follows a PChannel on its first call.

        `owners` appends where this host must not. `on_fenced` is called with each PChannel that a newer writer took
        over.
        """
        self._owners = owners
        self._on_fenced = on_fenced
        self._service = service
        self._load_state = load_state
        self._pchannels = pchannels
        self._own: tuple[Collection[str], float] = ((), 0.0)
        self._settings = settings or HostSettings()
        self.metrics = metrics
        self._now_ms = now_ms or partial(log_or_wall_time_ms, service)
        self._lock = threading.Lock()
        if metrics is not None:
            export_clock(metrics, service)
        self._starting: dict[str, threading.Lock] = {}
        self._followers: dict[str, Follower] = {}
        self._closed = False

    @property
    def forwards(self) -> bool:
        """Whether the host forwards appends of PChannels that it does not own."""
        return self._owners is not None

    def append(
        self, pchannel: str, entry: Entries, *, deadline: float = DEFAULT_DEADLINE, principal: str = ""
    ) -> AppendOutcome:
        """Append entries (docs/wire-form.md) as one atomic batch and wait for the chain's decisions, at most `deadline`
        seconds.

        If nodes take the PChannel's appends, returns their answer. A rejection is part of the outcome; only its typed
        readers raise it. Raises:

        - DeadlineExceeded: the entries are in the log, undecided.
        - LogUnavailable: they are in the log once or not at all. Retry with the same producer sequences.
        - ChannelNotFound, EntryTooLarge, Malformed, UnsupportedVersion, and the error that parked the PChannel: nothing
          was appended.
        """
        end = Deadline.after(deadline)
        if self._owners is not None and not self._owners.is_local(pchannel):
            return self._owners.append(pchannel, entry, deadline=deadline, principal=principal)
        return self.decide(pchannel, as_values(entry), deadline=end.remaining(), principal=principal)

    def judge(self, pchannel: str, entry: bytes, *, deadline: float = DEFAULT_DEADLINE) -> tuple[AppendOutcome, int]:
        """Judge an entry as if it came next in the log, without appending it. Returns the outcome that it would have,
        and the last tick of the PChannel.

        Everything in the log now is decided before.
        """
        follower = self._follower(pchannel)
        follower.reach_end(timeout=deadline)
        state = self.state(pchannel)
        place, stamp = state.position, max(self._now_ms(), state.last_tick >> LOGICAL_BITS)
        columns = [pa.array([number], pa.int64()) for number in (place.ledger, place.entry, stamp)]
        batch = pa.RecordBatch.from_arrays([*columns, pa.array([entry], pa.large_binary())], schema=ENTRY_SCHEMA)
        outcome = Chain().process(state, LogEntries(batch, place.following()))
        return AppendOutcome(outcome_rows(outcome.messages, outcome.rejections)), state.last_tick

    def submit(self, pchannel: str, entry: Entries) -> PendingOutcome:
        """Append as :meth:`append` does, but return as soon as the entries are durable."""
        return self.submit_all(pchannel, [as_values(entry)])[0]

    def decide(
        self,
        pchannel: str,
        values: pa.LargeBinaryArray,
        *,
        deadline: float,
        authorize: Callable[[pa.LargeBinaryArray], None] | None = None,
        principal: str = "",
    ) -> AppendOutcome:
        """Append here as :meth:`append` does, regardless of the PChannel's owner.

        `authorize` and `principal` as in :meth:`submit_all`.
        """
        follower, [stamped] = self._admitted(pchannel, [values], authorize, principal)
        return follower.append(stamped, timeout=deadline)

    def submit_all(
        self,
        pchannel: str,
        appends: Sequence[pa.LargeBinaryArray],
        *,
        authorize: Callable[[pa.LargeBinaryArray], None] | None = None,
        principal: str = "",
    ) -> list[PendingOutcome]:
        """Submit several appends in order, as one atomic batch in the log. Returns the pending outcome of each.

        Refused entries are counted only if their append comes alone: of several, the caller submits each again.
        `authorize` checks entries with valid framing and raises to refuse them. The entries get the stamp of
        `principal` alone, whatever stamp they came with; none in a term whose chain does not know stamps.
        """
        follower, stamped = self._admitted(pchannel, appends, authorize, principal)
        return follower.submit_all(stamped)

    def _admitted(
        self,
        pchannel: str,
        appends: Sequence[pa.LargeBinaryArray],
        authorize: Callable[[pa.LargeBinaryArray], None] | None,
        principal: str,
    ) -> tuple[Follower, list[pa.LargeBinaryArray]]:
        """Return the PChannel's follower after checks of the appends, and the appends with their stamps."""
        if not all(len(values) for values in appends):
            raise InvalidArgument("an append needs at least one entry")
        follower = self._follower(pchannel)
        for values in appends:
            self._check(pchannel, values, counted=len(appends) == 1)
            if authorize is not None:
                authorize(values)
        # A term that opens while these are under way is at most newer, and its chain reads them as well.
        name = principal if follower.state.chain_version >= VERSION_5 else ""
        return follower, [stamp_entries(values, name) for values in appends]

    def stamp(
        self, pchannel: str, values: pa.LargeBinaryArray, principal: str, *, counted: bool = True
    ) -> pa.LargeBinaryArray | None:
        """Check and stamp entries that are appended to a log past the host. Returns None if no chain reads that log.

        Raises Malformed or UnsupportedVersion for a PChannel of the deployment. Other logs, such as those of message
        streams, may hold any format.
        """
        own = pchannel in self._followers or self._is_own(pchannel)
        if not own:
            return None
        self._check(pchannel, values, counted=counted)
        follower = self._followers.get(pchannel)
        # Without a follower the version of the open term is not known, and a client must not write stamps itself.
        known = follower is not None and follower.state.chain_version >= VERSION_5
        return stamp_entries(values, principal if known else "")

    def _is_own(self, pchannel: str) -> bool:
        """Return whether a log is a PChannel of the deployment. A negative answer may be a second old."""
        names, until = self._own
        if pchannel not in names and time.monotonic() >= until:
            names = self._pchannels()
            self._own = names, time.monotonic() + _NAMES_SECONDS
        return pchannel in names

    def _check(self, pchannel: str, values: pa.LargeBinaryArray, *, counted: bool) -> None:
        refused = check_framing(values)
        if refused is None:
            return
        if counted and self.metrics is not None:
            self.metrics.log_refused_entries_total.labels(pchannel).inc(refused.count)
        kind = UnsupportedVersion if refused.is_newer_version else Malformed
        raise kind(
            f"entry {refused.index} of the append cannot be read by this build: {refused.cause}; nothing was appended"
        )

    def tick(
        self, pchannel: str, *, persist: bool = True, deadline: float = DEFAULT_DEADLINE, forward: bool = True
    ) -> int:
        """Append a time tick now. Returns a tick up to which everything in the PChannel is decided, including all
        earlier appends.

        Without `persist`, append nothing: wait until the current log is decided, and return the tick that is confirmed
        then. In the embedded log it moves with time, and tailing readers get it; in a broker's it does not move while
        nothing is written. Without `forward`, append here even if another process owns the PChannel. Raises
        InvalidArgument if no term is open, and as :meth:`append`.
        """
        return self.time_tick(pchannel, persist=persist, deadline=deadline, forward=forward).time_tick

    def time_tick(
        self,
        pchannel: str,
        *,
        tick: int = 0,
        persist: bool = True,
        source_id: int = 0,
        deadline: float = DEFAULT_DEADLINE,
        forward: bool = True,
    ) -> TimeTick:
        """Make a time tick, as :meth:`tick` does, and return it with its LastConfirmed (Milvus' `NewTimeTickMsg`).

        With `tick`, it has exactly that tick, once the clock has reached it. Appended, it has a later one if other
        messages come first. `source_id` says in an appended one who asked.
        Raises InvalidArgument also if what is decided has passed `tick`.
        Raises DeadlineExceeded if the clock does not reach `tick` in time.
        """
        follower = self._follower(pchannel)
        end = Deadline.after(deadline)
        if not follower.state.term:
            follower.reach_end(timeout=deadline)  # the follower may have started just before the log's first term
        if not follower.state.term:
            raise InvalidArgument(f"no term is open on {pchannel} yet: it is empty")
        before = follower.confirmed()
        if tick and tick < before.time_tick:
            raise InvalidArgument(f"{pchannel} has passed the tick {tick}: it has decided up to {before.time_tick}")
        if not persist:
            if tick:
                self.confirm(pchannel, tick, deadline=end.remaining(minimum=0.001))
                return before._replace(time_tick=tick)
            if follower.confirm_time(timeout=end.remaining(minimum=0.001)) is None:
                follower.reach_end(timeout=end.remaining(minimum=0.001))
            return follower.confirmed()
        # A tick that is appended moves the PChannel's time to it: one far ahead would end every lease on it.
        early = ((tick >> LOGICAL_BITS) - self._now_ms() - MAX_TICK_AHEAD_MS) / 1000
        if early >= end.remaining():
            raise DeadlineExceeded(f"the clock of {pchannel} does not reach the tick {tick} in time: ask again later")
        if early > 0:
            follower.tail.tail(tick - 1, timeout=early)
        if forward and self._owners is not None and not self._owners.is_local(pchannel):
            self._owners.tick(pchannel, tick=tick, source_id=source_id, deadline=end.remaining(minimum=0.001))
            follower.reach_end(timeout=end.remaining(minimum=0.001))
            return follower.confirmed()._replace(persisted=True)
        barrier = max(0, tick - 1)
        return follower.tick(barrier_tick=barrier, source_id=source_id, timeout=end.remaining(minimum=0.001))

    def confirm(self, pchannel: str, tick: int, *, deadline: float = DEFAULT_DEADLINE) -> int:
        """Wait until everything up to `tick` is decided. Returns the confirmed tick, >= `tick`.

        Appends a time tick only to a log that promises nothing about later stamps (a broker's).
        Raises DeadlineExceeded if the clock does not reach `tick` in time.
        """
        follower = self._follower(pchannel)
        end = Deadline.after(deadline)
        while (confirmed := follower.tail.confirmed_tick) < tick:
            if end.expired():
                raise DeadlineExceeded(f"{pchannel} has confirmed {confirmed}, not {tick}: retry")
            early = ((tick >> LOGICAL_BITS) - self._now_ms()) / 1000
            if early > 0:
                # The tick is ahead of the clock: other messages may reach it first.
                follower.tail.tail(tick - 1, timeout=end.remaining(maximum=early))
                continue
            passed = follower.confirm_time(timeout=end.remaining(minimum=0.001)) if follower.state.term else None
            if passed is None:
                self.tick(pchannel, deadline=end.remaining(minimum=0.001))
            elif passed < tick:
                # The clock is in the tick's own millisecond, in which other messages may still come.
                follower.tail.tail(tick - 1, timeout=end.remaining(maximum=_MILLISECOND))
        return confirmed

    def tail(self, pchannel: str, after_tick: int, *, timeout: float, max_bytes: int = 8 << 20) -> TailBatch | Evicted:
        """Return the messages after `after_tick` in tick order; see
        :meth:`millrace.node.append.tail_buffer.TailBuffer.tail`.
        """
        return self._follower(pchannel).tail.tail(after_tick, timeout=timeout, max_bytes=max_bytes)

    def decided(
        self,
        collection_id: int,
        after: Mapping[str, int],
        *,
        at: int | None,
        max_bytes: int,
        deadline: float = DEFAULT_DEADLINE,
    ) -> DecidedMessages:
        """Return what a read of a collection takes from its PChannels' tails: by PChannel, the messages after a tick.

        Without `at`, the ticks cover every append to the collection that was answered before the call. Entries of other
        collections that are not decided yet delay nothing. A time tick is appended only to a broker's log that is
        behind what is visible on another PChannel, or behind `at`; none is if the log's clock has not reached `at`.
        Raises as :meth:`tick`.
        """
        end = Deadline.after(deadline)
        followers = {name: self._follower(name) for name in after}
        own = {name: _vchannels_of(follower.state, collection_id) for name, follower in followers.items()}
        if at is None:
            for name, follower in followers.items():
                found = follower.least_unconfirmed(own[name]) if own[name] else None
                if found is None or found.in_log:
                    follower.reach_end(timeout=end.remaining(minimum=0.001))
        visible = (_visible_tick(follower.state, collection_id) for follower in followers.values())
        target = max(visible, default=0) if at is None else at
        ticks = {name: follower.tail.confirmed_tick for name, follower in followers.items()}
        for name, follower in followers.items():
            if ticks[name] < target and target >> LOGICAL_BITS <= self._now_ms():
                ticks[name] = self._confirm_for(follower, own[name], target, end)
        messages: dict[str, list[pa.RecordBatch]] = {name: [] for name in after}
        left = max_bytes
        for name, begin in after.items():
            seen = begin
            while seen < ticks[name]:
                piece = followers[name].tail.tail(seen, timeout=0.0)
                if isinstance(piece, Evicted) or left <= 0:
                    return DecidedMessages(ticks, {}, False)
                if piece.confirmed_tick <= seen:
                    break  # what is not decided yet is of other collections
                for batch in piece.batches:
                    messages[name].append(messages_of(collection_id, batch))
                    left -= messages[name][-1].nbytes
                seen = piece.confirmed_tick
        nonempty = {name: [each for each in batches if each.num_rows] for name, batches in messages.items()}
        return DecidedMessages(ticks, nonempty, True)

    def _confirm_for(self, follower: Follower, vchannels: Collection[str], tick: int, end: Deadline) -> int:
        """Wait until everything up to `tick` is decided on these VChannels. Returns the tick up to which it is."""
        while True:
            idle = follower.state.position >= follower.log_end()
            found = follower.least_unconfirmed(vchannels) if vchannels and not idle else None
            if found is None or found.in_log:
                return self.confirm(follower.pchannel, tick, deadline=end.remaining(minimum=0.001))
            if found.tick > tick:
                return found.tick - 1
            if end.expired():
                raise DeadlineExceeded(f"{follower.pchannel} has confirmed {found.tick - 1}, not {tick}: retry")
            time.sleep(_MILLISECOND)  # the clock is in the tick's own millisecond

    def state(self, pchannel: str) -> ChannelState:
        """Return the newest channel state, read-only. Raises the error that parked the PChannel."""
        follower = self._follower(pchannel)
        if follower.error is not None:
            raise copy(follower.error)
        return follower.state

    def mvcc(self, vchannel: str) -> Mvcc:
        """Return up to which tick a VChannel is readable now.

        Raises InvalidArgument, ChannelNotFound, the error that parked its PChannel, and DeadlineExceeded if the host
        has just begun and does not know the VChannel yet.
        """
        if collection_id_of(vchannel) is None:
            raise InvalidArgument(f"{vchannel[:100]!r} is not a VChannel: its name is like dml_0_7v2")
        follower = self._follower(pchannel_of(vchannel))
        if vchannel not in self.state(follower.pchannel).vchannels:
            follower.reach_end(timeout=DEFAULT_DEADLINE)  # after a start, the log has what the state lacks
        end, found = follower.log_end(), follower.least_unconfirmed((vchannel,))
        confirmed = follower.tail.confirmed_tick
        state = self.state(follower.pchannel)
        if vchannel not in state.vchannels:
            raise ChannelNotFound(f"there is no collection on {vchannel!r}")
        tick, updates = state.vchannels[vchannel].mvcc, follower.updates(vchannel)
        if found is None:
            return Mvcc(vchannel, tick, state.position >= end, confirmed + 1, updates)
        return Mvcc(vchannel, tick, not found.in_log or state.position >= end, found.tick, updates)

    def states(self) -> dict[str, ChannelState]:
        """Return the newest states of the followed PChannels, read-only, without parked ones."""
        return {name: each.state for name, each in list(self._followers.items()) if each.error is None}

    def describe(self, pchannel: str) -> dict[str, Any]:
        """Return the host's position: position, last_entry, last_tick, term, chain_version, parked (code and text, or
        None), news_end (a position after which there are only time ticks), and how much is open (OpenFigures).
        """
        follower = self._follower(pchannel)
        state, error = follower.state, follower.error
        return {
            "position": list(state.position),
            "last_tick": state.last_tick,
            "term": state.term,
            "chain_version": state.chain_version,
            "last_entry": None if state.last_entry is None else list(state.last_entry),
            "parked": None if error is None else f"{error.code}: {error}",
            "news_end": list(follower.news_end),
            "open": list(OpenFigures.of(state)),
        }

    def describe_all(self) -> dict[str, dict[str, Any]]:
        """Return by PChannel the :meth:`describe` of the host and begin, end and bytes of its log; or the error of
        either, as code and text.
        """
        found: dict[str, dict[str, Any]] = {}
        for name in self._service.names():
            parts = found[name] = {}
            for key, part in (("host", self.describe), ("log", self._describe_log)):
                try:
                    parts[key] = part(name)
                except MillraceError as error:
                    parts[f"{key}_error"] = f"{error.code}: {error}"
        return found

    def _describe_log(self, pchannel: str) -> dict[str, Any]:
        with closing(self._service.open(pchannel)) as log:
            described = log.describe()
        return {"begin": described.begin, "end": described.end, "bytes": described.bytes}

    def definitions(
        self, pchannel: str, collection_id: int | None, *, deadline: float = DEFAULT_DEADLINE
    ) -> PChannelDefinitions:
        """Return the chain's collections of a PChannel, after everything in the log now is decided."""
        follower = self._follower(pchannel)
        follower.reach_end(timeout=deadline)
        return PChannelDefinitions.of(follower.state, collection_id)

    def restart(self, pchannel: str) -> None:
        """Follow the PChannel again from `load_state`, after a person has fixed what parked it."""
        with self._lock:
            follower = self._followers.pop(pchannel, None)
        if follower is not None:
            follower.close()
        _log.info("following %s again", pchannel)
        self._follower(pchannel)

    def release(self, pchannel: str, *, deadline: float) -> None:
        """Stop following a PChannel, after all entries in its log are decided or `deadline` seconds have passed.

        Appends made here are answered by then. The next call for the PChannel follows it again.
        """
        follower = self._followers.get(pchannel)
        if follower is None:
            return
        with suppress(MillraceError):  # pending appends get the error
            follower.reach_end(timeout=deadline)
        with self._lock:
            if self._followers.get(pchannel) is follower:
                del self._followers[pchannel]
        follower.close()

    @contextmanager
    def hold(self, pchannel: str, *, deadline: float) -> Iterator[Follower | None]:
        """Yield the PChannel's follower once it is parked or has decided the current log. No other follower starts
        inside.

        Waits `deadline` seconds at most. Yields None if the PChannel is about to be followed again.
        """
        with suppress(MillraceError):  # the holder inspects the follower's error
            self._follower(pchannel).reach_end(timeout=deadline)
        with self._lock:
            starting = self._starting.setdefault(pchannel, threading.Lock())
        with starting:
            yield self._followers.get(pchannel)

    def close(self) -> None:
        """Stop all followers. The service stays open. Idempotent."""
        with self._lock:
            self._closed = True
            followers, self._followers = list(self._followers.values()), {}
        for follower in followers:
            follower.stop()
        for follower in followers:
            follower.close()

    def _follower(self, pchannel: str) -> Follower:
        follower = self._followers.get(pchannel)
        if follower is not None and not isinstance(follower.error, ChannelNotFound):
            return follower
        with self._lock:
            if follower is not None and self._followers.get(pchannel) is follower:
                del self._followers[pchannel]  # its log was dropped; a new one may exist since
            starting = self._starting.setdefault(pchannel, threading.Lock())
        with starting:
            follower = self._followers.get(pchannel)
            if follower is not None:
                return follower
            open_log = partial(self._service.open, pchannel)
            open_log()  # fail first for a PChannel that does not exist
            state = self._load_state(pchannel)
            with self._lock:
                if self._closed:
                    raise LogUnavailable("the append host is closed")
                follower = self._followers[pchannel] = Follower(
                    open_log,
                    state,
                    tail_limits=self._settings.tail,
                    tick_interval=self._settings.tick_interval,
                    metrics=self.metrics,
                    now_ms=self._now_ms,
                    suppress_ticks=(lambda: False) if self._owners is None else self._owners.suppress_ticks,
                    on_fenced=partial(self._on_fenced, pchannel),
                )
            return follower


def _vchannels_of(state: ChannelState, collection_id: int) -> frozenset[str]:
    """Return a collection's VChannels on a PChannel."""
    return frozenset(name for name, _ in state.channels_of(collection_id))


def _visible_tick(state: ChannelState, collection_id: int) -> int:
    """Return the greatest tick at which something of a collection became visible on a PChannel, or a later one."""
    own = [channel.mvcc for _, channel in state.channels_of(collection_id)]
    return max(own) if own else state.last_tick  # without one, it was dropped, or is being created
