"""The report of a compaction, as plain data for the task's result, the UI and the history."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Self

from pydantic import Field

from millrace.operations.operation import OperationReport, counted, mebibytes

if TYPE_CHECKING:
    from millrace.tables.rewrite.rewrite import RewriteResult


class TableCompaction(OperationReport):
    """Findings and work in one table. A dry run changes nothing."""

    files: int = 0
    """Live files at the start."""
    small_files: int = 0
    """Files that the plan merges."""
    groups: int = 0
    files_removed: int = 0
    files_added: int = 0
    rows: int = 0
    """Rows of the files that were written."""
    rows_removed: int = 0
    """Dead rows that those files no longer hold."""
    rows_apart: int = 0
    """Hidden rows that moved to files of their own."""
    bytes_read: int = 0
    bytes_written: int = 0
    given_up: list[str] = Field(default_factory=list)
    """Groups of files that were left unchanged, with reasons. The next run tries each again."""

    def with_rewrites(self, done: Sequence[RewriteResult], given_up: Sequence[str]) -> Self:
        """Return this report with the groups that were committed, and those that were given up."""
        return self.model_copy(
            update={
                "files_removed": self.files_removed + sum(len(each.group.files) for each in done),
                "files_added": self.files_added + sum(len(each.actions) for each in done),
                "rows": self.rows + sum(each.rows_out for each in done),
                "rows_removed": self.rows_removed + sum(each.rows_in - each.rows_out for each in done),
                "rows_apart": self.rows_apart + sum(each.rows_apart for each in done),
                "bytes_read": self.bytes_read + sum(each.group.size for each in done),
                "bytes_written": self.bytes_written + sum(action.size for each in done for action in each.actions),
                "given_up": [*given_up],
            }
        )


class CollectionCompaction(OperationReport):
    """The result for one collection."""

    collection_id: int
    name: str
    rows: TableCompaction = TableCompaction()
    deletes: TableCompaction = TableCompaction()
    deletes_known: int = 0
    """Keys in the deletes table at the start."""
    deletes_foldable: int = 0
    """Deletes old enough to be folded in."""
    folded_to: int = 0
    """Tick up to which deletes are folded in. 0: none are."""
    base_tick: int = 0
    """The least readable tick now."""
    history_tick: int = 0
    """Tick after which no delete could be folded in, because of the history to keep or of rows not flushed yet."""
    zordered: bool = False


class CompactionReport(OperationReport):
    """The result of one run."""

    dry_run: bool = False
    known_collections: int = 0
    collections: list[CollectionCompaction] = Field(default_factory=list)
    """The collections that changed since they were last found idle."""
    segments: TableCompaction = TableCompaction()
    segments_joined: int = 0
    """Small segments that were joined to another one."""
    vacuumed_files: dict[str, int] = Field(default_factory=dict)
    """Files removed by table. In a dry run, files to be removed."""
    vacuumed_bytes: int = 0
    seconds: float = 0.0
    stages: dict[str, float] = Field(default_factory=dict)
    """Seconds by stage."""

    @property
    def sentence(self) -> str:
        parts = [part for each in self.collections for part in (each.rows, each.deletes)] + [self.segments]
        merged, made = sum(each.files_removed for each in parts), sum(each.files_added for each in parts)
        would = "would be " if self.dry_run else ""
        if not merged and not self.vacuumed_bytes:
            idle = self.known_collections - len(self.collections)
            words = f"; {idle:,} of {counted(self.known_collections, 'collection')} unchanged" if idle > 0 else ""
            return f"There was nothing to compact{words}."
        return (
            f"{counted(merged, 'file')} of {counted(len(self.collections), 'collection')} {would}merged into {made:,},"
            f" and {mebibytes(self.vacuumed_bytes)} {would}freed."
        )


class CollectionNeed(OperationReport):
    """Potential of a compaction of one collection, according to the Delta logs."""

    collection_id: int
    name: str
    files: int
    small_files: int
    """Files that a merge would include."""
    deletes_known: int
    deletes_foldable: int
    delete_ratio: float
    """Foldable deletes as a share of the rows."""
    drops_foldable: bool
    needed: bool


class CompactionNeed(OperationReport):
    """Whether compaction is worth its cost now."""

    needed: bool
    why: list[str] = Field(default_factory=list)
    known_collections: int = 0
    collections: list[CollectionNeed] = Field(default_factory=list)
    """The collections that changed since they were last found idle."""
    small_segments: int = 0
    segment_files: int = 0
    """Files of the `segments` table that a merge would include."""
    reclaimable_bytes: int = 0
    """Bytes that VACUUM would free."""
