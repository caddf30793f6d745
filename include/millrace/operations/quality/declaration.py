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
    """Tables and range to check, and the treatment of a slice that fails."""

    tables: tuple[TableGroup, ...] = Field(default=ALL_TABLES, min_length=1, description="Tables to check.")
    collections: tuple[str, ...] = Field(
        default=(),
        description="Names or ids of the collections to check. Empty means all.",
        json_schema_extra={"choices": "collections"},
    )
    start: TimeParam = Field(
        default="",
        description="Start of the range: a time tick, or an ISO 8601 timestamp (2026-01-01T00:00:00Z; UTC without a "
        "zone). Empty: the end of the last check.",
    )
    end: TimeParam = Field(
        default="",
        description="End of the range, exclusive, in the same forms. Empty: now.",
    )
    samples: int = Field(
        default=20, ge=1, le=1000, description="Unexpected values to keep for each failing expectation."
    )
    quarantine: bool = Field(
        default=False, description="Record a collection's slice that fails a critical expectation as quarantined."
    )
    full: bool = Field(
        default=False, description="Look at every table, also at those that have not changed since they passed."
    )
    data_docs: bool = Field(default=True, description="Write the Data Docs (HTML) of this run.")

    @property
    def ignores_records(self) -> bool:
        """Whether the run looks at tables that have not changed, too."""
        return self.full or bool(self.start or self.end or self.collections)


class ReleaseParams(OperationParams):
    """The blocks that a person accepts, and the person's name."""

    blocks: tuple[str, ...] = Field(min_length=1, description="Ids of the blocks or quarantined slices to release.")
    by: str = Field(min_length=1, max_length=200, description="Name of the person who approved the release.")
    note: str = Field(default="", max_length=2000, description="Reason for the release.")


def first_tick_at(text: str) -> int | None:
    """Return the first time tick at or after the time in a form field, or None for ""."""
    if not text:
        return None
    tick = resolve_tick(text)
    return tick if text.isdigit() else tick >> LOGICAL_BITS << LOGICAL_BITS


QUALITY: Final = Operation(
    name="quality",
    title="Check data quality",
    summary="Runs the expectation suites. A critical failure blocks truncation and vacuum.",
    example="--tables wal --start 2026-01-01T00:00:00Z",
    params=QualityParams,
    run="millrace.operations.quality.run:quality",
    requires=("great_expectations",),
    role=Role.PRODUCE,
    changes_data=False,
)

RELEASE: Final = Operation(
    name="quality_release",
    title="Release a block",
    summary="Accepts what a critical expectation found, so that truncation and vacuum can continue.",
    example="--blocks 0123456789ab --by ada",
    params=ReleaseParams,
    run="millrace.operations.quality.gate:run_release",
    tags=("quality",),
    retries=1,
    changes_data=False,
)
