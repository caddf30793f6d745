"""Tombstones go along with a switch of the log's backend and with a backup.

What is restored judges as its source did.
"""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest

from millrace.message.ids import LogId
from millrace.message.tombstones import entry_sha256
from millrace.node.append.tombstones import TombstonePlacer
from millrace.node.ingest.definition import ingest_to_end
from millrace.operations.backup.declaration import BackupParams
from millrace.operations.backup.restore import restore_backup
from millrace.operations.backup.run import backup
from millrace.operations.verification import verify_channel
from millrace.runtime.progress import Progress
from millrace.tables.wal.reader import WalSnapshot
from millrace.tables.wal.table import WalTable
from tests.node.log_samples import poison
from tests.operations.backup_world import World, settings_in


def replace_entry(world: World, pchannel: str) -> LogId:
    """Have the PChannel park, and replace the entry."""
    with closing(world.log.open(pchannel)) as log:
        (entry,) = log.append([poison()])
    tombstones = TombstonePlacer(world.host, world.log, lambda: world.settings.wal_uri)
    tombstones.place(pchannel, entry, sha256=entry_sha256(poison()), author="ada", reason="INC-1")
    world.host.restart(pchannel)
    return entry


def seen(world: World, pchannel: str, entry: LogId) -> bytes:
    with closing(world.log.open(pchannel)) as log:
        return bytes(log.read(entry, end=entry.following()).batch["value"][0].as_py())


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("switched", [False, True], ids=["where it was", "switched"])
@pytest.mark.parametrize("committed", [False, True], ids=["not in the WAL", "in the WAL"])
def test_what_is_restored_judges_the_entry_as_its_source_did(tmp_path: Path, switched: bool, committed: bool) -> None:
    source = World(settings_in(tmp_path / "data"))
    for number in range(4):
        source.step("insert", number)
    source.step("node", 0)
    entries = {name: replace_entry(source, name) for name in source.log.names()}
    values = {name: seen(source, name, entry) for name, entry in entries.items()}
    if committed:
        source.step("node", 0)
    for number in range(4):
        source.step("insert", number)
    if switched:
        source.switch("rocksmq")
        source.step("insert", 1)
    assert {name: seen(source, name, entry) for name, entry in entries.items()} == values
    backup(source.settings, source.log, BackupParams.parse({"to": str(tmp_path / "backups")}), Progress())
    ingest_to_end(source.settings, source.log)

    restore_backup(settings_in(tmp_path / "restored"), tmp_path / "backups")
    restored = World.of(settings_in(tmp_path / "restored"), source.model, epoch=source.epoch)
    assert {name: seen(restored, name, entry) for name, entry in entries.items()} == values
    ingest_to_end(restored.settings, restored.log)
    tables = [WalTable.open(Path(each.settings.wal_uri)) for each in (source, restored)]
    for name in entries:
        one, other = (table.position(name) for table in tables)
        assert (one.totals.rejections, one.state_bytes, one.totals) == (1, other.state_bytes, other.totals)
        snapshot = WalSnapshot.open(Path(restored.settings.wal_uri))
        assert snapshot is not None
        assert verify_channel(snapshot, tables[1], restored.log, name).rejections == 1
    restored.step("insert", 2)
    restored.settle()
    assert restored.content() == restored.model.rows
    restored.close()
    source.close()
