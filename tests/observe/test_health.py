"""Health names everything that is not as it should be, and where to go with it; nothing else."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from millrace.access.grants import Grant, Role
from millrace.access.token_file import TokenFile
from millrace.base.file_lock import ProcessRegistration
from millrace.base.files import replace_json
from millrace.base.settings import Settings
from millrace.coord.catalog.store import CatalogStore
from millrace.message.ids import LogId, compose_tick
from millrace.message.schema import CollectionSchema, FieldSpec
from millrace.node.publish.definition import NAME
from millrace.node.range_loop.parking import Parked, park
from millrace.observe import health
from millrace.observe.health import HealthInputs, findings, overall_state, read_health_inputs
from millrace.observe.maintenance import running_operations
from millrace.observe.models import HealthFinding, JobView, PChannelView
from millrace.observe.observer import Observer
from millrace.operations.quality.checks import Check, CheckResult, TableCheckResult
from millrace.operations.quality.quarantine import release_blocks
from millrace.operations.quality.results import record_run
from millrace.operations.registry import find_operation
from millrace.rpc.wire import ClockView
from millrace.runtime.launch import history as launch_history
from millrace.runtime.launch.folder import RunFolder
from millrace.runtime.spark.slots import EXPECTED_START, JOBS_AHEAD
from tests.coord.catalog_rig import add_collection, finish

NOW = 1_800_000_000.0
SCHEMA = CollectionSchema((FieldSpec("id", "int64", False),), "id")


def job(name: str = "flusher", *, at: float = NOW, state: str = "running", **more: object) -> JobView:
    return JobView.model_validate({"name": name, "state": state, "pid": 1, "at": at, **more})


def channel(*, wal: float = NOW, flushed: float = NOW, **more: object) -> PChannelView:
    """A PChannel whose WAL and tables stand at these moments."""
    known: dict[str, object] = dict.fromkeys(PChannelView.model_fields, 0)
    known |= {
        "name": "dml_0", "owner": None, "time_tick": str(compose_tick(int(wal * 1000), 0)), "time": wal,
        "log_end": None, "wal_position": None, "flushed_tick": str(compose_tick(int(flushed * 1000), 0)),
        "flushed_time": flushed, "parked": None, "lag_seconds": 0.0,
    }  # fmt: skip
    return PChannelView.model_validate({**known, **more})


def kinds(jobs: list[JobView], channels: list[PChannelView], kept: HealthInputs | None = None) -> list[str]:
    return [each.kind for each in findings(jobs, channels, kept or HealthInputs(), log_server=True, now=NOW)]


def test_where_nothing_is_wrong_nothing_is_said() -> None:
    jobs = [job("streaming-node", at=NOW - 9000), job(at=NOW - 9000)]
    assert kinds(jobs, [channel(wal=NOW - 9000, flushed=NOW - 9000)]) == [], "a job that rests is no fault"
    assert overall_state([], empty=False)[0] == "healthy"


def test_a_flusher_that_has_rows_and_brings_none_is_stalled_however_short_its_lag_is() -> None:
    behind = channel(wal=NOW - 400, flushed=NOW - 401)
    assert kinds([job(at=NOW - 400)], [behind]) == ["flusher_stalled"]
    assert kinds([job(at=NOW - 10)], [behind]) == [], "it is at work"
    assert kinds([job(at=NOW - 400)], [channel(wal=NOW - 10, flushed=NOW - 11)]) == [], "the rows came just now"


def test_a_change_that_does_not_end_is_said_until_it_ends() -> None:
    assert kinds([], [], HealthInputs(running_ddl=[("users", "add_field", NOW - 5)])) == []
    assert kinds([], [], HealthInputs(running_ddl=[("users", "add_field", NOW - 90)])) == ["ddl_stuck"]
    assert kinds([], [], HealthInputs(running_ddl=[("users", "add_field", 0.0)])) == ["ddl_stuck"], (
        "begun by an earlier version"
    )


def test_a_clock_that_is_held_and_log_time_that_is_ahead_are_said() -> None:
    def found(clock: ClockView | None, wal: float = NOW) -> list[HealthFinding]:
        return findings([], [channel(wal=wal, flushed=wal)], HealthInputs(), log_server=True, clock=clock, now=NOW)

    now_ms = int(NOW * 1000)
    assert found(ClockView(now_ms, now_ms, None, 300.0)) == []
    [held] = found(ClockView(now_ms + 3_600_000, now_ms, now_ms - 5000, 300.0))
    assert (held.kind, held.severity, held.subject) == ("clock", "warning", "log clock")
    assert "3600 s behind" in held.words
    assert found(None, wal=NOW + 59.0) == [], "hosts' clocks differ a little"
    [ahead] = found(None, wal=NOW + 90.0)
    assert (ahead.kind, ahead.subject) == ("clock", "dml_0")
    assert "90 s ahead" in ahead.words
    assert overall_state([ahead], empty=False)[0] == "degraded"


def test_a_file_of_tokens_that_lets_nobody_in_is_said(tmp_path: Path) -> None:
    settings = Settings(data_dir=tmp_path)
    file = TokenFile(tmp_path)
    file.add("shop", (Grant(Role.READ),))
    assert kinds([], [], read_health_inputs(settings)) == []
    file.path.chmod(0o644)
    [found] = findings([], [], read_health_inputs(settings), log_server=True, now=NOW)
    assert (found.kind, found.severity) == ("tokens_refused", "warning")
    assert "chmod 600" in found.words


@pytest.mark.parametrize(
    "line, wrong",
    [
        ({"state": "finished", "report": {"ok": True}}, False),
        ({"state": "finished", "report": {"ok": False}}, True),
        ({"state": "failed", "error": {"code": "X", "message": "no"}}, True),
        ({"state": "lost", "error": None}, True),
        ({"state": "odd", "error": "odd", "report": "odd"}, False),
    ],
)
def test_the_newest_run_of_maintenance_says_whether_it_is_well(line: dict[str, object], wrong: bool) -> None:
    found = kinds([], [], HealthInputs(newest_runs={"checkpoint": line, "load_files": {"state": "failed"}}))
    assert found == (["maintenance_failed"] if wrong else [])


RETRIABLE: dict[str, object] = {"code": "LOG_UNAVAILABLE", "message": "no answer", "retriable": True}
FAILED: dict[str, object] = {
    "state": "failed",
    "run_id": "run-1",
    "attempt": 1,
    "ended_at": NOW - 60,
    "error": RETRIABLE,
}


@pytest.mark.parametrize(
    "change, active, kind",
    [
        ({}, set(), "maintenance_retry"),
        ({"state": "lost"}, set(), "maintenance_retry"),
        ({"attempt": find_operation("quality").retries + 1}, set(), "maintenance_failed"),
        ({"attempt": 9}, {"quality"}, "maintenance_retry"),
        ({"ended_at": NOW - 3600}, set(), "maintenance_failed"),
        ({"ended_at": NOW - 3600}, {"quality"}, "maintenance_retry"),
        ({"ended_at": NOW - 3600}, {"compaction"}, "maintenance_failed"),
        ({"error": {**RETRIABLE, "retriable": False}}, set(), "maintenance_failed"),
    ],
)
def test_a_failure_whose_retry_waits_does_not_degrade_the_whole(
    change: dict[str, object], active: set[str], kind: str
) -> None:
    kept = HealthInputs(newest_runs={"quality": {**FAILED, **change}}, active_jobs=active)
    [found] = findings([], [], kept, log_server=True, now=NOW)
    assert (found.kind, found.run) == (kind, "run-1")
    state, words = overall_state([found], empty=False)
    assert state == ("healthy" if kind == "maintenance_retry" else "degraded")
    assert "quality" in words


def test_a_run_that_waits_counts_as_a_retry(settings: Settings) -> None:
    folder = RunFolder(settings, "run-2")
    held = folder.try_lock()
    assert held is not None
    replace_json(folder.params, {"job": "quality", "attempt": 2, "at": NOW, "params": {}})
    launch_history.append_history(
        launch_history.history_path(settings, launch_history.OPERATIONS), {"job": "quality", **FAILED}
    )
    try:
        assert read_health_inputs(settings).active_jobs == {"quality"}
        replace_json(folder.progress, {"words": "waiting", "figures": {JOBS_AHEAD: 2, EXPECTED_START: NOW + 60}})
        [row] = running_operations(settings)
    finally:
        os.close(held)
    assert (row.state, row.before, row.expected_start, row.report) == ("waiting", 2, NOW + 60, {})
    assert read_health_inputs(settings).active_jobs == set()


def test_the_worst_makes_the_state_and_each_says_where_to_go() -> None:
    kept = HealthInputs(
        running_ddl=[("users", "add_field", 0.0)], blocks=["abc"], newest_runs={"backup": {"state": "failed"}}
    )
    found = findings([job(state="stopped")], [channel(parked="no", lag_seconds=99.0)], kept, log_server=False, now=NOW)
    assert {each.kind for each in found} == {
        "parked", "job_stopped", "ddl_stuck", "quality_blocks", "maintenance_failed", "lagging", "log_stopped",
    }  # fmt: skip
    assert overall_state(found, empty=False)[0] == "parked"
    assert overall_state(found[1:], empty=False)[0] == "stopped"
    assert overall_state(found[2:], empty=False)[0] == "degraded"
    assert [overall_state([each], empty=False)[0] for each in found if each.kind == "lagging"] == ["lagging"]
    assert all(each.where for each in found)


def test_collections_whose_last_publish_failed_are_one_finding(settings: Settings) -> None:
    failures = {"3": {"failure": "TABLE_DAMAGED: a file is gone"}, "7": {"failure": "x"}, "9": {"failure": None}}
    replace_json(settings.progress_path(NAME), {"pchannels": failures})
    kept = read_health_inputs(settings)
    assert kept.publish_failures == {3: "TABLE_DAMAGED: a file is gone", 7: "x"}
    (found,) = findings([], [], kept, log_server=True, now=NOW)
    assert (found.kind, found.severity, found.subject) == ("publish_failed", "warning", "collection 3")
    assert "a file is gone" in found.words
    assert "1 more" in found.words
    assert read_health_inputs(replace(settings, publish=False)).publish_failures == {}


def test_the_pages_that_findings_name_are_there() -> None:
    docs = Path(__file__).resolve().parents[2]
    for where in health.REMEDIES.values():
        page, _, heading = where.partition("docs/")[2].partition("#")
        text = (docs / "docs" / page).read_text()
        assert not heading or f"## {heading.replace('-', ' ')}" in text.lower(), where


@pytest.fixture
def look(settings: Settings) -> Iterator[Callable[[], Observer]]:
    """An observer of its own for each look: nothing cached."""
    made: list[Observer] = []

    def fresh() -> Observer:
        made.append(Observer(settings))
        return made[-1]

    yield fresh
    for each in made:
        each.close()


def test_what_a_deployment_keeps_is_found_by_whoever_looks(
    settings: Settings, look: Callable[[], Observer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(health, "DDL_STUCK_SECONDS", 0.0)
    store = CatalogStore(settings.data_dir / "coord" / "coord.db")
    broadcast = add_collection(store, "users", SCHEMA)
    _reporter = ProcessRegistration(settings.run_path)
    for name in ("streaming-node", "flusher"):
        progress = {"pid": os.getpid(), "at": time.time(), "batches": 1, "rows": 1, "pchannels": {}}
        replace_json(settings.progress_path(name), progress)
    check = Check("ticks", "expect_column_values_to_be_between", {"column": "a"}, "ticks increase")
    record_run(settings, "run", [TableCheckResult("wal", {}, (CheckResult(check, success=False, unexpected=1),))])
    path = launch_history.history_path(settings, launch_history.OPERATIONS)
    for state in ("finished", "failed", "stopped"):
        launch_history.append_history(path, {"job": "compaction", "run_id": state, "state": state, "error": None})
    park(settings.parked_path, Parked("dml_0", "MALFORMED", "no such thing", LogId(0, 7), "2026-11-21T10:00:00Z"))
    overview = look().overview()
    assert {each.kind for each in overview.findings} >= {
        "parked", "ddl_stuck", "quality_blocks", "maintenance_failed",
    }  # fmt: skip
    assert overview.state == "parked"
    text = look().metrics().decode()
    assert 'millrace_health_findings{kind="ddl_stuck",severity="critical"} 1.0' in text
    finish(store, broadcast)
    store.close()
    blocks = read_health_inputs(settings).blocks
    release_blocks(settings, list(blocks), by="a person")
    launch_history.append_history(path, {"job": "compaction", "run_id": "again", "state": "finished", "error": None})
    assert {each.kind for each in look().overview().findings} == {"parked", "log_stopped"}
