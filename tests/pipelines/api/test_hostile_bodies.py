"""Bodies that nobody sends in good faith.

Larger than memory, nested without end, numbers and texts that JSON has and others have not. Each is answered, none by
500, and a stranger's is not even read.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterable
from typing import Any

import pytest

from millrace.base.settings import Settings
from millrace.pipelines.api.routes import CALLS
from millrace.service.middleware import MAX_BODY_BYTES
from millrace.service.server import serving
from tests.pipelines.api.matrix import calls
from tests.pipelines.api.test_routes import DECLARED, OWN, Service, service

__all__ = ["service"]


def _answer(address: str, head: str, parts: Callable[[], Iterable[bytes]]) -> tuple[int, bytes]:
    """Return status and body of the answer to a PUT of `parts()`, after which the server closes the connection.

    A connection that is closed with unread bytes is reset, and the reset may overtake the
    answer: then it is asked again.
    """
    for _ in range(20):
        answer = _asked(address, head, parts())
        if answer:
            break
    status, _, rest = answer.partition(b"\r\n")
    return int(status.split()[1]), rest.partition(b"\r\n\r\n")[2]


def _asked(address: str, head: str, parts: Iterable[bytes]) -> bytes:
    host, _, port = address.removeprefix("http://").partition(":")
    with socket.create_connection((host, int(port)), timeout=20) as connection:
        connection.sendall(
            f"PUT /api/v1/pipelines/x HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n{head}\r\n".encode()
        )
        try:
            for part in parts:
                connection.sendall(part)
        except (ConnectionResetError, BrokenPipeError):
            pass  # it has heard enough
        answer = b""
        try:
            while part := connection.recv(1 << 16):
                answer += part
        except ConnectionResetError:
            pass
    return answer


@pytest.mark.slow
def test_a_body_that_is_too_large_is_not_read_whoever_sends_it(service: Service, settings: Settings) -> None:
    with serving(service.app, settings) as address:
        status, body = _answer(address, f"content-length: {1 << 40}\r\n", lambda: [b"{"])
        assert (status, json.loads(body)["error"]["code"]) == (413, "BODY_TOO_LARGE")
        chunk = b"10000\r\n" + b" " * 0x10000 + b"\r\n"
        sent: list[int] = []

        def chunks() -> Iterable[bytes]:
            sent.clear()
            for number in range(100 * MAX_BODY_BYTES // 0x10000):
                sent.append(number)
                yield chunk

        assert _answer(address, "transfer-encoding: chunked\r\n", chunks)[0] == 401, "of nobody, none of it"
        assert len(sent) * 0x10000 < 20 * MAX_BODY_BYTES
        own = f"authorization: Bearer {OWN}\r\n"
        assert _answer(address, f"{own}transfer-encoding: chunked\r\n", chunks)[0] == 413
        assert len(sent) * 0x10000 < 20 * MAX_BODY_BYTES, "it was cut off"
        padded = b"{}" + b" " * (MAX_BODY_BYTES - 2)
        head = f"content-length: {len(padded)}\r\nconnection: close\r\n"
        assert _answer(address, head, lambda: [padded])[0] == 401, "one that is not, of nobody"


def _nested(levels: int, inner: str = "1") -> str:
    return '{"a":' * levels + inner + "}" * levels


HOSTILE: dict[str, str] = {
    **{f"{levels} levels": _nested(levels) for levels in (60, 130, 250, 900, 5_000, 200_000)},
    "lists in lists": '{"a":' + "[" * 900 + "]" * 900 + "}",
    "a number of 400 digits": '{"a": ' + "9" * 400 + "}",
    "a number of 5000 digits": '{"a": ' + "9" * 5000 + "}",
    "no number": '{"a": NaN, "b": -Infinity, "c": 1e999}',
    "half a surrogate": '{"a": "\\ud800", "\\udfff": 1}',
    "a zero character": '{"a": "\\u0000", "\\u0000": 1}',
    "many names": json.dumps({f"n{place}": place for place in range(3_000)}),
    "a name without end": json.dumps({"n" * 1_000_000: 1}),
    "no UTF-8": '{"a": "\xff"}',
    "one name twice": '{"source": 1, "source": 2}',
}


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_json_is_answered(service: Service, name: str) -> None:
    text = HOSTILE[name]
    assert service.ask("PUT", "pipelines/flights", DECLARED)[0] == 201
    whole = json.dumps(DECLARED)[:-1]
    bodies = [
        text,
        f'{whole}, "labels": {text}}}',
        f'{whole}, "name": {text}}}',
        f'{whole}, "steps": [{{"kind": "constant", "fields": {{"x": {text}}}}}]}}',
        f'{whole}, "steps": [{{"kind": "json_schema", "schema": {text}}}]}}',
        f'{{"documents": [{text}]}}',
        f'{{"documents": [], "declaration": {text}}}',
    ]
    asked = 0
    for call in calls(service.app):
        if call.method != "PUT" or call.name not in CALLS:
            continue
        path = f"{call.path}?version=1" if call.name == "update_pipeline" else call.path
        for body in bodies:
            answer = _ask(service, path, body)
            assert answer.status_code not in (500,), (call.name, body[:100], answer.text[:500])
            assert len(answer.content) < MAX_BODY_BYTES + 1_000_000
            asked += 1
    assert asked > 50


def _ask(service: Service, path: str, body: str) -> Any:
    headers = {"Authorization": f"Bearer {OWN}", "content-type": "application/json"}
    return service.client.put(f"/api/v1/{path}", content=body.encode("latin-1"), headers=headers)
