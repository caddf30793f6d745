"""Changes of fields inside of fields, by their paths."""

from __future__ import annotations

import pyarrow as pa
import pytest
from deltalake import DeltaTable

from millrace.base.errors import AppendRejected, InvalidArgument
from millrace.client.collection import Collection
from millrace.client.nested_changes import resolve_paths
from millrace.client.schemas import alter_changes, schema
from millrace.message.schema_changes import DropNestedField, RenameNestedField, SchemaChange, WidenField, apply_changes
from millrace.tables.collections.data_tables import rows_uri
from millrace.testing import deployment

HERE = schema(
    {
        "id": "int64",
        "at": "struct<x: int8, deep: struct<day: date>>?",
        "lines": "list<struct<price: int32>>?",
        "by": "map<string, struct<n: float32>>?",
        "at.odd": "struct<y: int8>?",
    },
    key="id",
)


def of(made: list[SchemaChange]) -> list[SchemaChange]:
    return resolve_paths(made, lambda: HERE)


def test_paths_become_the_wider_type_of_the_whole_field() -> None:
    made = of(
        alter_changes(
            rename={"id": "key"},
            widen={"at.x": "int64", "lines.price": "int64", "at.odd.y": "int16"},
            add={"at.deep.zip": "uuid", "by.more": "list<int8>", "plain.dot": "string?"},
        )
    )
    assert made[1:6] == [
        WidenField("at", "struct<x: int64, deep: struct<day: date>>"),
        WidenField("lines", "list<struct<price: int64>>"),
        WidenField("at.odd", "struct<y: int16>"),
        WidenField("at", "struct<x: int64, deep: struct<day: date, zip: uuid>>"),
        WidenField("by", "map<string, struct<n: float32, more: list<int8>>>"),
    ]
    assert apply_changes(HERE, made).arrow().names == ["key", "at", "lines", "by", "at.odd", "plain.dot"]
    parts = of(alter_changes(drop="at.x", rename={"at.deep.day": "on", "at.odd.y": "z"}))
    assert parts == [
        DropNestedField("at", ("x",)),
        RenameNestedField("at", ("deep", "day"), "on"),
        RenameNestedField("at.odd", ("y",), "z"),
    ]


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ({"rename": {"at.x": "deep"}}, "'deep' appears twice in a struct"),
        ({"rename": {"at.x": "x"}}, "'at.x' has that name"),
        ({"rename": {"at.x": "at.y"}}, "'at.x' stays in its place: give only its new name, 'y'"),
        ({"rename": {"at.z": "y"}}, "'at.z': there is no field 'z'; there are x, deep"),
        ({"rename": {"at.x.z": "y"}}, "'z' would lie in a value of int8"),
        ({"rename": {"at.x": "_y"}}, "underscore"),
        ({"drop": "lines.price"}, "'lines.price' is the only field there: drop what it lies in"),
        ({"relax": "at.x"}, "'at.x' is nullable already"),
        ({"add": {"at.x": "int8"}}, "there is a field 'at.x' already"),
        ({"widen": {"at.z": "int8"}}, "there is no field 'at.z'; there are x, deep"),
        ({"widen": {"at.gone.z": "int8"}}, "there is no field 'gone'"),
        ({"add": {"at.x.z": "int8"}}, "'z' would lie in a value of int8"),
        ({"widen": {"at.x": "float64"}}, "cannot become"),
        ({"widen": {"at.deep.day": "timestamp"}}, "cannot become"),
        ({"widen": {"nowhere.x": "int64"}}, "there is no field 'nowhere.x'"),
    ],
)
def test_what_no_path_can_do_is_refused_in_words(what: dict[str, object], words: str) -> None:
    with pytest.raises(InvalidArgument, match=words):
        of(alter_changes(**what))  # type: ignore[arg-type]


@pytest.mark.slow
def test_rows_before_and_behind_a_nested_change_are_read_together() -> None:
    with deployment() as db:
        made = db.create_collection(
            "c", {"id": "int64", "at": "struct<x: int8>?", "many": "list<struct<x: int8>>?"}, key="id"
        )
        first = made.insert([{"id": 1, "at": {"x": 1}, "many": [{"x": 2}, None]}]).last_tick
        db.settle()
        made.alter(add={"at.zip": "string", "many.y": "int8"}, widen={"at.x": "int64"})
        made.insert([{"id": 2, "at": {"x": 1 << 40, "zip": "a"}, "many": [{"y": 3}]}])
        assert made.read(order_by="id").to_pylist() == [
            {"id": 1, "at": {"x": 1, "zip": None}, "many": [{"x": 2, "y": None}, None]},
            {"id": 2, "at": {"x": 1 << 40, "zip": "a"}, "many": [{"x": None, "y": 3}]},
        ]
        assert made.read(at=first).to_pylist() == [{"id": 1, "at": {"x": 1}, "many": [{"x": 2}, None]}]
        assert made.read(where="at.zip = 'a'", columns="id").to_pylist() == [{"id": 2}]


@pytest.mark.slow
def test_parts_are_renamed_and_dropped_for_every_reader_and_an_older_producer_goes_on() -> None:
    first_at: dict[str, object] = {"x": 1, "zip": "N1", "deep": [{"day": 1, "odd": 2}, None]}
    with deployment() as db:
        made = db.create_collection(
            "c",
            {"id": "int64", "at": "struct<x: int8, zip: string, deep: list<struct<day: int8, odd: int8>>>?"},
            key="id",
        )
        first = made.insert([{"id": 1, "at": first_at}, {"id": 2}]).last_tick
        db.settle()
        before = Collection(made.database, made.definition)
        made.alter(drop=["at.zip", "at.deep.odd"], rename={"at.deep.day": "odd"}, add_check={"near": "at.x < 100"})
        made.alter(rename={"at.x": "near", "at": "place"}, add={"place.zip": "int64"})
        made.insert([{"id": 3, "place": {"near": 3, "zip": 7, "deep": [{"odd": 4}]}}])
        assert before.insert([{"id": 4, "at": {**first_at, "x": 4}}]).rejected_rows == 0
        with pytest.raises(AppendRejected, match="CHECK_VIOLATED"):  # by the check of the part, which was renamed since
            before.insert([{"id": 5, "at": {"x": 101}}])
        inside = {"deep": [{"odd": 1}, None], "zip": None}
        wanted = [
            {"id": 1, "place": {"near": 1, **inside}},
            {"id": 2, "place": None},
            {"id": 3, "place": {"near": 3, "deep": [{"odd": 4}], "zip": 7}},
            {"id": 4, "place": {"near": 4, **inside}},
        ]
        for settled in (False, True):
            if settled:
                db.settle()
            assert made.read(order_by="id").to_pylist() == wanted
            assert made.read(order_by="id", at=first).to_pylist() == [{"id": 1, "at": first_at}, {"id": 2, "at": None}]
            assert made.read(where="place.near > 3", columns="id").to_pylist() == [{"id": 4}]
        rows = [row for change in made.scan(until=first, schema="current") for row in change.rows.to_pylist()]
        assert rows == wanted[:2]
        plain = pa.table(DeltaTable(rows_uri(db.settings, made.id)).to_pyarrow_table(columns=["id", "at"])).sort_by(
            "id"
        )
        assert plain["at"].to_pylist() == [first_at, None, None, {**first_at, "x": 4}], (
            "as any reader of Delta has them"
        )
        with pytest.raises(InvalidArgument, match=r"the check 'near' is of field 'place.near': drop"):
            made.alter(drop="place.near")
        assert made.refresh().definition.schema_version == 3
