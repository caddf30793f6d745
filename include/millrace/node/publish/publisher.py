"""One publish of one collection: from the version that is published to the tick that its inner tables have reached.

The versions are pinned in the order of a read (millrace.tables.read.plan): checkpoints, deletes, rows. The log alone
decides what a version holds. A publisher at tick T gets the rows of ``read(at=T)``, whichever version
it starts from:

- A file that was not published yet is judged by all deletes and drops up to T that the tables still have. This covers
  what a flush wrote, and what a fold, a compaction or a repair wrote in place of other files: no position is mapped.
- A file that was published is judged by the deletes and drops since then, with the key index
  (millrace.tables.key_index) if there is one. Its other masked rows stay masked.
- A file with rows of after the last published tick is judged again: these rows were masked, and may be visible now.
- A file of after T alone is left to a later publish.

Files that were rewritten are published first, by a commit of their own at the last published tick: it changes no rows.
So every other commit says by its files and vectors exactly which rows came and went.

Before the commit, the rows that the last version shows in removed files must be as many as the rows of that tick in the
added ones: a rewrite neither loses nor revives a row. Otherwise the publish raises PublishedRowsDiffer and changes
nothing.

Failpoints: ``publish.converted`` after each converted file, ``publish.planned`` before the commit, ``publish.indexed``
after the index follows it, and those of millrace.storage.published.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any, Final

import numpy as np

from millrace.base.errors import CommitFenced, PublishedRowsDiffer, TickNotReached
from millrace.base.failpoint import hit
from millrace.base.settings import Settings
from millrace.message.ids import tick_physical_ms
from millrace.message.schema import CollectionSchema
from millrace.message.stored_columns import key_columns
from millrace.node.publish.positions import Deletes, RowJudge, union
from millrace.node.publish.progress import TablesProgress
from millrace.node.publish.shape import PARTITION, PublishedShape, is_converted
from millrace.runtime.periodic import MAINTENANCE_ERRORS
from millrace.storage.deletion_vectors import NO_POSITIONS, Positions
from millrace.storage.parquet_file import file_statistics, open_file
from millrace.storage.published import (
    CONVERTED,
    ROWS_FOLDER,
    VECTOR_BYTES,
    AddedFile,
    PublishedChange,
    PublishedTable,
    inner_path,
)
from millrace.storage.published_log import CHANGE_FEED
from millrace.storage.store import store_at
from millrace.storage.table import TOMBSTONES, LiveFile, TableHandle, open_table
from millrace.tables.collections.data_tables import (
    TICK,
    deletes_uri,
    earliest_readable_tick,
    published_uri,
    rows_uri,
)
from millrace.tables.collections.dead_rows import HiddenRanges, hidden_ranges_at
from millrace.tables.key_index.index import INDEX_FROM_ROWS, KeyIndex
from millrace.tables.key_index.lookup import find_hits
from millrace.tables.key_index.shared_index import shared_index
from millrace.wal.visible.catalog import VChannelInfo, newest_schema

ROWS_VERSION: Final = "rowsVersion"
DELETES_VERSION: Final = "deletesVersion"
"""Keys of a commit's info: the versions of the inner tables that it was made from."""
WHOLE: Final = "whole"
"""Key of a commit's info: whether these versions have nothing of after its tick."""
CREATED: Final = "createdTick"
"""Key of a commit's info: the tick from which the collection exists. Ids may be used again."""

NEWS_BYTES: Final = "newsBytes"
"""Key of a commit's info: the size of the flushed files and deletes that it publishes, about."""
NEWS_SECONDS: Final = "newsSeconds"
"""Key of a commit's info: the log time in which they came; 0.0 for a first version."""
MASKED_ROWS: Final = "maskedRows"
"""Key of a commit's info: the rows of published files that it masks."""

FREE_VECTOR_BYTES: Final = 1 << 20
"""Bytes of vectors that never make the next publish wait: they cost less than the rest of the commit."""
MAX_PAUSE_INTERVALS: Final = 6.0
"""Longest pause between two publishes of a collection because of its vectors, in publish intervals."""

_log = logging.getLogger(__name__)


def pause_after(commit_info: Mapping[str, Any], interval: float) -> float:
    """Return the seconds that the next publish waits after one with this commit info, if `interval` is the shortest.

    Updates of random keys rewrite the vectors of nearly every file, however few they are. So a publish waits until as
    many bytes were flushed as its vectors have, by the rate of the last one. 0.0 if `interval` is enough for that.
    """
    vectors, news = int(commit_info.get(VECTOR_BYTES, 0)), int(commit_info.get(NEWS_BYTES, 0))
    if vectors < FREE_VECTOR_BYTES or not news:
        return 0.0
    longest = MAX_PAUSE_INTERVALS * interval
    pause = min(float(commit_info.get(NEWS_SECONDS, 0.0)), longest) * vectors / news
    return min(pause, longest) if pause > interval else 0.0


@dataclass(slots=True)
class CollectionTables:
    """Handles on the tables of one collection. One thread at a time."""

    settings: Settings
    collection_id: int
    deletes: TableHandle | None = None
    rows: TableHandle | None = None
    published: PublishedTable | None = None
    _index: KeyIndex | None = None

    def key_index(self) -> KeyIndex:
        """Return the key index of the rows. It covers nothing if there is none: then its files are read."""
        if self._index is None:
            folder = self.settings.key_index_path(self.collection_id)
            shared = shared_index(self.settings, self.collection_id)
            try:
                if shared is not None:
                    shared.take(folder)  # of a publisher on another machine
            except OSError as error:
                _log.warning("the key index of collection %d is not copied: %s", self.collection_id, error)
            self._index = KeyIndex.open(folder)
        return self._index

    def keep_index(self, schema: CollectionSchema, *, rows_scanned: int) -> None:
        """Bring the key index up to the version of the rows, if there is one, a reader asked for it, or it is worth it.

        Call after the commit. A failure costs the next publish a scan.
        """
        index, shared = self.key_index(), shared_index(self.settings, self.collection_id)
        if self.rows is None:
            return
        try:
            wanted = index.is_wanted or rows_scanned >= INDEX_FROM_ROWS
            if not (wanted or (shared is not None and shared.is_wanted())):
                return
            before = index.table_version
            index.catch_up(self.rows, schema)
            hit("publish.indexed")
            if shared is not None and index.table_version != before:
                shared.put(index.folder, [each.path.name for each in index.runs])
        except MAINTENANCE_ERRORS as error:
            _log.warning("the key index of collection %d is not up to date: %s", self.collection_id, error)
            self._index = None

    def refresh(self) -> None:
        """Go to the newest versions, deletes before rows: what a compaction removed is gone from the rows too."""
        number, settings = self.collection_id, self.settings
        self.published = _refreshed(self.published) or PublishedTable.open(store_at(published_uri(settings, number)))
        self.deletes = _refreshed(self.deletes) or open_table(deletes_uri(settings, number))
        self.rows = _refreshed(self.rows) or open_table(rows_uri(settings, number))


def _refreshed(table: Any) -> Any:
    if table is not None:
        table.refresh()
    return table


@dataclass(frozen=True)
class PublishView:
    """A collection at one tick, in pinned versions of its inner tables."""

    tables: CollectionTables
    tick: int
    vchannels: Mapping[str, VChannelInfo]
    newest: int
    """Tick after which the inner tables have nothing of the collection."""
    pinned_at: float = field(default_factory=time.monotonic)
    """Time at which the versions were pinned, by the monotonic clock. Their files stay for ``file_retention``."""

    @property
    def rows(self) -> TableHandle:
        assert self.tables.rows is not None
        return self.tables.rows

    @cached_property
    def schema(self) -> CollectionSchema:
        return newest_schema(self.vchannels.values(), self.tick)

    @cached_property
    def schema_version(self) -> int:
        return max(info.version_at(self.tick) for info in self.vchannels.values())

    @property
    def dropped(self) -> bool:
        """Whether the collection was dropped at the tick: then its published table is empty."""
        return any(0 < info.dropped_tick <= self.tick for info in self.vchannels.values())

    @property
    def created(self) -> bool:
        """Whether the collection exists on all its VChannels at the tick."""
        names = next((info.vchannels for info in self.vchannels.values()), ())
        return bool(names) and all(
            name in self.vchannels and self.vchannels[name].created_tick <= self.tick for name in names
        )

    def hidden(self, tick: int, *, after: int = 0) -> HiddenRanges:
        """Return what DDL with after < tick hides at `tick`."""
        found = hidden_ranges_at(self.vchannels, tick)
        return HiddenRanges(
            tuple(each for each in found.partitions if each[2] > after),
            tuple(each for each in found.vchannels if each[1] > after),
        )

    @property
    def created_tick(self) -> int:
        """The tick from which the collection exists."""
        return max(info.created_tick for info in self.vchannels.values())

    @property
    def whole(self) -> bool:
        """Whether the inner tables have nothing of after the tick."""
        return self.tick >= self.newest

    @property
    def info(self) -> dict[str, Any]:
        """Entries of the commit's info that tell whether the inner tables have news since."""
        deletes = self.tables.deletes
        return {
            ROWS_VERSION: self.rows.version,
            DELETES_VERSION: -1 if deletes is None else deletes.version,
            WHOLE: self.whole,
        }


@dataclass(slots=True)
class PublishFigures:
    """The result of a publish."""

    files_added: int = 0
    files_removed: int = 0
    files_masked: int = 0
    files_opened: int = 0
    rows_scanned: int = 0
    """Rows of published files that were read for the deletes, because the key index does not cover them."""
    rows_masked: int = 0
    """Rows of published files that were masked now."""
    news_bytes: int = 0
    """Size of the flushed files and deletes that are published, about."""
    vector_bytes: int = 0
    """Bytes of the deletion vectors that the commit wrote."""
    seconds: float = 0.0

    def add(self, other: PublishFigures) -> None:
        """Add what another publish did."""
        for each in fields(self):
            setattr(self, each.name, getattr(self, each.name) + getattr(other, each.name))


@dataclass(slots=True)
class PlannedPublish:
    """A change that waits for its commit."""

    view: PublishView
    change: PublishedChange | None
    """None: the published version holds the rows of the tick already."""
    figures: PublishFigures = field(default_factory=PublishFigures)
    rewrites: bool = False
    """Whether the change only has rewritten files take the place of published ones. What came since is planned next."""


def pin(tables: CollectionTables, progress: TablesProgress) -> PublishView | None:
    """Pin the newest versions of a collection's tables, after `progress` was taken. None: nothing to publish yet.

    Raises TickNotReached if a later tick is published, or a compaction has removed rows that are visible at the tick of
    `progress`: look again.
    """
    number = tables.collection_id
    tick, newest = progress.tick(number), progress.newest(number)
    tables.refresh()
    view = PublishView(tables, tick, progress.collections.get(number, {}), newest)
    if tables.rows is None or not view.created:
        return None
    # Another publisher may have looked later, and a compaction may have gone further. The catalog of `progress` is too
    # old for that tick: it may lack a drop.
    least = max(earliest_readable_tick(tables.rows), 0 if tables.published is None else tables.published.tick)
    if tick < least:
        raise TickNotReached(
            f"the tables of collection {number} were whole up to tick {tick} a moment ago, and are needed at {least}: "
            "retry"
        )
    return view


def plan_publish(view: PublishView, *, anew: bool = False) -> PlannedPublish:
    """Return the change that takes the published version to the tick of `view`. Creates the table if there is none.

    `anew` judges all files again, whatever the published version says: for one that is wrong.

    Raises PublishedRowsDiffer, TableDamaged, StoreCannotPublish.
    """
    began = time.perf_counter()
    planned = _Planning(view, anew).planned()
    planned.figures.seconds = time.perf_counter() - began
    return planned


def commit_publish(planned: PlannedPublish) -> None:
    """Commit a planned change. Its own converted files are deleted if another publisher was first.

    Raises CommitFenced (pin and plan again), TableUnavailable.
    """
    view = planned.view
    table, change = view.tables.published, planned.change
    assert table is not None
    if change is None:
        if view.tables.key_index().table_version != view.rows.version:  # a publisher died between commit and index
            view.tables.keep_index(view.schema, rows_scanned=0)
        return
    if time.monotonic() - view.pinned_at > view.tables.settings.file_retention / 2:
        _require_live(view, change)
    try:
        table.commit(change)
    except CommitFenced:
        table.store.delete([each.path for each in change.add if each.path.startswith(f"{CONVERTED}/")])
        raise
    figures = planned.figures
    figures.vector_bytes = int(table.commit_info[VECTOR_BYTES])
    view.tables.keep_index(view.schema, rows_scanned=figures.rows_scanned)
    if planned.rewrites:
        rest = plan_publish(view)
        commit_publish(rest)
        figures.add(rest.figures)


def _require_live(view: PublishView, change: PublishedChange) -> None:
    """Raise CommitFenced if a file to add was replaced since it was pinned: it may be removed at any time."""
    names = [inner_path(each.path) for each in change.add if each.path.startswith(f"{ROWS_FOLDER}/")]
    view.rows.refresh()
    if view.rows.not_live(names):
        raise CommitFenced(f"files of {view.rows.uri} were replaced while they were judged: plan again")


class _Planning:
    """The state of one plan."""

    def __init__(self, view: PublishView, anew: bool) -> None:
        tables = view.tables
        self._view = view
        self._anew = anew
        self._shape = PublishedShape.of(view.schema, partition=tables.settings.publish_partition)
        self._figures = PublishFigures()
        if tables.published is None:
            store = store_at(published_uri(tables.settings, tables.collection_id))
            tables.published = PublishedTable.create(
                store,
                self._shape.columns,
                collection_id=tables.collection_id,
                properties=self._properties,
                schema_version=view.schema_version,
            )
        self._table = tables.published
        self._since = self._table.tick
        self._opened: list[str] = []
        first_key = key_columns(view.schema)[0]
        self._live = {} if view.dropped else {file.path: file for file in view.rows.describe_files((TICK, first_key))}
        """The rows table's files by path."""
        self._current = {inner_path(path): path for path in self._table.files}
        """The published files by the inner file whose rows they have."""

    def planned(self) -> PlannedPublish:
        view, since, live, current = self._view, self._since, self._live, self._current
        added = [file for path, file in live.items() if path not in current and not _is_after(file, view.tick)]
        removed = [published for path, published in current.items() if path not in live]
        live_published = [live[path] for path in current if path in live]
        again = [file for file in live_published if self._anew or _is_ahead(file, since)]
        settled = (
            live_published
            if not again
            else [file for file in live_published if not (self._anew or _is_ahead(file, since))]
        )
        deletes = self._deletes([*added, *again])
        if not (self._anew or view.dropped or self._is_recreated()):
            shown = self._check(added, removed, deletes)
            if removed and shown is not None and view.tick > since and not self._is_reshaped:
                return self._rewrite(added, removed, shown)
        judge = self._judge(deletes, view.hidden(view.tick), view.tick)
        whole = {file.path: judge.positions(file) for file in (*added, *again)}
        news = deletes.after(since)
        self._figures.news_bytes = news.rows.nbytes + sum(file.size for file in added if _is_ahead(file, since))
        for path, found in self._news(settled, news).items():
            whole[path] = union(self._table.masked(current[path]), found)
        change = self._change(added, removed, whole)
        self._figures.files_opened = len(self._opened)
        hit("publish.planned")
        return PlannedPublish(view, change, self._figures)

    def _news(self, settled: list[LiveFile], deletes: Deletes) -> dict[str, Positions]:
        """Return by published file the positions that `deletes` and the drops since the last publish hit."""
        view, found = self._view, dict[str, Positions]()
        if deletes.rows.num_rows and settled:
            paths = [file.path for file in settled]
            hits = find_hits(view.tables.key_index(), view.rows, view.schema, deletes.rows, files=paths)
            found.update(hits.positions)
            self._figures.rows_scanned = hits.work.rows_scanned
        hidden = view.hidden(view.tick, after=self._since)
        if hidden.ticks:
            judge = self._judge(deletes.after(view.tick), hidden, view.tick)
            for file in settled:
                positions = judge.positions(file)
                if len(positions):
                    found[file.path] = union(found.get(file.path, NO_POSITIONS), positions)
        return found

    def _judge(self, deletes: Deletes, hidden: HiddenRanges, tick: int) -> RowJudge:
        return RowJudge(self._view.rows.store, deletes, hidden, tick, self._opened)

    def _deletes(self, judged: list[LiveFile]) -> Deletes:
        """Read the deletes that may hit: all since the last publish, and those since the first row of `judged`."""
        view = self._view
        lows = [file.low.get(TICK) or 0 for file in judged]
        first = min([self._since, *(low - 1 for low in lows)])
        return Deletes.read(view.tables.deletes, view.schema, after=first, until=view.tick)

    def _check(
        self, added: list[LiveFile], removed: list[str], deletes: Deletes
    ) -> dict[str, tuple[LiveFile, Positions]] | None:
        """Check that added files have as many rows of the last published tick as the removed ones show there.

        Returns by path the added files with such rows and what that version masks of them; None if they lack rows that
        it shows.
        """
        view, since = self._view, self._since
        shown = sum(self._table.files[path].live_rows for path in removed)
        old = [file for file in added if not _is_after(file, since)]
        judge = self._judge(deletes.up_to(since), view.hidden(since), since)
        masked = {file.path: (file, judge.positions(file)) for file in old}
        found = sum(file.rows - len(positions) for file, positions in masked.values())
        # A compaction that folds beyond the last published tick has dropped rows that are visible there.
        folded = earliest_readable_tick(view.rows) > since
        if found > shown or (found < shown and not folded):
            raise PublishedRowsDiffer(
                f"collection {view.tables.collection_id}: {len(removed)} published files that are gone show {shown}"
                f" rows at tick {since}, and {len(old)} files in their place have {found}. Nothing was published. Run "
                "`millrace verify`, then publish it anew (`millrace collections publish --anew`)"
            )
        return masked if found == shown else None

    def _rewrite(
        self, added: list[LiveFile], removed: list[str], shown: Mapping[str, tuple[LiveFile, Positions]]
    ) -> PlannedPublish:
        """Return the change that has rewritten files take the place of `removed`, and shows the same rows.

        In one commit with what came since, readers of changes would take rows that were moved for new ones, or miss
        deletes.
        """
        adds = [self._added(file, positions) for file, positions in shown.values()]
        self._figures.files_added, self._figures.files_removed = len(adds), len(removed)
        self._figures.files_opened = len(self._opened)
        change = PublishedChange(
            self._since,
            self._table.schema_version,
            add=adds,
            remove=removed,
            rewrites=frozenset([*removed, *(each.path for each in adds)]),
            info={**self._view.info, CREATED: self._view.created_tick},
        )
        hit("publish.planned")
        return PlannedPublish(self._view, change, self._figures, rewrites=True)

    def _change(
        self, added: list[LiveFile], removed: list[str], whole: Mapping[str, Positions]
    ) -> PublishedChange | None:
        """Return what takes the published version to `whole`, the masked positions by file; None if it is there."""
        view, table, figures = self._view, self._table, self._figures
        reshaped = self._is_reshaped
        adds = [self._added(file, whole[file.path]) for file in added]
        # Only if nothing came since do the files that take the place of others show the same rows.
        rewrites = {*removed, *(made.path for made in adds)} if view.tick == self._since and not self._anew else set()
        gone, mask = list(removed), {}
        for path, published in self._current.items():
            file = self._live.get(path)
            if file is None:
                continue
            positions = whole.get(path)
            if reshaped and self._must_move(path, published):
                made = self._added(file, table.masked(published) if positions is None else positions)
                gone.append(published)
                adds.append(made)
                if positions is None:
                    rewrites |= {published, made.path}
                continue
            if positions is None:
                continue
            # A file that was judged again may have as many masked rows as before, and others.
            before = table.masked(published)
            if not np.array_equal(before, positions):
                mask[published] = positions
                figures.rows_masked += len(positions) - len(before)
        figures.files_added, figures.files_removed, figures.files_masked = len(adds), len(gone), len(mask)
        info = {**view.info, CREATED: view.created_tick}
        known = {name: table.commit_info.get(name) for name in info}
        if not (adds or gone or mask or reshaped) and info == known:
            return None
        seconds = (tick_physical_ms(view.tick) - tick_physical_ms(self._since)) / 1000 if self._since else 0.0
        info |= {
            NEWS_BYTES: figures.news_bytes,
            NEWS_SECONDS: round(seconds, 3),
            MASKED_ROWS: max(0, figures.rows_masked),
        }
        return PublishedChange(
            view.tick,
            view.schema_version,
            schema=self._shape.columns if reshaped else None,
            add=adds,
            remove=gone,
            mask=mask,
            rewrites=frozenset(rewrites),
            properties=self._properties,
            info=info,
        )

    @property
    def _properties(self) -> dict[str, str]:
        """Table properties that follow the settings. Spark reads no version that is older than the retention."""
        hours = max(1, math.ceil(self._view.tables.settings.publish_retention / 3600))
        found = {TOMBSTONES: f"interval {hours} hours"}
        feed, table = self._view.tables.settings.publish_change_feed, self._view.tables.published
        if feed or (table is not None and CHANGE_FEED in table.properties):
            found[CHANGE_FEED] = str(feed).lower()
        return found

    @property
    def _is_reshaped(self) -> bool:
        """Return whether the published columns are those of another schema version, setting, or collection."""
        return (
            self._table.schema_version != self._view.schema_version
            or self._shape.has_partition != (PARTITION in self._table.schema.names)
            or self._is_recreated()
        )

    def _is_recreated(self) -> bool:
        """Return whether the published columns are those of an earlier collection of the same id."""
        created = self._table.commit_info.get(CREATED)
        return created is not None and created != self._view.created_tick

    def _must_move(self, path: str, published: str) -> bool:
        """Return whether a published file has values that readers of the new columns would not see."""
        if not self._shape.older or is_converted(published, self._shape):
            return False
        with open_file(self._view.rows.store, path) as file:
            return self._shape.needs_conversion(file.metadata)

    def _added(self, file: LiveFile, positions: Positions) -> AddedFile:
        """Return the file to add for an inner file: itself, or a converted copy, which is written here."""
        shape, inner = self._shape, self._view.rows.store
        with open_file(inner, file.path) as parquet:
            footer = parquet.metadata
        if not shape.needs_conversion(footer):
            stats = file_statistics(footer, shape.stored_names)
            return AddedFile(f"{ROWS_FOLDER}/{file.path}", file.size, footer.num_rows, stats, positions)
        made = shape.convert(inner, file.path, self._table.store)
        hit("publish.converted")
        return AddedFile(made.path, made.size, made.rows, made.stats, positions, made.written_ms)


def _is_after(file: LiveFile, tick: int) -> bool:
    """Return whether all rows of `file` are after `tick`."""
    low = file.low.get(TICK)
    return low is not None and low > tick


def _is_ahead(file: LiveFile, tick: int) -> bool:
    """Return whether `file` may have rows after `tick`."""
    high = file.high.get(TICK)
    return high is None or high > tick
