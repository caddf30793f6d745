"""What compaction found and did, as plain data for the task's result, the UI and the history."""

from __future__ import annotations

from pydantic import Field

from millrace.operations.operation import OperationReport


class TableCompaction(OperationReport):
    """One table: what was found in it, and what was done (in a dry run: nothing)."""

    files: int = 0
    """Live files at the beginning."""
    small_files: int = 0
    """Those that the plan merges."""
    groups: int = 0
    files_removed: int = 0
    files_added: int = 0
    rows: int = 0
    """Rows of the files that were written."""
    rows_removed: int = 0
    """Dead rows that are not in them any more."""
    bytes_read: int = 0
    bytes_written: int = 0
    given_up: list[str] = Field(default_factory=list)
    """Why a group of files was left as it is; each is tried again by the next run."""


class CollectionCompaction(OperationReport):
    """One collection."""

    collection_id: int
    name: str
    rows: TableCompaction = TableCompaction()
    deletes: TableCompaction = TableCompaction()
    deletes_known: int = 0
    """Keys in the deletes table at the beginning."""
    deletes_foldable: int = 0
    """Those old enough to be folded in."""
    folded_to: int = 0
    """The tick up to which deletes are folded in; 0: none was."""
    base_tick: int = 0
    """The least tick that can be read now."""
    history_tick: int = 0
    """No delete behind this tick could be folded in: history to be kept, or what is not flushed yet."""
    zordered: bool = False


class CompactionReport(OperationReport):
    """One run."""

    dry_run: bool = False
    collections: list[CollectionCompaction] = Field(default_factory=list)
    segments: TableCompaction = TableCompaction()
    segments_joined: int = 0
    """Small segments that became part of another one."""
    vacuumed_files: dict[str, int] = Field(default_factory=dict)
    """Files removed (in a dry run: to be removed), by table."""
    vacuumed_bytes: int = 0
    seconds: float = 0.0
    stages: dict[str, float] = Field(default_factory=dict)
    """Seconds by stage."""


class CollectionNeed(OperationReport):
    """What compaction would find in one collection, from the Delta logs alone."""

    collection_id: int
    name: str
    files: int
    small_files: int
    """Files that a merge would take."""
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
    collections: list[CollectionNeed] = Field(default_factory=list)
    small_segments: int = 0
    segment_files: int = 0
    """Files of the `segments` table that a merge would take."""
    reclaimable_bytes: int = 0
    """Bytes that VACUUM would free."""
