"""What a guarantee costs: the collection sink by each of its guarantees, beside a producer that inserts the same rows. No Spark."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from bench.tables.orders import SCHEMA, calls_of, orders
from millrace.client.database import Database
from millrace.streams.sinks.collection.sink import CollectionSink
from millrace.streams.sinks.guarantee import Guarantee
from millrace.testing import deployment


def guarantees(folder: Path, *, rows: int, size: int, pairs: int) -> dict[str, Any]:
    """Rows a second of orders (about 150 bytes each), `size` a micro-batch, each in turn, into a collection of its own."""
    table = orders(np.arange(rows))
    calls = list(calls_of(table, size))
    offered: tuple[Guarantee, ...] = ("at most once", "at least once", "exactly once")
    rates: dict[str, list[float]] = {each: [] for each in ("producer", *offered)}
    with deployment(folder / "data") as db:
        for turn in range(pairs):
            for each in rates:
                name = f"{each.replace(' ', '_')}_{turn}"
                db.client.catalog.create_collection(name, SCHEMA, vchannels=2)
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


def _writer(db: Any, name: str, how: str, folder: Path) -> Callable[[list[pa.RecordBatch]], None]:
    def by_producer(calls: list[pa.RecordBatch]) -> None:
        into = Database(db.client).collection(name)
        for each in calls:
            into.insert(each)

    def by_sink(calls: list[pa.RecordBatch]) -> None:
        with CollectionSink(db.settings, folder, name, guarantee=how) as sink:  # type: ignore[arg-type]
            for number, each in enumerate(calls):
                sink.write(number, [each])

    return by_producer if how == "producer" else by_sink


def _seconds(write: Callable[[list[pa.RecordBatch]], None], calls: list[pa.RecordBatch]) -> float:
    begun = time.perf_counter()
    write(calls)
    return time.perf_counter() - begun
