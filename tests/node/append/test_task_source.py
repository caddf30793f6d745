"""Where queues read their tasks: decoding by columns gives what the objects of each message give."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import pyarrow as pa
import pytest

from millrace.catalog.collection import CollectionInfo
from millrace.client.consume import batch_decoder
from millrace.client.consume.shared_tail import VisibleRows
from millrace.message import builders
from millrace.message.model import MutableMessage
from millrace.message.wire.encode import encode_entry
from millrace.node.append import task_source as module
from millrace.node.append.queue_lanes import TaskRows
from millrace.node.append.task_source import ScannedTasks
from millrace.wal.scanner import Scanner, VChannelFilter
from tests.node.append.samples import (
    PCHANNEL,
    SCHEMA,
    VCHANNELS,
    insert,
    judged,
    keys_of,
    open_log,
    opening,
    transaction,
)

V0 = VCHANNELS[0]
USERS = CollectionInfo(1, "users", "active", VCHANNELS, (SCHEMA,), {"all": 1}, 2)


def tasks_of(rows: pa.Table, monkeypatch: pytest.MonkeyPatch, *, columns: bool) -> list[tuple[int, dict[str, Any]]]:
    """Return the tasks of visible rows with their ticks."""
    with monkeypatch.context() as patch:
        if not columns:
            patch.setattr(module, "_only_messages", lambda rows: False)
        reader = ScannedTasks(cast(Any, None), V0, lambda number, version: USERS, cast(Any, None))
        found: Sequence[TaskRows] = list(reader._decoded([VisibleRows(rows)]))
    assert all(each.key == "id" for each in found)
    return [pair for each in found for pair in zip(each.ticks.tolist(), each.rows.to_pylist(), strict=True)]


def visible(folder: Path, appended: Sequence[Sequence[MutableMessage]]) -> pa.Table:
    with open_log(folder, PCHANNEL) as service:
        service.open(PCHANNEL).append([*opening(), *(encode_entry(list(each)) for each in appended)])
        return Scanner(filters=[VChannelFilter({V0})]).push(judged(service).messages)


def test_tasks_by_columns_are_those_by_objects(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_PIECE_BYTES", 2000)
    keys = keys_of(V0, 60)
    many = builders.insert(
        pa.record_batch([pa.array(keys[40:50]), pa.array([b"many"] * 10)], schema=SCHEMA.arrow()),
        vchannel=V0, collection_id=1, partition_id=1, term=1,
    )  # fmt: skip
    large = insert(keys[50], body=bytes(batch_decoder.MAX_BATCHED_PAYLOAD_BYTES + 1))
    appended = [*([insert(key)] for key in keys[:40]), [many], [insert(keys[51])], [large], [insert(keys[52])]]
    rows = visible(tmp_path, appended)
    found = tasks_of(rows, monkeypatch, columns=True)
    assert [row["id"] for _, row in found] == [*keys[:51][:40], *keys[40:50], keys[51], keys[50], keys[52]]
    assert found == tasks_of(rows, monkeypatch, columns=False)


def test_transactions_are_read_by_objects(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = keys_of(V0, 6)
    rows = visible(tmp_path, [[insert(keys[0])], transaction(5, keys[1:4], vchannel=V0), [insert(keys[4])]])
    found = tasks_of(rows, monkeypatch, columns=True)
    assert found == tasks_of(rows, monkeypatch, columns=False)
    assert len({tick for tick, _ in found}) == 3, "a transaction is one unit"
