"""One seed: a cluster, faults for a while, then none; and what must hold at the end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from millrace.coord.balancer.balancer import ChannelStats
from millrace.coord.balancer.policy import AssignmentView, ChannelView, PlannedMove
from millrace.coord.broadcast.task import TaskState, keys_conflict
from millrace.coord.channels.record import CHANNEL_PREFIX, AssignmentState, ChannelRecord
from millrace.coord.control import DRAIN_PREFIX
from millrace.coord.session import ROLES
from millrace.message.ids import pchannel_of
from millrace.meta.store import Delete, Put
from tests.sim.cluster import GUARDS, KEPT, Cluster, Request
from tests.sim.log import BROADCAST, ROW
from tests.sim.world import Broken

TROUBLE = 7.0
"""Seconds of the world with faults."""
RATE = 2.0
"""Faults a second of that, about."""
DRAIN = 2.0
"""Seconds behind them in which clients still ask for something new."""
BOUND = 25.0
"""Seconds behind them in which all is assigned, told and done."""
CALM = 3.0
"""Seconds behind that in which nothing moves."""
LATE = 10.0
"""Seconds behind that in which ingest has all that was on its way, one after the other."""

BEHIND = "ingest is behind"

KINDS = (
    "crash node",
    "crash coordinator",
    "pause node",
    "pause coordinator",
    "partition",
    "cut off node",
    "drop",
    "duplicate",
    "delay",
    "slow store",
    "store down",
    "ambiguous",
    "wall clock",
    "compaction",
    "drain",
    "added PChannel",
)
"""Every kind of fault and of change; clocks that drift are in every seed."""
MAX_PCHANNELS = 6


@dataclass
class Outcome:
    seed: int
    events: int
    faults: Counter[str]
    rows: int
    broadcasts: int


def play(seed: int) -> Outcome:
    """Raises Broken, or what a part raised that it must not raise."""
    cluster = Cluster(seed)
    world = cluster.world
    try:
        moment = 1.0
        while moment < TROUBLE:
            world.run(moment)
            inject(cluster)
            moment += world.random.expovariate(RATE)
        world.run(TROUBLE)
        calm(cluster)
        settle(cluster)
        return Outcome(seed, world.events, world.faults, len(cluster.acknowledged), len(cluster.requests))
    except BaseException as error:
        error.add_note(f"seed {seed}, at {world.now:.3f}:\n" + "\n".join(world.log))
        raise
    finally:
        world.close()
        cluster.catalog.database.close()


def inject(cluster: Cluster) -> None:
    world, network, random = cluster.world, cluster.network, cluster.world.random
    kind = random.choice(KINDS)
    until = random.uniform(0.3, 4.0)
    some = random.choice(cluster.nodes if kind.endswith("node") else cluster.coordinators)
    world.say(f"{kind} ({some.name}, {until:.1f} s)")
    if kind.startswith("crash"):
        if some.process.alive:
            world.faults[kind] += 1
            some.process.alive = False
            world.later(until, some.start)
    elif kind.startswith("pause"):
        world.faults[kind] += 1
        some.process.paused_until = world.now + until * 1.5
    elif kind == "partition":
        everybody = [each.name for each in (*cluster.nodes, *cluster.coordinators, *cluster.clients)]
        one, other = random.choice(everybody), random.choice([*everybody, "store", "store"])
        cut = {(one, other), (other, one)} if random.random() < 0.6 else {(one, other)}
        network.cut |= cut
        world.later(until * random.choice((1, 3)), lambda: network.cut.difference_update(cut))
    elif kind == "cut off node":
        # The coordinators alone do not reach it, and it is to be empty: it lives, keeps its
        # session, and has to be put out.
        cut = {(each.name, some.name) for each in cluster.coordinators}
        world.faults[kind] += 1
        network.cut |= cut
        world.later(until + GUARDS.eviction_seconds, lambda: network.cut.difference_update(cut))
        drain(cluster, some.name, until + GUARDS.eviction_seconds)
    elif kind in ("drop", "duplicate", "delay"):
        network.loss, network.doubling = (0.2 if kind == "drop" else 0.0), (0.4 if kind == "duplicate" else 0.0)
        network.delay = 0.15 if kind == "delay" else 0.004
        world.faults["delay"] += kind == "delay"
        world.later(until, lambda: _quiet(cluster))
    elif kind == "slow store":
        cluster.health.slow = 0.9
        world.later(until, lambda: setattr(cluster.health, "slow", 0.0))
    elif kind == "store down":
        cluster.health.down_until = world.now + until
    elif kind == "ambiguous":
        cluster.health.lost_answers = 0.4
        world.later(until, lambda: setattr(cluster.health, "lost_answers", 0.0))
    elif kind == "wall clock":
        world.faults[kind] += 1
        cluster.log.wall_offset = random.uniform(0.0, 1e5)
    elif kind == "compaction":
        world.faults[kind] += 1
        cluster.memory.compact(cluster.memory.revision)
    elif kind == "added PChannel":
        if len(cluster.pchannels) < MAX_PCHANNELS:
            world.faults[kind] += 1
            cluster.add_pchannel()
    else:
        world.faults[kind] += 1
        drain(cluster, random.choice(cluster.nodes).name, until)


def drain(cluster: Cluster, name: str, seconds: float) -> None:
    cluster.memory.commit([Put(DRAIN_PREFIX + name, b"")])
    cluster.world.later(seconds, lambda: cluster.memory.commit([Delete(DRAIN_PREFIX + name)]))


def _quiet(cluster: Cluster) -> None:
    cluster.network.loss = cluster.network.doubling = 0.0
    cluster.network.delay = 0.004


def calm(cluster: Cluster) -> None:
    """No more faults."""
    _quiet(cluster)
    cluster.network.cut.clear()
    cluster.health.slow = cluster.health.lost_answers = cluster.health.down_until = 0.0
    for some in (*cluster.nodes, *cluster.coordinators):
        cluster.world.wake(some.process)
    for name in [node.name for node in cluster.nodes]:
        cluster.memory.commit([Delete(DRAIN_PREFIX + name)])


def settle(cluster: Cluster) -> None:
    world = cluster.world
    world.say("calm")
    limit = world.now + BOUND
    world.run(world.now + DRAIN)
    for client in cluster.clients:
        client.produces = False
    while (missing := unsettled(cluster)) and world.now < limit:
        world.run(world.now + 1.0)
    if missing:
        raise Broken(f"{BOUND:.0f} s behind the last fault: {missing}")
    before = [record.term for record in records(cluster)]
    world.run(world.now + CALM)
    late = world.now + LATE
    while unsettled(cluster) == BEHIND and world.now < late:
        world.run(world.now + 1.5)  # entries that were on their way since the faults landed just now
    after = [record.term for record in records(cluster)]
    if before != after or unsettled(cluster):
        raise Broken(f"moves for nothing: terms {before}, then {after}, {unsettled(cluster)}")
    check_rows(cluster)
    check_broadcasts(cluster)


def records(cluster: Cluster) -> list[ChannelRecord]:
    return [ChannelRecord.decode(entry.value, entry.modified) for entry in cluster.memory.list(CHANNEL_PREFIX).entries]


def unsettled(cluster: Cluster) -> str:
    """What is not yet as it must be, "" where all is."""
    there = records(cluster)
    if len(there) != len(cluster.pchannels) * len(ROLES):
        return f"{len(there)} records"
    for record in there:
        if record.state is not AssignmentState.ASSIGNED or record.owner is None or record.history:
            return f"{record}"
        node = cluster.at(record.owner.address)
        assert node is not None
        if not node.process.alive:
            return f"{node.name} is away"
        try:
            node.hosting.check(record.pchannel, record.role, record.term)
        except Exception as error:
            return f"{record}: {error}"
        for client in cluster.clients:
            known = client.assignments.get(record.pchannel, record.role)
            if known is None or (known.term, known.session) != (record.term, record.owner.session):
                return f"{client.name} has {known} of {record}"
    for role in ROLES:
        load = Counter(record.owner.address for record in there if record.role == role and record.owner)
        shares = [load[node.name] for node in cluster.nodes]
        if max(shares) - min(shares) > 1:
            return f"{role} is {load}"
        if moves := planned(cluster, role, there):  # the next round may be some seconds away
            return f"{role} is even, and the policy moves {moves}"
    if open_requests := [name for name, each in cluster.requests.items() if each.patient and not each.outcome]:
        return f"requests {open_requests}"
    if left := cluster.catalog.kept.open_tasks():
        return f"broadcasts {left}"
    if len(cluster.catalog.kept.list_recent(limit=1_000)) > KEPT:
        return "closed broadcasts are not collected"
    if any(cluster.log.committed[name] != len(channel.entries) for name, channel in cluster.log.channels.items()):
        return BEHIND
    return ""


def planned(cluster: Cluster, role: str, there: Sequence[ChannelRecord]) -> list[PlannedMove]:
    """Return what the policy would move if it were asked now."""
    stats, none = cluster.shape.stats, ChannelStats()
    channels = [
        ChannelView(each.pchannel, each.owner.address, its.vchannels, its.collections)
        for each in there
        if each.role == role and each.owner is not None
        for its in [stats.get(each.pchannel, none)]
    ]
    nodes = tuple(node.name for node in cluster.nodes)
    return cluster.shape.policy(AssignmentView(nodes, tuple(channels), max_moves=len(channels)))


def check_rows(cluster: Cluster) -> None:
    for pchannel, channel in cluster.log.channels.items():
        accepted = [what for kind, _, what, good in channel.entries if good and kind == ROW]
        if len(set(accepted)) != len(accepted) or accepted != cluster.log.table[pchannel]:
            raise Broken(f"rows of {pchannel} are doubled, or not in the table as they are in the log")
    for pchannel, row in cluster.acknowledged:
        if row not in cluster.log.channels[pchannel].ticks:
            raise Broken(f"{row} was acknowledged and is not in {pchannel}")


def check_callbacks(cluster: Cluster) -> dict[str, int]:
    """Check the order of the callbacks of broadcasts of messages on each VChannel; return their ids by request."""
    found: dict[str, int] = {}
    newest: dict[str, int] = {}
    for task in cluster.catalog.called:
        if task.request in found:
            continue  # called again: by another process, or after a lost answer
        for target in task.targets:
            if newest.get(target, 0) > task.id:
                raise Broken(f"the callback of {task.id} came after that of {newest[target]} on {target}")
            newest[target] = task.id
        found[task.request] = task.id
    return found


def check_broadcasts(cluster: Cluster) -> None:
    """What was told done is whole and had its effect once, in order.

    What was told abandoned had none; nothing is in between.
    """
    placed: dict[int, dict[str, int]] = {}
    names: dict[str, set[int]] = {name: set() for name in cluster.requests}
    for pchannel, channel in cluster.log.channels.items():
        for place, (kind, _, what, accepted) in enumerate(channel.entries):
            if kind == BROADCAST:
                names[what[2]].add(what[1])
                if accepted:
                    placed.setdefault(what[1], {})[pchannel] = place
    effects = cluster.catalog.effects()
    for key in {collection for *_, collection in effects}:
        done = [task for task, _, collection in effects if collection == key]
        if done != sorted(set(done)):
            raise Broken(f"effects of collection {key} are doubled, or out of order: {done}")
    had = {request: task for task, request, _ in effects} | check_callbacks(cluster)
    closed = {each.task.request: each.task.state for each in cluster.catalog.kept.list_recent(limit=1_000)}
    ids: dict[int, Request] = {}
    for name, request in cluster.requests.items():
        if len(names[name]) > 1 or (name in had and names[name] != {had[name]}):
            raise Broken(f"request {name} had its effect by {had.get(name)}, and its messages are of {names[name]}")
        ids |= dict.fromkeys(names[name], request)
        if (name in had) == bool(request.refused_by) and (request.outcome or name in had):
            raise Broken(f"{name} is refused by {request.refused_by!r}, and its effect is {had.get(name)}")
        if request.outcome and request.outcome != ("done" if name in had else "abandoned"):
            raise Broken(f"the caller of {name} was told {request.outcome!r}, and its effect is {had.get(name)}")
        if name in closed and (closed[name] is TaskState.DONE) != (name in had):
            raise Broken(f"{name} is {closed[name]}, and its effect is {had.get(name)}")
        if name in had and set(placed[had[name]]) != set(map(pchannel_of, request.targets)):
            raise Broken(f"broadcast {had[name]} is not whole: {placed[had[name]]}, {request.targets}")
        if name not in had and not request.refused_by and names[name]:
            raise Broken(f"{name} was sent, and is not completed")
    order = sorted(ids)
    for number, one in enumerate(order):
        for other in order[number + 1 :]:
            both = set(placed.get(one, ())) & set(placed.get(other, ()))
            if keys_conflict(ids[one].keys, ids[other].keys) and any(
                placed[one][at] > placed[other][at] for at in both
            ):
                raise Broken(f"broadcasts {one} and {other} conflict and came in another order")
