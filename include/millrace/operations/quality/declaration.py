"""The operations `quality` and `quality_release`."""

from __future__ import annotations

from typing import Final, Literal

from pydantic import Field

from millrace.access.grants import Role
from millrace.message.ids import LOGICAL_BITS, resolve_tick
from millrace.operations.operation import Operation, OperationParams, TimeParam

TableGroup = Literal["wal", "segments", "checkpoints", "collections"]
ALL_TABLES: Final[tuple[TableGroup, ...]] = ("wal", "segments", "checkpoints", "collections")


class QualityParams(OperationParams):
    """What is checked, over which range, and what becomes of a slice that fails."""

    tables: tuple[TableGroup, ...] = Field(default=ALL_TABLES, min_length=1, description="Which tables are checked.")
    collections: tuple[str, ...] = Field(
        default=(),
        description="Names or ids of the collections to check; none: all.",
        json_schema_extra={"choices": "collections"},
    )
    start: TimeParam = Field(
        default="",
        description="Where the range begins: a time tick, or a moment in ISO 8601 (2026-01-01T00:00:00Z; without a zone: UTC). Empty: behind what was checked last.",
    )
    end: TimeParam = Field(
        default="",
        description="Where the range ends (the end itself is not in it), in the same forms. Empty: what is there now.",
    )
    samples: int = Field(
        default=20, ge=1, le=1000, description="Wrong values that are kept of each failing expectation."
    )
    quarantine: bool = Field(
        default=False, description="Record the slice of a collection that fails a critical expectation as quarantined."
    )
    data_docs: bool = Field(default=True, description="Write the Data Docs (HTML) of this run.")


class ReleaseParams(OperationParams):
    """Which blocks a person accepts, and who says so."""

    blocks: tuple[str, ...] = Field(min_length=1, description="Ids of the blocks (or quarantined slices) to release.")
    by: str = Field(min_length=1, max_length=200, description="Who approved it.")
    note: str = Field(default="", max_length=2000, description="Why it may go on.")


def first_tick_at(text: str) -> int | None:
    """The first time tick at or behind a moment of a form; None for ""."""
    if not text:
        return None
    tick = resolve_tick(text)
    return tick if text.isdigit() else tick >> LOGICAL_BITS << LOGICAL_BITS


QUALITY: Final = Operation(
    name="quality",
    title="Check data quality",
    summary="Runs the expectation suites; a critical failure holds truncation and vacuum back.",
    example="--tables wal --start 2026-01-01T00:00:00Z",
    params=QualityParams,
    run="millrace.operations.quality.run:run",
    needs_spark=True,
    role=Role.PRODUCE,
    changes_data=False,
)

RELEASE: Final = Operation(
    name="quality_release",
    title="Release a block",
    summary="Accepts what a critical expectation found, so that truncation and vacuum go on.",
    example="--blocks 0123456789ab --by ada",
    params=ReleaseParams,
    run="millrace.operations.quality.gate:run_release",
    tags=("quality",),
    retries=1,
    changes_data=False,
)
