"""Sensors on a real log, WAL and tables.

Each says whether it is so, defers where it is not yet, and fails where it never can.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pyarrow as pa
import pytest
from airflow.sdk.exceptions import AirflowFailException, TaskDeferred

from millrace.base.settings import Settings
from millrace.client.database import Database, connect
from millrace.message.schema import CollectionSchema, FieldSpec
from millrace.node.flush.definition import flush_to_end
from millrace.node.ingest.definition import ingest_to_end
from millrace_airflow.macros import moment_of, tick_of, ticks_between
from millrace_airflow.sensors import FreshnessSensor, LagSensor, SegmentSensor, TimeTickSensor
from millrace_airflow.triggers import ConditionTrigger

SCHEMA = CollectionSchema((FieldSpec("id", "int64", False),), "id")


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Database]:
    """A log with a collection of nine rows that the WAL has and whose segment was flushed."""
    settings = Settings(data_dir=tmp_path_factory.mktemp("sensors"), spark_cores=2)
    with connect(settings=settings) as client:
        try:
            client.catalog.ensure_pchannels(1)
            collection = client.catalog.create_collection("c", SCHEMA)
            client.new_producer().insert(collection, pa.table({"id": list(range(9))}))
            client.catalog.flush("c")
            ingest_to_end(settings, client.log)
            flush_to_end(settings)
            yield client
        finally:
            client.connection.service.shutdown()


@pytest.fixture(autouse=True)
def here(deployment: Database, monkeypatch: pytest.MonkeyPatch) -> Settings:
    for name, value in deployment.settings.environment().items():
        monkeypatch.setenv(name, value)
    return deployment.settings


def run(sensor: Any) -> dict[str, Any]:
    return sensor.execute({})


def test_a_tick_that_the_wal_has_is_reached(here: Settings) -> None:
    found = run(TimeTickSensor(task_id="t", tick=1))
    assert list(found["ticks"]) == ["dml_0"]


def test_a_tick_to_come_is_waited_for_without_a_slot(here: Settings) -> None:
    later = (datetime.now(tz=UTC) + timedelta(hours=1)).isoformat()
    with pytest.raises(TaskDeferred) as deferred:
        run(TimeTickSensor(task_id="t", tick=later, pchannel="dml_0"))
    trigger = deferred.value.trigger
    assert isinstance(trigger, ConditionTrigger)
    assert (trigger.condition, trigger.arguments["tick"]) == ("tick_reached", tick_of(later))


def test_a_channel_that_is_not_there_fails_at_once(here: Settings) -> None:
    with pytest.raises(AirflowFailException, match="CHANNEL_NOT_FOUND"):
        run(TimeTickSensor(task_id="t", tick=1, pchannel="dml_9"))


def test_the_lag_is_what_the_log_has_and_the_wal_lacks(here: Settings, deployment: Database) -> None:
    assert run(LagSensor(task_id="t", seconds=5.0))["lag_seconds"] == {"dml_0": 0.0}
    deployment.new_producer().insert(deployment.definition("c"), pa.table({"id": [100]}))
    end = time.monotonic() + 10
    while time.monotonic() < end:  # the entry grows older than a hundredth of a second
        try:
            run(LagSensor(task_id="t", seconds=0.01))
        except TaskDeferred:
            break
    else:
        pytest.fail("the lag was never seen")
    ingest_to_end(here, deployment.log)
    assert run(LagSensor(task_id="t", seconds=0.01))["lag_seconds"] == {"dml_0": 0.0}


def test_flushed_segments_are_counted(here: Settings) -> None:
    found = run(SegmentSensor(task_id="t", collection="c"))
    assert (len(found["segments"]), found["rows"]) == (1, 9)
    with pytest.raises(TaskDeferred):
        run(SegmentSensor(task_id="t", collection="c", count=2))
    with pytest.raises(AirflowFailException, match="COLLECTION_NOT_FOUND"):
        run(SegmentSensor(task_id="t", collection="d"))


def test_a_collection_is_fresh_as_of_a_moment_that_has_passed_and_not_of_one_to_come(here: Settings) -> None:
    now = datetime.now(tz=UTC)
    assert run(FreshnessSensor(task_id="t", collection="c", as_of=now.isoformat()))["ticks"]
    with pytest.raises(TaskDeferred):
        run(FreshnessSensor(task_id="t", collection="c", as_of=(now + timedelta(hours=1)).isoformat()))


def test_a_tick_is_a_moment_to_the_millisecond() -> None:
    moment = datetime(2026, 11, 21, 12, 0, 0, 123000, tzinfo=UTC)
    assert moment_of(tick_of(moment)) == moment
    assert tick_of("2026-11-21T12:00:00.123") == tick_of(moment)
    assert ticks_between(moment, moment) == (tick_of(moment), tick_of(moment))
