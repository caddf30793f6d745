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
        description="Name of the collection, or the id of a dropped one.",
        json_schema_extra={"choices": "collections"},
    )
    into: str = Field(
        default="",
        title="Into",
        pattern=r"^([A-Za-z_][A-Za-z0-9_]*)?$",
        description="Name of the new collection, which must not exist. Empty for a restore in place.",
    )
    in_place: bool = Field(
        default=False,
        title="In place",
        description="Replace the rows of the collection itself by those it had at that time.",
    )
    at: TimeParam = Field(
        "",
        title="At",
        description="A time tick, or an ISO 8601 timestamp (UTC without a zone). Empty: now.",
        examples=["2026-11-21T12:00:00Z"],
    )
    rows_per_slice: int = Field(
        500_000,
        ge=1,
        le=50_000_000,
        title="Rows a slice",
        description="Rows in memory at a time.",
        json_schema_extra={"section": "Tuning"},
    )
    run_id: str = Field(
        default="",
        max_length=500,
        title="Run",
        description="Id of a restore in place. A restore that a run with this id has finished is not repeated.",
        json_schema_extra={"section": "Tuning"},
    )
    dry_run: bool = Field(
        False, title="Dry run", description="Only check that the time can be read, and count the rows."
    )

    @model_validator(mode="after")
    def _one_target(self) -> Self:
        if bool(self.into) == self.in_place:
            raise ValueError("give either into (the name of a new collection) or in_place")
        if self.in_place and not self.at:
            raise ValueError("in_place needs the time to restore to (at)")
        return self


RESTORE: Final = Operation(
    name="restore",
    title="Restore to a point in time",
    summary="Restores a collection's rows of a tick or time into a new collection, or in place after approval.",
    example="--collection flights --into flights_noon --at 2026-11-21T12:00:00Z",
    params=RestoreParams,
    run="millrace.operations.restore.run:restore",
    set_by_dag=("run_id",),
)
