"""Writes what the chain made of one log range as Parquet files of the ``wal`` table, durable before anyone hears of them.

One file per kind and UTC date, under a name that no other attempt has; nothing is committed here. The result is a list of
:class:`FileAction`, small enough to travel through Spark as JSON, which the committer puts into one Delta commit. Memory
is bounded by the slices that are handed in: each becomes a row group at once.
"""

from __future__ import annotations

import itertools
import json
import uuid
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any, Final, Self

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from millrace.message.ids import LOGICAL_BITS
from millrace.tables.direct_file import DirectFile
from millrace.tables.wal_table import (
    STATS_COLUMNS,
    Totals,
    WalPosition,
    partition_path,
    state_detail,
    sync_directory,
)
from millrace.wal.chain import Outcome
from millrace.wal.digest import digest
from millrace.wal.schema import KIND_MESSAGE, KIND_REJECTION, KIND_STATE, ROW_SCHEMA
from millrace.wal.state import ChannelState

_DAY_MS: Final = 86_400_000
_DICTIONARY: Final = [
    "type",
    "vchannel",
    "reason",
    "term",
    "lc_ledger",
    "collection_id",
    "partition_id",
    "segment_id",
    "schema_version",
    "producer_id",
    "epoch",
    "txn_id",
    "ledger",
    "rows",
]
"""Columns of few values; the others would pay for a dictionary that fills up."""

_WRITE_OPTIONS: Final[dict[str, Any]] = {
    "compression": "none",
    "use_dictionary": _DICTIONARY,
    "write_statistics": list(STATS_COLUMNS),
    "store_schema": False,
    "version": "2.6",
    "data_page_size": 1 << 20,
}


@dataclass(frozen=True, slots=True)
class FileAction:
    """A durable file that a commit may add to the table. Sizes are bytes; `low` and `high` bound (tick, ledger, entry)."""

    path: str
    """Relative to the table."""
    kind: str
    date: str
    size: int
    rows: int
    low: tuple[int, ...]
    high: tuple[int, ...]

    def stats(self) -> str:
        """The statistics that readers prune by, as Delta writes them."""
        return json.dumps(
            {
                "numRecords": self.rows,
                "minValues": dict(zip(STATS_COLUMNS, self.low, strict=True)),
                "maxValues": dict(zip(STATS_COLUMNS, self.high, strict=True)),
                "nullCount": dict.fromkeys(STATS_COLUMNS, 0),
            }
        )

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Self:
        return cls(**{**data, "low": tuple(data["low"]), "high": tuple(data["high"])})


class RangeWriter:
    """The files of one attempt at one range of one PChannel.

    Call :meth:`add` for each outcome in log order, then :meth:`finish` once; :meth:`abort` takes everything away.
    """

    def __init__(self, table: Path, pchannel: str) -> None:
        self._table = table
        self._pchannel = pchannel
        self._attempt = uuid.uuid4().hex
        self._open: dict[tuple[str, str], RowFile] = {}
        self.totals = Totals()

    def add(self, outcome: Outcome) -> None:
        """Write the rows of one outcome."""
        for kind, rows in ((KIND_MESSAGE, outcome.messages), (KIND_REJECTION, outcome.rejections)):
            if rows.num_rows == 0:
                continue
            added = digest(rows)
            count = rows.num_rows
            self.totals += Totals(count if kind == KIND_MESSAGE else 0, count if kind == KIND_REJECTION else 0, added)
            for day, part in _by_date(kind, rows):
                self._file(kind, day).write(part)

    @property
    def rows(self) -> int:
        """Message and rejection rows written so far."""
        return self.totals.messages + self.totals.rejections

    def finish(self, state: ChannelState, base: WalPosition) -> list[FileAction]:
        """Write the state row behind the range, make all files durable and describe them."""
        row = _state_row(
            state,
            detail=state_detail(
                commits=base.commits + 1, previous_tick=base.last_tick, totals=base.totals + self.totals
            ),
        )
        self._file(KIND_STATE, _date(state.last_tick >> LOGICAL_BITS)).write(row)
        actions = [file.close() for file in self._open.values()]
        for folder in {file.path.parent for file in self._open.values()}:
            sync_directory(folder)
        return actions

    def abort(self) -> None:
        """Remove what was written. Idempotent."""
        for file in self._open.values():
            file.discard()
        self._open.clear()

    def _file(self, kind: str, day: str) -> RowFile:
        file = self._open.get((kind, day))
        if file is None:
            folder = partition_path(kind, self._pchannel, day)
            _make_folder(self._table, folder)
            file = self._open[(kind, day)] = RowFile(self._table, f"{folder}/{self._attempt}.parquet", kind, day)
        return file


class RowFile:
    """One Parquet file that is being written, with the bounds of what went in."""

    def __init__(self, table: Path, relative: str, kind: str, day: str) -> None:
        self.path = table / relative
        self._relative = relative
        self._kind = kind
        self._day = day
        self._rows = 0
        self._low: tuple[int, ...] | None = None
        self._high: tuple[int, ...] = (0, 0, 0)
        self._sink = DirectFile(self.path)
        self._writer = pq.ParquetWriter(self._sink, ROW_SCHEMA, **_WRITE_OPTIONS)

    def write(self, rows: pa.RecordBatch) -> None:
        self._writer.write_batch(rows, row_group_size=max(1, rows.num_rows))
        columns = [rows.column(name).to_numpy() for name in STATS_COLUMNS]
        low = tuple(int(column.min()) for column in columns)
        high = tuple(int(column.max()) for column in columns)
        self._low = low if self._low is None else tuple(map(min, self._low, low))
        self._high = tuple(map(max, self._high, high))
        self._rows += rows.num_rows

    def close(self) -> FileAction:
        self._writer.close()
        size = self._sink.sync()
        self._sink.close()
        assert self._low is not None
        return FileAction(self._relative, self._kind, self._day, size, self._rows, self._low, self._high)

    def discard(self) -> None:
        # What made the attempt fail (a full disk) makes closing fail too, and the file goes in any case.
        for stream in (self._writer, self._sink):
            with suppress(OSError, pa.ArrowException):
                stream.close()
        self.path.unlink(missing_ok=True)


def _make_folder(table: Path, relative: str) -> None:
    """Make a partition's folder durably: each new level is an entry of the level above."""
    if (table / relative).is_dir():
        return
    folder = table
    for part in Path(relative).parts:
        folder = folder / part
        if not folder.is_dir():
            folder.mkdir(exist_ok=True)
            sync_directory(folder.parent)


def _date(physical_ms: int) -> str:
    return datetime.fromtimestamp(physical_ms / 1000, UTC).date().isoformat()


def _by_date(kind: str, rows: pa.RecordBatch) -> list[tuple[str, pa.RecordBatch]]:
    """`rows` cut where the UTC date changes: of the tick, or of the append stamp for a rejection."""
    ticks = rows.column("time_tick" if kind == KIND_MESSAGE else "physical_ms").to_numpy()
    days = (ticks >> LOGICAL_BITS if kind == KIND_MESSAGE else ticks) // _DAY_MS
    if days[0] == days[-1]:  # ticks and stamps never decrease
        return [(_day_name(int(days[0])), rows)]
    cuts = [0, *(np.flatnonzero(np.diff(days)) + 1).tolist(), rows.num_rows]
    return [(_day_name(int(days[start])), rows.slice(start, end - start)) for start, end in itertools.pairwise(cuts)]


def _day_name(day: int) -> str:
    return (date(1970, 1, 1).fromordinal(date(1970, 1, 1).toordinal() + day)).isoformat()


def _state_row(state: ChannelState, *, detail: str) -> pa.RecordBatch:
    values: dict[str, Any] = {
        "time_tick": state.last_tick,
        "ledger": state.position.ledger,
        "entry": state.position.entry,
        "physical_ms": state.last_tick >> LOGICAL_BITS,
        "type": "UNDEFINED",
        "vchannel": "",
        "term": state.term,
        "reason": None,
        "detail": detail,
        "payload": state.to_bytes(),
    }
    arrays = [pa.array([values.get(item.name, 0)], _value_type(item.type)).cast(item.type) for item in ROW_SCHEMA]
    return pa.RecordBatch.from_arrays(arrays, schema=ROW_SCHEMA)


def _value_type(kind: pa.DataType) -> pa.DataType:
    return kind.value_type if pa.types.is_dictionary(kind) else kind
