"""The log of a Delta table: its entries, the files that a version needs, and which files may be removed.

delta-rs lists the whole log whenever it opens or refreshes a table, so each old entry makes every later commit slower
(0.8 µs here). :func:`trim_log` removes entries that no checkpoint needs. That breaks an assumption of optimistic
commits: that the name of a version stays taken. A suspended writer, after others committed and trimmed, would find the
name after its own version free again, and its commit would succeed without being part of the table. So each commit is
made under the store's lease and first checks that its version still exists. Trimming needs the lease exclusively, and
does nothing if it cannot get it at once. A store without leases keeps each entry for its ``log_seconds`` instead, and a
commit that took half as long counts as one whose outcome is unknown.
"""

from __future__ import annotations

import itertools
import json
import math
import re
import time
from collections.abc import Iterator
from typing import IO, Any, Final
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.parquet as pq

from millrace.base.failpoint import hit
from millrace.storage.parquet_file import FileAction
from millrace.storage.store import TableStore

LOG_FOLDER: Final = "_delta_log"
LAST_CHECKPOINT_FILE: Final = f"{LOG_FOLDER}/_last_checkpoint"
"""Hint at the newest Delta checkpoint. A log is valid without it, and with one that cannot be read."""
COMMIT_INFO_KEY: Final = "millrace"
"""Key in a commit's info that holds the entries of its parts."""
CLOSED: Final = "millrace.moved"
"""Writer feature of a table that was moved elsewhere (millrace.storage.closing): nobody writes it any more."""

_ENTRY: Final = re.compile(r"(\d{20})\..+")
_CHECKPOINT: Final = re.compile(r"(\d{20})\.checkpoint\.parquet")
_NAMING: Final = ("add", "remove", "cdc", "sidecar")
"""Actions that name a file."""


def commit_file(version: int) -> str:
    """Return the file of a version's commit, relative to the table."""
    return f"{LOG_FOLDER}/{version:020d}.json"


def is_log_file(name: str) -> bool:
    """Return whether the path is part of some table's log."""
    return f"/{LOG_FOLDER}/" in f"/{name}"


def last_checkpoint_version(store: TableStore) -> int:
    """Return the version of the newest Delta checkpoint; 0 if there is none or the hint is torn."""
    data = store.read(LAST_CHECKPOINT_FILE)
    try:
        return 0 if data is None else int(json.loads(data)["version"])
    except (ValueError, LookupError, TypeError):
        return 0


def log_files(store: TableStore) -> list[str]:
    """Return the names of all commits and checkpoints, relative to the table, oldest first."""
    return [f"{LOG_FOLDER}/{name}" for name in store.list(LOG_FOLDER) if _ENTRY.fullmatch(name)]


def log_files_of_version(store: TableStore, version: int) -> list[str]:
    """Return the log files that define `version`: the newest checkpoint up to it and the commits after that.

    Excludes the hint at the newest checkpoint. Each new checkpoint replaces it, so a copy made a moment later could
    point past the version; a log is valid without it.
    """
    names = [name for name in log_files(store) if version_of(name) <= version]
    start = max((version_of(name) for name in names if is_checkpoint(name)), default=0)
    return [name for name in names if version_of(name) >= start]


def read_actions(store: TableStore, version: int) -> list[dict[str, Any]] | None:
    """Return the actions of one commit; None if the log does not have it."""
    data = store.read(commit_file(version))
    return None if data is None else [json.loads(line) for line in data.splitlines()]


def read_app_versions(store: TableStore, version: int) -> dict[str, int] | None:
    """Return the app transactions of one commit; None if the log does not have it."""
    data = store.read(commit_file(version))
    if data is None:
        return None
    moves = (json.loads(line).get("txn") for line in data.splitlines() if b'"txn"' in line)
    return {move["appId"]: int(move["version"]) for move in moves if move is not None}


def read_commit_infos(store: TableStore) -> Iterator[dict[str, Any]]:
    """Yield the value of COMMIT_INFO_KEY of each commit in the log, newest first; empty if a commit has none."""
    for name in reversed(log_files(store)):
        if name.endswith(".json"):
            for action in read_actions(store, version_of(name)) or ():
                said = action.get("commitInfo", {}).get(COMMIT_INFO_KEY, {})
                yield json.loads(said) if isinstance(said, str) else said


def added_files(store: TableStore) -> dict[str, FileAction]:
    """Return, by name, each file that a commit in the log added."""
    found = {}
    for name in log_files(store):
        for action in (read_actions(store, version_of(name)) or ()) if name.endswith(".json") else ():
            add = action.get("add")
            if add is not None:
                rows = json.loads(add["stats"])["numRecords"]
                values = {column: str(value) for column, value in add["partitionValues"].items()}
                path = unquote(add["path"])
                found[path] = FileAction(path, add["size"], rows, values, add["stats"], add["modificationTime"])
    return found


def replaced_files(store: TableStore, version: int) -> tuple[int, list[str]] | None:
    """Return when a commit was made, in Unix milliseconds, and the table's own files that it removed.

    None if the log does not have it. Files of another table, which a shallow clone names, are left out.
    """
    actions = read_actions(store, version)
    if actions is None:
        return None
    removes = [action["remove"] for action in actions if "remove" in action]
    times = [int(each.get("deletionTimestamp") or 0) for each in removes]
    times += [int(action["commitInfo"].get("timestamp") or 0) for action in actions if "commitInfo" in action]
    return max(times, default=0), [name for each in removes if _is_own(name := unquote(each["path"]))]


def _is_own(name: str) -> bool:
    """Return whether a path of the log lies in the table's folder, outside of its log."""
    return "://" not in name and not name.startswith("/") and ".." not in name.split("/") and not is_log_file(name)


def first_commit(store: TableStore) -> int:
    """Return the oldest version whose commit the log still has; 0 if there is none."""
    return next((version_of(name) for name in log_files(store) if name.endswith(".json")), 0)


def referenced_files(name: str, file: IO[bytes]) -> Iterator[object]:
    """Yield the paths that a file of a log, a commit or a checkpoint, names.

    Yields None for a deletion vector, which may be anywhere; no table of Millrace has one.
    """
    if name.endswith(".parquet"):
        yield from _named_by_checkpoint(file)
        return
    for line in file.read().splitlines():
        action = json.loads(line)
        for kind in _NAMING:
            named: dict[str, Any] | None = action.get(kind)
            if named is not None:
                yield named.get("path")
                if named.get("deletionVector") is not None:
                    yield None


def _named_by_checkpoint(file: IO[bytes]) -> Iterator[object]:
    checkpoint = pq.ParquetFile(file)
    for kind in _NAMING:
        fields = checkpoint.schema_arrow.field(kind).type if kind in checkpoint.schema_arrow.names else pa.struct([])
        wanted = [each for each in ("path", "deletionVector") if fields.get_field_index(each) >= 0]
        for each in wanted:
            for batch in checkpoint.iter_batches(columns=[f"{kind}.{each}"]):
                (column,) = batch.column(0).flatten()
                for value in column.drop_null().to_pylist():
                    yield value if each == "path" else None


def trim_log(store: TableStore, *, keep: int, keep_from: int | None = None) -> int:
    """Remove entries before the newest checkpoint that at least `keep` versions follow. Returns the number of removed
    entries.

    Entries from the version `keep_from` on stay. Removes the oldest first, so that a kill leaves a log without gaps.
    Does nothing while another writer commits.
    """
    with store.alone() as free:
        if free:
            return _trim(store, keep, keep_from)
    return _trim(store, keep, keep_from, age=store.log_seconds) if store.log_seconds < math.inf else 0


def boot_seconds() -> float:
    """Return the seconds since boot, which go on while the machine is suspended."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def _trim(store: TableStore, keep: int, keep_from: int | None, *, age: float = 0.0) -> int:
    names = log_files(store)
    newest = max((version_of(name) for name in names if name.endswith(".json")), default=0)
    last = newest - keep if keep_from is None else min(newest - keep, keep_from)
    bases = [name for name in names if is_checkpoint(name) and version_of(name) <= last]
    if not bases:
        return 0
    doomed = [name for name in names if version_of(name) < version_of(bases[-1])]
    if doomed and age:
        old = {f"{LOG_FOLDER}/{name}" for name in store.list(LOG_FOLDER, age=age)}
        doomed = list(itertools.takewhile(old.__contains__, doomed))
    if doomed:
        # The checkpoint that replaces the entries must be durable before they are removed.
        store.sync([bases[-1]])
    for name in doomed:
        store.delete([name])
        hit("trim.removed")
    return len(doomed)


def checkpoint_file(version: int) -> str:
    """Return the file of the Delta checkpoint at a version, relative to the table."""
    return f"{LOG_FOLDER}/{version:020d}.checkpoint.parquet"


def version_of(name: str) -> int:
    """Return the version of a commit or checkpoint file."""
    return int(name.rpartition("/")[2][:20])


def is_checkpoint(name: str) -> bool:
    """Return whether a log file is a Delta checkpoint."""
    return _CHECKPOINT.fullmatch(name.rpartition("/")[2]) is not None
