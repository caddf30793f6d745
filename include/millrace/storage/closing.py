"""Closing a table: no writer commits to it any more, and every reader still reads it.

The commit that closes a table adds the writer feature CLOSED to its protocol, by put-if-absent, as any other commit. So
each commit is before it, and part of what the table held when it was closed, or fails: Millrace's committers then raise
TablesMoved, and delta-rs and Spark refuse a feature that they do not know. That also holds for a writer that was
suspended meanwhile, on any machine. What the table holds is the version before.

The copy of a closed table is made without that commit. :func:`reopen_table` takes it back.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

from millrace.base.errors import TablesMoved, TableUnavailable
from millrace.storage.delta_log import CLOSED, boot_seconds, commit_file, read_actions
from millrace.storage.published import PublishedTable
from millrace.storage.store import TableStore, conditional, store_at
from millrace.storage.table import open_table

MOVED_MARK: Final = "_moved.json"
"""File at the place of the tables from the moment on in which a move closes them. It says where they go."""
_TRIES: Final = 20
_IMPLIED: Final = (
    (2, ("appendOnly", "invariants")),
    (3, ("checkConstraints",)),
    (4, ("changeDataFeed", "generatedColumns")),
    (5, ("columnMapping",)),
    (6, ("identityColumns",)),
)
"""Features that a protocol's writer version implies. From version 7 on, the protocol lists them."""


def check_not_moved(root: str) -> None:
    """Raise TablesMoved if the tables below `root` are closed.

    For a folder that is not a table, or a table that was just created: check after taking it, and before using it.
    Costs a request.
    """
    if store_at(root).size(MOVED_MARK) is not None:
        raise TablesMoved(f"the tables of {root} were moved to another place: this continues there when started again")


def close_table(store: TableStore, *, published: bool) -> int | None:
    """Close the table, unless it is, and return its last version before that; None if there is no table.

    `published`: whether it is a published table. Raises TableUnavailable, StoreCannotPublish.
    """
    return _change(store, published, closed=True)


def reopen_table(store: TableStore, *, published: bool) -> int | None:
    """Let writers commit again. Returns the table's version then; None if there is no table."""
    return _change(store, published, closed=False)


def _change(store: TableStore, published: bool, *, closed: bool) -> int | None:
    target = conditional(store)
    for _ in range(_TRIES):
        with store.lease():  # the name after a version that is in the log is free, or taken for good
            found = _protocol(store, published)
            if found is None:
                return None
            version, protocol = found
            features = list(protocol.get("writerFeatures") or ())
            if (CLOSED in features) is closed:
                return version - 1 if closed else version
            begun = boot_seconds()
            actions = _actions(store, version, protocol, closed=closed)
            try:
                taken = not target.put_if_absent(commit_file(version + 1), actions)
            except OSError:
                continue  # whether it is there shows when it is looked at again
            if boot_seconds() - begun > store.log_seconds / 2:
                continue
            if not taken:
                store.sync([commit_file(version + 1)])
    raise TableUnavailable(f"other writers kept {store.uri} busy, or it accepts no commit: run this again")


def _protocol(store: TableStore, published: bool) -> tuple[int, Mapping[str, Any]] | None:
    """Return the newest version and its protocol as the log has it, or None if there is no table."""
    if published:
        table = PublishedTable.open(store)
        return None if table is None else (table.version, table.protocol)
    handle = open_table(store.uri)
    if handle is None:
        return None
    handle.refresh()
    found = handle.delta.protocol()
    protocol: dict[str, Any] = {
        "minReaderVersion": found.min_reader_version,
        "minWriterVersion": found.min_writer_version,
    }
    if found.writer_features is not None:
        protocol["writerFeatures"] = list(found.writer_features)
    if found.reader_features is not None:
        protocol["readerFeatures"] = list(found.reader_features)
    return handle.version, protocol


def _actions(store: TableStore, version: int, protocol: Mapping[str, Any], *, closed: bool) -> bytes:
    now = int(time.time() * 1000)
    info: dict[str, Any] = {"timestamp": now, "operation": "CLOSE" if closed else "REOPEN", "operationParameters": {}}
    before = [each["commitInfo"] for each in read_actions(store, version) or () if "commitInfo" in each]
    stamp = next((each["inCommitTimestamp"] for each in before if each.get("inCommitTimestamp") is not None), None)
    if stamp is not None:  # a feature of published tables, which requires it of each commit
        # Of the version before, not of the clock: the next publish has the time of its tick.
        info = {"inCommitTimestamp": int(stamp) + 1, **info}
        info |= {name: value for each in before for name, value in each.items() if name == "millrace"}
    lines: Sequence[Mapping[str, Any]] = [{"commitInfo": info}, {"protocol": _with(protocol, closed=closed)}]
    return ("\n".join(json.dumps(each) for each in lines) + "\n").encode()


def _with(protocol: Mapping[str, Any], *, closed: bool) -> dict[str, Any]:
    listed = protocol.get("writerFeatures")
    writer = int(protocol["minWriterVersion"])
    if listed is None:
        listed = [name for least, names in _IMPLIED if least <= writer for name in names]
    features = [name for name in listed if name != CLOSED]
    return {**protocol, "minWriterVersion": 7, "writerFeatures": [*features, CLOSED] if closed else features}
