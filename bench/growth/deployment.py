"""A deployment of a given size, filled in seconds: real messages in the log and the chain, catalog by its own store.

A collection that is made here is the one that DDL would make: the same CreateCollection message with the coordinator's
producer id on each VChannel, and the same entry in the catalog. Only the broadcast between the two is left out, which
syncs several times for each collection.
"""

from __future__ import annotations

import shutil
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import numpy as np
import pyarrow as pa

from bench.deployment import SCHEMA
from millrace.base.settings import Settings
from millrace.catalog.collection import CollectionInfo
from millrace.catalog.sqlite_file import catalog_path
from millrace.client.database import Database, connect
from millrace.coord.catalog.store import CatalogStore
from millrace.message import builders
from millrace.message.ids import COORDINATOR_ID, pchannel_of
from millrace.message.model import MutableMessage
from millrace.message.types import MessageType
from millrace.message.wire.encode import encode_columns, encode_entry
from millrace.node.flush.definition import flush_to_end
from millrace.node.ingest.definition import ingest_to_end

LIMITS: Final = {"max_vchannels": 1 << 16, "max_producers": 1 << 16}
"""The chain's limits, raised so that a size beyond the defaults can be measured."""
WIDE: Final = "wide"
"""The collection with a VChannel on each PChannel."""

_MESSAGES: Final = 500
"""CreateCollection messages of a log entry."""
_EPOCH: Final = 1
"""The epoch of the coordinator's messages: that of the first broadcast, so that each later one is newer."""


@dataclass(frozen=True)
class Shape:
    """How much there is."""

    collections: int = 10
    """Collections of one VChannel each, besides the wide one."""
    pchannels: int = 16
    partitions: int = 1
    """Partitions of the first collection."""
    producers: int = 0
    """Producers that wrote a row each to the first collection."""


@dataclass
class Grown:
    """A deployment that has its size, with an open database."""

    settings: Settings
    db: Database
    shape: Shape
    wide: CollectionInfo
    narrow: list[CollectionInfo]
    terms: dict[str, int]
    """The open term of each PChannel."""
    fill_s: float = 0.0
    ids: Iterator[int] = field(default_factory=lambda: iter(range(1 << 40)))

    @property
    def vchannels(self) -> int:
        return len(self.wide.vchannels) + len(self.narrow)

    def append_row(self, number: int) -> tuple[str, int]:
        """Append a row to the narrow collection `number`, with any partition. Return its PChannel and tick."""
        pchannel, entry = self.row(number)
        return pchannel, self.db.connection.append(pchannel, [entry]).result().time_tick

    def row(self, number: int) -> tuple[str, bytes]:
        """Return a log entry with a new row of the narrow collection `number`, and its PChannel."""
        collection, key = self.narrow[number % len(self.narrow)], next(self.ids)
        pchannel = pchannel_of(collection.vchannels[0])
        batch = pa.record_batch([pa.array([key]), pa.array([b"x" * 100])], schema=SCHEMA.arrow())
        message = builders.insert(
            batch,
            vchannel=collection.vchannels[0],
            collection_id=collection.id,
            partition_id=1 + key % len(collection.partitions),
            term=self.terms[pchannel],
        )
        return pchannel, encode_entry([message])


@contextmanager
def grown(folder: Path, shape: Shape) -> Iterator[Grown]:
    """Make a deployment of this size below `folder`; its server ends, and the folder goes, with the block."""
    shutil.rmtree(folder, ignore_errors=True)
    settings = Settings(
        data_dir=folder,
        cache_dir=Settings.load().cache_dir,
        pchannels=shape.pchannels,
        log_file_bytes=1 << 20,  # a file of the usual 64 MiB is allocated for each PChannel
    )
    began = time.perf_counter()
    with connect(settings=settings) as db:
        try:
            db.catalog.ensure_pchannels(shape.pchannels)
            for pchannel in db.catalog.pchannels():
                db.catalog.open_term(pchannel.name, config=LIMITS)
            wide = db.catalog.create_collection(WIDE, SCHEMA, vchannels=shape.pchannels)
            terms = {each.name: each.term for each in db.catalog.pchannels()}
            narrow = _make_collections(settings, db, shape, terms, first=wide.id + 1)
            _write_producers(db, narrow[0], terms, shape.producers)
            ingest_to_end(settings, db.log)
            flush_to_end(settings)
            yield Grown(settings, db, shape, wide, narrow, terms, round(time.perf_counter() - began, 1))
        finally:
            db.connection.service.shutdown()
    shutil.rmtree(folder, ignore_errors=True)


def _make_collections(
    settings: Settings, db: Database, shape: Shape, terms: Mapping[str, int], *, first: int
) -> list[CollectionInfo]:
    """Make the narrow collections, PChannel by PChannel in turn."""
    channels = list(terms)
    made = []
    by_pchannel: dict[str, list[MutableMessage]] = defaultdict(list)
    for place in range(shape.collections):
        number, pchannel = first + place, channels[place % len(channels)]
        count = shape.partitions if place == 0 else 1
        partitions = {f"partition_{each}": each for each in range(1, count + 1)}
        vchannel = f"{pchannel}_{number}v0"
        new = CollectionInfo(number, f"narrow_{place}", "active", (vchannel,), (SCHEMA,), partitions, count + 1)
        by_pchannel[pchannel].append(
            builders.create_collection(
                new.name,
                SCHEMA,
                vchannel=vchannel,
                vchannels=new.vchannels,
                collection_id=number,
                partitions=partitions,
                term=terms[pchannel],
                producer_id=COORDINATOR_ID,
                epoch=_EPOCH,
                sequence=0,
            )
        )
        made.append(new)
    for pchannel, messages in by_pchannel.items():
        for start in range(0, len(messages), _MESSAGES):
            outcome = db.connection.append(
                pchannel, [encode_entry(messages[start : start + _MESSAGES])], deadline=settings.start_deadline
            )
            assert not outcome.rejected, f"{outcome.rejected} collections were rejected on {pchannel}"
    with CatalogStore(catalog_path(settings.data_dir)) as store, store.transaction():
        assert all(map(store.add, made))
    return made


def _write_producers(db: Database, collection: CollectionInfo, terms: Mapping[str, int], count: int) -> None:
    """Append a row of each of `count` producers."""
    batch = pa.record_batch([pa.array([1]), pa.array([b"x" * 100])], schema=SCHEMA.arrow())
    vchannel = collection.vchannels[0]
    term = terms[pchannel_of(vchannel)]
    payload = builders.insert(batch, vchannel=vchannel, collection_id=collection.id, partition_id=1, term=term).payload
    for start in range(0, count, 1000):
        size = min(1000, count - start)
        entry = encode_columns(
            type=MessageType.INSERT,
            vchannel=vchannel,
            payloads=[payload] * size,
            term=term,
            collection_id=collection.id,
            partition_id=1,
            schema_version=1,
            rows=1,
            producer_id=np.arange(start + 1, start + size + 1),
            epoch=1,
            sequence=0,
        )
        outcome = db.connection.append(pchannel_of(vchannel), [entry], deadline=db.settings.start_deadline)
        assert not outcome.rejected, f"{outcome.rejected} producers were rejected"


def spread(collections: Sequence[CollectionInfo]) -> dict[str, int]:
    """Return the VChannels of `collections` by PChannel."""
    found: dict[str, int] = defaultdict(int)
    for collection in collections:
        for vchannel in collection.vchannels:
            found[pchannel_of(vchannel)] += 1
    return dict(sorted(found.items()))
