"""The log's retention gives up what is old or too much, and never what a checkpoint still needs."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

import pytest

from millrace.base.metrics import Metrics
from millrace.base.settings import Settings
from millrace.log.rocksmq.service import RocksMQ
from millrace.message.ids import EARLIEST
from millrace.node.flush.definition import flush_to_end
from millrace.node.ingest.definition import ingest_to_end
from millrace.node.retention import log_retention
from millrace.node.retention.log_retention import LogRetention, enforce_log_retention, retention_configured
from millrace.node.retention.truncation import truncate_log
from millrace.operations.quality.checks import Check, CheckResult, TableCheckResult
from millrace.operations.quality.ranges import TickRange
from millrace.operations.quality.results import record_run
from millrace.storage.delta_log import commit_file
from millrace.storage.table import table_at
from millrace.tables.read.arrow import read_arrow
from tests.client.medium import Medium

P = "dml_0"


class Died(BaseException):
    """Ends the process where it stands."""


@pytest.fixture
def settings(filled: Settings) -> Settings:
    return replace(filled, log_retention_bytes=2 << 20)


@pytest.mark.slow
def test_without_a_setting_there_is_no_retention(settings: Settings) -> None:
    assert not retention_configured(replace(settings, log_retention_bytes=0))
    assert retention_configured(settings)
    assert retention_configured(Settings(log_retention_seconds=1.0))


@pytest.mark.slow
def test_nothing_goes_before_both_checkpoints_have_passed_it(settings: Settings, engine: RocksMQ) -> None:
    assert enforce_log_retention(settings, engine) == {}
    ingest_to_end(settings, engine)
    assert enforce_log_retention(settings, engine) == {}
    assert engine.open(P).describe().begin == EARLIEST


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("by", ["size", "time"])
def test_what_is_beyond_goes_as_far_as_truncation_may_go(settings: Settings, engine: RocksMQ, by: str) -> None:
    ingest_to_end(settings, engine)
    flush_to_end(settings)
    (most,) = truncate_log(settings, engine, dry_run=True)
    if by == "size":
        assert enforce_log_retention(settings, engine)[P] > 0
        found = engine.open(P).describe()
        assert EARLIEST < found.begin < most.position
        assert found.bytes <= (2 << 20) + (1 << 20), "whole files go"
        assert enforce_log_retention(settings, engine)[P] == 0
        return
    assert enforce_log_retention(replace(settings, log_retention_bytes=0, log_retention_seconds=3600.0), engine)[P] == 0
    assert enforce_log_retention(replace(settings, log_retention_bytes=0, log_retention_seconds=0.001), engine)[P] > 0
    assert EARLIEST < engine.open(P).describe().begin <= most.position


@pytest.mark.slow
def test_what_is_gone_by_stands_on_the_disk_though_who_committed_it_has_not_come_to_that(
    settings: Settings, engine: RocksMQ, monkeypatch: pytest.MonkeyPatch
) -> None:
    ingest_to_end(settings, engine)
    flush_to_end(settings)
    medium = Medium(monkeypatch)
    looked: list[bool] = []

    def look(name: str) -> None:
        tables = [settings.wal_uri, settings.checkpoints_uri]
        looked.extend(medium.has(Path(each) / commit_file(table_at(each).version)) for each in tables)

    monkeypatch.setattr(log_retention, "hit", look)
    assert enforce_log_retention(settings, engine)[P] > 0
    assert looked[:2] == [True, True]


@pytest.mark.slow
def test_nothing_goes_while_quality_forbids_it(settings: Settings, engine: RocksMQ) -> None:
    ingest_to_end(settings, engine)
    flush_to_end(settings)
    check = Check(
        "ticks", "expect_column_values_to_be_between", {"column": "tick_step", "min_value": 1}, "they increase"
    )
    failed = TableCheckResult("wal", {P: TickRange(0, 1 << 62)}, (CheckResult(check, success=False, unexpected=1),))
    record_run(settings, "first", [failed])
    assert enforce_log_retention(settings, engine) == {}
    assert engine.open(P).describe().begin == EARLIEST
    record_run(settings, "mended", [replace(failed, results=(CheckResult(check, success=True),))])
    assert enforce_log_retention(settings, engine)[P] > 0


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("moment", ["retention.before", "retention.after"])
def test_a_death_around_it_loses_nothing(settings: Settings, moment: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def die(name: str) -> None:
        if name == moment:
            raise Died

    with RocksMQ(settings.log_path) as engine:
        ingest_to_end(settings, engine)
        flush_to_end(settings)
        monkeypatch.setattr(log_retention, "hit", die)
        with pytest.raises(Died):
            enforce_log_retention(settings, engine)
        monkeypatch.undo()
    with RocksMQ(settings.log_path) as engine:
        enforce_log_retention(settings, engine)
        ingest_to_end(settings, engine)
        flush_to_end(settings)
    assert sorted(read_arrow(settings, 1)["id"].to_pylist()) == list(range(20))


@pytest.mark.slow
def test_the_owner_of_the_log_enforces_it_again_and_again(settings: Settings, engine: RocksMQ) -> None:
    passed = threading.Semaphore(0)
    metrics = Metrics()
    retention = LogRetention(settings, engine, pause=0.01, on_pass=passed.release, metrics=metrics)
    retention.start()
    assert passed.acquire(timeout=20)
    assert engine.open(P).describe().begin == EARLIEST
    ingest_to_end(settings, engine)
    flush_to_end(settings)
    while passed.acquire(blocking=False):
        pass  # passes that ended before
    for _ in range(2):  # one may have begun before
        assert passed.acquire(timeout=20)
    retention.close()
    assert engine.open(P).describe().begin > EARLIEST
    assert (metrics.registry.get_sample_value("millrace_truncated_bytes_total", {"pchannel": P}) or 0) >= 1 << 20
    retention.close()
