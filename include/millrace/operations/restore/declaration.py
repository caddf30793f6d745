"""The operation `restore`."""

from __future__ import annotations

from typing import Final, Self

from pydantic import Field, model_validator

from millrace.operations.operation import Operation, OperationParams, TimeParam


class RestoreParams(OperationParams):
    """Parameters of the operation ``restore``."""

    collection: str = Field(
        title="Collection",
        min_length=1,
        description="Its name. A dropped collection is named by its id.",
        json_schema_extra={"choices": "collections"},
    )
    into: str = Field(
        default="",
        title="Into",
        pattern=r"^([A-Za-z_][A-Za-z0-9_]*)?$",
        description="The name of the collection that is made; it must not exist. Empty for a restore in place.",
    )
    in_place: bool = Field(
        default=False,
        title="In place",
        description="Replace the rows of the collection itself by those that it had then.",
    )
    at: TimeParam = Field(
        "",
        title="At",
        description="A time tick, or a moment in ISO 8601 (without a zone: UTC). Empty: now.",
        examples=["2026-11-21T12:00:00Z"],
    )
    rows_per_slice: int = Field(
        500_000,
        ge=1,
        le=50_000_000,
        title="Rows a slice",
        description="Rows that are in memory at once.",
        json_schema_extra={"section": "Tuning"},
    )
    run_id: str = Field(
        default="",
        max_length=500,
        title="Run",
        description="Names a restore in place: what a run of this id has done is not done again.",
        json_schema_extra={"section": "Tuning"},
    )
    dry_run: bool = Field(
        False, title="Dry run", description="Only check that the moment can be read, and count the rows."
    )

    @model_validator(mode="after")
    def _one_target(self) -> Self:
        if bool(self.into) == self.in_place:
            raise ValueError("give into (the name of a new collection), or in_place")
        if self.in_place and not self.at:
            raise ValueError("in_place: say to which moment (at)")
        return self


RESTORE: Final = Operation(
    name="restore",
    title="Restore to a point in time",
    summary="Makes a collection's rows of a tick or moment a new collection, or its own again after approval.",
    example="--collection flights --into flights_noon --at 2026-11-21T12:00:00Z",
    params=RestoreParams,
    run="millrace.operations.restore.run:restore",
    set_by_dag=("run_id",),
)
