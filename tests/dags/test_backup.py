"""The backup DAG on a real deployment: looked at first, made, restored elsewhere; scheduled where it has a folder."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from millrace.client.database import Database, connect
from millrace.operations.backup.manifest import list_backups
from millrace.operations.backup.restore import restore_backup
from tests.dags.conftest import RunDag, load_dag


@pytest.mark.slow
def test_a_person_looks_first_and_then_makes_a_backup_that_can_be_restored(
    run_dag: RunDag, client: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MILLRACE_BACKUP_ROOTS", str(tmp_path))
    root = tmp_path / "backups"
    said = run_dag("backup", {"to": str(root), "dry_run": True})
    assert said.state == "success"
    assert said.results["backup"]["tables"] > 0
    assert not root.exists()
    done = run_dag("backup", {"to": str(root), "verify": True})
    assert done.tasks == {"backup": "success"}
    assert [manifest.id for _, manifest in list_backups(root)] == [done.results["backup"]["id"]]
    settings = replace(client.settings, data_dir=tmp_path / "restored")
    restore_backup(settings, root)
    with connect(settings=settings) as restored:
        assert sorted(restored.collection("c").read()["id"].to_pylist()) == list(range(9))
        restored.connection.service.shutdown()


def test_it_has_a_schedule_where_it_has_a_folder(
    airflow: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not load_dag("backup").timetable.can_be_scheduled
    monkeypatch.setenv("MILLRACE_BACKUP_DIR", str(tmp_path))
    assert load_dag("backup").timetable.can_be_scheduled
