"""What a deployment gave after its backup, a restored one does not give again.

Rows that somebody still holds find no other's place.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pyarrow as pa
import pytest

from millrace.base.errors import LogUnavailable
from millrace.client.produce.producer import Producer
from millrace.client.spool.sender import SpoolSender
from millrace.operations.backup.declaration import BackupParams
from millrace.operations.backup.restore import restore_backup
from millrace.operations.backup.run import backup
from millrace.rpc.outcome import AppendOutcome
from millrace.runtime.progress import Progress
from tests.operations.backup_world import SCHEMA, Model, World, settings_in

OWN = 77
"""Id of a producer that its program gives."""


@pytest.fixture
def lives(tmp_path: Path) -> Iterator[tuple[World, World]]:
    """A deployment behind its backup, and what is restored of that."""
    first = World(settings_in(tmp_path / "first"))
    first.coordinator.next_epoch(OWN)
    backup(first.settings, first.log, BackupParams(to=str(tmp_path / "backups")), Progress())
    restore_backup(settings_in(tmp_path / "second"), tmp_path / "backups")
    second = World(settings_in(tmp_path / "second"), Model())
    yield first, second
    first.close()
    second.close()


class Way:
    """To the append host of a deployment; none: it cannot be reached."""

    def __init__(self, world: World | None) -> None:
        self.world = world

    def append(self, pchannel: str, entries: Sequence[bytes], *, deadline: float | None = None) -> AppendOutcome:
        if self.world is None:
            raise LogUnavailable("cut")
        return self.world.host.append(pchannel, entries, deadline=deadline or 10.0)


def producer(world: World, spool: Path, *, reached: bool = True) -> Producer:
    return Producer(
        Way(world if reached else None),  # type: ignore[arg-type]
        world.coordinator,
        world.settings,
        producer_id=OWN,
        spool=SpoolSender(spool, retry_delay=0.02),
    )


def rows(*ids: int) -> pa.Table:
    return pa.table({"id": list(ids), "body": [f"row {each}" for each in ids]})


def test_no_epoch_and_no_id_is_given_in_both_lives(lives: tuple[World, World]) -> None:
    given = [
        (
            world.coordinator.create_collection("another", SCHEMA).id,
            world.coordinator.create_partition("c1", "new"),
            world.coordinator.next_epoch(OWN),
            world.coordinator.next_epoch(OWN + 1),
        )
        for world in lives
    ]
    assert all(restored > 1000 * before for before, restored in zip(*given, strict=True))


def test_what_is_restored_twice_of_one_backup_gives_nothing_twice(
    tmp_path: Path, lives: tuple[World, World], monkeypatch: pytest.MonkeyPatch
) -> None:
    later = time.time() + 60
    with monkeypatch.context() as patch:
        patch.setattr(time, "time", lambda: later)
        restore_backup(settings_in(tmp_path / "third"), tmp_path / "backups")
    third = World(settings_in(tmp_path / "third"), Model())
    try:
        given = {lives[1].coordinator.next_epoch(OWN) for _ in range(50)}
        assert third.coordinator.next_epoch(OWN) > max(given)
    finally:
        third.close()


def test_rows_of_a_spool_and_new_ones_of_its_producer_are_all_there(lives: tuple[World, World], tmp_path: Path) -> None:
    first, second = lives
    with producer(first, tmp_path / "spool", reached=False) as cut:
        assert cut.insert("c1", rows(1, 2)).spooled_rows == 2
    with producer(second, tmp_path / "spool") as again:
        again.insert("c1", rows(3, 4))
        assert again.spool is not None
        assert again.spool.wait_empty(timeout=10)
        again.insert("c1", rows(5, 6))
    second.settle()
    assert set(second.content()["c1"]) == {1, 2, 3, 4, 5, 6}


def test_rows_of_a_lost_collection_come_into_no_other(lives: tuple[World, World], tmp_path: Path) -> None:
    first, second = lives
    first.coordinator.create_collection("lost", SCHEMA)
    with producer(first, tmp_path / "spool", reached=False) as cut:
        assert cut.insert("lost", rows(1, 2)).spooled_rows == 2
    second.coordinator.create_collection("another", SCHEMA)
    with producer(second, tmp_path / "spool") as again:
        assert again.spool is not None
        assert again.spool.wait_empty(timeout=10)
    assert "NOT_FOUND" in (tmp_path / "spool" / "rejected.jsonl").read_text()
    second.settle()
    assert not second.content()["another"]
