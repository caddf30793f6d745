"""Tombstones that replace an entry which parks its PChannel, so that every host judges the same (law 1).

A tombstone is allowed only while no host has judged the entry and no commit covers it. The log's server ensures that in
four steps:

1. Its append host is parked at the entry and still cannot judge it. It follows nothing while it is held.
2. The tombstone is proposed durably (millrace.log.generations.listing). From now on nobody reads the entry, in its old
   or its
   new form: each read checks the list afterwards.
3. The *fence*: a commit to the ``wal`` table that leaves the PChannel's state unchanged, made by the one committer. It
   succeeds only from a position before the entry, and counts as a commit. So the result of any task that read the old
   bytes
   follows an older base and is fenced, whatever its build and whenever it arrives.
4. The tombstone is placed: every reader sees it.

If another commit came first, the proposal is withdrawn and nobody has seen it. If a server dies in between, its
proposal stays, and the next server, or the same call again, completes or withdraws it (:meth:`TombstonePlacer.resume`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
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
"""Seconds that the append host may take to reach the entry."""
_TRIES: Final = 20

_log = logging.getLogger(__name__)


class TombstonePlacer:
    """Places tombstones in the log of `service`, which `host` follows and the ``wal`` table at `wal` is made from.
    Thread-safe.
    """

    def __init__(self, host: AppendHost, service: GenerationsService, wal: Callable[[], object]) -> None:
        """`wal` returns the URI of the ``wal`` table."""
        self._host = host
        self._service = service
        self._wal = wal

    def inspect(self, pchannel: str, entry: LogId) -> dict[str, Any]:
        """Describe `entry` and why it parks its PChannel: entry, bytes, sha256, physical_ms, judged, committed.

        Raises TombstoneRefused if the entry cannot be replaced, and errors of the log.
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
        """Replace the entry that parks `pchannel`. Returns the tombstone once every reader sees it. The PChannel stays
        parked.

        `sha256` is of the entry's bytes. Repeating the call is harmless: the first author and reason stay.
        Raises TombstoneRefused and InvalidArgument (nothing was changed), and errors of log and table (then repeat the
        call).
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
        """Complete or withdraw the proposals of a server that died."""
        for pchannel, standing in self._service.file.refresh().tombstones.items():
            for entry in [each for each in standing if not standing[each].placed]:
                try:
                    with self._host.hold(pchannel, deadline=0.0):
                        # The caller may have repeated the call, or done more, in the meantime.
                        if (proposal := self._standing(pchannel).get(entry)) is not None:
                            self._settled(proposal)
                except Exception:
                    _log.exception("the tombstone of %s in %s was withdrawn", entry, pchannel)

    def _standing(self, pchannel: str) -> TombstoneMap:
        return self._service.file.refresh().tombstones.get(pchannel, {})

    def _uncovered(self, pchannel: str, entry: LogId) -> LogId | None:
        """Return the PChannel's position in the table. Raises TombstoneRefused if it is after the entry."""
        if not WalTable.exists(self._wal()):
            return None
        return _uncovered(WalTable.open(self._wal()).position(pchannel), entry).position

    def _settled(self, tombstone: Tombstone) -> Tombstone:
        """Return `tombstone` once it is placed, completing a proposal. The caller holds the PChannel.

        Withdraws the proposal if it may not be placed.
        """
        if tombstone.placed:
            return tombstone
        pchannel, entry = tombstone.pchannel, tombstone.entry
        try:
            self._fence(pchannel, entry)
        except Exception:
            # The fence is harmless even if it is committed after all.
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
        """Commit the PChannel so that no commit computed earlier can follow. Raises TombstoneRefused."""
        table = WalTable.create(self._wal())
        log = self._service.open(pchannel)
        try:
            check_state(table, log, pchannel)
        finally:
            log.close()
        committer = WalCommitter(table)
        for _ in range(_TRIES):
            base = _uncovered(table.position(pchannel), entry)
            if committer.commit([_unmoved(base, self._wal())]).committed:
                return
        raise LogBusy(f"other committers of {pchannel} won {_TRIES} times: retry")


def _failure(log: GenerationLog, follower: Follower | None, pchannel: str, entry: LogId) -> RangeFailure:
    """Return why this host cannot judge `entry`, at which it is parked.

    Raises TombstoneRefused if it can, or if it is parked elsewhere.
    """
    if follower is None or follower.error is None:
        at = "" if follower is None else f"; it has decided everything before {follower.state.position}"
        raise TombstoneRefused(
            f"the append host is not parked on {pchannel}{at}: only the entry that parks its PChannel can be replaced"
        )
    state = follower.state
    check_not_regressed(log, state)
    found = log.read(state.position, end=entry.following(), max_bytes=1)
    if not found.batch.num_rows or id_at(found.batch, 0) != entry:
        at = str(id_at(found.batch, 0)) if found.batch.num_rows else str(state.position)
        raise TombstoneRefused(
            f"the append host is parked at {at} of {pchannel}, not at {entry}: only the entry that parks it "
            "can be replaced"
        )
    _, failure = process_until_failure(Chain(), state, found)
    if failure is None or failure.retriable:
        raise TombstoneRefused(
            f"entry {entry} of {pchannel} can be judged, or could with more memory: run millrace unpark {pchannel}"
        )
    return failure


def _uncovered(base: WalPosition, entry: LogId) -> WalPosition:
    """Return `base`. Raises TombstoneRefused if it covers `entry`: then a host has judged it, and that is final."""
    if base.position is not None and base.position > entry:
        raise TombstoneRefused(
            f"the wal table has committed {base.pchannel} up to {base.position}, and entry {entry} with it."
            f" Its rows are final. Run the build that judged it, then millrace unpark {base.pchannel}"
        )
    return base


def _unmoved(base: WalPosition, wal: object) -> IngestReport:
    """Make an empty range, whose commit leaves the PChannel's state unchanged."""
    state = base.state or ChannelState.new(base.pchannel)
    made = IngestReport.without_effect(base, state.position)
    writer = WalRangeWriter(wal, base.pchannel)
    actions = tuple(writer.finish(state, base))
    return replace(made, last_tick=state.last_tick, actions=actions, replaced_states=writer.replaced_states)
