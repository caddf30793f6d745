"""The streaming coordinator: terms of PChannels, collections, and DDL as persisted, idempotent broadcasts.

This module plans DDL from the catalog and from the chain's state of the collection. The broadcaster
(millrace.coord.broadcast.broadcaster) does the rest, with the messages of millrace.coord.ddl.kinds and the effects of
millrace.coord.ddl.callbacks. A broadcast is stored only if its messages can be built and every VChannel can take
them. If a coordinator crashes after that, :meth:`Coordinator.resume` completes the broadcast. A broadcast that cannot
be completed is abandoned with its reason, so that it does not block others.

The chain's state is the truth. Before DDL of a collection, the catalog is synchronised with it
(millrace.coord.catalog.sync).
"""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import import_module
from typing import Any, Final, Self

from millrace.base.closeable import Closeable
from millrace.base.errors import (
    AppendRejected,
    CatalogDiverged,
    ChannelExists,
    CollectionExists,
    CollectionNotFound,
    InvalidArgument,
    InvalidSettings,
    MillraceError,
)
from millrace.base.settings import Settings
from millrace.catalog.broadcast import (
    MESSAGE_KIND,
    BroadcastResult,
    check_data,
    check_messages,
    content_digest,
    message_to_json,
)
from millrace.catalog.collection import (
    DEFAULT_PARTITION,
    CollectionInfo,
    CollectionPage,
    CollectionQuery,
    PChannel,
    check_name,
)
from millrace.catalog.sqlite_file import catalog_path
from millrace.client.produce.producer_recovery import AppliedLookup
from millrace.coord.append_port import AppendPort
from millrace.coord.broadcast.broadcaster import MAX_TARGETS, Broadcaster
from millrace.coord.broadcast.kinds import KindCalls, find_kind
from millrace.coord.broadcast.ledger import BroadcastCallbacks, StalePlan
from millrace.coord.broadcast.messages import (
    DIGEST,
    MessageDispatcher,
    judge_messages,
    message_callbacks,
    message_draft,
    message_keys,
    without_wal,
)
from millrace.coord.broadcast.task import BroadcastDraft, BroadcastTask, collection_keys
from millrace.coord.catalog.database import SharedStore
from millrace.coord.catalog.store import CatalogStore
from millrace.coord.catalog.sync import (
    ChainDefinitions,
    Difference,
    chain_definitions,
    changed_collections,
    differences,
    reconcile,
)
from millrace.coord.cluster_file import is_cluster
from millrace.coord.concurrency import RunAll, run_sequentially
from millrace.coord.ddl.callbacks import DdlCallbacks, ddl_draft
from millrace.coord.ddl.dispatcher import DdlDispatcher
from millrace.coord.ddl.kinds import DdlKind, effect_status
from millrace.coord.ddl.placement import place_collection
from millrace.log.protocol import LogService
from millrace.message import builders
from millrace.message.ids import collection_id_of
from millrace.message.model import MutableMessage
from millrace.message.schema import CollectionSchema
from millrace.message.schema_changes import SchemaChange, apply_changes, change_to_json
from millrace.message.wire.encode import encode_entry
from millrace.tables.collections.layout import link_name, link_names, unlink_name
from millrace.wal.chain import CHAIN_VERSION
from millrace.wal.reasons import Reason

TERM_ATTEMPTS: Final = 5

_log = logging.getLogger(__name__)

Plan = Callable[[CollectionInfo, ChainDefinitions], dict[str, Any]]
"""Returns the change of a broadcast, from a collection and the chain's definitions of it. Raises if there is nothing to
change.
"""


def _chain_version(settings: Settings) -> int:
    """Return the chain version of new terms. Raises UnsupportedVersion, MetaUnavailable."""
    if not is_cluster(settings):
        return CHAIN_VERSION
    # By name: a single node starts without the meta store and its libraries.
    found: int = import_module("millrace.coord.cluster_level").chain_version_of(settings)
    return found


class Coordinator(Closeable):
    """Catalog and DDL of one deployment (millrace.catalog.port).

    Several processes may each have one; the catalog store serialises their writes.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        log: LogService,
        append: AppendPort,
        shared: SharedStore | None = None,
        run_all: RunAll = run_sequentially,
        applied: AppliedLookup = without_wal,
    ) -> None:
        """`shared`: the shared catalog that the local file is a copy of, in a cluster; closed with the coordinator.
        `run_all` sends the messages of a broadcast concurrently. `applied` finds messages of a broadcast in the WAL.
        """
        self._principal = ""
        self._settings = settings
        self._store = CatalogStore(catalog_path(settings.data_dir), shared=shared)
        if shared is None:
            try:
                self._store.require_not_shared()
            except InvalidSettings:
                self._store.close()
                raise
        self._log = log
        self._append = append
        effects = DdlCallbacks(self._store, max_entry_bytes=settings.max_entry_bytes, on_named=self._link_by_name)
        sending = MessageDispatcher(self._store, append, DdlDispatcher(self._store, append), applied)
        self._kind_calls = KindCalls()
        kinds = effects.registry(self._message_callbacks)
        self._broadcaster = Broadcaster(self._store.broadcasts, sending, kinds, run_all=run_all)

    def close(self) -> None:
        self._store.close()

    def acting_for(self, principal: str) -> Self:
        """Return this coordinator, which stamps what it appends with the name of `principal`. Do not close it."""
        found = copy.copy(self)
        found._principal = principal
        return found

    # -- PChannels ----------------------------------------------------------------------------------------------------

    def ensure_pchannels(self, count: int) -> list[PChannel]:
        """Ensure that the deployment has at least `count` PChannels, each with an open term.

        Also completes broadcasts and synchronises the catalog with the chain.
        """
        names = [f"dml_{number}" for number in range(count)]
        for name in dict.fromkeys([*names, *(each.name for each in self._store.pchannels())]):
            self.ensure_pchannel(name)
        self.resume()
        self.sync_catalog()
        self._link_all_names()
        return self._store.pchannels()

    def ensure_pchannel(self, name: str) -> PChannel:
        """Return the PChannel `name`; create its log and open its first term if needed."""
        known = self._store.pchannel(name)
        if known is None or not known.opened:
            if name not in self._log.names():
                try:
                    self._log.create(name)
                except ChannelExists:
                    pass  # another process created it at the same time
            self.open_term(name)
            known = self._store.pchannel(name)
        assert known is not None
        return known

    def open_term(self, name: str, *, config: Mapping[str, int] | None = None, request: str = "") -> int:
        """Open the next term of a PChannel and return it. The chain rejects messages of older terms from then on.

        A repeated `request` returns the term that it opened before. If that attempt crashed, another term is opened.
        """
        if request and (answered := self._store.find_answer(request, name)) is not None:
            return answered
        for _ in range(TERM_ATTEMPTS):
            term = self._store.next_term(name)
            version = _chain_version(self._settings)
            opening = builders.term_opening(term=term, chain_version=version, config=dict(config or {}))
            try:
                self._append.append_one(name, encode_entry([opening]), principal=self._principal)
            except AppendRejected as rejection:
                if rejection.reason != Reason.TERM_FENCED:
                    raise
                continue  # the log has a later term than the catalog: try the next one
            self._store.mark_term_opened(name, term, request=request)
            return term
        raise AppendRejected(
            f"the log of {name} has a later term than the coordinator's catalog: restore the newest copy of the"
            " catalog",
            reason=Reason.TERM_FENCED,
        )

    def pchannels(self) -> list[PChannel]:
        return self._store.pchannels()

    def term(self, pchannel: str) -> int:
        """Return the newest term of `pchannel`, which its producers stamp on messages."""
        return self._store.term(pchannel)

    def next_epoch(self, producer_id: int, *, held: int | None = None, request: str = "") -> int:
        """Return a new epoch of the producer `producer_id`, which fences every earlier producer of that id.

        `held`: the caller's own epoch. Raises ProducerFenced if a newer epoch has fenced it.
        """
        return self._store.next_epoch(producer_id, held=held, request=request)

    # -- collections --------------------------------------------------------------------------------------------------

    def collections(self, *, dropped: bool = False) -> list[CollectionInfo]:
        return self._store.collections(dropped=dropped)

    def collection_page(self, query: CollectionQuery) -> CollectionPage:
        return self._store.page(query)

    def collections_by_id(self, ids: Iterable[int]) -> dict[int, CollectionInfo]:
        return self._store.collections_by_id(ids)

    def collection_of(self, vchannel: str) -> str | None:
        """Return the name of a VChannel's collection, even a dropped one; None if there is none."""
        number = collection_id_of(vchannel)
        found = None if number is None else self._store.find_collection(number)
        return found.name if found is not None and vchannel in found.vchannels else None

    def collection(self, name: str) -> CollectionInfo:
        """Return a collection, by name or alias, that is ready for use.

        Raises CollectionNotFound if it does not exist, or is not usable yet.
        """
        found = self._store.collection(name)
        return found if found.state == "active" else self._settled(name)

    def create_collection(
        self,
        name: str,
        schema: CollectionSchema,
        *,
        vchannels: int = 1,
        partitions: Sequence[str] = (DEFAULT_PARTITION,),
        exist_ok: bool = False,
        restored: bool = False,
        request: str = "",
    ) -> CollectionInfo:
        if (known := self._stored_request(request, "create_collection", name)) is not None:
            return self._store.collection_by_id(self._broadcaster.complete(known).collection_id)
        schema = schema.as_declared()
        if not self._is_known(name):  # an older collection may have a name that is invalid now
            check_name(name, "a collection")
        elif there := self._standing(name, schema):
            if exist_ok:
                return there
            raise CollectionExists(f"collection {name!r} exists already")
        for partition in partitions if not restored else ():
            check_name(partition, "a partition")
        if isinstance(partitions, str) or not partitions or len(set(partitions)) != len(partitions):
            raise InvalidArgument("a collection needs a list of partitions with different names")
        if not 1 <= vchannels <= MAX_TARGETS:
            raise InvalidArgument(f"a collection has 1 to {MAX_TARGETS:,} VChannels, not {vchannels:,}")
        if not self._store.vchannel_counts():
            self.ensure_pchannels(self._settings.pchannels)

        def plan() -> BroadcastDraft:
            # The id first, then the counts: the broadcast is stored only if no other collection took this id, so no
            # collection can be placed between this look at the counts and the transaction that stores the broadcast.
            number = self._store.next_collection_id()
            placed = place_collection(
                name,
                vchannels,
                len(partitions),
                self._store.vchannel_counts(),
                lambda pchannel: self._append.definitions(pchannel, number),
            )
            ids = {partition: place for place, partition in enumerate(partitions, start=1)}
            names = tuple(f"{pchannel}_{number}v{place}" for place, pchannel in enumerate(placed))
            new = CollectionInfo(number, name, "creating", names, (schema,), ids, len(ids) + 1)
            return ddl_draft("create_collection", new, {}, request=request, principal=self._principal)

        try:
            self._broadcaster.submit(plan, request=request)
        except CollectionExists:
            if exist_ok and (there := self._standing(name, schema)):  # another process created it at the same time
                return there
            raise
        return self._store.collection(name)

    def _is_known(self, name: object) -> bool:
        if not isinstance(name, str) or any("\ud800" <= each <= "\udfff" for each in name):
            return False  # no name that a file can hold
        return self._store.has_collection(name)

    def _standing(self, name: str, schema: CollectionSchema) -> CollectionInfo | None:
        """Return the collection `name` if it has, or once had, this schema; None if it does not exist.

        Raises CollectionExists if its schemas differ.
        """
        try:
            found = self.collection(name)
        except CollectionNotFound:
            return None
        if schema not in [each.as_declared() for each in found.schemas]:
            raise CollectionExists(f"collection {name!r} exists already with another schema: choose another name")
        return found

    def drop_collection(self, name: str, *, request: str = "") -> None:
        if not self._is_known(name) and self._store.find_alias(name) is not None:
            raise InvalidArgument(
                f"{name!r} is an alias: drop the collection {self.collection_name(name)!r} by its name, or the alias"
            )
        self._broadcast(name, "drop_collection", lambda collection, there: {}, request)

    def create_partition(self, name: str, partition: str, *, restored: bool = False, request: str = "") -> int:
        """Add a partition and return its id.

        `restored` allows a name that older builds accepted.
        Raises AppendRejected (PARTITION_EXISTS), InvalidArgument for an invalid name.
        """
        if not restored:
            check_name(partition, "a partition")

        def plan(collection: CollectionInfo, there: ChainDefinitions) -> dict[str, Any]:
            if partition in collection.partitions:
                raise AppendRejected(f"{name!r} already has a partition {partition!r}", reason=Reason.PARTITION_EXISTS)
            known = [each.partitions for each in there.values() if each is not None]
            ids = (number for each in known for number, held_name in each.items() if held_name == partition)
            return {"name": partition, "id": next(ids, None) or self._store.allocate_partition_id(collection.id)}

        return int(self._broadcast(name, "create_partition", plan, request).change["id"])

    def drop_partition(self, name: str, partition: str, *, request: str = "") -> None:
        def plan(collection: CollectionInfo, there: ChainDefinitions) -> dict[str, Any]:
            if partition not in collection.partitions:
                raise AppendRejected(f"{name!r} has no partition {partition!r}", reason=Reason.PARTITION_NOT_FOUND)
            return {"id": collection.partitions[partition]}

        self._broadcast(name, "drop_partition", plan, request)

    def alter(self, name: str, changes: Sequence[SchemaChange], *, request: str = "") -> int:
        """Change the schema and return the new version.

        Raises InvalidArgument for an impossible change.
        """
        if not changes:
            raise InvalidArgument("pass at least one schema change")

        def plan(collection: CollectionInfo, there: ChainDefinitions) -> dict[str, Any]:
            changed = apply_changes(collection.schema, changes)
            said = [change_to_json(each) for each in changes]
            return {"changes": said, "schema": changed.to_json(), "version": collection.schema_version + 1}

        return int(self._broadcast(name, "schema_change", plan, request).change["version"])

    def flush(self, name: str, *, request: str = "") -> dict[str, int]:
        """Seal and flush growing segments; return the tick of each VChannel's ManualFlush, 0 if it had no growing
        segment.
        """
        return self._broadcast(name, "manual_flush", lambda collection, there: {}, request).ticks

    # -- aliases ------------------------------------------------------------------------------------------------------

    def collection_name(self, name: str, *, request: str = "") -> str:
        """Return the name of the collection with the name or alias `name`; `name` itself if there is none.

        For a `request` that is stored already, it is the collection that the request changed, wherever the alias
        points by now.
        """
        if self._is_known(name):
            return name
        if request and (task := self._store.broadcasts.find_request(request)) is not None:
            found = self._store.find_collection(task.collection_id)
            return name if found is None else found.name
        try:
            return self._store.collection(name).name
        except CollectionNotFound:
            return name

    def aliases(self, collection: str | None = None) -> dict[str, str]:
        """Return the names of collections by alias, or the aliases of one collection.

        Raises CollectionNotFound.
        """
        number = None if collection is None else self.collection(collection).id
        found = self._store.aliases(number)
        names = self._store.collections_by_id(found.values())
        return {alias: names[each].name for alias, each in found.items() if each in names}

    def create_alias(self, alias: str, collection: str, *, request: str = "") -> None:
        """See :class:`millrace.catalog.protocol.DdlOperations`."""
        check_name(alias, "an alias")
        self._store.set_alias(alias, self.collection(collection).id, new=True, request=request)

    def alter_alias(self, alias: str, collection: str, *, request: str = "") -> None:
        self._store.set_alias(alias, self.collection(collection).id, new=False, request=request)

    def drop_alias(self, alias: str, *, request: str = "") -> None:
        self._store.drop_alias(alias, request=request)

    # -- broadcasts ---------------------------------------------------------------------------------------------------

    def broadcast(
        self,
        messages: Sequence[MutableMessage],
        *,
        kind: str = MESSAGE_KIND,
        data: Mapping[str, Any] | None = None,
        request: str = "",
    ) -> BroadcastResult:
        """See :class:`millrace.catalog.protocol.DdlOperations`."""
        find_kind(kind)
        check_messages(messages)
        given = check_data(data)
        digest = content_digest([message_to_json(each) for each in messages], given)
        known = self._store.broadcasts.find_request(request) if request else None
        if known is not None and (known.kind, known.change.get(DIGEST)) != (kind, digest):
            raise InvalidArgument(f"request {request!r} was used for another change: name each request uniquely")

        def plan() -> BroadcastDraft:
            found = {number: self._targeted(number, messages) for number in {each.collection_id for each in messages}}
            # DDL and other broadcasts that are open on the same resources first: they decide what the chain accepts.
            self._broadcaster.complete_conflicting(message_keys(messages))
            barriers = judge_messages(self._append, self._store, messages)
            return message_draft(kind, messages, found, given, barriers, request=request, principal=self._principal)

        done = self._broadcaster.submit(plan, request=request)
        return BroadcastResult(done.id, done.ticks)

    def _targeted(self, number: int, messages: Sequence[MutableMessage]) -> CollectionInfo:
        """Return a collection of the messages. Raises CollectionNotFound, InvalidArgument."""
        found = self._store.find_collection(number)
        if found is None or found.state != "active":
            found = None if found is None or found.state == "dropped" else self._settled(found.name)
        if found is None:
            raise CollectionNotFound(f"there is no collection {number}: it may have been dropped")
        for each in messages:
            if each.collection_id == number and each.vchannel not in found.vchannels:
                raise InvalidArgument(f"{each.vchannel!r} is not a VChannel of collection {found.name!r}")
        return found

    def _message_callbacks(self, kind: str) -> BroadcastCallbacks | None:
        try:
            return message_callbacks(self._store, find_kind(kind), self._kind_calls)
        except InvalidArgument:
            return None  # of a newer build, or of a package that is not installed here

    def open_broadcasts(self) -> list[BroadcastTask]:
        """Return the broadcasts that are not complete, DDL as well; oldest first."""
        return self._store.broadcasts.open_tasks()

    def resume(self, *, min_age: float = 0.0) -> int:
        """Complete open broadcasts that were stored at least `min_age` seconds ago; return how many there were.

        A broadcast that cannot be completed now is left for the next call and does not stop the others.
        """
        now = time.time()
        return self._broadcaster.resume(skip=lambda task: 0 <= now - task.at < min_age)

    def sync_catalog(self) -> None:
        """Update the catalog from the chain where another client changed it. Conflicts are logged."""
        changed = changed_collections(self._store, self._append.definitions)
        for collection in self._store.collections_by_id(changed).values():
            try:
                there = reconcile(collection, chain_definitions(collection, self._append.definitions))
                if there != collection and self._store.update_if_settled(collection, there):
                    self._link_by_name(there)
                    _log.warning("updated the catalog's entry of %r from the chain: %s", collection.name, there)
            except MillraceError as error:
                _log.warning("cannot compare %r with the chain: %s: %s", collection.name, error.code, error)

    def differences(self) -> list[Difference]:
        """Return the current differences between catalog and chain (millrace.coord.catalog.sync)."""
        return differences(self._store, [each.name for each in self._store.pchannels()], self._append.definitions)

    def _link_by_name(self, collection: CollectionInfo) -> None:
        """Keep the link to a collection's tables by its name. Nothing but people relies on it."""
        try:
            link = unlink_name if collection.state == "dropped" else link_name
            link(self._settings, collection.name, collection.id)
        except (OSError, MillraceError) as error:
            _log.warning("cannot keep the link to the tables of %r: %s", collection.name, error)

    def _link_all_names(self) -> None:
        def named() -> list[tuple[str, int]]:
            return [(each.name, each.id) for each in self._store.collections() if each.state == "active"]

        try:
            link_names(self._settings, named)
        except (OSError, MillraceError) as error:
            _log.warning("cannot make the links to the tables of collections: %s", error)

    def _settled(self, name: str) -> CollectionInfo:
        """Return the collection after its earlier broadcasts are closed.

        Raises CollectionNotFound, and the error that keeps a broadcast open.
        """
        self._broadcaster.complete_conflicting(collection_keys(self._store.collection(name).id))
        return self._store.collection(name)

    def _broadcast(self, name: str, kind: DdlKind, plan: Plan, request: str) -> BroadcastTask:
        """Plan a change from the collection's current state and broadcast it.

        Nothing is stored unless the messages can be built and every VChannel can take them (else CatalogDiverged).
        """
        name = self.collection_name(name, request=request)
        self._stored_request(request, kind, name)
        return self._broadcaster.submit(lambda: self._plan(name, kind, plan, request), request=request)

    def _stored_request(self, request: str, kind: DdlKind, name: str) -> BroadcastTask | None:
        """Return the broadcast that is stored under a request's name.

        Raises InvalidArgument if the request was for another change.
        """
        task = self._store.broadcasts.find_request(request) if request else None
        if task is None:
            return None
        found = self._store.find_collection(task.collection_id)
        if task.kind == kind and found is not None and found.name == name:
            return task
        raise InvalidArgument(
            f"request {request!r} was used for another change than {kind} of {name!r}: name each request uniquely"
        )

    def _plan(self, name: str, kind: DdlKind, plan: Plan, request: str) -> BroadcastDraft:
        """Return a draft. Raises StalePlan if other DDL was in progress while the VChannels were read."""
        collection = self._settled(name)
        there = chain_definitions(collection, self._append.definitions)
        diverged: CatalogDiverged | None = None
        if kind != "drop_collection":
            try:
                now = reconcile(collection, there)
            except CatalogDiverged as error:
                now, diverged = collection, error
            if now != collection:
                self._store.update_if_settled(collection, now)
                raise StalePlan
        change = plan(collection, there)
        strange = [
            f"{vchannel} of {name!r} {found.detail}: see `millrace verify`"
            for vchannel, each in there.items()
            if (found := effect_status(kind, change, collection, each)).state == "differs"
        ]
        if strange and not self._store.is_settled(collection):
            raise StalePlan
        if strange:
            raise diverged or CatalogDiverged(strange[0])
        return ddl_draft(kind, collection, change, request=request, principal=self._principal)
