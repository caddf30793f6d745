"""A power loss leaves the end of a Delta log torn.

The table opens, with all that was said to stand, and takes commits.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest

from millrace.base.errors import TableDamaged
from millrace.storage.commit import AppTransaction, CommitPart, commit_fenced
from millrace.storage.delta_log import LAST_CHECKPOINT_FILE, checkpoint_file, commit_file
from millrace.storage.local import LocalStore
from millrace.storage.table import LogMaintenance, TableHandle, create_table, open_table, table_at

_NO_CHECKPOINTS = LogMaintenance(checkpoint_commits=1000)


def _commit(table: TableHandle, maintenance: LogMaintenance = _NO_CHECKPOINTS) -> None:
    stands = table.app_version("a")
    commit_fenced(
        table, [CommitPart(app_transactions={"a": AppTransaction(stands, stands + 1)})], maintenance=maintenance
    ).raise_if_fenced()


def _made(path: Path) -> TableHandle:
    return create_table(path, pa.schema([("n", pa.int64())]), partition_by=[])


def _cut(path: Path, name: str, bytes: int, zeros: int = 0) -> None:
    file = path / name
    file.write_bytes(file.read_bytes()[:bytes] + b"\0" * zeros)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A table of 12 commits behind its making, with checkpoints at 5 and 10, and its log trimmed behind the first."""
    table = _made(tmp_path / "table")
    for _ in range(12):
        _commit(table, LogMaintenance(checkpoint_commits=5, keep_commits=4))
    assert not (tmp_path / "table" / commit_file(4)).exists()
    return tmp_path / "table"


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("zeros", [0, 512])
def test_wherever_the_newest_commit_is_cut_the_table_has_all_before_it_and_takes_the_next(
    tmp_path: Path, zeros: int
) -> None:
    whole = tmp_path / "whole"
    table = _made(whole)
    _commit(table)
    _commit(table)
    length = (whole / commit_file(2)).stat().st_size
    for cut in range(length):
        path = tmp_path / "torn"
        shutil.copytree(whole, path)
        _cut(path, commit_file(2), cut, zeros)
        table = table_at(path)
        assert table.app_version("a") == 1, cut
        _commit(table)
        assert table_at(path).app_version("a") == 2, cut
        shutil.rmtree(path)


def test_a_table_whose_making_was_torn_is_none(tmp_path: Path) -> None:
    _made(tmp_path / "table")
    _cut(tmp_path / "table", commit_file(0), 100)
    assert open_table(tmp_path / "table") is None
    _commit(_made(tmp_path / "table"))


@pytest.mark.parametrize("left", [0, 3, 300])
def test_a_torn_checkpoint_goes_where_the_commits_say_the_same(path: Path, left: int) -> None:
    _cut(path, checkpoint_file(10), left)
    table = table_at(path)
    assert (table.version, table.app_version("a")) == (12, 12)
    _commit(table)
    assert table_at(path).app_version("a") == 13


def test_a_torn_checkpoint_that_nothing_else_says_stays_as_it_is_and_is_damage(path: Path) -> None:
    (path / commit_file(8)).unlink()
    _cut(path, checkpoint_file(10), 300)
    with pytest.raises(TableDamaged):
        table_at(path)
    assert (path / checkpoint_file(10)).exists()


def _flip(text: bytes) -> bytes:
    return text.replace(b'"txn":', b'"txn";')


def _without_its_end(text: bytes) -> bytes:
    return text[:-40]


@pytest.mark.parametrize("version, damage", [(12, _flip), (11, _without_its_end)], ids=["newest", "one before"])
def test_a_commit_that_is_damaged_elsewhere_than_at_the_logs_end_stays_and_is_said(
    path: Path, version: int, damage: Callable[[bytes], bytes]
) -> None:
    file = path / commit_file(version)
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(TableDamaged):
        table_at(path)
    assert file.exists()


def test_nothing_is_put_aside_while_somebody_commits(path: Path) -> None:
    _cut(path, commit_file(12), 50)
    with LocalStore(path).lease(), pytest.raises(TableDamaged):
        table_at(path)
    assert table_at(path).version == 11


@pytest.mark.parametrize("hint", [b"", b'{"version":1'], ids=["empty", "torn"])
def test_a_torn_hint_at_the_newest_checkpoint_keeps_nobody_from_committing(path: Path, hint: bytes) -> None:
    (path / LAST_CHECKPOINT_FILE).write_bytes(hint)
    _commit(table_at(path))
    assert table_at(path).app_version("a") == 13


def test_a_checkpoint_and_a_new_log_are_durable_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []
    real = LocalStore.sync
    monkeypatch.setattr(
        LocalStore, "sync", lambda self, names: (synced.extend(names := list(names)), real(self, names))
    )
    table = _made(tmp_path / "table")
    assert synced == [commit_file(0), "_delta_log"]
    _commit(table, LogMaintenance(checkpoint_commits=1))
    assert synced[2:] == [commit_file(1), checkpoint_file(1), LAST_CHECKPOINT_FILE]
