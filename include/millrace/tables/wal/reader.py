"""Rows of one PChannel from one pinned version of the ``wal`` table, in id order, by tick or from a message id on.

A :class:`WalSnapshot` is one version: everything read through it is consistent. Files are chosen by the partition
values and statistics in the Delta log alone, and only those are opened. So the cost of a read grows with its result,
and with the number of live files only by their listing. Batches, and with them memory, are bounded.

Files of different commits hold disjoint ranges of ids (compaction keeps that). A file out of order raises WalGap; rows
are never reordered or duplicated.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, Final, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from millrace.base.errors import PositionTruncated, WalGap
from millrace.base.lru_cache import LruCache
from millrace.base.settings import Settings
from millrace.message.ids import LogId, MessageId, tick_physical_ms
from millrace.storage.parquet_file import open_file
from millrace.storage.store import TableStore
from millrace.storage.table import TableHandle, open_table
from millrace.wal.schema import KIND_MESSAGE, ROW_SCHEMA, complete_rows

BATCH_BYTES: Final = 32 << 20
"""Approximate uncompressed Parquet bytes per batch."""

MAX_TICK: Final = (1 << 63) - 1

TRIMMED_APP_SUFFIX: Final = "/trimmed"
"""``<pchannel>/trimmed`` is the app id whose version is the tick up to which retention may have removed rows.

Its parts ``/ledger`` and ``/entry`` name the first log entry whose rows all exist, including transactions.
"""
FIRST_ID: Final = MessageId(0, 0, 0, 0)

_DICTIONARIES: Final = [field.name for field in ROW_SCHEMA if pa.types.is_dictionary(field.type)]
_CONFIRMED: Final = ["lc_ledger", "lc_entry", "lc_index", "lc_ordinal"]
_IDS: Final = ("ledger", "entry", "index", "ordinal")
_STATISTICS: Final = ("min.time_tick", "max.time_tick", "max.ledger", "max.entry")


ROW_BYTES: Final = 400
"""Bytes that a row takes at least, most of them in columns that compress."""

FOLLOWED_SECONDS: Final = 5.0
"""Time for which a reader counts as following the table after its last call of :func:`follow`."""

_FOLLOW_SECONDS: Final = 1.0


def follow(settings: Settings) -> None:
    """Say that a reader waits for the table's next rows, so that they do not wait for more (setting ``wal_linger``)."""
    path = settings.wal_readers_path
    with suppress(OSError):  # a hint: a reader may have no right to write here
        if path.exists() and abs(time.time() - path.stat().st_mtime) < _FOLLOW_SECONDS:
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()


def is_followed(settings: Settings) -> bool:
    """Return whether a reader has waited for the table's next rows in the last FOLLOWED_SECONDS."""
    try:
        return abs(time.time() - settings.wal_readers_path.stat().st_mtime) < FOLLOWED_SECONDS
    except OSError:
        return False


@dataclass(frozen=True, slots=True)
class WalFile:
    """One live file of messages, as the Delta log describes it."""

    path: str
    size: int
    """About the bytes of its rows in memory: a file of small rows is compressed."""
    rows: int
    first_tick: int
    last_tick: int
    last_id: tuple[int, int]
    """A log id at or after that of its last message."""


@dataclass(frozen=True, slots=True)
class WalRange:
    """A planned read: plain data that a task can receive without opening a Delta log."""

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
        """Open the table at `uri` at `version`, or at its newest one; None if it does not exist."""
        table = open_table(uri, version=version)
        return None if table is None else cls(table)

    def refreshed(self) -> WalSnapshot:
        """Return a snapshot of the newest version: this one, or another, after which this one is unusable."""
        self._table.refresh()
        return self if self._table.version == self.version else WalSnapshot(self._table)

    def polled(self) -> WalSnapshot:
        """Return :meth:`refreshed`, for callers that look again and again (:meth:`TableHandle.poll`)."""
        self._table.poll()
        return self if self._table.version == self.version else WalSnapshot(self._table)

    @property
    def store(self) -> TableStore:
        """The table's store, for :func:`read_range`."""
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
            # A file may lack statistics, such as one that another engine rewrote: it is read, not skipped.
            if rows is None or None in statistics:
                rows, statistics = self._without_statistics(path)
            if rows:
                first, last, ledger, entry = statistics
                files.setdefault(pchannel, []).append(
                    WalFile(path, max(size, rows * ROW_BYTES), rows, first, last, (ledger, entry))
                )
        for each in files.values():
            # The Delta log lists files in no order; `plan` then checks that they do not overlap.
            each.sort(key=lambda file: file.first_tick)
        return files

    def _without_statistics(self, path: str) -> tuple[int, list[int]]:
        """Return rows, first and last tick, and greatest ledger and entry of a file without statistics in the log."""
        with self._table.open_file(path) as parquet:
            table = parquet.read(columns=["time_tick", "ledger", "entry"])
        if table.num_rows == 0:
            return 0, [0, 0, 0, 0]
        most = [pc.max(table[name]).as_py() for name in ("time_tick", "ledger", "entry")]
        return table.num_rows, [pc.min(table["time_tick"]).as_py(), *most]

    def pchannels(self) -> list[str]:
        """Return the PChannels with messages in this version, sorted."""
        return sorted(self._files)

    def last_tick(self, pchannel: str) -> int:
        """Return the tick up to which this version has everything of `pchannel`; 0 if nothing was committed."""
        return self._table.app_version(pchannel)

    def log_time_ms(self) -> int:
        """Return the log time of this version: the stamp of its newest tick in Unix milliseconds; 0 without one.

        It does not move while nothing is written, and is independent of the wall clock.
        """
        return tick_physical_ms(max(map(self.last_tick, self.pchannels()), default=0))

    def trimmed(self, pchannel: str) -> tuple[int, LogId]:
        """Return the tick up to which retention may have removed rows, and the first entry readers may start at."""
        app = pchannel + TRIMMED_APP_SUFFIX
        tick, ledger, entry = (self._table.app_version(app + part) for part in ("", "/ledger", "/entry"))
        return tick, LogId(ledger, entry)

    def count(self, pchannel: str, *, after_tick: int) -> int:
        """Return the number of messages of `pchannel` with a tick > `after_tick`. Opens at most one file."""
        later = [file for file in self._files.get(pchannel, []) if file.last_tick > after_tick]
        whole = [file for file in later if file.first_tick > after_tick]
        cut = WalRange(tuple(later[: len(later) - len(whole)]), after_tick=after_tick)
        parts = read_range(self._table.store, cut, columns=["time_tick"])
        return sum(file.rows for file in whole) + sum(part.num_rows for part in parts)

    def lags(
        self, pchannel: str, ticks: Mapping[str, int], known: LruCache[str, Mapping[str, tuple[int, int]]]
    ) -> dict[str, tuple[int, int]]:
        """Return how many messages each lane has after its tick, and the tick of the first (0 without one).

        A lane is a VChannel, or the PChannel for all of its messages. Of files after a lane's tick, only the VChannels
        of the messages are read, once: `known` keeps what was found by file.
        """
        found = dict.fromkeys(ticks, (0, 0))
        for file in self._files.get(pchannel, []):
            for lane, tick in ticks.items():
                if file.last_tick <= tick:
                    continue
                if file.first_tick > tick:
                    lanes = known.get(file.path)
                    if lanes is None:
                        lanes = self._lanes_of(pchannel, file, 0)
                        known.put(file.path, lanes)
                else:
                    lanes = self._lanes_of(pchannel, file, tick)
                count, first = lanes.get(lane, (0, 0))
                before, oldest = found[lane]
                found[lane] = (before + count, oldest or first)
        return found

    def _lanes_of(self, pchannel: str, file: WalFile, tick: int) -> dict[str, tuple[int, int]]:
        found: dict[str, tuple[int, int]] = {}
        cut = WalRange((file,), after_tick=tick)
        for part in read_range(self._table.store, cut, columns=["time_tick", "vchannel"]):
            names = pa.table({"lane": part.column("vchannel").cast(pa.utf8()), "tick": part.column("time_tick")})
            counts = names.group_by("lane").aggregate([("tick", "count"), ("tick", "min")]).to_pylist()
            whole = {
                "lane": pchannel,
                "tick_count": part.num_rows,
                "tick_min": pc.min(part.column("time_tick")).as_py(),
            }
            for each in (*counts, *([whole] if part.num_rows else [])):
                before, oldest = found.get(each["lane"], (0, 0))
                found[each["lane"]] = (before + each["tick_count"], oldest or each["tick_min"])
        return found

    def plan(
        self,
        pchannel: str,
        *,
        start: MessageId | None = None,
        after_tick: int = 0,
        up_to_tick: int = MAX_TICK,
        max_bytes: int | None = None,
    ) -> WalRange:
        """Return the messages of `pchannel` with id >= `start` and after_tick < time_tick <= up_to_tick, as a range to
        read.

        `max_bytes` (of files) ends the range earlier, after a whole file, but includes at least one file beyond
        `after_tick`. The range's ``up_to_tick`` then tells where it ends. Raises WalGap if files overlap, and
        PositionTruncated if retention removed rows after `start`.
        """
        begin = start or FIRST_ID
        if start is not None:
            tick, earliest = self.trimmed(pchannel)
            if start.log_id < earliest:
                raise PositionTruncated(
                    f"the WAL of {pchannel} was trimmed up to tick {tick}: a reader can start at {earliest} or later, "
                    f"not at {start}; the collections' tables hold earlier rows",
                    earliest=earliest,
                )
        chosen = [
            file
            for file in self._files.get(pchannel, [])
            if file.last_id >= begin.log_id and file.first_tick <= up_to_tick and (start or file.last_tick > after_tick)
        ]
        for before, after in pairwise(chosen):
            if after.first_tick <= before.last_tick:
                raise WalGap(f"{before.path} and {after.path} overlap in ticks: rows would be out of order")
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
        """Yield accepted messages in id order, as tables of ROW_SCHEMA (or some columns) of about `batch_bytes`.

        The messages have id >= `start` or, without it, time_tick > after_tick; time_tick <= up_to_tick; and one of
        `types` if given.
        """
        plan = self.plan(pchannel, start=start, after_tick=after_tick, up_to_tick=up_to_tick)
        return read_range(self._table.store, plan, types=types, columns=columns, batch_bytes=batch_bytes)

    def confirmed_at(self, pchannel: str, tick: int) -> MessageId:
        """Return LastConfirmed of the last message <= `tick`: a reader that starts there misses nothing visible after
        `tick`.
        """
        files = self.plan(pchannel, up_to_tick=tick).files
        if not files:
            return FIRST_ID
        with self._table.open_file(files[-1].path) as parquet:
            table = parquet.read(columns=["time_tick", *_CONFIRMED])
        # `plan` chose files with a first tick <= `tick`, so there is such a row.
        place = int(np.searchsorted(table["time_tick"].to_numpy(), tick, side="right")) - 1
        return MessageId(*(table[name][place].as_py() for name in _CONFIRMED))

    def verify(self, pchannel: str) -> int:
        """Check that the messages of `pchannel` are in order and none is after the last tick. Returns their number.

        Raises WalGap. It does not detect missing rows: the totals and digests of the state rows do
        (millrace.tables.wal.table.WalTotals).
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
    """Yield the messages of a planned range of the ``wal`` table.

    Of a row group without any of `types`, only the types are read. Raises WalGap for rows out of order.
    """
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
    """Return the first files up to `max_bytes`, not counting those before `after_tick`, and the range's last tick."""
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
    """Return the approximate size of a range's files. Of its first file, only the part after the start counts."""
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
    dictionaries = [name for name in _DICTIONARIES if name in names]
    with open_file(wal, file.path, read_dictionary=dictionaries) as parquet:
        for group in _groups(parquet, plan):
            if types is not None and columns is None and not _has_any(parquet, group, types):
                continue
            size = parquet.metadata.row_group(group).total_byte_size
            if size <= 2 * batch_bytes:
                yield complete_rows(parquet.read_row_group(group, columns=names), names)
                continue
            rows = max(1, parquet.metadata.row_group(group).num_rows * batch_bytes // size)
            for batch in parquet.iter_batches(batch_size=rows, row_groups=[group], columns=names):
                yield complete_rows(pa.Table.from_batches([batch]), names)


def _groups(parquet: pq.ParquetFile, plan: WalRange) -> list[int]:
    """Return the row groups of a file that may hold messages of a range, by their statistics."""
    places = [parquet.schema.names.index(name) for name in ("time_tick", "ledger", "entry")]
    found = []
    for number in range(parquet.num_row_groups):
        group = parquet.metadata.row_group(number)
        tick, ledger, entry = (group.column(place).statistics for place in places)
        # A row group without statistics may hold anything.
        if all(each is not None and each.has_min_max for each in (tick, ledger, entry)):
            # The maxima of the two columns may be of different rows: the pair is an upper bound, so nothing is skipped
            # wrongly.
            before = (ledger.max, entry.max) < plan.start.log_id or tick.max <= plan.after_tick
            if before or tick.min > plan.up_to_tick:
                continue
        found.append(number)
    return found


def _group_bytes(parquet: pq.ParquetFile, number: int) -> int:
    group = parquet.metadata.row_group(number)
    return sum(group.column(place).total_compressed_size for place in range(group.num_columns))


def _first_at(table: pa.Table, start: MessageId) -> int:
    """Return the index of the first row with an id >= `start` in a table in id order."""
    below = np.zeros(table.num_rows, dtype=bool)
    equal = np.ones(table.num_rows, dtype=bool)
    for name, bound in zip(_IDS, start, strict=True):
        values = table[name].to_numpy()
        below |= equal & (values < bound)
        equal &= values == bound
    return int(below.sum())
