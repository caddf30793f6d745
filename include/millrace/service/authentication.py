"""Authentication and permissions of requests.

An authenticator says who calls; a table says what a route requires (millrace.access).

A route is a call with the name of its function. A route that is in no table is refused to everybody.
"""

from __future__ import annotations

import hmac
import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Annotated, Any, Final, TypeAlias

from fastapi import Depends, HTTPException, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer

from millrace.access.grants import LOCAL_ADMIN, Caller
from millrace.access.permissions import Requirement, authorize
from millrace.access.token_file import TokenFile

METRICS_TOKEN: Final = "MILLRACE_METRICS_TOKEN"
"""Environment variable with a bearer token that reads the metrics and nothing else, for Prometheus."""

ON_AUTHENTICATED: Final = "welcome"
"""Key in a request's state of the callback for an authenticated caller (millrace.service.server)."""

_bearer = HTTPBearer(auto_error=False, description="A token (millrace tokens add; in Airflow one of POST /auth/token).")
credentials_of: Final[Callable[[Request], Awaitable[HTTPAuthorizationCredentials | None]]] = _bearer
"""The bearer token of a request, as an authenticator takes it."""
Credentials = Annotated[HTTPAuthorizationCredentials | None, Depends(_bearer)]
Authenticator: TypeAlias = Callable[[Request, HTTPAuthorizationCredentials | None], Awaitable[Caller]]
"""Returns who calls. Raises HTTPException 401."""


def token_authenticator(own: Sequence[str], tokens: TokenFile) -> Authenticator:
    """Accept the deployment's tokens, and the machine's `own`, whose holders may do everything."""

    async def door(request: Request, credentials: HTTPAuthorizationCredentials | None) -> Caller:
        given = "" if credentials is None else credentials.credentials
        # Compare with every token, so that the time reveals nothing.
        if sum(hmac.compare_digest(given.encode(), each.encode()) for each in own if each):
            return LOCAL_ADMIN
        caller = tokens.authenticate(given) if given else None
        if caller is None:
            raise HTTPException(
                401, "Send a token of this deployment (Authorization: Bearer …): millrace tokens add makes one."
            )
        return caller

    return door


AuthorizeCall: TypeAlias = Callable[[Caller, str, Mapping[str, Any]], Caller]
"""Authorizes a call with its path parameters and returns the caller; raises a MillraceError."""


def require_permission(
    door: Authenticator, calls: Mapping[str, Requirement], admit: AuthorizeCall | None = None
) -> Any:
    """Return the dependency that authorizes a route's requests, by `calls` or by a route group's own function.

    The caller is then in ``request.state.caller``.
    """

    async def check(request: Request, credentials: Credentials) -> None:
        name = str(request.scope["route"].name)
        if name == "metrics" and credentials is not None and _scrapes(credentials.credentials):
            return
        caller = await door(request, credentials)
        if admit is None:
            authorize(caller, name, request.path_params, calls=calls)
        else:
            caller = await run_in_threadpool(admit, caller, name, request.path_params)
        request.state.caller = caller
        welcome = getattr(request.state, ON_AUTHENTICATED, None)
        if welcome is not None:
            welcome(caller)

    return Depends(check)


def _scrapes(given: str) -> bool:
    token = os.environ.get(METRICS_TOKEN, "")
    return bool(token) and hmac.compare_digest(given.encode(), token.encode())
