"""The log of a published table as it grows: a commit, a refresh and an opening at several numbers of live files.

Each commit adds one file and masks rows of one live file, as a publish of a small change does. Baselines of the same
run: the two synced files that a commit writes, and a commit of one file by delta-rs to a table without vectors.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from deltalake import CommitProperties
from deltalake.transaction import AddAction

from millrace.storage.local import LocalStore
from millrace.storage.published import AddedFile, PublishedChange, PublishedTable
from millrace.storage.table import NO_COMMIT_HOOKS, LogMaintenance, create_table

SCHEMA = pa.schema([("id", pa.int64()), ("text", pa.string())])
STATS = '{"numRecords": 100000, "minValues": {"id": 1}, "maxValues": {"id": 100000}, "nullCount": {"id": 0}}'
ROWS = 100_000
MASKED = 100
"""Rows that each commit masks."""


def commits(folder: Path, *, files: int, times: int = 60) -> dict[str, Any]:
    """Return medians in ms at `files` live files, of `times` commits each. No commit includes a Delta checkpoint."""
    shutil.rmtree(folder, ignore_errors=True)
    store = LocalStore(folder / "published")
    table = PublishedTable.create(store, SCHEMA, collection_id=1)
    never = LogMaintenance(checkpoint_commits=10**9)
    table.commit(
        PublishedChange(1, 1, add=[_file(number) for number in range(files)]),
        maintenance=LogMaintenance(checkpoint_commits=1),
    )
    draw = np.random.default_rng(0)
    reader = PublishedTable.open(store)
    assert reader is not None
    names = sorted(table.files)

    def commit() -> None:
        path = names[int(draw.integers(len(names)))]
        masked = np.unique(draw.integers(0, ROWS, MASKED))
        added = [_file(files + table.version)]
        table.commit(PublishedChange(table.tick + 1, 1, add=added, mask={path: masked}), maintenance=never)

    found: dict[str, Any] = {"files": files}
    found["commit_ms"], found["refresh_ms"] = _pairs(commit, reader.refresh, times)
    found["open_ms"] = _median(lambda: PublishedTable.open(store), 5)
    delta = create_table(folder / "plain", SCHEMA, partition_by=[]).delta
    delta.create_write_transaction(
        [_action(number) for number in range(files)], mode="append", schema=delta.schema(),
        post_commithook_properties=NO_COMMIT_HOOKS,
    )  # fmt: skip
    delta.create_checkpoint()
    delta = LocalStore(folder / "plain").delta()
    numbers = iter(range(files, files + times + 1))

    def plain() -> None:
        delta.create_write_transaction(
            [_action(next(numbers))], mode="append", schema=delta.schema(),
            commit_properties=CommitProperties(max_commit_retries=0), post_commithook_properties=NO_COMMIT_HOOKS,
        )  # fmt: skip
        delta.update_incremental()

    sizes = [(store.folder / name).stat().st_size for name in _written(table)]

    def raw() -> None:
        for number, size in enumerate(sizes):
            sink = store.put(f"raw/{time.perf_counter_ns()}-{number}")
            sink.write(b"x" * size)
            sink.sync()
            sink.close()

    found["delta_rs_commit_ms"] = _median(plain, times)
    found["two_synced_files_ms"] = _median(raw, times)
    shutil.rmtree(folder, ignore_errors=True)
    return found


def _file(number: int) -> AddedFile:
    return AddedFile(f"_rows/_date=2026-11-26/part-{number:08d}.parquet", 1_000_000, ROWS, STATS)


def _action(number: int) -> AddAction:
    file = asdict(_file(number))
    return AddAction(file["path"], file["size"], {}, 0, True, file["stats"])


def _written(table: PublishedTable) -> list[str]:
    """The files that the newest commit wrote."""
    newest = next(each.vector.file for each in reversed(list(table.files.values())) if each.vector is not None)
    return [newest, f"_delta_log/{table.version:020d}.json"]


def _median(call: Callable[[], object], times: int) -> float:
    spent = []
    for _ in range(times):
        start = time.perf_counter()
        call()
        spent.append(time.perf_counter() - start)
    return round(float(np.median(spent)) * 1e3, 2)


def _pairs(first: Callable[[], object], second: Callable[[], object], times: int) -> tuple[float, float]:
    """Return the medians of two calls that alternate."""
    spent: list[tuple[float, float]] = []
    for _ in range(times):
        start = time.perf_counter()
        first()
        between = time.perf_counter()
        second()
        spent.append((between - start, time.perf_counter() - between))
    one, other = np.median(np.array(spent), axis=0)
    return round(float(one) * 1e3, 2), round(float(other) * 1e3, 2)
