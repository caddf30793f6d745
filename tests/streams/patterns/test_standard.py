"""Queries with answers, after the suite of Trino's row pattern matching: what the standard means, case by case."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import duckdb
import pyarrow as pa
import pytest

from millrace.base.errors import InvalidArgument
from millrace.streams.patterns.builder import permute, row
from millrace.streams.patterns.sql import parse
from millrace.streams.patterns.table import answer_schema, match_table

FOUR = pa.table({"id": [1, 2, 3, 4], "value": [90, 80, 70, 70]})
EIGHT = pa.table({"id": [1, 2, 3, 4, 5, 6, 7, 8], "value": [90, 80, 70, 80, 90, 50, 40, 60]})
FALL_AND_RISE = "DEFINE B AS B.value < PREV(B.value), C AS C.value > PREV(C.value)"


def rows(sql: str, table: pa.Table = EIGHT, *names: str) -> list[tuple[Any, ...]]:
    found = match_table(parse(sql), table)
    return [tuple(each.values()) for each in found.select(names or found.column_names).to_pylist()]


def labelled(
    pattern: str, define: str = "B AS B.value < PREV(B.value), C AS C.value = PREV(C.value)", table: pa.Table = FOUR
) -> Any:
    names = [each for each in define.split(", ") if f"{each.split()[0]}" in pattern]
    clause = f"DEFINE {', '.join(names)}" if names else ""
    sql = f"ORDER BY id MEASURES CLASSIFIER() AS label ALL ROWS PER MATCH PATTERN ({pattern}) {clause}"
    return "".join(f"{number}{label or '-'} " for number, label in rows(sql, table, "id", "label")).strip()


@pytest.mark.parametrize(
    ("pattern", "labels"),
    [
        ("A B C", "2A 3B 4C"),
        ("B | C | A", "1A 2B 3B 4C"),
        ("A | B | C", "1A 2A 3A 4A"),
        ("(B | C) | A", "1A 2B 3B 4C"),
        ("PERMUTE(B, C)", "3B 4C"),
        ("PERMUTE(C, B)", "3B 4C"),
        ("((A) (B (C)))", "2A 3B 4C"),
        ("^A", "1A"),
        ("A^", ""),
        ("^A^", ""),
        ("$A", ""),
        ("A$", "4A"),
        ("^A B+ C$", "1A 2B 3B 4C"),
        ("()", ""),
        ("() | A", "1- 2- 3- 4-"),
        ("A ()", "1A 2A 3A 4A"),
        ("B*", "1- 2B 3B 4-"),
        ("B*?", "1- 2- 3- 4-"),
        ("B+", "2B 3B"),
        ("B+?", "2B 3B"),
        ("B?", "1- 2B 3B 4-"),
        ("B??", "1- 2- 3- 4-"),
        ("B{0,}", "1- 2B 3B 4-"),
        ("B{,5}?", "1- 2- 3- 4-"),
        ("B{1}", "2B 3B"),
        ("B{2}", "2B 3B"),
        ("B{3}", ""),
        ("B{1,2}? C", "2B 3B 4C"),
        ("A+? C", "1A 2A 3A 4C"),
        ("A B+?", "1A 2B"),
        ("((A | B)+ C)", "1A 2A 3A 4C"),
        ("{- A -} B+", "2B 3B"),
        ("A {- B+ -} C", "1A 4C"),
        ("{- A {- B+ -} -} C", "4C"),
        ("(B*)*", "1- 2B 3B 4-"),
        ("((B*)+)*?", "1- 2- 3- 4-"),
        ("(A | ()) (B* | ())*", "1A 2B 3B 4A"),
        ("(A B?){2}", "1A 2B 3A"),
    ],
)
def test_a_pattern_and_its_labels(pattern: str, labels: str) -> None:
    if pattern == "()":
        with pytest.raises(InvalidArgument, match="names no variable"):
            labelled(pattern)
        return
    assert labelled(pattern) == labels


def test_running_and_final() -> None:
    sql = f"""ORDER BY id MEASURES FINAL LAST(A.id) AS a, FINAL LAST(id) AS last, RUNNING LAST(id) AS now, COUNT(B.*) AS
        b, FINAL COUNT(B.*) AS all_b
      ALL ROWS PER MATCH PATTERN (A B+ C+) {FALL_AND_RISE}"""
    assert rows(sql, EIGHT, "id", "a", "last", "now", "b", "all_b")[:5] == [
        (1, 1, 5, 1, 0, 2), (2, 1, 5, 2, 1, 2), (3, 1, 5, 3, 2, 2), (4, 1, 5, 4, 2, 2), (5, 1, 5, 5, 2, 2),
    ]  # fmt: skip


def test_one_row_a_match_has_the_keys_and_the_measures() -> None:
    table = pa.table({"k": list("xxxxyyy"), "id": [1, 2, 3, 4, 1, 2, 3], "value": [9, 8, 9, 9, 5, 4, 6]})
    sql = f"""PARTITION BY k ORDER BY id MEASURES MATCH_NUMBER() AS m, A.value AS a, LAST(B.value) AS low, LAST(C.id) AS
        until, CLASSIFIER() AS label
      ONE ROW PER MATCH PATTERN (A B+ C+) {FALL_AND_RISE}"""
    assert rows(sql, table) == [("x", 1, 9, 8, 3, "C"), ("y", 1, 5, 4, 3, "C")]


@pytest.mark.parametrize(
    ("skip", "starts"),
    [
        ("PAST LAST ROW", [1, 6]),
        ("TO NEXT ROW", [1, 2, 5, 6]),
        ("TO FIRST B", [1, 2, 5, 6]),
        ("TO LAST B", [1, 5]),
        ("TO LAST C", [1, 5]),
        ("TO C", [1, 5]),
        ("TO FIRST C", [1, 5]),
        ("TO FIRST U", [1, 2, 5, 6]),
    ],
)
def test_where_the_next_match_is_looked_for(skip: str, starts: list[int]) -> None:
    sql = (
        f"ORDER BY id MEASURES FIRST(id) AS a AFTER MATCH SKIP {skip} PATTERN (A B+ C+) SUBSET U = (B, C)"
        f" {FALL_AND_RISE}"
    )
    assert rows(sql) == [(each,) for each in starts]


@pytest.mark.parametrize(
    ("pattern", "skip", "words"),
    [
        ("A B+ C+", "TO FIRST A", "first row, which never ends"),
        ("A (B | X)+ C+", "TO LAST X", "has no row of X"),
        ("X? A B+ C+", "TO FIRST U", "never ends"),
    ],
)
def test_a_skip_that_cannot_be_made_fails_when_it_comes_to_it(pattern: str, skip: str, words: str) -> None:
    define = "DEFINE X AS X.value > 1000, B AS B.value < PREV(B.value), C AS C.value > PREV(C.value)"
    define = define.replace("X AS X.value > 1000, ", "") if "X" not in pattern else define
    sql = f"ORDER BY id MEASURES FIRST(id) AS a AFTER MATCH SKIP {skip} PATTERN ({pattern}) SUBSET U = (A, B) {define}"
    with pytest.raises(InvalidArgument, match=words):
        rows(sql)
    assert rows(sql, EIGHT.slice(0, 1)) == []


def test_rows_without_a_match_and_empty_matches() -> None:
    base = "ORDER BY id MEASURES MATCH_NUMBER() AS m, CLASSIFIER() AS l, COUNT(*) AS n"
    assert rows(f"{base} ALL ROWS PER MATCH WITH UNMATCHED ROWS PATTERN (B) DEFINE B AS B.value < PREV(B.value)", FOUR,
        "id", "m", "l", "n") == [
        (1, None, None, None), (2, 1, "B", 1), (3, 2, "B", 1), (4, None, None, None),
    ]  # fmt: skip
    empty = f"{base} ALL ROWS PER MATCH %s PATTERN (B*) DEFINE B AS B.value < PREV(B.value)"
    shown = [(1, 1, None, 0), (2, 2, "B", 1), (3, 2, "B", 2), (4, 3, None, 0)]
    assert rows(empty % "SHOW EMPTY MATCHES", FOUR, "id", "m", "l", "n") == shown
    assert rows(empty % "WITH UNMATCHED ROWS", FOUR, "id", "m", "l", "n") == shown
    assert rows(empty % "OMIT EMPTY MATCHES", FOUR, "id", "m", "l", "n") == shown[1:3]
    assert rows(empty.replace("ALL ROWS PER MATCH %s", "ONE ROW PER MATCH"), FOUR, "m", "n") == [(1, 0), (2, 2), (3, 0)]


def test_navigation() -> None:
    def measured(expression: str) -> list[Any]:
        sql = f"ORDER BY id MEASURES {expression} AS x ALL ROWS PER MATCH PATTERN (A B+ C+) {FALL_AND_RISE}"
        return [each[0] for each in rows(sql, EIGHT.slice(0, 5), "x")]

    assert measured("value") == [90, 80, 70, 80, 90]
    assert measured("A.value") == [90] * 5
    assert measured("B.value") == [None, 80, 70, 70, 70]
    assert measured("LAST(value, 2)") == [None, None, 90, 80, 70]
    assert measured("FINAL LAST(value, 2)") == [70] * 5
    assert measured("FIRST(value, 2)") == [None, None, 70, 70, 70]
    assert measured("PREV(value, 2)") == [None, None, 90, 80, 70]
    assert measured("PREV(value, 0)") == measured("value")
    assert measured("NEXT(value)") == [80, 70, 80, 90, None]
    assert measured("PREV(LAST(B.value), 1)") == [None, 90, 80, 80, 80]
    assert measured("NEXT(FINAL LAST(B.value))") == [80] * 5
    assert measured("PREV(B.value + B.id)") == [None, 91, 82, 82, 82]
    assert measured("CLASSIFIER(B)") == [None, "B", "B", "B", "B"]
    assert measured("PREV(CLASSIFIER())") == [None, "A", "B", "B", "C"]
    assert measured("LAST(CLASSIFIER(), 1)") == [None, "A", "B", "B", "C"]
    assert measured("array_agg(CLASSIFIER(B))") == [[], ["B"], ["B", "B"], ["B", "B"], ["B", "B"]]
    assert measured("AVG(B.value) + 0.5") == [None, 80.5, 75.5, 75.5, 75.5]
    assert measured("CASE WHEN COUNT(C.*) > 0 THEN 'up' ELSE 'down' END") == ["down", "down", "down", "up", "up"]


def test_conditions_look_at_what_was_captured() -> None:
    # The sum of the falls may not exceed the first value; a row may be compared with any captured one.
    sql = """ORDER BY id MEASURES array_agg(CLASSIFIER()) AS l
      PATTERN (A (B | C)+) DEFINE B AS SUM(B.value) <= FIRST(value) AND B.value < A.value, C AS C.value = LAST(value,
      2)"""
    assert rows(sql) == [(["A", "B"],), (["A", "B", "B"],)]
    back = "ORDER BY id MEASURES LAST(id) AS until PATTERN (A X* B) DEFINE B AS B.value = A.value"
    assert rows(back) == [(5,)]


def test_names_are_in_any_case_unless_quoted() -> None:
    assert rows("order by ID measures a.VALUE as x pattern (A b) define B as b.Value < prev(B.value)") == [(90,), (90,)]
    assert rows('ORDER BY id MEASURES "a".value AS x PATTERN ("a" A) DEFINE A AS A.value > "a".value')[0] == (70,)


def test_within_and_absence() -> None:
    at = [datetime(2026, 1, 1, hour, tzinfo=UTC) for hour in (0, 1, 5, 6, 12, 13)]
    table = pa.table({"k": ["x"] * 6, "at": at, "what": list("abbaab")})
    base = "PARTITION BY k ORDER BY at MEASURES FIRST(at) AS since"
    followed = (
        f"{base} AFTER MATCH SKIP TO NEXT ROW PATTERN (A X*? B) WITHIN INTERVAL '2' HOUR DEFINE A AS what ="
        " 'a', B AS what = 'b'"
    )
    assert rows(followed, table, "since") == [(at[0],), (at[4],)]
    missing = f"{base} PATTERN (A [^ B]) WITHIN INTERVAL '2' HOUR DEFINE A AS what = 'a', B AS what = 'b'"
    assert rows(missing, table, "since") == [(at[3],)]
    captured = missing.replace("B AS what = 'b'", "B AS what = 'b' AND B.at > A.at")
    assert rows(captured, table, "since") == [(at[3],)]
    with pytest.raises(InvalidArgument, match="does not fit ORDER BY"):
        rows(missing.replace("INTERVAL '2' HOUR", "2"), table)


def test_duckdb_finds_the_same_three_rising_values() -> None:
    import random

    dice = random.Random(4)
    table = pa.table(
        {
            "k": [dice.randrange(5) for _ in range(300)],
            "t": list(range(300)),
            "v": [dice.randrange(9) for _ in range(300)],
        }
    )
    sql = """PARTITION BY k ORDER BY t MEASURES A.t AS a, C.t AS c, C.v - A.v AS by_ AFTER MATCH SKIP TO NEXT ROW
        PATTERN (A B C)
      WITHIN 25 DEFINE B AS B.v > A.v, C AS C.v > B.v"""
    joined = duckdb.sql(
        """with n as (select *, row_number() over (partition by k order by t) as r from "table")
        select a.k, a.t, c.t, c.v - a.v from n a join n b on b.k = a.k and b.r = a.r + 1 join n c on c.k = a.k and c.r =
        a.r + 2
        where b.v > a.v and c.v > b.v and c.t - a.t <= 25 order by a.k, a.t"""
    ).fetchall()
    assert sorted(rows(sql, table)) == joined
    assert len(joined) > 10


def test_the_builder_makes_the_same_query() -> None:
    fall, rise = row("B", "B.value < PREV(B.value)").plus(), row("C", "C.value > PREV(C.value)").plus(reluctant=True)
    built = (
        row("a")
        .then(fall, rise)
        .query(
            order_by=["id", "value desc"],
            partition_by="k",
            measures={"low": "LAST(B.value)", "n": "FINAL COUNT(U.*)"},
            rows="all omit empty",
            skip="to last",
            skip_to="B",
            within=timedelta(minutes=5),
            subsets={"U": ("A", "B")},
        )
    )
    assert built == parse(
        f"""MATCH_RECOGNIZE (PARTITION BY k ORDER BY id, value DESC MEASURES LAST(B.value) AS low, FINAL COUNT(U.*) AS n
        ALL ROWS PER MATCH OMIT EMPTY MATCHES AFTER MATCH SKIP TO LAST B PATTERN (A B+ C+?) WITHIN INTERVAL '5' MINUTE
        SUBSET U = (A, B) {FALL_AND_RISE})"""
    )
    pattern = (
        permute(row("A"), row("B", "v = 1"))
        .or_(row("C").excluded().times(2, 3))
        .then(row("E").optional(), row("F").star())
    )
    text = "(PERMUTE(A, B) | {- C -}{2,3}) E? F*"
    assert (
        pattern.query(order_by="t", measures={"x": "v"}).pattern
        == parse(f"ORDER BY t MEASURES v AS x PATTERN ({text})").pattern
    )
    absent = row("A").without(row("B", "v = 1")).query(order_by="t", measures={"x": "v"}, within=3)
    assert absent == parse("ORDER BY t MEASURES v AS x PATTERN (A [^ B]) WITHIN 3 DEFINE B AS v = 1")


@pytest.mark.parametrize(
    ("sql", "words"),
    [
        ("", "begins with"),
        ("SELECT 1", "begins with"),
        ("ORDER BY t MEASURES v AS x", "PATTERN .* is missing"),
        ("MEASURES v AS x PATTERN (A)", "ORDER BY is missing"),
        ("ORDER BY t PATTERN (A)", "rows without columns"),
        ("ORDER BY t MEASURES v AS x PATTERN (A", "not closed"),
        ("ORDER BY t MEASURES v AS x PATTERN (A))", "not closed|cannot be parsed|is unexpected"),
        ("ORDER BY t MEASURES v AS x PATTERN (A |)", "character 4: a pattern is missing"),
        ("ORDER BY t MEASURES v AS x PATTERN (A{3,2})", "matches nothing"),
        ("ORDER BY t MEASURES v AS x PATTERN (A{0})", "matches nothing"),
        ("ORDER BY t MEASURES v AS x PATTERN (A{9999999})", "at most"),
        ("ORDER BY t MEASURES v AS x PATTERN (A**)", "a variable is missing"),
        ("ORDER BY t MEASURES v AS x PATTERN ([^ B] A) WITHIN 3 DEFINE B AS v = 1", "at the end"),
        ("ORDER BY t MEASURES v AS x PATTERN (A [^ B]) DEFINE B AS v = 1", "needs WITHIN"),
        ("ORDER BY t MEASURES v AS x PATTERN (A [^ B]) WITHIN 3", "DEFINE must say"),
        ("ORDER BY t DESC MEASURES v AS x PATTERN (A) WITHIN 3", "to ascend"),
        ("ORDER BY t MEASURES v AS x PATTERN (A) DEFINE B AS v = 1", "DEFINE names B"),
        ("ORDER BY t MEASURES B.v AS x PATTERN (A)", "B is not a variable"),
        ("ORDER BY t MEASURES v AS x PATTERN (A) DEFINE A AS FINAL LAST(v) > 1", "FINAL is for MEASURES only"),
        ("ORDER BY t MEASURES SUM(A.v + B.v) AS x PATTERN (A B)", "belong to the same variable"),
        ("ORDER BY t MEASURES FIRST(PREV(v)) AS x PATTERN (A)", "cannot contain another navigation"),
        ("ORDER BY t MEASURES PREV(v, x) AS x PATTERN (A)", "whole number"),
        ("ORDER BY t MEASURES pg_sleep(1) AS x PATTERN (A)", "no function PG_SLEEP"),
        ("ORDER BY t MEASURES (SELECT 1) AS x PATTERN (A)", "not supported"),
        ("ORDER BY t MEASURES v AS x, v + 1 AS x PATTERN (A)", "twice"),
        ("ORDER BY t MEASURES v AS x PATTERN (A) PATTERN (B)", "twice"),
        ("PATTERN (A) ORDER BY t", "begins with|follows"),
        ("ORDER BY t MEASURES v AS x AFTER MATCH SKIP TO FIRST Z PATTERN (A)", "no such variable"),
        ("ORDER BY t MEASURES v AS x ALL ROWS PER MATCH WITH UNMATCHED ROWS PATTERN ({- A -})", "cannot be combined"),
        ("ORDER BY t MEASURES v AS x PATTERN (A) SUBSET A = (A)", "PATTERN has a variable of that name"),
        ("ORDER BY t MEASURES v AS x PATTERN (" + "(" * 60 + "A" + ")" * 60 + ")", "nested more than"),
        ("ORDER BY t MEASURES v AS x PATTERN (PERMUTE(A, B, C, D, E, F, G))", "at most 6"),
        ("ORDER BY nothing MEASURES v AS x PATTERN (A)", "no column nothing"),
        ("ORDER BY t MEASURES v || 1 AS x PATTERN (A)", "failed"),
        ("ORDER BY t MEASURES v AS x PATTERN (A) DEFINE A AS v + 1", "not boolean"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said(sql: str, words: str) -> None:
    with pytest.raises(InvalidArgument, match=words):
        match_table(parse(sql), pa.table({"t": [1], "v": [1]}))


def test_a_case_without_else_is_null_and_has_the_type_of_its_values() -> None:
    table = pa.table({"t": [1, 2], "v": [1, 5]})
    case = "ORDER BY t MEASURES CASE WHEN v > 3 THEN {} END AS x, CASE v WHEN 1 THEN NULL ELSE 'y' END AS z PATTERN (A)"
    assert match_table(parse(case.format("v")), table).to_pylist() == [{"x": None, "z": None}, {"x": 5, "z": "y"}]
    assert match_table(parse(case.format("'text'")), table).column("x").to_pylist() == [None, "text"]


def test_a_sum_that_no_bigint_holds_is_an_error() -> None:
    table = pa.table({"t": [1, 2], "v": [1 << 62, 1 << 62]})
    with pytest.raises(InvalidArgument, match="exceeds a bigint"):
        match_table(parse("ORDER BY t MEASURES SUM(v) AS x PATTERN (A+)"), table)
    found = match_table(parse("ORDER BY t MEASURES SUM(v) AS x, AVG(v) AS y PATTERN (A)"), table)
    assert found.to_pylist() == [{"x": 1 << 62, "y": 2.0**62}] * 2


def test_ways_that_remember_different_rows_are_both_followed() -> None:
    sql = (
        "ORDER BY t MEASURES CLASSIFIER() AS c ALL ROWS PER MATCH PATTERN ((A | B)+ C) DEFINE C AS t = 3 AND"
        " COUNT(B.*) = 1"
    )
    found = match_table(parse(sql), pa.table({"t": [1, 2, 3]}))
    assert found.column("c").to_pylist() == ["A", "B", "C"]


def test_words_in_quotes_are_no_clauses() -> None:
    sql = (
        "ORDER BY id MEASURES 'DEFINE (' AS x, CLASSIFIER() AS c PATTERN (A) DEFINE A AS 'PATTERN' <> ')' AND value"
        " = 40"
    )
    assert rows(sql) == [("DEFINE (", "A")]


def test_the_answers_columns_are_known_before_and_times_keep_their_zone() -> None:
    table = pa.table(
        {"k": ["x"], "at": pa.array([0], pa.timestamp("us", "UTC")), "d": pa.array([1], pa.decimal128(9, 2))}
    )
    query = parse(
        "PARTITION BY k ORDER BY at MEASURES A.at + INTERVAL '1' HOUR AS later, SUM(d) AS d2, A.at > TIMESTAMP"
        " '1969-01-01 00:00:00' AS b ALL ROWS PER MATCH PATTERN (A)"
    )
    found = match_table(query, table)
    assert found.schema == answer_schema(query, table.schema)
    assert found.schema.field("later").type == pa.timestamp("us", "UTC")
    assert found.column("b").to_pylist() == [True]
