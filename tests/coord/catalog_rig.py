"""A catalog's file with collections whose broadcasts are where a test wants them, without a log."""

from __future__ import annotations

from millrace.base.settings import Settings
from millrace.catalog.collection import CollectionInfo
from millrace.coord.broadcast.task import BroadcastTask
from millrace.coord.catalog.store import CatalogStore
from millrace.coord.ddl.callbacks import DdlCallbacks, ddl_draft
from millrace.message.schema import CollectionSchema


def effects_on(store: CatalogStore) -> DdlCallbacks:
    return DdlCallbacks(store, max_entry_bytes=Settings().max_entry_bytes)


def add_collection(store: CatalogStore, name: str, schema: CollectionSchema, *, vchannels: int = 1) -> BroadcastTask:
    """A collection that is being created: on dml_0, with the partition `p`."""
    number = store.next_collection_id()
    names = tuple(f"dml_0_{number}v{place}" for place in range(vchannels))
    drafted = ddl_draft(
        "create_collection", CollectionInfo(number, name, "creating", names, (schema,), {"p": 1}, 2), {}
    )
    kept = store.broadcasts.add(drafted, effects_on(store).check)
    assert isinstance(kept, BroadcastTask)
    return kept


def finish(store: CatalogStore, task: BroadcastTask) -> None:
    """All VChannels have it."""
    store.broadcasts.acknowledge(task.id, dict.fromkeys(task.targets, 1))
    store.broadcasts.finish(task.id, effects_on(store).on_acknowledged)
