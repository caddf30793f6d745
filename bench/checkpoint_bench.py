"""The operation `checkpoint` (verify by replay, write, sync, truncate) as the WAL before it grows, with equal tails.

No peer does this. The baseline is the same operation on a small WAL in the same run, and for the replay's speed a plain
read of the same log bytes.
"""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from bench.deployment import deployment
from millrace.base.settings import Settings
from millrace.catalog.collection import CollectionInfo
from millrace.client.database import Database
from millrace.log.protocol import Log
from millrace.message.ids import LogId
from millrace.node.flush.definition import flush_to_end
from millrace.node.ingest.definition import ingest_to_end
from millrace.operations.checkpoint.declaration import CheckpointParams
from millrace.operations.checkpoint.run import checkpoint
from millrace.runtime.progress import Progress

MIB = 1 << 20
BODY_BYTES = 1000
FRAME_ROWS = 4000
READ_BYTES = 8 * MIB


def checkpoints(
    folder: Path, *, marks_mib: tuple[int, ...], tail_mib: int = 64, repeats: int = 5
) -> list[dict[str, Any]]:
    """Return medians for each size of the WAL, over `repeats` checkpoints of another, flushed `tail_mib` each.

    `seconds` is the whole operation and `verify_s` its replay of both PChannels. `verify_mb_per_s` are the replayed
    bytes of the log per second, `log_read_mb_per_s` those of only reading them. `rest_s` is everything but the replay:
    the checkpoint's rows, the sync of new files, and the truncation.
    """
    found = []
    with deployment(folder) as (settings, client, collection):
        producer = Fill(client, collection)
        for mark in marks_mib:
            while producer.bytes < mark * MIB:
                _settled(settings, client, producer, min(256, mark - producer.bytes // MIB))
            checkpoint(settings, client.log, CheckpointParams(), Progress())
            found.append(_at_mark(settings, client, producer, tail_mib, repeats))
    return found


class Fill:
    """Inserts of 1 KB rows of random bytes, in frames as a producer that batches sends them."""

    def __init__(self, client: Database, collection: CollectionInfo) -> None:
        self.bytes = 0
        self._producer, self._collection = client.new_producer(), collection
        self._random = np.random.default_rng(1)
        self._offsets = pa.py_buffer(np.arange(0, (FRAME_ROWS + 1) * BODY_BYTES, BODY_BYTES, dtype=np.int32))
        self._next = 0

    def add(self, mib: int) -> None:
        """Append about `mib` MiB."""
        end = self.bytes + mib * MIB
        while self.bytes < end:
            data = pa.py_buffer(self._random.bytes(FRAME_ROWS * BODY_BYTES))
            bodies = pa.Array.from_buffers(pa.binary(), FRAME_ROWS, [None, self._offsets, data])
            ids = pa.array(range(self._next, self._next + FRAME_ROWS))
            self._producer.insert(self._collection, pa.table({"id": ids, "body": bodies}))
            self._next += FRAME_ROWS
            self.bytes += FRAME_ROWS * BODY_BYTES


def _settled(settings: Settings, client: Database, producer: Fill, mib: int) -> None:
    """Add `mib` MiB of rows, and bring them into the WAL and the collection."""
    producer.add(mib)
    ingest_to_end(settings, client.log)
    flush_to_end(settings)


def _at_mark(settings: Settings, client: Database, producer: Fill, tail_mib: int, repeats: int) -> dict[str, Any]:
    before = producer.bytes
    whole, replay, reads, freed = [], [], [], 0
    for _ in range(repeats):
        ends = {name: client.log.open(name).describe().end for name in client.log.names()}
        _settled(settings, client, producer, tail_mib)
        size, seconds = _read(client, ends)
        reads.append(size / seconds / 1e6)
        report = checkpoint(settings, client.log, CheckpointParams(), Progress())
        assert report.ok
        assert all(each.written and each.by_log and each.verified_by == "replayed" for each in report.channels)
        whole.append(report.seconds)
        replay.append((size, sum(each.seconds for each in report.channels)))
        freed += sum(each.freed_bytes for each in report.truncated)
    return {
        "wal_mib": before // MIB,
        "tail_mib": tail_mib,
        "repeats": repeats,
        "seconds": round(statistics.median(whole), 3),
        "seconds_min": min(whole),
        "seconds_max": max(whole),
        "verify_s": round(statistics.median(seconds for _, seconds in replay), 3),
        "verify_mb_per_s": round(statistics.median(size / seconds / 1e6 for size, seconds in replay), 1),
        "rest_s": round(
            statistics.median(total - seconds for total, (_, seconds) in zip(whole, replay, strict=True)), 3
        ),
        "log_read_mb_per_s": round(statistics.median(reads), 1),
        "freed_mib": freed // MIB,
    }


def _read(client: Database, positions: dict[str, LogId]) -> tuple[int, float]:
    """Return the bytes of the log's entries from `positions` on, and the seconds that reading them takes."""
    size, start = 0, time.perf_counter()
    for name, position in positions.items():
        log: Log = client.log.open(name)
        while (entries := log.read(position, max_bytes=READ_BYTES)).batch.num_rows:
            size += entries.batch.column("value").nbytes
            position = entries.next
        log.close()
    return size, time.perf_counter() - start
