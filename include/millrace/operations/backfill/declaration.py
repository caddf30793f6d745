"""The operations `backfill`, `backfill_plan` and `load_files`."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Final, Literal

from pydantic import AwareDatetime, Field, model_validator

from millrace.access.grants import Role
from millrace.operations.operation import Operation, OperationParams


class BackfillParams(OperationParams):
    """A range [start, end) of a derived table, to be rebuilt from its source collection at one time tick."""

    table: str = Field(
        default="flights_hourly",
        title="Which table",
        description="The derived table to rebuild.",
        min_length=1,
        json_schema_extra={"choices": "derived tables"},
    )
    start: AwareDatetime = Field(
        description="Start of the range, included; a whole hour (or day, as the table has it)."
    )
    end: AwareDatetime = Field(description="End of the range, not included.")
    range_of: Literal["event_time", "ticks"] = Field(
        default="event_time",
        description="event_time: the rows' own times. ticks: rebuild what changed in the source between the two moments.",
    )
    slice_hours: int = Field(default=24, ge=1, le=8784, description="Hours of event time in a slice: one commit each.")
    at: int | None = Field(
        default=None, ge=1, description="Time tick to read the source at; without one the newest that can be read."
    )
    parallel: int = Field(
        default=0, ge=0, le=64, description="Slices rebuilt at once in one driver; 0: the setting backfill_parallel."
    )
    run_id: str = Field(
        default="", max_length=500, description="Names the run: a slice that a run of this id has done is left alone."
    )
    slices: tuple[str, ...] = Field(
        default=(),
        max_length=1000,
        description="Only these stretches of event time, each start/end in ISO 8601; none: the whole range.",
    )
    dry_run: bool = Field(default=False, description="Only say which slices there are and what stands in them.")

    @model_validator(mode="after")
    def _in_order(self) -> BackfillParams:
        if self.start == self.end:
            raise ValueError(
                f"the range [{self.start.isoformat()}, {self.end.isoformat()}) is empty: a run without a data interval of "
                "its own (a manual run of a scheduled DAG, say) has none to rebuild; give start and end"
            )
        if self.start > self.end:
            raise ValueError(f"start {self.start.isoformat()} lies behind end {self.end.isoformat()}")
        _ = self.stretches
        return self

    @property
    def stretches(self) -> list[tuple[datetime, datetime]]:
        """`slices` as moments. Raises ValueError for a text that is no stretch with a zone."""
        found = []
        for text in self.slices:
            start, slash, end = text.partition("/")
            moments = [datetime.fromisoformat(each) for each in (start, end)] if slash else []
            if len(moments) != 2 or any(each.tzinfo is None for each in moments) or moments[0] >= moments[1]:
                raise ValueError(f"slice {text!r}: give start/end, both with a zone, the start first")
            found.append((moments[0], moments[1]))
        return found

    def for_slices(self, slices: Sequence[tuple[datetime, datetime]], *, at: int) -> BackfillParams:
        """The parameters of a run that rebuilds these slices alone, in one session: what a task that restarts alone is given."""
        changed = {"start": slices[0][0], "end": slices[-1][1], "at": at, "range_of": "event_time"}
        named = [f"{start.isoformat()}/{end.isoformat()}" for start, end in slices]
        return BackfillParams.parse({**self.model_dump(), **changed, "slices": named})


class LoadParams(OperationParams):
    """Files whose rows are to be inserted into a collection, each row once."""

    collection: str = Field(
        description="The collection that the rows go to.", min_length=1, json_schema_extra={"choices": "collections"}
    )
    files: list[str] = Field(
        min_length=1,
        max_length=10_000,
        description="Absolute paths, or patterns such as /data/2013-*.parquet, in a folder of the setting load_roots.",
    )
    format: Literal["by suffix", "jsonl", "csv", "parquet"] = Field(
        default="by suffix", description="How the rows are written."
    )
    partition: str | None = Field(default=None, description="The partition that all rows go to.")
    partition_by: str | None = Field(default=None, description="A text column that names each row's partition.")
    import_id: str = Field(
        default="",
        pattern=r"^([a-z0-9][a-z0-9._-]{0,79})?$",
        description="Names the load: what has been loaded under a name is never loaded again under it. "
        "Without one the name follows from the collection, the options and the files' contents.",
    )
    slice_bytes: int = Field(
        default=64 << 20,
        ge=1 << 16,
        le=1 << 30,
        description="Bytes of rows in a slice, which is one message and becomes visible as one.",
    )
    dry_run: bool = Field(default=False, description="Only read and check the files: every row, nothing is kept.")


BACKFILL: Final = Operation(
    name="backfill",
    summary="Rebuilds a range of a derived table from its source, slice by slice, each in one commit.",
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
    summary="Says which slices a backfill has, as parameters of a run of each, all at one tick; writes nothing.",
    words="Rebuilds a range of a derived table from its collection, slice by slice; readers never see a mix.",
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
    summary="Brings Parquet, CSV or JSON lines into a collection as Imports, slice by slice, each once.",
    example="--collection flights --files '/data/2013-*.parquet' --partition-by origin",
    params=LoadParams,
    run="millrace.operations.backfill.load:run",
    tags=("backfill", "load"),
)
