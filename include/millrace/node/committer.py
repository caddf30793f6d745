"""The one committer of the ``wal`` table: ranges of any number of attempts come in, each log range goes in once.

A commit is: (1) check that each PChannel stands where its range began, and drop the ranges of those that do not; (2) commit
all others in one Delta transaction from the very snapshot that was checked; (3) where somebody else committed in
between, refresh and go to (1). There is no refresh between (1) and (2), and delta-rs is allowed no retry of its own, so the
version that (2) writes is the successor of the one that (1) saw. All of it happens under the lease that keeps the log from
being trimmed (millrace.tables.delta_log), from a version that the log still has.

The fence. The app transaction of a PChannel carries the last time tick of its last range, as readers want it. A range that
holds only rejections does not move that tick, and app transactions are never compared by delta-rs, so a second app
id, ``<pchannel>/commit``, counts the PChannel's commits; each commit raises it by one. A range is fenced unless both are what
its base says. The first commit expects that neither exists.

A file is deleted only where no commit that names it was ever tried: after an ambiguous failure the commit may stand. VACUUM
takes the rest.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from deltalake import CommitProperties, PostCommitHookProperties, Transaction
from deltalake.exceptions import CommitFailedError, DeltaError
from deltalake.transaction import AddAction, RemoveAction

from millrace.errors import DeadlineExceeded, InvalidArgument
from millrace.failpoint import hit
from millrace.metrics import Metrics
from millrace.node.ranges import RangeReport
from millrace.node.wal_compaction import compact_once
from millrace.node.wal_writer import FileAction
from millrace.pauses import jittered
from millrace.tables.delta_log import WAL_COMMITS, commit_lease, trim
from millrace.tables.wal_table import (
    COMMIT_APP_SUFFIX,
    TABLE_SCHEMA,
    WalTable,
    sync_log,
)
from millrace.wal.schema import KIND_MESSAGE, KIND_REJECTION, KIND_STATE, PARTITION_COLUMNS

METADATA_KEY: Final = "millrace"
"""Key in a commit's info under which each PChannel's range is described."""

DEFAULT_DEADLINE: Final = 60.0

CHECKPOINT_COMMITS: Final = 50
"""Commits between two Delta checkpoints: a handle's refresh costs about 0.13 ms for each commit since the last one."""

COMPACT_COMMITS: Final = 4
"""Commits between two looks at whether small files can be merged."""

_NO_HOOKS: Final = PostCommitHookProperties(create_checkpoint=False, cleanup_expired_logs=False)
_PAUSE: Final = (0.01, 1.0)


@dataclass(frozen=True, slots=True)
class CommitResult:
    """What became of the ranges of one call."""

    version: int
    """Of the table, behind the commit."""
    committed: tuple[RangeReport, ...]
    fenced: tuple[RangeReport, ...]
    """Another committer was first; their PChannels are planned anew."""
    conflicts: int
    seconds: float


class Committer:
    """Commits ranges to one table. One thread at a time; any number of committers in any number of processes.

    `seam` is called at the places that crash and interleaving tests stop at (see millrace.failpoint).
    """

    def __init__(
        self,
        table: WalTable,
        *,
        metrics: Metrics | None = None,
        deadline: float = DEFAULT_DEADLINE,
        checkpoint_commits: int = CHECKPOINT_COMMITS,
        compact_commits: int = COMPACT_COMMITS,
        keep_commits: int = WAL_COMMITS,
        seam: Callable[[str], None] = hit,
    ) -> None:
        self._table = table
        self._metrics = metrics
        self._deadline = deadline
        self._checkpoint_commits = checkpoint_commits
        self._compact_commits = compact_commits
        self._keep_commits = keep_commits
        self._checkpointed = table.version
        self._commits = 0
        self._seam = seam

    @property
    def table(self) -> WalTable:
        """The handle that commits go through."""
        return self._table

    def commit(self, ranges: Sequence[RangeReport]) -> CommitResult:
        """Commit every range of `ranges` that still follows what the table holds; one without files is left out.

        Raises InvalidArgument for two ranges of one PChannel; DeadlineExceeded where other committers or the storage kept
        it from committing (its files stay: the commit may stand); DeltaError for what no retry can mend.
        """
        started = time.perf_counter()
        pending = [item for item in ranges if item.actions]
        if len({item.pchannel for item in pending}) < len(pending):
            raise InvalidArgument("a commit takes one range of a PChannel")
        with commit_lease(self._table.path):
            if not self._table.stands():
                self._table.refresh()
            result = self._commit(pending, started)
        self._report(result)
        self._compact()
        self._checkpoint()
        return result

    def _commit(self, pending: list[RangeReport], started: float) -> CommitResult:
        deadline = time.monotonic() + self._deadline
        committed: list[RangeReport] = []
        fenced: list[RangeReport] = []
        attempts, conflicts, pause, idle = 0, 0, _PAUSE[0], 0
        while pending:
            standing = [item for item in pending if self._follows(item)]
            for item in pending:
                if item in standing:
                    continue
                if attempts and self._is_ours(item):
                    committed.append(item)  # the attempt that seemed to fail did not
                else:
                    fenced.append(item)
                    if not attempts:
                        self._delete_files(item)
            pending = standing
            self._seam("commit.checked")
            if not pending:
                break
            attempts += 1
            checked = self._table.version
            try:
                self._write(pending)
            except DeltaError as error:
                if time.monotonic() >= deadline:
                    raise DeadlineExceeded(
                        f"no commit to {self._table.path} in {self._deadline:.0f} s: {error}"
                    ) from error
                self._table.refresh()
                if self._table.version == checked:  # nobody was first: it is the storage, or the commit itself
                    idle += 1
                    if not isinstance(error, CommitFailedError) or idle > 3:
                        raise
                    time.sleep(jittered(pause))
                    pause = min(pause * 2, _PAUSE[1])
                else:
                    conflicts += 1
                continue
            committed.extend(pending)
            pending = []
            self._table.refresh()
            sync_log(self._table.path, checked + 1)
        self._seam("commit.done")
        if not committed and fenced:
            self._table.refresh()
        return CommitResult(
            version=self._table.version,
            committed=tuple(committed),
            fenced=tuple(fenced),
            conflicts=conflicts,
            seconds=time.perf_counter() - started,
        )

    def _follows(self, item: RangeReport) -> bool:
        return (
            self._table.commits(item.pchannel) == item.base_commits
            and self._table.last_tick(item.pchannel) == item.base_tick
        )

    def _is_ours(self, item: RangeReport) -> bool:
        if self._table.commits(item.pchannel) != item.base_commits + 1:
            return False
        state = next(action.path for action in item.actions if action.kind == KIND_STATE)
        return self._table.position(item.pchannel).state_path == state

    def _write(self, ranges: Sequence[RangeReport]) -> None:
        now = int(time.time() * 1000)
        actions: list[AddAction | RemoveAction] = []
        apps: list[Transaction] = []
        described: dict[str, Any] = {}
        for item in ranges:
            actions.extend(_add(item.pchannel, action, now) for action in item.actions)
            if item.removed_state is not None:
                actions.append(_remove_state(item.pchannel, item.removed_state, now))
            apps.append(Transaction(item.pchannel, item.last_tick))
            apps.append(Transaction(item.pchannel + COMMIT_APP_SUFFIX, item.base_commits + 1))
            described[item.pchannel] = {
                "commit": item.base_commits + 1,
                "previous_tick": item.base_tick,
                "tick": item.last_tick,
                "position": str(item.position),
                **item.totals.to_json(),
            }
        self._table.delta.create_write_transaction(
            actions,
            mode="append",
            schema=TABLE_SCHEMA,
            partition_by=list(PARTITION_COLUMNS),
            commit_properties=CommitProperties(
                app_transactions=apps, max_commit_retries=0, custom_metadata={METADATA_KEY: described}
            ),
            post_commithook_properties=_NO_HOOKS,
        )

    def _delete_files(self, item: RangeReport) -> None:
        for action in item.actions:
            (self._table.path / action.path).unlink(missing_ok=True)

    def _compact(self) -> None:
        """Merge small files now and then: what a commit costs grows with the live files."""
        self._commits += 1
        if self._commits % self._compact_commits == 0 and compact_once(self._table.delta, self._table.path):
            self._seam("compaction.done")

    def _checkpoint(self) -> None:
        """Write a Delta checkpoint now and then, and start from it: what a refresh costs grows with the commits since.

        Then the log is cleaned up behind older ones: what a commit costs grows with the entries of its folder, too.
        """
        if self._table.version - self._checkpointed < self._checkpoint_commits:
            return
        self._table.delta.create_checkpoint()
        self._seam("checkpoint.written")
        trim(self._table.path, keep=self._keep_commits)
        self._table.reopen()
        self._checkpointed = self._table.version

    def _report(self, result: CommitResult) -> None:
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


def _add(pchannel: str, action: FileAction, now: int) -> AddAction:
    return AddAction(
        path=action.path,
        size=action.size,
        partition_values={"kind": action.kind, "pchannel": pchannel, "date": action.date},
        modification_time=now,
        data_change=True,
        stats=action.stats(),
    )


def _remove_state(pchannel: str, path: str, now: int) -> RemoveAction:
    date = path.partition("/date=")[2].partition("/")[0]
    return RemoveAction(
        path=path,
        data_change=True,
        deletion_timestamp=now,
        partition_values={"kind": KIND_STATE, "pchannel": pchannel, "date": date},
    )
