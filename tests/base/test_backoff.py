"""Delays between retries double up to their bound, never fall below what was asked for, and start again on success."""

from __future__ import annotations

import pytest

from millrace.base import backoff
from millrace.base.backoff import JITTER, Backoff, delay_after, jittered


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


def test_a_delay_by_a_count_of_failures_grows_by_its_factor_up_to_the_longest() -> None:
    assert [delay_after(failures, 1.0, 5.0) for failures in range(5)] == [0.0, 1.0, 2.0, 4.0, 5.0]
    assert [delay_after(failures, 2.0, 100.0, factor=3.0) for failures in (1, 2, 3, 9)] == [2.0, 6.0, 18.0, 100.0]
    assert delay_after(10**6, 1.0, 60.0) == 60.0, "no overflow"
    assert delay_after(10**6, 7.0, 60.0, factor=1.0) == 7.0
