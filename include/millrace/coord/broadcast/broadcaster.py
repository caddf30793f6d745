"""The broadcaster: a task is planned, kept, sent to each target, acknowledged by each, has its effect and is closed.

Any process may have one; what they share is the ledger. A task is kept where nothing that is open works on the same resources:
whoever comes upon such a task completes it first, and plans anew. So a task that was kept is completed by whoever needs that, or
looks for what lies there (`resume`), while its own process completes it, sleeps or is dead: messages carry the task's id, by which the
chain knows a repeat and refuses what a later task of its VChannel has passed, and the effect is made in the transaction that closes
the task. Those that conflict follow each other in the order of their ids, which is the order in which they were kept.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from functools import partial
from typing import Final, Protocol

from millrace.base.errors import AppendRejected, DeadlineExceeded, InvalidArgument, MillraceError
from millrace.base.failpoint import hit
from millrace.coord.broadcast.callbacks import CallbackRegistry, StalePlan
from millrace.coord.broadcast.keys import ResourceKey, keys_conflict
from millrace.coord.broadcast.ledger import Ledger
from millrace.coord.broadcast.task import BroadcastDraft, BroadcastTask, TaskState
from millrace.coord.concurrency import RunAll, run_sequentially
from millrace.wal.reasons import Reason

MAX_PLAN_ATTEMPTS: Final = 100
"""How often a broadcast that others overtook is planned anew."""
MAX_TARGETS: Final = 10_000

_log = logging.getLogger(__name__)


class Dispatcher(Protocol):
    """How a task's message gets to a VChannel."""

    def send(self, task: BroadcastTask, target: str) -> int:
        """Its time tick there (a repeat's: the first one's), 0 where the target has the effect by another. What raises may have
        been done."""
        ...

    def is_permanent(self, error: MillraceError) -> bool:
        """Whether a target refuses the message for good, so that no later attempt can come to another end."""
        ...


class Broadcaster:
    """Thread-safe as its ledger is; no transaction is open while something is sent."""

    def __init__(
        self,
        ledger: Ledger,
        sending: Dispatcher,
        kinds: CallbackRegistry,
        *,
        run_all: RunAll = run_sequentially,
        seam: Callable[[str], None] = hit,
    ) -> None:
        """`seam` is called at the places that crash and interleaving tests stop at (see millrace.base.failpoint)."""
        self._ledger = ledger
        self._sending = sending
        self._kinds = kinds
        self._together = run_all
        self._seam = seam

    def submit(
        self, plan: Callable[[], BroadcastDraft], *, request: str = "", expired: Callable[[], bool] = lambda: False
    ) -> BroadcastTask:
        """Keep what `plan` makes of the state as it is now, and complete it. It is called again where others came in between (Overtaken).

        A request that is kept already is completed as it was. Raises what `plan`, the kind's check and a target's refusal raise
        (behind the last the task is abandoned); what it has to wait for (the task stays, and is completed later); DeadlineExceeded
        where others kept coming, or it is `late` before anything was kept.
        """
        for _ in range(MAX_PLAN_ATTEMPTS):
            if request and (known := self._ledger.find_request(request)) is not None:
                return self.complete(known)
            if expired():
                break
            try:
                drafted = plan()
                if not 0 < len(set(drafted.targets)) == len(drafted.targets) <= MAX_TARGETS:
                    raise InvalidArgument(f"a broadcast goes to 1 to {MAX_TARGETS:,} different VChannels")
                self._seam("ddl.planned")
                kept = self._ledger.add(drafted, self._kinds[drafted.kind].check)
            except StalePlan:
                continue
            if isinstance(kept, BroadcastTask):
                return self.complete(kept)
            self._settle(kept)
        raise DeadlineExceeded("other broadcasts of the same resources kept coming: nothing was kept, call it again")

    def complete_conflicting(self, keys: Iterable[ResourceKey]) -> None:
        """Complete what is open and works on the same resources. Raises what keeps one of them from its end."""
        wanted = tuple(keys)
        self._settle([task for task in self._ledger.open_tasks() if keys_conflict(task.keys, wanted)])

    def _settle(self, tasks: Iterable[BroadcastTask]) -> None:
        for task in tasks:
            try:
                self.complete(task)
            except MillraceError:
                there = self._ledger.task(task.id)
                if there is not None and there.open:
                    raise

    def resume(self, *, skip: Callable[[BroadcastTask], bool] = lambda task: False) -> int:
        """Complete what is open and not `skip`, the oldest first; how many there were.

        What cannot be completed now stays for the next call, and is a wall only for what works on the same resources.
        """
        pending = [task for task in self._ledger.open_tasks() if not skip(task)]
        left: list[BroadcastTask] = []
        for task in pending:
            if any(keys_conflict(task.keys, each.keys) for each in left):
                continue
            try:
                self.complete(task)
            except MillraceError as error:
                _log.warning("%s of collection %s: %s: %s", task.kind, task.collection_id, error.code, error)
                there = self._ledger.task(task.id)
                if there is not None and there.open:
                    left.append(task)
        return len(pending)

    def complete(self, task: BroadcastTask) -> BroadcastTask:
        """Send what waits, and close the task; as it is then. Raises what a target refuses it for (it is abandoned then, by this
        broadcaster or by another one), or what to wait for; DeadlineExceeded where another one closed it, and it was collected since."""
        if not task.open:
            return self._closed(task)
        self._seam("ddl.kept")
        try:
            self._send(task)
            self._seam("ddl.acknowledged")
            done = self._ledger.finish(task.id, self._kinds[task.kind].on_acknowledged)
        except MillraceError as error:
            done = self._failed(task, error)
        if done is None:
            raise DeadlineExceeded(
                f"{task.kind} was closed by another, so long ago that what became of it is kept no more: look whether its effect"
                " is there, and call it again where it is not"
            )
        return self._closed(done)

    def _closed(self, task: BroadcastTask) -> BroadcastTask:
        if task.state is TaskState.ABANDONED:
            raise AppendRejected(f"{task.kind} was given up: {task.reason}", reason=Reason.NO_EFFECT)
        return task

    def _send(self, task: BroadcastTask) -> None:
        """To one target first: what that refuses, no other one gets."""
        waiting = task.pending_targets
        alone = 0 if task.ticks else 1
        ticks: dict[str, int] = {}
        errors: list[MillraceError] = []
        for targets in (waiting[:alone], waiting[alone:]):
            if targets and not errors:
                self._together([partial(self._send_one, task, target, ticks, errors) for target in targets])
        if ticks:
            self._ledger.acknowledge(task.id, ticks)
        if errors:
            raise next((each for each in errors if self._sending.is_permanent(each)), errors[0])

    def _send_one(self, task: BroadcastTask, target: str, ticks: dict[str, int], errors: list[MillraceError]) -> None:
        try:
            tick = self._sending.send(task, target)
        except MillraceError as error:
            errors.append(error)
            return
        self._seam("ddl.sent")
        ticks[target] = tick

    def _failed(self, task: BroadcastTask, error: MillraceError) -> BroadcastTask | None:
        """Abandon what was refused for good, note what has to wait, and raise; unless another broadcaster completed it."""
        there = self._ledger.task(task.id)
        if there is None or there.state is TaskState.DONE:
            return there
        if self._sending.is_permanent(error):
            if there.open:
                _log.warning("%s of collection %s is given up: %s", task.kind, task.collection_id, error)
            undoing = self._ledger.abandon(task.id, f"{error.code}: {error}", self._kinds[task.kind].on_abandoned)
            if undoing is not None:
                self.complete(undoing)
        elif there.open:
            self._ledger.note_reason(task.id, f"{error.code}: {error}")
        raise error
