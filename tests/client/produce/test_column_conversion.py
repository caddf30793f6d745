"""Values as people have them become columns of a field's type, or are refused: nothing is lost in silence."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from typing import Any
from uuid import UUID

import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.base.errors import InvalidArgument
from millrace.client.produce.column_conversion import CONVERSION_ERRORS, array_of, from_arrow, from_python
from millrace.message.field_types import FieldType, parse_type, type_of_arrow
from tests.message.samples import column, types, values_of

AN_ID = UUID("6ba7b810-9dad-11d1-80b4-00c04fd430c8")


@dataclass
class Address:
    street: str
    number: int | None = None


@given(st.data())
def test_a_column_of_a_type_comes_through_as_it_is_and_by_its_objects(data: st.DataObject) -> None:
    kind = data.draw(types())
    made = column(kind, data.draw(st.lists(st.one_of(st.none(), values_of(kind)), max_size=5)))
    assert from_arrow(made, kind).equals(made)
    found = from_python(made.to_pylist(), kind)
    found.validate(full=True)
    assert found.equals(made)


def wider(arrow: pa.DataType) -> pa.DataType:
    """The same values in large, view and dictionary layouts, as far as pyarrow's casts reach."""
    if pa.types.is_string(arrow):
        return pa.large_utf8()
    if pa.types.is_binary(arrow):
        return pa.large_binary()
    if pa.types.is_list(arrow):
        return pa.large_list(wider(arrow.value_type))
    if pa.types.is_map(arrow):
        return pa.map_(wider(arrow.key_type), wider(arrow.item_type))
    if pa.types.is_struct(arrow):
        return pa.struct([(each.name, wider(each.type)) for each in arrow])
    return arrow


@given(st.data())
def test_wider_layouts_hold_the_same_values(data: st.DataObject) -> None:
    kind = data.draw(types())
    made = column(kind, data.draw(st.lists(st.one_of(st.none(), values_of(kind)), min_size=1, max_size=5)))
    assert from_arrow(made.cast(wider(made.type)), kind).equals(made)
    assert from_arrow(pa.chunked_array([made, made]), kind).equals(pa.chunked_array([made, made]))


@pytest.mark.parametrize(
    ("given", "kind", "values"),
    [
        (pa.array(["a", "b", "a"]).dictionary_encode(), "string", ["a", "b", "a"]),
        (pa.array([["x"], None], pa.list_view(pa.string_view())), "list<string>", [["x"], None]),
        (pa.array([[1, 2], None, [], [3]], pa.list_view(pa.int64())).slice(1), "list<int64>", [None, [], [3]]),
        (pa.array([[[1], None]], pa.large_list_view(pa.list_view(pa.int8()))), "list<list<int8>>", [[[1], None]]),
        (
            pa.array([{"a": [1, 2]}], pa.struct({"a": pa.list_view(pa.int64())})),
            "struct<a: list<int64>>",
            [{"a": [1, 2]}],
        ),
        (pa.array([["x"]], pa.list_(pa.dictionary(pa.int8(), pa.utf8()))), "list<string>", [["x"]]),
        (pa.array([[1, 2]], pa.list_(pa.uint8(), 2)), "list<int16>", [[1, 2]]),
        (pa.array([2**64 - 1], pa.uint64()), "decimal(20,0)", [Decimal(2**64 - 1)]),
        (pa.array([12], pa.int8()), "decimal(4,1)", [Decimal(12)]),
        (pa.array([12.3, None]), "decimal(10,2)", [Decimal("12.30"), None]),
        (pa.array([time(1, 2, 3)]), "int64", [3_723_000_000]),
        (pa.array([1], pa.time32("s")), "int64", [1_000_000]),
        (pa.array([timedelta(seconds=-1)]), "int64", [-1_000_000]),
        (pa.array([b"abcd"], pa.binary(4)), "binary", [b"abcd"]),
        (pa.array([AN_ID.bytes], pa.uuid()), "uuid", [str(AN_ID)]),
        (pa.array([AN_ID.bytes, None], pa.uuid()), "uuid", [str(AN_ID), None]),
        (pa.ListArray.from_arrays([0, 1], pa.array([AN_ID.bytes], pa.uuid())), "list<uuid>", [[str(AN_ID)]]),
        (
            pa.ListArray.from_arrays(
                pa.array([0, 1], pa.int32()),
                pa.ListArray.from_arrays([0, 1], pa.array([AN_ID.bytes], pa.uuid())),
                mask=pa.array([True]),
            ),
            "list<list<uuid>>",
            [None],
        ),
        (pa.ListArray.from_arrays([0, 0, 1], pa.array([AN_ID.bytes], pa.uuid()))[:1], "list<uuid>", [[]]),
        (pa.array([{"t": time(0, 0, 1)}]), "struct<t: int64>", [{"t": 1_000_000}]),
        (pa.array([{"b": 1}]), "struct<a: string, b: int64>", [{"a": None, "b": 1}]),
        (
            pa.DictionaryArray.from_arrays([1, None, 0], pa.array(["a", "b"], pa.string_view())),
            "string",
            ["b", None, "a"],
        ),
        (
            pa.RunEndEncodedArray.from_arrays([2, 3], pa.array([b"a", b"b"], pa.binary_view()))[1:],
            "binary",
            [b"a", b"b"],
        ),
        (
            pa.array([[("x", [1])], None, []], pa.map_(pa.string_view(), pa.list_view(pa.int8())))[0:2],
            "map<string, list<int8>>",
            [[("x", [1])], None],
        ),
        (pa.array([[{"key": "a", "value": 1}]]), "map<string, int64>", [[("a", 1)]]),
    ],
    ids=str,
)
def test_arrow_columns_of_another_layout(given: pa.Array, kind: str, values: list[Any]) -> None:
    found = from_arrow(given, parse_type(kind))
    found.validate(full=True)
    assert found.type == parse_type(kind).arrow
    assert found.to_pylist() == values
    if "key" not in str(given.type) and "b: int64" not in kind and "decimal" not in kind:
        assert type_of_arrow("x", given.type).text == kind


@pytest.mark.parametrize(
    ("given", "kind", "values"),
    [
        (pa.array([[0.5], None, [1.0, 2.0]])[1:], "list<float32>", [None, [1.0, 2.0]]),
        (pa.array([AN_ID.bytes], pa.binary(16)), "uuid", [str(AN_ID)]),
        (pa.array([1], pa.bool8()), "bool", [True]),
        (pa.array([datetime.fromisoformat("2026-01-02")], pa.timestamp("ns")), "date", [date(2026, 1, 2)]),
        (pa.array([date(2026, 1, 2)]), "timestamp_ntz", [datetime.fromisoformat("2026-01-02")]),
        (pa.array([Decimal("12.30")]), "float64", [12.3]),
        (pa.array([float("inf"), 0.1], pa.float64()), "float32", [float("inf"), 0.10000000149011612]),
        (pa.array(["-Infinity", "1e3"]), "float64", [float("-inf"), 1000.0]),
    ],
    ids=str,
)
def test_arrow_columns_of_another_type_that_lose_nothing(given: pa.Array, kind: str, values: list[Any]) -> None:
    found = from_arrow(given, parse_type(kind))
    found.validate(full=True)
    assert found.type == parse_type(kind).arrow
    assert found.to_pylist() == values


@pytest.mark.parametrize(
    ("given", "kind", "values"),
    [
        ([{"a": 1}, {"b": 2}, None, {}], "map<string, int32>", [[("a", 1)], [("b", 2)], None, []]),
        ([[("a", 1)], [{"key": "b", "value": 2}]], "map<string, int32>", [[("a", 1)], [("b", 2)]]),
        ([Address("Mill"), None], "struct<street: string, number: int64>", [{"street": "Mill", "number": None}, None]),
        (["1.5", 2, 0.1, Decimal("3.25")], "decimal(5,2)", [Decimal(each) for each in ("1.50", "2", "0.10", "3.25")]),
        ([AN_ID, str(AN_ID).upper(), AN_ID.hex, AN_ID.bytes], "uuid", [str(AN_ID)] * 4),
        ([{"a": [1]}, '{"a": [1]}', None], "json", ['{"a":[1]}', '{"a": [1]}', None]),
        ([[[1], None], []], "list<list<int8>>", [[[1], None], []]),
        ([datetime.fromisoformat("2026-01-02")], "timestamp_ntz", [datetime.fromisoformat("2026-01-02")]),
    ],
    ids=str,
)
def test_objects(given: list[Any], kind: str, values: list[Any]) -> None:
    found = from_python(given, parse_type(kind))
    assert found.type == parse_type(kind).arrow
    assert found.to_pylist() == values


@pytest.mark.parametrize(
    ("given", "kind"),
    [
        ([1.005], "decimal(10,2)"),
        ([123456789012345678.0], "decimal(38,2)"),
        (["1.234"], "decimal(10,2)"),
        (["1e9"], "decimal(5,2)"),
        (["x"], "decimal(5,2)"),
        ([Decimal("NaN")], "decimal(5,2)"),
        ([True], "decimal(5,2)"),
        (["6ba7b810"], "uuid"),
        (["{"], "json"),
        (["NaN"], "json"),
        ([{"c": 1}], "struct<a: int8>"),
        ([1], "struct<a: int8>"),
        (["ab"], "list<string>"),
        ([{None: 1}], "map<string, int8>"),
        ([{"a": 300}], "map<string, int8>"),
        ([datetime(2026, 1, 2, tzinfo=UTC)], "timestamp_ntz"),
        ([[1.5]], "list<int8>"),
        ([[[1]]], "map<string, int8>"),
        ([[[]]], "map<string, int8>"),
        ([["ab"]], "map<string, string>"),
        ([[{"x": 1}]], "map<string, int8>"),
        ([[("a", 1, 2)]], "map<string, int8>"),
    ],
    ids=str,
)
def test_objects_that_a_type_does_not_hold_are_refused(given: list[Any], kind: str) -> None:
    with pytest.raises(CONVERSION_ERRORS):
        from_python(given, parse_type(kind))


@pytest.mark.parametrize(
    ("given", "kind"),
    [
        (pa.array([1.005]), "decimal(10,2)"),
        (pa.array([Decimal("1.234")]), "decimal(10,2)"),
        (pa.array([100_000]), "decimal(5,2)"),
        (pa.array([{"c": 1}]), "struct<a: int8>"),
        (pa.array([{"a": 1}]), "map<string, int64>"),
        (pa.array([1], pa.time64("ns")), "int64"),
        (pa.array([1], pa.duration("ns")), "int64"),
        (pa.array([1], pa.timestamp("us", "UTC")), "timestamp_ntz"),
        (pa.array(["no uuid"]), "uuid"),
        (pa.array(["no json"]), "json"),
        (pa.array([["no uuid"]]), "list<uuid>"),
    ],
    ids=str,
)
def test_arrow_columns_that_a_type_does_not_hold_are_refused(given: pa.Array, kind: str) -> None:
    with pytest.raises(CONVERSION_ERRORS):
        from_arrow(given, parse_type(kind))


@pytest.mark.parametrize("layout", ["{}", "list<{}>", "struct<a: {}>", "map<string, {}>"])
@pytest.mark.parametrize(
    ("given", "kind", "why"),
    [
        (5, "bool", "number is not a bool"),
        (0.5, "bool", "number is not a bool"),
        (1e300, "float32", "exceeds the range of float32"),
        ("1e400", "float64", "exceeds the range of float64"),
        (Decimal("0.1234567890123456789"), "float64", "more digits than float64"),
        (Decimal("12345678.12"), "float32", "more digits than float32"),
        (datetime(2026, 1, 2, 3), "date", "time of day"),  # noqa: DTZ001
        (datetime(2026, 1, 2, 3, tzinfo=UTC), "date", "time of day"),
        (5, "date", "has no unit of time"),
        (5, "timestamp", "has no unit of time"),
        (5.0, "timestamp_ntz", "has no unit of time"),
        (datetime(2026, 1, 2), "int64", "not a number"),  # noqa: DTZ001
        (date(2026, 1, 2), "int32", "not a number"),
        (datetime(2026, 1, 2, tzinfo=UTC), "timestamp_ntz", "time zone"),
    ],
    ids=str,
)
def test_what_arrow_would_guess_or_cut_off_in_silence_is_refused_on_any_level(
    given: Any, kind: str, why: str, layout: str
) -> None:
    inside: Any = {"{}": given, "list<{}>": [given], "struct<a: {}>": {"a": given}, "map<string, {}>": [("k", given)]}[
        layout
    ]
    as_map = pa.map_(pa.utf8(), pa.array([given]).type)
    column = pa.array([None, inside], as_map) if "map" in layout else pa.array([None, inside])
    with pytest.raises(InvalidArgument, match=why):
        from_arrow(column, parse_type(layout.format(kind)))


def test_nanoseconds_of_pandas_objects_are_refused_wherever_they_stand() -> None:
    for value in (pd.Timestamp("2026-01-02T00:00:00.000000001"), pd.Timedelta(1)):
        for values in ([value], [None, timedelta(1) if isinstance(value, timedelta) else datetime(2026, 1, 2), value]):  # noqa: DTZ001
            with pytest.raises(ValueError, match="nanoseconds"):
                array_of(values)
    assert array_of([pd.Timedelta(1000), None]).to_pylist() == [timedelta(microseconds=1), None]


def test_a_struct_with_two_fields_of_a_name_is_refused() -> None:
    twice = pa.StructArray.from_arrays([pa.array([1]), pa.array([2])], names=["a", "a"])
    with pytest.raises(InvalidArgument, match="two fields of one name"):
        from_arrow(twice, parse_type("struct<a: int64>"))


def test_a_null_column_is_null_of_any_type() -> None:
    for kind in ("decimal(5,2)", "uuid", "json", "list<int8>", "map<string, int8>", "struct<a: int8>", "timestamp_ntz"):
        assert from_arrow(pa.nulls(2), parse_type(kind)).equals(pa.nulls(2, parse_type(kind).arrow))
        assert from_python([None, None], parse_type(kind)).null_count == 2


def test_every_scalar_has_a_column_without_rows() -> None:
    for kind in (FieldType("string"), parse_type("list<map<string, struct<a: decimal(1,1)>>>")):
        assert from_python([], kind).type == kind.arrow
