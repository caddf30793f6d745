"""The range loop, over plain lists: what fails is parked or tried again, and the others go on."""

from __future__ import annotations

import errno
import itertools
import json
import pickle
from typing import Any

import pytest

from millrace.base.errors import (
    ChannelParked,
    CommitFenced,
    InvalidArgument,
    Malformed,
    TableUnavailable,
)
from millrace.base.settings import Settings
from millrace.node.range_loop.definition import run_range
from millrace.node.range_loop.failure import FailedRange, RangeFailure
from millrace.node.range_loop.in_process import run_to_end
from millrace.node.range_loop.parking import parked_names, read_parked, unpark
from millrace.node.range_loop.schedule import MAX_BOUNDED_ATTEMPTS, START, StallBackoff, offset_of
from tests.node.range_loop.host import Host
from tests.node.range_loop.lists import Clock, ListPlanner, Lists, Moved, Work, World, unavailable


@pytest.fixture
def world() -> World:
    return World(read={"a": [1, 2, 3, 4, 5], "b": [10, 20, 30]})


def here(lists: Lists, **options: Any) -> dict[str, int]:
    """The loop in this process; a pause takes no time."""
    clock = Clock()
    return run_to_end(lists, lists.committer(None), stalls=StallBackoff(clock=clock, sleep=clock.sleep), **options)


def test_everything_comes_over_in_order_in_ranges_that_are_bounded(settings: Settings, world: World) -> None:
    sizes: list[int] = []
    world.runs = lambda work: sizes.append(work.end - work.start)
    assert here(Lists(settings, world), max_bytes=2) == {"a": 5, "b": 3}
    assert world.table == world.read
    assert sizes == [2, 2, 2, 1, 1]
    assert here(Lists(settings, world)) == {}


def test_a_bounded_loop_ends_where_things_stood(settings: Settings, world: World) -> None:
    world.runs = lambda work: world.read["a"].append(99)
    here(Lists(settings, world))
    assert world.table["a"] == [1, 2, 3, 4, 5]
    assert here(Lists(settings, world), target={"a": 6}) == {"a": 6}
    assert world.table["a"] == [1, 2, 3, 4, 5, 99]


def test_what_cannot_be_processed_parks_its_channel_at_the_entry_and_the_others_go_on(
    settings: Settings, world: World
) -> None:
    world.poisoned.add(("a", 3))
    host = Host(Lists(settings, world))
    assert host.step() == ["a", "b"]
    assert world.table == {"a": [1, 2, 3], "b": [10, 20, 30]}
    (parked,) = read_parked(settings.parked_path)
    assert (parked.pchannel, parked.code, parked.position.entry) == ("a", "POISONED", 3)
    assert host.progress()["parked"] == ["a"]
    world.read["b"].append(40)
    host.clock.now += 60
    assert host.step() == ["b"], "a parked channel is planned no more"
    assert host.schedule.plan({**START, "ends": {"a": "5"}}) == [], "not by an offset from before it was parked either"
    unpark(settings.parked_path, "a")
    world.poisoned.clear()
    assert host.step() == ["a"]
    assert world.table == world.read
    assert host.progress()["parked"] == []


def test_what_may_pass_is_tried_again_ever_later_and_parks_nothing(settings: Settings, world: World) -> None:
    world.runs = lambda work: unavailable() if work.channel == "a" else None
    host = Host(Lists(settings, world))
    assert host.step() == ["a", "b"]
    assert host.step() == [], "it has just been tried"
    assert host.progress()["pchannels"]["a"]["failure"].startswith("TABLE_UNAVAILABLE")
    times = []
    for _ in range(400):
        host.clock.now += 0.1
        if host.step():
            times.append(host.clock.now)
    assert times[1] - times[0] < times[3] - times[2] < times[5] - times[4]
    assert max(later - before for before, later in itertools.pairwise(times)) < 7.7
    assert parked_names(settings.parked_path) == frozenset()
    world.read["b"].append(40)
    assert host.step() == ["b"], "nobody waits for another channel's pause"
    assert host.progress()["pchannels"]["a"]["failure"], "said until it moves"
    world.runs = lambda work: None
    host.clock.now += 10
    host.step()
    assert world.table == world.read
    assert host.progress()["pchannels"]["a"]["failure"] is None


def test_a_definition_that_parks_nothing_tries_again_whatever_it_was(settings: Settings, world: World) -> None:
    world.poisoned.add(("a", 0))
    host = Host(Lists(settings, world, parks=False))
    host.step()
    assert not settings.parked_path.exists()
    assert host.progress()["pchannels"]["a"]["failure"] == "POISONED: number 0"
    world.poisoned.clear()
    host.clock.now += 1
    assert host.step() == ["a"]


def test_a_defect_of_ours_in_one_range_is_that_channels_alone(settings: Settings, world: World) -> None:
    def defect(work: Work) -> None:
        if work.channel == "a":
            raise KeyError("vchannel")

    world.runs = defect
    Host(Lists(settings, world)).step()
    assert world.table == {"b": [10, 20, 30]}
    (parked,) = read_parked(settings.parked_path)
    assert (parked.pchannel, parked.code) == ("a", "KeyError")


def test_a_range_that_another_committer_was_faster_with_is_planned_anew(settings: Settings, world: World) -> None:
    lists = Lists(settings, world)
    slow, fast = Host(lists), Host(lists)
    offset = slow.schedule.next_offset(START)
    outcomes = [run_range(lists, plan) for plan in slow.schedule.plan(offset)]
    world.read["a"].append(6)
    fast.step()
    result = slow.batches.commit(outcomes)
    assert [report.channel for report in result.fenced] == ["a", "b"]
    assert world.table == world.read
    world.read["a"].append(7)
    assert slow.step() == ["a"]
    assert world.table["a"] == [1, 2, 3, 4, 5, 6, 7]


def test_a_fenced_range_that_failed_on_an_old_base_parks_nothing(settings: Settings, world: World) -> None:
    lists = Lists(settings, world)
    host = Host(lists)
    failure = RangeFailure("MALFORMED", "by a state that is no more", False)
    stale = Moved("a", 7, (1,), 1, failure)
    assert host.batches.commit([stale]).fenced == [stale]
    assert parked_names(settings.parked_path) == frozenset()


def test_a_report_that_the_commit_refuses_stands_still_alone(settings: Settings, world: World) -> None:
    world.refuses["a"] = ChannelParked("another schema")
    host = Host(Lists(settings, world, parks=False))
    host.step()
    assert world.table == {"b": [10, 20, 30]}
    assert host.progress()["pchannels"]["a"] == {"failure": "CHANNEL_PARKED: another schema"}


def test_a_commit_that_fails_ends_the_batch_and_the_next_one_knows_whether_it_stands(
    settings: Settings, world: World
) -> None:
    host = Host(Lists(settings, world))
    for step in ("commits_before", "commits_after"):
        setattr(world, step, unavailable)
        with pytest.raises(TableUnavailable):
            host.step()
        setattr(world, step, lambda: None)
        host.clock.now += 10
    host.step()
    assert world.table == world.read


def test_what_cannot_be_looked_at_is_nothing_to_do_and_what_is_wrong_for_good_is_said(
    settings: Settings, world: World
) -> None:
    host = Host(Lists(settings, world))
    world.looks = unavailable
    assert host.step() == []

    def wrong() -> None:
        raise InvalidArgument("no such folder")

    world.looks = wrong
    with pytest.raises(InvalidArgument):
        host.step()


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (Malformed("no entry"), Malformed),
        (TableUnavailable("busy"), TableUnavailable),
        (OSError(errno.ENOSPC, "no space left"), TableUnavailable),
        (KeyError("vchannel"), KeyError),
    ],
)
def test_in_this_process_a_failure_is_raised_once_the_others_are_there(
    settings: Settings, world: World, error: Exception, raised: type[Exception]
) -> None:
    def fails(work: Work) -> None:
        if work.channel == "a":
            raise error

    world.runs = fails
    with pytest.raises(raised):
        here(Lists(settings, world), max_bytes=1)
    assert world.table == {"b": [10, 20, 30]}
    assert not settings.parked_path.exists(), "who called knows"


def test_in_this_process_an_entry_that_cannot_be_processed_is_named(settings: Settings, world: World) -> None:
    world.poisoned.add(("a", 2))
    with pytest.raises(ChannelParked, match="parked at entry 0:2"):
        here(Lists(settings, world))
    assert world.table == {"a": [1, 2], "b": [10, 20, 30]}


def test_in_this_process_a_channel_that_is_fenced_each_time_is_an_error_in_the_end(
    settings: Settings, world: World
) -> None:
    tries = []

    def overtaken() -> None:
        tries.append(1)
        world.commits["a"] = 99  # somebody has it, and does not come on

    world.commits_before = overtaken
    world.commits_after = lambda: world.commits.update(a=0)
    with pytest.raises(CommitFenced, match="try again"):
        here(Lists(settings, world))
    assert world.table == {"b": [10, 20, 30]}
    assert len(tries) <= 2 * MAX_BOUNDED_ATTEMPTS


def test_in_this_process_a_channel_that_another_brought_there_meanwhile_is_no_error(
    settings: Settings, world: World
) -> None:
    lists = Lists(settings, world)

    def overtaken() -> None:
        world.commits_before = lambda: None
        here(lists)

    world.commits_before = overtaken
    assert here(lists) == {}
    assert world.table == world.read


def test_in_this_process_what_cannot_be_looked_at_is_an_error(settings: Settings, world: World) -> None:
    world.looks = unavailable
    with pytest.raises(TableUnavailable):
        here(Lists(settings, world))


def test_the_planner_is_closed_whatever_happens(settings: Settings, world: World) -> None:
    planner = ListPlanner(world)

    class Closing(Lists):
        def planner(self) -> ListPlanner:
            return planner

    world.commits_before = unavailable
    with pytest.raises(TableUnavailable):
        here(Closing(settings, world))
    assert planner.closed == 1


def test_an_offset_is_a_hint_that_may_be_lost_old_or_somebody_elses(settings: Settings, world: World) -> None:
    host = Host(Lists(settings, world))
    host.step()
    first = host.offset
    world.read["a"].append(6)
    host.offset = START
    assert host.step() == ["a"]
    assert host.schedule.plan(first) == []
    for foreign in ({}, {"ends": 3, "batch": 1}, {"ticks": {"a": 5}, "batch": 7, "max_bytes": 1}, {"ends": {}}):
        assert offset_of(foreign) == START
    assert host.schedule.plan(START) == []
    assert offset_of(json.loads(json.dumps(first))) == first


def test_a_stall_waits_at_least_its_pause_and_never_as_long_as_the_others() -> None:
    clock = Clock()
    stalls = StallBackoff(clock=clock, sleep=clock.sleep)
    names = [f"c{number}" for number in range(50)]
    assert all(stalls.due(name, 0, bounded=False) for name in names)
    clock.now = 0.0999
    assert not any(stalls.due(name, 0, bounded=False) for name in names)
    clock.now = 0.125
    some = [name for name in names if stalls.due(name, 0, bounded=False)]
    assert 5 < len(some) < 45, "those that failed together do not come back together"
    assert all(stalls.due(name, 1, bounded=False) for name in names), "what moved has no pause"


def test_stalls_are_kept_for_what_has_something_to_do_alone() -> None:
    stalls = StallBackoff()
    for number in range(1000):
        stalls.due(f"c{number}", 0, bounded=False)
        stalls.retain([f"c{number}"])
    assert len(stalls._stalls) == 1


def test_a_failure_crosses_processes_as_words_whatever_was_raised() -> None:
    class Unpicklable(Exception):
        def __reduce__(self) -> str:
            raise TypeError("never")

    failed = FailedRange.from_error("a", Unpicklable("so"))
    assert pickle.loads(pickle.dumps(failed)) == failed
    assert pickle.loads(pickle.dumps(failed)).error is None
    assert str(failed.failure) == "Unpicklable: so"
    assert RangeFailure.of(MemoryError()).retriable
    assert not RangeFailure.of(ValueError("x")).retriable
