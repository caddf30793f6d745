"""The ``segments`` and ``checkpoints`` tables: the state of each segment, and the progress of the flusher.

``segments`` gets a row each time the WAL shows a new state of a segment (growing, flushed, dropped); the newest row
counts. ``checkpoints`` has a PChannel's newest row: everything visible up to ``time_tick`` is in the collections'
tables, and a reader continues at the row's LastConfirmed with the row's catalog. Earlier checkpoints are in earlier
versions of the table. ``written_at`` is for people: no decision uses it.

A catalog beyond SMALL_CATALOG is stored as what changed since an earlier row, its *snapshot*, which stays live beside
the newest row and is named by tick and digest (millrace.wal.visible.catalog_changes).
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from millrace.base.errors import TableDamaged
from millrace.base.lru_cache import LruCache
from millrace.message.ids import MessageId
from millrace.storage.file_sink import FileSink
from millrace.storage.parquet_file import FileAction
from millrace.storage.table import TableHandle, create_table
from millrace.tables.collections.data_tables import ensure_columns
from millrace.tables.wal.reader import FIRST_ID
from millrace.wal.visible.catalog import CACHED_BYTES, SegmentEvent, WalCatalog, stored_form
from millrace.wal.visible.catalog_changes import CatalogChanges, CatalogSnapshot, catalog_digest, is_changes
from millrace.wal.visible.collection_rows import align_to_schema

PCHANNEL: Final = "pchannel"

CHANGED_INFO: Final = "changed/"
"""Beginning of a key in the info of a commit to ``checkpoints``; the PChannel follows. Its value is the list of the
collections that the commit's flush changed by rows, deletes or DDL: what follows the tables looks at these alone."""

SMALL_CATALOG: Final = 8 << 10
"""A catalog whose last snapshot has at most this many bytes is stored whole: its file is hardly larger."""

SNAPSHOT_FACTOR: Final = 8
"""A snapshot is written once the changes since the last one have this part of its bytes."""

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
        pa.field("flush_ticks", pa.utf8()),  # of earlier builds; now an empty object: time_tick holds for all
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
    catalog_bytes: bytes = field(default_factory=lambda: WalCatalog().to_bytes())
    path: str | None = None
    """Its file, relative to the table. The next checkpoint's commit removes it, unless it is that one's snapshot."""
    snapshot: CatalogSnapshot | None = None
    """The row with the whole catalog: this one, or the one that this one's changes follow."""
    changes: CatalogChanges = field(default_factory=CatalogChanges)
    """Changes in the catalog since `snapshot`."""

    @property
    def catalog(self) -> WalCatalog:
        """A copy of the catalog to evolve."""
        return WalCatalog.from_bytes(self.catalog_bytes)

    @property
    def base(self) -> int:
        """The app transaction's version that a flusher which planned from here expects; 0 before the first."""
        return self.time_tick

    @property
    def flush_ticks(self) -> dict[str, int]:
        """The tick up to which the tables of each VChannel's collection are whole."""
        return dict.fromkeys(sorted(stored_form(self.catalog_bytes)["vchannels"]), self.time_tick)

    def to_json(self) -> dict[str, Any]:
        """Return what readers need; a flusher does not plan with the result."""
        return {
            "pchannel": self.pchannel,
            "time_tick": self.time_tick,
            "confirmed": str(self.confirmed),
            "term": self.term,
            "catalog": self.catalog_bytes.decode(),
        }

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Checkpoint:
        return cls(
            value["pchannel"],
            value["time_tick"],
            MessageId.parse(value["confirmed"]),
            value["term"],
            value["catalog"].encode(),
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
    live: dict[str, list[str]] = {}
    actions = table.actions()
    for path, pchannel in zip(actions["path"].to_pylist(), actions[f"partition.{PCHANNEL}"].to_pylist(), strict=True):
        live.setdefault(pchannel, []).append(path)
    # More than one row of a PChannel may be live: the newest counts, and perhaps its snapshot.
    return {name: _read_checkpoint(table, name, sorted(paths)) for name, paths in live.items()}


_read: Final[LruCache[tuple[str, ...], Checkpoint]] = LruCache(
    CACHED_BYTES, cost=lambda key, checkpoint: len(checkpoint.catalog_bytes)
)
"""Checkpoints by table and live files: files never change, and a PChannel without news keeps its checkpoint."""


def _read_checkpoint(table: TableHandle, pchannel: str, paths: Sequence[str]) -> Checkpoint:
    key = (table.uri, *paths)
    found = _read.get(key)
    if found is None:
        rows = [_Row(path, table.read(path).to_pylist()[0]) for path in paths]
        found = _checkpoint(pchannel, rows)
        _read.put(key, found)
    return found


class _Row(NamedTuple):
    path: str
    values: dict[str, Any]


def _checkpoint(pchannel: str, live: list[_Row]) -> Checkpoint:
    path, row = max(live, key=lambda each: each.values["time_tick"])
    catalog: bytes = row["catalog"]
    snapshot = CatalogSnapshot(path, row["time_tick"], catalog_digest(catalog), len(catalog))
    changes = CatalogChanges()
    if is_changes(catalog):
        changes = CatalogChanges.from_bytes(catalog)
        for other, each in live:
            whole = each["catalog"]
            snapshot = CatalogSnapshot(other, each["time_tick"], catalog_digest(whole), len(whole))
            if changes.base == (snapshot.time_tick, snapshot.digest):
                catalog = changes.apply(whole)
                break
        else:
            raise TableDamaged(
                f"the checkpoint of {pchannel} at tick {row['time_tick']} holds changes to the one at tick "
                f"{changes.base[0]}, which is not there or is another one: run the operation recovery (mode repair)"
            )
    return Checkpoint(
        pchannel,
        row["time_tick"],
        MessageId(row["lc_ledger"], row["lc_entry"], row["lc_index"], row["lc_ordinal"]),
        row["term"],
        catalog,
        path,
        snapshot,
        changes,
    )


def next_checkpoint(
    base: Checkpoint, *, time_tick: int, confirmed: MessageId, term: int, catalog: WalCatalog
) -> Checkpoint:
    """Return the checkpoint that follows `base`. Its row is a snapshot, or what changed since that of `base`."""
    made = Checkpoint(base.pchannel, time_tick, confirmed, term, catalog.to_bytes())
    if base.snapshot is None or base.snapshot.size <= SMALL_CATALOG:
        return made
    changes = base.changes.extended(base.catalog_bytes, made.catalog_bytes, base.snapshot)
    # A snapshot follows once every row would repeat much of the last one.
    if changes is None or SNAPSHOT_FACTOR * len(changes.to_bytes()) > base.snapshot.size:
        return made
    return replace(made, snapshot=base.snapshot, changes=changes)


def write_checkpoint(uri: object, checkpoint: Checkpoint) -> list[FileAction]:
    """Write the file of `checkpoint`, to be committed in place of what it replaces."""
    lc = checkpoint.confirmed
    row = {
        "time_tick": checkpoint.time_tick,
        "lc_ledger": lc.ledger,
        "lc_entry": lc.entry,
        "lc_index": lc.index,
        "lc_ordinal": lc.ordinal,
        "term": checkpoint.term,
        "flush_ticks": "{}",
        "catalog": checkpoint.catalog_bytes if checkpoint.snapshot is None else checkpoint.changes.to_bytes(),
        "written_at": time.time_ns() // 1000,
    }
    sink = FileSink.at(uri, CHECKPOINT_COLUMNS, ("time_tick",))
    sink.write(pa.Table.from_pylist([row], schema=CHECKPOINT_COLUMNS), {PCHANNEL: checkpoint.pchannel})
    return sink.finish()


def replaced_checkpoint_files(base: Checkpoint, following: Checkpoint) -> tuple[str, ...]:
    """Return the files that a checkpoint which follows `base` takes the place of."""
    current = None if following.snapshot is None else following.snapshot.path
    known = dict.fromkeys((base.path, None if base.snapshot is None else base.snapshot.path))
    return tuple(path for path in known if path is not None and path != current)


def required_checkpoint_files(checkpoint: Checkpoint) -> tuple[str, ...]:
    """Return the files that must be live when `checkpoint` is committed: its changes follow them."""
    return () if checkpoint.snapshot is None else (checkpoint.snapshot.path,)


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
