"""The Delta log is cleaned up behind checkpoints, and neither a reader nor a writer that slept through it is misled."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import duckdb
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from deltalake import CommitProperties, DeltaTable, Transaction, write_deltalake
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.base.failpoint import VARIABLE
from millrace.storage.commit import AppTransaction, CommitPart, commit_fenced
from millrace.storage.delta_log import commit_file, last_checkpoint_version, log_files_of_version, trim_log
from millrace.storage.file_sink import FileSink
from millrace.storage.local import LocalStore
from millrace.storage.table import create_table, table_at

SCHEMA = pa.schema([("n", pa.int64())])
ROOT = Path(__file__).resolve().parents[2]


def add(path: Path, *numbers: int, app: tuple[str, int] = ("a", 0)) -> None:
    """One commit for each number."""
    for number in numbers:
        write_deltalake(
            str(path),
            pa.table({"n": [number]}),
            mode="append",
            commit_properties=CommitProperties(app_transactions=[Transaction(app[0], app[1] or number)]),
        )


def numbers(table: DeltaTable) -> list[int]:
    return sorted(table.to_pyarrow_table()["n"].to_pylist())


def versions(path: Path) -> list[int]:
    """Versions that the log has an entry of."""
    return sorted(int(name[:20]) for name in os.listdir(path / "_delta_log") if name.endswith(".json"))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A table of 12 commits (versions 0 to 11) with checkpoints at 4 and 8."""
    path = tmp_path / "table"
    for number in range(12):
        add(path, number)
        if number in (4, 8):
            DeltaTable(str(path)).create_checkpoint()
    return path


@pytest.mark.parametrize("keep, first", [(0, 8), (3, 8), (4, 4), (7, 4), (8, 0), (100, 0)])
def test_what_lies_before_a_checkpoint_that_enough_versions_follow_goes(path: Path, keep: int, first: int) -> None:
    removed = trim_log(LocalStore(path), keep=keep)
    assert versions(path) == list(range(first, 12))
    assert removed >= first
    assert last_checkpoint_version(LocalStore(path)) == 8
    assert numbers(DeltaTable(str(path))) == list(range(12))
    assert trim_log(LocalStore(path), keep=keep) == 0


def test_a_copy_of_a_version_reads_whatever_checkpoint_is_made_while_it_is_copied(tmp_path: Path) -> None:
    path = tmp_path / "table"
    write_deltalake(path, pa.table({"id": [0]}))
    for number in range(1, 4):
        write_deltalake(path, pa.table({"id": [number]}), mode="append")
    store, copy = LocalStore(path), LocalStore(tmp_path / "copy")
    DeltaTable(path).create_checkpoint()
    parts = log_files_of_version(store, 3)
    assert any(name.endswith(".parquet") for name in parts)
    write_deltalake(path, pa.table({"id": [4]}), mode="append")
    DeltaTable(path).create_checkpoint()  # by another node, between the look and the copy
    for part in parts:
        assert copy.take(store, part, "copy")
    assert DeltaTable(tmp_path / "copy").version() == 3


def test_a_table_without_a_checkpoint_is_left_alone(tmp_path: Path) -> None:
    add(tmp_path / "table", *range(5))
    assert trim_log(LocalStore(tmp_path / "table"), keep=0) == 0
    assert versions(tmp_path / "table") == [0, 1, 2, 3, 4]
    assert last_checkpoint_version(LocalStore(tmp_path / "table")) == 0


def test_an_apps_version_is_that_of_the_handles_version_however_often_it_is_asked_for(tmp_path: Path) -> None:
    add(tmp_path, 1)
    handle = table_at(tmp_path)
    for number in range(2, 5):
        before = number - 1
        assert [handle.app_version(app) for app in ("a", "a", "b")] == [before, before, 0]
        add(tmp_path, number)
        assert handle.app_version("a") == before
        handle.refresh()
        assert handle.app_version("a") == number
    commit_fenced(handle, [CommitPart(app_transactions={"b": AppTransaction(0, 7)})]).raise_if_fenced()
    assert [handle.app_version(app) for app in ("a", "b")] == [4, 7]
    handle.reopen()
    assert [handle.app_version(app) for app in ("a", "b")] == [4, 7]


@given(old=st.integers(0, 11), later=st.integers(0, 4), keep=st.integers(0, 12))
@settings(max_examples=15, deadline=None)
def test_a_handle_at_any_version_goes_on_with_the_newest_rows_and_app_versions(
    tmp_path_factory: pytest.TempPathFactory, old: int, later: int, keep: int
) -> None:
    path = tmp_path_factory.mktemp("log") / "table"
    add(path, 0)
    handle = table_at(path)
    for number in range(1, 12):
        add(path, number)
        if number == old:
            handle = table_at(path)
        if number in (4, 8):
            DeltaTable(str(path)).create_checkpoint()
    trim_log(LocalStore(path), keep=keep)
    add(path, *range(12, 12 + later))
    handle.refresh()
    assert handle.version == 11 + later
    assert numbers(handle.delta) == list(range(12 + later))
    assert handle.app_version("a") == 11 + later


def test_nothing_is_removed_while_somebody_commits(path: Path) -> None:
    store, oldest = LocalStore(path), table_at(path, version=0)
    with store.lease(), LocalStore(path).lease():
        assert trim_log(LocalStore(path), keep=0) == 0
    assert oldest.version_exists()
    assert trim_log(LocalStore(path), keep=0) > 0
    assert not oldest.version_exists()


def test_a_writer_that_slept_while_its_version_was_trimmed_writes_no_lost_commit(path: Path) -> None:
    asleep = table_at(path)
    add(path, *range(12, 20))
    DeltaTable(str(path)).create_checkpoint()
    trim_log(LocalStore(path), keep=0)
    assert LocalStore(path).size(commit_file(asleep.version + 1)) is None, (
        "its next version's name is free again: the trap"
    )
    sink = FileSink.at(path, SCHEMA, ("n",))
    sink.write(pa.table({"n": [20]}), {})
    outcome = commit_fenced(asleep, [CommitPart(sink.finish(), app_transactions={"a": AppTransaction(19, 20)})])
    assert (outcome.version, outcome.fenced) == (20, {})
    assert numbers(DeltaTable(str(path))) == list(range(21))


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("at", [1, 2, 5])
def test_a_clean_up_that_is_killed_leaves_a_log_without_gaps(path: Path, at: int) -> None:
    code = (
        "from millrace.storage.local import LocalStore; from millrace.storage.delta_log import trim_log; "
        f"trim_log(LocalStore({str(path)!r}), keep=0)"
    )
    environment = {**os.environ, VARIABLE: f"trim.removed@{at}", "PYTHONPATH": str(ROOT / "include")}
    ended = subprocess.run([sys.executable, "-c", code], env=environment, timeout=60, check=False)
    assert ended.returncode == -9
    left = versions(path)
    assert left == list(range(left[0], 12))
    assert left[0] > 0
    assert numbers(DeltaTable(str(path))) == list(range(12))
    trim_log(LocalStore(path), keep=0)
    assert versions(path) == [8, 9, 10, 11]


def test_a_filter_on_a_column_without_bounds_in_the_log_finds_its_rows(tmp_path: Path) -> None:
    schema = pa.schema([("n", pa.int64()), ("word", pa.string()), ("part", pa.string())])
    table = create_table(tmp_path / "table", schema, partition_by=["part"])
    sink = FileSink(table.store, schema.remove(2), ("n",))
    for part, word in (("a", "one"), ("b", "two")):
        sink.write(pa.table({"n": [1], "word": [word]}, schema.remove(2)), {"part": part})
    commit_fenced(table, [CommitPart(sink.finish())])
    rows = table.dataset()
    assert rows.to_table(filter=pc.field("word") == "two")["part"].to_pylist() == ["b"]
    assert duckdb.sql("select word from rows where part = 'a' and word = 'one'").fetchall() == [("one",)]


@pytest.mark.parametrize("character", ["\U0001f600", "\U00020bb7", "\U000e0041", "\U0010ffff"], ids=ascii)
def test_bounds_beyond_the_basic_plane_are_left_out_for_delta_rs_may_have_read_others(
    tmp_path: Path, character: str
) -> None:
    """As the Delta log of an earlier build has them, and as Java's writers may: as escaped pairs of surrogates."""
    rows = pa.table({"name": [character, character + "a"]})
    write_deltalake(tmp_path, rows)
    [commit] = (tmp_path / "_delta_log").glob("*.json")
    text = commit.read_text(encoding="utf-8")
    escaped = json.dumps(character)[1:-1].replace("\\", "\\\\")
    assert character in text
    commit.write_text(text.replace(character, escaped), encoding="utf-8")
    found = table_at(str(tmp_path)).actions()
    assert found.select(["min.name", "max.name", "num_records"]).to_pylist() == [
        {"min.name": None, "max.name": None, "num_records": 2}
    ]


def test_app_versions_are_read_from_the_commits_since_and_not_asked_for_one_by_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = create_table(tmp_path / "t", SCHEMA, partition_by=())
    commit_fenced(table, [CommitPart(app_transactions={"app0": AppTransaction(0, 1)})]).raise_if_fenced()
    apps = [f"app{number}" for number in range(1, 64)]
    for app in apps:
        table.app_version(app)
    asked: list[str] = []
    real = DeltaTable.transaction_version

    def counted(delta: DeltaTable, app: str) -> int | None:
        asked.append(app)
        return real(delta, app)

    monkeypatch.setattr(DeltaTable, "transaction_version", counted)
    for version in range(1, 4):
        moved = {app: AppTransaction(version - 1, version) for app in apps}
        commit_fenced(table, [CommitPart(app_transactions=moved)]).raise_if_fenced()
        assert {table.app_version(app) for app in apps} == {version}
    assert asked == []
    behind = table_at(tmp_path / "t", version=2)
    assert behind.app_version("app1") == 1
    asked.clear()
    behind.delta.update_incremental()
    assert behind.app_version("app1") == 3
    assert asked == []
