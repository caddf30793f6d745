"""Who looks at the catalog's file sees what the coordinator keeps, and leaves the file as it is."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from millrace.base.settings import Settings
from millrace.catalog.sqlite_file import catalog_path, collection_names, read_collections
from millrace.coord.broadcast.task import collection_keys
from millrace.coord.catalog.store import CatalogStore
from millrace.message.schema import CollectionSchema, FieldSpec
from millrace.observe.health import read_health_inputs
from tests.coord.catalog_rig import add_collection, finish

SCHEMA = CollectionSchema((FieldSpec("id", "int64", False),), "id")
LATER = {"begun", "request", "trouble"}
"""Tables that files of earlier builds lack."""


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A deployment with two collections, one of which is under way."""
    with CatalogStore(catalog_path(tmp_path)) as store:
        finish(store, add_collection(store, "users", SCHEMA))
        add_collection(store, "orders", SCHEMA)
    return tmp_path


def tables(data: Path) -> set[str]:
    db = sqlite3.connect(catalog_path(data))
    try:
        return {name for (name,) in db.execute("select name from sqlite_master where type = 'table'")}
    finally:
        db.close()


def test_a_look_sees_what_is_there_and_makes_no_file_where_nothing_is(data: Path, tmp_path: Path) -> None:
    assert [each.name for each in read_collections(data)] == collection_names(data) == ["orders", "users"]
    empty = tmp_path / "empty"
    empty.mkdir()
    assert read_collections(empty) == collection_names(empty) == []
    assert CatalogStore.open_read_only(empty) is None
    assert not any(empty.iterdir())


def test_a_look_makes_no_table_that_a_file_of_an_earlier_build_lacks(data: Path) -> None:
    db = sqlite3.connect(catalog_path(data))
    for name in LATER:
        db.execute(f"drop table {name}")
    db.close()
    before, kept = tables(data), catalog_path(data).read_bytes()
    assert not LATER & before
    store = CatalogStore.open_read_only(data)
    assert store is not None
    with store:
        (found,) = store.broadcasts.list_unresolved()
        assert (found.collection, found.task.kind, found.task.reason, found.task.at) == (
            "orders",
            "create_collection",
            "",
            0.0,
        )
        assert found.task.keys == collection_keys(2), "what earlier builds kept works on its collection for itself"
    assert [each[0] for each in read_health_inputs(Settings(data_dir=data)).running_ddl] == ["orders"]
    assert len(read_collections(data)) == 2
    assert tables(data) == before
    assert catalog_path(data).read_bytes() == kept


def test_a_look_cannot_write_and_waits_for_no_writer(data: Path) -> None:
    store = CatalogStore.open_read_only(data)
    assert store is not None
    with store:
        with pytest.raises(sqlite3.OperationalError, match="readonly"):
            store.next_term("dml_0")
        with CatalogStore(catalog_path(data)) as writer, writer.transaction():
            assert len(store.collections()) == len(read_collections(data)) == 2


def test_names_are_told_without_arrow(data: Path) -> None:
    program = (
        "import sys\nfrom pathlib import Path\nfrom millrace.catalog.sqlite_file import collection_names\n"
        f"print(collection_names(Path({str(data)!r})), 'pyarrow' in sys.modules)"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert ended.stdout == "['orders', 'users'] False\n"
