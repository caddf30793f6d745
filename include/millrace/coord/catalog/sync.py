"""Compares the catalog with the chain's state and updates the catalog from it.

A client that appends DDL to the log without the coordinator changes the chain, which is the truth, and not the
catalog. If all VChannels of a collection agree, the catalog adopts their state. If they differ, the differences are
reported.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from millrace.base.errors import CatalogDiverged, MillraceError
from millrace.catalog.collection import CollectionInfo
from millrace.coord.catalog.store import CatalogStore
from millrace.coord.ddl.kinds import same_collection
from millrace.message.ids import pchannel_of
from millrace.wal.definitions import PChannelDefinitions, VChannelDefinition, VChannelOutline

_log = logging.getLogger(__name__)

GetDefinitions = Callable[[str, int | None], PChannelDefinitions]
"""Returns what the chain has on a PChannel: the definitions of one collection, or an outline of all if the id is None
(millrace.wal.definitions).
"""

ChainDefinitions = Mapping[str, VChannelDefinition | None]
"""The chain's definition of a collection, by VChannel."""


def chain_definitions(collection: CollectionInfo, ask: GetDefinitions) -> ChainDefinitions:
    """Return the chain's definitions of `collection` by VChannel. Asks each PChannel once."""
    pchannels = dict.fromkeys(map(pchannel_of, collection.vchannels))
    found = {name: each for pchannel in pchannels for name, each in ask(pchannel, collection.id).vchannels.items()}
    return {name: found.get(name) for name in collection.vchannels}


def reconcile(collection: CollectionInfo, there: ChainDefinitions) -> CollectionInfo:
    """Return `collection` as the chain has it, with state `dropped` if no VChannel has it.

    Raises CatalogDiverged, which says what differs.
    """
    mine = [each for each in there.values() if each is not None and same_collection(collection, each)]
    strange = [name for name, each in there.items() if each is not None and not same_collection(collection, each)]
    if strange:
        raise _diverged(collection, f"{strange[0]} has another collection under the id {collection.id}")
    if not mine:
        return replace(collection, state="dropped")
    missing = [name for name, each in there.items() if each is None]
    if missing:
        raise _diverged(collection, f"{missing[0]} does not have it: drop it")
    first = mine[0]
    for name, each in there.items():
        assert each is not None
        if each.schemas != first.schemas:
            raise _diverged(
                collection,
                f"{name} has the fields {_fields(each)}, {next(iter(there))} has {_fields(first)}: add the field that"
                " is"
                " missing; where the fields contradict each other, restore into a new collection",
            )
        if each.partitions != first.partitions:
            raise _diverged(
                collection,
                f"{name} has the partitions {_partitions(each)}, {next(iter(there))} has {_partitions(first)}: create"
                " or"
                " drop the one that differs",
            )
    if first.schemas == collection.schemas and _by_name(first) == collection.partitions:
        return collection
    following = max([collection.next_partition, *(number + 1 for number in first.partitions)])
    return replace(collection, schemas=first.schemas, partitions=_by_name(first), next_partition=following)


def changed_collections(store: CatalogStore, ask: GetDefinitions) -> list[int]:
    """Return the ids of the catalog's collections whose outline the chain has otherwise.

    Asks each PChannel once, however many collections it has. One that cannot be asked is logged, and its collections
    count as unchanged.
    """
    found: dict[int, None] = {}
    there: dict[str, Mapping[str, VChannelOutline] | None] = {}
    for number, vchannel, mine in store.outlines():
        pchannel = pchannel_of(vchannel)
        if pchannel not in there:
            there[pchannel] = _outlines(pchannel, ask)
        outlines = there[pchannel]
        if outlines is not None and outlines.get(vchannel) != mine:
            found[number] = None
    return list(found)


def _outlines(pchannel: str, ask: GetDefinitions) -> Mapping[str, VChannelOutline] | None:
    try:
        return ask(pchannel, None).outlines
    except MillraceError as error:
        _log.warning("cannot compare the catalog with the chain of %s: %s: %s", pchannel, error.code, error)
        return None


@dataclass(frozen=True, slots=True)
class Difference:
    """A collection whose catalog entry differs from the chain."""

    id: int
    name: str
    detail: str


def chain_collections(pchannels: Iterable[str], ask: GetDefinitions) -> Iterator[CollectionInfo]:
    """Yield the collections that the chain has on `pchannels`, by id.

    Raises CatalogDiverged if a collection is not the same on its VChannels.
    """
    names: dict[int, str] = {}
    for pchannel in pchannels:
        for number in ask(pchannel, None).collections:
            names.setdefault(number, pchannel)
    for number, pchannel in sorted(names.items()):
        first = next(each for each in ask(pchannel, number).vchannels.values())
        partitions = _by_name(first)
        following = max(first.partitions, default=0) + 1
        seen = CollectionInfo(number, first.name, "active", first.vchannels, first.schemas, partitions, following)
        yield reconcile(seen, chain_definitions(seen, ask))


def differences(store: CatalogStore | None, pchannels: list[str], ask: GetDefinitions) -> list[Difference]:
    """Return the current differences between the catalog and the chain.

    Without a `store`, every collection of the chain is a difference. Collections with DDL in progress are skipped.
    """
    found: list[Difference] = []
    known = {} if store is None else {each.id: each for each in store.collections(dropped=True)}
    terms = frozenset() if store is None else frozenset(each.name for each in store.pchannels())
    for each in known.values():
        assert store is not None
        if each.state != "dropped" and (words := _difference(store, each, ask)):
            found.append(Difference(each.id, each.name, words))
    for pchannel in pchannels:
        try:
            collections = ask(pchannel, None).collections
        except MillraceError as error:
            if error.retriable:
                raise
            continue  # parked PChannels are reported elsewhere
        if collections and pchannel not in terms:
            found.append(Difference(0, pchannel, "the catalog has no entry for this PChannel, which has collections"))
        for number, name in collections.items():
            # read again: it may have been created since
            entry = None if store is None else store.find_collection(number)
            if entry is None:
                found.append(
                    Difference(number, name, f"{pchannel} has it, but the catalog never had it: a client wrote it")
                )
            elif entry.state == "dropped":
                found.append(Difference(number, name, f"{pchannel} still has it, but the catalog has dropped it"))
    return list(dict.fromkeys(found))


def _difference(store: CatalogStore, collection: CollectionInfo, ask: GetDefinitions) -> str:
    try:
        there = reconcile(collection, chain_definitions(collection, ask))
    except CatalogDiverged as error:
        words = str(error)
    except MillraceError as error:
        if error.retriable:
            raise
        return f"cannot be compared with the chain: {error.code}: {error}"
    else:
        if there == collection:
            return ""
        words = (
            "the catalog " + _entry(collection) + ", the chain " + _entry(there) + "; the next DDL follows the chain"
        )
    # A change since the read, or DDL in progress, is no difference.
    return words if store.is_settled(collection) else ""


def _diverged(collection: CollectionInfo, words: str) -> CatalogDiverged:
    return CatalogDiverged(
        f"collection {collection.name!r} ({collection.id}) is not the same on its VChannels: {words}"
    )


def _entry(collection: CollectionInfo) -> str:
    if collection.state == "dropped":
        return "does not have it"
    fields = ", ".join(each.name for each in collection.schema.fields)
    return f"has schema version {collection.schema_version} ({fields}), partitions {collection.partitions}"


def _by_name(definition: VChannelDefinition) -> dict[str, int]:
    return {name: number for number, name in definition.partitions.items()}


def _fields(definition: VChannelDefinition) -> str:
    return ", ".join(f"{each.name}:{each.type}" for each in definition.schemas[-1].fields)


def _partitions(definition: VChannelDefinition) -> str:
    return ", ".join(f"{name} ({number})" for number, name in sorted(definition.partitions.items()))
