"""Consumer groups at the log's server: members divide a group's lanes, and each lane has one holder and one position.

A lane is a VChannel, or a PChannel for a consumer of PChannels. A holder has a claim to a lane, a lease that each of
its calls renews. Meanwhile this process holds the lock of that position, so that no other process can. The claims of
one group never overlap: a lane has at most one holder that can move it.

Consumers hold lanes in two ways:

- A consumer with exclusive use takes all of its lanes, or gets GroupBusy. After a restart of the server, its next call
  takes the lease again unless another consumer has it. A move names the position that the holder left.
- A member calls `sync` about once a second. This is its heartbeat, and answers which lanes it shall have
  (:mod:`millrace.base.lane_division`), and which it holds. It gives up a lane with `leave` once it has moved the group,
  and only then, or when its lease is over, the lane is another's. A member that was silent for longer than its lease is
  fenced: a move without the claim gets GroupBusy, even if nobody else has the lane.

Moves marked `later` are written together every FLUSH_SECONDS, so the writes of a group do not grow with its members.
Everything is written before a lane changes hands.

At most MAX_LEASES leases of at most MAX_GROUPS groups are held. Calls of one group run one after the other; groups do
not wait for each other, so an unresponsive meta store delays only the calls of the group in question.
"""

from __future__ import annotations

import itertools
import json
import logging
import secrets
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, NamedTuple

from millrace.base.deadline import Deadline
from millrace.base.errors import (
    ChannelNotFound,
    GroupBusy,
    InvalidArgument,
    LogUnavailable,
    MillraceError,
    ServerFull,
)
from millrace.base.keyed_lock import KeyedLock
from millrace.base.lane_division import divide
from millrace.base.metrics import Metrics
from millrace.client.consume.membership import require_group, require_name
from millrace.client.consume.positions import FilePositions, PositionStore, lane_positions, start_of
from millrace.message.ids import split_channel
from millrace.node.append.task_window import TaskWindow
from millrace.rpc.wire import error_to_bytes

LEASE_SECONDS: Final = 15.0
"""Seconds that a lease lasts without a call."""
LONGEST_LEASE: Final = 300.0
FLUSH_SECONDS: Final = 0.2
"""Seconds between two writes of the moves that may be written later; longer with more than 10 groups."""
MAX_LEASES: Final = 16_384
"""Claims to lanes at one server."""
MAX_LANES: Final = 1024
"""Lanes of one member."""
MAX_MEMBERS: Final = 4096
MAX_GROUPS: Final = 10_000
MAX_HEARTBEATS: Final = 1024
"""Members in one call."""
HEARTBEATS_SECONDS: Final = 2.0
"""How long one call for several members may take; a slow store would end leases of members that wait for others."""
_BUSY_SECONDS: Final = 0.01
_LOOK: Final = 1.0
_VIEW_SECONDS: Final = 0.5
"""How long a look at a group's members and claims, which other servers may have, counts."""
_GROUP_FLUSH: Final = 0.02
_LISTED_GROUPS: Final = 8
"""A server with members of more groups looks at all groups of the store at once."""

_log: Final = logging.getLogger(__name__)


@dataclass(slots=True)
class _Place:
    holder: str
    until: float
    lease: float
    number: int = 0
    """Of the claim: another one each time that it is acquired. 0 if it was acquired at another server process."""


class _Mode(NamedTuple):
    """How members of a group consume: all in the same way."""

    queue: bool
    order: str

    @classmethod
    def of(cls, said: Mapping[str, Any]) -> _Mode:
        order = said.get("order") or ""
        if order not in ("", "key"):
            raise InvalidArgument(f"a queue's order is 'key' or none, not {str(order)[:100]!r}")
        return cls(said.get("queue") is True, order)


@dataclass(slots=True)
class _Member:
    lanes: frozenset[str]
    value: str
    """What the store records of it: JSON of lanes, client, since, queue and order."""
    lease: float
    until: float
    mode: _Mode


@dataclass(slots=True)
class _View:
    """Members and claims of one group, at all servers."""

    at: float
    wanted: dict[str, frozenset[str]]
    """By member the lanes that it reads."""
    claims: dict[str, str]
    """By lane its holder."""
    ticks: dict[str, int] | None = None
    """Positions on the lanes in `looked`, if a member asked for them."""
    looked: frozenset[str] = frozenset()


@dataclass(slots=True)
class _Group:
    """What this server knows of one group."""

    members: dict[str, _Member] = field(default_factory=dict)
    view: _View | None = None
    changed: int = 0
    """When this server last changed the group's members or claims, by a counter."""


@dataclass(frozen=True, slots=True)
class _Listing:
    """Members and claims of all groups, as the store had them."""

    at: float
    after: int
    """Every change of this server up to this one is in it."""
    version: object | None
    """Of the store; None if it has none."""
    members: Mapping[str, Mapping[str, str]]
    """By group and name."""
    claims: Mapping[str, Mapping[str, str]]
    """By group and lane."""


class QueueMove(NamedTuple):
    """What a work queue's dispatcher writes of one lane."""

    claim: int
    tick: int
    state: bytes


class ConsumerGroups:
    """Answers the actions ``append/group`` and its neighbours. Thread-safe."""

    def __init__(
        self,
        data_dir: Path,
        pchannels: Callable[[], Collection[str]],
        *,
        positions: Callable[[], PositionStore] | None = None,
        lease: float = LEASE_SECONDS,
        clock: Callable[[], float] = time.monotonic,
        metrics: Metrics | None = None,
    ) -> None:
        """Manage the groups of a deployment.

        `positions` opens the positions of the groups, on first use. None: the file in `data_dir`.
        """
        self._opened = positions or (lambda: FilePositions(data_dir / "coord"))
        self._pchannels = pchannels
        self._lease = lease
        self._clock = clock
        self._metrics = metrics
        self._turns = KeyedLock()
        self._guard = threading.Lock()
        """Guards the state that groups share. Only opening the store holds it for long."""
        self._places: dict[tuple[str, str], _Place] = {}
        self._lanes_of: dict[str, set[str]] = {}
        """The lanes in `_places`, by group."""
        self._groups: dict[str, _Group] = {}
        self._pending: dict[str, dict[str, int]] = {}
        """Moves by group and lane that are not written yet."""
        self._changes = itertools.count(1)
        self._last_change = 0
        self._listing: _Listing | None = None
        self._listing_turn = threading.Lock()
        self._positions: PositionStore | None = None
        self._closed = threading.Event()
        self._flusher: threading.Thread | None = None

    # --- calls --------------------------------------------------------------------------------------------------------

    def handle(self, request: dict[str, Any]) -> dict[str, Any]:
        """Answer one call of a holder: `{"group", "holder"}` and one of the following.

        - `"take": lane`: acquire the lease. The answer is `{"tick": position or null, "lease": seconds}`, and `"start"`
          if the position of the lane's PChannel is where to start.
        - `"move": {lane: [from, to]}`: move the group, all or nothing, durably. `from` may be null.
        - `"move": {lane: [claim, to]}` with `"strict": true`: the same under the claims of a member; with `"later":
          true` durable within FLUSH_SECONDS.
        - `"keep": [lane, ...]`: renew leases only.
        - `"leave": [lane, ...]`: release leases. With `"member": true`, leave the group too.
        - `"sync": {"lanes", "held": {lane: claim}, "client", "lease"?, "until"?}`: be a member that reads `lanes` and
          holds `held`. The answer is `{"held": {lane: [claim, position or null, start or null]}, "share": [lane, ...],
          "members": count, "lease": seconds, "reason": why it has no lane or "", "done": whether all other lanes have
          reached "until"}`. A claim with another number is a new one; only these have a position.

        Raises GroupBusy, ChannelNotFound, ServerFull, InvalidArgument.
        """
        group, holder = _group_of(request), require_name(request, "holder")
        with self._turn(group):
            match request:
                case {"take": str(lane)}:
                    self._require_mode(group, holder, _Mode(False, ""))
                    self._take(group, lane, holder)
                    ticks = self._positions_of(group, lane)
                    answer = {"tick": ticks.get(lane), "lease": self._lease}
                    start = start_of(lane, ticks)
                    return answer if start == ticks.get(lane) else answer | {"start": start}
                case {"move": dict(moves)}:
                    steps = {name: _step(step) for name, step in moves.items()}
                    if request.get("strict") is True:
                        self._move_claimed(group, holder, steps, later=request.get("later") is True)
                    else:
                        self._move(group, holder, steps)
                case {"keep": list(names)}:
                    for name in names:
                        self._take(group, str(name), holder)
                case {"leave": list(names)}:
                    whole = request.get("member") is True  # with lanes of an answer that the member never got
                    for name in self._of(group) if whole else names:
                        place = self._places.get((group, str(name)))
                        if place is not None and place.holder == holder:
                            self._give((group, str(name)))
                    if whole:
                        self._part(group, holder)
                case {"sync": dict(said)}:
                    return self._sync(group, holder, said)
                case _:
                    raise InvalidArgument("a call of a consumer group needs one of take, move, keep, leave and sync")
        return {}

    def heartbeats(self, members: object, require: Callable[[str], None]) -> list[dict[str, Any]]:
        """Answer calls with `sync` of several members, `[{"group", "holder", "sync", "move"?}, ...]`, in turn.

        What a member moves is durable within FLUSH_SECONDS; its answer has `"moved": true` if it was moved. Otherwise
        each answer is that of the call, or `{"error": error in wire form}`, so one member concerns no other. Members of
        groups that another call uses come last. After HEARTBEATS_SECONDS, the rest are to call again.
        `require` raises if the caller may not be a member of a group.
        """
        if not isinstance(members, list) or len(members) > MAX_HEARTBEATS:
            raise InvalidArgument(f"heartbeats need 'members', a list of at most {MAX_HEARTBEATS} calls")
        answers: list[dict[str, Any]] = [{} for _ in members]
        end = Deadline.after(HEARTBEATS_SECONDS)
        left = list(enumerate(members))
        while left:
            busy = []
            for place, member in left:
                try:
                    answer = self._heartbeat(member, require, end)
                except Exception as error:
                    answer = {"error": error_to_bytes(error).decode()}
                if answer is None:
                    busy.append((place, member))
                else:
                    answers[place] = answer
            if busy and len(busy) == len(left):
                end.pause(_BUSY_SECONDS)
            left = busy
        return answers

    def _heartbeat(self, member: object, require: Callable[[str], None], end: Deadline) -> dict[str, Any] | None:
        """Answer one call with `sync`; None if another call uses the group now."""
        if not isinstance(member, dict) or not isinstance(said := member.get("sync"), dict):
            raise InvalidArgument("a heartbeat is {'group', 'holder', 'sync'}")
        group, holder = _group_of(member), require_name(member, "holder")
        require(group)
        if end.expired():
            raise LogUnavailable("the server was busy with other groups: call again")
        moves = member.get("move") or {}
        if not isinstance(moves, dict):
            raise InvalidArgument("the moves of a heartbeat are {lane: [claim, to]}")
        steps = {name: _step(step) for name, step in moves.items()}
        with self._turn(group, blocking=False) as free:
            if not free:
                return None
            moved = False
            if steps:
                try:
                    self._move_claimed(group, holder, steps, later=True)
                    moved = True
                except GroupBusy as error:  # the answer says which lanes are lost
                    _log.debug("group %r: %s", group, error)
            answer = self._sync(group, holder, said)
            return answer | {"moved": True} if moved else answer

    def move_queue(self, group: str, holder: str, moves: Mapping[str, QueueMove]) -> set[str]:
        """Make the positions and states of a work queue's lanes durable, which the dispatcher `holder` has claims to.

        Returns the lanes that are not the holder's any more; nothing of theirs is written.
        Raises what the store raises.
        """
        with self._turn(group):
            self._loaded(group)
            lost, positions = set[str](), self._open()
            for lane, move in moves.items():
                position = positions.get(group, lane)
                known = self._holds(group, lane, holder, move.claim, dispatcher=True)
                if not known or (position is not None and position > move.tick):
                    lost.add(lane)
                    continue
                self._take(group, lane, holder, lease=self._member_lease(group, holder), adopted=True)
                self._places[group, lane].number = move.claim
            held = {lane: move for lane, move in moves.items() if lane not in lost}
            if not held:
                return lost
            try:
                self._move_states(group, held)
            except GroupBusy:
                for lane, move in held.items():
                    try:
                        self._move_states(group, {lane: move})
                    except GroupBusy as error:
                        _log.warning("group %r: %s is dispatched elsewhere: %s", group, lane, error)
                        self._lose((group, lane))
                        lost.add(lane)
            return lost

    def _move_states(self, group: str, moves: Mapping[str, QueueMove]) -> None:
        ticks = {lane: move.tick for lane, move in moves.items()}
        self._open().move(group, ticks, {lane: move.state for lane, move in moves.items()})
        if self._metrics is not None:
            self._metrics.consumer_position_commits_total.inc()

    def locked_until(self, group: str, lane: str) -> float:
        """Return until when no other server can have this one's claim to a lane, by the clock of boot time."""
        return self._open().locked_until(group, lane)

    def queue_states(self, group: str, lanes: Collection[str]) -> dict[str, bytes]:
        """Return the durable states of a work queue's lanes."""
        return self._open().queue_states(group, lanes)

    def drop(self, request: dict[str, Any]) -> None:
        """Delete `{"group"}` and its positions. Idempotent. Raises GroupBusy while a consumer uses it."""
        group = _group_of(request)
        with self._turn(group):
            self._require_empty(group)
            self._pending.pop(group, None)
            self._open().drop(group, self._pchannels())

    def reset(self, request: dict[str, Any]) -> dict[str, Any]:
        """Put `{"group", "ticks": {lane: tick or null}}` anywhere; null forgets a lane's position.

        A work queue stays one: of its tasks after these positions, none is done.
        The answer has the positions before, `{"before": {lane: tick}}`.
        Raises GroupBusy while a consumer uses the group, ChannelNotFound, InvalidArgument.
        """
        group, ticks = _group_of(request), request.get("ticks")
        if not isinstance(ticks, dict) or not ticks:
            raise InvalidArgument("a reset needs ticks: {lane: tick or null, ...}")
        wanted = {str(lane): None if tick is None else _step([None, tick])[1] for lane, tick in ticks.items()}
        with self._turn(group):
            for lane in wanted:
                self._require_channel(lane)
            self._require_empty(group)
            positions = self._open()
            before = positions.groups().get(group, {})
            states = {lane: TaskWindow(tick).encoded() for lane, tick in wanted.items() if tick is not None}
            positions.place(group, wanted, states if positions.queue_states(group) else None)
        return {"before": before}

    def describe(self) -> dict[str, Any]:
        """Return `{"groups": [{"group", "positions": {lane: tick}, "claims": {lane: holder}, "members": [...],
        "mode"}]}`.

        The mode is "stream" or "queue"; of a queue, the members are the servers that dispatch it. A member is
        `{"member", "client", "since", "wanted": count, "lanes": [lane, ...], "reason"}`.
        """
        positions = self._open()
        found = positions.groups()
        with self._guard:
            for group, moves in self._pending.items():
                found[group] = found.get(group, {}) | moves
        wanted: dict[str, dict[str, dict[str, Any]]] = {}
        claims: dict[str, dict[str, str]] = {}
        for (group, name), value in positions.members().items():
            wanted.setdefault(group, {})[name] = json.loads(value)
        claimed, queues = positions.claims(), positions.queues()
        abandoned = {group: positions.abandoned(group)[1] for group in {group for group, _ in claimed}}
        for (group, lane), holder in claimed.items():
            if holder in wanted.get(group, {}) or lane not in abandoned[group]:
                claims.setdefault(group, {})[lane] = holder
        views = []
        for group in sorted({*found, *wanted, *claims}):
            held, members = claims.get(group, {}), wanted.get(group, {})
            of = {name: frozenset(said["lanes"]) for name, said in members.items()}
            share = divide(of, held)
            views.append(
                {
                    "group": group,
                    "positions": lane_positions(found.get(group, {})),
                    "mode": "queue" if group in queues or any(m.get("queue") for m in members.values()) else "stream",
                    "claims": dict(sorted(held.items())),
                    "members": [
                        {
                            "member": name,
                            "client": said["client"],
                            "since": said["since"],
                            "wanted": len(of[name]),
                            "lanes": sorted(lane for lane, holder in held.items() if holder == name),
                            "reason": _reason(name, of, share, held),
                        }
                        for name, said in sorted(members.items(), key=lambda each: (each[1]["since"], each[0]))
                    ],
                }
            )
        return {"groups": views}

    def close(self) -> None:
        """Write what is to be written later, and release all leases."""
        self._closed.set()
        if self._flusher is not None:
            self._flusher.join()
        self._turns.wait_idle()
        for group in list(self._pending):
            try:
                self._flush(group)
            except MillraceError as error:
                _log.warning("the last moves of consumer group %r are not written: %s: %s", group, error.code, error)
        with self._guard:
            self._places.clear()
            self._lanes_of.clear()
            if self._positions is not None:
                self._positions.close()
                self._positions = None

    @contextmanager
    def _turn(self, group: str, *, blocking: bool = True) -> Iterator[bool]:
        with self._turns.acquire(group, blocking=blocking) as free:
            if self._closed.is_set():
                raise LogUnavailable("the log's server is stopping: call again")
            if not free:
                yield False
                return
            try:
                yield True
            finally:
                state = self._groups.get(group)
                if state is not None and not state.members:  # a refused call leaves nothing
                    with self._guard:
                        self._groups.pop(group, None)

    # --- members ------------------------------------------------------------------------------------------------------

    def _sync(self, group: str, holder: str, said: dict[str, Any]) -> dict[str, Any]:
        lanes, lease, held = _names_of(said, "lanes"), self._lease_of(said), said.get("held")
        if not isinstance(held, dict) or not all(isinstance(number, int) for number in held.values()):
            raise InvalidArgument("a sync needs 'held', the numbers of claims by lane")
        if not held.keys() <= lanes:
            raise InvalidArgument("a sync's 'held' has lanes that are not among its 'lanes'")
        state = self._loaded(group)
        self._join(group, state, holder, lanes, lease, str(said.get("client", ""))[:200], _Mode.of(said))
        self._release_expired(group)
        view = self._look(group, state, holder)
        for lane, number in held.items():
            if self._holds(group, lane, holder, number, dispatcher=state.members[holder].mode.queue):
                self._take(group, lane, holder, lease=lease, adopted=True)
                self._places[group, lane].number = number
        target = divide(view.wanted, view.claims)
        share = sorted(lane for lane, owner in target.items() if owner == holder)
        for lane in share:
            owner = view.claims.get(lane, holder)
            if owner == holder or owner not in view.wanted:
                try:
                    self._take(group, lane, holder, lease=lease)
                    view.claims[lane] = holder
                except GroupBusy as error:  # of another server, or of a consumer with exclusive use
                    _log.debug("group %r: %s", group, error)
                    state.view = None
        mine = {lane: place.number for lane, place in sorted(self._of(group).items()) if place.holder == holder}
        ticks = self._positions_of(group, *(lane for lane, claim in mine.items() if held.get(lane) != claim))
        until, done = said.get("until"), False
        if isinstance(until, int):
            others = lanes - mine.keys()
            if view.ticks is None or not others <= view.looked:
                view.ticks, view.looked = self._positions_of(group, *lanes), lanes
            starts = [start_of(lane, view.ticks) for lane in others]
            done = all(tick is not None and tick >= until for tick in starts)
        return {
            "held": {lane: [number, ticks.get(lane), start_of(lane, ticks)] for lane, number in mine.items()},
            "share": share,
            "members": len(view.wanted),
            "lease": lease,
            "reason": "" if mine else _reason(holder, view.wanted, target, view.claims),
            "done": done,
        }

    def _lease_of(self, said: dict[str, Any]) -> float:
        lease = said.get("lease")
        if lease is None:
            return self._lease
        if not isinstance(lease, (int, float)) or not 0.5 <= lease <= LONGEST_LEASE:
            raise InvalidArgument(f"a member's lease lasts 0.5 to {LONGEST_LEASE:.0f} s, not {lease!r}")
        return float(lease)

    def _join(
        self, group: str, state: _Group, name: str, lanes: frozenset[str], lease: float, client: str, mode: _Mode
    ) -> None:
        now, there = self._clock(), state.members.get(name)
        recorded = state.view is None or now - state.view.at >= _VIEW_SECONDS or name in state.view.wanted
        if there is not None and there.lanes == lanes and there.mode == mode and recorded:
            there.lease, there.until = lease, now + lease
            return
        for lane in lanes:
            self._require_channel(lane)
        if there is None and sum(len(each.members) for each in list(self._groups.values())) >= MAX_MEMBERS:
            raise ServerFull(
                f"the server has {MAX_MEMBERS} members of consumer groups, the limit: close idle consumers"
            )
        if there is None or there.mode != mode:
            self._require_mode(group, name, mode)
        said = {"lanes": sorted(lanes), "client": client, "since": round(time.time(), 3), **mode._asdict()}
        value = json.dumps(said)
        self._open().set_member(group, name, value)
        state.members[name] = _Member(lanes, value, lease, now + lease, mode)
        self._changed(group)
        self._count(group, state)

    def _require_mode(self, group: str, name: str, mode: _Mode) -> None:
        """Raise InvalidArgument if the others of a group consume in another way than this member will."""
        positions = self._open()
        others = [_Mode.of(json.loads(value)) for (_, of), value in positions.members(group).items() if of != name]
        if not mode.queue and (positions.queue_states(group) or any(other.queue for other in others)):
            raise InvalidArgument(
                f'group {group!r} is a work queue: consume it with mode="queue", use another group, or drop it first'
            )
        if mode.queue and not all(other.queue for other in others):
            raise InvalidArgument(
                f"consumers of group {group!r} read it as a stream: close them, or use another group for the queue"
            )
        if wrong := [other.order for other in others if other.order != mode.order]:
            raise InvalidArgument(
                f"consumers of queue {group!r} at another server have the order {wrong[0] or 'none'!r}, not"
                f" {mode.order or 'none'!r}: use the same everywhere"
            )

    def _part(self, group: str, name: str) -> None:
        state = self._groups.get(group)
        if state is not None and name in state.members:
            self._open().set_member(group, name, None)
            del state.members[name]
            self._changed(group)
            self._count(group, state)
            if not state.members:
                with self._guard:
                    self._groups.pop(group, None)

    def _loaded(self, group: str) -> _Group:
        """Return what is known of a group. Members and claims of a process that was killed count for one lease more."""
        state = self._groups.get(group)
        if state is None:
            with self._guard:
                self._last_change = next(self._changes)
            state = _Group(changed=self._last_change)
            now = self._clock()
            members, claims = self._open().abandoned(group)
            for name, value in members.items():
                said = json.loads(value)
                lanes = frozenset(said["lanes"])
                state.members[name] = _Member(lanes, value, self._lease, now + self._lease, _Mode.of(said))
            for lane, holder in claims.items():
                if holder in members and (group, lane) not in self._places:
                    try:
                        self._take(group, lane, holder, adopted=True)
                    except GroupBusy:
                        pass  # a consumer with exclusive use was faster
            with self._guard:
                self._groups[group] = state
        return state

    def _look(self, group: str, state: _Group, holder: str) -> _View:
        """Return the members and claims of a group at all servers, at most _VIEW_SECONDS old."""
        now, view = self._clock(), state.view
        if view is None or now - view.at >= _VIEW_SECONDS or holder not in view.wanted:
            positions = self._open()
            members, claims = self._listed(group, state)
            if holder not in members:  # the store's lease ended meanwhile
                positions.set_member(group, holder, state.members[holder].value)
                self._changed(group)
                members[holder] = state.members[holder].value
            wanted = {name: self._lanes_in(state, name, value) for name, value in members.items()}
            for lane, place in self._of(group).items():
                if claims.get(lane) != place.holder:  # the store's lease ended, and perhaps another server has it
                    self._lose((group, lane))
            view = state.view = _View(now, wanted, claims)
        return view

    @staticmethod
    def _lanes_in(state: _Group, name: str, value: str) -> frozenset[str]:
        known = state.members.get(name)
        return known.lanes if known is not None and known.value == value else frozenset(json.loads(value)["lanes"])

    def _listed(self, group: str, state: _Group) -> tuple[dict[str, str], dict[str, str]]:
        """Return what the store has of a group: members by name, and holders by lane.

        A server of many groups looks at all of them together, so that idle groups do not burden the store.
        """
        positions = self._open()
        listing = self._listing_now() if len(self._groups) > _LISTED_GROUPS else None
        if listing is None or state.changed > listing.after:
            return (
                {name: value for (_, name), value in positions.members(group).items()},
                {lane: name for (_, lane), name in positions.claims(group).items()},
            )
        return dict(listing.members.get(group, {})), dict(listing.claims.get(group, {}))

    def _listing_now(self) -> _Listing:
        """Return the members and claims of all groups, at most _VIEW_SECONDS old."""
        with self._listing_turn:
            listing = self._listing
            if listing is None or self._clock() - listing.at >= _VIEW_SECONDS:
                positions, at, after = self._open(), self._clock(), self._last_change
                version = positions.version()
                if listing is not None and version is not None and version == listing.version:
                    self._listing = replace(listing, at=at)
                    return self._listing
                members: dict[str, dict[str, str]] = {}
                claims: dict[str, dict[str, str]] = {}
                for (of, name), value in positions.members().items():
                    members.setdefault(of, {})[name] = value
                for (of, lane), name in positions.claims().items():
                    claims.setdefault(of, {})[lane] = name
                listing = self._listing = _Listing(at, after, version, members, claims)
            return listing

    def _release_expired(self, group: str) -> None:
        now, state = self._clock(), self._groups.get(group)
        for lane, place in self._of(group).items():
            if place.until <= now:
                self._give((group, lane))
        for name, member in list(state.members.items() if state is not None else ()):
            if member.until <= now:
                self._part(group, name)

    def _count(self, group: str, state: _Group) -> None:
        if self._metrics is not None and state.members:
            self._metrics.consumer_group_members.labels(group).set(len(state.members))
        elif self._metrics is not None:
            with suppress(KeyError):
                self._metrics.consumer_group_members.remove(group)

    # --- claims -------------------------------------------------------------------------------------------------------

    def _of(self, group: str) -> dict[str, _Place]:
        with self._guard:
            return {lane: self._places[group, lane] for lane in self._lanes_of.get(group, ())}

    def _holds(self, group: str, lane: str, holder: str, number: int, *, dispatcher: bool = False) -> bool:
        """Return whether the holder has this claim, from this or another server, and no other holder since.

        A dispatcher is a part of this server, which gave up a claim that it does not know. The store's claim may be of
        a later attempt whose answer was lost, and another server may have moved the lane in between.
        """
        place = self._places.get((group, lane))
        if place is not None:
            return place.holder == holder and place.until > self._clock() and place.number in (0, number)
        if dispatcher:
            return False
        return self._open().claims(group).get((group, lane)) == holder

    def _require_channel(self, lane: str) -> None:
        if split_channel(lane)[0] not in self._pchannels():
            raise ChannelNotFound(f"there is no PChannel {split_channel(lane)[0][:100]!r}")

    def _take(self, group: str, lane: str, holder: str, *, lease: float | None = None, adopted: bool = False) -> None:
        """Acquire or renew the holder's lease. `adopted`: another server process gave the claim, and it still holds."""
        seconds = self._lease if lease is None else lease
        place = self._places.get((group, lane))
        if place is not None and place.holder != holder:
            if place.until > self._clock():
                raise _busy(group, lane)
            self._give((group, lane))
            place = None
        if place is not None:
            place.until, place.lease = self._clock() + seconds, seconds
            return
        self._require_channel(lane)
        now = self._clock()
        for other, its in self._of(group).items():
            whole = split_channel(other)[0] == lane or split_channel(lane)[0] == other
            if whole and its.holder != holder and its.until > now:
                raise _busy(group, other)
        positions = self._open()
        first = not self._of(group) and positions.get(group, lane) is None
        if first and group not in (groups := positions.groups()) and len(groups) >= MAX_GROUPS:
            raise InvalidArgument(
                f"there are {MAX_GROUPS} consumer groups, the limit: use one of them, or drop some "
                "(Database.drop_group)"
            )
        with self._guard:
            if len(self._places) >= MAX_LEASES:
                raise ServerFull(
                    f"the server holds {MAX_LEASES} leases of consumer groups, the limit: close idle consumers"
                )
            self._places[group, lane] = _Place(
                holder, now + seconds, seconds, 0 if adopted else 1 + secrets.randbits(48)
            )
            self._lanes_of.setdefault(group, set()).add(lane)
        try:
            positions.lock(group, lane, holder=holder)
        except BaseException:
            self._forget((group, lane))
            raise
        self._changed(group)

    def _require_empty(self, group: str) -> None:
        """Raise GroupBusy while a consumer uses the group; release what expired consumers left."""
        self._loaded(group)
        self._release_expired(group)
        for lane in self._of(group):
            raise GroupBusy(f"a consumer reads {lane} for group {group!r}: close it first")
        if members := self._open().members(group):
            raise GroupBusy(f"group {group!r} has {len(members)} members: close them first")
        with self._guard:
            self._groups.pop(group, None)

    def _give(self, place: tuple[str, str]) -> None:
        self._flush(place[0])
        self._forget(place)
        self._open().unlock(*place)
        self._changed(place[0])

    def _end_claim(self, group: str, lane: str, holder: str) -> None:
        """Release a claim, whichever server it is from."""
        self._give((group, lane))
        positions = self._open()
        if positions.claims(group).get((group, lane)) == holder:
            positions.lock(group, lane, holder=holder)
            positions.unlock(group, lane)

    def _lose(self, place: tuple[str, str]) -> None:
        """Forget a claim that another server had meanwhile, and its moves that are not written yet.

        A move acquires it again to see so: under this process's lease, which lives, it would keep the lane from others.
        """
        group, lost = place
        with self._guard:  # first: a move that is tried again under a new claim takes the group back
            moves = {lane: tick for lane, tick in self._pending.pop(group, {}).items() if lane != lost}
            if moves:
                self._pending[group] = moves
        self._forget(place)
        self._open().unlock(*place)
        self._changed(place[0])

    def _forget(self, place: tuple[str, str]) -> None:
        group, lane = place
        with self._guard:
            if self._places.pop(place, None) is not None:
                self._lanes_of[group].discard(lane)
                if not self._lanes_of[group]:
                    del self._lanes_of[group]

    def _changed(self, group: str) -> None:
        """Note that this server has changed the members or claims of a group in the store."""
        with self._guard:
            self._last_change = next(self._changes)
            if (state := self._groups.get(group)) is not None:
                state.view, state.changed = None, self._last_change

    # --- positions ----------------------------------------------------------------------------------------------------

    def _positions_of(self, group: str, *lanes: str) -> dict[str, int]:
        """Return the positions of lanes and their PChannels, with moves that are not written yet."""
        pending, positions = self._pending.get(group, {}), self._open()
        found = {}
        for name in {*lanes, *(split_channel(lane)[0] for lane in lanes)}:
            tick = pending.get(name)
            tick = positions.get(group, name) if tick is None else tick
            if tick is not None:
                found[name] = tick
        return found

    def _move(self, group: str, holder: str, moves: Mapping[str, tuple[int | None, int]]) -> None:
        for lane in moves:
            self._take(group, lane, holder)
        self._flush(group)
        positions = self._open()
        for lane, (before, to) in moves.items():
            position = positions.get(group, lane)
            if position not in (before, to):
                raise _moved(group, lane, position)
        positions.move(group, {lane: to for lane, (_, to) in moves.items()})

    def _move_claimed(
        self, group: str, holder: str, moves: Mapping[str, tuple[int | None, int]], *, later: bool
    ) -> None:
        """Move lanes that the holder has a claim to, forward."""
        self._loaded(group)
        for lane in moves:
            if not self._holds(group, lane, holder, moves[lane][0] or 0):
                raise GroupBusy(
                    f"this consumer of group {group!r} was silent for longer than its lease and has lost {lane}:"
                    " what it has not acknowledged is delivered again"
                )
            self._take(group, lane, holder, lease=self._member_lease(group, holder), adopted=True)
            self._places[group, lane].number = moves[lane][0] or 0
        current = self._positions_of(group, *moves)
        if passed := [lane for lane, (_, to) in moves.items() if current.get(lane, to) > to]:
            # Another member had the lane, and this one missed it: the store's claim names a holder and has no number.
            # Under the old claim it could neither move the lane nor give it up, so its next claim is a new one.
            for lane in passed:
                self._end_claim(group, lane, holder)
            raise _moved(group, passed[0], current[passed[0]])
        ticks = {lane: to for lane, (_, to) in moves.items()}
        with self._guard:
            self._pending[group] = self._pending.get(group, {}) | ticks
            if self._flusher is None:
                self._flusher = threading.Thread(target=self._flush_often, name="group-positions", daemon=True)
                self._flusher.start()
        if not later and (lost := self._flush(group) & moves.keys()):
            raise _busy(group, min(lost))

    def _member_lease(self, group: str, holder: str) -> float:
        state = self._groups.get(group)
        member = None if state is None else state.members.get(holder)
        return self._lease if member is None else member.lease

    def _flush(self, group: str) -> set[str]:
        """Write the moves of a group that are not written yet. The caller has the group's turn.

        Returns the lanes that another server has taken, which are not moved.
        """
        ticks, lost = self._pending.get(group), set[str]()
        if not ticks:
            return lost
        try:
            self._open().move(group, ticks)
        except GroupBusy:  # another server has taken some of the lanes
            for lane, tick in ticks.items():
                try:
                    self._open().move(group, {lane: tick})
                except GroupBusy as error:
                    _log.warning("a move of group %r is dropped, its lane is another's: %s", group, error)
                    self._lose((group, lane))
                    lost.add(lane)
        if self._metrics is not None:
            self._metrics.consumer_position_commits_total.inc()
        with self._guard:
            self._pending.pop(group, None)
        return lost

    def _flush_often(self) -> None:
        pause = FLUSH_SECONDS
        while not self._closed.wait(pause):
            pause = max(FLUSH_SECONDS, _GROUP_FLUSH * self.flush())

    def flush(self) -> int:
        """Write the moves that may be written later; return the number of groups that had some."""
        with self._guard:
            groups = list(self._pending)
        for group in groups:
            with self._turns.acquire(group, blocking=False) as free:  # its own calls write otherwise
                if free:
                    try:
                        self._flush(group)
                    except MillraceError as error:
                        _log.warning("moves of consumer group %r are written later: %s: %s", group, error.code, error)
        return len(groups)

    # --- the store ----------------------------------------------------------------------------------------------------

    def _open(self) -> PositionStore:
        with self._guard:
            if self._positions is None:
                self._positions = self._opened()
                threading.Thread(target=self._watch, name="group-leases", daemon=True).start()
            return self._positions

    def _watch(self) -> None:
        while not self._closed.wait(min(_LOOK, self._lease)):
            self.release_silent()

    def release_silent(self) -> None:
        """Release the expired leases: a consumer of another process knows nothing of leases."""
        now = self._clock()
        with self._guard:
            silent = {group for (group, _), place in self._places.items() if place.until <= now}
            groups = list(self._groups.items())
        silent |= {group for group, state in groups if any(m.until <= now for m in list(state.members.values()))}
        for group in silent:
            # If the group is busy, the next pass retries: no group waits for another.
            with self._turns.acquire(group, blocking=False) as free:
                if free and not self._closed.is_set():
                    try:
                        self._release_expired(group)
                    except MillraceError as error:
                        _log.warning("consumer group %r: an expired lease is kept: %s", group, error)


def _reason(
    name: str, wanted: Mapping[str, Collection[str]], share: Mapping[str, str], claims: Mapping[str, str]
) -> str:
    """Return why a member has no lane, "" if it has one."""
    if name in claims.values():
        return ""
    if waits := sorted(lane for lane, owner in share.items() if owner == name):
        holders = {claims[lane] for lane in waits if lane in claims}
        if holders - wanted.keys():
            return f"waits for {len(waits)} lanes that a consumer outside the division has"
        return f"waits for {len(waits)} lanes that other members give up"
    rivals = sum(bool(set(lanes) & set(wanted.get(name, ()))) for lanes in wanted.values())
    return f"{rivals} members read {len(wanted.get(name, ()))} lanes: this one is in reserve"


def _busy(group: str, lane: str) -> GroupBusy:
    return GroupBusy(f"another consumer of group {group!r} reads {lane}: stop it, or give this one a group of its own")


def _moved(group: str, lane: str, position: int | None) -> GroupBusy:
    return GroupBusy(
        f"another consumer moved group {group!r} on {lane} to tick {position}: it owns what this consumer has not"
        " acknowledged; stop one of the two"
    )


def _group_of(request: dict[str, Any]) -> str:
    return require_group(request.get("group"))


def _names_of(said: dict[str, Any], key: str) -> frozenset[str]:
    names = said.get(key)
    if not isinstance(names, list) or len(names) > MAX_LANES or not all(isinstance(name, str) for name in names):
        raise InvalidArgument(f"a sync needs {key!r}, a list of at most {MAX_LANES} lanes")
    return frozenset(names)


def _step(value: object) -> tuple[int | None, int]:
    match value:
        case [None | int() as before, int(to)] if 0 <= to < 1 << 63:
            return before, to
        case _:
            raise InvalidArgument(f"{value!r} is not a move: use [from, to]")
