"""The commits of a rewrite, and the order that makes them safe beside the flusher and beside another rewrite.

Compaction has two app ids of its own in a collection's rows table. ``millrace/rewrites`` counts the commits that
replaced files. Each such commit increments it, so that of two concurrent rewriters of one table the second is fenced.
Every other operation that removes or adds rows by replacing files increments it too. A fold of small files
(millrace.tables.rewrite.fold) does not: it joins files row for row, so what a compaction found stays true, and the
check of the files that both replace is fence enough. ``millrace/folded`` is the tick up to which the table holds no
dead rows: deletes up to it have nothing left to hit.

The flusher's app ids are never touched. Its commits conflict with these only in the version number, and the later one
tries again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from millrace.base.failpoint import hit
from millrace.storage.commit import AppTransaction, CommitPart, commit_fenced, set_properties
from millrace.storage.file_sink import delete_uncommitted
from millrace.storage.table import TableHandle
from millrace.tables.collections.data_tables import BASE_TICK_PROPERTY, FOLDED_APP, REWRITES_APP, earliest_readable_tick
from millrace.tables.rewrite.files import FileGroup
from millrace.tables.rewrite.rewrite import RewriteJob, RewriteMapper, RewriteResult

COMMIT_GROUPS: Final = 64
"""Maximum number of file groups that one commit replaces."""


@dataclass(slots=True)
class RewriteCommitter:
    """Commits rewritten groups to one table. `rewrites` is the table's counter at the time of planning; None: the
    groups' files are joined row for row, which the counter does not count.
    """

    table: TableHandle
    rewrites: int | None
    superseded: bool = False
    """Another rewriter committed first: nothing more of this plan can be committed."""
    given_up: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, table: TableHandle) -> RewriteCommitter:
        return cls(table, table.app_version(REWRITES_APP))

    def commit(self, done: Sequence[RewriteResult]) -> list[RewriteResult]:
        """Commit the groups of `done` in one commit and return those that got through.

        The others leave no file behind.
        """
        good = []
        for each in done:
            if each.error is not None:
                self.given_up.append(f"{each.group.paths[0]} and {len(each.group.files) - 1} more: {each.error}")
            elif not each.unchanged:
                good.append(each)
        if self.superseded:
            delete_uncommitted(self.table.store, [action for each in good for action in each.actions])
            self._give_up(good, "another compaction committed first")
            return []
        parts = [CommitPart(each.actions, each.group.paths, self._moves()) for each in good]
        fenced = commit_fenced(self.table, parts, data_change=False).fenced
        self.superseded = any(REWRITES_APP in fence.conflicts for fence in fenced.values())
        self._give_up(
            [good[place] for place in fenced],
            "another compaction committed first" if self.superseded else "replaced concurrently",
        )
        through = [each for place, each in enumerate(good) if place not in fenced]
        if through:
            self._counted()
            hit("compact.replaced")
        return through

    def _moves(self) -> dict[str, AppTransaction]:
        count = self.rewrites
        return {} if count is None else {REWRITES_APP: AppTransaction(count, count + 1)}

    def _counted(self) -> None:
        if self.rewrites is not None:
            self.rewrites += 1

    def _give_up(self, groups: Sequence[RewriteResult], words: str) -> None:
        self.given_up += [f"{each.group.paths[0]} and {len(each.group.files) - 1} more: {words}" for each in groups]

    def mark_folded(self, tick: int) -> bool:
        """Record that no row that is dead at `tick` is left. Return False if another rewriter committed in between."""
        have = self.table.app_version(FOLDED_APP)
        part = CommitPart(app_transactions={**self._moves(), FOLDED_APP: AppTransaction(have, max(tick, have))})
        if commit_fenced(self.table, [part]).fenced:
            return False
        self._counted()
        hit("compact.folded")
        return True


def rewrite_and_commit(
    replacer: RewriteCommitter,
    job: RewriteJob,
    groups: Sequence[FileGroup],
    mapper: RewriteMapper,
) -> list[RewriteResult]:
    """Rewrite `groups` and commit them, a few per commit so that a long run keeps its progress.

    Returns those that got through; ``replacer.given_up`` has the others.
    """
    done: list[RewriteResult] = []
    for start in range(0, len(groups), COMMIT_GROUPS):
        if replacer.superseded:
            replacer.given_up.append(f"{len(groups) - start} groups: another compaction committed first")
            break
        done += replacer.commit(list(mapper(job, groups[start : start + COMMIT_GROUPS])))
    return done


def folded_tick(table: TableHandle | None) -> int:
    """Return the tick up to which the rows table holds no dead rows, or 0 before the first fold."""
    return 0 if table is None else table.app_version(FOLDED_APP)


def raise_base_tick(table: TableHandle, tick: int) -> int:
    """Raise the base tick of the rows table to `tick` and return it.

    Must precede the removal of rows that are dead there.

    The base tick never goes back: each commit is based on the very version that was read.
    """

    def raised_base(properties: Mapping[str, str]) -> dict[str, str]:
        return {BASE_TICK_PROPERTY: str(tick)} if int(properties.get(BASE_TICK_PROPERTY) or 0) < tick else {}

    if set_properties(table, raised_base):
        hit("compact.base")
    return earliest_readable_tick(table)
