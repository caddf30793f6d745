"""Random patterns over random rows: the columns, the threads and the model say the same."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pyarrow as pa
import pytest
from hypothesis import assume, given
from hypothesis import settings as profile
from hypothesis import strategies as st

from millrace.base.errors import InvalidArgument
from millrace.streams.patterns import find
from millrace.streams.patterns import pattern as pt
from millrace.streams.patterns.query import MatchRecognize, Order, size
from millrace.streams.patterns.solver import TooDeep
from millrace.streams.patterns.sql import parse_expression
from millrace.streams.patterns.table import match_table
from tests.streams.patterns.model import Model

NAMES = ("A", "B", "C")
LOCAL = [
    "v > 2",
    "v < 3",
    "v > PREV(v)",
    "v <= PREV({}.v, 2)",
    "v IS NULL OR v = 1",
    "NEXT(v) > v",
    "CLASSIFIER() = 'A' OR v < 2",
    "t > 4",
]
CAPTURED = [
    "v > FIRST(v)", "{}.v >= LAST({}.v, 1)", "SUM(v) < 9", "COUNT(A.*) < 3", "v > AVG(B.v)",
    "LAST(CLASSIFIER(), 1) <> 'B'", "MATCH_NUMBER() < 3",
    "PREV(FIRST(A.v), 1) < v", "v <> MAX(C.v)", "COUNT(*) > 1 AND v > 1", "PREV(CLASSIFIER()) = 'A'",
]  # fmt: skip
MEASURES = [
    "FIRST(v)", "LAST(A.v)", "FINAL LAST(B.v)", "CLASSIFIER()", "MATCH_NUMBER()", "SUM(v)", "FINAL SUM(A.v)",
    "COUNT(*)", "FINAL COUNT(B.*)", "MIN(v)",
    "FINAL MAX(C.v)", "AVG(A.v)", "PREV(FIRST(A.v, 1))", "NEXT(LAST(v), 1)", "LAST(U.v, 2)", "array_agg(v)",
    "FINAL array_agg(CLASSIFIER())",
    "COUNT(U.v)", "LAST(v) - FIRST(v) + 1", "PREV(CLASSIFIER(), 1)", "MAX(CLASSIFIER())", "CLASSIFIER(U)", "A.v * 2",
]  # fmt: skip

variables = st.sampled_from(NAMES).map(pt.Variable)
repeats = st.sampled_from([(0, None), (1, None), (0, 1), (2, 2), (1, 3), (0, 2), (2, None)])


def bigger(inside: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.one_of(
        st.lists(inside, min_size=2, max_size=3).map(lambda parts: pt.sequence(*parts)),
        st.lists(inside, min_size=2, max_size=3).map(lambda parts: pt.Alternation(tuple(parts))),
        st.tuples(inside, repeats, st.booleans()).map(lambda got: pt.Repeated(got[0], *got[1], got[2])),
        inside.map(pt.Excluded),
        st.lists(inside, min_size=2, max_size=2).map(lambda parts: pt.permute(*parts)),
    )


patterns = st.recursive(st.one_of(variables, variables, variables, st.just(pt.Nothing())), bigger, max_leaves=6)


@st.composite
def queries(draw: st.DrawFn, captured: bool) -> MatchRecognize:
    pattern = draw(patterns)
    if draw(st.integers(0, 7)) == 0:
        pattern = (
            pt.sequence(pt.Anchor("start"), pattern) if draw(st.booleans()) else pt.sequence(pattern, pt.Anchor("end"))
        )
    names = pt.variables(pattern)
    within = draw(st.sampled_from([None, None, 2, 5]))
    absent = within is not None and "C" not in names and draw(st.booleans())
    if absent:
        pattern = pt.sequence(pattern, pt.Absent("C"))
        names = pt.variables(pattern)
    subsets = {"U": names[:2]} if names else {}
    texts = LOCAL + (CAPTURED if captured else [])
    define = {
        name: text.replace("{}", name)
        for name in names
        if (text := draw(st.sampled_from([None, None, None, *texts]))) is not None
        and not (name == "C" and absent and text not in LOCAL[:1])
    }
    if absent:
        define["C"] = "v > 2"
    mentions = lambda text: all(each in names for each in NAMES if f"{each}." in text)  # noqa: E731
    chosen = [
        text
        for text in draw(st.lists(st.sampled_from(MEASURES), min_size=1, max_size=4, unique=True))
        if mentions(text)
    ]
    rows = draw(st.sampled_from(["one", "all", "all omit empty", "all with unmatched"]))
    if rows == "all with unmatched" and any(isinstance(each, pt.Excluded) for each in pt.walk(pattern)):
        rows = "all"
    skip = draw(st.sampled_from(["past last row", "past last row", "to next row", "to first", "to last"]))
    to = draw(st.sampled_from([each for each in (*names, "U") if each != "C" or not absent])) if names else ""
    return MatchRecognize(
        pattern=pattern,
        order=(Order("t"),),
        partition=("k",),
        define={name: parse_expression(text, names, subsets) for name, text in define.items() if mentions(text)},
        measures={f"m{at}": parse_expression(text, names, subsets) for at, text in enumerate(chosen)},
        subsets=subsets,
        rows=rows,
        skip=skip,
        skip_to=to,
        within=within,
    )


rows_of = st.lists(
    st.fixed_dictionaries(
        {
            "k": st.sampled_from(["x", "x", "x", "y", None]),
            "t": st.integers(0, 12),
            "v": st.sampled_from([None, 0, 1, 1, 2, 2, 3, 3, 4]),
        }
    ),
    min_size=3,
    max_size=14,
)
SCHEMA = pa.schema([("k", pa.utf8()), ("t", pa.int64()), ("v", pa.int64())])


def said(query: MatchRecognize, rows: list[dict[str, Any]]) -> Any:
    try:
        return match_table(query, pa.Table.from_pylist(rows, SCHEMA)).to_pylist()
    except InvalidArgument as error:
        return "refused" if str(error).startswith("AFTER MATCH SKIP") else error


def meant(query: MatchRecognize, rows: list[dict[str, Any]]) -> Any:
    try:
        return Model(query, rows).answer()
    except InvalidArgument:
        return "refused"


def usable(query: MatchRecognize) -> bool:
    return size(query.pattern) < 300


@st.composite
def cases(draw: st.DrawFn, captured: bool) -> tuple[MatchRecognize, list[dict[str, Any]]]:
    try:
        query = draw(queries(captured))
    except InvalidArgument:  # a name that is both, an empty pattern
        assume(False)
        raise
    return query, draw(rows_of)


@given(cases(captured=False))
@profile(max_examples=300)
def test_conditions_on_rows_alone(case: tuple[MatchRecognize, list[dict[str, Any]]]) -> None:
    query, rows = case
    if usable(query):
        assert said(query, rows) == meant(query, rows)


@given(cases(captured=True))
@profile(max_examples=300)
def test_conditions_on_captured_rows(case: tuple[MatchRecognize, list[dict[str, Any]]]) -> None:
    query, rows = case
    if usable(query):
        assert said(query, rows) == meant(query, rows)


@given(cases(captured=False))
@profile(max_examples=150)
def test_the_threads_say_what_the_columns_say(case: tuple[MatchRecognize, list[dict[str, Any]]]) -> None:
    query, rows = case
    if usable(query):
        with patch.object(find, "build", side_effect=TooDeep):
            by_threads = said(query, rows)
        assert by_threads == said(query, rows)


@pytest.mark.soak
@pytest.mark.timeout(1800)
@given(cases(captured=True))
@profile(max_examples=20_000)
def test_many_more(case: tuple[MatchRecognize, list[dict[str, Any]]]) -> None:
    query, rows = case
    if usable(query):
        assert said(query, rows) == meant(query, rows)
