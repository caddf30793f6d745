"""A collection's rows by time tick, planned and read: the basis of a batch, a stream and a snapshot. Without Spark.

    planner = RowsPlanner(rows)
    for task in planner.tasks(start, end):      # plain data: a task is sent it and opens no Delta log of its own
        for batch in rows_of(rows, task): ...   # Arrow: the columns of rows.arrow()

A :class:`Place` says how far a reader has come: a tick for each PChannel, and for a snapshot the tick up to which it
was read. The rows between two places never change, whatever is committed, flushed, checkpointed and compacted
meanwhile, in any number of tasks. If retention has removed them, that is PositionTruncated, or TickTooOld for a
snapshot; a change of the schema is SchemaChanged. Memory: that of a reader of changes (millrace.wal.visible.changes);
for a snapshot's task, the collection's deletes.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal, Self

import pyarrow as pa
import pyarrow.compute as pc

from millrace.base.errors import ChangesRefused, CollectionNotFound, InvalidArgument
from millrace.base.settings import Settings
from millrace.catalog.collection import CollectionInfo
from millrace.catalog.sqlite_file import read_collection
from millrace.message.ids import MAX_TICK, pchannel_of, tick_physical_ms
from millrace.message.schema import CollectionSchema
from millrace.message.types import DML, MessageType
from millrace.rpc.selection import ALL_ROWS, Selection
from millrace.storage.store import store_at
from millrace.storage.table import open_table
from millrace.tables.collections.changes import ImportedFiles
from millrace.tables.collections.data_tables import rows_uri
from millrace.tables.collections.flush_tables import Checkpoint, read_checkpoints
from millrace.tables.read.arrow import PIECE_BYTES, read_pieces
from millrace.tables.read.plan import plan_read
from millrace.tables.wal.reader import WalRange, WalSnapshot, read_range
from millrace.wal.txn_buffer import TxnBuffer
from millrace.wal.visible.catalog import CATALOG_TYPES, VChannelInfo, WalCatalog
from millrace.wal.visible.changes import CHANGE_COLUMNS, ChangePosition, ChangeReader, ChangeStart, change_schema
from millrace.wal.visible.collection_rows import align_to_schema

Kinds = Literal["all", "inserts", "skip others"]
"""The changes to return: all; inserts, with ChangesRefused at any other; or inserts, skipping the others."""

KINDS: Final[tuple[Kinds, ...]] = ("all", "inserts", "skip others")
UNBOUNDED: Final = 1 << 62
IDLE_MS: Final = 10_000
"""Milliseconds of log time: a PChannel that lags the newest one by more has no rows to wait for.

A log server ends a PChannel's traffic with a time tick within the setting `tick_interval`, 10 s, so a PChannel with
rows lags by that much only if it has no more.
"""
TASK_BYTES: Final = 64 << 20
"""About the bytes of ``wal`` files that one task reads. A longer stretch of a PChannel is cut into several tasks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowsOf:
    """The rows to read: a collection's rows, in one schema, as some of its columns."""

    settings: Settings
    collection_id: int
    name: str
    pchannels: tuple[str, ...]
    """All PChannels of the collection."""
    schema: CollectionSchema
    vchannels: tuple[str, ...] = ()
    """The VChannels whose rows are read; empty: all of the collection's."""
    columns: tuple[str, ...] = ()
    """Columns of the fields and CHANGE_COLUMNS, in this order; empty: all."""
    kinds: Kinds = "all"

    def __post_init__(self) -> None:
        if self.kinds not in KINDS:
            raise InvalidArgument(f"kinds is one of {', '.join(map(repr, KINDS))}, not {self.kinds!r}")
        known = change_schema(self.schema).names
        unknown = [name for name in self.columns if name not in known]
        if unknown:
            raise InvalidArgument(f"{self.name!r} has no column {unknown[0]!r}; its changes have {', '.join(known)}")

    @classmethod
    def find(
        cls,
        settings: Settings,
        name: str,
        *,
        channels: Iterable[str] = (),
        columns: Iterable[str] = (),
        kinds: Kinds = "all",
    ) -> Self:
        """Return the rows of the collection `name`, in its newest schema, or only those of `channels`.

        `channels` are VChannels of it, or PChannels. Raises CollectionNotFound, InvalidArgument.
        """
        found = find_collection(settings, name)
        return cls(
            settings=settings,
            collection_id=found.id,
            name=name,
            pchannels=tuple(found.pchannels),
            schema=found.schema,
            vchannels=found.vchannels_on(channels),
            columns=tuple(columns),
            kinds=kinds,
        )

    @property
    def read_pchannels(self) -> tuple[str, ...]:
        """The PChannels whose rows are read."""
        return tuple(sorted({pchannel_of(each) for each in self.vchannels})) or self.pchannels

    def arrow(self) -> pa.Schema:
        """Return the columns of the batches. All are nullable: a delete has only its key, a retraction nothing."""
        every = change_schema(self.schema)
        place = every.get_field_index(CHANGE_COLUMNS.names[0])
        every = every.set(place, pa.field(CHANGE_COLUMNS.names[0], pa.utf8()))
        return pa.schema([every.field(name) for name in self.columns]) if self.columns else every


def find_collection(settings: Settings, name: str) -> CollectionInfo:
    """Return the collection `name` of a data folder. Raises CollectionNotFound."""
    found = read_collection(settings.data_dir, name)
    if found is None or found.state != "active":
        raise CollectionNotFound(
            f"{settings.data_dir} has no collection {name!r}: create it, or look at the setting data_dir"
        )
    return found


@dataclass(frozen=True, slots=True)
class Place:
    """The position of a reader: plain data, also as JSON."""

    collection_id: int
    ticks: Mapping[str, int]
    """The tick, by PChannel, up to which changes were returned."""
    snapshot: int = 0
    """The tick of the snapshot that comes first; 0: none. Later changes follow after all of it was returned."""
    given: int = 0
    """The tick up to which the snapshot's rows were returned."""
    since: Mapping[str, int] = field(default_factory=dict)
    """Where the reader began, by PChannel. Spark stores a query's beginning only with its first micro-batch."""
    vchannels: tuple[str, ...] = ()
    """The VChannels whose rows are read; empty: all."""

    @classmethod
    def behind(cls, rows: RowsOf, ticks: Mapping[str, int] | int = 0, *, snapshot: int = 0) -> Self:
        """Return a reader's beginning: after a tick, or `ticks` by PChannel, or with the rows visible at `snapshot`."""
        tick = snapshot or ticks
        found = {name: tick if isinstance(tick, int) else tick.get(name, 0) for name in rows.read_pchannels}
        return cls(rows.collection_id, found, snapshot, 0, found, rows.vchannels)

    @property
    def begins(self) -> bool:
        return self.given == 0 and dict(self.ticks) == dict(self.since)

    def start(self) -> Self:
        """Return the position at which this reader began."""
        return replace(self, ticks=self.since, given=0)

    def to_json(self) -> dict[str, Any]:
        return {
            "collection": self.collection_id,
            "ticks": dict(self.ticks),
            "snapshot": self.snapshot,
            "given": self.given,
            "since": dict(self.since),
            "vchannels": list(self.vchannels),
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        vchannels = tuple(value.get("vchannels", ()))  # absent in a checkpoint of an older build
        return cls(value["collection"], value["ticks"], value["snapshot"], value["given"], value["since"], vchannels)


@dataclass(frozen=True, slots=True)
class Stretch:
    """A task: the changes after `start.after` that a range of the ``wal`` table makes visible."""

    pchannel: str
    start: ChangeStart
    range: WalRange


@dataclass(frozen=True, slots=True)
class SnapshotPart:
    """A task: those rows visible at `tick` that became visible after `after` and up to `until`."""

    tick: int
    after: int
    until: int


Task = Stretch | SnapshotPart
_MAY_CHANGE_ROWS: Final = (*(each.name for each in (*DML, MessageType.COMMIT_TXN, MessageType.IMPORT)), *CATALOG_TYPES)


class RowsPlanner:
    """Plans the reading of :class:`RowsOf` by the newest version of the tables. One thread at a time."""

    def __init__(self, rows: RowsOf) -> None:
        self._rows = rows
        self._wal: WalSnapshot | None = None
        self._catalogs: dict[str, tuple[int, Mapping[str, VChannelInfo]]] = {}
        """The effect, by PChannel, of DDL up to a tick on the collection."""

    def ends(self, *, exact: bool = True) -> dict[str, int]:
        """Return the tick, by PChannel, up to which the newest version of the ``wal`` table is complete.

        Not `exact` is for callers that look again and again: it asks an object store only after news of commits.
        """
        wal = self._newest(exact=exact)
        return {name: 0 if wal is None else wal.last_tick(name) for name in self._rows.read_pchannels}

    def newest(self, pchannel: str, after: int, until: int) -> dict[str, int]:
        """Return, by VChannel of `pchannel`, the tick of its last message in (after, until] that may change rows.

        Reads no payloads. VChannels of other collections are included. Raises PositionTruncated.
        """
        if self._wal is None or after >= until:
            return {}
        found: dict[str, int] = {}
        columns = ["time_tick", "type", "vchannel"]
        for table in self._wal.messages(
            pchannel, after_tick=after, up_to_tick=until, types=_MAY_CHANGE_ROWS, columns=columns
        ):
            last = table.group_by("vchannel").aggregate([("time_tick", "max")])
            names = last["vchannel"].cast(pa.utf8()).to_pylist()
            found |= dict(zip(names, last["time_tick_max"].to_pylist(), strict=True))
        return found

    def next(
        self,
        place: Place,
        *,
        max_bytes: int = UNBOUNDED,
        target: Mapping[str, int] | None = None,
        aligned: bool = False,
    ) -> Place:
        """Return the next position of a reader at `place`: up to `target`, about `max_bytes` of files of each PChannel.

        The default of `target` is everything there is. Returns `place` itself if there is nothing to read.

        All PChannels stop at one log time, that of the first whose bytes are used up, so a replay returns rows of
        different PChannels in the order in which they were appended. With `aligned` they also wait for a PChannel whose
        rows are not in the ``wal`` table yet, until it lags the newest one by IDLE_MS of log time; a `target` is always
        reached.

        Raises CollectionNotFound for a position in another collection of the same name, InvalidArgument for one of
        other VChannels.
        """
        if place.collection_id != self._rows.collection_id:
            raise CollectionNotFound(
                f"this reader reads collection {place.collection_id},"
                f" and {self._rows.name!r} is {self._rows.collection_id}"
                " now, since it was dropped and created again: start a new stream"
            )
        if place.vchannels != self._rows.vchannels:
            said = [", ".join(each) or "all channels" for each in (place.vchannels, self._rows.vchannels)]
            raise InvalidArgument(
                f"this reader has read {said[0]} and cannot continue with {said[1]}: start a new stream for them"
            )
        if place.given < place.snapshot:
            return replace(place, given=self._cuts(place.given, place.snapshot, max_bytes)[0])
        ends = self.ends(exact=False) if target is None else target
        wal = self._wal or self._newest()
        if wal is None:
            return place
        reach = {
            name: wal.plan(name, after_tick=tick, max_bytes=max_bytes).up_to_tick
            for name, tick in place.ticks.items()
            if ends.get(name, 0) > tick
        }
        common = min((cut for name, cut in reach.items() if cut < ends[name]), default=MAX_TICK)
        if aligned and target is None:
            common = min(common, _waited_for(ends))
        ticks = {
            name: max(tick, min(ends[name], common)) if name in reach else tick for name, tick in place.ticks.items()
        }
        return place if ticks == dict(place.ticks) else replace(place, ticks=ticks)

    def tasks(self, start: Place, end: Place) -> list[Task]:
        """Return the tasks between two positions. Raises PositionTruncated."""
        found: list[Task] = []
        if start.given < end.given:
            cuts = self._cuts(start.given, end.given, self._task_bytes(start.given, end.given))
            found += [
                SnapshotPart(end.snapshot, low, high) for low, high in zip([start.given, *cuts], cuts, strict=False)
            ]
        found += self.stretches(start.ticks, end.ticks)
        return found

    def stretches(self, after: Mapping[str, int], until: Mapping[str, int]) -> list[Stretch]:
        """Return the tasks for changes after a tick and up to another, by PChannel. Raises PositionTruncated."""
        wal = self._newest()
        checkpoints = read_checkpoints(open_table(self._rows.settings.checkpoints_uri))
        found: list[Stretch] = []
        for name, begin in after.items():
            end = until.get(name, begin)
            while wal is not None and begin < end:
                start = self._start(wal, name, begin, checkpoints.get(name))
                first = wal.confirmed_at(name, start.scan_after)
                cut = min(end, wal.plan(name, after_tick=begin, max_bytes=TASK_BYTES).up_to_tick)
                found.append(Stretch(name, start, wal.plan(name, start=first, up_to_tick=cut)))
                begin = cut
        return found

    def _start(self, wal: WalSnapshot, pchannel: str, tick: int, checkpoint: Checkpoint | None) -> ChangeStart:
        """Return the start after `tick`, with its catalog, so that nothing before the tick is read again."""
        mine = self._rows.collection_id
        if checkpoint is not None and checkpoint.time_tick >= tick:
            return ChangeStart.of(
                ChangePosition(tick), checkpoint.time_tick, checkpoint.catalog.collection_vchannels(mine)
            )
        bases = [(0, {}), self._catalogs.get(pchannel, (0, {}))]
        if checkpoint is not None:
            bases.append((checkpoint.time_tick, checkpoint.catalog.collection_vchannels(mine)))
        known, infos = max((each for each in bases if each[0] <= tick), key=lambda each: each[0])
        catalog = WalCatalog(infos)
        columns = ["time_tick", "type", "collection_id"]
        if any(_ddl(each, mine) for each in wal.messages(pchannel, after_tick=known, up_to_tick=tick, columns=columns)):
            for rows in wal.messages(pchannel, after_tick=known, up_to_tick=tick, types=CATALOG_TYPES):
                for _ in catalog.apply(TxnBuffer().push(rows.filter(pc.equal(rows["collection_id"], mine)))):
                    pass
        self._catalogs[pchannel] = (tick, catalog.vchannels)
        copied = WalCatalog.from_bytes(catalog.to_bytes())  # its reader modifies it
        return ChangeStart(ChangePosition(tick), tick, copied, dict.fromkeys(copied.vchannels, tick))

    def _newest(self, *, exact: bool = True) -> WalSnapshot | None:
        if self._wal is None:
            self._wal = WalSnapshot.open(self._rows.settings.wal_uri)
        else:
            self._wal = self._wal.refreshed() if exact else self._wal.polled()
        return self._wal

    def _files(self, after: int, until: int) -> list[tuple[int, int, int]]:
        """Return (first tick, last tick, bytes) of the files that may hold ticks in between, ordered by last tick."""
        table = open_table(rows_uri(self._rows.settings, self._rows.collection_id))
        actions = None if table is None else table.actions()
        columns = ("min._time_tick", "max._time_tick", "size_bytes")
        if actions is None or not actions.num_rows or not set(columns) <= set(actions.column_names):
            return []
        found = zip(*(actions[name].to_pylist() for name in columns), strict=True)
        whole = [(low or 0, until if high is None else high, size) for low, high, size in found]
        return sorted((each for each in whole if each[1] > after and each[0] <= until), key=lambda each: each[1])

    def _cuts(self, after: int, until: int, max_bytes: int) -> list[int]:
        """Return ticks that cut a snapshot's rows after `after` every `max_bytes` of files. The last is `until`."""
        cuts: list[int] = []
        taken = 0
        for _, last, size in self._files(after, until):
            taken += size
            if taken >= max_bytes and last < until and last > (cuts[-1] if cuts else after):
                cuts.append(last)
                taken = 0
        return [*cuts, until]

    def _task_bytes(self, after: int, until: int) -> int:
        """Return the bytes of files for a task of a snapshot.

        Small tasks balance the load, unless several tasks would then read many files with overlapping ticks. If that is
        so for larger tasks too, one task reads everything.
        """
        files = self._files(after, until)
        total = sum(size for *_, size in files)
        for tasks in (4, 2):
            least = max(8 << 20, total // (tasks * self._rows.settings.cores) + 1)
            cuts = [after, *self._cuts(after, until, least)]
            touched = sum(
                size
                for low, high in itertools.pairwise(cuts)
                for first, last, size in files
                if last > low and first <= high
            )
            if touched <= total * 3 // 2:
                return least
        return UNBOUNDED


def rows_of(rows: RowsOf, task: Task) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a task, in the order of the changes. Raises as the module says, and ChangesRefused."""
    found = _stretch(rows, task) if isinstance(task, Stretch) else _snapshot(rows, task)
    target = rows.arrow()
    for table in found:
        yield from align_to_schema(table, target).combine_chunks().to_batches()


def _stretch(rows: RowsOf, task: Stretch) -> Iterator[pa.Table]:
    settings = rows.settings
    buffer = TxnBuffer(after_tick=task.start.scan_after)
    imports = ImportedFiles.of(settings)
    reader = ChangeReader(
        task.pchannel, rows.collection_id, task.start, imports=imports, schema=rows.schema, raise_on_schema_change=True
    )
    for messages in read_range(store_at(settings.wal_uri), task.range):
        for batch in reader.push(_in_channels(rows, buffer.push(messages), "vchannel")):
            table = _selected(rows, pa.Table.from_batches([batch.rows]))
            if table.num_rows:
                yield table


def _in_channels(rows: RowsOf, table: pa.Table, column: str) -> pa.Table:
    """Return the rows of a table on the VChannels that are read."""
    if not rows.vchannels:
        return table
    return table.filter(pc.is_in(table[column].cast(pa.utf8()), pa.array(rows.vchannels)))


def _selected(rows: RowsOf, table: pa.Table) -> pa.Table:
    """Return the changes of a batch that match `kinds`. Raises ChangesRefused."""
    if rows.kinds == "all":
        return table
    inserts = pc.equal(table["_change"].cast(pa.utf8()), "insert")
    if rows.kinds == "inserts" and not pc.all(inserts).as_py():
        other = table.filter(pc.invert(inserts)).slice(0, 1).to_pylist()[0]
        raise ChangesRefused(
            f"{rows.name!r} has a {other['_change']} at tick {other['_time_tick']} on {other['_vchannel']},"
            " and this stream takes"
            " only inserts: read all kinds of changes, or 'skip others' to leave them out"
        )
    return table.filter(inserts)


def _snapshot(rows: RowsOf, task: SnapshotPart) -> Iterator[pa.Table]:
    plan = plan_read(
        rows.settings, rows.collection_id, at=task.tick, deadline=0.0, confirmed=_snapshot_ends(rows, task.tick)
    )
    plan = replace(plan, schema=rows.schema)
    fields = rows.schema.arrow().names
    selection = Selection(tuple(each for each in rows.columns if each in fields)) if rows.columns else ALL_ROWS
    for each in read_pieces(
        plan, selection=selection, with_ticks=True, max_bytes=PIECE_BYTES, ticks=(task.after, task.until)
    ):
        piece = _in_channels(rows, each, "_vchannel")
        if piece.num_rows:
            kind = pa.DictionaryArray.from_arrays(
                pa.nulls(piece.num_rows, pa.int8()).fill_null(0), pa.array(["insert"])
            )
            yield piece.append_column("_change", kind)


def _waited_for(ends: Mapping[str, int]) -> int:
    """Return the tick that every PChannel that is not idle has reached. Log time decides, never a clock."""
    newest = max(ends.values(), default=0)
    return min((end for end in ends.values() if tick_physical_ms(newest) - tick_physical_ms(end) <= IDLE_MS), default=0)


def _snapshot_ends(rows: RowsOf, tick: int) -> dict[str, int]:
    """Return the snapshot's tick for all PChannels.

    It was confirmed when chosen; an idle PChannel's own end is smaller.
    """
    return dict.fromkeys(rows.pchannels, tick)


def _ddl(rows: pa.Table, collection_id: int) -> bool:
    mine = pc.equal(rows["collection_id"], collection_id)
    return bool(pc.any(pc.and_(mine, pc.is_in(rows["type"].cast(pa.utf8()), pa.array(CATALOG_TYPES)))).as_py())
