"""Backfill of a derived table: whatever the slices, their order, repeats and kills, it is what a full rebuild gives."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from millrace.base.errors import CollectionNotFound, InvalidArgument, MillraceError, TickNotReached
from millrace.operations.backfill import run as module
from millrace.operations.backfill.declaration import BackfillParams
from millrace.operations.backfill.slices import recorded_slices
from tests.operations.backfill_rig import START, Rig, running

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory, spark: SparkSession) -> Iterator[Rig]:
    """Three days of trips; tests take tables of their own."""
    with running(tmp_path_factory.mktemp("backfill") / "data", spark) as made:
        made.insert(list(range(300)))
        made.catch_up()
        yield made


@pytest.mark.slow
def test_a_range_is_rebuilt_in_slices_and_each_is_recorded(rig: Rig) -> None:
    report = rig.rebuild(0, 48, run_id="first")
    assert [each.outcome for each in report.slices] == ["written"] * 2
    whole = rig.rebuild(0, 48, table="trips_again", slice_hours=24 * 30)
    assert rig.rows() == rig.rows("trips_again")
    assert report.rows == whole.rows == len(rig.rows())
    kept = recorded_slices(rig.settings, table="trips_hourly").to_pylist()
    assert {(row["start"], row["rows"], row["digest"], row["at_tick"], row["run_id"]) for row in kept} == {
        (each.start, each.rows, each.digest, report.at, "first") for each in report.slices
    }
    again = rig.rebuild(0, 48, run_id="first")
    assert [each.outcome for each in again.slices] == ["done before"] * 2
    dry = rig.rebuild(24, 96, dry_run=True)
    assert [each.outcome for each in dry.slices] == ["planned"] * 3
    assert (dry.slices[0].digest, dry.slices[2].digest) == (report.slices[1].digest, "0" * 16)
    assert recorded_slices(rig.settings, table="trips_hourly").num_rows == 2


@pytest.mark.slow
def test_slices_in_any_order_repeated_and_killed_behind_the_commit_give_the_same_table(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    dice = random.Random(7)
    tick = rig.rebuild(0, 72, table="trips_again").at
    pieces = [(0, 30), (24, 48), (30, 72)]
    pieces += dice.sample(pieces, 1)
    dice.shuffle(pieces)
    for number, (start, end) in enumerate(pieces):
        if number % 2 == 0:
            with monkeypatch.context() as patch:
                patch.setattr(module, "hit", _die)
                with pytest.raises(Killed):
                    rig.rebuild(start, end, table="trips_mixed", at=tick, run_id=str(number), parallel=2)
        report = rig.rebuild(start, end, table="trips_mixed", at=tick, run_id=str(number), parallel=2)
        assert {each.outcome for each in report.slices} <= {"written", "in place", "done before"}
    assert rig.rows("trips_mixed") == rig.rows("trips_again")


@pytest.mark.slow
def test_a_newer_tick_replaces_an_older_one_does_not_and_a_reader_sees_the_one_or_the_other(rig: Rig) -> None:
    before = rig.rebuild(0, 24, table="trips_seen")
    old = rig.rows("trips_seen")
    rig.insert(list(range(1000, 1200)), hours=24, seed=1)
    rig.delete(list(range(50)))
    rig.catch_up()
    stop, seen = threading.Event(), [old]

    def watch() -> None:
        while not stop.is_set():
            seen.append(rig.rows("trips_seen"))

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        after = rig.rebuild(0, 24, table="trips_seen")
    finally:
        stop.set()
        thread.join()
    new = rig.rows("trips_seen")
    assert (old != new, after.at > before.at) == (True, True)
    assert all(each in (old, new) for each in seen)
    late = rig.rebuild(0, 24, table="trips_seen", at=before.at)
    assert [each.outcome for each in late.slices] == ["kept newer"]
    assert [each.digest for each in late.slices] == [each.digest for each in after.slices]
    assert rig.rows("trips_seen") == new


@pytest.mark.slow
def test_a_range_of_ticks_rebuilds_the_days_that_changed_in_it_and_no_others(rig: Rig) -> None:
    rig.rebuild(0, 96, table="trips_ticked")
    assert rig.rebuild(0, 1, table="trips_ticked", range_of="ticks", dry_run=True).slices == []
    since = datetime.now(UTC).replace(microsecond=0) + timedelta(seconds=1)
    _wait_until(since)
    rig.insert([2000], hours=24, seed=3)
    rig.delete(list(range(100, 101)))
    rig.catch_up()
    until = datetime.now(UTC) + timedelta(seconds=2)
    report = rig.rebuild_between(since, until, table="trips_ticked")
    days = {each.start for each in report.slices}
    assert START in days
    assert 1 <= len(days) <= 2
    rig.rebuild(0, 96, table="trips_again")
    assert rig.rows("trips_ticked") == rig.rows("trips_again")


@pytest.mark.slow
def test_a_source_without_rows_gives_empty_slices(rig: Rig) -> None:
    (one,) = rig.rebuild(0, 24, table="of_no_rows").slices
    assert (one.outcome, one.rows) == ("written", 0)
    assert rig.rows("of_no_rows") == []


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize(
    ("table", "start", "end", "more", "error"),
    [
        ("elsewhere", 0, 24, {}, InvalidArgument),
        ("of_nothing", 0, 24, {}, CollectionNotFound),
        ("trips_moved", 0, 24, {"slice_hours": 24, "at": 1 << 62}, TickNotReached),
        ("trips_misspelt", 0, 24, {}, InvalidArgument),
        ("trips_shifted", 0, 24, {}, InvalidArgument),
    ],
)
def test_what_cannot_be_rebuilt_is_a_typed_error_and_nothing_is_written(
    rig: Rig, table: str, start: int, end: int, more: dict[str, Any], error: type[MillraceError]
) -> None:
    before = recorded_slices(rig.settings).num_rows
    with pytest.raises(error):
        rig.rebuild(start, end, table=table, **more)
    assert recorded_slices(rig.settings).num_rows == before
    assert not rig.exists(table) or rig.rows(table) == []


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_job_that_is_killed_behind_a_commit_goes_on_and_writes_no_slice_twice(rig: Rig) -> None:
    params = rig.params(0, 72, table="trips_killed", run_id="killed", parallel=1, at=rig.rebuild(0, 1, dry_run=True).at)
    killed = _job(rig, params, {"MILLRACE_TEST_FAILPOINTS": "backfill.written@2"})
    assert killed.returncode == -signal.SIGKILL
    assert recorded_slices(rig.settings, table="trips_killed").num_rows == 1
    again = _job(rig, params, {})
    assert again.returncode == 0, again.stderr
    report = json.loads((rig.settings.data_dir / "result.json").read_text())["report"]
    outcomes = [each["outcome"] for each in report["slices"]]
    assert outcomes == ["done before", "in place", "written"]
    rig.rebuild(0, 72, table="trips_again")
    assert rig.rows("trips_killed") == rig.rows("trips_again")


def _job(rig: Rig, params: BackfillParams, more: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """The operation as a process of its own."""
    path = os.pathsep.join([str(ROOT / "include"), str(ROOT)])
    command = [sys.executable, "-m", "millrace.operations", "backfill", "--params", params.model_dump_json()]
    command += ["--result", str(rig.settings.data_dir / "result.json")]
    env = {**os.environ, **rig.settings.environment(), "PYTHONPATH": path, **more}
    return subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=300)


class Killed(BaseException):
    """What a kill is here: nothing behind it runs."""


def _die(_place: str) -> None:
    raise Killed


def _wait_until(moment: datetime) -> None:
    while datetime.now(UTC) < moment:
        threading.Event().wait(0.05)
