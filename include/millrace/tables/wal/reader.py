"""Rows of one PChannel from one pinned version of the ``wal`` table, in id order, by tick or from a message id on.

A :class:`WalSnapshot` is one version: everything read through it is of one moment. Files are chosen by the partition
values and statistics in the Delta log alone, and only those are opened, so that the cost of a read grows with what it
returns, and with the number of live files only by their listing. Batches are bounded, memory with them.

Files of different commits hold ranges of ids that do not overlap (compaction keeps it so); a file out of order is WalGap,
never a reordered or doubled row.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, Final, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from millrace.base.errors import PositionTruncated, WalGap
from millrace.message.ids import LogId, MessageId, tick_physical_ms
from millrace.storage.parquet_file import open_file
from millrace.storage.store import TableStore
from millrace.storage.table import TableHandle, open_table
from millrace.wal.schema import KIND_MESSAGE, ROW_SCHEMA

BATCH_BYTES: Final = 32 << 20
"""Uncompressed Parquet bytes that one batch holds, about."""

MAX_TICK: Final = (1 << 63) - 1

TRIMMED_APP_SUFFIX: Final = "/trimmed"
"""``<pchannel>/trimmed`` is the app id whose version is the tick up to which retention may have taken rows away; its parts
``/ledger`` and ``/entry`` name the first log entry of which all rows are there, transactions included."""
FIRST_ID: Final = MessageId(0, 0, 0, 0)

_DICTIONARIES: Final = [field.name for field in ROW_SCHEMA if pa.types.is_dictionary(field.type)]
_CONFIRMED: Final = ["lc_ledger", "lc_entry", "lc_index", "lc_ordinal"]
_IDS: Final = ("ledger", "entry", "index", "ordinal")
_STATISTICS: Final = ("min.time_tick", "max.time_tick", "max.ledger", "max.entry")


@dataclass(frozen=True, slots=True)
class WalFile:
    """One live file of messages, as the Delta log describes it."""

    path: str
    size: int
    rows: int
    first_tick: int
    last_tick: int
    last_id: tuple[int, int]
    """A log id at or behind its last message's."""


@dataclass(frozen=True, slots=True)
class WalRange:
    """What to read: plain data that a task can be sent, so that it opens no Delta log of its own."""

    files: tuple[WalFile, ...]
    start: MessageId = FIRST_ID
    after_tick: int = 0
    up_to_tick: int = MAX_TICK

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Self:
        files = tuple(WalFile(**{**file, "last_id": tuple(file["last_id"])}) for file in value["files"])
        return cls(files, MessageId(*value["start"]), value["after_tick"], value["up_to_tick"])


class WalSnapshot:
    """One version of the ``wal`` table."""

    def __init__(self, table: TableHandle) -> None:
        self._table = table
        self.version = table.version

    @classmethod
    def open(cls, uri: object, *, version: int | None = None) -> Self | None:
        """The table at `uri` at `version`, or as it is now; None where there is none yet."""
        table = open_table(uri, version=version)
        return None if table is None else cls(table)

    def refreshed(self) -> WalSnapshot:
        """The newest version: this snapshot where it is that, else another one, and this one is of no more use."""
        self._table.refresh()
        return self if self._table.version == self.version else WalSnapshot(self._table)

    @property
    def store(self) -> TableStore:
        """Where the table lies, for :func:`read_range` of what was planned here."""
        return self._table.store

    @cached_property
    def _files(self) -> dict[str, list[WalFile]]:
        """The files of messages by PChannel, in tick order."""
        actions = self._table.actions()
        if actions.num_rows == 0:
            return {}
        actions = actions.filter(pc.equal(actions["partition.kind"], KIND_MESSAGE))
        known = set(actions.column_names)
        columns = [
            actions[name].to_pylist() if name in known else [None] * actions.num_rows
            for name in ("path", "size_bytes", "num_records", "partition.pchannel", *_STATISTICS)
        ]
        files: dict[str, list[WalFile]] = {}
        for path, size, rows, pchannel, *statistics in zip(*columns, strict=True):
            if rows is None or None in statistics:
                rows, statistics = self._without_statistics(path)
            if rows:
                first, last, ledger, entry = statistics
                files.setdefault(pchannel, []).append(WalFile(path, size, rows, first, last, (ledger, entry)))
        for each in files.values():
            each.sort(key=lambda file: file.first_tick)
        return files

    def _without_statistics(self, path: str) -> tuple[int, list[int]]:
        """Rows, first and last tick, greatest ledger and entry of a file whose writer left no statistics in the log."""
        with self._table.open_file(path) as parquet:
            table = parquet.read(columns=["time_tick", "ledger", "entry"])
        if table.num_rows == 0:
            return 0, [0, 0, 0, 0]
        most = [pc.max(table[name]).as_py() for name in ("time_tick", "ledger", "entry")]
        return table.num_rows, [pc.min(table["time_tick"]).as_py(), *most]

    def pchannels(self) -> list[str]:
        """PChannels that have messages in this version, sorted."""
        return sorted(self._files)

    def last_tick(self, pchannel: str) -> int:
        """Everything of `pchannel` up to this tick is in this version; 0 where nothing was committed."""
        return self._table.app_version(pchannel)

    def log_time_ms(self) -> int:
        """Log time as this version has it, in Unix milliseconds: the stamp of its newest tick; 0 without any. It stands still
        while nothing is written, and no wall clock that leaps moves it."""
        return tick_physical_ms(max(map(self.last_tick, self.pchannels()), default=0))

    def trimmed(self, pchannel: str) -> tuple[int, LogId]:
        """Up to which tick retention may have taken rows away, and the first entry that a reader may begin at."""
        app = pchannel + TRIMMED_APP_SUFFIX
        tick, ledger, entry = (self._table.app_version(app + part) for part in ("", "/ledger", "/entry"))
        return tick, LogId(ledger, entry)

    def count(self, pchannel: str, *, after_tick: int) -> int:
        """How many messages of `pchannel` have a tick > `after_tick`; opens the one file that the tick lies in, if any."""
        behind = [file for file in self._files.get(pchannel, []) if file.last_tick > after_tick]
        whole = [file for file in behind if file.first_tick > after_tick]
        cut = WalRange(tuple(behind[: len(behind) - len(whole)]), after_tick=after_tick)
        parts = read_range(self._table.store, cut, columns=["time_tick"])
        return sum(file.rows for file in whole) + sum(part.num_rows for part in parts)

    def plan(
        self,
        pchannel: str,
        *,
        start: MessageId | None = None,
        after_tick: int = 0,
        up_to_tick: int = MAX_TICK,
        max_bytes: int | None = None,
    ) -> WalRange:
        """The messages of `pchannel` with id >= `start` and after_tick < time_tick <= up_to_tick, as a range to read.

        `max_bytes` (of files) ends it earlier, behind a whole file, but lets at least one file in that reaches past
        `after_tick`. Its ``up_to_tick`` then tells where. Raises WalGap where files hold ticks of the same range,
        PositionTruncated where `start` lies before what retention has left.
        """
        begin = start or FIRST_ID
        if start is not None:
            tick, earliest = self.trimmed(pchannel)
            if start.log_id < earliest:
                raise PositionTruncated(
                    f"the WAL of {pchannel} was trimmed up to tick {tick}: a reader begins at {earliest} or behind it, "
                    f"not at {start}; what lies before stands in the collections' tables",
                    earliest=earliest,
                )
        chosen = [
            file
            for file in self._files.get(pchannel, [])
            if file.last_id >= begin.log_id and file.first_tick <= up_to_tick and (start or file.last_tick > after_tick)
        ]
        for before, behind in pairwise(chosen):
            if behind.first_tick <= before.last_tick:
                raise WalGap(
                    f"{before.path} and {behind.path} hold ticks of the same range: rows would come out of order"
                )
        if max_bytes is not None:
            chosen, cut = _within(chosen, after_tick, max_bytes)
            up_to_tick = min(up_to_tick, cut)
        return WalRange(tuple(chosen), begin, after_tick if start is None else 0, up_to_tick)

    def messages(
        self,
        pchannel: str,
        *,
        start: MessageId | None = None,
        after_tick: int = 0,
        up_to_tick: int = MAX_TICK,
        types: Sequence[str] | None = None,
        columns: Sequence[str] | None = None,
        batch_bytes: int = BATCH_BYTES,
    ) -> Iterator[pa.Table]:
        """Accepted messages in id order, as tables of ROW_SCHEMA (or some of its columns) of about `batch_bytes`.

        With id >= `start` or, without one, time_tick > after_tick; time_tick <= up_to_tick; of `types` where given.
        """
        plan = self.plan(pchannel, start=start, after_tick=after_tick, up_to_tick=up_to_tick)
        return read_range(self._table.store, plan, types=types, columns=columns, batch_bytes=batch_bytes)

    def confirmed_at(self, pchannel: str, tick: int) -> MessageId:
        """LastConfirmed of the last message <= `tick`: from there on is all that becomes visible after `tick`."""
        files = self.plan(pchannel, up_to_tick=tick).files
        if not files:
            return FIRST_ID
        with self._table.open_file(files[-1].path) as parquet:
            table = parquet.read(columns=["time_tick", *_CONFIRMED])
        place = int(np.searchsorted(table["time_tick"].to_numpy(), tick, side="right")) - 1
        return MessageId(*(table[name][place].as_py() for name in _CONFIRMED))

    def verify(self, pchannel: str) -> int:
        """Check that the messages of `pchannel` are in order and none lies past the last tick; how many there are.

        Raises WalGap. Whether rows are missing is told by the totals and digests that the committer keeps beside its state
        rows (millrace.tables.wal.table.WalTotals); this rests on the messages alone.
        """
        count = 0
        for table in self.messages(pchannel, columns=["time_tick", *_IDS]):
            ids = [table[name].to_numpy() for name in reversed(_IDS)]
            if (np.lexsort(ids) != np.arange(table.num_rows)).any():
                raise WalGap(f"ids of {pchannel} are not in the order of their ticks near tick {table['time_tick'][0]}")
            count += table.num_rows
            if table["time_tick"][-1].as_py() > self.last_tick(pchannel):
                raise WalGap(f"{pchannel} has messages past its last committed tick {self.last_tick(pchannel)}")
        return count


def read_range(
    wal: TableStore,
    plan: WalRange,
    *,
    types: Sequence[str] | None = None,
    columns: Sequence[str] | None = None,
    batch_bytes: int = BATCH_BYTES,
) -> Iterator[pa.Table]:
    """The messages of a planned range of the ``wal`` table; of a row group without any of `types` no more than the types is read.
    Raises WalGap for rows out of order."""
    last_seen = 0
    start: MessageId | None = plan.start
    for file in plan.files:
        for table in _batches(wal, file, plan, types, columns, batch_bytes):
            ticks = table["time_tick"].to_numpy()
            if len(ticks) == 0:
                continue
            if ticks[0] <= last_seen or (np.diff(ticks) <= 0).any():
                raise WalGap(f"{file.path} holds rows out of tick order")
            last_seen = int(ticks[-1])
            begin, end = np.searchsorted(ticks, [plan.after_tick, plan.up_to_tick], side="right")
            table = table.slice(int(begin), max(0, int(end - begin)))
            if start is not None:
                table = table.slice(_first_at(table, start))
                start = None if table.num_rows else start
            if types is not None:
                table = table.filter(pc.is_in(table["type"].cast(pa.utf8()), pa.array(types)))
            if table.num_rows:
                yield table if columns is None else table.select(list(columns))


def _within(files: list[WalFile], after_tick: int, max_bytes: int) -> tuple[list[WalFile], int]:
    """The first files up to `max_bytes`, those before `after_tick` not counted, and the last tick of a range cut there."""
    taken = 0
    for place, file in enumerate(files):
        if file.last_tick > after_tick:
            if taken and taken + file.size > max_bytes:
                return files[:place], files[place - 1].last_tick
            taken += file.size
    return files, MAX_TICK


def _has_any(parquet: pq.ParquetFile, group: int, types: Sequence[str]) -> bool:
    there = parquet.read_row_group(group, columns=["type"])["type"].unify_dictionaries()
    return there.num_chunks > 0 and not set(types).isdisjoint(there.chunk(0).dictionary.to_pylist())


def range_bytes(wal: TableStore, plan: WalRange) -> int:
    """About how many bytes of files hold the messages of a range; of the file that it begins in, what lies behind its start."""
    size = sum(file.size for file in plan.files[1:])
    for file in plan.files[:1]:
        with open_file(wal, file.path) as parquet:
            groups = _groups(parquet, plan)
            size += sum(_group_bytes(parquet, group) for group in groups[1:])
            for group in groups[:1]:
                ids = parquet.read_row_group(group, columns=["time_tick", *_IDS])
                before = int(np.searchsorted(ids["time_tick"].to_numpy(), plan.after_tick, side="right"))
                left = ids.num_rows - max(before, _first_at(ids, plan.start))
                size += _group_bytes(parquet, group) * left // max(1, ids.num_rows)
    return size


def _batches(
    wal: TableStore,
    file: WalFile,
    plan: WalRange,
    types: Sequence[str] | None,
    columns: Sequence[str] | None,
    batch_bytes: int,
) -> Iterator[pa.Table]:
    names = ROW_SCHEMA.names if columns is None else sorted({*columns, "time_tick", "type", *_IDS})
    schema = pa.schema([ROW_SCHEMA.field(name) for name in names])
    dictionaries = [name for name in _DICTIONARIES if name in names]
    with open_file(wal, file.path, read_dictionary=dictionaries) as parquet:
        for group in _groups(parquet, plan):
            if types is not None and columns is None and not _has_any(parquet, group, types):
                continue
            size = parquet.metadata.row_group(group).total_byte_size
            if size <= 2 * batch_bytes:
                yield parquet.read_row_group(group, columns=names).select(names).cast(schema)
                continue
            rows = max(1, parquet.metadata.row_group(group).num_rows * batch_bytes // size)
            for batch in parquet.iter_batches(batch_size=rows, row_groups=[group], columns=names):
                yield pa.Table.from_batches([batch]).select(names).cast(schema)


def _groups(parquet: pq.ParquetFile, plan: WalRange) -> list[int]:
    """The row groups of a file that may hold messages of a range, by their statistics."""
    places = [parquet.schema.names.index(name) for name in ("time_tick", "ledger", "entry")]
    found = []
    for number in range(parquet.num_row_groups):
        group = parquet.metadata.row_group(number)
        tick, ledger, entry = (group.column(place).statistics for place in places)
        if all(each is not None and each.has_min_max for each in (tick, ledger, entry)):
            before = (ledger.max, entry.max) < plan.start.log_id or tick.max <= plan.after_tick
            if before or tick.min > plan.up_to_tick:
                continue
        found.append(number)
    return found


def _group_bytes(parquet: pq.ParquetFile, number: int) -> int:
    group = parquet.metadata.row_group(number)
    return sum(group.column(place).total_compressed_size for place in range(group.num_columns))


def _first_at(table: pa.Table, start: MessageId) -> int:
    """The place of the first row with an id >= `start`, in a table in id order."""
    below = np.zeros(table.num_rows, dtype=bool)
    equal = np.ones(table.num_rows, dtype=bool)
    for name, bound in zip(_IDS, start, strict=True):
        values = table[name].to_numpy()
        below |= equal & (values < bound)
        equal &= values == bound
    return int(below.sum())
