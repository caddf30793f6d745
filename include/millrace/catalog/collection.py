"""What a deployment has: its PChannels, and its collections with their schemas, partitions and VChannels."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, Literal, Self, TypeAlias, cast

from millrace.base.errors import CollectionNotFound, InvalidArgument
from millrace.message.schema import CollectionSchema

DEFAULT_PARTITION: Final = "_default"
"""The partition that a collection has if its creator names none."""


@dataclass(frozen=True, slots=True)
class PChannel:
    """A PChannel of the deployment; `opened` says whether the opening of its newest term was acknowledged."""

    name: str
    term: int
    opened: bool


CollectionState: TypeAlias = Literal["creating", "active", "dropping", "dropped"]


@dataclass(frozen=True, slots=True)
class CollectionInfo:
    """A collection as the coordinator knows it."""

    id: int
    name: str
    state: CollectionState
    vchannels: tuple[str, ...]
    schemas: tuple[CollectionSchema, ...]
    """Version v is schemas[v - 1]."""
    partitions: dict[str, int]
    next_partition: int

    @property
    def schema(self) -> CollectionSchema:
        return self.schemas[-1]

    @property
    def schema_version(self) -> int:
        return len(self.schemas)

    @property
    def default_partition(self) -> str | None:
        """The partition of rows that name none: ``_default``, else the only one; None if there are several without it."""
        if DEFAULT_PARTITION in self.partitions:
            return DEFAULT_PARTITION
        return next(iter(self.partitions)) if len(self.partitions) == 1 else None

    @property
    def pchannels(self) -> list[str]:
        """The PChannels that its VChannels are on, by name."""
        return sorted({pchannel_of(vchannel) for vchannel in self.vchannels})

    def vchannels_on(self, channels: Iterable[str]) -> tuple[str, ...]:
        """The VChannels that `channels` name, each itself or its PChannel; none where none is named. Raises InvalidArgument."""
        named = frozenset(channels)
        if unknown := sorted(named - {*self.vchannels, *self.pchannels}):
            raise InvalidArgument(
                f"{self.name!r} is not on the channel {unknown[0]!r}: it has the VChannels {', '.join(self.vchannels)}"
            )
        return tuple(each for each in self.vchannels if named & {each, pchannel_of(each)})

    def restricted_to(self, channels: Iterable[str]) -> Self:
        """The collection as far as it is on `channels`, whole where none is named. Raises InvalidArgument."""
        return replace(self, vchannels=self.vchannels_on(channels) or self.vchannels)

    def require_same_id(self, found: Self) -> Self:
        """`found`, which the catalog has under this collection's name. Raises CollectionNotFound if it is another collection."""
        if found.id != self.id:
            raise CollectionNotFound(
                f"collection {self.name!r} with id {self.id} was dropped, and another collection with id {found.id} has its name:"
                " get that one by the name"
            )
        return found

    def to_json(self) -> dict[str, Any]:
        """As the catalog's calls carry it."""
        return {
            "id": self.id,
            "name": self.name,
            "state": self.state,
            "vchannels": list(self.vchannels),
            "schemas": [schema.to_json() for schema in self.schemas],
            "partitions": self.partitions,
            "next_partition": self.next_partition,
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        """Inverse of :meth:`to_json`."""
        return cls(
            id=int(value["id"]),
            name=str(value["name"]),
            state=cast(CollectionState, value["state"]),
            vchannels=tuple(value["vchannels"]),
            schemas=tuple(CollectionSchema.from_json(schema) for schema in value["schemas"]),
            partitions={str(name): int(number) for name, number in value["partitions"].items()},
            next_partition=int(value["next_partition"]),
        )


def pchannel_of(vchannel: str) -> str:
    """The PChannel in a VChannel's name, ``<pchannel>_<collection id>v<n>``."""
    return vchannel.rpartition("_")[0]


def require_distinct_sql_names(chosen: Iterable[CollectionInfo]) -> list[CollectionInfo]:
    """`chosen`, as views of an engine that takes names in any case for one. Raises InvalidArgument where two are one name there."""
    found: dict[str, CollectionInfo] = {}
    for each in chosen:
        other = found.setdefault(each.name.casefold(), each)
        if other.name != each.name:
            raise InvalidArgument(
                f"the collections {other.name!r} and {each.name!r} are one name in SQL: say by `names` which of them is to be the view"
            )
    return list(found.values())
