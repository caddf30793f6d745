"""What rows want of a schema that it does not have: columns, wider types, and nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

import pandas as pd
import pyarrow as pa
import pytest

from millrace.base.errors import InvalidArgument
from millrace.client.produce.schema_evolution import required_changes
from millrace.client.schemas import schema
from millrace.message.schema import FieldSpec
from millrace.message.schema_changes import AddField, SchemaChange, WidenField
from millrace.testing import Deployment, deployment

HERE = schema(
    {
        "id": "int64",
        "n": "int8?",
        "f": "float32?",
        "price": "decimal(4,2)?",
        "at": "struct<x: int8>?",
        "tags": "map<string, int8>?",
    },
    key="id",
)


@dataclass
class Row:
    id: int
    city: str


@pytest.mark.parametrize(
    ("rows", "wanted"),
    [
        ([{"id": 1, "n": 127, "f": 0.5, "at": {"x": 1}}], []),
        ([{"id": 1, "n": 128}], [WidenField("n", "int64")]),
        (
            [{"id": 1, "city": "Oslo"}, {"id": 2, "n": -129}],
            [AddField(FieldSpec("city", "string", True)), WidenField("n", "int64")],
        ),
        ([Row(1, "Oslo")], [AddField(FieldSpec("city", "string", True))]),
        ({"id": [1], "more": [[1.5]]}, [AddField(FieldSpec("more", "list<float64>", True))]),
        ([{"id": 1, "at": {"y": "a"}}], [WidenField("at", "struct<x: int8, y: string>")]),
        ([{"id": 1, "at": {"x": 300, "y": "a"}}], [WidenField("at", "struct<x: int64, y: string>")]),
        (pa.table({"id": [1], "n": pa.array([1], pa.int32())}), []),
        (pa.table({"id": [1], "n": pa.array([1 << 20], pa.int32())}), [WidenField("n", "int32")]),
        (pa.table({"id": [1], "price": [Decimal("123.456")]}), [WidenField("price", "decimal(6,3)")]),
        (pa.table({"id": [1], "price": [Decimal("1234567")]}), [WidenField("price", "decimal(9,2)")]),
        (pa.table({"id": [1], "n": ["x"]}), []),  # which no wider type takes: sending it says so
        (
            pd.DataFrame({"id": [1], "n": [1], "city": ["x"]}),
            [AddField(FieldSpec("city", "string", True))],
        ),
        (
            pa.table({"id": [1], "n": [5], "new": [True]}).to_reader(),
            [AddField(FieldSpec("new", "bool", True)), WidenField("n", "int64")],
        ),
    ],
)
def test_what_is_new_is_added_and_what_does_not_fit_is_widened(rows: Any, wanted: list[SchemaChange]) -> None:
    found = required_changes(rows, HERE)
    assert len(found) == len(wanted)
    assert all(each in found for each in wanted)


def test_a_column_without_a_value_says_no_type() -> None:
    with pytest.raises(InvalidArgument, match="nulls alone"):
        required_changes([{"id": 1, "new": None}], HERE)
    with pytest.raises(InvalidArgument, match="before it is read"):
        required_changes(iter([pa.record_batch({"id": [1]})]), HERE)


@pytest.fixture(scope="module")
def db() -> Iterator[Deployment]:
    with deployment() as made:
        yield made


@pytest.mark.slow
def test_an_insert_brings_what_the_collection_lacks(db: Deployment) -> None:
    made = db.create_collection("grown", {"id": "int64", "n": "int32?"}, key="id")
    first = made.insert([{"id": 1, "n": 1}], evolve=True).last_tick
    assert made.definition.schema_version == 1
    made.insert([{"id": 2, "n": 1 << 40, "city": "Oslo"}], evolve=True)
    assert [(each.name, each.type) for each in made.schema.fields] == [
        ("id", "int64"),
        ("n", "int64"),
        ("city", "string"),
    ]
    made.insert(pa.table({"id": [3], "size": [0.5]}).to_reader(), evolve=True)
    assert made.definition.schema_version == 3
    assert made.read(order_by="id").to_pylist() == [
        {"id": 1, "n": 1, "city": None, "size": None},
        {"id": 2, "n": 1 << 40, "city": "Oslo", "size": None},
        {"id": 3, "n": None, "city": None, "size": 0.5},
    ]
    assert made.read(at=first).column_names == ["id", "n"]
    with pytest.raises(InvalidArgument, match="not int64"):
        made.insert([{"id": 4, "n": "text"}], evolve=True)
    with pytest.raises(InvalidArgument, match="no column 'other'"):
        made.insert([{"id": 4, "other": 1}])
    assert made.refresh().definition.schema_version == 3


def test_of_two_producers_that_bring_the_same_the_second_goes_on(db: Deployment) -> None:
    made = db.create_collection("both", {"id": "int64"}, key="id")
    other = db.collection("both")
    made.insert([{"id": 1, "city": "Oslo"}], evolve=True)
    other.insert([{"id": 2, "city": "Reno"}], evolve=True)
    assert made.read(order_by="id")["city"].to_pylist() == ["Oslo", "Reno"]
    assert other.definition.schema_version == 2
