"""Tables on a store that is no folder: a deployment does all it does, and nobody looks for a table on the disk."""

from __future__ import annotations

import importlib
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from millrace.base.errors import InvalidSettings, StoreCannotPublish
from millrace.base.settings import Settings
from millrace.node.flush.definition import flush_to_end
from millrace.operations.backup.declaration import BackupParams
from millrace.operations.backup.restore import restore_backup
from millrace.operations.backup.run import backup
from millrace.operations.checkpoint.declaration import CheckpointParams
from millrace.operations.checkpoint.run import checkpoint
from millrace.operations.compaction.declaration import CompactionParams
from millrace.operations.compaction.run import compact
from millrace.operations.recovery.diagnose import diagnose
from millrace.operations.recovery.table_repair import rebuild_collection
from millrace.operations.verification import verify_collections
from millrace.runtime.progress import Progress
from millrace.storage.store import ENTRY_POINT_GROUP, _kind, _require_whole, store_at
from millrace.tables.collections.data_tables import published_uri, rows_uri
from millrace.tables.collections.layout import _is_earlier_store
from millrace.tables.read.arrow import read_arrow
from tests.operations.log_maker import Things
from tests.storage.shelf import SCHEME, Shelf, ShelfStore

TABLES = {
    "wal",
    "collections",
    "tables",
    "deletes",
    "segments",
    "checkpoints",
    "recovery_checkpoints",
    "bases",
    "wal_trims",
    "derived",
}


INSTALLED = """
from pathlib import Path
from millrace.storage.store import StoreKind
from tests.storage.shelf import SCHEME, Shelf
SHELF = Shelf(Path(__file__).parent / "hidden")
KIND = StoreKind(SCHEME, SHELF.store)
"""


@pytest.fixture
def shelf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Shelf]:
    """The shelf of an installed package that registers it."""
    metadata = tmp_path / "site" / "shelves-1.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: shelves\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(f"[{ENTRY_POINT_GROUP}]\nshelf = shelves:KIND\n")
    (tmp_path / "site" / "shelves.py").write_text(INSTALLED)
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    monkeypatch.delitem(sys.modules, "shelves", raising=False)
    _kind.cache_clear()
    yield importlib.import_module("shelves").SHELF
    _kind.cache_clear()


@pytest.fixture
def things(tmp_path: Path, shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> Iterator[Things]:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")  # whoever takes an address for a path makes a folder here
    made = Things(tmp_path, tables=f"{SCHEME}://box/of")
    yield made
    made.close()


def strays(things: Things) -> set[str]:
    """Tables, or folders of a strange name, where none should be."""
    below = {path.name for path in things.settings.data_dir.iterdir()}
    return (below & TABLES) | {path.name for path in Path.cwd().iterdir()}


def rows(settings: Settings) -> list[int]:
    return sorted(read_arrow(settings, 1)["id"].to_pylist())


@pytest.mark.slow
def test_a_deployment_whose_tables_lie_elsewhere_does_all_it_does(things: Things, shelf: Shelf) -> None:
    for _ in range(3):
        things.fill(2)
    before = rows(things.settings)
    assert len(before) >= 10
    report = checkpoint(things.settings, things.log, CheckpointParams.parse({}), Progress())
    assert report.ok
    compact(things.settings, CompactionParams(min_files=2, fold="always", keep_history_hours=0, vacuum=False))
    assert rows(things.settings) == before
    assert all(each.ok for each in verify_collections(things.settings).values())
    assert diagnose(things.settings, things.log, depth="full", stale_after=60.0, progress=Progress()) == []
    assert rebuild_collection(things.settings, 1, progress=Progress()) > 0
    assert rows(things.settings) == before
    things.fill_wal(
        2
    )  # a read sees what both channels have reached: of the last round perhaps one channel's rows alone
    flush_to_end(things.settings)
    assert len(set(rows(things.settings)) - set(before)) >= 2
    assert strays(things) == set()
    assert shelf.calls["put"] > 20
    assert shelf.calls["delta"] > 20


def test_a_backup_of_tables_elsewhere_is_restored_into_a_folder(things: Things, tmp_path: Path) -> None:
    things.fill(2)
    before = rows(things.settings)
    backup(things.settings, things.log, BackupParams.parse({"to": str(tmp_path / "backups")}), Progress())
    things.log.close()
    target = Settings(data_dir=tmp_path / "restored")
    restore_backup(target, tmp_path / "backups")
    assert rows(target) == before
    assert (tmp_path / "restored" / "wal").is_dir()


def test_tables_of_an_earlier_layout_stay_in_a_store_that_cannot_rename(
    things: Things, shelf: Shelf, tmp_path: Path
) -> None:
    things.fill(2)
    before, root = rows(things.settings), shelf.hidden / "box/of"
    (root / "collections").mkdir()
    (root / "tables/1/_rows").rename(root / "collections/1")
    shutil.rmtree(root / "tables")
    _is_earlier_store.cache_clear()
    try:
        assert rows(things.settings) == before
        shelf.calls.clear()
        things.fill(2)
        assert len(rows(things.settings)) > len(before)
        assert rows_uri(things.settings, 1) == f"{SCHEME}://box/of/collections/1"
        assert shelf.calls["folders of the root"] == 0, "the layout is looked for once"
        assert sorted(each.name for each in (root / "collections").iterdir()) == ["1"]
        with pytest.raises(StoreCannotPublish, match="restore a backup"):
            published_uri(things.settings, 1)
        backup(things.settings, things.log, BackupParams.parse({"to": str(tmp_path / "backups")}), Progress())
        assert rebuild_collection(things.settings, 1, progress=Progress()) > 0
        now = rows(things.settings)
    finally:
        _is_earlier_store.cache_clear()
    things.log.close()
    target = Settings(data_dir=tmp_path / "restored")
    restore_backup(target, tmp_path / "backups")
    assert rows(target) == now
    assert published_uri(target, 1) == f"{tmp_path}/restored/tables/1"


def test_a_store_of_an_earlier_protocol_is_refused_with_what_it_lacks(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(ShelfStore, "replace")
    monkeypatch.setattr(ShelfStore, "sync", None)
    _require_whole.cache_clear()
    with pytest.raises(InvalidSettings, match=r"shelf:// has no replace, sync: use a version of its package"):
        store_at(f"{SCHEME}://box/wal")
    monkeypatch.undo()
    _require_whole.cache_clear()


def test_an_address_of_a_store_that_nobody_knows_is_refused(shelf: Shelf) -> None:
    with pytest.raises(InvalidSettings, match=r"attic.*registered are az, file, gs, s3, shelf"):
        store_at("attic://box/wal")


@pytest.mark.parametrize("tables", ["relative/folder", "/folder/", "shelf:/box", "s3://bucket/"])
def test_a_place_of_tables_is_a_whole_path_or_a_uri(tables: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidSettings, match="TABLES"):
        Settings(data_dir=tmp_path, tables=tables)


def test_tables_may_lie_in_another_folder(tmp_path: Path) -> None:
    made = Things(tmp_path, tables=(tmp_path / "elsewhere").as_uri())
    try:
        made.fill(1)
        assert rows(made.settings) == rows(Settings(data_dir=tmp_path / "data", tables=str(tmp_path / "elsewhere")))
        assert (tmp_path / "elsewhere" / "wal").is_dir()
        assert not (tmp_path / "data" / "wal").exists()
    finally:
        made.close()
