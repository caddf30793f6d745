"""A day of few rows: 10 rows a second, a commit after each `wal_linger`, a flush a minute, as fast as this machine
makes them.

Time is compressed: what a deployment does by the clock (the removal of replaced files) is scaled by the measured time
of a commit. What is counted (files, bytes, bytes written) does not depend on it.
"""

from __future__ import annotations

import time
from collections import Counter
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
from prometheus_client import CollectorRegistry

from bench.deployment import SCHEMA
from bench.growth.measure import p50, usage
from millrace.base.metrics import Metrics
from millrace.base.settings import Settings
from millrace.log.rocksmq.service import RocksMQ
from millrace.message import builders
from millrace.message.types import MessageType
from millrace.message.wire.encode import encode_columns, encode_entry
from millrace.node.flush.definition import FlushLoop
from millrace.node.ingest.committer import RETAINED_STATES, WalCommitter
from millrace.node.ingest.definition import IngestLoop
from millrace.node.range_loop.definition import run_range
from millrace.node.range_loop.schedule import START, RangeSchedule, StallBackoff
from millrace.node.retention.file_removal import DeploymentFileRemover
from millrace.tables.read.arrow import read_arrow
from millrace.tables.wal.table import WalTable
from millrace.wal.chain import CHAIN_VERSION

COMMIT_SECONDS: Final = 3.0
"""The default of `wal_linger`."""
FLUSH_SECONDS: Final = 60.0
ROWS: Final = 30
"""Rows of a commit."""
ROW_BYTES: Final = 108
PCHANNEL: Final = "dml_0"
VCHANNEL: Final = "dml_0_1v0"
WARM_UP: Final = 100
"""Commits that tell how long one takes here."""


def trickle(folder: Path, *, hours: float) -> dict[str, Any]:
    """Make `hours` of such a deployment. Return files and bytes on disk at a tenth of the time and at its end, the
    milliseconds of a commit and a read then, and the bytes written for each byte of the rows.
    """
    settings = Settings(data_dir=folder, cache_dir=Settings.load().cache_dir, log_file_bytes=16 << 20, wal_linger=0.0)
    commits = int(hours * 3600 / COMMIT_SECONDS)
    found: dict[str, Any] = {"hours": hours, "commits": commits, "rows": commits * ROWS}
    with closing(RocksMQ(settings.log_path)) as service:
        node = _Node(settings, service)
        before = _written()
        spent: list[float] = []
        for number in range(commits):
            begun = time.perf_counter()
            node.commit(number)
            spent.append(time.perf_counter() - begun)
            if (number + 1) % int(FLUSH_SECONDS / COMMIT_SECONDS) == 0:
                node.flush()
            if number + 1 == WARM_UP:
                node.compress_time(sum(spent) / WARM_UP / COMMIT_SECONDS)
            if number + 1 in (commits // 10, commits):
                node.flush()
                name = "end" if number + 1 == commits else "tenth"
                found[name] = _look(settings) | {"commit_ms": round(float(np.median(spent[-200:])) * 1000, 1)}
        node.close()
    found["written_per_row_byte"] = round((_written() - before) / (commits * ROWS * ROW_BYTES), 1)
    return found


class _Node:
    """Log and streaming node in this process."""

    def __init__(self, settings: Settings, service: RocksMQ) -> None:
        service.create(PCHANNEL)
        self._log = service.open(PCHANNEL)
        opening = builders.term_opening(term=1, chain_version=CHAIN_VERSION, config={})
        made = builders.create_collection(
            "trickle", SCHEMA, vchannel=VCHANNEL, vchannels=[VCHANNEL], collection_id=1, partitions={"all": 1}, term=1
        )
        self._log.append([encode_entry([opening]), encode_entry([made])])
        body = pa.record_batch([pa.array([1]), pa.array([b"x" * 100])], schema=SCHEMA.arrow())
        self._payload = builders.insert(body, vchannel=VCHANNEL, collection_id=1, partition_id=1, term=1).payload
        table = WalTable.create(settings.wal_uri)
        self._loop = IngestLoop(settings, service, table)
        self._settings = settings
        self._table = table
        self._committer = WalCommitter(table)
        self._schedule = RangeSchedule(self._loop.planner(), stalls=StallBackoff(sleep=lambda seconds: None))
        self._offset = START
        self._start_flusher(settings)

    def _start_flusher(self, settings: Settings) -> None:
        metrics = Metrics(registry=CollectorRegistry())
        self._flushing = FlushLoop(settings)
        self._flusher = self._flushing.planner()
        self._flush_committer, self._record = self._flushing.committer(metrics), self._flushing.watch(metrics)

    def compress_time(self, factor: float) -> None:
        """Let replaced files go after `factor` times their retention."""
        retention = factor * self._settings.file_retention
        remover = DeploymentFileRemover(self._settings, keep=RETAINED_STATES, retention=retention)
        self._committer = WalCommitter(self._table, keep_commits=RETAINED_STATES, remover=remover)
        self._start_flusher(replace(self._settings, file_retention=max(60.0, retention)))  # the setting's least

    def commit(self, number: int) -> None:
        entry = encode_columns(
            type=MessageType.INSERT,
            vchannel=VCHANNEL,
            payloads=[self._payload] * ROWS,
            term=1,
            collection_id=1,
            partition_id=1,
            schema_version=1,
            rows=1,
            producer_id=1,
            epoch=1,
            sequence=np.arange(number * ROWS, (number + 1) * ROWS),
        )
        self._log.append([entry])
        following = self._schedule.next_offset(self._offset, max_bytes=self._loop.max_bytes)
        reports = [run_range(self._loop, plan) for plan in self._schedule.plan(following)]
        result = self._committer.commit(reports)  # type: ignore[arg-type]
        assert len(result.committed) == 1
        self._offset = following

    def flush(self) -> None:
        """Flush all there is, with the folds and the removals of a flusher that keeps running."""
        reports = [self._flushing.run(plan) for plan in self._flusher.plan(self._flusher.ends(), max_bytes=1 << 30)]
        result = self._flush_committer.commit(reports)
        assert not result.fenced
        self._record(result.committed)

    def close(self) -> None:
        self._schedule.close()


def _look(settings: Settings) -> dict[str, Any]:
    """Return what there is on disk, by table, and what a read costs."""
    by_table = Counter[str]()
    size = 0
    for name in ("wal", "tables", "deletes", "checkpoints", "segments"):
        files, bytes_ = usage(Path(settings.table_uri(name)))
        by_table[name], size = files, size + bytes_
    return {
        "files": sum(by_table.values()),
        "files_by_table": dict(by_table),
        "mib": round(size / (1 << 20), 1),
        "live_wal_files": len(WalTable.open(settings.wal_uri).table.live_files()),
        "read_ms": p50(lambda number: read_arrow(settings, 1, deadline=30.0), 5),
    }


def _written() -> int:
    """Return the bytes that this process has written."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.split(":")[1]) for line in lines if line.startswith("wchar"))
