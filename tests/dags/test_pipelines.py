"""The DAG of a pipeline on real servers.

Its task starts the worker on Spark, which moves documents; a killed one is started again.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from millrace.access.grants import LOCAL_ADMIN
from millrace.base.settings import Settings
from millrace.flows.range_host.observed import run_id
from millrace.pipelines.api.management import Management
from millrace.pipelines.store.store import open_pipelines
from millrace.runtime.launch.launcher import Launcher
from millrace_airflow.pipelines import pipeline_dags
from tests.dags.conftest import RunDag, run_of
from tests.flows.range_host.flights import Flights

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def test_a_pipeline_is_kept_by_its_dag(run_dag: RunDag, settings: Settings, tmp_path: Path) -> None:
    settings = replace(settings, spark_memory="700m")
    flights = Flights(tmp_path, deployment="airflow")
    launcher = Launcher(settings)
    name = run_id(flights.id)
    flights.send((f"k{number}", {"flight": number}) for number in range(100))
    with open_pipelines(settings, env={}) as store:
        management = Management(settings, store)
        management.create(LOCAL_ADMIN, flights.id, flights.declared)
        management.resume(LOCAL_ADMIN, flights.id)
        management.tend()
        assert not management.deployment.running(flights.id), "its DAG starts it, nobody else"

        def documents(count: int) -> None:
            end = time.monotonic() + 200
            while (
                sum(each.records_out for each in management.status(flights.id).tasks) < count and time.monotonic() < end
            ):
                time.sleep(0.1)  # the poll interval of a wait with a deadline

        def meanwhile() -> None:
            documents(100)
            pid = launcher.poll(name).pid
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
            flights.send((f"k{number}", {"flight": number}) for number in range(100, 200))
            documents(200)
            management.stop(LOCAL_ADMIN, flights.id)

        somebody = threading.Thread(target=meanwhile)
        somebody.start()
        (dag,) = pipeline_dags(settings).values()
        dag.deadline = None  # as in run_dag
        dag.get_task("supervise").watch_for = 240
        ran = run_of(dag.test())
        somebody.join()
        assert ran.state == "success"
        assert ran.results["supervise"]["restarts"] == 1
        assert management.status(flights.id).state == "STOPPED"
        assert launcher.poll(name).attempt == 2
        assert {key: value["flight"] for key, value in flights.index().items()} == {f"k{n}": n for n in range(200)}
