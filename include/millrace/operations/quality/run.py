"""The operation `quality`: pin versions, check each table over its range, record, quarantine, write the Data Docs.

A failed expectation is not an exception: it appears in the report, in ``quality/results`` and in the gate. An exception
means that the check itself could not run, for example because a user's suite is invalid or a table cannot be read.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from pydantic import Field

from millrace.base.errors import CollectionNotFound
from millrace.base.settings import Settings
from millrace.operations.operation import OperationReport
from millrace.operations.quality import collection_frames, data_docs, frames, quarantine
from millrace.operations.quality.checks import Check, TableCheckResult
from millrace.operations.quality.declaration import ALL_TABLES, QualityParams, first_tick_at
from millrace.operations.quality.frames import ValidationInput
from millrace.operations.quality.gx_validator import Validator, check_expectations
from millrace.operations.quality.ranges import choose_ranges, has_ticks
from millrace.operations.quality.results import docs_path, read_state, record_run
from millrace.operations.quality.snapshot import take_snapshot
from millrace.operations.quality.state import QualityState
from millrace.operations.quality.user_suites import read_suite, suite_file
from millrace.runtime.progress import Progress
from millrace.tables.wal.trims import trimmed_totals

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


class FailedExpectation(OperationReport):
    """One expectation that failed."""

    table: str
    expectation: str
    words: str
    critical: bool
    unexpected: int
    sample: tuple[str, ...]
    error: str


class QualityReport(OperationReport):
    """The findings of a run. `passed` is True if no expectation failed, critical or not."""

    summary: str = Field(description="The result in one sentence.")
    run_id: str
    passed: bool
    expectations: int
    failed: tuple[FailedExpectation, ...]
    tables: dict[str, dict[str, float]] = Field(description="By table: rows, seconds, expectations, failed.")
    blocks: tuple[str, ...] = Field(description="Ids of all blocks in force, of this run and of earlier ones.")
    quarantined: tuple[str, ...]
    docs: str | None = Field(description="Index page of the Data Docs.")
    seconds: float


def run(spark: SparkSession, settings: Settings, params: QualityParams, progress: Progress) -> QualityReport:
    """Run the checks that `params` select. Raises InvalidSuite, CollectionNotFound."""
    started, run_id = time.perf_counter(), f"{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}-{uuid.uuid4().hex[:6]}"
    state = read_state(settings)
    progress.update("selecting tables and ranges")
    outcomes: list[TableCheckResult] = []
    found = list(_frames(spark, settings, params, state, outcomes))
    pages = None
    if found:
        progress.update("starting Great Expectations", tables=len(found))
        validator = Validator(docs=docs_path(settings) if params.data_docs else None, samples=params.samples)
        for number, frame in enumerate(found):
            progress.update(f"checking {frame.table}", done=number / len(found))
            outcomes.append(validator.check(frame, run_id=run_id))
        pages = validator.write_docs()
        data_docs.remove_old_runs(docs_path(settings))
        if pages is not None:
            data_docs.write_index(docs_path(settings))
    progress.update("recording the results", done=1.0)
    state = record_run(settings, run_id, outcomes)
    quarantined = (
        quarantine.record(settings, [block for block in state.blocks if block.run_id == run_id])
        if params.quarantine
        else []
    )
    return QualityReport(
        summary=_summary(outcomes, len(state.blocks)),
        run_id=run_id,
        passed=not any(table.failed for table in outcomes),
        expectations=sum(len(table.results) for table in outcomes),
        failed=tuple(failure for table in outcomes for failure in _failures(table)),
        tables={table.table: _figures(table) for table in outcomes},
        blocks=tuple(block.id for block in state.blocks),
        quarantined=tuple(each.id for each in quarantined),
        docs=None if pages is None else str(pages),
        seconds=round(time.perf_counter() - started, 3),
    )


def _frames(
    spark: SparkSession, settings: Settings, params: QualityParams, state: QualityState, empty: list[TableCheckResult]
) -> Iterator[ValidationInput]:
    """Yield what to check: each table over its own range of one consistent snapshot.

    Tables without new rows are skipped.

    A collection without rows in its range goes to `empty` instead, because a Spark check of no rows still takes
    seconds. Exceptions are a collection with user checks, which may require rows, and one with a block, which an empty
    check can lift.
    """
    chosen = params.tables or ALL_TABLES
    start, end = first_tick_at(params.start), first_tick_at(params.end)
    pinned = take_snapshot(settings)
    if pinned is None:
        return
    wal, flushed, stored = pinned.wal, pinned.flushed_ticks, pinned.collections
    users = _user_suites(settings, list(stored.values()) if "collections" in chosen else [])
    if "wal" in chosen:
        ranges = choose_ranges(wal.committed_ticks, state.checked_ticks("wal"), start=start, end=end)
        if has_ticks(ranges):
            yield frames.messages(spark, wal, ranges)
        # Further rejections may have arrived at a range's open end, because a rejection has no tick of its own.
        ranges = choose_ranges(wal.committed_ticks, state.checked_ticks("wal/rejections"), start=start, end=end)
        yield frames.rejections(spark, wal, ranges)
        yield frames.channels(spark, wal, trimmed_totals(wal.table))
    if "checkpoints" in chosen and flushed:
        yield frames.checkpoints(spark, settings, pinned.checkpoints_version, wal)
    if "segments" in chosen and pinned.segments_version is not None:
        ranges = choose_ranges(flushed, state.checked_ticks("segments"), start=start, end=end)
        versions = {number: (each.rows_version, each.folded_tick) for number, each in stored.items()}
        if has_ticks(ranges):
            yield frames.segments(spark, settings, pinned.segments_version, ranges, versions)
    if "collections" in chosen:
        for each in _chosen(stored.values(), params.collections):
            homes = set(each.pchannels.values())
            reached = {name: tick for name, tick in flushed.items() if name in homes}
            ranges = choose_ranges(
                reached, state.checked_ticks(f"collections/{each.collection_id}"), start=start, end=end
            )
            if not has_ticks(ranges):
                continue
            table = f"collections/{each.collection_id}"
            blocked = any(block.table == table for block in state.blocks)
            if each.collection_id in users or blocked or collection_frames.may_have_rows(settings, each, ranges):
                yield collection_frames.visible_rows(spark, settings, each, ranges, users.get(each.collection_id, ()))
            else:
                empty.append(TableCheckResult(table, ranges, collection_id=each.collection_id))


def _chosen(
    stored: Iterable[collection_frames.StoredCollection], wanted: Sequence[str]
) -> Iterator[collection_frames.StoredCollection]:
    known = list(stored)
    for name in wanted:
        if not any(name in (each.name, str(each.collection_id)) for each in known):
            raise CollectionNotFound(
                f"no collection {name!r} has stored rows; those that do: "
                f"{', '.join(each.name for each in known) or 'none'}"
            )
    return (each for each in known if not wanted or {each.name, str(each.collection_id)} & set(wanted))


def _user_suites(
    settings: Settings, stored: Sequence[collection_frames.StoredCollection]
) -> dict[int, tuple[Check, ...]]:
    """Return the users' checks by collection. All of them are validated before the first one runs."""
    found = {}
    for each in stored:
        columns = [collection_frames.safe_name(field.name) for field in each.schema.fields]
        checks = read_suite(settings, each.name, [*columns, *collection_frames.SYSTEM_COLUMNS])
        if checks:
            check_expectations(checks, where=str(suite_file(settings, each.name)))
            found[each.collection_id] = checks
    return found


def _summary(tables: Sequence[TableCheckResult], blocks: int) -> str:
    """Return the result of a run in one sentence, failures first."""
    checked = sum(len(table.results) for table in tables)
    failed = sum(len(table.failed) for table in tables)
    scope = f"{checked:,} expectations on {len(tables):,} tables"
    if not checked:
        found = "Nothing to check: no rows are newer than the last check"
    elif failed:
        found = f"{failed:,} of {scope} failed"
    else:
        found = f"All {scope} passed"
    return (
        f"{found}; {blocks:,} {'block prevents' if blocks == 1 else 'blocks prevent'} removals."
        if blocks
        else f"{found}."
    )


def _failures(table: TableCheckResult) -> list[FailedExpectation]:
    return [
        FailedExpectation(
            table=table.table,
            expectation=each.check.name,
            words=each.check.words,
            critical=each.check.critical,
            unexpected=each.unexpected,
            sample=each.sample[:5],
            error=each.error,
        )
        for each in table.failed
    ]


def _figures(table: TableCheckResult) -> dict[str, float]:
    return {
        "rows": table.rows,
        "seconds": round(table.seconds, 3),
        "expectations": len(table.results),
        "failed": len(table.failed),
    }
