"""Positions and claims of consumer groups in the cluster's meta store, as FilePositions keeps them for one node.

A position is a key. So is a claim: the exclusive right of one consumer to a lane in a group, under one lease of its
process; and so is a member, under the same lease. Every move of a group is bound to the claims as this process acquired
them, so a process whose lease expired cannot move a group that another has claimed since. After a kill, claims are free
when the lease expires (at most one session length), and at once for the same holder.

Positions of an older file are imported once (:func:`open_positions`).
"""

from __future__ import annotations

import json
import logging
import math
import threading
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
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
from millrace.client.consume.membership import CLOCK_DRIFT, boot_clock
from millrace.client.consume.positions import FILE, FilePositions, PositionStore, QueueStates, migrate_positions
from millrace.coord.clock import SystemClock
from millrace.coord.store_factory import open_cluster_store
from millrace.meta.store import MAX_CHANGES, Delete, Entry, MetaStore, Mutation, Put, RevisionEquals

POSITION_PREFIX: Final = "consumers/at/"
CLAIM_PREFIX: Final = "consumers/place/"
QUEUE_PREFIX: Final = "consumers/queue/"
"""Prefix of the states of work queues' lanes, each written with its position."""
MEMBER_PREFIX: Final = "consumers/member/"
"""Prefix of the members of groups, each under the lease of the process that it calls."""
IMPORT_KEY: Final = "consumers/taken"
"""Key that names the file whose positions the store has imported."""
_PAUSE: Final = 0.1

_T = TypeVar("_T")
_log: Final = logging.getLogger(__name__)


def open_positions(settings: Settings) -> PositionStore:
    """Open the positions of a deployment's consumer groups: in its data folder, or in the configured meta store.

    Raises PositionsBusy, MetaUnavailable, UnsupportedVersion.
    Raises GroupBusy if a consumer still uses a file that must be imported.
    Raises InvalidSettings if the store has the positions of another data folder.
    """
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


def import_positions(
    store: MetaStore, groups: Mapping[str, Mapping[str, int]], file: str, queues: QueueStates | None = None
) -> None:
    """Make the store hold exactly the positions of the file named `file`. Idempotent, and safe to interrupt.

    `queues` are the states of work queues that belong to them.

    The store remembers the one file that it imported. A file without positions leaves the store unchanged, so a lost
    file or a second data folder deletes nothing.
    Raises InvalidSettings if the store has another file's positions; MetaUnavailable, MetaAmbiguous.
    """
    wanted = {
        _key(POSITION_PREFIX, group, pchannel): b"%d" % tick
        for group, ticks in groups.items()
        for pchannel, tick in ticks.items()
    }
    states = {
        _key(POSITION_PREFIX, *lane): Put(_key(QUEUE_PREFIX, *lane), state) for lane, state in (queues or {}).items()
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
                "another data folder is importing its consumer positions into the meta store, and has not"
                " finished: retry; if this persists, start the log server of that data folder"
            )
        if groups:
            raise InvalidSettings(
                f"the meta store has the consumer positions of another data folder, and this one's coord/{FILE} has"
                " positions"
                f" of {', '.join(sorted(groups)[:5])}: remove that file to use the positions in the meta store, or"
                " use another store"
            )
        return
    there = {entry.key: entry for entry in store.list(POSITION_PREFIX).entries}
    if taken.done:
        # A retry after a lost answer. File and store may both have moved since; the greater position counts.
        changes: list[Mutation] = [
            Put(key, tick) for key, tick in wanted.items() if key not in there or int(there[key].value) < int(tick)
        ]
    else:
        changes = [Delete(key) for key in there.keys() - wanted.keys()]
        changes += [Put(key, tick) for key, tick in wanted.items() if key not in there or there[key].value != tick]
        changes.append(Put(IMPORT_KEY, _Taken(file, done=True).encoded()))
        there[IMPORT_KEY] = claim or Entry(IMPORT_KEY, b"", 0, 0, 0)
    for part in _parts(changes, MAX_CHANGES // 2):
        # Bound to the state read above, so that a late commit of a dead process has no effect.
        seen = [RevisionEquals(each.key, there[each.key].modified if each.key in there else 0) for each in part]
        with_states = [*part, *(states[each.key] for each in part if each.key in states)]
        if store.commit(with_states, when=seen) is None:
            raise _changed()


def _changed() -> MetaUnavailable:
    return MetaUnavailable("another process is changing the consumer positions: retry")


@dataclass(frozen=True, slots=True)
class _Taken:
    """The imported file, and whether the import is complete."""

    file: str
    done: bool

    def encoded(self) -> bytes:
        return json.dumps({"file": self.file, "done": self.done}).encode()

    @classmethod
    def decoded(cls, data: bytes) -> Self:
        said = json.loads(data)
        return cls(str(said["file"]), bool(said["done"]))


class MetaStorePositions:
    """Positions in `store`, which it closes (the protocol Positions). Thread-safe: one caller per group at a time."""

    def __init__(
        self,
        store: MetaStore,
        *,
        seconds: float,
        patience: float | None = None,
        clock: Callable[[], float] = boot_clock,
    ) -> None:
        """`seconds`: length of the lease. `patience`: how long to retry an unavailable store; as long by default."""
        self._store = store
        self._seconds = seconds
        self._patience = seconds if patience is None else patience
        self._me = uuid.uuid4().hex
        self._turns = KeyedLock()
        self._guard = threading.Lock()
        """Guards the lease."""
        self._lease = 0
        self._clock = clock
        self._ends = -math.inf
        """Time at which the lease may expire, by this process's clock: earlier than the store ends it."""
        self._held: dict[tuple[str, str], _Held] = {}
        self._members: set[tuple[str, str]] = set()
        self._doubtful: set[tuple[str, str, str]] = set()
        """(prefix, group, name) of keys that may exist under this process's lease although no consumer owns them."""
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

    def move(self, group: str, ticks: dict[str, int], states: Mapping[str, bytes] | None = None) -> None:
        """Move a group. Atomic for up to 64 lanes (32 of a work queue), in parts for more."""
        with self._turns.acquire(group):
            for part in _parts(list(ticks.items()), MAX_CHANGES // (4 if states else 2)):
                self._move(group, dict(part), states or {})

    def queue_states(self, group: str, lanes: Collection[str] | None = None) -> dict[str, bytes]:
        found = self._store.list(f"{QUEUE_PREFIX}{_quoted(group)}/").entries
        states = {_names(each.key, QUEUE_PREFIX)[1]: each.value for each in found}
        return {lane: state for lane, state in states.items() if lanes is None or lane in lanes}

    def queues(self) -> set[str]:
        return {_names(each.key, QUEUE_PREFIX)[0] for each in self._store.list(QUEUE_PREFIX).entries}

    def _move(self, group: str, ticks: Mapping[str, int], states: Mapping[str, bytes]) -> None:
        for name in ticks:
            if (group, name) not in self._held:
                self.lock(group, name)
        puts = [Put(_key(POSITION_PREFIX, group, name), b"%d" % tick) for name, tick in ticks.items()]
        puts += [Put(_key(QUEUE_PREFIX, group, name), states[name]) for name in ticks if name in states]
        end = Deadline.after(self._patience)
        while True:
            # Bound to the position too, so that a late commit never moves a group back.
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
                        self._look(group, name, tick, states.get(name))
            except (MetaUnavailable, MetaAmbiguous):
                if end.expired():
                    raise
            if revision is not None:
                for held, _ in seen:
                    held.at = revision
                return
            if not end.pause(jittered(_PAUSE)):
                raise MetaUnavailable(f"could not move group {group!r}: retry")

    def _look(self, group: str, pchannel: str, tick: int, state: bytes | None) -> None:
        """Renew a claim that was lost with the lease, unless another process has moved the group since.

        An own move whose answer was lost is recognized by its tick, and that of a work queue by its state: its tick may
        stay while another process acknowledges.
        Raises GroupBusy.
        """
        held = self._held[group, pchannel]
        if _revision(self._store.get(_key(CLAIM_PREFIX, group, pchannel))) != held.place:
            self.lock(group, pchannel, holder=held.holder)
            held = self._held[group, pchannel]
        entry = self._store.get(_key(POSITION_PREFIX, group, pchannel))
        same = entry is not None and int(entry.value) == tick
        if _revision(entry) != held.at and same and state is not None:
            current = self._store.get(_key(QUEUE_PREFIX, group, pchannel))
            same = current is not None and current.value == state
        if _revision(entry) != held.at and not same:
            raise GroupBusy(
                f"another consumer moved group {group!r} on {pchannel} while this one was silent: messages that this"
                " one has not"
                " acknowledged belong to the other; stop one of the two"
            )
        held.at = _revision(entry)

    def place(self, group: str, ticks: Mapping[str, int | None], states: Mapping[str, bytes] | None = None) -> None:
        states = states or {}
        with self._turns.acquire(group):
            locked: list[str] = []
            try:
                for name in ticks:
                    if (group, name) in self._held:
                        raise _busy(group, name)
                    self.lock(group, name)
                    locked.append(name)
                for part in _parts(list(ticks.items()), MAX_CHANGES // 2):
                    changes: list[Mutation] = [
                        Put(key, states[name]) if name in states else Delete(key)
                        for name, _ in part
                        for key in [_key(QUEUE_PREFIX, group, name)]
                    ]
                    for name, tick in part:
                        key = _key(POSITION_PREFIX, group, name)
                        changes.append(Delete(key) if tick is None else Put(key, b"%d" % tick))
                    held = [
                        RevisionEquals(_key(CLAIM_PREFIX, group, name), self._held[group, name].place)
                        for name, _ in part
                    ]
                    if self._store.commit(changes, when=held) is None:
                        raise _busy(group, part[0][0])
            finally:
                for name in locked:
                    self.unlock(group, name)

    def claims(self, group: str | None = None) -> dict[tuple[str, str], str]:
        return self._listed(CLAIM_PREFIX, group)

    def version(self) -> object | None:
        return None

    def abandoned(self, group: str) -> tuple[dict[str, str], dict[str, str]]:
        return {}, {}  # leases end what a killed process recorded

    def members(self, group: str | None = None) -> dict[tuple[str, str], str]:
        return self._listed(MEMBER_PREFIX, group)

    def _listed(self, prefix: str, group: str | None) -> dict[tuple[str, str], str]:
        under = prefix if group is None else prefix + _quoted(group) + "/"
        return {_names(each.key, prefix): each.value.decode() for each in self._store.list(under).entries}

    def set_member(self, group: str, name: str, value: str | None) -> None:
        key = _key(MEMBER_PREFIX, group, name)
        self._doubtful.add((MEMBER_PREFIX, group, name))
        if value is None:
            self._members.discard((group, name))
            try:
                self._delete_own(key)
            except (MetaUnavailable, MetaAmbiguous) as error:
                _log.warning("could not remove a member of group %r, retrying: %s", group, error)
            return
        end = Deadline.after(self._patience)
        while True:
            lease = self._leased()
            try:
                self._store.commit([Put(key, value.encode(), lease)])
                self._members.add((group, name))
                return
            except LeaseNotFound:
                self._ended(lease)
            if not end.pause(jittered(_PAUSE)):
                raise MetaUnavailable(f"could not record a member of group {group!r}: retry")

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
                for part in _parts(names, MAX_CHANGES // 2):
                    gone = [
                        Delete(_key(prefix, group, name)) for name in part for prefix in (POSITION_PREFIX, QUEUE_PREFIX)
                    ]
                    held = [
                        RevisionEquals(_key(CLAIM_PREFIX, group, name), self._held[group, name].place) for name in part
                    ]
                    if self._store.commit(gone, when=held) is None:
                        raise _busy(group, part[0])
            finally:
                for name in locked:
                    self.unlock(group, name)

    def lock(self, group: str, pchannel: str, *, holder: str = "") -> None:
        key, value = _key(CLAIM_PREFIX, group, pchannel), (holder or self._me).encode()
        end = Deadline.after(self._patience)
        with self._turns.acquire(group):
            self._doubtful.add((CLAIM_PREFIX, group, pchannel))
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
                    revision = None  # the next read tells
                if revision is not None:
                    before = self._held.get((group, pchannel))
                    at = (
                        _revision(self._store.get(_key(POSITION_PREFIX, group, pchannel)))
                        if before is None
                        else before.at
                    )
                    self._held[group, pchannel] = _Held(holder, revision, at, lease)
                    return
                if not end.pause(jittered(_PAUSE)):
                    raise MetaUnavailable(f"could not claim {pchannel} for group {group!r}: retry")

    def unlock(self, group: str, pchannel: str) -> None:
        with self._turns.acquire(group):
            held = self._held.pop((group, pchannel), None)
            if held is not None:
                key = _key(CLAIM_PREFIX, group, pchannel)
                try:
                    self._store.commit([Delete(key)], when=[RevisionEquals(key, held.place)])
                except (MetaUnavailable, MetaAmbiguous) as error:
                    self._doubtful.add((CLAIM_PREFIX, group, pchannel))
                    _log.warning("could not release the claim of consumer group %r on %s: %s", group, pchannel, error)

    def close(self) -> None:
        self._closed.set()
        if self._keeping is not None:
            self._keeping.join()
        self._turns.wait_idle()
        self._held.clear()
        lease, self._lease = self._lease, 0
        if lease and not self._members:  # members go on at the next server, which their claims wait for
            try:
                self._store.revoke(lease)
            except (MetaUnavailable, MetaAmbiguous) as error:
                _log.warning("claims of consumer groups are released only when their lease expires: %s", error)
        self._store.close()

    def _leased(self) -> int:
        """Return the lease of this process's claims. A thread renews it from the first call on."""
        with self._guard:
            if self._lease == 0:
                asked = self._clock()
                self._lease = self._store.grant(self._seconds)
                self._ends = asked + self._seconds * (1 - CLOCK_DRIFT)
            if self._keeping is None:
                self._keeping = threading.Thread(target=self._keep, name="group-places", daemon=True)
                self._keeping.start()
            return self._lease

    def _ended(self, lease: int) -> None:
        with self._guard:
            if self._lease == lease:
                self._ends = -math.inf
                self._lease = 0  # `move` finds out which claims were lost

    def locked_until(self, group: str, pchannel: str) -> float:
        held = self._held.get((group, pchannel))
        with self._guard:  # a claim under an earlier lease has ended, even if this was not noticed yet
            return self._ends if held is not None and held.lease == self._lease else -math.inf

    def _keep(self) -> None:
        while not self._closed.wait(self._seconds / 3):
            self.renew()

    def renew(self) -> None:
        """Renew the lease of this process's claims. A thread does, unless a test has its own clock."""
        if lease := self._lease:
            asked = self._clock()
            try:
                self._store.renew(lease)
                with self._guard:
                    if self._lease == lease:
                        self._ends = asked + self._seconds * (1 - CLOCK_DRIFT)
            except LeaseNotFound:
                self._ended(lease)
            except (MetaUnavailable, MetaAmbiguous):
                return  # retried before the lease expires
        self._tidy()

    def _delete_own(self, key: str) -> None:
        """Delete a key under this process's lease; one that another process has put since stays."""
        there = self._store.get(key)
        if there is not None and there.lease == self._lease:
            self._store.commit([Delete(key)], when=[RevisionEquals(key, there.modified)])

    def _tidy(self) -> None:
        """Delete the keys that calls left whose answers were lost: under a lease that lives they would stay."""
        for prefix, group, name in list(self._doubtful):
            with self._turns.acquire(group, blocking=False) as free:
                if not free:
                    continue
                key, owned = _key(prefix, group, name), self._held if prefix == CLAIM_PREFIX else self._members
                try:
                    if (group, name) not in owned:
                        self._delete_own(key)
                except (MetaUnavailable, MetaAmbiguous):
                    return
                self._doubtful.discard((prefix, group, name))


@dataclass(slots=True)
class _Held:
    """A claim of this process."""

    holder: str
    place: int
    """Revision of the claim's key."""
    at: int
    """Revision of the position when it was last read or written."""
    lease: int
    """Lease that it is under."""


def read_group_positions(settings: Settings) -> dict[str, dict[str, int]]:
    """Return ticks by group and PChannel, wherever they are stored now. Imports nothing.

    Raises MetaUnavailable, PositionsBusy.
    Raises InvalidSettings if they are in a meta store that the settings do not name.
    """
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
    """Return ticks by group and PChannel."""
    found: dict[str, dict[str, int]] = {}
    for entry in store.list(POSITION_PREFIX).entries:
        group, pchannel = _names(entry.key, POSITION_PREFIX)
        found.setdefault(group, {})[pchannel] = int(entry.value)
    return {group: dict(sorted(found[group].items())) for group in sorted(found)}


def _busy(group: str, pchannel: str) -> GroupBusy:
    return GroupBusy(
        f"another consumer of group {group!r} reads {pchannel}, or did until a moment ago: stop it, or give this one"
        " a group of its own"
    )


def _revision(entry: Entry | None) -> int:
    return 0 if entry is None else entry.modified


def _key(prefix: str, group: str, lane: str) -> str:
    return f"{prefix}{_quoted(group)}/{_quoted(lane)}"


def _quoted(name: str) -> str:
    return quote(name, safe="").replace("%", "@").replace("~", "@7E")


def _names(key: str, prefix: str) -> tuple[str, str]:
    group, _, pchannel = key.removeprefix(prefix).partition("/")
    return unquote(group.replace("@", "%")), unquote(pchannel.replace("@", "%"))


def _parts(items: Sequence[_T], size: int) -> Iterator[Sequence[_T]]:
    for first in range(0, len(items), size):
        yield items[first : first + size]
