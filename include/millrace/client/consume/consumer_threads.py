"""What the stream consumers of one connection share: a few threads that read ahead, and one call for all heartbeats.

A consumer without news costs no thread: the tail of its PChannel wakes it (millrace.client.consume.shared_tail). One
thread renews the memberships of all groups, up to MAX_MEMBERS in a call. Each member has an answer or an error of its
own. A server of an earlier build is called for each member.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol, TypeAlias

from millrace.base.closeable import Closeable
from millrace.base.errors import InvalidArgument, LogUnavailable
from millrace.base.job_pool import JobPool

THREADS: Final = 8
"""Most threads that read ahead and commit for the consumers of a connection."""
MAX_MEMBERS: Final = 256
"""Members in one call."""
HEARTBEAT_CALL_SECONDS: Final = 5.0
"""Timeout of one call; a commit of a member waits for its heartbeat."""
_EARLY_SECONDS: Final = 0.25
"""How much earlier a member is renewed that another one's call takes along; a quarter of its interval at most."""
_BUSY_SECONDS: Final = 0.05
"""How soon a member is asked again that is in another call of its own."""
_OLDER_SECONDS: Final = 60.0
"""How long a server counts as one of an earlier build."""

_log: Final = logging.getLogger(__name__)

Answer: TypeAlias = "dict[str, Any] | Exception"
SendHeartbeats: TypeAlias = Callable[[list[dict[str, Any]]], Sequence[Answer]]
"""Sends requests of members, and returns an answer or error for each; raises what concerns all of them."""


class Heart(Protocol):
    """A member whose membership is renewed. One thread calls these."""

    @property
    def interval(self) -> float:
        """Seconds between two calls."""
        ...

    def begin(self) -> dict[str, Any] | None:
        """Begin a call: return its request, or None if the member is in another call now or has ended."""
        ...

    def end(self, answer: Answer) -> None:
        """End the call that was begun."""
        ...

    def send(self, request: dict[str, Any]) -> dict[str, Any]:
        """Make the call for this member alone."""
        ...


class Heartbeats(Closeable):
    """Renews the memberships of all members of one connection. Thread-safe."""

    def __init__(self, send: SendHeartbeats | None = None, *, clock: Callable[[], float] = time.monotonic) -> None:
        """`send` makes one call for several members; None: each makes its own."""
        self._send = send
        self._clock = clock
        self._changed = threading.Condition()
        self._due: dict[Heart, float] = {}
        self._older_until = float("inf") if send is None else float("-inf")
        self._beating = False
        self._closed = False

    def __len__(self) -> int:
        return len(self._due)

    def add(self, heart: Heart) -> None:
        """Renew a membership from now on, first after its interval."""
        with self._changed:
            self._due[heart] = self._clock() + heart.interval
            if not self._beating and not self._closed:
                self._beating = True
                threading.Thread(target=self._beat, name="group-heartbeats", daemon=True).start()
            self._changed.notify_all()

    def remove(self, heart: Heart) -> None:
        """Renew a membership no more; a call that was begun goes on. Idempotent."""
        with self._changed:
            self._due.pop(heart, None)
            if not self._due:
                self._changed.notify_all()

    def close(self) -> None:
        """End the thread. Idempotent."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _beat(self) -> None:
        while True:
            with self._changed:
                while True:
                    if self._closed or not self._due:
                        self._beating = False
                        return
                    left = min(self._due.values()) - self._clock()
                    if left <= 0:
                        break
                    self._changed.wait(left)
            self.beat()

    def beat(self) -> int:
        """Renew the memberships that are due, those first that have waited longest; return how many were asked for."""
        with self._changed:
            now = self._clock()
            due = sorted(
                (at, number, heart)
                for number, (heart, at) in enumerate(self._due.items())
                if at - min(_EARLY_SECONDS, heart.interval / 4) <= now
            )
            hearts = [heart for _, _, heart in due[:MAX_MEMBERS]]
        if self._send is None or self._clock() < self._older_until:
            return sum(self._beat_alone(heart) for heart in hearts)
        begun: list[tuple[Heart, dict[str, Any]]] = []
        for heart in hearts:
            if (request := self._begin(heart)) is not None:
                begun.append((heart, request))
        answers: list[Answer] = []
        try:
            if begun:
                answers = list(self._send([request for _, request in begun]))
        except InvalidArgument as error:
            _log.info("the server is called for each member of a group: %s", error)
            self._older_until = self._clock() + _OLDER_SECONDS
            answers = [LogUnavailable("the server knows no common heartbeats")] * len(begun)
        except Exception as error:
            answers = [error] * len(begun)
        for number, (heart, _) in enumerate(begun):
            self._end(heart, answers[number] if number < len(answers) else LogUnavailable("the server left it out"))
        return len(begun)

    def _beat_alone(self, heart: Heart) -> int:
        request = self._begin(heart)
        if request is None:
            return 0
        try:
            answer: Answer = heart.send(request)
        except Exception as error:
            answer = error
        self._end(heart, answer)
        return 1

    def _begin(self, heart: Heart) -> dict[str, Any] | None:
        request = None
        try:
            request = heart.begin()
        except Exception:  # of one member; the others go on
            _log.exception("a heartbeat could not be begun")
        self._next(heart, _BUSY_SECONDS if request is None else heart.interval)
        return request

    def _end(self, heart: Heart, answer: Answer) -> None:
        try:
            heart.end(answer)
        except Exception:
            _log.exception("the answer to a heartbeat could not be followed")
        self._next(heart, heart.interval)

    def _next(self, heart: Heart, seconds: float) -> None:
        with self._changed:
            if heart in self._due:
                self._due[heart] = self._clock() + seconds


class ConsumerThreads(Closeable):
    """The threads of the stream consumers of one connection."""

    def __init__(self, send: SendHeartbeats | None = None) -> None:
        self.pool = JobPool("consumer", threads=THREADS)
        self.heartbeats = Heartbeats(send)

    def close(self) -> None:
        """End the threads. The consumers are closed before. Idempotent."""
        self.heartbeats.close()
        self.pool.close()
