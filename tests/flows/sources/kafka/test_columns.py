"""Records as rows: JSON values become typed columns without loss of digits; what does not decode is put aside."""

from __future__ import annotations

from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

import pytest

from millrace.base.errors import InvalidArgument
from millrace.flows.records import Record
from millrace.flows.sources.kafka.columns import RECORD, RecordRows, undecoded_rows


def record(value: bytes | None, *, offset: int = 0, timestamp: int = 1_500) -> Record:
    return Record("in", 3, offset, b"k", value, timestamp, [("h", b"v"), ("h", None)])


def decoded(columns: dict[str, str], *values: bytes | None, **more: Any) -> tuple[list[dict[str, Any]], list[str]]:
    """Rows, and what was said of the records that are none."""
    records = [record(value, offset=number) for number, value in enumerate(values)]
    rows, bad = RecordRows(columns, (), **more).rows(records)
    return rows.to_pylist(), [f"{each.record.offset}: {each.reason}" for each in bad]


def test_values_of_all_types_are_decoded() -> None:
    columns = {
        "i": "int64", "small": "int8?", "f": "float64?", "d": "decimal(38,20)?", "s": "string?", "b": "binary?",
        "day": "date?", "at": "timestamp?", "local": "timestamp_ntz?", "j": "json?", "u": "uuid?",
        "l": "list<int32>?", "m": "map<string, float64>?", "t": "struct<a: int64, b: list<string>>?", "yes": "bool?",
    }  # fmt: skip
    value = (
        b'{"i": 9223372036854775807, "small": -128, "f": 3, "d": 123456789012345678.12345678901234567890, "s": "x",'
        b'"b": "AAE=", "day": "2013-01-01", "at": "2013-01-01T07:00:00+02:00", "local": "2013-01-01T05:00:00",'
        b'"j": {"n": 1.000}, "u": "7d444840-9dc0-11d1-b245-5ffdce74fad2", "l": [1, null], "m": {"k": 2.5},'
        b'"t": {"a": 1}, "yes": true, "other": [{}]}'
    )
    rows, bad = decoded(columns, value)
    assert bad == []
    assert rows == [
        {
            "i": 2**63 - 1,
            "small": -128,
            "f": 3.0,
            "d": Decimal("123456789012345678.12345678901234567890"),
            "s": "x",
            "b": b"\x00\x01",
            "day": date(2013, 1, 1),
            "at": datetime(2013, 1, 1, 5, tzinfo=UTC),
            "local": datetime(2013, 1, 1, 5, tzinfo=UTC).replace(tzinfo=None),
            "j": '{"n": 1.000}',
            "u": "7d444840-9dc0-11d1-b245-5ffdce74fad2",
            "l": [1, None],
            "m": [("k", 2.5)],
            "t": {"a": 1, "b": None},
            "yes": True,
        }
    ]


def test_an_integer_may_be_text_which_keeps_its_digits() -> None:
    assert decoded({"i": "int64"}, b'{"i": "9007199254740993"}', b'{"i": 1}') == (
        [{"i": 9007199254740993}, {"i": 1}],
        [],
    )


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (b"no json", "JSON is malformed"),
        (b"\xff", "JSON is malformed"),
        (b"[1]", "Expected `object`, got `array`"),
        (b"{}", "missing required field `i`"),
        (b'{"i": null}', "got `null`"),
        (b'{"i": 1.5}', "got `float`"),
        (b'{"i": 9223372036854775808}', "i: '9223372036854775808' is not a valid int64"),
        (b'{"i": "x"}', "i: 'x' is not a valid int64"),
        (b'{"i": 1, "d": 1.234}', "Rescaling Decimal value would cause data loss"),
        (b'{"i": 1, "small": 300}', "1: small: '300' is not a valid int8"),
        (b'{"i": 1, "at": "yesterday"}', "Invalid RFC3339 encoded datetime"),
        (b'{"i": 1, "local": "2013-01-01T05:00:00Z"}', "no timezone"),
        (None, "the record has no value"),
    ],
)
def test_a_record_that_does_not_decode_is_beside_the_rows_with_its_reason(value: bytes | None, reason: str) -> None:
    columns = {"i": "int64", "d": "decimal(10,2)?", "small": "int8?", "at": "timestamp?", "local": "timestamp_ntz?"}
    rows, bad = decoded(columns, b'{"i": 1}', value, b'{"i": 2}')
    assert [each["i"] for each in rows] == [1, 2]
    assert len(bad) == 1
    assert bad[0].startswith("1: ")
    assert reason in bad[0]


def test_a_tombstone_can_be_ignored() -> None:
    assert decoded({"i": "int64"}, None, b'{"i": 1}', tombstones="ignore") == ([{"i": 1}], [])


def test_a_record_s_own_columns() -> None:
    rows, bad = RecordRows({}, RECORD.names).rows([record(b"any bytes", offset=7), record(None, timestamp=-1)])
    assert bad == []
    first, second = rows.to_pylist()
    assert first == {
        "_key": b"k",
        "_value": b"any bytes",
        "_headers": [{"name": "h", "value": b"v"}, {"name": "h", "value": None}],
        "_topic": "in",
        "_partition": 3,
        "_offset": 7,
        "_record_time": datetime(1970, 1, 1, 0, 0, 1, 500_000, tzinfo=UTC),
    }
    assert (second["_value"], second["_record_time"]) == (None, None)
    assert RecordRows({"i": "int64"}, ("_offset",)).schema.names == ["i", "_offset"]


def test_what_is_put_aside_is_the_whole_record() -> None:
    _, bad = RecordRows({"i": "int64"}, ()).rows([record(b"bad", offset=5)])
    (row,) = undecoded_rows(bad).to_pylist()
    assert (row["_topic"], row["_partition"], row["_offset"], row["_value"], row["_key"]) == ("in", 3, 5, b"bad", b"k")
    assert "malformed" in row["reason"]


def test_unknown_types_and_columns_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="unknown type 'number'"):
        RecordRows({"i": "number"}, ())
    with pytest.raises(InvalidArgument, match="a record has no column '_size'"):
        RecordRows({}, ("_size",))
