"""A commit that stands although its answer was lost, and was overtaken before anybody looked.

The files that it names stay.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
from deltalake import DeltaTable
from deltalake.exceptions import CommitFailedError
from deltalake.transaction import AddAction, RemoveAction

from millrace.base.settings import Settings
from millrace.node.flush.definition import flush_to_end
from millrace.operations.checkpoint.declaration import CheckpointParams
from millrace.operations.checkpoint.recovery_checkpoints import recovery_checkpoints_uri
from millrace.operations.checkpoint.run import checkpoint
from millrace.operations.compaction.declaration import CompactionParams
from millrace.operations.compaction.run import compact
from millrace.operations.quality.checks import Check, CheckResult, TableCheckResult
from millrace.operations.quality.results import record_run
from millrace.runtime.progress import Progress
from millrace.tables.collections.bases import bases_uri
from millrace.tables.collections.data_tables import deletes_uri, rows_uri
from millrace.tables.quality_state import quality_results_uri
from tests.operations.conftest import short as short
from tests.operations.conftest import things as things
from tests.operations.log_maker import Things


@contextmanager
def overtaken(path: Path, behind: Callable[[], object] | None = None) -> Iterator[list[int]]:
    """The next commit that adds files to the table at `path` stands, is raised as failed,
    and what it added was replaced.

    By `behind`, another writer; by default what it added is taken out, as compaction does.
    """
    real = DeltaTable.create_write_transaction
    versions: list[int] = []

    def unlucky(table: DeltaTable, actions: list[Any], *args: Any, **options: Any) -> None:
        real(table, actions, *args, **options)
        adds = [action for action in actions if isinstance(action, AddAction)]
        if versions or not adds or Path(table.table_uri.removeprefix("file://")) != path:
            return
        newest = DeltaTable(str(path))
        versions.append(newest.version())
        if behind is not None:
            behind()
            raise CommitFailedError("the answer got lost")
        gone = [RemoveAction(add.path, True, 0, partition_values=add.partition_values) for add in adds]
        real(newest, gone, "append", newest.schema(), partition_by=newest.metadata().partition_columns)
        raise CommitFailedError("the answer got lost")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DeltaTable, "create_write_transaction", unlucky)
        yield versions


def lost_files(path: Path, version: int) -> list[str]:
    """The files that the commit of `version` added and that are no longer on the disk."""
    lines = (path / "_delta_log" / f"{version:020d}.json").read_text().splitlines()
    added = [unquote(action["add"]["path"]) for line in lines if "add" in (action := json.loads(line))]
    assert added
    return [name for name in added if not (path / name).exists()]


def rewritten(things: Things) -> None:
    params = CompactionParams(min_files=2, fold="never", keep_history_hours=0, vacuum=False)
    compact(things.settings, params)


def recorded(things: Things) -> None:
    check = Check("ticks-increase", "expect_column_values_to_be_between", {"column": "tick_step"}, "ticks increase")
    record_run(things.settings, "run", [TableCheckResult("wal", {}, (CheckResult(check, success=True, unexpected=0),))])


def checkpointed(things: Things) -> None:
    checkpoint(things.settings, things.log, CheckpointParams.parse({}), Progress())


def flushed(things: Things) -> None:
    flush_to_end(things.settings)


WORK: dict[str, tuple[Callable[[Settings], Path], Callable[[Things], None]]] = {
    "flush: rows": (lambda settings: Path(rows_uri(settings, 1)), flushed),
    "flush: deletes": (lambda settings: Path(deletes_uri(settings, 1)), flushed),
    "compaction": (lambda settings: Path(rows_uri(settings, 1)), rewritten),
    "checkpoint": (lambda settings: Path(recovery_checkpoints_uri(settings)), checkpointed),
    "quality": (lambda settings: Path(quality_results_uri(settings)), recorded),
}


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("work", WORK)
def test_the_files_of_a_commit_that_may_stand_stay(work: str, things: Things) -> None:
    path_of, run = WORK[work]
    for _ in range(2):  # a flush has one file
        things.fill(2)
    if run is flushed:
        things.fill_wal()
    with overtaken(path_of(things.settings), (lambda: recorded(things)) if run is recorded else None) as versions:
        run(things)
    assert len(versions) == 1, "the commit was not reached"
    assert lost_files(path_of(things.settings), versions[0]) == []


def test_the_file_of_a_base_that_may_stand_stays(things: Things, short: Settings) -> None:
    things.fill(2)
    with overtaken(Path(bases_uri(Path(short.wal_uri)))) as versions:
        checkpoint(short, things.log, CheckpointParams.parse({}), Progress())
    assert lost_files(Path(bases_uri(Path(short.wal_uri))), versions[0]) == []
