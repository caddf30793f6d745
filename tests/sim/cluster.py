"""A whole cluster in a world.

Nodes, coordinators and clients around the real sessions, hosting, balancer, broadcaster and discovery,
and what must hold at any moment.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from millrace.base.bounded_call import BoundedCalls
from millrace.base.errors import AppendRejected, MillraceError, NodeUnreachable, NotLeader
from millrace.coord.assignment_source import MetaStoreAssignmentSource
from millrace.coord.balancer.balancer import Balancer, ChannelStats, RebalanceLimits
from millrace.coord.balancer.policy import Policy
from millrace.coord.balancer.vchannelfair import vchannel_fair
from millrace.coord.broadcast.broadcaster import Broadcaster
from millrace.coord.broadcast.kinds import DATA, BroadcastKind, KindCalls, SubmittedBroadcast
from millrace.coord.broadcast.ledger import BroadcastCallbacks, CallbackRegistry
from millrace.coord.broadcast.messages import message_callbacks, message_draft, message_keys
from millrace.coord.broadcast.sqlite_ledger import SqliteLedger
from millrace.coord.broadcast.task import (
    CLUSTER,
    MESSAGES,
    BroadcastDraft,
    BroadcastTask,
    ResourceKey,
    collection_keys,
    normalize_keys,
)
from millrace.coord.catalog.database import CoordinatorDb
from millrace.coord.channels.record import Owner
from millrace.coord.leadership import Leadership
from millrace.coord.role_manager import HeldRole, RoleManager
from millrace.coord.session import APPEND, INGEST, NodeInfo, Session
from millrace.message.builders import manual_flush
from millrace.message.ids import pchannel_of
from millrace.message.model import MutableMessage
from millrace.meta.memory import MemoryStore
from millrace.node.cluster.owned_channels import OwnedChannels
from millrace.rpc.assignments import Assignment, AssignmentCache
from millrace.wal.reasons import Reason
from tests.sim.log import BROADCAST, OPENING, ROW, Log
from tests.sim.store import RemoteLedger, RemoteStore, StoreHealth
from tests.sim.world import Broken, Clock, Network, Process, World

SESSION = 3.0
WALL = 1_577_836_800
"""When the world begins, in Unix seconds."""
KEPT = 12
"""Finished broadcasts that stay known: more than can be repeated within a run."""
NOTE = "note"
"""The kind of the broadcasts of messages."""
DRIFT = 0.01
"""How far a process's clock may run from the world's."""
PCHANNELS = ["dml_0", "dml_1", "dml_2"]
GUARDS = RebalanceLimits(min_interval=4.0, max_moves=2, refusal_seconds=2.0, eviction_seconds=4.0)


@dataclass(frozen=True)
class Shape:
    """How large a cluster is."""

    pchannels: tuple[str, ...] = tuple(PCHANNELS)
    nodes: int = 3
    clients: int = 2
    stats: Mapping[str, ChannelStats] = field(
        default_factory=lambda: {"dml_0": ChannelStats(vchannels=2), "dml_1": ChannelStats(vchannels=1)}
    )
    limits: RebalanceLimits = GUARDS
    policy: Policy = vchannel_fair
    store: Callable[[Callable[[], float]], MemoryStore] = MemoryStore


T = TypeVar("T")


class _Direct(BoundedCalls):
    """Calls at once, as part of the simulated process: its time is the world's."""

    def run(self, call: Callable[[], T], seconds: float, *, key: Hashable = None) -> T:
        return call()


def _direct_calls() -> KindCalls:
    calls = KindCalls()
    calls._checks = calls._callbacks = _Direct("simulated", most=1)
    return calls


class Cluster:
    def __init__(self, seed: int, shape: Shape = Shape()) -> None:
        self.shape = shape
        self.world = world = World(seed)
        self.network = Network(world)
        self.store_process = Process("store", rate=1 + world.random.uniform(-DRIFT, DRIFT))
        self.memory = shape.store(Clock(world, self.store_process).monotonic)
        self.health = StoreHealth(self.memory)
        self.pchannels = list(shape.pchannels)
        self.log = Log(world, self.network, self.pchannels)
        self.catalog = Catalog(world)
        self.nodes = [Node(self, f"n{number}") for number in range(shape.nodes)]
        self.coordinators = [Coordinator(self, f"c{number}") for number in range(2)]
        self.clients = [Client(self, f"p{number}") for number in range(shape.clients)]
        self.opened: dict[tuple[str, str, int], str] = {}
        self.acknowledged: list[tuple[str, Any]] = []
        self.requests: dict[str, Request] = {}

    def add_pchannel(self) -> None:
        """What `ensure_pchannels` leaves: another log, and another PChannel in the catalog."""
        name = f"dml_{len(self.pchannels)}"
        self.log.add(name)
        self.pchannels.append(name)

    def process(self, name: str) -> Process:
        random = self.world.random
        return Process(name, 1 + random.uniform(-DRIFT, DRIFT), random.uniform(0.0, 1e6))

    def remote(self, process: Process) -> RemoteStore:
        return RemoteStore(self.world, self.network, self.health, process)

    def ledger(self, process: Process) -> RemoteLedger:
        return RemoteLedger(self.world, self.network, self.health, process, self.catalog.kept)

    def at(self, address: str) -> Node | None:
        return next((node for node in self.nodes if node.name == address), None)

    def acts(self, node: Node, pchannel: str, role: str, term: int) -> None:
        """`node` relies on owning the role this moment: nobody else may be able to."""
        for other in self.nodes:
            if other is node or not other.process.alive:
                continue
            if held := other.hosting.held_term(pchannel, role):
                raise Broken(f"{node.name} acts for {pchannel} ({role}) in {term}, {other.name} can in {held}")

    def leads(self, coordinator: Coordinator) -> None:
        for other in self.coordinators:
            if other is not coordinator and other.process.alive and other.leadership.epoch:
                raise Broken(f"{coordinator.name} and {other.name} lead")


class Catalog:
    """The coordinators' file, with a catalog that knows which broadcasts had their effect, and in which order."""

    def __init__(self, world: World) -> None:
        self.database = CoordinatorDb(":memory:")
        self.database.execute(
            "create table effect (place integer primary key, task integer, request text, collection integer)"
        )
        self.kept = SqliteLedger(self.database, max_closed=KEPT, wall=lambda: WALL + world.now)
        self.called: list[BroadcastTask] = []
        """Broadcasts of messages whose callback has returned, in that order; one may be there again."""

    def kinds(self, clock: Clock) -> CallbackRegistry:
        """The kinds of broadcast of one coordinator: DDL with a model of its effect, messages with the real checks."""

        def check(broadcast: SubmittedBroadcast) -> None:
            mine = {each.vchannel for each in broadcast.messages}
            for task in self.kept.list_recent(limit=1_000):
                earlier = task.task
                if MESSAGES in earlier.change and earlier.id < broadcast.id and mine & earlier.targets.keys():
                    raise Broken(f"{broadcast.id} is stored before the callback of {earlier.id}")

        def called(broadcast: SubmittedBroadcast) -> None:
            if set(broadcast.ticks) != {each.vchannel for each in broadcast.messages}:
                raise Broken(f"the callback of {broadcast.id} runs, and only {broadcast.ticks} have it")
            clock.sleep(clock.world.random.choice((0.01, 0.01, 0.3)))
            if clock.world.random.random() < 0.1:
                raise RuntimeError("the callback failed")
            task = self.kept.task(broadcast.id)
            if task is not None:
                self.called.append(task)

        notes = message_callbacks(self, BroadcastKind(NOTE, check, called), _direct_calls())  # type: ignore[arg-type]
        ddl = BroadcastCallbacks(lambda task, seen: None, self._effect, lambda task: None)
        return CallbackRegistry({"ddl": ddl, NOTE: notes})

    @property
    def broadcasts(self) -> SqliteLedger:
        """The ledger, by the name that it has in the real catalog."""
        return self.kept

    def _effect(self, task: BroadcastTask) -> None:
        if task.pending_targets:
            raise Broken(f"broadcast {task.id} has its effect, and {task.pending_targets} do not have it")
        values = (task.id, task.request, task.collection_id)
        self.database.execute("insert into effect (task, request, collection) values (?, ?, ?)", values)

    def effects(self) -> list[tuple[int, str, int]]:
        """(task, request, collection), in the order in which they were made."""
        return self.database.execute("select task, request, collection from effect order by place")


class Node:
    """A node around the real session and hosting; what it hosts is a model."""

    def __init__(self, cluster: Cluster, name: str) -> None:
        self.cluster = cluster
        self.name = name
        self.start()

    def start(self) -> None:
        cluster = self.cluster
        self.process = cluster.process(self.name)
        self.clock = Clock(cluster.world, self.process)
        self.session = Session(
            cluster.remote(self.process),
            self.clock,
            NodeInfo(self.name, self.name),
            on_end=lambda: self.hosting.end(),
            seconds=SESSION,
        )
        self.hosting = RoleManager(self.session, self, run_all=partial(cluster.network.together, self.process))
        self.owned = OwnedChannels(
            lambda planned: None,
            held=self.session.held,
            drain_seconds=SESSION / 4,
            changed=Changed(self.clock),  # type: ignore[arg-type]
            monotonic=self.clock.monotonic,
        )
        cluster.world.spawn(self.process, self._keep_session, cluster.world.random.random() * 0.2)
        cluster.world.spawn(self.process, self._ingest, 0.3)
        cluster.world.spawn(self.process, self._flush, 0.5)

    def _keep_session(self) -> None:
        while True:
            self.clock.sleep(self.session.step())

    def open(self, pchannel: str, role: str, term: int, session: str) -> None:
        known = self.cluster.opened.setdefault((pchannel, role, term), session)
        if known != session:
            raise Broken(f"{pchannel} ({role}) in term {term} is of {known} and of {session}")
        if role == APPEND:
            what = (OPENING, term, session)
            if self.cluster.log.append(self.process, pchannel, OPENING, term, what) is None:
                raise AppendRejected("a newer term is open", reason="TERM_FENCED")
        else:
            self.clock.sleep(0.02)
            self.owned.open(pchannel, role, term, session)

    def close(self, pchannel: str, role: str, term: int) -> None:
        self.clock.sleep(self.cluster.world.random.choice((0.01, 0.01, 0.3)))
        if role == INGEST:
            self.owned.close(pchannel, role, term)

    def append(self, assignment: Assignment, row: Any) -> int:
        """One row, if this node is the one to take it."""
        pchannel, term = assignment.pchannel, assignment.term
        self.hosting.check(pchannel, APPEND, term)
        self.clock.sleep(0.002)
        self.hosting.check(pchannel, APPEND, term)
        self.cluster.acts(self, pchannel, APPEND, term)
        tick = self.cluster.log.append(self.process, pchannel, ROW, term, row)
        if tick is None:
            raise AppendRejected("another term", reason="TERM_FENCED")
        return tick

    def _ingest(self) -> None:
        """The loop log → wal, around the real Owned: a range, and its commit, which takes a while."""
        log = self.cluster.log
        while True:
            self.clock.sleep(0.6)
            for held in self._ingests():
                base, end = log.committed[held.pchannel], len(log.channels[held.pchannel].entries)
                if base == end:
                    continue
                mine = frozenset({held.pchannel})
                with self.owned.running(mine):
                    self.clock.sleep(0.03)
                    with self.owned.committing(mine) as may:
                        if not may:
                            continue
                        self.cluster.acts(self, held.pchannel, INGEST, held.term)
                        session = self.session.name
                        self.clock.sleep(self.cluster.world.random.choice((0.01, 0.01, 0.2)))
                        log.commit(held.pchannel, base, end)
                        if self.session.held(session):  # else it may end late, and the table fences it
                            self.cluster.acts(self, held.pchannel, INGEST, held.term)

    def _flush(self) -> None:
        """The loop wal → collections: four commits, each asked for by itself."""
        while True:
            self.clock.sleep(0.9)
            for held in self._ingests():
                with self.owned.committing(frozenset({held.pchannel})) as may:
                    for _ in range(4 if may else 0):
                        if not self.owned.holds(held.pchannel):
                            break
                        self.cluster.acts(self, held.pchannel, INGEST, held.term)
                        session = self.session.name
                        self.clock.sleep(self.cluster.world.random.choice((0.02, 0.02, 0.2)))
                        if self.session.held(session):  # else it may end late, and the table fences it
                            self.cluster.acts(self, held.pchannel, INGEST, held.term)

    def _ingests(self) -> list[HeldRole]:
        return [each for each in self.hosting.held_roles() if each.role == INGEST]


class Changed:
    """What stands in for a Condition where one thing runs at a time: who waits gives way to the world."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def __enter__(self) -> None: ...

    def __exit__(self, *error: object) -> None: ...

    def wait(self, seconds: float) -> None:
        self._clock.sleep(seconds)

    def notify_all(self) -> None: ...


class Coordinator:
    """A coordinator around the real leadership, balancer and broadcaster."""

    def __init__(self, cluster: Cluster, name: str) -> None:
        self.cluster = cluster
        self.name = name
        self.start()

    def start(self) -> None:
        cluster = self.cluster
        self.process = cluster.process(self.name)
        self.clock = Clock(cluster.world, self.process)
        self.store = cluster.remote(self.process)
        self.leadership = Leadership(self.store, self.clock, self.name, seconds=SESSION)
        together = partial(cluster.network.together, self.process)
        self.broadcaster = Broadcaster(
            cluster.ledger(self.process), self, cluster.catalog.kinds(self.clock), run_all=together
        )
        self.balancer: Balancer | None = None
        cluster.world.spawn(self.process, self._campaign, cluster.world.random.random() * 0.2)
        cluster.world.spawn(self.process, self._lead, 0.2)

    def _campaign(self) -> None:
        while True:
            self.clock.sleep(self.leadership.step())

    def _lead(self) -> None:
        while True:
            self.clock.sleep(0.25)
            epoch = self.leadership.epoch
            if epoch == 0:
                continue
            self.cluster.leads(self)
            self._serve(epoch)

    def _serve(self, epoch: int) -> None:
        together = partial(self.cluster.network.together, self.process)
        self.balancer = Balancer(
            self.leadership,
            self.clock,
            self,
            self.cluster.shape.policy,
            pchannels=lambda: tuple(self.cluster.pchannels),
            run_all=together,
            stats=lambda: self.cluster.shape.stats,
            limits=self.cluster.shape.limits,
            session_seconds=SESSION,
        )
        ended = []

        def rounds(step: Callable[[], object], pause: float) -> None:
            while self.leadership.epoch == epoch:
                try:
                    step()
                except NotLeader:
                    break
                except MillraceError:
                    pass
                self.clock.sleep(pause)
            ended.append(step)

        for step, pause in ((self.balancer.step, 0.5), (self.broadcaster.resume, 0.3)):
            self.cluster.world.spawn(self.process, partial(rounds, step, pause))
        while len(ended) < 2:
            self.clock.sleep(0.4)
        self.balancer = None

    # -- orders and appends, through the network -----------------------------------------------------------------------

    def assign(self, owner: Owner, pchannel: str, role: str) -> None:
        self._order(owner, lambda hosting: hosting.assign(owner.session, pchannel, role, owner.term))

    def remove(self, owner: Owner, pchannel: str, role: str) -> None:
        self._order(owner, lambda hosting: hosting.remove(owner.session, pchannel, role, owner.term))

    def _order(self, owner: Owner, call: Callable[[RoleManager], None]) -> None:
        node = self.cluster.at(owner.address)
        assert node is not None
        self.cluster.network.call(self.process, node.process, lambda: call(node.hosting))

    def send(self, task: BroadcastTask, target: str) -> int:
        """The broadcaster's (the protocol Sending)."""
        if self.cluster.world.random.random() < 0.1 and self.cluster.network.loss:
            raise NodeUnreachable("lost on the way")
        change = task.change.get(DATA, task.change)
        what = (BROADCAST, task.id, task.request, target, change["refused_by"] == target)
        tick = self.cluster.log.append(self.process, pchannel_of(target), BROADCAST, 0, what)
        if tick is None:
            raise AppendRejected(f"{target} refuses {task.id}", reason=Reason.NO_EFFECT)
        return tick

    def is_permanent(self, error: MillraceError) -> bool:
        return isinstance(error, AppendRejected)


@dataclass
class Request:
    collection: int
    keys: tuple[ResourceKey, ...]
    targets: tuple[str, ...]
    refused_by: str
    """The target that takes it not, "" where all do."""
    notes: bool
    """Whether it is a broadcast of messages; else it is DDL."""
    patient: bool
    """Whether its caller asks until it has an answer; else it dies behind its first attempt."""
    outcome: str = ""
    """What the caller was told: done, or abandoned."""


class Client:
    """A producer that follows assignments, repeats what it got no answer for, and makes DDL and broadcasts messages."""

    def __init__(self, cluster: Cluster, name: str) -> None:
        self.cluster = cluster
        self.name = name
        self.process = cluster.process(name)
        self.clock = Clock(cluster.world, self.process)
        self.assignments = AssignmentCache(MetaStoreAssignmentSource(cluster.remote(self.process)))
        self.produces = True
        self._rows = 0
        self._requests = 0
        self._version = -1
        self._refused: set[tuple[str, int]] = set()
        """Assignments that their nodes did not know any more, as (PChannel, term)."""
        for loop, delay in ((self._follow, 0.1), (self._produce, 1.0), (self._ddl, 1.5)):
            cluster.world.spawn(self.process, loop, delay + cluster.world.random.random() * 0.2)

    def _follow(self) -> None:
        while True:
            self._ask()
            self.clock.sleep(0.5)

    def _ask(self) -> None:
        """Also by who was refused, at the same time: answers come in any order."""
        try:
            self.assignments.refresh()
        except MillraceError:
            pass
        if self.assignments.version < self._version:
            raise Broken(f"{self.name} follows backwards")
        self._version = self.assignments.version

    def _produce(self) -> None:
        random, network = self.cluster.world.random, self.cluster.network
        while True:
            self.clock.sleep(random.uniform(0.1, 0.5))
            if not self.produces:
                continue
            pchannel = random.choice(self.cluster.pchannels)
            self._rows += 1
            row = (ROW, self.name, self._rows)
            while True:
                assignment = self.assignments.get(pchannel, APPEND)
                if assignment is not None:
                    if (pchannel, assignment.term) in self._refused:
                        raise Broken(f"{self.name} goes again where it was refused: {assignment}")
                    node = self.cluster.at(assignment.address)
                    assert node is not None
                    try:
                        network.call(self.process, node.process, partial(node.append, assignment, row))
                        self.cluster.acknowledged.append((pchannel, row))
                        break
                    except NodeUnreachable:
                        pass
                    except MillraceError:
                        self._refused.add((pchannel, assignment.term))
                        self.assignments.mark_stale(assignment)
                        self._ask()
                self.clock.sleep(0.2)

    def _ddl(self) -> None:
        random, cluster = self.cluster.world.random, self.cluster
        while True:
            self.clock.sleep(random.uniform(1.0, 3.0))
            if not self.produces:
                continue
            self._requests += 1
            name = f"{self.name}-{self._requests}"
            collection = random.choice((1, 2))
            keys = collection_keys(collection) if random.random() < 0.8 else normalize_keys([ResourceKey(CLUSTER)])
            targets = tuple(f"{pchannel}_{collection}v0" for pchannel in random.sample(cluster.pchannels, 2))
            refused_by = random.choice(targets) if random.random() < 0.1 else ""
            notes = random.random() < 0.5
            if notes:
                keys = message_keys(_messages(collection, targets))
                # What a later VChannel would refuse is refused before anything is stored (judge_messages).
                refused_by = targets[0] if refused_by else ""
            request = Request(collection, keys, targets, refused_by, notes, patient=random.random() < 0.7)
            cluster.requests[name] = request
            while not request.outcome:
                for coordinator in random.sample(cluster.coordinators, 2):
                    try:
                        cluster.network.call(
                            self.process, coordinator.process, partial(self._submit, coordinator, name, request)
                        )
                        request.outcome = "done"
                        break
                    except AppendRejected:
                        request.outcome = "abandoned"
                        break
                    except MillraceError:
                        continue
                if not request.patient:
                    break
                self.clock.sleep(0.3)

    def _submit(self, coordinator: Coordinator, name: str, request: Request) -> BroadcastTask:
        deadline = coordinator.clock.monotonic() + 0.7
        change = {"refused_by": request.refused_by}
        if request.notes:
            messages, barriers = _messages(request.collection, request.targets), dict.fromkeys(request.targets, 0)
            draft = message_draft(NOTE, messages, {}, change, barriers, request=name, principal=self.name)
        else:
            draft = BroadcastDraft("ddl", request.collection, change, request.targets, request.keys, name)
        return coordinator.broadcaster.submit(
            lambda: draft, request=name, expired=lambda: coordinator.clock.monotonic() > deadline
        )


def _messages(collection: int, targets: Sequence[str]) -> list[MutableMessage]:
    return [manual_flush(vchannel=target, collection_id=collection, term=0) for target in targets]
