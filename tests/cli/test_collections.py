"""Collections by command: made from fields or a file, shown, changed, dropped."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import parquet

from millrace.base.errors import InvalidArgument
from millrace.base.settings import Settings
from millrace.catalog.sqlite_file import catalog_path
from millrace.client.database import connect
from millrace.client.produce.files.formats import CsvOptions, InputFormat
from millrace.client.produce.files.reader import read_batches
from millrace.commands.parts.collection_schema import make_schema, parse_field
from millrace.coord.catalog.store import CatalogStore
from millrace.message.schema import CollectionSchema, FieldSpec
from tests.cli.deployment import Deployment
from tests.coord.catalog.filled import fill_catalog


def test_a_collection_lives_from_create_to_drop(shared: Deployment) -> None:
    shared.create_users("--vchannels", "3", "--partition", "eu", "--partition", "us")
    [found] = shared.as_json("collections", "list")
    assert found["name"] == "users"
    assert found["fields"] == ["id:int64", "name:string?", "at:timestamp?"]
    assert found["vchannels"] == [f"dml_{number % 2}_{found['id']}v{number}" for number in range(3)]
    assert found["partitions"] == ["eu", "us"]

    shared.fails("COLLECTION_EXISTS", "collections", "create", "users", "--field", "id:int64", "--key", "id")
    shared.ok("collections", "add-field", "users", "mail:string?")
    shared.fails("INVALID_ARGUMENT", "collections", "add-field", "users", "age:int32")
    shared.fails("INVALID_ARGUMENT", "collections", "add-field", "users", "mail:string?")
    shared.ok("collections", "add-partition", "users", "ap")
    shared.fails("APPEND_REJECTED", "collections", "add-partition", "users", "ap")
    shared.ok("collections", "drop-partition", "users", "us", "--yes")
    shared.fails("APPEND_REJECTED", "collections", "drop-partition", "users", "us", "--yes")
    described = shared.as_json("collections", "describe", "users")
    assert described["schema_version"] == 2
    assert described["fields"][-1] == {"name": "mail", "type": "string", "nullable": True}
    assert list(described["partition_ids"]) == ["eu", "ap"]
    assert "timestamp" in shared.ok("collections", "describe", "users")

    assert shared.run("collections", "drop", "users", stdin="n\n").exit_code == 1
    assert shared.as_json("collections", "list")
    shared.ok("collections", "drop", "users", stdin="y\n")
    assert shared.as_json("collections", "list") == []
    assert {each["state"] for each in shared.as_json("collections", "list", "--dropped")} == {"dropped"}


def test_a_schema_is_altered_and_a_load_brings_what_it_lacks(shared: Deployment, tmp_path: Path) -> None:
    shared.create_users()
    shared.produce({"id": 1, "name": "Ada"})
    altered = (
        "--drop",
        "at",
        "--rename",
        "name:called",
        "--add",
        "age:int8?",
        "--relax",
        "called",
        "--order",
        "id,age",
    )
    told = shared.ok("collections", "alter", "users", *altered)
    assert "users has schema version 2: id:int64, age:int8?, called:string?." in told
    shared.fails("INVALID_ARGUMENT", "collections", "alter", "users", "--drop", "id")
    shared.fails("INVALID_ARGUMENT", "collections", "alter", "users", "--rename", "called")
    shared.fails("INVALID_ARGUMENT", "collections", "alter", "users")
    rows, lines = tmp_path / "rows.parquet", tmp_path / "rows.jsonl"
    parquet.write_table(pa.table({"id": [2], "age": pa.array([300], pa.int16()), "city": ["Oslo"]}), rows)
    lines.write_text('{"id": 3, "age": 3, "seen": true}\n')
    result = shared.run("produce", "users", str(rows), str(lines), "--evolve")
    assert result.exit_code == 0, result.output
    assert "added city:string, added seen:bool, widened age to int16" in result.output
    shared.fails("INVALID_ARGUMENT", "produce", "users", "-", "--evolve")
    shared.catch_up()
    read = [json.loads(line) for line in shared.ok("read", "users", "--json").splitlines()]
    assert sorted(read, key=lambda row: row["id"]) == [
        {"id": 1, "age": None, "called": "Ada", "city": None, "seen": None},
        {"id": 2, "age": 300, "called": None, "city": "Oslo", "seen": None},
        {"id": 3, "age": 3, "called": None, "city": None, "seen": True},
    ]
    shared.ok("collections", "drop", "users", "--yes")


def test_a_collection_that_replaces_says_so_and_does(shared: Deployment) -> None:
    shared.create_users("--on-duplicate", "replace")
    assert shared.as_json("collections", "describe", "users")["on_duplicate"] == "replace"
    for name in ("first", "second"):
        shared.produce({"id": 1, "name": name})
    shared.catch_up()
    assert shared.as_json("read", "users")["name"] == "second"  # the one line there is
    shared.ok("collections", "drop", "users", "--yes")
    assert shared.run("collections", "create", "more", "--on-duplicate", "last").exit_code == 2


def test_a_key_of_several_fields_is_made_filled_and_deleted_by(shared: Deployment) -> None:
    fields = ("--field", "symbol:string", "--field", "day:date", "--field", "name:string?")
    shared.ok("collections", "create", "quotes", *fields, "--key", "symbol", "--key", "day")
    assert shared.as_json("collections", "describe", "quotes")["primary_key"] == ["symbol", "day"]
    rows = "symbol,day,name\nA,2026-11-23,x\nA,2026-11-24,y\nB,2026-11-24,z\n"
    shared.ok("produce", "quotes", str(shared.file("quotes.csv", rows)))
    gone = '{"day": "2026-11-24", "symbol": "A"}\n{"day": "2026-11-24", "symbol": "B"}'
    shared.ok("produce", "quotes", "-", "--delete", stdin=gone)
    shared.catch_up()
    assert shared.as_json("read", "quotes")["name"] == "x"  # the one line there is
    shared.ok("collections", "drop", "quotes", "--yes")


def test_a_flush_waits_for_the_flusher_or_says_that_it_is_behind(shared: Deployment) -> None:
    shared.create_users()
    assert "There were no growing segments." in shared.ok("collections", "flush", "users")
    shared.produce({"id": 1})
    words = shared.fails("DEADLINE_EXCEEDED", "collections", "flush", "users", "--wait", "--timeout", "0")
    assert "millrace jobs run" in words
    shared.catch_up()
    [segment] = shared.as_json("segments", "users")
    assert (segment["state"], segment["rows"], segment["policy"]) == ("flushed", 1, "manual")
    assert "nothing yet" in shared.ok("collections", "describe", "users")
    shared.ok("collections", "publish", "users")
    published = shared.as_json("collections", "describe", "users")["published"]
    assert (published["rows"], published["lag_seconds"], published["error"]) == (1, 0.0, "")
    assert "1 rows at tick" in shared.ok("collections", "describe", "users")
    shared.ok("collections", "flush", "users", "--wait", "--timeout", "0")


@pytest.mark.parametrize("text", ["id", "id:", ":int64", "id:?", "", "id:int64??"])
def test_what_is_no_field_is_refused(text: str) -> None:
    with pytest.raises(InvalidArgument):
        parse_field(text)


def test_a_field_name_may_hold_colons() -> None:
    assert parse_field("a:b:list<string>?") == FieldSpec("a:b", "list<string>", True)


def test_the_fields_of_a_file_become_the_schema_with_the_given_ones_over_them(tmp_path: Path) -> None:
    csv, lines = tmp_path / "rows.csv", tmp_path / "rows.jsonl"
    csv.write_text("id,score,at,ok,name\n1,1.5,2026-11-21T10:00:00Z,true,Ada\n", encoding="utf-8")
    lines.write_text('{"id": 1, "tags": ["a"]}\n{"id": 2, "score": 1.5}\n', encoding="utf-8")
    found = make_schema(fields=["name:binary?", "more:date?"], source=csv, key=["id"], event_time="at")
    assert [(each.name, each.type, each.nullable) for each in found.fields] == [
        ("id", "int64", False),
        ("score", "float64", True),
        ("at", "timestamp", True),
        ("ok", "bool", True),
        ("name", "binary", True),
        ("more", "date", True),
    ]
    found = make_schema(fields=[], source=lines, key=["id"], event_time=None)
    assert [each.type for each in found.fields] == ["int64", "list<string>", "float64"]


def test_the_cells_of_a_csv_file_are_inferred_as_they_are_read(tmp_path: Path) -> None:
    path = tmp_path / "rows.txt"
    path.write_text(
        "id;zip;big;price;day;at;ok;time;none;wrong\n"
        "1;01234;12345678901234567890;1.234,5;23.11.2026;23.11.2026 10:00;true;10:00:00;NA;1\n"
        "\n2;99;1;NA;24.11.2026;;false;;;x\n3;only two\n",
        encoding="utf-16",
    )
    form = CsvOptions(
        ";", encoding="utf-16", nulls=("", "NA"), decimal=",", dates="%d.%m.%Y", timestamps="%d.%m.%Y %H:%M"
    )
    found = make_schema(fields=[], source=path, key=["id"], event_time=None, kind=InputFormat.CSV, form=form)
    assert {each.name: each.type for each in found.fields} == {
        "id": "int64",
        "zip": "string",
        "big": "string",
        "price": "float64",
        "day": "date",
        "at": "timestamp",
        "ok": "bool",
        "time": "string",
        "none": "string",
        "wrong": "string",
    }
    with path.open("rb") as file:
        batches = list(read_batches(file, InputFormat.CSV, found, batch_rows=9, form=form))
    assert [batch.rows.num_rows for batch in batches] == [2]
    assert [bad.line for batch in batches for bad in batch.bad] == [5]


@pytest.mark.parametrize(
    ("name", "text", "why"),
    [
        ("twice.csv", "id,v,v\n1,2,3\n", "two columns 'v'"),
        ("empty.csv", "", "it is empty"),
        ("mixed.jsonl", '{"id": 1, "v": 1}\n{"id": 2, "v": "x"}\n', "v has more than one type .*--field v:TYPE"),
        ("twice.jsonl", '{"id": 1}\n\n{"id": 1, "v": 1, "v": 2}\n', "line 3: the name 'v' appears twice"),
        ("number.json", '[{"id": 1},\n7]', "line 2: it is int, not an object"),
        ("rows.xyz", "", "names no format"),
    ],
)
def test_a_file_that_says_no_columns_is_refused_in_words(tmp_path: Path, name: str, text: str, why: str) -> None:
    (tmp_path / name).write_text(text, encoding="utf-8")
    with pytest.raises(InvalidArgument, match=why):
        make_schema(fields=[], source=tmp_path / name, key=["id"], event_time=None)
    with pytest.raises(InvalidArgument, match="without a header"):
        make_schema(
            fields=[],
            source=tmp_path / name,
            key=["id"],
            event_time=None,
            kind=InputFormat.CSV,
            form=CsvOptions(header=False),
        )


def test_parquet_types_find_the_field_type_that_holds_them_or_an_error_that_says_how(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    columns = {
        "id": pa.array([1], pa.int32()),
        "u": pa.array([1], pa.uint32()),
        "t": pa.array([1], pa.timestamp("ns")),
        "n": pa.nulls(1),
        "price": pa.array([1], pa.decimal128(10, 2)),
        "money": pa.array([1], pa.decimal256(50, 2)),
    }
    parquet.write_table(pa.table(columns), path)
    with pytest.raises(InvalidArgument, match="--field money:TYPE"):
        make_schema(fields=[], source=path, key=["id"], event_time=None)
    found = make_schema(fields=["money:float64?"], source=path, key=["id"], event_time=None)
    assert [each.type for each in found.fields] == ["int64", "int64", "timestamp", "string", "decimal(10,2)", "float64"]


def test_a_file_that_is_not_what_its_suffix_says_is_an_error(tmp_path: Path) -> None:
    for name in ("rows.parquet", "rows.jsonl"):
        path = tmp_path / name
        path.write_text("[1", encoding="utf-8")
        with pytest.raises(InvalidArgument, match="cannot be read"):
            make_schema(fields=[], source=path, key=["id"], event_time=None)


def test_a_generated_key_is_asked_for_by_name(shared: Deployment) -> None:
    csv = shared.file("clicks.csv", "page,ms\n/,1\n/,2\n")
    shared.ok("collections", "create", "clicks", "--from", str(csv), "--generated-key", "row_id")
    assert shared.as_json("collections", "describe", "clicks")["generated_key"] is True
    assert "Accepted 2 rows" in shared.ok("produce", "clicks", str(csv))
    shared.fails(
        "INVALID_ARGUMENT", "collections", "create", "c", "--from", str(csv), "--generated-key", "a", "--key", "ms"
    )
    shared.ok("collections", "drop", "clicks", "--yes")


def test_a_collection_is_made_and_altered_with_rules_that_describe_shows(shared: Deployment) -> None:
    fields = ["--field", "id:int64", "--field", "qty:int32", "--field", "twice:int64"]
    rules = ["--default", "qty=1", "--computed", "twice=qty * 2", "--check", "some=qty > 0"]
    shared.ok("collections", "create", "ruled", *fields, "--key", "id", *rules)
    shared.ok(
        "collections", "alter", "ruled", "--drop-check", "some", "--add-check", "few=qty < 9", "--set-default", "qty=2"
    )
    told = shared.as_json("collections", "describe", "ruled")
    assert [told[name] for name in ("default qty", "computed twice", "check few")] == ["2", "qty * 2", "qty < 9"]
    assert "check some" not in told
    for wrong in (
        ["--add-check", "few"],
        ["--add-check", "few=qty <"],
        ["--set-default", "qty=much"],
        ["--drop-check", "no"],
    ):
        shared.fails("INVALID_ARGUMENT", "collections", "alter", "ruled", *wrong)


def test_the_list_has_pages_and_a_search(tmp_path: Path) -> None:
    deployment = Deployment(Settings(data_dir=tmp_path))
    with CatalogStore(catalog_path(tmp_path)):
        fill_catalog(
            catalog_path(tmp_path), 230, CollectionSchema((FieldSpec("id", "int64", False),), "id"), pchannels=2
        )
    assert len(deployment.as_json("collections", "list")) == 230, "a script gets all"
    page = deployment.ok("collections", "list")
    assert "filled_000100" in page
    assert "filled_000101" not in page
    assert "100 of 230 collections. Next: --after 100:filled_000100;" in page
    following = deployment.as_json("collections", "list", "--after", "filled_000100", "--limit", "2")
    assert [each["name"] for each in following] == ["filled_000101", "filled_000102"]
    found = deployment.as_json("collections", "list", "--search", "D_00011")
    assert [each["id"] for each in found] == list(range(110, 120))
    assert "No collection's name contains 'other'" in deployment.ok("collections", "list", "--search", "other")
    assert "and 210 more" in deployment.fails("COLLECTION_NOT_FOUND", "collections", "describe", "nope")


def test_pchannels_are_added_while_the_deployment_runs_and_get_the_next_collections(shared: Deployment) -> None:
    before = shared.as_json("log", "pchannels")
    assert [each["opened"] for each in before] == [True] * len(before)
    count = len(before) + 2
    added = shared.as_json("log", "pchannels", "--count", str(count))
    assert [each["pchannel"] for each in added] == [f"dml_{number}" for number in range(count)]
    assert [each["vchannels"] for each in added[-2:]] == [0, 0]
    shared.ok("collections", "create", "late", "--field", "id:int64", "--key", "id", "--vchannels", "2")
    with connect(settings=shared.settings) as db:
        assert db.definition("late").pchannels == [f"dml_{count - 2}", f"dml_{count - 1}"]
    shared.ok("collections", "drop", "late", "--yes")
