"""A cluster of many PChannels in which each moves, and what a move costs: requests, orders, looks of the policy."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from millrace.coord.balancer.balancer import ChannelStats, RebalanceLimits
from millrace.coord.balancer.policy import AssignmentView, PlannedMove
from millrace.coord.balancer.vchannelfair import vchannel_fair
from millrace.coord.channels.record import AssignmentState, ChannelRecord
from millrace.coord.control import DRAIN_PREFIX, FREEZE_KEY
from millrace.meta.memory import MemoryStore
from millrace.meta.store import Delete, Entry, EventBatch, Listing, Mutation, Put, RevisionEquals
from tests.sim.cluster import Cluster, Shape
from tests.sim.run import check_broadcasts, check_rows, records
from tests.sim.world import Broken

NODES = 10
VCHANNELS = 10
"""VChannels of a PChannel."""
MOVES = 4
"""Moves of a round."""
LIMIT = 600.0
"""Seconds of the world that a drain may take."""


class CountedStore(MemoryStore):
    """Counts the requests, what they return and what they write, apart from those of this module."""

    def __init__(self, monotonic: Callable[[], float]) -> None:
        super().__init__(monotonic)
        self.work = Counter[str]()

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """Leave out what is done inside."""
        work, self.work = self.work, Counter[str]()
        try:
            yield
        finally:
            self.work = work

    def get(self, key: str) -> Entry | None:
        self.work["requests"] += 1
        return super().get(key)

    def list(self, prefix: str, *, revision: int | None = None) -> Listing:
        found = super().list(prefix, revision=revision)
        self.work["requests"] += 1
        self.work["entries"] += len(found.entries)
        return found

    def changes(self, prefix: str, *, after: int) -> EventBatch:
        found = super().changes(prefix, after=after)
        self.work["requests"] += 1
        self.work["entries"] += len(found.events)
        return found

    def commit(self, then: Sequence[Mutation], *, when: Sequence[RevisionEquals] = ()) -> int | None:
        self.work["requests"] += 1
        self.work["written"] += len(then)
        return super().commit(then, when=when)


@dataclass
class Outcome:
    """What happened while each node was drained once."""

    pchannels: int
    vchannels: int
    moves: int
    seconds: float
    """Of the world."""
    rows: int
    broadcasts: int
    work: Counter[str]

    def per_move(self) -> dict[str, float]:
        """Return the work of one move, by kind."""
        return {kind: count / self.moves for kind, count in sorted(self.work.items())}


def move_each(pchannels: int, *, seed: int = 1) -> Outcome:
    """Place and then move each of `pchannels` PChannels, while clients append and make DDL. Raises Broken."""
    names = tuple(f"dml_{number}" for number in range(pchannels))
    chance = random.Random(seed)
    count = VCHANNELS * pchannels
    collections = [chance.randrange(count // 4) for _ in range(count)]  # of four VChannels, about
    stats = {
        name: ChannelStats(VCHANNELS, frozenset(collections[place * VCHANNELS : (place + 1) * VCHANNELS]))
        for place, name in enumerate(names)
    }
    policy = CountedPolicy()
    limits = RebalanceLimits(min_interval=4.0, max_moves=MOVES, refusal_seconds=2.0, eviction_seconds=4.0)
    cluster = Cluster(
        seed,
        Shape(pchannels=names, nodes=NODES, clients=4, stats=stats, limits=limits, policy=policy, store=CountedStore),
    )
    world, store = cluster.world, cluster.memory
    assert isinstance(store, CountedStore)
    try:
        store.commit([Put(FREEZE_KEY, b"")])
        _run_until(cluster, lambda: _assigned(cluster, 2 * pchannels))
        began, before = world.now, {record.key: record.term for record in records(cluster)}
        store.work.clear()
        policy.looked_at = 0
        for node in cluster.nodes:
            store.commit([Put(DRAIN_PREFIX + node.name, b"")])
            _run_until(cluster, lambda name=node.name: _drained(cluster, name))  # type: ignore[misc]
            store.commit([Delete(DRAIN_PREFIX + node.name)])
        work = Counter({**store.work, "channels the policy looked at": policy.looked_at})
        seconds = world.now - began
        after = {record.key: record.term for record in records(cluster)}
        if stood := [key for key, term in before.items() if after[key] == term]:
            raise Broken(f"{len(stood)} roles did not move, one is {stood[0]}")
        for client in cluster.clients:
            client.produces = False
        _run_until(cluster, lambda: _settled(cluster))
        check_rows(cluster)
        check_broadcasts(cluster)
        return Outcome(
            pchannels,
            count,
            sum(after[key] - term for key, term in before.items()),
            seconds,
            len(cluster.acknowledged),
            len(cluster.requests),
            work,
        )
    finally:
        world.close()
        cluster.catalog.database.close()


class CountedPolicy:
    """The policy, with the number of channels in the views that it was given."""

    def __init__(self) -> None:
        self.looked_at = 0

    def __call__(self, view: AssignmentView) -> list[PlannedMove]:
        self.looked_at += len(view.channels)
        return vchannel_fair(view)


def _run_until(cluster: Cluster, holds: Callable[[], bool]) -> None:
    assert isinstance(cluster.memory, CountedStore)
    limit = cluster.world.now + LIMIT
    while True:
        with cluster.memory.uncounted():
            if holds():
                return
        if cluster.world.now >= limit:
            raise Broken(f"not done after {LIMIT:.0f} s")
        cluster.world.run(cluster.world.now + 1.0)


def _assigned(cluster: Cluster, roles: int) -> bool:
    found = records(cluster)
    return len(found) == roles and all(map(_is_whole, found))


def _is_whole(record: ChannelRecord) -> bool:
    return record.state is AssignmentState.ASSIGNED and not record.history


def _drained(cluster: Cluster, name: str) -> bool:
    return all(
        _is_whole(record) and record.owner is not None and record.owner.address != name for record in records(cluster)
    )


def _settled(cluster: Cluster) -> bool:
    log = cluster.log
    return (
        not any(each.patient and not each.outcome for each in cluster.requests.values())
        and not cluster.catalog.kept.open_tasks()
        and all(log.committed[name] == len(channel.entries) for name, channel in log.channels.items())
    )
