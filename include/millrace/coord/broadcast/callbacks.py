"""What a kind of broadcast does beside its messages: a check as it is kept, an effect when all targets have it, or its undoing.

All three run inside the ledger's transaction that does the rest of the step, so that both stand or neither does, and each is done
once, whoever completes the broadcast, however often.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from millrace.base.errors import UnsupportedVersion
from millrace.coord.broadcast.task import BroadcastDraft, BroadcastTask


class StalePlan(Exception):
    """What a broadcast is planned from, or was planned from, has changed: it is planned anew. Nobody outside hears of it."""


@dataclass(frozen=True, slots=True)
class BroadcastCallbacks:
    check: Callable[[BroadcastTask, Any], None]
    """As it is kept, with what it was planned from. Raises where it makes no sense (nothing is kept), Overtaken where the plan is old."""
    on_acknowledged: Callable[[BroadcastTask], None]
    """When every target has the message, as it is closed: before anything that conflicts is kept."""
    on_abandoned: Callable[[BroadcastTask], BroadcastDraft | None]
    """As it is given up: takes back what keeping it did; what has to be broadcast for that is kept in the same transaction."""


class CallbackRegistry:
    """The kinds of broadcasts by name."""

    def __init__(self, kinds: Mapping[str, BroadcastCallbacks]) -> None:
        self._kinds = dict(kinds)

    def __getitem__(self, name: str) -> BroadcastCallbacks:
        """Raises UnsupportedVersion for one that a newer build kept."""
        if name not in self._kinds:
            raise UnsupportedVersion(f"a broadcast of kind {name!r}: run the build that kept it, or a newer one")
        return self._kinds[name]
