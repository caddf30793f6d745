"""The recovery DAG on a real deployment: sound, damaged, and damaged in a way that a person decides about."""

from __future__ import annotations

from pathlib import Path

import pytest
from deltalake import DeltaTable

from millrace.client.database import Database
from millrace.tables.collections.data_tables import rows_uri
from millrace.tables.read.arrow import read_arrow
from tests.dags.conftest import RunDag


def test_a_sound_system_is_looked_at_and_left_alone(run_dag: RunDag, client: Database) -> None:
    ran = run_dag("recovery")
    assert ran.state == "success"
    assert ran.results["diagnose"]["healthy"]
    assert (ran.tasks["rehearse"], ran.tasks["repair"]) == ("skipped", "skipped")


@pytest.mark.slow
def test_a_lost_file_is_rehearsed_repaired_and_proved_without_anybody(run_dag: RunDag, client: Database) -> None:
    settings = client.settings
    next(Path(rows_uri(settings, 1)).rglob("part-*.parquet")).unlink()
    looked = run_dag("recovery", {"mode": "diagnose"})
    assert [each["kind"] for each in looked.results["diagnose"]["findings"]] == ["table_file_damaged"]
    assert looked.tasks["repair"] == "skipped"
    ran = run_dag("recovery")
    assert (ran.state, ran.tasks["approve"], ran.tasks["repair"]) == ("success", "skipped", "success")
    assert ran.results["repair"]["healthy"]
    assert sorted(read_arrow(settings, 1)["id"].to_pylist()) == list(range(9))


@pytest.mark.slow
def test_only_a_person_lets_rows_go(run_dag: RunDag, client: Database) -> None:
    settings = client.settings
    DeltaTable(str(Path(rows_uri(settings, 1)))).update(updates={"id": "id + 100"}, predicate="id = 3")
    ran = run_dag("recovery", {"allow_destructive": True})
    assert (ran.state, ran.results["repair"]["healthy"]) == ("success", True)
    assert sorted(read_arrow(settings, 1)["id"].to_pylist()) == list(range(9))
