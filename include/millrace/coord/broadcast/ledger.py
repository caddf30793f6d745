"""The broadcaster's port to storage, and the callbacks that run inside its transactions.

A kind of broadcast has three callbacks: a check when it is stored, an effect when all targets have it, and an undo
when it is abandoned. Each runs in the ledger transaction of that step, so both succeed or neither does, and each
happens once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from millrace.base.errors import UnsupportedVersion
from millrace.coord.broadcast.task import BroadcastDraft, BroadcastTask


class StalePlan(Exception):
    """The state that a broadcast was planned from has changed: plan it again. Never raised to a caller of the
    broadcaster.
    """


@dataclass(frozen=True, slots=True)
class BroadcastCallbacks:
    check: Callable[[BroadcastTask, Any], None]
    """Runs when the task is stored, with the snapshot that it was planned from. An error stores nothing; StalePlan
    replans.
    """
    on_acknowledged: Callable[[BroadcastTask], None]
    """Runs when every target has the message, before any conflicting task can be stored."""
    on_abandoned: Callable[[BroadcastTask], BroadcastDraft | None]
    """Runs when the task is abandoned and undoes its reservation. A returned draft is stored in the same transaction.
    """
    before_close: Callable[[BroadcastTask], None] | None = None
    """Runs when every target has the message, before `on_acknowledged`, in no transaction and at least once. If it
    raises, the task stays open.
    """
    must_complete: bool = False
    """Whether a task that one target has acknowledged is never abandoned."""


class CallbackRegistry:
    """Callbacks by kind of broadcast. `others` returns those of a kind that is not in `kinds`, or None."""

    def __init__(
        self,
        kinds: Mapping[str, BroadcastCallbacks],
        others: Callable[[str], BroadcastCallbacks | None] = lambda name: None,
    ) -> None:
        self._kinds = dict(kinds)
        self._others = others

    def __getitem__(self, name: str) -> BroadcastCallbacks:
        """Raises UnsupportedVersion for a kind that a newer build, or one with more packages, stored."""
        found = self._kinds.get(name) or self._others(name)
        if found is None:
            raise UnsupportedVersion(
                f"unknown broadcast kind {name!r}: run the build that stored it, or a newer one, with the same packages"
            )
        return found


class Ledger(Protocol):
    """Storage of broadcasts. Each call is one durable transaction; several processes may share a ledger.

    A call that raises MetaAmbiguous may have been done. Every call may be repeated.
    """

    def add(
        self, draft: BroadcastDraft, check: Callable[[BroadcastTask, Any], None]
    ) -> BroadcastTask | tuple[BroadcastTask, ...]:
        """Store a broadcast under the next id, unless an open one conflicts; return the task, or the conflicting tasks,
        oldest first.

        A request that is stored already is returned as it is. If `check` raises, nothing is stored.
        """
        ...

    def task(self, number: int) -> BroadcastTask | None:
        """Return a task; None if it was removed or never stored."""
        ...

    def find_request(self, request: str) -> BroadcastTask | None:
        """Return the task of a request, while it is stored."""
        ...

    def open_tasks(self) -> list[BroadcastTask]:
        """Return open tasks, oldest first."""
        ...

    def acknowledge(self, number: int, ticks: Mapping[str, int]) -> None:
        """Record that these targets have the message, at these ticks. The later tick of a target counts."""
        ...

    def finish(self, number: int, acked: Callable[[BroadcastTask], None]) -> BroadcastTask | None:
        """Close a task that all targets have and make its effect, once; return the task afterwards."""
        ...

    def abandon(
        self, number: int, words: str, refused: Callable[[BroadcastTask], BroadcastDraft | None]
    ) -> BroadcastTask | None:
        """Close an open task without its effect; return the task that undoes it, if any. None if it was closed
        already.
        """
        ...

    def note_reason(self, number: int, words: str) -> None:
        """Record why an open task waits."""
        ...
