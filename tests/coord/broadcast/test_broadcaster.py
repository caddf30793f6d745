"""The broadcaster on its ledger: to whom a message goes in which order, who completes what, what a refusal leaves."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from millrace.base.errors import AppendRejected, DeadlineExceeded, InvalidArgument, LogUnavailable, MillraceError
from millrace.coord.broadcast.broadcaster import MAX_PLAN_ATTEMPTS, Broadcaster, run_sequentially
from millrace.coord.broadcast.ledger import BroadcastCallbacks, CallbackRegistry, StalePlan
from millrace.coord.broadcast.sqlite_ledger import SqliteLedger
from millrace.coord.broadcast.task import BroadcastDraft, BroadcastTask, TaskState, collection_keys
from millrace.coord.catalog.database import CoordinatorDb
from millrace.coord.concurrency import ThreadRunner
from millrace.wal.reasons import Reason
from tests.failpoints import at_failpoints


@dataclass
class Targets:
    """VChannels that take what comes, but for those that refuse it or are away (the protocol Sending)."""

    refuse: set[str] = field(default_factory=set)
    away: set[str] = field(default_factory=set)
    sent: list[tuple[int, str]] = field(default_factory=list)

    def send(self, task: BroadcastTask, target: str) -> int:
        self.sent.append((task.id, target))
        if target in self.away:
            raise LogUnavailable(f"{target} is away")
        if target in self.refuse:
            raise AppendRejected(f"{target} takes it not", reason=Reason.LIMIT_EXCEEDED)
        return len(self.sent)

    def is_permanent(self, error: MillraceError) -> bool:
        return isinstance(error, AppendRejected)


@pytest.fixture
def ledger() -> Iterator[SqliteLedger]:
    with CoordinatorDb(":memory:") as made:
        yield SqliteLedger(made)


@pytest.fixture
def targets() -> Targets:
    return Targets()


def drafted(collection: int = 1, *, count: int = 3, request: str = "") -> BroadcastDraft:
    names = tuple(f"dml_{number}_{collection}v{number}" for number in range(count))
    return BroadcastDraft("ddl", collection, {}, names, collection_keys(collection), request)


def made(
    ledger: SqliteLedger, targets: Targets, done: list[int] | None = None, *, refused: BroadcastDraft | None = None
) -> Broadcaster:
    effects = [] if done is None else done
    kind = BroadcastCallbacks(lambda task, seen: None, lambda task: effects.append(task.id), lambda task: refused)
    return Broadcaster(ledger, targets, CallbackRegistry({"ddl": kind}), run_all=run_sequentially)


def test_what_the_first_target_refuses_no_other_one_gets(ledger: SqliteLedger, targets: Targets) -> None:
    draft = drafted()
    targets.refuse = {draft.targets[0]}
    with pytest.raises(AppendRejected, match="takes it not"):
        made(ledger, targets).submit(lambda: draft)
    assert [target for _, target in targets.sent] == [draft.targets[0]]
    (found,) = ledger.list_unresolved()
    assert found.task.state is TaskState.ABANDONED
    assert "LIMIT_EXCEEDED" in found.task.reason or "takes it not" in found.task.reason


def test_targets_behind_the_first_get_it_at_the_same_time(ledger: SqliteLedger) -> None:
    class Meeting(Targets):
        meets = threading.Barrier(4)

        def send(self, task: BroadcastTask, target: str) -> int:
            if target != "dml_0_1v0":
                self.meets.wait(timeout=20)
            return super().send(task, target)

    with ThreadRunner("broadcast") as together:
        kinds = CallbackRegistry(
            {"ddl": BroadcastCallbacks(lambda task, seen: None, lambda task: None, lambda task: None)}
        )
        done = Broadcaster(ledger, Meeting(), kinds, run_all=together).submit(lambda: drafted(count=5))
    assert done.state is TaskState.DONE
    assert len(done.ticks) == 5


def test_whoever_comes_upon_an_open_one_completes_it_and_plans_anew(ledger: SqliteLedger, targets: Targets) -> None:
    effects: list[int] = []
    left = ledger.add(drafted(), lambda task, seen: None)
    assert isinstance(left, BroadcastTask)
    seen: list[list[int]] = []

    def plan() -> BroadcastDraft:
        seen.append(list(effects))
        return drafted()

    done = made(ledger, targets, effects).submit(plan)
    assert seen == [[], [left.id]], "the second plan sees the effect of what was in the way"
    assert effects == [left.id, done.id]


def test_a_plan_that_is_overtaken_is_made_anew_and_not_for_ever(ledger: SqliteLedger, targets: Targets) -> None:
    turns: list[int] = []

    def plan() -> BroadcastDraft:
        turns.append(0)
        raise StalePlan

    with pytest.raises(DeadlineExceeded):
        made(ledger, targets).submit(plan)
    assert len(turns) == MAX_PLAN_ATTEMPTS
    with pytest.raises(DeadlineExceeded):
        made(ledger, targets).submit(plan, expired=lambda: True)
    assert len(turns) == MAX_PLAN_ATTEMPTS


def test_a_repeated_request_gets_what_the_first_one_came_to(ledger: SqliteLedger, targets: Targets) -> None:
    broadcaster, draft = made(ledger, targets), drafted(request="mine")
    done = broadcaster.submit(lambda: draft, request="mine")
    assert broadcaster.submit(lambda: pytest.fail("it is planned again"), request="mine") == done
    targets.refuse = set(drafted(2).targets)
    for _ in range(2):
        with pytest.raises(AppendRejected, match="takes it not"):
            broadcaster.submit(lambda: drafted(2, request="other"), request="other")


def test_one_that_waits_is_a_wall_for_its_own_resources_alone(ledger: SqliteLedger, targets: Targets) -> None:
    effects: list[int] = []
    broadcaster = made(ledger, targets, effects)
    targets.away = {"dml_1_1v1"}
    with pytest.raises(LogUnavailable):
        broadcaster.submit(lambda: drafted(1))
    other = broadcaster.submit(lambda: drafted(2))
    with pytest.raises(LogUnavailable):
        broadcaster.submit(lambda: drafted(1))
    (waits,) = ledger.open_tasks()
    assert (waits.pending_targets, waits.reason) == (["dml_1_1v1"], "LOG_UNAVAILABLE: dml_1_1v1 is away")
    assert broadcaster.resume() == 1
    assert broadcaster.resume(skip=lambda task: True) == 0
    targets.away = set()
    before = len(targets.sent)
    assert broadcaster.resume() == 1
    assert targets.sent[before:] == [(waits.id, "dml_1_1v1")], "who has it gets it no more"
    assert effects == [other.id, waits.id]
    assert ledger.open_tasks() == []


def test_a_target_that_refuses_says_more_than_one_that_is_away(ledger: SqliteLedger, targets: Targets) -> None:
    targets.away, targets.refuse = {"dml_1_1v1"}, {"dml_2_1v2"}
    with pytest.raises(AppendRejected):
        made(ledger, targets).submit(drafted)
    assert ledger.open_tasks() == []


def test_what_takes_a_refused_one_back_is_completed_with_it(ledger: SqliteLedger, targets: Targets) -> None:
    effects: list[int] = []
    targets.refuse = {"dml_2_1v2"}
    with pytest.raises(AppendRejected):
        made(ledger, targets, effects, refused=drafted(1, count=2)).submit(drafted)
    assert ledger.open_tasks() == []
    (undone,) = effects
    assert [target for number, target in targets.sent if number == undone] == ["dml_0_1v0", "dml_1_1v1"]


@pytest.mark.parametrize("names", [(), ("dml_0_1v0", "dml_0_1v0")])
def test_a_broadcast_goes_to_different_vchannels(
    ledger: SqliteLedger, targets: Targets, names: tuple[str, ...]
) -> None:
    with pytest.raises(InvalidArgument):
        made(ledger, targets).submit(lambda: BroadcastDraft("ddl", 1, {}, names, collection_keys(1)))
    assert ledger.open_tasks() == []


@pytest.mark.parametrize("became", ["done", "abandoned"])
def test_what_another_one_closed_and_was_collected_since_is_not_said_to_be_done(targets: Targets, became: str) -> None:
    with CoordinatorDb(":memory:") as database:
        ledger = SqliteLedger(database, max_closed=1)
        one, other = made(ledger, targets), made(ledger, targets)
        overtaken: list[str] = []

        def act(place: str) -> None:
            if place != "ddl.acknowledged" or overtaken:
                return
            overtaken.append(place)
            (task,) = ledger.open_tasks()
            if became == "abandoned":
                ledger.abandon(task.id, "a target refused it", lambda task: None)
            else:
                ledger.finish(task.id, lambda task: None)
            other.submit(lambda: drafted(2))

        with at_failpoints(act), pytest.raises(DeadlineExceeded, match="check whether its effect"):
            one.submit(drafted)
        assert overtaken
        assert ledger.open_tasks() == []
