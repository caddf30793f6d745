"""Places of consumer groups for consumers elsewhere: who has one, and where the group stands (millrace.client.consume.positions).

A consumer elsewhere holds a group's place on a PChannel by a lease, which each call of its holder renews; meanwhile
this process has the place's lock, so that a consumer on the spot sees it taken. After a restart of the server the
holder's next call takes the place again, if nobody else has. A move says where the holder left the group: where it
stands elsewhere by now, somebody else has moved it, and the holder hears GroupBusy; it never moves a group back. At
most MOST_PLACES are held, of at most MOST_GROUPS groups. The calls of one group are done one by one, those of others beside them: what
a meta store that does not answer holds up is each group's own call.
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
"""Seconds that a place stays its holder's without a call."""
MAX_LEASES: Final = 1024
MAX_GROUPS: Final = 10_000
_LONGEST: Final = 150
"""Characters of a group's name, quoted: it is part of a file's name."""
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
        """`positions` opens where the groups stand, when the first of them is asked for; None: the file of `data_dir`."""
        self._opened = positions or (lambda: FilePositions(data_dir / "coord"))
        self._pchannels = pchannels
        self._lease = lease
        self._clock = clock
        self._turns = KeyedLock()
        self._guard = threading.Lock()
        """Of what all groups have together; nobody waits for a store with it, but who opens it."""
        self._places: dict[tuple[str, str], _Place] = {}
        self._positions: PositionStore | None = None
        self._closed = threading.Event()

    def handle(self, request: dict[str, Any]) -> dict[str, Any]:
        """One call of a holder: `{"group", "holder"}` and one of

        - `"take": pchannel`: its place; `{"tick": where the group stands, or null, "lease": seconds}`,
        - `"move": {pchannel: [from, to]}`: durable when it is answered, all of it or nothing; `from` may be null,
        - `"keep": [pchannel, ...]`: the leases alone,
        - `"leave": [pchannel, ...]`.

        Raises GroupBusy, ChannelNotFound, ServerFull, InvalidArgument.
        """
        group, holder = _text(request, "group"), _text(request, "holder")
        if len(quote(group, safe="")) > _LONGEST:
            raise InvalidArgument(f"the name of a consumer group has at most {_LONGEST} characters, quoted as in a URL")
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
                    raise InvalidArgument("a call of a consumer group is one of take, move, keep and leave")
        return {}

    def drop(self, request: dict[str, Any]) -> None:
        """Forget `{"group"}` and where it stands; idempotent. Raises GroupBusy while a consumer has a place of it."""
        group = _text(request, "group")
        with self._turn(group):
            with self._guard:
                own = [place for place in self._places if place[0] == group]
            for place in own:
                if self._places[place].until > self._clock():
                    raise GroupBusy(f"a consumer elsewhere reads {place[1]} for group {group!r}: close it first")
            for place in own:
                self._give(place)
            self._open().drop(group, self._pchannels())

    def close(self) -> None:
        """Give all places back."""
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
                raise LogUnavailable("the log's server stops: call again")
            yield

    def _take(self, group: str, pchannel: str, holder: str) -> None:
        """The place is the holder's, anew or still."""
        place = self._places.get((group, pchannel))
        if place is None:
            if pchannel not in self._pchannels():
                raise ChannelNotFound(f"there is no PChannel {pchannel[:100]!r}")
            positions = self._open()
            if positions.get(group, pchannel) is None and len(positions.groups()) >= MAX_GROUPS:
                raise InvalidArgument(
                    f"{MAX_GROUPS} consumer groups are kept: take one of them, or drop some (Client.drop_group)"
                )
            with self._guard:
                if len(self._places) >= MAX_LEASES:
                    raise ServerFull(
                        f"the server holds {MAX_LEASES} places of consumer groups: close consumers that rest"
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
                    f"group {group!r} was moved on {pchannel} by another consumer, to tick {stands}: what this one has not"
                    " acknowledged is that one's; stop one of the two"
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
        """Give back the places whose holders are silent: a consumer on the spot knows nothing of leases."""
        while not self._closed.wait(min(_LOOK, self._lease)):
            with self._guard:
                silent = [name for name, place in self._places.items() if place.until <= self._clock()]
            for name in silent:
                with self._turns.acquire(
                    name[0], blocking=False
                ) as free:  # else the next look: no group waits for another one
                    place = self._places.get(name)
                    if free and place is not None and place.until <= self._clock() and not self._closed.is_set():
                        self._give(name)


def _text(request: dict[str, Any], key: str) -> str:
    value = request.get(key)
    if not isinstance(value, str) or not value:
        raise InvalidArgument(f"the request needs {key!r} among its arguments, a name")
    return value


def _step(value: object) -> tuple[int | None, int]:
    match value:
        case [None | int() as before, int(to)] if 0 <= to < 1 << 63:
            return before, to
        case _:
            raise InvalidArgument(f"{value!r} is no move: write it as [from, to]")
