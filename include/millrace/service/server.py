"""An application behind a port of its own, in a thread of this process."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import uvicorn

from millrace.base.errors import InvalidSettings
from millrace.base.settings import Settings
from millrace.log.server.flight import EVERYWHERE

_GRACE_SECONDS: Final = 1
"""How long requests that are under way are waited for at the end: a watch never ends by itself."""

_log: Final = logging.getLogger(__name__)


@contextmanager
def serving(app: Any, settings: Settings) -> Iterator[str]:
    """Serve `app` at `log_host` and `service_port`, by TLS where the log's server does; its address.

    Raises InvalidSettings where it cannot listen.
    """
    host, tls = settings.log_host, settings.log_tls
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, settings.service_port), family=family)
    except OSError as error:
        raise InvalidSettings(
            f"the service cannot listen at {host}, port {settings.service_port} (MILLRACE_SERVICE_PORT): {error.strerror}"
        ) from error
    config = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        lifespan="off",
        timeout_graceful_shutdown=_GRACE_SECONDS,
        ssl_certfile=None if tls is None else tls[0],
        ssl_keyfile=None if tls is None else tls[1],
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, args=([listener],), name="service", daemon=True)
    shown = "127.0.0.1" if host in EVERYWHERE else f"[{host}]" if ":" in host else host
    address = f"{'http' if tls is None else 'https'}://{shown}:{listener.getsockname()[1]}"
    thread.start()
    _log.info("the service is at %s", address)
    try:
        yield address
    finally:
        server.should_exit = True
        thread.join()
        listener.close()
