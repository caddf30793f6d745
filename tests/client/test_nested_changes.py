"""Changes of fields inside of fields, by their paths."""

from __future__ import annotations

import pytest

from millrace.base.errors import InvalidArgument
from millrace.client.nested_changes import resolved
from millrace.client.schemas import changes, schema
from millrace.message.schema_changes import Change, Widen, apply_all
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


def of(made: list[Change]) -> list[Change]:
    return resolved(made, lambda: HERE)


def test_paths_become_the_wider_type_of_the_whole_field() -> None:
    made = of(
        changes(
            rename={"id": "key"},
            widen={"at.x": "int64", "lines.price": "int64", "at.odd.y": "int16"},
            add={"at.deep.zip": "uuid", "by.more": "list<int8>", "plain.dot": "string"},
        )
    )
    assert made[1:6] == [
        Widen("at", "struct<x: int64, deep: struct<day: date>>"),
        Widen("lines", "list<struct<price: int64>>"),
        Widen("at.odd", "struct<y: int16>"),
        Widen("at", "struct<x: int64, deep: struct<day: date, zip: uuid>>"),
        Widen("by", "map<string, struct<n: float32, more: list<int8>>>"),
    ]
    assert apply_all(HERE, made).arrow().names == ["key", "at", "lines", "by", "at.odd", "plain.dot"]


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ({"rename": {"at.x": "y"}}, "'at.x' lies inside of a field.*cannot be renamed.*Add a field"),
        ({"drop": "lines.price"}, "'lines.price' lies inside of a field.*cannot be dropped"),
        ({"relax": "at.x"}, "'at.x' may be null already"),
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
        of(changes(**what))  # type: ignore[arg-type]


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
