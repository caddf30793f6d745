"""A power loss at any sync.

What was acknowledged is there once, and everything opens, as far as nothing but what was synced is left.

Two kinds of disk. One keeps what was synced and no more. The other has every name at once, and bytes only once they are
synced: what was not yet is empty. Log, streaming node, flusher, checkpoint, compaction and trims run in this process.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from millrace.base.settings import Settings
from millrace.log.rocksmq.service import RocksMQ
from millrace.node.flush.definition import flush_to_end
from millrace.node.ingest.definition import ingest_to_end
from millrace.operations.checkpoint.declaration import CheckpointParams
from millrace.operations.checkpoint.run import checkpoint
from millrace.operations.compaction.declaration import CompactionParams
from millrace.operations.compaction.run import compact
from millrace.operations.verification import verify_channel, verify_collections
from millrace.runtime.progress import Progress
from millrace.tables.read.arrow import read_arrow
from millrace.tables.wal.reader import WalSnapshot
from millrace.tables.wal.table import WalTable
from tests.client.medium import Medium
from tests.operations.log_maker import LOG, Things

ROUNDS = 3
LOSSES = 3
SYNCS = 550
"""About as many are in ROUNDS."""
COMPACTION = CompactionParams(min_files=2, fold="always", keep_history_hours=0)


class Disk(Medium):
    """The disk of one deployment, and at which of its syncs somebody looks what a power loss would leave."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
        super().__init__(monkeypatch)
        self._at = set(random.Random(seed).sample(range(SYNCS), LOSSES))
        self._syncs = 0
        self._looking = False
        self._held: list[int] = []
        self.look: Callable[[], None] = lambda: None

    def _synced(self, real: Callable[[int], None]) -> Callable[[int], None]:
        noted = super()._synced(real)

        def sync(fd: int) -> None:
            if self._looking:
                real(fd)
                return
            self._hold(Path(os.readlink(f"/proc/self/fd/{fd}")))
            noted(fd)
            self._syncs += 1
            if self._syncs in self._at:
                self._looking = True
                self.look()
                self._looking = False

        return sync

    def _hold(self, path: Path) -> None:
        """No other file gets the number of one that was synced, or that a folder names."""
        for each in [path, *(path.iterdir() if path.is_dir() else ())]:
            if each.stat().st_ino not in self.files.keys() | self.folders.keys():
                self._held.append(os.open(each, os.O_PATH))

    def names(self, folder: Path, target: Path) -> Path:
        """The folder with every name that it has, and of each file the bytes that were synced."""
        target.mkdir()
        for each in folder.iterdir():
            if not each.is_dir():
                (target / each.name).write_bytes(self.files.get(each.stat().st_ino, b""))
            elif each.name != "index":  # RocksDB syncs by itself, which nobody here sees; it holds no truth
                self.names(each, target / each.name)
        return target

    def close(self) -> None:
        for each in self._held:
            os.close(each)


@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (2, 3, 4))])
@pytest.mark.parametrize("kind", ["what was synced", "every name"])
@pytest.mark.timeout(120)
def test_what_was_acknowledged_is_there_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, seed: int
) -> None:
    disk = Disk(monkeypatch, seed)
    things = Things(tmp_path / "live")
    data = things.settings.data_dir
    acknowledged: set[int] = set()
    deleted: set[int] = set()
    looks: list[Path] = []

    def look() -> None:
        target = tmp_path / f"left-{len(looks)}"
        looks.append(target)
        left = disk.names(data, target) if kind == "every name" else disk.restore(data.stat().st_ino, target)
        if acknowledged:
            _check(Settings(data_dir=left), acknowledged, deleted)

    disk.look = look
    try:
        for _ in range(ROUNDS):
            for _ in range(3):
                for vchannel in things.collection.vchannels:
                    first = things.next[vchannel]
                    things.next[vchannel] = first + 2
                    keys = things.collection.keys_of(vchannel, first + 2)[first:]
                    rows = {"id": list(keys), "body": ["x" * 20_000] * 2}
                    things.collection.append(vchannel, things.collection.insert(rows, vchannel=vchannel))
                    acknowledged.update(keys)
                    acknowledged.discard(keys[0])
                    things.collection.append(vchannel, things.collection.delete(keys[:1], vchannel=vchannel))
                    deleted.add(keys[0])
                things.maker.commit()
            flush_to_end(things.settings)
            short = replace(things.settings, wal_retention=0.001)
            assert checkpoint(short, things.log, CheckpointParams(), Progress()).ok
            compact(things.settings, COMPACTION, Progress())
        assert len(looks) == LOSSES
    finally:
        disk.look = lambda: None
        things.close()
        disk.close()


def _check(settings: Settings, acknowledged: set[int], deleted: set[int]) -> None:
    with RocksMQ(settings.log_path, settings=LOG) as log:
        ingest_to_end(settings, log)
        flush_to_end(settings)
        wal, snapshot = WalTable.open(settings.wal_uri), WalSnapshot.open(settings.wal_uri)
        assert snapshot is not None
        newest = max(position.last_tick for position in wal.positions(wal.pchannels()).values())
        found = read_arrow(settings, 1, confirmed=dict.fromkeys(wal.pchannels(), newest))["id"].to_pylist()
        assert len(found) == len(set(found)), "a row is there twice"
        assert not acknowledged - set(found), "an acknowledged row is lost"
        assert not deleted & set(found), "an acknowledged delete is lost"
        assert all(verify_channel(snapshot, wal, None, name).ok for name in wal.pchannels())
        assert all(each.ok for each in verify_collections(settings).values())
        assert checkpoint(settings, log, CheckpointParams(), Progress()).ok
