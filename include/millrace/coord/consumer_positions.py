"""Consumers' positions and places in the meta store that the settings name: what FilePositions is for one node, for a cluster.

A position is a key, and so is a place, under one lease of the process that took it. Whatever moves a group is bound to its places
as this process took them, so one whose lease ran out moves nothing that another has taken since. Behind a kill a place is free once
the lease has run out, at most a session's length, and at once for who has it for the same holder.

What a file of earlier had is taken over once (:func:`open_positions`).
"""

from __future__ import annotations

import json
import logging
import threading
import uuid
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import Final, Self, TypeVar
from urllib.parse import quote, unquote

from millrace.base.backoff import jittered
from millrace.base.deadline import Deadline
from millrace.base.errors import GroupBusy, InvalidSettings, LeaseNotFound, MetaAmbiguous, MetaUnavailable
from millrace.base.keyed_lock import KeyedLock
from millrace.base.settings import Settings
from millrace.client.consume.positions import FILE, FilePositions, PositionStore, migrate_positions
from millrace.coord.clock import SystemClock
from millrace.coord.store_factory import open_cluster_store
from millrace.meta.store import MAX_CHANGES, Delete, Entry, MetaStore, Mutation, Put, RevisionEquals

POSITION_PREFIX: Final = "consumers/at/"
CLAIM_PREFIX: Final = "consumers/place/"
IMPORT_KEY: Final = "consumers/taken"
"""There is of which file the store has taken the positions over."""
_PAUSE: Final = 0.1

_T = TypeVar("_T")
_log: Final = logging.getLogger(__name__)


def open_positions(settings: Settings) -> PositionStore:
    """Where the consumer groups of a deployment stand: in its data folder, or in the meta store that the settings name. Raises
    PositionsBusy, GroupBusy (a consumer is at work on a file that is to be taken over), InvalidSettings (the store has those of another
    data folder), MetaUnavailable, UnsupportedVersion."""
    folder = settings.data_dir / "coord"
    if not settings.meta_store:
        return FilePositions(folder)
    store = open_cluster_store(settings, SystemClock())
    try:
        migrate_positions(folder, partial(import_positions, store))
        return MetaStorePositions(store, seconds=settings.session_seconds)
    except BaseException:
        store.close()
        raise


def import_positions(store: MetaStore, groups: Mapping[str, Mapping[str, int]], file: str) -> None:
    """Have the store hold the positions of the file named `file`, and no others. It may break off anywhere, and be done again.

    The store remembers the one file that it took over. One without positions takes the place of a file too, and leaves the store's
    positions as they are: a lost file, or a second data folder, wipes nothing. Raises InvalidSettings where the store has another file's
    positions, MetaUnavailable, MetaAmbiguous.
    """
    wanted = {
        _key(POSITION_PREFIX, group, pchannel): b"%d" % tick
        for group, ticks in groups.items()
        for pchannel, tick in ticks.items()
    }
    claim = store.get(IMPORT_KEY)
    taken = _Taken(file, done=not groups) if claim is None else _Taken.decoded(claim.value)
    if claim is None:
        if store.commit([Put(IMPORT_KEY, taken.encoded())], when=[RevisionEquals(IMPORT_KEY, 0)]) is None:
            raise _changed()
        claim = store.get(IMPORT_KEY)
    if taken.file != file:
        if not taken.done:
            raise MetaUnavailable(
                "the positions of consumer groups in another data folder are being taken over into the meta store, and that has not"
                " ended: try again; where it stays so, start the log server of that data folder"
            )
        if groups:
            raise InvalidSettings(
                f"the meta store has the positions of consumer groups of another data folder, and this one's coord/{FILE} has positions"
                f" of {', '.join(sorted(groups)[:5])}: remove that file to go on with the positions in the meta store, or name another store"
            )
        return
    there = {entry.key: entry for entry in store.list(POSITION_PREFIX).entries}
    if taken.done:
        # An attempt whose answer was lost. Both may have moved since, each for what is done: the greater one holds.
        changes: list[Mutation] = [
            Put(key, tick) for key, tick in wanted.items() if key not in there or int(there[key].value) < int(tick)
        ]
    else:
        changes = [Delete(key) for key in there.keys() - wanted.keys()]
        changes += [Put(key, tick) for key, tick in wanted.items() if key not in there or there[key].value != tick]
        changes.append(Put(IMPORT_KEY, _Taken(file, done=True).encoded()))
        there[IMPORT_KEY] = claim or Entry(IMPORT_KEY, b"", 0, 0, 0)
    for part in _parts(changes, MAX_CHANGES):
        # Bound to what was seen: one that comes late, of a process that died, does nothing.
        seen = [RevisionEquals(each.key, there[each.key].modified if each.key in there else 0) for each in part]
        if store.commit(part, when=seen) is None:
            raise _changed()


def _changed() -> MetaUnavailable:
    return MetaUnavailable("another process changes the consumers' positions: try again")


@dataclass(frozen=True, slots=True)
class _Taken:
    """Which file's positions the store took over, and whether all of them are there."""

    file: str
    done: bool

    def encoded(self) -> bytes:
        return json.dumps({"file": self.file, "done": self.done}).encode()

    @classmethod
    def decoded(cls, data: bytes) -> Self:
        said = json.loads(data)
        return cls(str(said["file"]), bool(said["done"]))


class MetaStorePositions:
    """The positions in `store`, which it closes (the protocol Positions). Thread-safe: one caller a group at a time."""

    def __init__(self, store: MetaStore, *, seconds: float) -> None:
        """`seconds`: the length of the lease, and how long a store that does not answer is asked again."""
        self._store = store
        self._seconds = seconds
        self._me = uuid.uuid4().hex
        self._turns = KeyedLock()
        self._guard = threading.Lock()
        """Of the lease."""
        self._lease = 0
        self._held: dict[tuple[str, str], _Held] = {}
        self._closed = threading.Event()
        self._keeping: threading.Thread | None = None

    def get(self, group: str, pchannel: str) -> int | None:
        with self._turns.acquire(group):
            entry = self._store.get(_key(POSITION_PREFIX, group, pchannel))
            if (held := self._held.get((group, pchannel))) is not None:
                held.at = _revision(entry)
        return None if entry is None else int(entry.value)

    def groups(self) -> dict[str, dict[str, int]]:
        return group_positions_in(self._store)

    def move(self, group: str, ticks: dict[str, int]) -> None:
        """All of it or nothing for up to 64 PChannels, part by part beyond."""
        with self._turns.acquire(group):
            for part in _parts(list(ticks.items()), MAX_CHANGES // 2):
                self._move(group, dict(part))

    def _move(self, group: str, ticks: Mapping[str, int]) -> None:
        for name in ticks:
            if (group, name) not in self._held:
                self.lock(group, name)
        puts = [Put(_key(POSITION_PREFIX, group, name), b"%d" % tick) for name, tick in ticks.items()]
        end = Deadline.after(self._seconds)
        while True:
            # Bound to the position as well: a commit that lands late never takes a group back.
            seen = [(self._held[group, name], name) for name in ticks]
            places = [RevisionEquals(_key(CLAIM_PREFIX, group, name), held.place) for held, name in seen]
            revision = None
            try:
                revision = self._store.commit(
                    puts,
                    when=[
                        *places,
                        *(RevisionEquals(_key(POSITION_PREFIX, group, name), held.at) for held, name in seen),
                    ],
                )
                if revision is None:
                    for name, tick in ticks.items():
                        self._look(group, name, tick)
            except (MetaUnavailable, MetaAmbiguous):
                if end.expired():
                    raise
            if revision is not None:
                for held, _ in seen:
                    held.at = revision
                return
            if not end.pause(jittered(_PAUSE)):
                raise MetaUnavailable(f"group {group!r} could not be moved: try again")

    def _look(self, group: str, pchannel: str, tick: int) -> None:
        """Have a place again that went with a lease, where nobody has moved the group since. Raises GroupBusy."""
        held = self._held[group, pchannel]
        if _revision(self._store.get(_key(CLAIM_PREFIX, group, pchannel))) != held.place:
            self.lock(group, pchannel, holder=held.holder)
            held = self._held[group, pchannel]
        entry = self._store.get(_key(POSITION_PREFIX, group, pchannel))
        if _revision(entry) != held.at and (entry is None or int(entry.value) != tick):
            raise GroupBusy(
                f"group {group!r} was moved on {pchannel} by another consumer while this one was silent: what this one has not"
                " acknowledged is that one's; stop one of the two"
            )
        held.at = _revision(entry)

    def drop(self, group: str, pchannels: Collection[str]) -> None:
        with self._turns.acquire(group):
            names = sorted({*pchannels, *self.groups().get(group, ())})
            locked: list[str] = []
            try:
                for name in names:
                    if (group, name) in self._held:
                        raise _busy(group, name)
                    self.lock(group, name)
                    locked.append(name)
                for part in _parts([Delete(_key(POSITION_PREFIX, group, name)) for name in names], MAX_CHANGES):
                    places = [(group, _names(each.key, POSITION_PREFIX)[1]) for each in part]
                    held = [RevisionEquals(_key(CLAIM_PREFIX, *place), self._held[place].place) for place in places]
                    if self._store.commit(part, when=held) is None:
                        raise _busy(group, places[0][1])
            finally:
                for name in locked:
                    self.unlock(group, name)

    def lock(self, group: str, pchannel: str, *, holder: str = "") -> None:
        key, value = _key(CLAIM_PREFIX, group, pchannel), (holder or self._me).encode()
        end = Deadline.after(self._seconds)
        with self._turns.acquire(group):
            while True:
                there = self._store.get(key)
                if there is not None and there.value != value and there.lease != self._lease:
                    raise _busy(group, pchannel)
                lease = self._leased()
                try:
                    revision = self._store.commit(
                        [Put(key, value, lease)], when=[RevisionEquals(key, _revision(there))]
                    )
                except LeaseNotFound:
                    self._ended(lease)
                    continue
                except MetaAmbiguous:
                    revision = None  # reading tells
                if revision is not None:
                    before = self._held.get((group, pchannel))
                    at = (
                        _revision(self._store.get(_key(POSITION_PREFIX, group, pchannel)))
                        if before is None
                        else before.at
                    )
                    self._held[group, pchannel] = _Held(holder, revision, at)
                    return
                if not end.pause(jittered(_PAUSE)):
                    raise MetaUnavailable(f"the place of group {group!r} on {pchannel} could not be taken: try again")

    def unlock(self, group: str, pchannel: str) -> None:
        with self._turns.acquire(group):
            held = self._held.pop((group, pchannel), None)
            if held is not None:
                key = _key(CLAIM_PREFIX, group, pchannel)
                try:
                    self._store.commit([Delete(key)], when=[RevisionEquals(key, held.place)])
                except (MetaUnavailable, MetaAmbiguous) as error:
                    # Under this process's lease it stays so, which keeps nobody away who asks this process.
                    _log.warning("the place of consumer group %r on %s is not given back: %s", group, pchannel, error)

    def close(self) -> None:
        self._closed.set()
        if self._keeping is not None:
            self._keeping.join()
        self._turns.wait_idle()
        self._held.clear()
        lease, self._lease = self._lease, 0
        if lease:
            try:
                self._store.revoke(lease)
            except (MetaUnavailable, MetaAmbiguous) as error:
                _log.warning("the places of consumer groups are free once their lease ran out: %s", error)
        self._store.close()

    def _leased(self) -> int:
        """The lease of this process's places, which a thread renews from the first one on."""
        with self._guard:
            if self._lease == 0:
                self._lease = self._store.grant(self._seconds)
            if self._keeping is None:
                self._keeping = threading.Thread(target=self._keep, name="group-places", daemon=True)
                self._keeping.start()
            return self._lease

    def _ended(self, lease: int) -> None:
        with self._guard:
            if self._lease == lease:
                self._lease = 0  # what was held under it, `move` finds out

    def _keep(self) -> None:
        while not self._closed.wait(self._seconds / 3):
            lease = self._lease
            if lease:
                try:
                    self._store.renew(lease)
                except LeaseNotFound:
                    self._ended(lease)
                except (MetaUnavailable, MetaAmbiguous):
                    pass  # again, before it runs out


@dataclass(slots=True)
class _Held:
    """A place that this process has."""

    holder: str
    place: int
    """The revision of its key."""
    at: int
    """The revision of the position, as it was seen or made last."""


def read_group_positions(settings: Settings) -> dict[str, dict[str, int]]:
    """By group and PChannel the ticks, wherever they lie now: looking takes nothing over. Raises MetaUnavailable, PositionsBusy, and
    InvalidSettings where they lie in a meta store that the settings do not name."""
    folder = settings.data_dir / "coord"
    if (folder / FILE).exists():
        try:
            with closing(FilePositions(folder)) as file:
                found = file.groups()
        except InvalidSettings:
            if not settings.meta_store:
                raise
            found = {}
        if found or not settings.meta_store:
            return found
    if not settings.meta_store:
        return {}
    with open_cluster_store(settings, SystemClock()) as store:
        return group_positions_in(store)


def group_positions_in(store: MetaStore) -> dict[str, dict[str, int]]:
    """By group and PChannel the ticks."""
    found: dict[str, dict[str, int]] = {}
    for entry in store.list(POSITION_PREFIX).entries:
        group, pchannel = _names(entry.key, POSITION_PREFIX)
        found.setdefault(group, {})[pchannel] = int(entry.value)
    return {group: dict(sorted(found[group].items())) for group in sorted(found)}


def _busy(group: str, pchannel: str) -> GroupBusy:
    return GroupBusy(
        f"another consumer of group {group!r} reads {pchannel}, or did until a moment ago: stop it, or give this one a group of its own"
    )


def _revision(entry: Entry | None) -> int:
    return 0 if entry is None else entry.modified


def _key(prefix: str, group: str, pchannel: str) -> str:
    return prefix + "/".join(quote(name, safe="").replace("%", "@").replace("~", "@7E") for name in (group, pchannel))


def _names(key: str, prefix: str) -> tuple[str, str]:
    group, _, pchannel = key.removeprefix(prefix).partition("/")
    return unquote(group.replace("@", "%")), unquote(pchannel.replace("@", "%"))


def _parts(items: Sequence[_T], size: int) -> Iterator[Sequence[_T]]:
    for first in range(0, len(items), size):
        yield items[first : first + size]
