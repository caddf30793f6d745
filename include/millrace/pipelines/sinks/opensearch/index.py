"""The index (or alias) of a sink: whether it is there, made as it was declared, taken away; and which cluster it is in."""

from __future__ import annotations

from base64 import b64encode
from typing import Any, Final
from urllib.parse import quote

from opensearchpy import OpenSearch
from opensearchpy.exceptions import ConnectionError as NoConnection
from opensearchpy.exceptions import OpenSearchException, TransportError

from millrace.base.errors import MillraceError, SinkBusy, SinkRefused
from millrace.pipelines.model.sinks import OpenSearchSink as Declared
from millrace.pipelines.sinks.opensearch.bulk import AGAIN, Json
from millrace.pipelines.sinks.opensearch.connection import LookingConnection

GC_DELETES: Final = "24h"
"""How long an index that is made here remembers the versions of what was deleted: as long, an older record cannot bring it back."""
_WORDS: Final = 500


def client_of(declared: Declared, *, seconds: float | None = None) -> OpenSearch:
    """A client that tries nothing again by itself, and waits for an answer for `seconds`, or as long as was declared."""
    options: dict[str, Any] = {}
    if declared.username:
        # In UTF-8, as OpenSearch reads it (RFC 7617); the client's own way takes latin-1 alone.
        login = f"{declared.username}:{declared.password.get_secret_value()}".encode()
        options["headers"] = {"authorization": f"Basic {b64encode(login).decode()}"}
    if any(host.startswith("https") for host in declared.hosts):
        import ssl

        options["ssl_context"] = ssl.create_default_context(cadata=declared.ca or None)
    return OpenSearch(
        [host.rstrip("/") for host in declared.hosts],
        timeout=declared.timeout_ms / 1000 if seconds is None else seconds,
        max_retries=0,
        retry_on_timeout=False,
        retry_on_status=(),
        pool_maxsize=declared.requests,
        serializer=Json(),
        connection_class=LookingConnection,
        **options,
    )


def index_path(index: str) -> str:
    """The path of `index`: a name with a percent sign is that name, and nothing that the server decodes from it."""
    return f"/{quote(index, safe='')}"


def exists(client: OpenSearch, declared: Declared) -> bool:
    """Whether it is there. Raises SinkBusy, SinkRefused."""
    try:
        return bool(client.transport.perform_request("HEAD", index_path(declared.index_base)))  # False: 404
    except OpenSearchException as error:
        raise error_of(error, declared) from None


def make(client: OpenSearch, declared: Declared) -> None:
    """Make it; no effect where it is there. Raises SinkBusy, SinkRefused."""
    try:
        client.transport.perform_request("PUT", index_path(declared.index_base), body=_with_memory(declared.index_body))
    except TransportError as error:
        if error.error != "resource_already_exists_exception":
            raise error_of(error, declared) from None
    except OpenSearchException as error:
        raise error_of(error, declared) from None


def remove(client: OpenSearch, declared: Declared, index: str) -> None:
    """Take `index` away, and nothing else that its name may match; no effect where it is not there. Raises SinkBusy, SinkRefused."""
    try:
        client.transport.perform_request("DELETE", index_path(index), params={"expand_wildcards": "none"})
    except TransportError as error:
        if error.status_code != 404:
            raise error_of(error, declared) from None
    except OpenSearchException as error:
        raise error_of(error, declared) from None


def cluster_of(client: OpenSearch, declared: Declared) -> str:
    """What tells its cluster from others: the cluster's own id, or its addresses where it does not say. Raises SinkBusy, SinkRefused."""
    try:
        return str(client.transport.perform_request("GET", "/")["cluster_uuid"])
    except TransportError as error:
        if error.status_code in (401, 403):  # a login that may use its index, and no more
            return ",".join(declared.hosts)
        raise error_of(error, declared) from None
    except OpenSearchException as error:
        raise error_of(error, declared) from None
    except (KeyError, TypeError):
        raise SinkRefused(f"{declared.hosts[0]} does not answer as an OpenSearch does") from None


def error_of(error: OpenSearchException, declared: Declared) -> MillraceError:
    """One of ours for one of the client's. Of an answer that is none of OpenSearch's nothing is told: it may be of a server that is nobody's
    business here."""
    pause = declared.backoff_ms / 1000
    if isinstance(error, NoConnection):
        return SinkBusy(f"OpenSearch does not answer: {told(error)}", retry_after=pause)
    if isinstance(error, TransportError):
        status = error.status_code
        info: Any = error.info
        known = isinstance(info, dict) and isinstance(info.get("error"), dict)
        words = f"{status} {told(error)}" if known else f"HTTP {status}"
        if status in AGAIN:
            return SinkBusy(f"OpenSearch: {words}", retry_after=pause)
        return SinkRefused(f"index {declared.index_base}: {words}")
    return SinkBusy(f"OpenSearch: {told(error)}", retry_after=pause)


def told(error: OpenSearchException) -> str:
    """Its words, in one line."""
    return " ".join(str(error).split())[:_WORDS]


def _with_memory(body: dict[str, Any]) -> dict[str, Any]:
    """An index's body with what external versions of deletes need."""
    settings = body.get("settings") or {}
    known = {"index.gc_deletes", "gc_deletes"} & settings.keys() or "gc_deletes" in (settings.get("index") or {})
    return body if known else {**body, "settings": {**settings, "index.gc_deletes": GC_DELETES}}
