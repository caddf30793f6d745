"""A pattern over a stream says what it says over the whole, however the stream is cut, disordered and sharded."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, assume, given
from hypothesis import settings as profile
from hypothesis import strategies as st

from millrace.base.errors import InvalidArgument
from millrace.streams.keyed.in_process import Run
from millrace.streams.keyed.operator import Counts
from millrace.streams.operators.patterns import Patterns
from millrace.streams.patterns.query import MatchRecognize
from millrace.streams.patterns.sql import parse
from millrace.streams.patterns.table import match_table
from tests.streams.operators.cuts import Row, alike, disordered, streamed
from tests.streams.patterns.test_against_model import SCHEMA, cases, usable


def ordered(rows: list[Row]) -> pa.Table:
    """As a stream orders equal times."""
    nulls_last = lambda value: (value is None, value)  # noqa: E731
    rows = sorted(rows, key=lambda row: (row["t"], nulls_last(row["k"]), nulls_last(row["v"])))
    return pa.Table.from_pylist(rows, SCHEMA)


@given(st.data(), cases(captured=True), st.integers(0, 4), st.integers(1, 3))
@profile(max_examples=80, suppress_health_check=list(HealthCheck))
def test_a_stream_is_answered_as_the_whole(
    data: st.DataObject, case: tuple[MatchRecognize, list[Row]], delay: int, shards: int
) -> None:
    query, rows = case
    operator = Patterns(query, "t")
    try:
        operator.check(SCHEMA)
    except InvalidArgument:  # anchors, NEXT
        assume(False)
    assume(usable(query))
    batches = data.draw(disordered(rows, delay))
    try:
        meant = match_table(query, ordered(rows)).to_pylist()
    except InvalidArgument:
        with pytest.raises(InvalidArgument, match="AFTER MATCH SKIP"):
            streamed(operator, SCHEMA, batches, delay, shards)
        return
    found, late, taken = streamed(operator, SCHEMA, batches, delay, shards)
    assert alike(found) == alike(meant)
    assert (late, taken) == ([], len(rows))


RISING = """PARTITION BY k ORDER BY t MEASURES A.v AS a, LAST(B.v) AS b PATTERN (A B B) WITHIN INTERVAL '1' HOUR
    DEFINE B AS v > PREV(v)"""
TIMED = pa.schema([("k", pa.utf8()), ("t", pa.timestamp("us", "UTC")), ("v", pa.int64())])
START = datetime(2026, 11, 23, tzinfo=UTC)


def rows(*each: tuple[str, float, int]) -> pa.Table:
    return pa.Table.from_pylist([{"k": k, "t": START + timedelta(minutes=at), "v": v} for k, at, v in each], TIMED)


def test_a_late_row_goes_to_the_side_and_says_how_late_it_is() -> None:
    run = Run(Patterns(parse(RISING), "t"), TIMED, timedelta(minutes=5))
    run.batch(rows(("x", 0, 1), ("x", 10, 2), ("x", 20, 3)))
    step = run.batch(rows(("x", 14, 9), ("x", 15, 9)))
    assert step.counts.taken == 1
    assert [(row["late_by"], row["reason"], row["v"]) for row in step.late.to_pylist()] == [(60_000_000, "late", 9)]
    nameless = run.batch(pa.Table.from_pylist([{"k": "x", "t": None, "v": 1}], TIMED))
    assert [row["reason"] for row in nameless.late.to_pylist()] == ["no time"]
    assert nameless.counts == Counts(rejected=1)


def test_what_a_pattern_looks_back_at_and_what_may_go_on_is_kept_from_batch_to_batch() -> None:
    sql = "PARTITION BY k ORDER BY t MEASURES {} AS x PATTERN ({}) DEFINE A AS v > 0, B AS v > PREV(v)"
    rises, runs = (
        Run(Patterns(parse(sql.format(*each)), "t"), TIMED, timedelta(0))
        for each in (("B.v", "B A??"), ("COUNT(*)", "A+ B??"))
    )
    found: dict[str, list[Any]] = {"rises": [], "runs": []}
    for at, value in enumerate([1, 2, 3, -1, 5]):
        for name, run in (("rises", rises), ("runs", runs)):
            found[name] += run.batch(rows(("x", at, value))).output.column("x").to_pylist()
    found["rises"] += rises.finish().output.column("x").to_pylist()
    found["runs"] += runs.finish().output.column("x").to_pylist()
    assert found == {"rises": [2, 3, 5], "runs": [3, 1]}


def test_a_key_is_not_forgotten_while_a_match_of_it_is_open() -> None:
    numbered = parse(
        "PARTITION BY k ORDER BY t MEASURES MATCH_NUMBER() AS n, A.v AS a PATTERN (A B) DEFINE B AS v > A.v"
    )
    run = Run(Patterns(numbered, "t", forget=3), SCHEMA, 0)
    rows = [[("x", 0, 1), ("x", 1, 2), ("x", 2, 5)], [("y", 20, 1)], [("y", 40, 1)], [("x", 41, 9)]]
    steps = [
        run.batch(pa.Table.from_pylist([dict(zip(SCHEMA.names, row, strict=False)) for row in each], SCHEMA))
        for each in rows
    ]
    steps.append(run.finish())
    assert [row for step in steps for row in step.output.to_pylist()] == [
        {"k": "x", "n": 1, "a": 1},
        {"k": "x", "n": 2, "a": 5},
    ]


def test_a_key_without_an_open_match_is_forgotten_with_its_number_and_the_rows_before_it() -> None:
    query = parse(
        "PARTITION BY k ORDER BY t MEASURES MATCH_NUMBER() AS n, A.v AS a PATTERN (A) DEFINE A AS PREV(v) IS NULL OR"
        " v > PREV(v)"
    )
    forgets, keeps = Run(Patterns(query, "t", forget=3), SCHEMA, 0), Run(Patterns(query, "t"), SCHEMA, 0)
    found = {}
    for name, run in (("forgets", forgets), ("keeps", keeps)):
        steps = [
            run.batch(pa.Table.from_pylist([{"k": k, "t": t, "v": v} for k, t, v in each], SCHEMA))
            for each in ([("x", 0, 5)], [("y", 20, 1)], [("y", 40, 1)], [("x", 41, 4)])
        ]
        steps.append(run.finish())
        found[name] = [(row["n"], row["a"]) for step in steps for row in step.output.to_pylist() if row["k"] == "x"]
    assert found == {"forgets": [(1, 5), (1, 4)], "keeps": [(1, 5)]}


def test_absence_is_answered_by_the_watermark_alone() -> None:
    sql = (
        "PARTITION BY k ORDER BY t MEASURES A.v AS a PATTERN (A [^ B]) WITHIN INTERVAL '10' MINUTE DEFINE A AS v >"
        " 0, B AS v < 0"
    )
    run = Run(Patterns(parse(sql), "t"), TIMED, timedelta(0))
    answers: list[Any] = []
    for each in [(("x", 0, 1),), (("y", 5, 2),), (("x", 8, -1),), (("z", 16, 0),), (("z", 17, 0),)]:
        answers.append(run.batch(rows(*each)).output.column("a").to_pylist())
    assert answers == [[], [], [], [], [2]]
    assert run.state_rows < 4


def test_state_stays_as_large_as_what_is_open() -> None:
    run = Run(Patterns(parse(RISING), "t"), TIMED, timedelta(minutes=1))
    sizes = []
    for number in range(50):
        run.batch(rows(*[(f"k{key}", number, (number * 7 + key) % 5) for key in range(20)]))
        sizes.append(run.state_rows)
    assert max(sizes[25:]) <= max(sizes[5:25])


def test_an_open_match_without_bounds_ends_with_an_error_and_keeps_its_state() -> None:
    query = parse("PARTITION BY k ORDER BY t MEASURES LAST(v) AS x PATTERN (A+ B) DEFINE A AS v > 0, B AS v < 0")
    operator = Patterns(query, "t", most_rows=10)
    assert "WITHIN does not bound it" in operator.check(TIMED)[0]
    run = Run(operator, TIMED, timedelta(0))
    run.batch(rows(*[("x", at, 1) for at in range(9)]))
    run.batch(rows(*[("x", at, 1) for at in range(9, 20)]))
    with pytest.raises(InvalidArgument, match="bound the pattern by WITHIN"):
        run.batch(rows(("x", 20, 1)))


@pytest.mark.parametrize(
    ("sql", "words"),
    [
        (RISING.replace("(A B B)", "(^ A B B)"), "ends of a partition"),
        (RISING.replace("PREV(v)", "NEXT(v)"), "have not come yet"),
        (
            RISING.replace("ORDER BY t", "ORDER BY v, t").replace("INTERVAL '1' HOUR", "3"),
            "begin with its event time",
        ),
        (RISING.replace("v > PREV(v)", "v > LAST(A.k)"), "failed"),
        (RISING.replace("v > PREV(v)", "v > SUM(A.k)"), "does not apply to"),
        (RISING.replace("v > PREV(v)", "LAST(A.v)"), "not boolean"),
        (RISING.replace("v > PREV(v)", "v > LAST(A.other)"), "no column other"),
    ],
)
def test_what_no_stream_can_answer_is_refused_before_it_runs(sql: str, words: str) -> None:
    with pytest.raises(InvalidArgument, match=words):
        Run(Patterns(parse(sql), "t"), TIMED, timedelta(0))
