"""The catalog's port: what everybody asks of it, and DDL. The coordinator implements it (millrace.coord.coordinator), its server
hands it on (millrace.catalog.calls)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol, TypedDict, Unpack

from millrace.catalog.collection import CollectionInfo, PChannel
from millrace.message.schema import CollectionSchema

if TYPE_CHECKING:  # a program that changes no schema does without
    from millrace.message.schema_changes import SchemaChange


class CollectionOptions(TypedDict, total=False):
    """What a collection is made with, beside its name and schema."""

    vchannels: int
    """Default: one."""
    partitions: Sequence[str]
    """Their names; default: ``_default`` alone."""
    exist_ok: bool
    """One of that name that has this schema, or had it before fields were added, is given as it is: its VChannels and partitions
    may be others."""
    restored: bool
    """Its partitions may have names from before the rule."""
    request: str
    """See :class:`DdlOperations`."""


class DdlOperations(Protocol):
    """DDL: a message to every VChannel or PChannel that it concerns, done when all of them have it, across crashes.

    `request` is the caller's name for a change: one that is made again under its name, since its answer was lost, is made once, and
    has the first one's result. "": nobody makes it again.
    """

    def ensure_pchannels(self, count: int) -> list[PChannel]:
        """Make sure that the deployment has at least `count` PChannels, each with an open term."""
        ...

    def open_term(self, name: str, *, config: Mapping[str, int] | None = None, request: str = "") -> int:
        """Open the next term of a PChannel; messages of older ones are rejected from its opening on. The term."""
        ...

    def create_collection(
        self, name: str, schema: CollectionSchema, **options: Unpack[CollectionOptions]
    ) -> CollectionInfo:
        """Create a collection; usable when all its VChannels have it. Raises CollectionExists, InvalidArgument for a name
        that nothing new may have, and AppendRejected (LIMIT_EXCEEDED) where its PChannels have no room for it."""
        ...

    def drop_collection(self, name: str, *, request: str = "") -> None: ...

    def create_partition(self, name: str, partition: str, *, restored: bool = False, request: str = "") -> int:
        """Add a partition; its id. Raises AppendRejected (PARTITION_EXISTS), and InvalidArgument for a name that nothing new
        may have; with `restored` it may be one from before that rule."""
        ...

    def drop_partition(self, name: str, partition: str, *, request: str = "") -> None: ...

    def alter(self, name: str, changes: Sequence[SchemaChange], *, request: str = "") -> int:
        """Change the schema; the new version. Raises InvalidArgument for a change that cannot be."""
        ...

    def flush(self, name: str, *, request: str = "") -> dict[str, int]:
        """Seal and flush what grows in the collection; by VChannel the tick of its ManualFlush, 0 where nothing grew."""
        ...


class Catalog(DdlOperations, Protocol):
    """What a deployment has, and its changes."""

    def pchannels(self) -> list[PChannel]: ...

    def term(self, pchannel: str) -> int:
        """The newest term of `pchannel`: what its producers stamp."""
        ...

    def next_epoch(self, producer_id: int, *, held: int | None = None, request: str = "") -> int:
        """A new epoch for the producer `producer_id`: it fences every earlier producer of that id.

        With `held`, the epoch the caller has, it is refused (ProducerFenced) to one that is fenced itself. `request` as for DDL.
        """
        ...

    def collections(self, *, dropped: bool = False) -> list[CollectionInfo]:
        """Collections by name; with `dropped` those too that are gone."""
        ...

    def collection(self, name: str) -> CollectionInfo:
        """Raises CollectionNotFound for one that is not there or not usable yet."""
        ...
