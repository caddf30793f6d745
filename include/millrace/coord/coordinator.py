"""The streaming coordinator: PChannels and their terms, collections, and DDL as persisted, idempotent broadcasts.

A broadcast is kept in the store before its first append (id → append to all → acknowledged by all → catalog changed), and only
where its messages can be made and every VChannel can take them. A coordinator that dies anywhere in between leaves a broadcast
that :meth:`Coordinator.resume` completes, and two coordinators may complete one at the same time: its messages carry its id, by
which the chain knows a repeat (millrace.coord.ddl). A collection's broadcasts come one after the other. One that cannot be
completed is abandoned, with its reason kept: it is no wall for others.

The chain's state is the truth. Before DDL of a collection the catalog follows it (millrace.coord.follow).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from millrace.base.closing import Closing
from millrace.base.errors import (
    AppendRejected,
    CatalogDiverged,
    ChannelExists,
    CollectionExists,
    CollectionNotFound,
    DeadlineExceeded,
    EntryTooLarge,
    InvalidArgument,
    MillraceError,
)
from millrace.base.failpoint import hit
from millrace.base.settings import Settings
from millrace.catalog.collection import Collection, PChannel
from millrace.catalog.records import catalog_path
from millrace.coord.appending import Appending
from millrace.coord.ddl import check_name, message, standing
from millrace.coord.follow import Difference, Held, differences, followed, held
from millrace.coord.store import Broadcast, DdlKind, Store
from millrace.log.protocol import LogService
from millrace.message import builders
from millrace.message.model import MutableMessage
from millrace.message.schema import CollectionSchema
from millrace.message.schema_changes import Change, apply_all, to_json
from millrace.message.wire.encode import encode_entry
from millrace.wal.chain import CHAIN_VERSION
from millrace.wal.reasons import Reason

TERM_ATTEMPTS: Final = 5
TURNS: Final = 100
"""How often DDL that other DDL of its collection overtook is planned anew."""

_log = logging.getLogger(__name__)
_TERMS: Final = frozenset({Reason.TERM_FENCED, Reason.TERM_NOT_OPENED})

Plan = Callable[[Collection, Held], dict[str, Any]]
"""From a collection, and what the chain has of it, the change that a broadcast makes. Raises where there is none to make."""


class Coordinator(Closing):
    """Catalog and DDL of one deployment (millrace.catalog.port). Any process may hold one; the store lets them write in turn."""

    def __init__(
        self, settings: Settings, *, log: LogService, append: Appending, seam: Callable[[str], None] = hit
    ) -> None:
        """`seam` is called at the places that crash and interleaving tests stop at (see millrace.base.failpoint)."""
        self._settings = settings
        self._seam = seam
        self._store = Store(catalog_path(settings.data_dir))
        self._log = log
        self._append = append

    def close(self) -> None:
        self._store.close()

    # -- PChannels ----------------------------------------------------------------------------------------------------

    def ensure_pchannels(self, count: int) -> list[PChannel]:
        """Make sure that the deployment has at least `count` PChannels, each with an open term; completes broadcasts, and
        lets the catalog follow the chain."""
        for number in range(count):
            self.ensure_pchannel(f"dml_{number}")
        for pchannel in self._store.pchannels():
            self.ensure_pchannel(pchannel.name)
        self.resume()
        self.follow()
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

    def collection_of(self, vchannel: str) -> str | None:
        """The name of the collection that a VChannel belongs to, a dropped one's too; None where there is none."""
        number = vchannel.rpartition("_")[2].partition("v")[0]
        found = self._store.known(int(number)) if number.isascii() and number.isdigit() and len(number) < 19 else None
        return found.name if found is not None and vchannel in found.vchannels else None

    def collection(self, name: str) -> Collection:
        """Raises CollectionNotFound for one that is not there or not usable yet."""
        found = self._store.collection(name)
        return found if found.state == "active" else self._settled(name)

    def create_collection(
        self,
        name: str,
        schema: CollectionSchema,
        *,
        vchannels: int = 1,
        partitions: Sequence[str] = ("_default",),
        exist_ok: bool = False,
        restored: bool = False,
    ) -> Collection:
        schema = schema.declared()
        if all(each.name != name for each in self._store.collections()):  # one from before the rule may be asked for
            check_name(name, "a collection")
        elif there := self._standing(name, schema):
            if exist_ok:
                return there
            raise CollectionExists(f"a collection {name!r} exists already")
        for partition in partitions if not restored else ():
            check_name(partition, "a partition")
        if isinstance(partitions, str) or not partitions or len(set(partitions)) != len(partitions) or vchannels < 1:
            raise InvalidArgument(
                "a collection needs a list of partitions of different names, and at least one VChannel"
            )
        channels = [pchannel.name for pchannel in self._store.pchannels()]
        if not channels:
            channels = [pchannel.name for pchannel in self.ensure_pchannels(self._settings.pchannels)]
        self._check_room(name, channels, vchannels, len(partitions))
        self._seam("ddl.planned")
        try:
            broadcast = self._store.add_collection(
                name,
                schema,
                vchannels=vchannels,
                partitions=list(partitions),
                pchannels=channels,
                check=self._check,
            )
        except CollectionExists:
            if exist_ok and (there := self._standing(name, schema)):  # another was as quick
                return there
            raise
        self._complete(broadcast)
        return self._store.collection(name)

    def _standing(self, name: str, schema: CollectionSchema) -> Collection | None:
        """The collection `name` where it has, or had, this schema; None where there is none. Raises CollectionExists."""
        try:
            found = self.collection(name)
        except CollectionNotFound:
            return None
        if schema not in [each.declared() for each in found.schemas]:
            raise CollectionExists(f"a collection {name!r} exists already, with another schema: choose another name")
        return found

    def _check_room(self, name: str, channels: Sequence[str], vchannels: int, partitions: int) -> None:
        """Before anything of a new collection is kept: the chain would refuse it at the end, VChannels later."""
        for place, pchannel in enumerate(channels):
            wanted = vchannels // len(channels) + (place < vchannels % len(channels))
            room = self._append.definitions(pchannel, None) if wanted else None
            if room is not None and room.taken + wanted > room.max_vchannels:
                raise AppendRejected(
                    f"{name!r} wants {wanted:,} VChannels on {pchannel}, which has {room.taken:,} of {room.max_vchannels:,}"
                    " (max_vchannels of the chain's config): it takes no more VChannels; ask for fewer",
                    reason=Reason.LIMIT_EXCEEDED,
                )
            if room is not None and partitions > room.max_partitions:
                raise AppendRejected(
                    f"{name!r} wants {partitions:,} partitions; a collection has at most {room.max_partitions:,}"
                    " (max_partitions of the chain's config)",
                    reason=Reason.LIMIT_EXCEEDED,
                )

    def drop_collection(self, name: str) -> None:
        self._broadcast(name, "drop_collection", lambda collection, there: {})

    def create_partition(self, name: str, partition: str, *, restored: bool = False) -> int:
        """Add a partition; its id. Raises AppendRejected (PARTITION_EXISTS), and InvalidArgument for a name that nothing new
        may have; with `restored` it may be one from before that rule."""
        if not restored:
            check_name(partition, "a partition")

        def plan(collection: Collection, there: Held) -> dict[str, Any]:
            if partition in collection.partitions:
                raise AppendRejected(f"{name!r} has a partition {partition!r} already", reason=Reason.PARTITION_EXISTS)
            known = [each.partitions for each in there.values() if each is not None]
            ids = (number for each in known for number, held_name in each.items() if held_name == partition)
            return {"name": partition, "id": next(ids, None) or self._store.take_partition_id(collection.id)}

        change, _ = self._broadcast(name, "create_partition", plan)
        return int(change["id"])

    def drop_partition(self, name: str, partition: str) -> None:
        def plan(collection: Collection, there: Held) -> dict[str, Any]:
            if partition not in collection.partitions:
                raise AppendRejected(f"{name!r} has no partition {partition!r}", reason=Reason.PARTITION_NOT_FOUND)
            return {"id": collection.partitions[partition]}

        self._broadcast(name, "drop_partition", plan)

    def alter(self, name: str, changes: Sequence[Change]) -> int:
        """Change the schema; the new version. Raises InvalidArgument for a change that cannot be."""
        if not changes:
            raise InvalidArgument("give at least one change of the schema")

        def plan(collection: Collection, there: Held) -> dict[str, Any]:
            changed = apply_all(collection.schema, changes)
            said = [to_json(each) for each in changes]
            return {"changes": said, "schema": changed.to_json(), "version": collection.schema_version + 1}

        change, _ = self._broadcast(name, "schema_change", plan)
        return int(change["version"])

    def flush(self, name: str) -> dict[str, int]:
        """Seal and flush what grows in the collection; by VChannel the tick of its ManualFlush, 0 where nothing grew."""
        return self._broadcast(name, "manual_flush", lambda collection, there: {})[1]

    # -- broadcasts ---------------------------------------------------------------------------------------------------

    def resume(self) -> int:
        """Complete the broadcasts that a coordinator left half done; how many there were.

        One that cannot be completed now stays for the next call, and is no reason to leave the others.
        """
        pending = self._store.broadcasts()
        for broadcast in pending:
            try:
                self._complete(broadcast)
            except MillraceError as error:
                _log.warning("%s of collection %s: %s", broadcast.kind, broadcast.collection_id, error)
        return len(pending)

    def follow(self) -> None:
        """Let the catalog follow the chain where another client changed that; what it cannot follow is logged."""
        for collection in self._store.collections():
            try:
                there = followed(collection, held(collection, self._append.definitions))
                if there != collection and self._store.follow(collection, there):
                    _log.warning("the catalog's entry of %r follows the chain: %s", collection.name, there)
            except MillraceError as error:
                _log.warning("%r cannot be held against the chain: %s: %s", collection.name, error.code, error)

    def differences(self) -> list[Difference]:
        """What differs between catalog and chain now (millrace.coord.follow)."""
        return differences(self._store, [each.name for each in self._store.pchannels()], self._append.definitions)

    def _settled(self, name: str) -> Collection:
        """The collection once its earlier broadcasts are closed. Raises CollectionNotFound, and what keeps them from that."""
        number = self._store.collection(name).id
        for earlier in self._store.broadcasts():
            if earlier.collection_id == number:
                try:
                    self._complete(earlier)
                except MillraceError:
                    if not self._store.outcome(earlier)[0]:
                        raise
        return self._store.collection(name)

    def _broadcast(self, name: str, kind: DdlKind, plan: Plan) -> tuple[dict[str, Any], dict[str, int]]:
        """Plan a change of the collection as it is now, and broadcast it; the change, and the ticks by VChannel.

        Nothing is kept before the plan stands: its messages can be made, and every VChannel can take them (CatalogDiverged).
        """
        for _ in range(TURNS):
            collection = self._settled(name)
            there = held(collection, self._append.definitions)
            diverged: CatalogDiverged | None = None
            if kind != "drop_collection":
                try:
                    now = followed(collection, there)
                except CatalogDiverged as error:
                    now, diverged = collection, error
                if now != collection:
                    self._store.follow(collection, now)
                    continue
            change = plan(collection, there)
            strange = [
                f"{vchannel} of {name!r} {found.words}: see `millrace verify`"
                for vchannel, each in there.items()
                if (found := standing(kind, change, collection, each)).state == "differs"
            ]
            if strange and not self._store.settled(collection):
                continue  # other DDL was on its way to the VChannels
            if strange:
                raise diverged or CatalogDiverged(strange[0])
            self._seam("ddl.planned")
            broadcast = self._store.add_broadcast(collection, kind, change, self._check)
            if broadcast is not None:
                return change, self._complete(broadcast)
        raise DeadlineExceeded(f"other DDL of {name!r} kept coming: {kind} was planned {TURNS} times; call it again")

    def _check(self, broadcast: Broadcast, collection: Collection) -> None:
        """Raise where a broadcast's messages cannot be made, or not be appended: they differ in the VChannel's name alone."""
        made = message(broadcast, collection, max(collection.vchannels, key=len), term=1)
        size, most = len(encode_entry([made])), self._settings.max_entry_bytes
        if size > most:
            raise EntryTooLarge(f"{broadcast.kind} of {collection.name!r} takes {size:,} bytes, an entry {most:,}")

    def _complete(self, broadcast: Broadcast) -> dict[str, int]:
        """Append what waits; the ticks by VChannel. Raises AppendRejected or EntryTooLarge (abandoned), or what to wait for."""
        self._seam("ddl.kept")
        try:
            collection = self._store.collection_by_id(broadcast.collection_id)
            for vchannel, pchannel in broadcast.waiting:
                tick = self._send(broadcast, collection, vchannel, pchannel)
                self._seam("ddl.sent")
                self._store.acked(broadcast.id, vchannel, tick)
        except MillraceError as error:
            self._failed(broadcast, error)
        self._seam("ddl.acknowledged")
        ticks = self._store.finish(broadcast)
        given_up = self._store.outcome(broadcast)[1]
        if given_up:
            raise AppendRejected(f"another coordinator gave {broadcast.kind} up: {given_up}", reason=Reason.NO_EFFECT)
        return ticks

    def _failed(self, broadcast: Broadcast, error: MillraceError) -> None:
        """Abandon what was refused for good, note what has to wait, and raise; unless another coordinator completed it."""
        done, given_up = self._store.outcome(broadcast)
        if done and not given_up:
            return
        if isinstance(error, EntryTooLarge) or (isinstance(error, AppendRejected) and error.reason not in _TERMS):
            _log.warning("%s of collection %s is given up: %s", broadcast.kind, broadcast.collection_id, error)
            undoing = self._store.abandon(broadcast, f"{error.code}: {error}")
            if undoing is not None:
                self._complete(undoing)
        elif not done:
            self._store.note(broadcast, f"{error.code}: {error}")
        raise error

    def _send(self, broadcast: Broadcast, collection: Collection, vchannel: str, pchannel: str) -> int:
        """Append one target's message; its tick, or 0 where the VChannel has the effect by another. Raises AppendRejected."""
        try:
            made = message(broadcast, collection, vchannel, self.term(pchannel))
        except InvalidArgument as error:  # kept by a build that did not look first
            raise AppendRejected(str(error), reason=Reason.MALFORMED) from error
        if broadcast.kind == "drop_collection":
            there = self._append.definitions(pchannel, collection.id).vchannels.get(vchannel)
            if standing(broadcast.kind, broadcast.change, collection, there).state == "done":
                return 0  # dropped, or another client's collection under this id
        try:
            tick = self._append_in_term(pchannel, made)
        except AppendRejected as rejection:
            if rejection.reason in _TERMS:
                raise
            if broadcast.kind == "manual_flush" and rejection.reason == Reason.NO_EFFECT:
                return 0
            there = self._append.definitions(pchannel, collection.id).vchannels.get(vchannel)
            found = standing(broadcast.kind, broadcast.change, collection, there)
            if found.state == "done":
                return 0
            words = f"{rejection} ({vchannel} {found.words})" if found.words else str(rejection)
            raise AppendRejected(words, reason=rejection.reason) from rejection
        if broadcast.kind == "create_collection":
            self._take_back(broadcast, collection, vchannel, pchannel)
        return tick

    def _take_back(self, broadcast: Broadcast, collection: Collection, vchannel: str, pchannel: str) -> None:
        """Drop what was just created, where the collection was dropped while this coordinator slept.

        A CreateCollection alone carries no identity that the chain looks at: behind the drop it makes the collection again.
        """
        if self._store.collection_by_id(collection.id).state in ("dropping", "dropped"):
            drop = message(
                replace(broadcast, kind="drop_collection", change={}), collection, vchannel, self.term(pchannel)
            )
            try:
                self._append_in_term(pchannel, drop)
            except AppendRejected as rejection:
                if rejection.reason != Reason.COLLECTION_NOT_FOUND:
                    raise

    def _append_in_term(self, pchannel: str, made: MutableMessage) -> int:
        """Append one message; once more where a newer term was opened meanwhile."""
        try:
            return self._append.append_one(pchannel, encode_entry([made]))
        except AppendRejected as rejection:
            term = self.term(pchannel)
            if rejection.reason not in _TERMS or term == made.term:
                raise
        return self._append_in_term(pchannel, replace(made, term=term))
