"""Plans a read at a time tick: the tick, the versions of the tables, and the tail of the WAL that complements them.

All versions are pinned here, once, in the order checkpoints, deletes, rows, wal. So the pinned ``wal`` has everything
after the tables' ticks, and a delete that compaction folded in and removed is gone from the rows too. The rows of a
VChannel up to the tick F of its rows table (and its deletes up to the tick of its deletes table) come from the table,
the rest up to T from the WAL. Each row is seen once, however far flusher and WAL are apart. The base
(millrace.tables.read.base) says what a published version masks in files of the pinned rows table, so it may be older or
newer than these.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from millrace.base.deadline import Deadline
from millrace.base.errors import CollectionNotFound, TickNotReached, TickTooOld
from millrace.base.settings import Settings
from millrace.message.bodies import parse_body
from millrace.message.ids import Moment, pchannel_of, resolve_tick
from millrace.message.schema import CollectionSchema
from millrace.message.types import KEY_DELETING_TYPES, MessageType
from millrace.storage.store import TableStore, store_at
from millrace.storage.table import TableHandle
from millrace.tables.collections.data_tables import deletes_uri, earliest_readable_tick, rows_uri
from millrace.tables.collections.flush_tables import Checkpoint
from millrace.tables.collections.staged_files import StagedFiles
from millrace.tables.read.base import PublishedBase
from millrace.tables.read.open_tables import OpenTables
from millrace.tables.wal.reader import MAX_TICK, WalRange, WalSnapshot, follow, range_bytes, read_range
from millrace.wal.txn_buffer import VISIBLE_TICK, TxnBuffer
from millrace.wal.visible.catalog import CATALOG_TYPES, VChannelInfo, WalCatalog, newest_schema
from millrace.wal.visible.collection_rows import align_to_schema, collection_rows, deletes_file_schema, rows_read_schema

_DELETING: Final = [kind.name for kind in KEY_DELETING_TYPES]
POLL_SECONDS: Final = 0.02
"""Pause between two polls of the ``wal`` table while a read waits for its tick."""

HELD_BYTES: Final = 32 << 20
"""Size of the tails' WAL files up to which a read holds their messages, and so reads the files once and not for each of
its uses: catalog, deletes, rows.
"""

_BODIES: Final = [kind.name for kind in (MessageType.INSERT, MessageType.UPSERT, MessageType.DELETE)]


@dataclass(frozen=True, slots=True)
class WalTail:
    """The part of one PChannel's WAL that follows the tables."""

    checkpoint: Checkpoint
    range: WalRange
    row_ticks: dict[str, int]
    """For each VChannel, the tick up to which the rows table is complete."""
    delete_ticks: dict[str, int]
    staged_bytes: int = 0
    """Size of the staged files that its imports name."""
    uncommitted: tuple[pa.Table, ...] = ()
    """Messages after `range` that only the log has, in order. For a read in this process: no task receives them."""
    held: tuple[pa.Table, ...] | None = None
    """The messages of `range` without bodies of other collections. None: they are read for each use. As `uncommitted`.
    """

    def messages(
        self, store: TableStore, *, types: Sequence[str] | None = None, columns: Sequence[str] | None = None
    ) -> Iterator[pa.Table]:
        """Yield the messages of the table and of the log, of these types or all, with these columns at least or all."""
        if self.held is None:
            yield from read_range(store, self.range, types=types, columns=columns)
        for rows in (*(self.held or ()), *self.uncommitted):
            yield rows if types is None else _of_types(rows, types)

    def has_any(self, store: TableStore, types: Sequence[str]) -> bool:
        """Return whether there may be messages of these types, which are read alone."""
        if self.held is None and any(True for _ in read_range(store, self.range, types=types, columns=["type"])):
            return True
        return any(_of_types(rows, types).num_rows for rows in (*(self.held or ()), *self.uncommitted))

    def first_tick(self) -> int:
        """Return a tick that no row of the tail precedes; MAX_TICK if it has none. Reads nothing."""
        if self.range.files and self.held is None:
            return min(self.row_ticks.values(), default=MAX_TICK - 1) + 1
        first = MAX_TICK
        for rows in (*(self.held or ()), *self.uncommitted):
            ticks = rows["time_tick"].to_numpy()
            for name, tick in self.row_ticks.items():
                # A row becomes visible at its own tick, or at that of its transaction's commit on the VChannel.
                late = ticks[pc.equal(rows["vchannel"].cast(pa.utf8()), name).to_numpy() & (ticks > tick)]
                first = min(first, int(late.min())) if len(late) else first
        return first

    def to_json(self) -> dict[str, Any]:
        return {
            "checkpoint": self.checkpoint.to_json(),
            "range": self.range.to_json(),
            "row_ticks": self.row_ticks,
            "delete_ticks": self.delete_ticks,
            "staged_bytes": self.staged_bytes,
        }

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Self:
        checkpoint, wal_range = Checkpoint.from_json(value["checkpoint"]), WalRange.from_json(value["range"])
        return cls(checkpoint, wal_range, value["row_ticks"], value["delete_ticks"], value["staged_bytes"])


@dataclass(frozen=True, slots=True)
class ReadPlan:
    """Everything a read needs. Nothing is looked up again."""

    settings: Settings
    collection_id: int
    tick: int
    schema: CollectionSchema
    """The collection's schema at `tick`."""
    vchannels: dict[str, VChannelInfo]
    rows: TableHandle | None
    deletes: TableHandle | None
    tails: tuple[WalTail, ...]
    base: PublishedBase | None = None
    """The published version at the tick; None if there is none, or if nothing hides a row."""

    def tail_bytes(self) -> int:
        """Return the approximate size of the tails' WAL and staged files. Reads one file of each tail."""
        return sum(range_bytes(store_at(self.settings.wal_uri), tail.range) + tail.staged_bytes for tail in self.tails)

    def tail_rows(self, *, deletes: bool) -> Iterator[pa.Table]:
        """Yield the rows (or deletes) of all tails; see :func:`tail_rows`."""
        for tail in self.tails:
            yield from tail_rows(
                tail,
                settings=self.settings,
                collection_id=self.collection_id,
                schema=self.schema,
                deletes=deletes,
            )

    def has_tail_deletes(self) -> bool:
        """Return whether the tails may hold a delete, from the types of their messages alone."""
        return any(tail.has_any(store_at(self.settings.wal_uri), _DELETING) for tail in self.tails)

    def may_hide_rows(self) -> bool:
        """Return whether a delete or DDL may hide rows at this tick."""
        first = self.first_ticks()
        return (
            tick_span(self.deletes)[0] <= self.tick
            or bool(self.partition_drops)
            or any(first[name] < info.first_visible_tick(self.tick) for name, info in self.vchannels.items())
            or self.has_tail_deletes()
        )

    def first_ticks(self) -> dict[str, int]:
        """Return by VChannel a tick that no row precedes, in the table or in the tail."""
        first, _ = tick_span(self.rows)
        return {name: min(first, tick + 1) for tail in self.tails for name, tick in tail.row_ticks.items()}

    @property
    def partition_drops(self) -> list[tuple[str, int, int]]:
        """(VChannel, partition id, tick) of each partition drop that hides rows at this tick: those before its own."""
        return [
            (name, number, max(past))
            for name, info in self.vchannels.items()
            for number, ticks in info.partition_drops.items()
            if (past := [tick for tick in ticks if tick <= self.tick])
        ]


def plan_read(
    settings: Settings,
    collection_id: int,
    *,
    at: Moment | None = None,
    deadline: float | None = None,
    confirmed: Mapping[str, int] | None = None,
    uncommitted: Mapping[str, Sequence[pa.Table]] | None = None,
    tables: OpenTables | None = None,
    use_published: bool = True,
) -> ReadPlan:
    """Pin the versions and choose the tick. Waits up to `deadline` seconds (default: ``read_deadline``) for a tick.

    `confirmed` gives by PChannel the tick up to which the ``wal`` table is complete, if the caller knows more than the
    table's own last tick (the table of an idle PChannel does not move, because a tick without news becomes no row).
    `uncommitted` gives by PChannel the messages that the log has after the ``wal`` table, up to its tick in `confirmed`
    or further (millrace.tables.read.freshness); then `confirmed` has all PChannels of the collection. `tables` are open
    already; the plan holds until they are used again. `use_published`: whether a published version may be the base; the
    rows are the same.
    Raises TickNotReached, TickTooOld, and CollectionNotFound if the collection is incomplete or dropped at that tick.
    """
    wanted = None if at is None else resolve_tick(at)
    limit = Deadline.after(settings.read_deadline if deadline is None else deadline)
    tables = tables or OpenTables()
    while True:
        plan = _plan(settings, collection_id, wanted, confirmed or {}, uncommitted, tables, use_published)
        if isinstance(plan, ReadPlan):
            return plan
        follow(settings)
        if not limit.pause(POLL_SECONDS):
            raise TickNotReached(
                f"collection {collection_id} is readable up to tick {plan}, not {wanted}: wait for its channels, "
                "append a time tick, or read without `at`"
            )


def _plan(
    settings: Settings,
    collection_id: int,
    wanted: int | None,
    known: Mapping[str, int],
    uncommitted: Mapping[str, Sequence[pa.Table]] | None,
    tables: OpenTables,
    use_published: bool,
) -> ReadPlan | int:
    """Return the plan; or the tick reached, if it is not the wanted one yet."""
    checkpoints = tables.checkpoints(settings.checkpoints_uri)
    deletes = tables.table(deletes_uri(settings, collection_id))  # before the rows: see the module's docstring
    rows = tables.table(rows_uri(settings, collection_id))
    wal = tables.wal(settings.wal_uri)
    if wal is None and uncommitted is None:
        raise CollectionNotFound(f"no collection {collection_id}: there is no WAL yet")
    # All channels are read at one tick, so the slowest one decides which tick is readable.
    pchannels = sorted(known) if wal is None or uncommitted is not None else _pchannels(wal, checkpoints, collection_id)
    last = {name: 0 if wal is None else wal.last_tick(name) for name in pchannels}
    confirmed = min((max(last[name], known.get(name, 0)) for name in pchannels), default=0)
    if wanted is not None and wanted > confirmed:
        if not pchannels:
            raise CollectionNotFound(f"no collection {collection_id}")
        return confirmed
    tick = confirmed if wanted is None else wanted
    _check_base(rows, tick)
    tails: list[WalTail] = []
    room = HELD_BYTES
    vchannels: dict[str, VChannelInfo] = {}
    for pchannel in pchannels:
        checkpoint = checkpoints.get(pchannel, Checkpoint(pchannel))
        tail = WalTail(checkpoint, WalRange(()), {}, {})
        after = checkpoint.time_tick
        newer = () if uncommitted is None else _between(uncommitted[pchannel], max(after, last[pchannel]), tick)
        # Without a message after the checkpoint, nothing that began before it ends after it.
        if wal is not None and tick > after and (newer or last[pchannel] > after):
            # From LastConfirmed, so that the tail includes the begin of transactions that commit after the checkpoint.
            planned = wal.plan(pchannel, start=checkpoint.confirmed, after_tick=after, up_to_tick=tick)
            size = sum(file.size for file in planned.files)
            held = _held(wal.store, planned, collection_id) if size <= room else None
            room -= 0 if held is None else size
            tail = replace(tail, range=planned, held=held)
        tail = replace(tail, uncommitted=newer)  # what the table has taken since the replay is in `range`
        catalog, staged_bytes = _catalog(settings, tail)
        found = catalog.collection_vchannels(collection_id)
        vchannels.update(found)
        # A table may be ahead of the checkpoint, which is committed last: its app ids tell from where the tail must add
        # rows.
        row_ticks, delete_ticks = (_ticks(table, found, checkpoint) for table in (rows, deletes))
        tails.append(replace(tail, row_ticks=row_ticks, delete_ticks=delete_ticks, staged_bytes=staged_bytes))
    _check_exists(collection_id, vchannels, tick)
    schema = newest_schema(vchannels.values(), tick)
    plan = ReadPlan(settings, collection_id, tick, schema, vchannels, rows, deletes, tuple(tails))
    if not use_published or rows is None or not plan.may_hide_rows():
        return plan
    return replace(plan, base=PublishedBase.find(settings, collection_id, tick, tables))


def tick_span(table: TableHandle | None) -> tuple[int, int]:
    """Return the bounds of ``_time_tick`` in the table, from its files' statistics.

    The bounds are (0, MAX_TICK) if a file has no statistics, and empty without rows. A filter that they satisfy for
    every row is omitted, so that a scan need not read its columns.
    """
    actions = None if table is None else table.actions()
    if actions is None or actions.num_rows == 0:
        return MAX_TICK, 0
    if {"min._time_tick", "max._time_tick"} <= set(actions.column_names):
        least, greatest = actions["min._time_tick"], actions["max._time_tick"]
        if least.null_count == greatest.null_count == 0:
            return pc.min(least).as_py(), pc.max(greatest).as_py()
    return 0, MAX_TICK


def _pchannels(wal: WalSnapshot, checkpoints: dict[str, Checkpoint], collection_id: int) -> list[str]:
    """Return the PChannels of the collection's VChannels, from checkpoints or the WAL's tail."""
    for checkpoint in checkpoints.values():
        for info in checkpoint.catalog.collection_vchannels(collection_id).values():
            return sorted(set(map(pchannel_of, info.vchannels)))
    for pchannel in wal.pchannels():
        checkpoint = checkpoints.get(pchannel, Checkpoint(pchannel))
        catalog = WalCatalog()
        for rows in wal.messages(pchannel, after_tick=checkpoint.time_tick, types=["CREATE_COLLECTION"]):
            created = rows.filter(pc.equal(rows["collection_id"], collection_id))
            for _ in catalog.apply(TxnBuffer().push(created)):
                pass
        for info in catalog.vchannels.values():
            return sorted(set(map(pchannel_of, info.vchannels)))
    return []


def _held(wal: TableStore, planned: WalRange, collection_id: int) -> tuple[pa.Table, ...]:
    """Read the messages of a range, except the bodies of other collections, as one table."""
    found = []
    for rows in read_range(wal, planned):
        body = pc.is_in(rows["type"].cast(pa.utf8()), pa.array(_BODIES))
        found.append(rows.filter(pc.or_(pc.equal(rows["collection_id"], collection_id), pc.invert(body))))
    return (pa.concat_tables(found).unify_dictionaries().combine_chunks(),) if found else ()


def _between(messages: Sequence[pa.Table], after: int, until: int) -> tuple[pa.Table, ...]:
    """Return the messages with after < tick <= until, as slices."""
    found = []
    for rows in messages:
        begin, end = np.searchsorted(rows["time_tick"].to_numpy(), [after, until], side="right")
        if end > begin:
            found.append(rows.slice(int(begin), int(end - begin)))
    return tuple(found)


def _of_types(messages: pa.Table, types: Sequence[str]) -> pa.Table:
    return messages.filter(pc.is_in(messages["type"].cast(pa.utf8()), pa.array(types)))


def _catalog(settings: Settings, tail: WalTail) -> tuple[WalCatalog, int]:
    """Return the catalog at the read's tick, or the checkpoint's if later, and the bytes of the tail's staged files."""
    catalog, staged_bytes = tail.checkpoint.catalog, 0
    for rows in tail.messages(store_at(settings.wal_uri), types=CATALOG_TYPES):
        for imported in catalog.apply(TxnBuffer(after_tick=tail.checkpoint.time_tick).push(rows)):
            for payload in imported["payload"].to_pylist():
                staged_bytes += sum(file["bytes"] for file in parse_body(MessageType.IMPORT, payload)["files"])
    return catalog, staged_bytes


def _ticks(table: TableHandle | None, vchannels: dict[str, VChannelInfo], checkpoint: Checkpoint) -> dict[str, int]:
    """Return the tick up to which `table` is complete, by VChannel: its app version, or the checkpoint if later."""
    return {
        name: max((None if table is None else table.app_version(name)) or 0, checkpoint.time_tick) for name in vchannels
    }


def _check_base(rows: TableHandle | None, tick: int) -> None:
    base = earliest_readable_tick(rows)
    if tick < base:
        raise TickTooOld(
            f"the oldest readable tick is {base}, not {tick}: compaction folded what was before,"
            " or it was trimmed with the WAL"
        )


def _check_exists(collection_id: int, vchannels: dict[str, VChannelInfo], tick: int) -> None:
    wanted = next(iter(vchannels.values())).vchannels if vchannels else ()
    missing = [name for name in wanted if name not in vchannels or vchannels[name].created_tick > tick]
    if not wanted or missing:
        raise CollectionNotFound(f"collection {collection_id} does not exist on all its VChannels at tick {tick}")
    for info in vchannels.values():
        if 0 < info.dropped_tick <= tick:
            raise CollectionNotFound(f"collection {collection_id} was dropped at tick {info.dropped_tick}")


def tail_rows(
    tail: WalTail, *, settings: Settings, collection_id: int, schema: CollectionSchema, deletes: bool
) -> Iterator[pa.Table]:
    """Yield the collection's rows (or deletes) that the tail has and its table lacks, in the columns that `schema`
    needs.
    """
    target = deletes_file_schema(schema) if deletes else rows_read_schema(schema)
    ticks = tail.delete_ticks if deletes else tail.row_ticks
    catalog = tail.checkpoint.catalog
    buffer = TxnBuffer(after_tick=tail.checkpoint.time_tick)
    for messages in tail.messages(store_at(settings.wal_uri)):
        for stretch in catalog.apply(buffer.push(messages)):
            mine = stretch.filter(pc.equal(stretch["collection_id"], collection_id))
            if mine.num_rows == 0 or _has(mine, ticks):
                continue
            for part in collection_rows(mine, catalog, imports=StagedFiles.of(settings), deletes=deletes):
                rows = _rows_after(part.rows, ticks)
                if rows.num_rows:
                    yield align_to_schema(rows, target)


def _has(stretch: pa.Table, ticks: dict[str, int]) -> bool:
    """Return whether the table has all rows of a slice: then its staged files need not be read."""
    columns = {"vchannel": stretch["vchannel"].cast(pa.utf8()), VISIBLE_TICK: stretch[VISIBLE_TICK]}
    last = pa.table(columns).group_by("vchannel").aggregate([(VISIBLE_TICK, "max")])
    return all(row[f"{VISIBLE_TICK}_max"] <= ticks[row["vchannel"]] for row in last.to_pylist())


def _rows_after(rows: pa.Table, ticks: dict[str, int]) -> pa.Table:
    """Return the rows after the tick of their VChannel."""
    channel = pc.dictionary_encode(rows["_vchannel"]).combine_chunks()
    has = np.array([ticks[name] for name in channel.dictionary.to_pylist()], dtype=np.int64)
    codes = channel.indices.to_numpy(zero_copy_only=False)
    return rows.filter(pa.array(rows["_time_tick"].to_numpy() > has[codes]))
