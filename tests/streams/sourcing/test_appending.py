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
from millrace.streams.sourcing.appending import Appended, Command
from millrace.streams.sourcing.commands import Verdict
from millrace.streams.sourcing.store import EventStore
from tests.streams.sourcing.conftest import Open
from tests.streams.sourcing.flying import AIRCRAFT, Aircraft, flown

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


def sent(monkeypatch: pytest.MonkeyPatch, store: EventStore[Aircraft]) -> list[int]:
    """Messages of each entry that the store sends from now on."""
    found: list[int] = []
    send = store._appender._sender.send

    def counted(messages: Sequence[MutableMessage]) -> list[Verdict | AppendRejected]:
        found.append(len(messages))
        return send(messages)

    monkeypatch.setattr(store._appender._sender, "send", counted)
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
