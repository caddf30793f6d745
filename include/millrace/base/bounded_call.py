"""Run code of other packages for a limited time.

    calls = BoundedCalls("policy", most=4)
    moves = calls.run(lambda: policy(view), 5.0)

Python cannot stop a thread. A call that exceeds its time goes on in its own thread, and its caller goes on without it.
At most `most` calls run at a time, so calls that never return cost a bounded number of threads.
"""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable, Hashable
from typing import Final, Generic, TypeVar, cast

LATE_SECONDS: Final = 1.0
"""Time for which a call that exceeded its time is waited for again."""

T = TypeVar("T")


class _Call(Generic[T]):
    """A call in a thread of its own."""

    def __init__(self, call: Callable[[], T], name: str) -> None:
        self._call = call
        self._done = threading.Event()
        self._result: T | None = None
        self._error: BaseException | None = None
        self._late = False
        context = contextvars.copy_context()
        threading.Thread(target=context.run, args=(self._run,), name=name, daemon=True).start()

    def _run(self) -> None:
        try:
            self._result = self._call()
        except BaseException as error:  # also SystemExit: code of another package must not end a thread of ours
            self._error = error
        self._done.set()

    @property
    def done(self) -> bool:
        return self._done.is_set()

    def result(self, seconds: float) -> T:
        if not self._done.wait(min(seconds, LATE_SECONDS) if self._late else seconds):
            self._late = True
            raise TimeoutError(f"it has not returned within {seconds:g} s and still runs")
        if isinstance(self._error, Exception):
            raise self._error
        if self._error is not None:
            raise RuntimeError(f"it raised {type(self._error).__name__}: {self._error}") from self._error
        return cast(T, self._result)


class BoundedCalls:
    """Calls that each have a limited time. Thread-safe."""

    def __init__(self, name: str, *, most: int) -> None:
        """`name` names the threads."""
        self._name = name
        self._most = most
        self._lock = threading.Lock()
        self._calls: dict[Hashable, _Call[object]] = {}

    def run(self, call: Callable[[], T], seconds: float, *, key: Hashable = None) -> T:
        """Return what `call` returns, or raise what it raises; anything but an Exception is a RuntimeError.

        A call with a `key` that timed out is not started again: the next one of that key waits a second for it, and has
        its result.
        Raises TimeoutError after `seconds`, or at once if `most` calls are still running.
        """
        known: Hashable = object() if key is None else key
        with self._lock:
            found = self._calls.get(known)
            if found is None:
                if len(self._calls) >= self._most:
                    self._calls = {each: there for each, there in self._calls.items() if not there.done}
                if len(self._calls) >= self._most:
                    raise TimeoutError(f"{self._most} earlier calls have not returned, so it was not called")
                found = self._calls[known] = _Call(call, self._name)
        try:
            return cast(T, found.result(seconds))
        finally:
            with self._lock:
                if found.done and self._calls.get(known) is found:
                    del self._calls[known]
