"""Literals and patterns of predicates mean what SQL, in single quotes, and Python, in double ones, say that they do."""

from __future__ import annotations

import ast
import warnings
from collections.abc import Iterator

import duckdb
import pyarrow as pa
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from millrace.base.errors import InvalidArgument
from millrace.base.predicate.arrow import filter_table
from millrace.base.predicate.language import Compare, Like, Literal, like_regex, like_text, parse_condition
from millrace.message.expression import binding
from millrace.message.expression.formatter import format_expression
from millrace.message.expression.kernels import column_values, evaluate
from millrace.message.field_types import parse_type

TEXTS = st.text(st.sampled_from("ab\\%_'\"\n\0é𠮷t.*[ "), max_size=8)
IN_QUERIES = TEXTS.map(lambda text: text.replace("\0", "0"))
"""What is written into a query: DuckDB 1.5 takes NUL for its end."""
FIELDS = {"s": parse_type("string"), "b": parse_type("binary")}


@pytest.fixture(scope="module")
def oracle() -> Iterator[duckdb.DuckDBPyConnection]:
    with duckdb.connect() as connection:
        yield connection


def quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def by_check(rows: list[str], text: str) -> list[str]:
    """The rows that satisfy a schema's condition, which is kept as a typed tree."""
    node = binding.bind_condition(text, FIELDS)
    again = binding.bind_condition(format_expression(node), FIELDS)
    assert again == node, format_expression(node)
    found = evaluate(node, len(rows), lambda path: column_values(pa.array(rows, pa.utf8()), FIELDS[path[0]]))
    return [row for row, hit in zip(rows, found.data, strict=True) if hit]


@given(st.lists(TEXTS, min_size=1, max_size=8), IN_QUERIES, st.sampled_from(["=", "<>", "<", ">="]))
def test_a_literal_in_single_quotes_is_that_of_duckdb(
    oracle: duckdb.DuckDBPyConnection, rows: list[str], text: str, op: str
) -> None:
    rows = [*rows, text]
    held = pa.table({"s": rows})
    for where in (f"s {op} {quoted(text)}", f"s in ({quoted(text)}, 'z')"):
        wanted = oracle.sql(f"select s from held where {where}").fetchnumpy()["s"].tolist()
        assert filter_table(held, where)["s"].to_pylist() == wanted
        assert by_check(rows, where) == wanted


@given(st.lists(TEXTS, min_size=1, max_size=8), IN_QUERIES, st.sampled_from(["", " escape '!'", " escape ''"]))
def test_like_is_that_of_duckdb(oracle: duckdb.DuckDBPyConnection, rows: list[str], pattern: str, escape: str) -> None:
    if escape == " escape '!'":
        pattern = pattern.replace("b", "!")
    held = pa.table({"s": [*rows, pattern, pattern.replace("\\", ""), pattern.replace("%", "ab").replace("\\", "")]})
    where = f"s like {quoted(pattern)}{escape}"
    try:
        theirs = where if escape else rf"{where} escape '\'"
        wanted = oracle.sql(f"select s from held where {theirs}").fetchnumpy()["s"].tolist()
    except duckdb.SyntaxException:
        assume(False)
    if dangles(pattern, {"": "\\", " escape '!'": "!"}.get(escape, "")):
        with pytest.raises(InvalidArgument, match="ends in its escape"):
            parse_condition(where)
        return
    assert filter_table(held, where)["s"].to_pylist() == wanted
    try:
        binding.bind_condition(where, FIELDS)
    except InvalidArgument:
        found = parse_condition(where)
        assert isinstance(found, Like)
        assert like_text(found.pattern) is None
    else:
        assert by_check(held["s"].to_pylist(), where) == wanted


def dangles(pattern: str, escape: str) -> bool:
    behind = len(pattern) - len(pattern.rstrip(escape)) if escape else 0
    return behind % 2 == 1


@given(st.text(st.sampled_from("ab\\'nx0u41{}é\t"), max_size=10))
def test_a_literal_in_double_quotes_is_that_of_python(text: str) -> None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of a backslash that means nothing
            wanted = ast.literal_eval(f'"{text}"')
    except SyntaxError:
        with pytest.raises(InvalidArgument):
            parse_condition(f's = "{text}"')
        return
    found = parse_condition(f's = "{text}"')
    assert isinstance(found, Compare)
    assert found.right == Literal(wanted)


@given(st.binary(max_size=8))
def test_bytes_are_those_of_python(value: bytes) -> None:
    found = parse_condition(f"b = {value!r}")
    assert isinstance(found, Compare)
    assert found.right == Literal(value)
    node = binding.bind_condition(f"b = {value!r}", FIELDS)
    assert binding.bind_condition(format_expression(node), FIELDS) == node


@pytest.mark.parametrize(
    "text",
    [r"s = 'it\'s'", "s = 'a", 's = "a', 's = "a""b"', r's = "\x4"', r's = "\ud800"', r's = "\N{NO SUCH}"',
        r"b = b'\N'x", "b = b'é𠮷'",
     r"s like 'a\'", r"s like 'a' escape 'xy'", "s like 'a!' escape '!'", "s like 5", "s like 'a' escape 5"],
)  # fmt: skip
def test_what_is_no_literal_is_refused_with_its_place(text: str) -> None:
    with pytest.raises(InvalidArgument, match=r"character [0-9]+: "):
        parse_condition(text)


def test_a_pattern_of_many_wildcards_stays_short() -> None:
    assert like_regex("%%%a%%") == ".*a.*"
    held = pa.table({"s": ["ba" * 4000]})
    assert filter_table(held, f"s like '{'%' * 4000}a_%{'%' * 4000}'").num_rows == 1
