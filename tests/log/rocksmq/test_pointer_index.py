"""RocksDB holds pointers and no truth: lost, behind, damaged or of a former channel, it is made anew from the files."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from rocksdict import AccessType, Options, Rdict

from millrace.base.errors import LogBusy, LogCorrupted
from millrace.log.rocksmq.manifest import ChannelManifest, encode_file_name
from millrace.log.rocksmq.pointer_index import PointerIndex, RecordPointer
from millrace.log.rocksmq.service import RocksMQ
from tests.log.crash_images import CHANNEL, SETTINGS, append, read


def keys(directory: Path) -> dict[bytes, bytes]:
    database = Rdict(str(directory / "index"), options=Options(raw_mode=True), access_type=AccessType.read_only())
    try:
        return dict(database.items())
    finally:
        database.close()


def fill(directory: Path, count: int = 20) -> list[tuple[object, bytes]]:
    with RocksMQ(directory, settings=SETTINGS) as service:
        if CHANNEL not in service.names():
            service.create(CHANNEL)
        log = service.open(CHANNEL)
        return [entry for index in range(count) for entry in append(log, [b"%d" % index * 5_000, b"second"])]


def test_keys_are_those_of_chapter_4_zero_padded_one_a_batch(tmp_path: Path) -> None:
    entries = fill(tmp_path)
    with RocksMQ(tmp_path, settings=SETTINGS) as service:
        service.create_consumer_group("g")
        service.seek("g", CHANNEL, entries[3][0].entry)
        service.open(CHANNEL).truncate(entries[2][0])
    found = keys(tmp_path)
    pointers = [key for key in found if key[:2] == b"c/" and key[2:].isdigit()]
    assert {int(key[2:]) for key in pointers} <= {entry_id.entry for entry_id, _ in entries[::2]}
    assert all(len(key) == len(b"c/") + 20 for key in pointers)
    assert int(found[b"c/begin_id"]) == entries[2][0].entry
    assert int(found[b"g/c/current_id"]) == entries[3][0].entry
    assert b"c/end_id" in found


@pytest.mark.parametrize("how", ["lost", "damaged", "behind"])
def test_an_index_that_is_lost_damaged_or_behind_is_rebuilt(tmp_path: Path, how: str) -> None:
    data = tmp_path / "data"
    entries = fill(data, 10)
    shutil.copytree(data / "index", tmp_path / "old")
    entries += fill(data, 10)
    whole = keys(data)
    if how == "lost":
        shutil.rmtree(data / "index")
    elif how == "damaged":
        (data / "index" / "CURRENT").write_bytes(b"garbage")
    else:
        shutil.rmtree(data / "index")
        shutil.copytree(tmp_path / "old", data / "index")
    with RocksMQ(data, settings=SETTINGS) as service:
        log = service.open(CHANNEL)
        assert read(log) == entries
        for entry_id, value in entries:
            assert log.read(entry_id, max_bytes=1).batch.column("value").to_pylist() == [value]
    assert keys(data) == whole


def test_an_index_with_a_damaged_block_is_rebuilt_when_it_is_met(tmp_path: Path) -> None:
    """RocksDB opens such a one, and says what is wrong with it only where the block is read."""
    entries = fill(tmp_path)
    database = Rdict(str(tmp_path / "index"), options=Options(raw_mode=True))
    database.flush()
    database.close()
    whole = keys(tmp_path)
    tables = list((tmp_path / "index").glob("*.sst"))
    assert tables
    for table in tables:
        data = bytearray(table.read_bytes())
        data[10] ^= 0xFF
        table.write_bytes(data)
    with RocksMQ(tmp_path, settings=SETTINGS) as service:
        log = service.open(CHANNEL)
        assert read(log) == entries
        append(log, [b"more"])
    assert keys(tmp_path).keys() > whole.keys() - {b"c/end_id"}


def test_pointers_of_a_former_channel_of_the_same_name_count_for_nothing(tmp_path: Path) -> None:
    fill(tmp_path)
    with RocksMQ(tmp_path, settings=SETTINGS) as service:
        service.drop(CHANNEL)
        service.create(CHANNEL)
        incarnation = ChannelManifest.load(tmp_path / "channels" / encode_file_name(CHANNEL)).incarnation
    index = PointerIndex(tmp_path / "index")
    stale = RecordPointer(1 << 60, 12345, 0, 100, 1)
    index.put(CHANNEL, incarnation + 1, [stale], 1 << 61)  # as if the drop had not reached the medium
    index.close()
    entries = fill(tmp_path, 3)
    with RocksMQ(tmp_path, settings=SETTINGS) as service:
        assert read(service.open(CHANNEL)) == entries


def test_the_index_proves_what_was_acknowledged(tmp_path: Path) -> None:
    entries = fill(tmp_path)
    tail = sorted((tmp_path / "channels" / encode_file_name(CHANNEL)).glob("*.log"))[-1]
    data = tail.read_bytes()
    for broken in (data[:-1], data[:-1] + bytes([data[-1] ^ 1]), b"", None):
        if broken is None:
            tail.unlink()
        else:
            tail.write_bytes(broken)
        with RocksMQ(tmp_path, settings=SETTINGS) as service, pytest.raises(LogCorrupted):
            service.open(CHANNEL)
        assert (tail.read_bytes() if tail.exists() else None) == broken  # nothing was cut nor removed
    tail.write_bytes(data)
    with RocksMQ(tmp_path, settings=SETTINGS) as service:
        assert read(service.open(CHANNEL)) == entries


def test_a_second_process_is_told_that_the_log_is_busy(tmp_path: Path) -> None:
    from dataclasses import replace

    with RocksMQ(tmp_path, settings=SETTINGS), pytest.raises(LogBusy):
        RocksMQ(tmp_path, settings=replace(SETTINGS, lock_wait=0.05))
    RocksMQ(tmp_path, settings=SETTINGS).close()


def test_the_index_proves_a_last_file_that_is_missing_even_where_it_held_one_entry(tmp_path: Path) -> None:
    with RocksMQ(tmp_path, settings=SETTINGS, now_ms=lambda: 1) as service:  # ids follow each other without a gap
        service.create(CHANNEL)
        log = service.open(CHANNEL)
        append(log, [b"x" * 60_000])
        append(log, [b"y" * 60_000])  # in a file of its own
    files = sorted((tmp_path / "channels" / encode_file_name(CHANNEL)).glob("*.log"))
    assert len(files) == 2
    files[-1].unlink()
    with RocksMQ(tmp_path, settings=SETTINGS) as service, pytest.raises(LogCorrupted, match="acknowledged"):
        service.open(CHANNEL)
