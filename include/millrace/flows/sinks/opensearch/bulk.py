"""One bulk request: its body, and OpenSearch's verdict on each item and on the whole."""

from __future__ import annotations

import re
from collections.abc import Sequence
from enum import Enum
from typing import Any, Final, NamedTuple

import msgspec
from opensearchpy import OpenSearch
from opensearchpy.exceptions import ConnectionError as NoConnection
from opensearchpy.exceptions import OpenSearchException, TransportError
from opensearchpy.serializer import Serializer

from millrace.flows.records import Action

FILTER: Final = "errors,items.*.status,items.*.error.type,items.*.error.reason,items.*.error.caused_by.reason"
AGAIN: Final = frozenset({429, 500, 502, 503, 504})
_BLOCKED: Final = frozenset({"cluster_block_exception", "process_cluster_event_timeout_exception"})
"""A read-only index (a full disk), a cluster without a manager: the cluster's state, whatever the status code."""
_CLOSED: Final = frozenset({"index_not_found_exception", "security_exception", "index_closed_exception"})
"""The index's state, not a document's fault."""
_INTERNAL: Final = 500
"""The status of an internal error of OpenSearch: of the cluster, or caused by one document."""
_NEWER: Final = re.compile(r"current version \[(\d+)\]")
_REASON: Final = 500


class Json(Serializer):
    """Passes bodies, which are bytes already. Responses are parsed by msgspec."""

    mimetype = "application/json"

    def dumps(self, data: Any) -> Any:
        return data if isinstance(data, bytes | str) else msgspec.json.encode(data).decode()

    def loads(self, data: Any) -> Any:
        return msgspec.json.decode(data)


class Verdict(Enum):
    """The verdict on an item."""

    DONE = "done"
    STALE = "stale"
    """The index has a newer version of its id."""
    REPEATED = "repeated"
    """The index has the same version, from an earlier attempt."""
    AGAIN = "again"
    FAILED = "failed"
    REFUSED = "refused"
    """Refused through no fault of the item, and not transient: missing rights, no index."""


class Item(NamedTuple):
    """The outcome of an item."""

    verdict: Verdict
    kind: str = ""
    reason: str = ""
    internal: bool = False
    """Whether it was answered with 500, so that the document may be the cause."""
    there: int | None = None
    """The newer version in the index, for a stale item."""


class Busy(Exception):
    """The whole request may be sent again later."""

    def __init__(self, reason: str, *, internal: bool = False) -> None:
        """`internal`: it was answered with 500, and one of its documents may be the cause."""
        super().__init__(reason)
        self.internal = internal


class TooLarge(Exception):
    """The request as a whole is refused, but parts of it may be accepted."""

    def __init__(self, kind: str, reason: str) -> None:
        super().__init__(reason)
        self.kind = kind


class Refused(Exception):
    """Requests of this kind are refused."""


_DONE: Final = Item(Verdict.DONE)


def body(
    actions: Sequence[Action], *, equal_wins: bool = False, indices: Sequence[str] = (), added: bool = False
) -> bytes:
    """Return the bulk API's newline-delimited body.

    With `equal_wins`, a later document replaces one of the same version. `indices` has the index of each action; empty:
    all go to one. `added`: documents of a data stream, which are never replaced.
    """
    encode = msgspec.json.encode
    if indices or added:
        return _placed_body(actions, equal_wins=equal_wins, indices=indices, added=added)
    kind = b"external_gte" if equal_wins else b"external"
    parts: list[bytes] = []
    for action in actions:
        name = encode(action.id)
        version = b"" if action.version is None else b',"version":%d,"version_type":"%b"' % (action.version, kind)
        if action.body is None:
            parts.append(b'{"delete":{"_id":%b%b}}' % (name, version))
        else:
            parts.append(b'{"index":{"_id":%b%b}}' % (name, version))
            parts.append(action.body)
    parts.append(b"")
    return b"\n".join(parts)


def _placed_body(actions: Sequence[Action], *, equal_wins: bool, indices: Sequence[str], added: bool) -> bytes:
    encode = msgspec.json.encode
    parts: list[bytes] = []
    for place, action in enumerate(actions):
        target: dict[str, Any] = {"_id": action.id}
        if indices:
            target["_index"] = indices[place]
        if action.version is not None:
            target |= {"version": action.version, "version_type": "external_gte" if equal_wins else "external"}
        if action.body is None:
            parts.append(encode({"delete": target}))
        else:
            parts.append(encode({"create" if added else "index": target}))
            parts.append(_timed(action, action.body) if added else action.body)
    parts.append(b"")
    return b"\n".join(parts)


def _timed(action: Action, document: bytes) -> bytes:
    """Return the document with the time that a data stream requires: its own, or else the record's."""
    if b'"@timestamp"' in document and "@timestamp" in msgspec.json.decode(document):
        return document
    stamp = b'{"@timestamp":%d' % action.record.timestamp
    rest = document.strip()[1:].lstrip()
    return stamp + (b"}" if rest == b"}" else b"," + rest)


def send(
    client: OpenSearch,
    path: str,
    actions: Sequence[Action],
    *,
    refresh: bool,
    alias: bool = False,
    equal_wins: bool = False,
    indices: Sequence[str] = (),
    added: bool = False,
) -> list[Item]:
    """Send a bulk to the index at `path`, or to that of the `alias` there; return the result of each of `actions`.

    `indices` and `added` as in :func:`body`.

    Raises Busy, TooLarge, Refused.
    """
    # A missing alias is then an error; otherwise an index of its name would be created.
    params = {"filter_path": FILTER} | ({"refresh": "true"} if refresh else {})
    params |= {"require_alias": "true"} if alias else {}
    try:
        answer = client.transport.perform_request(
            "POST",
            f"{path}/_bulk",
            params=params,
            body=body(actions, equal_wins=equal_wins, indices=indices, added=added),
            headers={"content-type": "application/x-ndjson"},
        )
    except NoConnection as error:  # including time-outs: the effect is unknown, and repeating it is idempotent
        raise Busy(_one_line(error)) from None
    except TransportError as error:
        known = is_answer(error)
        # Do not show the text of another server's response: it may be internal to that server.
        status, words = error.status_code, _one_line(error) if known else f"HTTP {error.status_code}, not by OpenSearch"
        if status in AGAIN or error.error in _BLOCKED:
            raise Busy(words, internal=status == _INTERNAL) from None
        if status == 413 or (status == 400 and known):
            raise TooLarge(f"HTTP_{status}", words) from None
        raise Refused(words) from None
    except OpenSearchException as error:
        raise Busy(_one_line(error)) from None
    if not isinstance(answer, dict) or "errors" not in answer:
        raise Busy(f"not a response to a bulk request: {str(answer)[:_REASON]}")
    if not answer["errors"]:
        return [_DONE] * len(actions)
    items = answer.get("items", [])
    if len(items) != len(actions):
        raise Busy(f"{len(items)} answers to {len(actions)} actions")
    return [
        _judged(next(iter(item.values())), action, added=added) for item, action in zip(items, actions, strict=True)
    ]


def _judged(item: dict[str, Any], action: Action, *, added: bool = False) -> Item:
    status, error = int(item["status"]), item.get("error") or {}
    if status < 300 or (status == 404 and action.body is None and not error):
        return _DONE
    kind = str(error.get("type", ""))
    # Check the kind of the error before the status: a conflict under external versions means that the document is up
    # to date.
    if kind == "version_conflict_engine_exception" and added:
        return Item(Verdict.REPEATED)
    if kind == "version_conflict_engine_exception" and action.version is not None:
        newer = _NEWER.search(str(error.get("reason", "")))
        there = None if newer is None else int(newer[1])
        return Item(Verdict.REPEATED if there == action.version else Verdict.STALE, there=there)
    caused = (error.get("caused_by") or {}).get("reason")
    reason = f"{error.get('reason', '')}{f': {caused}' if caused else ''}"[:_REASON]
    if kind in _BLOCKED or status in AGAIN or status == 409:
        return Item(Verdict.AGAIN, kind, reason, internal=status == _INTERNAL)
    if kind in _CLOSED or status in (401, 403):
        return Item(Verdict.REFUSED, kind, reason)
    return Item(Verdict.FAILED, kind or f"HTTP_{status}", reason)


def is_answer(error: TransportError) -> bool:
    """Return whether OpenSearch itself sent this response, rather than a proxy."""
    info: Any = error.info
    return isinstance(info, dict) and isinstance(info.get("error"), dict | str)


def _one_line(error: OpenSearchException) -> str:
    return " ".join(str(error).split())[:_REASON]
