"""A pipeline that Airflow keeps (`deployment: airflow`), from its declaration to its end, in a running system.

Its DAG appears, its worker on Spark moves documents, what is killed comes again, and who stops it stops it.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from opensearchpy import OpenSearch

from millrace.base.process import all_processes
from millrace.flows.range_host.observed import dag_id, run_id
from millrace.installation.system import STREAMING_DAG
from millrace.runtime.launch.launcher import Launcher, RunStatus
from tests.e2e.system import Airflow, System, kill, until
from tests.flows.range_host.flights import Flights

pytestmark = [pytest.mark.slow, pytest.mark.system, pytest.mark.timeout(1800)]


@pytest.fixture
def calls(airflow: Airflow) -> Iterator[httpx.Client]:
    """The calls of the management of pipelines, in Airflow's web server, as its admin.

    Making one waits for Kafka and OpenSearch.
    """
    with httpx.Client(base_url=airflow.address, timeout=240.0, trust_env=False) as client:
        login = {"username": "admin", "password": airflow.password}
        token = client.post("/auth/token", json=login).raise_for_status().json()["access_token"]
        client.base_url = httpx.URL(f"{airflow.address}/millrace/api/v1/pipelines/")
        client.headers["Authorization"] = f"Bearer {token}"
        yield client


def _told(answer: httpx.Response) -> dict[str, Any]:
    assert answer.is_success, answer.text
    found: dict[str, Any] = answer.json()
    return found


@pytest.fixture
def flights(system: System, airflow: Airflow, calls: httpx.Client) -> Iterator[Flights]:
    """A topic, an index, and a pipeline of Airflow's between them that runs.

    The streaming job stands still meanwhile.
    """
    airflow.api.set_paused(STREAMING_DAG, True)
    made = Flights(system.settings.data_dir.parent, deployment="airflow")
    assert _told(calls.put(made.id, json=made.declared))["phase"] == "READY"
    yield made
    calls.put(f"{made.id}/stop")


def _worker(system: System, flights: Flights, *, behind: int = 0) -> RunStatus | None:
    found = [each for each in Launcher(system.settings).runs() if each.run_id == run_id(flights.id)]
    return found[0] if found and found[0].active and found[0].pid and found[0].attempt > behind else None


def _until_in_the_index(flights: Flights, count: int) -> None:
    client = OpenSearch(flights.opensearch.url, timeout=60)

    def there() -> bool:
        if not client.indices.exists(index=flights.id):
            return False
        client.indices.refresh(index=flights.id)
        return bool(client.count(index=flights.id)["count"] == count)

    until(there, seconds=400, what=f"{count} documents are in the index")


def test_a_pipeline_lives_under_airflow(
    system: System, airflow: Airflow, calls: httpx.Client, flights: Flights
) -> None:
    dag = dag_id(flights.id)
    until(lambda: airflow.api.has_dag(dag), seconds=300, what="its DAG appears")
    flights.send((f"k{number}", {"flight": number}) for number in range(300))

    # It moves documents once it is asked to, and says so everywhere.
    _told(calls.put(f"{flights.id}/resume"))
    _until_in_the_index(flights, 300)
    first = until(lambda: _worker(system, flights), seconds=60, what="its worker runs")
    assert first.job == "pipeline"

    def told() -> dict[str, Any] | None:
        found = _told(calls.get(f"{flights.id}/status"))
        return found if sum(each["records_out"] for each in found["tasks"]) == 300 else None

    status = until(told, seconds=120, what="the API tells of all documents")
    assert (status["state"], {each["lag"] for each in status["tasks"]}) == ("RUNNING", {0})
    assert "RUNNING" in system.millrace("flows", "service", "status", flights.id)
    page = calls.get(f"{airflow.address}/millrace/pipelines/{flights.id}", headers={"Accept": "text/html"})
    assert (page.status_code, flights.id in page.text) == (200, True)
    assert httpx.get(str(page.url), headers={"Accept": "text/html"}, trust_env=False, timeout=60).status_code == 401

    # Its worker is killed: the DAG's task starts the next one, which goes on where that was.
    os.kill(first.pid or 0, signal.SIGKILL)
    flights.send((f"k{number}", {"flight": number}) for number in range(300, 600))
    second = until(lambda: _worker(system, flights, behind=first.attempt), seconds=400, what="its worker is back")
    _until_in_the_index(flights, 600)

    # The process of the task is killed: the worker works on, and the task's next try watches it.
    (run,) = [each for each in airflow.runs(dag) if each["state"] == "running"]
    (task,) = airflow.tasks(dag, run["dag_run_id"])
    everything = all_processes()
    kill([everything[everything[task["pid"]].parent], everything[task["pid"]]])
    flights.send((f"k{number}", {"flight": number}) for number in range(600, 700))
    _until_in_the_index(flights, 700)

    def watched_again() -> bool:
        now = airflow.tasks(dag, run["dag_run_id"])[0]
        return now["try_number"] > task["try_number"] and now["state"] == "running"

    until(watched_again, seconds=400, what="another process of the task watches it")
    now = until(lambda: _worker(system, flights), seconds=60, what="its worker runs")
    assert (now.pid, now.attempt) == (second.pid, second.attempt), "it was adopted, not started again"

    # Who stops it stops its worker, which nobody starts again; it is deleted, and so is its DAG.
    _told(calls.put(f"{flights.id}/stop"))
    assert _told(calls.get(f"{flights.id}/status"))["state"] == "STOPPED"
    flights.send([("late", {"flight": 1})])
    time.sleep(15)  # three looks of the task
    assert _worker(system, flights) is None
    assert len(flights.index()) == 700
    assert not airflow.api.import_errors()
