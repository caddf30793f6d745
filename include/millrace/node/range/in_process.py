"""The loop in the calling process, for maintenance, the command line, tests and millrace.testing: as far as there is something now."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from millrace.base.errors import CommitFenced, MillraceError, TableUnavailable
from millrace.node.range.definition import Committer, Definition, P, R, run_range, settle
from millrace.node.range.failure import Failed
from millrace.node.range.parking import Parked
from millrace.node.range.schedule import START, UNBOUNDED, Schedule, Stalls


def drain(
    definition: Definition[P, R],
    committer: Committer[R],
    *,
    target: Mapping[str, Any] | None = None,
    max_bytes: int = UNBOUNDED,
    stalls: Stalls | None = None,
) -> dict[str, int]:
    """Run the loop up to `target`, or to where what there is to read ends now; the tick that each channel that moved has reached.

    Others may be at work: what they commit first is not committed again. Once the other channels are there, raises what keeps
    one from going on: an error of ours as it was raised; TableUnavailable, or CommitFenced where others were first each time, for
    what may be tried again; ChannelParked for an entry that cannot be processed. Nothing is parked.
    """
    schedule = Schedule(definition.planner(), parked=definition.parked, assigned=definition.assigned, stalls=stalls)
    reached: dict[str, int] = {}
    errors: list[Exception] = []
    try:
        schedule.fix_target(target)
        offset = START
        while (following := schedule.latest(offset, max_bytes=max_bytes)) != offset:
            outcomes = [run_range(definition, plan) for plan in schedule.plan(following)]
            result, again, ended = settle(committer, outcomes)
            moved = {report.channel: report.tick for report in result.committed}
            reached |= moved
            fenced = {report.channel for report in result.fenced}
            for channel in (each.channel for each in outcomes if each.channel not in fenced):
                failed = again.get(channel) or ended.get(channel)
                if failed is not None:
                    errors.append(_to_raise(failed))
                if failed is not None or channel not in moved:
                    schedule.leave(channel)  # nothing more comes of it in this call
            offset = following
        errors += [CommitFenced(f"others moved {name} each time: try again") for name in sorted(schedule.behind)]
        if schedule.trouble is not None:
            errors.append(schedule.trouble)
    finally:
        schedule.close()
    for error in errors:
        raise error
    return reached


def _to_raise(failed: Failed) -> Exception:
    error, failure = failed.error, failed.failure
    if error is not None and (isinstance(error, MillraceError) or not failure.retriable):
        return error
    if failure.retriable:
        return TableUnavailable(
            f"{failed.channel} cannot go on from {failure.position} now: {failure}. Nothing of that range was committed; try again."
        )
    return Parked.of(failed.channel, failure).error()
