"""Batches of commands as a model judges them, one command after the other; answers are lost at any append.

Two stores share the aggregates. A store's cache may be older than what the other store has appended, so its messages
lose, are judged anew, and are split.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

import millrace.testing
from millrace.base.errors import AppendRejected, CheckViolated, LogUnavailable, VersionConflict
from millrace.message.model import MutableMessage
from millrace.streams.sourcing import appending
from millrace.streams.sourcing.commands import Verdict
from millrace.streams.sourcing.groups import Appended, Command
from millrace.streams.sourcing.store import EventStore
from tests.streams.sourcing.conftest import Open
from tests.streams.sourcing.flying import AIRCRAFT, Aircraft, flown
from tests.waiting import until

KEYS = 3
_WORLDS = itertools.count()


@dataclass
class Model:
    """One aggregate: the commands that appended its events, by version, and the flights since it was erased."""

    version: int = 0
    commands: dict[UUID, list[int]] = field(default_factory=dict)
    flights: int = 0

    def judge(self, command: Command) -> tuple[str, int]:
        """Apply a command; return its outcome (appended, repeated or conflict) and the version that it names."""
        expected, count = command.expected_version, 1 if command.erases else len(command.events)
        if expected is not None and expected != self.version:
            mine = self.commands.get(command.id, [0])
            return ("repeated", max(mine)) if min(mine) == expected + 1 else ("conflict", self.version)
        if command.erases:
            self.commands, self.flights = {}, 0
        else:
            self.flights += count
        self.commands[command.id] = list(range(self.version + 1, self.version + count + 1))
        self.version += count
        return "appended", self.version


@dataclass(frozen=True)
class Step:
    """A command relative to the aggregate's version when its batch begins; `again` repeats an earlier one instead."""

    key: int
    ahead: int | None
    events: int
    erases: bool
    again: int | None


STEPS = st.builds(
    Step,
    key=st.integers(0, KEYS - 1),
    ahead=st.none() | st.integers(-2, 5),
    events=st.integers(1, 3),
    erases=st.sampled_from([False] * 7 + [True]),
    again=st.sampled_from([None, None, None, 0, 3]),
)
BATCHES = st.lists(st.tuples(st.booleans(), st.lists(STEPS, min_size=1, max_size=12)), min_size=1, max_size=6)


def commands_of(
    steps: Sequence[Step], model: Sequence[Model], names: Sequence[str], done: list[Command]
) -> list[Command]:
    found = []
    for number, step in enumerate(steps):
        expected = None if step.ahead is None else max(0, model[step.key].version + step.ahead)
        if step.again is not None and step.again < len(done):
            found.append(done[step.again])
            continue
        events = [] if step.erases else [flown(number)] * step.events
        found.append(Command(names[step.key], events, expected, erases=step.erases))
    done += [each for each in found if each.expected_version is not None and each not in done]
    return found


@given(lost=st.sets(st.integers(0, 12), max_size=2), batches=BATCHES)
def test_batches_have_the_outcomes_of_commands_one_by_one(
    deployment: millrace.testing.Deployment, lost: set[int], batches: list[tuple[bool, list[Step]]]
) -> None:
    stores = [EventStore.open(deployment, "judged", AIRCRAFT, vchannels=2) for _ in range(2)]
    names = [f"{next(_WORLDS)}-{number}" for number in range(KEYS)]
    model = [Model() for _ in names]
    done: list[Command] = []
    append, count = deployment.connection.append, itertools.count()

    def losing(*args: Any, **options: Any) -> Any:
        found = append(*args, **options)
        if next(count) in lost:
            raise LogUnavailable("the answer was lost")
        return found

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(deployment.connection, "append", losing)
        for other, steps in batches:
            commands = commands_of(steps, model, names, done)
            outcomes = stores[other].append_all(commands)
            for command, outcome in zip(commands, outcomes, strict=True):
                wanted, version = model[names.index(command.key)].judge(command)
                if isinstance(outcome, VersionConflict):
                    assert (wanted, version) == ("conflict", outcome.current_version)
                else:
                    assert isinstance(outcome, Appended)
                    assert (wanted == "conflict", outcome.version) == (False, version)
                    assert outcome.repeated >= (wanted == "repeated")
                    assert not outcome.repeated or wanted == "repeated" or lost
    for store in [*stores, EventStore.open(deployment, "judged", AIRCRAFT)]:
        loaded = store.load_all(names)
        assert [loaded[name].version for name in names] == [each.version for each in model]
        assert [loaded[name].state.flights for name in names] == [each.flights for each in model]


@dataclass(frozen=True)
class Call:
    """A thread's command: expected version relative to the aggregate's at the start, None for whatever is there."""

    key: int
    ahead: int | None
    events: int
    bad: bool


CALLS = st.builds(
    Call,
    key=st.integers(0, KEYS - 1),
    ahead=st.sampled_from([None, 0, 0, 0, 1]),
    events=st.integers(1, 2),
    bad=st.sampled_from([False] * 5 + [True]),
)
ROUNDS = st.lists(st.lists(CALLS, min_size=2, max_size=8), min_size=1, max_size=3)


@given(lost=st.sets(st.integers(0, 6), max_size=2), rounds=ROUNDS, foreign=st.sets(st.integers(0, KEYS - 1)))
def test_threads_that_append_at_once_have_a_verdict_each(
    deployment: millrace.testing.Deployment, lost: set[int], rounds: list[list[Call]], foreign: set[int]
) -> None:
    """Whatever is sent together: the outcomes are those of some order, and every event is there once.

    The store's cache of aggregates in `foreign` is older than what another store has appended before each round. The
    answers of some appends are lost, and the append is repeated.
    """
    store, other = (EventStore.open(deployment, "at_once", AIRCRAFT, vchannels=2) for _ in range(2))
    if "short" not in {check.name for check in store.collection.schema.checks}:
        store.collection.alter(add_check={"short": "length(data) < 200"})
    names = [f"{next(_WORLDS)}-{number}" for number in range(KEYS)]
    versions = dict.fromkeys(names, 0)
    append, count = deployment.connection.append, itertools.count()

    def losing(*args: Any, **options: Any) -> Any:
        found = append(*args, **options)
        if next(count) in lost:
            raise LogUnavailable("the answer was lost")
        return found

    with pytest.MonkeyPatch.context() as patched, ThreadPoolExecutor(8) as pool:
        store.load_all(names)
        for calls in rounds:
            for number in foreign:
                versions[names[number]] = other.append(names[number], flown(0)).version
            commands = [
                Command(
                    names[call.key],
                    [flown(int("9" * 180) if call.bad else number)] * call.events,
                    None if call.ahead is None else versions[names[call.key]] + call.ahead,
                )
                for number, call in enumerate(calls)
            ]
            patched.setattr(deployment.connection, "append", losing)
            begin = threading.Barrier(len(calls))

            def run(command: Command, begin: threading.Barrier = begin) -> Appended | Exception:
                begin.wait(30)
                return store.append_all([command])[0]

            outcomes = list(pool.map(run, commands))
            patched.undo()
            _check_some_order(store, versions, calls, commands, outcomes)
    for each in (store, EventStore.open(deployment, "at_once", AIRCRAFT)):
        assert {name: found.version for name, found in each.load_all(names).items()} == versions
        assert {name: found.state.flights for name, found in each.load_all(names).items()} == versions


def _check_some_order(
    store: EventStore[Aircraft],
    versions: dict[str, int],
    calls: Sequence[Call],
    commands: Sequence[Command],
    outcomes: Sequence[Appended | Exception],
) -> None:
    """Check that the outcomes are those of the commands in some order, and move `versions` on."""
    for name in versions:
        mine = [each for each in zip(calls, commands, outcomes, strict=True) if each[1].key == name]
        done = {outcome.version: command for _, command, outcome in mine if isinstance(outcome, Appended)}
        passed = [versions[name]]
        for version, command in sorted(done.items()):
            assert version == passed[-1] + len(command.events), "each follows the one before it"
            assert command.expected_version in (None, passed[-1])
            passed.append(version)
        assert len(done) == sum(isinstance(outcome, Appended) for _, _, outcome in mine), "no version twice"
        ids = {event.version: event.command for event in store.history(name)}
        assert all(ids[version] == command.id for version, command in done.items())
        for call, command, outcome in mine:
            if isinstance(outcome, VersionConflict):
                assert outcome.current_version in passed
                assert command.expected_version != outcome.current_version
            elif call.bad:
                assert isinstance(outcome, CheckViolated)
            else:
                assert isinstance(outcome, Appended)
        versions[name] = passed[-1]


class Held:
    """Keeps the first entry back until so many other threads wait, and counts the messages of each entry."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, store: EventStore[Aircraft], waiting: int) -> None:
        self.entries: list[int] = []
        sender = store._appender._sender._sender
        send = sender.send

        def held(messages: Sequence[MutableMessage]) -> list[Verdict | AppendRejected]:
            self.entries.append(len(messages))
            if len(self.entries) == 1:
                lanes = store._appender._sender._lanes.values()
                until(lambda: sum(len(lane.waiting) for lane in lanes) == waiting)
            return send(messages)

        monkeypatch.setattr(sender, "send", held)


def test_threads_that_wait_share_an_entry(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that lose get a conflict with the version that is there; the others are not affected."""
    store = opened()
    names = [f"N{number}" for number in range(20)]
    store.append_all([Command(name, [flown(1)], 0) for name in names])
    held = Held(monkeypatch, store, 29)
    with ThreadPoolExecutor(30) as pool:
        calls = [pool.submit(store.append, names[n % 20], flown(n), expected_version=1) for n in range(30)]
        errors = [each.exception() for each in calls]
    # The first one's aggregate has a second command among the others, or none.
    assert held.entries in ([1, 19], [1, 20]), "one entry for all that wait, one message for each aggregate"
    lost = [each for each in errors if each is not None]
    assert [type(each) for each in lost] == [VersionConflict] * 10
    assert all(each.current_version == 2 for each in lost if isinstance(each, VersionConflict))
    assert {each.version for each in store.load_all(names).values()} == {2}


def test_threads_that_expect_no_version_follow_each_other_in_one_message(
    opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = opened(snapshot_every=10)
    store.append("N1", flown(1))
    held = Held(monkeypatch, store, 29)
    with ThreadPoolExecutor(30) as pool:
        found = list(pool.map(lambda n: store.append("N1", flown(n)).version, range(30)))
    assert sorted(found) == list(range(2, 32))
    assert held.entries == [1, 1]
    assert store.load("N1").state.flights == 31
    assert store.snapshots is not None
    assert store.snapshots.load(["N1"], None)["N1"].state.flights in (10, 20, 31)


def test_a_lost_answer_is_told_to_each_thread_of_the_entry(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each repeats its command with the same id, and has its own outcome."""
    store = opened()
    names = [f"N{number}" for number in range(10)]
    store.append_all([Command(name, [flown(1)], 0) for name in names])
    Held(monkeypatch, store, 9)
    sender = store._appender._sender._sender
    send = sender.send

    def lost(messages: Sequence[MutableMessage]) -> list[Verdict | AppendRejected]:
        send(messages)
        raise LogUnavailable("the answer was lost")

    commands = [Command(name, [flown(2)], 1) for name in names]
    with ThreadPoolExecutor(10) as pool:
        monkeypatch.setattr(sender, "send", lost)
        calls = [pool.submit(store.append_all, [each]) for each in commands]
        errors = [each.exception() for each in calls]
        assert [type(each) for each in errors] == [LogUnavailable] * 10
        assert len({id(each) for each in errors}) == 10, "an error of its own for each thread"
        monkeypatch.setattr(sender, "send", send)
        again = [each for found in pool.map(lambda one: store.append_all([one]), commands) for each in found]
    assert [(each.version, each.repeated) for each in again if isinstance(each, Appended)] == [(2, True)] * 10


def sent(monkeypatch: pytest.MonkeyPatch, store: EventStore[Aircraft]) -> list[int]:
    """Messages of each entry that the store sends from now on."""
    found: list[int] = []
    send = store._appender._sender._sender.send

    def counted(messages: Sequence[MutableMessage]) -> list[Verdict | AppendRejected]:
        found.append(len(messages))
        return send(messages)

    monkeypatch.setattr(store._appender._sender._sender, "send", counted)
    return found


def test_commands_of_one_aggregate_are_one_message(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    store = opened()
    entries = sent(monkeypatch, store)
    found = store.append_all([Command(f"N{number % 2}", [flown(number)], number // 2) for number in range(20)])
    assert [each.version for each in found] == [1 + number // 2 for number in range(20)]  # type: ignore[union-attr]
    assert entries == [2]


def test_a_refused_command_does_not_take_its_neighbours_along(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    store = opened()
    store.collection.alter(add_check={"short": "length(data) < 200"})
    bad = Command("N1", [flown(1), flown(int("9" * 180))])
    found = store.append_all([Command("N1", [flown(1)]), bad, Command("N1", [flown(3)]), Command("N2", [flown(1)])])
    assert [isinstance(each, Appended) for each in found] == [True, False, True, True]
    assert isinstance(found[1], CheckViolated)
    assert store.load("N1").version == 2


def test_writers_that_lose_wait_longer_each_time_and_not_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    for attempt in range(1, appending.ATTEMPTS + 1):
        appending.pause_between(attempt)
    assert slept[0] >= appending.FIRST_PAUSE
    assert all(each <= 1.5 * appending.LONGEST_PAUSE for each in slept)
    assert sum(slept) < 2.5
    assert len({round(each / appending.LONGEST_PAUSE, 6) for each in slept[-4:]}) == 4, "no two pauses are equal"
    assert [slept[number] < slept[number + 2] for number in range(4)] == [True] * 4


def test_sixteen_writers_decide_on_one_aggregate_at_once(opened: Open) -> None:
    """Each decision takes effect: the pauses keep the writers apart, and ten attempts are enough."""
    stores = [opened() for _ in range(16)]
    begin = threading.Barrier(16)

    def run(store: EventStore[Aircraft]) -> None:
        begin.wait(30)
        for _ in range(3):
            store.execute("N1", lambda state: [flown(state.flights)])

    with ThreadPoolExecutor(16) as pool:
        for _ in pool.map(run, stores):
            pass
    assert stores[0].load("N1").state.flights == 48
