"""The kernels give, for drawn trees over drawn rows, what a row-by-row model gives.

Their golden vectors stay as they are.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.base.errors import InvalidArgument, Malformed
from millrace.message.expression import binding
from millrace.message.expression.formatter import format_expression
from millrace.message.expression.kernels import column_values, evaluate, to_array
from millrace.message.expression.tree import Node, make_node, node_from_json, node_to_json
from millrace.message.field_types import parse_type, type_of_arrow
from tests.message.expression.drawn import FIELDS, lookup, rows, trees
from tests.message.expression.model import Failed, plain, row_value

VECTORS = Path(__file__).parents[3] / "docs" / "expression-vectors.json"


def found(node: Node, given: list[dict[str, Any]]) -> list[Any]:
    """By row the value, None, or Failed, as the kernels have it."""
    count = len(given)
    array, failed = to_array(evaluate(node, count, lookup(given)), node.parsed_type, count)
    if pa.types.is_timestamp(array.type) or pa.types.is_date(array.type):  # days and moments that Python has none of
        array = array.view(pa.int64() if pa.types.is_timestamp(array.type) else pa.int32())
    values = array.to_pylist()
    return [Failed if failed is not None and failed[place] else value for place, value in enumerate(values)]


def expected(node: Node, given: list[dict[str, Any]]) -> list[Any]:
    def one(row: dict[str, Any]) -> Any:
        try:
            return row_value(node, plain(row))
        except Failed:
            return Failed

    return [one(row) for row in given]


def alike(one: Any, other: Any) -> bool:
    if isinstance(one, float) and isinstance(other, float):
        return one == other or (math.isnan(one) and math.isnan(other))
    return bool(one == other and type(one) is type(other))


@given(trees(), rows())
@settings(max_examples=200)
def test_a_column_has_what_each_row_comes_to(node: Node, given: list[dict[str, Any]]) -> None:
    have, want = found(node, given), expected(node, given)
    assert all(map(alike, have, want)), (format_expression(node), have, want)


@given(trees(), rows(), st.integers(1, 7))
@settings(max_examples=60)
def test_what_a_row_comes_to_does_not_depend_on_the_rows_beside_it(
    node: Node, given: list[dict[str, Any]], place: int
) -> None:
    whole = found(node, given)
    parts = [*found(node, given[:place]), *(found(node, given[place:]) if given[place:] else [])]
    assert all(map(alike, whole, parts))


@given(trees())
def test_a_tree_is_the_same_behind_its_json(node: Node) -> None:
    assert node_from_json(json.loads(json.dumps(node_to_json(node))), FIELDS) == node


def _nodes(node: Node) -> Iterator[Node]:
    yield node
    for each in node.args:
        yield from _nodes(each)


def _is_whole_decimal(node: Node) -> bool:
    return node.op == "literal" and node.kind.startswith("decimal(") and "." not in node.params[1]


@given(trees("bool"), rows())
@settings(max_examples=100)
def test_a_condition_reads_back_from_its_text_and_means_the_same(node: Node, given: list[dict[str, Any]]) -> None:
    text = format_expression(node)
    try:
        again = binding.bind_condition(text, FIELDS)
    except InvalidArgument:
        # The text of a null, or of a decimal without a point, does not say its type.
        assert "NULL" in text or "-" in text or any(map(_is_whole_decimal, _nodes(node))), text
        return
    have, want = found(again, given), found(node, given)
    assert have == want or "NULL" in text or "decimal" in text, (text, format_expression(again))


STEPS = st.lists(
    st.lists(
        st.sampled_from(
            [
                "field",
                "literal",
                "and",
                "case",
                "+",
                "cast",
                "null",
                "int64",
                "n",
                "b",
                "1",
                "now",
                "||",
                "s",
                0,
                1,
                2,
                3,
                -1,
            ]
        )
        | st.none()
        | st.booleans()
        | st.lists(st.integers(), max_size=2),
        max_size=4,
    )
    | st.text(max_size=3)
    | st.integers(),
    max_size=8,
)


@given(STEPS)
@settings(max_examples=300)
def test_any_json_is_an_expression_or_a_typed_error(value: Any) -> None:
    try:
        node = node_from_json(value, FIELDS)
    except (Malformed, InvalidArgument):
        return
    assert node_from_json(node_to_json(node), FIELDS) == node


def test_what_is_too_deep_or_too_large_is_refused_in_bounded_time() -> None:
    field = ["field", "n"]
    for steps in (
        [field, *[["neg"]] * 80],
        [field, *[["field", "n"], ["+"]] * 300],
        [["field", "s"], ["field", "s"], ["||", 2], ["field", "s"], ["||", 2]],
        [["literal", "string", "x" * 1001]],
        [["literal", "decimal(38,0)", "9" * 39]],
        [["literal", "int64", "1" * 900]],
        [["literal", "float64", "nan"]],
        [["field", "n"], ["cast", "decimal(99,1)"]],
        [["field", "q"], ["field", "q"], ["*"]],
        [field, ["and", 10**9]],
    ):
        with pytest.raises((Malformed, InvalidArgument)):
            node_from_json(steps, FIELDS)


def test_joined_texts_have_a_bound_and_others_in_the_column_are_not_hurt_by_it() -> None:
    node = make_node("||", (make_node("field", (), ("s",), FIELDS), make_node("field", (), ("r",), FIELDS)), (), FIELDS)
    row = dict.fromkeys(FIELDS)
    given = [
        row | {"s": "x" * (16 << 10), "r": ""},
        row | {"s": "x" * (16 << 10), "r": "y"},
        row | {"s": "a", "r": "b"},
    ]
    assert [value if value is Failed else len(value) for value in found(node, given)] == [16 << 10, Failed, 2]


@pytest.mark.parametrize(
    "text",
    ["n ~ 1", "n +", "case when b then 1", "cast(n as what)", "lower(s)", "now()", "n like 'a'", "s like 'a_c'",
        "n + s > 1", "case end", "b and n",
     "((((", "random()", "f / 0 = q", "n.x > 1", "in_it.nothing = 1", "round(f, 1) > 0", "", "p and b"],
)  # fmt: skip
def test_what_is_no_condition_says_so(text: str) -> None:
    with pytest.raises(InvalidArgument):
        binding.bind_condition(text, FIELDS)


@pytest.mark.parametrize(
    "text",
    ["f" + " + f" * 40, "f" + " + n" * 40, "(" * 40 + "n" + " + f)" * 40, "coalesce(n, " * 40 + "f" + ")" * 40,
     "CASE WHEN f > 1 THEN f ELSE " * 40 + "n" + " END" * 40],
)  # fmt: skip
def test_a_formula_of_forty_levels_is_bound_at_once(text: str) -> None:
    """Each part is asked for twice on a level: 2 ** 40 askings, where none was kept."""
    assert binding.bind_computed(text, FIELDS, parse_type("float64")).kind == "float64"


@pytest.mark.parametrize(
    "text",
    ["n" + " + n" * 400, "n" + " + n" * 4_000, "(" * 4_000 + "n" + ")" * 4_000, "not " * 2_000 + "b",
     "abs(" * 2_000 + "n" + ")" * 2_000, "case when b then " * 400 + "n" + " end" * 400, "n" + " " * 20_000],
)  # fmt: skip
def test_a_text_that_is_too_long_or_too_deep_is_refused(text: str) -> None:
    with pytest.raises(InvalidArgument):
        binding.bind_condition(f"{text} > 0", FIELDS)


def vectors() -> list[dict[str, Any]]:
    read: list[dict[str, Any]] = json.loads(VECTORS.read_text())["vectors"]
    return read


def test_the_golden_vectors_hold() -> None:
    for each in vectors():
        kinds = {name: parse_type(text) for name, text in each["fields"].items()}
        node = node_from_json(each["expression"], kinds)
        columns = {name: _column(values, kinds[name].arrow) for name, values in each["rows"].items()}
        count = len(next(iter(columns.values())))
        values = evaluate(node, count, lambda path, c=columns, k=kinds: column_values(c[path[0]], k[path[0]]))
        array, failed = to_array(values, node.parsed_type, count)
        wrong = np.zeros(count, dtype=bool) if failed is None else failed
        have = ["failed" if bad else _text(value) for value, bad in zip(array, wrong, strict=True)]
        assert have == each["values"], each["text"]
        assert node.kind == each["type"]


def _column(values: list[str | None], arrow: pa.DataType) -> pa.Array:
    from millrace.client.produce.files.row_conversion import from_text

    return from_text(pa.array(values, pa.utf8()), type_of_arrow("it", arrow))


def _text(value: pa.Scalar) -> str | None:
    found = value.as_py()
    return None if found is None else str(found)
