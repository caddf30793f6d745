"""Continuous compaction of the ``wal`` table: merges small files of one PChannel and day, row for row.

The cost of a commit grows with the number of live files, and each micro-batch adds some. Files fall into tiers by size.
FAN_IN neighbours of one tier, in id order, become one file of the next tier, so each row is rewritten once per tier.
Rows and their order do not change. Old files stay on disk until VACUUM, for readers that planned with them. One commit
removes the old files and adds the new one (no data change). The committer's process makes it between two commits.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from typing import Final

import pyarrow as pa

from millrace.base.errors import DeadlineExceeded, TableUnavailable, WalGap
from millrace.base.failpoint import hit
from millrace.node.ingest.wal_writer import WalFileWriter
from millrace.storage.commit import CommitPart, commit_fenced
from millrace.storage.parquet_file import FileAction
from millrace.storage.table import LiveFile, TableHandle
from millrace.wal.schema import KIND_STATE, ROW_SCHEMA

FAN_IN: Final = 16
"""Neighbours of one tier that are merged into one file."""

TIER_BYTES: Final = (2 << 20, 32 << 20)
"""Upper bounds of the tiers. A file at or above the last bound is not merged."""

ROW_GROUP_BYTES: Final = 16 << 20
"""Approximate size up to which small row groups are joined."""

_ID: Final = ("ledger", "entry")

_DICTIONARIES: Final = [field.name for field in ROW_SCHEMA if pa.types.is_dictionary(field.type)]


def live_files(table: TableHandle) -> list[LiveFile]:
    """Return the files of messages and rejections at the table's version, in id order within a partition."""
    files = [file for file in table.describe_files(_ID) if file.partition["kind"] != KIND_STATE]
    return sorted(files, key=lambda file: (*file.partition.values(), first_entry(file)))


def first_entry(file: LiveFile) -> tuple[int, int]:
    """Return the (ledger, entry) of a file's first row."""
    return file.low["ledger"], file.low["entry"]


def last_entry(file: LiveFile) -> tuple[int, int]:
    """Return the (ledger, entry) of a file's last row."""
    return file.high["ledger"], file.high["entry"]


def _tier(file: LiveFile) -> int:
    """Return 0 for the smallest files, len(TIER_BYTES) for files that are not merged."""
    return next((tier for tier, bound in enumerate(TIER_BYTES) if file.size < bound), len(TIER_BYTES))


def plan_merge(files: Sequence[LiveFile], *, fan_in: int = FAN_IN) -> list[LiveFile]:
    """Return the next group to merge: `fan_in` neighbours of the lowest tier that has so many; empty if no tier has.

    `files` are in the order of :func:`live_files`.
    """
    best: list[LiveFile] = []
    for _, partition in itertools.groupby(files, key=lambda file: file.partition):
        for tier, run in itertools.groupby(partition, key=_tier):
            group = list(itertools.islice(run, fan_in))
            if tier < len(TIER_BYTES) and len(group) == fan_in and (not best or tier < _tier(best[0])):
                best = group
    return best


def compact_once(table: TableHandle, *, fan_in: int = FAN_IN, only: AbstractSet[str] | None = None) -> int:
    """Merge one group of files of `table`, a handle at its newest version, for the PChannels in `only`. Returns the
    files merged.

    Does nothing if another writer replaced one of the files first: the next call plans again. Raises WalGap if files
    overlap.
    """
    files = live_files(table)
    group = plan_merge(
        files if only is None else [file for file in files if file.partition["pchannel"] in only], fan_in=fan_in
    )
    if not group:
        return 0
    merged = _merge(table, group)
    hit("compaction.merged")
    part = CommitPart(adds=[merged], removes=[file.path for file in group], info={"replaced": len(group)})
    try:
        outcome = commit_fenced(table, [part], data_change=False)
    except (TableUnavailable, DeadlineExceeded):
        return 0  # the commit may have succeeded, so its file stays
    return 0 if outcome.fenced else len(group)


def _merge(table: TableHandle, group: Sequence[LiveFile]) -> FileAction:
    partition = group[0].partition
    pchannel = partition["pchannel"]
    file = WalFileWriter(table.store, partition["kind"], pchannel, partition["date"])
    try:
        previous: tuple[int, int] | None = None
        rows = 0
        for each in group:
            if previous is not None and first_entry(each) <= previous:
                raise WalGap(f"{each.path} overlaps another file of {pchannel}")
            previous = last_entry(each)
        for batch in _row_groups(table, group):
            file.write(batch)
            rows += batch.num_rows
        if rows != sum(each.rows for each in group):
            raise WalGap(f"{pchannel}: {rows} rows in files that should hold {sum(each.rows for each in group)}")
        action = file.close()
    except BaseException:
        file.discard()
        raise
    return action


def _row_groups(table: TableHandle, group: Sequence[LiveFile]) -> Iterator[pa.RecordBatch]:
    """Yield the rows of the files in order, in row groups of about ROW_GROUP_BYTES."""
    held: list[pa.Table] = []
    size = 0
    for each in group:
        with table.open_file(each.path, read_dictionary=_DICTIONARIES) as parquet:
            for number in range(parquet.num_row_groups):
                rows = parquet.read_row_group(number).cast(ROW_SCHEMA)
                if held and size + rows.nbytes > ROW_GROUP_BYTES:
                    yield _joined(held)
                    held, size = [], 0
                held.append(rows)
                size += rows.nbytes
    if held:
        yield _joined(held)


def _joined(tables: list[pa.Table]) -> pa.RecordBatch:
    return pa.concat_tables(tables).unify_dictionaries().combine_chunks().to_batches()[0]
