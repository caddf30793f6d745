"""Continuous compaction of the ``wal`` table: small files of one PChannel and day into larger ones, row for row.

What a commit costs grows with the number of live files, and a streaming node adds some with each micro-batch. Files fall
into tiers by size; where FAN_IN neighbours of one tier stand side by side in id order they become one file of the next
tier, so that a row is rewritten once a tier and the number of live files stays small. The rows stay as they are and in
order; the old files stay on disk until VACUUM, for readers that have planned with them. One commit removes the old and
adds the new (no data change); it is made by the process of the committer, between two of its commits.
"""

from __future__ import annotations

import itertools
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc
from deltalake import CommitProperties, DeltaTable, PostCommitHookProperties
from deltalake.exceptions import CommitFailedError
from deltalake.transaction import AddAction, RemoveAction

from millrace.errors import WalGap
from millrace.failpoint import hit
from millrace.node.wal_writer import FileAction, RowFile
from millrace.tables.delta_log import commit_lease, commit_names, stands
from millrace.tables.parquet_file import opened
from millrace.tables.wal_table import TABLE_SCHEMA, partition_path, sync_log
from millrace.wal.schema import KIND_STATE, PARTITION_COLUMNS, ROW_SCHEMA

FAN_IN: Final = 16
"""Neighbours of one tier that become one file."""

TIER_BYTES: Final = (2 << 20, 32 << 20)
"""Upper bounds of the tiers; a file of the last bound or more is left alone."""

ROW_GROUP_BYTES: Final = 16 << 20
"""Small row groups are joined up to about this size."""

_DICTIONARIES: Final = [field.name for field in ROW_SCHEMA if pa.types.is_dictionary(field.type)]
_HOOKS: Final = PostCommitHookProperties(create_checkpoint=False, cleanup_expired_logs=False)


@dataclass(frozen=True, slots=True)
class LiveFile:
    """One live file of messages or rejections; `low` and `high` are (ledger, entry)."""

    path: str
    size: int
    rows: int
    kind: str
    pchannel: str
    date: str
    low: tuple[int, int]
    high: tuple[int, int]

    @property
    def tier(self) -> int:
        """0 for the smallest files; len(TIER_BYTES) for those that stay."""
        return next((tier for tier, bound in enumerate(TIER_BYTES) if self.size < bound), len(TIER_BYTES))


def live_files(table: DeltaTable) -> list[LiveFile]:
    """The files of messages and rejections at the table's version, from its log alone, in id order within a partition."""
    actions = pa.table(table.get_add_actions(flatten=True))
    if actions.num_rows == 0:
        return []
    actions = actions.filter(pc.not_equal(actions["partition.kind"], KIND_STATE))
    files = [
        LiveFile(
            path=row["path"],
            size=row["size_bytes"],
            rows=row["num_records"],
            kind=row["partition.kind"],
            pchannel=row["partition.pchannel"],
            date=str(row["partition.date"]),
            low=(row["min.ledger"], row["min.entry"]),
            high=(row["max.ledger"], row["max.entry"]),
        )
        for row in actions.to_pylist()
    ]
    return sorted(files, key=lambda file: (file.kind, file.pchannel, file.date, file.low))


def plan(files: Sequence[LiveFile], *, fan_in: int = FAN_IN) -> list[LiveFile]:
    """The next group to merge: `fan_in` neighbours of one tier, of the lowest tier that has such; empty where none has.

    `files` are in the order of :func:`live_files`.
    """
    best: list[LiveFile] = []
    for _, partition in itertools.groupby(files, key=lambda file: (file.kind, file.pchannel, file.date)):
        for tier, run in itertools.groupby(partition, key=lambda file: file.tier):
            group = list(itertools.islice(run, fan_in))
            if tier < len(TIER_BYTES) and len(group) == fan_in and (not best or tier < best[0].tier):
                best = group
    return best


def compact_once(table: DeltaTable, path: Path, *, fan_in: int = FAN_IN) -> int:
    """Merge one group of files of `table` (a handle at its newest version, for the table at `path`); files merged.

    Where another writer was first, nothing happens: the next call plans anew. Raises WalGap for files that overlap.
    """
    group = plan(live_files(table), fan_in=fan_in)
    if not group:
        return 0
    merged = _merge(path, group)
    hit("compaction.merged")
    try:
        if replace_files(table, path, group[0].pchannel, group[0].kind, merged, [file.path for file in group]):
            return len(group)
    except CommitFailedError:
        return 0  # the storage: the commit may stand, and its file stays
    (path / merged.path).unlink(missing_ok=True)
    return 0


def replace_files(
    table: DeltaTable, path: Path, pchannel: str, kind: str, made: FileAction, removed: Sequence[str]
) -> bool:
    """Commit `made` in the place of `removed`, which hold the same rows (of one PChannel and kind), from the very version `table` stands at.

    False where another writer was first, and then nothing happened. Afterwards `table` is at the new version. Raises
    CommitFailedError where nobody was first: then the commit may stand, and `made` has to stay.
    """
    now = int(time.time() * 1000)
    actions: list[AddAction | RemoveAction] = [
        AddAction(made.path, made.size, _values(pchannel, kind, made.date), now, False, made.stats()),
        *(RemoveAction(name, False, now, partition_values=_values(pchannel, kind, _date(name))) for name in removed),
    ]
    with commit_lease(path):
        checked = int(table.version())
        if not stands(path, checked):
            return False
        try:
            table.create_write_transaction(
                actions,
                mode="append",
                schema=TABLE_SCHEMA,
                partition_by=list(PARTITION_COLUMNS),
                commit_properties=CommitProperties(
                    max_commit_retries=0, custom_metadata={"millrace": {"replaced": len(removed)}}
                ),
                post_commithook_properties=_HOOKS,
            )
        except CommitFailedError:
            table.update_incremental()
            if int(table.version()) == checked:
                raise
            if not commit_names(path, checked + 1, made.path):
                return False  # the answer of ours was not lost: somebody else's commit stands in its place
        table.update_incremental()
        sync_log(path, checked + 1)
    return True


def _values(pchannel: str, kind: str, date: str) -> dict[str, str | None]:
    return {"kind": kind, "pchannel": pchannel, "date": date}


def _date(name: str) -> str:
    return name.partition("/date=")[2].partition("/")[0]


def _merge(path: Path, group: Sequence[LiveFile]) -> FileAction:
    first = group[0]
    folder = partition_path(first.kind, first.pchannel, first.date)
    file = RowFile(path, f"{folder}/{uuid.uuid4().hex}.parquet", first.kind, first.date)
    try:
        previous: tuple[int, int] | None = None
        rows = 0
        for each in group:
            if previous is not None and each.low <= previous:
                raise WalGap(f"{each.path} holds entries that another file of {each.pchannel} holds too")
            previous = each.high
        for batch in _row_groups(path, group):
            file.write(batch)
            rows += batch.num_rows
        if rows != sum(each.rows for each in group):
            raise WalGap(f"{first.pchannel}: {rows} rows in files that should hold {sum(each.rows for each in group)}")
        action = file.close()
    except BaseException:
        file.discard()
        raise
    return action


def _row_groups(path: Path, group: Sequence[LiveFile]) -> Iterator[pa.RecordBatch]:
    """The rows of the files in order, in row groups of about ROW_GROUP_BYTES."""
    held: list[pa.Table] = []
    size = 0
    for each in group:
        with opened(path / each.path, read_dictionary=_DICTIONARIES) as parquet:
            for number in range(parquet.num_row_groups):
                table = parquet.read_row_group(number).cast(ROW_SCHEMA)
                if held and size + table.nbytes > ROW_GROUP_BYTES:
                    yield _joined(held)
                    held, size = [], 0
                held.append(table)
                size += table.nbytes
    if held:
        yield _joined(held)


def _joined(tables: list[pa.Table]) -> pa.RecordBatch:
    return pa.concat_tables(tables).unify_dictionaries().combine_chunks().to_batches()[0]
