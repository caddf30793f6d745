"""The rows tables of an earlier build are moved whole, by whoever comes first, killed anywhere; names lead to ids."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from millrace.base.errors import StoreCannotPublish, TableDamaged, TableUnavailable, UnsupportedVersion
from millrace.base.settings import Settings
from millrace.node.flush.definition import flush_to_end
from millrace.tables.collections.data_tables import published_uri, rows_uri
from millrace.tables.collections.layout import (
    earlier_name,
    has_earlier_layout,
    link_name,
    link_names,
    record_layout,
    stored_collection_ids,
    unlink_name,
)
from millrace.tables.read.arrow import read_arrow, stored_dataset
from tests.failpoints import at_failpoints
from tests.tables.wal_maker import Collection, WalMaker


class Killed(Exception):
    pass


def insert(collection: Collection, first: int) -> None:
    vchannel = collection.vchannels[0]
    keys = list(collection.keys_of(vchannel, first + 3))[first:]
    collection.append(vchannel, collection.insert({"id": keys, "body": ["a", "b", "c"]}, vchannel=vchannel))
    collection.maker.commit()


def rows(settings: Settings, collection: Collection) -> list[Any]:
    return sorted(map(str, read_arrow(settings, collection.id).to_pylist()))


def as_earlier_build(settings: Settings) -> None:
    """Put the tables where builds of layout 1 had them."""
    root, numbers = settings.data_dir, stored_collection_ids(settings, "rows")
    (root / "collections").unlink()
    (root / "collections").mkdir()
    for number in numbers:
        (root / "tables" / str(number) / "_rows").rename(root / "collections" / str(number))
    shutil.rmtree(root / "tables")


def inodes(folder: Path) -> set[int]:
    return {path.stat().st_ino for path in folder.rglob("*") if path.is_file() and "_delta_log" not in path.parts}


@pytest.fixture
def earlier(settings: Settings) -> list[Collection]:
    """Three collections with rows, in the layout of an earlier build."""
    maker = WalMaker(settings)
    maker.open()
    made = [Collection(maker, collection_id=number + 1, vchannels=1) for number in range(3)]
    for each in made:
        each.create()
    maker.commit()
    for each in made:
        insert(each, 0)
    flush_to_end(settings)
    as_earlier_build(settings)
    return made


def test_a_new_deployment_has_the_record_of_its_layout_before_its_first_table(settings: Settings) -> None:
    flush_to_end(settings)
    assert json.loads((settings.data_dir / "collections").read_text()) == {"layout": 2}
    assert rows_uri(settings, 7) == f"{settings.data_dir}/tables/7/_rows"
    assert published_uri(settings, 7) == f"{settings.data_dir}/tables/7"
    with pytest.raises(NotADirectoryError):  # what a build of layout 1 does
        os.scandir(settings.data_dir / "collections")


def test_tables_of_an_earlier_build_are_moved_and_not_copied(settings: Settings, earlier: list[Collection]) -> None:
    before = inodes(settings.data_dir / "collections")
    assert all(rows(settings, each) for each in earlier)
    assert inodes(settings.data_dir / "tables") == before | {(settings.data_dir / "tables/_layout.lock").stat().st_ino}
    assert (settings.data_dir / "collections").is_file()
    assert stored_collection_ids(settings, "rows") == [1, 2, 3]
    insert(earlier[1], 3)
    flush_to_end(settings)
    assert len(rows(settings, earlier[1])) == 6


def killed_moves(settings: Settings) -> int:
    """The number of failpoints of a move; each is a place for a kill."""
    passed: list[str] = []
    with at_failpoints(passed.append):
        rows_uri(settings, 1)
    return len([name for name in passed if name.startswith("layout.")])


def test_a_move_that_was_killed_anywhere_is_completed(settings: Settings, earlier: list[Collection]) -> None:
    expected = [rows(settings, each) for each in earlier]
    as_earlier_build(settings)
    count = killed_moves(settings)
    assert count == 6, "renamed, recorded, three tables, emptied"
    for place in range(count):
        as_earlier_build(settings)
        left = iter(range(count))

        def kill(name: str, place: int = place, left: Any = left) -> None:
            if name.startswith("layout.") and next(left) == place:
                raise Killed

        with pytest.raises(Killed), at_failpoints(kill):
            rows_uri(settings, 1)
        assert [rows(settings, each) for each in earlier] == expected, f"killed at step {place}"
        assert not (settings.data_dir / "tables/_moving").exists()


def test_of_processes_that_start_together_one_moves_and_none_sees_a_part(
    settings: Settings, earlier: list[Collection]
) -> None:
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda _: [len(read_arrow(settings, each.id)) for each in earlier], range(16)))
    assert found == [[3, 3, 3]] * 16


def refuse(number: int) -> Callable[..., Any]:
    def refused(*_: Any) -> Any:
        raise OSError(number, os.strerror(number))

    return refused


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES, errno.EXDEV, errno.EBUSY])
def test_tables_that_cannot_be_moved_are_read_where_they_are(
    settings: Settings, earlier: list[Collection], monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    monkeypatch.setattr(Path, "rename", refuse(number))
    assert [len(rows(settings, each)) for each in earlier] == [3, 3, 3]
    assert rows_uri(settings, 1) == f"{settings.data_dir}/collections/1"
    assert stored_collection_ids(settings, "rows") == [1, 2, 3]
    assert stored_dataset(settings, "tables/1/_rows").count_rows() == 3
    with pytest.raises(StoreCannotPublish, match="restore a backup"):
        published_uri(settings, 1)


def test_a_folder_that_is_a_link_stays(settings: Settings, earlier: list[Collection], tmp_path: Path) -> None:
    (settings.data_dir / "collections").rename(tmp_path / "elsewhere")
    (settings.data_dir / "collections").symlink_to(tmp_path / "elsewhere")
    assert has_earlier_layout(settings)
    assert len(rows(settings, earlier[0])) == 3


def test_half_moved_tables_that_may_only_be_read_are_an_error_and_not_an_empty_table(
    settings: Settings, earlier: list[Collection], monkeypatch: pytest.MonkeyPatch
) -> None:
    def kill(name: str) -> None:
        if name == "layout.moved":
            raise Killed

    with pytest.raises(Killed), at_failpoints(kill):
        rows_uri(settings, 1)
    with monkeypatch.context() as patched:
        patched.setattr(Path, "rename", refuse(errno.EROFS))
        with pytest.raises(TableUnavailable, match="half moved"):
            rows(settings, earlier[2])
    assert len(rows(settings, earlier[2])) == 3


def test_an_earlier_build_that_ran_after_a_kill_loses_nothing(settings: Settings, earlier: list[Collection]) -> None:
    def kill(name: str) -> None:
        if name == "layout.renamed":
            raise Killed

    with pytest.raises(Killed), at_failpoints(kill):
        rows_uri(settings, 1)
    root = settings.data_dir
    shutil.copytree(root / "tables/_moving/3", root / "collections/9")
    assert rows_uri(settings, 9).endswith("tables/9/_rows")
    assert stored_collection_ids(settings, "rows") == [1, 2, 3, 9]
    assert (root / "collections").is_file()


def test_two_tables_of_one_collection_are_not_mixed(settings: Settings, earlier: list[Collection]) -> None:
    rows_uri(settings, 1)
    root = settings.data_dir
    (root / "collections").unlink()
    shutil.copytree(root / "tables/2/_rows", root / "collections/2")
    with pytest.raises(TableDamaged, match="two rows tables"):
        rows_uri(settings, 1)
    shutil.rmtree(root / "tables/_moving")
    assert len(rows(settings, earlier[1])) == 3


def test_what_else_was_there_is_put_aside(settings: Settings, earlier: list[Collection]) -> None:
    (settings.data_dir / "collections" / "notes").mkdir()
    rows_uri(settings, 1)
    assert (settings.data_dir / "tables/_unknown/notes").is_dir()
    assert stored_collection_ids(settings, "rows") == [1, 2, 3]


def test_the_record_of_a_later_layout_is_refused(settings: Settings) -> None:
    record_layout(settings)
    (settings.data_dir / "collections").write_text('{"layout": 3}')
    with pytest.raises(UnsupportedVersion, match="layout 3"):
        rows_uri(settings, 1)
    (settings.data_dir / "collections").write_text("?")
    with pytest.raises(TableDamaged, match="not the record"):
        rows_uri(settings, 1)


def test_each_file_has_its_name_of_the_earlier_layout() -> None:
    assert earlier_name("tables/3/_rows") == "collections/3"
    assert earlier_name("tables/3/_rows/_date=2026-01-01/part-1") == "collections/3/_date=2026-01-01/part-1"
    for same in ("wal/_delta_log/1.json", "tables/3/_rowsx/a", "tables/3/_delta_log/0.json", "deletes/3"):
        assert earlier_name(same) == same


def test_a_name_leads_to_the_collection_that_has_it(settings: Settings) -> None:
    folder = settings.data_dir / "tables/by-name"
    link_name(settings, "users", 3)
    (settings.data_dir / "tables/3").mkdir()
    assert (folder / "users").resolve() == settings.data_dir / "tables/3"
    link_name(settings, "users", 4)  # dropped and made again; the late end of the drop leaves the new one
    unlink_name(settings, "users", 3)
    assert os.readlink(folder / "users") == "../4"
    unlink_name(settings, "users", 4)
    unlink_name(settings, "users", 4)
    assert os.listdir(folder) == []
    assert stored_collection_ids(settings, "rows") == [3], "the folder of links is no table"


@pytest.mark.parametrize("name", ["..", ".", "../../x", "a/b", "/etc", "%2E", "%2E.", ".x", "\0", "é" * 127, "_moving"])
def test_no_name_leads_out_of_the_folder(settings: Settings, name: str) -> None:
    folder = settings.data_dir / "tables/by-name"
    link_name(settings, "other", 1)
    link_name(settings, name, 2)
    assert {path.parent for path in settings.data_dir.rglob("*") if path.is_symlink()} == {folder}
    assert sorted(os.readlink(path) for path in folder.iterdir()) == ["../1", "../2"]
    unlink_name(settings, name, 2)
    assert os.listdir(folder) == ["other"]


def test_two_names_never_share_a_link(settings: Settings) -> None:
    names = ["..", "%2E.", "%252E.", ".", "%2E", "a/b", "a%2Fb", "A", "a"]
    for number, name in enumerate(names):
        link_name(settings, name, number)
    assert len(os.listdir(settings.data_dir / "tables/by-name")) == len(names)


def test_the_links_of_an_earlier_build_are_made_once(settings: Settings) -> None:
    asked = []

    def named() -> list[tuple[str, int]]:
        asked.append(1)
        return [("users", 3), ("..", 4)]

    link_names(settings, named)
    link_names(settings, named)
    folder = settings.data_dir / "tables/by-name"
    assert {each.name: os.readlink(each) for each in folder.iterdir()} == {"users": "../3", "%2E.": "../4"}
    assert asked == [1], "a later start asks the catalog for nothing"
