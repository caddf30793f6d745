"""Factories of streams. They differ in the backend that they open; streams are the same on every log.

    with RmqMsgStreamFactory("<folder>") as factory, factory.new_tt_msg_stream() as stream: ...

A factory takes a URL of its backend, the location of such a URL, or a LogService that the caller owns. The streaming
node treats every PChannel of a log as a WAL, so message streams need a log of their own: another folder, prefix or
namespace. The registry of channels is in that log, or in the meta store that MILLRACE_META_STORE names.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import ClassVar, Self

from millrace.base.closeable import Closeable
from millrace.base.errors import InvalidSettings
from millrace.base.settings import Settings
from millrace.coord.clock import SystemClock
from millrace.log.protocol import LogService
from millrace.log.registry import open_service
from millrace.meta.factory import ClosableMetaStore, open_meta_store
from millrace.msgstream.channels import MsgChannels
from millrace.msgstream.memory import MAX_MESSAGES, MemoryLogService, MessageTable
from millrace.msgstream.meta_registry import MetaStoreRegistry
from millrace.msgstream.protocol import UnmarshalDispatcherFactory
from millrace.msgstream.settings import StreamSettings
from millrace.msgstream.stream import LogMsgStream
from millrace.msgstream.tick_stream import LogTtMsgStream
from millrace.msgstream.unmarshal import MemUDFactory
from millrace.rpc.remote_log import RemoteLogService


class LogMsgStreamFactory(Closeable):
    """Streams on a log service (the MsgStreamFactory protocol). Closing the factory closes a service that it opened."""

    SCHEME: ClassVar[str] = ""
    """Scheme of the backend; "": any."""

    def __init__(
        self,
        source: str | LogService,
        *,
        settings: Mapping[str, object] | None = None,
        unmarshal: UnmarshalDispatcherFactory | None = None,
        meta_store: str | None = None,
    ) -> None:
        """`source`: a URL, a location, or a service. `settings`: the backend's, for a URL or location.
        `meta_store`: URL of the store with the channel registry, "" for the log itself (default:
        MILLRACE_META_STORE).

        Raises InvalidSettings, and errors of opening the log.
        """
        self._owned = isinstance(source, str)
        self._service = self._open(source, settings or {}) if isinstance(source, str) else source
        self._unmarshal = unmarshal
        self._handover: MessageTable | None = None
        self._settings = StreamSettings()
        self._meta_store = meta_store
        self._store: ClosableMetaStore | None = None

    @property
    def service(self) -> LogService:
        """The log of the streams."""
        return self._service

    @property
    def channels(self) -> MsgChannels:
        """The channels of that log: create, describe, destroy. Raises InvalidSettings, MetaUnavailable."""
        if self._meta_store is None:
            self._meta_store = Settings.load().meta_store
        if not self._meta_store:
            return MsgChannels(self._service)
        if self._store is None:
            self._store = open_meta_store(self._meta_store, SystemClock().monotonic, env=os.environ)
        return MsgChannels(self._service, MetaStoreRegistry(self._service, self._store))

    def set_params(self, params: Mapping[str, object]) -> None:
        """See MsgStreamFactory.set_params."""
        self._settings = self._settings.with_(params)

    def new_msg_stream(self) -> LogMsgStream:
        """See MsgStreamFactory.new_msg_stream."""
        return LogMsgStream(
            self._service, settings=self._settings, unmarshal=self._unmarshal, message_table=self._handover
        )

    def new_tt_msg_stream(self) -> LogTtMsgStream:
        """See MsgStreamFactory.new_tt_msg_stream."""
        return LogTtMsgStream(
            self._service, settings=self._settings, unmarshal=self._unmarshal, message_table=self._handover
        )

    def close(self) -> None:
        """Close a service that this factory opened; close its streams first. Idempotent."""
        if self._store is not None:
            self._store.close()
            self._store = None
        if self._owned:
            self._service.close()

    def _open(self, source: str, settings: Mapping[str, object]) -> LogService:
        scheme, separator, _ = source.partition("://")
        if separator and self.SCHEME and scheme != self.SCHEME:
            raise InvalidSettings(f"{type(self).__name__} opens {self.SCHEME}://…, not {scheme}://…")
        if not separator and not self.SCHEME:
            raise InvalidSettings("a log's URL is scheme://location")
        return open_service(source if separator else f"{self.SCHEME}://{source}", settings)


class RmqMsgStreamFactory(LogMsgStreamFactory):
    """Streams on RocksMQ. One process holds a folder; :meth:`served` uses the folder's server, for any number of
    processes.
    """

    SCHEME = "rocksmq"

    @classmethod
    def served(cls, folder: str, *, unmarshal: UnmarshalDispatcherFactory | None = None) -> Self:
        """Open streams through the server of `folder`, and start it if none runs.

        Raises LogUnavailable.
        """
        factory = cls(RemoteLogService.connect(folder), unmarshal=unmarshal)
        factory._owned = True
        return factory


class KafkaMsgStreamFactory(LogMsgStreamFactory):
    """Streams on Kafka: ``host:port[,host:port...]/prefix``."""

    SCHEME = "kafka"


class PulsarMsgStreamFactory(LogMsgStreamFactory):
    """Streams on Pulsar: ``host:port/tenant/namespace[/prefix]``."""

    SCHEME = "pulsar"


class MemMsgStreamFactory(LogMsgStreamFactory):
    """Streams in this process, on channels in memory. Messages are passed as objects (MemUDFactory)."""

    def __init__(self, *, max_messages: int = MAX_MESSAGES) -> None:
        """`max_messages`: capacity of a channel."""
        memory = MemoryLogService(max_messages=max_messages)
        super().__init__(memory, unmarshal=MemUDFactory(), meta_store="")
        self._owned = True
        self._handover = memory.message_table
