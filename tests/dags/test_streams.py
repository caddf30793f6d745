"""A declared stream under Airflow.

Its DAG starts the job, adopts it, stops it when it is paused; windows come out as by DuckDB.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

from millrace.base.settings import Settings
from millrace.demo.streams import HOURLY
from millrace.flows.declare.discovery import declared_flow
from millrace.flows.spark_host.incarnations import Incarnations
from millrace.flows.spark_host.status import run_id, status
from millrace.runtime.launch.launcher import Launcher, RunState
from millrace.testing import deployment
from tests.airflow_home import ROOT
from tests.dags import conftest
from tests.dags.conftest import RunDag
from tests.flows.spark_host.test_running import FLIGHTS, by_duckdb, flights, rows_of
from tests.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


def load(name: str) -> Any:
    """A DAG of dags/streams.py."""
    spec = importlib.util.spec_from_file_location("dags_streams", ROOT / "dags" / "streams.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return vars(module)[name]


def test_a_windowed_stream_runs_under_its_dag(
    run_dag: RunDag, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conftest, "load_dag", load)
    with deployment(settings.data_dir, spark_cores=2) as db:
        source = db.create_collection("flights", FLIGHTS, key="id", vchannels=2)
        db.create_collection("flights_by_hour", HOURLY, key=("origin", "hour"))
        source.insert(flights(0, 200))
        db.settle()
        launcher, run = Launcher(settings), run_id("flights_hourly")
        # A DAG is paused when it is made, and a run of it starts no job: pausing one is to stop its job.
        assert run_dag("stream_flights_hourly", {"watch_seconds": 5}).state == "success"
        assert launcher.runs() == []
        _pause("stream_flights_hourly", paused=False)
        ran = run_dag("stream_flights_hourly", {"watch_seconds": 5})
        assert ran.state == "success"
        first = launcher.poll(run)
        assert first.active
        wanted = by_duckdb(source.read())
        until(lambda: rows_of(db, "flights_by_hour") == wanted, "the answers as DuckDB has them", seconds=120)
        source.insert(flights(200, 50))
        ran = run_dag("stream_flights_hourly", {"watch_seconds": 5})
        assert launcher.poll(run).pid == first.pid, "it is adopted"
        wanted = by_duckdb(source.read())
        until(lambda: rows_of(db, "flights_by_hour") == wanted, "the answers as DuckDB has them", seconds=60)
        stream = declared_flow(settings, "flights_hourly")
        assert status(settings, stream).state == "running"
        Incarnations(settings, "flights_hourly").pause(paused=True)
        launcher.stop(run)
        assert status(settings, stream).state == "paused"
        assert run_dag("stream_flights_hourly", {"watch_seconds": 5}).state == "success"
        assert launcher.poll(run).state is RunState.STOPPED, "nobody starts it"


def _pause(dag_id: str, *, paused: bool) -> None:
    from airflow.models.dag import DagModel
    from airflow.utils.session import create_session

    with create_session() as session:
        model = session.get(DagModel, dag_id)
        assert model is not None
        model.is_paused = paused
