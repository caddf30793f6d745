"""The form of an action, rendered and read by the server: it starts a run without JavaScript."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from html import unescape
from typing import Any

import pytest
from fastapi import FastAPI, HTTPException, Request
from fastapi.testclient import TestClient

from millrace.operations.registry import operations
from millrace_airflow.forms import form
from millrace_airflow.ui import start_forms
from millrace_airflow.ui.middleware import PluginMiddleware
from millrace_airflow.ui.start_forms import Field, fields_of
from tests.plugins.ui.conftest import URL, Site


def details(dag_id: str) -> dict[str, Any]:
    """What Airflow says of a DAG."""
    operation = next(each for each in operations().values() if each.dag_id == dag_id)
    asked = form(operation.params, **operation.dag_defaults)
    return {
        "description": operation.summary,
        "is_paused": False,
        "params": {
            name: {"value": param.value if param.has_value else None, "schema": param.schema} | described(param)
            for name, param in asked.items()
            if name not in operation.set_by_dag
        },
    }


def described(param: Any) -> dict[str, Any]:
    return {"description": param.description}


class Airflow:
    """The part of Airflow's REST API that a form calls: what it answers, and what it was asked for."""

    def __init__(self) -> None:
        self.runs: dict[str, dict[str, Any]] = {}
        self.people: list[str] = []
        self.paused: dict[str, bool] = {}
        self.failures: list[HTTPException] = []

    def app(self) -> FastAPI:
        app = FastAPI()

        @app.get("/api/v2/dags/{dag_id}/details")
        def found(dag_id: str) -> dict[str, Any]:
            if dag_id == "gone":
                raise HTTPException(404, "The Dag with ID: `gone` was not found")
            return details(dag_id) | {"is_paused": self.paused.get(dag_id, False)}

        @app.patch("/api/v2/dags/{dag_id}")
        async def change(dag_id: str, request: Request) -> None:
            self.paused[dag_id] = (await request.json())["is_paused"]

        @app.post("/api/v2/dags/{dag_id}/dagRuns")
        async def begin(dag_id: str, request: Request) -> dict[str, Any]:
            asked = await request.json()
            self.people.append(request.headers["authorization"])
            if asked["dag_run_id"] in self.runs:
                raise HTTPException(409, "there is such a run")
            self.runs[asked["dag_run_id"]] = {"dag_id": dag_id, **asked["conf"]}
            if self.failures:  # the run has begun, and its answer is lost
                raise self.failures.pop(0)
            return asked

        return app


@pytest.fixture
def airflow() -> Airflow:
    return Airflow()


@pytest.fixture
def client(site: Site, airflow: Airflow) -> Iterator[TestClient]:
    root = airflow.app()
    root.mount(URL, site.app)
    root.add_middleware(PluginMiddleware, prefix=URL)
    with TestClient(root, headers={"Authorization": f"Bearer {site.tokens['op']}", "Accept": "text/html"}) as client:
        yield client


def opened(client: TestClient, dag_id: str, **query: Any) -> str:
    answer = client.get(f"{URL}/actions/{dag_id}", params=query)
    assert answer.status_code == 200, answer.text
    return answer.text.partition("<main")[2]


def sent(client: TestClient, page: str, **values: Any) -> Any:
    """The answer to the form of `page` as it stands, with `values` in its fields."""
    action = unescape(re.findall(r'<form class="start" method="post" action="([^"]+)"', page)[0])
    inputs = re.findall(r"<input ([^>]+)>", page)
    given: dict[str, Any] = {}
    for each in inputs:
        said = {name: unescape(value) for name, value in re.findall(r'([\w-]+)="([^"]*)"', each)}
        if said.get("type") != "checkbox" or each.endswith("checked"):
            given[said["name"]] = said.get("value", "on")
    for name, body in re.findall(r'<textarea [^>]*name="([^"]+)"[^>]*>\n([^<]*)</textarea>', page):
        given[name] = unescape(body)
    for name, body in re.findall(r'<select [^>]*name="([^"]+)"[^>]*>(.*?)</select>', page):
        given[name] = [unescape(each) for each in re.findall(r'<option value="([^"]*)" selected>', body)]
    return client.post(action, data=given | values, follow_redirects=False)


def test_a_form_has_its_fields_and_their_pickers_without_a_script(client: TestClient) -> None:
    page = opened(client, "backfill_range")
    assert "<script" not in page
    assert re.search(r'<h2 id="start-title">Backfill a time range</h2>', page)
    assert page.count('type="datetime-local" step="1"') == 2
    assert 'id="param-table" name="param.table"' in page.partition("<details")[0], "the table is in plain sight"
    page = opened(client, "restore", conf=json.dumps({"collection": "users"}))
    assert re.search(r'name="param.collection" value="users"', page)
    assert 'name="param.at.tick" inputmode="numeric" placeholder="or a time tick"' in page


def test_a_form_starts_a_run_as_the_person_who_sends_it(client: TestClient, airflow: Airflow, site: Site) -> None:
    page = opened(client, "checkpoint", title="Dry run", conf=json.dumps({"dry_run": True}))
    answer = sent(client, page, **{"param.sample_mib": "7"})
    assert answer.status_code == 303, answer.text
    (run, asked), *_ = airflow.runs.items()
    assert (asked["dag_id"], asked["dry_run"], asked["sample_mib"]) == ("checkpoint", True, 7)
    assert airflow.people == [f"Bearer {site.tokens['op']}"]
    shown = client.get(answer.headers["location"]).text
    assert f'href="/dags/checkpoint/runs/{run}"'.replace(":", "%3A").replace("+", "%2B") in shown
    again = sent(client, page)
    assert again.status_code == 422, "the same form again starts nothing"
    assert "Dry run was not started. This form has started its run already" in again.text
    assert len(airflow.runs) == 1


def test_what_is_wrong_stands_at_its_field_and_what_was_typed_stays(client: TestClient, airflow: Airflow) -> None:
    typed = {"param.table": "a/b", "param.start": "", "param.slice_hours": "soon"}
    answer = sent(client, opened(client, "backfill_range"), **typed)
    assert (answer.status_code, airflow.runs) == (422, {})
    page = answer.text.partition("<main")[2]
    assert "Backfill a time range was not started." in page
    assert '<em class="wrong" id="wrong-start">Choose a moment.</em>' in page
    assert '<em class="wrong" id="wrong-slice_hours">A number, not “soon”.</em>' in page
    assert 'value="a/b"' in page
    assert 'value="soon"' in page


def test_what_the_trigger_is_refused_for_stands_at_its_field(client: TestClient, airflow: Airflow) -> None:
    answer = sent(client, opened(client, "quality"), **{"param.samples": "0"})
    assert (answer.status_code, airflow.runs) == (422, {})
    assert '<em class="wrong" id="wrong-samples">is at least 1</em>' in answer.text
    assert "<details open>" in answer.text


def test_what_belongs_to_no_field_stands_above_them(client: TestClient, airflow: Airflow) -> None:
    answer = sent(client, opened(client, "restore", title="Restore", conf=json.dumps({"collection": "users"})))
    assert (answer.status_code, airflow.runs) == (422, {})
    assert "Restore was not started. Give either" in answer.text


def test_a_paused_dag_is_unpaused_if_the_form_says_so(client: TestClient, airflow: Airflow) -> None:
    airflow.paused["checkpoint"] = True
    page = opened(client, "checkpoint")
    assert 'name="unpause" checked' in page
    assert sent(client, page).status_code == 303
    assert airflow.paused == {"checkpoint": False}


def test_an_answer_that_was_lost_starts_no_second_run(
    client: TestClient, airflow: Airflow, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(start_forms, "PAUSE_SECONDS", 0.0)
    airflow.failures = [HTTPException(503, "database is locked")]
    assert sent(client, opened(client, "checkpoint")).status_code == 303
    assert len(airflow.runs) == 1


def test_a_form_of_another_site_and_one_without_its_run_start_nothing(client: TestClient, airflow: Airflow) -> None:
    page = opened(client, "checkpoint")
    client.headers["Sec-Fetch-Site"] = "cross-site"
    assert sent(client, page).status_code == 403
    client.headers["Sec-Fetch-Site"] = "same-origin"
    assert sent(client, page, run="scheduled__2026-01-01").status_code == 422
    assert airflow.runs == {}


def test_a_reader_sees_the_form_and_cannot_start_it(client: TestClient, site: Site) -> None:
    client.headers["Authorization"] = f"Bearer {site.tokens['viewer']}"
    assert re.search(
        r'<button type="submit" class="primary" disabled title="You need the permission', opened(client, "checkpoint")
    )
    assert client.get(f"{URL}/actions/gone").status_code == 404
    client.headers["Authorization"] = "Bearer nobody"
    assert client.get(f"{URL}/actions/checkpoint").status_code in (401, 403)


@pytest.mark.parametrize("dag_id", sorted(each.dag_id for each in operations().values()))
def test_a_form_that_is_sent_as_it_stands_says_the_defaults(dag_id: str) -> None:
    found = details(dag_id)
    for each in fields_of(found, {}):
        default = found["params"][each.name]["value"]
        texts = {f"param.{each.name}": each.texts[:1] if each.kind == "tick" else each.texts}
        if each.kind == "tick":
            texts[f"param.{each.name}.tick"] = each.texts[1:]
        again = each.filled_in(texts)
        assert again == each
        if default is None and each.kind in ("moment", "text"):
            continue  # a parameter that must be filled in
        assert again.value() == ([] if each.kind in ("lines", "choices") and default is None else default), each


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": "integer"}, "7", 7),
        ({"type": "integer"}, "7.0", 7),
        ({"type": "number"}, "7.5", 7.5),
        ({"type": ["null", "integer"]}, " ", None),
        ({"type": ["null", "string"]}, "", None),
        ({"type": "string", "format": "date-time"}, "2026-01-02T03:04", "2026-01-02T03:04:00Z"),
        ({"type": "string", "format": "date-time"}, "2026-01-02T03:04:05+02:00", "2026-01-02T03:04:05+02:00"),
        ({"type": "array"}, "a\n b \n", ["a", "b"]),
        ({"type": "array"}, '[{"a": 1}]', [{"a": 1}]),
        ({"type": "object"}, '{"a": 1}', {"a": 1}),
        ({"enum": ["a", None]}, "null", None),
    ],
)
def test_the_value_of_a_field(schema: dict[str, Any], text: str, value: Any) -> None:
    assert Field.of("f", {"schema": schema}, {}).filled_in({"param.f": [text]}).value() == value


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        ({"type": "number"}, "nan"),
        ({"type": "object"}, "{"),
        ({"type": "string", "pattern": "^a+$"}, "b"),
        ({"enum": ["a"]}, '"b"'),
    ],
)
def test_a_value_that_is_none_of_its_fields(schema: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError):
        Field.of("f", {"schema": schema}, {}).filled_in({"param.f": [text]}).value()
