"""The rows that are written: orders of seven columns, about 150 bytes each, and streams of changes to them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
from deltalake import write_deltalake

from millrace.client.collection import Collection
from millrace.client.database import Database
from millrace.message.schema import CollectionSchema, FieldSpec

SCHEMA = CollectionSchema(
    (
        FieldSpec("id", "int64", False),
        FieldSpec("symbol", "string", False),
        FieldSpec("quantity", "int32", False),
        FieldSpec("price", "float64", False),
        FieldSpec("version", "int64", False),
        FieldSpec("placed", "timestamp", False),
        FieldSpec("note", "string", True),
    ),
    "id",
)
BASE_PIECE = 5_000_000
"""Rows that are made at once, in memory."""
_DAY_MS = 86_400_000
_BEGIN_MS = 1_356_998_400_000
_NOTES = pa.array([np.random.default_rng(seed).bytes(48).hex() for seed in range(64)])
_SYMBOLS = pa.array([f"SYM{number:03}" for number in range(500)])


def orders(ids: np.ndarray, *, version: int = 0) -> pa.Table:
    """One row for each id; what is in it follows from the id and the version. A day has 10,000 ids."""
    mixed = (ids.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(version)) >> np.uint64(40)
    placed = pa.array((_BEGIN_MS + ids * (_DAY_MS // 10_000)) * 1000).cast(pa.timestamp("us", "UTC"))
    return pa.table(
        {
            "id": ids,
            "symbol": _SYMBOLS.take(pa.array(mixed % len(_SYMBOLS))),
            "quantity": (mixed % 1000).astype(np.int32),
            "price": (mixed % 100_003).astype(np.float64) / 100,
            "version": np.full(len(ids), version),
            "placed": placed,
            "note": _NOTES.take(pa.array(mixed % len(_NOTES))),
        }
    )


def changes(base: int, count: int, *, updates: float, seed: int = 1) -> pa.Table:
    """`count` rows in random order, no key twice: `updates` of them have a key below `base`, the others are new."""
    draw = np.random.default_rng(seed)
    old = round(count * updates)
    ids = np.concatenate([draw.choice(base, old, replace=False), np.arange(base, base + count - old)])
    return orders(draw.permutation(ids), version=1)


def calls_of(table: pa.Table, rows: int) -> Iterator[pa.RecordBatch]:
    """The table, `rows` a call."""
    for start in range(0, table.num_rows, rows):
        yield table.slice(start, rows).combine_chunks().to_batches()[0]


def write_base(folder: Path, base: int) -> None:
    """A plain Delta table of orders with the ids below `base`."""
    for start in range(0, base, BASE_PIECE):
        write_deltalake(str(folder), orders(np.arange(start, min(base, start + BASE_PIECE))), mode="append")


def collection_of(client: Database, name: str, *, base: int = 0) -> Collection:
    """A new collection of orders over the deployment's PChannels; with `base` rows in it."""
    made = client.create_collection(name, SCHEMA, vchannels=2)
    for start in range(0, base, 100_000):
        made.insert(orders(np.arange(start, min(base, start + 100_000))))
    return made
