"""Makes docs/expression-vectors.json: expressions, rows, and what they come to, by the row-by-row model.

``python -m tests.message.expression.vectors`` writes it once: a version of the chain keeps what it says.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa

from millrace.client.produce.files.row_conversion import from_text
from millrace.message.expression import binding
from millrace.message.expression.formatter import format_expression
from millrace.message.expression.tree import Node, make_node, node_to_json
from millrace.message.field_types import parse_type
from tests.message.expression.model import Failed, plain, row_value

PATH = Path(__file__).parents[3] / "docs" / "expression-vectors.json"
FIELDS = {
    "a": "int32",
    "b": "int64",
    "f": "float64",
    "p": "decimal(10,2)",
    "s": "string",
    "d": "date",
    "t": "timestamp",
    "ok": "bool",
}
ROWS: dict[str, list[str | None]] = {
    "a": ["3", "-2147483648", None, "0", "7"],
    "b": ["9223372036854775807", "-1", "5", None, "-9223372036854775808"],
    "f": ["1.5", "nan", None, "-0.0", "1e300"],
    "p": ["10.05", "-0.05", "99999999.99", None, "0.00"],
    "s": ["Straße", "", None, "abc", "A\U0001f600"],
    "d": ["2024-02-29", "0001-01-01", None, "1969-12-31", "9999-12-31"],
    "t": ["2024-02-29T23:59:59.999999Z", "0001-01-01T00:00:00Z", None, "1969-12-31T23:59:59Z", "2100-03-01T12:30:00Z"],
    "ok": ["true", "false", None, "true", "false"],
}
EXPRESSIONS = (
    "a > 0",
    "a + b",
    "b - 1",
    "a * b",
    "-b",
    "abs(b)",
    "div(b, a)",
    "div(b, -1)",
    "b % 7",
    "b % -1",
    "f / a",
    "f + 0.1",
    "f = f",
    "f < 2",
    "p * 3",
    "p + a",
    "round(p * 0.19, 2)",
    "round(p, 1)",
    "cast(p AS decimal(3,1))",
    "cast(p AS int64)",
    "cast(f AS int64)",
    "cast(b AS float64)",
    "cast(b AS string)",
    "cast(ok AS int64)",
    "cast(d AS timestamp)",
    "cast(t AS date)",
    "a = p",
    "b > 1.5",
    "a IN (0, 3)",
    "a BETWEEN 0 AND 5",
    "ok AND a > 0",
    "ok OR div(1, a) > 0",
    "a <> 0 AND div(6, a) = 2",
    "NOT ok",
    "a IS NULL",
    "coalesce(a, 5)",
    "coalesce(div(1, a), 1)",
    "CASE WHEN ok THEN a WHEN a IS NULL THEN -1 ELSE div(1, a) END",
    "s || '-' || cast(a AS string)",
    "length(s)",
    "substring(s, 2, 3)",
    "ascii_upper(s)",
    "ascii_lower(s)",
    "s LIKE 'S%'",
    "s LIKE '%c'",
    "s LIKE '%tra%'",
    "s < 'a'",
    "year(d)",
    "month(d)",
    "day(d)",
    "year(t)",
    "hour(t)",
    "minute(t)",
    "second(t)",
    "d >= '2000-01-01'",
    "t < '1970-01-01T00:00:00Z'",
)


def bound(text: str) -> Node:
    kinds = {name: parse_type(kind) for name, kind in FIELDS.items()}
    for kind in ("bool", "int64", "float64", "string", "date", "timestamp"):
        try:
            return binding.bind_computed(text, kinds, parse_type(kind))
        except Exception:
            continue
    from millrace.base.predicate.expressions import parse_scalar_expression
    from millrace.message.expression.binding import _Binder

    return _Binder(kinds).typed(parse_scalar_expression(text), None)


def as_text(value: Any, kind: str) -> str | None:
    """A value as Python's text of what Arrow gives for it."""
    if value is None or value is Failed:
        return None if value is None else "failed"
    if kind in ("date", "timestamp", "timestamp_ntz"):
        arrow = parse_type(kind).arrow
        return str(pa.array([value], pa.int32() if kind == "date" else pa.int64()).cast(arrow)[0].as_py())
    return str(value)


def main() -> None:
    if PATH.exists():
        raise SystemExit(f"{PATH.name} exists: what a version of the chain computes stays as it is")
    columns = {name: from_text(pa.array(values, pa.utf8()), parse_type(FIELDS[name])) for name, values in ROWS.items()}
    rows = [{name: plain(column[place].as_py()) for name, column in columns.items()} for place in range(5)]
    made_of = []
    for text in EXPRESSIONS:
        node = bound(text)
        used = [
            name
            for name in FIELDS
            if make_node("field", (), (name,), {n: parse_type(k) for n, k in FIELDS.items()}) in every(node)
        ]
        values = []
        for row in rows:
            try:
                values.append(as_text(row_value(node, row), node.kind))
            except Failed:
                values.append("failed")
        made_of.append(
            {
                "text": format_expression(node),
                "expression": node_to_json(node),
                "type": node.kind,
                "fields": {name: FIELDS[name] for name in used},
                "rows": {name: ROWS[name] for name in used},
                "values": values,
            }
        )
    lines = ",\n".join(json.dumps(each, ensure_ascii=False) for each in made_of)
    PATH.write_text(f'{{"vectors": [\n{lines}\n]}}\n')


def every(node: Node) -> list[Node]:
    return [node, *(found for each in node.args for found in every(each))]


if __name__ == "__main__":
    main()
