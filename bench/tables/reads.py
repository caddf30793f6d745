"""Reads: of updated rows against as many versions of distinct keys; filtered, against DuckDB; wide and deep rows."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
from deltalake import DeltaTable, write_deltalake

from bench.deployment import deployment
from bench.tables.orders import calls_of, changes, collection_of, orders
from millrace.base.settings import Settings
from millrace.client.collection import Collection
from millrace.client.database import Database
from millrace.node.flush.definition import flush_to_end
from millrace.node.ingest.definition import ingest_to_end
from millrace.operations.compaction.declaration import CompactionParams
from millrace.operations.compaction.run import compact

ALL = CompactionParams(min_files=2, fold="always", keep_history_hours=0, segments=False, vacuum=False)


def merge_on_read(folder: Path, *, living: int, times: int = 5) -> dict[str, Any]:
    """Return seconds of whole reads of `living` keys, each replaced until nine of ten rows are old versions.

    The baselines are as many versions of distinct keys, and the living rows written once; before and after compaction.
    """
    with deployment(folder) as (settings, client, _):
        updated, distinct, once = (collection_of(client, name) for name in ("updated", "distinct", "once"))
        for version in range(10):
            for piece in calls_of(orders(np.arange(living), version=version), 50_000):
                updated.upsert(piece)
            for piece in calls_of(orders(np.arange(living * version, living * (version + 1))), 50_000):
                distinct.insert(piece)
        once.insert(orders(np.arange(living), version=9))
        _settle(settings, client)
        found: dict[str, Any] = {"living_rows": living, "row_versions": living * 10}
        before = _seconds({"updated": updated, "distinct": distinct}, times)
        found |= _compared(before, "updated", "distinct")
        compact(settings, ALL)
        after = _seconds({"updated": updated, "once": once}, times)
        found |= _compared({"compacted": after["updated"], "once": after["once"]}, "compacted", "once")
        assert updated.count() == living
        return found


def _compared(spent: dict[str, tuple[float, float]], one: str, other: str) -> dict[str, float]:
    found = {f"{name}_s": round(clock, 3) for name, (clock, _) in spent.items()}
    found |= {f"{name}_cpu_s": round(cpu, 3) for name, (_, cpu) in spent.items()}
    ratios = [round(mine / theirs, 2) for mine, theirs in zip(spent[one], spent[other], strict=True)]
    return found | {f"{one}_to_{other}": ratios[0], f"{one}_to_{other}_cpu": ratios[1]}


def filtered(folder: Path, *, rows: int, updates: float = 0.1, times: int = 7) -> dict[str, Any]:
    """Return seconds of equal filters: `read` on a collection with updates, DuckDB on plain Delta files."""
    filters = {
        "one key": f"id = {rows // 2}",
        "a range of keys (1 %)": f"id >= {rows // 2} AND id < {rows // 2 + rows // 100}",
        "a range of time (1 %)": (
            "placed >= TIMESTAMP '2013-01-02 00:00:00+00' AND placed < TIMESTAMP '2013-01-03 00:00:00+00'"
        ),
        "a symbol (0.2 %)": "symbol = 'SYM007'",
        "all": "id >= 0",
    }
    with deployment(folder / "data") as (settings, client, _):
        target = collection_of(client, "orders", base=rows)
        for piece in calls_of(changes(rows, round(rows * updates), updates=1.0), 10_000):
            target.upsert(piece)
        _settle(settings, client)
        compact(settings, ALL)
        write_deltalake(str(folder / "plain"), target.read(order_by="id"))
        files = DeltaTable(str(folder / "plain")).file_uris()
        with duckdb.connect() as connection:
            connection.execute("SET TimeZone = 'UTC'")
            found: dict[str, Any] = {"rows": rows, "cores": settings.cores}
            for name, where in filters.items():

                def theirs(where: str = where) -> int:
                    answer: pa.Table = connection.sql(
                        f"SELECT * FROM read_parquet($1) WHERE {where}", params=[files]
                    ).to_arrow_table()
                    return answer.num_rows

                def ours(where: str = where) -> int:
                    return target.read(where=where).num_rows

                assert ours() == theirs(), name
                mine, other = _median(ours, times), _median(theirs, times)
                found[name] = {"read_s": round(mine, 4), "duckdb_s": round(other, 4), "ratio": round(mine / other, 2)}
        return found


def shapes(folder: Path, *, wide_rows: int, deep_rows: int) -> dict[str, Any]:
    """Measure a table of 500 columns and one five levels deep: MB/s in, through each stage, and seconds of a read."""
    inner: pa.DataType = pa.float64()
    for level in range(5):
        inner = pa.struct([pa.field(f"a{level}", inner), pa.field(f"b{level}", pa.list_(pa.int64()))])
    leaf: pa.Array = pa.array(np.arange(deep_rows, dtype=np.float64))
    for level in range(5):
        leaf = pa.StructArray.from_arrays(
            [leaf, pa.array([[level, number] for number in range(deep_rows)], pa.list_(pa.int64()))],
            [f"a{level}", f"b{level}"],
        )
    draw = np.random.default_rng(0)
    tables = {
        "500 columns": pa.table(
            {"id": np.arange(wide_rows)} | {f"c{number}": draw.random(wide_rows) for number in range(499)}
        ),
        "5 levels": pa.table({"id": np.arange(deep_rows), "doc": leaf.cast(inner)}),
    }
    with deployment(folder) as (settings, client, _):
        found = {}
        for number, (name, table) in enumerate(tables.items()):
            target = client.create_collection(f"shape{number}", table.schema, key="id", vchannels=2)
            start = time.perf_counter()
            target.insert(table)
            appended = time.perf_counter() - start
            _settle(settings, client)
            settled = time.perf_counter() - start
            found[name] = {
                "rows": table.num_rows,
                "mb": round(table.nbytes / 1e6, 1),
                "append_mb_per_s": round(table.nbytes / appended / 1e6, 1),
                "readable_mb_per_s": round(table.nbytes / settled / 1e6, 1),
                "read_s": round(_median(target.read, 3), 3),
            }
            assert target.count() == table.num_rows
        return found


def _settle(settings: Settings, client: Database) -> None:
    ingest_to_end(settings, client.log)
    flush_to_end(settings)


def _median(act: Callable[[], object], times: int) -> float:
    taken = []
    for _ in range(times + 1):
        start = time.perf_counter()
        act()
        taken.append(time.perf_counter() - start)
    return statistics.median(taken[1:])


def _seconds(places: dict[str, Collection], times: int) -> dict[str, tuple[float, float]]:
    """Return the median wall time and CPU time; the latter says more on a shared machine. Alternates for equal load."""
    spent: dict[str, list[tuple[float, float]]] = {name: [] for name in places}
    for _ in range(times):
        for name, place in places.items():
            start, worked = time.perf_counter(), time.process_time()
            place.read()
            spent[name].append((time.perf_counter() - start, time.process_time() - worked))
    return {name: tuple(map(statistics.median, zip(*each, strict=True))) for name, each in spent.items()}
