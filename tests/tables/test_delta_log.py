"""The Delta log is cleaned up behind checkpoints, and neither a reader nor a writer that slept through it is misled."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import CommitProperties, DeltaTable, Transaction, write_deltalake
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.failpoint import VARIABLE
from millrace.tables.delta_files import AppMove, FileSink, commit, open_table
from millrace.tables.delta_log import commit_lease, last_checkpoint, moved, stands, trim

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
    removed = trim(path, keep=keep)
    assert versions(path) == list(range(first, 12))
    assert removed >= first
    assert last_checkpoint(path) == 8
    assert numbers(DeltaTable(str(path))) == list(range(12))
    assert trim(path, keep=keep) == 0


def test_a_table_without_a_checkpoint_is_left_alone(tmp_path: Path) -> None:
    add(tmp_path / "table", *range(5))
    assert trim(tmp_path / "table", keep=0) == 0
    assert versions(tmp_path / "table") == [0, 1, 2, 3, 4]
    assert last_checkpoint(tmp_path / "table") == 0


@given(old=st.integers(0, 11), later=st.integers(0, 4), keep=st.integers(0, 12))
@settings(max_examples=15, deadline=None)
def test_a_handle_at_any_version_goes_on_with_the_newest_rows_and_app_versions(
    tmp_path_factory: pytest.TempPathFactory, old: int, later: int, keep: int
) -> None:
    path = tmp_path_factory.mktemp("log") / "table"
    add(path, 0)
    handle = DeltaTable(str(path))
    for number in range(1, 12):
        add(path, number)
        if number == old:
            handle = DeltaTable(str(path))
        if number in (4, 8):
            DeltaTable(str(path)).create_checkpoint()
    trim(path, keep=keep)
    add(path, *range(12, 12 + later))
    assert moved(path, handle.version()) == (handle.version() < 11 + later)
    handle.update_incremental()
    assert handle.version() == 11 + later
    assert numbers(handle) == list(range(12 + later))
    assert handle.transaction_version("a") == 11 + later


def test_nothing_is_removed_while_somebody_commits(path: Path) -> None:
    with commit_lease(path), commit_lease(path):
        assert trim(path, keep=0) == 0
    assert stands(path, 0)
    assert trim(path, keep=0) > 0
    assert not stands(path, 0)


def test_a_writer_that_slept_while_its_version_was_trimmed_writes_no_lost_commit(path: Path) -> None:
    asleep = open_table(path)
    assert asleep is not None
    add(path, *range(12, 20))
    DeltaTable(str(path)).create_checkpoint()
    trim(path, keep=0)
    assert not stands(path, asleep.version() + 1), "its next version's name is free again: the trap"
    sink = FileSink(path, SCHEMA, ("n",))
    sink.write(pa.table({"n": [20]}), {})
    version = commit(asleep, sink.finish(), moves={"a": AppMove(19, 20)})
    assert version == 20
    assert numbers(DeltaTable(str(path))) == list(range(21))


@pytest.mark.parametrize("at", [1, 2, 5])
def test_a_clean_up_that_is_killed_leaves_a_log_without_gaps(path: Path, at: int) -> None:
    code = f"from pathlib import Path; from millrace.tables.delta_log import trim; trim(Path({str(path)!r}), keep=0)"
    environment = {**os.environ, VARIABLE: f"trim.removed@{at}", "PYTHONPATH": str(ROOT / "include")}
    ended = subprocess.run([sys.executable, "-c", code], env=environment, timeout=60, check=False)
    assert ended.returncode == -9
    left = versions(path)
    assert left == list(range(left[0], 12))
    assert left[0] > 0
    assert numbers(DeltaTable(str(path))) == list(range(12))
    trim(path, keep=0)
    assert versions(path) == [8, 9, 10, 11]
