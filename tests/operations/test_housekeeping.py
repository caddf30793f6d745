"""What the system wrote about itself is removed once it is older than its retention, and nothing else."""

from __future__ import annotations

import json
import os
import time
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest

from millrace.base.deadline import Deadline
from millrace.base.errors import DeadlineExceeded, InvalidArgument
from millrace.base.file_lock import exclusive_lock
from millrace.base.files import replace_json
from millrace.base.settings import Settings
from millrace.node.retention.removal_lock import removals_blocked
from millrace.operations.housekeeping.declaration import ALL_AREAS, HousekeepingParams
from millrace.operations.housekeeping.old_files import remove_old_files
from millrace.operations.housekeeping.run import AREAS, LOCK, RETENTION, HousekeepingReport, run
from millrace.operations.quality.checks import Check, CheckResult, TableCheckResult
from millrace.operations.quality.data_docs import docs_uri
from millrace.operations.quality.ranges import TickRange
from millrace.operations.quality.results import read_results, read_state, record_run
from millrace.operations.restore.records import DONE, LOADING, read_record, restores_path, write_record
from millrace.runtime.launch.folder import RunFolder
from millrace.runtime.launch.launcher import RETAINED_RUNS, Launcher
from millrace.runtime.progress import Progress

DAY = 86_400.0
NOW = time.time()


def write(path: Path, *, days: float, text: str = "x" * 100) -> Path:
    """A file that was last written so many days ago."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    aged(path, days)
    return path


def aged(path: Path, days: float) -> None:
    os.utime(path, (NOW - days * DAY, NOW - days * DAY), follow_symlinks=False)


def trim(settings: Settings, *areas: str, dry_run: bool = False) -> HousekeepingReport:
    params = HousekeepingParams.parse({"areas": areas or ALL_AREAS, "dry_run": dry_run})
    return run(settings, params, Progress())


def ended_run(settings: Settings, run_id: str, *, days: float) -> RunFolder:
    """The folder of a run that has ended so many days ago."""
    folder = RunFolder(settings, run_id)
    at = NOW - days * DAY
    asked = {"run_id": run_id, "job": "compaction", "attempt": 1, "at": at, "params": {}}
    replace_json(folder.params, asked)
    replace_json(folder.result, {"ok": True, "report": {}})
    aged(folder.result, days)
    return folder


def test_every_area_has_a_setting_and_a_trim() -> None:
    assert set(AREAS) == set(RETENTION) == set(ALL_AREAS)
    kept = Settings(airflow_retention_days=1, run_retention_days=2, quality_retention_days=3, tables="s3://box/t")
    assert {each(kept) for each in RETENTION.values()} == {1, 2, 3}


def test_old_files_go_with_the_folders_that_they_leave_empty_and_newer_ones_stay(tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    old = write(logs / "dag_id=checkpoint" / "run_id=1" / "task_id=t" / "attempt=1.log", days=40)
    new = write(logs / "dag_id=checkpoint" / "run_id=2" / "task_id=t" / "attempt=1.log", days=2)
    for folder in (old.parent, old.parent.parent):
        aged(folder, 40)
    (logs / "begun").mkdir()  # somebody is about to write there
    assert (remove_old_files(logs, before=NOW - 30 * DAY, dry_run=True).files, old.exists()) == (1, True)
    found = remove_old_files(logs, before=NOW - 30 * DAY)
    assert (found.files, found.bytes) == (1, 100)
    assert not old.parent.parent.exists()
    assert new.exists()
    assert (logs / "begun").is_dir()


def test_no_link_leads_out_of_the_folder(tmp_path: Path) -> None:
    """The removal neither follows a link to a folder or a file, nor begins at one."""
    outside = write(tmp_path / "outside" / "precious", days=400)
    logs = tmp_path / "logs"
    logs.mkdir()
    (logs / "folder").symlink_to(outside.parent)
    (logs / "file").symlink_to(outside)
    for name in ("folder", "file"):
        aged(logs / name, 400)
    assert remove_old_files(logs, before=NOW).files == 0
    assert (logs / "folder").is_symlink()
    assert outside.exists()
    with pytest.raises(OSError, match=r"[Nn]ot a directory|symbolic"):
        remove_old_files(logs / "folder", before=NOW)
    assert outside.exists()


def test_airflows_logs_are_trimmed_in_its_own_home_only(settings: Settings) -> None:
    old = write(settings.data_dir / "airflow" / "logs" / "dag_id=a" / "attempt=1.log", days=31)
    secret = write(settings.data_dir / "airflow" / "secrets.json", days=400)
    report = trim(settings, "airflow_logs")
    assert not old.exists()
    assert secret.exists()
    (area,) = report.areas
    assert (area.files, area.freed_bytes, area.retention_days) == (1, 100, 30)
    assert report.sentence == "0 rows and 1 file were removed, 0.0 MiB."


def test_a_retention_of_zero_keeps_everything(settings: Settings) -> None:
    old = write(settings.data_dir / "airflow" / "logs" / "attempt=1.log", days=3000)
    report = trim(replace(settings, airflow_retention_days=0), "airflow_logs")
    assert old.exists()
    assert report.sentence == "Nothing is older than its retention."


def test_run_folders_are_kept_for_their_days_and_by_number(settings: Settings) -> None:
    ended_run(settings, "old", days=31)
    ended_run(settings, "new", days=29)
    assert [each.files for each in trim(settings, "runs", dry_run=True).areas] == [1]
    assert [each.files for each in trim(settings, "runs").areas] == [1]
    assert [each.run_id for each in Launcher(settings).runs()] == ["new"]
    for number in range(RETAINED_RUNS + 5):
        ended_run(settings, f"run-{number}", days=number / 1000)
    trim(replace(settings, run_retention_days=0), "runs")  # no limit of age
    assert len(Launcher(settings).runs()) == RETAINED_RUNS


def test_a_run_whose_job_lives_keeps_its_folder(settings: Settings) -> None:
    folder = ended_run(settings, "stuck", days=400)
    held = folder.try_lock()
    assert held is not None
    try:
        assert [each.files for each in trim(settings, "runs").areas] == [0]
    finally:
        os.close(held)
    assert [each.files for each in trim(settings, "runs").areas] == [1]


def test_reports_of_a_node_go_when_it_has_left_and_never_its_lock_while_it_runs(settings: Settings) -> None:
    """A running node's lock file is as old as the node: without it a second node could take the name."""
    lock = write(settings.run_path / "nodes" / "a" / "node.lock", days=90)
    write(settings.run_path / "nodes" / "a" / "flusher.json", days=90)
    with exclusive_lock(lock, deadline=Deadline.after(0)):
        aged(lock, 90)
        assert [each.files for each in trim(settings, "reports").areas] == [0]
        assert lock.exists()
    write(settings.run_path / "nodes" / "b" / "node.lock", days=90)
    write(settings.run_path / "nodes" / "b" / "flusher.json", days=1)  # it stopped yesterday
    assert [each.files for each in trim(settings, "reports").areas] == [2]
    assert sorted(path.name for path in (settings.run_path / "nodes").iterdir()) == ["b"]


def test_the_record_of_an_unfinished_restore_stays(settings: Settings) -> None:
    for name, state in (("done", DONE), ("half", LOADING), ("new", DONE)):
        write_record(settings, name, {"state": state, "collection": "c"})
    for path in restores_path(settings).iterdir():
        aged(path, 1 if path.stem == "new" else 60)
    assert [each.files for each in trim(settings, "restores").areas] == [1]
    assert trim(settings, "restores").kept == {"unfinished restores": 1}
    assert (read_record(settings, "done"), read_record(settings, "half")["state"]) == ({}, LOADING)
    assert read_record(settings, "new")["state"] == DONE


def test_a_backup_at_work_keeps_its_files(settings: Settings) -> None:
    write_record(settings, "done", {"state": DONE})
    aged(next(restores_path(settings).iterdir()), 60)
    with removals_blocked(settings, deadline=1.0):
        (area,) = trim(settings, "restores").areas
    assert (area.files, area.words) == (0, "a backup copies them now; the next run trims them")


def test_old_results_of_checks_go_and_the_state_stays(settings: Settings) -> None:
    """A block is the work of a person, however old it is."""
    check = Check("c", "expect_something", {}, "something holds")
    table = TableCheckResult("wal", {"dml_0": TickRange(0, 7)}, (CheckResult(check, False, unexpected=3),))
    good = TableCheckResult("segments", {"dml_0": TickRange(0, 9)}, (CheckResult(check, True),) * 4)
    record_run(settings, "20260101T000000Z-aaaaaa", [table], at=NOW - 90 * DAY)
    record_run(settings, "20260102T000000Z-aaaaaa", [good], at=NOW - 2 * DAY)
    before = read_state(settings)
    assert [each.rows for each in trim(settings, "quality", dry_run=True).areas] == [1]
    assert [each.rows for each in trim(settings, "quality").areas] == [1]
    assert [each.rows for each in trim(settings, "quality").areas] == [0]
    assert set(read_results(settings)["run_id"].to_pylist()) == {"20260102T000000Z-aaaaaa"}
    assert read_state(settings) == before
    assert len(before.blocks) == 1
    assert trim(settings, "quality").kept == {"quality blocks": 1}


def test_results_in_one_file_are_separated_by_their_age(settings: Settings) -> None:
    """Runs are compacted into one file: the old rows leave it, the others stay as they are."""
    check = Check("c", "expect_something", {}, "something holds")
    for number in range(32):  # the 32nd compacts
        result = TableCheckResult("segments", {"dml_0": TickRange(0, number + 1)}, (CheckResult(check, True),))
        record_run(settings, f"run-{number}", [result], at=NOW - (40.5 - number) * DAY)
    assert [each.rows for each in trim(settings, "quality").areas] == [11]
    assert set(read_results(settings)["run_id"].to_pylist()) == {f"run-{number}" for number in range(11, 32)}


def test_pages_of_old_runs_go_and_the_newest_run_stays(settings: Settings) -> None:
    def page(moment: float) -> Path:
        name = datetime.fromtimestamp(moment, UTC).strftime("%Y%m%dT%H%M%SZ") + "-abcdef"
        return write(Path(docs_uri(settings)) / "validations" / "wal" / name / "x" / "p.html", days=0)

    old, newest = page(NOW - 60 * DAY), page(NOW - 40 * DAY)
    assert [each.files for each in trim(settings, "quality", dry_run=True).areas] == [1]
    assert [each.files for each in trim(settings, "quality").areas] == [1]
    assert not old.exists()
    assert newest.exists()


def test_two_runs_do_not_work_side_by_side(settings: Settings) -> None:
    settings.run_path.mkdir(parents=True)
    with (
        exclusive_lock(settings.run_path / LOCK, deadline=Deadline.after(0)),
        pytest.raises(DeadlineExceeded, match="another run of housekeeping"),
    ):
        trim(settings)
    assert trim(settings).areas[0].words == "Airflow has not run here"


def test_an_unknown_area_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="airflow_database"):
        HousekeepingParams.parse({"areas": ["wal"]})


def test_the_report_is_plain_data(settings: Settings) -> None:
    found = trim(settings).to_json()
    assert json.loads(json.dumps(found))["summary"] == "Nothing is older than its retention."
    assert [each["area"] for each in found["areas"]] == list(ALL_AREAS)
