"""The move DAG on a real deployment: looked at first, moved to another disk, and what was left removed."""

from __future__ import annotations

from pathlib import Path

import pytest

from millrace.base.settings.place import read_place
from millrace.client.database import Database
from tests.dags.conftest import RunDag


@pytest.mark.slow
def test_a_person_looks_first_and_then_moves_the_tables(
    run_dag: RunDag, client: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "tables"
    refused = run_dag("move", {"to": str(target), "dry_run": True})
    assert refused.state == "failed", "the place is not in move_roots"
    monkeypatch.setenv("MILLRACE_MOVE_ROOTS", str(tmp_path))
    said = run_dag("move", {"to": str(target), "dry_run": True})
    assert said.results["move"]["tables"] > 0
    assert not target.exists()
    done = run_dag("move", {"to": str(target)})
    assert done.tasks == {"move": "success"}
    place = read_place(client.settings.data_dir)
    assert place is not None
    assert (place.uri, place.target) == (str(target), None)
    assert client.settings.wal_uri == f"{target}/wal"
    assert sorted(client.collection("c").read()["id"].to_pylist()) == list(range(9))
    assert run_dag("move", {"remove_old": True}).results["move"]["removed_files"] > 0
    assert sorted(client.collection("c").read()["id"].to_pylist()) == list(range(9))
