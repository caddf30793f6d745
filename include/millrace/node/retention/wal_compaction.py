"""Continuous compaction of the ``wal`` table: merges small files of one PChannel and day, row for row.

The cost of a commit grows with the number of live files, and each micro-batch adds some. FAN_IN neighbours, in id
order, become one file if none of them is larger than the others together. So each merge at least doubles the file that
a row is in, and a row is rewritten a logarithmic number of times, whatever the sizes of commits. Beyond MOST_SMALL
small files of a day, the cheapest neighbours are merged in any case. A day that has ended is merged into few large
files, once.

Rows and their order do not change. Old files stay on disk until VACUUM, for readers that planned with them. One commit
removes the old files and adds the new ones (no data change). The committer's process makes it between two commits.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from typing import Final

import pyarrow as pa

from millrace.base.errors import DeadlineExceeded, TableUnavailable, WalGap
from millrace.base.failpoint import hit
from millrace.node.ingest.wal_writer import WalFileWriter
from millrace.storage.commit import CommitPart, commit_fenced
from millrace.storage.file_sink import delete_uncommitted
from millrace.storage.parquet_file import FileAction
from millrace.storage.table import LiveFile, TableHandle
from millrace.wal.schema import KIND_STATE, ROW_SCHEMA, complete_rows

FAN_IN: Final = 16
"""Neighbours that are merged into one file."""

MERGED_BYTES: Final = 32 << 20
"""A file of this size is not merged."""

MOST_SMALL: Final = 64
"""Neighbours below MERGED_BYTES, of one kind, PChannel and day, beyond which the cheapest are merged at any price."""

CALL_BYTES: Final = 64 << 20
CALL_FILES: Final = 256
"""Bytes that one call merges at most, unless a single group has more: the committer waits for it."""

ROW_GROUP_BYTES: Final = 16 << 20
"""Approximate size up to which small row groups are joined."""

_LARGE_ROW: Final = 2 << 10
"""Rows of this size are not compressed: their payloads cost more time than they save."""

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


def plan_merges(files: Sequence[LiveFile], *, fan_in: int = FAN_IN) -> list[list[LiveFile]]:
    """Return the groups of neighbours to merge now, the cheapest first; at most one of each day that has not ended.

    `files` are in the order of :func:`live_files`.
    """
    newest: dict[str, str] = {}
    for file in files:
        pchannel, date = file.partition["pchannel"], file.partition["date"]
        newest[pchannel] = max(date, newest.get(pchannel, date))
    found: list[list[LiveFile]] = []
    for _, partition in itertools.groupby(files, key=lambda file: file.partition):
        best: list[LiveFile] = []
        for is_small, neighbours in itertools.groupby(partition, key=lambda file: file.size < MERGED_BYTES):
            run = list(neighbours)
            if not is_small:
                continue
            if run[0].partition["date"] < newest[run[0].partition["pchannel"]]:
                found += _merges_of_ended(run)
                continue
            group = _cheapest(run, fan_in)
            if group and (not best or _bytes(group) < _bytes(best)):
                best = group
        if best:
            found.append(best)
    return sorted(found, key=_bytes)


def _cheapest(run: Sequence[LiveFile], fan_in: int) -> list[LiveFile]:
    """Return the cheapest `fan_in` neighbours that may be merged; empty if there are none."""
    groups = [list(run[start : start + fan_in]) for start in range(len(run) - fan_in + 1)]
    if len(run) <= MOST_SMALL:
        groups = [group for group in groups if 2 * max(file.size for file in group) <= _bytes(group)]
    return min(groups, key=_bytes, default=[])


def _merges_of_ended(run: Sequence[LiveFile]) -> list[list[LiveFile]]:
    """Return the small files of a day that has ended in groups of about MERGED_BYTES."""
    groups: list[list[LiveFile]] = [[]]
    for file in run:
        groups[-1].append(file)
        if _bytes(groups[-1]) >= MERGED_BYTES:
            groups.append([])
    return [group for group in groups if len(group) > 1]


def _bytes(group: Sequence[LiveFile]) -> int:
    return sum(file.size for file in group)


def compact_once(table: TableHandle, *, fan_in: int = FAN_IN, only: AbstractSet[str] | None = None) -> dict[str, int]:
    """Merge groups of files of `table`, a handle at its newest version, for the PChannels in `only`, in one commit.

    Returns the files merged, by PChannel. A group is left to the next call if another writer replaced one of its files
    first. Raises WalGap if files overlap.
    """
    files = live_files(table)
    plan = plan_merges(
        files if only is None else [file for file in files if file.partition["pchannel"] in only], fan_in=fan_in
    )
    groups: list[list[LiveFile]] = []
    size = count = 0
    for group in plan:
        size, count = size + _bytes(group), count + len(group)
        if groups and (size > CALL_BYTES or count > CALL_FILES):
            break
        groups.append(group)
    if not groups:
        return {}
    made: list[FileAction] = []
    try:
        for group in groups:
            made.append(_merge(table, group))
    except BaseException:
        delete_uncommitted(table.store, made)
        raise
    hit("compaction.merged")
    info = {"replaced": sum(map(len, groups))}
    parts = [
        CommitPart(adds=[action], removes=[file.path for file in group], info=info)
        for action, group in zip(made, groups, strict=True)
    ]
    try:
        outcome = commit_fenced(table, parts, data_change=False)
    except (TableUnavailable, DeadlineExceeded):
        return {}  # the commit may have succeeded, so its files stay
    merged: Counter[str] = Counter()
    for place, group in enumerate(groups):
        if place not in outcome.fenced:
            merged[group[0].partition["pchannel"]] += len(group)
    return dict(merged)


def _merge(table: TableHandle, group: Sequence[LiveFile]) -> FileAction:
    partition = group[0].partition
    pchannel = partition["pchannel"]
    compress = _bytes(group) < _LARGE_ROW * sum(file.rows for file in group)
    file = WalFileWriter(table.store, partition["kind"], pchannel, partition["date"], compress=compress)
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
                rows = complete_rows(parquet.read_row_group(number))
                if held and size + rows.nbytes > ROW_GROUP_BYTES:
                    yield _joined(held)
                    held, size = [], 0
                held.append(rows)
                size += rows.nbytes
    if held:
        yield _joined(held)


def _joined(tables: list[pa.Table]) -> pa.RecordBatch:
    return pa.concat_tables(tables).unify_dictionaries().combine_chunks().to_batches()[0]
