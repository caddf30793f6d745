"""A flow has one status, whichever host runs it, from the files of its host."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from millrace.base.file_lock import ProcessRegistration
from millrace.base.settings import Settings
from millrace.flows.directory import flow_statuses
from millrace.flows.range_host.observed import described, flow_status, note_flow, observed, pipelines_here, read_flow
from millrace.flows.range_host.status import PipelineStatus, State, TaskStatus, status_path
from millrace.flows.range_host.trend import samples_path
from millrace.flows.status import FlowState, FlowStatus
from millrace.message.ids import compose_tick
from millrace.pipelines.declaration import pipeline_of

DECLARED: dict[str, Any] = {
    "id": "p",
    "description": "Flights.",
    "source": {"kind": "kafka", "bootstrap": ["b:1"], "topics": ["a", "b"]},
    "steps": [{"kind": "lookup", "collection": "planes", "key": "tail", "into": "plane"}],
    "sink": {"kind": "opensearch", "hosts": ["http://h:1"], "index_base": "i", "versions": False},
}


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(data_dir=tmp_path / "data", stream_declarations="")


def say(settings: Settings, *tasks: TaskStatus, state: State = State.RUNNING, pid: int | None = None) -> None:
    said = PipelineStatus(pipeline="p", state=state, at=time.time(), pid=pid or os.getpid(), tasks=tasks)
    path = status_path(settings, "p")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(said.model_dump_json())


def test_a_worker_in_the_foreground_is_a_running_flow_with_the_sums_of_its_lanes(settings: Settings) -> None:
    _registered = ProcessRegistration(settings.run_path)
    note_flow(settings, pipeline_of(DECLARED), file=Path("p.yaml"))
    counts = {"records_in": 10, "records_out": 6, "records_error": 1, "records_filtered": 2, "records_stale": 1}
    one = TaskStatus(task="a-0", state=State.RUNNING, position=10, end=14, lag=4, **counts)
    say(settings, one, one.model_copy(update={"task": "b-0", "lag": 2}))
    whole = time.time() // 15 * 15  # the end of the newest whole bucket
    samples = [{"at": whole - ago, "records_in": count} for ago, count in ((20, 0), (5, 150))]
    samples_path(settings, "p").write_text("".join(json.dumps(each) + "\n" for each in samples))
    found = flow_status(settings, "p", now=whole + 1)
    assert (found.state, found.workers, found.lanes, found.lag_records) == (FlowState.RUNNING, 1, 2, 6)
    assert found.rate == 10.0
    assert (found.rows_in, found.rows_out, found.rows_error) == (20, 12, 2)
    assert (found.rows_filtered, found.rows_stale) == (4, 2)
    assert (found.source, found.reads) == ("kafka:a,b", ("kafka:a", "kafka:b", "collection:planes"))
    assert (found.sink, found.writes) == ("opensearch:i", ("opensearch:i", "kafka:p.errors"))
    assert (found.guarantee, found.words, found.lag_seconds) == ("effectively once", "Flights.", None)
    assert found.since is not None
    assert found.since <= time.time()
    failed = one.model_copy(update={"task": "b-0", "state": State.FAILED, "cause": "the cluster is gone"})
    say(settings, one, failed)
    found = flow_status(settings, "p")
    assert (found.state, found.failed_lanes, found.error) == (FlowState.DEGRADED, 1, "the cluster is gone")


def test_a_worker_that_is_gone_is_a_stopped_flow_and_says_so(settings: Settings) -> None:
    say(settings, TaskStatus(task="a-0", state=State.RUNNING, records_in=3), pid=1 << 22)
    found = flow_status(settings, "p")
    assert (found.state, found.rows_in, found.workers, found.since, found.rate) == (FlowState.STOPPED, 3, 0, None, 0.0)
    assert found.error == f"its worker, process {1 << 22}, has ended"
    assert observed(settings, "p").tasks[0].state is State.STOPPED


def test_one_that_never_ran_is_new_and_is_found_by_what_was_noted(settings: Settings) -> None:
    assert pipelines_here(settings) == []
    note_flow(settings, pipeline_of(DECLARED))
    assert pipelines_here(settings) == ["p"]
    assert (flow_status(settings, "p").state, flow_status(settings, "p").at) == (FlowState.NEW, None)
    assert [(each.name, each.host) for each in flow_statuses(settings) if each.host == "range"] == [("p", "range")]
    assert flow_statuses(settings, without={"p"}) == [each for each in flow_statuses(settings) if each.host == "spark"]


def test_lag_behind_a_collection_is_time_and_not_records(settings: Settings) -> None:
    collection = {"kind": "collection", "collection": "flights"}
    cluster = {"bootstrap": ["b:1"]}
    sink = {"kind": "kafka", "bootstrap": ["b:1"], "topic": "out"}
    pipeline = pipeline_of({"id": "p", "source": collection, "sink": sink, "errors": {"cluster": cluster}})
    note_flow(settings, pipeline)
    here, end = compose_tick(1_790_000_000_000, 0), compose_tick(1_790_000_002_500, 0)
    say(settings, TaskStatus(task="flights-0", state=State.RUNNING, position=here, end=end, lag=end - here))
    found = flow_status(settings, "p")
    assert (found.lag_seconds, found.lag_records, found.source) == (2.5, None, "collection:flights")


def test_noting_a_flow_again_keeps_where_its_declaration_is(settings: Settings) -> None:
    pipeline = pipeline_of(DECLARED)
    note_flow(settings, pipeline, file=Path("/etc/p.yaml"), config=Path("/etc/c.yaml"))
    note_flow(settings, pipeline)
    assert read_flow(settings, "p") == {**described(pipeline), "file": "/etc/p.yaml", "config": "/etc/c.yaml"}


def test_every_status_is_json(settings: Settings) -> None:
    note_flow(settings, pipeline_of(DECLARED))
    for each in flow_statuses(settings):
        assert FlowStatus.model_validate_json(each.model_dump_json()) == each
