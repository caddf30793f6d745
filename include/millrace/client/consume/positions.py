"""Positions of consumer groups: by group and PChannel the time tick up to which everything is done, and the lock on it.

A scan resumes exactly at a time tick, including transactions that were open then, because it starts at the tick's
LastConfirmed. So these positions are separate from the log's own consumer groups
(:class:`millrace.log.protocol.LogService`), whose positions are entries.

One node keeps them in a synced SQLite file (:class:`FilePositions`). A cluster with a meta store keeps them there
(millrace.coord.positions).
"""

from __future__ import annotations

import fcntl
import os
import secrets
import sqlite3
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final, Protocol
from urllib.parse import quote

from millrace.base.errors import GroupBusy, InvalidSettings, PositionsBusy
from millrace.base.files import make_folder
from millrace.base.sqlite_errors import translate_busy

FILE: Final = "consumers.db"
"""Name of the file in the data folder's `coord` folder."""
BUSY_SECONDS: Final = 30.0
"""How long a writer waits for another process's transaction."""

_SCHEMA: Final = """
create table if not exists position (
    grp text not null, pchannel text not null, tick integer not null, primary key (grp, pchannel));
"""
_MOVED: Final = "create table moved (at real not null)"
"""Exists once the positions are in a meta store; from then on the file is not used."""


class PositionStore(Protocol):
    """Store of group positions. Thread-safe; any number of processes may use it."""

    def get(self, group: str, pchannel: str) -> int | None:
        """Return the tick up to which everything is done; None for a group that never moved there."""
        ...

    def move(self, group: str, ticks: dict[str, int]) -> None:
        """Move a group, by PChannel; durable and atomic."""
        ...

    def groups(self) -> dict[str, dict[str, int]]:
        """Return the ticks by group and PChannel."""
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

    def close(self) -> None:
        """Release all locks. Idempotent."""
        ...


def _held(error: sqlite3.OperationalError) -> PositionsBusy:
    return PositionsBusy(
        f"another process holds the consumers' positions, coord/{FILE}, and did not release it in time ({error})."
        " Nothing"
        " was done. Call it again; where it stays so, a process that has the file open is suspended, or copies it"
    )


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
        self._locks: dict[tuple[str, str], int] = {}
        self._db = sqlite3.connect(folder / FILE, timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False)
        try:
            with self._typed():
                self._db.execute("pragma journal_mode=wal")
                self._db.execute("pragma synchronous=full")
                self._db.executescript(_SCHEMA)
                self._check()
        except BaseException:
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

    def get(self, group: str, pchannel: str) -> int | None:
        with self._typed() as db:
            row = db.execute("select tick from position where grp = ? and pchannel = ?", (group, pchannel)).fetchone()
        return None if row is None else int(row[0])

    def move(self, group: str, ticks: dict[str, int]) -> None:
        with self._writing() as db:
            db.executemany(
                "insert into position values (?, ?, ?) on conflict (grp, pchannel) do update set tick = excluded.tick",
                [(group, pchannel, tick) for pchannel, tick in ticks.items()],
            )

    def groups(self) -> dict[str, dict[str, int]]:
        with self._typed() as db:
            return _groups(db)

    def drop(self, group: str, pchannels: Collection[str]) -> None:
        with ExitStack() as locked:
            for name in sorted({*pchannels, *self.groups().get(group, ())}):
                self.lock(group, name)
                locked.callback(self.unlock, group, name)
                locked.callback(self._lock_file(group, name).unlink, missing_ok=True)
            with self._writing() as db:
                db.execute("delete from position where grp = ?", (group,))

    def lock(self, group: str, pchannel: str, *, holder: str = "") -> None:
        path = self._lock_file(group, pchannel)
        while True:
            file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.path.samestat(path.stat(), os.fstat(file)):
                    break
            except BlockingIOError:
                os.close(file)
                raise GroupBusy(
                    f"another consumer of group {group!r} reads {pchannel}: stop it, or give this one a group of its"
                    " own"
                ) from None
            except FileNotFoundError:
                pass
            os.close(file)  # the group was dropped between open and flock: the locked file is unlinked
        with self._guard:
            self._locks[group, pchannel] = file

    def _lock_file(self, group: str, pchannel: str) -> Path:
        return self._folder / f"group-{quote(group, safe='')}-{quote(pchannel, safe='')}.lock"

    def unlock(self, group: str, pchannel: str) -> None:
        with self._guard:
            file = self._locks.pop((group, pchannel), None)
        if file is not None:
            os.close(file)

    def close(self) -> None:
        with self._guard:
            locks, self._locks = self._locks, {}
            for file in locks.values():
                os.close(file)
            self._db.close()


def migrate_positions(folder: Path, take: Callable[[Mapping[str, Mapping[str, int]], str], None]) -> None:
    """Pass the positions in the file of `folder` to `take(positions, name)` once; afterwards nobody uses the file.

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
            take(found, name)
            db.execute(_MOVED)
    except InvalidSettings:
        if not file.migrated:
            raise
    finally:
        file.close()


def reset_file_id(db: sqlite3.Connection) -> None:
    """Give a copy of the file an identity of its own."""
    db.execute("drop table if exists file")


def _name(db: sqlite3.Connection) -> str:
    db.execute("create table if not exists file (name text not null)")
    db.execute("insert into file select ? where not exists (select 1 from file)", (secrets.token_hex(16),))
    return str(db.execute("select name from file").fetchone()[0])


def _groups(db: sqlite3.Connection) -> dict[str, dict[str, int]]:
    found: dict[str, dict[str, int]] = {}
    for group, pchannel, tick in db.execute("select grp, pchannel, tick from position order by grp, pchannel"):
        found.setdefault(group, {})[pchannel] = tick
    return found
