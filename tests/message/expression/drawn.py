"""Typed trees and rows to evaluate them over, drawn."""

from __future__ import annotations

from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from hypothesis import strategies as st

from millrace.base.errors import InvalidArgument
from millrace.message.expression.kernels import ColumnValues, column_values
from millrace.message.expression.tree import CASTS, Node, literal_text, make_node
from millrace.message.field_types import parse_type

TYPES = {
    "b": "bool",
    "i": "int32",
    "n": "int64",
    "m": "int64",
    "f": "float64",
    "g": "float32",
    "p": "decimal(10,2)",
    "q": "decimal(38,10)",
    "s": "string",
    "r": "string",
    "d": "date",
    "t": "timestamp",
    "z": "timestamp_ntz",
    "in_it": "struct<x: int16, y: string>",
}
FIELDS = {name: parse_type(text) for name, text in TYPES.items()}
KINDS = (
    "bool",
    "int64",
    "float64",
    "decimal(10,2)",
    "decimal(38,10)",
    "decimal(4,0)",
    "string",
    "date",
    "timestamp",
    "timestamp_ntz",
)

TEXTS = st.text(alphabet=st.sampled_from("aAbB%_'\\ äß\U0001f600"), max_size=6)
LONG = st.integers(-(1 << 63), (1 << 63) - 1) | st.sampled_from([0, 1, -1, 2, 10, (1 << 63) - 1, -(1 << 63)])
VALUES: dict[str, st.SearchStrategy[Any]] = {
    "bool": st.booleans(),
    "int16": st.integers(-(1 << 15), (1 << 15) - 1),
    "int32": st.integers(-(1 << 31), (1 << 31) - 1),
    "int64": LONG,
    "float64": st.floats(),
    "float32": st.floats(width=32),
    "string": TEXTS,
    "date": st.dates(date(1, 1, 1), date(9999, 12, 31)),
    "timestamp": st.datetimes(datetime(1, 1, 2), datetime(9999, 12, 30), timezones=st.just(UTC)),  # noqa: DTZ001 - drawn
    "timestamp_ntz": st.datetimes(datetime(1, 1, 2), datetime(9999, 12, 30)),  # noqa: DTZ001
}


def decimals(precision: int, scale: int) -> st.SearchStrategy[Decimal]:
    most = 10**precision - 1
    return st.integers(-most, most).map(
        lambda n: Decimal(n).scaleb(-scale, context=None) if abs(n) < 10**27 else _exact(n, scale)
    )


def _exact(unscaled: int, scale: int) -> Decimal:
    return Decimal((int(unscaled < 0), tuple(map(int, str(abs(unscaled)))), -scale))


VALUES |= {"decimal(10,2)": decimals(10, 2), "decimal(38,10)": decimals(38, 10), "decimal(4,0)": decimals(4, 0)}


@st.composite
def rows(draw: st.DrawFn) -> list[dict[str, Any]]:
    """Rows with each field of FIELDS, null now and then."""
    fields = {
        name: st.none() | VALUES[text]
        for name, text in TYPES.items()
        if name in TYPES and not text.startswith("struct")
    }
    inner = st.none() | st.fixed_dictionaries({"x": st.none() | VALUES["int16"], "y": st.none() | TEXTS})
    found: list[dict[str, Any]] = draw(
        st.lists(st.fixed_dictionaries(fields | {"in_it": inner}), min_size=1, max_size=8)
    )
    return found


def lookup(given: list[dict[str, Any]]) -> Any:
    """How the kernels find the fields of rows."""
    columns = {name: pa.array([row[name] for row in given], kind.arrow) for name, kind in FIELDS.items()}

    def find(path: tuple[str, ...]) -> ColumnValues:
        column, kind = columns[path[0]], FIELDS[path[0]]
        for name in path[1:]:
            column, kind = pc.struct_field(column, name), kind.children[kind.names.index(name)]
        return column_values(column, kind)

    return find


@st.composite
def trees(draw: st.DrawFn, kind: str | None = None, depth: int = 4) -> Node:
    """A tree of a type (of any)."""
    kind = draw(st.sampled_from(KINDS)) if kind is None else kind
    for _ in range(20):
        try:
            return draw(_tree(kind, depth))
        except InvalidArgument:
            depth = max(0, depth - 1)
    return draw(_leaf(kind))


@st.composite
def _leaf(draw: st.DrawFn, kind: str) -> Node:
    from millrace.message.expression.tree import value_kind

    names = [name for name, tree in FIELDS.items() if value_kind(tree) == kind]
    which = draw(st.integers(0, 9))
    if which < 6 and names:
        return make_node("field", (), (draw(st.sampled_from(names)),), FIELDS)
    if which < 7 and kind in ("int64", "string"):
        return make_node("field", (), ("in_it", "x" if kind == "int64" else "y"), FIELDS)
    if which == 9:
        return make_node("null", (), (kind,), FIELDS)
    return draw(_literal(kind))


@st.composite
def _literal(draw: st.DrawFn, kind: str) -> Node:
    from tests.message.expression.model import plain

    value = plain(draw(st.floats(allow_nan=False, allow_infinity=False) if kind == "float64" else VALUES[kind]))
    if isinstance(value, Decimal):
        value = value.copy_abs() if value == 0 else value
    return make_node("literal", (), (kind, literal_text(kind, value)), FIELDS)


@st.composite
def _tree(draw: st.DrawFn, kind: str, depth: int) -> Node:  # noqa: C901 - one arm an operation
    if depth == 0 or draw(st.integers(0, 3)) == 0:
        return draw(_leaf(kind))

    def sub(of: str) -> Node:
        found: Node = draw(trees(of, depth - 1))
        return found

    def make(op: str, *args: Node, given: tuple[str, ...] = ()) -> Node:
        return make_node(op, args, given, FIELDS)

    plain = "decimal" if kind.startswith("decimal(") else kind
    choices = ["case", "coalesce", "cast"]
    choices += {
        "bool": ["not", "is_null", "and", "or", "compare", "compare", "in", "texts"],
        "int64": ["sum", "sum", "one", "div", "length", "part"],
        "float64": ["sum", "one", "/"],
        "decimal": ["sum", "one", "round"],
        "string": ["||", "substring", "case_of"],
    }.get(plain, [])
    match draw(st.sampled_from(choices)):
        case "case":
            return make("case", sub("bool"), sub(kind), sub("bool"), sub(kind), sub(kind))
        case "coalesce":
            return make("coalesce", sub(kind), sub(kind))
        case "cast":
            froms = [each for each in KINDS if (_plain(each), plain) in CASTS]
            return make("cast", sub(draw(st.sampled_from(froms or [kind]))), given=(kind,))
        case "not":
            return make("not", sub("bool"))
        case "is_null":
            return make("is_null", sub(draw(st.sampled_from(KINDS))))
        case ("and" | "or") as op:
            return make(op, sub("bool"), sub("bool"), sub("bool"))
        case "compare":
            of = draw(st.sampled_from(KINDS))
            return make(draw(st.sampled_from(["=", "!=", "<", "<=", ">", ">="])), sub(of), sub(of))
        case "in":
            of = draw(st.sampled_from(KINDS))
            return make("in", sub(of), draw(_literal(of)), draw(_literal(of)))
        case "texts":
            return make(
                draw(st.sampled_from(["starts_with", "ends_with", "contains"])), sub("string"), draw(_literal("string"))
            )
        case "sum":
            return make(draw(st.sampled_from(["+", "-", "*"])), sub(kind), sub(kind))
        case "one":
            return make(draw(st.sampled_from(["neg", "abs"])), sub(kind))
        case "div":
            return make(draw(st.sampled_from(["div", "%"])), sub(kind), sub(kind))
        case "/":
            return make("/", sub(kind), sub(kind))
        case "length":
            return make("length", sub("string"))
        case "part":
            of = draw(st.sampled_from(["date", "timestamp", "timestamp_ntz"]))
            parts = ["year", "month", "day"] + (["hour", "minute", "second"] if of != "date" else [])
            return make(draw(st.sampled_from(parts)), draw(_leaf(of)))
        case "round":
            return make("round", sub(kind), given=(str(draw(st.integers(0, parse_type(kind).scale))),))
        case "||":
            return make("||", sub("string"), sub("string"))
        case "substring":
            return make("substring", sub("string"), given=(str(draw(st.integers(1, 5))), str(draw(st.integers(0, 4)))))
    return make(draw(st.sampled_from(["ascii_lower", "ascii_upper"])), sub("string"))


def _plain(kind: str) -> str:
    return "decimal" if kind.startswith("decimal(") else kind
