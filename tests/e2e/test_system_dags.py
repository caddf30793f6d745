"""Every DAG on the real system.

A run through Airflow's REST API ends in success, and what it did stands in the tables.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable

from millrace.client.database import connect
from millrace.message.ids import pchannel_of
from millrace.node.flush.definition import flush_to_end
from millrace.node.ingest.definition import ingest_to_end
from millrace.operations.quality.gate import blocked
from tests.e2e.flown import START, days, derived, fly, hourly, read, same_rows, visible
from tests.e2e.system import Airflow, System, until

pytestmark = [pytest.mark.slow, pytest.mark.system, pytest.mark.spark, pytest.mark.timeout(1800)]

MOMENTS = {"start": START.isoformat(), "end": START.replace(day=START.day + 3).isoformat()}


@pytest.fixture(scope="module")
def flown(system: System) -> pa.Table:
    """Three days of flights that went through the system; those that are visible."""
    rows = days(3)
    assert fly(system.settings, rows) == visible(rows).num_rows
    return visible(rows)


@pytest.fixture(autouse=True)
def every_row_once(system: System, flown: pa.Table) -> Iterator[None]:
    """Whatever a test does: log, WAL and tables hold the same behind it, and the flights are all there."""
    yield
    system.verified()
    assert same_rows(read(system.settings), flown)


def collection_of(system: System, *, kind: str = "rows") -> Path:
    """The table of the flights' rows, or of their deletes."""
    found = {each["name"]: each["id"] for each in json.loads(system.millrace("collections", "list", "--json"))}
    number = found["flights"]
    return system.settings.data_dir / (f"tables/{number}/_rows" if kind == "rows" else f"deletes/{number}")


def test_the_streaming_dag_runs_and_all_others_are_known(system: System, airflow: Airflow) -> None:
    assert not airflow.api.import_errors()
    (running,) = [each for each in airflow.runs("streaming") if each["state"] == "running"]
    assert [each["state"] for each in airflow.tasks("streaming", running["dag_run_id"])] == ["running"]
    for dag_id in ("checkpoint", "recovery", "compaction", "quality", "quality_release", "backfill", "backfill_range"):
        assert airflow.api.has_dag(dag_id)
    for dag_id in ("load_files", "restore", "backup"):
        assert airflow.api.has_dag(dag_id)


def test_a_checkpoint_is_verified_and_the_log_gives_up_what_stands_before_it(
    system: System, airflow: Airflow, flown: pa.Table
) -> None:
    dry = airflow.run("checkpoint", {"dry_run": True}).succeeded()
    report = airflow.result(dry, "checkpoint")
    assert report["dry_run"]
    assert not any(each["written"] for each in report["channels"])
    before = _log_bytes(system)
    ran = airflow.run("checkpoint").succeeded()
    report = airflow.result(ran, "checkpoint")
    assert report["ok"]
    assert {each["problem"] for each in report["channels"]} == {""}
    confirmed = DeltaTable(str(system.settings.data_dir / "recovery_checkpoints")).to_pyarrow_table()
    assert {each["pchannel"] for each in report["channels"]} <= set(confirmed["pchannel"].to_pylist())
    assert _log_bytes(system) <= before
    assert _events(airflow, "checkpoint_written")


def test_compaction_merges_files_and_folds_deletes_in(system: System, airflow: Airflow, flown: pa.Table) -> None:
    conf = {"collections": ["flights"], "keep_history_hours": 0, "fold": "always", "min_files": 2, "target_mib": 64}
    dry = airflow.result(airflow.run("compaction", {**conf, "dry_run": True}).succeeded(), "compact")
    assert dry["dry_run"]
    assert DeltaTable(str(collection_of(system))).to_pyarrow_table().num_rows > flown.num_rows
    report = airflow.result(airflow.run("compaction", conf).succeeded(), "compact")
    (work,) = report["collections"]
    assert (work["name"], work["rows"]["given_up"]) == ("flights", [])
    assert 0 < work["rows"]["files_added"] < work["rows"]["files_removed"]
    assert work["rows"]["rows_removed"] == work["deletes_known"] > 0
    assert DeltaTable(str(collection_of(system))).to_pyarrow_table().num_rows == flown.num_rows
    assert DeltaTable(str(collection_of(system, kind="deletes"))).to_pyarrow_table().num_rows == 0


def test_recovery_rehearses_on_a_clone_and_then_repairs_a_lost_file(
    system: System, airflow: Airflow, flown: pa.Table
) -> None:
    sound = airflow.run("recovery", {"mode": "diagnose"}).succeeded()
    assert airflow.result(sound, "diagnose")["healthy"]
    table = collection_of(system)
    lost = Path(DeltaTable(str(table)).file_uris()[0])
    lost.unlink()
    rehearsed = airflow.run("recovery", {"mode": "rehearse"}).succeeded()
    assert airflow.result(rehearsed, "rehearse")["healthy"]
    assert rehearsed.tasks["repair"] == "skipped"
    assert not lost.exists()
    assert str(lost) in DeltaTable(str(table)).file_uris(), "a rehearsal leaves the tables alone"
    repaired = airflow.run("recovery", {"mode": "repair"}).succeeded()
    assert (repaired.tasks["approve"], repaired.tasks["repair"]) == ("skipped", "success")
    assert airflow.result(repaired, "repair")["healthy"]
    assert str(lost) not in DeltaTable(str(table)).file_uris()


def test_recovery_asks_a_person_before_it_gives_rows_up(system: System, airflow: Airflow, flown: pa.Table) -> None:
    table = DeltaTable(str(collection_of(system)))
    table.update(updates={"flight": "flight + 1"}, predicate="origin = 'JFK' AND carrier = 'HA'")
    run_id = airflow.start("recovery", {"mode": "repair"})
    airflow.approve("recovery", run_id)
    ran = airflow.wait("recovery", run_id).succeeded()
    assert ran.tasks["approve"] == "success"
    assert airflow.result(ran, "repair")["healthy"]


def test_quality_passes_tells_its_asset_and_its_docs_are_served(
    system: System, airflow: Airflow, flown: pa.Table
) -> None:
    ran = airflow.run("quality", {"start": "0"}).succeeded()
    report = airflow.result(ran, "check")
    assert report["passed"]
    assert {"wal", "segments", "checkpoints"} <= set(report["tables"])
    results = DeltaTable(str(system.settings.data_dir / "quality" / "results")).to_pyarrow_table()
    assert report["run_id"] in results["run_id"].to_pylist()
    assert _events(airflow, "quality_passed")


def test_what_fails_a_critical_expectation_stops_truncation_until_a_person_releases_it(
    system: System, airflow: Airflow, flown: pa.Table
) -> None:
    suite = system.settings.data_dir / "quality" / "flights.json"
    wrong = {
        "type": "expect_column_values_to_be_between",
        "kwargs": {"column": "distance", "min_value": 0, "max_value": 1},
        "meta": {"name": "all-flights-are-short"},
    }
    suite.write_text(json.dumps({"expectations": [wrong]}))
    conf = {"tables": ["collections"], "collections": ["flights"], "start": "0", "quarantine": True}
    ran = airflow.run("quality", conf)
    suite.unlink()
    assert (ran.state, ran.tasks["check"]) == ("failed", "failed")
    (block,) = blocked(system.settings)
    held = airflow.result(airflow.run("checkpoint").succeeded(), "checkpoint")
    assert (held["blocked"], held["truncated"]) == ([block.id], [])
    run_id = airflow.start("quality_release", {"blocks": [block.id], "by": "a test", "note": "all of it is a test"})
    airflow.approve("quality_release", run_id)
    released = airflow.wait("quality_release", run_id).succeeded()
    assert airflow.result(released, "release")["released"] == [block.id]
    assert blocked(system.settings) == []
    assert airflow.result(airflow.run("checkpoint").succeeded(), "checkpoint")["blocked"] == []


def test_a_range_is_rebuilt_in_shares_of_its_slices(system: System, airflow: Airflow, flown: pa.Table) -> None:
    dry = airflow.run("backfill_range", {**MOMENTS, "dry_run": True}).succeeded()
    assert len(airflow.result(dry, "plan")["slices"]) == 3
    assert dry.tasks["rebuild"] == "skipped"
    ran = airflow.run("backfill_range", MOMENTS).succeeded()
    shares = min(system.settings.spark_slots, 3)
    assert [ran.tasks[f"rebuild[{index}]"] for index in range(shares)] == ["success"] * shares
    assert airflow.result(ran, "summary")["rebuilt"] == 3
    rows, version = derived(system.settings)
    assert rows == hourly(flown, first=0, count=3)
    again = airflow.run("backfill_range", {**MOMENTS, "at": airflow.result(ran, "plan")["at"]}).succeeded()
    assert airflow.result(again, "summary")["rows"] == len(rows)
    assert derived(system.settings) == (rows, version), "the same slices at the same tick are written once"


def test_files_are_loaded_once_however_often_they_are_given(
    system: System, airflow: Airflow, flown: pa.Table, tmp_path: Path
) -> None:
    more = days(1, first=30)
    pq.write_table(more, tmp_path / "rows.parquet")
    made = ["--from", str(tmp_path / "rows.parquet"), "--key", "id", "--vchannels", "2"]
    for origin in ("EWR", "JFK", "LGA"):
        made += ["--partition", origin]
    system.millrace("collections", "create", "loaded", *made)
    conf: dict[str, Any] = {"collection": "loaded", "files": [str(tmp_path / "*.parquet")]}
    conf |= {"partition_by": "origin", "slice_bytes": 1 << 16}
    dry = airflow.run("load_files", {**conf, "dry_run": True}).succeeded()
    assert (airflow.result(dry, "load")["rows"], airflow.result(dry, "load")["loaded"]) == (more.num_rows, [])
    for _ in range(2):
        ran = airflow.run("load_files", conf).succeeded()
        assert len(airflow.result(ran, "load")["loaded"]) > 1
        assert same_rows(read(system.settings, "loaded"), more)


def test_a_restore_makes_what_was_there_at_that_moment(system: System, airflow: Airflow, flown: pa.Table) -> None:
    dry = airflow.run("restore", {"collection": "flights", "into": "flights_then", "dry_run": True}).succeeded()
    assert (airflow.result(dry, "check")["rows"], dry.tasks["restore"]) == (flown.num_rows, "skipped")
    ran = airflow.run("restore", {"collection": "flights", "into": "flights_then"}).succeeded()
    report = airflow.result(ran, "restore")
    assert (report["rows"], report["into"]) == (flown.num_rows, "flights_then")
    assert same_rows(read(system.settings, "flights_then"), flown)


def test_a_collection_is_restored_in_place_once_a_person_says_so(
    system: System, airflow: Airflow, flown: pa.Table
) -> None:
    with connect(settings=system.settings, start=False) as client:
        flights = client.definition("flights")
        moment = max(client.connection.tick(name) for name in {pchannel_of(each) for each in flights.vchannels})
        client.new_producer().delete(flights, flown["id"].to_pylist()[:50])
    assert read(system.settings).num_rows == flown.num_rows - 50
    run_id = airflow.start("restore", {"collection": "flights", "in_place": True, "at": str(moment)})
    airflow.approve("restore", run_id)
    ran = airflow.wait("restore", run_id).succeeded()
    assert airflow.result(ran, "restore")["rows"] == flown.num_rows


def test_a_backup_of_the_running_system_is_restored_elsewhere_with_every_row(
    system: System, airflow: Airflow, flown: pa.Table, tmp_path: Path
) -> None:
    ran = airflow.run("backup", {"to": str(tmp_path / "backups"), "verify": True}).succeeded()
    assert airflow.result(ran, "backup")["verified"]
    system.millrace("backup", "restore", str(tmp_path / "backups"), "--data", str(tmp_path / "again"))
    again = replace(system.settings, data_dir=tmp_path / "again", log_port=0)
    with connect(settings=again) as client:
        ingest_to_end(again, client.log)
        flush_to_end(again)
        found = client.collection("flights").read(deadline=120.0)
        client.connection.service.shutdown()
    assert same_rows(found, flown)


def test_a_users_dag_started_on_the_flushed_segments(system: System, airflow: Airflow, flown: pa.Table) -> None:
    def counted() -> bool:
        return any(each["state"] == "success" for each in airflow.runs("example_on_segments_flushed"))

    until(counted, seconds=300, what="the example has run on flushed segments")


def _log_bytes(system: System) -> int:
    channels = system.settings.log_path / "channels"
    return sum(file.stat().st_blocks * 512 for file in channels.rglob("*") if file.is_file())


def _events(airflow: Airflow, asset: str) -> list[dict[str, Any]]:
    """The events of the asset of this name."""
    found = airflow.api.call("GET", f"/api/v2/assets?name_pattern={asset}")["assets"]
    (known,) = [each for each in found if each["name"].endswith(asset)]
    return airflow.api.call("GET", f"/api/v2/assets/events?asset_id={known['id']}")["asset_events"]
