"""Where consumer groups stand: by group and PChannel the time tick up to which everything is done, and who has the place there.

A scan's place is a time tick, not a place in the log: from a tick it resumes exactly, transactions that were open there
included (it begins at that tick's LastConfirmed). So these positions are beside the log's own consumer groups
(:class:`millrace.log.protocol.LogService`), whose positions are entries.

One node keeps them in one SQLite file, synced (:class:`FilePositions`); a cluster whose meta store is named keeps them there
(millrace.coord.consumer_positions).
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
"""In the folder `coord` of the data folder."""
BUSY_SECONDS: Final = 30.0
"""How long a writer waits for another process's transaction."""

_SCHEMA: Final = """
create table if not exists position (
    grp text not null, pchannel text not null, tick integer not null, primary key (grp, pchannel));
"""
_MOVED: Final = "create table moved (at real not null)"
"""Is there once the positions lie in a meta store: from then on the file says nothing."""


class PositionStore(Protocol):
    """Thread-safe; any number of processes."""

    def get(self, group: str, pchannel: str) -> int | None:
        """The tick up to which everything is done; None for a group that never moved there."""
        ...

    def move(self, group: str, ticks: dict[str, int]) -> None:
        """Move a group, by PChannel; durable when it returns, all of it or nothing."""
        ...

    def groups(self) -> dict[str, dict[str, int]]:
        """By group and PChannel the ticks."""
        ...

    def drop(self, group: str, pchannels: Collection[str]) -> None:
        """Forget a group, and its places on these PChannels with it; idempotent. Raises GroupBusy where a consumer has one."""
        ...

    def lock(self, group: str, pchannel: str, *, holder: str = "") -> None:
        """Take a group's place on a PChannel, until `unlock`, `close` or the end of the process. Raises GroupBusy where another
        has it. `holder` names for whom it is taken where that is not this process: whoever takes it for the same one next has it."""
        ...

    def unlock(self, group: str, pchannel: str) -> None:
        """Give one place back."""
        ...

    def close(self) -> None:
        """Give the places back. Idempotent."""
        ...


def _held(error: sqlite3.OperationalError) -> PositionsBusy:
    return PositionsBusy(
        f"another process holds the consumers' positions, coord/{FILE}, and did not let go of them in time ({error}): nothing"
        " was done. Call it again; where it stays so, a process that has the file open is suspended, or copies it"
    )


class FilePositions:
    """The positions in the file of `folder` (the protocol Positions). A place is a lock of a file, which ends with its process."""

    def __init__(self, folder: Path) -> None:
        """Raises InvalidSettings where they lie in a meta store by now; PositionsBusy, here as in each call below, where another
        process holds the file for too long: nothing was done."""
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
        """One caller at a time inside; what another process keeps from it is an error that says so."""
        with self._guard, translate_busy(_held):
            yield self._db

    @contextmanager
    def _writing(self) -> Iterator[sqlite3.Connection]:
        """One transaction, durable at its end."""
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
                "the consumer groups of this deployment stand in its cluster's meta store: set MILLRACE_META_STORE as its nodes have it"
            )

    @property
    def migrated(self) -> bool:
        """Whether the positions lie in a meta store by now."""
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
                    f"another consumer of group {group!r} reads {pchannel}: stop it, or give this one a group of its own"
                ) from None
            except FileNotFoundError:
                pass
            os.close(file)  # the group was dropped between the two: what is locked has no name any more
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
    """Hand the positions in the file of `folder` over to `take(positions, name)`, once; afterwards nobody uses the file. `name` is the
    file's own, the same in each attempt. A file that is absent or empty hands over nothing, and is never taken for the truth.

    Only one process gets this far at a time. Where `take` raises, or this process dies, the file stays the truth, and the next call
    hands its positions over again. Raises GroupBusy where a consumer of the file has a place, PositionsBusy, and what `take` raises.
    """
    try:
        file = FilePositions(folder)
    except InvalidSettings:
        return
    try:
        with file._writing() as db:
            name = _name(db)  # durable before it is put anywhere
        with file._writing() as db:
            found = _groups(db)
            for group, ticks in found.items():
                for pchannel in ticks:
                    file.lock(group, pchannel)  # until the end: nobody's consumer is at work on the file
            take(found, name)
            db.execute(_MOVED)
    except InvalidSettings:
        if not file.migrated:
            raise
    finally:
        file.close()


def reset_file_id(db: sqlite3.Connection) -> None:
    """Have a copy of the file be another one than its original."""
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
