"""How workers of one flow divide the lanes of its source: a worker's share, and the leases for it.

Topics are divided by Kafka's own consumer group (millrace.flows.sources.kafka.membership). The lanes of any other
source are divided by leases: each worker has a key in the meta store of the settings, or else in a file of the data
folder, and computes from all keys which lanes are its own. A flow that one worker reads has one key in the meta store:
its holder has all lanes, and the workers of other machines wait for the end of its lease.

A division is a hint. Two workers may believe that they hold one lane until one of them polls again. The claim, a commit
of the lane's position before its first read (millrace.flows.range_host), excludes all but one.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import socket
import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

from millrace.base.errors import LogUnavailable, MetaAmbiguous, MetaUnavailable
from millrace.base.lane_division import shares
from millrace.base.settings import Settings
from millrace.coord.clock import Clock, SystemClock
from millrace.coord.lease import LeasedKey
from millrace.flows.sources.source import task_of
from millrace.meta.store import MetaStore
from millrace.runtime.periodic import PeriodicTask

if TYPE_CHECKING:
    from millrace.meta.factory import ClosableMetaStore

PREFIX: Final = "flows/"
"""Prefix of the workers' keys in the meta store."""
_ALONE: Final = "alone"
"""Name of the key of the only worker of an undivided flow."""
STORE_FILE: Final = "workers.db"
"""Name of the file, below the pipelines of a data folder whose settings name no meta store."""
_LOOK_SECONDS: Final = 0.2
_RENEW_SECONDS: Final = 0.2
PATIENCE_SECONDS: Final = 300.0
"""Seconds without a poll after which a worker loses its lanes: Kafka's ``max.poll.interval.ms``."""


class Division(NamedTuple):
    """The result of a poll."""

    held: frozenset[str]
    """Names of the tasks that this worker holds now."""
    came: frozenset[str] = frozenset()
    """Held tasks that it did not hold at the last poll, or lost and got again since."""
    went: frozenset[str] = frozenset()
    """Tasks that it held at the last poll and no longer holds, or lost and got again since."""


class Member(Protocol):
    """A worker among those that divide a source's lanes. One thread at a time."""

    @property
    def session_seconds(self) -> float:
        """Seconds for which a dead or suspended worker retains its lanes."""
        ...

    def follow(self, lanes: Sequence[tuple[str, int]]) -> None:
        """Divide these lanes (topic, partition) from now on. Raises LogUnavailable, InvalidSettings."""
        ...

    def poll(self) -> Division:
        """Return this worker's lanes, and the changes since the last poll. Call it regularly."""
        ...

    def wait_joined(self, seconds: float) -> None:
        """Wait until this worker knows its share, which may be empty. Raises LogUnavailable if that takes longer."""
        ...

    def commit(self, offsets: Iterable[tuple[str, int, int]]) -> None:
        """Publish positions (topic, partition, offset) of held lanes for other tools. Errors are ignored."""
        ...

    def close(self) -> None:
        """Leave. Idempotent."""
        ...


class LeasedMember:
    """A worker with a lease in a meta store.

    A thread renews the lease while the worker's loop polls, so that a range may take longer than a session. A suspended
    worker loses its lease by its own clock before other workers see it end.
    """

    def __init__(
        self,
        store: ClosableMetaStore,
        clock: Clock,
        *,
        flow: str,
        instance: str,
        seconds: float,
        alone: bool = False,
    ) -> None:
        """`instance` is a name that no other worker has at the same time, and that this one has again after a restart.

        With `alone`, one worker has all lanes, and the others have none.
        """
        self._alone = alone
        self.store, self._clock, self._flow, self._instance = store, clock, flow, instance
        self.session_seconds = seconds
        self._key = LeasedKey(
            store,
            clock,
            key=lambda lease: f"{PREFIX}{flow}/{_ALONE if alone else f'{instance}@{lease}'}",
            value=_lease_value(instance),
            seconds=seconds,
        )
        self._lanes: list[str] = []
        self._held: frozenset[str] = frozenset()
        self._lease = 0
        """The lease at which `_held` was computed."""
        self._members: tuple[str, ...] = ()
        self._looked = float("-inf")
        self._keeper = _Keeper(self._key, clock)
        self._keeper.start()

    @classmethod
    def of_flow(cls, settings: Settings, flow: str, instance: str, *, alone: bool = False) -> LeasedMember:
        """Join the workers of `flow`. Raises MetaUnavailable, UnsupportedVersion."""
        clock, seconds = SystemClock(), settings.session_seconds
        return cls(open_store(settings, clock), clock, flow=flow, instance=instance, seconds=seconds, alone=alone)

    def follow(self, lanes: Sequence[tuple[str, int]]) -> None:
        """Divide these lanes from now on."""
        self._lanes = [task_of(*each) for each in lanes]

    def poll(self) -> Division:
        """Return this worker's lanes, and the changes since the last poll."""
        self._keeper.polled = now = self._clock.monotonic()
        lease = self._key.lease if self._key.held() else 0
        if not lease:
            self._members = ()
        elif self._alone:
            self._members = (self._instance,)
        elif lease != self._lease or now - self._looked >= _LOOK_SECONDS:
            try:
                self._members = members(self.store, self._flow)
                self._looked = now
            except (MetaUnavailable, MetaAmbiguous):
                pass  # the lease still holds, and so do this worker's lanes
        mine = frozenset(lane for lane, owner in shares(self._lanes, self._members).items() if owner == self._instance)
        lost = (
            frozenset() if lease == self._lease else self._held
        )  # another worker may have had the lanes in the meantime
        found = Division(mine, mine - (self._held - lost), (self._held - mine) | lost)
        self._held, self._lease = mine, lease
        return found

    @property
    def held(self) -> bool:
        """Whether this worker has its lease, by its own clock."""
        return self._key.held()

    def wait_joined(self, seconds: float) -> None:
        """Wait for the lease. Raises LogUnavailable if that takes longer."""
        end = self._clock.monotonic() + seconds
        while not self._key.held():
            if self._clock.monotonic() >= end:
                words = "the meta store granted no lease"
                if self._alone and (others := members(self.store, self._flow)):
                    words = f"{', '.join(others)} held the lease"
                raise LogUnavailable(f"the workers of {self._flow}: {words} within {seconds:.0f} s")
            time.sleep(0.05)

    def commit(self, offsets: Iterable[tuple[str, int, int]]) -> None:
        """Do nothing: no group records positions."""

    def close(self) -> None:
        """Leave: other workers can take the lanes at once. Idempotent."""
        self._keeper.close()
        self._key.release()
        self.store.close()


class _Keeper(PeriodicTask):
    """Renews a member's lease while its loop polls."""

    def __init__(self, key: LeasedKey, clock: Clock) -> None:
        super().__init__(name="lane-lease", interval=_RENEW_SECONDS, run_at_start=True)
        self._key, self._clock = key, clock
        self.polled = math.inf
        """When the worker's loop last polled; infinite before it begins."""
        self._due = float("-inf")

    def run_once(self) -> None:
        now = self._clock.monotonic()
        if now - self.polled > PATIENCE_SECONDS:
            self._key.release()
        elif now >= self._due:
            self._due = now + self._key.step()


def instance_name(settings: Settings, worker: int) -> str:
    """Return the name of a worker in its group: the same after a restart, and no other worker's anywhere."""
    folder = hashlib.sha256(str(settings.data_dir.absolute()).encode()).hexdigest()[:12]
    return f"{socket.gethostname()}-{folder}-{worker}"


def open_store(settings: Settings, clock: Clock) -> ClosableMetaStore:
    """Open the store of the workers' keys: the cluster's, or a file of the data folder. Raises MetaUnavailable."""
    from millrace.meta.factory import open_meta_store
    from millrace.meta.sql import SqlStore

    if settings.meta_store:
        return open_meta_store(settings.meta_store, clock.monotonic, env=os.environ)
    return SqlStore.in_file(settings.data_dir / "pipelines" / STORE_FILE, clock.monotonic)


def members(store: MetaStore, flow: str) -> tuple[str, ...]:
    """Return the workers of `flow` that have a lease, by their instance names. Raises MetaUnavailable."""
    found = {str(json.loads(each.value)["instance"]) for each in store.list(f"{PREFIX}{flow}/").entries}
    return tuple(sorted(found))


def _lease_value(instance: str) -> bytes:
    return json.dumps({"instance": instance}).encode()
