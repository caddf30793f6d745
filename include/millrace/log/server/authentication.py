"""Authentication of the log server's callers: a token is checked before each call, and the caller is attached to it."""

from __future__ import annotations

import hmac
from collections.abc import Callable, Sequence
from typing import Any, Final

from pyarrow import flight

from millrace.access.grants import LOCAL_ADMIN, Caller
from millrace.access.token_file import TokenFile
from millrace.base.errors import TokenFileRefused
from millrace.rpc.wire import AUTHORIZATION

MIDDLEWARE_KEY: Final = "token"
"""Key of the middleware."""
_BEARER: Final = b"Bearer "


class CallerMiddleware(flight.ServerMiddleware):  # type: ignore[misc]  # pyarrow has no type information
    """The caller of one call."""

    def __init__(self, caller: Caller) -> None:
        super().__init__()
        self.caller: Final = caller


class TokenAuthentication(flight.ServerMiddlewareFactory):  # type: ignore[misc]  # pyarrow has no type information
    """Requires a token for each call: one of the machine's own, which may do everything, or one of the token file."""

    def __init__(
        self, tokens: Sequence[str], file: TokenFile | None, on_refused: Callable[[], None] = lambda: None
    ) -> None:
        """Accept these tokens and those of the file. `on_refused` is called for each call without a valid one."""
        super().__init__()
        self._on_refused = on_refused
        self._own = [token.encode() for token in tokens]
        self._machine = CallerMiddleware(LOCAL_ADMIN)
        self._file = file

    def start_call(self, info: flight.CallInfo, headers: dict[str, list[Any]]) -> CallerMiddleware:
        given = headers.get(AUTHORIZATION) or [""]
        value = given[0] if isinstance(given[0], bytes) else str(given[0]).encode()
        token = value.removeprefix(_BEARER)
        if token != value:
            # All tokens are compared, so that the time reveals nothing.
            if sum(hmac.compare_digest(token, own) for own in self._own):
                return self._machine
            try:
                caller = None if self._file is None else self._file.authenticate(token.decode(errors="replace"))
            except TokenFileRefused:
                self._on_refused()
                raise flight.FlightUnauthenticatedError(
                    "the server refuses its token file, which is damaged or readable by others: see its server.log"
                ) from None
            if caller is not None:
                return CallerMiddleware(caller)
        self._on_refused()
        raise flight.FlightUnauthenticatedError(
            "the token is not valid for this server, or was revoked, or has expired"
        )
