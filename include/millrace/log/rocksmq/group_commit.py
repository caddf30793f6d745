"""Group commit: appends of several threads become one write and one sync.

A thread that finds no leader becomes the leader, takes the queued appends and commits them. The others wait for their
batch, and one of them leads the next group. A single append never waits for others. An error that leaves the medium
in an unknown state stops appends (fail-stop) until the log is reopened: a failed sync is never retried as if it had
succeeded.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

from millrace.base.errors import LogUnavailable
from millrace.log.rocksmq.record import FramedBatch


class DiskFull(OSError):
    """The disk is full. Nothing was written, and the log is unchanged."""


class IdsUnavailable(Exception):
    """No ids are available for a group. Nothing was written, and the log is unchanged."""


@dataclass(slots=True, eq=False)
class PendingAppend:
    """A framed batch in the queue. ``base`` is its first id once it is ``done`` without an ``error``."""

    framed: FramedBatch
    base: int = -1
    done: bool = False
    error: BaseException | None = None


class GroupCommit:
    """The queue of one log's appends.

    `commit(group)` is called by the leader with `lock` held and may release it temporarily. It returns when every
    append of the group is durable and published, and raises otherwise.
    """

    def __init__(
        self, lock: threading.Lock, *, name: str, group_bytes: int, commit: Callable[[list[PendingAppend]], None]
    ) -> None:
        self._lock = lock
        self._written = threading.Condition(lock)
        self._name = name
        self._group_bytes = group_bytes
        self._commit = commit
        self._queue: list[PendingAppend] = []
        self._leading = False
        self._failure: BaseException | None = None
        self._closed = False

    @property
    def failure(self) -> BaseException | None:
        """The error that stopped the log."""
        return self._failure

    def append(self, framed: FramedBatch) -> int:
        """Commit a batch; return its first id when it is durable.

        Raises LogUnavailable.
        """
        mine = PendingAppend(framed)
        with self._lock:
            self._check()
            # Every waiting thread may become the leader, including one whose batch is in the middle of the queue: it
            # commits a group from the front, and loops until its own is done.
            self._queue.append(mine)
            while not mine.done:
                if self._leading:
                    self._written.wait()
                else:
                    self._lead()
        if mine.error is not None:
            raise LogUnavailable(f"an append to {self._name!r} failed: {mine.error}") from mine.error
        return mine.base

    def resume(self) -> None:
        """Accept appends again after a repaired failure. Called with the lock held."""
        self._failure = None

    def close(self) -> None:
        """Refuse new appends and wait for the one in progress. Called with the lock held."""
        self._closed = True
        while self._leading:
            self._written.wait()
        self._fail(self._queue, LogUnavailable(f"the log of {self._name!r} was closed"))
        self._queue = []
        self._written.notify_all()

    def _check(self) -> None:
        if self._closed:
            raise LogUnavailable(f"the log of {self._name!r} is closed: open it again")
        if self._failure is not None:
            raise LogUnavailable(
                f"the log of {self._name!r} stopped after a failed write ({self._failure}): reopen it"
            ) from self._failure

    def _lead(self) -> None:
        group = self._take()
        self._leading = True
        try:
            self._commit(group)
        # Nothing was written: only this group fails, and the log goes on.
        except (DiskFull, IdsUnavailable) as refused:
            self._fail(group, refused)
        except BaseException as failure:
            # A write or sync failed: the kernel may have dropped dirty pages, so a later sync that succeeds would prove
            # nothing. Stop until the log is reopened.
            self._failure = failure
            self._fail(group + self._queue, failure)
            self._queue = []
            if not isinstance(failure, Exception):
                raise
        finally:
            self._leading = False
            self._written.notify_all()

    def _take(self) -> list[PendingAppend]:
        size = 0
        for count, append in enumerate(self._queue):
            size += append.framed.size
            # `count and`: a single batch may exceed the limit, or it would never be written.
            if count and size > self._group_bytes:
                group, self._queue = self._queue[:count], self._queue[count:]
                return group
        group, self._queue = self._queue, []
        return group

    @staticmethod
    def _fail(appends: list[PendingAppend], error: BaseException) -> None:
        for append in appends:
            append.error, append.done = error, True
