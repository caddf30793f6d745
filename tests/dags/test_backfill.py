"""The two DAGs of backfill, run as Airflow runs them, over real flights."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable

from millrace.base.settings import Settings
from millrace.client.database import connect
from millrace.demo.flights import flights
from millrace.demo.load import ensure_collection
from millrace.node.flush.definition import flush_to_end
from millrace.node.ingest.definition import ingest_to_end
from millrace.operations.backfill.derived import derived_uri
from millrace.operations.backfill.slices import recorded_slices
from tests.dags.conftest import RunDag, load_dag

START = datetime(2013, 1, 2, tzinfo=UTC)


def test_the_form_asks_for_what_the_run_does_not_know(airflow: object) -> None:
    assert {"start", "end", "at", "run_id", "slices"}.isdisjoint(load_dag("backfill").params)
    ranged = load_dag("backfill_range")
    assert {"start", "end", "range_of", "slice_hours", "dry_run"} <= set(ranged.params)
    assert ranged.params.get_param("start").schema["format"] == "date-time"


@pytest.fixture
def of_flights(settings: Settings) -> Iterator[Settings]:
    """A deployment with the flights of the first days of the year."""
    settings = replace(settings, spark_memory="700m")
    with connect(settings=settings) as client:
        client.catalog.ensure_pchannels(2)
        collection = ensure_collection(client)
        rows = flights()
        rows = rows.filter(pc.less(rows["time_hour"], START + timedelta(days=3)))
        client.new_producer().insert(collection, rows, partition_by="origin")
        ingest_to_end(settings, client.log)
        flush_to_end(settings)
        yield settings
        client.connection.service.shutdown()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_day_by_its_interval_then_a_range_by_its_form(of_flights: Settings, run_dag: RunDag) -> None:
    day = run_dag("backfill", logical_date=START + timedelta(days=1))
    assert day.tasks == {"rebuild": "success"}
    (one,) = day.results["rebuild"]["slices"]
    assert (one["start"], one["outcome"]) == ("2013-01-02T00:00:00Z", "written")
    assert set(_hours(of_flights)) == {START + timedelta(hours=hour) for hour in range(24)} & set(_hours(of_flights))

    moments = {"start": START.isoformat(), "end": (START + timedelta(days=3)).isoformat()}
    dry = run_dag("backfill_range", {**moments, "dry_run": True})
    assert len(dry.results["plan"]["slices"]) == 3
    assert dry.tasks["rebuild"] == "skipped"
    ran = run_dag("backfill_range", moments)
    assert ran.state == "success"
    summary = ran.results["summary"]
    assert (summary["planned"], summary["rebuilt"]) == (3, 3)
    assert summary["rows"] == len(_hours(of_flights))
    assert recorded_slices(of_flights, table="flights_hourly").num_rows == 4


@pytest.mark.slow
def test_a_run_without_an_interval_is_refused_in_words(of_flights: Settings, run_dag: RunDag) -> None:
    ran = run_dag("backfill", logical_date=None)
    assert ran.state == "failed"
    assert recorded_slices(of_flights).num_rows == 0


@pytest.mark.slow
def test_files_are_loaded_once(
    of_flights: Settings, run_dag: RunDag, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MILLRACE_LOAD_ROOTS", str(tmp_path))
    rows = flights().slice(10_000, 4_000)
    pq.write_table(rows, tmp_path / "rows.parquet")
    with connect(settings=of_flights) as client:
        before = client.collection("flights").read().num_rows
    conf = {"collection": "flights", "files": [str(tmp_path / "*.parquet")], "partition_by": "origin"}
    conf["slice_bytes"] = 1 << 18
    dry = run_dag("load_files", {**conf, "dry_run": True})
    assert (dry.results["load"]["rows"], dry.results["load"]["loaded"]) == (4_000, [])
    for _ in range(2):
        ran = run_dag("load_files", conf)
        assert ran.state == "success"
        assert len(ran.results["load"]["loaded"]) > 1
        assert sum(each["rows"] for each in ran.results["load"]["loaded"]) == 4_000
    with connect(settings=of_flights) as client:
        ingest_to_end(of_flights, client.log)
        assert client.collection("flights").read().num_rows == before + 4_000


def _hours(settings: Settings) -> list[Any]:
    table = DeltaTable(str(Path(derived_uri(settings, "flights_hourly")))).to_pyarrow_table()
    return list(table["hour"].to_pylist())
