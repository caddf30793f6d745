"""Where broadcasts are kept: the port that the broadcaster works on. Each call is one transaction, durable when it returns."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from millrace.coord.broadcast.task import BroadcastDraft, BroadcastTask


class Ledger(Protocol):
    """Several broadcasters of several processes may work on one at once. A call that raises may have been done where it says so
    (MetaAmbiguous); each may be made again."""

    def add(
        self, draft: BroadcastDraft, check: Callable[[BroadcastTask, Any], None]
    ) -> BroadcastTask | tuple[BroadcastTask, ...]:
        """Keep a broadcast under the next id, where nothing that is open conflicts with it: the task, or what is in its way, the
        oldest first. A request that is kept already is given as it is. What `check` raises, called with the task and what it was
        planned from, keeps nothing."""
        ...

    def task(self, number: int) -> BroadcastTask | None:
        """As it is now; None where it was collected, or never kept."""
        ...

    def find_request(self, request: str) -> BroadcastTask | None:
        """The task of a request, while it is kept."""
        ...

    def open_tasks(self) -> list[BroadcastTask]:
        """What is not closed, the oldest first."""
        ...

    def acknowledge(self, number: int, ticks: Mapping[str, int]) -> None:
        """These targets have its message, at these ticks. A target that was acknowledged before keeps its later tick."""
        ...

    def finish(self, number: int, acked: Callable[[BroadcastTask], None]) -> BroadcastTask | None:
        """Close a task that all targets have, and make its effect: once, where it is open still. As it is behind that."""
        ...

    def abandon(
        self, number: int, words: str, refused: Callable[[BroadcastTask], BroadcastDraft | None]
    ) -> BroadcastTask | None:
        """Close an open task without its effect; the task that takes it back, where there is one. None where it was closed."""
        ...

    def note_reason(self, number: int, words: str) -> None:
        """Keep why an open task waits."""
        ...
