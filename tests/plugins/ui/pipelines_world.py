"""Pipelines to look at, without brokers and without processes.

What their workers would say lies in their files, what failed in a list.
"""

from __future__ import annotations

import json
import time
from typing import Any

from millrace.access.grants import LOCAL_ADMIN, Caller
from millrace.base.settings import Settings
from millrace.flows.errors.letter import Letter
from millrace.flows.errors.listing import ErrorPage, _row
from millrace.flows.errors.selection import Selection
from millrace.flows.errors.topic import headers_of
from millrace.flows.range_host.status import PipelineStatus, State, TaskStatus, status_path
from millrace.flows.range_host.supervision import read_status
from millrace.flows.range_host.trend import sample_of, samples_path
from millrace.flows.records import Failure, Record
from millrace.node.range_loop.samples import SampleFile
from millrace.pipelines.api.any_flow import FlowErrors
from millrace.pipelines.api.management import Management
from millrace.pipelines.store.store import PipelineStore
from tests.pipelines.api.test_routes import DECLARED, Kept, NoProcess, NoRun, NoServers

HOSTILE = "<script>alert(1)</script><img src=x onerror=alert(2)>"


class Said(NoProcess):
    """A worker that runs is how its file says."""

    def status(self, pipeline: str) -> PipelineStatus:
        said = read_status(self._settings, pipeline)
        return said if self.running(pipeline) else said.model_copy(update={"state": State.STOPPED})


class Failing(Management):
    """With an error topic of three records, the newest a hostile one."""

    def errors(self, pipeline: str, selection: Selection, *, before: str = "", limit: int = 50) -> ErrorPage:
        known = self._pipeline(self._store.get(pipeline))
        failed = [
            ("12a is no int", "number", b'{"flight": "12a"}'),
            ("no JSON", "json", b"{"),
            (HOSTILE, HOSTILE, HOSTILE.encode()),
        ]
        rows = []
        for offset, (reason, step, value) in enumerate(failed):
            origin = Record("in", 0, offset * 7, value, value, 1_790_000_000_000)
            told = headers_of(Failure(origin, "TRANSFORMATION", step, "CAST", reason), flow=pipeline, task="in-0")
            record = origin._replace(topic=known.errors_topic, offset=offset, headers=list(told.items()))
            rows += [_row(record)] if selection.takes(record) else []
        return ErrorPage(topic=known.errors_topic, total=3, errors=rows[::-1], next=None, complete=True)

    def flow_errors(self, caller: Caller, name: str, selection: Selection, *, limit: int = 50) -> FlowErrors:
        """Two letters of a stream: a record that does not decode, and a hostile row."""
        letters = [
            Letter(id="s/source/in-0-7", flow=name, lane="in-0", position=7, stage="VALUE_CONVERTER",
                   reason="JSON is malformed", payload="{", timestamp=1_790_000_000_000),
            Letter(id="s/1/3/0", flow=name, lane=f"stream-{name}", position=3, stage="TASK_PUT",
                   reason=HOSTILE, payload=HOSTILE),
        ]  # fmt: skip
        return FlowErrors(place="dead", letters=[each for each in letters if selection.takes_letter(each)])


def make_management(settings: Settings, store: Any) -> Failing:
    """Nothing in it yet."""
    deployment = Said(settings)
    made = Failing(settings, store, deployment=deployment, redrives=NoRun(settings), places=lambda *_: Kept())
    made._world = NoServers(deployment, made._pipeline)
    return made


def populate(settings: Settings, management: Failing) -> None:
    """One that runs well, one that fails, one that is stopped and bears hostile words."""
    management.create(LOCAL_ADMIN, "flights", {**DECLARED, "name": "Flights of 2013", "account": "ops"})
    management.create(LOCAL_ADMIN, "planes", DECLARED)
    hostile = {"name": HOSTILE, "description": HOSTILE, "account": HOSTILE, "labels": {HOSTILE: HOSTILE}}
    management.create(LOCAL_ADMIN, "hostile", {**DECLARED, **hostile})
    for name in ("flights", "planes"):
        management.resume(LOCAL_ADMIN, name)
    say(settings, "flights", out=96_000, error=3, lag=40)
    say(settings, "planes", out=10, error=0, lag=1_200, cause=HOSTILE)


def say(settings: Settings, pipeline: str, *, out: int, error: int, lag: int, cause: str = "") -> None:
    """What a worker would have said over the last quarter of an hour."""
    now = time.time()
    tasks = []
    for place in range(2):
        failed = bool(cause) and place == 0
        tasks.append(
            TaskStatus(
                task=f"in-{place}",
                state=State.FAILED if failed else State.RUNNING,
                position=out // 2,
                end=out // 2 + lag // 2,
                lag=lag // 2,
                records_in=(out + error) // 2,
                records_out=out // 2,
                records_error=error if place else 0,
                bulks=12,
                retries=3,
                cause=cause if failed else "",
                failures=10 * failed,
                retry_at=now + 60 if failed else None,
                latency_ms={"p50": 41.0, "p95": 180.5, "p99": 900.0},
            )
        )
    status = PipelineStatus(
        pipeline=pipeline,
        state=State.RUNNING,
        at=now,
        pid=1,
        tasks=tuple(tasks),
        cpu_percent=37.5,
        memory_bytes=210 << 20,
    )
    status_path(settings, pipeline).write_text(status.model_dump_json())
    path = samples_path(settings, pipeline)
    path.unlink(missing_ok=True)
    for step in range(180):
        at = now - 900 + step * 5
        share = (step + step % 7) / 190
        sample = sample_of(status) | {"records_out": int(out * share), "records_in": int((out + error) * share)}
        SampleFile(path, clock=lambda at=at: at).add(sample)  # type: ignore[misc]


def events(store: PipelineStore, pipeline: str) -> list[str]:
    return [each.what for each in store.events(pipeline)]


def as_lines(*documents: Any) -> str:
    return "\n".join(json.dumps(each) for each in documents)
