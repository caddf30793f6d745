"""Triggers: what they wait for, what they say meanwhile, and that they can be made again from their arguments."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from airflow.sdk.module_loading import import_string
from airflow.triggers.base import BaseTrigger

from millrace.base.errors import LogUnavailable, TickTooOld
from millrace.base.files import replace_json
from millrace.base.settings import Settings
from millrace.runtime.launch.launcher import Launcher, RunState
from millrace_airflow import conditions
from millrace_airflow.conditions import ConditionResult
from millrace_airflow.triggers import ConditionTrigger, JobTrigger, SegmentsFlushedTrigger
from tests.airflow_home import ROOT


@pytest.fixture(autouse=True)
def no_wait_before_an_event(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no scheduler here that has to hear of a deferral first."""
    monkeypatch.setattr("millrace_airflow.triggers.SETTLE_SECONDS", 0.0)


@pytest.fixture
def here(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> Settings:
    for name, value in settings.environment().items():
        monkeypatch.setenv(name, value)
    return settings


@pytest.fixture
def launcher(here: Settings, tmp_path: Path) -> Iterator[Launcher]:
    jobs = tmp_path / "jobs"
    jobs.mkdir()
    shutil.copy(ROOT / "tests" / "runtime" / "light_job.py", jobs / "light.py")
    made = Launcher(here, jobs=jobs)
    yield made
    for status in made.runs():
        made.stop(status.run_id, deadline=0.1)


def again(trigger: BaseTrigger) -> BaseTrigger:
    """The trigger as another triggerer makes it."""
    path, arguments = trigger.serialize()
    return import_string(path)(**arguments)


async def first(trigger: BaseTrigger) -> Any:
    async for event in trigger.run():
        return event.payload
    raise AssertionError("it ended without an event")


def test_a_job_trigger_made_anew_tells_how_the_job_ended(launcher: Launcher, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    launcher.start("one", "light", params={"wait_for": str(gate)})

    async def go() -> Any:
        waiting = asyncio.create_task(first(again(JobTrigger(run_id="one", poll_seconds=0.01))))
        await asyncio.sleep(0)
        gate.touch()
        return await asyncio.wait_for(waiting, 30)

    assert asyncio.run(go()) == {"run_id": "one", "state": "finished", "late": False}


@pytest.mark.slow
def test_no_event_wakes_a_task_whose_deferral_the_scheduler_has_not_heard_of(
    launcher: Launcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("millrace_airflow.triggers.SETTLE_SECONDS", 1.5)
    launcher.start("one", "light", params={})
    ended = time.monotonic() + 30
    while launcher.poll("one").active:
        assert time.monotonic() < ended
        time.sleep(0.01)
    began = time.monotonic()
    assert asyncio.run(first(again(JobTrigger(run_id="one"))))["state"] == "finished"
    assert time.monotonic() - began >= 1.5


def test_killing_the_task_stops_the_job(launcher: Launcher, tmp_path: Path) -> None:
    launcher.start("one", "light", params={"wait_for": str(tmp_path / "never")})
    asyncio.run(again(JobTrigger(run_id="one")).on_kill())
    assert launcher.poll("one").state is RunState.STOPPED


def test_a_condition_is_waited_for_over_what_may_pass(here: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    answers: list[ConditionResult | Exception] = [
        LogUnavailable("away"),
        ConditionResult(False, "not yet"),
        ConditionResult(True, "now", {"n": 1}),
    ]

    def look(settings: Settings) -> ConditionResult:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setitem(conditions._CONDITIONS, "test", look)
    trigger = again(ConditionTrigger(condition="test", arguments={}, poll_seconds=0.0))
    assert asyncio.run(first(trigger)) == {"found": {"n": 1}}


def test_a_condition_that_can_never_hold_ends_the_wait(here: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    def look(settings: Settings) -> ConditionResult:
        raise TickTooOld("gone")

    monkeypatch.setitem(conditions._CONDITIONS, "test", look)
    found = asyncio.run(first(ConditionTrigger(condition="test", arguments={})))
    assert found == {"error": {"code": "TICK_TOO_OLD", "message": "gone"}}


class Store:
    """Airflow's store beside an asset, as far as the trigger uses it."""

    def __init__(self) -> None:
        self.kept: dict[str, Any] = {}

    async def aget(self, key: str) -> Any:
        return self.kept.get(key)

    async def aset(self, key: str, value: Any) -> None:
        self.kept[key] = value


def flushed(here: Settings, *segments: tuple[int, int, int]) -> None:
    rows = [
        {"pchannel": "dml_0", "collection_id": collection, "segment_id": segment, "rows": 10, "time_tick": tick}
        for collection, segment, tick in segments
    ]
    replace_json(here.progress_path("flushed-segments"), {"segments": rows})


def watcher(store: Store, **arguments: Any) -> SegmentsFlushedTrigger:
    made = again(SegmentsFlushedTrigger(poll_seconds=0.001, **arguments))
    assert isinstance(made, SegmentsFlushedTrigger)
    made.asset_state_store = store  # type: ignore[assignment]
    return made


def test_flushed_segments_are_told_once_over_restarts_of_the_triggerer(here: Settings) -> None:
    store = Store()
    flushed(here, (7, 1, 100))

    async def started_and_stopped() -> None:
        task = asyncio.create_task(first(watcher(store)))
        while "told" not in store.kept:
            await asyncio.sleep(0.001)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(started_and_stopped())  # what was flushed before anybody asked is no news
    assert store.kept == {"told": {"dml_0": 100}}

    flushed(here, (7, 1, 100), (7, 2, 110), (8, 3, 120))
    event = asyncio.run(asyncio.wait_for(first(watcher(store)), 10))
    assert event == {"segments": [2, 3], "collections": [7, 8], "rows": 20, "time_tick": 120}


def test_a_watcher_of_one_collection_hears_of_that_alone(here: Settings) -> None:
    store = Store()
    store.kept["told"] = {"dml_0": 100}
    flushed(here, (7, 1, 100), (7, 2, 110), (8, 3, 120))
    event = asyncio.run(asyncio.wait_for(first(watcher(store, collection_id=8)), 10))
    assert event["segments"] == [3]
