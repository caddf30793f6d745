"""The end of the demo says whether every engine answers as Millrace does."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from millrace.demo.engines import EngineAnswer, print_answers

OWN = [("EWR", 10, 2_000, -3), ("JFK", 20, 1_000, None)]


@pytest.mark.parametrize(
    ("rows", "equal"),
    [
        (OWN, True),
        ([("EWR", 10, 2_000, -3), ("JFK", 21, 1_000, None)], False),
        (OWN[:1], False),
        ([*OWN, ("LGA", 1, 1, 1)], False),
    ],
)
def test_an_answer_that_differs_is_told(rows: list[tuple[object, ...]], equal: bool) -> None:
    console = Console(file=io.StringIO(), width=120)
    answers = [EngineAnswer("Millrace", OWN, 0.1), EngineAnswer("Other", rows, 1.0)]
    assert print_answers(7, answers, console) is equal
    said = console.file.getvalue()  # type: ignore[attr-defined]
    assert ("differs" in said) is not equal
    assert "at tick 7" in said
    assert "3,000" in said
