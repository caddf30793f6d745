"""Spark runs a pipeline by the same definition: tasks on workers, positions committed by the driver."""

from __future__ import annotations

import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from millrace.base.errors import InvalidSettings
from millrace.base.metrics import Metrics
from millrace.base.settings import TASK_FOLDER, Settings
from millrace.flows.batch import Batch
from millrace.flows.range_host.crashes import RangeWatch, suspects_of
from millrace.flows.range_host.definition import FlowRun
from millrace.flows.range_host.documents import change_document
from millrace.flows.range_host.positions import positions_of
from millrace.flows.range_host.status import State
from millrace.flows.range_host.supervision import read_status
from millrace.flows.sinks.sink import Verdicts
from millrace.node.range_loop.query import start_query
from millrace.node.range_loop.schedule import START, BatchOffset, RangeSchedule
from millrace.pipelines.declaration import pipeline_of
from tests.flows.range_host.flights import Flights
from tests.flows.range_host.lines import LinesFlow, numbers
from tests.waiting import until

KAFKA = {"kind": "kafka", "bootstrap": ["127.0.0.1:1"], "topics": ["a"]}
COLLECTION = {"kind": "collection", "collection": "c"}
QUERY = {
    "kind": "query", "engine": "mariadb", "host": "db", "user": "u", "password": "p", "database": "d", "table": "t",
    "column": "at",
}  # fmt: skip


def test_the_planner_and_the_tasks_are_other_processes_of_the_driver(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Range follows range, also with a meta store: nobody there waits for a lease that another of them has."""
    taken: list[int] = []

    def write(batch: Batch) -> Verdicts:
        taken.extend(numbers(batch))
        return Verdicts(len(batch.documents or ()), 0)

    lines = LinesFlow(tmp_path, write)
    lines.patch(monkeypatch)
    settings = replace(lines.settings, meta_store=f"sqlite:///{tmp_path / 'meta.db'}")
    driver = FlowRun(settings, pipeline_of(lines.declared), on_spark=True)
    lines.fill([])
    driver.prepare()

    def sent() -> FlowRun:
        made: FlowRun = pickle.loads(pickle.dumps(driver))
        assert made == driver
        return made

    schedule, committer = RangeSchedule(sent().planner()), driver.committer(None)
    offset = START
    for turn in range(4):
        lines.fill([turn])
        before = offset

        def planned(before: BatchOffset = before) -> bool:
            nonlocal offset
            offset = schedule.next_offset(before)
            return offset is not before

        until(planned, f"range {turn} is planned", seconds=5)
        done = [sent().run(plan) for plan in schedule.plan(offset)]
        assert len(committer.commit(done).committed) == 1
    assert taken == [0, 1, 2, 3]
    committer.close()
    schedule.close()


def test_tasks_of_an_executor_find_what_its_earlier_processes_and_other_machines_noted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = LinesFlow(tmp_path, lambda batch: Verdicts(len(batch.documents or ()), 0))
    lines.patch(monkeypatch)
    settings = replace(lines.settings, meta_store=f"sqlite:///{tmp_path / 'meta.db'}")
    driver = FlowRun(settings, pipeline_of(lines.declared), on_spark=True)
    lines.fill([1, 2])
    driver.prepare()
    (plan,) = _planned(driver)
    body = pickle.dumps(driver)
    body_of_suspect = b'{"start": 0, "end": 2, "records": 1, "crashes": 1, "alone": 0}\n'
    change_document(settings, "lines", f"suspects/{plan.channel}.json", lambda _: body_of_suspect)
    monkeypatch.setenv(TASK_FOLDER, str(tmp_path / "tasks"))
    seen: list[int] = []
    monkeypatch.setattr(RangeWatch, "limit", lambda watch, position, most: seen.append(watch.suspect.records) or most)
    first, second = pickle.loads(body), pickle.loads(body)
    assert first.settings.data_dir == second.settings.data_dir == tmp_path / "tasks" / "shared"
    assert first.run(plan).failure is None
    assert seen == [1], "what another machine noted is known here"
    assert suspects_of(first.settings, "lines") == {}, "it is passed"


@pytest.mark.parametrize(
    ("declared", "settings", "words"),
    [
        ({"source": QUERY, "sink": COLLECTION, "errors": {"collection": "e"}}, {}, "captured by a worker"),
        ({"source": {**KAFKA, "assignment": "group"}, "sink": COLLECTION}, {}, "one query reads all lanes"),
        ({"source": KAFKA, "sink": COLLECTION}, {"meta_store": ""}, "MILLRACE_META_STORE"),
        ({"source": KAFKA, "sink": COLLECTION}, {"tables": ""}, "MILLRACE_TABLES"),
        ({"source": KAFKA, "sink": COLLECTION}, {"log": "rocksmq"}, "MILLRACE_LOG"),
    ],
)
def test_a_flow_that_tasks_cannot_run_is_refused_at_its_start(
    tmp_path: Path, declared: dict[str, Any], settings: dict[str, Any], words: str
) -> None:
    apart: dict[str, Any] = {
        "spark_environment": "/environment.tar.gz", "tables": "s3://b/t", "log": "kafka://127.0.0.1:1/p",
        "meta_store": f"sqlite:///{tmp_path / 'meta.db'}",
    }  # fmt: skip
    found = Settings(data_dir=tmp_path / "data", **apart | settings)
    with pytest.raises(InvalidSettings, match=words):
        FlowRun(found, pipeline_of({"id": "f", **declared}), on_spark=True).prepare()


def _planned(run: FlowRun) -> list[Any]:
    schedule = RangeSchedule(run.planner())
    try:
        return list(schedule.plan(schedule.next_offset(START)))
    finally:
        schedule.close()


@pytest.mark.slow
def test_a_query_takes_a_topic_into_the_index_and_goes_on_where_it_stood(spark: SparkSession, tmp_path: Path) -> None:
    flights = Flights(tmp_path)
    flights.send((f"k{n}", {"flight": n if n % 10 else "bad"}) for n in range(500))
    definition = FlowRun(flights.settings, flights.pipeline, on_spark=True)
    for turn in (1, 2):
        query = start_query(spark, definition, metrics=Metrics(), available_now=True)
        query.awaitTermination(100)
        assert query.exception() is None
        places = positions_of(flights.settings, flights.id).values()
        assert sum(place.position for place in places) == 499 + turn
        flights.send([("late", {"flight": turn})])
    assert {key: value["flight"] for key, value in flights.index().items()} == {
        f"k{n}": n for n in range(500) if n % 10
    } | {"late": 1}
    assert len(flights.errors()) == 50
    assert read_status(flights.settings, flights.id).state is State.RUNNING
    definition.end()
    assert read_status(flights.settings, flights.id).state is State.STOPPED
