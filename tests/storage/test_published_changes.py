"""Changes between two published versions, from the log alone, lead from the rows of one to the rows of the other."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from millrace.storage.delta_log import first_commit
from millrace.storage.published import PublishedTable
from millrace.storage.published_changes import net_changes
from millrace.storage.table import LogMaintenance
from tests.storage.published_world import World, positions


def counted(world: World, since: int) -> tuple[Counter[object], Counter[object]]:
    """The rows that came and went."""
    came: Counter[object] = Counter()
    went: Counter[object] = Counter()
    for change in net_changes(world.table, since) or ():
        rows = world.rows[change.path]
        came.update(rows[at] for at in change.came(world.store, len(rows)).tolist())
        went.update(rows[at] for at in change.went(world.store, len(rows)).tolist())
    return came, went


@pytest.mark.parametrize("seed", range(3))
def test_the_changes_between_any_two_versions_make_one_from_the_other(tmp_path: Path, seed: int) -> None:
    world = World(tmp_path, seed=seed)
    for version in range(1, 26):
        world.change_at_random()
        since = world.random.randrange(version)
        came, went = counted(world, since)
        before = Counter(world.expected(since))
        before.update(came)
        before.subtract(went)
        assert +before == Counter(world.expected())
        assert not -before


def test_a_rewrite_is_no_change_and_a_mask_is_one_row(tmp_path: Path) -> None:
    world = World(tmp_path)
    old = world.write(world.make_rows(4), masked=[3])
    world.commit(add=[old])
    new = world.write(world.expected())
    world.commit(add=[new], remove=[old.path], rewrites=frozenset([old.path, new.path]))
    assert counted(world, 1) == (Counter(), Counter())
    gone = world.expected()[2]
    world.commit(mask={new.path: positions([2])})
    assert counted(world, 1) == (Counter(), Counter([gone]))
    world.commit(mask={new.path: positions([])})
    assert counted(world, 1) == (Counter(), Counter())
    assert net_changes(world.table, world.table.version) == []


def test_changes_that_the_log_no_longer_has_are_none(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.maintenance = LogMaintenance(checkpoint_commits=2, keep_commits=1)
    for _ in range(6):
        world.commit(add=[world.write(world.make_rows(1))])
    assert first_commit(world.store) > 1
    assert net_changes(world.table, 0) is None
    at = PublishedTable.open(world.store, version=world.table.version)
    assert at is not None
    assert net_changes(at, at.version - 1) is not None
