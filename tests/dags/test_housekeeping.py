"""A month of runs in Airflow's database: after housekeeping its rows and files are bounded.

Rows are written into the tables directly, 430 runs a day with their tasks, as the schedules of the DAGs make them.
"""

from __future__ import annotations

import json
import os
import sqlite3
import uuid
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from millrace.base.settings import Settings
from millrace.operations.housekeeping.declaration import HousekeepingParams
from millrace.operations.housekeeping.run import AreaReport, run
from millrace.runtime.progress import Progress
from tests.dags.conftest import RunDag

RUNS_A_DAY = {"checkpoint": 288, "quality": 48, "recovery": 48, "compaction": 24, "streaming": 24}
DAYS = 60
"""Two months: one to keep, one to remove."""


@pytest.fixture
def month(settings: Settings, airflow: Path) -> Settings:
    """A data folder whose Airflow has run for two months."""
    home = settings.data_dir / "airflow"
    (home / "logs").mkdir(parents=True)
    database = sqlite3.connect(home / "airflow.db")
    with closing(sqlite3.connect(airflow / "airflow.db")) as source, closing(database), database:
        source.backup(database)
        write_months(database, home / "logs")
    return settings


def write_months(database: sqlite3.Connection, logs: Path) -> None:
    """Write the runs of DAYS days up to now, each with a task instance, a job and an event; a tenth has logs."""
    now = datetime.now(UTC)
    database.execute("PRAGMA foreign_keys = ON")
    bundle = database.execute("select name from dag_bundle").fetchone()
    if bundle is None:
        database.execute("insert into dag_bundle (name, active) values ('dags-folder', 1)")
    runs = database.execute("select coalesce(max(id), 0) from dag_run").fetchone()[0]
    for dag_id, a_day in RUNS_A_DAY.items():
        version = uuid.uuid4().hex
        insert(
            database,
            "dag",
            {
                "dag_id": dag_id,
                "is_paused": 0,
                "is_stale": 0,
                "bundle_name": "dags-folder",
                "last_parsed_time": text(now),
            },
        )
        insert(
            database,
            "dag_version",
            {
                "id": version,
                "dag_id": dag_id,
                "version_number": 1,
                "bundle_name": "dags-folder",
                "created_at": text(now),
                "last_updated": text(now),
            },
        )
        for number in range(a_day * DAYS):
            runs += 1
            begin = now - timedelta(days=number / a_day)
            run_id = f"scheduled__{begin.isoformat()}"
            ended = number > 0
            insert(
                database,
                "dag_run",
                {
                    "id": runs,
                    "dag_id": dag_id,
                    "run_id": run_id,
                    "state": "success" if ended else "running",
                    "run_type": "scheduled",
                    "start_date": text(begin),
                    "end_date": text(begin),
                    "run_after": text(begin),
                    "logical_date": text(begin),
                    "created_dag_version_id": version,
                    "log_template_id": 1,
                },
            )
            insert(
                database,
                "task_instance",
                {
                    "id": uuid.uuid4().hex,
                    "task_id": dag_id,
                    "dag_id": dag_id,
                    "run_id": run_id,
                    "map_index": -1,
                    "state": "success" if ended else "running",
                    "start_date": text(begin),
                    "end_date": text(begin),
                    "try_number": 1,
                    "max_tries": 3,
                    "pool": "default_pool",
                    "dag_version_id": version,
                },
            )
            insert(
                database,
                "job",
                {
                    "dag_id": dag_id,
                    "state": "success",
                    "job_type": "LocalTaskJob",
                    "latest_heartbeat": text(begin),
                    "start_date": text(begin),
                },
            )
            insert(database, "log", {"dttm": text(begin), "dag_id": dag_id, "event": "success", "run_id": run_id})
            if number % 10 == 0:
                path = logs / f"dag_id={dag_id}" / f"run_id={run_id}" / f"task_id={dag_id}" / "attempt=1.log"
                path.parent.mkdir(parents=True)
                path.write_text("a line of a log\n" * 60)
                for each in (path, path.parent, path.parent.parent):
                    os.utime(each, (begin.timestamp(), begin.timestamp()))
    old = text(now - timedelta(days=50))
    insert(database, "trigger", {"classpath": "a.Watcher", "kwargs": "{}", "created_date": old})


_COLUMNS: dict[str, list[tuple[str, bool, str]]] = {}


def insert(database: sqlite3.Connection, table: str, values: dict[str, object]) -> None:
    """Insert a row; columns that must have a value and have no default get an empty one."""
    if table not in _COLUMNS:
        info = database.execute(f"PRAGMA table_info({table})").fetchall()
        _COLUMNS[table] = [
            (name, bool(notnull) and default is None and not key, kind) for _, name, kind, notnull, default, key in info
        ]
    for name, needed, kind in _COLUMNS[table]:
        if needed and name not in values:
            values[name] = 0 if any(part in kind.upper() for part in ("INT", "BOOL", "FLOAT")) else ""
    names = ", ".join(f'"{name}"' for name in values)
    marks = ", ".join("?" * len(values))
    database.execute(f"insert into {table} ({names}) values ({marks})", list(values.values()))


def text(moment: datetime) -> str:
    """A moment as SQLAlchemy writes it into SQLite."""
    return moment.strftime("%Y-%m-%d %H:%M:%S.%f")


def counted(settings: Settings, table: str, where: str = "1") -> int:
    with closing(sqlite3.connect(settings.data_dir / "airflow" / "airflow.db")) as database:
        return int(database.execute(f"select count(*) from {table} where {where}").fetchone()[0])


def housekeeping(settings: Settings, **params: object) -> dict[str, AreaReport]:
    report = run(settings, HousekeepingParams.parse(params), Progress())
    return {each.area: each for each in report.areas}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_after_two_months_the_rows_and_files_are_those_of_one(month: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AIRFLOW__DATABASE__SQL_ALCHEMY_CONN", raising=False)
    runs = sum(RUNS_A_DAY.values())
    assert counted(month, "dag_run") == runs * DAYS
    size = (month.data_dir / "airflow" / "airflow.db").stat().st_size
    with closing(sqlite3.connect(month.data_dir / "airflow" / "airflow.db")) as database, database:
        # A run of recovery waits for a person since the first day: its DAG keeps its history until then.
        database.execute(
            "update dag_run set state = 'running' where dag_id = 'recovery' and id = "
            "(select id from dag_run where dag_id = 'recovery' order by start_date limit 1)"
        )
    dry = housekeeping(month, dry_run=True, areas=["airflow_database", "airflow_logs"])
    assert counted(month, "dag_run") == runs * DAYS
    done = housekeeping(month, areas=["airflow_database", "airflow_logs"])
    print(json.dumps({name: each.model_dump() for name, each in done.items()}, indent=1), size)
    left = runs * 30 + RUNS_A_DAY["recovery"] * 30
    assert abs(counted(month, "dag_run") - left) <= len(RUNS_A_DAY)
    assert abs(counted(month, "task_instance") - left) <= len(RUNS_A_DAY)
    assert abs(counted(month, "job") - left) <= len(RUNS_A_DAY)
    assert counted(month, "dag_run", "dag_id = 'recovery'") == RUNS_A_DAY["recovery"] * DAYS
    assert counted(month, "dag") == len(RUNS_A_DAY)
    assert counted(month, "trigger") == 1  # the watcher of an asset is as old as the installation
    assert counted(month, "sqlite_master", "name like '_airflow_deleted%'") == 0
    database_area = done["airflow_database"]
    assert database_area.words == "the runs of recovery stay: one of them has not ended for so long"
    assert database_area.details["dag_run"] == runs * DAYS - counted(month, "dag_run")
    assert dry["airflow_database"].details["dag_run"] == database_area.details["dag_run"]
    files = sum(len(names) for _, _, names in os.walk(month.data_dir / "airflow" / "logs"))
    assert done["airflow_logs"].files == dry["airflow_logs"].files
    assert abs(files - runs * DAYS / 20) < 10
    again = housekeeping(month, areas=["airflow_database", "airflow_logs"])
    assert sum(each.rows for each in again.values()) <= 20  # those of the minute between
    assert again["airflow_logs"].files <= 1


@pytest.mark.slow
def test_the_dag_trims_and_reports(run_dag: RunDag, settings: Settings) -> None:
    (settings.data_dir / "airflow" / "logs").mkdir(parents=True)
    ran = run_dag("housekeeping")
    assert ran.state == "success"
    assert ran.results["trim"]["summary"] == "Nothing is older than its retention."
    assert ran.results["trim"]["areas"][0]["words"].startswith("no database at")
