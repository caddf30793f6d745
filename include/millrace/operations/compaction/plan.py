"""The compaction plan of one collection, made from the Delta logs, the checkpoints and a few sampled rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Final

import pyarrow as pa

from millrace.base.errors import CollectionNotFound, LogUnavailable, MillraceError
from millrace.base.settings import Settings
from millrace.catalog.sqlite_file import without_aliases
from millrace.log.clock import log_time_ms
from millrace.message.ids import LOGICAL_BITS, compose_tick
from millrace.message.stored_columns import ColumnChains, foldable_chains, key_columns
from millrace.operations.compaction.declaration import CompactionParams
from millrace.operations.coverage import Coverage
from millrace.rpc.remote_log import RemoteLogService
from millrace.storage.deletion_vectors import Vector
from millrace.storage.file_sink import MAX_FILE_BYTES
from millrace.storage.published import PublishedTable, inner_path
from millrace.storage.store import TableStore, store_at
from millrace.storage.table import LiveFile, TableHandle, open_table
from millrace.tables.collections.data_tables import TICK, deletes_uri, earliest_readable_tick, published_uri, rows_uri
from millrace.tables.collections.dead_rows import HiddenRanges, hidden_ranges_at
from millrace.tables.collections.flush_tables import Checkpoint, read_checkpoints
from millrace.tables.rewrite.commits import folded_tick
from millrace.tables.rewrite.files import FileGroup, is_hidden, live_files, merge_groups, row_bytes
from millrace.tables.rewrite.rewrite import DeadRowFilter, RewriteJob, file_schema, merge_job
from millrace.tables.wal.reader import WalSnapshot
from millrace.wal.visible.catalog import VChannelInfo, newest_schema

TARGET_SHARE: Final = 0.9
"""Share of the target to which a group is filled by estimate, so that its real size stays below the file limit."""


@dataclass(frozen=True, slots=True)
class FlushedCollection:
    """A collection according to the flusher's checkpoints."""

    collection_id: int
    name: str
    key: tuple[str, ...]
    """Columns of the primary key in the tables."""
    vchannels: Mapping[str, VChannelInfo]
    flushed_tick: int
    """Tick up to which the tables have everything of every VChannel. 0 if a VChannel was never flushed."""


@dataclass(slots=True)
class CollectionPlan:
    """The plan for one collection. The deletes table was opened before the rows table."""

    collection: FlushedCollection
    history_tick: int
    """Last tick that is folded in."""
    rows: TableHandle
    deletes: TableHandle | None
    rows_uri: str
    deletes_uri: str
    params: CompactionParams
    row_files: list[LiveFile]
    delete_files: list[LiveFile]
    merges: list[FileGroup] = field(default_factory=list)
    published: str = ""
    """URI of the published table; empty if it hides nothing."""
    vectors: Mapping[str, Vector] = field(default_factory=dict)
    """For each file of the rows table, the vector of the rows that the published version hides."""
    fold_tick: int = 0
    """Tick up to which deletes and drops are folded in. 0: nothing is folded."""
    drops: HiddenRanges = field(default_factory=HiddenRanges)
    foldable: int = 0
    """Deletes that may be folded in. An upper bound, taken from their files."""
    base_tick: int = 0
    folded_tick: int = 0

    @property
    def is_idle(self) -> bool:
        """Whether there is nothing to do in either table."""
        if self.merges or self.fold_tick or self.masked:
            return False
        return not plan_deletes(self, self.params, self.folded_tick).groups

    @property
    def masked(self) -> list[FileGroup]:
        """The files, except those that are merged, that have so many hidden rows that they are worth a rewrite.

        Each rewrite sets at least ``hidden_ratio`` of a file apart, and hidden rows stay hidden: so all such rewrites
        together read at most 1 / ``hidden_ratio`` rows for each row that is hidden.
        """
        merged = {path for group in self.merges for path in group.paths}
        least = self.params.hidden_ratio
        found = []
        for file in self.row_files:
            vector = self.vectors.get(file.path)
            if vector is None or file.path in merged or is_hidden(file):
                continue
            if least * file.rows <= vector.cardinality < file.rows:
                found.append(FileGroup((file,), for_hidden=True))
        return found

    @property
    def due_tick(self) -> int | None:
        """The tick of the history limit from which on the unchanged files give another plan. None: they never do."""
        ticks = [tick for file in self.delete_files for tick in (file.low[TICK], file.high[TICK])]
        if any(tick is None for tick in ticks):
            return 0
        return min((tick for tick in ticks if tick > self.history_tick), default=None)

    @property
    def row_count(self) -> int:
        return sum(file.rows for file in self.row_files)

    @property
    def delete_count(self) -> int:
        return sum(file.rows for file in self.delete_files)

    @property
    def delete_ratio(self) -> float:
        return self.foldable / self.row_count if self.row_count else 0.0

    @property
    def drops_foldable(self) -> bool:
        return self.drops.last_tick > 0

    def row_job(self) -> RewriteJob:
        """Return the job of the rows table."""
        fold = self._fold() if self.fold_tick else None
        chosen = {path for group in self.row_groups() for path in group.paths}
        vectors = {path: vector for path, vector in self.vectors.items() if path in chosen}
        job = merge_job(self.rows, self.collection.key)
        return replace(job, fold=fold, chains=self._chains(), published=self.published, vectors=vectors)

    def _chains(self) -> ColumnChains:
        """Return the column chains to fold: those that every read from the base on knows completely."""
        chains, tick = widened_chains(self.collection.vchannels)
        there = set(self.rows.columns)
        whole = tuple(chain for chain in chains if set(chain) <= there)
        return whole if 0 < tick <= max(self.base_tick, self.fold_tick) else ()

    def row_groups(self) -> list[FileGroup]:
        """Return the merges, the files with many hidden rows and, if deletes are folded, every other file that may hold
        a dead row.
        """
        chosen = [*self.merges, *self.masked]
        if not self.fold_tick:
            return chosen
        taken = {path for group in chosen for path in group.paths}
        others = [file for file in self.row_files if file.path not in taken and self._may_hold_dead(file)]
        return [*chosen, *(FileGroup((file,)) for file in others)]

    def _fold(self) -> DeadRowFilter:
        files = [file for file in self.delete_files if (file.low[TICK] or 0) <= self.fold_tick]
        schema = pa.schema([]) if self.deletes is None else file_schema(self.deletes)
        paths = tuple(file.path for file in files)
        if self.deletes is None:
            own = file_schema(self.rows)
            schema = pa.schema([pa.field(name, own.field(name).type) for name in self.collection.key])
        return DeadRowFilter(self.collection.key, self.fold_tick, str(self.deletes_uri), paths, schema, self.drops)

    def _may_hold_dead(self, file: LiveFile) -> bool:
        """Return whether the bounds in the log allow a dead row in the file.

        A file after the fold's tick has none, nor has one whose keys and ticks miss all deletes and drops.
        """
        low = file.low[TICK] or 0
        if low > self.fold_tick:
            return False
        if any(low < tick for tick in self.drops.ticks):
            return True
        key = self.collection.key[0]
        return any(_meet(file, each, key) for each in self.delete_files if (each.low[TICK] or 0) <= self.fold_tick)


def widened_chains(infos: Mapping[str, VChannelInfo]) -> tuple[ColumnChains, int]:
    """Return the columns of widened fields that may be folded, and the tick from which every VChannel has them all.

    The tick is 0 if a VChannel lacks one.
    """
    chains = foldable_chains(newest_schema(infos.values()))
    ticks = [
        next((tick for tick, schema in info.schemas if set(foldable_chains(schema)) >= set(chains)), 0)
        for info in infos.values()
    ]
    return chains, max(ticks) if chains and all(ticks) else 0


def _meet(rows: LiveFile, deletes: LiveFile, key: str) -> bool:
    """Return whether the bounds of `key` in the log allow a row that the deletes hit."""
    bounds = (rows.low[key], rows.high[key], deletes.low[key], deletes.high[key])
    if any(bound is None for bound in bounds):
        return True
    return bool(rows.low[key] <= deletes.high[key] and deletes.low[key] <= rows.high[key])


def history_tick(settings: Settings, params: CompactionParams) -> int:
    """Return the last tick before the history to keep: that many hours before log time.

    Log time comes from the log's server or, if none runs or brokers stamp, from the ``wal`` table. A wall clock that
    jumps ahead therefore never folds history that reads may ask for.
    """
    hours = settings.history_hours if params.keep_history_hours is None else params.keep_history_hours
    now_ms = None
    with suppress(LogUnavailable), RemoteLogService.connect(settings.log_path, start=False, deadline=5.0) as service:
        now_ms = log_time_ms(service)
    if now_ms is None:
        wal = WalSnapshot.open(settings.wal_uri)
        now_ms = 0 if wal is None else wal.log_time_ms()
    return compose_tick(max(0, now_ms - int(hours * 3_600_000)), (1 << LOGICAL_BITS) - 1)


def flushed_collections(settings: Settings, wanted: tuple[str, ...] = ()) -> list[FlushedCollection]:
    """Return the collections that the checkpoints know, or those of `wanted` (names, aliases or ids).

    Raises CollectionNotFound if the flusher does not know one of `wanted`.
    """
    path = settings.checkpoints_uri
    checkpoints = read_checkpoints(open_table(path))
    found: dict[int, dict[str, tuple[VChannelInfo, Checkpoint]]] = {}
    for checkpoint in checkpoints.values():
        for name, info in checkpoint.catalog.vchannels.items():
            found.setdefault(info.collection_id, {})[name] = (info, checkpoint)
    known = [_flushed_collection(number, places) for number, places in sorted(found.items())]
    if not wanted:
        return known
    resolved = without_aliases(settings.data_dir, wanted)
    missing = [
        given
        for given, each in zip(wanted, resolved, strict=True)
        if not any(each in (one.name, str(one.collection_id)) for one in known)
    ]
    if missing:
        raise CollectionNotFound(
            f"the flusher knows no collection {', '.join(missing)}: give names or ids of collections with rows"
        )
    return [one for one in known if one.name in resolved or str(one.collection_id) in resolved]


def _flushed_collection(collection_id: int, places: Mapping[str, tuple[VChannelInfo, Checkpoint]]) -> FlushedCollection:
    infos = {name: info for name, (info, _) in places.items()}
    first = next(iter(infos.values()))
    whole = set(first.vchannels) == set(infos)
    flushed = min(checkpoint.time_tick for _, checkpoint in places.values()) if whole else 0
    return FlushedCollection(collection_id, first.name, key_columns(first.newest_schema), infos, flushed)


def load_coverage(settings: Settings, params: CompactionParams) -> Coverage:
    """Return what earlier runs found idle. It depends on the parameters that a plan follows."""
    of_the_plan = {"files", "target_mib", "min_files", "fold", "fold_ratio", "keep_history_hours", "hidden_ratio"}
    depends = {"format": 1, "history_hours": settings.history_hours, **params.model_dump(include=of_the_plan)}
    return Coverage.load(settings, "compaction", depends=depends, ignore=params.full or bool(params.zorder_by))


def plan_changed(
    settings: Settings, found: list[FlushedCollection], params: CompactionParams, *, history: int
) -> Iterator[tuple[FlushedCollection, CollectionPlan | None]]:
    """Yield each collection with its plan, which is None if its tables are as an earlier run left them, idle.

    Also None if there is no rows table. Opens no table of such a collection. A plan follows from the files, and from
    deletes and drops as far as the history limit has passed them; so an idle one holds until the limit reaches the next
    of their ticks. Idle plans are recorded at the end.
    """
    covered = load_coverage(settings, params)
    for known in found:
        places = {
            f"collections/{known.collection_id}": rows_uri(settings, known.collection_id),
            f"deletes/{known.collection_id}": deletes_uri(settings, known.collection_id),
            f"published/{known.collection_id}": published_uri(settings, known.collection_id),
        }
        records = [covered.look(name, uri) for name, uri in places.items()]
        limit = min(known.flushed_tick, history)
        if all(records) and records[0] is not None and _still_idle(records[0].note, known, limit):
            yield known, None
            continue
        plan = plan_collection(settings, known, params, history=history)
        yield known, plan
        if plan is None or plan.is_idle:
            due = None if plan is None else plan.due_tick
            for name in places:
                covered.record(name, note=[limit, due])
    if not params.collections:
        numbers = {known.collection_id for known in found}
        covered.retain([f"{kind}/{number}" for number in numbers for kind in ("collections", "deletes", "published")])
    covered.save()


def _still_idle(note: Any, known: FlushedCollection, limit: int) -> bool:
    """Return whether an idle plan at an earlier history limit is idle at `limit`, too."""
    earlier, due = note
    if due is not None and limit >= due:
        return False
    passed = [hidden_ranges_at(known.vchannels, limit).last_tick, widened_chains(known.vchannels)[1]]
    return not any(earlier < tick <= limit for tick in passed)


def plan_collection(
    settings: Settings, known: FlushedCollection, params: CompactionParams, *, history: int
) -> CollectionPlan | None:
    """Plan one collection at the tables' newest versions. Returns None if it has no rows table yet."""
    paths = rows_uri(settings, known.collection_id), deletes_uri(settings, known.collection_id)
    deletes = open_table(paths[1])
    rows = open_table(paths[0])
    if rows is None:
        return None
    row_files = live_files(rows, key=known.key[0])
    delete_files = [] if deletes is None else live_files(deletes, key=known.key[0])
    plan = CollectionPlan(
        known,
        min(known.flushed_tick, history),
        rows,
        deletes,
        *paths,
        params,
        row_files,
        delete_files,
        base_tick=earliest_readable_tick(rows),
        folded_tick=folded_tick(rows),
    )
    if params.files:
        plan.published, plan.vectors = _vectors(settings, known.collection_id)
    plan.merges = [
        group
        for files in ([each for each in row_files if is_hidden(each) is hidden] for hidden in (False, True))
        for group in plan_merges(files, rows.store, params)
    ]
    _plan_fold(plan, params)
    return plan


def _vectors(settings: Settings, collection_id: int) -> tuple[str, Mapping[str, Vector]]:
    """Return the URI of the published table, and by file of the rows table the rows that it hides. Opens one table."""
    try:
        table = PublishedTable.open(store_at(published_uri(settings, collection_id)))
    except MillraceError:  # publishing says so, and compaction does the rest
        table = None
    if table is None:
        return "", {}
    found = {inner_path(path): file.vector for path, file in table.files.items()}
    return table.uri, {path: vector for path, vector in found.items() if vector is not None}


@dataclass(frozen=True, slots=True)
class DeletesPlan:
    """The plan for a deletes table, given the tick up to which deletes are folded in."""

    gone: list[FileGroup]
    """Files that hold only folded deletes. They are removed unread."""
    merges: list[FileGroup]
    partly: list[FileGroup]
    """Files that hold folded deletes beside others."""

    @property
    def groups(self) -> list[FileGroup]:
        return [*self.gone, *self.merges, *self.partly]


def plan_deletes(plan: CollectionPlan, params: CompactionParams, folded: int) -> DeletesPlan:
    """Plan the deletes table. Deletes up to the tick `folded` match no remaining row."""
    gone = [file for file in plan.delete_files if is_folded(file, folded)]
    rest = [file for file in plan.delete_files if not is_folded(file, folded)]
    merges = plan_merges(rest, plan.deletes.store, params) if plan.deletes is not None else []
    merged = {path for group in merges for path in group.paths}
    partly = [file for file in rest if file.path not in merged and (file.low[TICK] or 0) <= folded]
    return DeletesPlan([FileGroup((file,)) for file in gone], merges, [FileGroup((file,)) for file in partly])


def is_folded(file: LiveFile, folded: int) -> bool:
    """Return whether the file of deletes holds only deletes that are folded in."""
    return file.high[TICK] is not None and file.high[TICK] <= folded


def plan_merges(files: list[LiveFile], store: TableStore, params: CompactionParams) -> list[FileGroup]:
    """Return the merges of one table's files that the parameters ask for."""
    if not params.files or not files:
        return []
    target = int(min(params.target_mib << 20, MAX_FILE_BYTES) * TARGET_SHARE)
    return merge_groups(files, bytes_per_row=row_bytes(files, store), target=target, min_files=params.min_files)


def _plan_fold(plan: CollectionPlan, params: CompactionParams) -> None:
    limit = plan.history_tick
    new = [file for file in plan.delete_files if (file.high[TICK] or limit + 1) > plan.folded_tick]
    whole = [file for file in new if file.high[TICK] is not None and file.high[TICK] <= limit]
    partly = [file for file in new if file not in whole and (file.low[TICK] or 0) <= limit]
    plan.foldable = sum(file.rows for file in (*whole, *partly))
    plan.drops = _new_drops(plan, limit)
    since = widened_chains(plan.collection.vchannels)[1]
    columns = since if params.fold == "always" and plan.base_tick < since <= limit else 0
    if params.fold == "never" or not (plan.foldable or plan.drops_foldable or columns):
        return
    if params.fold == "auto" and plan.delete_ratio < params.fold_ratio and not plan.drops_foldable:
        return
    last_delete = limit if partly else max((file.high[TICK] or 0 for file in whole), default=0)
    plan.fold_tick = max(last_delete, plan.drops.last_tick, columns)


def _new_drops(plan: CollectionPlan, limit: int) -> HiddenRanges:
    """Return the drops up to `limit` that are not folded in yet and have earlier rows."""
    lowest: Any = min((file.low[TICK] or 0 for file in plan.row_files), default=None)
    if lowest is None:
        return HiddenRanges()
    drops = hidden_ranges_at(plan.collection.vchannels, limit)
    return HiddenRanges(
        tuple(each for each in drops.partitions if plan.folded_tick < each[2] and lowest < each[2]),
        tuple(each for each in drops.vchannels if plan.folded_tick < each[1] and lowest < each[1]),
    )


def delete_job(plan: CollectionPlan, folded: int) -> RewriteJob:
    """Return the job of the deletes table: merge files, and drop the deletes that are folded in up to `folded`."""
    assert plan.deletes is not None
    return replace(merge_job(plan.deletes, plan.collection.key), drop_deletes_to=folded)
