"""Broadcasts as they are seen: what goes to which VChannels, who has it, what became of it. From the coordinator's file."""

from __future__ import annotations

from collections import Counter
from typing import Final

from millrace.base.settings import Settings
from millrace.catalog.collection import pchannel_of
from millrace.coord.broadcast.task import TaskState
from millrace.coord.catalog_store import CatalogStore
from millrace.observe.models import BaseView, Int64String

MAX_BROADCASTS: Final = 200


class BroadcastRow(BaseView):
    """A broadcast."""

    id: int
    request: str
    """Its caller's name for it; `#` and its id where it has none."""
    kind: str
    collection: str
    state: TaskState
    at: float
    """When it was kept, in Unix seconds; 0 where that is known no more."""
    words: str
    """Why it waits, or was given up."""
    keys: list[str]
    """What it works on: what is not shared it has for itself."""
    targets: dict[str, Int64String | None]
    """By VChannel the time tick of its message (0: it has the effect by another), None while it is not known to be there."""


def broadcast_rows(settings: Settings, *, limit: int, closed: bool = True) -> list[BroadcastRow]:
    """Those that are open, all of them, and with `closed` the newest others up to `limit` in all; newest first."""
    store = CatalogStore.open_read_only(settings.data_dir)
    if store is None:
        return []
    with store:
        found = store.broadcasts.list_recent(limit=limit, closed=closed)
    return [
        BroadcastRow(
            id=task.id,
            request=task.request,
            kind=task.kind,
            collection=collection,
            state=task.state,
            at=task.at,
            words=task.reason,
            keys=[f"{key.domain}:{key.name}{' (shared)' if key.shared else ''}" for key in task.keys],
            targets={name: None if tick is None else str(tick) for name, tick in task.targets.items()},
        )
        for collection, task in ((each.collection, each.task) for each in found)
    ]


def waiting_broadcasts(settings: Settings) -> Counter[str]:
    """By PChannel how many open broadcasts are not at all its VChannels yet."""
    store = CatalogStore.open_read_only(settings.data_dir)
    if store is None:
        return Counter()
    with store:
        open_ = store.broadcasts.open_tasks()
    return Counter(pchannel for task in open_ for pchannel in {pchannel_of(target) for target in task.pending_targets})
