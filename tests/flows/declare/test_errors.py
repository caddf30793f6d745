"""What a declaration says of records that fail."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from millrace.flows.declare.errors import MAX_SKIPPED, ErrorLimit, Errors


def test_an_older_declaration_means_what_it_meant() -> None:
    made = Errors(topic="failed")
    assert (made.tries, made.in_a_row, made.limit, made.skip) == (3, 20, None, ())


@pytest.mark.parametrize(
    ("value", "told"),
    [
        ({"limit": {}}, "share, count or both"),
        ({"limit": {"over": 100}}, "share, count or both"),
        ({"limit": {"share": 1.5}}, "share"),
        ({"limit": {"count": -1}}, "count"),
        ({"limit": {"count": 1, "over": 0}}, "over"),
        ({"tries": 0}, "tries"),
        ({"in_a_row": 0}, "in_a_row"),
        ({"skip": [{"lane": "", "position": 1}]}, "lane"),
        ({"skip": [{"lane": "a-0", "position": -1}]}, "position"),
        ({"skip": [{"lane": "a-0", "position": 1 << 63}]}, "position"),
        ({"skip": [{"lane": "a-0", "position": n} for n in range(MAX_SKIPPED + 1)]}, "skip"),
    ],
)
def test_what_says_nothing_or_too_much_is_refused(value: dict[str, Any], told: str) -> None:
    with pytest.raises(ValidationError, match=told):
        Errors.model_validate(value)


@pytest.mark.parametrize(
    ("limit", "windows", "told"),
    [
        ({"count": 10}, [(50, 5), (50, 5)], ""),
        ({"count": 10}, [(50, 5), (50, 6)], "11 records failed"),
        ({"count": 0}, [(50, 1)], "1 records failed"),
        ({"share": 0.01, "over": 1000}, [(3, 3)], ""),
        ({"share": 0.01, "over": 1000}, [(3, 3), (200, 11)], "11 of 1000"),
        ({"share": 0.01, "over": 1000}, [(4000, 40)], ""),
        ({"share": 0.01, "over": 1000}, [(4000, 41)], "41 of 4000"),
        ({"share": 1.0}, [(100_000, 100_000)], ""),
        ({"count": 10}, [], ""),
    ],
)
def test_a_limit_counts_the_windows_of_all_lanes_and_shares_of_each(
    limit: dict[str, Any], windows: list[tuple[int, int]], told: str
) -> None:
    found = ErrorLimit.model_validate(limit).exceeded(windows)
    assert told in found
    assert bool(told) == bool(found)
