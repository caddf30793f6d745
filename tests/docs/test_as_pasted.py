"""Quickstart and tutorials run as pasted and print what they say."""

from __future__ import annotations

import pytest

from tests.docs import as_pasted


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("page", as_pasted.PAGES)
def test_a_page_runs_as_pasted(page: str) -> None:
    as_pasted.run(page)


def test_what_differs_from_run_to_run_is_the_same() -> None:
    page = ["Accepted 3 rows in 1 messages, 10.6 s.", "tick 470724117383348226", "…", "1 row, … dropped"]
    printed = [
        "Accepted 3 rows in 1 messages, 0.3 s.",
        "tick 470724117383348999",
        "more",
        "and more",
        "1 row, 2 dropped",
    ]
    assert as_pasted.same(page, printed)
    assert as_pasted.same(["", "a", "", "b"], ["a  ", "", "b", ""])


def test_other_words_are_not_the_same() -> None:
    assert not as_pasted.same(["3 rows"], ["4 rows"])
    assert not as_pasted.same(["3 rows"], ["3 rows", "and a warning"])
