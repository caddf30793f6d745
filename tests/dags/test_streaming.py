"""The streaming DAG with a real streaming job: it starts one, adopts it, heals it, and stops it when it is paused."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator

import pyarrow as pa
import pytest

from millrace.base.settings import Settings
from millrace.client.database import Database, connect
from millrace.message.schema import CollectionSchema, FieldSpec
from millrace.runtime.heartbeat import heartbeat_path
from millrace.runtime.launch.folder import read_json
from millrace.runtime.launch.launcher import Launcher, RunState, RunStatus, processes_of
from tests.dags.conftest import RunDag
from tests.waiting import until

RUN = "streaming-node"
SCHEMA = CollectionSchema((FieldSpec("id", "int64", False),), "id")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


@pytest.fixture
def client(settings: Settings) -> Iterator[Database]:
    with connect(settings=settings) as made:
        made.catalog.ensure_pchannels(1)
        made.catalog.create_collection("c", SCHEMA)
        yield made
        made.connection.service.shutdown()


def insert(client: Database, numbers: range) -> None:
    client.new_producer().insert(client.definition("c"), pa.table({"id": list(numbers)}))


def beats(settings: Settings, status: RunStatus) -> bool:
    """Whether this very process has said that it lives."""
    beat = read_json(heartbeat_path(settings, "millrace-streaming-node"))
    return beat is not None and beat["pid"] == status.pid


def pause(paused: bool) -> None:
    """What the button in Airflow does."""
    from airflow.models.dag import DagModel
    from airflow.utils.session import create_session

    with create_session() as session:
        model = session.get(DagModel, "streaming")
        assert model is not None
        model.is_paused = paused


def test_the_dag_starts_adopts_heals_and_stops_the_job(run_dag: RunDag, client: Database, settings: Settings) -> None:
    launcher = Launcher(settings)
    insert(client, range(100))

    # It is paused when it is created: a run starts no job.
    assert run_dag("streaming", {"watch_seconds": 5}).state == "success"
    assert launcher.runs() == []
    pause(False)

    # A first run starts the job and leaves it running.
    ran = run_dag("streaming", {"watch_seconds": 5})
    assert ran.state == "success"
    first = launcher.poll(RUN)
    assert first.active
    until(lambda: beats(settings, first), seconds=120)
    assert client.collection("c").read(deadline=60).num_rows == 100

    # While a second run watches, the job is killed: it starts a new one, and no row is lost or doubled.
    def kill() -> None:
        assert first.pid is not None
        os.kill(first.pid, signal.SIGKILL)

    killer = threading.Timer(2.0, kill)
    killer.start()
    ran = run_dag("streaming", {"watch_seconds": 20})
    killer.join()
    assert ran.results["supervise"]["restarts"] == 1
    second = launcher.poll(RUN)
    assert (second.active, second.attempt) == (True, 2)
    insert(client, range(100, 200))
    until(lambda: beats(settings, second), seconds=120)
    assert sorted(client.collection("c").read(deadline=60)["id"].to_pylist()) == list(range(200))

    # A run of the paused DAG stops it between two micro-batches.
    pause(True)
    try:
        assert run_dag("streaming", {"watch_seconds": 60}).state == "success"
    finally:
        pause(False)
    stopped = launcher.poll(RUN)
    assert stopped.state is RunState.STOPPED
    assert stopped.pid is not None
    assert processes_of(stopped.log.parent, session=stopped.pid) == []
