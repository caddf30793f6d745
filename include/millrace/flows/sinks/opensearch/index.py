"""The index (or alias) of a sink: existence, creation, removal, and the identity of its cluster."""

from __future__ import annotations

from base64 import b64encode
from typing import Any, Final, NamedTuple
from urllib.parse import quote

from opensearchpy import OpenSearch
from opensearchpy.exceptions import ConnectionError as NoConnection
from opensearchpy.exceptions import OpenSearchException, TransportError

from millrace.base.errors import MillraceError, SinkBusy, SinkRefused
from millrace.flows.sinks.opensearch.bulk import AGAIN, Json, is_answer
from millrace.flows.sinks.opensearch.connection import LookingConnection
from millrace.flows.sinks.opensearch.model import OpenSearchSink as Declared
from millrace.flows.sinks.opensearch.naming import FIRST, pattern_of

GC_DELETES: Final = "24h"
"""How long a created index remembers versions of deleted documents.

For that time an older record cannot restore one.
"""
_WORDS: Final = 500
_PRIORITY: Final = 200
"""The priority of templates: above OpenSearch's own and those of most tools (at most 100)."""


def client_of(declared: Declared, *, seconds: float | None = None) -> OpenSearch:
    """Return a client without retries that waits `seconds` for a response, or the declared time-out."""
    options: dict[str, Any] = {}
    if declared.username:
        # In UTF-8, as OpenSearch decodes it (RFC 7617); the client itself supports only latin-1.
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
    """Return the path of `index`, quoted so that the server does not decode a percent sign in the name."""
    return f"/{quote(index, safe='')}"


def exists(client: OpenSearch, declared: Declared) -> bool:
    """Return whether the index exists, or the template that its indices are created from.

    Raises SinkBusy, SinkRefused.
    """
    folder = "/_index_template" if declared.index_suffix else ""
    try:
        return bool(client.transport.perform_request("HEAD", folder + index_path(declared.index_base)))  # False: 404
    except OpenSearchException as error:
        raise error_of(error, declared) from None


class Target(NamedTuple):
    """The target that `index_base` names."""

    alias: bool = False
    identity: str = ""
    """The index's identity, which differs from that of a later index of the same name. Empty for an alias or if
    unknown."""


def target_of(client: OpenSearch, declared: Declared) -> Target:
    """Return the target of the name.

    Raises SinkBusy, and SinkRefused if it cannot accept documents: closed, a data stream, an alias without a write
    index, removed.
    """
    name = declared.index_base
    resolved = _asked(client, declared, f"/_resolve/index{index_path(name)}") or {}
    if bool(resolved.get("data_streams")) != declared.data_stream:
        if declared.data_stream:
            raise SinkRefused(f"{name} is not a data stream: name one, or leave out sink.data_stream")
        raise SinkRefused(f"{name} is a data stream, to which documents can only be added: set sink.data_stream")
    if declared.data_stream:
        return Target()
    if declared.rollover is not None and not any(each.get("name") == name for each in resolved.get("aliases", ())):
        raise SinkRefused(f"{name} is not an alias, which sink.rollover requires: name an alias")
    if any("closed" in each.get("attributes", ()) for each in resolved.get("indices", ()) if each.get("name") == name):
        raise SinkRefused(f"index {name} is closed: open it")
    if any(each.get("name") == name for each in resolved.get("aliases", ())):
        _require_writable(name, _asked(client, declared, f"{index_path(name)}/_alias{index_path(name)}") or {})
        return Target(alias=True)
    return Target(identity=identity_of(client, declared))


def identity_of(client: OpenSearch, declared: Declared) -> str:
    """Return the index's identity (see `Target`), or "" if unknown.

    Raises SinkRefused if it does not exist, SinkBusy.
    """
    found = _asked(client, declared, f"{index_path(declared.index_base)}/_settings/index.uuid")
    if found is None:
        return ""
    known = found.get(declared.index_base)
    return "" if known is None else str(known["settings"]["index"]["uuid"])


def is_healthy(client: OpenSearch, declared: Declared) -> bool:
    """Return whether all primary shards are assigned. False if the cluster does not respond."""
    try:
        found = client.transport.perform_request("GET", f"/_cluster/health{index_path(declared.index_base)}")
        return isinstance(found, dict) and found.get("status") in ("green", "yellow")
    except OpenSearchException:
        return False


def _require_writable(name: str, indices: dict[str, Any]) -> None:
    flags = [each["aliases"].get(name, {}).get("is_write_index") for each in indices.values() if "aliases" in each]
    if flags and not any(flags) and (len(flags) > 1 or flags[0] is False):
        raise SinkRefused(
            f"{name} is an alias of {len(flags)} indices without a write index: name one (is_write_index)"
        )


def _asked(client: OpenSearch, declared: Declared, path: str) -> dict[str, Any] | None:
    """Return the cluster's response; None if this login may not ask, or the server does not support the request."""
    try:
        found = client.transport.perform_request("GET", path)
    except TransportError as error:
        if error.error == "index_not_found_exception":
            raise SinkRefused(f"index {declared.index_base} does not exist any more: it was deleted") from None
        if error.status_code in (400, 401, 403, 404, 405):
            return None
        raise error_of(error, declared) from None
    except OpenSearchException as error:
        raise error_of(error, declared) from None
    return found if isinstance(found, dict) else None


def make(client: OpenSearch, declared: Declared) -> None:
    """Create the index, or the template for its indices, unless it exists. Raises SinkBusy, SinkRefused."""
    name, body = index_path(declared.index_base), _with_memory(declared.index_body)
    if declared.data_stream or declared.index_suffix:
        pattern = pattern_of(declared) if declared.index_suffix else declared.index_base
        made = {"index_patterns": [pattern], "template": declared.index_body, "priority": _PRIORITY}
        made |= {"data_stream": {}} if declared.data_stream else {"template": body}
        _put(client, declared, f"/_index_template{name}", made)
        if declared.data_stream:
            _put(client, declared, f"/_data_stream{name}", None)
    elif declared.rollover is not None:
        aliases = {**(body.get("aliases") or {}), declared.index_base: {"is_write_index": True}}
        _put(client, declared, index_path(declared.index_base + FIRST), {**body, "aliases": aliases})
    else:
        _put(client, declared, name, body)


def roll_over(client: OpenSearch, declared: Declared) -> None:
    """Roll over the alias to a new index if a condition is met. Raises SinkBusy, SinkRefused."""
    assert declared.rollover is not None, "only called for a sink with rollover"
    path = f"{index_path(declared.index_base)}/_rollover"
    body = {"conditions": declared.rollover.conditions(), **_of_a_new_index(declared)}
    try:
        client.transport.perform_request("POST", path, body=body)
    except OpenSearchException as error:
        raise error_of(error, declared) from None


def _of_a_new_index(declared: Declared) -> dict[str, Any]:
    body = _with_memory(declared.index_body)
    return {name: body[name] for name in ("settings", "mappings") if name in body}


def _put(client: OpenSearch, declared: Declared, path: str, body: dict[str, Any] | None) -> None:
    try:
        client.transport.perform_request("PUT", path, body=body)
    except TransportError as error:
        if error.error != "resource_already_exists_exception":
            raise error_of(error, declared) from None
    except OpenSearchException as error:
        raise error_of(error, declared) from None


def remove(client: OpenSearch, declared: Declared, index: str) -> None:
    """Remove `index`, if it exists, and nothing else that its name may match. Raises SinkBusy, SinkRefused.

    For many indices, remove the template, the data stream with its template, or the first index of an alias; the other
    indices stay.
    """
    if declared.data_stream:
        _delete(client, declared, f"/_data_stream{index_path(index)}")
    if declared.data_stream or declared.index_suffix:
        _delete(client, declared, f"/_index_template{index_path(index)}")
        return
    _delete(client, declared, index_path(index + FIRST if declared.rollover is not None else index))


def _delete(client: OpenSearch, declared: Declared, path: str) -> None:
    one = {} if path.startswith("/_") else {"expand_wildcards": "none"}
    try:
        client.transport.perform_request("DELETE", path, params=one)
    except TransportError as error:
        if error.status_code != 404:
            raise error_of(error, declared) from None
    except OpenSearchException as error:
        raise error_of(error, declared) from None


def cluster_of(client: OpenSearch, declared: Declared) -> str:
    """Return the identity of the cluster: its id, or its addresses if it hides the id. Raises SinkBusy, SinkRefused."""
    try:
        return str(client.transport.perform_request("GET", "/")["cluster_uuid"])
    except TransportError as error:
        if error.status_code in (401, 403):  # a login with rights for its index only
            return ",".join(declared.hosts)
        raise error_of(error, declared) from None
    except OpenSearchException as error:
        raise error_of(error, declared) from None
    except (KeyError, TypeError):
        raise SinkRefused(f"{declared.hosts[0]} does not respond like OpenSearch: correct sink.hosts") from None


def error_of(error: OpenSearchException, declared: Declared) -> MillraceError:
    """Translate a client's error into a MillraceError.

    Reveals nothing of a response that is not OpenSearch's, since it may come from an internal server.
    """
    pause = declared.backoff_ms / 1000
    if isinstance(error, NoConnection):
        return SinkBusy(f"OpenSearch does not answer: {one_line(error)}", retry_after=pause)
    if isinstance(error, TransportError):
        status = error.status_code
        words = f"{status} {one_line(error)}" if is_answer(error) else f"HTTP {status}"
        if status in AGAIN:
            return SinkBusy(f"OpenSearch: {words}", retry_after=pause)
        return SinkRefused(f"index {declared.index_base}: {words}")
    return SinkBusy(f"OpenSearch: {one_line(error)}", retry_after=pause)


def one_line(error: OpenSearchException) -> str:
    """Return the error's text on one line."""
    return " ".join(str(error).split())[:_WORDS]


def _with_memory(body: dict[str, Any]) -> dict[str, Any]:
    """Return an index's body with the setting that external versions of deletes need."""
    settings = body.get("settings") or {}
    known = {"index.gc_deletes", "gc_deletes"} & settings.keys() or "gc_deletes" in (settings.get("index") or {})
    return body if known else {**body, "settings": {**settings, "index.gc_deletes": GC_DELETES}}
