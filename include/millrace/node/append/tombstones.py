"""A tombstone in the place of an entry that parks its PChannel, so that every host judges the same (law 1).

Allowed only while no host has judged the entry and no commit covers it. The server of the log sees to that in four steps:

1. Its append host is parked at the entry, and still cannot judge it; it follows nothing while it is held.
2. The tombstone is proposed, durably (millrace.log.generations.generation_file). From here on nobody reads the entry, whether as it was or
   as it will be: each read looks at the list behind it.
3. The *fence*: a commit to the ``wal`` table that leaves the PChannel's state as it is, made through the one committer. It goes
   through only from a position that does not cover the entry, and counts as a commit, so that what any task made of the
   entry's old bytes follows from an older base and is fenced, whatever build it has and whenever it comes.
4. The tombstone is placed: every reader sees it.

Where a commit was first the proposal is withdrawn, and nobody has seen anything of it. A server that dies in between leaves
the proposal; the next one completes or withdraws it (:meth:`TombstonePlacer.resume`), and so does the same call again.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any, Final

from millrace.base.errors import LogBusy, MillraceError, TombstoneRefused
from millrace.base.failpoint import hit
from millrace.log.generations.log import GenerationLog
from millrace.log.generations.service import GenerationsService
from millrace.message.ids import LogId
from millrace.message.tombstones import Tombstone, TombstoneMap, entry_sha256
from millrace.node.append.follower import Follower
from millrace.node.append.host import AppendHost
from millrace.node.ingest.committer import WalCommitter
from millrace.node.ingest.ingester import IngestReport, check_not_regressed, process_until_failure
from millrace.node.ingest.wal_writer import WalRangeWriter
from millrace.node.range_loop.failure import RangeFailure
from millrace.tables.wal.state_check import check_state
from millrace.tables.wal.table import WalPosition, WalTable
from millrace.wal.chain import Chain
from millrace.wal.entry_chunks import id_at
from millrace.wal.state import ChannelState

_SECONDS: Final = 20.0
"""How long the append host may take to come to the entry."""
_TRIES: Final = 20

_log = logging.getLogger(__name__)


class TombstonePlacer:
    """Places tombstones in the log of `service`, which `host` follows and the ``wal`` table at `wal` is made from. Thread-safe."""

    def __init__(self, host: AppendHost, service: GenerationsService, wal: str) -> None:
        self._host = host
        self._service = service
        self._wal = wal

    def inspect(self, pchannel: str, entry: LogId) -> dict[str, Any]:
        """What stands at `entry` and why it parks its PChannel: entry, bytes, sha256, physical_ms, judged, committed.

        Raises TombstoneRefused where no tombstone may stand there, and what the log raises.
        """
        with self._host.hold(pchannel, deadline=_SECONDS) as follower:
            log = self._service.open(pchannel)
            try:
                value, physical_ms = log.read_stored(entry)
                failure = _failure(log, follower, pchannel, entry)
            finally:
                log.close()
            committed = self._uncovered(pchannel, entry)
        return {
            "entry": list(entry),
            "bytes": len(value),
            "sha256": entry_sha256(value),
            "physical_ms": physical_ms,
            "judged": f"{failure.code}: {failure.message}",
            "committed": None if committed is None else list(committed),
        }

    def place(self, pchannel: str, entry: LogId, *, sha256: str, author: str, reason: str) -> Tombstone:
        """Replace the entry that parks `pchannel`; the tombstone, once every reader sees it. The PChannel stays parked.

        `sha256` is of the entry's bytes. Repeating it is harmless: the first one's words stand. Raises TombstoneRefused and
        InvalidArgument (nothing was changed), and what log and table raise (then call it again).
        """
        now = datetime.now(UTC).isoformat(timespec="seconds")
        tombstone = Tombstone(pchannel, entry, sha256, author, reason, now)
        with self._host.hold(pchannel, deadline=0.0 if entry in self._standing(pchannel) else _SECONDS) as follower:
            before = self._standing(pchannel).get(entry)
            log = self._service.open(pchannel)
            try:
                if (found := entry_sha256(log.read_stored(entry)[0])) != sha256:
                    raise TombstoneRefused(f"entry {entry} of {pchannel} has the sha256 {found}, not {sha256}")
                if before is None:
                    _failure(log, follower, pchannel, entry)
            finally:
                log.close()
            if before is None:
                self._uncovered(pchannel, entry)
                self._service.file.change(lambda list_: list_.with_tombstone(tombstone))
                hit("tombstone.proposed")
            return self._settled(before or tombstone)

    def resume(self) -> None:
        """Complete or withdraw what a server that died has left."""
        for pchannel, standing in self._service.file.refresh().tombstones.items():
            for entry in [each for each in standing if not standing[each].placed]:
                try:
                    with self._host.hold(pchannel, deadline=0.0):
                        # Whoever asked for it may have asked again meanwhile, and more than that.
                        if (proposal := self._standing(pchannel).get(entry)) is not None:
                            self._settled(proposal)
                except Exception:
                    _log.exception("the tombstone of %s in %s was withdrawn", entry, pchannel)

    def _standing(self, pchannel: str) -> TombstoneMap:
        return self._service.file.refresh().tombstones.get(pchannel, {})

    def _uncovered(self, pchannel: str, entry: LogId) -> LogId | None:
        """Where the PChannel stands in the table now. Raises TombstoneRefused where that is behind the entry."""
        if not WalTable.exists(self._wal):
            return None
        return _uncovered(WalTable.open(self._wal).position(pchannel), entry).position

    def _settled(self, tombstone: Tombstone) -> Tombstone:
        """`tombstone`, proposed or placed, once it is placed. Where it may not be, the proposal is withdrawn. The PChannel is held."""
        if tombstone.placed:
            return tombstone
        pchannel, entry = tombstone.pchannel, tombstone.entry
        try:
            self._fence(pchannel, entry)
        except Exception:
            # The fence itself harms nobody, should it stand after all.
            with suppress(MillraceError, OSError):
                self._service.file.change(lambda list_: list_.without_proposal(pchannel, entry))
            raise
        hit("tombstone.fenced")
        placed = tombstone.as_placed()
        self._service.file.change(lambda list_: list_.with_tombstone(placed))
        hit("tombstone.placed")
        _log.warning(
            "entry %s of %s (sha256 %s) was replaced by a tombstone, by %s: %s",
            entry, pchannel, tombstone.sha256, tombstone.author, tombstone.reason,
        )  # fmt: skip
        return placed

    def _fence(self, pchannel: str, entry: LogId) -> None:
        """Make a commit of the PChannel behind which none follows that was computed before. Raises TombstoneRefused."""
        table = WalTable.create(self._wal)
        log = self._service.open(pchannel)
        try:
            check_state(table, log, pchannel)
        finally:
            log.close()
        committer = WalCommitter(table)
        for _ in range(_TRIES):
            base = _uncovered(table.position(pchannel), entry)
            if committer.commit([_unmoved(base, self._wal)]).committed:
                return
        raise LogBusy(f"other committers of {pchannel} were first {_TRIES} times: try again")


def _failure(log: GenerationLog, follower: Follower | None, pchannel: str, entry: LogId) -> RangeFailure:
    """Why this host cannot judge `entry`, at which it is parked. Raises TombstoneRefused where it can, or stands elsewhere."""
    if follower is None or follower.error is None:
        at = "" if follower is None else f", and has decided what stands before {follower.state.position}"
        raise TombstoneRefused(
            f"the append host is not parked on {pchannel}{at}: only the entry that parks its PChannel can be replaced"
        )
    state = follower.state
    check_not_regressed(log, state)
    found = log.read(state.position, end=entry.following(), max_bytes=1)
    if not found.batch.num_rows or id_at(found.batch, 0) != entry:
        at = str(id_at(found.batch, 0)) if found.batch.num_rows else str(state.position)
        raise TombstoneRefused(
            f"the append host is parked at {at} of {pchannel}, not at {entry}: only the entry that parks it can be replaced"
        )
    _, failure = process_until_failure(Chain(), state, found)
    if failure is None or failure.retriable:
        raise TombstoneRefused(
            f"entry {entry} of {pchannel} can be judged, or could with more memory: run millrace unpark {pchannel}"
        )
    return failure


def _uncovered(base: WalPosition, entry: LogId) -> WalPosition:
    """`base`, which does not cover `entry`. Raises TombstoneRefused where it does: a host has judged it, and that stands."""
    if base.position is not None and base.position > entry:
        raise TombstoneRefused(
            f"the wal table has committed {base.pchannel} up to {base.position}, and entry {entry} with it: what was made of"
            f" it stands. Run the build that judged it, then millrace unpark {base.pchannel}"
        )
    return base


def _unmoved(base: WalPosition, wal: str) -> IngestReport:
    """A range of nothing, whose commit leaves the PChannel's state as it is."""
    state = base.state or ChannelState.new(base.pchannel)
    made = IngestReport.without_effect(base, state.position)
    actions = tuple(WalRangeWriter(wal, base.pchannel).finish(state, base))
    return replace(made, last_tick=state.last_tick, actions=actions, removed_state=base.state_path)
