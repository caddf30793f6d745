"""What a person sees and types in a Python session: representations, completion, sizes, fields, history."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from datetime import datetime

import pyarrow as pa
import pytest

from millrace.base.errors import AppendRejected, InvalidSettings, LogUnavailable
from millrace.client.collection import Collection
from millrace.client.database import Database
from millrace.client.produce.written import Written
from tests.client.conftest import opened_shop


@pytest.fixture(scope="module")
def db(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Database]:
    yield from opened_shop(tmp_path_factory.mktemp("notebook"))


@pytest.fixture(scope="module")
def users(db: Database) -> Collection:
    return db.create_collection(
        "users",
        {"id": "int64", "name": "string?", "age": "int64?", "twice": "int64?"},
        key="id",
        defaults={"name": "<b>"},
        computed={"twice": "age * 2"},
        checks={"adult": "age >= 18"},
    )


def test_a_database_names_its_collections(db: Database, users: Collection) -> None:
    assert repr(db) == f"<Database {db.settings.data_dir}>"
    assert list(db) == db._ipython_key_completions_() == ["users"]
    assert len(db) == 1
    html = db._repr_html_()
    assert "users" in html
    assert str(db.settings.data_dir) in html


def test_a_database_whose_server_is_gone_is_shown_with_the_reason(
    db: Database, users: Collection, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone(**_: object) -> list[object]:
        raise LogUnavailable("no server")

    monkeypatch.setattr(db.catalog, "collections", gone)
    assert "no server" in db._repr_html_()


def test_a_collection_shows_its_fields_and_reads_no_row(users: Collection, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Collection, "read", None)
    assert repr(users).startswith("<Collection 'users' (id: int64, name: string?, age: int64?")
    html = users._repr_html_()
    for words in ("twice", "age * 2", "&lt;b&gt;", "check adult", "_default"):
        assert words in html
    assert "<b>'" not in html, "what users wrote is escaped"


def test_a_wide_collection_has_a_short_line(db: Database) -> None:
    wide = db.create_collection("wide", {"id": "int64"} | {f"f{number}": "int64?" for number in range(400)}, key="id")
    assert "394 more" in repr(wide)
    assert len(repr(wide)) < 200
    db.drop_collection("wide")


def test_rows_are_counted_and_shown(users: Collection) -> None:
    assert bool(users)
    assert len(users) == 0
    users.insert([{"id": number, "age": 20 + number} for number in range(30)])
    assert len(users) == 30
    assert users.head().num_rows == 5
    assert users.head(7).column_names == ["id", "name", "age", "twice"]
    assert users.describe().to_pylist()[3] == {
        "field": "twice", "type": "int64", "nullable": True, "key": False, "default": None, "computed": "age * 2",
    }  # fmt: skip
    assert users.describe()["key"].to_pylist() == [True, False, False, False]


def test_history_has_what_changed_the_whole(db: Database) -> None:
    made = db.create_collection("changed", {"id": "int64"}, key="id", vchannels=2)
    made.insert([{"id": 1}])
    made.alter(add={"more": "string?"})
    middle = db.current_tick(made.definition.pchannels)
    made.create_partition("eu")
    made.drop_partition("eu")
    found = made.history()
    operations = ["create", "alter", "create partition", "drop partition"]
    assert found["operation"].to_pylist() == operations
    assert found["tick"].to_pylist() == sorted(found["tick"].to_pylist())
    assert json.loads(found["details"][0].as_py())["fields"] == ["id"]
    assert "more" in found["details"][1].as_py()
    assert json.loads(found["details"][2].as_py()) == {"partition": "eu"}
    assert abs(found["time"][0].as_py() - datetime.now().astimezone()).total_seconds() < 600
    assert made.history(until=middle)["operation"].to_pylist() == operations[:2]
    assert made.history(after=middle)["operation"].to_pylist() == operations[2:]
    db.drop_collection("changed")


def test_an_outcome_is_a_line_of_figures() -> None:
    written = Written(messages=2, rows=1_500, bytes=9_000, last_tick=77)
    assert repr(written) == "<Written 1,500 rows in 2 messages, 9,000 bytes, last tick 77>"
    assert "1,500" in written._repr_html_()
    written.rejections = [AppendRejected("no", reason="SCHEMA_MISMATCH")]
    written.rejected_by_reason["SCHEMA_MISMATCH"] = 3
    assert "3 rows rejected (SCHEMA_MISMATCH)" in repr(written)
    assert "rejected: SCHEMA_MISMATCH" in written._repr_html_()


@pytest.mark.parametrize(
    ("library", "extra", "method"),
    [("pandas", "pandas", "to_pandas"), ("polars", "polars", "to_polars"), ("duckdb", "operations", "to_duckdb")],
)
def test_a_missing_library_names_its_extra(
    users: Collection, library: str, extra: str, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Collection, "read", lambda self, **_: pa.table({"id": [1]}))
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(InvalidSettings, match=rf"{library} is not installed: pip install 'millrace\[{extra}\]'"):
        getattr(users, method)()
