"""What a stranger may take of a service: a connection for a while, the head of one request, and no body."""

from __future__ import annotations

import asyncio
import http.client
import json
import socket
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from multiprocessing.connection import wait
from typing import Any

import pytest
from fastapi import APIRouter, HTTPException
from starlette.types import Message

from millrace.access.grants import LOCAL_ADMIN, Role
from millrace.access.permissions import Requirement, Scope
from millrace.base.settings import Settings
from millrace.log.server.connections import ConnectionLimits
from millrace.service.application import RouteGroup, build_app
from millrace.service.middleware import BodyLimit
from millrace.service.server import serving
from tests.waiting import until

OWN = "own"
CALLS = {"echo": Requirement((Role.READ,), Scope.ANYTHING, description="give it back")}


async def _door(request: Any, credentials: Any) -> Any:
    if credentials is None or credentials.credentials != OWN:
        raise HTTPException(401, "Send a token.")
    return LOCAL_ADMIN


@pytest.fixture
def app() -> Any:
    router = APIRouter()

    @router.put("/echo")
    def echo(body: dict[str, Any]) -> dict[str, Any]:
        return body

    return build_app([RouteGroup(router, CALLS)], _door)


@pytest.fixture
def place(app: Any, settings: Settings) -> Iterator[tuple[str, int]]:
    limits = ConnectionLimits(connections=12, unauthenticated_seconds=0.5)
    with serving(app, settings, limits) as address:
        host, _, port = address.removeprefix("http://").partition(":")
        yield host, int(port)


def _ended(connection: socket.socket) -> bool:
    try:
        return connection.recv(1 << 16) == b""
    except (BlockingIOError, TimeoutError):
        return False
    except ConnectionError:
        return True


def _ask(client: http.client.HTTPConnection, token: str = OWN) -> tuple[int, Any]:
    client.request("PUT", "/echo", '{"a": 1}', {"authorization": f"Bearer {token}", "content-type": "application/json"})
    answer = client.getresponse()
    return answer.status, json.loads(answer.read())


def test_requests_that_are_never_sent_whole_are_ended_and_keep_nobody_out(place: tuple[str, int]) -> None:
    client = http.client.HTTPConnection(*place, timeout=20)
    assert _ask(client) == (200, {"a": 1})
    own = client.sock.getsockname()
    with ExitStack() as stack:
        halves = [stack.enter_context(socket.create_connection(place, timeout=20)) for _ in range(40)]
        for each in halves:
            each.setblocking(False)
            try:
                each.sendall(b"PUT /echo HTTP/1.1\r\nhost: x\r\ncontent-")
            except ConnectionError:
                pass  # shut already: there were too many
        assert _ask(client) == (200, {"a": 1}), "whoever has a token comes in meanwhile"
        until(lambda: all(map(_ended, halves)), "each of them is ended")
    assert _ask(client) == (200, {"a": 1})
    assert client.sock.getsockname() == own, "the known connection was kept"
    client.close()


def test_a_pooled_connection_outlives_the_pauses_of_its_client(
    app: Any, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    later = asyncio.BaseEventLoop.call_later

    def sooner(self: asyncio.BaseEventLoop, delay: float, *given: Any, **named: Any) -> asyncio.TimerHandle:
        return later(self, delay / 50, *given, **named)  # a second is a minute of the server's pauses

    monkeypatch.setitem(sys.modules, "uvloop", None)  # asyncio's own loop, whose timers can be replaced
    monkeypatch.setattr(asyncio.BaseEventLoop, "call_later", sooner)
    with serving(app, settings) as address:
        client = http.client.HTTPConnection(address.removeprefix("http://"), timeout=20)
        assert _ask(client) == (200, {"a": 1})
        assert not wait([client.sock], 60 / 50), "the server closed it"
        assert _ask(client) == (200, {"a": 1})
        assert wait([client.sock], 20), "one that nobody uses is closed in the end"
        client.close()


def test_a_stranger_s_body_is_not_waited_for(place: tuple[str, int]) -> None:
    with socket.create_connection(place, timeout=20) as connection:
        connection.sendall(
            b"PUT /echo HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 100000\r\n\r\n{"
        )
        answer = b""
        while part := connection.recv(1 << 16):
            answer += part
    assert answer.startswith(b"HTTP/1.1 401 ")
    assert b"connection: close" in answer.lower()


def test_a_stranger_has_one_answer_over_a_connection_and_a_head_has_a_bound(place: tuple[str, int]) -> None:
    client = http.client.HTTPConnection(*place, timeout=20)
    assert _ask(client, "wrong")[0] == 401
    assert client.sock is None, "it said that it closes"
    with socket.create_connection(place, timeout=20) as connection:
        connection.sendall(b"GET /echo HTTP/1.1\r\nhost: x\r\nx: " + b"y" * (200 << 10))
        assert connection.recv(1 << 16).startswith(b"HTTP/1.1 400 ")


def test_a_body_that_does_not_come_is_an_error_even_of_somebody_known() -> None:
    came = iter([{"type": "http.request", "body": b"{", "more_body": True}])

    async def receive() -> Message:
        message = next(came, None)
        if message is None:
            await asyncio.Event().wait()
        assert message is not None
        return message

    async def reads(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        with pytest.raises(HTTPException) as caught:
            await receive()
        assert caught.value.status_code == 408
        await send({"type": "http.response.start", "status": 408, "headers": []})

    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    scope = {
        "type": "http",
        "method": "PUT",
        "path": "/echo",
        "query_string": b"",
        "headers": [(b"content-length", b"2"), (b"authorization", f"Bearer {OWN}".encode())],
    }
    asyncio.run(asyncio.wait_for(BodyLimit(reads, _door, seconds=0.05)(scope, receive, send), 20))
    assert (b"connection", b"close") in sent[0]["headers"]
