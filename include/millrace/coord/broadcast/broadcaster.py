"""The broadcaster: plans a task, stores it, sends it to each target, collects acknowledgements, makes its effect,
closes it.

Any process may have a broadcaster; they share the ledger. A task is stored only if no open task works on the same
resources. A broadcaster that meets such a task completes it first and then plans again. So any process may complete a
task, whether its own process is completing it, sleeps or is dead. Messages carry the task's id, by which the chain
recognises a repeat and refuses a message that a later task of its VChannel has overtaken. The effect is made in the
transaction that closes the task. Conflicting tasks follow each other in the order of their ids, which is the order in
which they were stored.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from functools import partial
from typing import Final, Protocol

from millrace.base.errors import AppendRejected, DeadlineExceeded, InvalidArgument, MillraceError
from millrace.base.failpoint import hit
from millrace.coord.broadcast.ledger import CallbackRegistry, Ledger, StalePlan
from millrace.coord.broadcast.task import BroadcastDraft, BroadcastTask, ResourceKey, TaskState, keys_conflict
from millrace.coord.concurrency import RunAll, run_sequentially
from millrace.wal.reasons import Reason

MAX_PLAN_ATTEMPTS: Final = 100
"""Number of times that a broadcast is planned again after others changed its snapshot."""
MAX_TARGETS: Final = 10_000
"""VChannels of one broadcast: bounds the task's record and its acknowledgements."""

_log = logging.getLogger(__name__)


class Dispatcher(Protocol):
    """Sends a task's message to a VChannel."""

    def send(self, task: BroadcastTask, target: str) -> int:
        """Send the message; return its time tick there (a repeat's: the first tick), 0 if another message had the
        effect.

        A call that raises may have been done.
        """
        ...

    def is_permanent(self, error: MillraceError) -> bool:
        """Return whether the target refuses the message permanently, so that no retry can succeed."""
        ...


class Broadcaster:
    """Thread-safe if its ledger is. No transaction is open while a message is sent."""

    def __init__(
        self,
        ledger: Ledger,
        sending: Dispatcher,
        kinds: CallbackRegistry,
        *,
        run_all: RunAll = run_sequentially,
    ) -> None:
        self._ledger = ledger
        self._sending = sending
        self._kinds = kinds
        self._run_all = run_all

    def submit(
        self, plan: Callable[[], BroadcastDraft], *, request: str = "", expired: Callable[[], bool] = lambda: False
    ) -> BroadcastTask:
        """Store the draft that `plan` returns, and complete it. On StalePlan, `plan` is called again.

        A request that is stored already is completed as it is.
        Raises the errors of `plan` and of the kind's check.
        Raises a target's refusal: the task is abandoned, unless its kind must complete and a target has the message.
        Raises a retriable error: the task stays and is completed later.
        Raises DeadlineExceeded if other tasks kept coming, or `expired` returned True before anything was stored.
        """
        for _ in range(MAX_PLAN_ATTEMPTS):
            # In the loop: another process may store the same request while this one plans.
            if request and (known := self._ledger.find_request(request)) is not None:
                return self.complete(known)
            # Checked before anything is stored: afterwards the request must be completed, late or not.
            if expired():
                break
            try:
                drafted = plan()
                if not 0 < len(set(drafted.targets)) == len(drafted.targets) <= MAX_TARGETS:
                    raise InvalidArgument(f"a broadcast goes to 1 to {MAX_TARGETS:,} different VChannels")
                hit("ddl.planned")
                added = self._ledger.add(drafted, self._kinds[drafted.kind].check)
            except StalePlan:
                continue
            if isinstance(added, BroadcastTask):
                return self.complete(added)
            # The ledger refused because open tasks use the same resources: complete those first, then plan again on the
            # new catalog.
            self._settle(added)
        raise DeadlineExceeded("other broadcasts on the same resources kept coming: nothing was stored, retry")

    def complete_conflicting(self, keys: Iterable[ResourceKey]) -> None:
        """Complete open tasks on the same resources.

        Raises the error that keeps one of them open.
        """
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
        """Complete open tasks, oldest first, except those that `skip` selects; return how many there were.

        A task that cannot be completed now is left for the next call and blocks only tasks on its resources.
        """
        pending = [task for task in self._ledger.open_tasks() if not skip(task)]
        left: list[BroadcastTask] = []
        for task in pending:
            # Order per resource: a task must not overtake an older one that could not be completed.
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
        """Send outstanding messages, close the task, and return it.

        Raises a target's refusal (the task is then abandoned) or a retriable error.
        Raises DeadlineExceeded if another broadcaster closed it and it has been removed since.
        """
        if not task.open:
            return self._closed(task)
        hit("ddl.kept")
        try:
            self._send(task)
            # All targets have the message. Only now the catalog changes, in one transaction with the task's end.
            hit("ddl.acknowledged")
            kind = self._kinds[task.kind]
            if kind.before_close is not None:
                self._call(task.id, kind.before_close)
            done = self._ledger.finish(task.id, kind.on_acknowledged)
        except MillraceError as error:
            done = self._failed(task, error)
        if done is None:
            raise DeadlineExceeded(
                f"another process closed {task.kind} so long ago that its result is no longer stored: check whether"
                " its effect"
                " was made, and retry if it was not"
            )
        return self._closed(done)

    def _call(self, number: int, callback: Callable[[BroadcastTask], None]) -> None:
        """Run a callback outside of any transaction, unless another broadcaster has closed the task meanwhile."""
        sent = self._ledger.task(number)
        if sent is not None and sent.state is TaskState.ACKNOWLEDGED:
            callback(sent)
            hit("ddl.called")

    def _closed(self, task: BroadcastTask) -> BroadcastTask:
        if task.state is TaskState.ABANDONED:
            raise AppendRejected(f"{task.kind} was abandoned: {task.reason}", reason=Reason.NO_EFFECT)
        return task

    def _send(self, task: BroadcastTask) -> None:
        """Send to one target first: if that refuses, no other target gets the message."""
        waiting = task.pending_targets
        # A target that acknowledged in an earlier attempt has shown that the message is acceptable.
        alone = 0 if task.ticks else 1
        ticks: dict[str, int] = {}
        errors: list[MillraceError] = []
        for targets in (waiting[:alone], waiting[alone:]):
            if targets and not errors:
                self._run_all([partial(self._send_one, task, target, ticks, errors) for target in targets])
        # Store the acknowledgements before the errors are raised, so that a retry sends only what is missing.
        if ticks:
            self._ledger.acknowledge(task.id, ticks)
        if errors:
            # A permanent refusal decides the task's fate, whichever target answered first.
            raise next((each for each in errors if self._sending.is_permanent(each)), errors[0])

    def _send_one(self, task: BroadcastTask, target: str, ticks: dict[str, int], errors: list[MillraceError]) -> None:
        try:
            tick = self._sending.send(task, target)
        except MillraceError as error:
            errors.append(error)
            return
        hit("ddl.sent")
        ticks[target] = tick

    def _failed(self, task: BroadcastTask, error: MillraceError) -> BroadcastTask | None:
        """Abandon a permanently refused task or record the reason of a retriable error, then raise; unless it is done
        already.
        """
        there = self._ledger.task(task.id)
        if there is None or there.state is TaskState.DONE:
            return there
        if self._sending.is_permanent(error) and not (there.ticks and self._kinds[there.kind].must_complete):
            if there.open:
                _log.warning("%s of collection %s is abandoned: %s", task.kind, task.collection_id, error)
            undoing = self._ledger.abandon(task.id, f"{error.code}: {error}", self._kinds[task.kind].on_abandoned)
            if undoing is not None:
                self.complete(undoing)
        elif there.open:
            self._ledger.note_reason(task.id, f"{error.code}: {error}")
        raise error
