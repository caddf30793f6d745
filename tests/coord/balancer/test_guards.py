"""What keeps a PChannel where it is though it would be cheaper elsewhere: it is behind, or moved a while ago."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest

from millrace.base.errors import NodeUnreachable, PermissionDenied
from millrace.base.settings import Settings
from millrace.base.settings.live import ChangedSettings, LiveSettings, write_changed
from millrace.coord.balancer.balancer import EVICTED_PREFIX, REPORT_SECONDS, Balancer, ChannelStats, RebalanceLimits
from millrace.coord.balancer.policies import NamedPolicy, find_policy
from millrace.coord.balancer.policy import AssignmentView, PlannedMove
from millrace.coord.channels.record import CHANNEL_PREFIX, AssignmentState, Owner
from millrace.coord.control import DRAIN_PREFIX
from millrace.coord.leadership import Leadership
from millrace.coord.lease import CLOCK_DRIFT
from millrace.coord.process import follow_settings
from millrace.coord.session import INGEST, NODE_PREFIX, NodeInfo
from millrace.meta.memory import MemoryStore
from millrace.meta.store import Put

NAMES = [f"dml_{number}" for number in range(4)]


class Clock:
    now = 0.0

    def monotonic(self) -> float:
        return self.now

    def wall(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class Obedient:
    """The protocol Orders: nodes that do what they are told."""

    def assign(self, owner: Owner, pchannel: str, role: str) -> None:
        pass

    def remove(self, owner: Owner, pchannel: str, role: str) -> None:
        pass


def together(calls: Sequence[Callable[[], None]]) -> None:
    for call in calls:
        call()


def test_what_is_behind_is_moved_for_balance_when_it_has_caught_up_and_not_again_at_once() -> None:
    clock, behind = Clock(), {"dml_0", "dml_1", "dml_2", "dml_3"}
    store = MemoryStore(clock.monotonic)
    leadership = Leadership(store, clock, "c1", seconds=86_400.0)
    leadership.step()
    balancer = Balancer(
        leadership,
        clock,
        Obedient(),
        find_policy("vchannelfair"),
        pchannels=lambda: NAMES,
        run_all=together,
        stats=lambda: {name: ChannelStats(vchannels=1, recovery_lag=2.0 if name in behind else 0.5) for name in NAMES},
        limits=RebalanceLimits(min_interval=100.0, max_recovery_lag=1.0),
        roles=(INGEST,),
    )

    def owned() -> Counter[str]:
        for _ in range(3):
            clock.sleep(1.0)
            balancer.step()
        return Counter(each.owner.session for each in balancer.manager.records.values() if each.owner is not None)

    def come(session: str) -> None:
        info = NodeInfo(session.partition("@")[0], "grpc://h:1", (INGEST,))
        store.commit([Put(NODE_PREFIX + session, info.encode())])

    come("n1@1")
    assert owned() == {"n1@1": 4}, "what has no home is placed, however far behind"
    come("n2@2")
    assert owned() == {"n1@1": 4}
    behind.discard("dml_2")
    assert owned() == {"n1@1": 3, "n2@2": 1}
    assert balancer.manager.records[f"{CHANNEL_PREFIX}dml_2@{INGEST}"].owner.session == "n2@2"  # type: ignore[union-attr]
    behind.clear()
    assert owned() == {"n1@1": 2, "n2@2": 2}
    come("n3@3")
    moved = [each.pchannel for each in balancer.manager.records.values() if each.owner and each.owner.session == "n2@2"]
    assert owned()["n2@2"] == 2, f"{moved} moved a moment ago"


def test_a_packages_policy_that_moves_everything_in_each_round_moves_a_role_once_an_interval(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def everything(view: AssignmentView) -> list[PlannedMove]:
        away = {each: other for each in view.nodes for other in view.nodes if other != each}
        return [PlannedMove(each.pchannel, away.get(each.owner or "", "n1@1"), "mine") for each in view.channels][:4]

    point = SimpleNamespace(name="mine", value="p:M", load=lambda: NamedPolicy("mine", everything))
    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: [point])
    clock = Clock()
    store = MemoryStore(clock.monotonic)
    leadership = Leadership(store, clock, "c1", seconds=86_400.0)
    leadership.step()
    for session in ("n1@1", "n2@2"):
        store.commit([Put(NODE_PREFIX + session, NodeInfo(session[:2], "grpc://h:1", (INGEST,)).encode())])
    balancer = Balancer(
        leadership,
        clock,
        Obedient(),
        find_policy("mine"),
        pchannels=lambda: NAMES,
        run_all=together,
        limits=RebalanceLimits(min_interval=100.0, max_moves=4),
        roles=(INGEST,),
    )
    for _ in range(50):
        balancer.step()
        clock.sleep(1.0)
    assert {(each.state, each.term) for each in balancer.manager.records.values()} == {(AssignmentState.ASSIGNED, 2)}


def test_the_role_of_a_node_that_was_put_out_is_opened_when_its_lease_has_ended_by_any_clock() -> None:
    """A node that cannot be reached hears nothing of its end.

    It acts until its lease would have ended, by its own clock.
    """
    clock, session = Clock(), 10.0
    store = MemoryStore(clock.monotonic)
    leadership = Leadership(store, clock, "c1", seconds=86_400.0)
    leadership.step()
    opened: list[str] = []

    class Orders(Obedient):
        def assign(self, owner: Owner, pchannel: str, role: str) -> None:
            opened.append(owner.session)

        def remove(self, owner: Owner, pchannel: str, role: str) -> None:
            if owner.session == "n1@1":
                raise NodeUnreachable("n1 does not answer")

    balancer = Balancer(
        leadership,
        clock,
        Orders(),
        find_policy("vchannelfair"),
        pchannels=lambda: ["dml_0"],
        run_all=together,
        limits=RebalanceLimits(eviction_seconds=3.0),
        session_seconds=session,
        roles=(INGEST,),
    )

    def come(name: str) -> None:
        store.commit([Put(NODE_PREFIX + name, NodeInfo(name.partition("@")[0], "grpc://h:1", (INGEST,)).encode())])

    come("n1@1")
    balancer.step()
    assert opened == ["n1@1"]
    store.commit([Put(f"{DRAIN_PREFIX}n1", b"")])
    come("n2@2")
    put_out = None
    while "n2@2" not in opened:
        clock.sleep(0.25)
        balancer.step()
        if put_out is None and store.get(f"{EVICTED_PREFIX}n1@1") is not None:
            put_out = clock.now
        assert clock.now < 60.0, "it is never opened"
    assert put_out is not None
    assert clock.now >= put_out + session * (1 + CLOCK_DRIFT)
    assert clock.now < put_out + session * (1 + CLOCK_DRIFT) + 2.0
    assert store.get(f"{EVICTED_PREFIX}n1@1") is None


def test_pchannels_that_are_added_while_the_cluster_runs_are_placed_and_move_no_others() -> None:
    clock, names = Clock(), NAMES[:2]
    store = MemoryStore(clock.monotonic)
    leadership = Leadership(store, clock, "c1", seconds=86_400.0)
    leadership.step()
    balancer = Balancer(
        leadership,
        clock,
        Obedient(),
        find_policy("vchannelfair"),
        pchannels=lambda: names,
        run_all=together,
        stats=lambda: {name: ChannelStats(vchannels=8, collections=frozenset([1])) for name in NAMES[:2]},
        roles=(INGEST,),
    )
    for session in ("n1@1", "n2@2"):
        info = NodeInfo(session.partition("@")[0], "grpc://h:1", (INGEST,))
        store.commit([Put(NODE_PREFIX + session, info.encode())])

    def owners() -> dict[str, str]:
        for _ in range(3):
            clock.sleep(1_000.0)
            balancer.step()
        return {each.pchannel: each.owner.session for each in balancer.manager.records.values() if each.owner}

    before = owners()
    assert Counter(before.values()) == {"n1@1": 1, "n2@2": 1}
    names = [*NAMES, "dml_4", "dml_5"]
    after = owners()
    assert Counter(after.values()) == {"n1@1": 3, "n2@2": 3}, "though nothing is on them yet"
    assert {name: after[name] for name in before} == before


def test_a_policy_and_limits_that_are_changed_while_a_leader_leads_count_from_its_next_round_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("millrace.base.settings.live.LOOK_SECONDS", 0.0)
    settings = Settings(data_dir=tmp_path)
    clock = Clock()
    store = MemoryStore(clock.monotonic)
    leadership = Leadership(store, clock, "c1", seconds=86_400.0)
    leadership.step()

    def to_the_first(view: AssignmentView) -> list[PlannedMove]:
        return [PlannedMove(each.pchannel, min(view.nodes), "place") for each in view.channels if each.owner is None]

    balancer = Balancer(
        leadership, clock, Obedient(), to_the_first, pchannels=lambda: NAMES, run_all=together, roles=(INGEST,)
    )
    live = LiveSettings(settings)
    for session in ("n1@1", "n2@2"):
        info = NodeInfo(session.partition("@")[0], "grpc://h:1", (INGEST,))
        store.commit([Put(NODE_PREFIX + session, info.encode())])

    def owned() -> Counter[str]:
        for _ in range(4):
            clock.sleep(1.0)
            balancer.step()
        return Counter(each.owner.session for each in balancer.manager.records.values() if each.owner is not None)

    assert owned() == {"n1@1": 4}
    write_changed(settings, ChangedSettings({"balance_policy": "not-installed-here", "balance_interval": "7"}))
    follow_settings(balancer, live)
    assert (owned(), balancer.limits.min_interval) == ({"n1@1": 4}, 7.0)
    write_changed(settings, ChangedSettings({"balance_policy": "pchannelcount"}))
    follow_settings(balancer, live)
    assert owned() == {"n1@1": 2, "n2@2": 2}


def test_a_node_that_refuses_every_order_is_named_in_the_log_now_and_then(caplog: pytest.LogCaptureFixture) -> None:
    """So a node with another MILLRACE_SERVER_TOKEN is found."""
    clock = Clock()
    store = MemoryStore(clock.monotonic)
    leadership = Leadership(store, clock, "c1", seconds=86_400.0)
    leadership.step()

    class Orders(Obedient):
        def assign(self, owner: Owner, pchannel: str, role: str) -> None:
            raise PermissionDenied("the token is not this server's")

    balancer = Balancer(
        leadership,
        clock,
        Orders(),
        find_policy("vchannelfair"),
        pchannels=lambda: NAMES,
        run_all=together,
        roles=(INGEST,),
    )
    store.commit([Put(NODE_PREFIX + "n1@1", NodeInfo("n1", "grpc://h:1", (INGEST,)).encode())])
    for _ in range(30):
        clock.sleep(1.0)
        balancer.step()
    lines = [each.message for each in caplog.records if "n1@1 did not take dml_" in each.message]
    assert 1 <= len(lines) <= 30 / REPORT_SECONDS + 1
    assert "PERMISSION_DENIED: the token is not this server's" in lines[0]
