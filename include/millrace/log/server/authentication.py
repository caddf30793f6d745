"""Who calls the log's server: asked of the token before a call begins, and known to the call from then on."""

from __future__ import annotations

import hmac
from collections.abc import Sequence
from typing import Any, Final

from pyarrow import flight

from millrace.access.grants import LOCAL_ADMIN, Caller
from millrace.access.token_file import TokenFile
from millrace.base.errors import TokenFileRefused
from millrace.rpc.wire import AUTHORIZATION

MIDDLEWARE_KEY: Final = "token"
"""The middleware's key."""
_BEARER: Final = b"Bearer "


class CallerMiddleware(flight.ServerMiddleware):  # type: ignore[misc]  # pyarrow has no type information
    """Who makes the call that it stands before."""

    def __init__(self, caller: Caller) -> None:
        super().__init__()
        self.caller: Final = caller


class TokenAuthentication(flight.ServerMiddlewareFactory):  # type: ignore[misc]  # pyarrow has no type information
    """Lets a call begin only with a token: one of the machine's own, which may do everything, or one of the file's."""

    def __init__(self, tokens: Sequence[str], file: TokenFile | None) -> None:
        super().__init__()
        self._own = [token.encode() for token in tokens]
        self._machine = CallerMiddleware(LOCAL_ADMIN)
        self._file = file

    def start_call(self, info: flight.CallInfo, headers: dict[str, list[Any]]) -> CallerMiddleware:
        given = headers.get(AUTHORIZATION) or [""]
        value = given[0] if isinstance(given[0], bytes) else str(given[0]).encode()
        token = value.removeprefix(_BEARER)
        if token != value:
            # Each one is compared, whichever it is, so that the time says nothing.
            if sum(hmac.compare_digest(token, own) for own in self._own):
                return self._machine
            try:
                caller = None if self._file is None else self._file.authenticate(token.decode(errors="replace"))
            except TokenFileRefused:
                raise flight.FlightUnauthenticatedError(
                    "the server refuses its file of tokens, which is damaged or open to others: its server.log says more"
                ) from None
            if caller is not None:
                return CallerMiddleware(caller)
        raise flight.FlightUnauthenticatedError("the token is not this server's, or was revoked, or ran out")
