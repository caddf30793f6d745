"""The interface of a loop: what to plan, how to run a range, what to report, how to commit (docs/architecture.md).

A *channel* is a sequence of ranges: a PChannel for ingest and flush, a shard of keys for a stream over the WAL. Only
the tables know a channel's position. Planner, tasks and committer share no memory: each may be another process, and
each may die or run twice. The commit keeps the order: it accepts a range only on the base that the range was planned
from.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Final, Generic, Protocol, TypeAlias, TypeVar

from millrace.base.errors import MillraceError
from millrace.base.metrics import Metrics
from millrace.base.settings import Settings
from millrace.node.range_loop.failure import FailedRange, RangeFailure
from millrace.node.range_loop.ownership import assigned_path


class Plan(Protocol):
    """One range of a channel. Picklable."""

    @property
    def channel(self) -> str: ...
    @property
    def bytes(self) -> int:
        """About how many bytes the range reads."""


class Report(Protocol):
    """The result of a task for the committer: some hundred bytes that name durable files. Picklable."""

    @property
    def channel(self) -> str: ...
    @property
    def failure(self) -> RangeFailure | None:
        """Reason that the range ended early. The files in the report were written before that."""

    @property
    def tick(self) -> int:
        """The time tick that the channel reaches by this commit."""

    @property
    def rows(self) -> int: ...
    @property
    def log_bytes(self) -> int:
        """Bytes read from the log; 0 if the loop does not read the log."""

    def progress(self) -> dict[str, Any]:
        """Return the entry for the progress file (JSON): tick, rows, seconds by part."""


TASK_BYTES: Final = 1 << 20
"""A range of this size is a task of its own."""

MAX_BACKOFF_SECONDS: Final = 5.0
"""Longest pause before a retry from the same base, without jitter."""

_RANGE_COST: Final = 64 << 10
"""Bytes that cost as much as a range that reads nothing: it opens a log and syncs files."""

P = TypeVar("P", bound=Plan)
R = TypeVar("R", bound=Report)
End = TypeVar("End")
"""The upper end of a range: a LogId or a time tick. Ordered; `str` gives its text."""


@dataclass(frozen=True, slots=True)
class PendingRange(Generic[End]):
    """A channel that has work."""

    channel: str
    base: int
    """A number that changes with each commit of the channel: a second plan from the same base made no progress."""
    end: End


class Planner(ABC, Generic[P, End]):
    """Finds work in the newest version of the tables. Call from one thread at a time. A retriable error means no work
    now.
    """

    @abstractmethod
    def pending(
        self,
        *,
        without: AbstractSet[str],
        only: AbstractSet[str] | None = None,
        target: Mapping[str, End] | None,
        max_bytes: int,
    ) -> Iterable[PendingRange[End]]:
        """Return the channels that have work.

        `without` excludes channels; `only`, if given, restricts them. With a `target`, plan its channels alone, up to
        its ends.
        """

    @abstractmethod
    def plan(self, ends: Mapping[str, End], *, max_bytes: int) -> list[P]:
        """Return a range for each channel of `ends` that has not reached its end, from one version of the tables."""

    @abstractmethod
    def ends(self) -> Mapping[str, End]:
        """Return the current end of the source by channel."""

    @abstractmethod
    def seen(self) -> Mapping[str, End]:
        """Return the ends that the last look found."""

    @abstractmethod
    def read_end(self, text: str) -> End:
        """Parse the text of an end: the inverse of ``str``."""

    def close(self) -> None:
        """Release the planner. Idempotent."""


@dataclass(frozen=True, slots=True)
class CommitResult(Generic[R]):
    """The outcome of one call of a committer."""

    committed: Sequence[R] = ()
    fenced: Sequence[R] = ()
    """Reports that lost to another committer. Their files are removed; their channels are planned again."""
    refused: Mapping[str, MillraceError] = field(default_factory=dict)
    """For each channel, the reason that its report cannot be committed. No part of it was."""
    version: int = 0
    """The version of the table after the commit, if there is one table."""
    conflicts: int = 0
    seconds: float = 0.0


class RangeCommitter(Protocol[R]):
    """Commits reports. One thread at a time per committer; any number of committers in any number of processes."""

    def commit(self, reports: Sequence[R], /) -> CommitResult[R]:
        """Commit every report that still follows the tables; at most one per channel."""


OwnershipCheck: TypeAlias = Callable[[str], bool]


def always_owned(channel: str) -> bool:
    """Return True: a single node owns all channels."""
    return True


class LoopDefinition(ABC, Generic[P, R]):
    """One implementation of the loop. Picklable: the driver, its planner and each task have a copy."""

    name: ClassVar[str]
    """The name of the query, its Spark checkpoint, its progress file and its samples."""
    settings: Settings

    @property
    @abstractmethod
    def max_bytes(self) -> int:
        """Bytes that a micro-batch takes from each channel."""

    @property
    @abstractmethod
    def interval(self) -> float:
        """Minimum seconds between the starts of two micro-batches."""

    @property
    def max_retry_seconds(self) -> float:
        """Longest pause before a channel is planned again that made no progress."""
        return MAX_BACKOFF_SECONDS

    @property
    def parked(self) -> Path | None:
        """Folder for channels that fail for good. None: such channels are retried instead."""
        return None

    @property
    def assigned(self) -> Path | None:
        """File with the channels that this node of a cluster may plan (millrace.node.range_loop.ownership). None: all
        channels.
        """
        return assigned_path(self.settings) if self.settings.node else None

    def prepare(self) -> None:
        """Create tables and check that the source is reachable. Runs in the driver, before the first plan."""

    @abstractmethod
    def planner(self) -> Planner[P, Any]:
        """Make the planner. Runs in the driver's planning process."""

    @abstractmethod
    def run(self, plan: P) -> R:
        """Run one range in a task.

        An exception becomes the range's :class:`FailedRange`. No commit may name files that were written before it.
        """

    @abstractmethod
    def committer(self, metrics: Metrics | None, *, holds: OwnershipCheck = always_owned) -> RangeCommitter[R]:
        """Make the committer, in the driver.

        `holds` says whether a channel may be committed now. A committer that makes several commits asks before each.
        """

    def watch(self, metrics: Metrics) -> Callable[[Sequence[R]], None]:
        """Return a function that receives each micro-batch's committed reports, for a supervised query."""
        return lambda committed: None


def group_plans(plans: Iterable[P], *, tasks: int) -> list[list[P]]:
    """Divide the ranges of a micro-batch into tasks: each large one is a task, small ones share at most `tasks` tasks.

    A task costs Spark and its worker tens of milliseconds, however little it does.
    """
    groups: list[list[P]] = []
    small: list[list[P]] = [[] for _ in range(tasks)]
    filled = [0] * tasks
    for plan in sorted(plans, key=lambda each: each.bytes, reverse=True):
        if plan.bytes >= TASK_BYTES:
            groups.append([plan])
            continue
        least = filled.index(min(filled))
        small[least].append(plan)
        filled[least] += plan.bytes + _RANGE_COST
    return [*groups, *(group for group in small if group)]


def run_range(definition: LoopDefinition[P, R], plan: P) -> R | FailedRange:
    """Run one task. A failure of one channel does not end the query that serves the others."""
    try:
        return definition.run(plan)
    except Exception as error:
        return FailedRange.from_error(plan.channel, error)


def commit_outcomes(
    committer: RangeCommitter[R], outcomes: Sequence[R | FailedRange]
) -> tuple[CommitResult[R], dict[str, FailedRange], dict[str, FailedRange]]:
    """Commit the results of a micro-batch's ranges.

    Returns the commit's result, the failures by channel that are retried from the channel's position, and the failures
    by channel that a retry would not cure.
    """
    reports = [each for each in outcomes if not isinstance(each, FailedRange)]
    result = committer.commit(reports)
    failed = {each.channel: each for each in outcomes if isinstance(each, FailedRange)}
    failed |= {each.channel: FailedRange(each.channel, each.failure) for each in reports if each.failure is not None}
    failed |= {channel: FailedRange.from_error(channel, error) for channel, error in result.refused.items()}
    # A fenced range may have failed on an outdated base: plan its channel again first.
    fenced = {report.channel for report in result.fenced}
    again = {name: each for name, each in failed.items() if each.failure.retriable or name in fenced}
    return result, again, {name: each for name, each in failed.items() if name not in again}
