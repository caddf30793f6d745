"""The catalog's protocol: queries and DDL.

The coordinator implements it (millrace.coord.coordinator); its server exposes it to clients (millrace.catalog.calls).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypedDict, Unpack

from millrace.catalog.broadcast import MESSAGE_KIND, BroadcastResult
from millrace.catalog.collection import CollectionInfo, PChannel
from millrace.message.model import MutableMessage
from millrace.message.schema import CollectionSchema

if TYPE_CHECKING:  # only programs that change schemas need it
    from millrace.message.schema_changes import SchemaChange


class CollectionOptions(TypedDict, total=False):
    """Options of a new collection, besides its name and schema."""

    vchannels: int
    """The number of VChannels; default: one."""
    partitions: Sequence[str]
    """The partitions' names; default: ``_default`` alone."""
    exist_ok: bool
    """Return an existing collection that has this schema, or had it before fields were added.

    Its VChannels and partitions may differ.
    """
    restored: bool
    """Allow partition names that predate the naming rule."""
    request: str
    """See :class:`DdlOperations`."""


class DdlOperations(Protocol):
    """DDL: a message to every VChannel or PChannel concerned, complete when all have it, across crashes.

    `request` is the caller's id for a change. A change that is retried with the same id, because its answer was lost,
    is made once and returns the first result. An empty id means no retries.
    """

    def ensure_pchannels(self, count: int) -> list[PChannel]:
        """Ensure that the deployment has at least `count` PChannels, each with an open term."""
        ...

    def open_term(self, name: str, *, config: Mapping[str, int] | None = None, request: str = "") -> int:
        """Open the next term of a PChannel and return it.

        From its opening on, messages of older terms are rejected.
        """
        ...

    def create_collection(
        self, name: str, schema: CollectionSchema, **options: Unpack[CollectionOptions]
    ) -> CollectionInfo:
        """Create a collection; it is usable once it exists on all its VChannels.

        Raises CollectionExists.
        Raises InvalidArgument if a new collection may not have this name.
        Raises AppendRejected (LIMIT_EXCEEDED) if its PChannels have no room for it.
        """
        ...

    def drop_collection(self, name: str, *, request: str = "") -> None:
        """Drop a collection, by its name.

        Raises CollectionHasAliases; raises InvalidArgument for an alias.
        """
        ...

    def create_partition(self, name: str, partition: str, *, restored: bool = False, request: str = "") -> int:
        """Add a partition and return its id.

        Raises AppendRejected (PARTITION_EXISTS).
        Raises InvalidArgument if a new partition may not have this name; `restored` allows names that predate the rule.
        """
        ...

    def drop_partition(self, name: str, partition: str, *, request: str = "") -> None: ...

    def alter(self, name: str, changes: Sequence[SchemaChange], *, request: str = "") -> int:
        """Change the schema and return the new version. Raises InvalidArgument if a change is not possible."""
        ...

    def flush(self, name: str, *, request: str = "") -> dict[str, int]:
        """Seal and flush the collection's growing segments.

        Returns the tick of the ManualFlush by VChannel, 0 if nothing was growing.
        """
        ...

    def broadcast(
        self,
        messages: Sequence[MutableMessage],
        *,
        kind: str = MESSAGE_KIND,
        data: Mapping[str, Any] | None = None,
        request: str = "",
    ) -> BroadcastResult:
        """Send one message to each of several VChannels, of one or more collections: to all, or to none.

        `kind` names the callbacks to run, which get `data`, a JSON object.
        Raises InvalidArgument, EntryTooLarge, CollectionNotFound, BroadcastRefused, AppendRejected with the reason why
        a VChannel refuses its message, TooManyBroadcasts: nothing was sent.
        Raises other errors that are retriable: it is sent, and completed by the coordinator.
        """
        ...

    def create_alias(self, alias: str, collection: str, *, request: str = "") -> None:
        """Give a collection another name. An alias that points to this collection already is no error.

        Raises AliasExists, CollectionNotFound, InvalidArgument.
        """
        ...

    def alter_alias(self, alias: str, collection: str, *, request: str = "") -> None:
        """Point an alias to another collection: every lookup finds the one or the other.

        Raises AliasNotFound, CollectionNotFound.
        """
        ...

    def drop_alias(self, alias: str, *, request: str = "") -> None:
        """Delete an alias, not the collection. Raises AliasNotFound."""
        ...


class Catalog(DdlOperations, Protocol):
    """The catalog of a deployment: queries and DDL. A collection's alias serves wherever its name does."""

    def pchannels(self) -> list[PChannel]: ...

    def term(self, pchannel: str) -> int:
        """Return the newest term of `pchannel`, which its producers stamp."""
        ...

    def next_epoch(self, producer_id: int, *, held: int | None = None, request: str = "") -> int:
        """Return a new epoch for the producer `producer_id`; it fences every earlier producer with that id.

        `held` is the caller's current epoch: if it is itself fenced, the call raises ProducerFenced.
        `request` works as for DDL.
        """
        ...

    def collections(self, *, dropped: bool = False) -> list[CollectionInfo]:
        """Return all collections, ordered by name; with `dropped`, also the dropped ones."""
        ...

    def collections_by_id(self, ids: Iterable[int]) -> dict[int, CollectionInfo]:
        """Return those collections that exist, also dropped ones, by id."""
        ...

    def collection(self, name: str) -> CollectionInfo:
        """Return a collection by name or alias. Raises CollectionNotFound if it does not exist or is not usable yet."""
        ...

    def aliases(self, collection: str | None = None) -> dict[str, str]:
        """Return the names of collections by alias, or the aliases of one collection. Raises CollectionNotFound."""
        ...
