"""Whether compaction is worth its cost now, measured from the Delta logs, without Spark and without reading rows.

The DAG asks this before it starts a driver. The thresholds are those of the parameters, so a run with the same
parameters does what is reported here.
"""

from __future__ import annotations

from typing import Final

from millrace.base.settings import Settings
from millrace.operations.compaction.declaration import CompactionParams
from millrace.operations.compaction.plan import flushed_collections, history_tick, plan_changed, plan_deletes
from millrace.operations.compaction.report import CollectionNeed, CompactionNeed
from millrace.operations.compaction.segments import joinable_runs, plan_segment_files
from millrace.operations.compaction.vacuum import reclaimable_bytes
from millrace.storage.table import open_table

RECLAIM_BYTES: Final = 256 << 20
"""Bytes that VACUUM would free from which on they alone justify a run."""

SMALL_SEGMENTS: Final = 16
"""Segments to join from which on they alone justify a run."""


def need(settings: Settings, params: CompactionParams | None = None) -> CompactionNeed:
    """Return what a run with `params` (default: all defaults) would find, and whether that justifies the run."""
    params = params or CompactionParams()
    history = history_tick(settings, params)
    why: list[str] = []
    collections: list[CollectionNeed] = []
    found = flushed_collections(settings, params.collections)
    for known, plan in plan_changed(settings, found, params, history=history):
        if plan is None:
            continue
        deletes = plan_deletes(plan, params, plan.fold_tick or plan.folded_tick)
        small = sum(len(group.files) for group in (*plan.merges, *deletes.merges))
        reasons = []
        if small:
            reasons.append(f"{small} small files")
        if plan.masked:
            reasons.append(f"hidden rows of {len(plan.masked)} files to set apart")
        if deletes.gone and not plan.fold_tick:
            reasons.append(f"{len(deletes.gone)} files of deletes that are folded in")
        if plan.fold_tick:
            reasons.append(f"{plan.foldable} deletes to fold in ({plan.delete_ratio:.0%} of the rows)")
        why += [f"{known.name}: {each}" for each in reasons]
        collections.append(
            CollectionNeed(
                collection_id=known.collection_id,
                name=known.name,
                files=len(plan.row_files) + len(plan.delete_files),
                small_files=small,
                deletes_known=plan.delete_count,
                deletes_foldable=plan.foldable,
                delete_ratio=round(plan.delete_ratio, 4),
                drops_foldable=plan.drops_foldable,
                needed=bool(reasons),
            )
        )
    table = open_table(settings.segments_uri)
    segments = segment_files = 0
    if table is not None:
        if params.segments:
            segments = sum(len(run) - 1 for *_, run in joinable_runs(settings, table, target=params.segment_mib << 20))
        segment_files = plan_segment_files(table, params)[1].small_files
    bytes_ = reclaimable_bytes(settings, hours=params.vacuum_hours, full=params.full) if params.vacuum else 0
    why += [f"{segments} small segments"] if segments >= SMALL_SEGMENTS else []
    why += [f"{segment_files} small files of segments"] if segment_files else []
    why += [f"{bytes_ >> 20} MiB for VACUUM to free"] if bytes_ >= RECLAIM_BYTES else []
    return CompactionNeed(
        needed=bool(why),
        why=why,
        known_collections=len(found),
        collections=collections,
        small_segments=segments,
        segment_files=segment_files,
        reclaimable_bytes=bytes_,
    )
