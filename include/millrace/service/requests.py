"""Each request by its id: in the answer's header, in every line of the log that is written for it, and in one line that says how it ended."""

from __future__ import annotations

import logging
import time
from typing import Any, Final

from millrace.base.correlation import REQUEST_ID, REQUEST_ID_HEADER, accept_request_id
from millrace.service.middleware import App, Message, Receive, Scope, Send

_log: Final = logging.getLogger(__name__)


class RequestLog:
    """Gives every request of an application its id. What changes something is told of by INFO, what looks by DEBUG."""

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = next((value for name, value in scope["headers"] if name.lower() == REQUEST_ID_HEADER.encode()), b"")
        own = accept_request_id(given.decode("latin-1"))
        before, begun, status = REQUEST_ID.set(own), time.monotonic(), 500

        async def told(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], (REQUEST_ID_HEADER.encode(), own.encode())]
            await send(message)

        try:
            await self._app(scope, receive, told)
        finally:
            level = logging.DEBUG if scope["method"] in ("GET", "HEAD") else logging.INFO
            spent = 1000 * (time.monotonic() - begun)
            _log.log(level, "%s %s by %s: %d in %.0f ms", scope["method"], _path(scope), _who(scope), status, spent)
            REQUEST_ID.reset(before)


def _path(scope: Scope) -> str:
    """As it came, so that no line ends within it."""
    raw: Any = scope.get("raw_path") or b""
    return str(raw.decode("ascii", "replace"))[:500]


def _who(scope: Scope) -> str:
    caller = scope.get("state", {}).get("caller")
    return "nobody" if caller is None else str(caller.principal.name)
