"""The management API as people with tokens have it.

Roles, versions, states, errors by field; the world of topics and workers is one of names.
"""

from __future__ import annotations

import json
import math
import os
import re
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi.testclient import TestClient

from millrace.access import token_file
from millrace.access.grants import Caller, Grant, Principal, Role
from millrace.access.token_file import TokenFile
from millrace.base.errors import InvalidSettings, LogUnavailable, MetaUnavailable, SecretUnreadable, StreamBusy
from millrace.base.file_lock import ProcessRegistration
from millrace.base.metrics import Metrics
from millrace.base.package import VERSION
from millrace.base.settings import Settings
from millrace.flows.declare.checks import check
from millrace.flows.declare.configuration import Configuration
from millrace.flows.declare.discovery import declared_flow
from millrace.flows.declare.file import flow_of_file
from millrace.flows.declare.keys import Keys, new_key
from millrace.flows.errors.selection import Selection
from millrace.flows.range_host.observed import note_flow
from millrace.flows.range_host.status import PipelineStatus, State, metrics_path, status_path
from millrace.flows.registry import SINKS, SOURCES
from millrace.flows.sources.source import Ends
from millrace.flows.spark_host.error_window import resets_of
from millrace.flows.spark_host.incarnations import Incarnations, sink_folder
from millrace.flows.spark_host.redrive import redrive
from millrace.pipelines.api.management import Management
from millrace.pipelines.api.routes import CALLS
from millrace.pipelines.declaration import pipeline_of
from millrace.pipelines.deploy.deployment import Deployment
from millrace.pipelines.deploy.redriving import Redrives, RedriveState, RedriveStatus
from millrace.pipelines.deploy.world import RealWorld
from millrace.pipelines.store.records import PipelineRole, Record
from millrace.pipelines.store.store import open_pipelines
from millrace.service.authentication import token_authenticator
from millrace.service.pipelines import service_app
from tests.pipelines.api.matrix import calls, expected, got

OWN = "the-machines-own"
KAFKA = {"kind": "kafka", "bootstrap": ["127.0.0.1:9"], "topics": ["in"], "socket_timeout_ms": 10}
DECLARED: dict[str, Any] = {
    "source": KAFKA,
    "steps": [{"kind": "rename", "fields": {"a": "b"}}],
    "sink": {
        "kind": "opensearch",
        "hosts": ["http://127.0.0.1:9"],
        "index_base": "flights",
        "username": "u",
        "password": "hunter2",
    },
}


class NoServers(RealWorld):
    """The real steps of the deployment; of Kafka and OpenSearch the names alone, since none runs here."""

    failing = ""

    def plan(self, step: str, record: Record) -> tuple[str, ...]:
        if step == self.failing:
            raise LogUnavailable("Kafka gave no answer")
        return super().plan(step, record) if step == "deployment" else ()


class NoProcess(Deployment):
    """Files as they are; no process is started."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self.runs: dict[str, int] = {}

    def start(self, pipeline: str) -> Any:
        self.runs[pipeline] = self.runs.get(pipeline, 0) + 1

    def stop(self, pipeline: str) -> None:
        self.runs.pop(pipeline, None)

    def running(self, pipeline: str) -> bool:
        return pipeline in self.runs


class NoRun(Redrives):
    """What is asked for, without a process that does it."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self.asked: dict[str, Any] = {}

    def _start(self, pipeline: str, asked: dict[str, Any]) -> Any:
        self.asked[pipeline] = asked
        return SimpleNamespace(params=asked)


class Kept:
    """A topic of two partitions, of which retention has taken the beginning."""

    def ends(self) -> dict[str, Ends]:
        return {"in-0": Ends(3, 90), "in-1": Ends(0, 7)}

    def at(self, milliseconds: int) -> dict[str, int]:
        return {"in-0": 3 + milliseconds // 1000, "in-1": 7}

    def close(self) -> None:
        pass


class Service:
    def __init__(self, settings: Settings, store: Any) -> None:
        self.deployment = NoProcess(settings)
        self.redrives = NoRun(settings)
        self.management = Management(
            settings, store, deployment=self.deployment, redrives=self.redrives, places=lambda *_: Kept()
        )
        self.world = NoServers(self.deployment, self.management._pipeline)
        self.management._world = self.world
        self.tokens = TokenFile(settings.data_dir)
        self.app = service_app(settings, self.management, token_authenticator([OWN], self.tokens))
        self.client = TestClient(self.app, raise_server_exceptions=False)

    def token(self, name: str, *grants: Grant) -> str:
        return self.tokens.add(name, list(grants))[0]

    def ask(self, method: str, path: str, body: Any = None, *, token: str = OWN) -> tuple[int, Any]:
        answer = self.client.request(
            method, f"/api/v1/{path}", json=body, headers={"Authorization": f"Bearer {token}"} if token else {}
        )
        return answer.status_code, answer.json() if answer.content else None


@pytest.fixture
def service(settings: Settings) -> Iterator[Service]:
    settings.data_dir.mkdir(mode=0o700)
    with open_pipelines(settings, env={}) as store:
        made = Service(settings, store)
        with made.management:
            yield made


def test_a_pipeline_lives_from_create_to_delete(service: Service, settings: Settings) -> None:
    status, made = service.ask("PUT", "pipelines/flights", DECLARED)
    assert (status, made["phase"], made["wanted"], made["version"]) == (201, "READY", "STOPPED", 1)
    assert made["secrets"] == ["sink.password"]
    assert "hunter2" not in str(made)
    file = settings.data_dir / "pipelines" / "flights" / "pipeline.json"
    assert file.stat().st_mode & 0o777 == 0o600
    assert "hunter2" not in file.read_text()
    assert service.ask("PUT", "pipelines/flights", DECLARED)[1]["error"]["code"] == "PIPELINE_EXISTS"
    assert service.ask("PUT", "pipelines/flights/pause")[1]["error"]["code"] == "PIPELINE_BUSY"
    assert service.ask("PUT", "pipelines/flights/resume")[1]["wanted"] == "RUNNING"
    assert service.deployment.running("flights")
    assert service.ask("DELETE", "pipelines/flights")[0] == 409, "not while it runs"
    assert service.ask("PUT", "pipelines/flights/offsets", {"in-0": 5})[0] == 409
    assert service.ask("PUT", "pipelines/flights/pause")[1]["wanted"] == "PAUSED"
    assert service.ask("PUT", "pipelines/flights/stop")[1]["wanted"] == "STOPPED"
    assert not service.deployment.running("flights")
    assert service.ask("GET", "pipelines/flights/offsets") == (200, {})
    assert service.ask("PUT", "pipelines/flights/offsets", {"in-0": 5}) == (200, {"in-0": 5})
    assert service.ask("DELETE", "pipelines/flights/offsets") == (200, {"in-0": 3, "in-1": 0}), "the earliest there is"
    assert service.ask("DELETE", "pipelines/flights/offsets?to=latest") == (200, {"in-0": 90, "in-1": 7})
    at = "pipelines/flights/offsets?to=1970-01-01T00:00:09Z"
    assert service.ask("DELETE", at) == (200, {"in-0": 12, "in-1": 7})
    assert service.ask("DELETE", "pipelines/flights/offsets?to=never")[1]["error"]["code"] == "INVALID_ARGUMENT"
    assert service.ask("PUT", "pipelines/flights/offsets", {"other-0": 5})[0] == 422
    done = [each["what"] for each in service.ask("GET", "pipelines/flights/history")[1]]
    assert done[-5:] == ["stop", "pause", "resume", "created", "create"]
    assert service.ask("DELETE", "pipelines/flights")[0] == 204
    assert not file.parent.exists()
    assert service.ask("GET", "pipelines/flights")[0] == 404


def test_what_is_wrong_is_said_by_field_and_nothing_is_made(service: Service) -> None:
    wrong = {**DECLARED, "flush": {"items": 0}, "source": {**KAFKA, "topics": []}, "nonsense": 1}
    for path in ("pipelines/flights", "pipelines/flights/validate"):
        status, found = service.ask("PUT", path, wrong)
        assert (status, found["error"]["code"]) == (422, "PIPELINE_INVALID")
        assert {each["field"]: each["message"] for each in found["error"]["problems"]} == {
            "flush.items": "is at least 1",
            "source.topics": "give either topics or topics_regex",
            "nonsense": "is not a field here",
        }
    assert service.ask("PUT", "pipelines/flights/validate", {**DECLARED, "id": "other"})[0] == 422
    assert service.ask("PUT", "pipelines/flights/validate", DECLARED)[0] == 200
    stolen = {**DECLARED, "steps": [{"kind": "constant", "fields": {"x": "${env:MILLRACE_SERVER_TOKEN}"}}]}
    status, found = service.ask("PUT", "pipelines/flights", stolen)
    assert (status, found["error"]["problems"][0]["kind"]) == (422, "environment")
    assert service.ask("GET", "pipelines")[1]["total"] == 0


STREAM = """
streams:
- {name: by_hour, group: hours, source: {collection: absent}, sink: {collection: hours}}
- {name: hourly, source: {collection: absent}, sink: {collection: hours}}
"""


@pytest.fixture
def streams(service: Service, settings: Settings, tmp_path: Path) -> Service:
    """Two streams are declared beside the service's pipelines."""
    file = tmp_path / "streams.yaml"
    file.write_text(STREAM)
    service.management._settings = replace(settings, stream_declarations=str(file))
    return service


def test_any_flow_is_listed_shown_and_moved_by_one_route(streams: Service) -> None:
    service = streams
    assert service.ask("PUT", "pipelines/flights", DECLARED)[0] == 201
    rows = [each for each in service.ask("GET", "flows?text=H")[1]["flows"] if "flights_" not in each["name"]]
    assert [(each["name"], each["host"], each["state"]) for each in rows] == [
        ("by_hour", "spark", "new"), ("flights", "range", "new"), ("hourly", "spark", "new")
    ]  # fmt: skip
    assert service.ask("GET", "flows?host=range&limit=1")[1]["flows"][0]["name"] == "flights"
    told = service.ask("GET", "flows/flights")[1]
    assert (told["guarantee"], told["promise"].partition(":")[0], told["tasks"]) == (
        "effectively once", "effectively once", []
    )  # fmt: skip
    assert service.ask("PUT", "flows/flights/resume")[0] == 200
    assert service.deployment.running("flights")
    assert service.ask("GET", "pipelines/flights")[1]["wanted"] == "RUNNING"
    assert service.ask("PUT", "flows/flights/stop")[0] == 200
    assert not service.deployment.running("flights")
    told = service.ask("GET", "flows/by_hour")[1]
    assert (told["guarantee"], told["promise"], told["positions"]) == (
        "exactly once", "exactly once: the sink stores the micro-batch's number with its rows", {}
    )  # fmt: skip
    assert service.ask("PUT", "flows/by_hour/pause")[1]["state"] == "paused"
    status, found = service.ask("PUT", "flows/by_hour/resume")
    assert (status, found["error"]["code"]) == (422, "INVALID_STREAM")
    assert "there is no collection 'absent'" in found["error"]["message"]
    assert service.ask("GET", "flows/by_hour")[1]["state"] == "new", "it may run"
    assert service.ask("PUT", "flows/by_hour/stop")[1]["state"] == "new"


def test_a_flow_is_seen_and_moved_by_whoever_may_and_a_name_is_no_file(streams: Service, tmp_path: Path) -> None:
    service = streams
    assert service.ask("PUT", "pipelines/flights", DECLARED)[0] == 201
    one = service.token("one", Grant(Role.OPERATE, ("pipeline:hourly",)))
    assert [each["name"] for each in service.ask("GET", "flows", token=one)[1]["flows"]] == ["hourly"]
    assert service.ask("GET", "flows/flights", token=one)[1]["error"]["code"] == "PIPELINE_NOT_FOUND"
    assert service.ask("GET", "flows/hourly", token=one)[0] == 200
    status, found = service.ask("PUT", "flows/hourly/pause", token=one)
    assert (status, found["error"]["code"]) == (403, "PERMISSION_DENIED"), "it runs code of the machine's owner"
    assert service.ask("GET", "flows/hourly")[1]["state"] == "new"
    some = service.token("some", Grant(Role.READ, ("pipeline:absent*",)))
    for name in ("absent", "absent.yaml"):
        status, found = service.ask("GET", f"flows/{name}", token=some)
        assert (status, found["error"]["message"]) == (404, f"no flow {name!r}"), "other flows are not named"


def test_a_stream_s_count_begins_anew_and_its_letters_are_asked_for_by_place(streams: Service) -> None:
    service = streams
    settings = service.management._settings
    stream = declared_flow(settings, "hourly")
    assert service.ask("PUT", "flows/hourly/errors/reset")[0] == 200
    incarnations = Incarnations(settings, "hourly")
    assert resets_of(sink_folder(incarnations.checkpoint(incarnations.state))) == 1
    assert service.ask("GET", "flows/hourly/errors?lane=in-0&low=3&high=9") == (200, {"place": "", "letters": []})
    for asked, status, code in (
        ("flows/hourly/errors?low=3", 422, "INVALID_ARGUMENT"),
        ("flows/hourly/errors?low=-3&lane=in-0", 422, "INVALID_ARGUMENT"),
    ):
        assert (service.ask("GET", asked)[0], service.ask("GET", asked)[1]["error"]["code"]) == (status, code)
    status, found = service.ask("PUT", "flows/hourly/redrive", {})
    assert (status, "has no dead letters" in found["error"]["message"]) == (422, True)
    with Incarnations(settings, "hourly").locked():
        lettered = stream.model_copy(update={"sink": stream.sink.model_copy(update={"dead_letters": "dead"})})
        with pytest.raises(StreamBusy):
            redrive(settings, lettered)
    one = service.token("one", Grant(Role.OPERATE, ("pipeline:hourly",)))
    for method, path in (("GET", "errors"), ("PUT", "redrive"), ("PUT", "errors/reset")):
        status, found = service.ask(method, f"flows/hourly/{path}", {} if path == "redrive" else None, token=one)
        assert (status, found["error"]["code"]) == (403, "PERMISSION_DENIED"), path
    assert service.ask("PUT", "pipelines/flights", DECLARED)[0] == 201
    status, found = service.ask("PUT", "flows/flights/redrive", {})
    assert (status, "PUT /pipelines/flights/redrive" in found["error"]["message"]) == (422, True)
    assert service.ask("PUT", "flows/flights/errors/reset")[0] == 200


def test_a_pipeline_and_a_stream_never_have_one_name(streams: Service) -> None:
    service = streams
    for path in ("pipelines/hourly", "pipelines/hourly/validate"):
        status, found = service.ask("PUT", path, DECLARED)
        assert (status, found["error"]["problems"][0]["kind"]) == (422, "taken")
    settings = service.management._settings
    note_flow(settings, pipeline_of({"id": "hourly", **DECLARED}))
    (first, *_) = check(settings, declared_flow(settings, "hourly"))
    assert (first.level, first.field) == ("error", "name")


def test_a_declaration_is_checked_with_what_its_pair_promises(service: Service) -> None:
    status, found = service.ask("PUT", "pipelines/flights/validate", DECLARED)
    assert (status, found["guarantee"].partition(":")[0]) == (200, "effectively once")


FLOW: dict[str, Any] = {"transform": DECLARED["steps"], **{n: DECLARED[n] for n in ("source", "sink")}, "title": "T"}
"""The same in the form of flows, with a title."""


def test_a_declaration_in_the_form_of_flows_is_the_same_pipeline_and_any_is_shown_so(streams: Service) -> None:
    service = streams
    was = {**DECLARED, "name": "T"}
    valid, same = (service.ask("PUT", "pipelines/flights/validate", each) for each in (FLOW, was))
    assert valid[0] == 200
    assert valid == same
    assert service.ask("PUT", "pipelines/flights", FLOW)[1]["declaration"]["steps"][0]["kind"] == "rename"
    told = service.ask("GET", "flows/flights")[1]["declaration"]
    assert (told["name"], told["title"], told["host"]) == ("flights", "T", "range")
    assert told["transform"]["steps"] == [{"kind": "rename", "fields": {"a": "b"}}]
    assert "hunter2" not in json.dumps(told)
    assert service.ask("GET", "flows/hourly")[1]["declaration"]["sink"]["collection"] == "hours"
    service.ask("PUT", "pipelines/flights/resume")
    sink = {name: each for name, each in DECLARED["sink"].items() if name != "password"}
    changed = service.ask("PUT", "pipelines/flights/declaration?version=1", {**FLOW, "sink": sink, "title": "U"})
    assert changed[0] == 200
    assert (changed[1]["restarted_for"], changed[1]["pipeline"]["secrets"]) == ([], ["sink.password"])
    nested = {**FLOW, "transform": {"steps": [{"kind": "drop", "fields": ["a"]}]}}
    assert service.ask("PUT", "pipelines/flights/declaration?version=2", nested)[1]["restarted_for"] == ["steps"]


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"host": "spark"}, "host"),
        ({"schedule": "@daily"}, "schedule"),
        ({"version": 2}, "version"),
        ({"name": "other"}, "name"),
        ({"transform": {"sql": "select 1"}}, "transform"),
        ({"transform": "os:system"}, "transform"),
        ({"late": {"kind": "function", "function": "os:system"}}, "late"),
        ({"sink": {"kind": "function", "function": "os:system"}}, "sink"),
        ({"sink": {"kind": "delta", "path": "/elsewhere"}}, "sink"),
        ({"steps": []}, "transform"),
        ({"transform": [{"kind": "filter", "keep": "doc.("}]}, "transform.0.keep"),
        ({"transform": {"steps": [{"kind": "filter", "keep": "doc.("}]}}, "transform.steps.0.keep"),
        ({"transform": [{"kind": "constant", "fields": {"x": "${env:HOME}"}}]}, "transform.0.fields.x"),
    ],
)
def test_the_service_keeps_no_flow_that_runs_code_or_that_it_cannot_run(
    service: Service, changes: dict[str, Any], field: str
) -> None:
    for path in ("pipelines/flights", "pipelines/flights/validate"):
        status, found = service.ask("PUT", path, {**FLOW, **changes})
        assert status == 422, found
        assert field in [each["field"] for each in found["error"]["problems"]], found
    assert service.ask("GET", "pipelines")[1]["total"] == 0


def test_a_step_that_fails_leaves_nothing_and_the_id_is_free(service: Service, settings: Settings) -> None:
    service.world.failing = "resource_policy"
    status, found = service.ask("PUT", "pipelines/flights", DECLARED)
    assert (status, found["error"]["code"], found["error"]["retriable"]) == (503, "LOG_UNAVAILABLE", True)
    assert "Kafka gave no answer" in found["error"]["message"]
    assert service.ask("GET", "pipelines/flights")[0] == 404
    service.world.failing = ""
    assert service.ask("PUT", "pipelines/flights", DECLARED)[0] == 201


def test_two_editors_and_secrets_that_stay_or_must_be_given_anew(service: Service) -> None:
    service.ask("PUT", "pipelines/flights", DECLARED)
    service.ask("PUT", "pipelines/flights/resume")
    sink = {key: value for key, value in DECLARED["sink"].items() if key != "password"}
    renamed = {**DECLARED, "sink": sink, "name": "Flights"}
    status, changed = service.ask("PUT", "pipelines/flights/declaration?version=1", renamed)
    assert (status, changed["pipeline"]["version"], changed["restarted_for"]) == (200, 2, [])
    assert changed["pipeline"]["secrets"] == ["sink.password"]
    assert (
        service.ask("PUT", "pipelines/flights/declaration?version=1", renamed)[1]["error"]["code"]
        == "PIPELINE_CONFLICT"
    )
    other = {**renamed, "failure_threshold": 3}
    status, changed = service.ask("PUT", "pipelines/flights/declaration?version=2", other)
    assert changed["restarted_for"] == ["failure_threshold"]
    assert service.deployment.runs == {"flights": 1}, "stopped and started"
    elsewhere = {**other, "sink": {**sink, "hosts": ["http://evil:9200"]}}
    status, found = service.ask("PUT", "pipelines/flights/declaration?version=3", elsewhere)
    assert status == 422, "a secret is sent nowhere else"
    assert "password" in found["error"]["message"]


TOKENS = {
    "stranger": (Grant(Role.READ, ("collection:x",)), None),
    "producer": (Grant(Role.PRODUCE), Role.PRODUCE),
    "reader": (Grant(Role.READ, ("pipeline:fl*",)), Role.READ),
    "runner": (Grant(Role.OPERATE, ("pipeline:flights",)), Role.OPERATE),
    "chief": (Grant(Role.ADMIN), Role.ADMIN),
}
"""Grants of tokens, and what role over the pipeline they are."""


def test_every_call_lets_in_who_the_table_says_and_no_one_else(service: Service) -> None:
    tokens = {name: service.token(name, grant) for name, (grant, _) in TOKENS.items()}
    who: dict[str, Role | None] = {name: role for name, (_, role) in TOKENS.items()}
    for name in PipelineRole:  # roles of the pipeline itself
        tokens[name], who[name] = service.token(name, Grant(Role.READ, ("collection:x",))), name.role
    found = list(calls(service.app))
    assert {call.name for call in found} == set(CALLS)
    for call in found:
        for name, role in who.items():
            _anew(service)
            ask = partial(service.ask, token=tokens[name])
            on_all = role if name in TOKENS and TOKENS[name][0].patterns == ("*",) else None
            assert got(ask, call) == expected(call, on_it=role, on_all=on_all, anywhere=True), (name, call)
        assert got(partial(service.ask, token=""), call) == "logged out"
        assert got(partial(service.ask, token="nonsense"), call) == "logged out"


def _anew(service: Service) -> None:
    """The pipeline as every case finds it."""
    status, answer = service.ask("PUT", "pipelines/flights", DECLARED)
    if status != 201:
        assert answer["error"]["code"] == "PIPELINE_EXISTS", answer
    else:
        for name in PipelineRole:
            assert service.ask("PUT", f"pipelines/flights/roles/{name}?role={name}")[0] == 200


def test_who_may_not_see_a_pipeline_does_not_learn_that_it_is_there(service: Service) -> None:
    service.ask("PUT", "pipelines/flights", DECLARED)
    service.ask("PUT", "pipelines/flights/roles/viewer?role=viewer")
    nobody = service.token("nobody", Grant(Role.READ, ("collection:x",)))
    viewer = service.token("viewer", Grant(Role.READ, ("collection:x",)))
    for call in calls(service.app):
        if "flights" in call.path:
            body = [] if call.method == "PUT" else None
            there = service.ask(call.method, call.path, body, token=nobody)
            absent = service.ask(call.method, call.path.replace("flights", "absent"), body, token=nobody)
            assert str(absent).replace("absent", "flights") == str(there), call
    listed = [service.ask("GET", "pipelines", token=each)[1]["pipelines"] for each in (viewer, nobody)]
    assert [[each["id"] for each in found] for found in listed] == [["flights"], []]


def test_what_the_machine_made_is_of_nobody_who_bears_its_name(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    service.ask("PUT", "pipelines/flights", DECLARED)
    with monkeypatch.context() as earlier:  # builds that took every name
        earlier.setattr(token_file, "LOCAL_ADMIN", Caller(Principal.admin("nobody")))
        namesake = service.token("machine", Grant(Role.READ, ("collection:x",)))
    assert service.ask("GET", "pipelines/flights", token=namesake)[0] == 404
    assert service.ask("DELETE", "pipelines/flights")[0] == 204


def test_a_list_is_filtered_sorted_and_paged(service: Service) -> None:
    for name in ("b-one", "a-two", "c-three"):
        service.ask("PUT", f"pipelines/{name}", {**DECLARED, "account": name[0]})
    listed = lambda query: [each["id"] for each in service.ask("GET", f"pipelines?{query}")[1]["pipelines"]]  # noqa: E731
    assert listed("") == ["a-two", "b-one", "c-three"]
    assert listed("sort=created_at&descending=true&limit=2") == ["c-three", "a-two"]
    assert listed("offset=1&limit=1") == ["b-one"]
    assert listed("text=TWO") == ["a-two"]
    assert listed("account=c&wanted=STOPPED") == ["c-three"]


def test_a_dry_run_shows_each_step_and_a_clone_has_no_secrets(service: Service) -> None:
    service.ask("PUT", "pipelines/flights", DECLARED)
    status, found = service.ask("PUT", "pipelines/flights/dry-run", {"documents": [{"a": 1}, 7]})
    assert status == 200
    assert [each["outcome"] for each in found] == ["index", "error"]
    assert found[0]["steps"][0]["document"] == {"b": 1}
    keyed = {
        "documents": [{"a": 1}, None],
        "keys": ["k1"],
        "declaration": {**DECLARED, "sink": {**DECLARED["sink"], "ids": "key"}},
    }
    found = service.ask("PUT", "pipelines/flights/dry-run", keyed)[1]
    assert [(each["outcome"], each["id"]) for each in found] == [("index", "k1"), ("delete", "sample-1")]
    status, silent = service.ask("PUT", "pipelines/flights/dry-run", {"newest": 3})
    assert (status, silent["error"]["code"]) == (503, "LOG_UNAVAILABLE")
    assert service.ask("PUT", "pipelines/flights/dry-run", {"newest": 21})[0] == 422
    assert service.ask("PUT", "pipelines/flights/clone/copy")[0] == 422, "username without its password"
    status, made = service.ask("PUT", "pipelines/flights/clone/copy", {"sink": DECLARED["sink"]})
    assert (status, made["id"]) == (201, "copy")


def test_a_redrive_is_asked_for_by_a_selection_and_stands_in_the_history(service: Service) -> None:
    service.ask("PUT", "pipelines/flights", DECLARED)
    assert service.ask("GET", "pipelines/flights/redrive")[1]["state"] == "NONE"
    chosen = {"kind": "CAST", "first": "0-3", "last": "0-9"}
    assert service.ask("PUT", "pipelines/flights/redrive", chosen)[0] == 202
    asked = service.redrives.asked["flights"]
    assert asked["selection"] == Selection(kind="CAST", first="0-3", last="0-9").to_json()
    newest = service.ask("GET", "pipelines/flights/history")[1][0]
    assert (newest["what"], newest["who"], newest["detail"]["selection"]["kind"]) == ("redrive", "machine", "CAST")
    for wrong in ({"first": "x"}, {"ids": ["0-1"] * 1001}, {"first": "0-1", "last": "1-1"}):
        assert service.ask("PUT", "pipelines/flights/redrive", wrong)[0] == 422, wrong
    assert service.ask("GET", "pipelines/flights/errors?first=x")[1]["error"]["code"] == "INVALID_ARGUMENT"
    status, silent = service.ask("GET", "pipelines/flights/errors")
    assert (status, silent["error"]["code"]) == (503, "LOG_UNAVAILABLE")


def test_health_says_what_it_runs_on(service: Service) -> None:
    status, found = service.ask("GET", "pipelines-health")
    assert (status, found["service"], found["dependencies"]["store"]) == (200, "millrace-pipelines", "ok")
    assert found["language"].startswith("Python 3.")


def test_the_kinds_of_sources_and_sinks_are_told_with_the_schema_of_their_declarations(service: Service) -> None:
    status, found = service.ask("GET", "pipelines-kinds")
    assert status == 200
    kinds = {(each["part"], each["kind"]): each for each in found}
    assert kinds.keys() == {("source", each.name) for each in SOURCES} | {("sink", each.name) for each in SINKS}
    assert kinds["source", "kafka"]["declaration"]["properties"]["topics"]["type"] == "array"
    assert kinds["sink", "delta"]["promise"].startswith("exactly once")


def test_a_probe_needs_no_token_and_hears_whether_the_store_answers(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = service.client.get("/health")
    known = {"service": "millrace-pipelines", "version": VERSION, "ready": True}
    assert (answer.status_code, known.items() <= answer.json().items()) == (200, True)
    assert set(answer.json()) == {*known, "language", "architecture"}

    def silent() -> None:
        raise MetaUnavailable("no answer")

    monkeypatch.setattr(service.management._store, "ping", silent)
    assert service.client.get("/health").json()["ready"], "it is asked once a second at most"
    service.management._answered = (-math.inf, True)
    answer = service.client.get("/health")
    assert (answer.status_code, answer.json()["ready"]) == (503, False)


def test_its_root_says_where_to_go_and_to_nobody_more_than_that(service: Service) -> None:
    outside = service.client.get("/")
    assert (outside.status_code, outside.json()["openapi"], "version" in outside.json()) == (
        200,
        "/openapi.json",
        False,
    )
    inside = service.client.get("/", headers={"Authorization": f"Bearer {OWN}"}).json()
    assert inside["version"] == VERSION
    for name in ("openapi", "health", "metrics", "api"):
        assert service.client.get(inside[name], headers={"Authorization": f"Bearer {OWN}"}).status_code == 200, name
        assert service.client.get(inside[name]).status_code == (200 if name == "health" else 401), name


def test_a_request_s_id_is_in_its_answer_the_log_and_the_history(
    service: Service, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="millrace.service")
    own = {"Authorization": f"Bearer {OWN}"}
    ask = partial(service.client.request, "PUT", json=DECLARED)
    assert (
        ask("/api/v1/pipelines/flights", headers={**own, "X-Request-ID": "deploy-7"}).headers["x-request-id"]
        == "deploy-7"
    )
    made = ask("/api/v1/pipelines/fl%0Aights", headers={**own, "X-Request-ID": "two words"}).headers["x-request-id"]
    assert re.fullmatch(r"[0-9a-f]{16}", made)
    assert {each["detail"]["request"] for each in service.ask("GET", "pipelines/flights/history")[1]} == {"deploy-7"}
    told = [line for line in caplog.messages if line.startswith("PUT")]
    assert re.fullmatch(r"PUT /api/v1/pipelines/flights by machine: 201 in \d+ ms", told[0])
    assert re.fullmatch(r"PUT /api/v1/pipelines/fl%0Aights by machine: 422 in \d+ ms", told[1])


def test_metrics_are_those_of_workers_that_live_and_say_who_lacks_one(service: Service, settings: Settings) -> None:
    _reporter = ProcessRegistration(settings.run_path)
    for name in ("runs", "dies", "rests"):
        service.ask("PUT", f"pipelines/{name}", DECLARED)
        metrics = Metrics()
        metrics.flow_memory_bytes.labels(name).set(7)
        metrics.write_textfile(metrics_path(settings, name))
        pid = os.getpid() if name == "runs" else 0
        said = PipelineStatus(pipeline=name, state=State.RUNNING, at=time.time(), pid=pid)
        status_path(settings, name).write_text(said.model_dump_json())
    for name in ("runs", "dies"):
        service.ask("PUT", f"pipelines/{name}/resume")
    service.deployment.runs.pop("dies")
    text = service.client.get("/metrics", headers={"Authorization": f"Bearer {OWN}"}).text
    found = {line for line in text.splitlines() if line.startswith("millrace_flow_")}
    assert found == {
        'millrace_flow_memory_bytes{flow="runs"} 7.0',
        'millrace_flow_running{flow="runs",host="range"} 1.0',
        'millrace_flow_running{flow="dies",host="range"} 0.0',
    }


def test_a_service_that_comes_again_keeps_what_was_asked_for(service: Service) -> None:
    service.ask("PUT", "pipelines/flights", DECLARED)
    service.ask("PUT", "pipelines/flights/resume")
    service.deployment.runs.clear()  # its worker died, with its supervisor
    service.management.tend()
    assert service.deployment.running("flights")
    service.ask("PUT", "pipelines/flights/stop")
    service.management.tend()
    assert not service.deployment.running("flights")


def test_what_a_call_does_not_have_is_refused_and_nothing_is_done(service: Service) -> None:
    service.ask("PUT", "pipelines/flights", DECLARED)
    service.ask("PUT", "pipelines/flights/offsets", {"in-0": 50})
    for method, path, body in (
        ("PUT", "pipelines/flights/redrive", {"dryRun": True}),
        ("DELETE", "pipelines/flights/offsets?at=latest", None),
        ("PUT", "pipelines/flights/restart?onlyFailed=true", None),
        ("PUT", "pipelines/flights/dry-run", {"document": {}}),
        ("PUT", "pipelines-quotas/ada", {"pipelines": 1, "cpus": 1, "memory_mib": 1, "memory": 2}),
        ("GET", "pipelines?state=RUNNING", None),
        ("DELETE", "pipelines/flights?forced=true", None),
    ):
        status, found = service.ask(method, path, body)
        assert (status, found["error"]["code"]) == (422, "INVALID_ARGUMENT"), path
    assert service.ask("GET", "pipelines/flights/offsets") == (200, {"in-0": 50})
    assert service.redrives.asked == {}
    status, found = service.ask("DELETE", "pipelines/flights/offsets?at=latest")
    assert found["error"]["message"] == "at is not a parameter of this call: its parameters are to"
    assert service.ask("DELETE", "pipelines/flights/offsets?at=latest", token="wrong")[0] == 401, "not to a stranger"


def test_a_dry_run_shows_a_number_that_is_none_as_the_sink_would_have_it(service: Service) -> None:
    service.ask("PUT", "pipelines/flights", DECLARED)
    steps = [{"kind": "flatten"}, {"kind": "cast", "fields": {"b": "float"}}]
    asked = {"documents": [{"a": 1}], "declaration": {**DECLARED, "steps": steps}}
    raw = json.dumps(asked).replace('{"a": 1}', '{"a": NaN, "b": 1}')
    headers = {"Authorization": f"Bearer {OWN}", "content-type": "application/json"}
    answer = service.client.put("/api/v1/pipelines/flights/dry-run", content=raw, headers=headers)
    assert answer.status_code == 200
    assert answer.json()[0]["document"] == {"a": None, "b": 1.0}


def test_how_a_redrive_ended_is_known_when_its_run_is_gone(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    service.ask("PUT", "pipelines/flights", DECLARED)
    failed = RedriveStatus(
        pipeline="flights", state=RedriveState.FAILED, id="r1", asked_by="ada", asked_at=time.time(), cause="no index"
    )
    monkeypatch.setattr(service.redrives, "status", lambda _: failed)
    service.management.tend()
    service.management.tend()
    monkeypatch.setattr(service.redrives, "status", lambda name: RedriveStatus(pipeline=name, state=RedriveState.NONE))
    found = service.ask("GET", "pipelines/flights/redrive")[1]
    assert (found["state"], found["id"], found["cause"]) == ("FAILED", "r1", "no index")
    told = [each["what"] for each in service.ask("GET", "pipelines/flights/history")[1]]
    assert told.count("redrive ended") == 1


def test_passwords_are_sealed_where_a_worker_reads_them_and_its_key_opens_them(
    service: Service, settings: Settings
) -> None:
    service.ask("PUT", "pipelines/flights", DECLARED)
    file = settings.data_dir / "pipelines" / "flights" / "pipeline.json"
    assert "hunter2" not in file.read_text()
    keys = Keys(settings.data_dir)
    assert flow_of_file(file, Configuration(), keys=keys).secrets() == {"sink.password": "hunter2"}
    with pytest.raises(InvalidSettings, match="sealed"):
        flow_of_file(file, Configuration())
    stranger = Keys(settings.data_dir, env={"MILLRACE_PIPELINE_KEYS": new_key()})
    with pytest.raises(SecretUnreadable):
        flow_of_file(file, Configuration(), keys=stranger)
    status, found = service.ask(
        "PUT", "pipelines/other", {**DECLARED, "name": json.loads(file.read_text())["sink"]["password"]}
    )
    assert (status, found["error"]["problems"][0]["kind"]) == (422, "environment"), "nobody has it opened by the API"
    # A key of later takes the place of the first one.
    key = settings.data_dir / "access" / "pipelines.key"
    old = key.read_text()
    key.write_text(f"{new_key()}\n{old}")
    service.management._store.rotate_keys(who="ada")
    Deployment(settings).seal_anew(service.management._store)
    key.write_text(key.read_text().splitlines()[0])
    made = flow_of_file(file, Configuration(), keys=Keys(settings.data_dir))
    assert made.secrets() == {"sink.password": "hunter2"}
