"""Steps of strangers, tried by a process apart: what has no end ends in time, alone, and nothing of it is left."""

from __future__ import annotations

import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import msgspec
import psutil
import pytest

from millrace.base.errors import LogUnavailable
from millrace.base.settings import Settings
from millrace.flows.declare import expressions
from millrace.flows.declare.flow import Flow
from millrace.flows.records import Record
from millrace.flows.samples.trying import Trying
from millrace.flows.transform.transform import Rules
from millrace.pipelines.declaration import pipeline_of
from millrace.runtime.sandbox.errors import ServiceBusy, TooMuchWork
from millrace.runtime.sandbox.pool import Sandbox
from millrace.runtime.sandbox.protocol import FRAME_HEADER, FrameKind
from tests.pipelines.api.conftest import settings
from tests.pipelines.api.test_routes import DECLARED, Service, service
from tests.waiting import until

__all__ = ["service", "settings"]

SECONDS = 1.0
_AGAIN = {"$ref": "#/$defs/n"}
_DOWN = {"properties": {"a": _AGAIN}}
TWO_WAYS = {"$defs": {"n": {"oneOf": [_DOWN, {"properties": {"a": _AGAIN, "leaf": False}}]}}, **_AGAIN}
"""Each level of a document is looked at twice as often as the one above it."""
MANY_ERRORS = {
    "$defs": {"n": {"anyOf": [{**_DOWN, "required": ["x"]}, {**_DOWN, "required": ["y"]}, {"type": "integer"}]}},
    **_AGAIN,
}
MANY_PATTERNS = {"patternProperties": {f"(a|b{n}){{50}}\\d{{99}}": {"type": "string"} for n in range(9000)}}
EXPRESSION = "doc.l.map(x, x.matches(doc.r))"
TEXTS = {"r": "(.{0,90}x){0,90}y$", "l": ["ab" * 100] * 1000}


def _deep(levels: int) -> Any:
    found: Any = {"leaf": 1}
    for _ in range(levels):
        found = {"a": found}
    return found


HOSTILE: dict[str, tuple[dict[str, Any], Any, set[str]]] = {
    "two ways back": ({"kind": "json_schema", "schema": TWO_WAYS}, _deep(30), {"time", "memory"}),
    "errors without number": ({"kind": "json_schema", "schema": MANY_ERRORS}, _deep(30), {"time", "memory"}),
    "a pattern of the document's own": ({"kind": "compute", "fields": {"x": EXPRESSION}}, TEXTS, {"time"}),
}


def _pipeline(*steps: dict[str, Any]) -> Flow:
    return pipeline_of({"id": "p", **DECLARED, "steps": list(steps)}, compiled=False)


def _records(*documents: Any) -> list[Record]:
    return [Record("sample", 0, n, b"k", msgspec.json.encode(each), 0) for n, each in enumerate(documents)]


def _no_rows(step: Any) -> Any:
    raise AssertionError(step)


_others: set[int] = set()


def _children() -> list[psutil.Process]:
    """Those that this test has started.

    Other tests of this process may have left some, which end when nobody asks them any more.
    """
    found = [each for each in psutil.Process().children() if each.pid not in _others]
    return [each for each in found if "millrace.flows.samples" in each.cmdline()]


@pytest.fixture(autouse=True)
def none_of_other_tests() -> None:
    _others.clear()
    _others.update(each.pid for each in psutil.Process().children())


@pytest.fixture
def trying() -> Iterator[Trying]:
    with Trying(Sandbox("millrace.flows.samples", seconds=SECONDS)) as made:
        yield made
    assert not _children()


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("name", HOSTILE)
def test_what_has_no_end_ends_in_time_and_the_next_is_answered(trying: Trying, name: str) -> None:
    step, document, limits = HOSTILE[name]
    mild = {"kind": "drop", "fields": ["b"]}
    trying.show(_pipeline(mild), _records({}), _no_rows)
    (first,) = _children()
    begun = time.monotonic()
    with pytest.raises(TooMuchWork, match=r"document 1, step 1\.") as raised:
        trying.show(
            _pipeline(mild, step),
            _records({"l": [], "r": ""}, document),
            _no_rows,
        )
    assert raised.value.limit in limits
    assert time.monotonic() - begun < 20, "the first of them would take minutes"
    assert not first.is_running()
    (sample,) = trying.show(_pipeline(mild), _records({"a": 1, "b": 2}), _no_rows)
    assert sample["document"] == {"a": 1}


@pytest.mark.slow
def test_the_service_answers_others_while_one_asks_for_what_has_no_end(settings: Settings, service: Service) -> None:
    service.management._trying = Trying(Sandbox("millrace.flows.samples", seconds=3.0))
    assert service.ask("PUT", "pipelines/flights", DECLARED)[0] == 201
    answers: list[tuple[int, Any]] = []

    def ask(step: dict[str, Any], document: Any) -> None:
        body = {"documents": [document], "declaration": {**DECLARED, "steps": [step]}}
        answers.append(service.ask("PUT", "pipelines/flights/dry-run", body))

    threads = [
        threading.Thread(target=ask, args=HOSTILE[name][:2])
        for name in ("two ways back", "a pattern of the document's own")
    ]
    for thread in threads:
        thread.start()
    until(lambda: len(_children()) == 2, "both are tried")
    looks = 0
    while all(thread.is_alive() for thread in threads):
        assert service.ask("GET", "pipelines/flights")[0] == 200
        looks += 1
    assert looks > 1
    for thread in threads:
        thread.join()
    assert [(status, body["error"]["code"]) for status, body in answers] == [(422, "TOO_MUCH_WORK")] * 2
    assert not _children()


@pytest.mark.slow
def test_a_check_of_a_declaration_ends_too_and_tells_all_that_is_wrong(service: Service) -> None:
    service.management._trying = Trying(Sandbox("millrace.flows.samples", seconds=SECONDS))
    wrong = [
        {"kind": "drop", "fields": []},
        {"kind": "filter", "keep": "1 +"},
        {"kind": "json_schema", "schema": {"type": 7}},
    ]
    status, answer = service.ask("PUT", "pipelines/x/validate", {**DECLARED, "steps": wrong, "flush": {"mib": 0}})
    assert status == 422
    fields = [each["field"] for each in answer["error"]["problems"]]
    assert fields == ["steps.0.fields", "flush.mib", "steps.1.keep", "steps.2.schema"]
    steps = [{"kind": "json_schema", "schema": MANY_PATTERNS}]
    for path in ("pipelines/x/validate", "pipelines/x"):
        begun = time.monotonic()
        status, answer = service.ask("PUT", path, {**DECLARED, "steps": steps})
        assert (status, answer["error"]["code"]) == (422, "TOO_MUCH_WORK")
        assert "steps.0: not done within 1 s" in answer["error"]["message"]
        assert time.monotonic() - begun < 20
    service.management._trying.close()


def test_the_service_compiles_nothing_itself(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("compiled in the service")

    monkeypatch.setattr(expressions, "compiled", refuse)
    monkeypatch.setattr(expressions, "validator", refuse)
    steps = [{"kind": "filter", "keep": "doc.a > 0"}, {"kind": "json_schema", "schema": {"type": "object"}}]
    declared = {**DECLARED, "steps": steps}
    assert service.ask("PUT", "pipelines/x/validate", declared)[0] == 200
    assert service.ask("PUT", "pipelines/x", declared)[0] == 201
    assert service.ask("PUT", "pipelines/x/declaration?version=1", {**declared, "name": "n"})[0] == 200
    assert service.ask("PUT", "pipelines/y/clone/z")[0] == 404
    status, found = service.ask("PUT", "pipelines/x/dry-run", {"documents": [{"a": 1}]})
    assert (status, found[0]["outcome"]) == (200, "index")
    service.management.tend()


@pytest.mark.slow
def test_who_comes_when_too_many_ask_is_told_so_at_once() -> None:
    apart = Sandbox("millrace.flows.samples", seconds=SECONDS, max_processes=1, max_queued=1)
    step, document, _ = HOSTILE["a pattern of the document's own"]
    errors: list[type[Exception]] = []

    def ask() -> None:
        with pytest.raises((TooMuchWork, ServiceBusy)) as raised:
            Trying(apart).show(_pipeline(step), _records(document), _no_rows)
        errors.append(raised.type)

    threads = [threading.Thread(target=ask) for _ in range(5)]
    with apart:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert sorted(each.__name__ for each in errors) == ["ServiceBusy"] * 3 + ["TooMuchWork"] * 2
    assert errors[:3] == [ServiceBusy] * 3


def test_what_is_shown_is_bounded(trying: Trying) -> None:
    steps = [{"kind": "rename", "fields": {"a": "b"}}] * 90
    with pytest.raises(TooMuchWork, match="more than 8 MiB") as raised:
        trying.show(_pipeline(*steps), _records({"z": "x" * 1_000_000}), _no_rows)
    assert raised.value.limit == "answer"


class _Rows:
    def get(self, key: str) -> dict[str, Any] | None:
        if key == "away":
            raise LogUnavailable("it is away")
        time.sleep(0.7)  # twice that is more than the steps' own time
        return {"id": key, "n": 1} if key != "none" else None


def test_a_lookup_s_rows_come_from_the_service_on_its_time(trying: Trying) -> None:
    step = {"kind": "lookup", "collection": "c", "key": "k", "into": "row", "missing": "null"}
    found = trying.show(_pipeline(step), _records({"k": "x"}, {"k": "none"}, {"k": "away"}), lambda _: _Rows())
    assert [each["document"] and each["document"]["row"] for each in found] == [{"id": "x", "n": 1}, None, None]
    assert found[2]["reason"] == "it is away"


def test_a_process_that_went_while_nobody_asked_is_no_fault(trying: Trying) -> None:
    for _ in range(3):
        assert trying.problems([{"kind": "filter", "keep": "true"}]) == []
        (child,) = _children()
        child.send_signal(signal.SIGTERM)
        child.wait(10)


@pytest.mark.slow
def test_it_ends_by_itself_when_who_asked_is_gone() -> None:
    step, document, _ = HOSTILE["a pattern of the document's own"]
    command = [
        sys.executable,
        "-m",
        "millrace.flows.samples",
        "--seconds",
        "0.5",
        "--memory-mib",
        "512",
        "--where",
        "2",
    ]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    body = pickle.dumps(("show", Rules.of(_pipeline(step)), _records(document)))
    child.communicate(FRAME_HEADER.pack(FrameKind.REQUEST, len(body)) + body, timeout=120)  # and nothing behind it
    assert child.returncode == -signal.SIGXCPU


@pytest.mark.parametrize(("levels", "outcome"), [(200, "index"), (201, "error")])
def test_a_document_that_no_answer_can_hold_is_said_to_be_too_deep(trying: Trying, levels: int, outcome: str) -> None:
    (found,) = trying.show(_pipeline({"kind": "drop", "fields": ["z"]}), _records(_deep(levels - 1)), _no_rows)
    assert (found["outcome"], "too deep to be shown" in found["reason"]) == (outcome, outcome == "error")
