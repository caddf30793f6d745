"""What a kind of broadcast does beside its messages: a check before it is kept, an effect when all targets have it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from millrace.base.errors import InvalidArgument
from millrace.coord.broadcast.task import Task

Callback: TypeAlias = Callable[[Task], None]


@dataclass(frozen=True, slots=True)
class Kind:
    """`check` raises where the broadcast makes no sense now: then nothing of it is kept. It runs while the task's keys are
    held. `acked` runs when every target has the message, before anything that conflicts begins; again after a crash."""

    check: Callback
    acked: Callback


class Kinds:
    """The kinds of broadcasts by name."""

    def __init__(self, kinds: Mapping[str, Kind]) -> None:
        self._kinds = dict(kinds)

    def __getitem__(self, name: str) -> Kind:
        """Raises InvalidArgument."""
        if name not in self._kinds:
            raise InvalidArgument(f"no broadcast of the kind {name!r}; there are {', '.join(sorted(self._kinds))}")
        return self._kinds[name]
