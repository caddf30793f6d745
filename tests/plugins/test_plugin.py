"""What Airflow finds in plugins/: one plugin, light to load, whose pages ask for a login."""

from __future__ import annotations

from pathlib import Path

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from millrace.base.settings import Settings
from millrace_airflow.job_logs import make_app
from tests.airflow_home import ROOT
from tests.airflow_loads import airflow_loads


def test_airflow_loads_one_plugin_without_anything_heavy() -> None:
    found = airflow_loads()["plugin"]
    assert "error" not in found, found["error"]
    assert found["errors"] == {}
    assert found["names"].count("millrace") == 1
    loaded = set(found["modules"])
    assert not loaded & {"pyspark", "delta", "deltalake", "great_expectations", "pyarrow", "duckdb"}
    assert "operators" not in loaded, "a module of the package was loaded as a plugin of its own"


@pytest.fixture
def app(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> FastAPI:
    for name, value in settings.environment().items():
        monkeypatch.setenv(name, value)
    run = settings.run_path / "operations" / "one"
    run.mkdir(parents=True)
    (run / "log").write_text("first\nlast\n")
    return make_app()


def test_the_log_of_a_job_is_shown_to_readers_alone(app: FastAPI) -> None:
    from millrace_airflow.ui.access import require_reader

    client = TestClient(app, raise_server_exceptions=False)
    assert client.get("/one/log").status_code in {401, 403}
    app.dependency_overrides[require_reader] = lambda: None
    assert client.get("/one/log").text == "first\nlast\n"
    assert client.get("/one/log?lines=1").text == "last\n"
    assert client.get("/two/log").status_code == 404
    assert client.get("/..%2Fone/log").status_code == 404


def test_the_package_is_not_read_as_plugins_of_its_own() -> None:
    assert "millrace_airflow/" in Path(ROOT / "plugins" / ".airflowignore").read_text()
