"""A broadcast as it is kept: what it is, to whom it goes, who has it, what became of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from millrace.coord.broadcast.keys import COLLECTION, ResourceKey, normalize_keys


class TaskState(StrEnum):
    PENDING = "pending"
    """Kept; some targets may not have it yet."""
    ACKNOWLEDGED = "acknowledged"
    """All targets have it; its effect is not there yet."""
    DONE = "done"
    """All targets have it, and its effect is there. Kept for a while, so that a repeated request finds it."""
    ABANDONED = "abandoned"
    """Refused for good: closed without its effect, with the reason."""


OPEN_STATES = frozenset({TaskState.PENDING, TaskState.ACKNOWLEDGED})


def collection_keys(collection_id: int) -> tuple[ResourceKey, ...]:
    """What DDL of one collection works on."""
    return normalize_keys([ResourceKey(COLLECTION, str(collection_id))])


@dataclass(frozen=True, slots=True)
class BroadcastDraft:
    """A broadcast that is planned, and not kept yet."""

    kind: str
    collection_id: int
    change: dict[str, Any]
    """What its end does to the catalog: what JSON takes."""
    targets: tuple[str, ...]
    """VChannels."""
    keys: tuple[ResourceKey, ...]
    request: str = ""
    """The caller's name for it: the same request is one broadcast, however often it is made. "": nobody repeats it."""
    snapshot: Any = field(default=None, compare=False)
    """What it was planned from, for its kind's check. It is not kept."""


@dataclass(frozen=True, slots=True)
class BroadcastTask:
    id: int
    request: str
    kind: str
    collection_id: int
    change: dict[str, Any]
    keys: tuple[ResourceKey, ...]
    targets: dict[str, int | None]
    """By VChannel the time tick of its message (0: it has the effect by another), None while it is not known to be there."""
    state: TaskState = TaskState.PENDING
    at: float = 0.0
    """When it was kept, in Unix seconds; 0.0 where that is known no more."""
    reason: str = ""
    """Why it waits, or was given up."""
    reason_at_ms: int = 0
    """When that was written."""

    @property
    def pending_targets(self) -> list[str]:
        return [target for target, tick in self.targets.items() if tick is None]

    @property
    def open(self) -> bool:
        return self.state in OPEN_STATES

    @property
    def ticks(self) -> dict[str, int]:
        """By VChannel, of those that have it."""
        return {target: tick for target, tick in self.targets.items() if tick is not None}
