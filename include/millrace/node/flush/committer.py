"""The flusher's commits: deletes, rows, then ``segments``, and ``checkpoints`` last. Each is fenced and idempotent.

A crash between two commits leaves tables ahead of the checkpoint. The next flush starts from the checkpoint and skips,
table by table, what was committed already. If two flushers run, each table takes a range of a VChannel from only one of
them: a commit succeeds only from the app id's version that its work was planned from. The other flusher is fenced,
deletes its files and plans again. The checkpoint is moved by the flusher that has everything before it in the tables.

Collections are independent of each other until then, so several are committed at once. A collection's rows table is
created with its first row, and its deletes table with its first delete. The small files that tasks wrote for one table,
one for each PChannel, are joined before the commit, and then committed or fenced together.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final, TypeVar

import pyarrow as pa

from millrace.base.errors import ChannelParked, MillraceError
from millrace.base.failpoint import hit
from millrace.base.metrics import Metrics
from millrace.base.settings import Settings
from millrace.message.ids import tick_physical_ms
from millrace.message.schema import CollectionSchema
from millrace.message.stored_columns import key_columns
from millrace.node.flush.flusher import DELETES, ROWS, FlushReport, TablePart
from millrace.node.range_loop.definition import CommitResult, OwnershipCheck, always_owned
from millrace.node.retention.file_removal import DeploymentFileRemover
from millrace.storage.commit import AppTransaction, CommitPart, commit_fenced
from millrace.storage.file_sink import delete_uncommitted
from millrace.storage.store import store_at
from millrace.storage.table import LiveFile, LogMaintenance, TableHandle, table_exists
from millrace.tables.collections.data_tables import (
    DATE,
    deletes_uri,
    ensure_deletes_table,
    ensure_rows_table,
    rows_uri,
)
from millrace.tables.collections.flush_tables import (
    CHANGED_INFO,
    ensure_checkpoints_table,
    ensure_segments_table,
    replaced_checkpoint_files,
    required_checkpoint_files,
)
from millrace.tables.collections.layout import record_layout
from millrace.tables.rewrite.files import FileGroup
from millrace.tables.rewrite.rewrite import merge_job, rewrite_in_process
from millrace.wal.visible.collection_rows import rows_table_schema

COMMIT_THREADS: Final = 4
"""Collections that are committed at once. A commit mostly waits for the disk."""

OPEN_TABLES: Final = 512
"""Tables of collections that stay open from one flush to the next: their memory must not grow with the collections."""

JOIN_BYTES: Final = 256 << 10
"""Files of one flush of a table are joined if they are smaller than this in sum."""

_UPKEEP: Final = LogMaintenance(keep_commits=64)
"""Versions of a table to keep at least; all versions within ``file_retention`` stay."""

_URIS: Final = {DELETES: deletes_uri, ROWS: rows_uri}
_Item = TypeVar("_Item")
_Parts = list[tuple[FlushReport, TablePart]]
"""Reports with their files for one table."""


@dataclass(frozen=True, slots=True)
class _CollectionTable:
    handle: TableHandle
    columns: frozenset[pa.Field]
    """Columns of the schemas that it was ensured to have."""


class FlushCommitter:
    """Commits flushes to the tables of one deployment. Call from one thread at a time; any number may run in any
    process.

    Failpoints: ``commit.checked`` before each commit, and ``flush.<table>`` after the commit of ``deletes``, ``rows``,
    ``segments`` and ``checkpoints``.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        metrics: Metrics | None = None,
        holds: OwnershipCheck = always_owned,
    ) -> None:
        """Commit to the tables that `settings` name.

        `holds` says whether a PChannel may be committed now; it is asked before each commit of a flush, from several
        threads. A PChannel that may no longer be committed counts as fenced, and its next owner continues after what
        the tables hold.
        """
        record_layout(settings)
        self._settings = settings
        self._metrics = metrics
        self._holds = holds
        self._remover = DeploymentFileRemover(settings)
        self._shared: dict[str, TableHandle] = {}
        self._open: OrderedDict[str, _CollectionTable] = OrderedDict()
        self._settled: set[tuple[str, str]] = set()
        """(PChannel, table) whose files a commit of this batch took or, fenced, deleted."""

    def commit(self, reports: Sequence[FlushReport]) -> CommitResult[FlushReport]:
        """Commit every report that still follows the tables. At most one report per PChannel."""
        started = time.perf_counter()
        self._settled.clear()
        refused: dict[str, MillraceError] = {}
        for failed in self._each(lambda number: self._ensured(number, reports), _numbers(reports, schemas=True)):
            refused |= failed
        left = [report for report in reports if report.channel not in refused]
        pending = _without(
            left, self._each(lambda number: self._collection(number, left), _numbers(left, schemas=False))
        )
        pending = _without(pending, [self._segments(pending)])
        hit("flush.segments")
        pending = _without(pending, [self._checkpoints(pending)])
        hit("flush.checkpoints")
        through = {report.channel for report in pending}
        for report in reports:
            if report.channel not in through:
                self._drop(report)
        while len(self._open) > OPEN_TABLES:
            self._open.popitem(last=False)
        self._report(pending)
        fenced = [report for report in left if report.channel not in through]
        return CommitResult(committed=pending, fenced=fenced, refused=refused, seconds=time.perf_counter() - started)

    def _each(self, work: Callable[[int], _Item], collections: Sequence[int]) -> list[_Item]:
        """Do `work` for each collection, several at once. Raises its first error once all are done."""
        if len(collections) < 2:
            return [work(number) for number in collections]
        with ThreadPoolExecutor(COMMIT_THREADS, thread_name_prefix="millrace-flush-commit") as pool:
            return list(pool.map(work, collections))

    def _ensured(self, number: int, reports: Sequence[FlushReport]) -> dict[str, MillraceError]:
        """Create one collection's tables and columns that the reports need; idempotent.

        Returns the error of each report that does not fit a table. The others go on (law 6).
        """
        refused: dict[str, MillraceError] = {}
        for report in reports:
            if number not in report.schemas:
                continue
            parts = report.collections.get(number, {})
            try:
                for kind in (DELETES, ROWS):
                    self._ensure(kind, number, report.schemas[number], create=kind in parts)
            except ChannelParked as error:
                refused[report.channel] = error
        return refused

    def _ensure(self, kind: str, number: int, schema: CollectionSchema, *, create: bool) -> None:
        uri = _URIS[kind](self._settings, number)
        known = self._open.pop(uri, None)
        columns = frozenset(rows_table_schema(schema)) if kind == ROWS else frozenset[pa.Field]()
        if known is None or not columns <= known.columns:
            # A schema change reaches the table with its commit. Deletes have only the key, which never changes.
            if not create and (kind == DELETES or not table_exists(uri)):
                return
            ensure = ensure_rows_table if kind == ROWS else ensure_deletes_table
            known = _CollectionTable(ensure(uri, schema), columns | (known.columns if known else frozenset()))
        self._open[uri] = known

    def _collection(self, number: int, reports: Sequence[FlushReport]) -> set[str]:
        """Commit one collection's deletes, then its rows. Returns the PChannels that were fenced."""
        fenced: set[str] = set()
        for kind in (DELETES, ROWS):
            parts, lost = self._held(
                (report, part)
                for report in reports
                if report.channel not in fenced and (part := report.collections.get(number, {}).get(kind)) is not None
            )
            fenced |= lost
            if parts:
                table = self._open[_URIS[kind](self._settings, number)].handle
                joined = _join(table, parts, key_columns(parts[0][0].schemas[number]))
                fenced |= self._commit(kind, table, [parts] if joined else [[each] for each in parts])
            hit(f"flush.{kind}")
        return fenced

    def _segments(self, reports: Sequence[FlushReport]) -> set[str]:
        uri = self._settings.segments_uri
        parts, lost = self._held((report, report.segments) for report in reports if report.segments.rows)
        return lost | self._commit("segments", self._table(uri, ensure_segments_table), [[each] for each in parts])

    def _checkpoints(self, reports: Sequence[FlushReport]) -> set[str]:
        uri = self._settings.checkpoints_uri
        found = []
        for report in reports:
            move = AppTransaction(report.checkpoint.base, report.new_checkpoint.time_tick)
            found.append((report, TablePart(report.checkpoint_actions, {report.channel: move})))
        parts, lost = self._held(found)
        return lost | self._commit(
            "checkpoints", self._table(uri, ensure_checkpoints_table), [[each] for each in parts]
        )

    def _table(self, uri: str, ensure: Callable[[str], TableHandle]) -> TableHandle:
        if uri not in self._shared:
            self._shared[uri] = ensure(uri)
        return self._shared[uri]

    def _held(self, parts: Iterable[tuple[FlushReport, TablePart]]) -> tuple[_Parts, set[str]]:
        """Return the parts of PChannels that may be committed now, and the other PChannels."""
        found = list(parts)
        lost = {report.channel for report, _ in found if not self._holds(report.channel)}
        return [(report, part) for report, part in found if report.channel not in lost], lost

    def _commit(self, kind: str, table: TableHandle, groups: Sequence[_Parts]) -> set[str]:
        """Commit the parts of one table together, each group entirely or not at all.

        Returns the PChannels that were fenced.
        """
        if not groups:
            return set()
        started = time.perf_counter()
        outcome = commit_fenced(
            table,
            [
                CommitPart(
                    [action for _, part in group for action in part.actions],
                    replaced_checkpoint_files(group[0][0].checkpoint, group[0][0].new_checkpoint)
                    if kind == "checkpoints"
                    else (),
                    {app: move for _, part in group for app, move in part.moves.items()},
                    info={f"{CHANGED_INFO}{each.channel}": each.changed for each, _ in group if each.changed}
                    if kind == "checkpoints"
                    else {},
                    requires=required_checkpoint_files(group[0][0].new_checkpoint) if kind == "checkpoints" else (),
                )
                for group in groups
            ],
            maintenance=_UPKEEP,
        )
        self._settled.update((report.channel, table.uri) for group in groups for report, _ in group)
        self._remover.after_commit(table)
        if len(outcome.fenced) < len(groups) and self._metrics is not None:
            self._metrics.flusher_commit_duration_seconds.labels(kind).observe(time.perf_counter() - started)
        return {report.channel for place in outcome.fenced for report, _ in groups[place]}

    def _drop(self, report: FlushReport) -> None:
        """Delete the files of an abandoned report in the tables whose commit it did not reach.

        Call it once no commit of the batch is under way.
        """
        settings = self._settings
        places = [
            (_URIS[kind](settings, number), part.actions)
            for number, parts in report.collections.items()
            for kind, part in parts.items()
        ]
        places.append((settings.segments_uri, report.segments.actions))
        places.append((settings.checkpoints_uri, report.checkpoint_actions))
        for uri, actions in places:
            store = store_at(uri)
            if (report.channel, store.uri) not in self._settled:
                delete_uncommitted(store, actions)

    def _report(self, committed: Sequence[FlushReport]) -> None:
        metrics = self._metrics
        if metrics is None:
            return
        for report in committed:
            checkpoint = report.new_checkpoint
            metrics.recovery_persisted_time_tick.labels(report.channel).set(checkpoint.time_tick)
            now_ms = time.time() * 1000
            # By PChannel: a series for each VChannel would grow with the collections.
            tick = checkpoint.time_tick
            metrics.flusher_time_tick.labels(report.channel).set(tick)
            metrics.flusher_lag_seconds.labels(report.channel).set(max(0.0, now_ms - tick_physical_ms(tick)) / 1000)
            metrics.flusher_rows_total.labels(report.channel).inc(report.rows)


def _join(table: TableHandle, parts: _Parts, key: Sequence[str]) -> bool:
    """Join the small files of several reports into one file per day, which becomes the first one's.

    Returns whether they are joined, and so must be committed together.
    """
    actions = [action for _, part in parts for action in part.actions]
    if len(parts) < 2 or sum(action.size for action in actions) >= JOIN_BYTES:
        return False
    days: dict[str, list[LiveFile]] = {}
    for action in actions:
        file = LiveFile(action.path, action.size, action.rows, action.partition)
        days.setdefault(action.partition[DATE], []).append(file)
    done = list(rewrite_in_process(merge_job(table, key), [FileGroup(tuple(files)) for files in days.values()]))
    joined = [action for each in done for action in each.actions]
    if any(each.error for each in done):
        delete_uncommitted(table.store, joined)
        return False
    replaced = {path for each in done if not each.unchanged for path in each.group.paths}
    for _, part in parts:
        part.actions = []
    parts[0][1].actions = [*(action for action in actions if action.path not in replaced), *joined]
    delete_uncommitted(table.store, [action for action in actions if action.path in replaced])
    return True


def _without(reports: Sequence[FlushReport], fenced: Iterable[set[str]]) -> list[FlushReport]:
    gone = set[str]().union(*fenced)
    return [report for report in reports if report.channel not in gone]


def _numbers(reports: Iterable[FlushReport], *, schemas: bool) -> list[int]:
    """Return the collections that the reports have rows or deletes of or, with `schemas`, whose schema they know."""
    return sorted({number for report in reports for number in (report.schemas if schemas else report.collections)})
