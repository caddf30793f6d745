"""Attempts that failed at one moment are spread, and none comes before its time."""

from __future__ import annotations

from millrace.base.backoff import JITTER, jittered


def test_a_pause_is_at_least_what_was_asked_for_and_hardly_ever_the_same() -> None:
    drawn = [jittered(2.0) for _ in range(100)]
    assert all(2.0 <= each <= 2.0 * (1 + JITTER) for each in drawn)
    assert len(set(drawn)) > 90
    assert jittered(0.0) == 0.0
