"""Where consumer groups stand: by group and PChannel the time tick up to which everything is done. One SQLite file, synced.

A scan's place is a time tick, not a place in the log: from a tick it resumes exactly, transactions that were open there
included (it begins at that tick's LastConfirmed). So these positions are beside the log's own consumer groups
(:class:`millrace.log.protocol.LogService`), whose positions are entries.
"""

from __future__ import annotations

import fcntl
import os
import sqlite3
import threading
from collections.abc import Collection
from pathlib import Path
from typing import Final
from urllib.parse import quote

from millrace.base.errors import GroupBusy

_SCHEMA: Final = """
create table if not exists position (
    grp text not null, pchannel text not null, tick integer not null, primary key (grp, pchannel));
"""


class Positions:
    """The positions in `folder`. Thread-safe; any number of processes."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._guard = threading.Lock()
        self._db = sqlite3.connect(folder / "consumers.db", timeout=30.0, isolation_level=None, check_same_thread=False)
        self._db.execute("pragma journal_mode=wal")
        self._db.execute("pragma synchronous=full")
        self._db.executescript(_SCHEMA)
        self._locks: dict[tuple[str, str], int] = {}

    def get(self, group: str, pchannel: str) -> int | None:
        """The tick up to which everything is done; None for a group that never moved there."""
        with self._guard:
            row = self._db.execute(
                "select tick from position where grp = ? and pchannel = ?", (group, pchannel)
            ).fetchone()
        return None if row is None else int(row[0])

    def move(self, group: str, ticks: dict[str, int]) -> None:
        """Move a group, by PChannel; durable when it returns, all of it or nothing."""
        with self._guard:
            self._db.execute("begin immediate")
            self._db.executemany(
                "insert into position values (?, ?, ?) on conflict (grp, pchannel) do update set tick = excluded.tick",
                [(group, pchannel, tick) for pchannel, tick in ticks.items()],
            )
            self._db.execute("commit")

    def groups(self) -> dict[str, dict[str, int]]:
        """By group and PChannel the ticks."""
        with self._guard:
            rows = self._db.execute("select grp, pchannel, tick from position order by grp, pchannel").fetchall()
        found: dict[str, dict[str, int]] = {}
        for group, pchannel, tick in rows:
            found.setdefault(group, {})[pchannel] = tick
        return found

    def drop(self, group: str, pchannels: Collection[str]) -> None:
        """Forget a group, and its places on these PChannels with it; idempotent. Raises GroupBusy where a consumer has one."""
        names = sorted({*pchannels, *self.groups().get(group, ())})
        locked: list[str] = []
        try:
            for name in names:
                self.lock(group, name)
                locked.append(name)
            with self._guard:
                self._db.execute("delete from position where grp = ?", (group,))
            for name in names:
                self._lock_file(group, name).unlink(missing_ok=True)
        finally:
            for name in locked:
                self.unlock(group, name)

    def lock(self, group: str, pchannel: str) -> None:
        """Take a group's place on a PChannel, until `close` or the end of the process. Raises GroupBusy."""
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
        """Give one place back."""
        with self._guard:
            file = self._locks.pop((group, pchannel), None)
        if file is not None:
            os.close(file)

    def close(self) -> None:
        """Give the places back. Idempotent."""
        with self._guard:
            locks, self._locks = self._locks, {}
            for file in locks.values():
                os.close(file)
            self._db.close()
