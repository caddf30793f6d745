"""Makes a table old: commits that added and replaced files, as a deployment leaves them after months, in seconds.

The commits are real entries of the Delta log with the actions, sizes, statistics and times of a streaming node's or a
flusher's. Each adds files and removes those of the commit before it. The removed files are on disk if they would still
be: `on_disk` says for how many of the newest commits. What is live, and every row, stays as it was.
"""

from __future__ import annotations

import json
import os
import time
import uuid
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from bench.growth.deployment import Grown
from bench.growth.measure import p50, usage
from millrace.observe.observer import Observer
from millrace.storage.commit import partition_values
from millrace.storage.delta_log import commit_file, log_files
from millrace.storage.local import local_path
from millrace.storage.table import LogMaintenance, TableHandle, maintain_log, table_at
from millrace.tables.collections.data_tables import rows_uri
from millrace.tables.read.arrow import read_arrow
from millrace.tables.wal.reader import WalSnapshot
from millrace.tables.wal.table import WalTable

_STATISTICS: Final = json.dumps(
    {"numRecords": 1, "minValues": {"time_tick": 1}, "maxValues": {"time_tick": 1}, "nullCount": {"time_tick": 0}}
)


@dataclass(frozen=True)
class ReplacedFile:
    """A kind of file that each commit adds, and the next one replaces."""

    folder: str
    """Partition folder, relative to the table, with a trailing slash; empty for a table without partitions."""
    size: int
    """Bytes."""


def age(deployment: Grown, *, commits: int, seconds: float) -> None:
    """Give `wal` a history of `commits`, and the tables of the flusher one of half as many."""
    settings = deployment.settings
    day = time.strftime("%Y-%m-%d", time.gmtime())
    node = [
        ReplacedFile(f"kind={kind}/pchannel=dml_0/date={day}/", size)
        for kind, size in (("message", 6_000), ("state", 5_000))
    ]
    age_table(table_at(settings.wal_uri), node, commits=commits, seconds=seconds, on_disk=1_000)
    flusher = {
        settings.checkpoints_uri: ReplacedFile("pchannel=dml_0/", 7_000),
        rows_uri(settings, deployment.wide.id): ReplacedFile(f"_date={day}/", 3_000),
    }
    for uri, file in flusher.items():
        age_table(table_at(uri), [file], commits=commits // 2, seconds=seconds, on_disk=1_000)


def openings(deployment: Grown) -> dict[str, Any]:
    """Measure what a process does when it starts, and what the log's folder of `wal` holds."""
    settings = deployment.settings
    wal = Path(settings.wal_uri)

    def position(_number: int) -> None:
        table = WalTable.open(wal)
        table.positions(table.pchannels())

    def status(_number: int) -> None:
        with closing(Observer(settings)) as observer:
            observer.overview()

    def verify(_number: int) -> None:
        table = WalTable.open(wal)
        snapshot = WalSnapshot(table.table)
        for name in table.pchannels():
            snapshot.verify(name)

    files, size = usage(wal / "_delta_log")
    return {
        "open_ms": p50(position, 5),
        "status_ms": p50(status, 3),
        "verify_ms": p50(verify, 3),
        "read_ms": p50(lambda number: read_arrow(settings, deployment.wide.id, deadline=30.0), 5),
        "log_files": files,
        "log_bytes": size,
        "all_files": usage(wal)[0],
    }


def age_table(
    table: TableHandle,
    files: Sequence[ReplacedFile],
    *,
    commits: int,
    seconds: float,
    on_disk: int = 0,
    keep_commits: int = 1000,
) -> TableHandle:
    """Append `commits` entries to the table's log, the last one now and the first `seconds` before. Return a handle.

    The log is left as the committer leaves it: Delta checkpoints, and the entries of the last `keep_commits` versions.
    The table must be on a local disk, and nobody else may write it.
    """
    folder, first = local_path(table.uri), table.version + 1
    begun = time.time() - seconds
    _backdate(table, int(begun * 1000))
    attempt = uuid.uuid4().hex[:12]
    previous: list[str] = []
    for number in range(commits):
        version = first + number
        if number == commits - keep_commits:
            maintain_log(table_at(table.uri), LogMaintenance(1, keep_commits))
        at = int((begun + seconds * (number + 1) / commits) * 1000)
        names = [f"{each.folder}{attempt}-{version}-{place}.parquet" for place, each in enumerate(files)]
        actions: list[dict[str, Any]] = [
            {
                "add": {
                    "path": name,
                    "partitionValues": partition_values(name),
                    "size": each.size,
                    "modificationTime": at,
                    "dataChange": True,
                    "stats": _STATISTICS,
                }
            }
            for name, each in zip(names, files, strict=True)
        ]
        actions += [_remove(name, at) for name in previous]
        _append(folder, version, at, actions)
        if number >= commits - on_disk:
            for name, each in zip(names, files, strict=True):
                _write(folder / name, each.size, at)
        previous = names
    last = first + commits
    _append(folder, last, int(time.time() * 1000), [_remove(name, int(time.time() * 1000)) for name in previous])
    old = table_at(table.uri)
    maintain_log(old, LogMaintenance(1, keep_commits))
    return table_at(table.uri)


def _backdate(table: TableHandle, at: int) -> None:
    """Let the commits that the log has be no younger than Unix time `at`, in milliseconds."""
    for name in (each for each in log_files(table.store) if each.endswith(".json")):
        path = local_path(table.uri) / name
        actions = [json.loads(line) for line in path.read_text().splitlines()]
        for action in actions:
            for kind, field in (("commitInfo", "timestamp"), ("remove", "deletionTimestamp")):
                if action.get(kind, {}).get(field, 0) > at:
                    action[kind][field] = at
        path.write_text("".join(json.dumps(action, separators=(",", ":")) + "\n" for action in actions))


def _remove(name: str, at: int) -> dict[str, Any]:
    values = partition_values(name)
    removed: dict[str, Any] = {"path": name, "deletionTimestamp": at, "dataChange": True, "extendedFileMetadata": True}
    return {"remove": {**removed, "partitionValues": values, "size": 0}}


def _append(folder: Path, version: int, at: int, actions: Sequence[dict[str, Any]]) -> None:
    info = {"timestamp": at, "operation": "WRITE", "operationParameters": {"mode": "Append"}, "clientVersion": "old"}
    lines = [json.dumps(each, separators=(",", ":")) for each in [*actions, {"commitInfo": info}]]
    path = folder / commit_file(version)
    with path.open("x") as file:
        file.write("\n".join(lines) + "\n")
    os.utime(path, (at / 1000, at / 1000))


def _write(path: Path, size: int, at: int) -> None:
    """Write a file of this size whose content nobody reads: no version that is still in the log's reach has it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"\0" * size)
    os.utime(path, (at / 1000, at / 1000))
