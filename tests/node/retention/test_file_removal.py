"""What blocks the removal of replaced files in a deployment, and what it makes of tables of earlier builds."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest

from bench.growth.history import ReplacedFile, age_table
from millrace.base.settings import Settings
from millrace.node.retention.file_removal import REMOVE_COMMITS, DeploymentFileRemover
from millrace.node.retention.removal_lock import removals_blocked
from millrace.storage.pins import TablePins
from millrace.storage.table import DEFAULT_TOMBSTONES, TOMBSTONES, TableHandle, create_table, table_at

COLUMNS = pa.schema([pa.field("id", pa.int64())])


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(data_dir=tmp_path / "data", cache_dir=tmp_path / "cache")


def old_table(settings: Settings, *, commits: int = 40) -> TableHandle:
    """A table whose commits, one a minute, each replaced a file; all replaced files are on disk."""
    table = create_table(settings.wal_uri, COLUMNS, partition_by=[], configuration={TOMBSTONES: "interval 2 days"})
    return age_table(table, [ReplacedFile("", 100)], commits=commits, seconds=60.0 * commits, on_disk=commits)


def on_disk(settings: Settings) -> int:
    return len(list(Path(settings.wal_uri).glob("*.parquet")))


def test_what_was_replaced_within_the_retention_stays(settings: Settings) -> None:
    table = old_table(settings)
    assert DeploymentFileRemover(settings).remove(table) == 29
    assert on_disk(settings) == 11, "of the last ten minutes"


def test_pins_backups_and_failed_expectations_hold_it_up(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    table = old_table(settings)
    with removals_blocked(settings, deadline=1.0):
        assert DeploymentFileRemover(settings).remove(table) == 0
    monkeypatch.setattr("millrace.node.retention.file_removal.failed_critical_expectations", lambda settings: ["one"])
    assert DeploymentFileRemover(settings).remove(table) == 0
    monkeypatch.undo()
    pins = TablePins(settings.pins_uri)
    with pins.pinned(since_ms=0):
        assert DeploymentFileRemover(settings).remove(table) == 0
    with pins.pinned():
        assert DeploymentFileRemover(settings).remove(table) == 29


def test_a_removal_comes_with_each_sixteenth_commit(settings: Settings) -> None:
    remover = DeploymentFileRemover(settings)
    assert remover.after_commit(old_table(settings)) == 29
    removed = []
    for _ in range(REMOVE_COMMITS):
        table = age_table(table_at(settings.wal_uri), [ReplacedFile("", 100)], commits=1, seconds=3600.0, on_disk=1)
        removed.append(remover.after_commit(table))
    # Each call makes two commits and lets all earlier ones be an hour old.
    assert [count for count in removed if count] == [18, 8]


def test_checkpoints_of_a_table_of_an_earlier_build_forget_removed_files_too(settings: Settings) -> None:
    table = old_table(settings)
    DeploymentFileRemover(settings).after_commit(table)
    assert table_at(settings.wal_uri).configuration[TOMBSTONES] == DEFAULT_TOMBSTONES
    version = table.version
    DeploymentFileRemover(settings).after_commit(table)
    assert table.version == version
