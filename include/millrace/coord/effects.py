"""What DDL does to the catalog: as its broadcast is kept, when all VChannels have it, and when it is given up."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from millrace.base.errors import EntryTooLarge
from millrace.catalog.collection import Collection
from millrace.coord.broadcast.callbacks import Kind, Kinds, Overtaken
from millrace.coord.broadcast.task import Draft, Task, keys_of
from millrace.coord.ddl import KINDS, DdlKind, message
from millrace.coord.store import Store
from millrace.message.schema import CollectionSchema
from millrace.message.wire.encode import encode_entry


def draft(kind: DdlKind, collection: Collection, change: dict[str, object], *, request: str = "") -> Draft:
    """DDL of `collection` as it was seen."""
    return Draft(kind, collection.id, change, collection.vchannels, keys_of(collection.id), request, seen=collection)


class Effects:
    """The callbacks of all kinds, on the catalog in `store`."""

    def __init__(self, store: Store, *, max_entry_bytes: int) -> None:
        self._store = store
        self._max_entry_bytes = max_entry_bytes

    def kinds(self) -> Kinds:
        return Kinds(dict.fromkeys(KINDS, Kind(self.check, self.acked, self.refused)))

    def check(self, task: Task, seen: Collection) -> None:
        """Raises Overtaken, CollectionExists, and where the messages cannot be made, or not be appended."""
        if task.kind == "create_collection":
            if not self._store.add(seen):
                raise Overtaken
        elif not self._store.unchanged(seen):
            raise Overtaken
        if task.kind == "drop_collection":
            self._store.change(replace(seen, state="dropping"))
        made = message(task, seen, max(seen.vchannels, key=len), term=1)  # they differ in the VChannel's name alone
        size = len(encode_entry([made]))
        if size > self._max_entry_bytes:
            raise EntryTooLarge(
                f"{task.kind} of {seen.name!r} takes {size:,} bytes, an entry {self._max_entry_bytes:,}"
            )

    def acked(self, task: Task) -> None:
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
        self._store.change(there)

    def refused(self, task: Task) -> Draft | None:
        """A collection that cannot be created is dropped where it was made; one that cannot be dropped is there as before."""
        there = self._store.collection_by_id(task.collection_id)
        if task.kind == "drop_collection":
            self._store.change(replace(there, state="active"))
        if task.kind != "create_collection":
            return None
        dropping = replace(there, state="dropping")
        self._store.change(dropping)
        return draft(DROP, dropping, {})


DROP: Final[DdlKind] = "drop_collection"
