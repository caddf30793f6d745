"""A middleware for Airflow's web server: it prepares applications, redirects ``/millrace``, and checks triggers.

It is a plain ASGI middleware (``fastapi_root_middlewares``). Airflow accepts any parameters of a run, and a conflict
between two of them would appear only when the run has a worker, so triggers of Millrace's DAGs are checked here.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Final
from urllib.parse import unquote

from millrace.flows.declare.part import Problem
from millrace.operations.operation import Operation, problem_list
from millrace.operations.registry import operations
from millrace.service.middleware import App, Message, Receive, Scope, Send

TRIGGER: Final = re.compile(r"/api/v2/dags/(?P<dag_id>[^/]+)/dagRuns/?")
AIRFLOW: Final = "millrace.airflow"
"""The scope key with Airflow's own application, which the form of an action calls."""
MAX_TRIGGER_BYTES: Final = 1 << 20
"""The most bytes of a trigger that is checked here. Only Airflow checks a larger one."""


class PluginMiddleware:
    """Checks triggers, redirects `prefix` to ``prefix/``, and calls each of `ready` in a thread once the server has
    started."""

    def __init__(self, app: App, *, prefix: str, ready: Sequence[Callable[[], object]] = ()) -> None:
        self._app = app
        self._prefix = prefix
        self._ready = ready

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, self._then_ready(send))
            return
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        scope[AIRFLOW] = scope["app"]  # the mounted applications replace it
        root = str(scope.get("root_path", ""))
        path = str(scope.get("path", "")).removeprefix(root)
        if path == self._prefix and scope["method"] in ("GET", "HEAD"):
            await _redirect(scope, f"{root}{self._prefix}/", send)
            return
        found = TRIGGER.fullmatch(path)
        if found is None or scope["method"] != "POST" or not _knows_somebody(scope):
            await self._app(scope, receive, send)
            return
        messages, body = await _read(receive)
        problems = trigger_problems(unquote(found["dag_id"]), body)
        if problems:
            await _refuse(problems, send)
            return
        await self._app(scope, _again(messages, receive), send)

    def _then_ready(self, send: Send) -> Send:
        async def sent(message: Message) -> None:
            await send(message)
            if message["type"] == "lifespan.startup.complete":
                for each in self._ready:
                    threading.Thread(target=each, name="ready", daemon=True).start()

        return sent


def trigger_problems(dag_id: str, body: bytes) -> list[Problem]:
    """Return the problems of a trigger's parameters, by field; empty if only Airflow should check them."""
    operation = _by_dag().get(dag_id)
    try:
        asked = json.loads(body) if operation is not None and len(body) <= MAX_TRIGGER_BYTES else None
    except ValueError:
        return []
    conf = asked.get("conf") if isinstance(asked, dict) else None
    if operation is None or not isinstance(conf, dict):
        return []
    # Airflow fills in the form's defaults.
    return [each for each in operation.trigger_problems(conf) if each.kind != "missing"]


def _by_dag() -> Mapping[str, Operation]:
    return {each.dag_id: each for each in operations().values()}


def _knows_somebody(scope: Scope) -> bool:
    """Return whether the request has credentials. Without them, only Airflow responds."""
    return any(name in (b"authorization", b"cookie") for name, _ in scope.get("headers", ()))


async def _read(receive: Receive) -> tuple[list[Message], bytes]:
    """Read a body up to its end or to MAX_TRIGGER_BYTES; return its messages and bytes."""
    messages: list[Message] = []
    body = b""
    while len(body) <= MAX_TRIGGER_BYTES:
        message = await receive()
        messages.append(message)
        body += message.get("body", b"")
        if message["type"] != "http.request" or not message.get("more_body"):
            break
    return messages, body


def _again(messages: list[Message], receive: Receive) -> Receive:
    """Return a receive function that repeats the messages that were read, and then continues."""
    left = iter(messages)

    async def received() -> Message:
        message = next(left, None)
        return await receive() if message is None else message

    return received


async def _refuse(problems: Sequence[Problem], send: Send) -> None:
    by_field = [{"field": each.field, "message": each.message} for each in problems]
    body = json.dumps({"detail": problem_list(problems), "problems": by_field}).encode()
    headers: list[tuple[bytes, bytes]] = [(b"content-type", b"application/json"), (b"cache-control", b"no-store")]
    await send({"type": "http.response.start", "status": 422, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def _redirect(scope: Scope, to: str, send: Send) -> None:
    query = bytes(scope.get("query_string", b""))
    headers: list[tuple[bytes, bytes]] = [(b"location", to.encode() + (b"?" + query if query else b""))]
    await send({"type": "http.response.start", "status": 307, "headers": headers})
    await send({"type": "http.response.body", "body": b""})
