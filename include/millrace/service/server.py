"""An application on a port of its own, in a thread of this process.

Resources that a stranger can use are bounded as in the log server (millrace.log.server.connections): connections, and
the time and bytes until an authenticated call arrives. A request's head is limited to 64 KiB; `middleware.py` limits
its body.
"""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import uvicorn

from millrace.access.grants import Caller
from millrace.base.errors import InvalidSettings
from millrace.base.settings import Settings
from millrace.log.server.connections import ConnectionGuard, ConnectionLimits
from millrace.log.server.flight import WILDCARD_HOSTS
from millrace.service.authentication import ON_AUTHENTICATED
from millrace.service.middleware import MAX_BODY_BYTES, App, Message, Receive, Scope, Send

_GRACE_SECONDS: Final = 1
"""Time that running requests may take at shutdown: a watch never ends by itself."""

_KEEP_ALIVE_SECONDS: Final = 75
"""Time for which a connection without a request stays open, as in nginx. HTTP clients pool connections for about a
minute; uvicorn's 5 s would end a pooled one just as its client sends the next request."""
_IDLE_SECONDS: Final = 30.0
"""A connection silent for so long is shut if a new one finds no room."""

_UNKNOWN_BYTES: Final = MAX_BODY_BYTES + (1 << 20)
"""A body stays in the kernel until its sender is authenticated, so it may have arrived before."""
_HEAD_BYTES: Final = 64 << 10

_log: Final = logging.getLogger(__name__)


class _Welcomed:
    """Reports authenticated callers to `connections`, and closes other connections after one answer."""

    def __init__(self, app: App, connections: ConnectionGuard) -> None:
        self._app, self._connections = app, connections

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        host, port = scope["client"] or ("", 0)
        known = False

        def welcome(caller: Caller) -> None:
            nonlocal known
            known = True
            self._connections.welcome(f"ipv6:[{host}]:{port}" if ":" in host else f"ipv4:{host}:{port}", caller)

        async def answered(message: Message) -> None:
            if not known and message["type"] == "http.response.start":
                have = {name.lower() for name, _ in message["headers"]}
                if b"connection" not in have:
                    message["headers"] = [*message["headers"], (b"connection", b"close")]
            await send(message)

        scope.setdefault("state", {})[ON_AUTHENTICATED] = welcome
        await self._app(scope, receive, answered)


@contextmanager
def serving(app: Any, settings: Settings, limits: ConnectionLimits | None = None) -> Iterator[str]:
    """Serve `app` on `log_host` and `service_port`, with TLS if the log server uses it; yield its address.

    The default `limits` allow as many connections as the log server does.

    Raises InvalidSettings if it cannot listen.
    """
    host, tls = settings.log_host, settings.log_tls
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, settings.service_port), family=family)
    except OSError as error:
        raise InvalidSettings(
            f"the service cannot listen at {host}, port {settings.service_port} (MILLRACE_SERVICE_PORT):"
            f" {error.strerror}"
        ) from error
    limits = limits or ConnectionLimits(
        settings.log_connections, unauthenticated_bytes=_UNKNOWN_BYTES, idle_seconds=_IDLE_SECONDS
    )
    connections = ConnectionGuard(listener.getsockname()[1], limits)
    config = uvicorn.Config(
        _Welcomed(app, connections),
        http="h11",  # httptools does not limit the size of a head
        h11_max_incomplete_event_size=_HEAD_BYTES,
        proxy_headers=False,  # the peer is the connected address, whatever headers say
        log_config=None,
        access_log=False,
        lifespan="off",
        timeout_keep_alive=_KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=_GRACE_SECONDS,
        ssl_certfile=None if tls is None else tls[0],
        ssl_keyfile=None if tls is None else tls[1],
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, args=([listener],), name="service", daemon=True)
    shown = "127.0.0.1" if host in WILDCARD_HOSTS else f"[{host}]" if ":" in host else host
    address = f"{'http' if tls is None else 'https'}://{shown}:{listener.getsockname()[1]}"
    thread.start()
    connections.start()
    _log.info("the service is at %s", address)
    try:
        yield address
    finally:
        connections.close()
        server.should_exit = True
        thread.join()
        listener.close()
