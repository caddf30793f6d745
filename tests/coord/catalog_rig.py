"""A catalog's file with collections whose broadcasts are where a test wants them, without a log."""

from __future__ import annotations

from millrace.base.settings import Settings
from millrace.catalog.collection import Collection
from millrace.coord.broadcast.task import Task
from millrace.coord.effects import Effects, draft
from millrace.coord.store import Store
from millrace.message.schema import CollectionSchema


def effects_on(store: Store) -> Effects:
    return Effects(store, max_entry_bytes=Settings().max_entry_bytes)


def add_collection(store: Store, name: str, schema: CollectionSchema, *, vchannels: int = 1) -> Task:
    """A collection that is being created: on dml_0, with the partition `p`."""
    number = store.next_collection()
    names = tuple(f"dml_0_{number}v{place}" for place in range(vchannels))
    drafted = draft("create_collection", Collection(number, name, "creating", names, (schema,), {"p": 1}, 2), {})
    kept = store.broadcasts.keep(drafted, effects_on(store).check)
    assert isinstance(kept, Task)
    return kept


def finish(store: Store, task: Task) -> None:
    """All VChannels have it."""
    store.broadcasts.acknowledge(task.id, dict.fromkeys(task.targets, 1))
    store.broadcasts.finish(task.id, effects_on(store).acked)
