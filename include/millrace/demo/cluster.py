"""A cluster on this machine: coordinators and nodes as processes over one data folder, and an observer of their moves.

The observer reads what anybody can read: the records of the meta store and the commits of `wal`.
"""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from millrace.base.closeable import Closeable
from millrace.base.deadline import Deadline
from millrace.base.errors import DeadlineExceeded, MillraceError
from millrace.base.settings import Settings
from millrace.coord import control
from millrace.coord.channels.record import CHANNEL_PREFIX, AssignmentState, ChannelRecord
from millrace.coord.clock import SystemClock
from millrace.coord.cluster_file import STORE_FILE
from millrace.coord.session import INGEST, moving_roles
from millrace.coord.store_factory import open_cluster_store
from millrace.meta.store import MetaStore
from millrace.runtime.child_processes import ChildProcess
from millrace.storage.delta_log import COMMIT_INFO_KEY, read_actions
from millrace.storage.store import store_at
from millrace.storage.table import open_table

POLL_SECONDS: Final = 0.05
SUSPEND_SECONDS: Final = 30.0
LOCK_SECONDS: Final = 1.0
"""A process that locks the embedded meta store for longer counts as suspended."""


class LocalCluster(Closeable):
    """The processes of the cluster, by name. They end when it is closed."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self.store: MetaStore = open_cluster_store(settings, SystemClock())
        self.jobs: dict[str, ChildProcess] = {}

    def coordinator(self, name: str = "c1") -> ChildProcess:
        """Start a coordinator."""
        return self._start(name, ["-m", "millrace.service", "--name", name], self._settings, {})

    def node(self, name: str, *, job: Path | None = None, environment: Mapping[str, str] | None = None) -> ChildProcess:
        """Start a node: with the loops in its process, or with Spark through the file `job` of jobs/."""
        command = ["-m", "millrace.node.cluster"] if job is None else [str(job), "--with-flusher"]
        return self._start(name, command, replace(self._settings, node=name), environment or {})

    def _start(self, name: str, command: list[str], settings: Settings, environment: Mapping[str, str]) -> ChildProcess:
        log_file = self._settings.run_path / f"{name}.log"
        env = {**settings.environment(), **environment}
        self.jobs[name] = ChildProcess([sys.executable, *command], log_file=log_file, env=env)
        return self.jobs[name]

    def suspend(self, name: str) -> None:
        """Suspend a process, but not during a write to SQLite, whose lock would block all others.

        See docs/coordinator.md. Raises DeadlineExceeded.
        """
        end = Deadline.after(SUSPEND_SECONDS)
        while True:
            os.kill(self.jobs[name].pid, signal.SIGSTOP)
            if self.store_is_writable():
                return
            self.resume(name)
            if not end.pause(POLL_SECONDS):
                raise DeadlineExceeded(f"{name} kept the meta store locked for {SUSPEND_SECONDS:.0f} s")

    def store_is_writable(self) -> bool:
        """Return whether the embedded meta store accepts a write now; a database server never waits for a sleeper."""
        if self._settings.meta_store:
            return True
        path = self._settings.data_dir / "coord" / STORE_FILE
        with closing(sqlite3.connect(path, timeout=LOCK_SECONDS, isolation_level=None)) as db:
            try:
                db.execute("begin immediate")
                db.execute("rollback")
            except sqlite3.OperationalError:
                return False
        return True

    def resume(self, name: str) -> None:
        os.kill(self.jobs[name].pid, signal.SIGCONT)

    def session(self, name: str) -> str:
        """Return the node's session; "" if it has none."""
        return next((each.session for each in control.nodes(self.store) if each.name == name), "")

    def owners(self, role: str = INGEST) -> dict[str, str]:
        """Return, by PChannel, the name of the node that holds the role beyond doubt."""
        return {
            record.pchannel: record.owner.session.rpartition("@")[0]
            for record in control.channels(self.store)
            if record.state is AssignmentState.ASSIGNED and record.owner is not None and record.role == role
        }

    def wait_owned(self, names: set[str], *, pchannels: int, deadline: float) -> dict[str, str]:
        """Wait until exactly the nodes `names` own all PChannels in each movable role; return the owners for ingest.

        Raises DeadlineExceeded.
        """
        end = Deadline.after(deadline)
        roles = moving_roles(self._settings.log)
        while True:
            with suppress(MillraceError):
                found = self.owners()
                owned = [found, *(self.owners(role) for role in roles if role != INGEST)]
                if all(len(each) == pchannels and set(each.values()) == names for each in owned):
                    return found
            if not end.pause(POLL_SECONDS):
                raise DeadlineExceeded(
                    f"after {deadline:.0f} s the nodes {sorted(names)} do not own all: {found}\n{self.log_tails()}"
                )

    def log_tails(self) -> str:
        return "\n".join(f"--- {name}\n{job.tail(12)}" for name, job in self.jobs.items())

    def stop(self) -> dict[str, int]:
        """Stop all processes, suspended ones too, and return their exit codes."""
        for name, job in self.jobs.items():
            if job.running():
                self.resume(name)
        return {name: job.stop(deadline=self._settings.stop_deadline) for name, job in self.jobs.items()}

    def close(self) -> None:
        self.stop()
        self.store.close()


@dataclass(frozen=True, slots=True)
class ObservedMove:
    """The move of a PChannel's role (ingest or append) from one node to another. Times are Unix seconds."""

    pchannel: str
    term: int
    cause: str
    source: str
    """The previous owner; "" for the first owner."""
    to: str
    decided_at: float
    """Time of the decision."""
    assigned_at: float
    """Time at which the new owner had the role."""
    downtime_seconds: float | None = None
    """Seconds between the last commit before the move and the first one after it.

    None if one of them was not seen, and for appends.
    """


class MoveObserver(threading.Thread):
    """Watches the records of one role and the commits of `wal` until it is stopped."""

    def __init__(self, settings: Settings, store: MetaStore, *, role: str = INGEST) -> None:
        super().__init__(name=f"moves-{role}", daemon=True)
        self._role = role
        self._wal = settings.wal_uri
        self._store = store
        self._ended = threading.Event()
        self._owners: dict[str, str] = {}
        self._begun: dict[str, tuple[float, str]] = {}
        self._moves: list[ObservedMove] = []
        self._commits: dict[str, list[float]] = {}
        self._version = -1
        """The version of `wal` up to which commits were read."""

    def run(self) -> None:
        revision = -1
        while not self._ended.wait(POLL_SECONDS):
            with suppress(MillraceError, OSError):  # the meta store, or the tables' store, is away
                if revision < 0:
                    listed = self._store.list(CHANNEL_PREFIX)
                    revision, entries = listed.revision, list(listed.entries)
                else:
                    found = self._store.changes(CHANNEL_PREFIX, after=revision)
                    revision, entries = found.revision, [event.entry for event in found.events if event.entry]
                for entry in entries:
                    self._saw(ChannelRecord.decode(entry.value, entry.modified), time.time())
                if self._role == INGEST:
                    self._read_commits()

    def end(self) -> None:
        """Observe nothing further, so that the store may be closed. Idempotent."""
        self._ended.set()
        if self.is_alive():
            self.join()

    def stop(self) -> None:
        """End, and take the last commits into account. Raises what the tables' store raises."""
        self.end()
        if self._role == INGEST:
            self._read_commits()

    def _saw(self, record: ChannelRecord, now: float) -> None:
        if record.role != self._role:
            return
        name = record.pchannel
        if record.state in (AssignmentState.ASSIGNING, AssignmentState.UNAVAILABLE):
            self._begun.setdefault(name, (now, record.cause))
        if record.state is AssignmentState.ASSIGNED and record.owner is not None:
            to = record.owner.session.rpartition("@")[0]
            began, _ = self._begun.pop(name, (now, ""))
            self._moves.append(
                ObservedMove(name, record.term, record.cause, self._owners.get(name, ""), to, began, now)
            )
            self._owners[name] = to

    def _read_commits(self) -> None:
        store = store_at(self._wal)
        if self._version < 0:
            table = open_table(self._wal)
            if table is None:
                return
            self._version = table.version
        while (actions := read_actions(store, self._version + 1)) is not None:
            self._version += 1
            for action in actions:
                info = action.get("commitInfo", {})
                said = info.get(COMMIT_INFO_KEY, {})
                for pchannel in json.loads(said) if isinstance(said, str) else said:
                    self._commits.setdefault(pchannel, []).append(info["timestamp"] / 1000)

    def commits(self) -> Mapping[str, list[float]]:
        """Return the times of each PChannel's commits to `wal`, in Unix seconds, as their writers recorded them."""
        return self._commits

    def observed(self) -> Iterator[ObservedMove]:
        """Yield the moves from one node to another so far, in order."""
        for move in self._moves:
            if move.source:
                times = self._commits.get(move.pchannel, [])
                before = [each for each in times if each <= move.assigned_at]
                after = [each for each in times if each > move.assigned_at]
                yield replace(move, downtime_seconds=after[0] - before[-1] if before and after else None)
