"""Whoever asks for an operation through a form names no file that the deployment's settings do not give to them."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import parquet as pq

from millrace.base.errors import InvalidArgument, InvalidSettings
from millrace.base.settings import Settings
from millrace.catalog.collection import CollectionInfo
from millrace.client.produce.files.formats import InputFormat
from millrace.client.produce.files.reader import read_batches
from millrace.message.schema import CollectionSchema, FieldSpec
from millrace.operations.backfill import file_staging
from millrace.operations.backfill.declaration import LoadParams
from millrace.operations.backup.declaration import BackupParams
from millrace.operations.backup.run import backup_folder
from millrace.runtime.progress import Progress

SCHEMA = CollectionSchema((FieldSpec("id", "int64", False), FieldSpec("place", "string", True)), "id")
THINGS = CollectionInfo(1, "things", "active", ("dml_0_1v0",), (SCHEMA,), {"_default": 1}, 2)
SECRET = "hunter2"


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MILLRACE_RUN_FOLDER", "/run")


@pytest.fixture
def inbox(settings: Settings) -> Path:
    folder = settings.data_dir / "inbox"
    (folder / "2013").mkdir(parents=True)
    (folder / "2013" / "a.csv").write_text("id\n1\n")
    return folder


def staged(settings: Settings, *files: object) -> int:
    params = LoadParams.parse({"collection": "things", "files": [str(each) for each in files], "dry_run": True})
    return file_staging.stage_files(settings, params, THINGS, Progress()).rows


@pytest.mark.usefixtures("launched")
def test_a_load_reads_the_inbox_or_the_folders_of_the_setting_and_nothing_else(
    settings: Settings, inbox: Path, tmp_path: Path
) -> None:
    outside, inner = tmp_path / "outside", inbox / "2013" / "a.csv"
    outside.mkdir()
    (outside / "b.csv").write_text("id\n1\n2\n")
    (inbox / "link.csv").symlink_to(outside / "b.csv")
    (inbox / "folder").symlink_to(outside)
    (inbox / "fine.csv").symlink_to(inner)
    assert [staged(settings, name) for name in (inner, inbox / "*" / "a.csv", inbox / "fine.csv")] == [1, 1, 1]
    refused = [
        outside / "b.csv",
        outside / "not there.csv",
        outside / "*.csv",
        f"{inbox}/../../outside/b.csv",
        inbox / "link.csv",
        inbox / "folder" / "b.csv",
        inbox / "folder" / "*",
        f"{inbox}/*/b.csv",
        f"{inbox}x/a.csv",
        "/etc/passwd",
        f"{inbox}/a\0b",
    ]
    for name in refused:
        with pytest.raises(InvalidArgument, match="lies outside the allowed folders") as told:
            staged(settings, name)
        assert str(told.value).startswith(str(name)), "it says nothing that the caller did not"
    given = replace(settings, load_roots=f"{outside}:{tmp_path / 'more'}")
    assert staged(given, outside / "b.csv") == 2
    with pytest.raises(InvalidArgument, match="lies outside the allowed folders"):
        staged(given, inner)


def test_who_runs_a_job_in_a_shell_may_name_any_file(settings: Settings, tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("id\n1\n")
    assert staged(settings, tmp_path / "a.csv") == 1


@pytest.mark.usefixtures("launched")
@pytest.mark.parametrize("what", ["file", "folder"])
def test_a_link_that_takes_a_files_place_behind_the_look_is_not_followed(
    what: str, settings: Settings, inbox: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outside, place = tmp_path / "outside", inbox / "2013" if what == "folder" else inbox / "2013" / "a.csv"
    outside.mkdir()
    (outside / "a.csv").write_text("id\n7\n8\n")
    opened: Callable[[Path, str], object] = file_staging.open_beneath

    def swapped(root: Path, name: str) -> object:
        place.rename(tmp_path / "gone")
        place.symlink_to(outside if what == "folder" else outside / "a.csv")
        return opened(root, name)

    monkeypatch.setattr(file_staging, "open_beneath", swapped)
    with pytest.raises(InvalidArgument, match="is not a file in an allowed folder"):
        staged(settings, inbox / "2013" / "a.csv")


@pytest.mark.usefixtures("launched")
def test_a_backup_goes_where_the_settings_say(settings: Settings, tmp_path: Path) -> None:
    root, more, link = tmp_path / "backups", tmp_path / "more", tmp_path / "backups" / "link"
    root.mkdir()
    link.symlink_to(tmp_path)
    with pytest.raises(InvalidArgument, match="none yet"):
        backup_folder(settings, BackupParams(to=str(root)))
    given = replace(settings, backup_dir=str(root), backup_roots=str(more))
    for to in ("", root, root / "daily", more / "x"):
        assert backup_folder(given, BackupParams(to=str(to))) == Path(to or root)
    for to in (tmp_path, tmp_path / "elsewhere", f"{root}/../elsewhere", link / "elsewhere", f"{root}2"):
        with pytest.raises(InvalidArgument, match="backup_roots"):
            backup_folder(given, BackupParams(to=str(to)))


def test_folders_in_a_setting_are_absolute() -> None:
    for value in ("inbox", "/a:b", "/a::/b", ":/a"):
        with pytest.raises(InvalidSettings, match="absolute paths"):
            Settings.load(env={"MILLRACE_LOAD_ROOTS": value})


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.csv", f"{SECRET}:x:0:0\n"),
        ("a.csv", f"id,{SECRET}\n1,2\n"),
        ("a.csv", f"id\n{SECRET}\n"),
        ("a.csv", f"id,place\n1,{SECRET}\n"),
        ("a.jsonl", f"{SECRET}\n"),
        ("a.jsonl", f'{{"id": 1, "{SECRET}": 2}}\n'),
        ("a.jsonl", f'{{"id": "{SECRET}"}}\n'),
        ("a.parquet", SECRET * 100),
    ],
)
def test_no_error_of_a_load_has_anything_of_the_file(name: str, text: str, settings: Settings, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    params = {"collection": "things", "files": [str(tmp_path / name)], "partition_by": "place", "dry_run": True}
    with pytest.raises(InvalidArgument) as told:
        file_staging.stage_files(settings, LoadParams.parse(params), THINGS, Progress())
    assert SECRET not in str(told.value)
    assert re.search(rf"{name}: (line \d+|the )", str(told.value)), "but where it is"


def test_nor_have_those_of_parquets_values(tmp_path: Path) -> None:
    for columns in ({"id": [SECRET]}, {"id": [1], SECRET: [2]}):
        pq.write_table(pa.table(columns), tmp_path / "a.parquet")
        with (tmp_path / "a.parquet").open("rb") as file:
            try:
                (batch,) = read_batches(file, InputFormat.PARQUET, SCHEMA, batch_rows=10, quote=False)
                words = batch.bad[0].why
            except InvalidArgument as error:
                words = str(error)
        assert words
        assert SECRET not in words
