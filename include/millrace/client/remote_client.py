"""The client for another host: appends and DDL through the log's server, with no data folder of its own.

    with RemoteClient.connect("grpc+tls://log.example.net:7700", roots="ca.pem") as client:
        client.producer().insert(client.collection("users"), batch, partition="eu")

Results and errors are those of :class:`millrace.client.client.Client`. Tables are read where they lie, with Spark or any reader
of Delta: this client writes. The token comes from MILLRACE_SERVER_TOKEN in the environment of both sides.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from millrace.client.append_client import AppendClient
from millrace.client.producer import Producer
from millrace.client.spool import DEFAULT_BYTES
from millrace.client.spooling import OnRejected, SpoolSender
from millrace.closing import Closing
from millrace.coord.store import Collection
from millrace.errors import InvalidSettings
from millrace.log.remote import DEFAULT_DEADLINE, RemoteLogService
from millrace.log.server_wire import TOKEN_VARIABLE
from millrace.message.schema import CollectionSchema, FieldSpec
from millrace.metrics import Metrics
from millrace.node.catalog_calls import collection_from_json
from millrace.settings import Settings


class RemoteCatalog:
    """The coordinator of the server's deployment, with the methods of millrace.coord.coordinator.Coordinator that it serves."""

    def __init__(self, append: AppendClient) -> None:
        self._append = append

    def term(self, pchannel: str) -> int:
        """The newest term of a PChannel."""
        return int(self._call("term", pchannel=pchannel)["term"])

    def next_epoch(self, producer_id: int, *, held: int | None = None) -> int:
        """A new epoch for a producer: it fences every earlier one of that id. Raises ProducerFenced."""
        return int(self._call("next_epoch", producer_id=producer_id, held=held)["epoch"])

    def collection(self, name: str) -> Collection:
        """Raises CollectionNotFound."""
        return collection_from_json(self._call("collection", name=name))

    def collections(self) -> list[Collection]:
        return [collection_from_json(each) for each in self._call("collections")["collections"]]

    def create_collection(
        self,
        name: str,
        schema: CollectionSchema,
        *,
        vchannels: int = 1,
        partitions: Sequence[str] = ("_default",),
        exist_ok: bool = False,
    ) -> Collection:
        """Raises CollectionExists; with `exist_ok` only where the one that is there never had this schema."""
        made = self._call(
            "create_collection",
            name=name,
            schema=schema.to_json(),
            vchannels=vchannels,
            partitions=list(partitions),
            exist_ok=exist_ok,
        )
        return collection_from_json(made)

    def drop_collection(self, name: str) -> None:
        self._call("drop_collection", name=name)

    def create_partition(self, name: str, partition: str) -> int:
        """Add a partition; its id. Raises AppendRejected (PARTITION_EXISTS)."""
        return int(self._call("create_partition", name=name, partition=partition)["id"])

    def drop_partition(self, name: str, partition: str) -> None:
        self._call("drop_partition", name=name, partition=partition)

    def add_field(self, name: str, field: FieldSpec) -> int:
        """Add a nullable field; the new schema version."""
        return int(self._call("add_field", name=name, field=field.to_json())["version"])

    def flush(self, name: str) -> dict[str, int]:
        """Seal and flush what grows in the collection; by VChannel the tick of its ManualFlush."""
        return {str(channel): int(tick) for channel, tick in self._call("flush", name=name)["ticks"].items()}

    def _call(self, name: str, /, **arguments: Any) -> Mapping[str, Any]:
        return self._append.catalog(name, arguments)


class RemoteClient(Closing):
    """A connection to the server of a deployment on any host. Thread-safe."""

    def __init__(self, append: AppendClient, settings: Settings) -> None:
        self.append = append
        self.settings = settings
        self.coordinator = RemoteCatalog(append)
        self._producers: list[Producer] = []

    @classmethod
    def connect(
        cls,
        address: str,
        *,
        roots: str | Path = "",
        tls_name: str = "",
        settings: Settings | None = None,
        env: Mapping[str, str] | None = None,
        deadline: float = DEFAULT_DEADLINE,
    ) -> Self:
        """Connect to ``grpc://host:port`` or ``grpc+tls://host:port``; `roots` is a PEM file of trusted certificates.

        `settings` gives attempts and deadlines of appends. Raises InvalidSettings without a token in the environment, and
        LogUnavailable where the server cannot be reached or refuses the token.
        """
        token = (os.environ if env is None else env).get(TOKEN_VARIABLE, "")
        if not token:
            raise InvalidSettings(f"{TOKEN_VARIABLE} is not set: give it the token that the server has under that name")
        service = RemoteLogService.at(address, token=token, roots=roots, tls_name=tls_name, deadline=deadline)
        return cls(AppendClient(service), settings or Settings.load(env=env))

    def collection(self, name: str) -> Collection:
        """The definition of a collection. Raises CollectionNotFound."""
        return self.coordinator.collection(name)

    def producer(
        self,
        *,
        producer_id: int | None = None,
        spool: Path | None = None,
        spool_bytes: int = DEFAULT_BYTES,
        on_rejected: OnRejected | None = None,
        metrics: Metrics | None = None,
    ) -> Producer:
        """A new idempotent producer, closed with the client; the spool is that of :meth:`millrace.client.client.Client.producer`.

        The folder is on this host. A producer that has not sent anything yet needs the server once: it gives the epoch.
        """
        sender = SpoolSender.wanted(
            spool, self.settings, max_bytes=spool_bytes, on_rejected=on_rejected, metrics=metrics
        )
        producer = Producer(
            self.append, self.coordinator, self.settings, producer_id=producer_id, spool=sender, metrics=metrics
        )
        self._producers.append(producer)
        return producer

    def close(self) -> None:
        """Close producers and connection; the server goes on. Idempotent."""
        for producer in self._producers:
            producer.close()
        self.append.close()
