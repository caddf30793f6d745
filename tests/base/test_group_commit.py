"""Group commit: one thread leads, the others gather; whatever happens, each has an answer of its own."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import copy

import pytest

from millrace.base.group_commit import GroupCommit, Waiter
from tests.waiting import until

Item = Waiter[int, int]


class Groups:
    """Commits numbers, at most `limit` at once, and keeps the first group back until so many others wait."""

    def __init__(
        self, *, waiting: int, limit: int = 100, commit: Callable[[Sequence[Item]], None] | None = None
    ) -> None:
        self.groups: list[list[int]] = []
        self._waiting = waiting
        self._limit = limit
        self._then = commit
        self.commit: GroupCommit[int, int] = GroupCommit(
            self._take, self._commit, interrupted=lambda: ConnectionError("interrupted"), copy=copy
        )

    def _take(self, waiting: deque[Item]) -> list[Item]:
        return [waiting.popleft() for _ in range(min(self._limit, len(waiting)))]

    def _commit(self, taken: Sequence[Item]) -> None:
        self.groups.append([each.item for each in taken])
        if len(self.groups) == 1:
            until(lambda: len(self.commit.waiting) == self._waiting)
        if self._then is not None:
            self._then(taken)
        for each in taken:
            each.answer = each.item * 2

    def run(self, count: int) -> list[int | BaseException]:
        with ThreadPoolExecutor(count) as pool:
            calls = [pool.submit(self.commit.commit, number) for number in range(count)]
            return [each.exception() or each.result() for each in calls]


def test_what_waits_is_committed_together_and_in_parts_that_fit() -> None:
    made = Groups(waiting=20, limit=8)
    assert made.run(21) == [2 * number for number in range(21)]
    assert [len(group) for group in made.groups] == [1, 8, 8, 4]
    assert made.commit.commit(30) == 60, "one that is alone commits at once"


def test_an_error_is_a_copy_for_each_that_has_no_answer_yet() -> None:
    def fail(taken: Sequence[Item]) -> None:
        if len(taken) > 1:
            taken[0].answer = 7
            raise ValueError("it broke")

    found = Groups(waiting=5, commit=fail).run(6)
    errors = [each for each in found if isinstance(each, BaseException)]
    assert [str(each) for each in errors] == ["it broke"] * 4
    assert len({id(each) for each in errors}) == 4
    assert 7 in found


def test_an_interrupted_leader_leaves_the_others_an_error_and_the_next_leads() -> None:
    interrupted = threading.Event()

    def interrupt(taken: Sequence[Item]) -> None:
        if len(taken) > 1 and not interrupted.is_set():
            interrupted.set()
            raise KeyboardInterrupt

    made = Groups(waiting=5, commit=interrupt)
    found = made.run(6)
    assert [type(each) for each in found].count(KeyboardInterrupt) == 1
    assert [type(each) for each in found].count(ConnectionError) == 4
    assert made.commit.commit(4) == 8


def test_a_thread_that_is_interrupted_while_it_waits_is_not_committed(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Groups(waiting=1)
    waiting = made.commit._wait

    def interrupt(own: Item) -> None:
        own._turn = Interrupted()  # type: ignore[assignment]
        waiting(own)

    class Interrupted:
        def acquire(self) -> None:
            until(lambda: len(made.commit.waiting) == 1)
            raise KeyboardInterrupt

        def release(self) -> None: ...

    monkeypatch.setattr(made.commit, "_wait", interrupt)
    made._waiting = 0
    begun = threading.Event()
    first = threading.Thread(target=lambda: made.commit.commit(1))

    def hold(taken: Sequence[Item]) -> None:
        begun.set()
        assert released.wait(10)

    released = threading.Event()
    made._then = hold
    first.start()
    assert begun.wait(10)
    with pytest.raises(KeyboardInterrupt):
        made.commit.commit(2)
    released.set()
    first.join(10)
    made._then = None
    assert made.commit.commit(3) == 6
    assert made.groups == [[1], [3]]


def test_an_error_that_cannot_be_copied_reaches_every_thread() -> None:
    """No thread of the group waits forever."""
    gate = threading.Event()

    def commit(taken: Sequence[Waiter[int, int]]) -> None:
        if taken[0].item == 0:
            gate.wait(10.0)
        raise ValueError("no space")

    def copied(error: Exception) -> Exception:
        raise TypeError("it takes other arguments")

    def take(waiting: deque[Waiter[int, int]]) -> list[Waiter[int, int]]:
        taken = list(waiting)
        waiting.clear()
        return taken

    group = GroupCommit[int, int](take, commit, interrupted=lambda: OSError("interrupted"), copy=copied)
    raised: list[str] = []

    def one(item: int) -> None:
        try:
            group.commit(item)
        except ValueError as error:
            raised.append(str(error))

    threads = [threading.Thread(target=one, args=(item,), daemon=True) for item in range(4)]
    threads[0].start()
    for each in threads[1:]:
        each.start()
    until(lambda: len(group.waiting) == 3, "the others wait")
    gate.set()
    for each in threads:
        each.join(5.0)
    assert raised == ["no space"] * 4
