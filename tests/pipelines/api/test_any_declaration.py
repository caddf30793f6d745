"""Any JSON in any field of a declaration is a fault of that field or works, and what it makes can be deleted."""

from __future__ import annotations

import copy
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from millrace.access.grants import LOCAL_ADMIN
from millrace.base.errors import PipelineBusy
from millrace.pipelines.deploy.runner import run
from millrace.pipelines.deploy.saga import Saga
from millrace.pipelines.deploy.world import RealWorld
from millrace.pipelines.store.records import Phase, Record
from tests.pipelines.api.test_routes import OWN, Service, service

__all__ = ["service"]


class Index(BaseHTTPRequestHandler):
    """Answers what a saga asks of an OpenSearch that has no index yet."""

    def _answer(self) -> None:
        self.rfile.read(int(self.headers.get("content-length") or 0))
        body = b"" if self.command == "HEAD" else json.dumps({"cluster_uuid": "u", "acknowledged": True}).encode()
        self.send_response(404 if self.command == "HEAD" else 200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_GET = do_PUT = do_HEAD = do_DELETE = _answer

    def log_message(self, format: str, *args: Any) -> None:
        """Says nothing."""


class NoBrokers(RealWorld):
    """The real steps, apart from the topics: no Kafka runs here."""

    def plan(self, step: str, record: Record) -> tuple[str, ...]:
        return () if step == "topics" else super().plan(step, record)


@pytest.fixture
def declared(service: Service) -> Iterator[dict[str, Any]]:
    """A declaration that says each field of its sink, and whose index a server answers for."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Index)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    service.management._world = NoBrokers(service.deployment, service.management._pipeline)
    yield {
        "name": "n",
        "labels": {"a": "b"},
        "source": {
            "kind": "kafka",
            "bootstrap": ["127.0.0.1:9"],
            "topics": ["in"],
            "security": {"protocol": "SSL", "ca": ""},
        },
        "steps": [{"kind": "constant", "fields": {"a": 1}}, {"kind": "cast", "fields": {"a": "int"}}],
        "sink": {
            "kind": "opensearch",
            "hosts": [f"http://127.0.0.1:{server.server_address[1]}"],
            "index_base": "flights",
            "create_index": True,
            "index_body": {"settings": {"index": {"number_of_shards": 1}}, "mappings": {}},
            "username": "u",
            "password": "p",
            "ca": "",
            "timeout_ms": 1000,
        },
        "errors": {"topic": "t"},
        "flush": {"items": 5},
        "resources": {"cpus": 1},
    }
    server.shutdown()
    server.server_close()
    thread.join()


def _paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if path:
        yield path
    for name in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield from _paths(value[name], (*path, name))


SINK = ("sink",)
PATHS = [
    *[("name",), ("labels",), ("source",), ("steps",), SINK, ("errors",), ("flush",), ("resources",)],
    *[("source", name) for name in ("bootstrap", "topics", "security")],
    *[("source", "bootstrap", 0), ("source", "security", "ca"), ("steps", 0, "fields", "a"), ("steps", 1, "fields")],
    *[(*SINK, name) for name in ("hosts", "index_base", "index_body", "username", "password", "ca", "timeout_ms")],
    *[(*SINK, "hosts", 0), (*SINK, "index_body", "settings"), (*SINK, "index_body", "settings", "index")],
    *[(*SINK, "index_body", "mappings"), ("errors", "topic"), ("flush", "items"), ("resources", "cpus")],
]
TEXTS = st.one_of(
    st.text(max_size=20),
    st.sampled_from(["http://h:99999", "http://h:abc", "http://%zz", "http://[", "https://h", "h:0", "ü", "a:b", "\0"]),
)
ANY = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), TEXTS),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(TEXTS, inner, max_size=3)),
    max_leaves=5,
)


def _with(declared: dict[str, Any], path: tuple[Any, ...], value: Any) -> dict[str, Any]:
    found = copy.deepcopy(declared)
    place: Any = found
    for name in path[:-1]:
        place = place[name]
    place[path[-1]] = value
    return found


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(path=st.sampled_from(PATHS), value=ANY)
@example(path=(*SINK, "hosts", 0), value="http://h:99999")
@example(path=(*SINK, "hosts", 0), value="http://h:abc")
@example(path=(*SINK, "hosts", 0), value="http://%zz")
@example(path=(*SINK, "hosts", 0), value="http://[")
@example(path=(*SINK, "username"), value="日本")
@example(path=(*SINK, "index_body", "settings"), value="x")
@example(path=(*SINK, "index_body", "settings", "index"), value=5)
@example(path=(*SINK, "index_body", "mappings"), value=[1])
@example(path=(*SINK, "index_body", "mappings"), value={"a": 1 << 70})
@example(path=("source", "bootstrap", 0), value="h:99999")
@example(path=("source", "security", "ca"), value="garbage")
def test_any_json_in_any_field_is_that_field_s_fault_or_works(
    service: Service, declared: dict[str, Any], path: tuple[Any, ...], value: Any
) -> None:
    asked = json.dumps(_with(declared, path, value))
    own = {"Authorization": f"Bearer {OWN}", "content-type": "application/json"}
    answer = service.client.put("/api/v1/pipelines/any", content=asked, headers=own)
    there = service.ask("GET", "pipelines/any")[0]
    if answer.status_code == 201:
        assert there == 200
        assert service.ask("DELETE", "pipelines/any")[0] == 204
    else:
        assert answer.status_code in (409, 422, 503), answer.text
        assert there == 404, "nothing of it is left"
        if answer.status_code == 422:
            found = answer.json()["error"]
            assert found["code"] == "PIPELINE_INVALID", (
                "it is found when it is checked, and by no library that stumbles"
            )
            assert all(each["field"] for each in found["problems"])


@pytest.mark.parametrize("ca", ["garbage", "-----BEGIN CERTIFICATE-----\nx\n-----END CERTIFICATE-----"])
def test_certificates_that_are_none_are_a_fault_of_their_field(
    service: Service, declared: dict[str, Any], ca: str
) -> None:
    declared["sink"] |= {"hosts": ["https://127.0.0.1:9"], "ca": ca}
    status, found = service.ask("PUT", "pipelines/any", declared)
    assert (status, [each["field"] for each in found["error"]["problems"]]) == (422, ["sink.ca"])


class Breaks(NoBrokers):
    """What a step meets that nobody foresaw."""

    making = undoing = False

    def make(self, step: str, record: Record, things: tuple[str, ...]) -> None:
        super().make(step, record, things)
        if self.making and step == "deployment":
            raise AttributeError("'str' object has no attribute 'keys'")

    def undo(self, step: str, record: Record, things: tuple[str, ...]) -> tuple[str, ...]:
        if self.undoing and step == "index_base":
            raise ValueError("Port out of range 0-65535")
        return super().undo(step, record, things)


def test_a_step_that_fails_unforeseen_is_undone_like_any_other(service: Service, declared: dict[str, Any]) -> None:
    service.management._world = world = Breaks(service.deployment, service.management._pipeline)
    world.making = True
    status, found = service.ask("PUT", "pipelines/any", declared)
    assert status == 422
    assert "AttributeError" in found["error"]["message"]
    assert service.ask("GET", "pipelines/any")[0] == 404


def test_a_pipeline_that_cannot_be_undone_is_deleted_with_force_and_says_what_it_leaves(
    service: Service, declared: dict[str, Any]
) -> None:
    service.management._world = world = Breaks(service.deployment, service.management._pipeline)
    assert service.ask("PUT", "pipelines/any", declared)[0] == 201
    world.undoing = True
    for _ in range(2):
        status, found = service.ask("DELETE", "pipelines/any")
        assert (status, found["error"]["code"]) == (409, "PIPELINE_BUSY")
        assert "force" in found["error"]["message"]
    assert service.ask("GET", "pipelines/any")[1]["phase"] == "DELETING"
    assert service.ask("DELETE", "pipelines/any?force=true")[0] == 204
    assert service.ask("GET", "pipelines/any")[0] == 404
    left = [each["detail"]["things"] for each in service.ask("GET", "pipelines-audit")[1] if each["what"] == "left"]
    assert left == [["flights u"]]


def test_one_that_was_left_half_made_can_be_deleted(service: Service, declared: dict[str, Any]) -> None:
    management = service.management
    management._world = world = Breaks(service.deployment, management._pipeline)
    world.making = world.undoing = True  # its making failed, and so does the undoing
    assert service.ask("PUT", "pipelines/any", declared)[1]["error"]["code"] == "PIPELINE_BUSY"
    assert service.ask("GET", "pipelines/any")[1]["phase"] == "CREATING"
    world.undoing = False
    assert service.ask("DELETE", "pipelines/any")[0] == 204
    # One whose process died in the middle is somebody's who makes it, until it is old enough.
    management._store.create({"id": "any"}, secrets={}, who="ada", saga=Saga(who="ada").to_json())
    with pytest.raises(PipelineBusy, match="being created"):
        management.delete(LOCAL_ADMIN, "any")
    before, management._clock = management._clock, lambda: before() + 61
    management.delete(LOCAL_ADMIN, "any")
    assert service.ask("GET", "pipelines/any")[0] == 404


def test_what_another_build_declared_and_this_one_refuses_is_undone_all_the_same(
    service: Service, declared: dict[str, Any]
) -> None:
    store, world = service.management._store, service.management._world
    kept = {"id": "old", **_with(declared, (*SINK, "hosts", 0), "http://h:99999")}
    made = store.create(kept, secrets={"sink.password": "p"}, who="ada", saga=Saga(who="ada").to_json())
    assert run(store, made, world) is None
    stuck = Saga(at=2, back=True, planned={"index_base": ("flights u",)}, who="ada").to_json()
    made = store.create(kept, secrets={}, who="ada", saga=stuck)
    store.move(made, phase=Phase.DELETING, saga=stuck)
    assert service.ask("DELETE", "pipelines/old")[0] == 422
    assert service.ask("DELETE", "pipelines/old?force=true")[0] == 204
