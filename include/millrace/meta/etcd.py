"""A meta store in etcd, through the JSON gateway of its v3 API. Revisions, leases and compaction are etcd's own.

The etcd should serve this cluster only: its revision counts all writes, and this store compacts it. Several clusters
can share one under different prefixes if each tolerates the others' compaction.

A request without an answer may have taken effect (MetaAmbiguous); one without a connection did not (MetaUnavailable).
"""

from __future__ import annotations

import json
import logging
import math
import threading
from base64 import b64decode, b64encode
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import httpx

from millrace.base.closeable import Closeable
from millrace.base.errors import InvalidArgument, LeaseNotFound, MetaAmbiguous, MetaUnavailable, RevisionCompacted
from millrace.meta.store import (
    RETAINED_REVISIONS,
    Delete,
    Entry,
    Event,
    EventBatch,
    Listing,
    Mutation,
    RevisionEquals,
    check_commit,
    check_revision,
    check_seconds,
)

ANSWER_SECONDS: Final = 5.0
"""Timeout for an answer."""
CONNECT_SECONDS: Final = 2.0
_COMPACT_EVERY: Final = 256
"""Revisions between two compactions by one store."""
_PAGE: Final = 1_000
"""Keys per answer to a listing."""

_NOT_FOUND, _OUT_OF_RANGE, _UNAUTHENTICATED = 5, 11, 16
_REFUSED: Final = frozenset({3, 7, 8, 9, 16})
"""gRPC codes of calls that certainly had no effect: invalid argument, permission denied, resource exhausted, failed
precondition, unauthenticated."""
_NOT_SENT: Final = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout)


@dataclass(frozen=True, slots=True)
class EtcdAddress:
    """The URLs of an etcd's members, and the prefix of all our keys."""

    members: tuple[str, ...]
    prefix: str
    authority: Path | None = None
    """CA certificates that verify https members; None: the host's."""


class _Refused(Exception):
    """An error answer of etcd."""

    def __init__(self, code: int, words: str) -> None:
        super().__init__(words)
        self.code = code


class EtcdStore(Closeable):
    """A MetaStore in etcd. Thread-safe. Leases last whole seconds, and at least as long as etcd's elections."""

    def __init__(
        self,
        address: EtcdAddress,
        *,
        username: str = "",
        password: str = "",
        retained_revisions: int = RETAINED_REVISIONS,
    ) -> None:
        """Connect to the cluster. Raises MetaUnavailable if no member answers or the login is rejected."""
        self._members = list(address.members)
        self._prefix = address.prefix
        self._login = {"name": username, "password": password} if username else None
        self._retained = retained_revisions
        self._lock = threading.Lock()
        timeout = httpx.Timeout(ANSWER_SECONDS, connect=CONNECT_SECONDS)
        verify: Any = True if address.authority is None else _authority(address.authority)
        logging.getLogger("httpx").setLevel(logging.WARNING)  # it logs every call
        # The environment's proxies are for external hosts.
        self._http = httpx.Client(timeout=timeout, verify=verify, trust_env=False)
        try:
            self._compacted_at = self._newest()
        except BaseException:
            self._http.close()
            raise

    def close(self) -> None:
        self._http.close()

    # -- calls --

    def _reads(self, call: str, **body: Any) -> dict[str, Any]:
        try:
            return self._answer(call, body, repeat=True)
        except httpx.TransportError as error:
            raise _unavailable(error) from error
        except _Refused as error:
            if error.code == _OUT_OF_RANGE:
                raise
            raise _unavailable(error) from error

    def _writes(self, call: str, **body: Any) -> dict[str, Any]:
        try:
            return self._answer(call, body, repeat=False)
        except _NOT_SENT as error:
            raise _unavailable(error) from error
        except httpx.TransportError as error:
            raise _ambiguous(error) from error
        except _Refused as error:
            if error.code == _NOT_FOUND:
                raise
            if error.code in _REFUSED:
                raise _unavailable(error) from error
            raise _ambiguous(error) from error

    def _answer(self, call: str, body: dict[str, Any], *, repeat: bool) -> dict[str, Any]:
        """Return the answer of the first reachable member; with `repeat`, of the first that answers."""
        failure: Exception | None = None
        for _ in self._members:
            member = self._members[0]
            try:
                return self._authenticated(member, call, body)
            except httpx.TransportError as error:
                if not repeat and not isinstance(error, _NOT_SENT):
                    raise
                failure = error
            with self._lock:
                if self._members[0] == member:
                    self._members.append(self._members.pop(0))
        assert failure is not None
        raise failure

    def _authenticated(self, member: str, call: str, body: dict[str, Any]) -> dict[str, Any]:
        if self._login is not None and "authorization" not in self._http.headers:
            self._authenticate(member)
        try:
            return self._posted(member, call, body)
        except _Refused as error:
            if error.code != _UNAUTHENTICATED or self._login is None:
                raise
            self._authenticate(member)  # its token has expired
            return self._posted(member, call, body)

    def _authenticate(self, member: str) -> None:
        self._http.headers.pop("authorization", None)
        self._http.headers["authorization"] = self._posted(member, "auth/authenticate", self._login or {})["token"]

    def _posted(self, member: str, call: str, body: dict[str, Any]) -> dict[str, Any]:
        answer = self._http.post(f"{member}/v3/{call}", json=body)
        if answer.status_code != 200:
            raise _refused(answer.status_code, answer.text)
        found: dict[str, Any] = answer.json()
        return found

    # -- reads --

    def _newest(self) -> int:
        return _revision(self._reads("kv/range", key=_coded(self._prefix), count_only=True))

    def get(self, key: str) -> Entry | None:
        found = self._reads("kv/range", key=_coded(self._prefix + key)).get("kvs", ())
        return self._entry(found[0]) if found else None

    def list(self, prefix: str, *, revision: int | None = None) -> Listing:
        begin, end = self._range(prefix)
        entries: list[Entry] = []
        while True:
            page = {"key": begin, "range_end": end, "limit": _PAGE, "revision": revision or 0}
            try:
                answer = self._reads("kv/range", **page)
            except _Refused as error:
                assert revision is not None
                raise self._out_of_range(revision) from error
            revision = revision or _revision(answer)
            entries += (self._entry(row) for row in answer.get("kvs", ()))
            if not answer.get("more"):
                return Listing(revision, tuple(entries))
            begin = b64encode(b64decode(answer["kvs"][-1]["key"]) + b"\0").decode()

    def _out_of_range(self, revision: int) -> Exception:
        """Return the error that explains why a revision cannot be read."""
        newest = self._newest()
        try:
            check_revision(revision, newest=newest, compacted=self._earliest(revision) if revision <= newest else 0)
        except (InvalidArgument, RevisionCompacted) as error:
            return error
        return MetaUnavailable(f"etcd could not read revision {revision}: try again")

    def _earliest(self, revision: int) -> int:
        """Return the revision up to which etcd is compacted, 0 if `revision` can be read. Only a watch reports it."""
        watch = {"key": _coded(self._prefix), "start_revision": revision}
        with self._watch(watch) as answers:
            for answer in answers:
                if answer.get("canceled") or answer.get("compact_revision"):
                    return int(answer.get("compact_revision", 0))
                if not answer.get("created"):
                    return 0
        return 0

    def changes(self, prefix: str, *, after: int) -> EventBatch:
        newest = self._newest()
        if after == newest:
            return EventBatch(newest, ())
        if after > newest:
            check_revision(after, newest=newest, compacted=0)
        # Every revision is an event of some key: a watch of all keys is complete once it has the event of `newest`.
        everything = {"key": _coded("\0"), "range_end": _coded("\0"), "start_revision": after + 1}
        found: list[Event] = []
        reached = after
        with self._watch(everything) as answers:
            for answer in answers:
                if answer.get("canceled"):
                    check_revision(after, newest=newest, compacted=int(answer.get("compact_revision", 0)))
                    raise MetaUnavailable(f"etcd ended a watch: {answer.get('cancel_reason', 'no reason given')}")
                for event in answer.get("events", ()):
                    reached = int(event["kv"]["mod_revision"])
                    if (key := b64decode(event["kv"]["key"]).decode("utf-8", "replace")).startswith(
                        self._prefix + prefix
                    ):
                        gone = event.get("type") == "DELETE"
                        found.append(
                            Event(reached, key[len(self._prefix) :], None if gone else self._entry(event["kv"]))
                        )
                if reached >= newest:
                    break
        # A compaction to after + 1 may have dropped that revision's deletes although the watch could start there.
        try:
            self._reads("kv/range", key=_coded(self._prefix), revision=after, count_only=True) if after else None
        except _Refused as error:
            raise self._out_of_range(after) from error
        return EventBatch(max(reached, newest), tuple(found))

    def _watch(self, request: dict[str, Any]) -> _Watch:
        return _Watch(self._http, self._members[0], request)

    # -- writes --

    def commit(self, then: Sequence[Mutation], *, when: Sequence[RevisionEquals] = ()) -> int | None:
        check_commit(then, when)
        compare = [
            {"key": _coded(self._prefix + each.key), "target": "MOD", "result": "EQUAL", "mod_revision": each.revision}
            for each in when
        ]
        try:
            answer = self._writes("kv/txn", compare=compare, success=[self._operation(change) for change in then])
        except _Refused as error:
            raise LeaseNotFound(f"a lease has ended ({error}): nothing was written") from error
        if not answer.get("succeeded"):
            return None
        revision = _revision(answer)
        self._keep_short(revision)
        return revision

    def _operation(self, change: Mutation) -> dict[str, Any]:
        key = _coded(self._prefix + change.key)
        if isinstance(change, Delete):
            return {"request_delete_range": {"key": key}}
        return {"request_put": {"key": key, "value": b64encode(change.value).decode(), "lease": str(change.lease)}}

    def _keep_short(self, revision: int) -> None:
        with self._lock:
            if revision - self._compacted_at < _COMPACT_EVERY:
                return
            self._compacted_at = revision
        if revision > self._retained:
            try:
                self._compact(revision - self._retained)
            except (MetaUnavailable, MetaAmbiguous):
                pass  # the commit took effect; the next one compacts

    def grant(self, seconds: float) -> int:
        check_seconds(seconds)
        return int(self._writes("lease/grant", TTL=str(math.ceil(seconds)), ID="0")["ID"])

    def renew(self, lease: int) -> None:
        try:
            answer = self._writes("lease/keepalive", ID=str(lease)).get("result", {})
        except _Refused as error:
            raise LeaseNotFound(f"the lease {lease} has ended") from error
        if int(answer.get("TTL", 0)) <= 0:
            raise LeaseNotFound(f"the lease {lease} has ended")

    def revoke(self, lease: int) -> None:
        try:
            self._writes("lease/revoke", ID=str(lease))
        except _Refused:
            pass  # already ended

    def compact(self, revision: int) -> None:
        newest = self._newest()
        if revision > newest:
            check_revision(revision, newest=newest, compacted=0)
        self._compact(revision)

    def _compact(self, revision: int) -> None:
        try:
            self._answer("kv/compaction", {"revision": str(revision)}, repeat=True)
        except httpx.TransportError as error:
            raise _unavailable(error) from error
        except _Refused as error:
            if error.code != _OUT_OF_RANGE:  # already compacted further
                raise _unavailable(error) from error

    # -- keys --

    def _range(self, prefix: str) -> tuple[str, str]:
        return _coded(self._prefix + prefix), _coded(self._prefix + prefix + "\x7f")

    def _entry(self, row: dict[str, Any]) -> Entry:
        return Entry(
            key=b64decode(row["key"]).decode()[len(self._prefix) :],
            value=b64decode(row.get("value", "")),
            created=int(row["create_revision"]),
            modified=int(row["mod_revision"]),
            lease=int(row.get("lease", 0)),
        )


class _Watch:
    """The answers of one watch, from its start to the end of the block."""

    def __init__(self, http: httpx.Client, member: str, request: dict[str, Any]) -> None:
        self._stream = http.stream("POST", f"{member}/v3/watch", json={"create_request": request})

    def __enter__(self) -> Any:
        try:
            answer = self._stream.__enter__()
        except httpx.TransportError as error:
            raise _unavailable(error) from error
        return self._answers(answer)

    def _answers(self, answer: httpx.Response) -> Any:
        try:
            if answer.status_code != 200:
                answer.read()
                raise _unavailable(_refused(answer.status_code, answer.text))
            for line in answer.iter_lines():
                if line.strip():
                    said = json.loads(line)
                    if "error" in said:
                        raise MetaUnavailable(f"etcd ended a watch: {said['error']}")
                    yield said["result"]
            raise MetaUnavailable("etcd ended a watch: its stream was closed")
        except httpx.TransportError as error:
            raise _unavailable(error) from error

    def __exit__(self, *failure: Any) -> None:
        self._stream.__exit__(*failure)


def _refused(status: int, text: str) -> _Refused:
    try:
        said = json.loads(text)
        return _Refused(int(said.get("code", -1)), str(said.get("error") or said.get("message")))
    except (ValueError, AttributeError, TypeError):
        return _Refused(-1, f"HTTP {status}")


def _unavailable(error: Exception) -> MetaUnavailable:
    return MetaUnavailable(
        f"etcd cannot be used now ({_words(error)}); nothing was done: check that it runs at MILLRACE_META_STORE"
    )


def _ambiguous(error: Exception) -> MetaAmbiguous:
    return MetaAmbiguous(f"etcd gave no answer ({_words(error)}): read before you retry")


def _words(error: Exception) -> str:
    words = str(error) or type(error).__name__
    return f"{error.request.url.netloc.decode()}: {words}" if isinstance(error, httpx.TransportError) else words


def _authority(path: Path) -> Any:
    import ssl

    try:
        return ssl.create_default_context(cafile=path)
    except OSError as error:
        raise InvalidArgument(f"the certificates in {path} cannot be read: {error}") from error


def _coded(key: str) -> str:
    return b64encode(key.encode()).decode()


def _revision(answer: dict[str, Any]) -> int:
    return int(answer["header"]["revision"])
