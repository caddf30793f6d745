"""The cost of a restart by the WAL's length and by the uncommitted tail: the log server, killed, and the node.

The baseline is the same restart of the smallest WAL without a tail, in the same run.
"""

from __future__ import annotations

import os
import signal
import statistics
import time
from pathlib import Path
from typing import Any

import psutil

from bench.checkpoint_bench import MIB, Fill
from bench.deployment import deployment, rows
from millrace.base.settings import Settings
from millrace.catalog.collection import CollectionInfo
from millrace.client.database import connect
from millrace.node.ingest.definition import ingest_to_end
from millrace.rpc.discovery import read_record


def restarts(
    folder: Path, *, marks_mib: tuple[int, ...], tails_mib: tuple[int, ...] = (0, 64, 256), repeats: int = 5
) -> list[dict[str, Any]]:
    """Measure each size of the WAL with each tail that is not committed to it; the log keeps everything.

    `first_append_s`: from a client's start after SIGKILL of the log server until an append is acknowledged. It includes
    the process, opening the log, and the chain over the tail (median, least and greatest of `repeats`). `node_s`: the
    streaming node's part in one process, from opening the table until the tail is committed.
    """
    found = []
    with deployment(folder) as (settings, client, collection):
        producer = Fill(client, collection)
        for mark in marks_mib:
            while producer.bytes < mark * MIB:
                producer.add(min(256, mark - producer.bytes // MIB))
                ingest_to_end(settings, client.log)
            before = producer.bytes
            for tail in tails_mib:
                if tail:
                    producer.add(tail)
                times = [_first_append(settings, collection) for _ in range(repeats)]
                start = time.perf_counter()
                ingest_to_end(settings, client.log)
                found.append(
                    {
                        "wal_mib": before // MIB,
                        "tail_mib": tail,
                        "first_append_s": round(statistics.median(times), 3),
                        "first_append_s_min": round(min(times), 3),
                        "first_append_s_max": round(max(times), 3),
                        "node_s": round(time.perf_counter() - start, 3),
                    }
                )
    return found


def _first_append(settings: Settings, collection: CollectionInfo) -> float:
    record = read_record(settings.log_path)
    assert record is not None
    server = psutil.Process(record.pid)
    os.kill(record.pid, signal.SIGKILL)
    psutil.wait_procs([server], timeout=30)
    start = time.perf_counter()
    with connect(settings=settings) as db, db.new_producer() as producer:
        producer.insert(collection, rows(1 << 40, len(collection.vchannels) * 8))  # some for each PChannel
        return time.perf_counter() - start
