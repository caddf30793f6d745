"""Tables of every type, on the whole way in one process: what is written is what is read, at every place that reads."""

from __future__ import annotations

import io
import json
import operator
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pytest
from deltalake import write_deltalake
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from millrace.base.predicate.language import parse_condition
from millrace.client.produce.files.formats import InputFormat
from millrace.client.produce.files.reader import read_batches
from millrace.client.schemas import schema as schema_of
from millrace.commands.parts.row_writers import write_json_lines
from millrace.message.schema import CollectionSchema, FieldSpec
from millrace.storage.table import table_at
from millrace.tables.collections.data_tables import rows_uri
from millrace.tables.read.pruning import may_match
from millrace.testing import Deployment, deployment
from tests.message.samples import column, types, values_of

EVERY: dict[str, tuple[str, Any]] = {
    "flag": ("bool", True),
    "tiny": ("int8", -128),
    "small": ("int16", 1),
    "whole": ("int32", 2),
    "big": ("int64", 2**63 - 1),
    "half": ("float32", 0.5),
    "real": ("float64", 0.1),
    "text": ("string", "é"),
    "raw": ("binary", b"\0\xff"),
    "day": ("date", date(2026, 11, 23)),
    "at": ("timestamp", datetime(2026, 11, 23, 1, 2, 3, 4, UTC)),
    "wall": ("timestamp_ntz", datetime.fromisoformat("2026-11-23T01:02:03.000004")),
    "price": ("decimal(10,2)", Decimal("-12.30")),
    "most": ("decimal(38,0)", Decimal(10**38 - 1)),
    "key": ("uuid", "6ba7b810-9dad-11d1-80b4-00c04fd430c8"),
    "doc": ("json", '{"a": [1, null]}'),
    "address": ("struct<street: string, floors: list<int8>>", {"street": "Mill", "floors": [1, None]}),
    "tags": ("map<string, decimal(4,1)>", [("a", Decimal("1.5")), ("b", None)]),
    "grid": ("list<list<float64>>", [[1.0, None], None, []]),
    "walls": ("list<timestamp_ntz>", [datetime.fromisoformat("2026-01-02")]),
    "deep": ("list<struct<a: map<int64, list<struct<b: binary>>>>>", [{"a": [(1, [{"b": b"x"}, None])]}]),
}
"""A field of each type, and a value."""


def schema() -> CollectionSchema:
    return schema_of({"id": "int64"} | {name: f"{kind}?" for name, (kind, _) in EVERY.items()}, key="id")


def rows() -> pa.Table:
    """A row of values, one of nulls, one of values."""
    full = {name: value for name, (_, value) in EVERY.items()}
    found = [{"id": 1, **full}, {"id": 2}, {"id": 3, **full}]
    return pa.Table.from_pylist(found, schema=schema().arrow())


@pytest.fixture(scope="module")
def db(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with deployment(tmp_path_factory.mktemp("types") / "data") as made:
        yield made


def by_id(table: pa.Table) -> list[dict[str, Any]]:
    return table.sort_by("id").to_pylist()


@pytest.mark.slow
def test_a_file_of_orders_with_a_price_an_address_and_tags_is_a_collection(db: Deployment, tmp_path: Path) -> None:
    orders = pa.table(
        {
            "id": pa.array([1, 2], pa.int64()),
            "price": pa.array([Decimal("12.30"), None], pa.decimal128(10, 2)),
            "address": pa.array([{"street": "Mill Lane", "number": 1}, None]),
            "tags": pa.array([[("a", "b")], []], pa.map_(pa.utf8(), pa.utf8())),
        }
    )
    parquet.write_table(orders, tmp_path / "orders.parquet")
    read = parquet.read_table(tmp_path / "orders.parquet")
    made = db.create_collection("orders", read, key="id")
    assert [f"{each.name}: {each.type}" for each in made.schema.fields] == [
        "id: int64",
        "price: decimal(10,2)",
        "address: struct<street: string, number: int64>",
        "tags: map<string, string>",
    ]
    made.insert(read)
    db.settle()
    made.insert(pd.DataFrame({"id": [3], "price": ["1.5"], "address": [{"street": "x"}], "tags": [{"k": "v"}]}))
    made.upsert([{"id": 2, "price": 2, "tags": {"c": "d"}}])
    assert by_id(made.read()) == [
        {"id": 1, "price": Decimal("12.30"), "address": {"street": "Mill Lane", "number": 1}, "tags": [("a", "b")]},
        {"id": 2, "price": Decimal("2.00"), "address": None, "tags": [("c", "d")]},
        {"id": 3, "price": Decimal("1.50"), "address": {"street": "x", "number": None}, "tags": [("k", "v")]},
    ]


@pytest.mark.slow
def test_a_table_of_every_type_is_read_as_it_was_written(db: Deployment) -> None:
    made = db.create_collection("every", schema())
    made.insert(rows())
    assert by_id(made.read()) == rows().to_pylist()  # from the tail
    db.settle()
    made.delete([2])
    found = made.read()  # from the tables
    assert found.schema.equals(schema().arrow())
    assert by_id(found) == [row for row in rows().to_pylist() if row["id"] != 2]
    scanned: list[dict[str, Any]] = []
    for change in made.scan():
        scanned += change.rows.to_pylist() if change.kind == "insert" else []
        if len(scanned) == 3:
            break
    assert sorted(scanned, key=lambda row: row["id"]) == rows().to_pylist()
    made.add_field("wall2", "timestamp_ntz?")
    made.add_field("more", "map<string, list<decimal(3,1)>>?")
    made.insert([{"id": 9, "more": {"x": [Decimal("1.5"), None]}, "wall2": datetime.fromisoformat("2026-01-01")}])
    db.settle()
    assert by_id(made.read())[-1]["more"] == [("x", [Decimal("1.5"), None])]
    assert by_id(made.read())[0]["more"] is None


@pytest.mark.slow
def test_a_key_in_any_script_is_found_by_what_it_is(db: Deployment) -> None:
    made = db.create_collection("scripts", {"name": "string"}, key="name")
    names = ["a", "é", "日本", "\uffff", "😀", "𠮷野家", "\U000e0041", "\U0010ffff"]
    for name in names:  # a file each
        made.insert([{"name": name}])
        db.settle()
    for place, name in enumerate(names):
        assert made.read(where=f"name = '{name}'").to_pylist() == [{"name": name}]
        found = made.read(where=f"name >= '{name}'", order_by="name")["name"].to_pylist()
        assert found == names[place:]
    made.delete(names[5:])
    db.settle()
    assert made.count() == made.count(where="name <= '😀'") == 5


@pytest.mark.slow
def test_files_are_left_out_by_a_key_that_is_a_moment_and_no_row_with_them(db: Deployment) -> None:
    made = db.create_collection("moments", {"at": "timestamp"}, key="at")
    micros = [-10_001, -1, 0, 1, 999, 1_000, 1_001, 86_400_000_000]
    for each in micros:  # a file each
        made.insert(pa.table({"at": pa.array([each]).cast(pa.timestamp("us", "UTC"))}))
        db.settle()
    actions = table_at(rows_uri(db.settings, made.id)).actions()
    for each in micros:
        text = (datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=each)).isoformat()
        for op, holds in (
            ("=", operator.eq),
            ("<", operator.lt),
            (">=", operator.ge),
            ("<=", operator.le),
            (">", operator.gt),
        ):
            wanted = [value for value in micros if holds(value, each)]
            found = made.read(where=f"at {op} '{text}'", order_by="at")["at"].cast(pa.int64()).to_pylist()
            assert found == wanted, (op, each)
        kept = may_match(actions, made.schema.arrow(), [parse_condition(f"at = '{text}'")])
        assert 1 <= sum(kept.to_pylist()) <= 6, "those within a millisecond or two"


def test_a_file_that_another_writer_made_is_not_left_out_for_what_its_bounds_cut_off(tmp_path: Path) -> None:
    at = pa.array([1_000, 1_999]).cast(pa.timestamp("us", "UTC"))
    write_deltalake(str(tmp_path), pa.table({"at": at}))
    actions = table_at(str(tmp_path)).actions()
    assert actions["max.at"].cast(pa.int64()).to_pylist() == [1_000], (
        "or it says all of it by now, and the slack may go"
    )
    for op in ("=", ">=", ">"):
        for micro, holds in ((1_500, True), (1_999, True), (3_000, False)):
            where = f"at {op} '1970-01-01T00:00:00.{micro:06}Z'"
            assert may_match(actions, pa.schema([("at", at.type)]), [parse_condition(where)]).to_pylist() == [holds], (
                where
            )


SCHEMAS = st.lists(types(), min_size=1, max_size=4)


@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_rows_of_any_types_come_back(db: Deployment, data: st.DataObject) -> None:
    kinds = data.draw(SCHEMAS)
    fields = [FieldSpec("id", "int64", False), *(FieldSpec(f"f{n}", each.text, True) for n, each in enumerate(kinds))]
    made = db.create_collection(f"any{len(db.collections())}", CollectionSchema(tuple(fields), "id"))
    count = data.draw(st.integers(1, 5))
    columns = [pa.array(range(count), pa.int64())]
    for kind in kinds:
        one = st.one_of(st.none(), values_of(kind))
        columns.append(column(kind, data.draw(st.lists(one, min_size=count, max_size=count))))
    written = pa.Table.from_arrays(columns, schema=made.schema.arrow())
    tick = made.insert(written).last_tick
    made.delete([0])
    if data.draw(st.booleans()):
        db.settle()
    assert made.read(at=tick).sort_by("id").equals(written)
    assert made.read().sort_by("id").equals(written.slice(1))
    change = next(iter(made.scan()))
    assert (change.kind, pa.Table.from_batches([change.rows], written.schema)) == ("insert", written)


@given(st.data())
def test_json_lines_that_are_written_read_back(data: st.DataObject) -> None:
    fields = [FieldSpec("id", "int64", False), FieldSpec("f", data.draw(types()).text, True)]
    # A map with a key twice is no JSON object, and a float may be none.
    kind, wanted = fields[1].parsed_type, CollectionSchema(tuple(fields), "id")
    values = data.draw(st.lists(st.one_of(st.none(), values_of(kind)), min_size=1, max_size=4))
    written = pa.Table.from_arrays(
        [pa.array(range(len(values)), pa.int64()), column(kind, values)], schema=wanted.arrow()
    )
    if "map" in kind.text or "float" in kind.text:
        return
    sink = io.BytesIO()
    write_json_lines(written.to_reader(), sink)
    text = sink.getvalue()
    assert all(isinstance(json.loads(line), dict) for line in text.splitlines())
    (batch,) = read_batches(io.BytesIO(text), InputFormat.JSONL, wanted, batch_rows=100)
    assert not batch.bad
    assert batch.rows.equals(written)
