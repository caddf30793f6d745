"""The flusher's commits: deletes, rows, then ``segments``, and ``checkpoints`` last. Each is fenced and idempotent.

A crash between two commits leaves tables ahead of the checkpoint. The next flush starts from the checkpoint and skips,
table by table, what is there already. If two flushers run, each table takes a range of a VChannel from only one of
them: a commit succeeds only from the app id's version that its work was planned from. The other flusher is fenced,
deletes its files and plans again. The checkpoint is moved by the flusher that has everything before it in the tables.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import pyarrow as pa

from millrace.base.errors import ChannelParked, MillraceError
from millrace.base.failpoint import hit
from millrace.base.metrics import Metrics
from millrace.base.settings import Settings
from millrace.message.ids import tick_physical_ms
from millrace.node.flush.flusher import DELETES, ROWS, FlushReport, TablePart
from millrace.node.range_loop.definition import CommitResult, OwnershipCheck, always_owned
from millrace.storage.commit import AppTransaction, CommitPart, commit_fenced
from millrace.storage.file_sink import delete_uncommitted
from millrace.storage.store import store_at
from millrace.storage.table import TableHandle
from millrace.tables.collections.data_tables import (
    deletes_uri,
    ensure_deletes_table,
    ensure_rows_table,
    rows_uri,
)
from millrace.tables.collections.flush_tables import (
    ensure_checkpoints_table,
    ensure_segments_table,
    replaced_checkpoint_files,
)
from millrace.wal.visible.collection_rows import rows_table_schema


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

        `holds` says whether a PChannel may be committed now; it is asked before each commit of a flush. A PChannel that
        may no longer be committed counts as fenced, and its next owner continues after what the tables hold.
        """
        self._settings = settings
        self._metrics = metrics
        self._holds = holds
        self._handles: dict[str, TableHandle] = {}
        self._known: dict[int, set[pa.Field]] = {}
        self._done: set[str] = set()

    def commit(self, reports: Sequence[FlushReport]) -> CommitResult[FlushReport]:
        """Commit every report that still follows the tables. At most one report per PChannel."""
        started = time.perf_counter()
        refused: dict[str, MillraceError] = {}
        fenced: list[FlushReport] = []
        self._done.clear()
        pending = [report for report in reports if self._ensured(report, refused)]
        for kind, path_of in ((DELETES, deletes_uri), (ROWS, rows_uri)):
            for collection_id in sorted({number for report in pending for number in report.collections}):
                pending = self._table(kind, collection_id, path_of(self._settings, collection_id), pending, fenced)
                hit(f"flush.{kind}")
        pending = self._segments(pending, fenced)
        hit("flush.segments")
        pending = self._checkpoints(pending, fenced)
        hit("flush.checkpoints")
        self._report(pending)
        return CommitResult(committed=pending, fenced=fenced, refused=refused, seconds=time.perf_counter() - started)

    def _ensured(self, report: FlushReport, refused: dict[str, MillraceError]) -> bool:
        """Create the report's tables and columns before the commit; idempotent.

        Refuses a report that does not fit its tables. The others go on (law 6).
        """
        try:
            for number, schema in report.schemas.items():
                if set(rows_table_schema(schema)) <= self._known.get(number, set()):
                    continue
                rows, deletes = rows_uri(self._settings, number), deletes_uri(self._settings, number)
                self._handles[rows] = ensure_rows_table(rows, schema)
                self._handles[deletes] = ensure_deletes_table(deletes, schema)
                self._known.setdefault(number, set()).update(rows_table_schema(schema))
        except ChannelParked as error:
            self._drop(report, None)
            refused[report.channel] = error
            return False
        return True

    def _table(
        self, kind: str, collection_id: int, path: str, reports: list[FlushReport], fenced: list[FlushReport]
    ) -> list[FlushReport]:
        parts = [
            (report, part)
            for report in reports
            if (part := report.collections.get(collection_id, {}).get(kind)) is not None
        ]
        return self._commit(kind, path, parts, reports, fenced)

    def _segments(self, reports: list[FlushReport], fenced: list[FlushReport]) -> list[FlushReport]:
        path = self._settings.segments_uri
        if path not in self._handles:
            self._handles[path] = ensure_segments_table(path)
        parts = [(report, report.segments) for report in reports if report.segments.rows]
        return self._commit("segments", path, parts, reports, fenced)

    def _checkpoints(self, reports: list[FlushReport], fenced: list[FlushReport]) -> list[FlushReport]:
        path = self._settings.checkpoints_uri
        if path not in self._handles:
            self._handles[path] = ensure_checkpoints_table(path)
        parts = []
        for report in reports:
            move = AppTransaction(report.checkpoint.base, report.new_checkpoint.time_tick)
            parts.append((report, TablePart(report.checkpoint_actions, {report.channel: move})))
        return self._commit("checkpoints", path, parts, reports, fenced)

    def _commit(
        self,
        kind: str,
        path: str,
        parts: list[tuple[FlushReport, TablePart]],
        reports: list[FlushReport],
        fenced: list[FlushReport],
    ) -> list[FlushReport]:
        """Commit the parts of one table together. Returns the reports that go on; fenced ones delete their files."""
        lost = [report for report, _ in parts if not self._holds(report.channel)]
        for report in lost:
            self._drop(report, None)
        fenced.extend(lost)
        reports = [report for report in reports if report not in lost]
        parts = [(report, part) for report, part in parts if report not in lost]
        if not parts:
            return reports
        started = time.perf_counter()
        outcome = commit_fenced(
            self._handles[path],
            [
                CommitPart(
                    part.actions,
                    replaced_checkpoint_files(report.checkpoint) if kind == "checkpoints" else (),
                    part.moves,
                )
                for report, part in parts
            ],
        )
        late = [parts[place][0] for place in outcome.fenced]
        for report in late:
            self._drop(report, path)
        fenced.extend(late)
        if len(late) < len(parts):
            self._done.add(path)
            if self._metrics is not None:
                self._metrics.flusher_commit_duration_seconds.labels(kind).observe(time.perf_counter() - started)
        return [report for report in reports if report not in late]

    def _drop(self, report: FlushReport, fenced_at: str | None) -> None:
        """Delete the files of an abandoned report in the tables whose commit it did not reach."""
        settings = self._settings
        places = [
            ((deletes_uri if kind == DELETES else rows_uri)(settings, number), part.actions)
            for number, parts in report.collections.items()
            for kind, part in parts.items()
        ]
        places.append((settings.segments_uri, report.segments.actions))
        places.append((settings.checkpoints_uri, report.checkpoint_actions))
        for path, actions in places:
            if path not in self._done and path != fenced_at:
                delete_uncommitted(store_at(path), actions)

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
