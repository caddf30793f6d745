"""In front of Airflow's server.

Triggers are checked in our words, ``/millrace`` leads to the pages, and the pages are ready or say that they start.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
from fastapi import FastAPI, Request
from fastapi.testclient import TestClient

from millrace.operations.registry import operations
from millrace_airflow.ui import LazyApp
from millrace_airflow.ui.middleware import MAX_TRIGGER_BYTES, PluginMiddleware

LOGGED_IN = {"Authorization": "Bearer somebody"}
PATIENCE = 20.0


def server(*ready: Callable[[], object]) -> FastAPI:
    """A server that takes triggers and says what reached it."""
    app = FastAPI()

    @app.post("/api/v2/dags/{dag_id}/dagRuns")
    async def trigger(dag_id: str, request: Request) -> dict[str, Any]:
        return {"dag_id": dag_id, "bytes": len(await request.body())}

    @app.get("/millrace/")
    def pages() -> str:
        return "pages"

    app.add_middleware(PluginMiddleware, prefix="/millrace", ready=ready)
    return app


@pytest.fixture
def client() -> TestClient:
    return TestClient(server())


def said(client: TestClient, dag_id: str, conf: object) -> str:
    """What is said to a trigger; empty: it was taken."""
    answer = client.post(f"/api/v2/dags/{dag_id}/dagRuns", json={"conf": conf, "logical_date": None}, headers=LOGGED_IN)
    assert answer.status_code in (200, 422)
    return "" if answer.status_code == 200 else str(answer.json()["detail"])


RANGE = {"start": "2013-01-02T00:00:00Z", "end": "2013-01-03T00:00:00Z"}


@pytest.mark.parametrize(
    "dag_id, conf, words",
    [
        (
            "backfill_range",
            {**RANGE, "frm": 1},
            "frm: unknown parameter of backfill_range; the parameters are table, start, end",
        ),
        ("backfill_range", {**RANGE, "slices": ["a/b"]}, "slices: unknown parameter"),
        (
            "backfill_range",
            {"start": RANGE["end"], "end": RANGE["start"]},
            "start 2013-01-03T00:00:00+00:00 is after end",
        ),
        ("backfill_range", {**RANGE, "start": "2013-01-01T00:00:00"}, "start: needs a zone"),
        ("backfill", {"start": RANGE["start"]}, "start: unknown parameter of backfill; the parameters are table"),
        ("backfill", {"slice_hours": 0}, "slice_hours: is at least 1"),
        ("compaction", {"zorder_by": ["id"]}, "give exactly that collection in collections"),
        ("recovery", {"mode": "pray"}, "mode: is one of 'diagnose', 'rehearse' or 'repair'"),
        ("quality", {"samples": "many"}, "samples: is a whole number"),
    ],
)
def test_a_trigger_that_would_fail_later_is_refused_at_once_in_words(
    client: TestClient, dag_id: str, conf: dict[str, Any], words: str
) -> None:
    found = said(client, dag_id, conf)
    assert words in found
    assert not any(each in found for each in ("Value error", "Input should", "Params", "pydantic"))


@pytest.mark.parametrize(
    "dag_id, conf",
    [
        ("backfill_range", RANGE),
        ("backfill_range", {"start": RANGE["start"]}),
        ("backfill", {}),
        ("recovery", {"mode": "diagnose"}),
        ("somebodys", {"frm": 1}),
        ("quality", None),
        ("quality", "x"),
    ],
)
def test_what_is_right_or_airflows_to_judge_reaches_airflow(client: TestClient, dag_id: str, conf: object) -> None:
    assert said(client, dag_id, conf) == ""


def test_every_form_as_it_stands_is_taken(client: TestClient) -> None:
    from millrace_airflow.forms import form

    for each in operations().values():
        shown = {name: value for name, value in form(each.params).items() if name not in each.set_by_dag}
        defaults = {name: param.value for name, param in shown.items() if param.has_value}
        assert [one for one in each.trigger_problems(defaults) if one.kind != "missing"] == [], each.name


def test_a_refusal_says_its_field(client: TestClient) -> None:
    answer = client.post(
        "/api/v2/dags/quality/dagRuns", json={"conf": {"samples": 0, "start": "soon"}}, headers=LOGGED_IN
    )
    assert answer.status_code == 422
    found = {each["field"]: each["message"] for each in answer.json()["problems"]}
    assert set(found) == {"samples", "start"}
    assert found["samples"] == "is at least 1"
    assert f"samples: {found['samples']}" in answer.json()["detail"]


def test_nobody_in_particular_gets_airflows_answer_and_a_body_is_handed_on_whole(client: TestClient) -> None:
    path = "/api/v2/dags/quality/dagRuns"
    assert client.post(path, json={"conf": {"frm": 1}}).status_code == 200
    large = b"x" * (3 * MAX_TRIGGER_BYTES)
    assert client.post(path, content=large, headers=LOGGED_IN).json()["bytes"] == len(large)
    assert client.post(path, content=b"{", headers=LOGGED_IN).status_code == 200


def test_the_address_without_its_slash_leads_to_the_pages(client: TestClient) -> None:
    answer = client.get("/millrace?window=1h", follow_redirects=False)
    assert (answer.status_code, answer.headers["location"]) == (307, "/millrace/?window=1h")
    assert client.get("/millrace").json() == "pages"
    behind = TestClient(server(), root_path="/proxy")
    assert behind.get("/proxy/millrace", follow_redirects=False).headers["location"] == "/proxy/millrace/"


def test_the_applications_are_built_once_the_server_has_started() -> None:
    built = threading.Event()
    app = server(built.set)
    assert not built.is_set()
    with TestClient(app):
        assert built.wait(PATIENCE)


@pytest.mark.slow
def test_a_page_that_comes_while_the_application_is_built_says_so_and_an_answer_to_a_program_waits() -> None:
    goes_on = threading.Event()

    def build() -> FastAPI:
        assert goes_on.wait(PATIENCE)
        return server()

    app = LazyApp(build)
    client = TestClient(app)
    starting = client.get("/millrace/", headers={"Accept": "text/html"})
    assert (starting.status_code, starting.headers["retry-after"]) == (503, "1")
    assert "are starting" in starting.text
    goes_on.set()
    assert client.get("/millrace/").json() == "pages"
    assert client.get("/millrace/", headers={"Accept": "text/html"}).json() == "pages"
