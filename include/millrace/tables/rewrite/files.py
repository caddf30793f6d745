"""The live files of a Delta table according to its log, and the choice of files to merge.

Sizes are of decoded columns, estimated from a sample: they determine a task's memory and the end of a file. Bytes on
disk can differ by a factor of ten either way. Merging is size-tiered: a file is rewritten only together with others
that are at least as large in sum, so each row is rewritten a logarithmic number of times, however often compaction
runs.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from millrace.storage.parquet_file import open_file
from millrace.storage.store import TableStore
from millrace.storage.table import LiveFile, TableHandle
from millrace.tables.collections.data_tables import TICK

SMALL_SHARE: Final = 0.5
"""A file, or a segment, below this share of the target is small."""

TINY_BYTES: Final = 1 << 20
"""Files below this size are merged regardless of the sizes of the others."""

SAMPLES: Final = 3
"""Files of which a row group is read to estimate the size of a row."""


@dataclass(frozen=True, slots=True)
class FileGroup:
    """Files of one partition that are rewritten together: one task's work and one part of a commit."""

    files: tuple[LiveFile, ...]
    for_hidden: bool = False
    """Whether the rewrite is worth it for the hidden rows alone, which it sets apart."""

    @property
    def partition(self) -> dict[str, str | None]:
        return dict(self.files[0].partition)

    @property
    def size(self) -> int:
        return sum(file.size for file in self.files)

    @property
    def paths(self) -> tuple[str, ...]:
        return tuple(file.path for file in self.files)


def live_files(table: TableHandle, *, key: str | None = None) -> list[LiveFile]:
    """Return the files of the table at its version with the bounds of tick and `key`, by partition and tick."""
    found = table.describe_files((TICK,) if key is None else (TICK, key))
    return sorted(found, key=lambda file: (*file.partition.values(), file.low[TICK] or 0, file.path))


def row_bytes(files: Sequence[LiveFile], store: TableStore) -> float:
    """Return the decoded bytes of a row, estimated from the first row groups of the largest files.

    1 if there are none.
    """
    total, rows = 0, 0
    for file in sorted(files, key=lambda file: file.size, reverse=True)[:SAMPLES]:
        with open_file(store, file.path) as parquet:
            for batch in parquet.iter_batches(batch_size=10_000, row_groups=[0] if parquet.num_row_groups else []):
                total, rows = total + batch.nbytes, rows + batch.num_rows
                break
    return total / rows if rows else 1.0


HIDDEN: Final = "hidden"
"""First word of the names of files whose rows were all hidden when they were written."""


def is_hidden(file: LiveFile) -> bool:
    """Return whether the file has only rows that a rewrite set apart. They are merged among themselves."""
    return file.path.rpartition("/")[2].startswith(f"{HIDDEN}-")


Tiering = Callable[[Sequence[LiveFile], float], list[list[LiveFile]]]
"""Splits files of one partition, whose rows have so many decoded bytes, into tiers that are merged among themselves."""


def merge_groups(
    files: Sequence[LiveFile],
    *,
    bytes_per_row: float,
    target: int,
    min_files: int,
    tiers: Tiering | None = None,
) -> list[FileGroup]:
    """Choose small files to merge: at least `min_files` of a partition and about `target` decoded bytes at most.

    `tiers` (default: by the sums of sizes) splits a partition's small files.
    """
    groups: list[FileGroup] = []
    for _, partition in itertools.groupby(files, key=lambda file: file.partition):
        small = [file for file in partition if file.rows * bytes_per_row < target * SMALL_SHARE]
        for tier in (tiers or _tiers)(small, bytes_per_row):
            taken: list[LiveFile] = []
            held = 0.0
            for file in sorted(tier, key=lambda file: (file.low[TICK] or 0, file.path)):
                size = file.rows * bytes_per_row
                if taken and held + size > target:
                    groups += [FileGroup(tuple(taken))] if len(taken) >= min_files else []
                    taken, held = [], 0.0
                taken.append(file)
                held += size
            groups += [FileGroup(tuple(taken))] if len(taken) >= min_files else []
    return groups


def _tiers(files: Sequence[LiveFile], bytes_per_row: float) -> list[list[LiveFile]]:
    """Split the files into size tiers. A file larger than twice the sum of its tier so far starts a new tier."""
    tiers: list[list[LiveFile]] = []
    held = 0.0
    for file in sorted(files, key=lambda file: (file.rows, file.path)):
        size = file.rows * bytes_per_row
        if not tiers or size > max(2 * held, TINY_BYTES):
            tiers.append([])
            held = 0.0
        tiers[-1].append(file)
        held += size
    return tiers
