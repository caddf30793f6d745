"""The streaming coordinator: PChannels and their terms, collections, and DDL as persisted, idempotent broadcasts.

A broadcast is kept in the store before its first append (id → append to all → acknowledged by all → catalog changed). A
coordinator that dies anywhere in between leaves a broadcast that :meth:`Coordinator.resume` completes: a message that is
appended again is rejected by the chain with a reason that says that it took effect before, and that is an acknowledgement.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Protocol

from millrace.closing import Closing
from millrace.coord.store import Broadcast, Collection, PChannel, Store
from millrace.errors import AppendRejected, ChannelExists, CollectionExists, CollectionNotFound, InvalidArgument
from millrace.log.protocol import LogService
from millrace.message import builders
from millrace.message.model import MutableMessage
from millrace.message.schema import CollectionSchema, FieldSpec
from millrace.message.wire import encode_entry
from millrace.settings import Settings
from millrace.wal.chain import CHAIN_VERSION
from millrace.wal.reasons import Reason

SETTLED: Final[dict[str, frozenset[Reason]]] = {
    "create_collection": frozenset({Reason.COLLECTION_EXISTS}),
    "drop_collection": frozenset({Reason.COLLECTION_NOT_FOUND}),
    "create_partition": frozenset({Reason.PARTITION_EXISTS}),
    "drop_partition": frozenset({Reason.PARTITION_NOT_FOUND, Reason.COLLECTION_NOT_FOUND}),
    "schema_change": frozenset({Reason.SCHEMA_MISMATCH}),
    "manual_flush": frozenset({Reason.NO_EFFECT}),
}
"""By kind of broadcast: the rejections of a repeated message that say that it took effect before."""

TERM_ATTEMPTS: Final = 5


class Appending(Protocol):
    """What the coordinator needs of an append host: append one entry with one message; its time tick, or AppendRejected."""

    def append_one(self, pchannel: str, entry: bytes) -> int: ...


class Coordinator(Closing):
    """DDL of one deployment. Any process may hold one; the store lets them write in turn."""

    def __init__(self, settings: Settings, *, log: LogService, append: Appending) -> None:
        self._settings = settings
        self._store = Store(settings.data_dir / "coord" / "coord.db")
        self._log = log
        self._append = append

    def close(self) -> None:
        self._store.close()

    # -- PChannels ----------------------------------------------------------------------------------------------------

    def ensure_pchannels(self, count: int) -> list[PChannel]:
        """Make sure that the deployment has at least `count` PChannels, each with an open term; completes broadcasts."""
        for number in range(count):
            self.ensure_pchannel(f"dml_{number}")
        for pchannel in self._store.pchannels():
            self.ensure_pchannel(pchannel.name)
        self.resume()
        return self._store.pchannels()

    def ensure_pchannel(self, name: str) -> PChannel:
        """The PChannel `name`, with its log made and its term opened where they are not yet."""
        known = next((each for each in self._store.pchannels() if each.name == name), None)
        if known is None or not known.opened:
            if name not in self._log.names():
                try:
                    self._log.create(name)
                except ChannelExists:
                    pass  # another process was as quick
            self.open_term(name)
        return next(each for each in self._store.pchannels() if each.name == name)

    def open_term(self, name: str, *, config: Mapping[str, int] | None = None) -> int:
        """Open the next term of a PChannel; messages of older ones are rejected from its opening on. The term."""
        for _ in range(TERM_ATTEMPTS):
            term = self._store.next_term(name)
            opening = builders.term_opening(term=term, chain_version=CHAIN_VERSION, config=dict(config or {}))
            try:
                self._append.append_one(name, encode_entry([opening]))
            except AppendRejected as rejection:
                if rejection.reason != Reason.TERM_FENCED:
                    raise
                continue  # the log knows a later term than the store: count on
            self._store.term_opened(name, term)
            return term
        raise AppendRejected(
            f"the log of {name} knows a later term than the coordinator's store: restore the store's newest copy",
            reason=Reason.TERM_FENCED,
        )

    def pchannels(self) -> list[PChannel]:
        return self._store.pchannels()

    def term(self, pchannel: str) -> int:
        """The newest term of `pchannel`: what its producers stamp."""
        return next(each.term for each in self._store.pchannels() if each.name == pchannel)

    def next_epoch(self, producer_id: int, *, held: int | None = None) -> int:
        """A new epoch for the producer `producer_id`: it fences every earlier producer of that id.

        With `held`, the epoch the caller has, it is refused (ProducerFenced) to one that is fenced itself.
        """
        return self._store.next_epoch(producer_id, held=held)

    # -- collections --------------------------------------------------------------------------------------------------

    def collections(self, *, dropped: bool = False) -> list[Collection]:
        return self._store.collections(dropped=dropped)

    def collection(self, name: str) -> Collection:
        """Raises CollectionNotFound for one that is not there or not usable yet."""
        found = self._store.collection(name)
        if found.state == "creating":
            self.resume()
            found = self._store.collection(name)
        return found

    def create_collection(
        self,
        name: str,
        schema: CollectionSchema,
        *,
        vchannels: int = 1,
        partitions: Sequence[str] = ("_default",),
        exist_ok: bool = False,
    ) -> Collection:
        """Create a collection; usable when all its VChannels have it. Raises CollectionExists.

        With `exist_ok` one of that name that has this schema, or had it before fields were added, is given as it is: its
        VChannels and partitions may be others.
        """
        if exist_ok and (standing := self._standing(name, schema)):
            return standing
        channels = [pchannel.name for pchannel in self._store.pchannels()]
        if not channels:
            channels = [pchannel.name for pchannel in self.ensure_pchannels(self._settings.pchannels)]
        if not name or not partitions or len(set(partitions)) != len(partitions) or vchannels < 1:
            raise InvalidArgument("a collection needs a name, at least one VChannel and partitions of different names")
        try:
            broadcast = self._store.add_collection(
                name, schema, vchannels=vchannels, partitions=list(partitions), pchannels=channels
            )
        except CollectionExists:
            if exist_ok and (standing := self._standing(name, schema)):  # another was as quick
                return standing
            raise
        self._complete(broadcast)
        return self._store.collection(name)

    def _standing(self, name: str, schema: CollectionSchema) -> Collection | None:
        """The collection `name` where it has, or had, this schema; None where there is none. Raises CollectionExists."""
        try:
            found = self.collection(name)
        except CollectionNotFound:
            return None
        if schema not in found.schemas:
            raise CollectionExists(f"a collection {name!r} exists already, with other fields: choose another name")
        return found

    def drop_collection(self, name: str) -> None:
        self._broadcast(self.collection(name), "drop_collection", {})

    def create_partition(self, name: str, partition: str) -> int:
        """Add a partition; its id. Raises AppendRejected (PARTITION_EXISTS)."""
        collection = self.collection(name)
        if partition in collection.partitions:
            raise AppendRejected(f"{name!r} has a partition {partition!r} already", reason=Reason.PARTITION_EXISTS)
        number = self._store.take_partition_id(collection.id)
        self._broadcast(collection, "create_partition", {"name": partition, "id": number})
        return number

    def drop_partition(self, name: str, partition: str) -> None:
        collection = self.collection(name)
        if partition not in collection.partitions:
            raise AppendRejected(f"{name!r} has no partition {partition!r}", reason=Reason.PARTITION_NOT_FOUND)
        self._broadcast(collection, "drop_partition", {"id": collection.partitions[partition]})

    def add_field(self, name: str, field: FieldSpec) -> int:
        """Add a nullable field; the new schema version."""
        collection = self.collection(name)
        changed = collection.schema.with_field(field)
        version = collection.schema_version + 1
        change = {"field": field.to_json(), "schema": changed.to_json(), "version": version}
        self._broadcast(collection, "schema_change", change)
        return version

    def flush(self, name: str) -> dict[str, int]:
        """Seal and flush what grows in the collection; by VChannel the tick of its ManualFlush, 0 where nothing grew."""
        return self._broadcast(self.collection(name), "manual_flush", {})

    # -- broadcasts ---------------------------------------------------------------------------------------------------

    def resume(self) -> int:
        """Complete the broadcasts that a coordinator left half done; how many there were."""
        pending = self._store.broadcasts()
        for broadcast in pending:
            self._complete(broadcast)
        return len(pending)

    def _broadcast(self, collection: Collection, kind: str, change: dict[str, Any]) -> dict[str, int]:
        for earlier in self._store.broadcasts():
            if earlier.collection_id == collection.id:
                self._complete(earlier)
        return self._complete(self._store.add_broadcast(collection, kind, change))

    def _complete(self, broadcast: Broadcast) -> dict[str, int]:
        collection = self._store.collection_by_id(broadcast.collection_id)
        for vchannel, pchannel in broadcast.waiting:
            message = _MESSAGES[broadcast.kind](collection, vchannel, self.term(pchannel), broadcast.change)
            try:
                tick = self._append_settled(broadcast.kind, pchannel, message)
            except AppendRejected:
                undoing = self._store.abandon(broadcast)
                if undoing is not None:
                    self._complete(undoing)
                raise
            self._store.acked(broadcast.id, vchannel, tick)
        return self._store.finish(broadcast)

    def _append_settled(self, kind: str, pchannel: str, message: MutableMessage) -> int:
        """Append one target's message; its tick, or 0 where the chain says that it took effect before."""
        try:
            return self._append.append_one(pchannel, encode_entry([message]))
        except AppendRejected as rejection:
            if rejection.reason in SETTLED[kind]:
                return 0
            if rejection.reason in (Reason.TERM_FENCED, Reason.TERM_NOT_OPENED):
                term = self.term(pchannel)
                if term != message.term:
                    return self._append_settled(kind, pchannel, message.with_(term=term))
            raise


def _create(collection: Collection, vchannel: str, term: int, change: dict[str, Any]) -> MutableMessage:
    return builders.create_collection(
        collection.name,
        collection.schemas[0],
        vchannel=vchannel,
        vchannels=collection.vchannels,
        collection_id=collection.id,
        partitions=collection.partitions,
        term=term,
    )


_MESSAGES: Final[dict[str, Callable[[Collection, str, int, dict[str, Any]], MutableMessage]]] = {
    "create_collection": _create,
    "drop_collection": lambda collection, vchannel, term, change: builders.drop_collection(
        vchannel=vchannel, collection_id=collection.id, term=term
    ),
    "create_partition": lambda collection, vchannel, term, change: builders.create_partition(
        change["name"], vchannel=vchannel, collection_id=collection.id, partition_id=change["id"], term=term
    ),
    "drop_partition": lambda collection, vchannel, term, change: builders.drop_partition(
        vchannel=vchannel, collection_id=collection.id, partition_id=change["id"], term=term
    ),
    "schema_change": lambda collection, vchannel, term, change: builders.schema_change(
        FieldSpec.from_json(change["field"]),
        vchannel=vchannel,
        collection_id=collection.id,
        schema_version=change["version"],
        term=term,
    ),
    "manual_flush": lambda collection, vchannel, term, change: builders.manual_flush(
        vchannel=vchannel, collection_id=collection.id, term=term
    ),
}
