"""What every answer of our applications has: headers that keep a browser from what a page of ours does not ask for."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, Final

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

SECURITY_HEADERS: Final = {
    # Nothing of a page comes from elsewhere, and no script or style stands in the HTML.
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
        "form-action 'self'; base-uri 'none'; frame-ancestors 'self'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "same-origin",
    "cache-control": "no-store",
}


class SecurityHeaders:
    """Gives every answer of an application the headers that it does not have itself."""

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
