"""The cost of the collection sink, without Spark: each guarantee against a producer that inserts the same rows.

Changes through the sink are compared with a producer that upserts and deletes them.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from bench.tables.orders import SCHEMA, calls_of, orders
from millrace.flows.batch import Batch
from millrace.flows.guarantee import Guarantee
from millrace.flows.sinks.collection.changes import KIND
from millrace.flows.sinks.collection.sink import CollectionSink
from millrace.testing import deployment


def guarantees(folder: Path, *, rows: int, size: int, pairs: int) -> dict[str, Any]:
    """Return rows/s of orders (about 150 bytes each), `size` per micro-batch, each into a new collection."""
    table = orders(np.arange(rows))
    calls = list(calls_of(table, size))
    offered: tuple[Guarantee, ...] = ("at most once", "at least once", "exactly once")
    rates: dict[str, list[float]] = {each: [] for each in ("producer", *offered)}
    with deployment(folder / "data") as db:
        for turn in range(pairs):
            for each in rates:
                name = f"{each.replace(' ', '_')}_{turn}"
                db.catalog.create_collection(name, SCHEMA, vchannels=2)
                rates[each].append(rows / _seconds(_writer(db, name, each, folder / name), calls))
    found = {each: round(statistics.median(found)) for each, found in rates.items()}
    return {
        "rows": rows,
        "batch": size,
        "rows_per_s": found,
        "of_the_producer": {
            each: round(statistics.median(a / b for a, b in zip(rates[each], rates["producer"], strict=True)), 2)
            for each in offered
        },
    }


def changes(folder: Path, *, rows: int, size: int, pairs: int) -> dict[str, Any]:
    """Return changes/s in key order as databases make them: of each `size` 10 % deletes, half of the rest updates."""
    calls = [_changes(first, size) for first in range(0, rows // 2, size // 2)]
    count = len(calls) * size
    rates: dict[str, list[float]] = {"producer": [], "stream": []}
    with deployment(folder / "data") as db:
        for turn in range(pairs):
            for each in rates:
                name = f"{each}_{turn}"
                db.catalog.create_collection(name, SCHEMA, vchannels=2)
                write = _applying(db, name, None if each == "producer" else folder / name)
                rates[each].append(count / _seconds(write, calls))
            db.settle()
            one, other = (db.collection(f"{each}_{turn}").count() for each in rates)
            assert one == other, "both come to the same rows"
    found = {each: round(statistics.median(found)) for each, found in rates.items()}
    of_the_producer = statistics.median(a / b for a, b in zip(rates["stream"], rates["producer"], strict=True))
    return {"changes": count, "batch": size, "changes_per_s": found, "of_the_producer": round(of_the_producer, 2)}


def _changes(first: int, size: int) -> pa.RecordBatch:
    """Of `size` keys from `first` on, every tenth deleted."""
    table = orders(np.arange(first, first + size), version=first)
    kinds = np.where(np.arange(size) % 10 == 9, "delete", "upsert")
    return table.append_column(KIND, pa.array(kinds)).combine_chunks().to_batches()[0]


def _applying(db: Any, name: str, folder: Path | None) -> Callable[[list[pa.RecordBatch]], None]:
    """By a producer, or with a `folder` for its memory by a sink."""

    def by_producer(calls: list[pa.RecordBatch]) -> None:
        into = db.collection(name)
        for each in calls:
            gone = pc.equal(each.column(KIND), "delete")
            into.delete(each.filter(gone).column("id"))
            into.upsert(each.filter(pc.invert(gone)).drop_columns([KIND]))

    def by_sink(calls: list[pa.RecordBatch]) -> None:
        with CollectionSink(db.settings, name, memory=folder or Path(), mode="changes") as sink:
            for number, each in enumerate(calls):
                sink.write(Batch.of_rows("query", number, [each]))

    return by_producer if folder is None else by_sink


def _writer(db: Any, name: str, how: str, folder: Path) -> Callable[[list[pa.RecordBatch]], None]:
    def by_producer(calls: list[pa.RecordBatch]) -> None:
        into = db.collection(name)
        for each in calls:
            into.insert(each)

    def by_sink(calls: list[pa.RecordBatch]) -> None:
        with CollectionSink(db.settings, name, memory=folder, guarantee=how) as sink:  # type: ignore[arg-type]
            for number, each in enumerate(calls):
                sink.write(Batch.of_rows("query", number, [each]))

    return by_producer if how == "producer" else by_sink


def _seconds(write: Callable[[list[pa.RecordBatch]], None], calls: list[pa.RecordBatch]) -> float:
    begun = time.perf_counter()
    write(calls)
    return time.perf_counter() - begun
