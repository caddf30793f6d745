"""Leased tasks of a work queue on the wire: a batch for each schema, as an Arrow stream, and the names as metadata."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import pyarrow as pa

from millrace.rpc.wire import to_json

LONGEST_LEASE: Final = 12 * 3600.0
"""Seconds that a task's lease, or the delay of one that is given back, lasts at most."""
TASKS_SCHEMA: Final = pa.schema([pa.field("rows", pa.large_binary(), nullable=False)])


class WireTasks(NamedTuple):
    """Tasks of one schema, as columns."""

    rows: pa.RecordBatch
    lanes: Sequence[tuple[str, int]]
    """VChannels with the number of rows of each, in order."""
    ticks: Sequence[int]
    ordinals: Sequence[int]
    deliveries: Sequence[int]


class LeasedTasks(NamedTuple):
    """One answer of the server."""

    number: int
    """Number of the answer, which the next call names."""
    parts: Sequence[WireTasks]
    lanes: int
    """VChannels of the queue that the server dispatches."""
    reason: str
    """Why it dispatches none, "" if it does."""
    session: int = 0
    """Number of the session in which the consumer waits for tasks now; 0 if it waits in none."""


class TaskNews(NamedTuple):
    """One answer to a call that waits for tasks of all consumers of a session."""

    number: int
    """Of the answer; the next call names it."""
    session: int
    """Number of the session; 0 if the server does not know it."""
    ready: Sequence[tuple[str, str]]
    """Groups and consumers that may have tasks now, and wait in the session no more."""


def encode_tasks(
    rows: pa.RecordBatch,
    lanes: Sequence[tuple[str, int]],
    ticks: Sequence[int],
    ordinals: Sequence[int],
    deliveries: Sequence[int],
) -> tuple[pa.RecordBatch, bytes]:
    """Return tasks of one schema as a batch of TASKS_SCHEMA with metadata."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, rows.schema) as writer:
        writer.write_batch(rows)
    said = {"lanes": lanes, "ticks": ticks, "ordinals": ordinals, "deliveries": deliveries}
    payload = pa.array([memoryview(sink.getvalue())], pa.large_binary())
    return pa.RecordBatch.from_arrays([payload], schema=TASKS_SCHEMA), to_json(said)


def decode_tasks(batch: pa.RecordBatch, said: dict[str, Any]) -> WireTasks:
    """Return the tasks of a batch that :func:`encode_tasks` made."""
    with pa.ipc.open_stream(batch.column(0)[0].as_buffer()) as stream:
        rows = stream.read_next_batch()
    lanes = [(str(lane), int(count)) for lane, count in said["lanes"]]
    return WireTasks(rows, lanes, said["ticks"], said["ordinals"], said["deliveries"])
