"""Clients against the disk: Arrow batches of a DataFrame through a producer to the durable embedded log, and small appends gathered.

The baseline is the disk's own write limit for a naive appender, measured in the same run: write + fdatasync of a growing file,
in entries of the producer's size. MB are 10**6 bytes of rows. The server is a process of its own, as in a deployment, and it judges
every row before the producer's call returns.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from bench.deployment import deployment, rows
from bench.log_bench import Ratio, pairs, plain_append
from millrace.client.produce.batch_appender import BatchLimits
from millrace.client.produce.rows import ENTRY_BYTES

MIB = 1 << 20
FRAME_ROWS = 65_536


@dataclass(frozen=True)
class SmallAppends:
    """Calls of one row each, gathered: how many a second, and how many messages they became."""

    calls: int
    per_s: float
    messages: int


def arrow_batches(
    folder: Path, *, row_bytes: int = 1000, total: int = 1024 * MIB, count: int = 7, pchannels: int = 2
) -> Ratio:
    """MB/s of `insert` of a stream of Arrow batches over `pchannels`, against the disk in interleaved pairs."""
    folder.mkdir(parents=True, exist_ok=True)
    with deployment(folder / "data", pchannels=pchannels) as (_, client, collection):
        frame_rows = max(1, min(FRAME_ROWS, 64 * MIB // row_bytes))
        batches = rows(0, frame_rows, size=row_bytes).combine_chunks().to_batches()
        size = sum(batch.nbytes for batch in batches)
        times = max(1, total // size)
        producer = client.new_producer()

        def subject() -> float:
            stream = pa.RecordBatchReader.from_batches(batches[0].schema, iter(batches * times))
            start = time.perf_counter()
            written = producer.insert(collection, stream)
            assert written.rows == times * frame_rows
            return times * size / (time.perf_counter() - start) / 1e6

        subject()  # what the first append loads is loaded

        def baseline() -> float:
            return plain_append(folder, batch_bytes=ENTRY_BYTES, total=times * size)

        return pairs(
            f"DataFrame of {row_bytes} B rows to the log, {pchannels} PChannels", "MB/s", subject, baseline, count
        )


def small_appends(folder: Path, *, calls: int = 20_000) -> SmallAppends:
    """Calls of one row through a BatchAppender, each with a future of its own."""
    with deployment(folder / "small") as (_, client, collection):
        pieces = [rows(number, 1, size=100) for number in range(calls)]
        with client.new_producer().batch(limits=BatchLimits()) as batch:
            start = time.perf_counter()
            futures = [batch.insert(collection, piece) for piece in pieces]
            batch.flush()
            seconds = time.perf_counter() - start
        messages = {each.message_id for future in futures for each in future.result().results}
        return SmallAppends(calls, round(calls / seconds), len(messages))
