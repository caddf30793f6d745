"""Joins small flushed segments in the bookkeeping, and merges the files of the table ``segments``.

The first segment of a run absorbs the others: it gets a row with their rows and bytes added, and each of them gets a
row with state ``dropped`` that names it (``merged_into``). No new id is assigned, so a later drop of the partition
finds the segment like any other, even if the drop was under way during this commit. Rows keep the ``_segment_id`` that
the chain assigned: a collection rebuilt from the WAL is identical, row for row.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from millrace.base.failpoint import hit
from millrace.base.settings import Settings
from millrace.operations.compaction.declaration import CompactionParams
from millrace.operations.compaction.plan import plan_merges
from millrace.operations.compaction.report import TableCompaction
from millrace.storage.commit import AppTransaction, CommitPart, commit_fenced
from millrace.storage.parquet_file import FileAction
from millrace.storage.table import TableHandle, open_table
from millrace.tables.collections.data_tables import REWRITES_APP
from millrace.tables.collections.flush_tables import (
    PCHANNEL,
    ensure_segments_table,
    read_checkpoints,
    read_segments,
    write_segments,
)
from millrace.tables.rewrite.commits import RewriteCommitter, rewrite_and_commit
from millrace.tables.rewrite.files import SMALL_SHARE, FileGroup, live_files
from millrace.tables.rewrite.rewrite import RewriteMapper, segments_job
from millrace.wal.visible.catalog import SegmentEvent


def joinable_runs(
    settings: Settings, table: TableHandle, *, target: int
) -> Iterator[tuple[str, int, list[SegmentEvent]]]:
    """Yield (PChannel, tick, segments to join): at least two segments in the order of ids, of `target` bytes at most.

    The checkpoints are read before `table` is refreshed. The tick is the checkpoint's, and later than each segment's
    own.
    """
    checkpoints = read_checkpoints(open_table(settings.checkpoints_uri))
    table.refresh()
    ticks = {name: each.time_tick for name, each in checkpoints.items()}
    rows = read_segments(table).to_pylist()

    def place(row: dict[str, Any]) -> tuple[str, str, int]:
        return row[PCHANNEL], row["vchannel"], row["partition_id"]

    for (pchannel, *_), found in itertools.groupby(
        sorted(rows, key=lambda row: (*place(row), row["segment_id"])), key=place
    ):
        tick = ticks.get(pchannel, 0)
        run: list[SegmentEvent] = []
        for row in found:
            event = SegmentEvent(**{name: value for name, value in row.items() if name != PCHANNEL})
            if event.state != "flushed" or event.time_tick >= tick or event.bytes >= target * SMALL_SHARE:
                continue
            if run and sum(each.bytes for each in run) + event.bytes > target:
                if len(run) > 1:
                    yield pchannel, tick, run
                run = []
            run.append(event)
        if len(run) > 1:
            yield pchannel, tick, run


def joined_events(run: Sequence[SegmentEvent], tick: int) -> list[SegmentEvent]:
    """Return the rows that record at `tick` that the first segment of `run` absorbed the others."""
    first, *others = run
    whole = first._replace(rows=sum(each.rows for each in run), bytes=sum(each.bytes for each in run), time_tick=tick)
    return [whole, *(each._replace(state="dropped", time_tick=tick, merged_into=first.segment_id) for each in others)]


def join_segments(settings: Settings, *, target: int, dry_run: bool) -> int:
    """Join small segments and return how many were joined to another one. A dry run only counts them."""
    path = settings.segments_uri
    table = open_table(path)
    if table is None:
        return 0
    runs = list(joinable_runs(settings, table, target=target))
    count = sum(len(run) - 1 for *_, run in runs)
    if dry_run or not runs:
        return count
    table = ensure_segments_table(path)  # a table made by an older version gets the column here
    base = table.app_version(REWRITES_APP)
    actions: list[FileAction] = []
    for pchannel, events in itertools.groupby(runs, key=lambda each: each[0]):
        rows = [event for _, tick, run in events for event in joined_events(run, tick)]
        actions += write_segments(path, pchannel, rows)
    if commit_fenced(
        table, [CommitPart(actions, app_transactions={REWRITES_APP: AppTransaction(base, base + 1)})]
    ).fenced:
        return 0  # another compaction joined them
    hit("compact.segments")
    return count


def plan_segment_files(table: TableHandle, params: CompactionParams) -> tuple[list[FileGroup], TableCompaction]:
    """Return the merges of the table ``segments``, and what was found in it."""
    files = live_files(table)
    groups = plan_merges(files, table.store, params)
    small = sum(len(each.files) for each in groups)
    return groups, TableCompaction(files=len(files), small_files=small, groups=len(groups))


def merge_segment_files(settings: Settings, params: CompactionParams, mapper: RewriteMapper) -> TableCompaction:
    """Merge the small files of ``segments``, row for row."""
    path = settings.segments_uri
    table = open_table(path)
    if table is None:
        return TableCompaction()
    groups, work = plan_segment_files(table, params)
    if params.dry_run or not groups:
        return work
    replacer = RewriteCommitter.of(table)
    done = rewrite_and_commit(replacer, segments_job(path), groups, mapper)
    return work.with_rewrites(done, replacer.given_up)
