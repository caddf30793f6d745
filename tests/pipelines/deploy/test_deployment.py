"""How a pipeline is told of whose worker ended: its counts stay, what only a process has does not."""

from __future__ import annotations

from millrace.base.settings import Settings
from millrace.flows.range_host.status import PipelineStatus, State, TaskStatus, status_path
from millrace.pipelines.deploy.deployment import Deployment


def test_of_a_worker_that_ended_no_state_of_its_process_is_told(settings: Settings) -> None:
    tasks = (
        TaskStatus(task="in-0", state=State.RUNNING, position=7, end=9, lag=2, records_in=7, latency_ms={"p50": 3.0}),
        TaskStatus(task="in-1", state=State.FAILED, cause="no", retry_at=1.0),
    )
    said = PipelineStatus(
        pipeline="p", state=State.RUNNING, at=1.0, pid=7, tasks=tasks, cpu_percent=9.0, memory_bytes=1
    )
    path = status_path(settings, "p")
    path.parent.mkdir(parents=True)
    path.write_text(said.model_dump_json())  # as one that was killed left it
    found = Deployment(settings).status("p")
    assert (found.state, found.pid, found.cpu_percent, found.memory_bytes) == (State.STOPPED, 0, 0.0, 0)
    assert [(task.state, task.latency_ms) for task in found.tasks] == [(State.STOPPED, {}), (State.FAILED, {})]
    assert (found.tasks[0].position, found.tasks[0].lag, found.tasks[0].records_in) == (7, 2, 7)
