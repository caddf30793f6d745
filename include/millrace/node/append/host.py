"""The append host: follows each PChannel's log once for all its clients and answers appends in milliseconds.

    host = AppendHost(service, load_state)
    result = host.append("p0", encode_entry([message]), deadline=5.0).result()

It runs the same chain over the same log as the Spark host, from the newest committed (position, state) on, so both find the
same answer; nothing is coordinated between them, and it may be killed at any instant. An append is one atomic batch in the
log; callers at once share one disk acknowledgement (the log's group commit) and one run of the chain. An append whose answer
was lost is repeated with the same producer sequence, which has one effect and gets the first one's result (law 8).

It also keeps each PChannel's newest rows for tailing readers (:mod:`millrace.node.append.tail_buffer`) and appends time ticks when
one is needed (:mod:`millrace.node.append.follower`).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
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
from millrace.message.ids import LOGICAL_BITS
from millrace.message.wire.framing import check_framing
from millrace.node.append.follower import Follower
from millrace.node.append.metrics import export_clock
from millrace.node.append.pending import PendingOutcome
from millrace.node.append.tail_buffer import TailLimits
from millrace.rpc.append_pipeline import Entries, as_values
from millrace.rpc.outcome import AppendOutcome
from millrace.rpc.tail import Evicted, Mvcc, TailBatch
from millrace.rpc.wire import DEFAULT_DEADLINE
from millrace.wal.definitions import PChannelDefinitions
from millrace.wal.state import ChannelState

_log: Final = logging.getLogger(__name__)

_NAMES_SECONDS: Final = 1.0
"""How long the deployment's PChannels are taken as they were: a message stream's log is none, and appends often."""


@dataclass(frozen=True, slots=True)
class HostSettings:
    """`tick_interval`: seconds after which a PChannel that took messages gets a time tick if nobody asked for one."""

    tick_interval: float = 10.0
    tail: TailLimits = field(default_factory=TailLimits)


class AppendForwarder(Protocol):
    """Who appends to the logs of a host that is not alone: the nodes of a cluster, while some have the role."""

    def is_local(self, pchannel: str) -> bool:
        """Whether this host appends by itself now; where nodes did before, once it has taken the log back. Raises what keeps it from
        that, LogUnavailable where it cannot be told."""
        ...

    def append(self, pchannel: str, entries: Entries, *, deadline: float) -> AppendOutcome:
        """Append at whoever has the PChannel. Raises as :meth:`AppendHost.append` does."""
        ...

    def tick(self, pchannel: str, *, deadline: float) -> None:
        """Have whoever has the PChannel append a time tick; returns when it is decided there."""
        ...

    def suppress_ticks(self) -> bool:
        """Whether nothing is to be appended here that nobody asked for."""
        ...


class AppendHost(Closeable):
    """Answers appends to the logs of `service`. Thread-safe.

    `load_state(pchannel)` gives the state to follow from: the newest committed one, or ``ChannelState.new(pchannel)``; `pchannels`
    the deployment's, so that what goes past the host into one that nobody asked it to follow yet is looked at too.
    Timers go by the clock that the log stamps by (`now_ms` stands in for it), so that log time reaches what it waits for.
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
        """`owners`: who appends where this host is not to; `on_fenced` is told of each PChannel that a newer writer took over."""
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
        """Whether it hands what it does not append itself to whoever does."""
        return self._owners is not None

    def append(self, pchannel: str, entry: Entries, *, deadline: float = DEFAULT_DEADLINE) -> AppendOutcome:
        """Append entries (docs/wire-form.md) as one atomic batch and wait for the chain's decisions, at most `deadline` seconds.

        Raises DeadlineExceeded (in the log, undecided), LogUnavailable (in the log once or not at all: repeat it with the
        same producer sequences), ChannelNotFound, EntryTooLarge, Malformed or UnsupportedVersion (bytes that are no entry by
        their header), or what parked the PChannel (nothing was appended).
        A rejection is part of the outcome and raised by its typed readers only. Where nodes take the PChannel's appends, theirs
        is the answer.
        """
        end = Deadline.after(deadline)
        if self._owners is not None and not self._owners.is_local(pchannel):
            return self._owners.append(pchannel, entry, deadline=deadline)
        return self.submit(pchannel, entry).outcome(timeout=end.remaining())

    def submit(self, pchannel: str, entry: Entries) -> PendingOutcome:
        """The first half of :meth:`append`: returns once the entries are durable."""
        return self.submit_all(pchannel, [as_values(entry)])[0]

    def submit_all(
        self,
        pchannel: str,
        appends: Sequence[pa.LargeBinaryArray],
        *,
        authorize: Callable[[pa.LargeBinaryArray], None] | None = None,
    ) -> list[PendingOutcome]:
        """:meth:`submit` for several appends in order, in the log as one atomic batch; each one's outcome by itself.

        Refused entries are counted where their append comes alone: of several the caller hands each one over again. `door`
        looks at what is framed rightly, and raises for what it does not let in.
        """
        if not all(len(values) for values in appends):
            raise InvalidArgument("an append needs at least one entry")
        follower = self._follower(pchannel)
        for values in appends:
            self._check(pchannel, values, counted=len(appends) == 1)
            if authorize is not None:
                authorize(values)
        return follower.submit_all(appends)

    def check(self, pchannel: str, values: pa.LargeBinaryArray, *, counted: bool = True) -> bool:
        """Whether entries go past the host into a log that a chain reads, which they may. Raises Malformed, UnsupportedVersion.

        Into any other log may go what its readers know how to read: the message streams have a form of their own.
        """
        own = pchannel in self._followers or self._is_own(pchannel)
        if own:
            self._check(pchannel, values, counted=counted)
        return own

    def _is_own(self, pchannel: str) -> bool:
        """Whether a log is a PChannel of the deployment, as it was a second ago at the most where it is none."""
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
            f"entry {refused.index} of the append is none that this build reads: {refused.cause}; nothing was appended"
        )

    def tick(
        self, pchannel: str, *, persist: bool = True, deadline: float = DEFAULT_DEADLINE, forward: bool = True
    ) -> int:
        """Append a time tick now; a tick up to which everything in the PChannel is decided, every earlier append included.

        Without `persist` nothing is appended: it waits until what the log holds now is decided, and gives that tick, which
        does not move while nothing is written. Without `forward` it is appended here, whoever has the PChannel. Raises InvalidArgument where no term is open yet, and as :meth:`append` does.
        """
        follower = self._follower(pchannel)
        end = Deadline.after(deadline)
        if not follower.state.term:
            follower.reach_end(timeout=deadline)  # it may have begun a moment ago, before the log's first term
        if not follower.state.term:
            raise InvalidArgument(f"no term is open on {pchannel} yet: nothing can be in it")
        if not persist:
            follower.reach_end(timeout=end.remaining(minimum=0.001))
            return follower.state.last_tick
        if forward and self._owners is not None and not self._owners.is_local(pchannel):
            self._owners.tick(pchannel, deadline=end.remaining(minimum=0.001))
            follower.reach_end(timeout=end.remaining(minimum=0.001))
            return follower.state.last_tick
        return follower.tick(timeout=end.remaining(minimum=0.001))

    def confirm(self, pchannel: str, tick: int, *, deadline: float = DEFAULT_DEADLINE) -> int:
        """Wait until everything up to `tick` is decided, with a time tick appended where that needs one.

        Returns the confirmed tick, which is `tick` or greater. Raises DeadlineExceeded where the clock is not there in time.
        """
        follower = self._follower(pchannel)
        end = Deadline.after(deadline)
        while (confirmed := follower.tail.confirmed_tick) < tick:
            if end.expired():
                raise DeadlineExceeded(f"{pchannel} has confirmed {confirmed}, not {tick}: ask again")
            early = ((tick >> LOGICAL_BITS) - self._now_ms()) / 1000
            if early > 0:
                # A tick that lies ahead of the clock: other messages may reach it, else it is ticked when its time has come.
                follower.tail.tail(tick - 1, timeout=end.remaining(maximum=early))
            else:
                self.tick(pchannel, deadline=end.remaining())
        return confirmed

    def tail(self, pchannel: str, after_tick: int, *, timeout: float, max_bytes: int = 8 << 20) -> TailBatch | Evicted:
        """The messages with a tick above `after_tick`, in tick order; see :meth:`millrace.node.append.tail_buffer.TailBuffer.tail`."""
        return self._follower(pchannel).tail.tail(after_tick, timeout=timeout, max_bytes=max_bytes)

    def state(self, pchannel: str) -> ChannelState:
        """The newest channel state of the host; to be read only. Raises what parked the PChannel."""
        follower = self._follower(pchannel)
        if follower.error is not None:
            raise copy(follower.error)
        return follower.state

    def mvcc(self, vchannel: str) -> Mvcc:
        """Up to where a VChannel is readable now. Raises ChannelNotFound, and what parked its PChannel."""
        follower = self._follower(vchannel.rpartition("_")[0])
        end = follower.log_end()
        state = self.state(follower.pchannel)
        if vchannel not in state.vchannels:
            raise ChannelNotFound(f"there is no collection on {vchannel!r}")
        return Mvcc(vchannel, state.vchannels[vchannel].mvcc, state.position >= end)

    def states(self) -> dict[str, ChannelState]:
        """The newest states of the PChannels that are followed now; to be read only. Parked ones are left out."""
        return {name: each.state for name, each in list(self._followers.items()) if each.error is None}

    def describe(self, pchannel: str) -> dict[str, Any]:
        """Where the host stands: position, last_entry, last_tick, term, chain_version, parked (the error's code and text, or None)."""
        follower = self._follower(pchannel)
        state, error = follower.state, follower.error
        return {
            "position": list(state.position),
            "last_tick": state.last_tick,
            "term": state.term,
            "chain_version": state.chain_version,
            "last_entry": None if state.last_entry is None else list(state.last_entry),
            "parked": None if error is None else f"{error.code}: {error}",
        }

    def definitions(
        self, pchannel: str, collection_id: int | None, *, deadline: float = DEFAULT_DEADLINE
    ) -> PChannelDefinitions:
        """What the chain has of collections there, once everything that the log holds now is decided."""
        follower = self._follower(pchannel)
        follower.reach_end(timeout=deadline)
        return PChannelDefinitions.of(follower.state, collection_id)

    def restart(self, pchannel: str) -> None:
        """Follow the PChannel anew from `load_state`: for a person who has cured what parked it."""
        with self._lock:
            follower = self._followers.pop(pchannel, None)
        if follower is not None:
            follower.close()
        _log.info("%s is followed anew", pchannel)
        self._follower(pchannel)

    def release(self, pchannel: str, *, deadline: float) -> None:
        """Follow a PChannel no more, once everything that its log holds now is decided or `deadline` seconds are over: what was
        appended here has its answer then. The next call for it follows it anew."""
        follower = self._followers.get(pchannel)
        if follower is None:
            return
        with suppress(MillraceError):  # who waits is told what became of it
            follower.reach_end(timeout=deadline)
        with self._lock:
            if self._followers.get(pchannel) is follower:
                del self._followers[pchannel]
        follower.close()

    @contextmanager
    def hold(self, pchannel: str, *, deadline: float) -> Iterator[Follower | None]:
        """No follower of the PChannel starts inside. The one there is, once it is parked or has decided what the log holds.

        That is waited for `deadline` seconds at most; None where the PChannel is about to be followed anew.
        """
        with suppress(MillraceError):  # whoever holds it sees what became of it
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
                del self._followers[pchannel]  # its log was dropped; another may have been made since
            starting = self._starting.setdefault(pchannel, threading.Lock())
        with starting:
            follower = self._followers.get(pchannel)
            if follower is not None:
                return follower
            open_log = partial(self._service.open, pchannel)
            open_log()  # before anything else is looked up for a PChannel that is none
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
