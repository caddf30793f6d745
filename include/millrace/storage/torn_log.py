"""What a power loss leaves at the end of a table's log, and how the table opens all the same.

Whoever writes to a log syncs it only afterwards, and names can be durable before bytes: the newest commit may be a beginning of
itself, and so may the newest Delta checkpoint. Nobody was told that such a commit stands (:mod:`millrace.storage.commit` syncs it
first), so it does not: its bytes are put aside. A checkpoint holds nothing of its own: it goes where the commits say the same from
an older one on, or from the first. All else that does not read is damage, and stays.
"""

from __future__ import annotations

import json
import logging

import pyarrow as pa
import pyarrow.parquet as pq

from millrace.storage.delta_log import (
    LAST_CHECKPOINT_FILE,
    LOG_FOLDER,
    commit_file,
    is_checkpoint,
    log_files,
    version_of,
)
from millrace.storage.store import TableStore

_log = logging.getLogger(__name__)


def quarantine_torn_files(store: TableStore) -> bool:
    """Put aside what is torn; whether anything was. Does nothing while somebody commits: for them the log reads."""
    try:
        with store.alone() as free:
            return free and (_commit(store) | _checkpoint(store))
    except OSError as error:
        _log.warning("nothing that is torn in the log of %s can be put aside: %s", store.uri, error)
        return False


def _commit(store: TableStore) -> bool:
    newest = max(_commits(store), default=0)
    data = store.read(commit_file(newest))
    if data is None or not _is_beginning(data):
        return False
    aside = f"{LOG_FOLDER}/.torn-{newest:020d}"
    store.delete([aside])
    sink = store.put(aside)
    try:
        sink.write(data)
        sink.sync()
    finally:
        sink.close()
    store.delete([commit_file(newest)])
    _log.warning("%s/%s is torn, as a power loss leaves it: put aside as %s", store.uri, commit_file(newest), aside)
    return True


def _is_beginning(data: bytes) -> bool:
    """Whether the last action is but a piece of one; behind it may be zeros, of blocks that were never written."""
    piece = data.rstrip(b"\0").rpartition(b"\n")[2]
    try:
        json.loads(piece.decode("utf-8", "replace"))
    except json.JSONDecodeError as error:
        # What ends as an action does and is wrong before its end is damaged, not torn.
        return not piece.endswith(b"}") or error.pos == len(error.doc) or error.msg.startswith("Unterminated")
    return data.endswith(b"\0")


def _checkpoint(store: TableStore) -> bool:
    checkpoints = sorted(filter(is_checkpoint, log_files(store)), key=version_of, reverse=True)
    torn: list[str] = []
    base = 0
    for name in checkpoints:
        if _is_whole(store, name):
            base = version_of(name) + 1
            break
        torn.append(name)
    if not torn or not set(range(base, version_of(torn[0]) + 1)) <= _commits(store):
        return False
    store.delete([*torn, LAST_CHECKPOINT_FILE])
    _log.warning("%s: %s torn, as a power loss leaves it: the log goes on without", store.uri, torn)
    return True


def _commits(store: TableStore) -> set[int]:
    return {version_of(name) for name in log_files(store) if name.endswith(".json")}


def _is_whole(store: TableStore, name: str) -> bool:
    try:
        pq.ParquetFile(name, filesystem=store.filesystem).close()
    except pa.ArrowException:
        return False
    return True
