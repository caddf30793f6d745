"""Files of every format keep to the rules of their collection's schema: defaults, computed fields, checks."""

from __future__ import annotations

import io
import json
from decimal import Decimal
from typing import Any

import fastavro
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from millrace.client.produce.files.formats import InputFormat
from millrace.client.produce.files.reader import read_batches
from millrace.client.schemas import schema

SCHEMA = schema(
    {"id": "int64", "qty": "int32", "price": "decimal(10,2)", "total": "decimal(14,2)", "note": "string?"},
    key="id",
    defaults={"qty": 2, "note": "none"},
    computed={"total": "qty * price"},
    checks={"some": "qty > 0"},
)


def as_csv(rows: list[dict[str, Any]]) -> bytes:
    names = list(rows[0])
    lines = [",".join(names), *(",".join(str(row[name]) for name in names) for row in rows)]
    return "\n".join(lines).encode()


def as_parquet(rows: list[dict[str, Any]]) -> bytes:
    sink = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows), sink)
    return sink.getvalue()


def as_arrow(rows: list[dict[str, Any]]) -> bytes:
    sink = io.BytesIO()
    table = pa.Table.from_pylist(rows)
    with pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue()


def as_avro(rows: list[dict[str, Any]]) -> bytes:
    sink = io.BytesIO()
    kinds = {"id": "long", "qty": "int", "price": "string", "note": "string"}
    named = [{"name": name, "type": kinds[name]} for name in rows[0]]
    fastavro.writer(sink, {"type": "record", "name": "row", "fields": named}, rows)
    return sink.getvalue()


WRITERS = {
    InputFormat.CSV: as_csv,
    InputFormat.JSONL: lambda rows: "\n".join(json.dumps(row) for row in rows).encode(),
    InputFormat.JSON: lambda rows: json.dumps(rows).encode(),
    InputFormat.PARQUET: as_parquet,
    InputFormat.ARROW: as_arrow,
    InputFormat.AVRO: as_avro,
}


def read(data: bytes, kind: InputFormat) -> tuple[list[tuple[Any, ...]], list[tuple[int, str]]]:
    batches = list(read_batches(io.BytesIO(data), kind, SCHEMA, batch_rows=2))
    rows = [tuple(row.values()) for batch in batches for row in batch.rows.to_pylist()]
    assert all(batch.rows.schema == SCHEMA.arrow() for batch in batches)
    return rows, [(bad.line, bad.why) for batch in batches for bad in batch.bad]


@pytest.mark.parametrize("kind", list(WRITERS), ids=str)
def test_what_the_file_does_not_have_is_filled(kind: InputFormat) -> None:
    rows, bad = read(
        WRITERS[kind]([{"id": 1, "price": "1.50"}, {"id": 2, "price": "2.00"}, {"id": 3, "price": "0.10"}]), kind
    )
    assert not bad
    assert rows == [
        (1, 2, Decimal("1.50"), Decimal("3.00"), "none"),
        (2, 2, Decimal("2.00"), Decimal("4.00"), "none"),
        (3, 2, Decimal("0.10"), Decimal("0.20"), "none"),
    ]


@pytest.mark.parametrize("kind", list(WRITERS), ids=str)
def test_a_row_that_breaks_a_check_is_a_bad_row_with_its_line(kind: InputFormat) -> None:
    given = [{"id": each, "qty": qty, "price": "1.00"} for each, qty in enumerate([1, 0, 3, -4, 5])]
    rows, bad = read(WRITERS[kind](given), kind)
    assert [(row[0], row[3]) for row in rows] == [(0, Decimal(1)), (2, Decimal(3)), (4, Decimal(5))]
    first = 2 if kind is InputFormat.CSV else 1
    lines = [1, 1] if kind is InputFormat.JSON else [first + 1, first + 3]
    assert bad == [(line, "check 'some' does not hold") for line in lines]


def test_an_object_that_lacks_a_name_has_its_default_and_a_null_stays_one() -> None:
    given = [
        {"id": 1, "price": 1, "note": None},
        {"id": 2, "qty": 3, "price": 1},
        {"id": 3, "qty": None, "price": 1, "note": "n"},
    ]
    rows, bad = read(WRITERS[InputFormat.JSONL](given), InputFormat.JSONL)
    assert not bad
    assert [(row[1], row[4]) for row in rows] == [(2, None), (3, "none"), (2, "n")]


def test_nulls_of_a_column_that_is_there_stay_nulls_whatever_the_batch_has() -> None:
    note = pa.array([None, None, "a", None], pa.utf8())
    table = pa.table({"id": [1, 2, 3, 4], "price": ["1", "1", "1", "1"], "note": note})
    sink = io.BytesIO()
    pq.write_table(table, sink)
    rows, _ = read(sink.getvalue(), InputFormat.PARQUET)
    assert [row[4] for row in rows] == [None, None, "a", None]
