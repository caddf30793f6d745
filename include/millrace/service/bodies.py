"""How a request's body is read: after its sender is known, no larger than a bound, and no longer than one.

A route reads its body before it asks who sends it, so a stranger's bodies would fill this server's memory, and hold its connections for ever.
"""

from __future__ import annotations

import asyncio
import time
from typing import Final

from fastapi import HTTPException, Request

from millrace.service.authentication import Authenticator, credentials_of
from millrace.service.middleware import App, Message, Receive, Scope, Send

MAX_BODY_BYTES: Final = 4 << 20
"""A declaration with all of its certificates, or the samples of a dry run; more is no call of ours."""
BODY_SECONDS: Final = 30.0
"""That all of a body may take."""


class BodyLimit:
    """Answers 401 to a body of a stranger, 413 where one says, or turns out, to be larger, 408 where it does not come, and ends that
    connection: what is left of the body is not read."""

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
            if whole or empty:  # what comes behind a body is that its sender has gone
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
                raise HTTPException(408, f"The body did not come within {self._seconds:g} s.") from None
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
