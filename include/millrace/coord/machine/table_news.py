"""News of commits to tables on an object store, from each machine to all others, by the meta store.

A process that commits announces it to the processes of its machine (millrace.storage.log_mirror). One process of each
machine, the one that holds the deployment's lock in the news folder, puts what its machine announced into the meta
store, in one entry for the machine, and announces here what other machines put. So no process polls the object store
for commits of other machines. A machine whose entry skipped some of its news counts as one that committed to every
table.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from millrace.base.errors import LeaseNotFound
from millrace.base.files import make_folder
from millrace.base.settings import Settings, following
from millrace.meta.store import MetaStore, Put
from millrace.runtime.periodic import PeriodicTask
from millrace.storage.log_mirror import LocalNews, is_mirrored, news_key, note_heard, remote_news
from millrace.storage.store import store_at

PREFIX: Final = "news/"
NEWS_SECONDS: Final = 0.5
"""Time between two rounds: the delay of news, and the least time between two puts of a machine."""
MAX_TABLES: Final = 128
"""Tables that an entry names: those with the newest commits."""
LEASE_SECONDS: Final = 600.0
"""Time after which the entry of a machine that is gone ends."""
HEARD_EVERY: Final = 5.0
"""Seconds between two notes that this machine hears the others."""


class TableNews(PeriodicTask):
    """Carries the news of one machine, from :meth:`start` to :meth:`close`. Does nothing while the tables are on a
    disk; follows a move of the tables.
    """

    def __init__(
        self,
        settings: Settings,
        store: MetaStore,
        *,
        folder: Path | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """`folder`: the machine's cache of objects, if not this user's. `now` returns seconds."""
        super().__init__(name="table-news", interval=NEWS_SECONDS)
        self._settings = following(settings)
        self._root = ""
        """Place of the tables in the last round, without a trailing slash."""
        self._store, self._now = store, now
        self._local = LocalNews(folder)
        self._folder = folder
        self._key = PREFIX + secrets.token_hex(8)
        self._lock = -1
        self._number = 0
        """Number of the newest commit that this process put."""
        self._tables: dict[str, int] = {}
        """Tables with newest commits of this machine, by name relative to the root, with their numbers."""
        self._unsent = False
        self._seen: dict[str, tuple[int, int]] = {}
        """Revision of each other machine's entry, and the number of its newest commit."""
        self._first = True
        self._lease, self._renewed = 0, 0.0
        self._noted = float("-inf")
        """When it noted that this machine hears the others."""

    def close(self) -> None:
        super().close()
        self._let_go()

    def _let_go(self) -> None:
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def run_once(self) -> None:
        """Send and receive once. Raises MetaUnavailable, MetaAmbiguous: the next round repeats it."""
        root = self._settings.tables_uri.rstrip("/")
        if root != self._root:
            self._root, self._first = root, True
            self._tables.clear()
            self._let_go()
        if not is_mirrored(store_at(root)) or not self._carries():
            return
        self._send()
        self._receive()
        if self._now() - self._noted >= HEARD_EVERY:
            self._noted = self._now()
            note_heard(self._root, self._folder)

    def _carries(self) -> bool:
        """Return whether this process is the one that carries its machine's news of the deployment."""
        if self._lock >= 0:
            return True
        make_folder(self._local.folder, 0o700)
        path = self._local.folder / f".{news_key(self._root)}.lock"
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(handle)
            return False
        self._lock = handle
        return True

    def _send(self) -> None:
        for uri in self._local.changed():
            if not uri.startswith(f"{self._root}/"):
                continue  # another deployment's, by the same cache
            self._number += 1
            name = uri.removeprefix(f"{self._root}/")
            self._tables.pop(name, None)  # the newest last
            self._tables[name] = self._number
            self._unsent = True
        for name in [*self._tables][:-MAX_TABLES]:
            del self._tables[name]
        if not self._unsent and self._now() - self._renewed < LEASE_SECONDS / 3:
            return
        entry: dict[str, Any] = {"number": self._number, "tables": self._tables}
        # Repeating it after a lost answer is harmless: the entry says the same.
        try:
            self._keep_lease()
            self._store.commit([Put(self._key, json.dumps(entry).encode(), self._lease)])
        except LeaseNotFound:
            self._lease = 0
            self._keep_lease()
            self._store.commit([Put(self._key, json.dumps(entry).encode(), self._lease)])
        self._unsent = False

    def _keep_lease(self) -> None:
        if self._lease == 0:
            self._lease = self._store.grant(LEASE_SECONDS)
        elif self._now() - self._renewed >= LEASE_SECONDS / 3:
            self._store.renew(self._lease)
        else:
            return
        self._renewed = self._now()

    def _receive(self) -> None:
        found = {entry.key: entry for entry in self._store.list(PREFIX).entries if entry.key != self._key}
        for key, entry in found.items():
            revision, number = self._seen.get(key, (0, 0))
            if entry.modified == revision:
                continue
            said = json.loads(entry.value)
            newer = [name for name, each in said["tables"].items() if each > number]
            if self._first or len(newer) < said["number"] - number:
                # What it names may be less than what it committed since.
                self._local.announce_all()
            else:
                for name in newer:
                    remote_news(f"{self._root}/{name}", self._folder)
            self._seen[key] = (entry.modified, said["number"])
        for key in self._seen.keys() - found.keys():
            del self._seen[key]
        self._first = False
