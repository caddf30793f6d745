"""docs/types.md matches the code."""

from __future__ import annotations

import re
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import Schema

from millrace.base.errors import InvalidArgument
from millrace.client.pandas_frame import pandas_frame
from millrace.message.field_types import (
    MAX_DEPTH,
    MAX_LEAVES,
    MAX_TYPE_CHARACTERS,
    SCALAR_TYPES,
    parse_type,
    type_of_arrow,
)
from millrace.operations.quality.suites import _SPARK_TYPES

PAGE = (Path(__file__).parents[2] / "docs" / "types.md").read_text(encoding="utf-8")
ROWS = [[cell.strip() for cell in line.split("|")[1:-1]] for line in PAGE.splitlines() if line.startswith("| `")]
OTHERS = {
    "dictionary": pa.dictionary(pa.int8(), pa.utf8()),
    "run-end encoded": pa.run_end_encoded(pa.int32(), pa.utf8()),
    "large_string": pa.large_utf8(),
    "string_view": pa.string_view(),
    "large_binary": pa.large_binary(),
    "binary_view": pa.binary_view(),
    "fixed_size_binary": pa.binary(2),
    "uint64": pa.uint64(),
    "halffloat": pa.float16(),
    "date64": pa.date64(),
    "time32": pa.time32("s"),
    "time64": pa.time64("ns"),
    "duration": pa.duration("s"),
}


def delta(kind: object) -> str:
    """Return a Delta type in the page's notation."""
    text = re.sub(r"PrimitiveType\(\"([^\"]*)\"\)", r"\1", str(kind))
    text = re.sub(r"ArrayType\((\w+), contains_null=True\)", r"array<\1>", text)
    text = re.sub(r"MapType\((\w+), (\w+), value_contains_null=True\)", r"map<\1,\2>", text)
    return re.sub(r"StructType\(\[Field\((\w+), (\w+), nullable=True\)\]\)", r"struct<\1:\2>", text)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_a_row_of_the_table_is_what_the_code_has(row: list[str]) -> None:
    kind = parse_type(row[0].strip("`"))
    assert kind.text == row[0].strip("`")
    assert str(kind.arrow) == row[1]
    (field,) = Schema.from_arrow(pa.schema([pa.field("x", kind.arrow)])).fields
    assert delta(field.type).replace(" ", "") == row[2].replace(" ", "")
    if kind.kind in _SPARK_TYPES:
        assert _SPARK_TYPES[kind.kind] == row[3]
    columns = pa.schema([pa.field("one", kind.arrow, nullable=False), pa.field("other", kind.arrow)]).empty_table()
    found = [str(each) for each in pandas_frame(columns).dtypes]
    assert ", ".join(dict.fromkeys(found)) == row[4]


def test_the_table_has_every_scalar() -> None:
    assert set(SCALAR_TYPES) <= {row[0].strip("`") for row in ROWS}


def test_the_bounds_on_the_page_are_the_codes() -> None:
    assert f"at most {MAX_DEPTH} levels" in PAGE
    assert f"{MAX_LEAVES:,} scalars" in PAGE
    assert f"{MAX_TYPE_CHARACTERS:,} characters" in PAGE


@pytest.mark.parametrize("name", OTHERS)
def test_another_arrow_type_becomes_what_the_page_says(name: str) -> None:
    line = next(line for line in PAGE.splitlines() if re.match(rf"\| .*\b{name}\b.* \|", line))
    found = type_of_arrow("x", OTHERS[name]).text
    assert f"`{found}`" in line or "the type of its values" in line
    with pytest.raises(InvalidArgument):
        type_of_arrow("x", pa.null())
