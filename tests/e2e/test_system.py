"""The whole system as its user has it.

A real Airflow, the streaming job that its DAG starts, the log; up, killed, up, down.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from millrace.base.settings import Settings
from millrace.client.database import connect
from millrace.installation.airflow_api import AirflowApi
from millrace.message.schema import CollectionSchema, FieldSpec
from tests.e2e.system import System, said

GIB = 1 << 30

pytestmark = [pytest.mark.slow, pytest.mark.system, pytest.mark.spark]


@pytest.fixture
def system(tmp_path: Path) -> Iterator[System]:
    made = System(tmp_path / "data")
    yield made
    made.installation.stop()


def status_of(url: str) -> int:
    try:
        with urllib.request.urlopen(url, timeout=20) as answer:
            return answer.status
    except urllib.error.HTTPError as error:
        return error.code


def append(settings: Settings, ids: list[int]) -> list[int]:
    """Append rows with these ids; the ids that a read gives then."""
    with connect(settings=settings) as client:
        if "users" not in [each.name for each in client.catalog.collections()]:
            client.catalog.create_collection("users", CollectionSchema((FieldSpec("id", "int64", False),), "id"))
        users = client.definition("users")
        client.new_producer().insert(users, pa.table({"id": ids}))
        return sorted(client.collection("users").read(deadline=120.0)["id"].to_pylist())


def idle(system: System, api: AirflowApi) -> dict[str, Any]:
    """The status while no scheduled operation runs.

    A new system's first ones run at once, each with a Spark of its own.
    """
    until = time.monotonic() + 300
    while True:
        before, found, after = operating(api), system.status(), operating(api)
        if not before + after:
            return found
        assert time.monotonic() < until, f"still running: {before + after}"
        time.sleep(1)  # the poll interval of a wait with a deadline


def operating(api: AirflowApi) -> list[str]:
    """The DAGs that run now, but for the one that keeps the streaming job."""
    runs = api.call("GET", "/api/v2/dags/~/dagRuns?state=running&state=queued&limit=100")["dag_runs"]
    return [each["dag_id"] for each in runs if each["dag_id"] != "streaming"]


@pytest.mark.timeout(1500)
def test_up_and_kill_9_of_everything_and_up_again_and_down(system: System) -> None:
    address, password = said(system.run("up", "--detach", "--port", "0"))
    assert status_of(f"{address}/api/v2/monitor/health") == 200
    api = AirflowApi(address, user="admin", password=password)
    api.login()
    assert api.has_dag("streaming")
    assert not api.import_errors()
    assert status_of(f"{address}/api/v2/dags") == 401

    again = system.run("up", "--detach")
    assert "runs already" in again
    assert said(again) == (address, password)

    demo = [sys.executable, "-m", "millrace.demo.running", "--rows", "3000", "--seconds", "2", "--times", "1"]
    shown = subprocess.run(demo, env=system.env, capture_output=True, text=True, timeout=300, check=False)
    assert shown.returncode == 0, shown.stdout + shown.stderr
    assert shown.stdout.count("✓") == 5
    assert f"{address}/millrace/collections/flights" in shown.stdout
    beside = subprocess.run([*demo[:2], "millrace.demo"], env=system.env, capture_output=True, text=True, check=False)
    assert "make demo" in beside.stdout  # `make run` refuses to start a second streaming job on the same data
    assert append(system.settings, [1, 2]) == [1, 2]
    found = idle(system, api)
    assert found["healthy"]
    assert 0.5 * GIB < found["total_pss_bytes"] <= 3.5 * GIB
    assert "streaming" in system.run("airflow", "dags", "list")

    system.kill_everything()
    assert not system.installation.processes()
    watching = system.popen("up", "--port", "0")  # this one stays, until another command stops it
    try:
        end = time.monotonic() + 600
        while not (system.installation.running() and system.installation.streaming_job_running()):
            assert watching.poll() is None, watching.communicate()[0]
            assert time.monotonic() < end
            time.sleep(0.5)  # the poll interval of a wait with a deadline
        assert append(system.settings, [3]) == [1, 2, 3]
        stopped = system.run("down")
        output, _ = watching.communicate(timeout=120)
    finally:
        if watching.poll() is None:
            watching.kill()
            watching.communicate()
    assert "none is left" in stopped
    assert watching.returncode == 0, output
    assert "stopped by another command" in output
    assert said(output)[1] == password
    assert not system.installation.processes()


@pytest.mark.timeout(300)
def test_ctrl_c_while_it_starts_stops_what_was_started(system: System) -> None:
    starting = system.popen("up", "--port", "0")
    end = time.monotonic() + 120
    while len(system.installation.processes()) < 6:  # the keeper, Airflow, and its components at least
        assert starting.poll() is None, starting.communicate()[0]
        assert time.monotonic() < end
        time.sleep(0.1)  # the poll interval of a wait with a deadline
    starting.send_signal(signal.SIGINT)
    output, _ = starting.communicate(timeout=120)
    assert starting.returncode == 0, output
    assert "none is left" in output
    assert not system.installation.processes()
