"""Pulsar as the log: one topic per PChannel in the deployment's namespace, with the promises of log/protocol.py.

    open_service("pulsar://127.0.0.1:6650/millrace/wal/demo?admin=http://127.0.0.1:8080")

- An entry is a Pulsar message. Its id is (ledger, entry << 20 | index in the batch); its stamp is Pulsar's publish
  time, the writer's clock.
- The first appender holds the topic exclusively; a newer writer fences an older one (LogFenced). Readers fence
  nobody.
- The namespace's policies (set at creation, checked at every opening) keep brokers from deleting, evicting or
  expiring untruncated entries and from creating topics by accident, and make them drop duplicates.
- The log's beginning and the positions of consumer groups are durable properties of its topic; a group retains
  nothing.
- After an ambiguous failure, a prefix of the batch's values may be in the log, in order.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any, Final
from urllib.parse import quote, unquote

import pulsar
import pyarrow as pa

from millrace.base.closeable import Closeable
from millrace.base.errors import ChannelExists, ChannelNotFound, InvalidArgument, LogFenced, LogUnavailable
from millrace.log.group_leases import LeasesInProcess
from millrace.log.protocol import LogHandle
from millrace.log.pulsar import policies as pulsar_policies
from millrace.log.pulsar.admin import PulsarAdmin
from millrace.log.pulsar.channel import SUBSCRIPTION, PulsarChannel
from millrace.log.pulsar.settings import PulsarCredentials, PulsarSettings, groups_topic, pchannel_of_topic, topic_of
from millrace.message.ids import LogId

_GROUP: Final = "group."
_CONNECT_SECONDS: Final = 10


class PulsarLog(LogHandle[PulsarChannel]):
    """A handle on one PChannel (the Log protocol). Closing it leaves other handles of the PChannel open."""

    def __init__(self, core: PulsarChannel) -> None:
        super().__init__(core)
        self._fenced: LogFenced | None = None

    def append(self, values: Sequence[bytes] | pa.LargeBinaryArray) -> Sequence[LogId]:
        """See :meth:`millrace.log.protocol.Log.append`.

        Also raises LogFenced: a newer writer took over the log.
        """
        core = self._open()
        if self._fenced is not None:
            raise self._fenced
        plain = core.validated(values)
        if not plain:
            return []
        try:
            return core.append(plain)
        except LogFenced as error:
            self._fenced = error
            raise


class PulsarService(LeasesInProcess, Closeable):
    """The logs of one deployment on Pulsar (the LogService protocol). Thread-safe."""

    def __init__(self, settings: PulsarSettings, *, credentials: PulsarCredentials | None = None) -> None:
        """Check or create the namespace.

        Raises InvalidSettings (refused, or unsafe policies), LogUnavailable.
        """
        self._settings = settings
        self._credentials = credentials or PulsarCredentials()
        self._admin = PulsarAdmin(settings, self._credentials)
        self._lock = threading.RLock()
        self._client: Any = None
        self._channels: dict[str, PulsarChannel] = {}
        self._known_groups: set[str] = set()
        self._registering = threading.Lock()
        self._closed = False
        try:
            pulsar_policies.ensure_namespace(self._admin, settings)
        except BaseException:
            self._admin.close()
            raise

    # --- logs ---------------------------------------------------------------------------------------------------------

    def create(self, pchannel: str) -> None:
        """Create an empty log.

        Raises ChannelExists.
        """
        self._check_open()
        topic = topic_of(self._settings.prefix, pchannel)
        if not self._admin.create_topic(topic):
            raise ChannelExists(f"channel {pchannel!r} exists already")
        self._admin.ensure_subscription(topic, SUBSCRIPTION)

    def open(self, pchannel: str) -> PulsarLog:
        """Return a handle on an existing log; let a log that was fenced write again.

        Raises ChannelNotFound.
        """
        self._check_open()
        topic = topic_of(self._settings.prefix, pchannel)
        # Also completes a `create` that crashed half-way.
        if self._admin.properties(topic) is None or not self._admin.ensure_subscription(topic, SUBSCRIPTION):
            self._forget(pchannel, f"the channel {pchannel!r} is gone")
            raise self._not_found(pchannel)
        with self._lock:
            self._check_open()
            core = self._channels.get(pchannel)
            if core is None:
                core = PulsarChannel(self._connected, self._admin, self._settings, pchannel, topic)
                self._channels[pchannel] = core
        core.refresh_writer()
        return PulsarLog(core)

    def names(self) -> list[str]:
        """Return the deployment's PChannels, sorted."""
        self._check_open()
        found = (pchannel_of_topic(self._settings.prefix, topic) for topic in self._admin.topics())
        return sorted(name for name in found if name is not None)

    def drop(self, pchannel: str) -> None:
        """Drop a log with all its entries and its groups' positions.

        Raises ChannelNotFound.
        """
        self._check_open()
        self._forget(pchannel, f"the channel {pchannel!r} was dropped")
        if not self._admin.delete_topic(topic_of(self._settings.prefix, pchannel)):
            raise self._not_found(pchannel)

    # --- consumer groups ----------------------------------------------------------------------------------------------

    def groups(self) -> list[str]:
        """Return the deployment's consumer groups, sorted."""
        self._check_open()
        found = self._admin.properties(groups_topic(self._settings.prefix)) or {}
        return sorted(unquote(key.removeprefix(_GROUP)) for key in found if key.startswith(_GROUP))

    def group_position(self, group: str, pchannel: str) -> LogId | None:
        """Return a group's position in a log; None if it never moved there.

        Raises ChannelNotFound.
        """
        self._check_open()
        found = self._admin.properties(topic_of(self._settings.prefix, pchannel))
        if found is None:
            raise self._not_found(pchannel)
        text = found.get(_GROUP + quote(group, safe=""))
        return None if text is None else LogId.parse(text)

    def move_group(self, group: str, pchannel: str, position: LogId) -> None:
        """Move a group in a log, durably.

        Raises ChannelNotFound, InvalidArgument.
        """
        self._check_open()
        if not all(0 <= part < 1 << 63 for part in position):
            raise InvalidArgument(f"{position} is not a position of a log")
        topic, key = topic_of(self._settings.prefix, pchannel), _GROUP + quote(group, safe="")
        if group not in self._known_groups:
            if self._admin.properties(topic) is None:
                raise self._not_found(pchannel)  # before the group is registered
            registry = groups_topic(self._settings.prefix)
            with self._registering:
                if not self._admin.set_properties(registry, {key: ""}):
                    self._admin.create_topic(registry)
                    self._admin.set_properties(registry, {key: ""})
                self._known_groups.add(group)
        if not self._admin.set_properties(topic, {key: str(position)}):
            raise self._not_found(pchannel)

    def drop_group(self, group: str) -> None:
        """Remove a group and its positions in every log. No effect if it does not exist."""
        self._known_groups.discard(group)
        key = _GROUP + quote(group, safe="")
        topics = [topic_of(self._settings.prefix, pchannel) for pchannel in self.names()]
        for topic in [*topics, groups_topic(self._settings.prefix)]:
            self._admin.remove_property(topic, key)

    # --- the service --------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Close the service and its handles. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            channels, self._channels = list(self._channels.values()), {}
        for channel in channels:
            channel.close("this log service is closed: open it again")
        if self._client is not None:
            self._client.shutdown()
        self._admin.close()

    def _connected(self) -> Any:
        """Return the client, created on first use: administration does not need it."""
        with self._lock:
            self._check_open()
            if self._client is None:
                self._client = _client(self._settings, self._credentials)
            return self._client

    def _forget(self, pchannel: str, why: str) -> None:
        with self._lock:
            core = self._channels.pop(pchannel, None)
        if core is not None:
            core.close(why)

    def _check_open(self) -> None:
        if self._closed:
            raise LogUnavailable("this log service is closed: open it again")

    def _not_found(self, pchannel: str) -> ChannelNotFound:
        return ChannelNotFound(
            f"channel {pchannel!r} does not exist in {self._settings.tenant}/{self._settings.namespace} "
            f"(prefix {self._settings.prefix!r}): create it first"
        )


def _client(settings: PulsarSettings, credentials: PulsarCredentials) -> Any:
    authentication = None
    if credentials.token:
        authentication = pulsar.AuthenticationToken(credentials.token)
    elif credentials.username:
        authentication = pulsar.AuthenticationBasic(credentials.username, credentials.password)
    return pulsar.Client(
        settings.service_url,
        authentication=authentication,
        operation_timeout_seconds=int(settings.operation_timeout),
        connection_timeout_ms=_CONNECT_SECONDS * 1000,
        tls_trust_certs_file_path=settings.tls_trust_certs_file or None,
        tls_validate_hostname=settings.tls_validate_hostname,
        tls_certificate_file_path=settings.tls_certificate_file or None,
        tls_private_key_file_path=settings.tls_private_key_file or None,
        listener_name=settings.listener_name or None,
        # A Python logger would be called from the client's threads during interpreter shutdown.
        logger=pulsar.ConsoleLogger(pulsar.LoggerLevel.Error),
    )


def open_location(location: str, settings: Mapping[str, object]) -> PulsarService:
    """Open a log for the registry: ``host:port/tenant/namespace[/prefix]``. Credentials come from the
    environment only.
    """
    return PulsarService(PulsarSettings.of(location, settings), credentials=PulsarCredentials.of_environment())
