"""A client of the pipeline service: HTTP with a token, its errors raised as MillraceErrors."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any, Final, Self

import httpx
import typer

from millrace.base.closeable import Closeable
from millrace.base.errors import InvalidSettings, PermissionDenied, PipelineInvalid, ServiceUnavailable
from millrace.base.settings import Settings
from millrace.log.server.flight import WILDCARD_HOSTS
from millrace.rpc.wire import error_from_bytes

if TYPE_CHECKING:
    from pathlib import Path

DEFAULT_PORT: Final = 13012
TOKEN_VARIABLE: Final = "MILLRACE_SERVER_TOKEN"
_SECONDS: Final = 120.0
"""Timeout of a request. A create waits for brokers and the sink, which have their own timeouts."""


class PipelineClient(Closeable):
    """A connection to one service.

    The token is MILLRACE_SERVER_TOKEN or, on the service's own host, the data folder's, which has all rights.
    """

    def __init__(self, settings: Settings, server: str = "", *, roots: Path | None = None) -> None:
        """`server` is the address; default: this host at the settings' port.

        Raises InvalidSettings, PermissionDenied.
        """
        self.address = (server or _local_address(settings)).rstrip("/")
        if not self.address.startswith(("http://", "https://")):
            raise InvalidSettings(
                f"{self.address!r} is not a service's address: give http://host:port or https://host:port"
            )
        token = os.environ.get(TOKEN_VARIABLE, "") or ("" if server else _own_token(settings))
        if not token and not server:
            raise ServiceUnavailable(
                f"no pipeline service has run with the data folder {settings.data_dir}: start one (`millrace flows"
                " service serve`), or give another's address with --server"
            )
        if not token:
            raise PermissionDenied(
                f"no token for {self.address}: set {TOKEN_VARIABLE} to one (`millrace tokens add` on the service's host"
                " makes it)"
            )
        self._client = httpx.Client(
            base_url=f"{self.address}/api/v1/",
            headers={"Authorization": f"Bearer {token}"},
            timeout=httpx.Timeout(_SECONDS, connect=5.0),
            verify=True if roots is None else str(roots),
            trust_env=False,
        )

    def __enter__(self) -> Self:
        return self

    def request(self, method: str, path: str, body: Any = None, **query: Any) -> Any:
        """Send a request and return the answer. Raises the service's error, or ServiceUnavailable."""
        asked = {name: value for name, value in query.items() if value not in (None, "")}
        try:
            answer = self._client.request(method, path, json=body, params=asked)
        except httpx.TimeoutException:
            raise ServiceUnavailable(
                f"{self.address} did not answer within {_SECONDS:.0f} s, but may still do what was asked: check with"
                " `millrace flows service list`"
            ) from None
        except httpx.HTTPError as error:
            raise ServiceUnavailable(
                f"no pipeline service answers at {self.address} ({error}): start one (`millrace flows service"
                " serve`), or give another's address with --server"
            ) from None
        if answer.is_success:
            return answer.json() if answer.content else None
        try:
            said = answer.json()["error"]
        except (ValueError, KeyError, TypeError):
            raise ServiceUnavailable(
                f"{self.address} is not a pipeline service: it answers {answer.status_code} to {method} {path}"
            ) from None
        if answer.status_code == 401:
            raise PermissionDenied(f"{self.address}: {said['message']}")
        if answer.status_code in (404, 405) and said["code"] in ("NOT_FOUND", "METHOD_NOT_ALLOWED"):
            raise ServiceUnavailable(
                f"{self.address} is not a pipeline service, or runs an older build: it has no {method} {path}"
            )
        failure = {"code": said["code"], "message": said["message"], "attributes": {}}
        if said["code"] == PipelineInvalid.code:
            problems = said.get("problems") or []
            for each in problems:
                typer.echo(f"  {each['field'] or 'declaration'}: {each['message']}", err=True)
            raise PipelineInvalid(
                f"the declaration has {len(problems)} problem{'s' * (len(problems) != 1)}", problems=problems
            )
        raise error_from_bytes(json.dumps(failure).encode())

    def close(self) -> None:
        self._client.close()


def _local_address(settings: Settings) -> str:
    host = settings.log_host
    shown = "127.0.0.1" if host in WILDCARD_HOSTS else f"[{host}]" if ":" in host else host
    return f"{'http' if settings.log_tls is None else 'https'}://{shown}:{settings.service_port or DEFAULT_PORT}"


def _own_token(settings: Settings) -> str:
    from millrace.coord.store_factory import cluster_token

    return cluster_token(settings) if settings.data_dir.is_dir() else ""
