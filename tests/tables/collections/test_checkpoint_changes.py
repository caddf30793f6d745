"""Checkpoints store what changed in a large catalog since a snapshot, and give the whole catalog or a typed error."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.base.errors import TableDamaged, UnsupportedVersion
from millrace.message.ids import MessageId
from millrace.message.schema import CollectionSchema, FieldSpec
from millrace.storage.commit import AppTransaction, CommitPart, commit_fenced
from millrace.storage.table import TableHandle
from millrace.tables.collections.flush_tables import (
    SMALL_CATALOG,
    SNAPSHOT_FACTOR,
    Checkpoint,
    ensure_checkpoints_table,
    next_checkpoint,
    read_checkpoints,
    replaced_checkpoint_files,
    required_checkpoint_files,
    write_checkpoint,
)
from millrace.wal.visible.catalog import GrowingSegment, VChannelInfo, WalCatalog
from millrace.wal.visible.catalog_changes import CatalogChanges, CatalogSnapshot, catalog_digest, is_changes

SCHEMA = CollectionSchema((FieldSpec("id", "int64", False), FieldSpec("body", "binary", True)), "id")


def new_info(number: int) -> VChannelInfo:
    return VChannelInfo(number, f"c{number}", (f"p0_{number}v0",), 5, [(5, SCHEMA)], {1: "all"})


def change(catalog: WalCatalog, dice: random.Random, tick: int) -> None:
    """Do to the catalog what a message might."""
    number = dice.randrange(1, 400)
    info = catalog.vchannels.setdefault(f"p0_{number}v0", new_info(number))
    match dice.randrange(6):
        case 0:
            info.partitions[tick] = f"part{tick}"
        case 1:
            info.replace_ticks.append(tick)
        case 2:
            info.growing.clear()
        case 3:
            info.dropped_tick = tick
        case _:
            info.growing[tick] = GrowingSegment(1, tick, 3, 7)


@settings(max_examples=60, deadline=None)
@given(st.randoms(use_true_random=False), st.integers(0, 40), st.lists(st.integers(0, 20), max_size=6))
def test_a_snapshot_and_the_changes_since_give_the_catalog(dice: random.Random, before: int, steps: list[int]) -> None:
    catalog = WalCatalog()
    for tick in range(10, 10 + before):
        change(catalog, dice, tick)
    whole = catalog.to_bytes()
    snapshot = CatalogSnapshot("path", 50, catalog_digest(whole), len(whole))
    last, changes, tick = whole, CatalogChanges(), 100
    for step in steps:
        for _ in range(step):
            tick += 1
            change(catalog, dice, tick)
        now = catalog.to_bytes()
        extended = changes.extended(last, now, snapshot)
        assert extended is not None
        last, changes = now, CatalogChanges.from_bytes(extended.to_bytes())
        assert changes.apply(whole) == now


def test_a_catalog_decodes_what_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    catalog = WalCatalog({f"p0_{number}v0": new_info(number) for number in range(1, 401)})
    data = catalog.to_bytes()
    decoded: list[int] = []
    from_json = VChannelInfo.from_json
    monkeypatch.setattr(
        VChannelInfo, "from_json", lambda value: (decoded.append(value["collection_id"]), from_json(value))[1]
    )
    read = WalCatalog.from_bytes(data)
    read.collection_vchannels(7)["p0_7v0"].growing[9] = GrowingSegment(1, 9)
    read.vchannels["p0_500v0"] = new_info(500)
    read.vchannels["p0_8v0"] = new_info(501)
    assert [info.collection_id for info in read.vchannels.with_new_schemas()] == [500]
    assert (list(read.collection_vchannels(8)), list(read.collection_vchannels(501))) == ([], ["p0_8v0"])
    assert (len(read.vchannels), len(list(read.vchannels))) == (401, 401)
    changed = read.to_bytes()
    assert decoded == [7]
    again = WalCatalog.from_bytes(changed)
    assert dict(again.vchannels) == dict(read.vchannels)
    assert dict(WalCatalog.from_bytes(data).vchannels) == dict(catalog.vchannels), "copies share nothing that changes"


class Flushed:
    """A ``checkpoints`` table to which a PChannel with many collections is committed."""

    def __init__(self, folder: Path, vchannels: int) -> None:
        self.table = ensure_checkpoints_table(folder / "checkpoints")
        self.catalog = WalCatalog({f"p0_{number}v0": new_info(number) for number in range(1, vchannels + 1)})
        self.sizes: list[int] = []
        """Bytes of each row's catalog or changes."""
        self.commit()

    def commit(self, *touched: int) -> None:
        base = read_checkpoints(self.table).get("p0", Checkpoint("p0"))
        tick = base.time_tick + 10
        for number in touched:
            self.catalog.vchannels[f"p0_{number}v0"].growing[tick] = GrowingSegment(1, tick, 1, 1)
        made = next_checkpoint(base, time_tick=tick, confirmed=MessageId(0, tick, 0, 0), term=1, catalog=self.catalog)
        assert not self.commit_made(base, made)

    def commit_made(self, base: Checkpoint, made: Checkpoint) -> bool:
        """Commit a checkpoint and return whether it was fenced."""
        actions = write_checkpoint(self.table.uri, made)
        self.sizes += [len(made.catalog_bytes if made.snapshot is None else made.changes.to_bytes())]
        part = CommitPart(
            actions,
            replaced_checkpoint_files(base, made),
            {"p0": AppTransaction(base.base, made.time_tick)},
            requires=required_checkpoint_files(made),
        )
        return bool(commit_fenced(self.table, [part]).fenced)

    def stored(self) -> Checkpoint:
        return read_checkpoints(self.table)["p0"]


def test_a_checkpoint_without_news_is_not_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flushed = Flushed(tmp_path, 400)
    read: list[str] = []
    plain = TableHandle.read
    monkeypatch.setattr(TableHandle, "read", lambda self, name: (read.append(name), plain(self, name))[1])
    first = flushed.stored()
    for _ in range(3):
        assert flushed.stored() == first
    assert len(read) <= 1
    flushed.commit(3)
    assert flushed.stored().time_tick > first.time_tick
    assert flushed.stored().catalog.vchannels["p0_3v0"].growing


def test_a_flush_of_one_collection_writes_its_own_changes(tmp_path: Path) -> None:
    flushed = Flushed(tmp_path, 400)
    for number in range(1, 11):
        flushed.commit(number, 7)
        assert flushed.stored().catalog_bytes == flushed.catalog.to_bytes()
        assert len(flushed.table.live_files()) == 2
    assert flushed.sizes[0] > 100_000
    assert max(flushed.sizes[1:]) < 1_000
    assert flushed.stored().flush_ticks == dict.fromkeys(sorted(flushed.catalog.vchannels), flushed.stored().time_tick)


def test_a_snapshot_follows_when_the_changes_outweigh_it(tmp_path: Path) -> None:
    flushed, dice = Flushed(tmp_path, 400), random.Random(5)
    for _ in range(30):
        flushed.commit(*dice.sample(range(1, 401), 40))
        found = flushed.stored()
        assert found.catalog_bytes == flushed.catalog.to_bytes()
        assert found.snapshot is not None
        assert len(found.changes.to_bytes()) * SNAPSHOT_FACTOR <= found.snapshot.size
    assert 1 < sum(size > 100_000 for size in flushed.sizes) < 15


def test_a_small_catalog_is_one_row(tmp_path: Path) -> None:
    flushed = Flushed(tmp_path, 4)
    flushed.commit(1)
    assert len(flushed.table.live_files()) == 1
    assert len(flushed.stored().catalog_bytes) < SMALL_CATALOG


def test_changes_without_their_snapshot_are_an_error(tmp_path: Path) -> None:
    flushed = Flushed(tmp_path, 400)
    flushed.commit(1)
    snapshot = flushed.stored().snapshot
    assert snapshot is not None
    gone = CommitPart((), [snapshot.path])
    assert not commit_fenced(flushed.table, [gone]).fenced
    with pytest.raises(TableDamaged, match=f"changes to the one at tick {snapshot.time_tick}"):
        flushed.stored()


def test_changes_to_a_snapshot_that_was_replaced_meanwhile_are_fenced(tmp_path: Path) -> None:
    flushed = Flushed(tmp_path, 400)
    base = flushed.stored()
    made = next_checkpoint(base, time_tick=99, confirmed=MessageId(0, 9, 0, 0), term=1, catalog=flushed.catalog)
    again = write_checkpoint(flushed.table.uri, Checkpoint("p0", base.time_tick, catalog_bytes=base.catalog_bytes))
    assert base.path is not None
    assert not commit_fenced(flushed.table, [CommitPart(again, [base.path])]).fenced
    assert flushed.commit_made(base, made)


def test_the_form_is_that_of_the_golden_sample() -> None:
    """A build that writes another form needs another version, and reads this one."""
    golden = json.loads(Path("tests/laws/golden/catalog-changes-v3.json").read_text())
    changes = CatalogChanges.from_bytes(golden["changes"].encode())
    assert changes.to_bytes().decode() == golden["changes"]
    assert changes.apply(golden["snapshot"].encode()).decode() == golden["catalog"]
    assert is_changes(golden["changes"].encode())
    assert not is_changes(golden["catalog"].encode())
    with pytest.raises(UnsupportedVersion, match="version 3"):
        WalCatalog.from_bytes(golden["changes"].encode())
    with pytest.raises(UnsupportedVersion, match="version 4"):
        CatalogChanges.from_bytes(golden["changes"].replace('"version":3', '"version":4').encode())
