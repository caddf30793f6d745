"""Values of JSON become those of a collection's fields, with all digits."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import pytest

from millrace.client.schemas import schema
from millrace.flows.conversion import row_of
from millrace.flows.records import DIGITS, Action, Record


@pytest.mark.parametrize(
    ("text", "kind", "wanted"),
    [
        ("12345678901234567890123.4500", "string?", "12345678901234567890123.4500"),
        ("7", "string?", "7"),
        ('"NaN"', "string?", "NaN"),
        ("null", "string?", None),
        ("1.50", "decimal(8,2)?", Decimal("1.50")),
        ("1.50", "float64?", 1.5),
    ],
)
def test_a_number_of_any_digits_fits_a_text_and_a_number(text: str, kind: str, wanted: Any) -> None:
    body = f'{{"id": 1, "a": {text}, "b": 1.5}}'.encode()
    record = Record("public.items", 0, 0, b"1", body, 0, [(DIGITS, b"a")])
    row = row_of(Action(record, "1", body, None), schema({"id": "int64", "a": kind, "b": "string?"}, key="id")).row
    assert row is not None
    assert (type(row["a"]), row["a"]) == (type(wanted), wanted)
    assert row["b"] == 1.5, "another number is none"
