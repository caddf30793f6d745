"""The state accumulated over all runs: the tick up to which each table is checked, and the failures that block removal.

A pure fold over runs. A failure remains until a later run passes over a range that covers it, or until a person
releases it. The checked tick of a table does not advance past a failure, so the next run checks the same range again.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from millrace.operations.quality.checks import CheckResult, TableCheckResult
from millrace.operations.quality.ranges import Ranges, TickRange, covers, ranges_from_json, ranges_to_json


@dataclass(frozen=True, slots=True)
class Block:
    """A failed critical expectation, neither passed nor released since. It blocks every removal."""

    id: str
    table: str
    expectation: str
    words: str
    run_id: str
    at: float
    """Unix seconds."""
    collection_id: int = 0
    ranges: Ranges = field(default_factory=dict)
    unexpected: int = 0
    sample: tuple[str, ...] = ()
    error: str = ""

    def to_json(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "table": self.table,
            "expectation": self.expectation,
            "words": self.words,
            "run_id": self.run_id,
            "at": self.at,
            "collection_id": self.collection_id,
            "ranges": ranges_to_json(self.ranges),
            "unexpected": self.unexpected,
            "sample": list(self.sample),
            "error": self.error,
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        return cls(**{**value, "ranges": ranges_from_json(value["ranges"]), "sample": tuple(value["sample"])})


@dataclass(frozen=True, slots=True)
class QualityState:
    """The value of the fold."""

    revision: int = 0
    """Number of runs and releases so far."""
    checked: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    """For each table and PChannel, the tick up to which everything passed or was released."""
    blocks: tuple[Block, ...] = ()

    def checked_ticks(self, table: str) -> Mapping[str, int]:
        return self.checked.get(table, {})

    def to_json(self) -> str:
        value = {"revision": self.revision, "checked": self.checked, "blocks": [each.to_json() for each in self.blocks]}
        return json.dumps(value, sort_keys=True)

    @classmethod
    def from_text(cls, text: str) -> Self:
        value = json.loads(text)
        return cls(value["revision"], value["checked"], tuple(Block.from_json(each) for each in value["blocks"]))


def apply_run(state: QualityState, run_id: str, at: float, tables: Iterable[TableCheckResult]) -> QualityState:
    """Return the state after a run."""
    checked, blocks = dict(state.checked), list(state.blocks)
    for table in tables:
        looked_at = {outcome.check.name for outcome in table.results}
        blocks = [
            block
            for block in blocks
            if block.table != table.table
            or block.expectation not in looked_at
            or not covers(table.ranges, block.ranges)
        ]
        blocks += [_block(run_id, at, table, outcome) for outcome in table.failed_critical]
        if not table.failed_critical:
            checked[table.table] = _advanced(checked.get(table.table, {}), table.ranges)
    return QualityState(state.revision + 1, checked, tuple(blocks))


def apply_release(state: QualityState, ids: Iterable[str]) -> QualityState:
    """Return the state after a person accepted the blocks `ids`. Their ranges count as checked."""
    wanted = set(ids)
    released = [block for block in state.blocks if block.id in wanted]
    left = tuple(block for block in state.blocks if block.id not in wanted)
    checked = dict(state.checked)
    for block in released:
        if not any(each.table == block.table for each in left):
            checked[block.table] = _advanced(checked.get(block.table, {}), block.ranges)
    return QualityState(state.revision + 1, checked, left)


def block_id(run_id: str, table: str, expectation: str) -> str:
    """Return a short id that is the same for the same failure of the same run."""
    return hashlib.sha256(f"{run_id}/{table}/{expectation}".encode()).hexdigest()[:12]


def _block(run_id: str, at: float, table: TableCheckResult, outcome: CheckResult) -> Block:
    return Block(
        id=block_id(run_id, table.table, outcome.check.name),
        table=table.table,
        expectation=outcome.check.name,
        words=outcome.check.words,
        run_id=run_id,
        at=at,
        collection_id=table.collection_id,
        ranges=dict(table.ranges),
        unexpected=outcome.unexpected,
        sample=outcome.sample[:5],
        error=outcome.error,
    )


def _advanced(checked: Mapping[str, int], ranges: Mapping[str, TickRange]) -> dict[str, int]:
    """Advance `checked` to the end of each range that starts at or before it."""
    found = dict(checked)
    for pchannel, each in ranges.items():
        if each.after <= found.get(pchannel, 0):
            found[pchannel] = max(found.get(pchannel, 0), each.up_to)
    return found
