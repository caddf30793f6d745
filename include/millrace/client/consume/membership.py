"""A consumer's part of a group: as a member that divides the lanes with others, or with exclusive use.

The server divides the group's lanes among its members (millrace.node.append.consumer_groups). A member asks it about
once a second. Its claims last for a lease after the last answer, by its own clock; a member that was suspended or cut
off for longer acts on none of them until the server has answered again.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import quote

from millrace.base.errors import GroupBusy, InvalidArgument, MillraceError

MAX_GROUP_NAME: Final = 150
"""Maximum length of a group's URL-quoted name, which becomes part of a file name."""
HEARTBEAT_SECONDS: Final = 1.0
"""Seconds between two calls of a member; less if its lease is short."""
SETTLING_SECONDS: Final = 0.25
"""The same while lanes change hands."""
CLOCK_DRIFT: Final = 0.05
"""Relative drift of two clocks that a lease allows for."""

_LONGEST_NAME: Final = 1000

_log: Final = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class HeldLane:
    """A lane that a member has a claim to."""

    claim: int
    """Number of the claim; another one if the claim was lost in between."""
    tick: int | None
    """Position of the group on the lane if the claim is new; None if it never moved there."""
    start: int | None
    """Where to start: `tick`, or the position of the lane's PChannel."""


@dataclass(frozen=True, slots=True)
class GroupShare:
    """A member's part of its group."""

    held: Mapping[str, HeldLane]
    share: frozenset[str]
    """Lanes that it shall have. It gives up the others that it holds."""
    members: int
    reason: str
    """Why the member has no lane, "" if it has one."""
    done: bool
    """Whether the group has reached the requested tick on all lanes that this member does not hold."""


def require_group(group: object) -> str:
    """Return the name of a consumer group if it is valid. Raises InvalidArgument."""
    if not isinstance(group, str) or not group:
        raise InvalidArgument(f"a consumer group needs a name, not {str(group)[:100]!r}")
    try:
        quoted = quote(group, safe="")
    except UnicodeEncodeError:
        raise InvalidArgument(f"the name {group[:100]!r} of a consumer group cannot be written as UTF-8") from None
    if len(quoted) > MAX_GROUP_NAME:
        raise InvalidArgument(f"the name of a consumer group is limited to {MAX_GROUP_NAME} characters, URL-quoted")
    return group


def require_name(request: Mapping[str, Any], key: str) -> str:
    """Return an argument of a call that is a name. Raises InvalidArgument."""
    value = request.get(key)
    if not isinstance(value, str) or not 0 < len(value) <= _LONGEST_NAME or not value.isprintable():
        raise InvalidArgument(f"the request needs the argument {key!r}, a name")
    return value


def boot_clock() -> float:
    """Return seconds on a monotonic clock that continues while the machine is suspended."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class GroupMember:
    """A member of `group` that reads `lanes`, through `call`, which sends one request to the server. Thread-safe."""

    def __init__(
        self,
        call: Callable[[dict[str, Any]], dict[str, Any]],
        group: str,
        lanes: Collection[str],
        *,
        lease: float | None = None,
        until: int | None = None,
        name: str = "",
        queue: bool = False,
        order: str = "",
        clock: Callable[[], float] = boot_clock,
    ) -> None:
        """`lease`: seconds that the claims outlast a call; None: the server's. `name`: unique among members.

        `queue`: it dispatches the lanes of a work queue, in this `order`.
        """
        self.group = group
        self.lanes = tuple(sorted(set(lanes)))
        self.name = name or uuid.uuid4().hex
        self._call = call
        self._lease = lease
        self._until = until
        self._queue = queue
        self._order = order
        self._clock = clock
        self._client = f"{socket.gethostname()}:{os.getpid()}"
        self._turn = threading.RLock()
        self._claims: dict[str, int] = {}
        self._ends = self._asked = float("-inf")
        self.heartbeat = HEARTBEAT_SECONDS
        """Seconds between two calls."""

    @property
    def next_call(self) -> float:
        """When the next `sync` is due, by the own clock."""
        return self._asked + self.heartbeat

    @property
    def expired(self) -> bool:
        """Whether the lease is over by the own clock: others may have the lanes."""
        return self._clock() >= self._ends

    def sync(self, followed: Mapping[str, int]) -> GroupShare:
        """Tell the server that the member is alive, and return its part. Raises what the call raises.

        `followed` has the claims that the caller acts on, by lane: those of the last answer without the lanes that it
        released since. Other lanes of the answer have a position.
        """
        with self._turn:
            return self.followed(self._call(self.asking(followed)))

    def asking(self, followed: Mapping[str, int], ticks: Mapping[str, int] | None = None) -> dict[str, Any]:
        """Return the request of `sync`. Its answer goes to :meth:`followed`; no other call may come in between.

        `ticks`: moves of lanes as those of :meth:`move` with `later`. The answer has "moved" if they were made.
        """
        with self._turn:
            self._asked = self._clock()
            said: dict[str, Any] = {"lanes": list(self.lanes), "held": dict(followed), "client": self._client}
            if self._lease is not None:
                said["lease"] = self._lease
            if self._until is not None:
                said["until"] = self._until
            if self._queue:
                said |= {"queue": True, "order": self._order}
            moves = {lane: [self._claims[lane], tick] for lane, tick in (ticks or {}).items() if lane in self._claims}
            request = {"group": self.group, "holder": self.name, "sync": said}
            return request | {"move": moves} if moves else request

    def send(self, request: dict[str, Any]) -> dict[str, Any]:
        """Send a request of :meth:`asking` for this member alone."""
        return self._call({name: value for name, value in request.items() if name != "move"})

    def followed(self, answer: dict[str, Any]) -> GroupShare:
        """Note an answer, and return the member's part."""
        with self._turn:
            held = {lane: HeldLane(*each) for lane, each in answer["held"].items()}
            self._claims = {lane: each.claim for lane, each in held.items()}
            seconds = float(answer["lease"])
            self._ends = self._asked + seconds * (1 - CLOCK_DRIFT)
            # A dispatcher alone changes nothing for others by calling often, and there may be many idle queues.
            alone = self._queue and answer["members"] == 1
            self.heartbeat = seconds / 3 if alone else min(HEARTBEAT_SECONDS, seconds / 4)
        return GroupShare(held, frozenset(answer["share"]), answer["members"], answer["reason"], answer["done"])

    def move(self, ticks: Mapping[str, int], *, later: bool = False) -> None:
        """Move the group on lanes that this member has; `later`: durable a moment after the call returns.

        Raises GroupBusy if the claim to one of them is lost; then none is moved.
        """
        with self._turn:
            lost = sorted(ticks.keys() - self._claims.keys())
            if lost:
                raise GroupBusy(f"this consumer of group {self.group!r} has lost {', '.join(lost)}")
            moves = {lane: [self._claims[lane], tick] for lane, tick in ticks.items()}
            self._send(move=moves, strict=True, later=later)

    def release(self, lanes: Collection[str]) -> None:
        """Give up lanes; from now on others may have them."""
        with self._turn:
            names = sorted(self._claims.keys() & set(lanes))
            if names:
                self._send(leave=names)
                for name in names:
                    del self._claims[name]

    def leave(self) -> None:
        """Leave the group with all lanes. If the server is away, they are free when the lease is over."""
        with self._turn:
            names, self._claims, self._ends = sorted(self._claims), {}, float("-inf")
            try:
                self._send(leave=names, member=True)
            except MillraceError as error:
                _log.warning("the lanes of consumer group %r are free once their lease is over: %s", self.group, error)

    def _send(self, **what: Any) -> dict[str, Any]:
        return self._call({"group": self.group, "holder": self.name, **what})


class ExclusivePositions:
    """A group's positions that one consumer has for itself, at the server (implements GroupPositions).

    A thread renews the leases of their lanes.
    """

    def __init__(self, call: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
        self._call_server = call
        self._holder = uuid.uuid4().hex
        self._guard = threading.Lock()
        self._ticks: dict[tuple[str, str], int | None] = {}
        """The position of each group and lane, as last read from or written to the server."""
        self._starts: dict[tuple[str, str], int | None] = {}
        """Where each starts; its PChannel's position where it has none."""
        self._unsure: dict[str, dict[str, int]] = {}
        """A group's last move that failed; it may have taken effect, so it is repeated before the next one."""
        self._lost: GroupBusy | None = None
        self._closed = threading.Event()

    def lock(self, group: str, lane: str) -> None:
        with self._guard:
            if (group, lane) in self._ticks:
                raise GroupBusy(f"this consumer has locked the position of group {group!r} on {lane} already")
            answer = self._call(group, take=lane)
            first = not self._ticks
            self._ticks[group, lane] = answer["tick"]
            self._starts[group, lane] = answer.get("start", answer["tick"])
        if first:
            pause = float(answer["lease"]) / 3
            threading.Thread(target=self._keep, args=(pause,), name="consumer-group", daemon=True).start()

    def get(self, group: str, lane: str) -> int | None:
        tick = self._ticks.get((group, lane))
        return self._starts.get((group, lane)) if tick is None else tick

    def move(self, group: str, ticks: dict[str, int]) -> None:
        with self._guard:
            if self._lost is not None:
                raise self._lost
            unknown = [name for name in ticks if (group, name) not in self._ticks]
            if unknown:
                raise InvalidArgument(
                    f"this consumer has not locked the position of group {group!r} on {unknown[0]}: lock it first"
                )
            for moved in (self._unsure.get(group), ticks):
                if moved is None:
                    continue
                self._unsure[group] = moved
                self._call(group, move={name: [self._ticks[group, name], tick] for name, tick in moved.items()})
                self._ticks |= {(group, name): tick for name, tick in moved.items()}
                del self._unsure[group]

    def close(self) -> None:
        """Release the positions. If the server is down, they become free when their leases expire."""
        self._closed.set()
        with self._guard:
            held, self._ticks = self._by_group(), {}
            for group, names in held.items():
                try:
                    self._call(group, leave=names)
                except MillraceError as error:
                    _log.warning("the places of consumer group %r are free once their leases ran out: %s", group, error)

    def _keep(self, pause: float) -> None:
        while not self._closed.wait(pause):
            for group, names in self._by_group().items():
                try:
                    self._call(group, keep=names)
                except GroupBusy as error:
                    self._lost = error
                    return
                except MillraceError as error:
                    _log.info("the leases of consumer group %r were not renewed: %s", group, error)

    def _by_group(self) -> dict[str, list[str]]:
        found: dict[str, list[str]] = {}
        for group, lane in list(self._ticks):
            found.setdefault(group, []).append(lane)
        return found

    def _call(self, group: str, **what: Any) -> dict[str, Any]:
        return self._call_server({"group": group, "holder": self._holder, **what})
