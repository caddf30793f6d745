"""Plain rows: their conversion waits, so it must be the one that the call would have made, and never fail."""

from __future__ import annotations

from datetime import UTC, date, datetime, timedelta, timezone
from decimal import Decimal
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.base.errors import MillraceError
from millrace.catalog.collection import CollectionInfo
from millrace.client.produce.plain_rows import PlainRows, last_of_keys
from millrace.client.produce.rows import conform, last_of_each_key
from millrace.client.schemas import schema
from millrace.message.keys import key_column, key_hashes
from millrace.message.schema import CollectionSchema, FieldSpec

KINDS = (
    "bool",
    "int8",
    "int16",
    "int32",
    "int64",
    "float32",
    "float64",
    "string",
    "binary",
    "date",
    "timestamp",
    "timestamp_ntz",
    "uuid",
    "json",
    "decimal(9,2)",
    "list<int64>",
)

EAST = timezone(timedelta(hours=2))
NAIVE = datetime(2026, 1, 2)  # noqa: DTZ001 (a value of timestamp_ntz)
MOMENTS = st.datetimes(datetime(1, 1, 3), datetime(9999, 12, 28))  # noqa: DTZ001
STRANGE = [np.int64(7), np.float64(0.5), np.bool_(True), pd.NaT, pd.NA, pd.Timestamp("2026-01-02"), "7", "x"]
ANYTHING = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(1 << 65), 1 << 65),
    st.sampled_from([0, 127, 128, -128, -129, 32767, 32768, (1 << 31) - 1, 1 << 31, (1 << 63) - 1, 1 << 63]),
    st.floats(),
    st.text(st.characters(), max_size=5),  # with surrogates
    st.binary(max_size=5),
    st.dates(date(1, 1, 3), date(9999, 12, 28)),
    MOMENTS,
    MOMENTS.map(lambda each: each.replace(tzinfo=UTC)),
    MOMENTS.map(lambda each: each.replace(tzinfo=EAST)),
    st.sampled_from(
        [np.int64(7), np.float64(0.5), np.bool_(True), pd.NaT, pd.NA, pd.Timestamp("2026-01-02"), "7", "x"]
    ),
    st.decimals(-100, 100, places=2),
    st.lists(st.integers(0, 3), max_size=2),
)


def info(made: CollectionSchema) -> CollectionInfo:
    return CollectionInfo(1, "c", "active", ("dml_0_1v0", "dml_0_1v1"), (made,), {"_default": 1}, 2)


@st.composite
def cases(draw: st.DrawFn) -> tuple[CollectionSchema, list[Any]]:
    fields = [
        FieldSpec(f"f{place}", kind, draw(st.booleans()))
        for place, kind in enumerate(draw(st.lists(st.sampled_from(KINDS), max_size=4)))
    ]
    key = draw(st.sampled_from(["int8", "int32", "int64", "string", "date"]))
    names = ["id", *(field.name for field in fields), "unknown"]
    rows = draw(st.lists(st.dictionaries(st.sampled_from(names[:-1]), ANYTHING), min_size=1, max_size=4))
    if draw(st.booleans()):  # rows that are likely plain, as most are
        good: dict[str, st.SearchStrategy[Any]] = {
            "bool": st.booleans(),
            "int8": st.integers(-128, 127),
            "int16": st.integers(-32768, 32767),
            "int32": st.integers(-(1 << 31), (1 << 31) - 1),
            "int64": st.integers(-(1 << 63), (1 << 63) - 1),
            "float64": st.floats(),
            "string": st.text(max_size=4),
            "binary": st.binary(max_size=4),
            "date": st.dates(),
            "timestamp": MOMENTS.map(lambda each: each.replace(tzinfo=UTC)),
            "timestamp_ntz": MOMENTS,
        }
        rows = [
            {field.name: draw(good.get(field.type, st.none())) for field in [FieldSpec("id", key, False), *fields]}
            for _ in rows
        ]
        for field in fields:
            if field.nullable and draw(st.booleans()):
                del rows[0][field.name]
    if draw(st.integers(0, 9)) == 0:
        rows[-1] = rows[-1] | {"unknown": 1}
    return CollectionSchema((FieldSpec("id", key, False), *fields), "id"), rows


@settings(max_examples=200, deadline=None)
@given(cases())
def test_plain_rows_become_what_a_call_of_their_own_makes_of_them_and_never_fail(
    case: tuple[CollectionSchema, list[Any]],
) -> None:
    made, rows = case
    plain = PlainRows.of(made)
    if plain is None:
        return
    taken, table = plain.take(rows), plain.table(rows)
    try:
        wanted = conform(rows, info(made))
    except MillraceError:
        assert taken is table is None, "what a call refuses is not plain"
        return
    if taken is not None:
        batch = plain.batch(taken)
        batch.validate(full=True)
        assert same(pa.Table.from_batches([batch]), wanted)
        assert all(plain.size(row) > 0 for row in taken)
        if plain.hashes_keys:
            hashes = key_hashes(key_column(batch, made.key_names)).tolist()
            assert [plain.key_hash(row) for row in taken] == hashes
        last = last_of_keys(taken, plain.key_of)
        assert same(pa.Table.from_batches([plain.batch(last)]), last_of_each_key(wanted, made.key_names))
    if table is not None:
        assert same(table, wanted)


def same(one: pa.Table, other: pa.Table) -> bool:
    """Whether tables are equal, with NaN as equal to itself."""
    ours, theirs = (repr(each.combine_chunks().to_pylist()) for each in (one, other))
    return one.schema.equals(other.schema) and ours == theirs


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        ("int8", 128),
        ("int8", -129),
        ("int16", 1 << 15),
        ("int32", -(1 << 31) - 1),
        ("int64", 1 << 63),
        ("int64", -(1 << 63) - 1),
        ("int64", True),
        ("int64", 1.0),
        ("float64", 1),
        ("string", "\ud800"),
        ("timestamp", NAIVE),
        ("timestamp", datetime(2026, 1, 2, tzinfo=EAST)),
        ("timestamp_ntz", datetime(2026, 1, 2, tzinfo=UTC)),
        ("date", NAIVE),
        ("decimal(9,2)", Decimal("1.25")),
        ("uuid", "0" * 32),
    ],
)
def test_a_value_that_needs_a_conversion_is_not_plain(kind: str, value: Any) -> None:
    plain = PlainRows.of(CollectionSchema((FieldSpec("id", "int64", False), FieldSpec("v", kind, True)), "id"))
    assert plain is not None
    assert plain.take([{"id": 1, "v": value}]) is plain.table([{"id": 1, "v": value}]) is None
    assert plain.take([{"id": 1}]) is not None


def test_a_schema_with_rules_has_no_plain_rows() -> None:
    fields = {"id": "int64", "n": "int64?"}
    assert PlainRows.of(schema(fields, key="id")) is not None
    assert PlainRows.of(schema(fields, key="id", defaults={"n": 1})) is None
    assert PlainRows.of(schema(fields, key="id", checks={"small": "n < 5"})) is None
    assert PlainRows.of(schema(fields | {"m": "int64?"}, key="id", computed={"m": "n + 1"})) is None
    assert PlainRows.of(schema({"n": "int64?"}, generated_key="id")) is None
