"""A catalog's file with many collections, written at once: what no test would wait for by DDL."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from pathlib import Path

from millrace.message.schema import CollectionSchema


def fill_catalog(file: Path, count: int, schema: CollectionSchema, *, pchannels: int, dropped: int = 0) -> None:
    """Add `count` active and `dropped` dropped collections of one VChannel each to a file that a coordinator made."""
    schemas, partitions = json.dumps([schema.to_json()]), json.dumps({"_default": 1})
    with closing(sqlite3.connect(file)) as db, db:
        (first,) = db.execute("select coalesce(max(id), 0) + 1 from collection").fetchone()
        states = ["active"] * count + ["dropped"] * dropped
        db.executemany(
            "insert into collection values (?, ?, ?, ?, ?, ?, 2)",
            (
                (number, f"filled_{number:06}", state, f'["dml_{number % pchannels}_{number}v0"]', schemas, partitions)
                for number, state in enumerate(states, first)
            ),
        )
