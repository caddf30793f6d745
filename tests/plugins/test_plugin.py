"""What Airflow finds in plugins/: one plugin, light to load, whose pages ask for a login."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from millrace.base.settings import Settings
from millrace_airflow.job_logs import make_app
from tests.airflow_home import ROOT

LOADED = """
import sys
from airflow import plugins_manager
from airflow.plugins_manager import get_plugin_info
found = [each for each in get_plugin_info() if each["name"] == "millrace"]
assert len(found) == 1, found
assert not plugins_manager.get_import_errors(), plugins_manager.get_import_errors()
heavy = {"pyspark", "delta", "deltalake", "great_expectations", "pyarrow", "duckdb"} & {n.split(".")[0] for n in sys.modules}
assert not heavy, heavy
assert "operators" not in sys.modules, "a module of the package was loaded as a plugin of its own"
"""


def test_airflow_loads_one_plugin_without_anything_heavy() -> None:
    paths = os.pathsep.join((str(ROOT / "include"), str(ROOT / "plugins")))
    done = subprocess.run(
        [sys.executable, "-c", LOADED],
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
        env=os.environ | {"PYTHONPATH": paths},
    )
    assert done.returncode == 0, done.stderr


@pytest.fixture
def app(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> FastAPI:
    for name, value in settings.environment().items():
        monkeypatch.setenv(name, value)
    run = settings.run_path / "operations" / "one"
    run.mkdir(parents=True)
    (run / "log").write_text("first\nlast\n")
    return make_app()


def test_the_log_of_a_job_is_shown_to_readers_alone(app: FastAPI) -> None:
    from millrace_airflow.ui.access import reader

    client = TestClient(app, raise_server_exceptions=False)
    assert client.get("/one/log").status_code in {401, 403}
    app.dependency_overrides[reader] = lambda: None
    assert client.get("/one/log").text == "first\nlast\n"
    assert client.get("/one/log?lines=1").text == "last\n"
    assert client.get("/two/log").status_code == 404
    assert client.get("/..%2Fone/log").status_code == 404


def test_the_package_is_not_read_as_plugins_of_its_own() -> None:
    assert "millrace_airflow/" in Path(ROOT / "plugins" / ".airflowignore").read_text()
