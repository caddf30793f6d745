"""Repair of a table's log whose end a power loss tore, so that the table opens.

Writers sync the log only afterwards, and names can become durable before bytes. So the newest commit may be a prefix of
itself, and so may the newest Delta checkpoint. Nobody was told that such a commit succeeded
(:mod:`millrace.storage.commit` syncs it first), so it did not: its bytes are moved aside. A checkpoint holds no data of
its own. It is deleted if the commits since an older checkpoint, or since the first version, say the same. Everything
else that is unreadable is damage, and stays.
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
    """Move torn files aside. Returns whether there were any. Does nothing while a writer commits: for it the log is
    fine.
    """
    try:
        with store.alone() as free:
            return free and (_commit(store) | _checkpoint(store))
    except OSError as error:
        _log.warning("cannot move torn files of the log of %s aside: %s", store.uri, error)
        return False


def _commit(store: TableStore) -> bool:
    newest = max(_commits(store), default=0)
    data = store.read(commit_file(newest))
    if data is None or not _is_beginning(data):
        return False
    aside = f"{LOG_FOLDER}/.torn-{newest:020d}"
    store.delete([aside])
    # Copy and sync before the original is deleted: a crash in between repeats this, and never loses the bytes.
    sink = store.put(aside)
    try:
        sink.write(data)
        sink.sync()
    finally:
        sink.close()
    store.delete([commit_file(newest)])
    _log.warning("%s/%s is torn, probably by a power loss: moved aside as %s", store.uri, commit_file(newest), aside)
    return True


def _is_beginning(data: bytes) -> bool:
    """Return whether the last action is incomplete. Zeros may follow, from blocks that were never written."""
    # A commit is one JSON action per line, written from front to back: only its last line can be torn.
    piece = data.rstrip(b"\0").rpartition(b"\n")[2]
    try:
        json.loads(piece.decode("utf-8", "replace"))
    except json.JSONDecodeError as error:
        # An action with an end but an error before it is damaged, not torn.
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
    # A torn checkpoint may only go if all commits since the previous complete one are there to replace it.
    if not torn or not set(range(base, version_of(torn[0]) + 1)) <= _commits(store):
        return False
    # The pointer goes too, since it names the torn checkpoint. Readers then list the folder.
    store.delete([*torn, LAST_CHECKPOINT_FILE])
    _log.warning("%s: deleted torn checkpoints %s, probably from a power loss", store.uri, torn)
    return True


def _commits(store: TableStore) -> set[int]:
    return {version_of(name) for name in log_files(store) if name.endswith(".json")}


def _is_whole(store: TableStore, name: str) -> bool:
    try:
        pq.ParquetFile(name, filesystem=store.filesystem).close()
    except pa.ArrowException:
        return False
    return True
