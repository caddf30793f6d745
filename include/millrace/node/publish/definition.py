"""The publisher, an implementation of the range loop: brings collections' published tables up to their inner tables.

A channel of this loop is a collection, by its id. A round publishes the collections that changed, several at once: the
flusher's commits to ``checkpoints`` name them. A collection whose rows wait for a PChannel stays in the next rounds. A
collection that cannot be published is retried with back-off, up to MAX_RETRY_SECONDS, and shows its error; the others
go on, and the flusher knows nothing of it.

Any process may run this loop, beside others: of two publishers of one collection, one is fenced and plans again.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final

import millrace.runtime.arrow_without_pandas  # noqa: F401 - first, before an array is made
from millrace.base.errors import CommitFenced, MillraceError, TickNotReached
from millrace.base.metrics import Metrics
from millrace.base.settings import Settings
from millrace.base.settings.live import LiveSettings
from millrace.message.ids import tick_physical_ms
from millrace.node.publish.progress import ConfirmTicks, LogTicks, ProgressReader, TablesProgress
from millrace.node.publish.publisher import (
    CollectionTables,
    PlannedPublish,
    commit_publish,
    pause_after,
    pin,
    plan_publish,
)
from millrace.node.range_loop.definition import (
    CommitResult,
    LoopDefinition,
    OwnershipCheck,
    PendingRange,
    Planner,
    always_owned,
)
from millrace.node.range_loop.in_process import run_to_end
from millrace.node.range_loop.runner import RETRY_SECONDS, run_loop
from millrace.node.retention.file_removal import DeploymentFileRemover
from millrace.runtime.process_setup import lower_thread_priority
from millrace.storage.table import announcement, change_mark
from millrace.tables.collections.data_tables import deletes_uri, rows_uri
from millrace.tables.wal.reader import follow

NAME: Final = "publisher"

PUBLISH_THREADS: Final = 2
"""Collections that are published at once."""

ROUND_LIMIT: Final = 64
"""Collections of one round, those that the flusher named first. After a start, all are looked at in such rounds."""

OPEN_COLLECTIONS: Final = 64
"""Collections whose handles stay open from one round to the next."""

SWEEP_SECONDS: Final = 60.0
"""Pause between two looks for changes that the flusher did not make. Replaced files stay for `file_retention`, which is
at least as long."""
UNANNOUNCED_SECONDS: Final = 3600.0
"""The same on an object store, for changes that no process of this machine announced: another machine's compaction.
Until then the published version needs the files that it replaced, so they stay (millrace.storage.replaced_files)."""

WAIT_SECONDS: Final = 0.5
"""Least pause between two looks at a collection whose rows wait for a PChannel."""

MAX_RETRY_SECONDS: Final = 300.0
"""Longest pause before a collection is tried again that cannot be published."""

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _News:
    """Knowledge of one collection's inner tables."""

    seen: int = 1
    """Counts news."""
    done: int = 0
    """The news that the published version has."""
    tries: int = 0
    """Counts commits and looks that found nothing to do: the loop's base."""
    attempts: int = 0
    """Looks since the last one that ended well."""
    mark: str = ""
    """The logs of the inner tables at the last look."""
    swept: bool = False
    """Only the sweep found it: it waits for those that the flusher named."""
    not_before: float = 0.0
    """Time of the next look by the clock, if it waits for a PChannel or because of its vectors."""
    announced: Sequence[bytes | None] = ()
    """Announcements of the inner tables' stores at the sweep's last look."""
    looked_at: float = -math.inf
    """Time of that look."""


class PublishState:
    """One process's knowledge of its collections, for planner, runs and committer. Thread-safe."""

    def __init__(self, settings: Settings, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._settings = settings
        self._clock = clock
        self._lock = threading.Lock()
        self._news: dict[int, _News] = {}
        self._open: OrderedDict[int, CollectionTables] = OrderedDict()
        self.lags: dict[int, float] = {}
        """Published tick of each collection that is behind, in Unix seconds."""
        self.published = False
        """Whether the last round published all rows of a collection that had news."""

    def add(self, numbers: Iterable[int]) -> None:
        """Note news of collections."""
        with self._lock:
            for number in numbers:
                found = self._news.setdefault(number, _News(seen=0))
                found.seen += 1
                found.swept = False

    def sweep(self, numbers: Iterable[int]) -> None:
        """Note as news the collections whose tables changed since they were looked at. Opens no table."""
        for number in numbers:
            announced = [announcement(uri(self._settings, number)) for uri in (rows_uri, deletes_uri)]
            with self._lock:
                known = self._news.setdefault(number, _News(seen=0))
                quiet = None not in announced and known.announced == announced
                if quiet and self._clock() - known.looked_at < UNANNOUNCED_SECONDS:
                    continue
            mark = self._mark(number)
            with self._lock:
                found = self._news.setdefault(number, _News(seen=0))
                found.announced, found.looked_at = announced, self._clock()
                if found.done == found.seen and (not mark or mark != found.mark):
                    found.seen += 1
                    found.swept = True

    def pending(self) -> dict[int, tuple[int, int]]:
        """Return by collection with news how often it was tried, and the news.

        Those that failed come last, those that the flusher named first.
        """
        now = self._clock()
        with self._lock:
            found = {n: each for n, each in self._news.items() if each.done < each.seen and each.not_before <= now}
            order = sorted(found, key=lambda n: (found[n].attempts, found[n].swept, n))
            return {number: (found[number].tries, found[number].seen) for number in order}

    def seen(self) -> dict[int, int]:
        """Return the news by collection."""
        with self._lock:
            return {number: each.seen for number, each in self._news.items()}

    def look(self, number: int) -> None:
        """Remember the logs of a collection's tables. Call before they are opened."""
        mark = self._mark(number)
        with self._lock:
            found = self._news.setdefault(number, _News())
            found.mark = mark
            found.attempts += 1

    def settle(self, number: int, news: int, *, whole: bool, pause: float = 0.0) -> None:
        """Note that the collection is published up to `news` if `whole`; if not, it waits for a PChannel.

        The next publish waits `pause` seconds.
        """
        with self._lock:
            found = self._news[number]
            found.tries += 1
            found.attempts = 0
            found.not_before = self._clock() + max(pause, 0.0 if whole else WAIT_SECONDS)
            if whole:
                found.done = max(found.done, news)

    @contextmanager
    def tables(self, number: int) -> Iterator[CollectionTables]:
        """Yield the handles of one collection, and keep them open unless the block raises."""
        with self._lock:
            found = self._open.pop(number, None) or CollectionTables(self._settings, number)
        yield found
        with self._lock:
            self._open[number] = found
            while len(self._open) > OPEN_COLLECTIONS:
                self._open.popitem(last=False)

    def _mark(self, number: int) -> str:
        """Return the marks of the inner tables' logs; empty if a later change may leave them as they are."""
        found = [change_mark(uri(self._settings, number)) for uri in (rows_uri, deletes_uri)]
        settled = all(each is None or each.settled for each in found)
        return " ".join("-" if each is None else each.text for each in found) if settled else ""


@dataclass(frozen=True, slots=True)
class PublishPlan:
    """One collection to publish."""

    collection_id: int
    news: int
    progress: TablesProgress

    bytes: ClassVar[int] = 0

    @property
    def channel(self) -> str:
        return str(self.collection_id)


@dataclass(slots=True)
class PublishReport:
    """A planned change of one collection, for the committer."""

    collection_id: int
    news: int
    planned: PlannedPublish | None
    """None: the collection has nothing to publish yet."""
    waits: bool = False
    """Whether the tables, by this look, have not reached the published tick: a PChannel did not answer."""

    failure: ClassVar[None] = None
    log_bytes: ClassVar[int] = 0

    @property
    def channel(self) -> str:
        return str(self.collection_id)

    @property
    def tick(self) -> int:
        return 0 if self.planned is None else self.planned.view.tick

    @property
    def rows(self) -> int:
        table = None if self.planned is None else self.planned.view.tables.published
        return 0 if table is None else table.row_count

    def progress(self) -> dict[str, Any]:
        figures = None if self.planned is None else self.planned.figures
        seconds = 0.0 if figures is None else figures.seconds
        return {"tick": self.tick, "rows": self.rows, "seconds": {"plan": round(seconds, 4)}}


class PublishPlanner(Planner[PublishPlan, int]):
    """Finds the collections whose inner tables have news. Ends are counts of news."""

    def __init__(self, settings: Settings, state: PublishState, confirm: ConfirmTicks, only: Collection[int]) -> None:
        self._settings = settings
        self._live = LiveSettings(settings)
        self._state = state
        self._only = frozenset(only)
        self._reader = ProgressReader(settings, confirm)
        self._swept = -SWEEP_SECONDS

    def pending(
        self,
        *,
        without: AbstractSet[str],
        only: AbstractSet[str] | None = None,
        target: Mapping[str, int] | None,
        max_bytes: int,
    ) -> Iterable[PendingRange[int]]:
        self._refresh()
        found = [
            PendingRange(str(number), tries, news)
            for number, (tries, news) in self._state.pending().items()
            if str(number) not in without and (target is None or str(number) in target)
        ]
        return found if target is not None else found[:ROUND_LIMIT]

    def plan(self, ends: Mapping[str, int], *, max_bytes: int) -> list[PublishPlan]:
        progress = self._reader.look(map(int, ends))
        return [PublishPlan(int(name), news, progress) for name, news in ends.items()]

    def ends(self) -> dict[str, int]:
        self._refresh()
        return self.seen()

    def seen(self) -> dict[str, int]:
        return {str(number): news for number, news in self._state.seen().items()}

    def read_end(self, text: str) -> int:
        return int(text)

    def _refresh(self) -> None:
        reader = self._reader
        if self._live.current().publish_interval < self._settings.wal_linger:
            follow(self._settings)
        reader.refresh()
        changed, reader.changed = reader.changed, set()
        self._state.add(self._selected(changed))
        if reader.missed or time.monotonic() - self._swept >= SWEEP_SECONDS:
            reader.missed = False
            self._swept = time.monotonic()
            self._state.sweep(self._selected(reader.collections()))

    def _selected(self, numbers: Iterable[int]) -> Iterator[int]:
        return (number for number in numbers if not self._only or number in self._only)


class PublishCommitter:
    """Commits planned changes, several collections at once."""

    def __init__(self, settings: Settings, state: PublishState, metrics: Metrics | None, *, bounded: bool) -> None:
        """`bounded`: a collection that waits for a PChannel counts as published, because there is no later look."""
        self._live = LiveSettings(settings)
        self._remover = DeploymentFileRemover(settings)
        self._state = state
        self._metrics = metrics
        self._bounded = bounded

    def commit(self, reports: Sequence[PublishReport], /) -> CommitResult[PublishReport]:
        began = time.perf_counter()
        if len(reports) < 2:
            failed = [self._commit(each) for each in reports]
        else:
            with ThreadPoolExecutor(PUBLISH_THREADS, thread_name_prefix="millrace-publish-commit") as pool:
                failed = list(pool.map(self._commit, reports))
        self._report()
        done = [each.planned for each, error in zip(reports, failed, strict=True) if error is None]
        self._state.published = any(each is not None and each.change is not None and each.view.whole for each in done)
        return CommitResult(
            committed=[each for each, error in zip(reports, failed, strict=True) if error is None],
            fenced=[each for each, error in zip(reports, failed, strict=True) if isinstance(error, CommitFenced)],
            refused={
                each.channel: error
                for each, error in zip(reports, failed, strict=True)
                if error is not None and not isinstance(error, CommitFenced)
            },
            seconds=time.perf_counter() - began,
        )

    def _commit(self, report: PublishReport) -> MillraceError | None:
        planned, pause = report.planned, 0.0
        if planned is not None:
            try:
                commit_publish(planned)
            except MillraceError as error:
                return error
            table = planned.view.tables.published
            if planned.change is not None and table is not None:
                self._remover.after_publish(table)
                if not self._bounded:
                    pause = pause_after(table.commit_info, self._live.current().publish_interval)
            self._state.lags.pop(report.collection_id, None)
            if not planned.view.whole:
                self._state.lags[report.collection_id] = tick_physical_ms(report.tick) / 1000
            if self._metrics is not None and planned.change is not None:
                self._metrics.publish_duration_seconds.observe(planned.figures.seconds)
                self._metrics.publish_vector_bytes_total.inc(planned.figures.vector_bytes)
                self._metrics.publish_masked_rows_total.inc(max(0, planned.figures.rows_masked))
        whole = self._bounded or (not report.waits if planned is None else planned.view.whole)
        self._state.settle(report.collection_id, report.news, whole=whole, pause=pause)
        return None

    def _report(self) -> None:
        if self._metrics is not None:
            oldest = min(list(self._state.lags.values()), default=None)
            self._metrics.publish_lag_seconds.set(0.0 if oldest is None else max(0.0, time.time() - oldest))


@dataclass
class PublishLoop(LoopDefinition[PublishPlan, PublishReport]):
    """The publish loop of one process. Its planner, runs and committer share a state: they are threads of it."""

    name: ClassVar[str] = NAME
    settings: Settings
    confirm: ConfirmTicks | None = None
    """Asks how far ``wal`` is complete; None: the append host is asked."""
    only: Collection[int] = ()
    """Collections to publish; empty: all."""
    anew: bool = False
    """Whether all files are judged again, whatever the published versions say."""
    bounded: bool = False
    """Whether the loop ends: what waits for a PChannel is left."""
    state: PublishState = field(init=False)
    live: LiveSettings = field(init=False)

    def __post_init__(self) -> None:
        self.state = PublishState(self.settings)
        self.live = LiveSettings(self.settings)

    @property
    def max_bytes(self) -> int:
        return 0

    @property
    def interval(self) -> float:
        # The flusher decides how long rows wait. A round that found nothing to publish, or rows that wait for a
        # PChannel, must not delay the next flush by half an interval.
        half = self.live.current().publish_interval / 2
        return half if self.state.published else min(half, WAIT_SECONDS)

    @property
    def assigned(self) -> None:
        """Every node publishes what it sees change: a collection has PChannels of several nodes."""
        return None

    @property
    def max_retry_seconds(self) -> float:
        return MAX_RETRY_SECONDS

    def planner(self) -> PublishPlanner:
        return PublishPlanner(self.settings, self.state, self.confirm or LogTicks(self.settings), self.only)

    def run(self, plan: PublishPlan) -> PublishReport:
        self.state.look(plan.collection_id)
        with self.state.tables(plan.collection_id) as tables:
            try:
                view = pin(tables, plan.progress)
            except TickNotReached:
                return PublishReport(plan.collection_id, plan.news, None, waits=True)
            planned = None if view is None else plan_publish(view, anew=self.anew)
        return PublishReport(plan.collection_id, plan.news, planned)

    def committer(self, metrics: Metrics | None, *, holds: OwnershipCheck = always_owned) -> PublishCommitter:
        return PublishCommitter(self.settings, self.state, metrics, bounded=self.bounded)


def publish_to_end(
    settings: Settings,
    *,
    collections: Collection[int] = (),
    confirm: ConfirmTicks | None = None,
    anew: bool = False,
    metrics: Metrics | None = None,
) -> dict[int, int]:
    """Publish the `collections` (default: all) up to what their tables hold now. Returns the tick of each.

    `confirm` says how far ``wal`` is complete; by default the append host is asked, if one runs. `anew` judges all
    files again, for published versions that are wrong.

    Raises as :func:`run_to_end` what keeps a collection from being published: PublishedRowsDiffer, TableDamaged,
    TableUnavailable, PublishRefused, StoreCannotPublish.
    """
    loop = PublishLoop(settings, confirm, collections, anew, bounded=True)
    reached = run_to_end(loop, loop.committer(metrics))
    return {int(name): tick for name, tick in reached.items() if tick}


def publish(settings: Settings, collection_id: int, *, confirm: ConfirmTicks | None = None, anew: bool = False) -> int:
    """Publish one collection up to what its tables hold now. Returns the tick; 0 if there is nothing to publish yet.

    Raises what :func:`publish_to_end` raises.
    """
    return publish_to_end(settings, collections=[collection_id], confirm=confirm, anew=anew).get(collection_id, 0)


@contextmanager
def publishing_at_end(settings: Settings, metrics: Metrics) -> Iterator[None]:
    """Publish after the block, unless it raises, if the settings say so."""
    yield
    if settings.publish:
        publish_to_end(settings, metrics=metrics)


@contextmanager
def publishing(settings: Settings, metrics: Metrics) -> Iterator[None]:
    """Publish beside the block, in threads of a lower priority, if the settings say so. An error never leaves them."""
    if not settings.publish:
        yield
        return
    stop = threading.Event()
    thread = threading.Thread(target=_publish_until, args=(settings, metrics, stop), name=NAME, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def _publish_until(settings: Settings, metrics: Metrics, stop: threading.Event) -> None:
    lower_thread_priority()
    while not stop.is_set():
        try:
            loop = PublishLoop(settings)
            run_loop(loop, metrics=metrics, stop=stop, threads=PUBLISH_THREADS, on_thread=lower_thread_priority)
        except Exception:  # whatever it is, the flusher beside it goes on
            _log.exception("publishing stopped and starts again")
            stop.wait(RETRY_SECONDS)
