"""The entry point of the read model. Each answer uses one version of each table and is cached for a second or two."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from typing import Any, Final

from millrace.base.errors import ChannelNotFound, CollectionNotFound, InvalidArgument, MillraceError
from millrace.base.settings import Settings, following
from millrace.catalog.collection import CollectionInfo, CollectionQuery
from millrace.catalog.sqlite_file import (
    read_aliases,
    read_collection,
    read_collections_by_id,
    read_names,
    read_page,
    read_state_counts,
)
from millrace.message.ids import MessageId
from millrace.node.publish.status import published_status
from millrace.node.range_loop.parking import read_parked
from millrace.observe import channels, charts, checkpoints, collections, exposition, health, maintenance, message_views
from millrace.observe import row_sample as samples
from millrace.observe.channels import tick_unix_seconds
from millrace.observe.collections import FlushProgress, SegmentTable
from millrace.observe.consumer_groups import GroupView, LaneLags, group_lags, group_views
from millrace.observe.flows import StreamsView, flow_metrics, streams_view
from millrace.observe.jobs import QUERIES, pchannel_owners, read_job, read_jobs
from millrace.observe.log_probe import LogProbe, LogView
from millrace.observe.models import (
    CheckpointsView,
    CollectionListPage,
    CollectionRow,
    CollectionView,
    FilePage,
    HistoryView,
    MaintenanceView,
    MessageSearch,
    MessageView,
    OperationRow,
    Overview,
    OverviewTotals,
    PublishedView,
    QualityView,
    RejectionSearch,
    RowSample,
    SegmentPage,
    TableView,
    TransactionSearch,
)
from millrace.observe.table_cache import TableCache, TableSnapshot
from millrace.observe.ttl_cache import TtlCache
from millrace.observe.wal_search import Cursor, SearchResult, WalQuery, find_message, search_wal
from millrace.operations.quality.data_docs import INDEX, docs_store
from millrace.storage.table import open_table
from millrace.tables.collections.data_tables import deletes_uri, rows_uri
from millrace.tables.collections.flush_tables import Checkpoint, read_checkpoints
from millrace.tables.collections.layout import rows_name
from millrace.tables.quality_state import quality_results_uri
from millrace.tables.wal.table import WalPosition, WalTable
from millrace.wal.reasons import Reason

FAST: Final = 1.5
"""Seconds for which fast-changing answers are cached."""
SLOW: Final = 5.0
"""Seconds for which answers that read many files are cached."""
COUNT_SECONDS: Final = 15.0
"""Seconds for which a collection's count of visible rows is cached."""
COUNT_BUDGET_SECONDS: Final = 0.5
"""Time that a list of collections spends on counts that are not cached."""
COLLECTIONS_PER_PAGE: Final = 50
WORST_TABLES: Final = 20
"""Tables of collections whose health is shown: those with the most small files."""
SURVEY_SECONDS: Final = 0.5
"""Time for which a list of tables looks at those of collections."""
MAX_NAMED: Final = 20
"""Collections that an error names."""
MAX_COUNTED_ROWS: Final = 500_000
"""Rows and deletes of a collection up to which its visible rows are counted. Without deletes, no row is read."""


class Observer:
    """The read model of one deployment. Thread-safe. Writes nothing and starts nothing."""

    def __init__(self, settings: Settings) -> None:
        settings = following(settings)
        self._settings = settings
        self._lane_lags = LaneLags()
        self._cache = TtlCache()
        self._tables = TableCache(self._cache)
        self._survey = maintenance.TableSurvey(settings)
        self._progress: FlushProgress | None = None
        self._samples = charts.SampleFiles(settings)
        self._log = LogProbe(settings)
        self._wal_lock = threading.Lock()
        self._wal: WalTable | None = None

    @property
    def settings(self) -> Settings:
        return self._settings

    def close(self) -> None:
        """Close the connection to the log's server."""
        self._log.close()

    # -- Now and over time --------------------------------------------------------------------------------------------

    def overview(self) -> Overview:
        """Return the state of the deployment."""
        return self._cache.get("overview", FAST, self._overview)

    def _overview(self) -> Overview:
        jobs = read_jobs(self._settings)
        log, flushed = self._log_view(), self._checkpoints()
        parked = {each.pchannel: each.error().args[0] for each in read_parked(self._settings.parked_path)}
        found = channels.pchannel_views(
            self._positions(), flushed, log, parked, jobs[0], pchannel_owners(self._settings)
        )
        wrong = health.findings(jobs, found, self._health_inputs(), log_server=log.running, clock=log.clock)
        state, words = health.overall_state(wrong, empty=not found)
        now = time.time()
        points = charts.with_current(self._samples.points("streaming-node"), jobs[0])
        messages_now, bytes_now = charts.current_rates(points, now=now)
        flushed_points = charts.with_current(self._samples.points("flusher"), jobs[1])
        rows_now, _ = charts.current_rates(flushed_points, now=now)
        lags = [each.lag_seconds for each in found if each.lag_seconds is not None]
        fresh = next((point for point in reversed(points[-8:]) if point.lag is not None), None)
        return Overview(
            at=now,
            state=state,
            words=words,
            log_server=log.running,
            log_server_pid=log.pid,
            jobs=jobs,
            pchannels=found,
            findings=wrong,
            problems=[f"{each.subject}: {each.words}" for each in wrong],
            totals=OverviewTotals(
                messages=sum(each.messages for each in found),
                rejections=sum(each.rejections for each in found),
                collections=read_state_counts(self._settings.data_dir).get("active", 0),
                open_transactions=sum(each.open_transactions for each in found),
                growing_rows=sum(each.growing_rows for each in found),
                messages_per_second=round(messages_now, 1),
                rows_per_second=round(rows_now, 1),
                bytes_per_second=round(bytes_now, 1),
                lag_seconds=max(lags) if lags else None,
                flush_lag_seconds=max((each.flush_lag_seconds for each in found), default=0.0),
                freshness_seconds=None if fresh is None else fresh.lag,
                freshness_at=None if fresh is None else fresh.at,
            ),
        )

    def history(self, window: str = "15m") -> HistoryView:
        """Return the charts of a window (15m, 1h, 6h, 24h). Raises InvalidArgument."""
        if window not in charts.WINDOWS:
            raise InvalidArgument(f"no window {window[:20]!r}: use one of {', '.join(charts.WINDOWS)}")
        return self._cache.get(("history", window), FAST, lambda: self._history(charts.WINDOWS[window]))

    def _history(self, seconds: int) -> HistoryView:
        node, flusher = (
            charts.with_current(self._samples.points(name), read_job(self._settings, name)) for name in QUERIES
        )
        return charts.build_charts(node, flusher, now=time.time(), seconds=seconds)

    def metrics(self) -> bytes:
        """Return all metrics in the Prometheus text format."""
        return self._cache.get(
            "metrics",
            FAST,
            lambda: exposition.render_exposition(
                self.overview(),
                host=self._log.metrics(),
                jobs=[*exposition.job_metrics(self._settings), self._flow_metrics()],
                backlogs=exposition.backlog_metrics(group_lags(self._settings, self._lane_lags)),
            ),
        )

    def consumer_groups(self) -> list[GroupView]:
        """Return the consumer groups with their members and lags, sorted by name. Raises MetaUnavailable."""
        return self._cache.get("consumer groups", FAST, lambda: group_views(self._settings, self._log, self._lane_lags))

    def _flow_metrics(self) -> str:
        try:
            return flow_metrics(self.streams())
        except MillraceError:
            return ""  # an unreadable declaration is reported by the page and by Airflow

    # -- Collections --------------------------------------------------------------------------------------------------

    def collections(
        self, *, dropped: bool = False, search: str = "", offset: int = 0, limit: int = COLLECTIONS_PER_PAGE
    ) -> CollectionListPage:
        """Return a page of the collections by name; `search`: part of the name. Raises InvalidArgument."""
        query = CollectionQuery(dropped, search, offset=offset, limit=_page(limit, offset))
        return self._cache.get(("collections", query), FAST, lambda: self._collection_page(query))

    def _collection_page(self, query: CollectionQuery) -> CollectionListPage:
        segments, flushed = self._segments(), self._flushed()
        page = read_page(self._settings.data_dir, query)
        rows = [
            collections.collection_row(each, *self._of_collection(each), segments.of_collection(each.id), flushed)
            for each in page.items
        ]
        # A page of many collections counts some with each refresh, and keeps the counts for a while.
        until = time.monotonic() + COUNT_BUDGET_SECONDS
        items = [self._with_visible(each) if time.monotonic() < until else each for each in rows]
        return CollectionListPage(total=page.total, offset=query.offset, limit=query.limit, items=items)

    def _with_visible(self, row: CollectionRow) -> CollectionRow:
        """Return `row` with the number of its visible rows, if that is cheap to know."""
        if row.state != "active" or (row.deletes and row.rows + row.deletes > MAX_COUNTED_ROWS):
            return row
        visible = self._cache.get(
            ("visible", row.id), COUNT_SECONDS, lambda: samples.count_visible(self._settings, int(row.id))
        )
        return row.model_copy(update={"visible": visible})

    def collection(self, name: str) -> CollectionView:
        """Return a collection by name, alias or id. Raises CollectionNotFound."""
        found = self._find(name)
        view = collections.collection_view(
            found,
            *self._of_collection(found),
            self._segments().of_collection(found.id),
            self._flushed(),
            table_path=rows_name(self._settings, found.id),
        )
        counted = self._with_visible(view)
        published = self._cache.get(("published", found.id), FAST, lambda: self._published(found.id))
        aliases = [*read_aliases(self._settings.data_dir, found.id)]
        return view.model_copy(update={"visible": counted.visible, "published": published, "aliases": aliases})

    def _published(self, collection_id: int) -> PublishedView:
        found = published_status(self._settings, collection_id)
        moment = tick_unix_seconds(found.tick) if found.tick else None
        return PublishedView(**found.to_json(), time=moment)

    def segments(self, name: str, *, state: str = "", offset: int = 0, limit: int = 50) -> SegmentPage:
        """Return segments of a collection, newest first. Raises CollectionNotFound, InvalidArgument."""
        found = self._find(name)
        return collections.segment_page(
            found,
            self._segments().of_collection(found.id),
            self._flushed(),
            state=state,
            offset=offset,
            limit=_page(limit, offset),
        )

    def files(
        self, name: str, *, deletes: bool = False, order: str = "tick", offset: int = 0, limit: int = 50
    ) -> FilePage:
        """Return files of a collection's rows (or deletes). Raises CollectionNotFound, InvalidArgument."""
        found = self._find(name)
        pinned = self._of_collection(found)[1 if deletes else 0]
        return collections.file_page(pinned, order=order, offset=offset, limit=_page(limit, offset))

    def sample(self, name: str, *, at: int | None = None, limit: int = 50) -> RowSample:
        """Return some of a collection's newest rows at a tick.

        Raises as :func:`millrace.observe.row_sample.sample_rows`.
        """
        found = self._find(name)
        return samples.sample_rows(self._settings, found.id, found.name, at=at, limit=limit)

    # -- Messages -----------------------------------------------------------------------------------------------------

    def messages(self, query: WalQuery, *, limit: int = 50, before: str = "") -> MessageSearch:
        """Return accepted messages, newest first. Raises InvalidArgument."""
        cursor = Cursor.parse(before) if before else None
        pinned = self._tables.newest(self._settings.wal_uri)
        found = SearchResult() if pinned is None else search_wal(pinned, query, limit=limit, before=cursor)
        names = self._names()
        return MessageSearch(
            version=None if pinned is None else pinned.version,
            next=None if found.next is None else str(found.next),
            complete=found.complete,
            items=[message_views.message_row(row, "message", names) for row in found.rows],
        )

    def rejections(self, query: WalQuery, *, limit: int = 50, before: str = "") -> RejectionSearch:
        """Return rejected messages, newest first. Raises InvalidArgument."""
        if query.reason and query.reason not in Reason.__members__:
            raise InvalidArgument(f"no reason {query.reason[:40]!r}: use one of {', '.join(Reason.__members__)}")
        cursor = Cursor.parse(before) if before else None
        pinned = self._tables.newest(self._settings.wal_uri)
        found = search_wal(pinned, query, limit=limit, before=cursor) if pinned is not None else None
        names = self._names()
        return RejectionSearch(
            version=pinned.version if pinned is not None else None,
            next=str(found.next) if found is not None and found.next is not None else None,
            complete=found is None or found.complete,
            items=[
                message_views.message_row(row, "rejection", names) for row in (found.rows if found is not None else [])
            ],
            reasons=list(Reason.__members__),
        )

    def transactions(self, query: WalQuery, *, limit: int = 50, before: str = "") -> TransactionSearch:
        """Return open transactions, and ended ones newest first. Raises InvalidArgument."""
        cursor = Cursor.parse(before) if before else None
        pinned = self._tables.newest(self._settings.wal_uri)
        found = search_wal(pinned, query, limit=limit, before=cursor) if pinned is not None else None
        names = self._names()
        return TransactionSearch(
            version=pinned.version if pinned is not None else None,
            next=str(found.next) if found is not None and found.next is not None else None,
            complete=found is None or found.complete,
            open=message_views.open_transactions(self._positions(), query, names),
            items=[message_views.ended_transaction(row, names) for row in (found.rows if found is not None else [])],
        )

    def message(self, pchannel: str, message_id: str) -> MessageView:
        """Return a message or rejection of the WAL with its payload decoded.

        Raises ChannelNotFound, InvalidArgument.
        """
        wanted = MessageId.parse(message_id)
        if max(wanted) >= 1 << 63:
            raise InvalidArgument(f"{message_id[:80]!r} is not a message id: its numbers have at most 63 bits")
        pinned = self._tables.newest(self._settings.wal_uri)
        found = find_message(pinned, pchannel, wanted) if pinned is not None else None
        if found is None:
            raise ChannelNotFound(f"the WAL has no message {wanted} on {pchannel[:80]!r}")
        row, kind = found
        number = row["collection_id"]
        known = read_collections_by_id(self._settings.data_dir, [number])
        return message_views.message_view(row, kind, known.get(number))

    # -- Checkpoints and maintenance ----------------------------------------------------------------------------------

    def checkpoints(self) -> CheckpointsView:
        """Return the checkpoints, and what truncation could free."""
        return self._cache.get("checkpoints", FAST, self._checkpoints_view)

    def _checkpoints_view(self) -> CheckpointsView:
        pinned = self._tables.newest(self._settings.checkpoints_uri)
        return checkpoints.checkpoints_view(
            self._settings, self._positions(), self._checkpoints(), self._log_view(), pinned
        )

    def maintenance(self, *, job: str = "", run: str = "", limit: int = 50) -> MaintenanceView:
        """Return the tables' health, and running and finished operations. `run` restricts them to one run."""
        if not 1 <= limit <= maintenance.MAX_OPERATIONS:
            raise InvalidArgument(f"a page has 1 to {maintenance.MAX_OPERATIONS} operations, not {limit}")
        tables, table_count = self._cache.get("table views", SLOW, self._table_views)
        return MaintenanceView(
            tables=tables,
            table_count=table_count,
            operations=(
                maintenance.run_attempts(self._settings, run)
                if run
                else maintenance.finished_operations(self._settings, job=job, limit=limit)
            ),
            running=maintenance.running_operations(self._settings),
            small_file_bytes=maintenance.SMALL_FILE_BYTES,
            log=maintenance.run_log(self._settings, run) if run else "",
        )

    def _table_views(self) -> tuple[list[TableView], int]:
        """Return the deployment's own tables and the worst of the collections', and the number of all."""
        named = [
            ("wal", "WAL", self._settings.wal_uri),
            ("segments", "segments", self._settings.segments_uri),
            ("checkpoints", "checkpoints", self._settings.checkpoints_uri),
        ]
        own = [
            maintenance.table_view(name, title, pinned)
            for name, title, path in named
            if (pinned := self._tables.newest(path)) is not None
        ]
        names = read_names(self._settings.data_dir, dropped=False)
        worst, known = self._survey.look(names, seconds=SURVEY_SECONDS, limit=WORST_TABLES)
        return [*own, *worst], len(own) + known

    def operations(self, *, job: str = "", limit: int = 50) -> list[OperationRow]:
        """Return finished operations, newest first, of one job if given."""
        return self.maintenance(job=job, limit=limit).operations

    def streams(self) -> StreamsView:
        """Return the declared streams and their connections. Raises InvalidStream if a declaration cannot be read."""
        return self._cache.get("streams", FAST, lambda: streams_view(self._settings))

    def quality(self, *, limit: int = 100) -> QualityView:
        """Return results of the quality checks, newest first."""
        if not 1 <= limit <= maintenance.MAX_OPERATIONS:
            raise InvalidArgument(f"a page has 1 to {maintenance.MAX_OPERATIONS} results, not {limit}")
        found = self._cache.get(
            ("quality", limit),
            SLOW,
            lambda: maintenance.quality_view(
                self._settings,
                self._tables.newest(quality_results_uri(self._settings)),
                limit=limit,
                names=self._names(),
            ),
        )
        docs = self._cache.get("data docs", SLOW, lambda: docs_store(self._settings).size(INDEX) is not None)
        return found.model_copy(update={"docs": docs})

    # -- Sources of the answers ----------------------------------------------------------------------------------------

    def _find(self, name: str) -> CollectionInfo:
        """Return the collection with that id, name or alias; by name only if it is not dropped.

        Raises CollectionNotFound.
        """
        folder = self._settings.data_dir
        number = int(name) if name.isascii() and name.isdecimal() and len(name) < 19 else 0
        found = read_collections_by_id(folder, [number]).get(number) if number else None
        found = found or read_collection(folder, name)
        if found is None:
            known = read_page(folder, CollectionQuery(limit=MAX_NAMED))
            more = f" and {known.total - len(known.items):,} more" if known.next else ""
            raise CollectionNotFound(
                f"no collection {name[:80]!r}; the collections are {', '.join(each.name for each in known.items)}{more}"
            )
        return found

    def _names(self) -> Mapping[int, str]:
        return self._cache.get("names", FAST, lambda: read_names(self._settings.data_dir))

    def _of_collection(self, found: CollectionInfo) -> tuple[TableSnapshot | None, TableSnapshot | None]:
        return (
            self._tables.newest(rows_uri(self._settings, found.id)),
            self._tables.newest(deletes_uri(self._settings, found.id)),
        )

    def _segments(self) -> SegmentTable:
        return self._cache.get(
            "segments", SLOW, lambda: collections.read_segments(self._tables.newest(self._settings.segments_uri))
        )

    def _checkpoints(self) -> dict[str, Checkpoint]:
        def ask() -> dict[str, Checkpoint]:
            pinned = self._tables.newest(self._settings.checkpoints_uri)
            return {} if pinned is None else read_checkpoints(pinned.table)

        return self._cache.get("checkpoint rows", FAST, ask)

    def _flushed(self) -> FlushProgress:
        """Return the flusher's progress. Decodes catalogs of all collections: not for the overview."""
        checkpoints = self._checkpoints()

        def ask() -> FlushProgress:
            self._progress = FlushProgress.of(checkpoints, known=self._progress)
            return self._progress

        return self._cache.get("flushed", FAST, ask)

    def _positions(self) -> dict[str, WalPosition]:
        return self._cache.get("positions", FAST, lambda: self._with_wal(_positions))

    def _health_inputs(self) -> health.HealthInputs:
        return self._cache.get("kept", FAST, lambda: health.read_health_inputs(self._settings))

    def _log_view(self) -> LogView:
        positions = self._positions()  # not inside: the handle is locked there
        return self._cache.get("log", FAST, lambda: self._with_wal(lambda wal: self._log.probe(wal, positions)))

    def _with_wal(self, ask: Any) -> Any:
        """Call `ask` with this observer's WAL handle at the newest version, or with None if there is no table yet."""
        with self._wal_lock:
            if self._wal is not None and not self._wal.table.version_exists():
                self._wal = None
            if self._wal is None:
                table = open_table(self._settings.wal_uri)
                self._wal = None if table is None else WalTable(table)
            else:
                self._wal.refresh()
            return ask(self._wal)


def _positions(wal: WalTable | None) -> dict[str, WalPosition]:
    return wal.valid_positions(wal.pchannels()) if wal is not None else {}


def _page(limit: int, offset: int) -> int:
    if not 1 <= limit <= collections.MAX_PAGE_SIZE or not 0 <= offset < 1 << 62:
        raise InvalidArgument(f"a page has 1 to {collections.MAX_PAGE_SIZE} items, and its offset must be at least 0")
    return limit
