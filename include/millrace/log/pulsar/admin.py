"""The part of Pulsar's admin API that the log uses: topics, their properties and positions, the namespace's policies.

Every call has a deadline and is retried until then while the brokers are unreachable or starting. A retry that finds
a topic already created or deleted attributes that to the previous attempt, whose answer was lost.
"""

from __future__ import annotations

import http.client
import json
import ssl
import threading
from typing import Any, Final
from urllib.parse import quote, urlencode, urlsplit

from millrace.base.backoff import jittered
from millrace.base.deadline import Deadline
from millrace.base.errors import InvalidSettings, LogRefused, LogUnavailable
from millrace.log.pulsar.settings import PulsarCredentials, PulsarSettings

_PAUSE: Final = 0.1
_REDIRECTS: Final = 5
_OK: Final = range(200, 300)
_ACCEPTED: Final = object()
"""Result of a call that failed with a status that the caller expects."""


class PulsarAdmin:
    """Admin API calls for one namespace. Thread-safe."""

    def __init__(self, settings: PulsarSettings, credentials: PulsarCredentials) -> None:
        self._settings = settings
        self._header = {"Content-Type": "application/json", "Accept": "application/json"} | credentials.header()
        self._context = _tls(settings) if settings.admin_url.startswith("https:") else None
        self._idle: list[http.client.HTTPConnection] = []
        self._lock = threading.Lock()
        self._namespace = f"{quote(settings.tenant, safe='')}/{quote(settings.namespace, safe='')}"

    # --- topics -------------------------------------------------------------------------------------------------------

    def topics(self) -> list[str]:
        """Return the names of the namespace's topics, without tenant and namespace."""
        found = self._call("GET", f"/persistent/{self._namespace}")
        return [str(name).rpartition("/")[2] for name in found]

    def create_topic(self, topic: str) -> bool:
        """Create a topic; False if it exists."""
        return self._call("PUT", self._topic(topic), accept=(409,), settles=True) is not _ACCEPTED

    def delete_topic(self, topic: str) -> bool:
        """Delete a topic with its subscriptions, even if readers and writers are connected; False if it does
        not exist.
        """
        return self._call("DELETE", f"{self._topic(topic)}?force=true", accept=(404,), settles=True) is not _ACCEPTED

    def ensure_subscription(self, topic: str, name: str) -> bool:
        """Create a durable subscription at the topic's beginning if it is missing; False if the topic does
        not exist.
        """
        earliest = {"ledgerId": -1, "entryId": -1, "partitionIndex": -1}
        path = f"{self._topic(topic)}/subscription/{quote(name, safe='')}"
        try:
            self._call("PUT", path, earliest, accept=(409,))
        except LogRefused as error:
            if error.status == 404:
                return False
            raise
        return True

    def properties(self, topic: str) -> dict[str, str] | None:
        """Return the topic's durable properties; None if the topic does not exist."""
        found = self._call("GET", f"{self._topic(topic)}/properties", accept=(404,))
        return None if found is _ACCEPTED else {str(key): str(value) for key, value in (found or {}).items()}

    def set_properties(self, topic: str, values: dict[str, str]) -> bool:
        """Set some of the topic's properties, durably; False if the topic does not exist."""
        if self.properties(topic) is None:
            return False  # Pulsar never answers this call for a missing topic
        return self._call("PUT", f"{self._topic(topic)}/properties", values, accept=(404,)) is not _ACCEPTED

    def remove_property(self, topic: str, key: str) -> None:
        """Remove a property of a topic. No effect if either does not exist."""
        if key not in (self.properties(topic) or {}):
            return  # as above
        self._call("DELETE", f"{self._topic(topic)}/properties?{urlencode({'key': key})}", accept=(404,))

    def last_message_id(self, topic: str) -> dict[str, Any] | None:
        """Return ``ledgerId``, ``entryId`` (-1: none) and ``batchIndex`` (-1: no batch) of the last message; None
        without a topic.
        """
        found = self._call("GET", f"{self._topic(topic)}/lastMessageId", accept=(404,))
        return None if found is _ACCEPTED else dict(found)

    def internal_stats(self, topic: str) -> dict[str, Any] | None:
        """Return ledgers, cursors and sizes of a topic; None if it does not exist."""
        found = self._call("GET", f"{self._topic(topic)}/internalStats", accept=(404,))
        return None if found is _ACCEPTED else dict(found)

    def reset_cursor(self, topic: str, subscription: str, ledger: int, entry: int) -> None:
        """Move a subscription to an entry, which becomes its first unread one."""
        path = f"{self._topic(topic)}/subscription/{quote(subscription, safe='')}/resetcursor"
        body = {"ledgerId": ledger, "entryId": entry, "partitionIndex": -1, "batchIndex": -1, "isExcluded": False}
        self._call("POST", path, body)

    def trim(self, topic: str) -> None:
        """Delete ledgers that no subscription needs."""
        self._call("POST", f"{self._topic(topic)}/trim")

    # --- the namespace ------------------------------------------------------------------------------------------------

    def clusters(self) -> list[str]:
        """Return the clusters of this Pulsar instance."""
        return [str(name) for name in self._call("GET", "/clusters")]

    def create_tenant(self, clusters: list[str]) -> None:
        """Create the tenant if it does not exist."""
        tenant = quote(self._settings.tenant, safe="")
        self._call("PUT", f"/tenants/{tenant}", {"allowedClusters": clusters}, accept=(409,))

    def policies(self) -> dict[str, Any] | None:
        """Return the namespace's policies; None if the namespace or the tenant does not exist."""
        found = self._call("GET", f"/namespaces/{self._namespace}", accept=(404,))
        return None if found is _ACCEPTED else dict(found)

    def create_namespace(self, policies: dict[str, Any]) -> bool:
        """Create the namespace; False if it exists."""
        return self._call("PUT", f"/namespaces/{self._namespace}", policies, accept=(409,)) is not _ACCEPTED

    def namespace_call(self, method: str, what: str, body: Any = None) -> None:
        """Set one policy of the namespace."""
        self._call(method, f"/namespaces/{self._namespace}/{what}", body)

    def close(self) -> None:
        """Close the connections. Idempotent."""
        with self._lock:
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

    # --- the wire -----------------------------------------------------------------------------------------------------

    def _topic(self, topic: str) -> str:
        return f"/persistent/{self._namespace}/{quote(topic, safe='')}"

    def _call(
        self, method: str, path: str, body: Any = None, *, accept: tuple[int, ...] = (), settles: bool = False
    ) -> Any:
        """Return the answer's JSON, or `_ACCEPTED` for a status in `accept` (with `settles`, only on the
        first attempt).

        Raises LogUnavailable, LogRefused, InvalidSettings.
        """
        deadline = Deadline.after(self._settings.operation_timeout)
        data = b"" if body is None and method != "GET" else None if body is None else json.dumps(body).encode()
        uncertain = False
        while True:
            try:
                status, answer = self._send(method, path, data, deadline)
            except (OSError, http.client.HTTPException) as error:
                uncertain = uncertain or not isinstance(error, ConnectionRefusedError)
                failure = f"{method} {path} got no answer from {self._settings.admin_url}: {error!r}"
            else:
                if status in _OK:
                    return json.loads(answer) if answer else None
                if status in accept:
                    return None if settles and uncertain else _ACCEPTED
                reason = _reason(answer)
                if status in (401, 403):
                    raise InvalidSettings(f"Pulsar refuses {method} {path} ({status}): {reason}; check the credentials")
                failure = f"{method} {path} failed at {self._settings.admin_url} ({status}): {reason}"
                busy = status in (408, 429) or (status == 412 and "Busy" in reason)
                if status < 500 and not busy:
                    raise LogRefused(failure, status=status)
                uncertain = True
            if not deadline.pause(jittered(_PAUSE)):
                raise LogUnavailable(failure)

    def _send(self, method: str, path: str, data: bytes | None, deadline: Deadline) -> tuple[int, bytes]:
        """Send one request, following redirects to the broker that owns the topic."""
        home = self._settings.admin_url
        target = f"{home}/admin/v2{path}"
        for _ in range(_REDIRECTS):
            parts = urlsplit(target)
            connection = None
            if target.startswith(f"{home}/"):
                with self._lock:
                    connection = self._idle.pop() if self._idle else None
            left = deadline.remaining(minimum=0.1)
            connection = connection or self._connect(parts.scheme, parts.netloc)
            connection.timeout = left
            if connection.sock is not None:
                connection.sock.settimeout(left)
            place = parts.path + (f"?{parts.query}" if parts.query else "")
            try:
                connection.request(method, place, body=data, headers=self._header)
                response = connection.getresponse()
                answer = response.read()
            except (OSError, http.client.HTTPException):
                connection.close()
                raise
            moved = response.status in (302, 307) and response.getheader("Location")
            if response.will_close or not target.startswith(f"{home}/"):
                connection.close()
            else:
                with self._lock:
                    self._idle.append(connection)
            if not moved:
                return response.status, answer
            target = str(moved)
        raise http.client.HTTPException(f"more than {_REDIRECTS} redirects")

    def _connect(self, scheme: str, netloc: str) -> http.client.HTTPConnection:
        if scheme == "https":
            return http.client.HTTPSConnection(netloc, context=self._context or _tls(self._settings))
        return http.client.HTTPConnection(netloc)


def _tls(settings: PulsarSettings) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cafile=settings.tls_trust_certs_file or None)
        if settings.tls_certificate_file:
            context.load_cert_chain(settings.tls_certificate_file, settings.tls_private_key_file or None)
    except OSError as error:
        raise InvalidSettings(f"the TLS files of the Pulsar log cannot be loaded: {error}") from error
    context.check_hostname = settings.tls_validate_hostname
    return context


def _reason(answer: bytes) -> str:
    try:
        found = json.loads(answer)
        text = str(found.get("reason", found)) if isinstance(found, dict) else str(found)
    except ValueError:
        text = answer.decode(errors="replace")
    return text.strip()[:300]
