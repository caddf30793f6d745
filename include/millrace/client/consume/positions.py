"""Positions of consumer groups: by group and lane the time tick up to which everything is done, and the claim on it.

A lane is a VChannel, or a PChannel for a consumer of PChannels. Builds before consumer groups shared their lanes have
positions by PChannel alone, which apply to a VChannel that has none of its own (:func:`start_of`). A claim is the
exclusive right of one holder to a lane. A member is a consumer that divides a group's lanes with others.

A scan resumes exactly at a time tick, including transactions that were open then, because it starts at the tick's
LastConfirmed. So these positions are separate from the log's own consumer groups
(:class:`millrace.log.protocol.LogService`), whose positions are entries.

One node keeps them in a synced SQLite file (:class:`FilePositions`). A cluster with a meta store keeps them there
(millrace.coord.consumer_positions).
"""

from __future__ import annotations

import math
import secrets
import sqlite3
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final, Protocol
from urllib.parse import quote

from millrace.base.errors import GroupBusy, InvalidSettings, PositionsBusy
from millrace.base.file_lock import NamedLocks, is_locked
from millrace.base.files import make_folder
from millrace.base.sqlite_errors import translate_busy
from millrace.message.ids import split_channel

FILE: Final = "consumers.db"
"""Name of the file in the data folder's `coord` folder."""
LOCKS: Final = "consumers.locks"
"""Name of the folder of the locks, beside it."""
BUSY_SECONDS: Final = 30.0
"""How long a writer waits for another process's transaction."""

_SCHEMA: Final = """
create table if not exists position (
    grp text not null, pchannel text not null, tick integer not null, primary key (grp, pchannel));
create table if not exists claim (
    grp text not null, lane text not null, holder text not null, primary key (grp, lane));
create table if not exists queue (
    grp text not null, lane text not null, state blob not null, primary key (grp, lane));
create table if not exists member (
    grp text not null, name text not null, value text not null, primary key (grp, name));
"""
_MOVED: Final = "create table moved (at real not null)"
"""Exists once the positions are in a meta store; from then on the file is not used."""


class PositionStore(Protocol):
    """Store of group positions. Thread-safe; any number of processes may use it."""

    def get(self, group: str, pchannel: str) -> int | None:
        """Return the tick up to which everything is done; None for a group that never moved there."""
        ...

    def move(self, group: str, ticks: dict[str, int], states: Mapping[str, bytes] | None = None) -> None:
        """Move a group, by PChannel; durable and atomic. `states` are those of a work queue, of the same lanes."""
        ...

    def queue_states(self, group: str, lanes: Collection[str] | None = None) -> dict[str, bytes]:
        """Return the states of a work queue's lanes, of all without `lanes`; empty if the group is none."""
        ...

    def queues(self) -> set[str]:
        """Return the groups that are work queues."""
        ...

    def groups(self) -> dict[str, dict[str, int]]:
        """Return the ticks by group and lane."""
        ...

    def place(self, group: str, ticks: Mapping[str, int | None], states: Mapping[str, bytes] | None = None) -> None:
        """Put a group's positions anywhere, also back; None deletes one. `states` replace those of a work queue there.

        Raises GroupBusy if one is claimed.
        """
        ...

    def claims(self, group: str | None = None) -> dict[tuple[str, str], str]:
        """Return the holders of claimed lanes by (group, lane), of one group or of all."""
        ...

    def version(self) -> object | None:
        """Return what changes with every change of claims and members, perhaps more often; None if that is unknown."""
        ...

    def abandoned(self, group: str) -> tuple[dict[str, str], dict[str, str]]:
        """Return the members by name, and the holders by lane, that another process recorded and no lease ends."""
        ...

    def members(self, group: str | None = None) -> dict[tuple[str, str], str]:
        """Return what is recorded of members by (group, member), of one group or of all."""
        ...

    def set_member(self, group: str, name: str, value: str | None) -> None:
        """Record a member until `close` or the end of the process, or longer; None removes it. Idempotent."""
        ...

    def drop(self, group: str, pchannels: Collection[str]) -> None:
        """Delete a group with its positions on these PChannels; idempotent.

        Raises GroupBusy if a consumer has locked one.
        """
        ...

    def lock(self, group: str, pchannel: str, *, holder: str = "") -> None:
        """Lock a group's position on a PChannel until `unlock`, `close` or the end of the process.

        `holder` names on whose behalf it is locked, if that is not this process: a later lock for the same holder
        succeeds.

        Raises GroupBusy if another has it.
        """
        ...

    def unlock(self, group: str, pchannel: str) -> None:
        """Release one lock."""
        ...

    def locked_until(self, group: str, pchannel: str) -> float:
        """Return until when nobody else can have this process's lock, by its clock of boot time."""
        ...

    def close(self) -> None:
        """Release all locks. Idempotent."""
        ...


class GroupPositions(Protocol):
    """Positions of a group that one consumer has for itself. Thread-safe.

    See :class:`millrace.client.consume.membership.ExclusivePositions`.
    """

    def lock(self, group: str, lane: str) -> None:
        """Lock a group's position on a lane until `close` or the end of the process. Raises GroupBusy."""
        ...

    def get(self, group: str, lane: str) -> int | None:
        """Return the tick up to which everything is done; None for a group that never moved there."""
        ...

    def move(self, group: str, ticks: dict[str, int]) -> None:
        """Move a group, by lane; durable and atomic. Raises GroupBusy if its lock is lost."""
        ...

    def close(self) -> None:
        """Release the locks. Idempotent."""
        ...


def _held(error: sqlite3.OperationalError) -> PositionsBusy:
    return PositionsBusy(
        f"another process holds the consumers' positions, coord/{FILE}, and did not release it in time ({error})."
        " Nothing"
        " was done. Call it again; where it stays so, a process that has the file open is suspended, or copies it"
    )


def _lock_name(group: str, pchannel: str) -> str:
    return f"{quote(group, safe='')}-{quote(pchannel, safe='')}"


class FilePositions:
    """The positions in the file of `folder` (implements PositionStore).

    Locks are file locks, which end with their process.
    """

    def __init__(self, folder: Path) -> None:
        """Open the file.

        Raises InvalidSettings if the positions are in a meta store by now.
        Raises PositionsBusy, here and in every method, if another process holds the file for too long; nothing was
        done.
        """
        make_folder(folder)
        self._folder = folder
        self._guard = threading.RLock()
        self._recorded: set[tuple[str, str]] = set()
        """Locks whose holder is in the file."""
        self._own_members: set[tuple[str, str]] = set()
        self._locks = NamedLocks(folder / LOCKS)
        self._db = sqlite3.connect(folder / FILE, timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False)
        try:
            with self._typed():
                self._db.execute("pragma journal_mode=wal")
                self._db.execute("pragma synchronous=full")
                self._db.executescript(_SCHEMA)
                self._check()
        except BaseException:
            self._locks.close()
            self._db.close()
            raise

    @contextmanager
    def _typed(self) -> Iterator[sqlite3.Connection]:
        """Serialize callers, and turn SQLite's busy error into PositionsBusy."""
        with self._guard, translate_busy(_held):
            yield self._db

    @contextmanager
    def _writing(self) -> Iterator[sqlite3.Connection]:
        """Run one transaction, durable at its end."""
        with self._typed() as db:
            db.execute("begin immediate")
            try:
                self._check()
                yield db
                db.execute("commit")
            except BaseException:
                if db.in_transaction:
                    db.rollback()
                raise

    def _check(self) -> None:
        if self.migrated:
            raise InvalidSettings(
                "the consumer groups of this deployment are in its cluster's meta store: set MILLRACE_META_STORE as on"
                " its nodes"
            )

    @property
    def migrated(self) -> bool:
        """Whether the positions are in a meta store by now."""
        return self._db.execute("select 1 from sqlite_master where name = 'moved'").fetchone() is not None

    def place(self, group: str, ticks: Mapping[str, int | None], states: Mapping[str, bytes] | None = None) -> None:
        with ExitStack() as locked:
            for name in ticks:
                self.lock(group, name)
                locked.callback(self.unlock, group, name)
            gone = [(group, name) for name, tick in ticks.items() if tick is None]
            with self._writing() as db:
                db.executemany("delete from position where grp = ? and pchannel = ?", gone)
                db.executemany("delete from queue where grp = ? and lane = ?", [(group, name) for name in ticks])
                _put(db, group, {name: tick for name, tick in ticks.items() if tick is not None})
                _put_states(db, group, states or {})

    def claims(self, group: str | None = None) -> dict[tuple[str, str], str]:
        with self._typed() as db:
            rows = db.execute("select grp, lane, holder from claim where ? is null or grp = ?", (group, group))
            return {(name, lane): holder for name, lane, holder in rows}

    def version(self) -> object | None:
        with self._typed() as db:
            return db.execute("pragma data_version").fetchone(), db.total_changes

    def abandoned(self, group: str) -> tuple[dict[str, str], dict[str, str]]:
        members, claims = self.members(group), self.claims(group)
        with self._guard:
            return (
                {name: value for (_, name), value in members.items() if (group, name) not in self._own_members},
                {lane: holder for (_, lane), holder in claims.items() if _lock_name(group, lane) not in self._locks},
            )

    def members(self, group: str | None = None) -> dict[tuple[str, str], str]:
        with self._typed() as db:
            rows = db.execute("select grp, name, value from member where ? is null or grp = ?", (group, group))
            return {(of, name): value for of, name, value in rows}

    def set_member(self, group: str, name: str, value: str | None) -> None:
        with self._writing() as db:
            (self._own_members.discard if value is None else self._own_members.add)((group, name))
            if value is None:
                db.execute("delete from member where grp = ? and name = ?", (group, name))
            else:
                db.execute("insert or replace into member values (?, ?, ?)", (group, name, value))

    def get(self, group: str, pchannel: str) -> int | None:
        with self._typed() as db:
            row = db.execute("select tick from position where grp = ? and pchannel = ?", (group, pchannel)).fetchone()
        return None if row is None else int(row[0])

    def move(self, group: str, ticks: dict[str, int], states: Mapping[str, bytes] | None = None) -> None:
        with self._writing() as db:
            _put(db, group, ticks)
            _put_states(db, group, states or {})

    def queue_states(self, group: str, lanes: Collection[str] | None = None) -> dict[str, bytes]:
        with self._typed() as db:
            rows = db.execute("select lane, state from queue where grp = ?", (group,))
            return {lane: state for lane, state in rows if lanes is None or lane in lanes}

    def queues(self) -> set[str]:
        with self._typed() as db:
            return {group for (group,) in db.execute("select distinct grp from queue")}

    def groups(self) -> dict[str, dict[str, int]]:
        with self._typed() as db:
            return _groups(db)

    def drop(self, group: str, pchannels: Collection[str]) -> None:
        with ExitStack() as locked:
            for name in sorted({*pchannels, *self.groups().get(group, ())}):
                self.lock(group, name)
                locked.callback(self.unlock, group, name)
            with self._writing() as db:
                for table in ("position", "queue", "claim", "member"):
                    db.execute(f"delete from {table} where grp = ?", (group,))

    def lock(self, group: str, pchannel: str, *, holder: str = "") -> None:
        earlier = self._folder / f"group-{_lock_name(group, pchannel)}.lock"
        if is_locked(earlier) or not self._locks.acquire(_lock_name(group, pchannel)):
            raise GroupBusy(
                f"another consumer of group {group!r} reads {pchannel}: stop it, or give this one a group of its own"
            )
        try:
            earlier.unlink(missing_ok=True)  # of a build that had a file for each lock
            if holder:
                with self._writing() as db:
                    self._recorded.add((group, pchannel))
                    db.execute("insert or replace into claim values (?, ?, ?)", (group, pchannel, holder))
        except BaseException:
            self.unlock(group, pchannel)
            raise

    def unlock(self, group: str, pchannel: str) -> None:
        with self._guard:
            recorded = (group, pchannel) in self._recorded
            self._recorded.discard((group, pchannel))
        try:
            if recorded:  # before the lock is free: the next claim writes this row
                with self._writing() as db:
                    db.execute("delete from claim where grp = ? and lane = ?", (group, pchannel))
        finally:
            self._locks.release(_lock_name(group, pchannel))

    def locked_until(self, group: str, pchannel: str) -> float:
        return (
            math.inf if _lock_name(group, pchannel) in self._locks else -math.inf
        )  # a file lock ends with its process

    def close(self) -> None:
        with self._guard:
            self._locks.close()
            self._db.close()


QueueStates = Mapping[tuple[str, str], bytes]
"""States of work queues by group and lane."""


def migrate_positions(folder: Path, take: Callable[[Mapping[str, Mapping[str, int]], str, QueueStates], None]) -> None:
    """Pass the positions in the file of `folder` to `take(positions, name, queues)` once; then nobody uses the file.

    `name` identifies the file and is the same in each attempt. A missing or empty file passes on nothing and never
    overrides the meta store. Only one process may get this far at a time. If `take` raises or this process dies, the
    file stays authoritative, and the next call passes its positions on again.

    Raises GroupBusy if a consumer has locked a position in the file, PositionsBusy, and what `take` raises.
    """
    try:
        file = FilePositions(folder)
    except InvalidSettings:
        return
    try:
        with file._writing() as db:
            name = _name(db)  # must be durable before it is stored anywhere else
        with file._writing() as db:
            found = _groups(db)
            for group, ticks in found.items():
                for pchannel in ticks:
                    file.lock(group, pchannel)  # held until the end, so that no consumer uses the file
            rows = db.execute("select grp, lane, state from queue")
            take(found, name, {(group, lane): state for group, lane, state in rows})
            db.execute(_MOVED)
    except InvalidSettings:
        if not file.migrated:
            raise
    finally:
        file.close()


def start_of(lane: str, ticks: Mapping[str, int]) -> int | None:
    """Return where a group with these positions starts on a lane; None if it never moved there."""
    found = ticks.get(lane)
    return ticks.get(split_channel(lane)[0]) if found is None else found


def lane_positions(ticks: Mapping[str, int]) -> dict[str, int]:
    """Return the positions that count: one of a PChannel does not once the group has one of a VChannel there."""
    moved = {pchannel for pchannel, vchannel in map(split_channel, ticks) if vchannel}
    return {lane: tick for lane, tick in ticks.items() if lane not in moved}


def reset_file_id(db: sqlite3.Connection) -> None:
    """Give a copy of the file an identity of its own."""
    db.execute("drop table if exists file")


def _put(db: sqlite3.Connection, group: str, ticks: Mapping[str, int]) -> None:
    db.executemany(
        "insert into position values (?, ?, ?) on conflict (grp, pchannel) do update set tick = excluded.tick",
        [(group, lane, tick) for lane, tick in ticks.items()],
    )


def _put_states(db: sqlite3.Connection, group: str, states: Mapping[str, bytes]) -> None:
    rows = [(group, lane, state) for lane, state in states.items()]
    db.executemany("insert or replace into queue values (?, ?, ?)", rows)


def _name(db: sqlite3.Connection) -> str:
    db.execute("create table if not exists file (name text not null)")
    db.execute("insert into file select ? where not exists (select 1 from file)", (secrets.token_hex(16),))
    return str(db.execute("select name from file").fetchone()[0])


def _groups(db: sqlite3.Connection) -> dict[str, dict[str, int]]:
    found: dict[str, dict[str, int]] = {}
    for group, pchannel, tick in db.execute("select grp, pchannel, tick from position order by grp, pchannel"):
        found.setdefault(group, {})[pchannel] = tick
    return found
