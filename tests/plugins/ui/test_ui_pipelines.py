"""Pipelines inside Airflow: the management API behind its login, by its roles and those of each pipeline."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from html import unescape
from pathlib import Path
from typing import Any, Literal

import pytest
import uvicorn
from airflow.api_fastapi.auth.managers.base_auth_manager import COOKIE_NAME_JWT_TOKEN
from pydantic import Field

from millrace.access.grants import Role
from millrace.base.deadline import Deadline, poll_until
from millrace.base.settings import Settings
from millrace.flows.declare.part import Part
from millrace.flows.registry import SourceKind, source_kinds
from millrace.pipelines.api import management
from millrace.pipelines.api.routes import CALLS
from millrace.service.pipelines import LazyPipelineStore
from millrace_airflow.roles import RolesAuthManager
from millrace_airflow.ui import access, flows
from millrace_airflow.ui import pipelines as ui
from tests.e2e.browser import Page, browser
from tests.in_memory import folder_in_memory
from tests.pipelines.api.matrix import calls, expected, got
from tests.pipelines.api.test_routes import DECLARED
from tests.plugins.ui.conftest import Site, make_site
from tests.plugins.ui.pipelines_world import HOSTILE, as_lines, make_management, populate

OVER_ALL = {"viewer": Role.READ, "user": Role.READ, "op": Role.OPERATE, "admin": Role.ADMIN}


@pytest.fixture(scope="module")
def pipelines(airflow_database: None) -> Iterator[Site]:
    """The application with the roles of `make up`, over a folder that is not there yet."""
    with folder_in_memory() as folder, pytest.MonkeyPatch.context() as patch:
        settings = Settings(data_dir=folder / "data")
        patch.setattr(access, "get_auth_manager", RolesAuthManager)
        with LazyPipelineStore(settings) as store:
            yield from make_site(settings, make_management(settings, store))


@pytest.fixture(scope="module")
def shown(airflow_database: None) -> Iterator[Site]:
    """The same over three pipelines: `flights` runs, a task of `planes` failed, `hostile` is stopped."""
    with folder_in_memory() as folder, pytest.MonkeyPatch.context() as patch:
        settings = Settings(data_dir=folder / "data")
        patch.setattr(access, "get_auth_manager", RolesAuthManager)
        with LazyPipelineStore(settings) as store:
            management = make_management(settings, store)
            populate(settings, management)
            yield from make_site(settings, management)


def ask(site: Site, method: str, path: str, body: Any = None, *, role: str | None) -> tuple[int, Any]:
    headers = {} if role is None else {"Authorization": f"Bearer {site.tokens[role]}"}
    answer = site.client.request(method, f"/millrace/api/v1/{path}", json=body, headers=headers)
    return answer.status_code, answer.json() if answer.content else None


def test_every_call_lets_in_who_the_table_says_and_no_one_else(pipelines: Site) -> None:
    found = list(calls(pipelines.app))
    assert {call.name for call in found} == set(CALLS)
    for call in found:
        for role, over_all in OVER_ALL.items():
            status, answer = ask(pipelines, "PUT", "pipelines/flights", DECLARED, role="admin")
            assert status == 201 or answer["error"]["code"] == "PIPELINE_EXISTS", (call, role, answer)
            assert got(partial(ask, pipelines, role=role), call) == expected(
                call, on_it=over_all, on_all=over_all, anywhere=True
            ), (
                role,
                call,
            )
        assert got(partial(ask, pipelines, role="stranger"), call) == "refused"
        assert got(partial(ask, pipelines, role=None), call) == "logged out"


def test_who_makes_one_owns_it_and_who_has_a_role_on_it_may_more_there(pipelines: Site) -> None:
    assert ask(pipelines, "PUT", "pipelines/mine", DECLARED, role="viewer")[0] == 403
    assert ask(pipelines, "PUT", "pipelines/mine", DECLARED, role="op")[0] == 201
    assert ask(pipelines, "GET", "pipelines/mine/roles", role="viewer") == (200, {"op": "owner"})
    assert ask(pipelines, "PUT", "pipelines/mine/resume", role="viewer")[0] == 403
    assert ask(pipelines, "PUT", "pipelines/mine/roles/viewer?role=operator", role="op")[0] == 200
    assert ask(pipelines, "PUT", "pipelines/mine/resume", role="viewer")[0] == 200
    assert ask(pipelines, "PUT", "pipelines/mine/stop", role="viewer")[0] == 200
    assert ask(pipelines, "DELETE", "pipelines/mine", role="viewer")[0] == 403
    assert ask(pipelines, "DELETE", "pipelines/mine", role="op")[0] == 204, "its owner"


def test_what_a_form_of_another_page_could_send_does_nothing(pipelines: Site) -> None:
    for call in calls(pipelines.app):
        if call.method != "GET":
            assert ask(pipelines, "POST", call.path, {}, role="admin")[0] == 405, call


VIEWS = ("state", "errors", "samples", "declaration", "history")


@pytest.mark.parametrize("role", ["viewer", "op", "admin"])
def test_every_page_is_shown_to_who_may_read_and_has_nothing_hostile_as_markup(shown: Site, role: str) -> None:
    paths = ["flows", "pipelines", "pipelines-new", "pipelines/hostile/edit", "pipelines/planes"]
    for path in [*paths, *(f"pipelines/hostile?view={view}" for view in VIEWS)]:
        answer = shown.get(path, html=True, role=role)
        assert answer.status_code == 200, path
        assert answer.text.count("<main") == 1
        for markup in ("<script>alert", "<img", "Undefined", " style=", "hunter2"):
            assert markup not in answer.text, (path, markup)
    for echo in (
        f"flows?text={HOSTILE}",
        f"pipelines/hostile?view=errors&reason={HOSTILE}",
        f"pipelines/{HOSTILE.replace('/', '')}",
    ):
        assert "<script>alert" not in shown.get(echo, html=True, role=role).text, echo


def test_the_list_has_states_sums_and_causes_and_is_searched(shown: Site) -> None:
    page = shown.page("flows")
    for words in ("flights", "96 k", "degraded", "new", "180 ms", "alert(1)", 'class="spark"'):
        assert words in page, words
    assert "New pipeline" not in page, "for a viewer"
    assert "New pipeline" in shown.get("flows", html=True, role="op").text
    assert "planes" not in shown.page("flows", text="fligh").partition("<main")[2]
    assert 'id="pipeline-flights"' not in shown.page("flows", state="degraded")
    assert "None fits this search" in shown.page("flows", text="nothing")
    assert "flights_hourly" in page, "a stream"
    assert "flights_hourly" not in shown.page("flows", host="range").partition("<main")[2]


def test_one_graph_has_streams_and_pipelines_and_what_lies_between_them(shown: Site) -> None:
    graph = shown.page("flows").partition('id="graph"')[2].partition("</svg>")[0]
    assert graph.count('class="flow new"') == 2, "the stream, and a pipeline that never ran"
    assert 'class="flow running"' in graph, "flights"
    assert 'class="flow degraded"' in graph, "planes"
    assert 'href="/millrace/pipelines/flights"' in graph
    assert graph.count("<title>kafka in</title>") == 1, "one topic is one place, however many read it"
    for name in ("flights", "planes", "hostile"):
        assert f"<title>kafka {name}.errors</title>" in graph


def test_addresses_of_earlier_builds_lead_to_the_page(shown: Site) -> None:
    for path in ("streams", "pipelines"):
        answer = shown.client.get(
            f"/millrace/{path}?text=fligh",
            headers={"Authorization": f"Bearer {shown.tokens['viewer']}"},
            follow_redirects=False,
        )
        assert (answer.status_code, answer.headers["location"]) == (308, "/millrace/flows?text=fligh")


def test_a_pipeline_is_in_nobodys_list_who_may_not_see_it(shown: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(management, "sees", lambda caller, pipeline: pipeline != "planes")
    monkeypatch.setattr(flows, "sees", lambda caller, pipeline: pipeline != "planes")
    page = shown.page("flows").partition("<main")[2]
    assert "flights" in page
    assert "planes" not in page


def test_a_kind_that_a_package_adds_is_offered_with_its_plain_fields(
    shown: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Lines(Part):
        kind: Literal["lines"] = "lines"
        folder: str = Field(description="where the files <are>")
        start: Literal["earliest", "latest"] = "earliest"
        parts: tuple[str, ...] = ()

    added = SourceKind("lines", Lines, "lines:source_of", "lines:reader_of", package="lines-source")
    monkeypatch.setattr(ui, "source_kinds", lambda: {**source_kinds(), "lines": added})
    form = shown.get("pipelines-new", html=True, role="op").text
    assert "<option>lines</option>" in form
    mine = form.partition('data-when="source.kind=lines"')[2].partition("</fieldset>")[0]
    assert re.findall(r'data-path="([^"]+)"', mine) == ["source.folder", "source.start", "errors.cluster.bootstrap"]
    assert "where the files &lt;are&gt;" in mine
    assert "<option>latest</option>" in mine


def test_buttons_are_alive_for_whom_the_api_lets_do_it(shown: Site) -> None:
    def buttons(pipeline: str, role: str, view: str = "state") -> dict[str, bool]:
        page = shown.get(f"pipelines/{pipeline}", html=True, role=role, view=view).text.partition("<main")[2]
        found = re.findall(r"<button([^>]*)>([^<]+)</button>", page)
        return {label: "disabled" not in how for how, label in found}

    assert buttons("flights", "viewer") == {"Pause": False, "Restart": False, "Stop": False}
    assert buttons("flights", "op") == {"Pause": True, "Restart": True, "Stop": True}
    assert buttons("planes", "op") == {"Pause": True, "Restart": True, "Restart failed": True, "Stop": True}
    assert buttons("hostile", "op") == {"Run": True, "Reset offsets…": True, "Delete…": False}
    assert buttons("hostile", "admin") == {"Run": True, "Reset offsets…": True, "Delete…": True}
    assert buttons("flights", "viewer", "errors")["Redrive"] is False
    assert buttons("flights", "op", "errors")["Redrive"] is True
    assert buttons("flights", "viewer", "samples") | {"Newest of its topics": True} == buttons(
        "flights", "viewer", "samples"
    )
    assert "Change…" not in shown.page("pipelines/flights", view="declaration")


def test_a_stream_has_the_buttons_of_a_pipeline_and_only_who_operates_everything_may_press_them(shown: Site) -> None:
    def buttons(role: str, **query: str) -> dict[str, bool]:
        page = shown.get("flows/flights_hourly", html=True, role=role, **query).text.partition("<main")[2]
        found = re.findall(r"<button type=\"button\"([^>]*)>([^<]+)</button>", page)
        return {label: "disabled" not in how for how, label in found}

    assert buttons("viewer") == {"Run": False, "Pause": False, "Reset errors…": False}
    assert buttons("op") == {"Run": True, "Pause": True, "Reset errors…": True}
    assert buttons("viewer", view="errors")["Redrive"] is False
    assert buttons("op", view="errors")["Redrive"] is True
    assert ask(shown, "PUT", "flows/flights_hourly/errors/reset", role="viewer")[0] == 403
    assert ask(shown, "PUT", "flows/flights_hourly/redrive", {}, role="viewer")[0] == 403
    assert ask(shown, "PUT", "flows/flights_hourly/errors/reset", role=None)[0] == 401
    assert ask(shown, "PUT", "flows/flights_hourly/errors/reset", role="op")[0] == 200
    assert ask(shown, "PUT", "flows/flights_hourly/pause", role="op")[1]["state"] == "paused"
    assert "Run" in buttons("op")
    assert "Pause" not in buttons("op")
    assert ask(shown, "PUT", "flows/flights_hourly/resume", role="op")[0] == 422, "its collections are not there"
    page = shown.page("flows/flights_hourly")
    for words in ("collection:flights_by_hour", "exactly once: the sink stores", 'href="/dags/stream_flights_hourly"'):
        assert words in page, words
    moved = shown.client.get(
        "/millrace/flows/flights", headers={"Authorization": f"Bearer {shown.tokens['op']}"}, follow_redirects=False
    )
    assert (moved.status_code, moved.headers["location"]) == (307, "/millrace/pipelines/flights")


def test_letters_of_a_stream_are_chosen_by_their_place(shown: Site) -> None:
    def page(**query: Any) -> str:
        answer = shown.get("flows/flights_hourly", html=True, role="op", view="errors", **query)
        return answer.text.partition("<main")[2]

    assert "JSON is malformed" in page()
    assert "alert(1)" in page()
    assert "<script>alert" not in page()
    low = page(lane="in-0", low="7", high="9")
    assert "JSON is malformed" in low
    assert "alert(1)" not in low
    (body,) = re.findall(r'data-body="([^"]*)"', low)
    assert json.loads(unescape(body)) == {"lane": "in-0", "low": 7, "high": 9}
    assert "Redrive what fits" in low
    assert "No dead letter fits this search" in page(lane="in-0", high="6")
    for wrong in ({"lane": "in-0", "low": "x"}, {"low": "7"}):
        told = page(**wrong)
        assert "INVALID_ARGUMENT" in told
        assert "Redrive" not in told, "what does not fit a search is not everything"
    of_pipeline = shown.page("pipelines/flights", view="errors", lane="in-0", low="7", high="7")
    assert "no JSON" in of_pipeline
    assert "12a is no int" not in of_pipeline
    wrong_page = shown.get("pipelines/flights", html=True, role="op", view="errors", lane="in-0", low="x").text
    assert re.search(r'data-redrive="all" disabled', wrong_page)


def test_who_may_not_read_gets_no_page_and_what_is_not_there_is_said(shown: Site) -> None:
    for path in (
        "flows",
        "flows/flights_hourly",
        "pipelines",
        "streams",
        "pipelines-new",
        "pipelines/flights",
        "pipelines/flights/edit",
    ):
        assert shown.get(path, role=None, html=True).status_code == 401, path
        assert shown.get(path, role="stranger", html=True).status_code == 403, path
    assert shown.get("pipelines/absent", html=True).status_code == 404
    assert shown.get("flows/absent", html=True).status_code == 404
    assert shown.get("flows/flights_hourly", html=True, view="nothing").status_code == 404
    assert shown.get("pipelines/flights", html=True, view="nothing").status_code == 404


@contextmanager
def served(app: Any) -> Iterator[str]:
    """An application at a port of its own."""
    config = uvicorn.Config(app, host="127.0.0.1", port=0, log_config=None, access_log=False, lifespan="off")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    assert poll_until(lambda: server.started, Deadline.after(30), interval=0.02)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(20)


@pytest.fixture
def page(shown: Site, tmp_path: Path) -> Iterator[tuple[Page, str]]:
    """A browser, logged in as *op*, and where the pages are; none may complain, or ask another machine for anything."""
    with served(shown.client.app) as address, browser(tmp_path) as made:
        made.cookie(address, COOKIE_NAME_JWT_TOKEN, shown.tokens["op"])
        yield made, f"{address}/millrace"
        assert {url for url in made.fetched if not url.startswith(address)} == set()


@pytest.mark.slow
def test_a_person_makes_one_mends_what_is_wrong_runs_it_and_redrives(page: tuple[Page, str], shown: Site) -> None:
    made, root = page
    at = "document.querySelector('[data-path=\"{}\"]')".format
    made.open(f"{root}/flows", ready="document.querySelectorAll('svg.spark path').length >= 2")
    made.click("[...document.querySelectorAll('a.button')].find((each) => each.innerText === 'New pipeline…')")
    made.wait("document.querySelector('#pipeline #whole')?.value")
    made.type("document.getElementById('pipeline-id')", "mine")
    made.type(at("source.bootstrap"), "127.0.0.1:9")
    made.type(at("steps"), '[{"kind": "rename", "fields": {"a": "b"}}, {"kind": "nothing"}]')
    made.click("document.getElementById('check')")
    made.wait("document.querySelectorAll('.wrong').length >= 3", what="errors by field")
    marked = made.evaluate("[...document.querySelectorAll('.wrong')].map((each) => each.parentElement.dataset.for)")
    assert set(marked) == {"source.topics", "steps", "sink.hosts", "sink.index_base"}
    assert made.errors != []  # the browser's own word for 422
    made.forget()
    made.type(at("source.topics"), "in")
    made.type(at("steps"), '[{"kind": "rename", "fields": {"a": "b"}}]')
    made.type(at("sink.hosts"), "http://127.0.0.1:9")
    made.type(at("sink.index_base"), "mine")
    made.click("document.getElementById('check')")
    verdict = "Nothing is wrong with it. Its guarantee: effectively once:"
    made.wait(f"document.getElementById('verdict').innerText.startsWith('{verdict}')")
    assert made.evaluate("JSON.parse(document.getElementById('whole').value).sink.index_base") == "mine"
    made.click("document.querySelector('form#pipeline button.primary')")
    made.wait("location.pathname.endsWith('/pipelines/mine') && document.querySelector('#buttons button')")
    made.click("[...document.querySelectorAll('#buttons button')].find((each) => each.innerText === 'Run')")
    made.wait("[...document.querySelectorAll('#buttons button')].some((each) => each.innerText === 'Stop')")
    assert ask(shown, "GET", "pipelines/mine", role="op")[1]["wanted"] == "RUNNING"

    made.open(f"{root}/pipelines/mine?view=samples", ready="document.querySelector('#dry-run textarea')")
    made.type("document.querySelector('#dry-run textarea')", as_lines({"a": HOSTILE}, 7))
    made.click("document.querySelector('#dry-run button')")
    made.wait("document.querySelectorAll('#steps .sample').length === 2")
    assert "alert(1)" in made.text()
    assert made.evaluate("document.querySelectorAll('#steps img, #steps script').length") == 0
    assert made.evaluate("document.querySelector('#steps .step pre').innerText.includes('\"b\"')")

    made.open(f"{root}/pipelines/flights?view=samples", ready="document.querySelector('#newest')")
    made.click("document.querySelector('#newest')")
    made.wait("!document.querySelector('#dry-run [role=alert]').hidden", what="that its brokers do not answer")
    made.forget()  # the browser's own word for 503

    made.open(f"{root}/pipelines/flights?view=errors", ready="document.querySelector('input.chosen')")
    made.click("document.querySelector('input.chosen')")
    made.click("[...document.querySelectorAll('button')].find((each) => each.innerText === 'Redrive the 1 chosen')")
    made.wait("true", seconds=1)
    assert poll_until(lambda: "redrive" in _what(shown, "flights"), Deadline.after(20), interval=0.1)
    newest = ask(shown, "GET", "pipelines/flights/history", role="op")[1][0]
    assert (newest["what"], newest["who"], newest["detail"]["selection"]["ids"]) == ("redrive", "op", ["0-2"])
    assert made.errors == []

    # Somebody else changes it meanwhile: who comes later is told, and nothing of his is taken.
    made.open(f"{root}/pipelines/mine/edit", ready="document.querySelector('#whole')?.value")
    declared = ask(shown, "GET", "pipelines/mine", role="op")[1]["declaration"]
    assert (
        ask(shown, "PUT", "pipelines/mine/declaration?version=1", {**declared, "name": "theirs"}, role="admin")[0]
        == 200
    )
    made.type(at("name"), "ours")
    made.click("document.querySelector('form#pipeline button.primary')")
    made.wait("document.getElementById('problems').innerText.includes('because it was changed')")
    assert ask(shown, "GET", "pipelines/mine", role="op")[1]["name"] == "theirs"


def _what(site: Site, pipeline: str) -> list[str]:
    return [each["what"] for each in ask(site, "GET", f"pipelines/{pipeline}/history", role="op")[1]]
