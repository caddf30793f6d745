"""A backfill of a derived table: read each slice of the range at one tick, build it, and replace it in one commit.

Readers see either the old rows of a slice or the new ones: one Delta commit replaces them. Spark's tasks write the
files, and the driver commits them (millrace.operations.backfill.slice_writer). The commit carries an app transaction of
the slice, whose version is the tick. A slice is thus written once per tick, however often it is tried, and an older
tick never replaces a newer one. The slice is recorded after the commit. If a kill comes in between, the next attempt
finds the rows in place and records them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise
from typing import Any, Final, Literal

from pyspark.errors import AnalysisException
from pyspark.sql import DataFrame, Observation, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import StructType

from millrace.base.errors import DeadlineExceeded, InvalidArgument
from millrace.base.failpoint import hit
from millrace.base.settings import Settings
from millrace.catalog.collection import CollectionInfo
from millrace.operations.backfill.declaration import BackfillParams
from millrace.operations.backfill.derived import DATE, DerivedTable, derived_table, derived_uri, source_collection
from millrace.operations.backfill.slice_writer import SliceWriter, ensure_table, table_columns
from millrace.operations.backfill.slices import TimeSlice, check_width, cut_range, record_slices, recorded_slices
from millrace.operations.backfill.source import (
    PinnedTick,
    changed_slices,
    digest_columns,
    in_slice,
    pin_tick,
    source_rows,
)
from millrace.operations.entry import SessionFactory
from millrace.operations.operation import OperationReport, counted
from millrace.runtime.progress import Progress
from millrace.storage.delta_log import COMMIT_INFO_KEY
from millrace.storage.spark import spark_frame
from millrace.storage.table import open_table

MAX_COMMITS_SEARCHED: Final = 1000
"""Maximum number of commits of a derived table searched for the commit of a slice."""

RECENT: Final = 32
"""Commits that are searched first."""

MAX_CONFLICTS: Final = 20
"""Commit conflicts of one slice before it fails. In each, another writer replaced a file with rows of the slice."""

SliceOutcome = Literal["written", "in place", "done before", "kept newer", "planned"]


class SliceReport(OperationReport):
    """The result of one slice.

    - ``written``: its rows are new.
    - ``in place``: an earlier attempt at this tick had written it.
    - ``done before``: this run had recorded it.
    - ``kept newer``: the slice has rows of a newer tick.
    - ``planned``: a dry run; rows and digest are the current ones.
    """

    start: datetime
    end: datetime
    outcome: SliceOutcome
    rows: int
    digest: str
    delta_version: int


class BackfillReport(OperationReport):
    """The result of a backfill."""

    table: str
    source: str
    at: int
    """Time tick at which the source was read."""
    run_id: str
    dry_run: bool
    slices: list[SliceReport]
    rows: int

    @property
    def sentence(self) -> str:
        slices, rows = counted(len(self.slices), "slice"), counted(self.rows, "row")
        if self.dry_run:
            return f"{slices} of {self.table} would be rebuilt from {self.source}; they have {rows} now."
        return f"{slices} of {self.table} rebuilt from {self.source}, with {rows}."


class PlannedSlice(OperationReport):
    """A slice of a planned backfill."""

    start: datetime
    end: datetime


class PlanReport(OperationReport):
    """The plan of a backfill."""

    table: str
    source: str
    at: int
    slices: list[PlannedSlice]
    runs: list[dict[str, Any]]
    """Parameters of the runs that rebuild the slices: a few slices in one session each, one run per available slot."""

    @property
    def sentence(self) -> str:
        slices, runs = counted(len(self.slices), "slice"), counted(len(self.runs), "run")
        return f"{slices} of {self.table} are to be rebuilt from {self.source}, in {runs}."


@dataclass(frozen=True, slots=True)
class _Source:
    """A derived table and its source at one tick."""

    table: DerivedTable
    collection: CollectionInfo
    pinned: PinnedTick


@dataclass(frozen=True, slots=True)
class _Work:
    """Shared state of all slices of a run."""

    spark: SparkSession
    settings: Settings
    table: DerivedTable
    rows: DataFrame
    """The source at the pinned tick."""
    event: Any
    tick: int
    run_id: str

    @property
    def uri(self) -> str:
        return derived_uri(self.settings, self.table.name)

    def built(self, part: TimeSlice) -> DataFrame:
        """Return the table's rows of a slice. Raises InvalidArgument if the definition does not fit the source."""
        try:
            made = self.table.build(self.rows.where(in_slice(self.event, part)))
            if dict(made.dtypes).get(self.table.bucket) != "timestamp":
                raise InvalidArgument(f"{self.table.name}: build returns no timestamp column {self.table.bucket!r}")
            return made.withColumn(DATE, F.to_date(F.col(self.table.bucket)))
        except AnalysisException as error:
            raise InvalidArgument(
                f"{self.table.name} cannot be built from {self.table.source!r}: {error.getMessage()}"
            ) from error

    def app(self, part: TimeSlice) -> str:
        """Return the app id of a slice's commits."""
        return f"backfill/v{self.table.version}/{part}"


def run(spark: SparkSession, settings: Settings, params: BackfillParams, progress: Progress) -> BackfillReport:
    """Rebuild the range. A failed slice does not undo finished ones; the same call again continues with the rest.

    Raises InvalidArgument, CollectionNotFound, TickNotReached or TickTooOld before anything is written.
    """
    progress.update("pinning the source")
    source = _pinned(settings, params)
    rows = source_rows(spark, settings, source.table, source.collection, source.pinned)
    event = source.table.event_column(source.collection)
    work = _Work(spark, settings, source.table, rows, event, source.pinned.tick, params.run_id)
    slices = _slices(settings, source, params, lambda: nullcontext(spark))
    if params.dry_run:
        done = [_standing(work, part) for part in slices]
        return _report(work, params, done)
    if slices:
        _ensure(work, work.built(slices[0]).schema)
    before = _done_by(settings, work.table.name, params.run_id)
    done = [before[part] for part in slices if part in before]
    progress.update(f"{len(done)} of {len(slices)} slices", done=len(done) / max(len(slices), 1))
    with ThreadPoolExecutor(params.parallel or settings.backfill_parallel, thread_name_prefix="slice") as pool:
        futures = [pool.submit(_rebuild, work, part) for part in slices if part not in before]
        try:
            for future in as_completed(futures):
                done.append(future.result())
                progress.update(
                    f"{len(done)} of {len(slices)} slices",
                    done=len(done) / len(slices),
                    rows=sum(each.rows for each in done),
                )
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    return _report(work, params, sorted(done, key=lambda each: each.start))


def plan(settings: Settings, params: BackfillParams, progress: Progress) -> PlanReport:
    """Return the slices of a range and the runs that rebuild them, all at one tick. Writes nothing.

    A range of event time needs no Spark; finding what changed between two ticks does.

    Raises as :func:`run`.
    """
    from millrace.operations.entry import spark_session

    progress.update("pinning the source")
    source = _pinned(settings, params)
    slices = _slices(settings, source, params, lambda: spark_session("backfill_plan", settings, progress))
    return PlanReport(
        table=source.table.name,
        source=source.table.source,
        at=source.pinned.tick,
        slices=[PlannedSlice(start=part.start, end=part.end) for part in slices],
        runs=[
            params.for_slices(each, at=source.pinned.tick).model_dump(mode="json")
            for each in split_evenly(slices, settings.spark_slots)
        ],
    )


def split_evenly(slices: Sequence[TimeSlice], count: int) -> list[Sequence[TimeSlice]]:
    """Split `slices` into at most `count` contiguous groups of nearly equal size."""
    count = min(count, len(slices))
    bounds = [len(slices) * number // count for number in range(count + 1)] if count else [0]
    return [slices[first:last] for first, last in pairwise(bounds)]


def _pinned(settings: Settings, params: BackfillParams) -> _Source:
    table = derived_table(settings, params.table)
    collection = source_collection(settings, table)
    table.event_field(collection)
    # Reject an invalid range before waiting for the tick.
    if params.range_of == "event_time":
        _cut(params, table)
    else:
        check_width(params.slice_hours, table)
    return _Source(table, collection, pin_tick(settings, collection, at=params.at))


def _cut(params: BackfillParams, table: DerivedTable) -> list[TimeSlice]:
    """Return the slices of a range of event time, or of the stretches given."""
    stretches = params.stretches or [(params.start, params.end)]
    return [part for start, end in stretches for part in cut_range(start, end, hours=params.slice_hours, table=table)]


def _slices(
    settings: Settings, source: _Source, params: BackfillParams, session_factory: SessionFactory
) -> list[TimeSlice]:
    if params.range_of == "event_time":
        return _cut(params, source.table)
    start, end, hours = params.start, params.end, params.slice_hours
    with session_factory() as spark:
        found = changed_slices(
            spark, settings, source.table, source.collection, source.pinned, start=start, end=end, hours=hours
        )
    return list(found)


def _ensure(work: _Work, schema: StructType) -> None:
    """Create the derived table if it does not exist.

    Raises InvalidArgument if its columns are not those of `schema`.
    """
    wanted = StructType([field for field in schema.fields if field.name != DATE] + [schema[DATE]])
    columns = table_columns(wanted)
    found = ensure_table(work.uri, columns)
    have = {each.name: each.type for each in found.schema}
    if have != {each.name: each.type for each in columns}:
        raise InvalidArgument(
            f"the table {work.table.name} has the columns {', '.join(found.columns)}, but its definition now "
            f"returns {', '.join(wanted.names)} (or other types): give the definition a new name, or move "
            f"{work.uri} away"
        )


def _done_by(settings: Settings, table: str, run_id: str) -> dict[TimeSlice, SliceReport]:
    """Return the slices that the run `run_id` has recorded, or none if the run has no id."""
    if not run_id:
        return {}
    return {
        TimeSlice(row["start"], row["end"]): SliceReport(
            start=row["start"],
            end=row["end"],
            outcome="done before",
            rows=row["rows"],
            digest=row["digest"],
            delta_version=row["delta_version"],
        )
        for row in recorded_slices(settings, table=table, run_id=run_id).to_pylist()
    }


def _rebuild(work: _Work, part: TimeSlice) -> SliceReport:
    """Write one slice unless it is in place at this tick or a newer one, and record it."""
    tick = _tick_of(work, part)
    if tick < work.tick:
        written = _write(work, part)
        if written is not None:
            hit("backfill.written")
            return _recorded(work, written)
        tick = _tick_of(work, part)
    version = _find(work, lambda note: note.get("slice") == str(part) and note.get("at") == tick)
    found = _standing(work, part, outcome="in place" if tick == work.tick else "kept newer", version=version)
    return _recorded(work, found) if tick == work.tick else found


def _write(work: _Work, part: TimeSlice) -> SliceReport | None:
    """Replace the slice in one commit. Return None if a commit of this tick or a newer one was first."""
    frame = work.built(part)
    note = {"slice": str(part), "at": work.tick, "run_id": work.run_id}
    for _ in range(MAX_CONFLICTS):
        writer = SliceWriter(work.uri, part, bucket=work.table.bucket, app=work.app(part))
        if writer.tick >= work.tick:
            return None
        seen = Observation()
        made = writer.write(frame.observe(seen, *digest_columns(frame.drop(DATE))))
        if made is None:
            raise InvalidArgument(
                f"{work.table.name}: build returned rows whose {work.table.bucket!r} lies outside the slice {part} "
                "that they were built from: a row's bucket must follow from its own event time"
            )
        version = writer.commit(made, tick=work.tick, note=note)
        if version is not None:
            figures = seen.get
            return _slice_report(part, "written", figures["rows"], figures["hashes"], version)
    raise DeadlineExceeded(
        f"slice {part} of {work.table.name}: {MAX_CONFLICTS} commits of other writers came first; run it again"
    )


def _predicate(table: DerivedTable, part: TimeSlice) -> str:
    """Return the slice as an SQL predicate.

    Uses days alone where possible, so that other days' commits do not conflict.
    """
    if part.whole_days:
        return f"{DATE} >= DATE '{part.start:%Y-%m-%d}' AND {DATE} < DATE '{part.end:%Y-%m-%d}'"
    start, end = (f"TIMESTAMP '{moment:%Y-%m-%d %H:%M:%S}Z'" for moment in part)
    days = f"{DATE} >= DATE '{part.start:%Y-%m-%d}' AND {DATE} <= DATE '{part.end:%Y-%m-%d}'"
    return f"{days} AND `{table.bucket}` >= {start} AND `{table.bucket}` < {end}"


def _tick_of(work: _Work, part: TimeSlice) -> int:
    """Return the tick of the slice's rows, or 0 if it was never written."""
    table = open_table(work.uri)
    return 0 if table is None else table.app_version(work.app(part))


def _find(work: _Work, match: Callable[[dict[str, Any]], bool]) -> int | None:
    """Return the version of the newest commit whose metadata matches, or None."""
    table = open_table(work.uri)
    if table is None:
        return None
    for limit in (RECENT, MAX_COMMITS_SEARCHED):
        for commit in table.history(limit):
            # Earlier builds committed through Spark, which keeps a text of the user's.
            note = commit.get(COMMIT_INFO_KEY) or json.loads(commit.get("userMetadata") or "{}")
            if match(json.loads(note) if isinstance(note, str) else note):
                return int(commit["version"])
    return None


def _standing(
    work: _Work, part: TimeSlice, *, outcome: SliceOutcome = "planned", version: int | None = None
) -> SliceReport:
    """Describe the slice in the table at `version`, or at the newest version."""
    table = open_table(work.uri, version=version)
    if table is None:
        return _slice_report(part, outcome, 0, None, -1)
    frame = spark_frame(work.spark, table.store, table.version)
    rows = frame.where(_predicate(work.table, part)).drop(DATE)
    found = rows.agg(*digest_columns(rows)).collect()[0]
    return _slice_report(part, outcome, found["rows"], found["hashes"], table.version)


def _slice_report(part: TimeSlice, outcome: SliceOutcome, rows: int, hashes: Any, version: int) -> SliceReport:
    text = f"{int(hashes or 0) % (1 << 64):016x}"
    return SliceReport(start=part.start, end=part.end, outcome=outcome, rows=rows, digest=text, delta_version=version)


def _recorded(work: _Work, found: SliceReport) -> SliceReport:
    row = found.model_dump(exclude={"outcome"})
    record_slices(
        work.settings,
        [
            {
                **row,
                "table": work.table.name,
                "at_tick": work.tick,
                "definition": work.table.version,
                "run_id": work.run_id,
            }
        ],
    )
    return found


def _report(work: _Work, params: BackfillParams, done: list[SliceReport]) -> BackfillReport:
    return BackfillReport(
        table=work.table.name,
        source=work.table.source,
        at=work.tick,
        run_id=params.run_id,
        dry_run=params.dry_run,
        slices=done,
        rows=sum(each.rows for each in done),
    )
