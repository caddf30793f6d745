"""What a commit to ``wal`` costs as the table grows: p50 around commit 1,000 against p50 around commit 20,000."""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from bench.deployment import SCHEMA
from millrace.message import builders
from millrace.message.ids import LogId
from millrace.message.log_entries import ENTRY_SCHEMA, LogEntries
from millrace.message.wire.encode import encode_entry
from millrace.node.ingest.committer import WalCommitter
from millrace.node.ingest.ingester import IngestReport
from millrace.node.ingest.wal_writer import WalRangeWriter
from millrace.tables.wal.table import WalTable
from millrace.wal.chain import Chain
from millrace.wal.state import ChannelState

WINDOW = 200


def commits(folder: Path, *, marks: tuple[int, ...] = (1000, 20_000)) -> dict[str, Any]:
    """Return p50 and p99 of a commit in ms, over the 200 commits before each of `marks`.

    Compaction and checkpoints run as always. `restart_ms` is the time, at each mark, for opening the table and reading
    position and state.
    """
    shutil.rmtree(folder, ignore_errors=True)
    committer = WalCommitter(WalTable.create(folder / "wal"))
    chain, state = Chain(), ChannelState.new("p0")
    vchannel = "p0_1v0"
    head = [
        builders.term_opening(term=1, chain_version=1, config={}),
        builders.create_collection(
            "c", SCHEMA, vchannel=vchannel, vchannels=[vchannel], collection_id=1, partitions={"all": 1}, term=1
        ),
    ]
    body = pa.record_batch([pa.array([1]), pa.array([b"x" * 1000])], schema=SCHEMA.arrow())
    insert = builders.insert(body, vchannel=vchannel, collection_id=1, partition_id=1, term=1)
    seconds: list[float] = []
    restarts: dict[int, float] = {}
    started = time.perf_counter()
    for number in range(1, max(marks) + 1):
        value = encode_entry(head if number == 1 else [insert] * 10)
        batch = pa.RecordBatch.from_arrays(
            [
                pa.array([0], pa.int64()),
                pa.array([number], pa.int64()),
                pa.array([1_750_000_000_000 + number * 300], pa.int64()),
                pa.array([value], pa.large_binary()),
            ],
            schema=ENTRY_SCHEMA,
        )
        outcome = chain.process(state, LogEntries(batch, LogId(0, number + 1)))
        base = committer.table.position("p0")
        writer = WalRangeWriter(Path(committer.table.uri), "p0")
        writer.add(outcome)
        actions = writer.finish(outcome.state, base)
        report = IngestReport(
            pchannel="p0",
            base_commits=base.commits,
            base_tick=base.last_tick,
            last_tick=outcome.state.last_tick,
            position=outcome.state.position,
            totals=writer.totals,
            actions=tuple(actions),
            replaced_states=writer.replaced_states,
        )
        seconds.append(committer.commit([report]).seconds)
        state = outcome.state
        if number in marks:
            restarts[number] = _restart_ms(folder / "wal")
    result: dict[str, Any] = {"total_s": round(time.perf_counter() - started, 1)}
    for mark in marks:
        p50, p99 = np.percentile(seconds[mark - WINDOW : mark], [50, 99])
        result[f"at_{mark}"] = {
            "p50_ms": round(float(p50) * 1e3, 2),
            "p99_ms": round(float(p99) * 1e3, 2),
            "restart_ms": restarts[mark],
        }
    first, last = (result[f"at_{mark}"]["p50_ms"] for mark in (marks[0], marks[-1]))
    result["ratio_p50"] = round(last / first, 2)
    shutil.rmtree(folder, ignore_errors=True)
    return result


def _restart_ms(path: Path) -> float:
    """Return the ms that a new host needs to open the table and find position and state (median of 5)."""
    spent = []
    for _ in range(5):
        start = time.perf_counter()
        position = WalTable.open(path).position("p0")
        assert position.state is not None
        spent.append(time.perf_counter() - start)
    return round(sorted(spent)[2] * 1e3, 2)
