"""Running Millrace's DAGs with ``dag.test()``.

A migrated metadata database, a data folder of the test's own, jobs stopped.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from millrace.base.settings import Settings
from millrace.client.database import Database, connect
from millrace.message.schema import CollectionSchema, FieldSpec
from millrace.node.flush.definition import flush_to_end
from millrace.node.ingest.definition import ingest_to_end
from millrace.runtime.launch.launcher import Launcher
from tests.airflow_home import HOME, ROOT, database


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The first test of a run pays for Airflow's imports, its database and its API server.

    A minute on a busy machine.
    """
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent) and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(300))


@pytest.fixture(scope="session")
def airflow() -> Path:
    """AIRFLOW_HOME with a metadata database, made once."""
    database()
    return HOME


@dataclass(frozen=True)
class Ran:
    """A DAG run that has ended."""

    state: str
    tasks: dict[str, str]
    """Task id (with its map index, where it has one) -> state."""
    results: dict[str, Any]
    """Task id -> what it returned; a list for a mapped task."""


RunDag = Callable[..., Ran]


FOLDERS = (ROOT / "dags", ROOT / "tests" / "dags" / "own")


def load_dag(name: str) -> Any:
    """The DAG of the file <name>.py of dags/ or tests/dags/own/, read anew."""
    path = next(folder / f"{name}.py" for folder in FOLDERS if (folder / f"{name}.py").exists())
    spec = importlib.util.spec_from_file_location(f"dags_{name.replace('/', '_')}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.dag


@pytest.fixture
def run_dag(airflow: Path, settings: Settings, monkeypatch: pytest.MonkeyPatch) -> Iterator[RunDag]:
    """Runs the DAG of a file with a run's conf, on the data folder of the test's settings.

    ``run_dag("compaction", {...})``.
    """
    for name, value in settings.environment().items():
        monkeypatch.setenv(name, value)
    # dag.test() has no scheduler that has to hear of a deferral first.
    monkeypatch.setattr("millrace_airflow.triggers.SETTLE_SECONDS", 0.0)

    def run(name: str, conf: dict[str, Any] | None = None, **arguments: Any) -> Ran:
        dag = load_dag(name)
        dag.deadline = None  # dag.test() of Airflow 3.3.2 looks for the deadline's row by its description and fails
        return run_of(dag.test(run_conf=conf or {}, **arguments))

    yield run
    launcher = Launcher(settings)
    for status in launcher.runs():
        launcher.stop(status.run_id, deadline=20.0)


def run_of(run: Any) -> Ran:
    """A DagRun of ``dag.test()`` as plain data."""
    instances = sorted(run.get_task_instances(), key=lambda ti: (ti.task_id, ti.map_index))
    tasks = {_key(ti): str(ti.state) for ti in instances}
    return Ran(str(run.state), tasks, {ti.task_id: _result(run, ti) for ti in instances})


def _key(ti: Any) -> str:
    return str(ti.task_id) if ti.map_index < 0 else f"{ti.task_id}[{ti.map_index}]"


def _result(run: Any, ti: Any) -> Any:
    from airflow.models.xcom import XComModel
    from airflow.utils.session import create_session

    with create_session() as session:
        rows = session.scalars(
            XComModel.get_many(run_id=run.run_id, dag_ids=run.dag_id, task_ids=ti.task_id, key="return_value")
        ).all()
        values = [XComModel.deserialize_value(row) for row in sorted(rows, key=lambda row: row.map_index)]
    return values if ti.map_index >= 0 else (values[0] if values else None)


@pytest.fixture
def client(settings: Settings) -> Iterator[Database]:
    """A deployment with nine flushed rows, ids 0 to 8, in collection `c` on one PChannel."""
    schema = CollectionSchema((FieldSpec("id", "int64", False),), "id")
    with connect(settings=settings) as made:
        made.catalog.ensure_pchannels(1)
        made.new_producer().insert(made.catalog.create_collection("c", schema), pa.table({"id": list(range(9))}))
        ingest_to_end(settings, made.log)
        flush_to_end(settings)
        yield made
        made.connection.service.shutdown()


assert os.environ["AIRFLOW_HOME"] == str(HOME)
