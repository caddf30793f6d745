"""The driver's work beside the loop, once a second: follow management's commands, and report the flow's state."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Final, NamedTuple

import psutil

from millrace.base.errors import MetaAmbiguous, MetaUnavailable
from millrace.base.file_lock import ProcessRegistration
from millrace.base.files import replace_file
from millrace.base.metrics import Metrics
from millrace.flows.range_host.answers import handlers_of
from millrace.flows.range_host.crashes import suspects_of
from millrace.flows.range_host.documents import DocumentCopies
from millrace.flows.range_host.limits import over_memory, taken_by
from millrace.flows.range_host.positions import COUNTS, Position, Positions, positions_uri
from millrace.flows.range_host.status import PipelineStatus, State, TaskStatus, metrics_path, status_path
from millrace.flows.range_host.supervision import Health, Supervision, read_status, read_wanted
from millrace.flows.range_host.task import Done
from millrace.flows.range_host.trend import EVERY_SECONDS, sample_of, samples_path
from millrace.flows.requests import Requests
from millrace.flows.sources.division import instance_name
from millrace.flows.sources.source import Ends
from millrace.node.range_loop.samples import SampleFile
from millrace.runtime.periodic import PeriodicTask
from millrace.storage.table import open_table

if TYPE_CHECKING:
    from millrace.flows.range_host.definition import FlowRun

_logger: Final = logging.getLogger(__name__)

SECONDS: Final = 1.0
_LATENCIES: Final = 2_000
"""Newest latencies of a task that its percentiles are computed from."""


class TaskTaken(NamedTuple):
    """The resources that a task used, as reported by its ranges."""

    cpu_seconds: float = 0.0
    range_bytes: int = 0


class Beat(PeriodicTask):
    """Writes the status file and the process's metrics. Only `note` may be called from other threads."""

    def __init__(self, run: FlowRun, metrics: Metrics | None = None, *, on_spark: bool = False) -> None:
        """With `on_spark`, child processes do the work, and their usage counts."""
        super().__init__(name=f"beat-{run.flow.name}", interval=SECONDS)
        self._definition, self._metrics = run, metrics
        self._reporter = ProcessRegistration(run.settings.run_path)
        self._process = psutil.Process()
        self._below = on_spark
        self._taken, self._at = taken_by(self._process, below=on_spark), time.monotonic()
        self._cpu_percent = 0.0
        self._counted_cpu = 0.0
        self._by_task: dict[str, TaskTaken] = {}
        self._supervision = Supervision(run.settings, run.flow, worker=run.worker)
        self._positions: Positions | None = None
        self._reading = threading.Lock()
        self._shown: set[str] = set()
        self._topics = run.places()
        self._documents = DocumentCopies(run.settings, run.flow.name)
        self._requests = Requests(
            run.settings,
            run.flow.name,
            instance_name(run.settings, run.worker),
            handlers_of(run.settings, run.flow, run.worker),
        )
        self._serial = read_wanted(run.settings, run.flow.name).serial
        self._history = SampleFile(samples_path(run.settings, run.flow.name)) if not run.worker else None
        self._sampled = 0.0
        self._latencies: dict[str, deque[float]] = {}
        self._ends: dict[str, Ends] = {}
        text = json.dumps(run.flow.to_json(), sort_keys=True)
        self.over = ""
        """Why this process should end (it exceeds the flow's memory limit); empty if it need not."""
        self._digest = hashlib.sha256(text.encode()).hexdigest()[:16]

    def note(self, committed: Sequence[Done]) -> None:
        """Count committed ranges."""
        for each in committed:
            self._latencies.setdefault(each.channel, deque(maxlen=_LATENCIES)).extend(each.latencies)
            before = self._by_task.get(each.channel, TaskTaken())
            self._by_task[each.channel] = TaskTaken(before.cpu_seconds + each.cpu_seconds, each.log_bytes)
            known = self._ends.get(each.channel)
            if known is not None and known.high < each.position:  # the end was read before these records came
                self._ends[each.channel] = known._replace(high=each.position)

    def run_once(self) -> None:
        with suppress(MetaUnavailable, MetaAmbiguous):  # the copies are the newest known documents
            self._documents.refresh()
            self._requests.answer()
        self.take()
        self._look()
        taken = self._taken
        self.over = over_memory(self._definition.flow.resources, taken.memory_bytes - taken.jvm_bytes)
        try:
            self._ends = self._topics.ends()
        finally:
            self.say()

    def _look(self) -> None:
        taken, now = taken_by(self._process, below=self._below), time.monotonic()
        spent = max(0.0, taken.cpu_seconds - self._taken.cpu_seconds)
        self._cpu_percent = round(100 * spent / max(now - self._at, 0.001), 1)
        self._taken, self._at = taken, now

    def take(self) -> None:
        """Follow new commands. A restart clears failures; the next plan of a task tells it to restart."""
        wanted = read_wanted(self._definition.settings, self._definition.flow.name)
        if wanted.serial != self._serial:
            self._serial = wanted.serial
            self._supervision.restart()

    def say(self, state: State | None = None, cause: str = "") -> None:
        """Write the status file, with the present state or the final `state`."""
        status = self.status(state, cause)
        replace_file(
            status_path(self._definition.settings, self._definition.flow.name, self._definition.worker),
            status.model_dump_json() + "\n",
        )
        if self._metrics is not None:
            self._measure(status, self._metrics)
        if self._history is not None and status.at - self._sampled >= EVERY_SECONDS:
            self._sampled = status.at
            self._history.add(sample_of(read_status(self._definition.settings, status.pipeline)))

    def _measure(self, status: PipelineStatus, metrics: Metrics) -> None:
        name, used = status.pipeline, self._taken.cpu_seconds
        metrics.flow_cpu_seconds_total.labels(name).inc(max(0.0, used - self._counted_cpu))
        self._counted_cpu = used
        metrics.flow_memory_bytes.labels(name).set(status.memory_bytes)
        metrics.flow_failed_lanes.labels(name).set(sum(task.state is State.FAILED for task in status.tasks))
        for task in status.tasks:
            metrics.flow_lag_records.labels(name, task.task).set(task.lag)
        if status.source_lag_bytes is not None:
            metrics.flow_source_lag_bytes.labels(name).set(status.source_lag_bytes)
        if status.source_lag_seconds is not None:
            metrics.flow_source_lag_seconds.labels(name).set(status.source_lag_seconds)
        for outcome, number in status.source_counts.items():
            metrics.flow_source_messages.labels(name, outcome).set(number)
        shown = {task.task for task in status.tasks}
        for gone in self._shown - shown:  # another worker reports it now
            metrics.flow_lag_records.remove(name, gone)
        self._shown = shown
        metrics.write_textfile(metrics_path(self._definition.settings, name, self._definition.worker))

    def status(self, state: State | None = None, cause: str = "") -> PipelineStatus:
        """Return the status as the file contains it."""
        run = self._definition
        positions = self._read_positions()
        health = self._supervision.tasks
        paused = read_wanted(run.settings, run.flow.name).paused
        suspects = suspects_of(run.settings, run.flow.name)
        tasks = []
        names = positions.keys() | self._ends.keys()
        if run.flow.divided:
            names &= set(run.claims)
        for name in sorted(names):
            known, its = positions.get(name), health.get(name, Health())
            end = self._ends[name].high if name in self._ends else known.position if known is not None else 0
            position = known.position if known is not None else 0
            counts = {field: getattr(known, field, 0) for field in COUNTS}
            tasks.append(
                TaskStatus(
                    task=name,
                    state=state or (its.state if its.failed or not paused else State.PAUSED),
                    position=position,
                    end=end,
                    lag=max(0, end - position),
                    failures=its.failures,
                    recoveries=its.recoveries,
                    cause=its.cause,
                    code=its.code,
                    suspect=suspects[name].words(run.flow.name, name) if name in suspects else "",
                    retry_at=its.retry_at,
                    latency_ms=percentiles(self._latencies.get(name, ())),
                    **self._by_task.get(name, TaskTaken())._asdict(),
                    **counts,
                )
            )
        lag = self._topics.lag() if state is None else None
        failed = [each for each in tasks if each.state is State.FAILED]
        if state is None:
            state = State.FAILED if tasks and len(failed) == len(tasks) else State.PAUSED if paused else State.RUNNING
        return PipelineStatus(
            pipeline=run.flow.name,
            state=state,
            at=time.time(),
            pid=os.getpid(),
            cause=cause or (failed[0].cause if state is State.FAILED and failed else ""),
            tasks=tuple(tasks),
            source_lag_bytes=None if lag is None else lag.bytes,
            source_lag_seconds=None if lag is None else lag.seconds,
            source_error="" if lag is None else lag.cause,
            source_counts={} if lag is None else dict(lag.counts),
            cpu_percent=self._cpu_percent,
            memory_bytes=self._taken.memory_bytes,
            declaration=self._digest,
        )

    def _read_positions(self) -> dict[str, Position]:
        """Return the positions of its tasks; empty before the first commit and after the flow's deletion."""
        with self._reading:
            if self._positions is None:
                table = open_table(positions_uri(self._definition.settings, self._definition.flow.name))
                if table is None:
                    return {}
                self._positions = Positions(table)
            return {task: each for task, each in self._positions.now().items() if not each.forgotten}

    def close(self) -> None:
        super().close()
        self._topics.close()
        self._documents.close()


def percentiles(seconds: Sequence[float] | deque[float]) -> dict[str, float]:
    """Return p50, p95 and p99 in milliseconds of latencies in `seconds`; empty if there are none."""
    found = sorted(seconds)
    if not found:
        return {}
    return {f"p{part}": round(1000 * found[min(len(found) - 1, len(found) * part // 100)], 1) for part in (50, 95, 99)}
