"""A definition of the range loop over plain lists.

Numbers of a channel go into the table's list of that channel, in order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

from millrace.base.errors import MillraceError, TableUnavailable
from millrace.base.metrics import Metrics
from millrace.base.settings import Settings
from millrace.message.ids import LogId
from millrace.node.range_loop.definition import (
    CommitResult,
    LoopDefinition,
    OwnershipCheck,
    PendingRange,
    Planner,
    always_owned,
)
from millrace.node.range_loop.failure import RangeFailure


class Clock:
    """Time that passes when told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@dataclass
class World:
    """What outlives every process: what there is to read, what was committed, and what goes wrong."""

    read: dict[str, list[int]] = field(default_factory=dict)
    poisoned: set[tuple[str, int]] = field(default_factory=set)
    """Channel and place of a number that no run gets past."""
    table: dict[str, list[int]] = field(default_factory=dict)
    commits: dict[str, int] = field(default_factory=dict)
    looks: Callable[[], None] = lambda: None
    """Called at each look of a planner."""
    runs: Callable[[Work], None] = lambda work: None
    """Called in each task, which may raise."""
    commits_before: Callable[[], None] = lambda: None
    commits_after: Callable[[], None] = lambda: None
    refuses: dict[str, MillraceError] = field(default_factory=dict)


@dataclass(frozen=True)
class Work:
    """The plan of one range."""

    channel: str
    start: int
    end: int
    commits: int

    @property
    def bytes(self) -> int:
        return self.end - self.start


@dataclass(frozen=True)
class Moved:
    """The report of one range."""

    channel: str
    commits: int
    numbers: tuple[int, ...]
    tick: int
    failure: RangeFailure | None = None
    log_bytes: int = 0

    @property
    def rows(self) -> int:
        return len(self.numbers)

    def progress(self) -> dict[str, Any]:
        return {"tick": self.tick, "rows": self.rows}


class ListPlanner(Planner[Work, int]):
    """Ends are lengths of the lists that are read."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.closed = 0

    def pending(
        self,
        *,
        without: AbstractSet[str],
        only: AbstractSet[str] | None = None,
        target: Mapping[str, int] | None,
        max_bytes: int,
    ) -> Iterable[PendingRange[int]]:
        self._world.looks()
        names = self._world.read.keys() - without
        for name in sorted(names if only is None else names & only):
            end = len(self._world.read[name])
            end = end if target is None else min(end, target.get(name, 0))
            if self._stands(name) < end:
                yield PendingRange(name, self._world.commits.get(name, 0), end)

    def plan(self, ends: Mapping[str, int], *, max_bytes: int) -> list[Work]:
        return [
            Work(name, stands, min(end, stands + max_bytes), self._world.commits.get(name, 0))
            for name, end in ends.items()
            if (stands := self._stands(name)) < end
        ]

    def ends(self) -> dict[str, int]:
        return {name: len(numbers) for name, numbers in self._world.read.items()}

    seen = ends

    def read_end(self, text: str) -> int:
        return int(text)

    def close(self) -> None:
        self.closed += 1

    def _stands(self, name: str) -> int:
        return len(self._world.table.get(name, []))


class ListCommitter:
    """Commits a report onto the base that it was planned from, and onto no other."""

    def __init__(self, world: World) -> None:
        self._world = world

    def commit(self, reports: Sequence[Moved], /) -> CommitResult[Moved]:
        world = self._world
        world.commits_before()
        committed, fenced = [], []
        for each in reports:
            if each.channel in world.refuses:
                continue
            if world.commits.get(each.channel, 0) != each.commits:
                fenced.append(each)
            elif each.numbers:
                world.table.setdefault(each.channel, []).extend(each.numbers)
                world.commits[each.channel] = each.commits + 1
                committed.append(each)
        world.commits_after()
        refused = {each.channel: world.refuses[each.channel] for each in reports if each.channel in world.refuses}
        return CommitResult(version=sum(world.commits.values()), committed=committed, fenced=fenced, refused=refused)


@dataclass(frozen=True)
class Lists(LoopDefinition[Work, Moved]):
    name: ClassVar[str] = "lists"
    settings: Settings
    world: World
    parks: bool = True
    batch: int = 1 << 62

    @property
    def parked(self) -> Path | None:
        return self.settings.parked_path if self.parks else None

    @property
    def max_bytes(self) -> int:
        return self.batch

    @property
    def interval(self) -> float:
        return 0.0

    def planner(self) -> ListPlanner:
        return ListPlanner(self.world)

    def run(self, plan: Work) -> Moved:
        self.world.runs(plan)
        numbers = self.world.read[plan.channel][plan.start : plan.end]
        report = Moved(plan.channel, plan.commits, tuple(numbers), plan.end)
        for place in range(plan.start, plan.end):
            if (plan.channel, place) in self.world.poisoned:
                failure = RangeFailure("POISONED", f"number {place}", False, LogId(0, place))
                return replace(report, numbers=tuple(numbers[: place - plan.start]), tick=place, failure=failure)
        return report

    def committer(self, metrics: Metrics | None, *, holds: OwnershipCheck = always_owned) -> ListCommitter:
        return ListCommitter(self.world)


def unavailable(*_: object) -> None:
    """What raises at a step, and may pass."""
    raise TableUnavailable("the storage does not answer")
