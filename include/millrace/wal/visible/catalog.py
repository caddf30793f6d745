"""The catalog of one PChannel's WAL at a tick: collections by VChannel, their schemas, partitions and segments.

A :class:`WalCatalog` evolves by visible rows alone, so it does not depend on how they were split into ranges. The
flusher stores it with each checkpoint, and readers evolve it over the tail of the WAL. It keeps what is gone for as
long as a read at an earlier tick may need it: drop ticks of partitions and collections, and the tick of each schema.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final, Literal, NamedTuple, Self, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from millrace.base.errors import UnsupportedVersion
from millrace.base.lru_cache import LruCache
from millrace.message.bodies import ImportBody, import_partitions, parse_body
from millrace.message.schema import CollectionSchema
from millrace.message.schema_changes import apply_changes
from millrace.message.types import ROW_CARRYING_TYPES, MessageType
from millrace.wal.txn_buffer import VISIBLE_TICK

VERSIONS: Final = (1, 2)
"""Versions of the stored form. Version 2 has the ticks of replacing imports, and is written only if there are any."""

CACHED_BYTES: Final = 8 << 20
"""Bytes of catalogs whose parsed form a process keeps: about those of 20,000 VChannels."""

CATALOG_TYPES: Final = tuple(
    member.name
    for member in (
        MessageType.CREATE_COLLECTION,
        MessageType.DROP_COLLECTION,
        MessageType.CREATE_PARTITION,
        MessageType.DROP_PARTITION,
        MessageType.SCHEMA_CHANGE,
        MessageType.IMPORT,
    )
)
"""Message types that evolve a catalog. A reader that needs only the catalog reads these."""

_CATALOG_TYPES: Final = pa.array(CATALOG_TYPES)
_BRINGING: Final = pa.array([kind.name for kind in ROW_CARRYING_TYPES])
_SEGMENT_EVENTS: Final = pa.array([MessageType.CREATE_SEGMENT.name, MessageType.FLUSH.name])


@dataclass(slots=True)
class GrowingSegment:
    """A growing segment, with the rows and payload bytes visible in it so far."""

    partition_id: int
    created_tick: int
    rows: int = 0
    bytes: int = 0


SegmentState: TypeAlias = Literal["growing", "flushed", "dropped"]


class SegmentEvent(NamedTuple):
    """A new state of a segment."""

    vchannel: str
    collection_id: int
    partition_id: int
    segment_id: int
    state: SegmentState
    rows: int
    bytes: int
    policy: str
    created_tick: int
    time_tick: int
    merged_into: int = 0


@dataclass(slots=True)
class VChannelInfo:
    """The collection of one VChannel."""

    collection_id: int
    name: str
    vchannels: tuple[str, ...]
    created_tick: int
    schemas: list[tuple[int, CollectionSchema]]
    """(tick from which it applies, schema), by version from 1."""
    partitions: dict[int, str]
    partition_drops: dict[int, list[int]] = field(default_factory=dict)
    """Ticks at which a partition of that id was dropped: earlier rows are hidden from there on."""
    dropped_tick: int = 0
    replace_ticks: list[int] = field(default_factory=list)
    """Ticks of imports that replaced the VChannel's rows: earlier rows are hidden from there on."""
    growing: dict[int, GrowingSegment] = field(default_factory=dict)

    def schema_at(self, tick: int) -> CollectionSchema:
        """Return the newest schema at `tick` (the first one if `tick` is before it)."""
        return self.schemas[self.version_at(tick) - 1][1]

    def version_at(self, tick: int) -> int:
        """Return the version of :meth:`schema_at`."""
        return max(1, sum(since <= tick for since, _ in self.schemas))

    def first_visible_tick(self, tick: int) -> int:
        """Return the tick before which a read at `tick` sees no row of the VChannel.

        Earlier rows belong to a previous collection of the same id, or an Import replaced them.
        """
        return max([self.created_tick, *(each for each in self.replace_ticks if each <= tick)])

    @property
    def newest_schema(self) -> CollectionSchema:
        return self.schemas[-1][1]

    def to_json(self) -> dict[str, Any]:
        replaced = {"replace_ticks": self.replace_ticks} if self.replace_ticks else {}
        return replaced | {
            "collection_id": self.collection_id,
            "name": self.name,
            "vchannels": list(self.vchannels),
            "created_tick": self.created_tick,
            "schemas": [[tick, schema.to_json()] for tick, schema in self.schemas],
            "partitions": {str(number): name for number, name in sorted(self.partitions.items())},
            "partition_drops": {str(number): ticks for number, ticks in sorted(self.partition_drops.items())},
            "dropped_tick": self.dropped_tick,
            "growing": {
                str(number): [info.partition_id, info.created_tick, info.rows, info.bytes]
                for number, info in sorted(self.growing.items())
            },
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        return cls(
            collection_id=value["collection_id"],
            name=value["name"],
            vchannels=tuple(value["vchannels"]),
            created_tick=value["created_tick"],
            schemas=[(tick, CollectionSchema.from_json(schema)) for tick, schema in value["schemas"]],
            partitions={int(number): name for number, name in value["partitions"].items()},
            partition_drops={int(number): list(ticks) for number, ticks in value["partition_drops"].items()},
            dropped_tick=value["dropped_tick"],
            replace_ticks=list(value.get("replace_ticks", ())),
            growing={int(number): GrowingSegment(*info) for number, info in value["growing"].items()},
        )


def newest_schema(infos: Iterable[VChannelInfo], tick: int | None = None) -> CollectionSchema:
    """Return a collection's schema (at `tick`).

    Changes may have reached only some VChannels: the newest schema counts.
    """
    if tick is None:
        # A schema change is a broadcast: the VChannel with the most versions is the furthest.
        return max(infos, key=lambda info: len(info.schemas)).newest_schema
    return max(infos, key=lambda info: info.version_at(tick)).schema_at(tick)


_NOTHING: Final[Mapping[str, Mapping[str, Any]]] = MappingProxyType({})


class VChannelInfos(MutableMapping[str, VChannelInfo]):
    """VChannels by name, each decoded from its stored form when it is first asked for.

    The stored form is shared and never changed, so a copy costs what is asked of it. Iteration is in stored order, then
    in the order in which VChannels were added.
    """

    __slots__ = ("_decoded", "_stored")

    def __init__(
        self, infos: Mapping[str, VChannelInfo], stored: Mapping[str, Mapping[str, Any]] | None = None
    ) -> None:
        self._decoded = dict(infos)
        self._stored = {} if stored is None else stored

    def __getitem__(self, name: str) -> VChannelInfo:
        info = self._decoded.get(name)
        if info is None:
            info = self._decoded[name] = VChannelInfo.from_json(self._stored[name])
        return info

    def __setitem__(self, name: str, info: VChannelInfo) -> None:
        self._decoded[name] = info

    def __delitem__(self, name: str) -> None:
        raise TypeError("a VChannel is never removed from a catalog: reads at earlier ticks may need it")

    def __contains__(self, name: object) -> bool:
        return name in self._decoded or name in self._stored

    def __iter__(self) -> Iterator[str]:
        yield from self._stored
        yield from (name for name in self._decoded if name not in self._stored)

    def __len__(self) -> int:
        return len(self._stored) + sum(name not in self._stored for name in self._decoded)

    def names_of(self, collection_id: int) -> list[str]:
        """Return the VChannels of a collection, without decoding any."""
        stored, decoded = self._stored, self._decoded
        found = [name for name, value in stored.items() if value["collection_id"] == collection_id]
        return [name for name in found if name not in decoded] + [
            name for name, info in decoded.items() if info.collection_id == collection_id
        ]

    def with_new_schemas(self) -> Iterator[VChannelInfo]:
        """Yield those that are new or have another number of schemas than in the stored form."""
        for name, info in self._decoded.items():
            if len(info.schemas) != len(self._stored.get(name, {}).get("schemas", ())):
                yield info

    def to_json(self) -> dict[str, Any]:
        """Return the stored form of all."""
        return {**self._stored, **{name: info.to_json() for name, info in self._decoded.items()}}


class WalCatalog:
    """The VChannels of one PChannel, including dropped ones."""

    __slots__ = ("vchannels",)

    def __init__(self, vchannels: Mapping[str, VChannelInfo] | None = None) -> None:
        """Make a catalog of these VChannels, which are not copied."""
        self.vchannels = vchannels if isinstance(vchannels, VChannelInfos) else VChannelInfos(vchannels or {})

    def to_bytes(self) -> bytes:
        """Return canonical bytes: equal catalogs have equal bytes."""
        vchannels = self.vchannels.to_json()
        # A build without replacing imports must not continue a catalog that hides rows by one.
        version = VERSIONS[any("replace_ticks" in value for value in vchannels.values())]
        body = {"version": version, "vchannels": vchannels}
        return json.dumps(body, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """Parse the result of :meth:`to_bytes`. Raises UnsupportedVersion."""
        body = stored_form(data)
        if body["version"] not in VERSIONS:
            raise UnsupportedVersion(
                f"a checkpoint's catalog of version {body['version']}: run the build that wrote it"
            )
        return cls(VChannelInfos({}, body["vchannels"]))

    def collection_vchannels(self, collection_id: int) -> dict[str, VChannelInfo]:
        """Return this PChannel's VChannels of one collection."""
        return {name: self.vchannels[name] for name in self.vchannels.names_of(collection_id)}

    def apply(self, rows: pa.Table) -> Iterator[pa.Table]:
        """Evolve by visible rows. Yields them in slices, each once the DDL before it is applied.

        An Import also brings rows: it is the first row of its slice.
        """
        start = 0
        for place in _places(rows, _CATALOG_TYPES):
            if place > start:
                yield rows.slice(start, place - start)
            row = rows.slice(place, 1).to_pylist()[0]
            self._evolve(row)
            # DDL rows are consumed here; an Import stays, because its rows follow in the same slice.
            start = place + (row["type"] != MessageType.IMPORT.name)
        if start < rows.num_rows:
            yield rows.slice(start)

    def _evolve(self, row: dict[str, Any]) -> None:
        kind, name, tick = MessageType[row["type"]], row["vchannel"], row[VISIBLE_TICK]
        body = parse_body(kind, row["payload"] or b"")
        if kind is MessageType.CREATE_COLLECTION:
            self.vchannels[name] = VChannelInfo(
                collection_id=row["collection_id"],
                name=body["name"],
                vchannels=tuple(body["vchannels"]),
                created_tick=tick,
                schemas=[(tick, body["schema"])],
                partitions={number: partition for partition, number in body["partitions"].items()},
            )
            return
        info = self.vchannels[name]
        match kind:
            case MessageType.DROP_COLLECTION:
                info.dropped_tick = tick
            case MessageType.CREATE_PARTITION:
                info.partitions[row["partition_id"]] = body["name"]
            case MessageType.IMPORT:
                if body["replace"]:
                    info.replace_ticks.append(tick)
            case MessageType.DROP_PARTITION:
                info.partition_drops.setdefault(row["partition_id"], []).append(tick)
            case _:
                info.schemas.append((tick, apply_changes(info.newest_schema, body["changes"])))

    def segment_events(self, rows: pa.Table) -> Iterator[SegmentEvent]:
        """Count the visible rows of a slice into their segments. Yields the segments that began and ended in it."""
        events = [rows.slice(place, 1).to_pylist()[0] for place in _places(rows, _SEGMENT_EVENTS)]
        for row in events:
            if row["type"] == MessageType.CREATE_SEGMENT.name:
                info = GrowingSegment(row["partition_id"], row["time_tick"])
                self.vchannels[row["vchannel"]].growing[row["segment_id"]] = info
                yield _event(row, "growing", info, "")
        # Between the two loops: a segment counts the rows of its slice after it began and before it ends.
        self._count(rows)
        self._count_imports(rows)
        for row in events:
            if row["type"] == MessageType.FLUSH.name:
                info = self.vchannels[row["vchannel"]].growing.pop(row["segment_id"])
                yield _event(row, "flushed", info, parse_body(MessageType.FLUSH, row["payload"])["policy"])

    def _count(self, rows: pa.Table) -> None:
        inserts = rows.filter(pc.is_in(rows["type"].cast(pa.utf8()), _BRINGING))
        if inserts.num_rows == 0:
            return
        sizes = pc.binary_length(inserts["payload"]).cast(pa.int64())
        counted = (
            pa.table(
                {
                    "vchannel": inserts["vchannel"].cast(pa.utf8()),
                    "segment_id": inserts["segment_id"],
                    "rows": inserts["rows"],
                    "bytes": sizes,
                }
            )
            .group_by(["vchannel", "segment_id"])
            .aggregate([("rows", "sum"), ("bytes", "sum")])
        )
        for row in counted.to_pylist():
            info = self.vchannels[row["vchannel"]].growing[row["segment_id"]]
            info.rows += row["rows_sum"]
            info.bytes += row["bytes_sum"]

    def _count_imports(self, rows: pa.Table) -> None:
        for place in _places(rows, pa.array([MessageType.IMPORT.name])):
            row = rows.slice(place, 1).to_pylist()[0]
            body = parse_body(MessageType.IMPORT, row["payload"])
            segments = import_segments(row["segment_id"], body)
            for file in body["files"]:
                info = self.vchannels[row["vchannel"]].growing[segments[file["partition_id"]]]
                info.rows += file["rows"]
                info.bytes += file["bytes"]


def stored_form(data: bytes) -> Mapping[str, Any]:
    """Return the JSON of a catalog's bytes. It is cached and shared: never change it."""
    form = _parsed.get(data)
    if form is None:
        form = json.loads(data)
        _parsed.put(data, form)
    return form


_parsed: Final[LruCache[bytes, Mapping[str, Any]]] = LruCache(CACHED_BYTES, cost=lambda data, form: len(data))


def import_segments(first: int, body: ImportBody) -> dict[int, int]:
    """Return the segment of each partition of an Import: `first` is the message's own, the others follow it."""
    return {partition: first + place for place, partition in enumerate(import_partitions(body))}


def _event(row: dict[str, Any], state: SegmentState, info: GrowingSegment, policy: str) -> SegmentEvent:
    return SegmentEvent(
        vchannel=row["vchannel"],
        collection_id=row["collection_id"],
        partition_id=row["partition_id"],
        segment_id=row["segment_id"],
        state=state,
        rows=info.rows,
        bytes=info.bytes,
        policy=policy,
        created_tick=info.created_tick,
        time_tick=row[VISIBLE_TICK],
    )


def _places(rows: pa.Table, kinds: pa.Array) -> list[int]:
    found = pc.is_in(rows["type"].cast(pa.utf8()), kinds)
    places: list[int] = np.flatnonzero(found.to_numpy()).tolist()
    return places
