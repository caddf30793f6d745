"""WAL rows made by hand: what the tests of writer, committer and table feed in, without log and chain."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from millrace.message.ids import LogId, compose_tick
from millrace.node.ingest.ingester import IngestReport
from millrace.node.ingest.wal_writer import WalRangeWriter
from millrace.tables.wal.table import WalPosition
from millrace.wal.chain import ChainOutcome
from millrace.wal.schema import ROW_SCHEMA
from millrace.wal.state import ChannelState

NOON = 1_750_000_000_000
"""2025-06-15 15:06:40 UTC in Unix ms."""


def wal_rows(rows: Sequence[dict[str, Any]]) -> pa.RecordBatch:
    """A batch of ROW_SCHEMA with `rows`; what a row leaves out is 0, "" or null."""
    columns = []
    for item in ROW_SCHEMA:
        kind = item.type.value_type if pa.types.is_dictionary(item.type) else item.type
        default = None if item.nullable else "" if pa.types.is_string(kind) else 0
        columns.append(pa.array([row.get(item.name, default) for row in rows], kind).cast(item.type))
    return pa.RecordBatch.from_arrays(columns, schema=ROW_SCHEMA)


def message(entry: int, *, physical_ms: int = NOON, payload: bytes | None = None) -> dict[str, Any]:
    """An insert that the log's entry `entry` held."""
    return {
        "time_tick": compose_tick(physical_ms, entry),
        "entry": entry,
        "physical_ms": physical_ms,
        "type": "INSERT",
        "vchannel": "p0_1v0",
        "term": 1,
        "rows": 1,
        "payload": payload if payload is not None else b"payload %d" % entry,
    }


def rejection(entry: int, *, tick: int = 0, physical_ms: int = NOON) -> dict[str, Any]:
    """A rejected message of entry `entry`."""
    return {
        "time_tick": tick,
        "entry": entry,
        "physical_ms": physical_ms,
        "type": "UNDEFINED",
        "reason": "MALFORMED",
        "detail": "no value of the wire form",
        "payload": b"?",
    }


def outcome(
    base: WalPosition,
    *,
    messages: Sequence[dict[str, Any]] = (),
    rejections: Sequence[dict[str, Any]] = (),
) -> ChainOutcome:
    """What a chain would say that made these rows of the entries behind `base`."""
    state = (base.state or ChannelState.new(base.pchannel)).copy()
    rows = [*messages, *rejections]
    if messages:
        state.last_tick = messages[-1]["time_tick"]
    state.position = LogId(0, max(row["entry"] for row in rows) + 1)
    return ChainOutcome(state, lambda: (wal_rows(messages), wal_rows(rejections)))


def write_range(table: Path | str, base: WalPosition, made: ChainOutcome) -> IngestReport:
    """One attempt at a range: files on disk and the report that a task would hand to the committer."""
    writer = WalRangeWriter(table, base.pchannel)
    writer.add(made)
    actions = writer.finish(made.state, base)
    return IngestReport(
        pchannel=base.pchannel,
        base_commits=base.commits,
        base_tick=base.last_tick,
        last_tick=made.state.last_tick,
        position=made.state.position,
        totals=writer.totals,
        actions=tuple(actions),
        replaced_states=writer.replaced_states,
    )


def inserts(table: Path | str, base: WalPosition, *entries: int) -> IngestReport:
    """An attempt at a range that holds one insert for each of `entries`."""
    return write_range(table, base, outcome(base, messages=[message(entry) for entry in entries]))
