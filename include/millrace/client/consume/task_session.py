"""What the queue consumers of one connection share: a few threads, and one call that waits for tasks of all of them.

A consumer that finds no task waits in the session at the server (millrace.node.append.task_sessions). One thread asks
which of these have tasks; each of them then takes for itself, so an error of one concerns no other. Up to DIRECT_TAKES
consumers that had tasks just now wait in calls of their own, which saves them the call that tells.

A server that restarts, or that has forgotten the session, answers with another number: all consumers take again, and
wait there. A server of an earlier build knows no sessions: its consumers ask by turns.
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, Protocol

from millrace.base.backoff import jittered
from millrace.base.closeable import Closeable
from millrace.base.deadline import Deadline
from millrace.base.errors import MillraceError
from millrace.base.job_pool import Job, JobPool
from millrace.rpc.link import end_waits_with_process
from millrace.rpc.tasks import LeasedTasks, TaskNews

THREADS: Final = 16
"""Most threads that take for the consumers of a session, and most that settle."""
DIRECT_TAKES: Final = 4
"""Most consumers that wait in calls of their own."""
PATIENCE: Final = 30.0
"""How long errors that pass by themselves last before consumers raise them."""
_WAIT: Final = 10.0
_CALL_SECONDS: Final = 10.0
_PAUSE: Final = 0.2
_LONGEST_PAUSE: Final = 2.0
_END_SECONDS: Final = 1.0
_IDLE_SECONDS: Final = 5.0
"""How long the waiting thread stays without a consumer that waits."""


class QueueServer(Protocol):
    """The server's calls that consumers make."""

    def take_tasks(self, request: dict[str, Any], *, seconds: float) -> LeasedTasks: ...

    def task_news(self, request: dict[str, Any], *, seconds: float) -> TaskNews: ...

    def settle_tasks(self, request: dict[str, Any], *, seconds: float) -> dict[str, Any]: ...


@dataclass(slots=True, eq=False)
class _Member:
    job: Job
    """Takes."""
    fail: Callable[[Exception], None]
    waits: bool = False


class TaskSession(Closeable):
    """The queue consumers of the connection to `server`. Thread-safe."""

    def __init__(self, server: QueueServer) -> None:
        self.name = uuid.uuid4().hex
        self.taking = JobPool("queue-take", threads=THREADS)
        # Apart, so that acknowledgements and renewals do not wait for takes.
        self.settling = JobPool("queue-settle", threads=THREADS)
        self._server = server
        self._changed = threading.Condition()
        self._members: dict[tuple[str, str], _Member] = {}
        """By group and consumer."""
        self._waiting = 0
        self._number = 0
        """Of the session at the server; 0 before the first take."""
        self._direct = threading.BoundedSemaphore(DIRECT_TAKES)
        self._waits = 0
        """Calls that may wait at the server now."""
        self._listening = False
        self._closed = False
        end_waits_with_process(self)

    def add(self, group: str, consumer: str, job: Job, fail: Callable[[Exception], None]) -> None:
        """Add a consumer: `job` takes tasks; `fail` is called with an error that lasts while it waits."""
        with self._changed:
            self._members[group, consumer] = _Member(job, fail)

    def remove(self, group: str, consumer: str) -> None:
        """Remove a consumer, which has left its queue or will. Idempotent."""
        with self._changed:
            member = self._members.pop((group, consumer), None)
            if member is not None and member.waits:
                self._waiting -= 1

    @contextmanager
    def direct(self) -> Iterator[bool]:
        """Enclose a take; yield whether it may wait for tasks at the server."""
        if self._closed or not self._direct.acquire(blocking=False):
            yield False
            return
        try:
            with self._counted():
                yield True
        finally:
            self._direct.release()

    @contextmanager
    def _counted(self) -> Iterator[None]:
        """Enclose a call that may wait at the server."""
        with self._changed:
            self._waits += 1
        try:
            yield
        finally:
            with self._changed:
                self._waits -= 1

    def took(self, group: str, consumer: str, number: int) -> None:
        """Note the session's number in the answer to a take: the consumer waits now, unless it is 0."""
        with self._changed:
            member = self._members.get((group, consumer))
            if member is not None:
                self._waiting += (number != 0) - member.waits
                member.waits = number != 0
            if not number:
                return
            self._follow(number, but=member)
            if self._waiting and not self._listening and not self._closed:
                self._listening = True
                threading.Thread(target=self._listen, name="queue-news", daemon=True).start()
            self._changed.notify_all()

    def _follow(self, number: int, *, but: _Member | None = None) -> None:
        """Have all consumers take again if the server knows another session than before."""
        if number == self._number:
            return
        before, self._number = self._number, number
        if before or not number:
            for member in self._members.values():
                if member.waits and member is not but:
                    self._wake(member)

    def _wake(self, member: _Member) -> None:
        if member.waits:
            member.waits = False
            self._waiting -= 1
        member.job.wake()

    def _listen(self) -> None:
        """Wait for tasks of all consumers, until none waits any more."""
        last, pause, failing = 0, _PAUSE, None
        while True:
            with self._changed:
                end = Deadline.after(_IDLE_SECONDS)
                while not self._waiting and not self._closed and not end.expired():
                    end.wait(self._changed)
                if not self._waiting or self._closed:
                    self._listening = False
                    return
            asked = Deadline.after(_WAIT / 2)
            try:
                with self._counted():
                    found = self._server.task_news(
                        {"session": self.name, "last": last, "wait": _WAIT}, seconds=_WAIT + _CALL_SECONDS
                    )
            except Exception as error:  # any other, too, ends no thread without a word
                failing = failing or Deadline.after(PATIENCE)
                self._failed(error, lasts=failing.expired())
                with self._changed:
                    if not self._closed:
                        self._changed.wait(jittered(pause))
                pause = min(2 * pause, _LONGEST_PAUSE)
                continue
            last, pause, failing = found.number, _PAUSE, None
            with self._changed:
                self._follow(found.session)
                for key in found.ready:
                    # Also one that does not seem to wait: the answer to its take may be on its way.
                    if (member := self._members.get(key)) is not None:
                        self._wake(member)
                if not found.ready and found.session and not asked.expired() and not self._closed:
                    self._changed.wait(jittered(_PAUSE))  # the server cannot wait now: no hot loop

    def _failed(self, error: Exception, *, lasts: bool) -> None:
        with self._changed:
            waiting = [member for member in self._members.values() if member.waits]
            if not passes(error):  # each meets what concerns it by itself
                for member in waiting:
                    self._wake(member)
                return
        if lasts:
            for member in waiting:
                member.fail(error)

    def end_waits(self) -> None:
        """End the calls that wait at the server, because the process ends. Raises what the call raises."""
        with self._changed:
            self._closed = True
            waits = self._waits
            self._changed.notify_all()
        if waits:
            self._server.task_news({"session": self.name, "wait": 0.0, "end": True}, seconds=_END_SECONDS)

    def close(self) -> None:
        """End the threads. The consumers are closed before. Idempotent."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self.taking.close()
        self.settling.close()


def passes(error: Exception) -> bool:
    """Return whether an error is temporary."""
    return isinstance(error, MillraceError) and error.retriable
