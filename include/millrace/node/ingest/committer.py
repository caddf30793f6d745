"""The one committer of the ``wal`` table: ranges of any number of attempts come in, each log range goes in once.

What makes it so is :func:`millrace.storage.commit.commit_fenced`; here stands what a range is fenced by. The app transaction of a
PChannel carries the last time tick of its last range, as readers want it. A range that holds only rejections does not move
that tick, so a second app id, ``<pchannel>/commit``, counts the PChannel's commits; each commit raises it by one. A range is
fenced unless both are what its base says. The first commit expects that neither exists.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from typing import Final

from millrace.base.errors import InvalidArgument
from millrace.base.failpoint import hit
from millrace.base.metrics import Metrics
from millrace.node.ingest.ingester import IngestReport
from millrace.node.range_loop.definition import CommitResult
from millrace.node.retention.wal_compaction import compact_once
from millrace.storage.commit import COMMIT_DEADLINE, AppTransaction, CommitPart, commit_fenced
from millrace.storage.table import LogMaintenance
from millrace.tables.wal.table import COMMIT_APP_SUFFIX, WalTable
from millrace.wal.schema import KIND_MESSAGE, KIND_REJECTION

WAL_COMMITS: Final = 1000
"""Versions of ``wal`` that stay behind: four minutes at the fastest that a streaming node commits."""

CHECKPOINT_COMMITS: Final = 50
"""Commits between two Delta checkpoints: a handle's refresh costs about 0.13 ms for each commit since the last one."""

COMPACT_COMMITS: Final = 4
"""Commits between two looks at whether small files can be merged."""


class WalCommitter:
    """Commits ranges to one table. One thread at a time; any number of committers in any number of processes.

    `seam` is called at the places that crash and interleaving tests stop at (see millrace.base.failpoint).
    """

    def __init__(
        self,
        table: WalTable,
        *,
        metrics: Metrics | None = None,
        deadline: float = COMMIT_DEADLINE,
        checkpoint_commits: int = CHECKPOINT_COMMITS,
        compact_commits: int = COMPACT_COMMITS,
        keep_commits: int = WAL_COMMITS,
        owned: Callable[[], AbstractSet[str] | None] = lambda: None,
        seam: Callable[[str], None] = hit,
    ) -> None:
        """`owned`: the PChannels whose files this committer merges; None: all."""
        self._table = table
        self._metrics = metrics
        self._deadline = deadline
        self._upkeep = LogMaintenance(checkpoint_commits, keep_commits)
        self._compact_commits = compact_commits
        self._owned = owned
        self._commits = 0
        self._seam = seam

    @property
    def table(self) -> WalTable:
        """The handle that commits go through."""
        return self._table

    def commit(self, ranges: Sequence[IngestReport]) -> CommitResult[IngestReport]:
        """Commit every range of `ranges` that still follows what the table holds; one without files is left out.

        Raises InvalidArgument for two ranges of one PChannel, and what :func:`commit_fenced` does.
        """
        started = time.perf_counter()
        pending = [item for item in ranges if item.actions]
        if len({item.pchannel for item in pending}) < len(pending):
            raise InvalidArgument("a commit takes one range of a PChannel")
        outcome = commit_fenced(
            self._table.table,
            [_part(item) for item in pending],
            deadline=self._deadline,
            maintenance=self._upkeep,
            seam=self._seam,
        )
        self._seam("commit.done")
        result = CommitResult(
            version=outcome.version,
            committed=tuple(item for place, item in enumerate(pending) if place not in outcome.fenced),
            fenced=tuple(item for place, item in enumerate(pending) if place in outcome.fenced),
            conflicts=outcome.conflicts,
            seconds=time.perf_counter() - started,
        )
        self._report(result)
        self._compact()
        return result

    def _compact(self) -> None:
        """Merge small files now and then: what a commit costs grows with the live files."""
        self._commits += 1
        if self._commits % self._compact_commits == 0 and compact_once(self._table.table, only=self._owned()):
            self._seam("compaction.done")

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
        unchecked_removes=() if item.removed_state is None else (item.removed_state,),
        app_transactions={
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
