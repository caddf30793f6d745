"""What numbers prove lost: exactly those between the first and the greatest that never came."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.flows.sources.direct import losses
from millrace.flows.sources.direct.losses import SequenceTracker

WIDTHS = st.sampled_from([None, 2, 4, 8])


@given(
    st.integers(2, 400),
    st.sets(st.integers(0, 399)),
    st.lists(st.integers(0, 399), max_size=20),
    st.integers(0, 40),
    WIDTHS,
    st.randoms(use_true_random=False),
)
def test_lost_are_the_numbers_that_never_came_however_the_others_are_shuffled(
    count: int, dropped: set[int], repeated: list[int], shuffle: int, width: int | None, dice: random.Random
) -> None:
    modulus = None if width is None else 1 << (8 * width)
    begin = 0 if modulus is None else modulus - count // 2  # half of them come after the greatest number
    sent = [number for number in range(count) if number not in dropped]
    sent += [number for number in repeated if number in set(sent)]
    first = min(sent, default=0)
    # The first comes first, and none is later than the window allows.
    sent.sort(key=lambda number: (number + (dice.random() * shuffle if number != first else 0), number))
    tracker = SequenceTracker(width)
    for number in sent:
        tracker.see("a", begin + number if modulus is None else (begin + number) % modulus)
    came = set(sent)
    assert tracker.counts["lost"] == (max(came) - min(came) + 1 - len(came) if came else 0)
    assert tracker.counts["repeated"] == len(sent) - len(came)
    assert not tracker.counts["restarts"]


def test_senders_have_numbers_of_their_own() -> None:
    tracker = SequenceTracker(None)
    for number in (1, 2, 5):
        tracker.see("a", number)
        tracker.see("b", 10 * number)
    assert tracker.counts["lost"] == 2 + 9 + 29
    assert tracker.greatest() == {"a": 5, "b": 50}


def test_a_sender_that_begins_anew_proves_nothing() -> None:
    tracker = SequenceTracker(4)
    for number in (5_000_000, 5_000_001, 0, 1, 3):
        tracker.see("a", number)
    assert (tracker.counts["restarts"], tracker.counts["lost"]) == (1, 1)


def test_a_gap_across_a_restart_of_this_process_counts() -> None:
    before = SequenceTracker(None)
    before.see("a", 7)
    after = SequenceTracker(None, before.greatest())
    after.see("a", 10)
    assert after.counts["lost"] == 2


@pytest.mark.parametrize("width", [1, 2])
def test_a_number_that_wraps_is_another_message(width: int) -> None:
    """A repeated message is not the one that was lost a turn before."""
    modulus = 1 << (8 * width)
    tracker = SequenceTracker(width)
    for number in range(2 * modulus):
        if number != 5:
            tracker.see("a", number % modulus)
        if number == modulus + 5:
            tracker.see("a", 4)
            tracker.see("a", 5)
    assert dict(tracker.counts) == {"lost": 1, "repeated": 2}
    assert not tracker._senders["a"].missing


@pytest.mark.parametrize("gap", [100, 126])
def test_late_messages_of_short_numbers_are_not_lost(gap: int) -> None:
    tracker = SequenceTracker(1)
    for start in range(0, 2_000, gap + 2):
        tracker.see("a", start % 256)
        tracker.see("a", (start + gap + 1) % 256)
        for number in range(start + 1, start + gap + 1):
            tracker.see("a", number % 256)
    assert (tracker.counts["lost"], tracker.counts["repeated"]) == (0, 0)


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(losses, "MAX_SENDERS", 3)
    tracker = SequenceTracker(None)
    for sender in range(10):
        tracker.see(str(sender), 1)
    assert list(tracker.greatest()) == ["7", "8", "9"]
    assert tracker.counts["forgotten"] == 7
    for number in range(0, 100_000, 2):
        tracker.see("9", number)
    assert len(tracker._senders["9"].missing) <= losses.WINDOW
    assert tracker.counts["lost"] == 49_998 + 1 - 1 or tracker.counts["lost"] == 49_999
