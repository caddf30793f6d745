"""A compaction run: for each collection its rows, then its deletes; then segments; finally VACUUM.

The order makes a fold safe: raise the base tick, remove dead rows, record the fold, and only then remove the deletes
that have nothing left to hit. After a crash between any two steps every read is still correct, and the next run
continues.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Final

from millrace.base.settings import Settings
from millrace.operations.compaction.declaration import CompactionParams
from millrace.operations.compaction.plan import (
    CollectionPlan,
    DeletesPlan,
    delete_job,
    flushed_collections,
    history_tick,
    is_folded,
    plan_changed,
    plan_deletes,
)
from millrace.operations.compaction.report import CollectionCompaction, CompactionReport, TableCompaction
from millrace.operations.compaction.segments import join_segments, merge_segment_files
from millrace.operations.compaction.vacuum import vacuum
from millrace.operations.entry import SessionFactory
from millrace.runtime.progress import Progress
from millrace.storage.table import open_table
from millrace.tables.rewrite.commits import (
    RewriteCommitter,
    folded_tick,
    raise_base_tick,
    rewrite_and_commit,
)
from millrace.tables.rewrite.files import FileGroup, live_files
from millrace.tables.rewrite.rewrite import (
    RewriteJob,
    RewriteMapper,
    RewriteResult,
    rewrite_in_process,
    spark_mapper,
)
from millrace.wal.visible.catalog import newest_schema

ZOrder = Callable[[CollectionPlan], None]

MAX_BYTES_WITHOUT_SPARK: Final = 64 << 20
"""Size on disk up to which a table's groups are rewritten in this process. Starting a JVM would take longer."""


def compaction(settings: Settings, params: CompactionParams, progress: Progress) -> CompactionReport:
    """Run the operation as its job does: with a Spark session if there is much to rewrite, or rows to Z-order."""
    from millrace.operations.entry import spark_session

    return run(settings, params, progress, session_factory=lambda: spark_session("compaction", settings, progress))


def run(
    settings: Settings,
    params: CompactionParams,
    progress: Progress,
    *,
    session_factory: SessionFactory,
    max_bytes_without_spark: int = MAX_BYTES_WITHOUT_SPARK,
) -> CompactionReport:
    """Compact.

    `session_factory` is called at most once, for a table whose groups exceed `max_bytes_without_spark` on disk.
    """
    with ExitStack() as stack:
        session = cache(lambda: stack.enter_context(session_factory()))

        def mapper(job: RewriteJob, groups: Sequence[FileGroup]) -> Iterable[RewriteResult]:
            if sum(group.size for group in groups) <= max_bytes_without_spark:
                return rewrite_in_process(job, groups)
            return spark_mapper(session(), cores=settings.cores)(job, groups)

        def order(plan: CollectionPlan) -> None:
            from millrace.operations.compaction.zorder import zorder

            zorder(session(), plan.rows, newest_schema(plan.collection.vchannels.values()), params.zorder_by)

        return compact(settings, params, progress, mapper=mapper, order=order)


def compact(
    settings: Settings,
    params: CompactionParams,
    progress: Progress | None = None,
    *,
    mapper: RewriteMapper = rewrite_in_process,
    order: ZOrder | None = None,
    history: int | None = None,
) -> CompactionReport:
    """Compact what the parameters ask for and return what was done.

    `mapper` rewrites the groups and `order` Z-orders. `history` is the tick after which nothing is folded in (default:
    log time minus the history to keep).

    A group whose files another writer replaced meanwhile is reported, and its new files are removed.

    Raises CollectionNotFound, QualityBlocked.
    """
    started = time.perf_counter()
    progress = progress or Progress()
    stages: dict[str, float] = {}
    if history is None:
        history = history_tick(settings, params)
    found = flushed_collections(settings, params.collections)
    works = []
    plans = plan_changed(settings, found, params, history=history)
    for number in range(len(found) + 1):
        with _stage(stages, "plan"):
            known, plan = next(plans, (None, None))  # the step after the last one records the idle collections
        if known is not None and plan is not None:
            progress.step(f"collection {known.name}", number, len(found))
            works.append(_collection(plan, params, mapper, order, stages))
    report = CompactionReport(dry_run=params.dry_run, known_collections=len(found), collections=works)
    changes: dict[str, object] = {}
    if params.segments:
        with _stage(stages, "segments"):
            changes["segments_joined"] = join_segments(
                settings, target=params.segment_mib << 20, dry_run=params.dry_run
            )
    if params.files:
        with _stage(stages, "segments"):
            changes["segments"] = merge_segment_files(settings, params, mapper)
    if params.vacuum:
        with _stage(stages, "vacuum"):
            ids = [known.collection_id for known in found] if params.collections else None
            done = vacuum(
                settings,
                progress,
                hours=params.vacuum_hours,
                collection_ids=ids,
                dry_run=params.dry_run,
                full=params.full,
            )
            changes |= {"vacuumed_files": done.files, "vacuumed_bytes": done.bytes}
    changes |= {"seconds": round(time.perf_counter() - started, 3), "stages": stages}
    return report.model_copy(update=changes)


def _collection(
    plan: CollectionPlan,
    params: CompactionParams,
    mapper: RewriteMapper,
    order: ZOrder | None,
    stages: dict[str, float],
) -> CollectionCompaction:
    work = CollectionCompaction(
        collection_id=plan.collection.collection_id,
        name=plan.collection.name,
        rows=TableCompaction(
            files=len(plan.row_files),
            small_files=sum(len(group.files) for group in plan.merges),
            groups=len(plan.row_groups()),
        ),
        deletes_known=plan.delete_count,
        deletes_foldable=plan.foldable,
        folded_to=plan.fold_tick or plan.folded_tick,
        base_tick=plan.base_tick,
        history_tick=plan.history_tick,
    )
    if params.dry_run:
        return work.model_copy(update={"deletes": _deletes_report(plan, plan_deletes(plan, params, work.folded_to))})
    with _stage(stages, "rows"):
        work = _rows(plan, work, mapper)
    if params.zorder_by and order is not None:
        with _stage(stages, "zorder"):
            order(plan)
            work = work.model_copy(update={"zordered": True})
    with _stage(stages, "deletes"):
        return work.model_copy(update={"deletes": _deletes(plan, params, mapper)})


def _rows(plan: CollectionPlan, work: CollectionCompaction, mapper: RewriteMapper) -> CollectionCompaction:
    """Merge files and, if the plan folds, drop the dead rows."""
    replacer = RewriteCommitter.of(plan.rows)
    job, groups = plan.row_job(), plan.row_groups()
    base = plan.base_tick
    if plan.fold_tick:
        base = raise_base_tick(plan.rows, plan.fold_tick)
    done = rewrite_and_commit(replacer, job, groups, mapper)
    folded = plan.folded_tick
    if plan.fold_tick and not replacer.given_up and not replacer.superseded and replacer.mark_folded(plan.fold_tick):
        folded = plan.fold_tick
    rows = work.rows.with_rewrites(done, replacer.given_up)
    return work.model_copy(update={"rows": rows, "base_tick": base, "folded_to": folded})


def _deletes(plan: CollectionPlan, params: CompactionParams, mapper: RewriteMapper) -> TableCompaction:
    """Remove the deletes that have nothing left to hit, and merge files."""
    plan.deletes = open_table(plan.deletes_uri)
    if plan.deletes is None:
        return TableCompaction()
    # Read the folded tick after opening the deletes table. A recovery that rebuilds both tables takes the fold back
    # before it restores deletes: so either these deletes are the old ones and the commit is fenced, or nothing is
    # folded.
    folded = folded_tick(open_table(plan.rows_uri))
    plan.delete_files = live_files(plan.deletes, key=plan.collection.key[0])
    deletes = plan_deletes(plan, params, folded)
    work = _deletes_report(plan, deletes)
    if not deletes.groups:
        return work
    replacer = RewriteCommitter.of(plan.deletes)

    def whole_files_first(job: RewriteJob, chosen: Sequence[FileGroup]) -> Iterator[RewriteResult]:
        rest = []
        for group in chosen:
            if all(is_folded(file, folded) for file in group.files):
                yield RewriteResult(group, rows_in=sum(file.rows for file in group.files))
            else:
                rest.append(group)
        if rest:
            yield from mapper(job, rest)

    done = rewrite_and_commit(replacer, delete_job(plan, folded), deletes.groups, whole_files_first)
    return work.with_rewrites(done, replacer.given_up)


def _deletes_report(plan: CollectionPlan, deletes: DeletesPlan) -> TableCompaction:
    """Return what was found in the deletes table."""
    small = sum(len(group.files) for group in deletes.merges)
    return TableCompaction(files=len(plan.delete_files), small_files=small, groups=len(deletes.groups))


@contextmanager
def _stage(stages: dict[str, float], name: str) -> Iterator[None]:
    started = time.perf_counter()
    try:
        yield
    finally:
        stages[name] = round(stages.get(name, 0.0) + time.perf_counter() - started, 3)
