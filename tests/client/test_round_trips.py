"""What is read goes back in as it was: rows of every type by pandas, Polars, Arrow, records, JSON, CSV and Parquet."""

from __future__ import annotations

import io
from collections.abc import Callable
from datetime import UTC, date, datetime, timedelta, timezone
from decimal import Decimal
from typing import Any, Final
from uuid import UUID

import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from pyarrow import parquet

from millrace.base.errors import InvalidArgument
from millrace.catalog.collection import CollectionInfo
from millrace.client.pandas_frame import pandas_frame
from millrace.client.produce.files.formats import InputFormat
from millrace.client.produce.files.reader import read_batches
from millrace.client.produce.rows import conform
from millrace.commands.parts.row_writers import write_csv, write_json_lines, write_parquet
from millrace.message.datetime_range import check_datetime_range
from millrace.message.field_types import SCALAR_TYPES, FieldType, parse_type
from millrace.message.schema import CollectionSchema, FieldSpec
from tests.message.samples import column, types, values_of

NAN = float("nan")
EDGES: dict[str, list[Any]] = {
    "int64": [9_007_199_254_740_993, -(1 << 63)],
    "float32": [NAN, float("inf"), -0.0],
    "float64": [NAN, float("-inf"), -0.0],
    "date": [-719_162, 2_932_896],
    "timestamp": [-62_135_596_800_000_000, 253_402_300_799_999_999],
    "timestamp_ntz": [-62_135_596_800_000_000, 253_402_300_799_999_999],
}

TYPES: Final = types()
SCALARS: Final = st.sampled_from([*SCALAR_TYPES, "decimal(38,7)", "decimal(5,5)"]).map(parse_type)


def collection(schema: CollectionSchema) -> CollectionInfo:
    return CollectionInfo(1, "c", "created", ("v0",), (schema,), {"_default": 1}, 2)


@st.composite
def tables(draw: st.DrawFn, kinds: st.SearchStrategy[FieldType] = TYPES) -> tuple[CollectionSchema, pa.Table]:
    """A schema and rows of it, with the values at the edges of their types."""
    found = draw(st.lists(kinds, min_size=1, max_size=3))
    fields, columns = [FieldSpec("id", "int64", False)], [pa.array(range(4))]
    for number, kind in enumerate(found):
        nullable = draw(st.booleans())
        values = values_of(kind)
        if kind.kind in EDGES:
            values = st.one_of(values, st.sampled_from(EDGES[kind.kind]))
        rows = st.one_of(st.none(), values) if nullable else values
        fields.append(FieldSpec(f"f{number}", kind.text, nullable))
        columns.append(column(kind, draw(st.lists(rows, min_size=4, max_size=4))))
    schema = CollectionSchema(tuple(fields), "id")
    return schema, pa.Table.from_arrays(columns, schema=schema.arrow())


def same(found: pa.Table, wanted: pa.Table) -> None:
    """Equal, NaN to NaN as well."""
    assert found.schema.equals(wanted.schema)
    assert repr(found.to_pylist()) == repr(wanted.to_pylist())


def every_type() -> tuple[CollectionSchema, pa.Table]:
    """A field of every type, with and without nulls, alone and inside of each nested
    type, with the values at its edges.
    """
    plain: dict[str, list[Any]] = {
        "bool": [True],
        "string": ["", "é"],
        "binary": [b"\0"],
        "uuid": [str(UUID(int=5))],
        "json": ["[1.50]"],
    }
    fields, columns = [FieldSpec("id", "int64", False)], [pa.array(range(4))]
    for name in (*SCALAR_TYPES, "decimal(38,7)"):
        kind = parse_type(name)
        two = [*EDGES.get(name, plain.get(name, [Decimal("0.0000001")] if kind.kind == "decimal" else [1])), None]
        first, last = two[0], two[-2]
        made = {
            name: [first, last, first, last], f"{name}?": [None, first, last, None],
            f"list<{name}>?": [[first, None], None, [], [last]], f"list<{name}>": [[first], [last], [], [first, last]],
            f"struct<a: {name}>?": [{"a": first}, {"a": None}, None, {"a": last}],
            f"map<string, {name}>?": [[("k", first), ("l", None)], None, [], [("k", last)]],
            f"map<{name}, list<{name}>>?": [[(last, [first, None])], None, [], [(last, None)]],
        }  # fmt: skip
        for text, values in made.items():
            fields.append(FieldSpec(f"f{len(fields)}", text.removesuffix("?"), text.endswith("?")))
            columns.append(column(fields[-1].parsed_type, values))
    schema = CollectionSchema(tuple(fields), "id")
    return schema, pa.Table.from_arrays(columns, schema=schema.arrow())


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize(
    "form",
    [pandas_frame, pl.DataFrame, lambda table: table.to_batches()[0], lambda table: table.to_pylist(),
        lambda table: table.to_pydict()],
    ids=["pandas", "polars", "arrow", "records", "columns"],
)  # fmt: skip
@example(case=every_type())
@given(case=tables())
def test_rows_come_back_as_they_were(form: Callable[[pa.Table], Any], case: tuple[CollectionSchema, pa.Table]) -> None:
    schema, table = case
    same(conform(form(table), collection(schema)), table)


def read_back(schema: CollectionSchema, file: io.BytesIO, kind: InputFormat) -> pa.Table:
    batches = list(read_batches(io.BytesIO(file.getvalue()), kind, schema, batch_rows=3))
    assert not [bad for batch in batches for bad in batch.bad]
    return pa.concat_tables([batch.rows for batch in batches])


@example(every_type())
@given(tables())
def test_files_hold_the_rows_as_they_were(case: tuple[CollectionSchema, pa.Table]) -> None:
    schema, table = case
    for kind, write in ((InputFormat.JSONL, write_json_lines), (InputFormat.PARQUET, write_parquet)):
        file = io.BytesIO()
        write(table.to_reader(), file)
        same(read_back(schema, file, kind), table)


@given(tables(SCALARS))
def test_csv_holds_the_rows_as_they_were_but_for_empty_text(case: tuple[CollectionSchema, pa.Table]) -> None:
    schema, table = case
    for place, field in enumerate(table.schema):
        if pa.types.is_string(field.type) or pa.types.is_binary(field.type):
            values = [
                None if value in ("", b"") and field.nullable else value for value in table[field.name].to_pylist()
            ]
            table = table.set_column(place, field, pa.array(values, field.type))
    file = io.BytesIO()
    write_csv(table.to_reader(), file)
    same(read_back(schema, file, InputFormat.CSV), table)


def test_integers_and_nulls_in_pandas_are_what_they_were() -> None:
    big = 9_007_199_254_740_993
    kinds = {"n": "int64", "s": "struct<a: int64>", "l": "list<int64>", "m": "map<string, int64>", "x": "float64"}
    schema = CollectionSchema(
        (FieldSpec("id", "int64", False), *(FieldSpec(name, kind, True) for name, kind in kinds.items())), "id"
    )
    rows = [
        {"id": 1, "n": big, "s": {"a": big}, "l": [big, None], "m": [("k", big), ("l", None)], "x": NAN},
        {"id": 2, "n": None, "s": {"a": None}, "l": None, "m": None, "x": None},
    ]
    table = pa.Table.from_pylist(rows, schema.arrow())
    frame = pandas_frame(table)
    assert [str(kind) for kind in frame.dtypes] == ["int64", "Int64", "object", "object", "object", "Float64"]
    assert frame.n[0] == big
    same(conform(frame, collection(schema)), table)
    with pytest.raises(InvalidArgument, match="may stand for another whole number"):
        conform(table.select(["id", "n"]).to_pandas(), collection(schema))  # Arrow's own: a float


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (NAN, "string"), (True, "string"), (1, "string"), (1.0, "string"), (b"x", "string"),
        (date(2026, 1, 2), "string"),
        ("0x10", "int64"), ("1_000", "decimal(9,2)"), ("\uff11", "decimal(9,2)"), (True, "int64"), (True, "float64"),
        ("x", "binary"), (5, "binary"),
        (float(1 << 53), "int64"), (datetime(1, 1, 1, tzinfo=timezone(timedelta(hours=9))), "timestamp"),
    ],
    ids=str,
)  # fmt: skip
def test_a_value_of_another_type_is_refused_as_a_value_and_as_a_key(value: Any, kind: str) -> None:
    key = FieldSpec("k", "int64", False)
    with pytest.raises(InvalidArgument, match="'v'"):
        conform({"k": [1], "v": [value]}, collection(CollectionSchema((key, FieldSpec("v", kind, True)), "k")))
    with pytest.raises(InvalidArgument, match="'v'"):
        conform(
            {"k": [1], "v": [[value]]}, collection(CollectionSchema((key, FieldSpec("v", f"list<{kind}>", True)), "k"))
        )
    if kind in ("string", "int64"):
        with pytest.raises(InvalidArgument, match="'k'"):
            conform([{"k": value}], collection(CollectionSchema((FieldSpec("k", kind, False),), "k")))


def test_a_missing_value_is_null_or_refused_and_never_a_key() -> None:
    key = CollectionSchema((FieldSpec("k", "string", False), FieldSpec("v", "string", True)), "k")
    for missing in (None, pd.NaT, pd.NA):
        with pytest.raises(InvalidArgument, match="'k' has nulls"):
            conform([{"k": missing}], collection(key))
        assert conform([{"k": "a", "v": missing}], collection(key))["v"].to_pylist() == [None]
    with pytest.raises(InvalidArgument, match="'v' is not string: a number is not text"):
        conform(pd.DataFrame({"k": ["a", "b"], "v": [1.0, NAN]}), collection(key))
    assert conform(pd.DataFrame({"k": ["a"], "v": [NAN]}), collection(key))["v"].to_pylist() == [None]
    found = conform([{"k": UUID(int=5)}], collection(key))
    assert found["k"].to_pylist() == ["00000000-0000-0000-0000-000000000005"]


def test_nat_is_null_beside_moments_and_in_lists() -> None:
    fields = (
        FieldSpec("id", "int64", False),
        FieldSpec("at", "timestamp", True),
        FieldSpec("l", "list<timestamp>", True),
    )
    at = datetime(2026, 1, 2, tzinfo=UTC)
    rows = [{"id": 1, "at": pd.NaT, "l": [at, pd.NaT]}, {"id": 2, "at": pd.Timestamp(at), "l": None}]
    found = conform(rows, collection(CollectionSchema(fields, "id")))
    assert found["at"].to_pylist() == [None, at]
    assert found["l"].to_pylist() == [[at, None], None]


@pytest.mark.parametrize("form", [pandas_frame, lambda table: write_csv(table.to_reader(), io.BytesIO()),
                                  lambda table: write_json_lines(table.to_reader(), io.BytesIO())])  # fmt: skip
def test_a_day_beyond_the_calendar_leaves_as_no_other_one(form: Callable[[pa.Table], Any]) -> None:
    kinds = [pa.date32(), pa.timestamp("us"), pa.timestamp("us", "UTC")]
    for kind, value in zip(kinds, (148_108 * 365, -(1 << 60), 1 << 60), strict=True):
        with pytest.raises(InvalidArgument, match=r"'day'.* beyond the years 1 to 9999"):
            form(pa.table({"day": pa.array([0, value], kind)}))


def test_a_day_beyond_the_calendar_comes_in_by_no_column_of_arrow() -> None:
    for kind, value in (("date", 2_932_897), ("timestamp", 1 << 62), ("timestamp_ntz", -(1 << 62))):
        flat = column(FieldType(kind), [None, value])
        deep = pa.MapArray.from_arrays([0, 0, 2], pa.array(["a", "b"]), flat)
        for made, text in ((flat, kind), (pa.chunked_array([flat]), kind), (deep, f"map<string, {kind}>")):
            fields = (FieldSpec("k", "int64", False), FieldSpec("v", text, True))
            with pytest.raises(InvalidArgument, match=r"'v'.* beyond the years 1 to 9999"):
                conform(pa.table({"k": [1, 2], "v": made}), collection(CollectionSchema(fields, "k")))


@given(st.data())
def test_days_of_the_calendar_stand_on_every_level(data: st.DataObject) -> None:
    kind = data.draw(TYPES.filter(lambda kind: any(each.kind == "date" for each in kind.scalars())))
    made = column(kind, data.draw(st.lists(st.one_of(st.none(), values_of(kind)), max_size=4)))
    check_datetime_range(made)
    check_datetime_range(pa.chunked_array([made, made[1:]]))


def test_an_offset_with_seconds_is_read() -> None:
    schema = CollectionSchema((FieldSpec("id", "int64", False), FieldSpec("at", "timestamp", True)), "id")
    amsterdam = timezone(timedelta(minutes=19, seconds=32))
    at = datetime(1900, 1, 1, tzinfo=amsterdam)
    wanted = [at.astimezone(UTC), datetime(2026, 1, 1, tzinfo=UTC)]
    rows = [{"id": 1, "at": at}, {"id": 2, "at": wanted[1]}]
    assert conform(rows, collection(schema))["at"].to_pylist() == wanted
    text = b"id,at\n1,1900-01-01T00:00:00+00:19:32\n2,2026-01-01\n"
    assert read_back(schema, io.BytesIO(text), InputFormat.CSV)["at"].to_pylist() == wanted


def test_int96_is_microseconds_and_pages_are_checked() -> None:
    schema = CollectionSchema((FieldSpec("id", "int64", False), FieldSpec("at", "timestamp", True)), "id")
    last = datetime(9999, 12, 31, 23, 59, 59, 999_999)  # noqa: DTZ001
    table = pa.table({"id": list(range(3000)), "at": pa.array([last] * 3000, pa.timestamp("us", "UTC"))})
    file = io.BytesIO()
    parquet.write_table(table.slice(0, 2), file, use_deprecated_int96_timestamps=True)
    assert read_back(schema, file, InputFormat.PARQUET)["at"].to_pylist() == [last.replace(tzinfo=UTC)] * 2
    file = io.BytesIO()
    parquet.write_table(table, file, write_page_checksum=True, compression="none", use_dictionary=False)
    spoiled = bytearray(file.getvalue())
    spoiled[len(spoiled) // 4] ^= 0x40
    with pytest.raises(InvalidArgument, match="Parquet file cannot be read"):
        read_back(schema, io.BytesIO(bytes(spoiled)), InputFormat.PARQUET)


def test_text_that_is_no_whole_number_is_refused_in_files() -> None:
    schema = CollectionSchema((FieldSpec("id", "int64", False), FieldSpec("s", "struct<n: int8>", True)), "id")
    [batch] = read_batches(io.BytesIO(b'{"id": 1, "s": {"n": "16"}}\n'), InputFormat.JSONL, schema, batch_rows=9)
    assert len(batch.bad) == 1
    plain = CollectionSchema((FieldSpec("id", "int64", False),), "id")
    [batch] = read_batches(io.BytesIO(b"id\n16\n0x10\n"), InputFormat.CSV, plain, batch_rows=9)
    assert batch.rows["id"].to_pylist() == [16]
    assert [(bad.line, bad.column) for bad in batch.bad] == [(3, "id")]
