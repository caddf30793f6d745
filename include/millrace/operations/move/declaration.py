"""The operation `move`."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final, Self

from pydantic import Field, field_validator, model_validator

from millrace.operations.operation import Operation, OperationParams


class MoveParams(OperationParams):
    """Target of the tables, or what to do about an earlier or unfinished move."""

    to: str = Field(
        default="",
        title="To",
        description=(
            "Where the tables go: a prefix of an object store (s3://bucket/prefix) that is empty, an empty folder, or "
            "the path of the data folder. Empty: where the unfinished move goes."
        ),
    )
    remove_old: bool = Field(
        default=False,
        title="Remove the old place",
        description="Move nothing; remove the tables that finished moves left where they were.",
    )
    cancel: bool = Field(
        default=False,
        title="Cancel",
        description="Cancel the unfinished move: the tables stay where they are, and the copies are removed.",
    )
    dry_run: bool = Field(
        default=False, title="Dry run", description="Only check the place, and report what would be copied or removed."
    )

    @field_validator("to")
    @classmethod
    def _absolute(cls, value: str) -> str:
        if value and "://" not in value and not Path(value).is_absolute():
            raise ValueError("give an absolute path; the job does not run in your working directory")
        scheme, separator, rest = value.partition("://")
        if separator and (not scheme or not rest.strip("/")):
            raise ValueError(f"{value} names no bucket: give a prefix of one, such as s3://warehouse/millrace")
        return value.rstrip("/") if len(value) > 1 else value

    @model_validator(mode="after")
    def _one_thing(self) -> Self:
        chosen: list[Any] = [self.to, self.remove_old, self.cancel]
        if sum(map(bool, chosen)) > 1:
            raise ValueError("give one of to, remove_old and cancel")
        return self


MOVE: Final = Operation(
    name="move",
    title="Move the tables",
    summary="Moves the tables between a disk and an object store while everything runs.",
    words="Copies the tables to another place, compares every file, and continues there. Producers notice nothing.",
    example="--to s3://warehouse/millrace --dry-run",
    params=MoveParams,
    run="millrace.operations.move.run:run",
    low_priority=True,
)
