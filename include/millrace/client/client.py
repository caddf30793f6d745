"""The client of a deployment: collections, producers, all from one data folder.

with Client.connect() as client:
    client.create_collection("users", schema, partitions=["eu", "us"])
    client.producer().insert(client.collection("users"), batch, partition="eu")
"""

from __future__ import annotations

from dataclasses import replace
from types import TracebackType
from typing import Self

from millrace.client.append_client import AppendClient
from millrace.client.producer import Producer
from millrace.coord.coordinator import Coordinator
from millrace.coord.store import Collection
from millrace.log.protocol import LogService
from millrace.node.append_host_server import LAUNCH
from millrace.settings import Settings


class _OneByOne:
    """The append host as the coordinator sees it."""

    def __init__(self, append: AppendClient, deadline: float) -> None:
        self._append = append
        self._deadline = deadline

    def append_one(self, pchannel: str, entry: bytes) -> int:
        return self._append.append(pchannel, [entry], deadline=self._deadline).result().time_tick


class Client:
    """A connection to the log's server and its append host, which it starts where none runs."""

    def __init__(self, settings: Settings, append: AppendClient) -> None:
        self.settings = settings
        self.append = append
        self.log: LogService = append.service
        self.coordinator = Coordinator(settings, log=self.log, append=_OneByOne(append, settings.append_deadline))
        self._producers: list[Producer] = []

    @classmethod
    def connect(cls, settings: Settings | None = None, *, start: bool = True) -> Self:
        """Connect to the deployment in ``settings.data_dir``; `start` lets it start the log's server.

        Raises LogUnavailable where it cannot be reached (or must not be started).
        """
        settings = settings or Settings.load()
        launch = replace(
            LAUNCH,
            host=settings.log_host,
            port=settings.log_port,
            settings=(
                ("segment_bytes", str(settings.log_file_bytes)),
                ("max_entry_bytes", str(settings.max_entry_bytes)),
            ),
        )
        return cls(
            settings,
            AppendClient.connect(settings.data_dir, start=start, deadline=settings.start_deadline, launch=launch),
        )

    def close(self) -> None:
        for producer in self._producers:
            producer.close()
        self.coordinator.close()
        self.append.close()
        self.log.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def collection(self, name: str) -> Collection:
        """The definition of a collection. Raises CollectionNotFound."""
        return self.coordinator.collection(name)

    def producer(self, *, producer_id: int | None = None) -> Producer:
        """A new idempotent producer, closed with the client."""
        producer = Producer(self.append, self.coordinator, self.settings, producer_id=producer_id)
        self._producers.append(producer)
        return producer
