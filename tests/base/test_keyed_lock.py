"""Callers of one name come one by one, those of others beside them."""

from __future__ import annotations

import threading

from millrace.base.keyed_lock import KeyedLock


def test_a_name_has_one_caller_at_a_time_and_another_name_is_not_waited_for() -> None:
    turns, inside, most, counted = KeyedLock(), [0, 0], [0, 0], [0, 0]
    met = threading.Barrier(2, timeout=30.0)

    def works(name: int) -> None:
        for _ in range(200):
            with turns.acquire(f"{name}"), turns.acquire(f"{name}"):
                inside[name] += 1
                most[name] = max(most[name], inside[name])
                counted[name] += 1
                inside[name] -= 1

    def meets(name: str) -> None:
        with turns.acquire(name):
            met.wait()  # both are inside

    threads = [threading.Thread(target=works, args=(number % 2,)) for number in range(8)]
    threads += [threading.Thread(target=meets, args=(name,)) for name in ("a", "b")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60.0)
    turns.wait_idle()
    assert (most, counted, met.broken) == ([1, 1], [800, 800], False)


def test_who_does_not_wait_is_told_and_nothing_is_remembered_behind_the_last_caller() -> None:
    turns, told = KeyedLock(), list[bool]()

    def asks() -> None:
        with turns.acquire("a", blocking=False) as mine:
            told.append(mine)

    with turns.acquire("a"):
        asking = threading.Thread(target=asks)
        asking.start()
        asking.join(30.0)
        assert turns._turns
    asks()
    assert told == [False, True]
    assert not turns._turns
