"""What compaction commits, and the order that makes it safe beside the flusher and beside another compaction.

Two app transactions of its own in a collection's rows table. ``millrace/rewrites`` counts the commits that replaced files:
each moves it by one, so that of two rewriters at work on one table the second is fenced. Whoever else removes files of a
collection's table moves it, too. ``millrace/folded`` is the tick up to which no dead row is in the table any more: deletes
up to it have nothing left to hit. The flusher's app ids are never touched; its commits and these meet only in the
version number, and whoever comes second tries again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from deltalake import CommitProperties, DeltaTable, PostCommitHookProperties
from deltalake.exceptions import CommitFailedError
from deltalake.transaction import RemoveAction

from millrace.errors import DeadlineExceeded
from millrace.failpoint import hit
from millrace.ops.compaction.files import Group
from millrace.ops.compaction.report import TableWork
from millrace.ops.compaction.rewrite import Job, Mapper, Rewritten
from millrace.tables.collection_table import BASE_TICK, FOLDED, REWRITES, base_tick
from millrace.tables.delta_files import ATTEMPTS, AppMove, Fenced, commit, drop_files
from millrace.tables.delta_log import commit_lease
from millrace.tables.fsync import sync

_HOOKS: Final = PostCommitHookProperties(create_checkpoint=False, cleanup_expired_logs=False)

COMMIT_GROUPS: Final = 64
"""Groups of files that one commit replaces at most."""

Seam = Callable[[str], None]


@dataclass(slots=True)
class Replacer:
    """Commits rewritten groups to one table. `rewrites` is where the table stood when the groups were planned."""

    table: DeltaTable
    path: Path
    rewrites: int | None
    seam: Seam = hit
    superseded: bool = False
    """Another rewriter was first: nothing more goes through from this plan."""
    given_up: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, table: DeltaTable, path: Path, *, seam: Seam = hit) -> Replacer:
        return cls(table, path, table.transaction_version(REWRITES), seam)

    def replace(self, done: Sequence[Rewritten]) -> list[Rewritten]:
        """Commit the groups of `done` as one; those that went through. What did not leaves no file behind."""
        good = []
        for each in done:
            if each.error is not None:
                self.given_up.append(f"{each.group.paths[0]} and {len(each.group.files) - 1} more: {each.error}")
            elif not each.unchanged:
                good.append(each)
        while good:
            if self.superseded:
                self._drop(good, "another compaction was first")
                return []
            try:
                self._commit(good)
            except Fenced as error:
                moved = set(error.app_ids)
                self.superseded = REWRITES in moved
                late = good if self.superseded else [each for each in good if moved.intersection(each.group.paths)]
                if error.attempted:
                    # A commit that failed in an unknown way may have named the files after all: VACUUM takes what it did not.
                    self.given_up += [f"{each.group.paths[0]}: replaced meanwhile" for each in late]
                else:
                    self._drop(late, "replaced meanwhile")
                good = [each for each in good if each not in late]
                continue
            return good
        return []

    def _commit(self, done: Sequence[Rewritten]) -> None:
        now = int(time.time() * 1000)
        removes = [
            RemoveAction(name, False, now, partition_values=each.group.partition)
            for each in done
            for name in each.group.paths
        ]
        commit(
            self.table,
            [action for each in done for action in each.actions],
            moves={REWRITES: AppMove(self.rewrites, (self.rewrites or 0) + 1)},
            removes=removes,
            data_change=False,
            seam=self.seam,
        )
        self.rewrites = (self.rewrites or 0) + 1
        self.seam("compact.replaced")

    def _drop(self, done: Sequence[Rewritten], words: str) -> None:
        for each in done:
            drop_files(self.path, each.actions)
            self.given_up.append(f"{each.group.paths[0]} and {len(each.group.files) - 1} more: {words}")

    def mark_folded(self, tick: int) -> bool:
        """Record that no row that is dead at `tick` is left; False where another rewriter was in between."""
        have = self.table.transaction_version(FOLDED)
        moves = {
            REWRITES: AppMove(self.rewrites, (self.rewrites or 0) + 1),
            FOLDED: AppMove(have, max(tick, have or 0)),
        }
        try:
            commit(self.table, [], moves=moves, data_change=False, seam=self.seam)
        except Fenced:
            return False
        self.rewrites = (self.rewrites or 0) + 1
        self.seam("compact.folded")
        return True


def replace_groups(replacer: Replacer, job: Job, groups: Sequence[Group], mapper: Mapper, work: TableWork) -> TableWork:
    """Rewrite `groups` and commit them, a few at a time, so that a long run keeps what it has done; `work` with the outcome."""
    done: list[Rewritten] = []
    for start in range(0, len(groups), COMMIT_GROUPS):
        if replacer.superseded:
            replacer.given_up.append(f"{len(groups) - start} groups: another compaction was first")
            break
        done += replacer.replace(list(mapper(job, groups[start : start + COMMIT_GROUPS])))
    return work.model_copy(
        update={
            "files_removed": work.files_removed + sum(len(each.group.files) for each in done),
            "files_added": work.files_added + sum(len(each.actions) for each in done),
            "rows": work.rows + sum(each.rows_out for each in done),
            "rows_removed": work.rows_removed + sum(each.rows_in - each.rows_out for each in done),
            "bytes_read": work.bytes_read + sum(each.group.size for each in done),
            "bytes_written": work.bytes_written + sum(action.size for each in done for action in each.actions),
            "given_up": [*replacer.given_up],
        }
    )


def folded_tick(table: DeltaTable | None) -> int:
    """The tick up to which the rows table holds no dead row; 0 before the first fold."""
    return 0 if table is None else int(table.transaction_version(FOLDED) or 0)


def raise_base(table: DeltaTable, path: Path, tick: int, *, seam: Seam = hit) -> int:
    """Have the rows table say that it can be read from `tick` on, before any row that is dead there goes; its base tick.

    It never goes back: a commit is made from the very version that was looked at, or not at all.
    """
    with commit_lease(path):
        table.update_incremental()
        for _ in range(ATTEMPTS):
            have = base_tick(table)
            if have >= tick:
                return have
            seam("compact.checked")
            looked_at = int(table.version())
            try:
                table.alter.set_table_properties(
                    {BASE_TICK: str(tick)},
                    raise_if_not_exists=False,
                    commit_properties=CommitProperties(max_commit_retries=0),
                    post_commithook_properties=_HOOKS,
                )
            except CommitFailedError:
                table.update_incremental()
                if int(table.version()) == looked_at:
                    raise
                continue
            sync(path / "_delta_log" / f"{looked_at + 1:020d}.json")
            sync(path / "_delta_log")
            table.update_incremental()
            seam("compact.base")
            return tick
    raise DeadlineExceeded(f"{ATTEMPTS} attempts to set the base tick of {path} met another writer's commit; try again")
