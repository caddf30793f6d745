"""Consumer groups of remote consumers: who holds a group's PChannel, and the group's position.

A remote consumer holds a group's PChannel by a lease that each of its calls renews. Meanwhile this process holds the
lock of that position, so that a local consumer finds it taken. After a restart of the server, the holder's next call
takes the lease again unless another consumer has it. A move names the position that the holder left. If the group is
elsewhere by now, another consumer moved it, and the holder gets GroupBusy; a move never goes back. At most MAX_LEASES
leases of at most MAX_GROUPS groups are held. Calls of one group run one after the other; groups do not wait for each
other, so an unresponsive meta store delays only the calls of the group in question.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

from millrace.base.errors import ChannelNotFound, GroupBusy, InvalidArgument, LogUnavailable, ServerFull
from millrace.base.keyed_lock import KeyedLock
from millrace.client.consume.positions import FilePositions, PositionStore

LEASE_SECONDS: Final = 15.0
"""Seconds that a lease lasts without a call."""
MAX_LEASES: Final = 1024
MAX_GROUPS: Final = 10_000
_LONGEST: Final = 150
"""Maximum length of a group's quoted name, which becomes part of a file name."""
_LOOK: Final = 1.0


@dataclass(slots=True)
class _Place:
    holder: str
    until: float


class ConsumerGroups:
    """Answers the action ``append/group``. Thread-safe."""

    def __init__(
        self,
        data_dir: Path,
        pchannels: Callable[[], Collection[str]],
        *,
        positions: Callable[[], PositionStore] | None = None,
        lease: float = LEASE_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Manage the groups of a deployment.

        `positions` opens the positions of the groups, on first use. None: the file in `data_dir`.
        """
        self._opened = positions or (lambda: FilePositions(data_dir / "coord"))
        self._pchannels = pchannels
        self._lease = lease
        self._clock = clock
        self._turns = KeyedLock()
        self._guard = threading.Lock()
        """Guards the state that groups share. Only opening the store holds it for long."""
        self._places: dict[tuple[str, str], _Place] = {}
        self._positions: PositionStore | None = None
        self._closed = threading.Event()

    def handle(self, request: dict[str, Any]) -> dict[str, Any]:
        """Answer one call of a holder: `{"group", "holder"}` and one of the following.

        - `"take": pchannel`: acquire the lease. The answer is `{"tick": position or null, "lease": seconds}`.
        - `"move": {pchannel: [from, to]}`: move the group, all or nothing, durably. `from` may be null.
        - `"keep": [pchannel, ...]`: renew leases only.
        - `"leave": [pchannel, ...]`: release leases.

        Raises GroupBusy, ChannelNotFound, ServerFull, InvalidArgument.
        """
        group, holder = _text(request, "group"), _text(request, "holder")
        if len(quote(group, safe="")) > _LONGEST:
            raise InvalidArgument(f"the name of a consumer group is limited to {_LONGEST} characters, URL-quoted")
        with self._turn(group):
            match request:
                case {"take": str(pchannel)}:
                    self._take(group, pchannel, holder)
                    return {"tick": self._open().get(group, pchannel), "lease": self._lease}
                case {"move": dict(moves)}:
                    self._move(group, holder, {name: _step(step) for name, step in moves.items()})
                case {"keep": list(names)}:
                    for name in names:
                        self._take(group, str(name), holder)
                case {"leave": list(names)}:
                    for name in names:
                        place = self._places.get((group, str(name)))
                        if place is not None and place.holder == holder:
                            self._give((group, str(name)))
                case _:
                    raise InvalidArgument("a call of a consumer group needs one of take, move, keep and leave")
        return {}

    def drop(self, request: dict[str, Any]) -> None:
        """Delete `{"group"}` and its positions. Idempotent. Raises GroupBusy while a consumer holds a lease of it."""
        group = _text(request, "group")
        with self._turn(group):
            with self._guard:
                own = [place for place in self._places if place[0] == group]
            for place in own:
                if self._places[place].until > self._clock():
                    raise GroupBusy(f"a remote consumer reads {place[1]} for group {group!r}: close it first")
            for place in own:
                self._give(place)
            self._open().drop(group, self._pchannels())

    def close(self) -> None:
        """Release all leases."""
        self._closed.set()
        self._turns.wait_idle()
        with self._guard:
            self._places.clear()
            if self._positions is not None:
                self._positions.close()
                self._positions = None

    @contextmanager
    def _turn(self, group: str) -> Iterator[None]:
        with self._turns.acquire(group):
            if self._closed.is_set():
                raise LogUnavailable("the log's server is stopping: call again")
            yield

    def _take(self, group: str, pchannel: str, holder: str) -> None:
        """Acquire or renew the holder's lease."""
        place = self._places.get((group, pchannel))
        if place is None:
            if pchannel not in self._pchannels():
                raise ChannelNotFound(f"there is no PChannel {pchannel[:100]!r}")
            positions = self._open()
            if positions.get(group, pchannel) is None and len(positions.groups()) >= MAX_GROUPS:
                raise InvalidArgument(
                    f"there are {MAX_GROUPS} consumer groups, the limit: use one of them, or drop some "
                    "(Database.drop_group)"
                )
            with self._guard:
                if len(self._places) >= MAX_LEASES:
                    raise ServerFull(
                        f"the server holds {MAX_LEASES} leases of consumer groups, the limit: close idle consumers"
                    )
                self._places[group, pchannel] = _Place(holder, self._clock() + self._lease)
            try:
                positions.lock(group, pchannel, holder=holder)
            except BaseException:
                self._forget((group, pchannel))
                raise
        elif place.holder == holder or place.until <= self._clock():
            place.holder, place.until = holder, self._clock() + self._lease
        else:
            raise GroupBusy(
                f"another consumer of group {group!r} reads {pchannel}: stop it, or give this one a group of its own"
            )

    def _move(self, group: str, holder: str, moves: dict[str, tuple[int | None, int]]) -> None:
        for pchannel in moves:
            self._take(group, pchannel, holder)
        positions = self._open()
        for pchannel, (before, to) in moves.items():
            stands = positions.get(group, pchannel)
            if stands not in (before, to):
                raise GroupBusy(
                    f"another consumer moved group {group!r} on {pchannel} to tick {stands}: it owns what this "
                    "consumer has not"
                    " acknowledged; stop one of the two"
                )
        positions.move(group, {pchannel: to for pchannel, (_, to) in moves.items()})

    def _give(self, place: tuple[str, str]) -> None:
        self._forget(place)
        self._open().unlock(*place)

    def _forget(self, place: tuple[str, str]) -> None:
        with self._guard:
            del self._places[place]

    def _open(self) -> PositionStore:
        with self._guard:
            if self._positions is None:
                self._positions = self._opened()
                threading.Thread(target=self._watch, name="group-leases", daemon=True).start()
            return self._positions

    def _watch(self) -> None:
        """Release the expired leases: a local consumer knows nothing of leases."""
        while not self._closed.wait(min(_LOOK, self._lease)):
            with self._guard:
                silent = [name for name, place in self._places.items() if place.until <= self._clock()]
            for name in silent:
                with self._turns.acquire(
                    name[0], blocking=False
                ) as free:  # if the group is busy, the next pass retries: no group waits for another
                    place = self._places.get(name)
                    if free and place is not None and place.until <= self._clock() and not self._closed.is_set():
                        self._give(name)


def _text(request: dict[str, Any], key: str) -> str:
    value = request.get(key)
    if not isinstance(value, str) or not value:
        raise InvalidArgument(f"the request needs the argument {key!r}, a name")
    return value


def _step(value: object) -> tuple[int | None, int]:
    match value:
        case [None | int() as before, int(to)] if 0 <= to < 1 << 63:
            return before, to
        case _:
            raise InvalidArgument(f"{value!r} is not a move: use [from, to]")
