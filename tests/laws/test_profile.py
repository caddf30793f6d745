"""A law that fails shows its example: shrinking ends long before the test's time does."""

from __future__ import annotations

import hypothesis.internal.conjecture.engine as engine
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st


def calls_behind_the_first_failure() -> int:
    calls: list[bool] = []

    @settings(max_examples=50, database=None, derandomize=True)
    @given(st.lists(st.integers(0, 1000), max_size=50))
    def fails(values: list[int]) -> None:
        calls.append(sum(values) > 500)
        assert not calls[-1]

    with pytest.raises(AssertionError) as caught:
        fails()
    assert any("values=" in note for note in caught.value.__notes__), "the example is shown"
    return len(calls) - calls.index(True)


def test_a_failing_example_is_shown_though_there_is_no_time_to_make_it_smaller(
    pytestconfig: pytest.Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert float(pytestconfig.getini("timeout")) / 4 >= engine.MAX_SHRINKING_SECONDS
    shrunk = calls_behind_the_first_failure()
    monkeypatch.setattr(engine, "MAX_SHRINKING_SECONDS", 0)
    assert calls_behind_the_first_failure() < 10 < shrunk
