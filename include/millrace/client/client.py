"""The client of a deployment: collections, producers, all from one data folder.

with Client.connect() as client:
    client.create_collection("users", schema, partitions=["eu", "us"])
    client.producer().insert(client.collection("users"), batch, partition="eu")
"""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime
from types import TracebackType
from typing import Self

import pyarrow as pa

from millrace.client.append_client import AppendClient
from millrace.client.freshness import confirm
from millrace.client.producer import Producer
from millrace.coord.coordinator import Coordinator
from millrace.coord.store import Collection
from millrace.errors import TickNotReached
from millrace.log.protocol import LogService
from millrace.node.append_host_server import LAUNCH
from millrace.settings import Settings
from millrace.tables.arrow_read import read_arrow
from millrace.tables.read_plan import resolve_tick


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

    def read(self, name: str, *, at: int | datetime | None = None, deadline: float | None = None) -> pa.Table:
        """The rows of a collection at the tick (or moment) `at`; without one everything that was decided before the call.

        Has a tick appended on each PChannel of the collection, so that one on which nothing happens does not hold the read
        back, and waits up to `deadline` seconds (default: ``read_deadline``) for the streaming node to have come that far.
        No JVM. Raises TickNotReached, TickTooOld, CollectionNotFound; :func:`millrace.tables.reader.read` is the same for Spark.
        """
        collection = self.collection(name)
        tick = None if at is None else resolve_tick(at)
        seconds = self.settings.read_deadline if deadline is None else deadline
        confirmed, whole = confirm(self.settings, collection, self.append, at=tick, seconds=seconds)
        if not whole:
            raise TickNotReached(
                f"the wal table does not hold all of {name!r} after {seconds:.1f} s: is the streaming node running"
                " (`millrace status`)? Or read at an older tick"
            )
        return read_arrow(self.settings, collection.id, at=tick, deadline=0.0, confirmed=confirmed)
