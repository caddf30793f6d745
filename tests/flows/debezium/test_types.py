"""Values of Debezium's types become the JSON that docs/capture.md lists, and nothing else does."""

from __future__ import annotations

import base64
import json
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.flows.conversion import row_of
from millrace.flows.debezium.types import Column, converter_of, declared_converter, is_unavailable, number
from millrace.flows.documents import Digits, decoded, encoded
from millrace.flows.records import Action, Record
from millrace.message.schema import CollectionSchema, FieldSpec

TIME = "io.debezium.time."
DATA = "io.debezium.data."
CONNECT = "org.apache.kafka.connect.data."


def _bytes(value: bytes) -> str:
    return base64.b64encode(value).decode()


def _unscaled(value: int) -> str:
    return _bytes(value.to_bytes(value.bit_length() // 8 + 1, "big", signed=True))


@pytest.mark.parametrize(
    ("column", "value", "wanted"),
    [
        (Column("int32", name=TIME + "Date"), 19_782, "2024-02-29"),
        (Column("int32", name=CONNECT + "Date"), -719_162, "0001-01-01"),
        (Column("int64", name=TIME + "Timestamp"), 1_709_208_000_123, "2024-02-29T12:00:00.123000"),
        (Column("int64", name=CONNECT + "Timestamp"), -1, "1969-12-31T23:59:59.999000"),
        (Column("int64", name=TIME + "MicroTimestamp"), 1_709_208_000_123_456, "2024-02-29T12:00:00.123456"),
        (Column("int64", name=TIME + "NanoTimestamp"), 1_709_208_000_123_456_789, "2024-02-29T12:00:00.123456789"),
        (Column("int64", name=TIME + "NanoTimestamp"), 1_709_208_000_123_456_000, "2024-02-29T12:00:00.123456"),
        (Column("int32", name=TIME + "Time"), 45_296_789, "12:34:56.789000"),
        (Column("int32", name=CONNECT + "Time"), 0, "00:00:00.000000"),
        (Column("int64", name=TIME + "MicroTime"), -3_020_399_000_000, "-838:59:59.000000"),
        (Column("int64", name=TIME + "NanoTime"), 1_999, "00:00:00.000001"),
        (Column("string", name=TIME + "ZonedTimestamp"), "2024-02-29T12:00:00.5Z", "2024-02-29T12:00:00.5Z"),
        (Column("bytes", name=CONNECT + "Decimal", parameters={"scale": "2"}), _unscaled(-1_230), -12.3),
        (Column("bytes", name=CONNECT + "Decimal", parameters={"scale": "0"}), _unscaled(1 << 63), 1 << 63),
        (Column("bytes", name=CONNECT + "Decimal"), _unscaled(7), 7),
        (Column("struct", name=DATA + "VariableScaleDecimal"), {"scale": 3, "value": _unscaled(1)}, 0.001),
        (Column("bytes", name=DATA + "Bits", parameters={"length": "12"}), _bytes(b"\x01\x02"), 0x201),
        (Column("bytes"), _bytes(b"\0\xff"), "AP8="),
        (Column("bytes"), b"\0\xff", "AP8="),  # Avro has bytes as they are
        (Column("array", items=Column("int32", name=TIME + "Date")), [0, None], ["1970-01-01", None]),
        (Column("map", values=Column("bytes")), {"a": b"x", "b": None}, {"a": "eA==", "b": None}),
        (
            Column("struct", fields=(Column("int32", field="at", name=TIME + "Date"), Column("int32", field="n"))),
            {"at": 1, "n": 2},
            {"at": "1970-01-02", "n": 2},
        ),
    ],
)
def test_a_value_becomes_json(column: Column, value: Any, wanted: Any) -> None:
    convert = converter_of(column)
    assert (value if convert is None else convert(value)) == wanted


@pytest.mark.parametrize(
    "column",
    [
        *(Column("string", name=DATA + name) for name in ("Json", "Enum", "EnumSet", "Uuid", "Xml", "Ltree")),
        Column("int32", name=TIME + "Year"),
        Column("string", name=TIME + "Interval"),
        Column("int64"),
        Column("array", items=Column("string")),
    ],
)
def test_what_is_json_already_stays(column: Column) -> None:
    assert converter_of(column) is None


@pytest.mark.parametrize(
    ("column", "value", "words"),
    [
        (Column("bytes", name=CONNECT + "Decimal", parameters={"scale": "2"}), "not base64!", "not base64"),
        (Column("bytes"), "AP8", "not base64"),
        (Column("bytes"), 7, "not base64 text"),
        (Column("int32", name=TIME + "Date"), "2024-02-29", "not a whole number"),
        (Column("int32", name=TIME + "Date"), True, "not a whole number"),
        (Column("int32", name=TIME + "Date"), 1 << 31, "years 1 to 9999"),
        (Column("int64", name=TIME + "MicroTimestamp"), 9_223_372_036_825_200_000, "years 1 to 9999"),
        (Column("struct", name=DATA + "VariableScaleDecimal"), {"scale": 2_000_000_000, "value": "AQ=="}, "scale"),
        (Column("struct", name=DATA + "VariableScaleDecimal"), {"scale": -2_000_000_000, "value": "AQ=="}, "scale"),
        (Column("struct", name=DATA + "VariableScaleDecimal"), {"value": "AQ=="}, "not a decimal"),
        (Column("struct", name=DATA + "geometry.Point"), {"x": 1.0, "y": 2.0}, "no form in JSON"),
    ],
)
def test_a_value_that_is_none_of_its_type_says_why(column: Column, value: Any, words: str) -> None:
    convert = converter_of(column)
    assert convert is not None
    with pytest.raises((ValueError, TypeError), match=words):
        convert(value)


def test_a_scale_that_is_no_number_is_refused_with_the_schema() -> None:
    with pytest.raises(ValueError, match="scale"):
        converter_of(Column("bytes", field="price", name=CONNECT + "Decimal", parameters={"scale": "two"}))


@given(st.integers(-(10**65), 10**65), st.integers(-5, 70))
def test_a_decimal_keeps_all_digits_into_a_collection(unscaled: int, scale: int) -> None:
    wanted = Decimal(f"{unscaled}E{-scale}")
    document = decoded(encoded({"id": 1, "price": number(unscaled, scale)}))
    schema = CollectionSchema(
        (FieldSpec("id", "int64", nullable=False), FieldSpec("price", "decimal(38,0)", nullable=True)), primary_key="id"
    )
    record = Record("t", 0, 0, b"1", b"", 0)
    row = row_of(Action(record, "1", encoded(document), None), schema).row
    assert row is not None
    assert row["price"] == wanted


def test_only_a_number_that_a_float_rounds_has_a_text() -> None:
    assert type(number(1_230, 2)) is float
    assert type(number(10**30 + 1, 2)) is Digits
    assert json.loads(encoded({"a": number(-(10**30), 0)})) == {"a": -(10**30)}


@given(st.dates(), st.datetimes())
def test_dates_and_moments_are_those_of_python(day: date, moment: datetime) -> None:
    dates, micros = (
        converter_of(Column("int32", name=TIME + "Date")),
        converter_of(Column("int64", name=TIME + "MicroTimestamp")),
    )
    assert dates is not None
    assert micros is not None
    assert dates((day - date(1970, 1, 1)).days) == day.isoformat()
    since = (moment.replace(tzinfo=UTC) - datetime(1970, 1, 1, tzinfo=UTC)) // timedelta(microseconds=1)
    assert datetime.fromisoformat(micros(since)) == moment


def test_declared_types_have_debeziums_names() -> None:
    assert declared_converter("MicroTimestamp")[0](0) == "1970-01-01T00:00:00.000000"
    assert declared_converter(TIME + "Date")[0](0) == "1970-01-01"
    assert declared_converter("Decimal(2)")[0](_unscaled(1_234)) == 12.34
    assert declared_converter("bytes") == (declared_converter("bytes")[0], True)
    with pytest.raises(ValueError, match="not one of bytes"):
        declared_converter("timestamp")


def test_a_value_that_was_not_logged_is_known_in_each_form() -> None:
    mark = "__debezium_unavailable_value"
    assert all(map(is_unavailable, [mark, _bytes(mark.encode()), mark.encode(), [mark]]))
    assert not any(map(is_unavailable, ["", mark + "s", [], [mark, mark], 7, None]))
