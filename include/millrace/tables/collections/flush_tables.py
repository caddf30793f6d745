"""The ``segments`` and ``checkpoints`` tables: the state of each segment, and the progress of the flusher.

``segments`` gets a row each time the WAL shows a new state of a segment (growing, flushed, dropped); the newest row
counts. ``checkpoints`` has one live row per PChannel: everything visible up to ``time_tick`` is in the collections'
tables, and a reader continues at the row's LastConfirmed with the row's catalog. Earlier checkpoints are in earlier
versions of the table. ``written_at`` is for people: no decision uses it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from millrace.message.ids import MessageId
from millrace.storage.file_sink import FileSink
from millrace.storage.parquet_file import FileAction
from millrace.storage.table import TableHandle, create_table
from millrace.tables.collections.data_tables import ensure_columns
from millrace.tables.wal.reader import FIRST_ID
from millrace.wal.visible.catalog import SegmentEvent, WalCatalog
from millrace.wal.visible.collection_rows import align_to_schema

PCHANNEL: Final = "pchannel"

SEGMENT_COLUMNS: Final = pa.schema(
    [
        pa.field("vchannel", pa.utf8()),
        pa.field("collection_id", pa.int64()),
        pa.field("partition_id", pa.int64()),
        pa.field("segment_id", pa.int64()),
        pa.field("state", pa.utf8()),
        pa.field("rows", pa.int64()),  # rows and payload bytes that are visible in it
        pa.field("bytes", pa.int64()),
        pa.field("policy", pa.utf8()),  # why it was sealed; "" while it grows
        pa.field("created_tick", pa.int64()),
        pa.field("time_tick", pa.int64()),  # from which on it has this state
        pa.field("merged_into", pa.int64()),  # the segment that compaction joined it to; 0: none
    ]
)
"""Columns of the files of ``segments``. The table is partitioned by PChannel."""

CHECKPOINT_COLUMNS: Final = pa.schema(
    [
        pa.field("time_tick", pa.int64()),
        pa.field("lc_ledger", pa.int64()),
        pa.field("lc_entry", pa.int64()),
        pa.field("lc_index", pa.int32()),
        pa.field("lc_ordinal", pa.int32()),
        pa.field("term", pa.int64()),
        pa.field("flush_ticks", pa.utf8()),  # JSON: VChannel -> tick up to which its collection's tables are whole
        pa.field("catalog", pa.binary()),
        pa.field("written_at", pa.timestamp("us", tz="UTC")),
    ]
)
"""Columns of the files of ``checkpoints``. The table is partitioned by PChannel."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The flusher's progress on one PChannel."""

    pchannel: str
    time_tick: int = 0
    confirmed: MessageId = FIRST_ID
    term: int = 0
    flush_ticks: dict[str, int] = field(default_factory=dict)
    catalog_bytes: bytes = field(default_factory=lambda: WalCatalog().to_bytes())
    path: str | None = None
    """Its file, relative to the table. The next checkpoint's commit removes it."""

    @property
    def catalog(self) -> WalCatalog:
        """A copy of the catalog to evolve."""
        return WalCatalog.from_bytes(self.catalog_bytes)

    @property
    def base(self) -> int:
        """The app transaction's version that a flusher which planned from here expects; 0 before the first."""
        return self.time_tick

    def to_json(self) -> dict[str, Any]:
        return {
            "pchannel": self.pchannel,
            "time_tick": self.time_tick,
            "confirmed": str(self.confirmed),
            "term": self.term,
            "flush_ticks": self.flush_ticks,
            "catalog": self.catalog_bytes.decode(),
            "path": self.path,
        }

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Checkpoint:
        return cls(
            value["pchannel"],
            value["time_tick"],
            MessageId.parse(value["confirmed"]),
            value["term"],
            value["flush_ticks"],
            value["catalog"].encode(),
            value["path"],
        )


def ensure_segments_table(uri: object) -> TableHandle:
    """Open the ``segments`` table, creating it if needed."""
    table = create_table(uri, _with_pchannel(SEGMENT_COLUMNS), partition_by=[PCHANNEL])
    ensure_columns(table, _with_pchannel(SEGMENT_COLUMNS))  # a table from before compaction lacks merged_into
    return table


def ensure_checkpoints_table(uri: object) -> TableHandle:
    """Open the ``checkpoints`` table, creating it if needed."""
    return create_table(uri, _with_pchannel(CHECKPOINT_COLUMNS), partition_by=[PCHANNEL])


def _with_pchannel(schema: pa.Schema) -> pa.Schema:
    return pa.schema([*schema, pa.field(PCHANNEL, pa.utf8())])


def read_checkpoints(table: TableHandle | None) -> dict[str, Checkpoint]:
    """Return the checkpoint of each PChannel at the version of `table`."""
    if table is None:
        return {}
    found: dict[str, Checkpoint] = {}
    for action in table.actions().to_pylist():
        row = table.read(action["path"]).to_pylist()[0]
        pchannel = action[f"partition.{PCHANNEL}"]
        known = found.get(pchannel)
        # More than one file of a PChannel may be live: the newest counts.
        if known is None or known.time_tick < row["time_tick"]:
            found[pchannel] = Checkpoint(
                pchannel,
                row["time_tick"],
                MessageId(row["lc_ledger"], row["lc_entry"], row["lc_index"], row["lc_ordinal"]),
                row["term"],
                json.loads(row["flush_ticks"]),
                row["catalog"],
                action["path"],
            )
    return found


def write_checkpoint(uri: object, checkpoint: Checkpoint) -> list[FileAction]:
    """Write the file of `checkpoint`, to be committed in place of the PChannel's last one."""
    lc = checkpoint.confirmed
    row = {
        "time_tick": checkpoint.time_tick,
        "lc_ledger": lc.ledger,
        "lc_entry": lc.entry,
        "lc_index": lc.index,
        "lc_ordinal": lc.ordinal,
        "term": checkpoint.term,
        "flush_ticks": json.dumps(checkpoint.flush_ticks, sort_keys=True),
        "catalog": checkpoint.catalog_bytes,
        "written_at": time.time_ns() // 1000,
    }
    sink = FileSink.at(uri, CHECKPOINT_COLUMNS, ("time_tick",))
    sink.write(pa.Table.from_pylist([row], schema=CHECKPOINT_COLUMNS), {PCHANNEL: checkpoint.pchannel})
    return sink.finish()


def replaced_checkpoint_files(checkpoint: Checkpoint) -> tuple[str, ...]:
    """Return the file that a PChannel's next checkpoint replaces."""
    return () if checkpoint.path is None else (checkpoint.path,)


def write_segments(uri: object, pchannel: str, events: Iterable[SegmentEvent]) -> list[FileAction]:
    """Write the file of `events`; none if there are no events."""
    rows = [event._asdict() for event in events]
    if not rows:
        return []
    sink = FileSink.at(uri, SEGMENT_COLUMNS, ("segment_id", "time_tick"))
    sink.write(pa.Table.from_pylist(rows, schema=SEGMENT_COLUMNS), {PCHANNEL: pchannel})
    return sink.finish()


def read_segments(
    table: TableHandle | None, *, pchannel: str | None = None, vchannels: Sequence[str] | None = None
) -> pa.Table:
    """Return the newest row of each segment (with ``pchannel``) at the version of `table`, in order of segment ids."""
    schema = _with_pchannel(SEGMENT_COLUMNS)
    if table is None:
        return schema.empty_table()
    parts = [schema.empty_table()]
    for action in table.actions().to_pylist():
        owner = action[f"partition.{PCHANNEL}"]
        if pchannel is None or owner == pchannel:
            rows = align_to_schema(table.read(action["path"]), SEGMENT_COLUMNS)
            parts.append(rows.append_column(PCHANNEL, pa.array([owner] * rows.num_rows, pa.utf8())).cast(schema))
    rows = pa.concat_tables(parts)
    merged = schema.get_field_index("merged_into")
    # A file from before compaction lacks the column.
    rows = rows.set_column(merged, schema.field(merged), pc.fill_null(rows["merged_into"], 0))
    if vchannels is not None:
        rows = rows.filter(pc.is_in(rows["vchannel"], pa.array(list(vchannels), pa.utf8())))
    rows = rows.sort_by([("pchannel", "ascending"), ("segment_id", "ascending"), ("time_tick", "ascending")])
    newest = {
        (row["pchannel"], row["segment_id"]): place
        for place, row in enumerate(rows.select(["pchannel", "segment_id"]).to_pylist())
    }
    return rows.take(pa.array(sorted(newest.values()), pa.int64()))
