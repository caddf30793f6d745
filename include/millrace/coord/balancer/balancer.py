"""The balancer's loop: reads live nodes and records, asks the policy, and carries out its moves by orders to nodes.

A role changes owner in steps that any later leader can repeat: the record becomes ASSIGNING with the next term and
lists the former owners; each of those releases the role or is gone; the new owner opens it; the record becomes
ASSIGNED. An owner that is alive but unreachable is evicted after a while: its session is deleted, and its lease
waited for. So no role waits for ever for a node that only the coordinator cannot reach.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final, Protocol

from millrace.base.errors import MetaAmbiguous, MillraceError, NotLeader, OrderIgnored, SessionEnded
from millrace.coord.balancer.policy import AssignmentView, ChannelView, PlannedMove, Policy
from millrace.coord.channels.manager import ChannelManager
from millrace.coord.channels.record import AssignmentState, ChannelRecord, Owner
from millrace.coord.clock import Clock
from millrace.coord.cluster_level import NEWEST, cluster_level, known_level
from millrace.coord.control import ControlState, read_control_state
from millrace.coord.leadership import Leadership
from millrace.coord.lease import CLOCK_DRIFT
from millrace.coord.session import NODE_PREFIX, ROLES, SESSION_SECONDS, NodeInfo
from millrace.meta.store import Delete, Put

EVICTED_PREFIX: Final = "putout/"
"""Prefix of evicted sessions, until their leases have certainly expired."""
REPORT_SECONDS: Final = 10.0
"""Seconds between two log lines about a node that carries out no orders."""

_log = logging.getLogger(__name__)


class Orders(Protocol):
    """Orders to nodes. An order that raises may have been carried out."""

    def assign(self, owner: Owner, pchannel: str, role: str) -> None: ...

    def remove(self, owner: Owner, pchannel: str, role: str) -> None: ...


@dataclass(frozen=True, slots=True)
class ChannelStats:
    """Statistics of a PChannel."""

    vchannels: int = 0
    collections: frozenset[int] = frozenset()
    rows_per_second: float = 0.0
    bytes_per_second: float = 0.0
    recovery_lag: float = 0.0
    """Seconds that its owner lags behind the log."""


@dataclass(frozen=True, slots=True)
class RebalanceLimits:
    """Limits on moves that only improve balance."""

    allow_rebalance: bool = True
    min_interval: float = 300.0
    """Seconds between two moves of one PChannel."""
    max_recovery_lag: float = 1.0
    max_moves: int = 3
    """Moves per round."""
    refusal_seconds: float = 5.0
    """Seconds for which a session that refused a role is not asked again, if there are others."""
    eviction_seconds: float = 15.0
    """Seconds for which a live owner may fail to release a role before it is evicted."""


@dataclass(slots=True)
class HandoverProgress:
    """A leader's memory of a role in transition: since when, and which sessions refused it."""

    term: int = 0
    since: float = 0.0
    moved_at: float = float("-inf")
    refused: dict[str, float] = field(default_factory=dict)


class Balancer:
    """The balancer of one leader in one epoch. A new epoch needs a new balancer."""

    def __init__(
        self,
        leadership: Leadership,
        clock: Clock,
        orders: Orders,
        policy: Policy,
        *,
        pchannels: Callable[[], Sequence[str]],
        run_all: Callable[[Sequence[Callable[[], None]]], None],
        stats: Callable[[], Mapping[str, ChannelStats]] = dict,
        limits: RebalanceLimits | None = None,
        session_seconds: float = SESSION_SECONDS,
        roles: Sequence[str] = ROLES,
    ) -> None:
        """`pchannels` returns the current PChannels. `run_all` runs calls concurrently and returns when all have
        returned.
        `session_seconds`: the longest time that a session lasts without renewal.
        """
        self._leadership = leadership
        self._epoch = leadership.epoch
        self._clock = clock
        self._orders = orders
        self._policy = policy
        self._pchannels = pchannels
        self._run_all = run_all
        self._stats = stats
        self.limits = limits or RebalanceLimits()
        self._session_seconds = session_seconds
        self._roles = roles
        self._progress: dict[str, HandoverProgress] = {}
        self._reported: dict[str, float] = {}
        """When an order to a session was last reported as failed."""
        self._levels: dict[str, int] = {}
        """Newest level that the build of each session's node knows."""
        self._outdated: frozenset[str] = frozenset()
        """Sessions whose build does not know the cluster's level: they are given nothing."""
        self._put_out_since: dict[str, float] = {}
        self._wanted = ControlState(frozenset(), frozen=False)
        self._rests: dict[str, AssignmentView] = {}
        """For each role, the view for which the policy, a pure function, returned no moves."""
        self._drains: dict[str, tuple[frozenset[str], list[PlannedMove]]] = {}
        """For each role, the sessions that could get it when its drains were planned, and those left for later rounds.
        """
        self._loaded = False
        self.manager = ChannelManager(leadership, self._epoch)
        self.nodes: dict[str, NodeInfo] = {}
        self.settings: object = None
        """The settings that limits and policy were last taken from."""

    def use_policy(self, policy: Policy) -> None:
        """Plan by another policy from the next round on."""
        if policy != self._policy:
            self._policy = policy
            self._rests.clear()  # that the former policy had no moves says nothing of this one
            self._drains.clear()

    def step(self) -> None:
        """Run one round.

        Raises NotLeader if another coordinator leads. Other failures are retried in the next round.
        """
        if not self._loaded:
            self.manager.load()
            self._loaded = True
        # First: a record whose write got no answer must be known before anything is decided on it.
        self.manager.rewrite_unsure()
        self.manager.add(self._pchannels(), self._roles)
        # Before planning, in the same round: a role must not go to a session that has ended.
        self._see_nodes()
        self.manager.change_all(
            [
                record.mark_unavailable("lost", self._clock.wall())
                for record in self.manager.records.values()
                if record.owner is not None and record.owner.session not in self.nodes
            ]
        )
        for role in self._roles:
            self._plan(role)
        waiting = [key for key, record in self.manager.records.items() if record.state is AssignmentState.ASSIGNING]
        failures: list[BaseException] = []
        self._run_all([partial(self._attempt, key, failures) for key in waiting])
        for failure in failures:
            raise failure

    def _attempt(self, key: str, failures: list[BaseException]) -> None:
        try:
            self._hand_over(key)
        except NotLeader as error:
            failures.append(error)
        except MillraceError:
            pass  # an error of the store or a node: retried in the next round

    # -- nodes --------------------------------------------------------------------------------------------------------

    def _see_nodes(self) -> None:
        listed = self._leadership.store.list(NODE_PREFIX)
        self.nodes = {entry.key.removeprefix(NODE_PREFIX): NodeInfo.decode(entry.value) for entry in listed.entries}
        self._see_levels()
        self._wanted = read_control_state(self._leadership.store)
        now = self._clock.monotonic()
        there = {
            entry.key.removeprefix(EVICTED_PREFIX) for entry in self._leadership.store.list(EVICTED_PREFIX).entries
        }
        self._put_out_since = {session: self._put_out_since.get(session, now) for session in sorted(there)}
        for session, since in list(self._put_out_since.items()):
            # By then the lease is over by the node's own clock too, however much the clocks drift apart.
            if now >= since + self._session_seconds * (1 + CLOCK_DRIFT):
                self._leadership.commit(self._epoch, [Delete(EVICTED_PREFIX + session)])
                del self._put_out_since[session]

    def _see_levels(self) -> None:
        store = self._leadership.store
        known = {session: level for session, level in self._levels.items() if session in self.nodes}
        self._levels = known | {each: known_level(store, each) for each in self.nodes.keys() - known.keys()}
        low = {session: level for session, level in self._levels.items() if level < NEWEST}
        outdated: frozenset[str] = frozenset()
        if low:
            least = cluster_level(store)
            outdated = frozenset(session for session, level in low.items() if level < least)
        for session in sorted(outdated - self._outdated):
            _log.warning("%s runs a build older than the cluster's level and gets no channels: upgrade it", session)
        self._outdated = outdated

    def _has_ended(self, session: str) -> bool:
        """Return whether a session has ended: neither its key nor its eviction record exists any longer."""
        store = self._leadership.store
        return store.get(NODE_PREFIX + session) is None and store.get(EVICTED_PREFIX + session) is None

    def _evict(self, session: str) -> None:
        """Evict a session. Its node learns of it at its next renewal, at the latest when its lease would have
        expired.
        """
        self._leadership.commit(self._epoch, [Delete(NODE_PREFIX + session), Put(EVICTED_PREFIX + session, b"")])

    # -- planning -----------------------------------------------------------------------------------------------------

    def _plan(self, role: str) -> None:
        now, stats = self._clock.monotonic(), self._stats()
        able = {
            name: info
            for name, info in self.nodes.items()
            if role in info.roles and info.name not in self._wanted.drains and name not in self._outdated
        }
        records = {record.pchannel: record for record in self.manager.records.values() if record.role == role}
        channels = tuple(self._channel(record, stats, now) for record in records.values())
        owners = {each.pchannel: each.owner for each in channels}
        wanted = []
        for move in self._moves(role, able, channels):
            record = records[move.pchannel]
            to = self._instead(record, move.to, able, now)
            if (
                record.owner is not None
                and to == record.owner.session
                and record.state is not AssignmentState.UNAVAILABLE
            ):
                continue
            cause = record.cause if record.state is AssignmentState.UNAVAILABLE else move.cause
            wanted.append(
                record.begin_assignment(
                    to, able[to].address, cause, self._clock.wall(), client_address=able[to].client_address
                )
            )
            if owners[move.pchannel] in able:  # for balance, whatever a package's policy calls it
                self._progress.setdefault(record.key, HandoverProgress()).moved_at = now
        try:
            self.manager.change_all(wanted)
        finally:
            for record in wanted:
                progress = self._progress.setdefault(record.key, HandoverProgress())
                # In `finally`: a write without an answer may have begun the handover, and its deadline runs from now.
                progress.term, progress.since = self.manager.records[record.key].term, now

    def _moves(
        self, role: str, able: Mapping[str, NodeInfo], channels: tuple[ChannelView, ...]
    ) -> Sequence[PlannedMove]:
        """Return this round's moves.

        All drains of a node are planned at once and made over the next rounds: an evaluation costs as much as all
        channels.
        """
        guards = self.limits
        leaving = {each.pchannel for each in channels if each.owner is not None and each.owner not in able}
        planned_for, queue = self._drains.pop(role, (frozenset(), []))
        queue = [move for move in queue if move.pchannel in leaving]
        moves: Sequence[PlannedMove] = ()
        if not queue or planned_for != able.keys() or any(each.owner is None for each in channels):
            view = AssignmentView(
                tuple(able),
                channels,
                guards.allow_rebalance and not self._wanted.frozen,
                max_moves=max(guards.max_moves, len(leaving)),
            )
            # The policy is pure: the same view gives the same answer, and a round at rest costs nothing.
            if view == self._rests.get(role):
                return ()
            moves = self._policy(view)
            if not moves:
                self._rests[role] = view
            queue = [move for move in moves if move.pchannel in leaving]
        self._drains[role] = frozenset(able), queue[guards.max_moves :]
        return [*(move for move in moves if move.pchannel not in leaving), *queue[: guards.max_moves]]

    def _channel(self, record: ChannelRecord, stats: Mapping[str, ChannelStats], now: float) -> ChannelView:
        progress = self._progress.setdefault(record.key, HandoverProgress())
        known = stats.get(record.pchannel, ChannelStats())
        owner = None if record.owner is None else record.owner.session
        if owner is not None and record.state is AssignmentState.ASSIGNING and owner in progress.refused:
            owner = None  # the session refused the role: place it again
        return ChannelView(
            record.pchannel,
            owner,
            known.vchannels,
            known.collections,
            movable=record.state is AssignmentState.ASSIGNED
            and now >= progress.moved_at + self.limits.min_interval
            and known.recovery_lag <= self.limits.max_recovery_lag,
        )

    def _instead(self, record: ChannelRecord, to: str, able: Mapping[str, NodeInfo], now: float) -> str:
        """Return another session if `to` recently refused the role and there is one."""
        refused = self._progress.setdefault(record.key, HandoverProgress()).refused
        for session, at in list(refused.items()):
            if now >= at + self.limits.refusal_seconds or session not in self.nodes:
                del refused[session]
        if to not in refused:
            return to
        return min((session for session in able if session not in refused), default=to)

    # -- handing over -------------------------------------------------------------------------------------------------

    def _hand_over(self, key: str) -> None:
        record = self.manager.records[key]
        assert record.owner is not None
        # All earlier owners first: the new one is asked only once nobody else may still write.
        let_go = {owner.session for owner in record.history if self._lets_go(record, owner)}
        if let_go:
            record = self.manager.change(record.without_history(let_go))
        if record.history or record.owner is None or record.state is not AssignmentState.ASSIGNING:
            return
        try:
            self._orders.assign(record.owner, record.pchannel, record.role)
        except (OrderIgnored, SessionEnded):
            self._progress[key].refused[record.owner.session] = self._clock.monotonic()
            return
        except MillraceError as error:
            self._report(record.owner.session, f"take {record.pchannel} ({record.role})", error)
            progress = self._progress.setdefault(key, HandoverProgress())
            if progress.term != record.term:
                progress.term, progress.since = record.term, self._clock.monotonic()
            elif self._clock.monotonic() >= progress.since + self.limits.eviction_seconds / 2:
                progress.refused[record.owner.session] = self._clock.monotonic()
            return
        self.manager.change(record.complete_assignment(self._clock.wall()))

    def _report(self, session: str, what: str, error: MillraceError) -> None:
        """Log an order that failed, and is repeated: of each node, one now and then."""
        now = self._clock.monotonic()
        if now >= self._reported.get(session, -math.inf) + REPORT_SECONDS:
            self._reported = {each: at for each, at in self._reported.items() if each in self.nodes} | {session: now}
            _log.warning("%s did not %s and will be asked again: %s: %s", session, what, error.code, error)

    def _lets_go(self, record: ChannelRecord, owner: Owner) -> bool:
        if self._has_ended(owner.session):
            return True
        try:
            self._orders.remove(owner, record.pchannel, record.role)
            return True
        except MillraceError as error:
            self._report(owner.session, f"let go of {record.pchannel} ({record.role})", error)
            progress = self._progress.setdefault(record.key, HandoverProgress())
            now = self._clock.monotonic()
            if progress.term != record.term:
                progress.term, progress.since = record.term, now
            if owner.session in self.nodes and now >= progress.since + self.limits.eviction_seconds:
                try:
                    self._evict(owner.session)
                except MetaAmbiguous:
                    pass  # read in the next round
            return False
