"""The key index: building, lookups, merges, bytes, and `get` of a key, on a collection whose keys are in random order.

No bound of a file excludes a key, so everything is found by the index.
"""

from __future__ import annotations

import resource
import shutil
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from bench.deployment import deployment
from bench.tables.orders import SCHEMA, orders
from millrace.client.collection import Collection
from millrace.message.keys import key_column
from millrace.node.flush.definition import flush_to_end
from millrace.node.ingest.definition import ingest_to_end
from millrace.storage.table import table_at
from millrace.tables.collections.data_tables import rows_uri
from millrace.tables.key_index.hashes import hash_keys
from millrace.tables.key_index.index import KeyIndex
from millrace.tables.key_index.lookup import find_hits

CALL_ROWS = 100_000
FLUSHES = 40
"""Flushes in which the rows arrive: as many files or more, and a catch-up after each."""


def index_of(folder: Path, *, rows: int, keys: int = 1_000, times: int = 20, gets: int = 100) -> dict[str, Any]:
    """Measure the index of a collection of `rows` rows: upkeep per flush, a rebuild, lookups of `keys` keys, gets."""
    draw = np.random.default_rng(0)
    with deployment(folder) as (settings, client, _):
        target = client.create_collection("orders", SCHEMA, vchannels=2)
        ids = draw.permutation(rows)
        index = KeyIndex.open(settings.key_index_path(target.id))
        spent, indexed, merged = 0.0, 0, 0
        for part in np.array_split(ids, FLUSHES):
            for piece in np.array_split(part, max(1, len(part) // CALL_ROWS)):
                target.insert(orders(piece))
            ingest_to_end(settings, client.log)
            flush_to_end(settings)
            table = table_at(rows_uri(settings, target.id))
            start = time.perf_counter()
            work = index.catch_up(table, SCHEMA)
            spent += time.perf_counter() - start
            indexed += work.rows_indexed
            merged += work.rows_merged
        assert indexed == rows
        found: dict[str, Any] = {
            "rows": rows,
            "files": len(table.live_files()),
            "runs": len(index.runs),
            "bytes_per_row": round(sum(run.path.stat().st_size for run in index.runs) / rows, 2),
            "catch_up_rows_per_s": round(rows / spent),
            "merged_per_row": round(merged / rows, 2),
        }
        found |= _lookups(index, table, draw, rows, keys, times)
        found |= _gets(target, draw, rows, gets)
        shutil.rmtree(settings.key_index_path(target.id))
        start = time.perf_counter()
        KeyIndex.open(settings.key_index_path(target.id)).catch_up(table, SCHEMA)
        found["rebuild_rows_per_s"] = round(rows / (time.perf_counter() - start))
        found["peak_rss_mib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
        shutil.rmtree(settings.key_index_path(target.id))
        found["get_without_index_p50_ms"] = _milliseconds(
            lambda: target.get(int(draw.integers(rows))), max(3, gets // 20)
        )[0]
        return found


def _lookups(
    index: KeyIndex, table: Any, draw: np.random.Generator, rows: int, keys: int, times: int
) -> dict[str, Any]:
    """Measure which rows deletes of random keys hit, and the part of the hashes."""

    def deletes() -> pa.Table:
        tick = pa.array(np.full(keys, 1 << 62))
        wanted = pa.array(draw.choice(rows, keys, replace=False))
        return pa.table(
            {"id": wanted, "_partition_id": np.zeros(keys, np.int64), "_time_tick": tick, "_write_tick": tick}
        )

    hits = find_hits(index, table, SCHEMA, deletes())
    assert hits.rows == keys
    p50, p99 = _milliseconds(lambda: find_hits(index, table, SCHEMA, deletes()), times)
    live = {each.path: each.rows for each in table.describe_files()}
    alone, _ = _milliseconds(lambda: index.find(hash_keys(key_column(deletes(), ["id"])), live), times)
    return {
        f"hits_of_{keys}_keys_p50_ms": p50,
        f"hits_of_{keys}_keys_p99_ms": p99,
        f"index_alone_of_{keys}_keys_p50_ms": alone,
        "blocks_per_key": round(hits.work.blocks / keys, 2),
    }


def _gets(target: Collection, draw: np.random.Generator, rows: int, gets: int) -> dict[str, Any]:
    assert target.get(rows // 2)["id"].to_pylist() == [rows // 2]
    one = _milliseconds(lambda: target.get(int(draw.integers(rows))), gets)
    tick = target.database.current_tick(target.definition.pchannels)
    at = _milliseconds(lambda: target.get(int(draw.integers(rows)), at=tick), gets)
    read = _milliseconds(lambda: target.read(where=f"id = {int(draw.integers(rows))}"), max(3, gets // 20))
    return {
        "get_p50_ms": one[0],
        "get_p99_ms": one[1],
        "get_at_p50_ms": at[0],
        "read_where_p50_ms": read[0],
    }


def _milliseconds(act: Callable[[], object], times: int) -> tuple[float, float]:
    """Return the median and the 99th percentile of some calls."""
    taken = []
    for _ in range(times):
        start = time.perf_counter()
        act()
        taken.append((time.perf_counter() - start) * 1000)
    return round(statistics.median(taken), 2), round(float(np.percentile(taken, 99)), 2)
