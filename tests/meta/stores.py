"""The meta stores that the conformance suite runs against.

On a clock that the test moves, where the store does not have one.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pymysql

from millrace.base.deadline import Deadline
from millrace.brokers.mariadb import MariaDbServer
from millrace.meta.etcd import EtcdAddress, EtcdStore
from millrace.meta.memory import MemoryStore
from millrace.meta.sql import SqlStore
from millrace.meta.store import MetaStore
from tests import running_brokers


@dataclass
class Hand:
    """A monotonic clock that stands until somebody moves it."""

    now: float = 1_000.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Rig:
    """One store, opened, that goes by a clock which the test moves."""

    store: MetaStore
    clock: Hand
    again: Callable[[], MetaStore] | None = None
    """Opens the same store once more, as another process would; None where it lives in one process."""
    lease_seconds: float = 10.0
    """A lease that is long enough to be seen alive behind half of it."""
    opened: list[MetaStore] = field(default_factory=list)

    def pass_time(self, seconds: float) -> None:
        """Seconds pass on every clock that the store goes by, with somebody watching its leases."""
        steps = 20
        for _ in range(steps):
            self.store.get("a-look")
            self.clock.now += seconds / steps
        self.store.get("a-look")

    def lapse(self, over: Callable[[], bool]) -> None:
        """What is not renewed is over behind this, as `over` says."""
        self.pass_time(self.lease_seconds)

    def another(self) -> MetaStore:
        """The same store as another process has it, or itself."""
        if self.again is None:
            return self.store
        self.opened.append(self.again())
        return self.opened[-1]

    def close(self) -> None:
        for store in [self.store, *self.opened]:
            store.close()


class RealTime(Rig):
    """A store that goes by a clock of its own."""

    def pass_time(self, seconds: float) -> None:
        over = Deadline.after(seconds)
        while over.pause(seconds):
            pass

    def lapse(self, over: Callable[[], bool]) -> None:
        until = Deadline.after(3 * self.lease_seconds + 10)
        while not over():
            assert until.pause(0.05), "a lease that nobody renewed did not end"


def memory(folder: Path, kept: int) -> Rig:
    clock = Hand()
    return Rig(MemoryStore(clock, retained_revisions=kept), clock)


def sqlite(folder: Path, kept: int) -> Rig:
    clock = Hand()

    def opened() -> MetaStore:
        return SqlStore.in_file(folder / "meta.db", clock, retained_revisions=kept)

    return Rig(opened(), clock, opened)


def mariadb(folder: Path, kept: int) -> Rig:
    """A database of its own on the run's MariaDB."""
    clock, server = Hand(), running_brokers.mariadb()
    url = f"mariadb://{server.address}/{new_database(server)}"

    def opened() -> MetaStore:
        return SqlStore(url, clock, retained_revisions=kept, **server.credentials._asdict())

    return Rig(opened(), clock, opened)


def new_database(server: MariaDbServer) -> str:
    name = f"meta_{uuid.uuid4().hex}"
    username, password = server.credentials
    with (
        pymysql.connect(host="127.0.0.1", port=server.port["client"], user=username, password=password) as db,
        db.cursor() as cursor,
    ):
        cursor.execute(f"create database {name}")
    return name


def etcd(folder: Path, kept: int) -> Rig:
    """A prefix of its own in the run's etcd."""
    server = running_brokers.etcd()
    address = EtcdAddress((f"http://{server.address}",), f"{uuid.uuid4().hex}/")

    def opened() -> MetaStore:
        return EtcdStore(address, retained_revisions=kept)

    return RealTime(opened(), Hand(), opened, lease_seconds=3.0)


STORES: dict[str, Callable[[Path, int], Rig]] = {"memory": memory, "sqlite": sqlite, "mariadb": mariadb, "etcd": etcd}
