"""Schedules of flows: what is accepted runs again and again under Airflow, whose library reads the same text."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest
from croniter import croniter
from hypothesis import given
from hypothesis import strategies as st

from millrace.flows.declare.worker import check_schedule

_MONTHS = ("jan", "FEB", "Mar", "dec")


def _spans(low: int, high: int, names: tuple[str, ...]) -> st.SearchStrategy[str]:
    value = st.integers(low - 1, high + 1)
    one = st.one_of(
        st.just("*"), value.map(str), st.tuples(value, value).map(lambda ends: f"{ends[0]}-{ends[1]}"),
        st.sampled_from(names) if names else st.just("*"),
    )  # fmt: skip
    stepped = st.tuples(one, st.one_of(st.just(""), st.integers(0, high + 1).map(lambda step: f"/{step}")))
    return st.lists(stepped.map("".join), min_size=1, max_size=2).map(",".join)


_CRON = st.tuples(
    _spans(0, 59, ()), _spans(0, 23, ()), _spans(1, 31, ()), _spans(1, 12, _MONTHS), _spans(0, 7, ("sun", "Fri"))
).map(" ".join)


def _accepted(text: str) -> bool:
    try:
        return check_schedule(text) == text
    except ValueError:
        return False


@given(_CRON)
def test_an_expression_that_is_accepted_is_one_of_airflow_s_and_comes_again(text: str) -> None:
    if _accepted(text):
        assert croniter(text, datetime(2026, 1, 1, tzinfo=UTC)).get_next(float) > 0


@pytest.mark.parametrize(
    "text",
    ["continuous", "@hourly", "@daily", "@weekly", "@monthly", "@yearly", "0 2 * * *", "*/15 8-18 * * mon-fri",
     "0 0 29 2 *", "5/10,59 * 1,15 jan,JUL 7", "0 0 30 2 mon"],
)  # fmt: skip
def test_schedules(text: str) -> None:
    assert check_schedule(text) == text
    if not text.startswith("c"):
        assert croniter.is_valid(text)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "is continuous, one of @hourly, .* or a cron expression"),
        ("@once", "is continuous, one of"),
        ("daily", "is continuous, one of"),
        ("0 2 * *", "is continuous, one of"),
        ("0 0 2 * * *", "is continuous, one of"),
        ("60 * * * *", "the minute '60' is not 0 to 59"),
        ("* 5-2 * * *", "the hour '5-2' is not 0 to 23"),
        ("* * 0 * *", "the day '0' is not 1 to 31"),
        ("* * * abc *", "the month 'abc' is not 1 to 12"),
        ("* * * * 1-2-3", "the weekday '1-2-3' is not 0 to 7"),
        ("*/0 * * * *", "the minute '\\*/0' has no step of 1 to 59"),
        ("1/ * * * *", "the minute '1/' has no step"),
        ("٣ * * * *", "the minute '٣' is not"),
        ("0 0 30 2 *", "no month of '2' has a day 30, so it would never run"),
        ("0 0 31 4,6 *", "no month of '4,6' has a day 31"),
    ],
)  # fmt: skip
def test_a_text_that_is_no_schedule_is_refused(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        check_schedule(text)
