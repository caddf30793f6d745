"""The compaction DAG on a real deployment: nothing to do, enough to do, a dry run that a person starts."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from deltalake import DeltaTable

from millrace.base.settings import Settings
from millrace.operations.compaction.declaration import CompactionParams
from millrace.tables.collections.data_tables import rows_uri
from tests.dags.conftest import RunDag, load_dag
from tests.operations.test_compaction_beside_writers import Filled, filled, rows

__all__ = ["filled"]

QUICK = {"vacuum": False, "segments": False}


@pytest.mark.slow
def test_a_person_looks_first_and_then_has_the_small_files_merged(
    run_dag: RunDag, filled: Filled, settings: Settings
) -> None:
    filled.copy(settings.data_dir.parent)
    before = rows(settings)
    said = run_dag("compaction", {**QUICK, "min_files": 2, "dry_run": True})
    assert said.tasks == {"needed": "success", "compact": "success"}
    assert said.results["compact"]["collections"][0]["rows"]["small_files"] == 3, "each flush joined its own"
    assert files(settings) == 3
    done = run_dag("compaction", {**QUICK, "min_files": 2})
    assert done.results["compact"]["collections"][0]["rows"]["files_removed"] == 3
    assert files(settings) == 1
    assert rows(settings) == before


@pytest.mark.parametrize(
    ("run_type", "min_files", "goes_on"),
    [("scheduled", 2, True), ("scheduled", 8, False), ("asset_triggered", 8, False), ("manual", 8, True)],
)
def test_only_a_person_starts_a_run_that_gains_too_little(
    run_type: str,
    min_files: int,
    goes_on: bool,
    filled: Filled,
    settings: Settings,
    airflow: object,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    copied = filled.copy(settings.data_dir.parent)
    for name, value in copied.environment().items():
        monkeypatch.setenv(name, value)
    # A history that reaches behind everything, so that nothing is folded in; and segments that stay as they are.
    params = CompactionParams.parse({**QUICK, "min_files": min_files, "keep_history_hours": 876_000})
    needed: Any = load_dag("compaction").get_task("needed").python_callable
    assert needed(params=params.model_dump(mode="json"), dag_run=SimpleNamespace(run_type=run_type)) is goes_on


def files(settings: Settings) -> int:
    return len(DeltaTable(str(Path(rows_uri(settings, 1)))).file_uris())
