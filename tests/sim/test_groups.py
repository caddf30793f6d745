"""Members of a group and a work queue's consumers under faults, seed by seed (members.py, tasks.py).

What breaks names its seed: ``python -m tests.sim members SEED``, or ``tasks`` and ``tasks-by-key``, replays it.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

import pytest

from tests.sim import members, tasks

COMMON = ("kill", "pause", "store", "restart", "switch", "leave", "cut")
"""What happens in worlds of both kinds."""
SOAK, PART = 20_000, 100
FOUND = {"members": [145417011, 482859785], "tasks": [778000468, 778000487, 895823584]}
"""Seeds that once broke a law."""


def play_members(seeds: Iterable[int]) -> tuple[Counter[str], int]:
    """Return what happened, and how many messages came again."""
    worlds = [members.play(seed) for seed in seeds]
    return _summary(worlds)


def play_tasks(seeds: Iterable[int], order: str) -> tuple[Counter[str], int]:
    """Return what happened, and how many tasks came again."""
    worlds = [tasks.play(seed, order=order) for seed in seeds]
    return _summary(worlds)


def _summary(worlds: list[members.World] | list[tasks.World]) -> tuple[Counter[str], int]:
    events = sum((world.events for world in worlds), Counter[str]())
    return events, sum(count > 1 for world in worlds for count in world.times.values())


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("part", range(12))
def test_of_a_shared_group_nothing_is_lost_and_a_lane_has_one_committer(part: int) -> None:
    events, again = play_members(range(part * 25, part * 25 + 25))
    assert min(events[kind] for kind in (*COMMON, "beat", "lost beat", "moved")) > 10, events
    assert again, "lanes were lost with messages in flight, which came again"


def test_seeds_that_once_broke_a_law_hold_it() -> None:
    play_members(FOUND["members"])
    play_tasks(FOUND["tasks"], "")


def test_the_same_for_a_group_on_one_machine(tmp_path: Path) -> None:
    for seed in range(8):
        members.play(seed, tmp_path / str(seed), steps=100)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("part", range(25))
@pytest.mark.parametrize("order", ["", "key"])
def test_of_a_queue_on_two_servers_nothing_is_lost_and_a_task_has_one_holder(part: int, order: str) -> None:
    events, again = play_tasks(range(part * 12, part * 12 + 12), order)
    assert min(events[kind] for kind in (*COMMON, "lost answer", "wait", "told", "lost news")) > 1, events
    assert again, "leases ended, and tasks came again"


@pytest.mark.parametrize("order", ["", "key"])
def test_the_same_for_a_queue_on_one_machine(tmp_path: Path, order: str) -> None:
    for seed in range(6):
        tasks.play(seed, tmp_path / str(seed), order=order, steps=150)


@pytest.mark.soak
@pytest.mark.timeout(4 * 3600)
@pytest.mark.parametrize("kind", ["members", "tasks", "tasks-by-key"])
def test_no_seed_of_many_breaks_what_must_hold(kind: str) -> None:
    first = random.SystemRandom().randrange(10**9)
    parts = [range(at, at + PART) for at in range(first, first + SOAK, PART)]
    run = play_members if kind == "members" else partial(play_tasks, order="" if kind == "tasks" else "key")
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        assert sum(again for _, again in pool.map(run, parts)) > 0
