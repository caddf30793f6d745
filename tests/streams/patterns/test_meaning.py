"""An expression means one thing.

By columns, by values, and to DuckDB, whatever nulls, NaNs, extremes and failures its rows hold.
"""

from __future__ import annotations

import math
from decimal import Decimal
from typing import Any, NamedTuple

import duckdb
import pyarrow as pa
import pytest
from hypothesis import example, given
from hypothesis import settings as profile
from hypothesis import strategies as st

from millrace.base.errors import InvalidArgument
from millrace.streams.patterns.expressions import Call, Expression, Reach
from millrace.streams.patterns.operations import Failed, over_columns
from millrace.streams.patterns.sql import parse_expression
from millrace.streams.patterns.table import match_recognize
from millrace.streams.patterns.values import over_values

MOST = (1 << 63) - 1
SCHEMA = pa.schema(
    [
        ("i", pa.int64()), ("j", pa.int64()), ("x", pa.float64()), ("y", pa.float64()),
        ("d", pa.decimal128(10, 2)), ("e", pa.decimal128(38, 4)), ("s", pa.utf8()), ("u", pa.utf8()),
    ]
)  # fmt: skip
INTS = st.sampled_from([None, 0, 1, -1, 2, -7, 10, MOST, -MOST - 1, (1 << 53) + 1])
FLOATS = st.sampled_from([None, 0.0, -0.0, 1.5, -2.5, 7.0, 1e300, float("nan"), float("inf"), float(1 << 53)])
DECIMALS = st.sampled_from([None, "0", "0.25", "-7.50", "99999999.99", "1", "3.3"])
WIDE = st.sampled_from([None, "0", "-0.0001", "12345678901234567890.1234", "9" * 34 + ".9999", "2.5"])
TEXTS = st.sampled_from([None, "", "a", "straße", "a%c", "abc", "A\\b", "a\nc", "ΑΣ", "İx"])
ROWS = st.lists(
    st.fixed_dictionaries(
        {"i": INTS, "j": INTS, "x": FLOATS, "y": FLOATS, "d": DECIMALS, "e": WIDE, "s": TEXTS, "u": TEXTS}
    ),
    min_size=1,
    max_size=6,
)


class Said(NamedTuple):
    """An expression as it is written here, and as DuckDB has the same."""

    ours: str
    duck: str


def _literal(text: str, duck: str = "") -> st.SearchStrategy[Said]:
    return st.just(Said(text, duck or text))


NUMBERS = st.sampled_from(
    [
        *(Said(each, each) for each in "ijxyde"),
        Said("2", "2::bigint"),
        Said("-3", "(-3)::bigint"),
        Said("0.5", "0.5::double"),
    ]
)
STRINGS = st.sampled_from([Said("s", "s"), Said("u", "u"), Said("'ab'", "'ab'")])


def _compared(op: str, one: Said, other: Said) -> Said:
    """NaN is neither less, equal nor greater here, as in predicates; DuckDB has it greatest."""
    nan = f"(isnan(({one.duck})::double) or isnan(({other.duck})::double))"
    null = f"(({one.duck}) is null or ({other.duck}) is null)"
    plain = f"(({one.duck}) {op} ({other.duck}))"
    told = f"(case when {null} then null when {nan} then {op == '<>'} else {plain} end)"
    return Said(f"({one.ours} {op} {other.ours})", told)


def _chosen(name: str, parts: list[Said]) -> Said:
    known = " or ".join(f"({each.duck}) is null" for each in parts)
    duck = ", ".join(each.duck for each in parts)
    ours = ", ".join(each.ours for each in parts)
    return Said(f"{name}({ours})", f"(case when {known} then null else {name}({duck}) end)")


def numbers(inner: st.SearchStrategy[Said]) -> st.SearchStrategy[Said]:
    two = st.tuples(inner, inner)
    return st.one_of(
        st.builds(lambda op, pair: Said(f"({pair[0].ours} {op} {pair[1].ours})", f"({pair[0].duck} {op}"
            f" {pair[1].duck})"), st.sampled_from("+-*"), two),
        two.map(lambda pair: Said(f"({pair[0].ours} / {pair[1].ours})", f"(({pair[0].duck})::double /"
            f" nullif(({pair[1].duck})::double, 0))")),
        two.map(lambda pair: Said(f"({pair[0].ours} % {pair[1].ours})", f"({pair[0].duck} % nullif({pair[1].duck},"
            " 0))")),
        st.builds(_chosen, st.sampled_from(["greatest", "least"]), st.lists(inner, min_size=2, max_size=3)),
        inner.map(lambda each: Said(f"abs({each.ours})", f"abs({each.duck})")),
        inner.map(lambda each: Said(f"(-{each.ours})", f"(-({each.duck}))")),
        st.builds(lambda name, each: Said(f"{name}({each.ours})", f"{name}({each.duck})"),
            st.sampled_from(["floor", "ceil"]), inner),
        inner.map(lambda each: Said(f"cast({each.ours} as bigint)", f"(trunc({each.duck}))::bigint")),
        inner.map(lambda each: Said(f"cast({each.ours} as double)", f"({each.duck})::double")),
        st.builds(
            lambda when, then, other: Said(f"case when {when.ours} then {then.ours} else {other.ours} end",
                f"case when {when.duck} then {then.duck} else {other.duck} end"),
            st.deferred(lambda: CONDITIONS), inner, inner,
        ),
        two.map(lambda pair: Said(f"coalesce({pair[0].ours}, {pair[1].ours})", f"coalesce({pair[0].duck},"
            f" {pair[1].duck})")),
        STRINGS.map(lambda each: Said(f"length({each.ours})", f"length({each.duck})")),
    )  # fmt: skip


VALUES = st.recursive(NUMBERS, numbers, max_leaves=4)
TEXT_VALUES = st.one_of(
    STRINGS,
    st.builds(lambda name, each: Said(f"{name}({each.ours})", f"{name}({each.duck})"),
        st.sampled_from(["upper", "lower"]), STRINGS),
    st.builds(lambda one, other: Said(f"({one.ours} || {other.ours})", f"({one.duck} || {other.duck})"), STRINGS,
        STRINGS),
)  # fmt: skip
PATTERNS = st.sampled_from(["a%", "%c", "a\\%c", "%\\\\%", "a_c", "%", "", "ABC", "stra_e", "a\\bc", "A\\\\b"])
CONDITIONS: st.SearchStrategy[Said] = st.recursive(
    st.one_of(
        st.builds(_compared, st.sampled_from(["=", "<>", "<", "<=", ">", ">="]), NUMBERS | VALUES, NUMBERS),
        st.builds(lambda op, one, other: Said(f"({one.ours} {op} {other.ours})", f"({one.duck} {op} {other.duck})"),
            st.sampled_from(["=", "<", ">="]), TEXT_VALUES, TEXT_VALUES),
        st.builds(lambda each, pattern: Said(f"({each.ours} like '{pattern}')", f"({each.duck} like '{pattern}'"
            " escape '\\')"), TEXT_VALUES, PATTERNS),
        VALUES.map(lambda each: Said(f"({each.ours} is null)", f"(({each.duck}) is null)")),
    ),
    lambda inner: st.builds(lambda op, one, other: Said(f"({one.ours} {op} {other.ours})", f"({one.duck} {op}"
        f" {other.duck})"), st.sampled_from(["and", "or"]), inner, inner)
    | inner.map(lambda each: Said(f"(not {each.ours})", f"(not {each.duck})")),
    max_leaves=4,
)  # fmt: skip


def plain(expression: Expression) -> Expression:
    """A condition's columns as those of the row itself."""
    match expression:
        case Reach(row):
            return row
        case Call(name, arguments, kind):
            return Call(name, tuple(plain(each) for each in arguments), kind)
    return expression


def by_columns(expression: Expression, table: pa.Table) -> Any:
    found = over_columns(expression, lambda leaf: table.column(leaf.name).combine_chunks())
    return [found.as_py()] * len(table) if isinstance(found, pa.Scalar) else found.to_pylist()


def by_values(expression: Expression, table: pa.Table) -> list[Any]:
    def leaf(column: Any) -> Any:
        return lambda row: row[column.name]

    ask = over_values(expression, leaf, lambda column: SCHEMA.field(column.name).type)
    return [_tried(ask, row) for row in table.to_pylist()]


def _tried(ask: Any, *given_: Any) -> Any:
    try:
        return ask(*given_)
    except Failed:
        return Failed


def alike(one: Any, other: Any) -> bool:
    if isinstance(one, float) and isinstance(other, float | Decimal | int):
        return one == other or (math.isnan(one) and math.isnan(float(other)))
    return one == other and (one is None) == (other is None)


def of_rows(rows: list[dict[str, Any]]) -> pa.Table:
    given_ = [{**row, **{name: None if row[name] is None else Decimal(row[name]) for name in "de"}} for row in rows]
    return pa.Table.from_pylist(given_, SCHEMA)


ROW = {"i": MOST, "j": 1, "x": 2.5, "y": float("nan"), "d": "-7.50", "e": "2.5", "s": "a%c", "u": "straße"}


@example(Said("(i % x)", "(i % nullif(x, 0))"), [ROW])
@example(Said("(d % j)", "(d % nullif(j, 0))"), [ROW])
@example(Said("((d / j) > 0.5)", "((d::double / nullif(j, 0)) > 0.5)"), [ROW])
@example(Said("greatest(d, j)", "greatest(d, j)"), [ROW])
@example(Said("(s like 'a\\%c')", "(s like 'a\\%c' escape '\\')"), [ROW])
@example(Said("upper(u)", "upper(u)"), [ROW])
@example(Said("(i + j)", "(i + j)"), [ROW])
@example(
    Said("case when j > 1 then i + j else 0 end", "case when j > 1 then i + j else 0 end"),
    [ROW, ROW | {"i": 1, "j": 5}],
)
@example(Said("greatest(x, y)", "greatest(x, y)"), [ROW])
@example(Said("(i = x)", "(i = x)"), [ROW | {"i": (1 << 53) + 1, "x": float(1 << 53)}])
@given(VALUES | CONDITIONS | TEXT_VALUES, ROWS)
@profile(max_examples=40, deadline=None)
def test_columns_values_and_duckdb_agree(said: Said, rows: list[dict[str, Any]]) -> None:
    require_alike(said, rows)


@pytest.mark.slow
@pytest.mark.timeout(900)
@given(VALUES | CONDITIONS | TEXT_VALUES, ROWS)
@profile(max_examples=600, deadline=None)
def test_many_more_expressions(said: Said, rows: list[dict[str, Any]]) -> None:
    require_alike(said, rows)


def require_alike(said: Said, rows: list[dict[str, Any]]) -> None:
    table = of_rows(rows)
    try:
        expression = plain(parse_expression(said.ours, ("A",), {}))
        by_columns(expression, table.slice(0, 0))
    except InvalidArgument:  # of types that do not go together
        return
    singly = [_tried(lambda at: by_columns(expression, table.slice(at, 1))[0], at) for at in range(len(table))]
    together = _tried(by_columns, expression, table)
    valued = by_values(expression, table)
    assert all(alike(*pair) for pair in zip(singly, valued, strict=True)), (singly, valued)
    if together is Failed:
        assert Failed in singly
    else:
        assert all(alike(*pair) for pair in zip(together, singly, strict=True)), (together, singly)
    with duckdb.connect() as ducks:
        for at, mine in enumerate(singly):
            ducks.register("rows", table.slice(at, 1))
            try:
                [(theirs,)] = ducks.sql(f"select {said.duck} from rows").fetchall()
            except duckdb.Error:  # a failure, or types that do not go together there: it does not leave out what we do
                continue
            floats = isinstance(mine, float) and isinstance(theirs, float | Decimal)
            assert alike(mine, theirs) or (floats and math.isclose(mine, float(theirs), rel_tol=1e-12)), (
                said,
                mine,
                theirs,
            )


TABLE = pa.table(
    {"k": ["x"] * 4, "t": [1, 2, 3, 4], "v": [1.0, float("nan"), 3.0, None], "i": [1, 1 << 62, 1 << 62, 1]}
)


@pytest.mark.parametrize("condition", ["MAX(v) > 2", "NOT (MAX(v) > 2)", "MIN(v) = 1", "SUM(t) > 2", "AVG(v) = 1"])
def test_an_aggregate_in_a_condition_is_that_of_the_measures(condition: str) -> None:
    """NaN is the greatest value, though no comparison with it holds."""
    measures = f"MEASURES MAX(v) AS high, MIN(v) AS low, {condition} AS told"
    found = match_recognize(TABLE.slice(0, 3), f"ORDER BY t {measures} ALL ROWS PER MATCH PATTERN (A+)")
    assert repr(found.column("high").to_pylist()) == "[1.0, nan, nan]"
    assert found.column("low").to_pylist() == [1.0] * 3
    for rows, told in enumerate(found.column("told").to_pylist()):
        before = f"A{{{rows}}}" if rows else ""
        taken = match_recognize(
            TABLE, f"ORDER BY t MEASURES MIN(t) AS t PATTERN (^ {before} B) DEFINE B AS {condition}"
        )
        assert taken.num_rows == bool(told)


def test_a_failure_in_a_row_that_no_match_asks_for_is_none() -> None:
    query = """PARTITION BY k ORDER BY t MEASURES B.t AS b PATTERN (A B) DEFINE A AS t = 3, B AS i * 4 < 100"""
    assert match_recognize(TABLE, query).to_pylist() == [{"k": "x", "b": 4}]
    with pytest.raises(InvalidArgument, match=r"overflow|exceeds"):
        match_recognize(TABLE, query.replace("t = 3", "t = 2"))
    with pytest.raises(InvalidArgument, match="exceeds a bigint"):
        match_recognize(TABLE, "ORDER BY t MEASURES COUNT(*) AS n PATTERN (A A A B) DEFINE B AS SUM(A.i) > 0")


@pytest.mark.parametrize("beside", ["", " AND MATCH_NUMBER() > 0"], ids=["by columns", "by rows"])
@pytest.mark.parametrize(
    ("condition", "holds"),
    [
        (r"s LIKE 'a\%c'", ["a%c"]), ("s LIKE 'a!%c' ESCAPE '!'", ["a%c"]), ("UPPER(s) = 'STRAẞE'", ["straße"]),
        ("t % 1.5 = 0.5", ["abc"]),
        ("d % 2 = 1.5", ["abc"]), ("d / 2 > 1.5", ["straße"]), ("GREATEST(d, t) = d", ["a%c", "abc", "straße"]),
    ],
)  # fmt: skip
def test_a_condition_has_one_answer_by_columns_and_by_rows(condition: str, holds: list[str], beside: str) -> None:
    rows = pa.table(
        {
            "t": [1, 2, 3],
            "s": ["a%c", "abc", "straße"],
            "d": pa.array([Decimal("2.50"), Decimal("3.50"), Decimal("3.00")], pa.decimal128(5, 2)),
        }
    )
    rows = (
        rows.set_column(2, "d", pa.array([Decimal("2.50"), Decimal("-1.50"), Decimal("3.01")], pa.decimal128(5, 2)))
        if "/" in condition
        else rows
    )
    found = match_recognize(rows, f"ORDER BY t MEASURES A.s AS s PATTERN (A) DEFINE A AS {condition}{beside}")
    assert found.column("s").to_pylist() == holds


def test_a_pattern_of_like_does_not_end_with_its_escape() -> None:
    for like in ("s LIKE 'a\\'", "s LIKE 'a!' ESCAPE '!'"):
        with pytest.raises(InvalidArgument, match="ends in its escape"):
            match_recognize(
                TABLE.append_column("s", pa.array(["a"] * 4)),
                f"ORDER BY t MEASURES A.t AS t PATTERN (A) DEFINE A AS {like}",
            )


def test_running_first_does_not_look_ahead() -> None:
    found = match_recognize(
        TABLE,
        "ORDER BY t MEASURES FIRST(t, 2) AS seen, FINAL FIRST(t, 2) AS whole ALL ROWS PER MATCH PATTERN (A+)",
    )
    assert found.column("seen").to_pylist() == [None, None, 3, 3]
    assert found.column("whole").to_pylist() == [3] * 4
