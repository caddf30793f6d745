"""Compares the catalog with the log and the WAL, and rebuilds it from them if its file is lost: all DDL is in the log.

The chain's state says which collections exist. The WAL's own messages, independent of that state, say it a second time,
and include dropped collections. A repair requires both to have the same digest.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Final

from millrace.base.errors import RepairImpossible
from millrace.base.settings import Settings
from millrace.catalog.collection import CollectionInfo
from millrace.catalog.sqlite_file import catalog_path
from millrace.coord.catalog.shared import open_shared_catalog
from millrace.coord.catalog.store import CatalogStore
from millrace.coord.catalog.sync import (
    Difference,
    GetDefinitions,
    chain_collections,
    chain_definitions,
    differences,
    reconcile,
)
from millrace.log.protocol import LogService
from millrace.storage.table import open_table, table_exists
from millrace.tables.collections.flush_tables import Checkpoint, read_checkpoints
from millrace.tables.wal.reader import WalSnapshot
from millrace.wal.txn_buffer import TxnBuffer
from millrace.wal.visible.catalog import CATALOG_TYPES, VChannelInfo, WalCatalog

_PCHANNEL: Final = re.compile(r"dml_\d+")
"""Names that the coordinator assigns.

A log with another name may be a message stream's, which the chain does not read.
"""


def pchannels_of(settings: Settings, service: LogService) -> list[str]:
    """Return the PChannels of the deployment known to the catalog, the WAL or the log."""
    found = {name for name in service.names() if _PCHANNEL.fullmatch(name)}
    store = CatalogStore.open_read_only(settings.data_dir)
    if store is not None:
        with store:
            found |= {each.name for each in store.pchannels()}
    if table_exists(settings.wal_uri):
        snapshot = WalSnapshot.open(settings.wal_uri)
        found |= set() if snapshot is None else set(snapshot.pchannels())
    return sorted(found)


def catalog_differences(settings: Settings, service: LogService, ask: GetDefinitions) -> list[Difference]:
    """Return where the catalog differs from the chain. If its file is lost, everything differs.

    A missing file means nothing if the catalog lives in a meta store: it is a copy, which the next call recreates.
    """
    store = CatalogStore.open_read_only(settings.data_dir)
    if store is None and settings.meta_store:
        return []
    names = pchannels_of(settings, service)
    if store is None:
        return differences(None, names, ask)
    with store:
        return differences(store, names, ask)


def rebuild_catalog(settings: Settings, service: LogService, ask: GetDefinitions, term: Callable[[str], int]) -> str:
    """Make the catalog match the chain and return a description of the changes.

    `term` returns the newest term in a PChannel's log. The WAL must have caught up with the log.

    Raises RepairImpossible if the WAL contradicts the chain, CatalogDiverged if a collection differs between its
    VChannels, CatalogBusy.
    """
    names = pchannels_of(settings, service)
    there = list(chain_collections(names, ask))
    by_wal, gone = _collections(settings, names)
    if catalog_digest(there) != catalog_digest(by_wal):
        raise RepairImpossible(
            f"the chain has the collections {_names(there)} with the digest {catalog_digest(there)}, the WAL "
            f"{_names(by_wal)} with {catalog_digest(by_wal)}: repair the WAL first"
        )
    with CatalogStore(catalog_path(settings.data_dir), shared=open_shared_catalog(settings)) as store:
        with store.transaction():
            lost = [name for name in names if name not in {each.name for each in store.pchannels()}]
            for name in lost:
                store.record_term(name, term(name))
            made = [each for each in [*there, *gone] if store.restore_collection(each)]
            if lost or made:
                store.raise_id_floor()
        for each in store.collections():
            store.update_if_settled(each, reconcile(each, chain_definitions(each, ask)))
        digest = catalog_digest(store.collections())
    if digest != catalog_digest(there):
        raise RepairImpossible(
            f"the catalog has the digest {digest}, the chain {catalog_digest(there)}: DDL is under way, try again"
        )
    return (
        f"{len(made)} collections and {len(lost)} PChannels restored from the log; digest {digest}, equal to the WAL's"
    )


def catalog_digest(collections: Iterable[CollectionInfo]) -> str:
    """Return a digest of what a catalog says about the collections that are not dropped."""
    said = sorted(
        json.dumps(
            [
                each.id,
                each.name,
                each.vchannels,
                [one.to_json() for one in each.schemas],
                sorted(each.partitions.items()),
            ]
        )
        for each in collections
        if each.state != "dropped"
    )
    return hashlib.sha256("\n".join(said).encode()).hexdigest()[:16]


def _names(collections: Iterable[CollectionInfo]) -> str:
    return ", ".join(sorted(each.name for each in collections)) or "(none)"


def _collections(settings: Settings, names: Iterable[str]) -> tuple[list[CollectionInfo], list[CollectionInfo]]:
    """Return the existing and the dropped collections according to the WAL's messages."""
    infos: dict[int, list[VChannelInfo]] = {}
    for info in _vchannels(settings, names):
        infos.setdefault(info.collection_id, []).append(info)
    there, gone = [], []
    for collection_id, each in sorted(infos.items()):
        first = max(each, key=lambda info: len(info.schemas))
        # Count dropped partitions too: an id is never assigned twice.
        partitions = {name: number for number, name in first.partitions.items() if number not in first.partition_drops}
        collection = CollectionInfo(
            id=collection_id,
            name=first.name,
            state="active",
            vchannels=first.vchannels,
            schemas=tuple(schema for _, schema in first.schemas),
            partitions=partitions,
            next_partition=max([0, *first.partitions, *first.partition_drops]) + 1,
        )
        if all(info.dropped_tick for info in each):
            gone.append(replace(collection, state="dropped"))
        else:
            there.append(collection)
    return there, gone


def _vchannels(settings: Settings, names: Iterable[str]) -> Iterator[VChannelInfo]:
    snapshot = WalSnapshot.open(settings.wal_uri) if table_exists(settings.wal_uri) else None
    if snapshot is None:
        return
    checkpoints = read_checkpoints(open_table(settings.checkpoints_uri))
    for name in names:
        checkpoint = checkpoints.get(name, Checkpoint(name))
        catalog: WalCatalog = checkpoint.catalog
        for rows in snapshot.messages(name, after_tick=checkpoint.time_tick, types=CATALOG_TYPES):
            for _ in catalog.apply(TxnBuffer(after_tick=checkpoint.time_tick).push(rows)):
                pass
        yield from catalog.vchannels.values()
