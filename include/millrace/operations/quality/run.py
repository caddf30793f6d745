"""The operation `quality`: pin versions, check each table over its range, record, quarantine, write the Data Docs.

A failed expectation is not an exception: it appears in the report, in ``quality/results`` and in the gate. An exception
means that the check itself could not run, for example because a user's suite is invalid or a table cannot be read.
"""

from __future__ import annotations

import tempfile
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import Field

from millrace.base.errors import CollectionNotFound
from millrace.base.settings import Settings
from millrace.catalog.sqlite_file import without_aliases
from millrace.operations.coverage import Coverage
from millrace.operations.entry import SessionFactory
from millrace.operations.operation import OperationReport
from millrace.operations.quality import collection_frames, data_docs, frames, quarantine
from millrace.operations.quality.checks import Check, TableCheckResult
from millrace.operations.quality.collection_frames import StoredCollection
from millrace.operations.quality.declaration import ALL_TABLES, QualityParams, first_tick_at
from millrace.operations.quality.frames import ValidationInput
from millrace.operations.quality.gx_validator import Validator, check_expectations
from millrace.operations.quality.ranges import choose_ranges, has_ticks
from millrace.operations.quality.results import read_state, record_run
from millrace.operations.quality.small_collections import SmallCollection, batches, read_small
from millrace.operations.quality.snapshot import DeploymentSnapshot, take_snapshot
from millrace.operations.quality.state import QualityState
from millrace.operations.quality.user_suites import read_suite, suite_file, suites_folder
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
    known_tables: int = Field(default=0, description="Tables that the run looked at.")
    unchanged_tables: int = Field(default=0, description="Those of them that have not changed since they passed.")
    blocks: tuple[str, ...] = Field(description="Ids of all blocks in force, of this run and of earlier ones.")
    quarantined: tuple[str, ...]
    docs: str | None = Field(description="Index page of the Data Docs.")
    seconds: float


def quality(settings: Settings, params: QualityParams, progress: Progress) -> QualityReport:
    """Run the operation as its job does: with a Spark session if there is something to check."""
    from millrace.operations.entry import spark_session

    return run(settings, params, progress, session_factory=lambda: spark_session("quality", settings, progress))


def run(
    settings: Settings, params: QualityParams, progress: Progress, *, session_factory: SessionFactory
) -> QualityReport:
    """Run the checks that `params` select. `session_factory` is called at most once.

    Raises InvalidSuite, CollectionNotFound.
    """
    with ExitStack() as stack:
        return _run(cache(lambda: stack.enter_context(session_factory())), settings, params, progress, stack)


def _run(
    session: Callable[[], SparkSession], settings: Settings, params: QualityParams, progress: Progress, scope: ExitStack
) -> QualityReport:
    started, run_id = time.perf_counter(), f"{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}-{uuid.uuid4().hex[:6]}"
    state = read_state(settings)
    progress.update("selecting tables and ranges")
    chosen = Selection(Coverage.load(settings, "quality", depends={"format": 1}, ignore=params.ignores_records))
    found = list(_frames(session, settings, params, state, chosen))
    small = batches(chosen.small)
    outcomes = chosen.empty
    pages: str | None = None
    total = len(found) + sum(len(each.members) for each in small)
    if total:
        progress.update("starting Great Expectations", tables=total)
        folder = Path(scope.enter_context(tempfile.TemporaryDirectory(prefix="millrace-docs-")))
        validator = Validator(docs=folder if params.data_docs else None, samples=params.samples)
        checked = 0
        for frame in found:
            progress.step(f"checking {frame.table}", checked, total)
            outcomes.append(validator.check(frame, run_id=run_id))
            checked += 1
        for batch in small:
            progress.step(f"checking {len(batch.members):,} small collections", checked, total)
            whole = validator.check(batch.frame(session()), run_id=run_id)
            if not whole.failed:
                outcomes += batch.passed(whole)
                checked += len(batch.members)
                continue
            for each in batch.members:
                progress.step(f"checking {each.stored.name}", checked, total)
                alone = collection_frames.visible_rows(session(), settings, each.stored, each.ranges)
                outcomes.append(validator.check(alone, run_id=run_id))
                checked += 1
        docs, made = data_docs.docs_store(settings), validator.write_docs() is not None
        if made:
            data_docs.put_pages(docs, folder)
        data_docs.remove_old_runs(docs)
        if made:
            pages = data_docs.write_index(docs)
    progress.update("recording the results", done=1.0)
    state = record_run(settings, run_id, outcomes)
    if not (params.start or params.end):
        chosen.record(outcomes)
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
        known_tables=chosen.covered.tables,
        unchanged_tables=chosen.covered.unchanged,
        blocks=tuple(block.id for block in state.blocks),
        quarantined=tuple(each.id for each in quarantined),
        docs=pages,
        seconds=round(time.perf_counter() - started, 3),
    )


@dataclass(slots=True)
class Selection:
    """Other things that a run found to check besides the frames, and those that it may record as checked."""

    covered: Coverage
    small: list[SmallCollection] = field(default_factory=list)
    empty: list[TableCheckResult] = field(default_factory=list)
    """Results of collections without rows in their range."""
    complete: dict[int, StoredCollection] = field(default_factory=dict)
    """Collections whose tables hold nothing after the range of this run."""
    wal: bool = False
    """Whether all checks of the WAL were selected."""
    checkpoints: bool = False

    def record(self, outcomes: Sequence[TableCheckResult]) -> None:
        """Record the tables that were checked completely and passed."""
        failed = {each.table for each in outcomes if each.failed}
        for number in self.complete:
            if f"collections/{number}" not in failed:
                self.covered.record(f"collections/{number}")
                self.covered.record(f"deletes/{number}")
        if self.wal and not any(table.startswith("wal") for table in failed):
            self.covered.record("wal")
        if self.checkpoints and "checkpoints" not in failed:
            self.covered.record("checkpoints")
        self.covered.save()


def _frames(
    session: Callable[[], SparkSession],
    settings: Settings,
    params: QualityParams,
    state: QualityState,
    selection: Selection,
) -> Iterator[ValidationInput]:
    """Yield what to check: each table over its own range of one consistent snapshot.

    Tables that have not changed since they passed are skipped, and tables without new rows.

    A small collection goes to `selection.small`. A collection without rows in its range goes to `selection.empty`,
    because a Spark check of no rows still takes seconds. Exceptions are a collection with user checks, which may
    require rows, and one with a block, which an empty check can lift.
    """
    chosen = params.tables or ALL_TABLES
    start, end = first_tick_at(params.start), first_tick_at(params.end)
    blocked = {block.table for block in state.blocks}
    suites = {path.stem for path in suites_folder(settings).glob("*.json")} if "collections" in chosen else set()
    numbers = {block.collection_id for block in state.blocks}
    pinned = take_snapshot(settings, selection.covered, names=suites, numbers=numbers)
    if pinned is None:
        return
    wal, flushed, stored = pinned.wal, pinned.flushed_ticks, pinned.collections
    users = _user_suites(settings, list(stored.values()) if "collections" in chosen else [])
    same = pinned.unchanged if not any(table.startswith("wal") for table in blocked) else frozenset()
    selection.wal, selection.checkpoints = "wal" in chosen, "checkpoints" in chosen
    if "wal" in chosen and "wal" not in same:
        ranges = choose_ranges(wal.committed_ticks, state.checked_ticks("wal"), start=start, end=end)
        if has_ticks(ranges):
            yield frames.messages(session(), wal, ranges)
        # Further rejections may have arrived at a range's open end, because a rejection has no tick of its own.
        ranges = choose_ranges(wal.committed_ticks, state.checked_ticks("wal/rejections"), start=start, end=end)
        yield frames.rejections(session(), wal, ranges)
        yield frames.channels(session(), wal, trimmed_totals(wal.table))
    if "checkpoints" in chosen and flushed and not ({"wal", "checkpoints"} <= same and "checkpoints" not in blocked):
        yield frames.checkpoints(session(), settings, pinned.checkpoints_version, wal)
    if "segments" in chosen and pinned.segments_version is not None:
        ranges = choose_ranges(flushed, state.checked_ticks("segments"), start=start, end=end)
        if has_ticks(ranges):
            versions = partial(_versions, settings, pinned)
            yield frames.segments(session(), settings, pinned.segments_version, ranges, versions)
    if "collections" in chosen:
        for each in _chosen(
            stored.values(), params.collections, without_aliases(settings.data_dir, params.collections)
        ):
            homes = set(each.pchannels.values())
            reached = {name: tick for name, tick in flushed.items() if name in homes}
            table = f"collections/{each.collection_id}"
            ranges = choose_ranges(reached, state.checked_ticks(table), start=start, end=end)
            if all(tick <= reached.get(each.pchannels[name], 0) for name, tick in each.flushed_ticks.items()):
                selection.complete[each.collection_id] = each
            if not has_ticks(ranges):
                continue
            wanted = each.collection_id in users or table in blocked
            if wanted or collection_frames.may_have_rows(settings, each, ranges):
                small = None if wanted else read_small(settings, each, ranges)
                if small is not None:
                    selection.small.append(small)
                else:
                    checks = users.get(each.collection_id, ())
                    yield collection_frames.visible_rows(session(), settings, each, ranges, checks)
            else:
                selection.empty.append(TableCheckResult(table, ranges, collection_id=each.collection_id))


def _versions(settings: Settings, pinned: DeploymentSnapshot, numbers: list[int]) -> dict[int, tuple[int, int]]:
    """Return version and rewritten tick of collections with flushed segments, pinning those that are not yet."""
    found = {
        number: pinned.collections.get(number) or collection_frames.pin_collection(settings, number, infos)
        for number, infos in pinned.known.items()
        if number in numbers
    }
    return {number: (each.rows_version, each.folded_tick) for number, each in found.items() if each is not None}


def _chosen(
    stored: Iterable[StoredCollection], given: Sequence[str], resolved: Sequence[str]
) -> Iterator[StoredCollection]:
    """Return the collections that are `given` by name, alias or id; `resolved` has ids in place of aliases."""
    known = list(stored)
    for name, wanted in zip(given, resolved, strict=True):
        if not any(wanted in (each.name, str(each.collection_id)) for each in known):
            raise CollectionNotFound(
                f"no collection {name!r} has stored rows; those that do: "
                f"{', '.join(each.name for each in known) or 'none'}"
            )
    return (each for each in known if not given or {each.name, str(each.collection_id)} & set(resolved))


def _user_suites(settings: Settings, stored: Sequence[StoredCollection]) -> dict[int, tuple[Check, ...]]:
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
