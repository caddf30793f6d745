"""Reads on top of the published version: a table of which a tenth was updated, and what was appended just now.

Baseline of the same run: the same reads without a published version, which take all deletes.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from bench.deployment import deployment
from bench.tables.orders import SCHEMA, orders
from millrace.base.settings import Settings
from millrace.client.collection import Collection
from millrace.client.database import Database
from millrace.node.flush.definition import flush_to_end
from millrace.node.ingest.definition import ingest_to_end
from millrace.node.publish.definition import publish_to_end
from millrace.rpc.selection import Selection
from millrace.runtime.spark.session import session
from millrace.tables.read.arrow import read_arrow
from millrace.tables.read.open_tables import OpenTables
from millrace.tables.read.spark import read_spark

CALL_ROWS = 100_000
FLUSHES = 10


def updated(folder: Path, *, rows: int, times: int = 7, appends: int = 200) -> dict[str, Any]:
    """Read a table of `rows` rows, of which random upserts replaced a tenth, and after each of some appends."""
    draw = np.random.default_rng(0)
    with deployment(folder) as (settings, client, _):
        target = client.create_collection("orders", SCHEMA, vchannels=2)

        def settle() -> None:
            _settle(settings, client)

        _update(settings, client, target, draw, rows)
        tick = client.current_tick(target.definition.pchannels)
        confirmed = dict.fromkeys(target.definition.pchannels, tick)
        found: dict[str, Any] = {"rows": rows}
        for name, selection in {
            "all": Selection(),
            "one_column": Selection(columns=("price",)),
            "where": Selection(where=f"id < {rows // 1000}"),
        }.items():
            tables = {True: OpenTables(), False: OpenTables()}

            def read(published: bool, selection: Selection = selection, tables: Any = tables) -> int:
                return read_arrow(
                    settings,
                    target.id,
                    at=tick,
                    confirmed=confirmed,
                    selection=selection,
                    tables=tables[published],
                    use_published=published,
                ).num_rows

            assert read(True) == read(False)
            with_base, without = _pairs(lambda: read(True), lambda: read(False), times)
            found |= {f"{name}_ms": with_base, f"{name}_without_base_ms": without}
            found[f"{name}_ratio"] = round(without / with_base, 2)
        spent = []
        for number in range(appends):
            key = int(draw.integers(rows))
            start = time.perf_counter()
            target.upsert(orders(np.array([key]), version=101 + number))
            assert target.read(where=f"id = {key}").num_rows == 1
            spent.append(time.perf_counter() - start)
            if number % 50 == 49:
                settle()
                publish_to_end(settings)
        p50, p99 = np.percentile(np.array(spent[5:]) * 1e3, [50, 99])
        return found | {"append_to_read_p50_ms": round(float(p50), 1), "append_to_read_p99_ms": round(float(p99), 1)}


def by_spark(folder: Path, *, rows: int, times: int = 5) -> dict[str, Any]:
    """Read the same table by Spark: count it, sum a column, and look for a few keys."""
    draw = np.random.default_rng(0)
    with deployment(folder) as (settings, client, _):
        target = client.create_collection("orders", SCHEMA, vchannels=2)
        _update(settings, client, target, draw, rows)
        tick = client.current_tick(target.definition.pchannels)
        confirmed = dict.fromkeys(target.definition.pchannels, tick)
        spark = session("bench-published", settings=settings)
        try:
            found: dict[str, Any] = {"rows": rows}
            for name, query in {
                "sum": lambda frame: frame.agg(F.sum("quantity"), F.max("price"), F.max("note")).collect(),
                "where": lambda frame: frame.where(f"id < {rows // 1000}").agg(F.sum("quantity")).collect(),
            }.items():

                def read(published: bool, query: Callable[[DataFrame], Any] = query) -> Any:
                    return query(
                        read_spark(spark, settings, target.id, at=tick, confirmed=confirmed, use_published=published)
                    )

                assert read(True) == read(False)
                with_base, without = _pairs(lambda: read(True), lambda: read(False), times)
                found |= {f"{name}_ms": with_base, f"{name}_without_base_ms": without}
            return found
        finally:
            spark.stop()


def _update(settings: Settings, client: Database, target: Collection, draw: np.random.Generator, rows: int) -> None:
    """Write `rows` rows, replace a tenth of them by random upserts, publish, and replace some more."""
    for part in np.array_split(draw.permutation(rows), FLUSHES):
        for piece in np.array_split(part, max(1, len(part) // CALL_ROWS)):
            target.insert(orders(piece))
        _settle(settings, client)
    for number, piece in enumerate(np.array_split(draw.choice(rows, rows // 10, replace=False), FLUSHES)):
        target.upsert(orders(piece, version=number + 1))
        _settle(settings, client)
    publish_to_end(settings)
    target.upsert(orders(draw.choice(rows, 1_000, replace=False), version=99))
    _settle(settings, client)
    publish_to_end(settings)  # the index is there
    target.upsert(orders(draw.choice(rows, 100, replace=False), version=100))
    _settle(settings, client)


def _settle(settings: Settings, client: Database) -> None:
    ingest_to_end(settings, client.log)
    flush_to_end(settings)


def _pairs(first: Callable[[], object], second: Callable[[], object], times: int) -> tuple[float, float]:
    """Return the medians of two calls that alternate, in milliseconds."""
    spent: list[list[float]] = [[], []]
    for _ in range(times):
        for number, call in enumerate((first, second)):
            start = time.perf_counter()
            call()
            spent[number].append((time.perf_counter() - start) * 1e3)
    return round(statistics.median(spent[0]), 1), round(statistics.median(spent[1]), 1)
