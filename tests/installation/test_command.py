"""``millrace system`` on a data folder where nothing runs: it says so, starts nothing, and leaves nothing behind."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import pytest
from typer.testing import CliRunner, Result

from millrace.base.settings import Settings
from millrace.commands.main import app
from millrace.commands.system import _lines
from millrace.installation import status
from millrace.installation.status import InstallationStatus
from millrace.installation.system import Installation
from millrace.observe.health import make_finding
from millrace.observe.observer import Observer


def system(data: Path, *arguments: str) -> Result:
    return CliRunner().invoke(app, ["system", *arguments, "--data", str(data)])


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


def test_down_where_nothing_runs_is_no_error_and_makes_no_folder(tmp_path: Path) -> None:
    found = system(tmp_path / "data", "down")
    assert found.exit_code == 0, found.output
    assert "Nothing of" in found.output
    assert not (tmp_path / "data").exists()


def test_status_where_nothing_runs_says_how_to_start_it(tmp_path: Path) -> None:
    found = system(tmp_path / "data", "status")
    assert found.exit_code == 3
    assert "make up" in found.output
    as_json = system(tmp_path / "data", "status", "--json")
    assert as_json.exit_code == 3
    assert not json.loads(as_json.stdout)["healthy"]


def test_a_taken_port_is_an_error_in_one_line(tmp_path: Path, taken_port: int) -> None:
    found = system(tmp_path / "data", "up", "--detach", "--port", str(taken_port))
    assert found.exit_code == 1
    assert found.stderr.splitlines()[-1].startswith(f"INVALID_SETTINGS: port {taken_port} on 127.0.0.1 is taken")
    assert not (tmp_path / "data" / "airflow" / "installation.json").exists()


GOOD = InstallationStatus(
    at=0.0,
    data="/data",
    running=True,
    address="http://127.0.0.1:8080",
    components={"metadatabase": "healthy", "scheduler": "healthy"},
    restarts=0,
    reason="",
    streaming=True,
    state="healthy",
    words="All is well.",
    findings=(),
    rows_per_second=1234.5,
    lag_seconds=0.25,
    log_server=True,
    processes={"airflow": 13, "jobs": 10, "log": 1},
    pss_bytes={"airflow": 1 << 30, "jobs": 1 << 30, "log": 1 << 29},
)


def test_a_system_that_runs_and_is_not_well_says_so_and_where_to_go() -> None:
    stuck = replace(GOOD, findings=(make_finding("ddl_stuck", "users", "add_field is under way for 90 s"),))
    assert not stuck.healthy
    assert _lines(stuck)[-1].startswith("Critical    users: add_field is under way for 90 s (`millrace broadcasts")
    assert stuck.to_json()["findings"][0]["kind"] == "ddl_stuck"
    assert replace(GOOD, findings=(make_finding("maintenance_failed", "backup", "its newest run failed"),)).healthy


def test_a_running_system_is_put_in_five_lines() -> None:
    assert GOOD.healthy
    airflow, streaming, _, log, memory = _lines(GOOD)
    assert airflow.endswith("healthy")
    assert "1,234 rows/s, lag 0.2 s" in streaming
    assert log.endswith("running")
    assert "2.50 GiB in 24 processes" in memory


@pytest.mark.parametrize(
    "change, words",
    [
        ({"components": {"scheduler": "unhealthy"}}, "scheduler unhealthy"),
        ({"components": {}}, "does not answer"),
        ({"restarts": 2, "reason": "Airflow ended with -9"}, "started anew 2 times; Airflow ended with -9"),
        ({"streaming": False}, "not running, "),
        ({"lag_seconds": None}, "lag unknown"),
    ],
)
def test_what_is_not_well_is_said(change: dict[str, object], words: str) -> None:
    found = replace(GOOD, **change)  # type: ignore[arg-type]
    assert words in "\n".join(_lines(found))


def test_a_look_between_takes_the_processes_of_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def counted(_installation: object) -> NoReturn:
        raise AssertionError("all processes were looked at")

    monkeypatch.setattr(status, "_groups", counted)
    settings = Settings(data_dir=tmp_path / "data")
    observer = Observer(settings)
    try:
        found = status.read_status(
            Installation(settings), observer, status.ProcessUsage({"airflow": 13}, {"airflow": 1 << 30})
        )
        with pytest.raises(AssertionError, match="looked at"):
            status.read_status(Installation(settings), observer)
    finally:
        observer.close()
    assert (found.processes, found.pss_bytes) == ({"airflow": 13}, {"airflow": 1 << 30})
