"""The public face: its names, how little it loads, its types, and what it takes and refuses."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

import pandas as pd
import polars as pl
import pyarrow as pa
import pytest

import millrace
import millrace.testing
from millrace.base.errors import InvalidArgument
from millrace.message.schema import CollectionSchema, FieldSpec

HEAVY = ("pyarrow", "numpy", "pandas", "polars", "deltalake", "pyspark", "airflow", "sqlite3", "grpc", "pydantic")

USER = """
from datetime import datetime

import millrace

with millrace.connect("data", start=False) as db:
    users = db.create_collection("users", {"id": "int64", "name": "string?"}, key="id")
    written: millrace.Written = users.insert([{"id": 1, "name": "Ada"}])
    rows = users.read(at=datetime.now().astimezone(), columns=["id"])
    for change in users.scan(start=millrace.All(), until=written.last_tick):
        kind: str = change.kind
    try:
        users.delete([1])
    except millrace.errors.AppendRejected as error:
        print(error.reason)
    with users.consume(group="g") as consumer:
        delivery: millrace.Delivery | None = consumer.poll(timeout=1.0)
"""


def loaded_by(statement: str) -> set[str]:
    code = f"{statement}\nimport sys\nprint('\\n'.join(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    return set(done.stdout.split())


def test_the_face_alone_loads_nothing() -> None:
    loaded = loaded_by("import millrace")
    assert not loaded.intersection(HEAVY)
    assert {name for name in loaded if name.startswith("millrace.")} == {"millrace.base", "millrace.base.package"}


def test_every_name_is_there_and_no_other() -> None:
    assert {name for name in millrace.__all__ if getattr(millrace, name) is None} == set()
    assert set(millrace.__all__) <= set(dir(millrace))
    with pytest.raises(AttributeError, match="no attribute 'Collektion'"):
        _ = millrace.Collektion  # type: ignore[attr-defined]


@pytest.mark.slow
def test_a_users_program_is_typed(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(USER)
    command = [sys.executable, "-m", "mypy", "--strict", "--no-error-summary"]  # with what the linter's run has cached
    root = Path(__file__).resolve().parents[1]
    good = subprocess.run([*command, str(program)], cwd=root, capture_output=True, text=True, timeout=110)
    assert good.returncode == 0, good.stdout
    program.write_text(USER.replace("kind: str = change.kind", "kind: int = change.kind"))
    bad = subprocess.run([*command, str(program)], cwd=root, capture_output=True, text=True, timeout=110)
    assert "Incompatible types in assignment" in bad.stdout


# --- schemas ----------------------------------------------------------------------------------------------------------


@dataclass
class Everything:
    id: int
    ok: bool
    part: float
    name: str
    raw: bytes
    day: date
    at: datetime
    tags: list[str]
    note: str | None = None


def test_a_schema_is_made_of_what_people_have() -> None:
    wanted = CollectionSchema((FieldSpec("id", "int64", False), FieldSpec("name", "string", True)), "id")
    frame = {"id": [1], "name": ["a"]}
    sources: list[Any] = [
        {"id": "int64", "name": "string?"},
        pa.schema([pa.field("id", pa.int64()), pa.field("name", pa.utf8())]),
        pa.table(frame),
        pd.DataFrame(frame),
        pl.DataFrame(frame),
    ]
    assert [millrace.schema(source, key="id") for source in sources] == [wanted] * len(sources)
    assert millrace.schema(wanted) is wanted


def test_a_dataclass_is_a_schema() -> None:
    made = millrace.schema(Everything, key="id", event_time="at")
    assert [(each.name, each.type, each.nullable) for each in made.fields] == [
        ("id", "int64", False),
        ("ok", "bool", False),
        ("part", "float64", False),
        ("name", "string", False),
        ("raw", "binary", False),
        ("day", "date", False),
        ("at", "timestamp", False),
        ("tags", "list<string>", False),
        ("note", "string", True),
    ]


@dataclass
class WithSet:
    id: int
    seen: set[int]


@pytest.mark.parametrize(
    ("source", "key", "words"),
    [
        ({"id": "int64"}, None, "name the primary key"),
        ({"id": "integer"}, "id", "unknown type 'integer'; one of bool, int8"),
        ({"id": 7}, "id", "the type of 'id' is text, such as \"int64\""),
        ({"id": "int64"}, "key", "the primary key 'key' is no field"),
        (WithSet, "id", "field 'seen': set[int] has no type here; a class has bool, int"),
        (int, "id", "int is neither a dataclass"),
        (7, "id", "int is not a schema: pass a dict of types by column"),
    ],
)
def test_what_is_no_schema_is_refused_in_words(source: object, key: str | None, words: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        millrace.schema(source, key=key)
    assert words in str(refused.value)


# --- a database -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def db() -> Iterator[millrace.testing.Deployment]:
    with millrace.testing.deployment() as made:
        yield made


@pytest.fixture
def users(db: millrace.testing.Deployment, request: pytest.FixtureRequest) -> millrace.Collection:
    name = "".join(each if each.isalnum() else "_" for each in request.node.name)[:60]
    return db.create_collection(name, {"id": "int64", "name": "string?"}, key="id")


@dataclass
class User:
    id: int
    name: str | None = None


@pytest.mark.slow
def test_what_may_be_null_is_said_and_what_cannot_be_is_refused(users: millrace.Collection) -> None:
    with pytest.raises(InvalidArgument, match="the key 'a' may not be null: its type is int64"):
        millrace.schema({"a": "int64?"}, key="a")
    assert millrace.schema({"id": "int64", "d": "int64?"}, key="id").fields[1].nullable
    for change in (lambda: users.add_field("must", "int64"), lambda: users.alter(add={"must": "int64"})):
        with pytest.raises(InvalidArgument, match=r"have no 'must', so it may be null: write 'int64\?'"):
            change()
    users.add_field("may", "int64?")
    assert users.schema.fields[-1].nullable


def test_rows_go_in_however_people_have_them(users: millrace.Collection) -> None:
    users.insert([{"id": 1, "name": "a"}, {"id": 2}])
    users.insert([User(3, "c"), User(4)])
    users.insert({"id": [5], "name": ["e"]})
    users.insert(pa.table({"id": [6]}))
    users.insert(pa.record_batch({"id": [7], "name": ["g"]}))
    users.insert(pd.DataFrame({"id": [8], "name": ["h"]}))
    users.insert(pl.DataFrame({"id": [9], "name": ["i"]}))
    users.insert(iter([pa.record_batch({"id": [10], "name": ["j"]})]))
    users.insert([])
    users.upsert(pl.DataFrame({"id": [1], "name": ["A"]}))
    rows = {row["id"]: row["name"] for row in users.read().to_pylist()}
    assert rows == {1: "A", 2: None, 3: "c", 4: None, 5: "e", 6: None, 7: "g", 8: "h", 9: "i", 10: "j"}
    assert isinstance(users.to_polars(columns=["id"]), pl.DataFrame)
    assert users.to_pandas(columns=["id"]).id.sum() == 55


@pytest.mark.quick_cases(4)
@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ("name", "str is not a DataFrame"),
        (7, "int is not a DataFrame"),
        ([1, 2], "row 0 is int: rows are dicts, dataclass instances or pydantic models"),
        ([{"id": 1}, None], "row 1 is NoneType"),
        ([{"id": 1, "city": "Oslo"}], "has no column 'city'; it has id, name"),
        ([{"name": "a"}], "the column 'id' is missing"),
        ([{"id": 1, "name": 5}, {"id": 2, "name": "x"}], "the column 'name' is not a list of values of one type"),
        ({"id": [1, 2], "name": ["a"]}, "these columns make no table"),
        ([{"id": 1.5}], "the column 'id' is not int64"),
        ([{"id": None}], "the column 'id' has nulls"),
    ],
)
def test_what_is_no_rows_is_refused_in_words(users: millrace.Collection, rows: Any, words: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        users.insert(rows)
    assert words in str(refused.value)
    assert users.read().num_rows == 0


def test_a_name_stands_for_its_collection_and_a_moment_for_its_tick(
    db: millrace.testing.Deployment, users: millrace.Collection
) -> None:
    producer = db.producer
    first = producer.insert(users.name, [{"id": 1}]).last_tick
    producer.upsert(users.name, [{"id": 1, "name": "Ada"}])
    with producer.transaction(users.name) as txn:
        txn.insert([{"id": 2}])
    with producer.batch() as batch:
        batch.insert([{"id": 3}], collection=users.name)
    producer.delete(users.name, [2])
    assert producer.delete_where(users.name, "id == 3").keys == 1
    assert db[users.name].read(at=first).to_pylist() == [{"id": 1, "name": None}]
    assert db[users.name].read(at=datetime.now(UTC).isoformat()).to_pylist() == [{"id": 1, "name": "Ada"}]
    kinds = [change.kind for change in users.scan(until=txn.commit_tick)]
    assert kinds == ["insert", "delete", "insert", "insert"]
    assert [change.kind for change in users.scan(start=millrace.StartAfterTick(first), until=txn.commit_tick)] == kinds[
        1:
    ]
    with pytest.raises(millrace.errors.CollectionNotFound):
        producer.insert("nobody", [{"id": 1}])


def test_collections_are_found_changed_and_dropped(db: millrace.testing.Deployment) -> None:
    made = db.create_collection("pots", {"id": "int64"}, key="id", partitions=["a"])
    assert "pots" in db
    assert db.collections().count("pots") == 1
    assert repr(db["pots"]) == "<Collection 'pots' (id: int64), key 'id'>"
    made.add_field("size", "float64?")
    made.create_partition("b")
    assert (made.schema.arrow().names, made.partitions) == (["id", "size"], ["a", "b"])
    made.insert({"id": [1, 2]}, partition="a")
    made.insert([{"id": 3, "size": 0.5}], partition="b")
    made.drop_partition("a")
    assert made.read().to_pylist() == [{"id": 3, "size": 0.5}]
    assert set(made.flush()) == set(made.definition.vchannels)
    with pytest.raises(InvalidArgument, match="no column 'colour'; there are id, size"):
        made.read(columns=["colour"])
    db.drop_collection("pots")
    with pytest.raises(millrace.errors.CollectionNotFound):
        db.collection("pots")


def test_where_a_database_is_told_in_one_word(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="neither a folder nor a server"):
        millrace.connect("http://localhost:7700")
    with pytest.raises(InvalidArgument, match="a token and roots are for a server"):
        millrace.connect(tmp_path, token="secret")
    with pytest.raises(millrace.errors.LogUnavailable):
        millrace.connect(tmp_path / "none", start=False)


@pytest.mark.parametrize("kind", ["missing", "of something else"])
def test_a_typing_error_in_a_path_makes_no_deployment(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(millrace.Database, "in_folder", lambda settings, **_: settings.data_dir)
    folder = tmp_path / "x"
    if kind != "missing":
        folder.mkdir()
        (folder / "notes.txt").touch()
    for call in (lambda: millrace.connect(folder), lambda: millrace.connect(str(folder))):
        with pytest.raises(InvalidArgument, match=r"(no|not a) deployment.*create=True"):
            call()
    assert [path.name for path in folder.glob("*")] == ([] if kind == "missing" else ["notes.txt"])
    assert millrace.connect(folder, create=True) == folder  # type: ignore[comparison-overlap]


def test_a_path_may_begin_with_a_tilde(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(millrace.Database, "in_folder", lambda settings, **_: settings.data_dir)
    assert millrace.connect("~/data", create=True) == tmp_path / "data"  # type: ignore[comparison-overlap]


def test_the_same_face_stands_before_a_server(db: millrace.testing.Deployment, users: millrace.Collection) -> None:
    record = (db.settings.log_path / "server.json").read_text()
    import json

    found = json.loads(record)
    with millrace.connect(found["address"], token=found["token"]) as far:
        far[users.name].insert([{"id": 1, "name": "Ada"}])
        assert far.collections() == db.collections()
        with pytest.raises(InvalidArgument, match="the table wal is on the server"):
            far.table("wal")
    assert users.read().to_pylist() == [{"id": 1, "name": "Ada"}]
