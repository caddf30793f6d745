"""Writes the chain's outcome for one log range as Parquet files of the ``wal`` table.

There is one file per kind and UTC date, under a name that no other attempt uses. The files are durable when they are
reported; nothing is committed here. The result is a list of file actions that is small enough to pass through Spark.
Memory is bounded by the slices: each becomes a row group immediately.
"""

from __future__ import annotations

import itertools
import uuid
from datetime import UTC, date, datetime
from typing import Any, Final

import numpy as np
import pyarrow as pa

from millrace.message.ids import LOGICAL_BITS
from millrace.storage.parquet_file import FileAction, ParquetFileWriter
from millrace.storage.store import TableStore, store_at
from millrace.tables.wal.state_rows import remember
from millrace.tables.wal.table import (
    STATS_COLUMNS,
    WalPosition,
    WalTotals,
    partition_path,
    state_detail,
)
from millrace.wal.chain import ChainOutcome
from millrace.wal.digest import digest_rows
from millrace.wal.schema import KIND_MESSAGE, KIND_REJECTION, KIND_STATE, ROW_SCHEMA
from millrace.wal.state import ChannelState

SMALL_BYTES: Final = 1 << 20
"""A range whose rows take less is compressed: with few rows, the columns cost more than the payloads."""

_COMPRESSED: Final[dict[str, Any]] = {"compression": "zstd", "compression_level": 1}
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
"""Columns with few distinct values. Others would pay for a dictionary that fills up."""

_WRITE_OPTIONS: Final[dict[str, Any]] = {
    "compression": "none",
    "use_dictionary": _DICTIONARY,
    "write_statistics": list(STATS_COLUMNS),
    "version": "2.6",
    "data_page_size": 1 << 20,
}


class WalRangeWriter:
    """The files of one attempt at one range of one PChannel.

    Call :meth:`add` for each outcome in log order, then :meth:`finish` once. :meth:`abort` removes everything.
    """

    def __init__(self, uri: object, pchannel: str) -> None:
        self._store = store_at(uri)
        self._pchannel = pchannel
        # Attempts of one task never share a file name, so removing a failed one's files cannot hit another's.
        self._attempt = uuid.uuid4().hex
        self._open: dict[tuple[str, str], WalFileWriter] = {}
        self.totals = WalTotals()
        self.replaced_states: tuple[str, ...] = ()
        """Files of the state rows that the one of :meth:`finish` takes the place of."""

    def add(self, outcome: ChainOutcome) -> None:
        """Write the rows of one outcome."""
        for kind, rows in ((KIND_MESSAGE, outcome.messages), (KIND_REJECTION, outcome.rejections)):
            if rows.num_rows == 0:
                continue
            added = digest_rows(rows)
            count = rows.num_rows
            self.totals += WalTotals(
                count if kind == KIND_MESSAGE else 0, count if kind == KIND_REJECTION else 0, added
            )
            for day, part in rows_by_date(kind, rows):
                self._file(kind, day, compress=rows.nbytes < SMALL_BYTES).write(part)

    @property
    def rows(self) -> int:
        """Number of message and rejection rows written so far."""
        return self.totals.messages + self.totals.rejections

    def finish(self, state: ChannelState, base: WalPosition) -> list[FileAction]:
        """Write the state row of the range's end, make all files durable, and describe them."""
        # The state row goes into the same commit as the rows before it, so position and rows cannot disagree.
        made = base.next_row(state)
        detail = state_detail(
            commits=base.commits + 1,
            previous_tick=base.last_tick,
            totals=base.totals + self.totals,
            time_tick=state.last_tick,
            row=made,
        )
        row = _state_row(state, detail=detail, data=made.payload)
        self.replaced_states = made.replaced
        self._file(KIND_STATE, _date(state.last_tick >> LOGICAL_BITS), compress=len(made.payload) < SMALL_BYTES).write(
            row
        )
        actions = [file.close() for file in self._open.values()]
        remember(made, state)
        return actions

    def abort(self) -> None:
        """Remove all written files. Idempotent."""
        for file in self._open.values():
            file.discard()
        self._open.clear()

    def _file(self, kind: str, day: str, *, compress: bool) -> WalFileWriter:
        file = self._open.get((kind, day))
        if file is None:
            file = WalFileWriter(self._store, kind, self._pchannel, day, name=self._attempt, compress=compress)
            self._open[(kind, day)] = file
        return file


class WalFileWriter:
    """Writes one file of the ``wal`` table: rows of one kind and day."""

    def __init__(
        self,
        store: TableStore,
        kind: str,
        pchannel: str,
        day: str,
        *,
        name: str | None = None,
        compress: bool = False,
    ) -> None:
        """`compress` pays for small rows, whose columns repeat; large payloads cost more time than they save."""
        self._partition = {"kind": kind, "pchannel": pchannel, "date": day}
        # The commits' digests cover messages and rejections. Page checksums for them would cost a third of the write
        # time.
        checksums = {"write_page_checksum": kind == KIND_STATE}
        path = f"{partition_path(kind, pchannel, day)}/{name or uuid.uuid4().hex}.parquet"
        options = _WRITE_OPTIONS | checksums | (_COMPRESSED if compress else {})
        self._file = ParquetFileWriter(store, path, ROW_SCHEMA, options=options)

    def write(self, rows: pa.RecordBatch) -> None:
        """Add rows as one row group."""
        self._file.write(rows, row_group_size=max(1, rows.num_rows))

    def close(self) -> FileAction:
        """Make the file durable and describe it."""
        return self._file.close(self._partition, STATS_COLUMNS)

    def discard(self) -> None:
        """Remove the file."""
        self._file.discard()


def _date(physical_ms: int) -> str:
    return datetime.fromtimestamp(physical_ms / 1000, UTC).date().isoformat()


def rows_by_date(kind: str, rows: pa.RecordBatch) -> list[tuple[str, pa.RecordBatch]]:
    """Split `rows` where the UTC date changes: the date of the tick, or of the append stamp for a rejection."""
    ticks = rows.column("time_tick" if kind == KIND_MESSAGE else "physical_ms").to_numpy()
    days = (ticks >> LOGICAL_BITS if kind == KIND_MESSAGE else ticks) // _DAY_MS
    if days[0] == days[-1]:  # ticks and stamps never decrease
        return [(_day_name(int(days[0])), rows)]
    cuts = [0, *(np.flatnonzero(np.diff(days)) + 1).tolist(), rows.num_rows]
    return [(_day_name(int(days[start])), rows.slice(start, end - start)) for start, end in itertools.pairwise(cuts)]


def _day_name(day: int) -> str:
    return (date(1970, 1, 1).fromordinal(date(1970, 1, 1).toordinal() + day)).isoformat()


def _state_row(state: ChannelState, *, detail: str, data: bytes) -> pa.RecordBatch:
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
        "payload": data,
        "principal": None,
    }
    arrays = [pa.array([values.get(item.name, 0)], _value_type(item.type)).cast(item.type) for item in ROW_SCHEMA]
    return pa.RecordBatch.from_arrays(arrays, schema=ROW_SCHEMA)


def _value_type(kind: pa.DataType) -> pa.DataType:
    return kind.value_type if pa.types.is_dictionary(kind) else kind
