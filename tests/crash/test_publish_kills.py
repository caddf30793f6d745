"""A publisher that dies at each step of a commit, and the one that comes after it."""

from __future__ import annotations

from pathlib import Path

import pytest

from millrace.storage.local import LocalStore
from millrace.storage.published import VECTOR_FOLDER, PublishedTable
from tests.crash.publish_process import publish
from tests.crash.test_power_loss import Disk
from tests.failpoints import die_at
from tests.storage.published_world import tick_at


def content(table: PublishedTable) -> dict[str, list[int]]:
    return {path: table.masked(path).tolist() for path in table.files}


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize(
    "place",
    [
        "publish.vectors",
        "publish.checked",
        "publish.committed",
        "publish.vectors@3",
        "checkpoint.written",
        "trim.removed",
        "trim.removed@2",
        "publish.expired",
        "publish.expired@2",
    ],
)
def test_each_tick_is_published_once_wherever_the_publisher_died(tmp_path: Path, place: str) -> None:
    died, lived = tmp_path / "died", tmp_path / "lived"
    publish(died, 2)
    die_at(place, "tests.crash.publish_process", died, 7)
    standing = PublishedTable.open(LocalStore(died))
    assert standing is not None
    assert content(standing) == content(publish(lived, standing.version)), "a whole version, that of its tick"
    table = publish(died, 9)
    assert content(table) == content(publish(lived, 9))
    assert table.version == 9, "no tick was published twice"
    table.sweep_vectors()
    named = {each.vector.file for each in table.files.values() if each.vector is not None}
    left = {f"{VECTOR_FOLDER}/{name}" for name in table.store.list(VECTOR_FOLDER)}
    assert named <= left
    assert len(left) <= len(named) + 1, "what the killed publisher left is gone; the version before the newest stays"
    assert not [name for name in table.store.list("_delta_log") if name.startswith(".")]


@pytest.mark.parametrize("kind", ["what was synced", "every name"])
def test_a_power_loss_at_any_sync_leaves_a_whole_version_and_each_acknowledged_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    disk = Disk(monkeypatch, 0)
    disk._at = set(range(1, 1000))
    folder = tmp_path / "live"
    folder.mkdir()
    ticks = {tick_at(ms): ms for ms in range(10)} | {0: 0}
    looks = acknowledged = 0

    def look() -> None:
        nonlocal looks
        looks += 1
        target = tmp_path / f"left-{looks}"
        left = disk.names(folder, target) if kind == "every name" else disk.restore(folder.stat().st_ino, target)
        table = PublishedTable.open(LocalStore(left))
        if table is None:
            assert not acknowledged
            return
        ms = ticks[table.tick]
        assert ms >= acknowledged
        # File n of tick n has one more masked row with each tick.
        assert content(table) == {f"_rows/part-{n}.parquet": list(range(n, ms + 1)) for n in range(1, ms + 1)}

    disk.look = look
    try:
        for ms in range(1, 8):
            publish(folder, ms)
            acknowledged = ms
        assert looks > 30
    finally:
        disk.look = lambda: None
        disk.close()
