"""A flow with a schedule under Airflow: a run of its DAG moves what the source has, and ends with the counts."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from millrace.testing import deployment
from tests.airflow_home import ROOT
from tests.dags import conftest
from tests.dags.conftest import RunDag
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
