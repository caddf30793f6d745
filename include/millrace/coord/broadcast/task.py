"""A broadcast task as it is kept."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, Final, Self

from millrace.coord.broadcast.keys import ResourceKey

TASKS: Final = "broadcasts/"


class TaskState(StrEnum):
    PENDING = "pending"
    """Kept; some targets may not have it yet."""
    ACKNOWLEDGED = "acknowledged"
    """All targets have it; its ack callback may not have run to its end."""
    TOMBSTONE = "tombstone"
    """Done: kept for a while so that a repeated request finds it."""


@dataclass(frozen=True, slots=True)
class Task:
    id: int
    request: str
    """The caller's name for it: the same request is one broadcast, however often it is made."""
    kind: str
    keys: tuple[ResourceKey, ...]
    payload: Any
    """What JSON takes."""
    targets: dict[str, int | None]
    """By VChannel the time tick of its message, None while it is not known to be there."""
    state: TaskState = TaskState.PENDING
    revision: int = 0

    @property
    def key(self) -> str:
        return f"{TASKS}{self.id:012}"

    @property
    def waiting(self) -> list[str]:
        return [target for target, tick in self.targets.items() if tick is None]

    def acknowledged(self, ticks: dict[str, int]) -> Task:
        targets = self.targets | {target: tick for target, tick in ticks.items() if self.targets[target] is None}
        state = TaskState.ACKNOWLEDGED if None not in targets.values() else self.state
        return replace(self, targets=targets, state=state)

    def encoded(self) -> bytes:
        keys = [[key.domain, key.name, key.shared] for key in self.keys]
        return json.dumps([self.id, self.request, self.kind, keys, self.payload, self.targets, self.state]).encode()

    @classmethod
    def decoded(cls, data: bytes, revision: int) -> Self:
        number, request, kind, keys, payload, targets, state = json.loads(data)
        resources = tuple(ResourceKey(*key) for key in keys)
        return cls(number, request, kind, resources, payload, targets, TaskState(state), revision)
