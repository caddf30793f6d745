"""The balancer at the size of a large cluster, in virtual time: nodes are lost, and their PChannels come to others.

Leadership, channel manager, balancer and policy are the real ones, over the meta store in memory. The durations of a
write to the meta store and of an order to a node are modelled, as measured on etcd and on an idle node. The leader's
processor time is added as it is.
"""

from __future__ import annotations

import heapq
import random
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

from millrace.coord.balancer.balancer import Balancer, ChannelStats, RebalanceLimits
from millrace.coord.balancer.policies import find_policy
from millrace.coord.balancer.policy import AssignmentView, ChannelView
from millrace.coord.balancer.vchannelfair import vchannel_fair
from millrace.coord.channels.record import CHANNEL_PREFIX, AssignmentState, ChannelRecord, Owner
from millrace.coord.concurrency import MAX_THREADS
from millrace.coord.leadership import Leadership
from millrace.coord.process import ROUND_SECONDS
from millrace.coord.session import INGEST, NODE_PREFIX, NodeInfo
from millrace.meta.memory import MemoryStore
from millrace.meta.store import MAX_CHANGES, Delete, Mutation, Put, RevisionEquals

WRITE_SECONDS = 0.0015
"""A commit to etcd on one host."""
ORDER_SECONDS = 0.005
"""A node opens a PChannel to ingest."""


@dataclass
class VirtualClock:
    """The protocol Clock: it goes on by what is charged to it, and by the processor's time."""

    charged: float = 0.0
    began: float = field(default_factory=time.process_time)

    def monotonic(self) -> float:
        return self.charged + time.process_time() - self.began

    def wall(self) -> float:
        return self.monotonic()

    def sleep(self, seconds: float) -> None:
        self.charged += seconds

    def together(self, calls: Sequence[Callable[[], None]]) -> None:
        """Run calls as a pool of AT_ONCE threads would: simulated time that is charged inside overlaps."""
        start = self.charged
        free = [start] * MAX_THREADS
        for call in calls:
            self.charged = heapq.heappop(free)
            call()
            heapq.heappush(free, self.charged)
        self.charged = max(free)


class TimedStore(MemoryStore):
    """Each commit takes its time."""

    def __init__(self, clock: VirtualClock) -> None:
        super().__init__(clock.monotonic, retained_revisions=100_000)
        self._clock = clock

    def commit(self, then: Sequence[Mutation], *, when: Sequence[RevisionEquals] = ()) -> int | None:
        self._clock.sleep(WRITE_SECONDS)
        return super().commit(then, when=when)


class ObedientNodes:
    """The protocol Orders: nodes that do what they are told."""

    def __init__(self, clock: VirtualClock) -> None:
        self._clock = clock
        self.assigned = 0

    def assign(self, owner: Owner, pchannel: str, role: str) -> None:
        self._clock.sleep(ORDER_SECONDS)
        self.assigned += 1

    def remove(self, owner: Owner, pchannel: str, role: str) -> None:
        self._clock.sleep(ORDER_SECONDS)


def batched(changes: Sequence[Mutation], size: int) -> Iterator[list[Mutation]]:
    """Yield batches as itertools.batched does from Python 3.12 on."""
    rest = iter(changes)
    while some := list(islice(rest, size)):
        yield some


def lose_nodes(*, pchannels: int, nodes: int, share: float = 0.1) -> dict[str, Any]:
    """Lose `share` of the nodes at once. The leader sees it at second 0, after the length of their sessions.

    Return moves, and seconds until every PChannel is assigned and nothing moves any more. The lower bound: record what
    the nodes owned as lost and assign it again, in full commits one after the other, then one order and one write for
    each PChannel, AT_ONCE at a time.
    """
    clock = VirtualClock()
    store = TimedStore(clock)
    leadership = Leadership(store, clock, "bench", seconds=86_400.0)
    leadership.step()
    sessions = [f"n{number:04}@{number}" for number in range(nodes)]
    names = [f"dml_{number}" for number in range(pchannels)]
    records = [
        ChannelRecord(name, INGEST)
        .begin_assignment(sessions[place % nodes], "grpc://there", "place")
        .complete_assignment()
        for place, name in enumerate(names)
    ]
    registered = [
        Put(NODE_PREFIX + each, NodeInfo(each.partition("@")[0], "grpc://there", (INGEST,)).encode())
        for each in sessions
    ]
    for some in batched([*registered, *(Put(each.key, each.encode()) for each in records)], 100):
        MemoryStore.commit(store, some)
    stats = dict.fromkeys(names, ChannelStats(vchannels=2))  # alike: what moves beside the lost moves for numbers alone
    orders = ObedientNodes(clock)
    balancer = Balancer(
        leadership,
        clock,
        orders,
        find_policy("vchannelfair"),
        pchannels=lambda: names,
        run_all=clock.together,
        stats=lambda: stats,
        limits=RebalanceLimits(),
        roles=(INGEST,),
    )
    before = time.process_time()
    balancer.step()  # knows what there is
    first_look = time.process_time() - before
    gone = sessions[:: round(1 / share)]
    for some_gone in batched([Delete(NODE_PREFIX + each) for each in gone], 100):
        MemoryStore.commit(store, some_gone)
    lost = sum(record.owner is not None and record.owner.session in set(gone) for record in records)
    moved_before, began, cpu = orders.assigned, clock.monotonic(), time.process_time()
    rounds, settled = 0, 0.0
    while True:
        made = orders.assigned
        balancer.step()
        rounds += 1
        whole = all(each.state is AssignmentState.ASSIGNED for each in balancer.manager.records.values())
        if whole and not settled:
            settled = clock.monotonic() - began
        if whole and orders.assigned == made:
            break
        clock.sleep(ROUND_SECONDS)
    owned = Counter(
        record.owner.session
        for entry in store.list(CHANNEL_PREFIX).entries
        if (record := ChannelRecord.decode(entry.value, entry.modified)).owner is not None
    )
    moves = orders.assigned - moved_before
    return {
        "pchannels": pchannels,
        "nodes": nodes,
        "nodes_lost": len(gone),
        "moves": moves,
        "moves_at_least": lost,
        "seconds": round(settled, 2),
        "seconds_at_least": round(
            2 * -(-lost // (MAX_CHANGES - 1)) * WRITE_SECONDS + lost * (ORDER_SECONDS + WRITE_SECONDS) / MAX_THREADS,
            2,
        ),
        "leaders_processor_s": round(time.process_time() - cpu, 2),
        "moves_per_second": round(moves / settled, 1),
        "rounds": rounds,
        "first_look_s": round(first_look, 2),
        "owned": {"least": min(owned.values()), "most": max(owned.values()), "by": len(owned)},
    }


def balance_rounds(*, pchannels: int, nodes: int, collections: int, rounds: int = 10) -> dict[str, Any]:
    """Measure the policy alone in a round of moves for balance, with two random `collections` for each PChannel.

    That is its worst case, since nearly no two PChannels are alike. Every node has the same number of PChannels, so
    that only affinity can improve.
    """
    chance = random.Random(19)
    sessions = tuple(f"n{number:04}@{number}" for number in range(nodes))
    channels = {
        name: ChannelView(name, sessions[number % nodes], 2, frozenset(chance.sample(range(collections), 2)))
        for number, name in enumerate(f"dml_{number}" for number in range(pchannels))
    }
    seconds, moves = [], 0
    for _ in range(rounds):
        view = AssignmentView(sessions, tuple(channels.values()))
        began = time.process_time()
        found = vchannel_fair(view)
        seconds.append(time.process_time() - began)
        moves += len(found)
        for move in found:
            channels[move.pchannel] = replace(channels[move.pchannel], owner=move.to)
        if not found:
            break
    return {
        "pchannels": pchannels,
        "nodes": nodes,
        "collections": collections,
        "rounds": len(seconds),
        "moves": moves,
        "round_s": {"p50": round(statistics.median(seconds), 3), "max": round(max(seconds), 3)},
    }
