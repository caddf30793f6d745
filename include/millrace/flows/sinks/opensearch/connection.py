"""A connection of the OpenSearch client that checks its peer's address before it sends, and limits a response's size.

Addresses are checked when a pipeline is declared (millrace.pipelines.deploy.reach). But a name may resolve to another
address at the time of the connection, as its owner decides. That server may not be OpenSearch, and may send an endless
response.
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
"""The most bytes of an unpacked response. For ten thousand items with an error each, OpenSearch sends about 10 MB."""
_AT_ONCE: Final = 1 << 16
_GRACE_SECONDS: Final = 0.5


class _Looking:
    """A urllib3 connection that sends nothing to a forbidden address."""

    def _new_conn(self) -> socket.socket:
        made: socket.socket = super()._new_conn()  # type: ignore[misc]
        if is_forbidden(str(made.getpeername()[0])):
            made.close()
            forbidden = "its name resolves to a forbidden address"
            raise NewConnectionError(self, forbidden)  # type: ignore[arg-type]
        return made

    def getresponse(self) -> Any:
        """Read status and headers within the whole time-out, not only from one byte to the next."""
        given: Any = self
        # The socket's own time-out, which applies from one byte to the next, fires first if nothing arrives.
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
        if late.is_set():  # a truncated response may look like the end of the headers
            raise TimeoutError(f"no complete response within {given.timeout:g} s")
        return response


class _Http(_Looking, HTTPConnection):
    pass


class _Https(_Looking, HTTPSConnection):
    pass


class _Answer(NamedTuple):
    """The parts of a response that the client uses."""

    status: int
    headers: Any
    data: bytes


class _Pool:
    """A urllib3 pool whose responses are bounded in bytes and in time."""

    def __init__(self, pool: Any, seconds: float) -> None:
        self._pool, self._seconds = pool, seconds

    def urlopen(self, method: str, url: str, body: Any = None, **options: Any) -> _Answer:
        response = self._pool.urlopen(method, url, body, preload_content=False, **options)
        end, left, parts = time.monotonic() + self._seconds, MAX_ANSWER_BYTES, []
        try:
            while part := response.read1(_AT_ONCE, decode_content=True):
                left -= len(part)
                if left < 0:
                    raise ProtocolError(f"a response of more than {MAX_ANSWER_BYTES >> 20} MiB")
                if time.monotonic() > end:
                    raise ReadTimeoutError(self._pool, url, f"a response that took more than {self._seconds:g} s")
                parts.append(part)
        except BaseException:
            response.close()  # the rest is not read
            raise
        response.release_conn()
        return _Answer(response.status, response.headers, b"".join(parts))

    def close(self) -> None:
        self._pool.close()


class LookingConnection(Urllib3HttpConnection):
    """A connection class for :class:`opensearchpy.OpenSearch` with these checks."""

    def _create_urllib3_pool(self) -> None:
        super()._create_urllib3_pool()
        pool: Any = self.pool
        pool.ConnectionCls = _Https if self.use_ssl else _Http
        self.pool = _Pool(pool, float(self.timeout))
