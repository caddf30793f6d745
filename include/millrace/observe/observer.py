"""The one way in to the read model: each question answered from one version of each table, cached for a second or two."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from typing import Any, Final

from millrace.base.errors import ChannelNotFound, InvalidArgument, MillraceError
from millrace.base.settings import Settings
from millrace.catalog.collection import Collection
from millrace.catalog.records import known_collections
from millrace.message.ids import MessageId
from millrace.node.range.parking import read_parked
from millrace.observe import channels, checkpoints, collections, exposition, health, history, maintenance, rows
from millrace.observe import sample as samples
from millrace.observe.cache import Cache
from millrace.observe.collections import Flushed, Segments
from millrace.observe.jobs import QUERIES, owners, read_job, read_jobs
from millrace.observe.log_view import LogView, LogWatch
from millrace.observe.models import (
    CheckpointsView,
    CollectionRow,
    CollectionView,
    FilePage,
    HistoryView,
    MaintenanceView,
    MessageView,
    OperationRow,
    Overview,
    QualityView,
    RejectionSearch,
    Sample,
    SegmentPage,
    Totals,
    TransactionSearch,
)
from millrace.observe.search import Cursor, Query, find_message, search
from millrace.observe.streams import StreamsView, of_streams, streams_view
from millrace.observe.tables import Pinned, Tables
from millrace.operations.quality.results import docs_path
from millrace.storage.table import open_table
from millrace.tables.collections.flush_tables import Checkpoint, read_checkpoints
from millrace.tables.collections.table import deletes_uri, rows_uri
from millrace.tables.quality_state import results_uri
from millrace.tables.wal.reader import WalSnapshot
from millrace.tables.wal.table import WalPosition, WalTable
from millrace.wal.reasons import Reason

FAST: Final = 1.5
"""Seconds that what changes all the time is good for."""
SLOW: Final = 5.0
"""Seconds that what needs many files is good for."""


class Observer:
    """The read model of one deployment. Thread-safe; writes nothing and starts nothing."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._cache = Cache()
        self._tables = Tables(self._cache)
        self._samples = history.SampleFiles(settings)
        self._log = LogWatch(settings)
        self._wal_lock = threading.Lock()
        self._wal: WalTable | None = None

    @property
    def settings(self) -> Settings:
        return self._settings

    def close(self) -> None:
        """Let go of the connection to the log's server."""
        self._log.close()

    # -- Now and over time --------------------------------------------------------------------------------------------

    def overview(self) -> Overview:
        """The state of the whole."""
        return self._cache.get("overview", FAST, self._overview)

    def _overview(self) -> Overview:
        jobs = read_jobs(self._settings)
        log, flushed = self._log_view(), self._flushed()
        parked = {each.pchannel: each.error().args[0] for each in read_parked(self._settings.parked_path)}
        found = channels.pchannels(self._positions(), flushed.checkpoints, log, parked, jobs[0], owners(self._settings))
        wrong = health.findings(jobs, found, self._kept(), log_server=log.running, clock=log.clock)
        state, words = health.state_of(wrong, empty=not found)
        now = time.time()
        points = history.with_last_word(self._samples.points("streaming-node"), jobs[0])
        messages_now, bytes_now = history.rate_now(points, now=now)
        flushed_points = history.with_last_word(self._samples.points("flusher"), jobs[1])
        rows_now, _ = history.rate_now(flushed_points, now=now)
        lags = [each.lag_seconds for each in found if each.lag_seconds is not None]
        fresh = [point.lag for point in points[-8:] if point.lag is not None]
        return Overview(
            at=now,
            state=state,
            words=words,
            log_server=log.running,
            jobs=jobs,
            pchannels=found,
            findings=wrong,
            problems=[f"{each.subject}: {each.words}" for each in wrong],
            totals=Totals(
                messages=sum(each.messages for each in found),
                rejections=sum(each.rejections for each in found),
                collections=sum(each.state == "active" for each in self._collections()),
                open_transactions=sum(each.open_transactions for each in found),
                growing_rows=sum(each.growing_rows for each in found),
                messages_per_second=round(messages_now, 1),
                rows_per_second=round(rows_now, 1),
                bytes_per_second=round(bytes_now, 1),
                lag_seconds=max(lags) if lags else None,
                flush_lag_seconds=max((each.flush_lag_seconds for each in found), default=0.0),
                freshness_seconds=fresh[-1] if fresh else None,
            ),
        )

    def history(self, window: str = "15m") -> HistoryView:
        """The charts of a window (15m, 1h, 6h, 24h). Raises InvalidArgument."""
        if window not in history.WINDOWS:
            raise InvalidArgument(f"no window {window[:20]!r}: one of {', '.join(history.WINDOWS)}")
        return self._cache.get(("history", window), FAST, lambda: self._history(history.WINDOWS[window]))

    def _history(self, seconds: int) -> HistoryView:
        node, flusher = (
            history.with_last_word(self._samples.points(name), read_job(self._settings, name)) for name in QUERIES
        )
        return history.charts(node, flusher, now=time.time(), seconds=seconds)

    def metrics(self) -> bytes:
        """All metrics in the Prometheus text format."""
        return self._cache.get(
            "metrics",
            FAST,
            lambda: exposition.exposition(
                self.overview(),
                host=self._log.metrics(),
                jobs=[*exposition.job_metrics(self._settings), self._stream_metrics()],
                backlogs=exposition.backlogs(self._settings, WalSnapshot.open(self._settings.wal_uri)),
            ),
        )

    def _stream_metrics(self) -> str:
        try:
            return of_streams(self.streams())
        except MillraceError:
            return ""  # a declaration that cannot be read: the page and Airflow say so

    # -- Collections --------------------------------------------------------------------------------------------------

    def collections(self, *, dropped: bool = False) -> list[CollectionRow]:
        """All collections by name."""
        return self._cache.get(("collections", dropped), FAST, lambda: self._collection_rows(dropped))

    def _collection_rows(self, dropped: bool) -> list[CollectionRow]:
        segments, flushed = self._segments(), self._flushed()
        known = [each for each in self._collections() if dropped or each.state != "dropped"]
        return [
            collections.row(each, *self._of_collection(each), segments.of(each.id), flushed)
            for each in sorted(known, key=lambda each: (each.name, each.id))
        ]

    def collection(self, name: str) -> CollectionView:
        """A collection by name or id. Raises CollectionNotFound."""
        found = collections.find(self._collections(), name)
        return collections.view(found, *self._of_collection(found), self._segments().of(found.id), self._flushed())

    def segments(self, name: str, *, state: str = "", offset: int = 0, limit: int = 50) -> SegmentPage:
        """Segments of a collection, newest first. Raises CollectionNotFound, InvalidArgument."""
        found = collections.find(self._collections(), name)
        return collections.segment_page(
            found,
            self._segments().of(found.id),
            self._flushed(),
            state=state,
            offset=offset,
            limit=_page(limit, offset),
        )

    def files(
        self, name: str, *, deletes: bool = False, order: str = "tick", offset: int = 0, limit: int = 50
    ) -> FilePage:
        """Files of a collection's rows (or deletes). Raises CollectionNotFound, InvalidArgument."""
        found = collections.find(self._collections(), name)
        pinned = self._of_collection(found)[1 if deletes else 0]
        return collections.file_page(pinned, order=order, offset=offset, limit=_page(limit, offset))

    def sample(self, name: str, *, at: int | None = None, limit: int = 50) -> Sample:
        """Some of a collection's newest rows at a tick. Raises what :func:`millrace.observe.sample.sample` does."""
        found = collections.find(self._collections(), name)
        return samples.sample(self._settings, found.id, found.name, at=at, limit=limit)

    # -- Messages -----------------------------------------------------------------------------------------------------

    def rejections(self, query: Query, *, limit: int = 50, before: str = "") -> RejectionSearch:
        """Rejected messages, newest first. Raises InvalidArgument."""
        if query.reason and query.reason not in Reason.__members__:
            raise InvalidArgument(f"no reason {query.reason[:40]!r}: one of {', '.join(Reason.__members__)}")
        cursor = Cursor.parse(before) if before else None
        pinned = self._tables.newest(self._settings.wal_uri)
        found = search(pinned, query, limit=limit, before=cursor) if pinned is not None else None
        names = self._names()
        return RejectionSearch(
            version=pinned.version if pinned is not None else None,
            next=str(found.next) if found is not None and found.next is not None else None,
            complete=found is None or found.complete,
            items=[rows.message_row(row, "rejection", names) for row in (found.rows if found is not None else [])],
            reasons=list(Reason.__members__),
        )

    def transactions(self, query: Query, *, limit: int = 50, before: str = "") -> TransactionSearch:
        """Open transactions, and those that ended, newest first. Raises InvalidArgument."""
        cursor = Cursor.parse(before) if before else None
        pinned = self._tables.newest(self._settings.wal_uri)
        found = search(pinned, query, limit=limit, before=cursor) if pinned is not None else None
        names = self._names()
        return TransactionSearch(
            version=pinned.version if pinned is not None else None,
            next=str(found.next) if found is not None and found.next is not None else None,
            complete=found is None or found.complete,
            open=rows.open_transactions(self._positions(), query, names),
            items=[rows.ended_transaction(row, names) for row in (found.rows if found is not None else [])],
        )

    def message(self, pchannel: str, message_id: str) -> MessageView:
        """A message or rejection of the WAL with its payload decoded. Raises ChannelNotFound, InvalidArgument."""
        wanted = MessageId.parse(message_id)
        if max(wanted) >= 1 << 63:
            raise InvalidArgument(f"{message_id[:80]!r} is no message id: its numbers have 63 bits")
        pinned = self._tables.newest(self._settings.wal_uri)
        found = find_message(pinned, pchannel, wanted) if pinned is not None else None
        if found is None:
            raise ChannelNotFound(f"the WAL has no message {wanted} on {pchannel[:80]!r}")
        row, kind = found
        return rows.message_view(row, kind, self._collections())

    # -- Checkpoints and maintenance ----------------------------------------------------------------------------------

    def checkpoints(self) -> CheckpointsView:
        """Checkpoints, and what truncation could free."""
        return self._cache.get("checkpoints", FAST, self._checkpoints_view)

    def _checkpoints_view(self) -> CheckpointsView:
        pinned = self._tables.newest(self._settings.checkpoints_uri)
        return checkpoints.checkpoints_view(
            self._settings, self._positions(), self._flushed().checkpoints, self._log_view(), pinned
        )

    def maintenance(self, *, job: str = "", run: str = "", limit: int = 50) -> MaintenanceView:
        """The tables' health, operations that run and that ran; with `run` those of that run alone."""
        if not 1 <= limit <= maintenance.MOST_OPERATIONS:
            raise InvalidArgument(f"a page has 1 to {maintenance.MOST_OPERATIONS} operations, not {limit}")
        return MaintenanceView(
            tables=self._cache.get("table views", SLOW, self._table_views),
            operations=(
                maintenance.operations_of(self._settings, run)
                if run
                else maintenance.finished_operations(self._settings, job=job, limit=limit)
            ),
            running=maintenance.running_operations(self._settings),
            small_file_bytes=maintenance.SMALL_FILE_BYTES,
            log=maintenance.log_of(self._settings, run) if run else "",
        )

    def _table_views(self) -> list[Any]:
        named = [
            ("wal", "WAL", self._settings.wal_uri),
            ("segments", "segments", self._settings.segments_uri),
            ("checkpoints", "checkpoints", self._settings.checkpoints_uri),
        ]
        for each in self._collections():
            if each.state != "dropped":
                named.append((f"collections/{each.id}", each.name, rows_uri(self._settings, each.id)))
                named.append((f"deletes/{each.id}", f"{each.name}, deletes", deletes_uri(self._settings, each.id)))
        return [
            maintenance.table_view(name, title, pinned)
            for name, title, path in named
            if (pinned := self._tables.newest(path)) is not None
        ]

    def operations(self, *, job: str = "", limit: int = 50) -> list[OperationRow]:
        """Finished operations (of one job), the newest first."""
        return self.maintenance(job=job, limit=limit).operations

    def streams(self) -> StreamsView:
        """Declared streams, and what feeds what. Raises InvalidStream where a declaration cannot be read."""
        return self._cache.get("streams", FAST, lambda: streams_view(self._settings))

    def quality(self, *, limit: int = 100) -> QualityView:
        """Results of the quality checks, the newest first."""
        if not 1 <= limit <= maintenance.MOST_OPERATIONS:
            raise InvalidArgument(f"a page has 1 to {maintenance.MOST_OPERATIONS} results, not {limit}")
        found = self._cache.get(
            ("quality", limit),
            SLOW,
            lambda: maintenance.quality_view(
                self._settings, self._tables.newest(results_uri(self._settings)), limit=limit
            ),
        )
        return found.model_copy(update={"docs": (docs_path(self._settings) / "index.html").exists()})

    # -- What the answers are made of ---------------------------------------------------------------------------------

    def _collections(self) -> list[Collection]:
        return self._cache.get("known", FAST, lambda: known_collections(self._settings.data_dir, dropped=True))

    def _names(self) -> Mapping[int, str]:
        return {each.id: each.name for each in self._collections()}

    def _of_collection(self, found: Collection) -> tuple[Pinned | None, Pinned | None]:
        return (
            self._tables.newest(rows_uri(self._settings, found.id)),
            self._tables.newest(deletes_uri(self._settings, found.id)),
        )

    def _segments(self) -> Segments:
        return self._cache.get(
            "segments", SLOW, lambda: collections.read_segments(self._tables.newest(self._settings.segments_uri))
        )

    def _flushed(self) -> Flushed:
        def ask() -> Flushed:
            pinned = self._tables.newest(self._settings.checkpoints_uri)
            known: dict[str, Checkpoint] = {}
            if pinned is not None:
                known = read_checkpoints(pinned.table)
            return Flushed.of(known)

        return self._cache.get("flushed", FAST, ask)

    def _positions(self) -> dict[str, WalPosition]:
        return self._cache.get("positions", FAST, lambda: self._with_wal(_positions))

    def _kept(self) -> health.Kept:
        return self._cache.get("kept", FAST, lambda: health.read_kept(self._settings))

    def _log_view(self) -> LogView:
        return self._cache.get("log", FAST, lambda: self._with_wal(self._log.look))

    def _with_wal(self, ask: Any) -> Any:
        """`ask` with the one WAL handle of this observer, at the newest version, or None where there is no table yet."""
        with self._wal_lock:
            if self._wal is not None and not self._wal.table.stands():
                self._wal = None
            if self._wal is None:
                table = open_table(self._settings.wal_uri)
                self._wal = None if table is None else WalTable(table)
            else:
                self._wal.refresh()
            return ask(self._wal)


def _positions(wal: WalTable | None) -> dict[str, WalPosition]:
    return wal.sound_positions(wal.pchannels()) if wal is not None else {}


def _page(limit: int, offset: int) -> int:
    if not 1 <= limit <= collections.MOST_PAGE or not 0 <= offset < 1 << 62:
        raise InvalidArgument(f"a page has 1 to {collections.MOST_PAGE} items, and begins at 0 or behind it")
    return limit
