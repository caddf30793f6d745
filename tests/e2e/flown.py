"""Flights that are put through the running system, and what must come of them.

Computed from the flights alone, with DuckDB.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final

import duckdb
import pyarrow as pa
import pyarrow.compute as pc
from deltalake import DeltaTable

from millrace.base.settings import Settings
from millrace.client.database import connect
from millrace.client.produce.producer import Producer
from millrace.demo.flights import flights
from millrace.demo.load import COLLECTION, ensure_collection
from millrace.operations.backfill.derived import derived_uri
from millrace.tables.wal.table import WalTable
from tests.waiting import until

START: Final = datetime(2013, 1, 2, tzinfo=UTC)
BATCH_ROWS: Final = 700
HOURLY: Final = """
    SELECT origin, date_trunc('hour', time_hour) AS hour, count(*) AS scheduled, count(dep_time) AS departed,
        count(*) - count(dep_time) AS cancelled, count(*) FILTER (dep_delay >= 15) AS late,
        avg(dep_delay) AS mean_dep_delay, max(dep_delay) AS max_dep_delay, avg(arr_delay) AS mean_arr_delay,
        count(DISTINCT carrier) AS carriers
    FROM flown WHERE time_hour >= $start AND time_hour < $end GROUP BY ALL ORDER BY hour, origin
"""
"""The derived table of the demo, by another engine."""


def days(count: int, *, first: int = 0) -> pa.Table:
    """The flights of `count` days from START + `first` days on."""
    rows = flights()
    start = START + timedelta(days=first)
    hour = rows["time_hour"]
    return rows.filter(pc.and_(pc.greater_equal(hour, start), pc.less(hour, start + timedelta(days=count))))


def fly(settings: Settings, rows: pa.Table) -> int:
    """Insert the flights in a few micro-batches, delete those to LAX, and flush; how many are visible then."""
    with connect(settings=settings) as client:
        client.catalog.ensure_pchannels(settings.pchannels)
        collection = ensure_collection(client)
        producer = client.new_producer()
        for start in range(0, len(rows), BATCH_ROWS):
            producer.insert(collection, rows.slice(start, BATCH_ROWS), partition_by="origin")
            _wait_committed(settings, producer)  # so that the next rows are in another micro-batch
        producer.delete(collection, rows.filter(pc.equal(rows["dest"], "LAX"))["id"].combine_chunks())
        _wait_committed(settings, producer)
        client.catalog.flush(COLLECTION)
        return client.collection(COLLECTION).read(deadline=120.0).num_rows


def _wait_committed(settings: Settings, producer: Producer) -> None:
    """Until `wal` has what the producer appended. A read takes it from the log while no streaming node runs."""

    def committed() -> bool:
        if not WalTable.exists(settings.wal_uri):
            return False
        wal = WalTable.open(settings.wal_uri)
        return all(wal.last_tick(pchannel) >= tick for pchannel, tick in producer.ticks().items())

    until(committed, "the rows are in wal", seconds=300.0)


def visible(rows: pa.Table) -> pa.Table:
    """What is left of them behind :func:`fly`."""
    return rows.filter(pc.not_equal(rows["dest"], "LAX"))


def read(settings: Settings, collection: str = COLLECTION) -> pa.Table:
    """All visible rows now."""
    with connect(settings=settings) as client:
        return client.collection(collection).read(deadline=120.0)


def same_rows(found: pa.Table, wanted: pa.Table) -> bool:
    """Whether both have the same rows, in any order: every row once."""
    columns = wanted.column_names
    return found.select(columns).sort_by("id").equals(wanted.cast(found.select(columns).schema).sort_by("id"))


def hourly(rows: pa.Table, *, first: int, count: int) -> list[tuple[Any, ...]]:
    """What the derived table must hold of the days from START + `first` on, by DuckDB."""
    start = START + timedelta(days=first)
    with duckdb.connect() as db:
        db.register("flown", rows)
        db.execute("SET TimeZone = 'UTC'")
        return db.execute(HOURLY, {"start": start, "end": start + timedelta(days=count)}).fetchall()


def derived(settings: Settings) -> tuple[list[tuple[Any, ...]], int]:
    """The derived table's rows in the same order and columns, and the table's version."""
    table = DeltaTable(str(Path(derived_uri(settings, "flights_hourly"))))
    flown = table.to_pyarrow_table()
    with duckdb.connect() as db:
        db.register("flown", flown)
        db.execute("SET TimeZone = 'UTC'")
        columns = (
            "origin, hour, scheduled, departed, cancelled, late, mean_dep_delay, max_dep_delay, mean_arr_delay,"
            " carriers"
        )
        return db.execute(f"SELECT {columns} FROM flown ORDER BY hour, origin").fetchall(), table.version()
