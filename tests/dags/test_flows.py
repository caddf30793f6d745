"""A flow with a schedule under Airflow: a run of its DAG moves what the source has, and ends with the counts."""

from __future__ import annotations

import importlib.util
import json
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from airflow.models.connection import Connection
from airflow.utils.session import create_session
from sqlalchemy import delete

from millrace.testing import deployment
from tests.airflow_home import HOME, ROOT
from tests.dags import conftest
from tests.dags.conftest import RunDag
from tests.flows.sources.sql.databases import Base
from tests.flows.test_scheduled import DECLARED

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def load(name: str) -> Any:
    """A DAG of dags/flows.py."""
    spec = importlib.util.spec_from_file_location("dags_flows", ROOT / "dags" / "flows.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return vars(module)[name]


def test_a_run_of_the_dag_ends_with_what_the_source_had(
    run_dag: RunDag, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "flows.yaml").write_text(DECLARED, encoding="utf-8")
    monkeypatch.setattr(conftest, "load_dag", load)
    monkeypatch.setenv("MILLRACE_FLOW_DECLARATIONS", str(tmp_path / "flows.yaml"))
    with deployment(tmp_path / "data", flow_declarations=str(tmp_path / "flows.yaml")) as db:
        monkeypatch.setenv("MILLRACE_DATA", str(db.settings.data_dir))
        for name, value in db.settings.environment().items():
            monkeypatch.setenv(name, value)
        source = db.create_collection("flights", {"number": "int64"}, key="number")
        source.insert([{"number": 1}])
        failed = run_dag("flow_nightly")
        assert (failed.state, failed.tasks) == ("failed", {"run": "failed"}), "there is no collection to write to"
        db.create_collection("copied", {"flight": "int64"}, key="flight")
        for count in (1, 3):
            source.insert([{"number": number} for number in range(2, count + 1)])
            ran = run_dag("flow_nightly")
            assert (ran.state, ran.results["run"]["rows_in"]) == ("success", count)
            assert db["copied"].read().num_rows == count


def test_a_capture_gets_its_password_from_an_airflow_connection_and_nothing_shows_it(
    run_dag: RunDag, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = Base(tmp_path, "mariadb")
    base.execute("create table items (id int primary key, v int)", "insert into items values (1, 1), (2, 2)")
    source = {**base.place, "kind": "query", "table": "items", "column": "id", "password": "${connection:shop_db}"}
    flow = {
        "name": "shop", "schedule": "@hourly", "source": source, "sink": {"kind": "collection", "collection": "rows"},
        "errors": {"collection": "letters", "create": True},
    }  # fmt: skip
    (tmp_path / "flows.yaml").write_text(json.dumps({"flows": [flow]}), encoding="utf-8")
    monkeypatch.setattr(conftest, "load_dag", load)
    monkeypatch.setenv("MILLRACE_FLOW_DECLARATIONS", str(tmp_path / "flows.yaml"))
    seen, stop = list[str](), threading.Event()

    def watch() -> None:
        while not stop.wait(0.05):
            for each in psutil.Process().children(recursive=True):
                with suppress(OSError, psutil.Error):
                    for place in ("cmdline", "environ"):
                        if base.password.encode() in Path(f"/proc/{each.pid}/{place}").read_bytes():
                            seen.append(f"{place} of {each.name()}")

    watcher = threading.Thread(target=watch)
    with deployment(tmp_path / "data", flow_declarations=str(tmp_path / "flows.yaml")) as db:
        monkeypatch.setenv("MILLRACE_DATA", str(db.settings.data_dir))
        for name, value in db.settings.environment().items():
            monkeypatch.setenv(name, value)
        db.create_collection("rows", {"id": "int64", "v": "int64"}, key="id")
        failed = run_dag("flow_shop")
        assert (failed.state, failed.tasks) == ("failed", {"run": "failed"}), "Airflow has no such connection yet"
        with create_session() as session:
            session.add(Connection(conn_id="shop_db", conn_type="mysql", login="me", password=base.password))
        watcher.start()
        try:
            ran = run_dag("flow_shop")
        finally:
            stop.set()
            watcher.join()
            with create_session() as session:
                session.execute(delete(Connection).where(Connection.conn_id == "shop_db"))
        assert (ran.state, ran.results["run"]["rows_in"]) == ("success", 2)
        assert db["rows"].read().num_rows == 2
        db["rows"].flush()
    assert seen == []
    files = [path for root in (tmp_path, HOME) for path in root.rglob("*") if path.is_file()]
    files = [
        path for path in files if not path.name.startswith("airflow.db")
    ]  # Airflow's own, which has the connection
    assert [str(path) for path in files if base.password.encode() in path.read_bytes()] == []
