"""A node's server for the coordinator's orders over Flight (millrace.coord.orders is its client)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
from pyarrow import flight

from millrace.base.errors import InvalidArgument, InvalidSettings, MillraceError
from millrace.base.settings import Settings
from millrace.coord.orders import ASSIGN, REMOVE, STATUS
from millrace.coord.store_factory import cluster_token
from millrace.log.server.authentication import MIDDLEWARE_KEY, TokenAuthentication
from millrace.log.server.flight import WILDCARD_HOSTS
from millrace.rpc.wire import flight_error, request_number, request_of, to_json

OrderHandler = Callable[[str, dict[str, Any]], dict[str, Any]]

_log: Final = logging.getLogger(__name__)


class OrderServer(flight.FlightServerBase):  # type: ignore[misc]  # pyarrow has no type information
    """Executes orders by `act`, from construction on, for callers with the cluster's token."""

    def __init__(self, settings: Settings, act: OrderHandler) -> None:
        """Start the server. Raises InvalidSettings if it cannot listen."""
        self._act = act
        tls = settings.log_tls
        scheme = "grpc" if tls is None else "grpc+tls"
        try:
            super().__init__(
                f"{scheme}://{settings.log_host}:0",
                tls_certificates=None if tls is None else [(Path(tls[0]).read_bytes(), Path(tls[1]).read_bytes())],
                middleware={MIDDLEWARE_KEY: TokenAuthentication([cluster_token(settings)], None)},
            )
        except (pa.ArrowException, OSError) as error:
            raise InvalidSettings(f"the node's server cannot listen at {settings.log_host}: {error}") from error
        host = "127.0.0.1" if settings.log_host in WILDCARD_HOSTS else settings.log_host
        self.address = f"{scheme}://{host}:{self.port}"

    def do_action(self, context: flight.ServerCallContext, action: flight.Action) -> Sequence[bytes]:
        try:
            if action.type not in (ASSIGN, REMOVE, STATUS):
                raise InvalidArgument(f"unknown order {action.type!r}")
            return [to_json(self._act(action.type, request_of(action.body.to_pybytes())))]
        except MillraceError as error:
            raise flight_error(error) from None
        except Exception as error:
            _log.exception("an order failed")
            raise flight_error(error) from None


def parse_order(request: dict[str, Any]) -> tuple[str, str, str, int]:
    """Return session, PChannel, role and term of an order. Raises InvalidArgument."""
    words = [request.get(key) for key in ("session", "pchannel", "role")]
    match words:
        case [str(session), str(pchannel), str(role)]:
            return session, pchannel, role, int(request_number(request, "term", 0))
        case _:
            raise InvalidArgument("an order needs session, pchannel and role")
