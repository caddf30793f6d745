"""A connection of the OpenSearch client that checks its peer's address before it sends, and limits an answer's size.

Addresses are checked when a pipeline is declared (millrace.pipelines.deploy.reach). But a name may lead elsewhere when
somebody connects, and its owner decides where. What answers there may not be OpenSearch, and may answer without end.
"""

from __future__ import annotations

import socket
import threading
import time
from contextlib import suppress
from typing import Any, Final, NamedTuple

from opensearchpy import Urllib3HttpConnection
from urllib3.connection import HTTPConnection, HTTPSConnection
from urllib3.exceptions import NewConnectionError, ProtocolError, ReadTimeoutError

from millrace.flows.declare.addresses import is_forbidden

MAX_ANSWER_BYTES: Final = 64 << 20
"""Unpacked. Of ten thousand items with an error each OpenSearch says about 10 MB."""
_AT_ONCE: Final = 1 << 16
_GRACE_SECONDS: Final = 0.5


class _Looking:
    """For a connection of urllib3: nothing is sent to an address that no pipeline may reach."""

    def _new_conn(self) -> socket.socket:
        made: socket.socket = super()._new_conn()  # type: ignore[misc]
        if is_forbidden(str(made.getpeername()[0])):
            made.close()
            forbidden = "its name leads to an address that no pipeline may reach"
            raise NewConnectionError(self, forbidden)  # type: ignore[arg-type]
        return made

    def getresponse(self) -> Any:
        """Status and headers within the time-out altogether, not only from one byte to the next."""
        given: Any = self
        # The socket's own time-out, which is from one byte to the next, comes first where nothing is said at all.
        connected, late = given.sock, threading.Event()

        def hang_up() -> None:
            late.set()
            with suppress(OSError):
                connected.shutdown(socket.SHUT_RDWR)

        end = threading.Timer(given.timeout + _GRACE_SECONDS, hang_up)
        end.daemon = True
        end.start()
        try:
            response = super().getresponse()  # type: ignore[misc]
        finally:
            end.cancel()
        if late.is_set():  # what was cut off may look like the end of the headers
            raise TimeoutError(f"no whole answer in {given.timeout:g} s")
        return response


class _Http(_Looking, HTTPConnection):
    pass


class _Https(_Looking, HTTPSConnection):
    pass


class _Answer(NamedTuple):
    """What the client looks at of a response."""

    status: int
    headers: Any
    data: bytes


class _Pool:
    """A pool of urllib3 whose answers are bounded, in bytes and in time."""

    def __init__(self, pool: Any, seconds: float) -> None:
        self._pool, self._seconds = pool, seconds

    def urlopen(self, method: str, url: str, body: Any = None, **options: Any) -> _Answer:
        response = self._pool.urlopen(method, url, body, preload_content=False, **options)
        end, left, parts = time.monotonic() + self._seconds, MAX_ANSWER_BYTES, []
        try:
            while part := response.read1(_AT_ONCE, decode_content=True):
                left -= len(part)
                if left < 0:
                    raise ProtocolError(f"an answer of more than {MAX_ANSWER_BYTES >> 20} MiB")
                if time.monotonic() > end:
                    raise ReadTimeoutError(self._pool, url, f"an answer that took more than {self._seconds:g} s")
                parts.append(part)
        except BaseException:
            response.close()  # the rest of it is not read
            raise
        response.release_conn()
        return _Answer(response.status, response.headers, b"".join(parts))

    def close(self) -> None:
        self._pool.close()


class LookingConnection(Urllib3HttpConnection):
    """What :class:`opensearchpy.OpenSearch` takes as its `connection_class`."""

    def _create_urllib3_pool(self) -> None:
        super()._create_urllib3_pool()
        pool: Any = self.pool
        pool.ConnectionCls = _Https if self.use_ssl else _Http
        self.pool = _Pool(pool, float(self.timeout))
