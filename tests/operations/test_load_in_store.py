"""A load whose staged files lie in a bucket: cut off anywhere and run again, it has one effect and leaves nothing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from millrace.base.errors import InvalidArgument, StagedFileDamaged
from millrace.base.settings import Settings
from millrace.client.database import Database
from millrace.node.flush.definition import flush_to_end
from millrace.node.ingest.definition import ingest_to_end
from millrace.operations.backfill import file_staging, staging_folder
from millrace.operations.backfill.declaration import LoadParams
from millrace.operations.backfill.file_staging import stage_files
from millrace.operations.backfill.importer import append_imports
from millrace.operations.backfill.staging_folder import LOADING, StagingManifest
from millrace.operations.verification import verify_collections
from millrace.runtime.progress import Progress
from millrace.storage.store import TableStore, list_below, store_at
from tests.failpoints import at_failpoints
from tests.s3_server import Faults, bucket

ROWS = 3000


class Killed(BaseException):
    pass


@pytest.fixture
def faults() -> Iterator[Faults]:
    with Faults() as proxy:
        yield proxy


@pytest.fixture
def db(tmp_path: Path, faults: Faults, monkeypatch: pytest.MonkeyPatch) -> Iterator[Database]:
    monkeypatch.setenv("MILLRACE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(file_staging, "BATCH_ROWS", 500)
    with bucket(monkeypatch, faults.at) as uri:
        settings = replace(Settings.load(env={}), data_dir=tmp_path / "data", tables=f"{uri}/tables", pchannels=2)
        with Database.in_folder(settings) as found:
            found.create_collection("things", {"id": "int64", "note": "string"}, key="id")
            pq.write_table(pa.table({"id": range(ROWS), "note": ["x" * 50] * ROWS}), tmp_path / "rows.parquet")
            yield found
            found.connection.service.shutdown()


def staged(db: Database) -> TableStore:
    return store_at(db.settings.staged_uri)


def stage(db: Database, path: Path) -> StagingManifest:
    collection = db.catalog.collection("things")
    params = LoadParams.parse({"collection": "things", "files": [str(path)], "slice_bytes": 1 << 16})
    return stage_files(db.settings, params, collection, Progress())


def load(db: Database, path: Path) -> None:
    append_imports(db, stage(db, path), progress=Progress())


def ids(db: Database) -> list[int]:
    return sorted(db["things"].read()["id"].to_pylist())


def test_a_load_through_faults_that_is_cut_off_and_repeated_has_one_effect(
    db: Database, faults: Faults, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(place: str) -> None:
        if place == "staging.uploaded":
            raise Killed

    with at_failpoints(killed), pytest.raises(Killed):
        load(db, tmp_path / "rows.parquet")
    left = list_below(staged(db))
    assert len(left) == 3
    assert len(staged(db).list(LOADING)) == 1
    lost: list[str] = []

    def broken(method: str, path: str) -> str:
        if "PUT" in method and path.endswith("/manifest.json") and not lost:
            lost.append(path)
            return "lost"
        return ""

    faults.break_request = broken
    monkeypatch.setattr(staging_folder, "ABANDONED_SECONDS", -5.0)
    load(db, tmp_path / "rows.parquet")
    assert lost, "the answer to the manifest's put is lost: what is there decides"
    load(db, tmp_path / "rows.parquet")
    ingest_to_end(db.settings, db.log)
    assert ids(db) == list(range(ROWS)), "read from the staged files"
    flush_to_end(db.settings)
    assert ids(db) == list(range(ROWS))
    assert all(each.ok for each in verify_collections(db.settings).values())
    now = list_below(staged(db))
    assert not set(left) & set(now), "what the killed load uploaded is removed"
    manifest = StagingManifest.read(staging_folder.staged_folder(db.settings, next(iter(now)).partition("/")[0]))
    assert manifest is not None
    named = {file["path"] for each in manifest.slices for file in each.files}
    assert named == {name for name in now if name.endswith(".parquet")}
    assert len(manifest.slices) == 2
    assert not (db.settings.data_dir / "staged").exists()


def test_of_two_loads_of_one_id_the_second_takes_what_the_first_staged(db: Database, tmp_path: Path) -> None:
    found: list[StagingManifest] = []

    def other(place: str) -> None:
        if place == "staging.uploaded" and not found:
            found.append(StagingManifest("", "", 0, 0, {}, []))
            found.append(stage(db, tmp_path / "rows.parquet"))

    with at_failpoints(other):
        mine = stage(db, tmp_path / "rows.parquet")
    assert mine == found[1]
    files = {file["path"] for each in mine.slices for file in each.files}
    assert {name for name in list_below(staged(db)) if name.endswith(".parquet")} == files
    assert staged(db).list(LOADING) == []


def test_a_staged_file_that_changed_is_refused_before_and_found_after_it_is_named(db: Database, tmp_path: Path) -> None:
    manifest = stage(db, tmp_path / "rows.parquet")
    path = manifest.slices[0].files[0]["path"]
    whole = staged(db).read(path)
    assert whole is not None
    staged(db).replace(path, whole[:-20] + b"x" + whole[-19:])
    with pytest.raises(InvalidArgument, match="not the file that was staged"):
        append_imports(db, manifest, progress=Progress())
    staged(db).replace(path, whole)
    append_imports(db, manifest, progress=Progress())
    staged(db).replace(path, whole[:-20] + b"x" + whole[-19:])
    ingest_to_end(db.settings, db.log)
    with pytest.raises(StagedFileDamaged, match="sha256"):
        ids(db)
    staged(db).delete([path])
    with pytest.raises(StagedFileDamaged, match="cannot be read"):
        ids(db)


def test_files_that_an_earlier_build_staged_in_the_data_folder_are_read_there(db: Database, tmp_path: Path) -> None:
    manifest = stage(db, tmp_path / "rows.parquet")
    for name in list_below(staged(db)):
        data = staged(db).read(name)
        assert data is not None
        store_at(db.settings.staged_path).replace(name, data)
        staged(db).delete([name])
    assert stage(db, tmp_path / "rows.parquet") == manifest, "it is staged already"
    append_imports(db, manifest, progress=Progress())
    ingest_to_end(db.settings, db.log)
    assert ids(db) == list(range(ROWS))
    assert list_below(staged(db)) == {}
