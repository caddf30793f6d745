"""What a user of the range loop brings: what to plan, how a range runs, what is reported, how it commits (docs/architecture.md).

A *channel* is what ranges follow one another on: a PChannel for ingest and flush; for a stream over the WAL, a shard of its keys.
Where a channel stands is in the tables alone. Planner, tasks and committer share no memory: each may be another process, and any of
them may die or run twice. What holds the order is the commit: a range goes in only onto the base that it was planned from.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Generic, Protocol, TypeAlias, TypeVar

from millrace.base.errors import MillraceError
from millrace.base.metrics import Metrics
from millrace.base.settings import Settings
from millrace.node.range_loop.failure import FailedRange, RangeFailure
from millrace.node.range_loop.ownership import assigned_path


class Plan(Protocol):
    """What one task is to do. It pickles."""

    @property
    def channel(self) -> str: ...


class Report(Protocol):
    """What a task hands to the committer: some hundred bytes that name durable files. It pickles."""

    @property
    def channel(self) -> str: ...
    @property
    def failure(self) -> RangeFailure | None:
        """Why the range ended early; what the report names was made before."""

    @property
    def tick(self) -> int:
        """The time tick that its commit brings the channel to."""

    @property
    def rows(self) -> int: ...
    @property
    def log_bytes(self) -> int:
        """Read from the log; 0 where that is not what it reads."""

    def progress(self) -> dict[str, Any]:
        """What stands of it in the progress file (JSON): tick, rows, seconds by part."""


P = TypeVar("P", bound=Plan)
R = TypeVar("R", bound=Report)
End = TypeVar("End")
"""How far a range goes at most: a LogId, a time tick. Ordered, and text by `str`."""


@dataclass(frozen=True, slots=True)
class PendingRange(Generic[End]):
    """A channel with something to do."""

    channel: str
    base: int
    """Moves with each commit of the channel: what is planned again from the same base came to nothing."""
    end: End


class Planner(ABC, Generic[P, End]):
    """What there is to do, by the newest version of the tables. One thread at a time. An error that is retriable: nothing, now."""

    @abstractmethod
    def pending(
        self,
        *,
        without: AbstractSet[str],
        only: AbstractSet[str] | None = None,
        target: Mapping[str, End] | None,
        max_bytes: int,
    ) -> Iterable[PendingRange[End]]:
        """The channels with something to do, but those in `without`, and those in `only` alone where that is given; with a
        `target`, up to that, and of its channels alone."""

    @abstractmethod
    def plan(self, ends: Mapping[str, End], *, max_bytes: int) -> list[P]:
        """A range for each channel of `ends` that does not stand there yet, from one version of the tables."""

    @abstractmethod
    def ends(self) -> Mapping[str, End]:
        """Where what is to be read ends now, by channel."""

    @abstractmethod
    def seen(self) -> Mapping[str, End]:
        """As :meth:`ends`, as of the last look."""

    @abstractmethod
    def read_end(self, text: str) -> End:
        """Inverse of ``str``."""

    def close(self) -> None:
        """Idempotent."""


@dataclass(frozen=True, slots=True)
class CommitResult(Generic[R]):
    """What became of the reports of one call."""

    committed: Sequence[R] = ()
    fenced: Sequence[R] = ()
    """Another committer was first: their files are gone, their channels are planned anew."""
    refused: Mapping[str, MillraceError] = field(default_factory=dict)
    """By channel, why its report cannot be committed; nothing of it was."""
    version: int = 0
    """Of the table, behind the commit, where there is one table."""
    conflicts: int = 0
    seconds: float = 0.0


class RangeCommitter(Protocol[R]):
    """Commits, one thread at a time; any number of committers in any number of processes."""

    def commit(self, reports: Sequence[R], /) -> CommitResult[R]:
        """Commit every report that still follows what the tables hold; at most one of each channel."""


OwnershipCheck: TypeAlias = Callable[[str], bool]


def always_owned(channel: str) -> bool:
    """One node has all channels."""
    return True


class LoopDefinition(ABC, Generic[P, R]):
    """One user of the loop. It pickles: the driver, its planner and each task have a copy, in processes of their own."""

    name: ClassVar[str]
    """Of the query, its Spark checkpoint, its progress file and its history."""
    settings: Settings

    @property
    @abstractmethod
    def max_bytes(self) -> int:
        """What a micro-batch takes of each channel."""

    @property
    @abstractmethod
    def interval(self) -> float:
        """Least seconds between the starts of two micro-batches."""

    @property
    def parked(self) -> Path | None:
        """The folder that a channel is parked in which no other attempt would bring further; None: it is tried all the same."""
        return None

    @property
    def assigned(self) -> Path | None:
        """The file with the channels that this node of a cluster may plan (millrace.node.range_loop.ownership); None: all there are."""
        return assigned_path(self.settings) if self.settings.node else None

    def prepare(self) -> None:
        """In the driver, before the first plan: make tables, and fail here where what is read cannot be reached."""

    @abstractmethod
    def planner(self) -> Planner[P, Any]:
        """In the driver's planning process."""

    @abstractmethod
    def run(self, plan: P) -> R:
        """In a task. What it raises is the range's :class:`FailedRange`; no file that it wrote may be named anywhere then."""

    @abstractmethod
    def committer(self, metrics: Metrics | None, *, holds: OwnershipCheck = always_owned) -> RangeCommitter[R]:
        """In the driver. `holds`: whether something of a channel may be committed this moment; who commits several times in one
        go asks before each."""

    def watch(self, metrics: Metrics) -> Callable[[Sequence[R]], None]:
        """In the driver of a supervised query: what is told of the reports that were committed."""
        return lambda committed: None


def run_range(definition: LoopDefinition[P, R], plan: P) -> R | FailedRange:
    """One task: one channel's trouble is no reason to end the query that serves the others."""
    try:
        return definition.run(plan)
    except Exception as error:
        return FailedRange.from_error(plan.channel, error)


def commit_outcomes(
    committer: RangeCommitter[R], outcomes: Sequence[R | FailedRange]
) -> tuple[CommitResult[R], dict[str, FailedRange], dict[str, FailedRange]]:
    """Commit what a micro-batch's ranges left. Besides what became of it, by channel: what failed and is tried again from where
    the channel stands, and what failed so that no other attempt would come further, as things are."""
    reports = [each for each in outcomes if not isinstance(each, FailedRange)]
    result = committer.commit(reports)
    failed = {each.channel: each for each in outcomes if isinstance(each, FailedRange)}
    failed |= {each.channel: FailedRange(each.channel, each.failure) for each in reports if each.failure is not None}
    failed |= {channel: FailedRange.from_error(channel, error) for channel, error in result.refused.items()}
    # A range that was fenced may have failed on a base that is no longer its channel's: it is planned anew first.
    fenced = {report.channel for report in result.fenced}
    again = {name: each for name, each in failed.items() if each.failure.retriable or name in fenced}
    return result, again, {name: each for name, each in failed.items() if name not in again}
