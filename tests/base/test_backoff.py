"""Delays between retries double up to their bound, never fall below what was asked for, and start again on success."""

from __future__ import annotations

import pytest

from millrace.base import backoff
from millrace.base.backoff import JITTER, Backoff, jittered


def test_jitter_only_lengthens_a_delay() -> None:
    delays = [jittered(2.0) for _ in range(200)]
    assert all(2.0 <= delay <= 2.0 * (1 + JITTER) for delay in delays)
    assert len(set(delays)) > 100, "clients that failed together do not retry together"
    assert jittered(0.0) == 0.0


def test_delays_double_up_to_the_longest_and_start_again_after_a_reset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backoff, "jittered", lambda seconds: seconds)
    delays = Backoff(1.0, 5.0)
    assert [delays.next_delay() for _ in range(5)] == [1.0, 2.0, 4.0, 5.0, 5.0]
    delays.reset()
    assert [delays.next_delay() for _ in range(2)] == [1.0, 2.0]


def test_a_first_delay_above_the_longest_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backoff, "jittered", lambda seconds: seconds)
    delays = Backoff(8.0, 5.0)
    assert [delays.next_delay() for _ in range(2)] == [8.0, 8.0]
