"""The range loop in the calling process, until it is stopped or, if bounded, has reached the topics' present ends.

For workers, tests and small deployments; ``jobs/pipeline.py`` runs the same definition on Spark.
"""

from __future__ import annotations

import logging
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from millrace.base.errors import MemoryExceeded
from millrace.base.metrics import Metrics
from millrace.flows.range_host.beat import Beat
from millrace.flows.range_host.definition import FlowRun
from millrace.flows.range_host.positions import positions_of
from millrace.flows.range_host.status import State
from millrace.flows.range_host.task import Done, Work
from millrace.flows.sources.source import Feeder
from millrace.node.range_loop.definition import commit_outcomes, run_range
from millrace.node.range_loop.failure import FailedRange
from millrace.node.range_loop.schedule import START, RangeSchedule

_JOIN_SECONDS: Final = 60.0
"""Longest wait of a bounded run for its assignment by the consumer group."""
_FED_SECONDS: Final = 3600.0
"""Longest wait of a bounded run for a snapshot."""
_IDLE: Final = 0.1
"""Seconds between two plans while there is nothing to do."""

_logger: Final = logging.getLogger(__name__)


def run(
    definition: FlowRun,
    *,
    stop: threading.Event,
    metrics: Metrics | None = None,
    until_end: bool = False,
    own_process: bool = False,
) -> dict[str, int]:
    """Run until `stop`; with `until_end`, to the present ends of the topics or until a task fails. Return positions.

    If workers divide the partitions, a bounded run ends at the ends of the partitions that it holds. A flow with a
    process of its own (`own_process`) ends if the process exceeds `resources.memory_mib`; otherwise the rest of the
    program would count, too.

    Raises the errors of `prepare` and those that are not the failure of one task. The status file names the cause.
    """
    feeder = None
    try:
        if not definition.wait_alone(stop, seconds=_JOIN_SECONDS if until_end else None):
            return {}
        feeder = definition.feeder()
        definition.prepare()
        if until_end and feeder is not None:
            feeder.wait_complete(_FED_SECONDS)
        return _loop(definition, feeder, stop, metrics, until_end, own_process)
    finally:
        if feeder is not None:
            feeder.close()
        definition.leave()


def _loop(
    definition: FlowRun,
    feeder: Feeder | None,
    stop: threading.Event,
    metrics: Metrics | None,
    until_end: bool,
    own_process: bool,
) -> dict[str, int]:
    still_ours = getattr(feeder, "check", lambda: None)  # feeders of other packages may not have it
    if until_end:
        definition.join(seconds=_JOIN_SECONDS)
    committer = definition.committer(metrics)
    beat = Beat(definition, metrics)
    schedule: RangeSchedule[Work] = RangeSchedule(definition.planner())
    beat.start()
    threads = ThreadPoolExecutor(
        definition.flow.resources.tasks or max(1, int(definition.flow.resources.cpus)),
        thread_name_prefix="task",
    )
    try:
        if until_end:
            schedule.fix_target()
        offset = START
        while not stop.is_set():
            definition.settings.check_place()
            still_ours()
            if own_process and beat.over:
                raise MemoryExceeded(beat.over)
            following = schedule.next_offset(offset)
            if following == offset:
                if until_end and not schedule.stalled and schedule.error is None:
                    break
                stop.wait(_IDLE)
                continue
            outcomes: list[Done | FailedRange] = list(
                threads.map(lambda plan: run_range(definition, plan), schedule.plan(following))
            )
            result, again, _ = commit_outcomes(committer, outcomes)
            beat.note(result.committed)
            for name, failed in again.items():
                _logger.warning("%s will be retried: %s", name, failed.failure)
            offset = following
    except BaseException as error:
        beat.close()
        beat.say(State.FAILED, f"{getattr(error, 'code', type(error).__name__)}: {error}")
        raise
    finally:
        threads.shutdown()
        schedule.close()
        definition.stop_tasks()
        definition.leave()
        committer.close()
        beat.close()
    beat.say(State.STOPPED)
    reached = {task: each.position for task, each in positions_of(definition.settings, definition.flow.name).items()}
    _logger.info(
        "%s ends at %s", definition.name, ", ".join(f"{task} {place}" for task, place in sorted(reached.items()))
    )
    return reached
