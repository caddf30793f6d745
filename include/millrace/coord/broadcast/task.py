"""The persisted broadcast: its kind, targets, acknowledgements, state, and the resources that it works on.

Broadcasts with conflicting resource keys run one after the other.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final

CLUSTER: Final = "cluster"
COLLECTION: Final = "collection"
VCHANNEL: Final = "vchannel"

MESSAGES: Final = "messages"
"""Key of a task's change that has its messages. It is removed when the task closes, so that closed tasks stay small."""


@dataclass(frozen=True, slots=True, order=True)
class ResourceKey:
    domain: str
    name: str = ""
    shared: bool = False


SHARED_CLUSTER: Final = ResourceKey(CLUSTER, "", shared=True)


def normalize_keys(keys: Iterable[ResourceKey]) -> tuple[ResourceKey, ...]:
    """Return the keys sorted and unique, exclusive if both forms are given, plus a shared key of the cluster if it is
    missing.
    """
    strongest: dict[tuple[str, str], ResourceKey] = {}
    for key in [SHARED_CLUSTER, *keys]:
        known = strongest.get((key.domain, key.name))
        if known is None or known.shared:
            strongest[key.domain, key.name] = key
    return tuple(sorted(strongest.values()))


def keys_conflict(one: Iterable[ResourceKey], other: Iterable[ResourceKey]) -> bool:
    """Return whether two broadcasts share a resource that at least one of them needs exclusively."""
    held = {(key.domain, key.name): key.shared for key in one}
    return any(not (key.shared and held[key.domain, key.name]) for key in other if (key.domain, key.name) in held)


class TaskState(StrEnum):
    PENDING = "pending"
    """Some targets may not have the message yet."""
    ACKNOWLEDGED = "acknowledged"
    """All targets have the message; its effect is pending."""
    DONE = "done"
    """All targets have the message, and the effect is made. Kept for a while for repeated requests."""
    ABANDONED = "abandoned"
    """Permanently refused: closed without its effect, with the reason."""


OPEN_STATES = frozenset({TaskState.PENDING, TaskState.ACKNOWLEDGED})


def collection_keys(collection_id: int) -> tuple[ResourceKey, ...]:
    """Return the resource keys of DDL on one collection."""
    return normalize_keys([ResourceKey(COLLECTION, str(collection_id))])


@dataclass(frozen=True, slots=True)
class BroadcastDraft:
    """A planned broadcast that is not stored yet."""

    kind: str
    collection_id: int
    change: dict[str, Any]
    """The catalog change that completion makes; JSON-compatible."""
    targets: tuple[str, ...]
    """VChannels."""
    keys: tuple[ResourceKey, ...]
    request: str = ""
    """The caller's name for it. A repeated request is one broadcast. "": never repeated."""
    snapshot: Any = field(default=None, compare=False)
    """The state that it was planned from, for the check of its kind. Not persisted."""
    principal: str = ""
    """Principal that requested it. Its messages carry the name."""


@dataclass(frozen=True, slots=True)
class BroadcastTask:
    id: int
    request: str
    kind: str
    collection_id: int
    change: dict[str, Any]
    keys: tuple[ResourceKey, ...]
    targets: dict[str, int | None]
    """Time tick of each VChannel's message: 0 if another message had the effect, None while unacknowledged."""
    state: TaskState = TaskState.PENDING
    at: float = 0.0
    """Time at which it was stored, in Unix seconds; 0.0 if unknown."""
    reason: str = ""
    """Reason that it waits or was abandoned."""
    reason_at_ms: int = 0
    """Time at which `reason` was written."""
    principal: str = ""
    """Principal that requested it; empty if unknown."""

    @property
    def pending_targets(self) -> list[str]:
        return [target for target, tick in self.targets.items() if tick is None]

    @property
    def open(self) -> bool:
        return self.state in OPEN_STATES

    @property
    def ticks(self) -> dict[str, int]:
        """Time ticks of the VChannels that have the message."""
        return {target: tick for target, tick in self.targets.items() if tick is not None}
