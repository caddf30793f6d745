"""Effects of DDL on the catalog: when its broadcast is stored, when all VChannels have it, and when it is abandoned."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Final

from millrace.base.errors import EntryTooLarge
from millrace.catalog.collection import CollectionInfo
from millrace.coord.broadcast.ledger import BroadcastCallbacks, CallbackRegistry, StalePlan
from millrace.coord.broadcast.task import BroadcastDraft, BroadcastTask, collection_keys
from millrace.coord.catalog.store import CatalogStore
from millrace.coord.ddl.kinds import DDL_KINDS, DdlKind, build_message
from millrace.message.schema import CollectionSchema
from millrace.message.wire.encode import encode_entry


def ddl_draft(
    kind: DdlKind, collection: CollectionInfo, change: dict[str, object], *, request: str = "", principal: str = ""
) -> BroadcastDraft:
    """Return the draft of a DDL broadcast, planned from `collection` as it was read."""
    return BroadcastDraft(
        kind,
        collection.id,
        change,
        collection.vchannels,
        collection_keys(collection.id),
        request,
        snapshot=collection,
        principal=principal,
    )


class DdlCallbacks:
    """Broadcast callbacks of all DDL kinds, on the catalog in `store`."""

    def __init__(
        self, store: CatalogStore, *, max_entry_bytes: int, on_named: Callable[[CollectionInfo], None] | None = None
    ) -> None:
        """`on_named` gets each collection that became active or dropped, just before the catalog says so. It may be
        called again.
        """
        self._store = store
        self._max_entry_bytes = max_entry_bytes
        self._on_named = on_named

    def registry(self, others: Callable[[str], BroadcastCallbacks | None] = lambda kind: None) -> CallbackRegistry:
        """Return the callbacks by kind; `others` finds those of a kind that is not DDL."""
        return CallbackRegistry(
            dict.fromkeys(DDL_KINDS, BroadcastCallbacks(self.check, self.on_acknowledged, self.on_abandoned)), others
        )

    def check(self, task: BroadcastTask, seen: CollectionInfo) -> None:
        """Validate the plan and reserve what it needs.

        Raises StalePlan, CollectionExists, CollectionHasAliases, and an error if the messages cannot be built or are
        too large.
        """
        if task.kind == "create_collection":
            if not self._store.add(seen):
                raise StalePlan
        elif not self._store.is_unchanged(seen):
            raise StalePlan
        if task.kind == "drop_collection":
            self._store.require_no_alias(seen)
            self._store.update_collection(replace(seen, state="dropping"))
        made = build_message(
            task, seen, max(seen.vchannels, key=len), term=1
        )  # they differ in the VChannel's name alone
        size = len(encode_entry([made]))
        if size > self._max_entry_bytes:
            raise EntryTooLarge(
                f"{task.kind} of {seen.name!r} takes {size:,} bytes, an entry {self._max_entry_bytes:,}"
            )

    def on_acknowledged(self, task: BroadcastTask) -> None:
        there, change = self._store.collection_by_id(task.collection_id), task.change
        match task.kind:
            case "create_collection":
                there = replace(there, state="active")
            case "drop_collection":
                there = replace(there, state="dropped")
            case "create_partition":
                there = replace(there, partitions={**there.partitions, change["name"]: change["id"]})
            case "drop_partition":
                left = {name: number for name, number in there.partitions.items() if number != change["id"]}
                there = replace(there, partitions=left)
            case "schema_change":
                schema = CollectionSchema.from_json(change["schema"])
                there = replace(there, schemas=(*there.schemas, schema))
            case _:
                return
        if self._on_named is not None and task.kind in ("create_collection", DROP):
            self._on_named(there)
        self._store.update_collection(there)

    def on_abandoned(self, task: BroadcastTask) -> BroadcastDraft | None:
        """Undo what storing the broadcast did.

        A collection that cannot be created is dropped on the VChannels that have it. One that cannot be dropped
        becomes active again.
        """
        there = self._store.collection_by_id(task.collection_id)
        if task.kind == "drop_collection":
            self._store.update_collection(replace(there, state="active"))
        if task.kind != "create_collection":
            return None
        dropping = replace(there, state="dropping")
        self._store.update_collection(dropping)
        return ddl_draft(DROP, dropping, {}, principal=task.principal)


DROP: Final[DdlKind] = "drop_collection"
