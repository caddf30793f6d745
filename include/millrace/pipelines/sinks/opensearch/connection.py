"""The connection of the OpenSearch client that looks where it has come out, before it says anything.

Addresses are checked when a pipeline is declared (millrace.pipelines.deploy.reach), but a name may lead elsewhere by the time that
somebody connects, and its owner decides where.
"""

from __future__ import annotations

import socket
from typing import Any

from opensearchpy import Urllib3HttpConnection
from urllib3.connection import HTTPConnection, HTTPSConnection
from urllib3.exceptions import NewConnectionError

from millrace.pipelines.model.addresses import is_forbidden


class _Looking:
    """For a connection of urllib3: nothing is sent to an address that no pipeline may reach."""

    def _new_conn(self) -> socket.socket:
        made: socket.socket = super()._new_conn()  # type: ignore[misc]
        if is_forbidden(str(made.getpeername()[0])):
            made.close()
            raise NewConnectionError(self, "its name leads to an address that no pipeline may reach")  # type: ignore[arg-type]
        return made


class _Http(_Looking, HTTPConnection):
    pass


class _Https(_Looking, HTTPSConnection):
    pass


class LookingConnection(Urllib3HttpConnection):
    """What :class:`opensearchpy.OpenSearch` takes as its `connection_class`."""

    def _create_urllib3_pool(self) -> None:
        super()._create_urllib3_pool()
        pool: Any = self.pool
        pool.ConnectionCls = _Https if self.use_ssl else _Http
