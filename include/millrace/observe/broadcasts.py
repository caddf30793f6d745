"""Views of broadcasts, DDL and messages: their targets, which VChannels have them, their outcome.

Read from the coordinator's file.
"""

from __future__ import annotations

from collections import Counter
from typing import Final

from millrace.base.settings import Settings
from millrace.coord.broadcast.sqlite_ledger import NamedBroadcast
from millrace.coord.broadcast.task import OPEN_STATES, TaskState
from millrace.coord.catalog.store import CatalogStore
from millrace.message.ids import pchannel_of
from millrace.observe.models import BaseView, Int64String

MAX_BROADCASTS: Final = 200


class BroadcastRow(BaseView):
    """A broadcast."""

    id: int
    request: str
    """The caller's request id, or `#` and the broadcast's id if there is none."""
    kind: str
    collection: str
    """Its collection, or several, with commas in between."""
    principal: str
    """Principal that requested it. Empty if unknown."""
    state: TaskState
    at: float
    """Time at which it was stored, in Unix seconds. 0 if unknown."""
    words: str
    """Reason that it waits or was abandoned."""
    words_at: float
    """Time at which `words` was written, in Unix seconds; 0 if it was not."""
    keys: list[str]
    """The resources it locks, exclusively unless marked as shared."""
    targets: dict[str, Int64String | None]
    """Time tick of each VChannel's message: None while unknown, 0 if another message had the same effect."""

    @property
    def open(self) -> bool:
        return self.state in OPEN_STATES


def broadcast_rows(settings: Settings, *, limit: int, closed: bool = True) -> list[BroadcastRow]:
    """Return all open broadcasts and, with `closed`, the newest others up to `limit` in total. Newest first."""
    store = CatalogStore.open_read_only(settings.data_dir)
    if store is None:
        return []
    with store:
        found = store.broadcasts.list_recent(limit=limit, closed=closed)
    return [_row(each) for each in found]


def unresolved_broadcasts(settings: Settings) -> list[BroadcastRow]:
    """Return the broadcasts that are open, or abandoned with their reason still stored. Oldest first."""
    store = CatalogStore.open_read_only(settings.data_dir)
    if store is None:
        return []
    with store:
        found = store.broadcasts.list_unresolved()
    return [_row(each) for each in found]


def waiting_broadcasts(settings: Settings) -> Counter[str]:
    """Return by PChannel the number of open broadcasts that have not reached all its VChannels."""
    store = CatalogStore.open_read_only(settings.data_dir)
    if store is None:
        return Counter()
    with store:
        open_ = store.broadcasts.open_tasks()
    return Counter(pchannel for task in open_ for pchannel in {pchannel_of(target) for target in task.pending_targets})


def _row(found: NamedBroadcast) -> BroadcastRow:
    task = found.task
    return BroadcastRow(
        id=task.id,
        request=task.request,
        kind=task.kind,
        collection=found.collection or ", ".join(task.change.get("collections", ())),
        principal=task.principal,
        state=task.state,
        at=task.at,
        words=task.reason,
        words_at=task.reason_at_ms / 1000,
        keys=[f"{key.domain}:{key.name}{' (shared)' if key.shared else ''}" for key in task.keys],
        targets={name: None if tick is None else str(tick) for name, tick in task.targets.items()},
    )
