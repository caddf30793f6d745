"""One bulk request: its body, and what OpenSearch says of each item and of the whole."""

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
"""A read-only index (a full disk), a cluster without a manager: the cluster's state, whatever status it comes with."""
_CLOSED: Final = frozenset({"index_not_found_exception", "security_exception", "index_closed_exception"})
"""The index's state, and no document's fault."""
_INTERNAL: Final = 500
"""The status of a fault within OpenSearch: of the cluster, or of one document that it trips over."""
_NEWER: Final = re.compile(r"current version \[(\d+)\]")
_REASON: Final = 500


class Json(Serializer):
    """Bodies are bytes already; answers are read by msgspec."""

    mimetype = "application/json"

    def dumps(self, data: Any) -> Any:
        return data if isinstance(data, bytes | str) else msgspec.json.encode(data).decode()

    def loads(self, data: Any) -> Any:
        return msgspec.json.decode(data)


class Verdict(Enum):
    """Of an item."""

    DONE = "done"
    STALE = "stale"
    """A newer version of its id is there."""
    REPEATED = "repeated"
    """The same version is there: an earlier attempt brought it."""
    AGAIN = "again"
    FAILED = "failed"
    REFUSED = "refused"
    """Not the item's fault, and nothing that passes: rights, no index."""


class Item(NamedTuple):
    """What became of one."""

    verdict: Verdict
    kind: str = ""
    reason: str = ""
    internal: bool = False
    """It was answered with 500, so that it may be the document that OpenSearch trips over."""
    there: int | None = None
    """The newer version that is there, of one that is stale."""


class Busy(Exception):
    """The whole request may be sent again later."""

    def __init__(self, reason: str, *, internal: bool = False) -> None:
        """`internal`: it was answered with 500, and one of its documents may be the cause."""
        super().__init__(reason)
        self.internal = internal


class TooLarge(Exception):
    """The request as a whole is not taken; parts of it may be."""

    def __init__(self, kind: str, reason: str) -> None:
        super().__init__(reason)
        self.kind = kind


class Refused(Exception):
    """No request of this kind is taken."""


_DONE: Final = Item(Verdict.DONE)


def body(
    actions: Sequence[Action], *, equal_wins: bool = False, indices: Sequence[str] = (), added: bool = False
) -> bytes:
    """Return the bulk API's newline-delimited body. With `equal_wins`, a later document replaces one of its version.

    `indices`: of each action its own index; none: all go to one. `added`: documents of a data stream, never replaced.
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
        told: dict[str, Any] = {"_id": action.id}
        if indices:
            told["_index"] = indices[place]
        if action.version is not None:
            told |= {"version": action.version, "version_type": "external_gte" if equal_wins else "external"}
        if action.body is None:
            parts.append(encode({"delete": told}))
        else:
            parts.append(encode({"create" if added else "index": told}))
            parts.append(_timed(action, action.body) if added else action.body)
    parts.append(b"")
    return b"\n".join(parts)


def _timed(action: Action, document: bytes) -> bytes:
    """The document with the time that a data stream asks of it: the record's, where it has none of its own."""
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
    """Send a bulk to the index at `path`, or to the one of the `alias` there; return the result of each of `actions`.

    `indices` and `added` as in :func:`body`.

    Raises Busy, TooLarge, Refused.
    """
    # An alias that is gone is then an error; without this an index of its name would be made.
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
    except NoConnection as error:  # time-outs too: what was done is not known, and doing it again is the same
        raise Busy(_told(error)) from None
    except TransportError as error:
        known = is_answer(error)
        # The text of another server's answer is not shown: it may be internal to that server.
        status, told = error.status_code, _told(error) if known else f"HTTP {error.status_code}, not by OpenSearch"
        if status in AGAIN or error.error in _BLOCKED:
            raise Busy(told, internal=status == _INTERNAL) from None
        if status == 413 or (status == 400 and known):
            raise TooLarge(f"HTTP_{status}", told) from None
        raise Refused(told) from None
    except OpenSearchException as error:
        raise Busy(_told(error)) from None
    if not isinstance(answer, dict) or "errors" not in answer:
        raise Busy(f"no answer of a bulk request: {str(answer)[:_REASON]}")
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
    # Check the kind of the error before the status: a conflict under external versions means that the document is as
    # new.
    if kind == "version_conflict_engine_exception" and added:
        return Item(Verdict.REPEATED)
    if kind == "version_conflict_engine_exception" and action.version is not None:
        told = _NEWER.search(str(error.get("reason", "")))
        there = None if told is None else int(told[1])
        return Item(Verdict.REPEATED if there == action.version else Verdict.STALE, there=there)
    caused = (error.get("caused_by") or {}).get("reason")
    reason = f"{error.get('reason', '')}{f': {caused}' if caused else ''}"[:_REASON]
    if kind in _BLOCKED or status in AGAIN or status == 409:
        return Item(Verdict.AGAIN, kind, reason, internal=status == _INTERNAL)
    if kind in _CLOSED or status in (401, 403):
        return Item(Verdict.REFUSED, kind, reason)
    return Item(Verdict.FAILED, kind or f"HTTP_{status}", reason)


def is_answer(error: TransportError) -> bool:
    """Whether OpenSearch itself answered so, and not a proxy before it."""
    info: Any = error.info
    return isinstance(info, dict) and isinstance(info.get("error"), dict | str)


def _told(error: OpenSearchException) -> str:
    return " ".join(str(error).split())[:_REASON]
