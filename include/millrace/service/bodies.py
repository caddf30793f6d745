"""How large a request's body may be: it is read before anybody asks who sends it, so a stranger's would fill this server's memory."""

from __future__ import annotations

from typing import Final

from fastapi import HTTPException

from millrace.service.answers import App, Message, Receive, Scope, Send

MAX_BODY_BYTES: Final = 4 << 20
"""A declaration with all of its certificates, or the samples of a dry run; more is no call of ours."""


class BoundedBodies:
    """Answers 413 where a body says, or turns out, to be larger, and ends that connection: what is left of it is not read."""

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        said = next((value for name, value in scope["headers"] if name.lower() == b"content-length"), b"0")
        left = MAX_BODY_BYTES
        refused = said.isdigit() and (len(said) > 18 or int(said) > left)

        async def bounded() -> Message:
            nonlocal left, refused
            if not refused:
                message = await receive()
                left -= len(message.get("body", b""))
                refused = left < 0
            if refused:
                raise HTTPException(413, f"A body has at most {MAX_BODY_BYTES >> 20} MiB.")
            return message

        async def answered(message: Message) -> None:
            if refused and message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (b"connection", b"close")]
            await send(message)

        await self._app(scope, bounded, answered)
