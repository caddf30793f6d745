"""Everything is behind Airflow's login.

Viewers read, runs need the permission to trigger; metrics take a token of their own.
"""

from __future__ import annotations

import re
from typing import Any

import pytest

from millrace.coord import control
from millrace.meta.store import MetaStore
from tests.airflow_home import ROOT
from tests.plugins.ui.conftest import Site

SAMPLES = {
    "name": "users",
    "message_id": "0:1:0:0",
    "pchannel": "dml_0",
    "pipeline": "flights",
    "run": "1",
    "dag": "checkpoint",
}


def _paths(site: Site) -> list[str]:
    """What can be looked at."""
    routes = [route for route in site.app.routes if "GET" in getattr(route, "methods", ("GET",))]
    found = [route.path.replace("{path:path}", "index.html").format(**SAMPLES).lstrip("/") for route in routes]
    return [path for path in found if not path.startswith("static/")]


@pytest.mark.parametrize(("role", "status"), [(None, 401), ("stranger", 403)])
def test_no_route_answers_who_may_not_read(site: Site, role: str | None, status: int) -> None:
    paths = _paths(site)
    assert len(paths) > 25
    for path in paths:
        answer = site.get(path, role=role)
        assert answer.status_code == status, f"{path}: {answer.status_code}"
        assert answer.json()["error"]["code"] in {"UNAUTHORIZED", "FORBIDDEN"}, path


def test_who_sees_the_website_but_not_the_dag_reads_nothing(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in an auth manager whose permissions are finer than roles."""
    from airflow.api_fastapi.auth.managers.simple.simple_auth_manager import SimpleAuthManager

    real = SimpleAuthManager.is_authorized_dag

    def refused(self: SimpleAuthManager, **asked: Any) -> bool:
        details = asked.get("details")
        return not (details and details.id == "streaming") and bool(real(self, **asked))

    monkeypatch.setattr(SimpleAuthManager, "is_authorized_dag", refused)
    for path in _paths(site):
        answer = site.get(path, role="viewer")
        assert answer.status_code == 403, f"{path}: {answer.status_code}"


def test_a_browser_without_login_gets_a_page_that_leads_to_it_and_back(site: Site) -> None:
    answer = site.get("rejections", role=None, html=True, pchannel="dml_0")
    assert answer.status_code == 401
    assert 'href="/auth/login?next=%2Fmillrace%2Frejections%3Fpchannel%3Ddml_0"' in answer.text
    assert "<nav" not in answer.text
    assert "dml_1" not in answer.text


def test_the_page_without_a_login_has_its_style_and_script(site: Site) -> None:
    page = site.get("", role=None, html=True).text
    named = re.findall(r"(?:src|href)=\"(/millrace/static/[^\"]+)\"", page)
    assert len(named) >= 4
    for path in named:
        answer = site.client.get(path)
        assert answer.status_code == 200, path
        assert answer.headers["X-Content-Type-Options"] == "nosniff"
    assert site.client.get("/millrace/static/..%2Fapi.py").status_code == 404


def test_a_jobs_log_is_text_that_no_browser_keeps_or_guesses_about(site: Site) -> None:
    from fastapi.testclient import TestClient

    from millrace_airflow.job_logs import make_app

    with TestClient(make_app(), raise_server_exceptions=False) as client:
        answer = client.get("/run/log")
    assert answer.headers["Cache-Control"] == "no-store"
    assert answer.headers["X-Content-Type-Options"] == "nosniff"
    assert "default-src 'none'" in answer.headers["Content-Security-Policy"]


def test_a_forged_token_is_refused(site: Site) -> None:
    answer = site.client.get("/millrace/api/v1/overview", headers={"Authorization": "Bearer nonsense"})
    assert answer.status_code in {401, 403}


@pytest.mark.parametrize("role", ["viewer", "user", "admin"])
def test_who_has_a_role_reads(site: Site, role: str) -> None:
    assert site.get("api/v1/overview", role=role).status_code == 200
    assert site.get("", role=role, html=True).status_code == 200


def test_actions_are_offered_to_who_may_trigger_the_dag(site: Site) -> None:
    seen = site.get("api/v1/actions", role="viewer").json()
    assert {each["dag_id"] for each in seen} <= {path.stem for path in (ROOT / "dags").glob("*.py")}
    assert len(seen) >= 7
    assert not any(each["allowed"] for each in seen)
    assert all(each["allowed"] for each in site.get("api/v1/actions", role="admin").json())
    assert "disabled" in site.get("actions", role="viewer", html=True).text
    assert "disabled" not in site.get("actions", role="admin", html=True).text


def test_metrics_take_a_login_or_the_token_of_the_environment(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    def status(token: str) -> int:
        return int(site.client.get("/millrace/metrics", headers={"Authorization": f"Bearer {token}"}).status_code)

    assert status("scrape-me") in {401, 403}
    assert status(site.tokens["viewer"]) == 200
    monkeypatch.setenv("MILLRACE_METRICS_TOKEN", "scrape-me")
    assert status("scrape-me") == 200
    assert status("scrape-you") in {401, 403}
    monkeypatch.setenv("MILLRACE_METRICS_TOKEN", "")
    assert site.client.get("/millrace/metrics", headers={"Authorization": "Bearer "}).status_code == 401
    # The token reads the metrics and nothing else.
    monkeypatch.setenv("MILLRACE_METRICS_TOKEN", "scrape-me")
    answer = site.client.get("/millrace/api/v1/overview", headers={"Authorization": "Bearer scrape-me"})
    assert answer.status_code in {401, 403}


def test_nothing_can_be_changed_through_it(site: Site) -> None:
    """But what the cluster is to do (the next test), pipelines (test_ui_pipelines.py), and runs (test_ui_start.py)."""
    for path in _paths(site):
        if path.startswith(("api/v1/pipelines/", "actions/")):
            continue
        for method in ("post", "put", "patch", "delete"):
            answer = getattr(site.client, method)(
                f"/millrace/{path}", headers={"Authorization": f"Bearer {site.tokens['admin']}"}
            )
            assert answer.status_code in {404, 405}, f"{method} {path}"


def test_the_cluster_is_told_what_to_do_by_who_may_start_the_streaming_dag(
    site: Site, cluster_store: MetaStore
) -> None:
    def ask(role: str, method: str, path: str) -> Any:
        headers = {"Authorization": f"Bearer {site.tokens[role]}"}
        return site.client.request(method, f"/millrace/api/v1/{path}", headers=headers)

    for path in ("nodes/n1/drain", "balance/freeze"):
        for method in ("PUT", "DELETE"):
            assert ask("viewer", method, path).status_code == 403
            assert ask("viewer", method, path).json()["error"]["code"] == "PERMISSION_DENIED"
        assert ask("admin", "POST", path).status_code == 405, "what a form of another page could send does nothing"
    assert control.read_control_state(cluster_store) == control.ControlState(frozenset(), frozen=False)
    assert ask("admin", "PUT", "nodes/n1/drain").json()["draining"] == ["n1"]
    assert ask("admin", "PUT", "balance/freeze").json()["frozen"] is True
    assert "disabled" in site.get("cluster", role="viewer", html=True).text
    shown = site.get("cluster", role="admin", html=True).text
    assert "disabled" not in shown
    assert "Use again" in shown
    assert ask("admin", "DELETE", "nodes/n1/drain").json()["draining"] == []
    assert ask("admin", "DELETE", "balance/freeze").json()["frozen"] is False
    assert ask("admin", "PUT", "nodes/nobody/drain").json()["error"]["code"] == "NODE_NOT_FOUND"


def test_pages_take_nothing_from_elsewhere(site: Site) -> None:
    answer = site.get("", html=True)
    policy = answer.headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert "http" not in policy
    for path in ("", "collections", "rejections", "docs"):
        page = site.page(path)
        assert 'src="http' not in page
        assert 'href="http' not in page
        assert "<script>" not in page
        assert " style=" not in page
