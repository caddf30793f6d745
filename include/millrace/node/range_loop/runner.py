"""The supervised loop in a process without Spark: micro-batch after micro-batch until it is stopped.

Ranges run in threads of this process, which is efficient because the chain works in Arrow and releases the GIL.
Results are handled as in a Spark query (millrace.node.range_loop.batch_driver).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

from millrace.base.backoff import jittered
from millrace.base.errors import MillraceError
from millrace.base.metrics import Metrics
from millrace.node.range_loop.batch_driver import BatchDriver
from millrace.node.range_loop.definition import LoopDefinition, run_range
from millrace.node.range_loop.ownership import ChannelOwnership, FullOwnership
from millrace.node.range_loop.schedule import START, RangeSchedule, StallBackoff

POLL_SECONDS: Final = 0.1
"""Pause between two polls of an idle source."""
RETRY_SECONDS: Final = 1.0

_logger: Final = logging.getLogger(__name__)


def run_loop(
    definition: LoopDefinition[Any, Any],
    *,
    metrics: Metrics,
    stop: threading.Event,
    ownership: ChannelOwnership | None = None,
    threads: int = 2,
    on_started: Callable[[], None] = lambda: None,
    on_thread: Callable[[], None] = lambda: None,
) -> None:
    """Run the loop of `definition` until `stop` is set, which ends it between two micro-batches.

    `on_started` is called before the first micro-batch, `on_thread` in each thread that runs ranges.
    Retriable errors (an unreachable log or table) are retried; others are raised, and TablesMoved.
    """
    owned = ownership or FullOwnership()
    definition.prepare()
    schedule = RangeSchedule(
        definition.planner(),
        parked=definition.parked,
        assigned=definition.assigned,
        stalls=StallBackoff(longest=definition.max_retry_seconds),
    )
    batches = BatchDriver(definition, metrics=metrics, ownership=owned)
    offset = START
    with ThreadPoolExecutor(threads, thread_name_prefix=f"millrace-{definition.name}", initializer=on_thread) as pool:
        try:
            on_started()
            while not stop.is_set():
                definition.settings.check_place()
                began = time.monotonic()
                following = schedule.next_offset(offset, max_bytes=definition.max_bytes)
                if following is offset:
                    stop.wait(POLL_SECONDS)
                    continue
                try:
                    with owned.running(following["ends"].keys()):
                        plans = schedule.plan(following)
                        batches.commit(list(pool.map(lambda plan: run_range(definition, plan), plans)))
                except MillraceError as error:
                    if not error.retriable:
                        raise
                    _logger.warning("%s will be retried: %s: %s", definition.name, error.code, error)
                    stop.wait(jittered(RETRY_SECONDS))
                offset = following
                stop.wait(max(0.0, began + definition.interval - time.monotonic()))
        finally:
            schedule.close()
