"""The broadcaster's core: a task is kept, appended to each target, acknowledged by each, has its effect, and is collected.

Tasks whose keys conflict run one after the other in the order of their ids, which is the order in which they were kept. A task
that was kept is completed by whoever leads: appends carry its id, by which the chain knows a repeat, and effects may be made
twice. A request is one task, however often it is made.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final, Protocol

from millrace.base.errors import (
    DeadlineExceeded,
    InvalidArgument,
    MetaAmbiguous,
    MetaUnavailable,
    MillraceError,
    NotLeader,
)
from millrace.coord.broadcast.callbacks import Kinds
from millrace.coord.broadcast.keys import ResourceKey, complete, conflict
from millrace.coord.broadcast.task import TASKS, Task, TaskState
from millrace.coord.clock import Clock
from millrace.coord.leadership import Leadership
from millrace.meta.store import Delete, Is, Put

KEPT_TOMBSTONES: Final = 1_000
"""Finished tasks that are kept, so that a request that is repeated finds its own."""
MAX_TARGETS: Final = 10_000
_PAUSE: Final = 0.05


class Appending(Protocol):
    """How a task's message gets to a VChannel."""

    def append(self, task: Task, target: str) -> int:
        """Its time tick there (a repeat's: the first one's). What raises may have been done."""
        ...


class Broadcaster:
    """One leader's, for one epoch: made anew for each. Thread-safe; no lock is held over a call outwards."""

    def __init__(
        self,
        leadership: Leadership,
        clock: Clock,
        appending: Appending,
        kinds: Kinds,
        *,
        together: Callable[[Sequence[Callable[[], None]]], None],
        kept: int = KEPT_TOMBSTONES,
    ) -> None:
        self._leadership = leadership
        self._epoch = leadership.epoch
        self._clock = clock
        self._appending = appending
        self._kinds = kinds
        self._together = together
        self._kept = kept
        self._lock = threading.Lock()
        self._tasks: dict[int, Task] = {}
        self._requests: dict[str, int] = {}
        self._coming: dict[str, tuple[ResourceKey, ...]] = {}
        """Requests that hold their keys, and are not kept yet."""
        self._running: set[int] = set()
        self._last = 0
        self._loaded = False

    def load(self) -> None:
        """Know what was kept: nothing is taken before."""
        for entry in self._leadership.store.list(TASKS).entries:
            self._know(Task.decoded(entry.value, entry.modified))
        self._loaded = True

    def _know(self, task: Task) -> Task:
        self._tasks[task.id] = task
        self._requests[task.request] = task.id
        self._last = max(self._last, task.id)
        return task

    # -- requests -----------------------------------------------------------------------------------------------------

    def submit(
        self,
        request: str,
        kind: str,
        keys: Iterable[ResourceKey],
        payload: Any,
        targets: Sequence[str],
        *,
        deadline: float,
    ) -> Task:
        """Keep a broadcast, when nothing that conflicts is under way; it is completed from then on, whatever happens.

        Raises NotLeader, DeadlineExceeded (what conflicts takes longer than `deadline`, monotonic), what the kind's check
        raises: nothing was kept; MetaAmbiguous: make the same request again.
        """
        chosen = self._kinds[kind]
        if not 0 < len(set(targets)) == len(targets) <= MAX_TARGETS:
            raise InvalidArgument(f"a broadcast goes to 1 to {MAX_TARGETS:,} different VChannels")
        wanted = complete(keys)
        while True:
            if not self._loaded or self._leadership.epoch != self._epoch:
                raise NotLeader("this coordinator does not lead: ask the one that does")
            with self._lock:
                known = self._requests.get(request)
                if known is not None and self._tasks[known].revision:
                    return self._tasks[known]
                if known is None and request not in self._coming and self._free(wanted, self._last + 1):
                    self._coming[request] = wanted
                    break
            if self._clock.monotonic() >= deadline:
                raise DeadlineExceeded(
                    f"other broadcasts of the same resources take their time: {request!r} was not kept"
                )
            self._clock.sleep(_PAUSE)
        try:
            task = Task(0, request, kind, wanted, payload, dict.fromkeys(targets))
            chosen.check(task)
            return self._keep(task)
        finally:
            with self._lock:
                del self._coming[request]

    def _free(self, keys: tuple[ResourceKey, ...], before: int) -> bool:
        """Whether nothing that conflicts, and came before the id `before`, is unfinished or coming."""
        earlier = (
            task.keys for task in self._tasks.values() if task.id < before and task.state is not TaskState.TOMBSTONE
        )
        return not any(conflict(keys, each) for each in earlier) and not (
            before > self._last and any(conflict(keys, each) for each in self._coming.values())
        )

    def _keep(self, task: Task) -> Task:
        with self._lock:
            self._last += 1
            task = replace(task, id=self._last)
            self._know(task)  # from here on it may be kept: it is this leader's to find out
            self._running.add(task.id)
        try:
            return self._put(task)
        except (NotLeader, MetaUnavailable):
            with self._lock:  # certain: nothing was done
                del self._tasks[task.id], self._requests[task.request]
            raise
        finally:
            with self._lock:
                self._running.discard(task.id)

    def _put(self, task: Task) -> Task:
        """Keep it, or see that an earlier try did: only this leader gives ids. Raises MetaAmbiguous: try again."""
        revision = self._leadership.commit(self._epoch, [Put(task.key, task.encoded())], when=[Is(task.key, 0)])
        if revision is None:
            there = self._leadership.store.get(task.key)
            if there is None:
                raise MetaAmbiguous(f"{task.key} was kept, and is gone: another coordinator leads")
            revision = there.modified
        with self._lock:
            return self._know(replace(task, revision=revision))

    def task(self, request: str) -> Task | None:
        """What became of a request, as this leader knows it."""
        with self._lock:
            number = self._requests.get(request)
            return None if number is None else self._tasks[number]

    # -- completion ---------------------------------------------------------------------------------------------------

    def step(self) -> None:
        """One round over what is unfinished. Raises NotLeader; what else fails is tried again in the next round."""
        if not self._loaded:
            self.load()
        with self._lock:
            ready = [
                task.id
                for task in self._tasks.values()
                if task.state is not TaskState.TOMBSTONE
                and task.id not in self._running
                and self._free(task.keys, task.id)
            ]
            self._running |= set(ready)
        failures: list[BaseException] = []
        try:
            self._together([partial(self._attempt, number, failures) for number in ready])
        finally:
            with self._lock:
                self._running -= set(ready)
        for failure in failures:
            raise failure
        self._collect()

    def _attempt(self, number: int, failures: list[BaseException]) -> None:
        try:
            self._complete(number)
        except NotLeader as error:
            failures.append(error)
        except MillraceError:
            pass  # the next round tries again

    def _complete(self, number: int) -> None:
        task = self._tasks[number]
        if not task.revision:
            task = self._put(task)
        if task.state is TaskState.PENDING:
            ticks: dict[str, int] = {}
            self._together([partial(self._append, task, target, ticks) for target in task.waiting])
            if ticks:
                task = self._change(task.acknowledged(ticks))
        if task.state is TaskState.ACKNOWLEDGED:
            self._kinds[task.kind].acked(task)
            self._change(replace(task, state=TaskState.TOMBSTONE))

    def _append(self, task: Task, target: str, ticks: dict[str, int]) -> None:
        try:
            ticks[target] = self._appending.append(task, target)
        except MillraceError:
            pass  # it may be there: the next round sends it again, with the same id

    def _change(self, task: Task) -> Task:
        """Keep what became of a task. What it became meanwhile by a write of this leader whose answer was lost, counts."""
        try:
            revision = self._leadership.commit(
                self._epoch, [Put(task.key, task.encoded())], when=[Is(task.key, task.revision)]
            )
        except MetaAmbiguous:
            revision = None
        if revision is not None:
            with self._lock:
                return self._know(replace(task, revision=revision))
        there = self._leadership.store.get(task.key)
        if there is None:
            raise NotLeader("the task was collected by another coordinator: it leads")
        with self._lock:
            return self._know(Task.decoded(there.value, there.modified))

    def _collect(self) -> None:
        with self._lock:
            done = sorted(number for number, task in self._tasks.items() if task.state is TaskState.TOMBSTONE)
            old = [self._tasks[number] for number in done[: max(len(done) - self._kept, 0)]]
        for task in old:
            try:
                self._leadership.commit(self._epoch, [Delete(task.key)])
            except MillraceError:
                return
            with self._lock:
                del self._tasks[task.id]
                if self._requests.get(task.request) == task.id:
                    del self._requests[task.request]
