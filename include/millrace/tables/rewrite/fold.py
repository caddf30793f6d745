"""Folds: small files of a table are joined into larger ones, row for row, so that readers never meet many of them.

Small files of a partition fall into tiers by their size on disk, each tier up to eight times as large as the one below.
Once a tier has FAN_IN files, they become one file of a tier above. So each byte is rewritten once per tier, and a
partition has fewer than FAN_IN small files per tier after a fold. A day that is over gets no further rows: its
remaining small files become one file.

A fold keeps every row, the dead ones too; compaction removes those, and joins the files in which it set hidden rows
apart. Replaced files stay on disk until VACUUM, for
readers that have pinned an earlier version.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Final

from millrace.storage.table import LiveFile, TableHandle
from millrace.tables.collections.data_tables import DATE
from millrace.tables.rewrite.commits import RewriteCommitter, rewrite_and_commit
from millrace.tables.rewrite.files import FileGroup, Tiering, is_hidden, live_files, merge_groups, row_bytes
from millrace.tables.rewrite.rewrite import RewriteJob, RewriteResult, rewrite_in_process

FAN_IN: Final = 8
"""Files of one tier that are joined."""

TIER_BYTES: Final = (32 << 10, 256 << 10, 2 << 20)
"""Upper bounds of the tiers, on disk. A file at or above the last one is not small: it is left to compaction."""

MAX_GROUPS: Final = 8
"""Joined files of one fold: a table with many days of small files is caught up with in several."""

FOLD_BYTES: Final = 64 << 20
"""Approximate decoded size of a joined file: a fold takes about three times as much memory."""


def plan_folds(table: TableHandle) -> list[FileGroup]:
    """Return the files to join at the version of `table`. Reads rows only if there are any."""
    files = live_files(table)
    newest = max((file.partition[DATE] for file in files if DATE in file.partition), default="")
    small = [file for file in files if file.size < TIER_BYTES[-1] and not is_hidden(file)]
    growing = [file for file in small if file.partition.get(DATE, newest) == newest]
    over = [file for file in small if file.partition.get(DATE, newest) != newest]
    if not (_any(growing, _full_tiers) or _any(over, _one_tier)):
        return []
    size = row_bytes(small, table.store)
    return [
        *merge_groups(growing, bytes_per_row=size, target=FOLD_BYTES, min_files=2, tiers=_full_tiers),
        *merge_groups(over, bytes_per_row=size, target=FOLD_BYTES, min_files=2, tiers=_one_tier),
    ]


def fold_files(table: TableHandle, job: RewriteJob) -> tuple[list[RewriteResult], list[str]]:
    """Join the small files of `table`, a handle at its newest version, that are due.

    Returns what was committed, and why the other groups were not: another writer replaced one of their files, or a file
    cannot be read. The next fold plans them again. Raises what the commit raises.
    """
    replacer = RewriteCommitter(table, rewrites=None)
    groups = plan_folds(table)[:MAX_GROUPS]
    return rewrite_and_commit(replacer, job, groups, rewrite_in_process), replacer.given_up


def _tier(file: LiveFile) -> int:
    return next(tier for tier, bound in enumerate(TIER_BYTES) if file.size < bound)


def _full_tiers(files: Sequence[LiveFile], bytes_per_row: float) -> list[list[LiveFile]]:
    tiers = [list(tier) for _, tier in itertools.groupby(sorted(files, key=_tier), key=_tier)]
    return [tier for tier in tiers if len(tier) >= FAN_IN]


def _one_tier(files: Sequence[LiveFile], bytes_per_row: float) -> list[list[LiveFile]]:
    return [list(files)]


def _any(files: Sequence[LiveFile], tiers: Tiering) -> bool:
    """Return whether a partition has files to join, whatever their rows take in memory."""
    partitions = itertools.groupby(files, key=lambda file: file.partition)
    return any(len(tier) > 1 for _, partition in partitions for tier in tiers(list(partition), 0.0))
