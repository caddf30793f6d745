"""Verification of a checkpoint by replay.

Running the log through the chain again, from an earlier state, must give the rows and the state of the WAL. Four things
must agree over the range [earlier position, checkpoint): the digest by which the commits' totals differ, the digest of
the stored rows, the digest of the rows that the chain makes of the log now, and the end state, byte for byte. If the
log no longer has the range (truncated by hand), the stored rows are evolved instead, and the log is not verified.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc

from millrace.base.errors import MillraceError, PositionTruncated
from millrace.log.protocol import Log
from millrace.message.ids import LogId, MessageId
from millrace.tables.wal.log_replay import replay_totals
from millrace.tables.wal.reader import WalSnapshot
from millrace.tables.wal.table import WalPosition, WalTable, WalTotals
from millrace.wal.chain import replay
from millrace.wal.digest import WalDigest, digest_rows
from millrace.wal.rows import rows_in_order
from millrace.wal.schema import KIND_MESSAGE, KIND_REJECTION, ROW_SCHEMA, complete_rows
from millrace.wal.state import ChannelState

MAX_LOOKBACK_STEPS: Final = 12
"""Earlier table versions to try for a nearer state: 1, 2, 4 ... commits back."""


@dataclass(frozen=True, slots=True)
class VerificationStart:
    """The start of a replay: a state, and the totals of the WAL up to there."""

    state: ChannelState
    totals: WalTotals
    contiguous: bool
    """Whether the replay continues the last checkpoint without a gap."""


@dataclass(frozen=True, slots=True)
class Verification:
    """The result of a replay."""

    start: LogId
    rows: int
    by_log: bool
    """Whether the log was run through the chain. Otherwise the stored rows were evolved."""
    problem: str = ""
    """Reason that the checkpoint must not be trusted. Empty if everything agrees."""


def choose_start(
    wal: WalTable, position: WalPosition, earlier: tuple[ChannelState, WalTotals] | None, *, max_bytes: int
) -> VerificationStart:
    """Choose the last checkpoint, if the WAL grew by `max_bytes` at most since; else the nearest state of an older
    version.
    """
    state, totals = earlier or (ChannelState.new(position.pchannel), WalTotals())
    if _bytes_since(wal, position.pchannel, state.position) <= max_bytes:
        return VerificationStart(state, totals, contiguous=True)
    nearest: VerificationStart | None = None
    for power in range(MAX_LOOKBACK_STEPS):
        version = position.version - (1 << power)
        found = _at_version(wal, position.pchannel, version) if version > 0 else None
        if found is None or found[0].position <= state.position:
            break
        if nearest is not None and _bytes_since(wal, position.pchannel, found[0].position) > max_bytes:
            break
        if found[0].position < _position(position):
            nearest = VerificationStart(*found, contiguous=False)
    return nearest or VerificationStart(state, totals, contiguous=True)


def verify_checkpoint(
    wal: WalTable, snapshot: WalSnapshot, position: WalPosition, start: VerificationStart, log: Log | None
) -> Verification:
    """Replay [start, position) and compare. `wal` and `snapshot` must be of one version."""
    pchannel, begin, end = position.pchannel, start.state.position, _position(position)
    messages = _messages(snapshot, pchannel, begin)
    rejections = _rejections(wal, pchannel, begin)
    by_log = log is not None and log.describe().begin <= begin
    expected = position.totals.digest - start.totals.digest
    stored = digest_rows(rejections)
    try:
        if by_log:
            assert log is not None
            for rows in messages:
                stored += digest_rows(rows)
            state, totals = replay_totals(log, start.state, WalTotals(), until=end)
            given = totals.digest
        else:
            rows = pa.concat_tables([ROW_SCHEMA.empty_table(), *messages])
            stored += digest_rows(rows)
            given, state = expected, _evolve(start.state, rows, rejections, position)
    except MillraceError as error:
        if by_log and isinstance(error, PositionTruncated):  # this part of the log was truncated meanwhile
            return verify_checkpoint(wal, snapshot, position, start, None)
        return Verification(begin, stored.rows, by_log, f"{error.code}: {error}")
    return Verification(begin, stored.rows, by_log, _compare(expected, stored, given, state, position))


def _compare(
    expected: WalDigest, stored: WalDigest, replayed: WalDigest, state: ChannelState, position: WalPosition
) -> str:
    if stored != expected:
        return f"the WAL stores {stored} since the earlier checkpoint, but its commits counted {expected}"
    if replayed != expected:
        return f"the log gives {replayed} through the chain, but the WAL holds {expected}"
    if state.to_bytes() != position.state_bytes:
        return "the replay ends in a channel state that differs from the one in the WAL"
    return ""


def _evolve(state: ChannelState, messages: pa.Table, rejections: pa.Table, position: WalPosition) -> ChannelState:
    committed = position.state
    assert committed is not None
    return replay(
        state,
        rows_in_order(messages, rejections),
        position=committed.position,
        last_tick=committed.last_tick,
        last_entry=committed.last_entry,
        last_entry_crc=committed.last_entry_crc,
    )


def _messages(snapshot: WalSnapshot, pchannel: str, begin: LogId) -> Iterator[pa.Table]:
    return snapshot.messages(pchannel, start=MessageId(*begin, 0, 0))


def _rejections(wal: WalTable, pchannel: str, begin: LogId) -> pa.Table:
    """Return the rejections of entries from `begin` on. Files that end before it are not opened."""
    parts = [ROW_SCHEMA.empty_table()]
    for name, _, last in _files(wal, pchannel, KIND_REJECTION):
        if last >= begin:
            rows = complete_rows(wal.table.read(name))
            later = pc.or_(
                pc.greater(rows["ledger"], begin.ledger),
                pc.and_(pc.equal(rows["ledger"], begin.ledger), pc.greater_equal(rows["entry"], begin.entry)),
            )
            parts.append(rows.filter(later))
    return pa.concat_tables(parts)


def _bytes_since(wal: WalTable, pchannel: str, begin: LogId) -> int:
    """Return the bytes of the files with messages of entries from `begin` on."""
    return sum(size for _, size, last in _files(wal, pchannel, KIND_MESSAGE) if last >= begin)


def _files(wal: WalTable, pchannel: str, kind: str) -> list[tuple[str, int, LogId]]:
    """Return (path, bytes, last entry) of the live files, from the Delta log alone."""
    actions = wal.table.actions()
    if actions.num_rows == 0:
        return []
    mine = pc.and_(pc.equal(actions["partition.kind"], kind), pc.equal(actions["partition.pchannel"], pchannel))
    rows = actions.filter(mine).select(["path", "size_bytes", "max.ledger", "max.entry"]).to_pylist()
    return [(row["path"], row["size_bytes"], LogId(row["max.ledger"], row["max.entry"])) for row in rows]


def _at_version(wal: WalTable, pchannel: str, version: int) -> tuple[ChannelState, WalTotals] | None:
    """Return the state and totals of an older version, or None if that version is gone."""
    position = wal.position_at(pchannel, version)
    state = None if position is None else position.state
    return None if position is None or state is None else (state, position.totals)


def _position(position: WalPosition) -> LogId:
    state = position.state
    assert state is not None
    return state.position
