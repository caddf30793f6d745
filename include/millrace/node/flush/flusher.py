"""One flush of one PChannel, from plan to files: visible WAL rows to the tables' Parquet files. Independent of Spark.

A plan starts at the PChannel's checkpoint (millrace.node.flush.definition). :func:`run_flush` is a pure function of
(checkpoint, WAL range, position of each table), except for file names. It leaves durable files and a
:class:`FlushReport`
that names them, and commits nothing. If a flusher died between two commits, a table skips the rows that it already has.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from millrace.base.failpoint import hit
from millrace.base.settings import Settings
from millrace.message.bodies import parse_body
from millrace.message.ids import MessageId
from millrace.message.schema import CollectionSchema
from millrace.message.types import MessageType
from millrace.storage.commit import AppTransaction
from millrace.storage.file_sink import FileSink, delete_uncommitted
from millrace.storage.parquet_file import FileAction
from millrace.storage.store import store_at
from millrace.storage.table import TableHandle, open_table
from millrace.tables.collections.data_tables import DATE, check_column_types, deletes_uri, rows_uri, stats_columns
from millrace.tables.collections.flush_tables import (
    Checkpoint,
    next_checkpoint,
    read_segments,
    write_checkpoint,
    write_segments,
)
from millrace.tables.collections.staged_files import StagedFiles
from millrace.tables.wal.reader import WalRange, read_range
from millrace.wal.txn_buffer import VISIBLE_TICK, TxnBuffer
from millrace.wal.visible.catalog import CATALOG_TYPES, SegmentEvent, newest_schema
from millrace.wal.visible.collection_rows import (
    VisibleRows,
    align_to_schema,
    collection_rows,
    split_by_date,
    union_schema,
)

ROWS: Final = "rows"
DELETES: Final = "deletes"

_CATALOG_TYPES: Final = pa.array(CATALOG_TYPES)
_DROPS: Final = pa.array(
    [MessageType.DROP_PARTITION.name, MessageType.DROP_COLLECTION.name, MessageType.IMPORT.name],
)


@dataclass(frozen=True, slots=True)
class FlushPlan:
    """The work of one task: everything that becomes visible on the PChannel in (checkpoint, up_to_tick]."""

    checkpoint: Checkpoint
    up_to_tick: int
    range: WalRange

    @property
    def channel(self) -> str:
        return self.checkpoint.pchannel

    @property
    def bytes(self) -> int:
        return sum(file.size for file in self.range.files)


@dataclass(slots=True)
class TablePart:
    """Files for one table and, for each app id with rows in them, its version before and after the commit."""

    actions: list[FileAction] = field(default_factory=list)
    moves: dict[str, AppTransaction] = field(default_factory=dict)
    rows: int = 0


@dataclass(slots=True)
class FlushReport:
    """A task's result for the committer."""

    checkpoint: Checkpoint
    """The checkpoint that the work was planned from."""
    new_checkpoint: Checkpoint
    schemas: dict[int, CollectionSchema] = field(default_factory=dict)
    """The newest schema of each collection that has rows or deletes here, or whose schema changed."""
    collections: dict[int, dict[str, TablePart]] = field(default_factory=dict)
    """ROWS and DELETES, by collection id."""
    segments: TablePart = field(default_factory=TablePart)
    checkpoint_actions: list[FileAction] = field(default_factory=list)
    changed: list[int] = field(default_factory=list)
    """Collections with rows, deletes or DDL in the range, also those whose tables have them already."""
    rows_by_vchannel: dict[str, int] = field(default_factory=dict)
    """Rows for the collections' rows tables."""
    seconds: float = 0.0

    failure: ClassVar[None] = None
    """A range is flushed completely or not at all."""
    log_bytes: ClassVar[int] = 0

    @property
    def channel(self) -> str:
        return self.checkpoint.pchannel

    @property
    def tick(self) -> int:
        return self.new_checkpoint.time_tick

    @property
    def rows(self) -> int:
        return sum(self.rows_by_vchannel.values())

    def progress(self) -> dict[str, Any]:
        return {"tick": self.tick, "rows": self.rows, "seconds": {"write": round(self.seconds, 4)}}


def run_flush(settings: Settings, plan: FlushPlan) -> FlushReport:
    """Write what became visible in the planned range to durable files. Deletes its files if it raises.

    Raises ChannelParked, before it writes rows, if a table has a column of another type than its collection; Malformed;
    StagedFileDamaged.
    """
    started = time.perf_counter()
    writer = _Writer(settings, plan)
    try:
        report = writer.run()
    except BaseException:
        writer.abort()
        raise
    report.seconds = time.perf_counter() - started
    hit("flush.written")
    return report


class _Writer:
    """The state of one flush."""

    def __init__(self, settings: Settings, plan: FlushPlan) -> None:
        self._settings = settings
        self._plan = plan
        self._catalog = plan.checkpoint.catalog
        self._tables: dict[tuple[int, str], _TableWriter] = {}
        self._segment_events: list[SegmentEvent] = []
        self._drops: list[_Drop] = []
        self._altered: set[int] = set()
        """Collections with DDL in the range."""
        self._confirmed = plan.checkpoint.confirmed
        self._term = plan.checkpoint.term

    def run(self) -> FlushReport:
        plan, settings = self._plan, self._settings
        pchannel = plan.checkpoint.pchannel
        for visible in self._visible():
            ddl = pc.is_in(visible["type"].cast(pa.utf8()), _CATALOG_TYPES)
            self._altered |= set(pc.unique(visible["collection_id"].filter(ddl)).to_pylist())
            drops = visible.filter(pc.is_in(visible["type"].cast(pa.utf8()), _DROPS))
            self._drops.extend(each for row in drops.to_pylist() if (each := _drop(row)).before)
            # A stretch ends at each catalog message, so all of its rows have one schema.
            for stretch in self._catalog.apply(visible):
                self._segment_events.extend(self._catalog.segment_events(stretch))
                for part in collection_rows(stretch, self._catalog, imports=StagedFiles.of(self._settings)):
                    self._table(part).write(part)
        collections: dict[int, dict[str, TablePart]] = {}
        rows_by_vchannel: dict[str, int] = {}
        for (collection_id, kind), table in self._tables.items():
            made = table.finish(plan.up_to_tick)
            rows_by_vchannel |= table.counts if kind == ROWS else {}
            if made.rows:
                collections.setdefault(collection_id, {})[kind] = made
        new_checkpoint = next_checkpoint(
            plan.checkpoint,
            time_tick=plan.up_to_tick,
            confirmed=self._confirmed,
            term=self._term,
            catalog=self._catalog,
        )
        # A schema that only gained columns has no rows yet, but its table must get them with this commit.
        numbers = {info.collection_id for info in self._catalog.vchannels.with_new_schemas()} | collections.keys()
        changed = {
            number: newest_schema(self._catalog.collection_vchannels(number).values()) for number in sorted(numbers)
        }
        return FlushReport(
            checkpoint=plan.checkpoint,
            new_checkpoint=new_checkpoint,
            schemas=changed,
            collections=collections,
            segments=self._segments(pchannel),
            # The checkpoint's file is written with the others, but the committer commits it last: a crash before that
            # repeats the range, and the tables' app ids skip what they already have.
            checkpoint_actions=write_checkpoint(settings.checkpoints_uri, new_checkpoint),
            changed=sorted(self._altered | {number for number, _ in self._tables}),
            rows_by_vchannel=rows_by_vchannel,
        )

    def _visible(self) -> Iterator[pa.Table]:
        # The range starts at LastConfirmed, possibly before the checkpoint: it reads open transactions from their
        # Begin, and gives only what becomes visible after the checkpoint.
        buffer = TxnBuffer(after_tick=self._plan.checkpoint.time_tick)
        for table in read_range(store_at(self._settings.wal_uri), self._plan.range):
            last = table.slice(table.num_rows - 1).to_pylist()[0]
            self._confirmed = MessageId(last["lc_ledger"], last["lc_entry"], last["lc_index"], last["lc_ordinal"])
            self._term = last["term"]
            yield buffer.push(table)

    def _table(self, part: VisibleRows) -> _TableWriter:
        kind = DELETES if part.is_delete else ROWS
        table = self._tables.get((part.collection_id, kind))
        if table is None:
            path = (deletes_uri if part.is_delete else rows_uri)(self._settings, part.collection_id)
            sink = FileSink.at(path, part.rows.schema, stats_columns(part.schema))
            table = _TableWriter(sink, path, self._plan.checkpoint.time_tick)
            self._tables[part.collection_id, kind] = table
        return table

    def _segments(self, pchannel: str) -> TablePart:
        path = self._settings.segments_uri
        table = open_table(path)
        base = 0 if table is None else table.app_version(pchannel)
        events = [*self._segment_events, *self._dropped_segments(table, pchannel)]
        # The table may be ahead of the checkpoint after a crash between two commits.
        events = [event for event in events if event.time_tick > base]
        actions = write_segments(path, pchannel, events)
        moves = {pchannel: AppTransaction(base, self._plan.up_to_tick)} if actions else {}
        return TablePart(actions, moves, len(events))

    def _dropped_segments(self, table: TableHandle | None, pchannel: str) -> list[SegmentEvent]:
        """Return segments that drops of partitions and collections, or replacing imports, removed in this range."""
        if not self._drops:
            return []
        stored = read_segments(table, pchannel=pchannel).drop_columns(["pchannel"])
        newest = {row["segment_id"]: SegmentEvent(**row) for row in stored.to_pylist()}
        # Events of this range are newer than the stored ones.
        newest.update({event.segment_id: event for event in self._segment_events})
        dropped: list[SegmentEvent] = []
        for drop in self._drops:
            for number, event in sorted(newest.items()):
                gone = event.vchannel == drop.vchannel and drop.partition_id in (0, event.partition_id)
                if gone and event.state != "dropped" and event.time_tick < drop.tick and number < drop.before:
                    newest[number] = event._replace(state="dropped", time_tick=drop.tick)
                    dropped.append(newest[number])
        return dropped

    def abort(self) -> None:
        for table in self._tables.values():
            table.abort()


class _Drop(NamedTuple):
    """Removal of segments: those of a VChannel and partition (0: all) with an id smaller than `before`."""

    vchannel: str
    partition_id: int
    tick: int
    before: int


def _drop(row: Mapping[str, Any]) -> _Drop:
    """Describe the removal by a message. A replacing Import keeps its own segments; any other Import removes none."""
    tick, before = row[VISIBLE_TICK], row[VISIBLE_TICK]
    partition_id = row["partition_id"] if row["type"] == MessageType.DROP_PARTITION.name else 0
    if row["type"] == MessageType.IMPORT.name:
        replaces = parse_body(MessageType.IMPORT, row["payload"])["replace"]
        before = (row["segment_id"] or tick) if replaces else 0
    return _Drop(row["vchannel"], partition_id, tick, before)


class _TableWriter:
    """Writes rows to one table. Skips those that the table already has of their VChannel."""

    def __init__(self, sink: FileSink, uri: str, checkpoint_tick: int) -> None:
        self._sink = sink
        self._table = open_table(uri)
        self._check()
        self._checkpoint_tick = checkpoint_tick
        self._bases: dict[str, int] = {}
        self._ahead = False
        self.counts: dict[str, int] = {}
        """Rows written, by VChannel."""

    def write(self, part: VisibleRows) -> None:
        rows = part.rows
        wider = union_schema(self._sink.schema, rows.schema)
        if wider != self._sink.schema:
            self._sink.finish()  # the schema changed: rows with the new columns need new files
            self._sink.schema = wider
            self._check()
        channels = pc.unique(rows["_vchannel"]).to_pylist()
        for channel in channels:
            if channel not in self._bases:
                base = 0 if self._table is None else self._table.app_version(channel)
                self._bases[channel] = base
                # Only after a crash between two commits: otherwise no row needs to be compared.
                self._ahead |= base > self._checkpoint_tick
        if self._ahead:
            rows = self._missing(rows)
        for day, each in split_by_date(rows) if rows.num_rows else ():
            self._sink.write(align_to_schema(each, self._sink.schema), {DATE: day})
        for count in pc.value_counts(rows["_vchannel"]).to_pylist():
            self.counts[count["values"]] = self.counts.get(count["values"], 0) + count["counts"]

    def _check(self) -> None:
        """Raise ChannelParked if the rows do not fit the table. The commit would fail too, but only with all files
        written.
        """
        if self._table is not None:
            check_column_types(self._table, self._sink.schema)

    def _missing(self, rows: pa.Table) -> pa.Table:
        channel = pc.dictionary_encode(rows["_vchannel"]).combine_chunks()
        has = np.array([self._bases[name] for name in channel.dictionary.to_pylist()], dtype=np.int64)
        codes = channel.indices.to_numpy(zero_copy_only=False)
        return rows.filter(pa.array(rows["_time_tick"].to_numpy() > has[codes]))

    def finish(self, tick: int) -> TablePart:
        # If the table is ahead of a VChannel, the range adds no rows of it, so its app id stays.
        moves = {name: AppTransaction(base, tick) for name, base in self._bases.items() if base < tick}
        return TablePart(self._sink.finish(), moves, sum(self.counts.values()))

    def abort(self) -> None:
        self._sink.abort()
        delete_uncommitted(self._sink.store, self._sink.actions)
