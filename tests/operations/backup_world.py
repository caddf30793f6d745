"""A deployment in this process, log, append host, coordinator, node and flusher step by
step, and a model of what it holds.

Producers are idempotent, each insert has a sequence of its own, so that a restored deployment can be asked whether it
knows what it had acknowledged.
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa

from millrace.base.errors import AppendRejected
from millrace.base.settings import Settings
from millrace.catalog.collection import CollectionInfo
from millrace.coord.catalog.shared import SharedCatalog
from millrace.coord.coordinator import Coordinator
from millrace.coord.switch_log import LogSwitch
from millrace.log.generations.service import open_deployment_log
from millrace.message import builders
from millrace.message.ids import pchannel_of
from millrace.message.keys import vchannel_index
from millrace.message.model import MutableMessage
from millrace.message.schema import CollectionSchema, FieldSpec
from millrace.message.schema_changes import AddField
from millrace.message.wire.encode import encode_entry
from millrace.node.append.host import AppendHost
from millrace.node.append.server import committed_state_loader
from millrace.node.flush.definition import flush_to_end
from millrace.node.ingest.definition import ingest_to_end
from millrace.operations.checkpoint.declaration import CheckpointParams
from millrace.operations.checkpoint.run import checkpoint
from millrace.operations.compaction.declaration import CompactionParams
from millrace.operations.compaction.run import compact
from millrace.rpc.outcome import AppendResult
from millrace.runtime.progress import Progress
from millrace.tables.collections.staged_files import sync_staged_files
from millrace.tables.read.arrow import read_arrow
from millrace.wal.definitions import PChannelDefinitions
from tests.tables.staged_files import stage

SCHEMA = CollectionSchema((FieldSpec("id", "int64", False), FieldSpec("body", "string", True)), "id")
LOG = {"segment_bytes": 16 << 10, "spare_files": 2, "max_entry_bytes": 1 << 20}
LEASE_MS = 600_000
COMPACTION = CompactionParams(min_files=2, fold="always", keep_history_hours=0, vacuum_hours=24)

STEPS = [
    "insert",
    "delete",
    "begin",
    "body",
    "commit",
    "field",
    "partition",
    "collection",
    "node",
    "flush",
    "checkpoint",
]


@dataclass
class Model:
    """What a deployment was told, and had acknowledged."""

    rows: dict[str, dict[int, str]] = field(default_factory=dict)
    """By collection and key."""
    open: dict[tuple[str, str], tuple[int, dict[int, str]]] = field(default_factory=dict)
    """By collection and VChannel: an open transaction and its rows."""
    keys: int = 0
    txns: int = 0
    sequences: dict[str, int] = field(default_factory=dict)
    """By VChannel: the producer's last sequence."""
    names: int = 0


class World:
    """One data folder. Close it; another one may then open the same folder, with the model."""

    def __init__(self, settings: Settings, model: Model | None = None, *, shared: SharedCatalog | None = None) -> None:
        self.settings = settings
        self.log = open_deployment_log(settings.log_path, settings.log, settings=LOG)
        self.host = AppendHost(self.log, committed_state_loader(settings.wal_uri, self.log))
        self.coordinator = Coordinator(settings, log=self.log, append=self, shared=shared)
        self.model = model or Model()
        self.epoch = 1
        if model is None:
            self.coordinator.ensure_pchannels(2)
            self.epoch = self.coordinator.next_epoch(1)
            self.step("collection", 0)

    @classmethod
    def of(cls, settings: Settings, model: Model, *, epoch: int) -> World:
        """The deployment in a restored folder, with what it must hold."""
        made = cls(settings, deepcopy(model))
        made.epoch = epoch
        return made

    def close(self) -> None:
        self.host.close()
        self.coordinator.close()
        self.log.close()

    def switch(self, to: str) -> None:
        """Let the log go on in another backend."""
        LogSwitch(self.settings.log_path, "", self.log, self, self.coordinator).run(to)

    def append_one(self, pchannel: str, entry: bytes, *, principal: str = "") -> int:
        return self.host.append(pchannel, [entry], deadline=20.0, principal=principal).result().time_tick

    def definitions(self, pchannel: str, collection_id: int | None) -> PChannelDefinitions:
        return self.host.definitions(pchannel, collection_id, deadline=20.0)

    def describe(self, pchannel: str) -> dict[str, Any]:
        return self.host.describe(pchannel)

    def append(self, vchannel: str, message: MutableMessage) -> AppendResult:
        return self.host.append(pchannel_of(vchannel), [encode_entry([message])], deadline=20.0).result()

    def insert(
        self, collection: CollectionInfo, key: int, *, txn: int = 0, sequence: int | None = None
    ) -> AppendResult:
        """One row, sent by the producer with its next sequence, or once more with one that it had."""
        vchannel = home(collection, key)
        following = self.model.sequences.get(vchannel, -1) + 1 if sequence is None else sequence
        values: list[pa.Array] = [pa.array([key], pa.int64()), pa.array([f"row {key} " + "x" * 200])]
        values += [pa.nulls(1, each.type) for each in list(collection.schema.arrow())[2:]]
        found = self.append(
            vchannel,
            builders.insert(
                pa.record_batch(values, schema=collection.schema.arrow()),
                vchannel=vchannel,
                collection_id=collection.id,
                partition_id=collection.partitions["_default"],
                term=self.coordinator.term(pchannel_of(vchannel)),
                schema_version=collection.schema_version,
                txn_id=txn,
                producer_id=1,
                epoch=self.epoch,
                sequence=following,
            ),
        )
        self.model.sequences[vchannel] = max(following, self.model.sequences.get(vchannel, -1))
        return found

    def step(self, kind: str, number: int) -> None:
        """One step; `number` chooses among what there is. One that has nothing to act on does nothing."""
        model, names = self.model, sorted(self.model.rows)
        if kind == "collection":
            if len(names) < 3:
                model.names += 1
                name = f"c{model.names}"
                self.coordinator.create_collection(name, SCHEMA, vchannels=2)
                model.rows[name] = {}
            return
        if kind in ("node", "flush", "checkpoint", "compact"):
            ingest_to_end(self.settings, self.log)
            if kind != "node":
                flush_to_end(self.settings)
            if kind == "checkpoint":
                assert checkpoint(self.settings, self.log, CheckpointParams(), Progress()).ok
            if kind == "compact":
                compact(self.settings, COMPACTION, history=(1 << 62))
            return
        collection = self.coordinator.collection(names[number % len(names)])
        self._change(kind, number, collection)

    def _change(self, kind: str, number: int, collection: CollectionInfo) -> None:
        model, rows = self.model, self.model.rows[collection.name]
        vchannel = collection.vchannels[number % 2]
        place = (collection.name, vchannel)
        stamps = {
            "vchannel": vchannel,
            "collection_id": collection.id,
            "term": self.coordinator.term(pchannel_of(vchannel)),
        }
        match kind:
            case "insert":
                key = self._key(collection, None)
                self.insert(collection, key)
                rows[key] = text(key)
            case "delete" if rows:
                key = sorted(rows)[number % len(rows)]
                stamps["vchannel"] = home(collection, key)
                stamps["term"] = self.coordinator.term(pchannel_of(str(stamps["vchannel"])))
                version = collection.schema_version
                self.append(
                    str(stamps["vchannel"]),
                    builders.delete([key], schema=collection.schema, schema_version=version, **stamps),  # type: ignore[arg-type]
                )
                del rows[key]
            case "begin" if place not in model.open:
                model.txns += 1
                self.append(vchannel, builders.begin_txn(model.txns, keepalive_ms=LEASE_MS, **stamps))  # type: ignore[arg-type]
                model.open[place] = (model.txns, {})
            case "body" if place in model.open:
                key = self._key(collection, vchannel)
                self.insert(collection, key, txn=model.open[place][0])
                model.open[place][1][key] = text(key)
            case "commit" if place in model.open:
                self.append(vchannel, builders.commit_txn(model.open[place][0], **stamps))  # type: ignore[arg-type]
                rows.update(model.open.pop(place)[1])
            case "import" | "replace":
                self._import(collection, vchannel, replace=kind == "replace")
            case "field" | "partition":
                self._ddl(kind, collection)

    def _import(self, collection: CollectionInfo, vchannel: str, *, replace: bool) -> None:
        """Two rows by a staged file; as DDL does, it ends what is open on the VChannel."""
        rows = self.model.rows[collection.name]
        keys = [self._key(collection, vchannel) for _ in range(2)]
        values = [pa.array(keys, pa.int64()), pa.array([text(key) for key in keys])]
        values += [pa.nulls(2, each.type) for each in list(collection.schema.arrow())[2:]]
        batch = pa.record_batch(values, schema=collection.schema.arrow())
        file = stage(self.settings.staged_uri, f"load-{keys[0]}/0.parquet", batch)
        sync_staged_files(self.settings.staged_uri, [file])
        message = builders.import_files(
            f"load-{keys[0]}",
            [file],
            vchannel=vchannel,
            collection_id=collection.id,
            term=self.coordinator.term(pchannel_of(vchannel)),
            replace=replace,
            schema_version=collection.schema_version,
        )
        self.append(vchannel, message)
        self.model.open.pop((collection.name, vchannel), None)
        if replace:
            self.model.rows[collection.name] = rows = {k: v for k, v in rows.items() if home(collection, k) != vchannel}
        rows.update({key: text(key) for key in keys})

    def _ddl(self, kind: str, collection: CollectionInfo) -> None:
        """DDL ends what is open on the collection's VChannels."""
        if kind == "field" and len(collection.schema.fields) < 4:
            self.coordinator.alter(
                collection.name, [AddField(FieldSpec(f"f{len(collection.schema.fields)}", "int64", True))]
            )
        elif kind == "partition" and len(collection.partitions) < 3:
            self.coordinator.create_partition(collection.name, f"p{len(collection.partitions)}")
        else:
            return
        for vchannel in collection.vchannels:
            self.model.open.pop((collection.name, vchannel), None)

    def _key(self, collection: CollectionInfo, vchannel: str | None) -> int:
        while True:
            self.model.keys += 1
            if vchannel is None or home(collection, self.model.keys) == vchannel:
                return self.model.keys

    def settle(self) -> None:
        """End open transactions, move every PChannel's tick behind all, bring it in and flush it."""
        for name, vchannel in list(self.model.open):
            collection = self.coordinator.collection(name)
            self._change("commit", collection.vchannels.index(vchannel), collection)
        for name in self.log.names():
            self.host.tick(name)
            self.append_all(name)
        self.step("flush", 0)

    def append_all(self, pchannel: str) -> None:
        term = self.coordinator.term(pchannel)
        self.host.append(pchannel, [encode_entry([builders.flush_all(term=term)])], deadline=20.0)

    def content(self, *, at: int | None = None) -> dict[str, dict[int, str]]:
        """What reads find, by collection and key."""
        return {
            each.name: {
                row["id"]: row["body"].split(" x")[0]
                for row in read_arrow(self.settings, each.id, at=at, deadline=10.0).to_pylist()
            }
            for each in self.coordinator.collections()
        }


def text(key: int) -> str:
    return f"row {key}"


def home(collection: CollectionInfo, key: int) -> str:
    """The VChannel of a key."""
    return collection.vchannels[int(vchannel_index(pa.array([key]), len(collection.vchannels))[0])]


def knows(world: World, collection: CollectionInfo, key: int, sequence: int) -> bool:
    """Whether the deployment answers a repeated insert as one that it has."""
    try:
        return world.insert(collection, key, sequence=sequence).duplicate
    except AppendRejected:
        return False


def settings_in(folder: Path) -> Settings:
    return Settings(data_dir=folder, cache_dir=folder.parent / "cache")
