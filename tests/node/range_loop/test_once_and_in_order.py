"""Whatever fails at whichever step, of whichever host, each number has its effect once and in order."""

from __future__ import annotations

import pickle
import shutil
import tempfile
from pathlib import Path
from typing import Any

from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from prometheus_client import CollectorRegistry

from millrace.base.errors import MillraceError, TableUnavailable
from millrace.base.metrics import Metrics
from millrace.base.settings import Settings
from millrace.node.range_loop.batch_driver import BatchDriver
from millrace.node.range_loop.definition import run_range
from millrace.node.range_loop.in_process import run_to_end
from millrace.node.range_loop.parking import parked_names, unpark
from millrace.node.range_loop.schedule import START, BatchOffset, RangeSchedule, StallBackoff
from tests.node.range_loop.lists import Clock, Lists, Moved, Work, World, unavailable

CHANNELS = ("a", "b", "c")
HOSTS = st.integers(0, 1)
FAULTS = st.sampled_from(["", "looks", "commits_before", "commits_after"])


class Host:
    """A process of the loop: what it knows is gone when it dies."""

    def __init__(self, lists: Lists, clock: Clock) -> None:
        self.schedule = RangeSchedule(
            lists.planner(), parked=lists.parked, stalls=StallBackoff(clock=clock, sleep=clock.sleep)
        )
        self.batches = BatchDriver(lists, metrics=Metrics(registry=CollectorRegistry()))
        self.plans: list[Work] = []
        self.outcomes: list[Any] = []


class Loop(RuleBasedStateMachine):
    """Two hosts over one world; each of their steps may come at any time, fail, be repeated or be the last."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="millrace-loop-"))
        self.world = World(read={name: [] for name in CHANNELS})
        self.lists = Lists(Settings(data_dir=self.folder), self.world, batch=2)
        self.clock = Clock()
        self.hosts = [Host(self.lists, self.clock) for _ in range(2)]
        self.offsets: list[BatchOffset] = [START]
        """Of Spark's checkpoint: any of them may come back."""

    def teardown(self) -> None:
        self.world.poisoned.clear()
        for name in parked_names(self.lists.settings.parked_path):
            unpark(self.lists.settings.parked_path, name)
        run_to_end(self.lists, self.lists.committer(None), max_bytes=2)
        assert {name: self.world.table.get(name, []) for name in CHANNELS} == self.world.read
        for host in self.hosts:  # what a zombie has left goes nowhere
            host.batches.commit(host.outcomes)
        assert {name: self.world.table.get(name, []) for name in CHANNELS} == self.world.read
        shutil.rmtree(self.folder)

    @rule(name=st.sampled_from(CHANNELS), count=st.integers(1, 4))
    def comes(self, name: str, count: int) -> None:
        numbers = self.world.read[name]
        numbers.extend(range(len(numbers), len(numbers) + count))

    @rule(name=st.sampled_from(CHANNELS))
    def is_poisoned(self, name: str) -> None:
        self.world.poisoned.add((name, len(self.world.read[name])))

    @rule()
    def is_cured(self) -> None:
        self.world.poisoned.clear()
        for name in parked_names(self.lists.settings.parked_path):
            unpark(self.lists.settings.parked_path, name)

    @rule(seconds=st.floats(0, 10))
    def time_passes(self, seconds: float) -> None:
        self.clock.now += seconds

    @rule(number=HOSTS, fault=FAULTS, back=st.integers(0, 3))
    def plans(self, number: int, fault: str, back: int) -> None:
        start = self.offsets[-1 - min(back, len(self.offsets) - 1)]
        self._with(fault, lambda: self._plan(number, start))

    def _plan(self, number: int, start: BatchOffset) -> None:
        schedule = self.hosts[number].schedule
        following = schedule.next_offset(start, max_bytes=2)
        self.offsets.append(following)
        self.hosts[number].plans = pickle.loads(pickle.dumps(schedule.plan(following)))

    @rule(number=HOSTS, error=st.sampled_from([None, TableUnavailable("gone"), OSError("disk")]))
    def runs(self, number: int, error: Exception | None) -> None:
        def fails(work: Work) -> None:
            if error is not None and work.channel == "a":
                raise error

        self.world.runs = fails
        host = self.hosts[number]
        host.outcomes = pickle.loads(pickle.dumps([run_range(self.lists, plan) for plan in host.plans]))
        self.world.runs = lambda work: None

    @rule(number=HOSTS, fault=FAULTS)
    def commits(self, number: int, fault: str) -> None:
        """Any number of times: Spark may run a batch again."""
        host = self.hosts[number]
        self._with(fault, lambda: host.batches.commit(host.outcomes))

    @rule(number=HOSTS)
    def dies(self, number: int) -> None:
        self.hosts[number] = Host(self.lists, self.clock)

    @precondition(lambda self: not self.world.poisoned and not parked_names(self.lists.settings.parked_path))
    @rule()
    def somebody_catches_up(self) -> None:
        run_to_end(self.lists, self.lists.committer(None))

    @invariant()
    def each_once_and_in_order(self) -> None:
        for name, numbers in self.world.table.items():
            assert numbers == self.world.read[name][: len(numbers)]

    def _with(self, fault: str, step: Any) -> None:
        if fault:
            setattr(self.world, fault, unavailable)
        try:
            step()
        except MillraceError:
            pass
        finally:
            if fault:
                setattr(self.world, fault, lambda: None)


TestLoop = Loop.TestCase
TestLoop.settings = hypothesis_settings(max_examples=60, stateful_step_count=40)


def test_the_lists_would_show_a_commit_that_is_not_fenced() -> None:
    """Of this test's own world: a report that comes twice has its effect once."""
    world = World(read={"a": [1, 2]})
    committer = Lists(Settings(), world).committer(None)
    report = Moved("a", 0, (1, 2), 2)
    assert committer.commit([report]).committed == [report]
    assert committer.commit([report]).fenced == [report]
    assert world.table == {"a": [1, 2]}
