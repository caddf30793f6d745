"""The loop in the calling process, up to the current end: for maintenance, the command line, tests and
millrace.testing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from millrace.base.errors import CommitFenced, MillraceError, TableUnavailable
from millrace.node.range_loop.definition import LoopDefinition, P, R, RangeCommitter, commit_outcomes, run_range
from millrace.node.range_loop.failure import FailedRange
from millrace.node.range_loop.parking import Parked
from millrace.node.range_loop.schedule import START, UNBOUNDED, RangeSchedule, StallBackoff


def run_to_end(
    definition: LoopDefinition[P, R],
    committer: RangeCommitter[R],
    *,
    target: Mapping[str, Any] | None = None,
    max_bytes: int = UNBOUNDED,
    stalls: StallBackoff | None = None,
) -> dict[str, int]:
    """Run the loop up to `target`, or to the current end of the source. Returns the tick that each moved channel
    reached.

    Other committers may work at the same time: a range that they commit first is not committed again. Nothing is
    parked. Once all other channels are done, raises the error of a channel that cannot go on: the original
    MillraceError; TableUnavailable for a retriable failure; CommitFenced if other committers won every time;
    ChannelParked for an entry that cannot be processed.
    """
    schedule = RangeSchedule(
        definition.planner(), parked=definition.parked, assigned=definition.assigned, stalls=stalls
    )
    reached: dict[str, int] = {}
    errors: list[Exception] = []
    try:
        schedule.fix_target(target)
        offset = START
        while (following := schedule.next_offset(offset, max_bytes=max_bytes)) != offset:
            outcomes = [run_range(definition, plan) for plan in schedule.plan(following)]
            result, again, ended = commit_outcomes(committer, outcomes)
            moved = {report.channel: report.tick for report in result.committed}
            reached |= moved
            fenced = {report.channel for report in result.fenced}
            for channel in (each.channel for each in outcomes if each.channel not in fenced):
                failed = again.get(channel) or ended.get(channel)
                if failed is not None:
                    errors.append(_to_raise(failed))
                if failed is not None or channel not in moved:
                    schedule.exclude(channel)  # no more progress in this call
            offset = following
        errors += [
            CommitFenced(f"other committers moved {name} every time: try again") for name in sorted(schedule.stalled)
        ]
        if schedule.error is not None:
            errors.append(schedule.error)
    finally:
        schedule.close()
    for error in errors:
        raise error
    return reached


def _to_raise(failed: FailedRange) -> Exception:
    error, failure = failed.error, failed.failure
    if error is not None and (isinstance(error, MillraceError) or not failure.retriable):
        return error
    if failure.retriable:
        return TableUnavailable(
            f"{failed.channel} cannot go on from {failure.position} now: {failure}. Nothing of that range was "
            "committed; try again."
        )
    return Parked.of(failed.channel, failure).error()
