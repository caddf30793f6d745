"""A deployment to measure: a data folder, the log server with the append host, and a Spark driver in its usual form."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pyarrow as pa

from millrace.base.settings import Settings
from millrace.catalog.collection import CollectionInfo
from millrace.client.database import Database, connect
from millrace.message.schema import CollectionSchema, FieldSpec
from millrace.runtime.child_processes import ChildProcess
from millrace.runtime.queries import started_path

ROOT = Path(__file__).parents[1]
SCHEMA = CollectionSchema((FieldSpec("id", "int64", False), FieldSpec("body", "binary", True)), "id")
NAME = "bench"


@contextmanager
def deployment(
    folder: Path, *, pchannels: int = 2, meta_store: str = "", tables: str = ""
) -> Iterator[tuple[Settings, Database, CollectionInfo]]:
    """Make a deployment with one collection over `pchannels` PChannels; its log server ends with the block."""
    settings = Settings(
        data_dir=folder,
        cache_dir=Settings.load().cache_dir,
        pchannels=pchannels,
        meta_store=meta_store,
        tables=tables,
    )
    with connect(settings=settings) as db:
        db.catalog.ensure_pchannels(pchannels)
        collection = db.catalog.create_collection(NAME, SCHEMA, vchannels=pchannels)
        try:
            yield settings, db, collection
        finally:
            db.connection.service.shutdown()


@contextmanager
def spark_job(settings: Settings, *arguments: str) -> Iterator[ChildProcess]:
    """Run the streaming node (and flusher) as a driver of its own for as long as the block lasts."""
    ready = started_path(settings, "millrace-streaming-node")
    ready.unlink(missing_ok=True)
    job = ChildProcess(
        [sys.executable, str(ROOT / "jobs" / "streaming_node.py"), *arguments],
        log_file=settings.run_path / "bench-job.log",
        env=settings.environment(),
    )
    try:
        job.wait_ready(ready.exists, deadline=settings.start_deadline)
        yield job
    finally:
        job.stop(deadline=settings.stop_deadline)


def rows(first: int, count: int, *, size: int = 1000) -> pa.Table:
    """Return `count` rows with ids from `first` on and bodies of `size` random bytes (of a few that repeat)."""
    bodies = [np.random.default_rng(seed).bytes(size) for seed in range(8)]
    return pa.table({"id": range(first, first + count), "body": [bodies[number % 8] for number in range(count)]})
