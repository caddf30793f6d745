"""The operations `backfill`, `backfill_plan` and `load_files`."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Final, Literal

from pydantic import AwareDatetime, Field, model_validator

from millrace.access.grants import Role
from millrace.operations.operation import Operation, OperationParams


class BackfillParams(OperationParams):
    """A range [start, end) of a derived table to rebuild from its source collection at one time tick."""

    table: str = Field(
        default="flights_hourly",
        title="Which table",
        description="Derived table to rebuild.",
        min_length=1,
        json_schema_extra={"choices": "derived tables"},
    )
    start: AwareDatetime = Field(
        description="Start of the range, inclusive. A whole hour, or a whole day if the table's grain is a day."
    )
    end: AwareDatetime = Field(description="End of the range, exclusive.")
    range_of: Literal["event_time", "ticks"] = Field(
        default="event_time",
        description=(
            "event_time: the range is in the rows' own times. ticks: rebuild what changed in the source "
            "between start and end."
        ),
    )
    slice_hours: int = Field(
        default=24, ge=1, le=8784, description="Hours of event time per slice. Each slice is one commit."
    )
    at: int | None = Field(
        default=None, ge=1, description="Time tick to read the source at. Empty: the newest readable tick."
    )
    parallel: int = Field(
        default=0,
        ge=0,
        le=64,
        description="Slices to rebuild concurrently in one driver. 0: the setting backfill_parallel.",
    )
    run_id: str = Field(
        default="",
        max_length=500,
        description="Id of the run. A slice that a run with this id has finished is skipped.",
    )
    slices: tuple[str, ...] = Field(
        default=(),
        max_length=1000,
        description="Only these stretches of event time, each start/end in ISO 8601. Empty: the whole range.",
    )
    dry_run: bool = Field(default=False, description="Only list the slices and what they contain now.")

    @model_validator(mode="after")
    def _in_order(self) -> BackfillParams:
        if self.start == self.end:
            raise ValueError(
                f"the range [{self.start.isoformat()}, {self.end.isoformat()}) is empty: this run has no data interval "
                "of its own (like any manual run of a scheduled DAG). Give start and end"
            )
        if self.start > self.end:
            raise ValueError(f"start {self.start.isoformat()} is after end {self.end.isoformat()}")
        _ = self.stretches
        return self

    @property
    def stretches(self) -> list[tuple[datetime, datetime]]:
        """The stretches in `slices`, parsed. Raises ValueError for a text that is not start/end with time zones."""
        found = []
        for text in self.slices:
            start, slash, end = text.partition("/")
            moments = [datetime.fromisoformat(each) for each in (start, end)] if slash else []
            if len(moments) != 2 or any(each.tzinfo is None for each in moments) or moments[0] >= moments[1]:
                raise ValueError(f"slice {text!r}: give start/end, both with a time zone and start before end")
            found.append((moments[0], moments[1]))
        return found

    def for_slices(self, slices: Sequence[tuple[datetime, datetime]], *, at: int) -> BackfillParams:
        """Return the parameters of a run that rebuilds only these slices, in one session.

        A task that restarts independently gets them.
        """
        changed = {"start": slices[0][0], "end": slices[-1][1], "at": at, "range_of": "event_time"}
        named = [f"{start.isoformat()}/{end.isoformat()}" for start, end in slices]
        return BackfillParams.parse({**self.model_dump(), **changed, "slices": named})


class LoadParams(OperationParams):
    """Files whose rows to insert into a collection, each row once."""

    collection: str = Field(
        description="Collection that receives the rows.", min_length=1, json_schema_extra={"choices": "collections"}
    )
    files: list[str] = Field(
        min_length=1,
        max_length=10_000,
        description="Absolute paths, or patterns such as /data/2013-*.parquet, in a folder of the setting load_roots.",
    )
    format: Literal["by suffix", "jsonl", "csv", "parquet"] = Field(
        default="by suffix", description="Format of the files."
    )
    partition: str | None = Field(default=None, description="Partition for all rows.")
    partition_by: str | None = Field(default=None, description="String column that names each row's partition.")
    import_id: str = Field(
        default="",
        pattern=r"^([a-z0-9][a-z0-9._-]{0,79})?$",
        description="Id of the load. Rows loaded under an id are never loaded again under it. "
        "Empty: derived from the collection, the options and the files' contents.",
    )
    slice_bytes: int = Field(
        default=64 << 20,
        ge=1 << 16,
        le=1 << 30,
        description="Bytes of rows per slice. A slice is one message and becomes visible as a whole.",
    )
    dry_run: bool = Field(default=False, description="Only read and check every row of the files. Nothing is kept.")


BACKFILL: Final = Operation(
    name="backfill",
    summary="Rebuilds a range of a derived table from its source, slice by slice, one commit per slice.",
    example="--table flights_hourly --start 2013-01-01T00:00Z --end 2013-02-01T00:00Z",
    params=BackfillParams,
    run="millrace.operations.backfill.run:run",
    needs_spark=True,
    role=Role.PRODUCE,
    tags=("backfill", "derived"),
    set_by_dag=("start", "end", "at", "parallel", "run_id", "slices"),
)

BACKFILL_PLAN: Final = Operation(
    name="backfill_plan",
    title="Backfill a time range",
    summary="Plans a backfill: the parameters of a run per group of slices, all at one tick. Writes nothing.",
    words="Rebuilds a range of a derived table from its collection, slice by slice. Readers never see a mix.",
    example="--start 2013-01-01T00:00Z --end 2013-02-01T00:00Z",
    params=BackfillParams,
    run="millrace.operations.backfill.run:plan",
    role=Role.PRODUCE,
    dag="backfill_range",
    tags=("backfill", "derived"),
    set_by_dag=("parallel", "run_id", "slices"),
)

LOAD: Final = Operation(
    name="load_files",
    title="Load files",
    summary="Loads Parquet, CSV or JSON lines into a collection as Imports, slice by slice, each once.",
    example="--collection flights --files '/data/2013-*.parquet' --partition-by origin",
    params=LoadParams,
    run="millrace.operations.backfill.load:run",
    tags=("backfill", "load"),
)
