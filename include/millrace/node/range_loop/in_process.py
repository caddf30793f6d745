"""The loop in the calling process, for maintenance, the command line, tests and millrace.testing: as far as there is something now."""

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
    """Run the loop up to `target`, or to where what there is to read ends now; the tick that each channel that moved has reached.

    Others may be at work: what they commit first is not committed again. Once the other channels are there, raises what keeps
    one from going on: an error of ours as it was raised; TableUnavailable, or CommitFenced where others were first each time, for
    what may be tried again; ChannelParked for an entry that cannot be processed. Nothing is parked.
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
                    schedule.exclude(channel)  # nothing more comes of it in this call
            offset = following
        errors += [CommitFenced(f"others moved {name} each time: try again") for name in sorted(schedule.stalled)]
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
            f"{failed.channel} cannot go on from {failure.position} now: {failure}. Nothing of that range was committed; try again."
        )
    return Parked.of(failed.channel, failure).error()
