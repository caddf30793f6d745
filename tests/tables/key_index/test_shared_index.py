"""The key index beside the tables: another machine copies what the publisher made, whole or not at all."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from millrace.base.settings import Settings
from millrace.client.database import Database
from millrace.node.flush.definition import flush_to_end
from millrace.node.ingest.definition import ingest_to_end
from millrace.node.publish.definition import publish
from millrace.storage import objects
from millrace.storage.store import TableStore, list_below, store_at
from millrace.tables.key_index import shared_index as module
from millrace.tables.key_index.index import INDEX_FROM_ROWS, MANIFEST_FILE, WANTED_FILE, KeyIndex
from millrace.tables.key_index.shared_index import SharedIndex, request_index, shared_index
from tests.s3_server import Faults, bucket
from tests.tables.key_index.stored_rows import Place, StoredRows, schema_of


@pytest.fixture
def faults() -> Iterator[Faults]:
    with Faults() as proxy:
        yield proxy


@pytest.fixture
def tables(faults: Faults, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr(module, "_looks", {})
    with bucket(monkeypatch, faults.at) as uri:
        yield f"{uri}/tables"


@pytest.fixture
def store(tables: str) -> TableStore:
    return store_at(f"{tables}/tables/1/_index")


def put(rows: StoredRows, shared: SharedIndex, first: int) -> set[str]:
    """Add a file of rows, and put the index that covers it. Returns the runs."""
    rows.commit([Place((number,), 1, number + 1, number) for number in range(first, first + 10)])
    found = {each.path.name for each in rows.catch_up().runs}
    shared.put(rows.index_folder, found)
    return found


def runs(store: TableStore) -> set[str]:
    return {name for name in list_below(store) if name.endswith(".run")}


def covered(folder: Path, rows: StoredRows) -> set[str]:
    live = {each.path: each.rows for each in rows.table().describe_files()}
    return KeyIndex.open(folder).covered(live)


def test_a_copy_covers_what_the_publishers_index_covers(
    store: TableStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, shared, copy = StoredRows(tmp_path, schema_of("int64")), SharedIndex(store), tmp_path / "copy"
    assert not shared.take(copy), "there is none"
    named = put(rows, shared, 0)
    assert shared.take(copy)
    assert not shared.take(copy), "it is no newer"
    assert covered(copy, rows) == set(rows.files)
    for turn in range(1, 9):  # runs merge
        named = put(rows, shared, 100 * turn)
    assert runs(store) > named, "who reads the last manifest may still copy them"
    assert shared.take(copy)
    assert covered(copy, rows) == set(rows.files)
    assert {path.name for path in copy.glob("*.run")} == named, "what it no longer needs is gone"
    monkeypatch.setattr(module, "STRAY_SECONDS", 0.0)
    named = put(rows, shared, 5000)
    assert runs(store) == named


def test_a_copy_that_fails_midway_leaves_what_was_there(
    store: TableStore, tmp_path: Path, faults: Faults, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, shared, copy = StoredRows(tmp_path, schema_of("int64")), SharedIndex(store), tmp_path / "copy"
    put(rows, shared, 0)
    assert shared.take(copy)
    before = {path.name: path.read_bytes() for path in copy.iterdir()}
    put(rows, shared, 100)
    monkeypatch.setattr(objects, "_retrying", objects._single)
    faults.break_request = lambda method, path: "503" if path.endswith(".run") else ""
    with pytest.raises(OSError, match="503"):
        SharedIndex(store_at(store.uri)).take(copy)
    assert {path.name: path.read_bytes() for path in copy.iterdir()} == before
    faults.break_request = lambda method, path: ""
    gone = [name for name in runs(store) if name not in before]
    store.delete(gone)
    assert not shared.take(copy), "its runs were replaced meanwhile"
    assert {path.name: path.read_bytes() for path in copy.iterdir()} == before


@pytest.mark.parametrize("manifest", [b"", b"{", b'{"format": 99, "table_version": 9, "runs": []}', b'{"runs": "x"}'])
def test_a_manifest_that_cannot_be_read_is_none(store: TableStore, tmp_path: Path, manifest: bytes) -> None:
    store.replace(MANIFEST_FILE, manifest)
    assert not SharedIndex(store).take(tmp_path / "copy")


def test_a_manifest_names_files_of_its_folder_alone(store: TableStore, tmp_path: Path) -> None:
    store.replace(MANIFEST_FILE, b'{"format": 1, "table_version": 9, "runs": ["../outside.run"]}')
    assert not SharedIndex(store).take(tmp_path / "copy")
    assert not (tmp_path / "outside.run").exists()


def test_a_reader_elsewhere_asks_and_gets_the_index(
    tables: str, tmp_path: Path, faults: Faults, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MILLRACE_CACHE", str(tmp_path / "cache"))
    settings = replace(Settings.load(env={}), data_dir=tmp_path / "data", tables=tables, pchannels=2)
    with Database.in_folder(settings) as db:
        users = db.create_collection("users", {"id": "int64"}, key="id")
        number = db.catalog.collection("users").id
        elsewhere = replace(settings, data_dir=tmp_path / "elsewhere")
        folder = elsewhere.key_index_path(number)

        def publish_more(first: int) -> None:
            users.insert([{"id": first + place} for place in range(100)])
            ingest_to_end(db.settings, db.log)
            flush_to_end(db.settings)
            publish(db.settings, number)

        publish_more(0)
        assert not settings.key_index_path(number).exists(), "nobody needs an index"
        request_index(elsewhere, number, KeyIndex.open(folder), INDEX_FROM_ROWS - 1)
        assert not folder.exists()
        request_index(elsewhere, number, KeyIndex.open(folder), INDEX_FROM_ROWS)
        shared = shared_index(settings, number)
        assert shared is not None
        assert shared.is_wanted()
        assert (folder / WANTED_FILE).exists()
        publish_more(1000)
        assert KeyIndex.open(settings.key_index_path(number)).rows == 200
        faults.requests.clear()
        request_index(elsewhere, number, KeyIndex.open(folder), INDEX_FROM_ROWS)
        assert not faults.requests, "a reader looks once a minute"
        module._looks.clear()
        request_index(elsewhere, number, KeyIndex.open(folder), INDEX_FROM_ROWS)
        assert KeyIndex.open(folder).rows == 200
        found = db["users"].read(where="id = 1003")
        assert found["id"].to_pylist() == [1003]
        db.connection.service.shutdown()
    assert shared_index(Settings(data_dir=tmp_path), number) is None
