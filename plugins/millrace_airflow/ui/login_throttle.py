"""A limit on password guessing at Airflow's login.

It is a plain ASGI middleware for Airflow's whole web server (``fastapi_root_middlewares``), since Airflow's own login
has no limit.
"""

from __future__ import annotations

import math
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Final

from millrace.base.backoff import delay_after
from millrace.service.middleware import App, Message, Receive, Scope, Send

LOGINS: Final = ("/auth/token", "/auth/token/cli")
"""POST paths at which a password is checked."""
FREE_FAILURES: Final = 5
"""Failed logins of one address without a pause."""
FIRST_PAUSE: Final = 1.0
LONGEST_PAUSE: Final = 300.0
"""Longest pause of an address, in seconds. It doubles with each further failure."""
MAX_ADDRESSES: Final = 10_000
"""The most addresses that are remembered, the last ones that failed."""


class LoginFailures:
    """Failed logins by address, and how long each must wait.

    Bounded; forgets an address that succeeds or has waited long enough.
    """

    def __init__(self, *, clock: Callable[[], float] = time.monotonic, most: int = MAX_ADDRESSES) -> None:
        self._clock = clock
        self._most = most
        self._known: OrderedDict[str, tuple[int, float]] = OrderedDict()
        """Address -> failures in a row, and when the next attempt is accepted."""

    def __len__(self) -> int:
        return len(self._known)

    def wait(self, address: str) -> float:
        """Return the seconds until a login from `address` is accepted; 0 means now."""
        count, free_at = self._known.get(address, (0, 0.0))
        left = free_at - self._clock()
        if count and left < -LONGEST_PAUSE:
            del self._known[address]
        return max(0.0, left)

    def failed(self, address: str) -> None:
        """Count a refused login from `address`."""
        count = self._known.pop(address, (0, 0.0))[0] + 1
        delay = delay_after(count - FREE_FAILURES, FIRST_PAUSE, LONGEST_PAUSE)
        self._known[address] = (count, self._clock() + delay)
        while len(self._known) > self._most:
            self._known.popitem(last=False)

    def succeeded(self, address: str) -> None:
        """Forget the failures of `address` after a successful login."""
        self._known.pop(address, None)


class LoginThrottle:
    """Responds 429 with Retry-After to logins of an address that failed too often; counts refused logins.

    The address is the peer's, or the one reported by a proxy that uvicorn trusts (``--proxy-headers``).
    """

    def __init__(self, app: App, failures: LoginFailures | None = None) -> None:
        self._app = app
        self._failures = LoginFailures() if failures is None else failures

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = str(scope.get("path", "")).rstrip("/").removeprefix(str(scope.get("root_path", "")))
        if scope["type"] != "http" or scope["method"] != "POST" or path not in LOGINS:
            await self._app(scope, receive, send)
            return
        address = str((scope.get("client") or ("",))[0])
        wait = self._failures.wait(address)
        if wait:
            await _too_many(send, wait)
            return

        async def counting(message: Message) -> None:
            if message["type"] == "http.response.start":
                if message["status"] in (401, 403):
                    self._failures.failed(address)
                elif message["status"] < 300:
                    self._failures.succeeded(address)
            await send(message)

        await self._app(scope, receive, counting)


async def _too_many(send: Send, wait: float) -> None:
    seconds = str(math.ceil(wait)).encode()
    body = b'{"detail": "Too many failed logins from this address: wait ' + seconds + b' s, then try again."}'
    headers = [(b"content-type", b"application/json"), (b"retry-after", seconds), (b"cache-control", b"no-store")]
    await send({"type": "http.response.start", "status": 429, "headers": headers})
    await send({"type": "http.response.body", "body": body})
