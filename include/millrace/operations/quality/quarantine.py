"""The Delta table ``quality/quarantine``: slices of collections that failed a check, until a person releases them.

A slice is recorded, not moved: a collection changes only through messages (law 10). A reader that wants to skip such
slices calls :func:`quarantined`. Truncation and VACUUM are stopped by the block with the same id (:mod:`.gate`). The
newest row of an id is the valid one.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final, Literal, cast

import pyarrow as pa

from millrace.base.errors import InvalidArgument
from millrace.base.failpoint import hit
from millrace.base.settings import Settings
from millrace.operations.quality.ranges import Ranges, ranges_from_json, ranges_to_json
from millrace.operations.quality.results import read_state, update_state
from millrace.operations.quality.state import Block, apply_release
from millrace.storage.commit import CommitPart, commit_fenced
from millrace.storage.file_sink import FileSink
from millrace.storage.table import create_table, open_table

Status = Literal["quarantined", "released"]

COLUMNS: Final = pa.schema(
    [
        pa.field("id", pa.utf8()),
        pa.field("at", pa.timestamp("us", tz="UTC")),
        pa.field("status", pa.utf8()),  # quarantined or released
        pa.field("table", pa.utf8()),
        pa.field("collection_id", pa.int64()),
        pa.field("expectation", pa.utf8()),
        pa.field("reason", pa.utf8()),
        pa.field("run_id", pa.utf8()),
        pa.field("after_tick", pa.int64()),
        pa.field("up_to_tick", pa.int64()),
        pa.field("ranges", pa.utf8()),  # JSON: PChannel -> [after, up to]
        pa.field("by", pa.utf8()),  # who released it
        pa.field("note", pa.utf8()),
    ]
)


@dataclass(frozen=True, slots=True)
class QuarantinedSlice:
    """A slice that is quarantined or was released."""

    id: str
    status: Status
    table: str
    collection_id: int
    expectation: str
    reason: str
    run_id: str
    ranges: Ranges
    by: str = ""
    note: str = ""


def quarantine_uri(settings: Settings) -> str:
    return settings.table_uri("quality/quarantine")


def read_slices(settings: Settings) -> list[QuarantinedSlice]:
    """Return the current state of every slice, oldest first."""
    table = open_table(quarantine_uri(settings))
    if table is None:
        return []
    rows = table.read_rows(table.live_files(), COLUMNS).sort_by("at").to_pylist()
    return list({row["id"]: _slice(row) for row in rows}.values())


def quarantined(settings: Settings, collection_id: int | None = None) -> list[QuarantinedSlice]:
    """Return the slices that are quarantined now, of one collection if given."""
    return [
        each
        for each in read_slices(settings)
        if each.status == "quarantined" and collection_id in (None, each.collection_id)
    ]


def record(settings: Settings, blocks: Iterable[Block]) -> list[QuarantinedSlice]:
    """Quarantine the collection slices among `blocks` and return the new ones. Known slices stay unchanged."""
    known = {each.id for each in read_slices(settings)}
    found = [
        QuarantinedSlice(
            id=block.id,
            status="quarantined",
            table=block.table,
            collection_id=block.collection_id,
            expectation=block.expectation,
            reason=f"{block.words or block.expectation}: {block.unexpected} wrong",
            run_id=block.run_id,
            ranges=block.ranges,
        )
        for block in blocks
        if block.collection_id and block.id not in known
    ]
    _append(settings, found)
    return found


def release_blocks(settings: Settings, ids: Iterable[str], *, by: str, note: str = "") -> list[str]:
    """Lift blocks that a person accepted, with the quarantine of their slices, and return the lifted ids.

    The record is written before the block is lifted. A release that is killed in between leaves one block too many,
    never one too few, and calling it again completes it.

    Raises InvalidArgument if an id is neither a block in force nor a quarantined slice.
    """
    wanted = list(dict.fromkeys(ids))
    state = read_state(settings)
    blocks = {block.id: block for block in state.blocks}
    known = {each.id: each for each in read_slices(settings)}
    strange = [each for each in wanted if each not in blocks and each not in known]
    if strange:
        standing = ", ".join(sorted(blocks)) or "none"
        raise InvalidArgument(
            f"{', '.join(strange)}: no such block or quarantined slice; the blocks in force are: {standing}"
        )
    records = []
    for number in wanted:
        if number in known and known[number].status == "released":
            continue
        block = blocks.get(number)
        source = known.get(number)
        if source is None and block is not None:
            source = QuarantinedSlice(
                number,
                "released",
                block.table,
                block.collection_id,
                block.expectation,
                block.words,
                block.run_id,
                block.ranges,
            )
        assert source is not None
        records.append((source, by, note))
    _append(settings, [_released(*each) for each in records])
    hit("quality.released")
    if any(number in blocks for number in wanted):
        update_state(settings, lambda current: apply_release(current, wanted))
    return wanted


def _released(source: QuarantinedSlice, by: str, note: str) -> QuarantinedSlice:
    return QuarantinedSlice(
        source.id,
        "released",
        source.table,
        source.collection_id,
        source.expectation,
        source.reason,
        source.run_id,
        source.ranges,
        by,
        note,
    )


def _append(settings: Settings, found: list[QuarantinedSlice]) -> None:
    if not found:
        return
    path = quarantine_uri(settings)
    table = create_table(path, COLUMNS, partition_by=[])
    sink = FileSink.at(path, COLUMNS, ("after_tick", "up_to_tick"))
    sink.write(pa.Table.from_pylist([_row(each) for each in found], schema=COLUMNS), {})
    commit_fenced(table, [CommitPart(adds=sink.finish())]).raise_if_fenced()


def _row(found: QuarantinedSlice) -> dict[str, Any]:
    return {
        "id": found.id,
        "at": time.time_ns() // 1000,
        "status": found.status,
        "table": found.table,
        "collection_id": found.collection_id,
        "expectation": found.expectation,
        "reason": found.reason,
        "run_id": found.run_id,
        "after_tick": min((each.after for each in found.ranges.values()), default=0),
        "up_to_tick": max((each.up_to for each in found.ranges.values()), default=0),
        "ranges": json.dumps(ranges_to_json(found.ranges)),
        "by": found.by,
        "note": found.note,
    }


def _slice(row: dict[str, Any]) -> QuarantinedSlice:
    return QuarantinedSlice(
        row["id"],
        cast(Status, row["status"]),
        row["table"],
        row["collection_id"],
        row["expectation"],
        row["reason"],
        row["run_id"],
        ranges_from_json(json.loads(row["ranges"])),
        row["by"],
        row["note"],
    )
