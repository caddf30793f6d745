"""The operation `compaction`."""

from __future__ import annotations

from typing import Final, Literal, Self

from pydantic import Field, model_validator

from millrace.operations.operation import Operation, OperationParams


class CompactionParams(OperationParams):
    """Tables to compact, minimum sizes, and the history that reads at a time tick must still reach afterwards."""

    collections: tuple[str, ...] = Field(
        default=(),
        description="Names or ids of the collections to compact. Empty means all.",
        json_schema_extra={"choices": "collections"},
    )
    files: bool = Field(default=True, description="Merge small files of rows, deletes and segments.")
    target_mib: int = Field(
        default=256,
        ge=1,
        le=256,
        description="Size of a merged file, in MiB of decoded columns (about a third of it on disk).",
    )
    min_files: int = Field(
        default=8, ge=2, le=10_000, description="Small files of one day from which on a merge is worthwhile."
    )
    fold: Literal["auto", "always", "never"] = Field(
        default="auto",
        description="Remove deleted rows from the tables: if there are enough of them (auto), always, or never.",
    )
    fold_ratio: float = Field(
        default=0.1,
        ge=0,
        le=1,
        description="auto: fold when the foldable deletes reach this share of the rows.",
    )
    hidden_ratio: float = Field(
        default=0.05,
        gt=0,
        le=1,
        description="Set hidden rows of a published file apart when they reach this share of it. 1: only in merges.",
    )
    keep_history_hours: float | None = Field(
        default=None,
        ge=0,
        le=876_000,
        description="Hours back that reads at a time tick must reach. Later deletes are not folded in. "
        "Empty: the setting history_hours.",
    )
    segments: bool = Field(default=True, description="Join small flushed segments of a partition.")
    segment_mib: int = Field(default=256, ge=1, le=65_536, description="Size of a joined segment, in MiB of payload.")
    zorder_by: tuple[str, ...] = Field(
        default=(),
        description=(
            "Columns to Z-order by, with Spark. Needs exactly one collection. Empty: clustered by key and tick."
        ),
    )
    vacuum: bool = Field(
        default=True, description="Remove files that were replaced long enough ago, and files that crashes left."
    )
    vacuum_hours: int = Field(
        default=168,
        ge=24,
        le=876_000,
        description="Hours for which a replaced or unreferenced file stays, for readers and running tasks.",
    )
    full: bool = Field(
        default=False, description="Look at every table, also at those that have not changed since the last run."
    )
    dry_run: bool = Field(default=False, description="Only report what would be done.")

    @model_validator(mode="after")
    def _one_collection_to_order(self) -> Self:
        if self.zorder_by and len(self.collections) != 1:
            raise ValueError("zorder_by names columns of one collection: give exactly that collection in collections")
        return self


COMPACTION: Final = Operation(
    name="compaction",
    title="Compact tables",
    summary="Joins small files and segments, folds in old deletes, clusters, and vacuums within the retention.",
    example="--collections flights --fold always",
    params=CompactionParams,
    run="millrace.operations.compaction.run:compaction",
    low_priority=True,
)
