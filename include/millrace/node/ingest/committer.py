"""The only committer of the ``wal`` table: of all attempts at a log range, exactly one is committed.

:func:`millrace.storage.commit.commit_fenced` guarantees that; this module defines the fence of a range. A PChannel's
app
transaction carries the last time tick of its last range, which readers need. A range of rejections alone does not move
that
tick. Therefore a second app id, ``<pchannel>/commit``, counts the PChannel's commits. A range is fenced unless both
match
its base. The first commit expects that neither exists.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from typing import Final

from millrace.base.errors import InvalidArgument
from millrace.base.failpoint import hit
from millrace.base.metrics import Metrics
from millrace.node.ingest.ingester import IngestReport
from millrace.node.range_loop.definition import CommitResult
from millrace.node.retention.file_removal import DeploymentFileRemover
from millrace.node.retention.wal_compaction import FAN_IN, compact_once
from millrace.storage.commit import COMMIT_DEADLINE, AppTransaction, CommitPart, commit_fenced
from millrace.storage.table import LogMaintenance
from millrace.tables.wal.table import COMMIT_APP_SUFFIX, WalTable
from millrace.wal.schema import KIND_MESSAGE, KIND_REJECTION, KIND_STATE

WAL_COMMITS: Final = 1000
"""Versions of ``wal`` to keep: four minutes at a streaming node's highest commit rate."""

RETAINED_STATES: Final = 64
"""Newest versions whose entries and replaced files stay whatever their age, where replaced files are removed: earlier
states, to go on from if the newest is damaged (millrace.tables.wal.state_check).
"""

CHECKPOINT_COMMITS: Final = 50
"""Commits between two Delta checkpoints: refreshing a handle costs about 0.13 ms per commit since the last one."""

LOOK_COMMITS: Final = 1000
"""Commits after which the committer looks for files to merge even if it added few: those of days that have ended."""


class WalCommitter:
    """Commits ranges to one table. Call from one thread at a time; any number of committers may run in any number of
    processes.

    """

    def __init__(
        self,
        table: WalTable,
        *,
        metrics: Metrics | None = None,
        deadline: float = COMMIT_DEADLINE,
        checkpoint_commits: int = CHECKPOINT_COMMITS,
        fan_in: int = FAN_IN,
        keep_commits: int = WAL_COMMITS,
        owned: Callable[[], AbstractSet[str] | None] = lambda: None,
        remover: DeploymentFileRemover | None = None,
    ) -> None:
        """Commit to `table`.

        `remover` removes replaced files beside the commits; None: they stay until VACUUM.
        `fan_in` neighbours are merged into one file; 0: none. `owned` returns the PChannels whose files this committer
        merges; None: all.
        """
        self._table = table
        self._metrics = metrics
        self._deadline = deadline
        self._upkeep = LogMaintenance(checkpoint_commits, keep_commits)
        self._fan_in = fan_in
        self._owned = owned
        self._remover = remover
        self._added: Counter[str] = Counter()
        """Files by PChannel since it had nothing to merge."""
        self._until_look = 0
        """Commits after which it looks for files to merge in any case."""

    @property
    def table(self) -> WalTable:
        """The handle that commits use."""
        return self._table

    def commit(self, ranges: Sequence[IngestReport]) -> CommitResult[IngestReport]:
        """Commit every range that still follows the table. A range without files is skipped.

        Raises InvalidArgument for two ranges of one PChannel, and what :func:`commit_fenced` raises.
        """
        started = time.perf_counter()
        pending = [item for item in ranges if item.actions]
        if len({item.pchannel for item in pending}) < len(pending):
            raise InvalidArgument("a commit takes at most one range per PChannel")
        outcome = commit_fenced(
            self._table.table,
            [_part(item) for item in pending],
            deadline=self._deadline,
            maintenance=self._upkeep,
        )
        hit("commit.done")
        result = CommitResult(
            version=outcome.version,
            committed=tuple(item for place, item in enumerate(pending) if place not in outcome.fenced),
            fenced=tuple(item for place, item in enumerate(pending) if place in outcome.fenced),
            conflicts=outcome.conflicts,
            seconds=time.perf_counter() - started,
        )
        self._report(result)
        self._compact(result.committed)
        if self._remover is not None:
            self._remover.after_commit(self._table.table)
        return result

    def _compact(self, committed: Sequence[IngestReport]) -> None:
        """Merge small files where enough were added: the cost of a commit grows with the number of live files."""
        for item in committed:
            self._added[item.pchannel] += sum(file.partition["kind"] != KIND_STATE for file in item.actions)
        self._until_look -= 1
        most = max(self._added.values(), default=0)
        if not self._fan_in or (self._until_look > 0 and most < self._fan_in):
            return
        merged = compact_once(self._table.table, fan_in=self._fan_in, only=self._owned())
        self._until_look = LOOK_COMMITS
        if not merged:
            self._added.clear()
            return
        hit("compaction.done")
        for pchannel in merged:
            del self._added[pchannel]
        self._until_look = 0  # a merged file may be one of the next group

    def _report(self, result: CommitResult[IngestReport]) -> None:
        metrics = self._metrics
        if metrics is None:
            return
        metrics.wal_commit_conflict_total.inc(result.conflicts)
        for item in result.fenced:
            metrics.wal_commit_fenced_total.labels(item.pchannel).inc()
        for item in result.committed:
            metrics.wal_commit_duration_seconds.labels(item.pchannel).observe(result.seconds)
            metrics.wal_committed_bytes_total.labels(item.pchannel).inc(sum(file.size for file in item.actions))
            metrics.wal_committed_rows_total.labels(item.pchannel, KIND_MESSAGE).inc(item.totals.messages)
            metrics.wal_committed_rows_total.labels(item.pchannel, KIND_REJECTION).inc(item.totals.rejections)
            metrics.wal_committed_time_tick.labels(item.pchannel).set(item.last_tick)
            for part, seconds in item.seconds.items():
                metrics.wal_commit_part_duration_seconds.labels(part).observe(seconds)
        if result.committed:
            metrics.wal_commit_part_duration_seconds.labels("commit").observe(result.seconds)


def _part(item: IngestReport) -> CommitPart:
    commits = item.base_commits + 1
    return CommitPart(
        adds=item.actions,
        # The state rows of the base are not checked: the app id at `base_tick` already proves that they are live.
        unchecked_removes=item.replaced_states,
        app_transactions={
            # Both are fences: the number of commits grows even where the tick does not.
            item.pchannel: AppTransaction(item.base_tick, item.last_tick),
            item.pchannel + COMMIT_APP_SUFFIX: AppTransaction(item.base_commits, commits),
        },
        info={
            item.pchannel: {
                "commit": commits,
                "previous_tick": item.base_tick,
                "tick": item.last_tick,
                "position": str(item.position),
                **item.totals.to_json(),
            }
        },
    )
