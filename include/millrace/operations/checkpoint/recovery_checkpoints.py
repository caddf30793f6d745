"""The Delta table ``recovery_checkpoints``: states of a PChannel's chain that a replay has confirmed.

A row is everything that a recovery starts from: the state, the next log position, LastConfirmed, tick, term, and the
totals of the WAL up to there. Later rows of the WAL can thus be verified without earlier ones. The newest
RETAINED_CHECKPOINTS rows of a PChannel are live; earlier ones are in earlier versions of the table. Writes are fenced
by the PChannel's number of WAL commits.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import pyarrow as pa

from millrace.base.failpoint import hit
from millrace.base.settings import Settings
from millrace.message.ids import LogId, MessageId
from millrace.storage.commit import AppTransaction, CommitPart, commit_fenced
from millrace.storage.file_sink import FileSink
from millrace.storage.parquet_file import read_file
from millrace.storage.store import TableStore, store_at
from millrace.storage.table import TableHandle, create_table, open_table
from millrace.tables.wal.table import WalPosition, WalTotals
from millrace.wal.chain import CHAIN_VERSION, last_confirmed
from millrace.wal.digest import WalDigest
from millrace.wal.state import ChannelState

PCHANNEL: Final = "pchannel"
RETAINED_CHECKPOINTS: Final = 8
"""Live rows per PChannel."""

COLUMNS: Final = pa.schema(
    [
        pa.field("time_tick", pa.int64()),
        pa.field("ledger", pa.int64()),  # the next entry of the log
        pa.field("entry", pa.int64()),
        pa.field("lc_ledger", pa.int64()),  # LastConfirmed, a message id in four columns
        pa.field("lc_entry", pa.int64()),
        pa.field("lc_index", pa.int32()),
        pa.field("lc_ordinal", pa.int32()),
        pa.field("term", pa.int64()),
        pa.field("commits", pa.int64()),  # commits of the PChannel to `wal`
        pa.field("messages", pa.int64()),
        pa.field("rejections", pa.int64()),
        pa.field("digest", pa.utf8()),
        pa.field("wal_version", pa.int64()),
        pa.field("chain_version", pa.int32()),
        pa.field("verified_by", pa.utf8()),  # replayed or sampled
        pa.field("replayed_from", pa.utf8()),  # the log position where the replay began
        pa.field("replayed_rows", pa.int64()),
        pa.field("state", pa.binary()),
        pa.field("written_at", pa.timestamp("us", tz="UTC")),
    ]
)
"""Columns of the files. The table is partitioned by PChannel."""


@dataclass(frozen=True, slots=True)
class RecoveryCheckpoint:
    """One verified state of a PChannel."""

    pchannel: str
    time_tick: int
    position: LogId
    confirmed: MessageId
    term: int
    commits: int
    totals: WalTotals
    wal_version: int
    state_bytes: bytes
    verified_by: str = "replayed"
    replayed_from: LogId = LogId(0, 0)  # noqa: RUF009 - a value
    replayed_rows: int = 0
    chain_version: int = CHAIN_VERSION
    path: str = ""
    """File of the checkpoint, relative to the table."""

    @property
    def state(self) -> ChannelState:
        return ChannelState.from_bytes(self.state_bytes)

    @classmethod
    def of(
        cls, position: WalPosition, *, verified_by: str, replayed_from: LogId, replayed_rows: int
    ) -> RecoveryCheckpoint:
        """Return the checkpoint at a position of the WAL."""
        state = position.state
        assert state is not None
        return cls(
            pchannel=position.pchannel,
            time_tick=position.last_tick,
            position=state.position,
            confirmed=last_confirmed(state),
            term=state.term,
            commits=position.commits,
            totals=position.totals,
            wal_version=position.version,
            state_bytes=state.to_bytes(),
            verified_by=verified_by,
            replayed_from=replayed_from,
            replayed_rows=replayed_rows,
        )


def recovery_checkpoints_uri(settings: Settings) -> str:
    return settings.table_uri("recovery_checkpoints")


def newest(settings: Settings, pchannel: str | None = None) -> dict[str, RecoveryCheckpoint]:
    """Return the newest checkpoint of each PChannel, or of one. Reads one small file for each."""
    path = recovery_checkpoints_uri(settings)
    table = open_table(path)
    if table is None:
        return {}
    found: dict[str, tuple[int, str]] = {}
    for owner, commits, name in _live(table):
        if pchannel in (None, owner) and (owner not in found or found[owner][0] < commits):
            found[owner] = (commits, name)
    return {owner: _read(table.store, name, owner) for owner, (_, name) in sorted(found.items())}


def history(settings: Settings, pchannel: str) -> list[RecoveryCheckpoint]:
    """Return the live checkpoints of a PChannel, oldest first."""
    return [load(settings, pchannel, name) for owner, name in live_files(settings) if owner == pchannel]


def live_files(settings: Settings) -> list[tuple[str, str]]:
    """Return (PChannel, file) of each live checkpoint, oldest first per PChannel, for :func:`load`."""
    table = open_table(recovery_checkpoints_uri(settings))
    return [(owner, name) for owner, _, name in sorted(_live(table) if table else [])]


def load(settings: Settings, pchannel: str, name: str) -> RecoveryCheckpoint:
    """Read the checkpoint in one file. Raises OSError or a pyarrow error if the file is missing or damaged."""
    return _read(store_at(recovery_checkpoints_uri(settings)), name, pchannel)


def remove(settings: Settings, names: Sequence[str]) -> int:
    """Remove the live files among `names` from the table and return their number.

    The next run writes a new checkpoint.
    """
    table = open_table(recovery_checkpoints_uri(settings))
    gone = [(owner, name) for owner, _, name in (_live(table) if table else []) if name in names]
    if table is None or not gone:
        return 0
    if commit_fenced(table, [CommitPart(removes=[name for _, name in gone])]).fenced:
        return 0  # a checkpoint run removed them meanwhile
    return len(gone)


def write(settings: Settings, checkpoint: RecoveryCheckpoint) -> bool:
    """Commit `checkpoint`. Return False if the table has one that is as new or newer."""
    path = recovery_checkpoints_uri(settings)
    table = create_table(path, pa.schema([*COLUMNS, pa.field(PCHANNEL, pa.utf8())]), partition_by=[PCHANNEL])
    base = table.app_version(checkpoint.pchannel)
    if base >= checkpoint.commits:
        return False
    sink = FileSink.at(path, COLUMNS, ("commits", "time_tick"))
    sink.write(pa.Table.from_pylist([_row(checkpoint)], schema=COLUMNS), {PCHANNEL: checkpoint.pchannel})
    actions = sink.finish()
    live = sorted((commits, name) for owner, commits, name in _live(table) if owner == checkpoint.pchannel)
    removes = [name for _, name in live[: max(0, len(live) + 1 - RETAINED_CHECKPOINTS)]]
    part = CommitPart(actions, removes, {checkpoint.pchannel: AppTransaction(base, checkpoint.commits)})
    hit("checkpoint.confirmed")
    if commit_fenced(table, [part]).fenced:
        return False
    hit("checkpoint.recorded")
    return True


def _live(table: TableHandle) -> list[tuple[str, int, str]]:
    """Return (PChannel, commits, file) of each live row, from the Delta log alone."""
    return [(row[f"partition.{PCHANNEL}"], row["min.commits"], row["path"]) for row in table.actions().to_pylist()]


def _read(store: TableStore, name: str, pchannel: str) -> RecoveryCheckpoint:
    row = read_file(store, name).to_pylist()[0]
    return RecoveryCheckpoint(
        pchannel=pchannel,
        time_tick=row["time_tick"],
        position=LogId(row["ledger"], row["entry"]),
        confirmed=MessageId(row["lc_ledger"], row["lc_entry"], row["lc_index"], row["lc_ordinal"]),
        term=row["term"],
        commits=row["commits"],
        totals=WalTotals(row["messages"], row["rejections"], WalDigest.parse(row["digest"])),
        wal_version=row["wal_version"],
        state_bytes=row["state"],
        verified_by=row["verified_by"],
        replayed_from=LogId.parse(row["replayed_from"]),
        replayed_rows=row["replayed_rows"],
        chain_version=row["chain_version"],
        path=name,
    )


def _row(checkpoint: RecoveryCheckpoint) -> dict[str, Any]:
    lc = checkpoint.confirmed
    return {
        "time_tick": checkpoint.time_tick,
        "ledger": checkpoint.position.ledger,
        "entry": checkpoint.position.entry,
        "lc_ledger": lc.ledger,
        "lc_entry": lc.entry,
        "lc_index": lc.index,
        "lc_ordinal": lc.ordinal,
        "term": checkpoint.term,
        "commits": checkpoint.commits,
        "messages": checkpoint.totals.messages,
        "rejections": checkpoint.totals.rejections,
        "digest": str(checkpoint.totals.digest),
        "wal_version": checkpoint.wal_version,
        "chain_version": checkpoint.chain_version,
        "verified_by": checkpoint.verified_by,
        "replayed_from": str(checkpoint.replayed_from),
        "replayed_rows": checkpoint.replayed_rows,
        "state": checkpoint.state_bytes,
        "written_at": time.time_ns() // 1000,
    }
