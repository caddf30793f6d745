"""Turns: one at a time, in the order of asking, and whoever gives up while it waits holds nobody up."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.client.produce.fair_lock import FairLock


class Gate(threading.Condition):
    """A condition of which a thread that is in `leaving` is interrupted instead of waiting on."""

    def __init__(self) -> None:
        super().__init__()
        self.leaving: set[str] = set()

    def wait(self, timeout: float | None = None) -> bool:
        found = super().wait(0.01)
        if threading.current_thread().name in self.leaving:
            raise KeyboardInterrupt
        return found


def started(name: str, target: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=target, name=name, daemon=True)
    thread.start()
    return thread


@settings(max_examples=15, deadline=None)
@given(st.lists(st.booleans(), min_size=1, max_size=5))
def test_whoever_is_interrupted_while_it_waits_passes_its_turn_on(interrupted: list[bool]) -> None:
    turns, gate = FairLock(), Gate()
    turns._changed = gate
    order: list[int] = []

    def wait(number: int) -> None:
        if interrupted[number]:
            with pytest.raises(KeyboardInterrupt), turns.held():
                pytest.fail("it was interrupted before its turn")
        else:
            with turns.held():
                order.append(number)

    with turns.held():
        threads = []
        for number in range(len(interrupted)):
            asked = turns._next
            threads.append(started(str(number), lambda number=number: wait(number)))  # type: ignore[misc]
            with gate:
                assert gate.wait_for(lambda asked=asked: turns._next > asked, timeout=10)  # type: ignore[misc]
        gate.leaving = {str(number) for number, gone in enumerate(interrupted) if gone}
        for number, thread in enumerate(threads):
            if interrupted[number]:
                thread.join(timeout=10)
                assert not thread.is_alive()
    for thread in threads:
        thread.join(timeout=10)
        assert not thread.is_alive(), "an interrupted waiter keeps the turn"
    assert order == [number for number, gone in enumerate(interrupted) if not gone]
    assert not turns.contended
