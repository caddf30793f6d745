"""ASGI middleware of the applications: security headers, limits of request bodies, and request ids with a log line."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, Final

from fastapi import HTTPException, Request

from millrace.base.correlation import REQUEST_ID, REQUEST_ID_HEADER, accept_request_id
from millrace.service.authentication import Authenticator, credentials_of

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

SECURITY_HEADERS: Final = {
    # Pages load only from this site, without inline scripts or styles.
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
        "form-action 'self'; base-uri 'none'; frame-ancestors 'self'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "same-origin",
    "cache-control": "no-store",
}


class SecurityHeaders:
    """Adds security headers to every answer that lacks them."""

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                have = {name.lower() for name, _ in message["headers"]}
                missing = [(name.encode(), value.encode()) for name, value in SECURITY_HEADERS.items()]
                message["headers"] = [*message["headers"], *(each for each in missing if each[0] not in have)]
            await send(message)

        await self._app(scope, receive, guarded if scope["type"] == "http" else send)


MAX_BODY_BYTES: Final = 4 << 20
"""Large enough for a declaration with all its certificates, or the samples of a dry run."""
BODY_SECONDS: Final = 30.0
"""Timeout for a whole body."""


class BodyLimit:
    """Limits request bodies: only authenticated, at most MAX_BODY_BYTES long, and complete within `seconds`.

    A route reads its body before it authenticates the sender. Without this, strangers could fill the server's memory
    and hold its connections. Answers 401 to a stranger's body, 413 if the body is announced or turns out to be larger,
    408 if it does not arrive. Then the connection is closed, and the rest of the body is not read.
    """

    def __init__(self, app: App, door: Authenticator, seconds: float = BODY_SECONDS) -> None:
        self._app, self._door, self._seconds = app, door, seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = {name.lower(): value for name, value in scope["headers"]}
        said = headers.get(b"content-length", b"0")
        left, refused, whole, known = MAX_BODY_BYTES, False, False, False
        large = said.isdigit() and (len(said) > 18 or int(said) > left)
        empty = said == b"0" and b"transfer-encoding" not in headers
        end = time.monotonic() + self._seconds

        async def bounded() -> Message:
            nonlocal left, refused, whole, known
            if whole or empty:  # the next message after a body is the disconnect
                return await receive()
            try:
                if large or left < 0:
                    raise HTTPException(413, f"A body has at most {MAX_BODY_BYTES >> 20} MiB.")
                if not known:
                    request = Request(scope)
                    await self._door(request, await credentials_of(request))
                    known = True
                message = await asyncio.wait_for(receive(), max(0.0, end - time.monotonic()))
                left -= len(message.get("body", b""))
                if left < 0:
                    raise HTTPException(413, f"A body has at most {MAX_BODY_BYTES >> 20} MiB.")
            except TimeoutError:
                refused = True
                raise HTTPException(408, f"The body did not arrive within {self._seconds:g} s.") from None
            except HTTPException:
                refused = True
                raise
            whole = not message.get("more_body", False)
            return message

        async def answered(message: Message) -> None:
            if refused and message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (b"connection", b"close")]
            await send(message)

        await self._app(scope, bounded, answered)


_log: Final = logging.getLogger(__name__)


class RequestLog:
    """Gives every request an id, in the answer's header and in all of its log lines, and logs how it ended.

    Requests that change something are logged at INFO, others at DEBUG.
    """

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = next((value for name, value in scope["headers"] if name.lower() == REQUEST_ID_HEADER.encode()), b"")
        own = accept_request_id(given.decode("latin-1"))
        before, begun, status = REQUEST_ID.set(own), time.monotonic(), 500

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], (REQUEST_ID_HEADER.encode(), own.encode())]
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        finally:
            level = logging.DEBUG if scope["method"] in ("GET", "HEAD") else logging.INFO
            spent = 1000 * (time.monotonic() - begun)
            _log.log(level, "%s %s by %s: %d in %.0f ms", scope["method"], _path(scope), _who(scope), status, spent)
            REQUEST_ID.reset(before)


def _path(scope: Scope) -> str:
    """Return the path as received and still escaped, so that it cannot contain a line break."""
    raw: Any = scope.get("raw_path") or b""
    return str(raw.decode("ascii", "replace"))[:500]


def _who(scope: Scope) -> str:
    caller = scope.get("state", {}).get("caller")
    return "nobody" if caller is None else str(caller.principal.name)
