"""Group commit: of the threads that wait at once, one leads and commits what waits for all of them.

A thread that is alone commits at once. While it does, others gather; one of them leads the next group. So the cost of a
commit is shared by as many threads as came during the last one, and nobody waits for a timer.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Generic, TypeVar

T = TypeVar("T")
A = TypeVar("A")


class Waiter(Generic[T, A]):
    """One thread's item, and its answer once it is committed."""

    __slots__ = ("_leads", "_turn", "answer", "item")

    def __init__(self, item: T) -> None:
        self.item = item
        self.answer: A | Exception | None = None
        """None until the item is committed; an exception is raised to its thread."""
        self._turn = threading.Lock()
        self._turn.acquire()
        self._leads = False
        """Whether it was woken to lead."""

    def _wake(self) -> None:
        with suppress(RuntimeError):  # a leader is awake
            self._turn.release()


class GroupCommit(Generic[T, A]):
    """Commits the items of concurrent threads in groups, one group at a time. Thread-safe."""

    def __init__(
        self,
        take: Callable[[deque[Waiter[T, A]]], list[Waiter[T, A]]],
        commit: Callable[[Sequence[Waiter[T, A]]], None],
        *,
        interrupted: Callable[[], Exception],
        copy: Callable[[Exception], Exception],
    ) -> None:
        """`take` removes the next group from what waits, at least one item. `commit` sets the answer of each.

        If `commit` raises, the items without an answer get a `copy` of the error each, or, if the leading thread was
        interrupted, the error that `interrupted` returns.
        """
        self._take = take
        self._commit = commit
        self._interrupted = interrupted
        self._copy = copy
        self._lock = threading.Lock()
        self.waiting: deque[Waiter[T, A]] = deque()
        """Items that no leader has taken yet. Read it for its length only."""
        self._leading = False

    def commit(self, item: T) -> A:
        """Commit an item together with those of other threads. Returns its answer, or raises it if it is an error."""
        own = Waiter[T, A](item)
        with self._lock:
            self.waiting.append(own)
            leads, self._leading = not self._leading, True
        if not leads:
            self._wait(own)
        if own.answer is None:
            self._lead(own)
        assert own.answer is not None
        if isinstance(own.answer, Exception):
            raise own.answer
        return own.answer

    def _wait(self, own: Waiter[T, A]) -> None:
        """Wait for the answer, or for the lead."""
        try:
            own._turn.acquire()
        except BaseException:  # interrupted: the item is not committed if it was not taken yet
            with self._lock:
                with suppress(ValueError):
                    self.waiting.remove(own)
                leads = own._leads
            if leads:
                self._hand_over()
            raise

    def _lead(self, own: Waiter[T, A]) -> None:
        """Commit groups until `own` has its answer; then hand over."""
        try:
            while own.answer is None:
                with self._lock:
                    taken = self._take(self.waiting)
                self._commit_group(taken)
        finally:
            self._hand_over()

    def _hand_over(self) -> None:
        with self._lock:
            if self.waiting:
                following = self.waiting[0]
                following._leads = True
                following._wake()
            else:
                self._leading = False

    def _commit_group(self, taken: Sequence[Waiter[T, A]]) -> None:
        """Commit a group and wake each of its threads, whatever happens."""
        fault = self._interrupted()
        try:
            self._commit(taken)
        except Exception as error:
            fault = error
        finally:
            for each in taken:
                if each.answer is None:
                    each.answer = self._of(fault)
                if not each._leads:
                    each._wake()

    def _of(self, fault: Exception) -> Exception:
        """Return the error of one thread: a copy, or the error itself if it cannot be copied. Nobody waits forever."""
        try:
            return self._copy(fault)
        except Exception:
            return fault
