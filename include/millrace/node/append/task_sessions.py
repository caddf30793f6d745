"""Sessions of work queues: one call of a client waits for tasks of all its idle consumers.

A take that finds no task and names a session leaves its consumer waiting there. The call ``append/queue_news`` returns
the consumers that may have tasks now; each of them then takes for itself. A session lives as long as its client calls;
while it does, its waiting consumers are not silent.

A session has a number that this process chose. A client that sees another one, or none, knows that its consumers wait
nowhere, and has them take again. An answer that was lost is repeated: a call names the last one that arrived.

Bounds: MAX_SESSIONS sessions. A consumer waits in one session at most.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable
from typing import Final

from millrace.base.deadline import Deadline
from millrace.base.errors import LogUnavailable
from millrace.rpc.tasks import TaskNews

MAX_SESSIONS: Final = 1024
"""Of more, consumers ask by themselves."""
SILENT_SECONDS: Final = 30.0
"""A session without calls for so long is forgotten."""
MAX_READY: Final = 1000
"""Consumers in one answer."""


class TaskSession:
    """The waiting consumers of one client. Thread-safe; queues tell it what they have with their own locks held."""

    def __init__(self, now: float) -> None:
        self.number = 1 + secrets.randbits(48)
        self.seen = now
        """When its client last called."""
        self._changed = threading.Condition()
        self._waiting = 0
        self._ready: dict[tuple[str, str], None] = {}
        """Consumers that may have tasks, in order."""
        self._answer = 0
        self._given: dict[tuple[str, str], None] = {}
        """Those of the last answer, until it has arrived."""
        self._closed = False

    def wait(self) -> None:
        """Note that one consumer more waits."""
        with self._changed:
            self._waiting += 1

    def end_wait(self, group: str, consumer: str, *, tell: bool) -> None:
        """Note that a consumer waits no more; `tell` its client that there may be tasks for it."""
        with self._changed:
            self._waiting -= 1
            if tell:
                self._ready[group, consumer] = None
            if tell or not self._waiting:
                self._changed.notify_all()

    def news(self, last: int, end: Deadline) -> TaskNews:
        """Wait until a consumer may have tasks, or none waits any more.

        Raises LogUnavailable if the server stops meanwhile.
        """
        with self._changed:
            if last != self._answer:  # it was lost
                self._ready = self._given | self._ready
            self._given = {}
            while not self._ready and self._waiting and not self._closed and not end.expired():
                end.wait(self._changed)
            if self._closed:
                raise LogUnavailable("the log's server is stopping: call again")
            ready = list(self._ready)[:MAX_READY]
            for key in ready:
                del self._ready[key]
            self._answer, self._given = last + 1, dict.fromkeys(ready)
            return TaskNews(self._answer, self.number, ready)

    @property
    def closed(self) -> bool:
        return self._closed

    def close(self) -> None:
        """End calls that wait."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()


class TaskSessions:
    """The sessions of one server, by principal and name. Thread-safe."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._guard = threading.Lock()
        self._sessions: dict[tuple[str, str], TaskSession] = {}
        self._closed = False

    def __len__(self) -> int:
        return len(self._sessions)

    def of(self, caller: str, name: str) -> TaskSession | None:
        """Return a session, new if there is none; None if there are too many."""
        now = self._clock()
        with self._guard:
            found = self._sessions.get((caller, name))
            if found is None:
                self._forget(now)
                if self._closed or len(self._sessions) >= MAX_SESSIONS:
                    return None
                found = self._sessions[caller, name] = TaskSession(now)
            found.seen = now
            return found

    def news(self, caller: str, name: str, *, last: int, end: Deadline) -> TaskNews:
        """Answer a call that waits for tasks. Raises LogUnavailable."""
        with self._guard:
            self._forget(self._clock())
            found = self._sessions.get((caller, name))
            if found is not None:
                found.seen = self._clock()
        if found is None:
            return TaskNews(0, 0, [])
        try:
            return found.news(last, end)
        finally:
            found.seen = self._clock()

    def end(self, caller: str, name: str) -> None:
        """Forget a session whose client ends, and end its calls that wait."""
        with self._guard:
            found = self._sessions.pop((caller, name), None)
        if found is not None:
            found.close()

    def _forget(self, now: float) -> None:
        for key, session in list(self._sessions.items()):
            if now - session.seen > SILENT_SECONDS:
                session.close()
                del self._sessions[key]

    def close(self) -> None:
        """End all calls that wait. Idempotent."""
        with self._guard:
            self._closed = True
            for session in self._sessions.values():
                session.close()
