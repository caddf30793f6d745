"""The catalog's records: PChannels, and collections with their schemas, partitions and VChannels."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, Literal, Self, TypeAlias, cast

from millrace.base.errors import CollectionNotFound, InvalidArgument
from millrace.message.bodies import MAX_NAME_BYTES
from millrace.message.ids import pchannel_of
from millrace.message.schema import CollectionSchema

DEFAULT_PARTITION: Final = "_default"
"""The partition of a collection that is created without partition names."""
_MARKS: Final = "_-."


def check_name(name: object, what: str) -> None:
    """Raise InvalidArgument unless `name` is valid for a new object: safe in paths, URLs and shells.

    Older names stay valid: the chain accepts any name of 1 to 255 bytes.
    """
    if (
        not isinstance(name, str)
        or not 0 < len(name.encode("utf-8", "replace")) <= MAX_NAME_BYTES
        or not (name[0].isalnum() or name[0] == "_")
        or not all(each in _MARKS or unicodedata.category(each)[0] in "LMN" for each in name)
        or unicodedata.normalize("NFC", name) != name
    ):
        raise InvalidArgument(
            f"{what} is called {name!r}: a name has letters and digits (of any alphabet, composed), {' '.join(_MARKS)},"
            f" begins with a letter, a digit or _, and has at most {MAX_NAME_BYTES} bytes"
        )


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
    """The schema versions; version v is schemas[v - 1]."""
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
        """The partition of rows that name none: ``_default``, else the only one; None if neither exists."""
        if DEFAULT_PARTITION in self.partitions:
            return DEFAULT_PARTITION
        return next(iter(self.partitions)) if len(self.partitions) == 1 else None

    @property
    def pchannels(self) -> list[str]:
        """The PChannels of its VChannels, sorted."""
        return sorted({pchannel_of(vchannel) for vchannel in self.vchannels})

    def vchannels_on(self, channels: Iterable[str]) -> tuple[str, ...]:
        """Return the VChannels that `channels` name directly or by their PChannel; empty if `channels` is empty.

        Raises InvalidArgument if a channel is unknown.
        """
        named = frozenset(channels)
        if unknown := sorted(named - {*self.vchannels, *self.pchannels}):
            raise InvalidArgument(
                f"{self.name!r} has no channel {unknown[0]!r}; its VChannels are {', '.join(self.vchannels)}"
            )
        return tuple(each for each in self.vchannels if named & {each, pchannel_of(each)})

    def restricted_to(self, channels: Iterable[str]) -> Self:
        """Return the collection restricted to `channels`, or unchanged if `channels` is empty. Raises
        InvalidArgument.
        """
        return replace(self, vchannels=self.vchannels_on(channels) or self.vchannels)

    def require_same_id(self, found: Self) -> Self:
        """Return `found`, the catalog's collection with this name.

        Raises CollectionNotFound if it is another collection with the same name.
        """
        if found.id != self.id:
            raise CollectionNotFound(
                f"collection {self.name!r} with id {self.id} was dropped, and the name now belongs to the collection"
                " with id"
                f" {found.id}: open it by name"
            )
        return found

    def to_json(self) -> dict[str, Any]:
        """Return the JSON form in the catalog's calls."""
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
        """Invert :meth:`to_json`."""
        return cls(
            id=int(value["id"]),
            name=str(value["name"]),
            state=cast(CollectionState, value["state"]),
            vchannels=tuple(value["vchannels"]),
            schemas=tuple(CollectionSchema.from_json(schema) for schema in value["schemas"]),
            partitions={str(name): int(number) for name, number in value["partitions"].items()},
            next_partition=int(value["next_partition"]),
        )


def require_distinct_sql_names(chosen: Iterable[CollectionInfo]) -> list[CollectionInfo]:
    """Return `chosen`, as views of an engine whose names are case-insensitive.

    Raises InvalidArgument if two collections have the same name there.
    """
    found: dict[str, CollectionInfo] = {}
    for each in chosen:
        other = found.setdefault(each.name.casefold(), each)
        if other.name != each.name:
            raise InvalidArgument(
                f"the collections {other.name!r} and {each.name!r} have the same name in SQL: choose one of them with"
                " `names`"
            )
    return list(found.values())


PAGE_SIZE: Final = 100
"""Collections of a page, unless a reader asks for another number."""
MAX_PAGE_SIZE: Final = 1_000


@dataclass(frozen=True, slots=True)
class CollectionQuery:
    """A page of the collections, ordered by name."""

    dropped: bool = False
    """Include dropped collections."""
    search: str = ""
    """Part of the name, in any case."""
    after: str = ""
    """The page begins after this cursor: `next` of the page before, or a name. Empty: at the beginning."""
    offset: int = 0
    """Collections to skip after that. What is created or dropped between two pages moves the others; a cursor stays."""
    limit: int = PAGE_SIZE


@dataclass(frozen=True, slots=True)
class CollectionPage:
    """A page of the collections."""

    items: list[CollectionInfo]
    total: int
    """The number of collections on all pages."""
    next: str
    """The cursor of the next page; empty if there is none."""
