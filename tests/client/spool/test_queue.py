"""The spool on the disk: what was acknowledged is there after any crash, a torn end is cut, damage is said."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from millrace.base.errors import SpoolBusy, SpoolCorrupted, SpoolFull
from millrace.client.spool import queue as spool
from millrace.client.spool.queue import Spool
from tests.client.medium import Medium

ENTRIES = [bytes([65 + number]) * (number * 7 + 1) for number in range(12)]


def held(folder: Path, pchannel: str = "p/0") -> list[bytes]:
    with Spool(folder, segment_bytes=200) as spool:
        return [frame.entry for frame in spool.channel(pchannel).frames()]


def filled(folder: Path) -> None:
    with Spool(folder, segment_bytes=200) as spool:
        for entry in ENTRIES:
            spool.channel("p/0").append(entry)


def test_what_was_appended_is_there_in_order_and_what_was_settled_is_not(tmp_path: Path) -> None:
    filled(tmp_path)
    assert held(tmp_path) == ENTRIES
    for settled in range(len(ENTRIES)):
        with Spool(tmp_path, segment_bytes=200) as spool:
            channel = spool.channel("p/0")
            channel.settle(settled)
            assert channel.entries == spool.entries == len(ENTRIES) - settled - 1
        assert held(tmp_path) == ENTRIES[settled + 1 :]
    with Spool(tmp_path) as spool:
        assert (spool.bytes, spool.oldest_ns) == (0, None)
        assert spool.channel("p/0").append(b"next") == len(ENTRIES), "numbers go on"


@pytest.mark.slow
def test_a_torn_end_is_cut_at_the_last_whole_frame_wherever_it_tore(tmp_path: Path) -> None:
    filled(tmp_path)
    last = max((tmp_path / "p%2F0").glob("*.spool"))
    whole = last.read_bytes()
    before = len(ENTRIES) - len(list(_frames(whole)))
    ends = list(_frames(whole))
    for size in range(len(whole)):
        last.write_bytes(whole[:size])
        assert held(tmp_path) == ENTRIES[: before + sum(end <= size for end in ends)]
        last.write_bytes(whole[:size] + bytes(len(whole) - size))  # the file system grew the file, the bytes never came
        assert held(tmp_path) == ENTRIES[: before + sum(end <= size for end in ends)]
    with Spool(tmp_path, segment_bytes=200) as spool:
        spool.channel("p/0").append(b"after the cut")
    assert held(tmp_path)[-1] == b"after the cut"


def test_a_last_frame_that_was_damaged_looks_torn_and_its_bytes_are_kept(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    filled(tmp_path)
    last = max((tmp_path / "p%2F0").glob("*.spool"))
    whole = last.read_bytes()
    *_, begin, end = [0, *_frames(whole)]
    last.write_bytes(whole[: end - 1] + bytes([whole[end - 1] ^ 1]))
    assert held(tmp_path) == ENTRIES[:-1]
    assert "torn" in caplog.text
    kept = (tmp_path / "p%2F0" / "torn").read_bytes()
    assert kept == whole[begin : end - 1] + bytes([whole[end - 1] ^ 1])


def _frames(data: bytes) -> list[int]:
    ends, place = [], 0
    while place < len(data):
        place += 24 + int.from_bytes(data[place : place + 4], "little")
        ends.append(place)
    return ends


def test_a_frame_that_was_damaged_with_others_behind_it_is_said_and_nothing_is_cut(tmp_path: Path) -> None:
    filled(tmp_path)
    before = len(os.listdir("/proc/self/fd"))
    for path in sorted((tmp_path / "p%2F0").glob("*.spool")):
        whole = path.read_bytes()
        is_last = path == max((tmp_path / "p%2F0").glob("*.spool"))
        last_frame = ([0, *_frames(whole)])[-2] if is_last else len(whole)
        for place in range(last_frame):
            path.write_bytes(whole[:place] + bytes([whole[place] ^ 0xFF]) + whole[place + 1 :])
            with pytest.raises(SpoolCorrupted):
                held(tmp_path)
            assert path.stat().st_size == len(whole)
        path.write_bytes(whole)
    assert len(os.listdir("/proc/self/fd")) < before + 50, "a spool that does not open leaves no file open"
    assert held(tmp_path) == ENTRIES


def test_a_power_loss_leaves_what_was_appended_and_what_was_settled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spool, "_PROGRESS_BYTES", 40)  # so that the progress is written anew now and then
    medium = Medium(monkeypatch)
    folder = tmp_path / "new" / "spool"
    with Spool(folder, segment_bytes=200) as kept:
        channel = kept.channel("p/0")
        for number, entry in enumerate(ENTRIES):
            assert channel.append(entry) == number
            if number % 2:
                channel.settle(number // 2)
            left = medium.restore(tmp_path.stat().st_ino, tmp_path / str(number))
            assert held(left / "new" / "spool") == ENTRIES[(number + 1) // 2 : number + 1]


@pytest.mark.parametrize("call", ["write", "fdatasync"])
def test_a_frame_that_the_disk_refused_leaves_no_damage_and_takes_no_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    with Spool(tmp_path, segment_bytes=1_000) as kept:
        channel = kept.channel("p/0")
        channel.append(ENTRIES[0])
        before = kept.bytes
        write = os.write

        def refuse(file: int, data: bytes = b"") -> int:
            if call == "write" and len(data) > 30:
                return write(file, data[:30])  # and then nothing more fits
            raise OSError(28, "injected")

        with monkeypatch.context() as patch:
            patch.setattr(os, call, refuse)
            with pytest.raises(OSError, match="injected"):
                channel.append(ENTRIES[5])
        assert (kept.bytes, channel.entries) == (before, 1)
        channel.append(ENTRIES[1])
    assert held(tmp_path) == ENTRIES[:2]


@pytest.mark.parametrize("entries", [0, 1])
@pytest.mark.parametrize("call", ["open", "fsync"])
def test_a_file_that_the_disk_had_no_room_for_is_made_when_there_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, entries: int
) -> None:
    with Spool(tmp_path, segment_bytes=1) as kept:
        channel = kept.channel("p/0")
        for entry in ENTRIES[:entries]:
            channel.append(entry)

        def refuse(*arguments: object) -> int:
            raise OSError(28, "injected")

        for _ in range(2):
            with monkeypatch.context() as patch:
                patch.setattr(os, call, refuse)
                with pytest.raises(OSError, match="injected"):
                    channel.append(ENTRIES[5])
            taken = os.open(os.devnull, os.O_RDONLY)  # by somebody else, under the number that was free
        channel.append(ENTRIES[1])
        os.fstat(taken)  # nobody closed it
        os.close(taken)
    assert held(tmp_path) == [*ENTRIES[:entries], ENTRIES[1]]


def test_a_progress_file_that_cannot_be_opened_anew_leaves_the_old_one_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spool, "_PROGRESS_BYTES", 1)
    filled(tmp_path)
    real = os.open

    def refuse(path: Path, flags: int, mode: int = 0o777) -> int:
        if Path(path).name == "progress":
            raise OSError(24, "injected")
        return real(path, flags, mode)

    with Spool(tmp_path, segment_bytes=200) as kept:
        channel = kept.channel("p/0")
        with monkeypatch.context() as patch:
            patch.setattr(os, "open", refuse)
            with pytest.raises(OSError, match="injected"):
                channel.settle(0)
        taken = os.open(tmp_path / "another", os.O_WRONLY | os.O_CREAT)
        channel.settle(1)
        os.close(taken)
    assert not (tmp_path / "another").read_bytes()
    (tmp_path / "another").unlink()
    assert held(tmp_path) == ENTRIES[2:]


def test_the_bound_is_kept_and_room_comes_back(tmp_path: Path) -> None:
    with Spool(tmp_path, max_bytes=300, segment_bytes=100) as spool:
        for number in range(300 // (24 + 50)):
            spool.channel(f"p{number % 2}").append(b"x" * 50)
        before = (spool.bytes, spool.entries)
        with pytest.raises(SpoolFull, match="not taken"):
            spool.channel("p0").append(b"x" * 50)
        assert (spool.bytes, spool.entries) == before == (4 * 74, 4)
        spool.channel("p0").settle(1)
        spool.channel("p0").append(b"y" * 50)


def test_a_spool_belongs_to_one_process_at_a_time(tmp_path: Path) -> None:
    with Spool(tmp_path), pytest.raises(SpoolBusy):
        Spool(tmp_path)
    Spool(tmp_path).close()


def test_a_torn_progress_only_repeats_what_was_done(tmp_path: Path) -> None:
    filled(tmp_path)
    with Spool(tmp_path, segment_bytes=10_000) as spool:
        spool.channel("p/0").settle(2)
        spool.channel("p/0").settle(5)
    progress = tmp_path / "p%2F0" / "progress"
    os.truncate(progress, progress.stat().st_size - 3)
    assert held(tmp_path)[-len(ENTRIES) + 6 :] == ENTRIES[6:]


def test_what_was_spooled_is_its_owner_s_alone_to_read(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        with Spool(tmp_path / "spool") as made:
            made.channel("dml_0").append(b"entry")
            found = [tmp_path / "spool", *(tmp_path / "spool").rglob("*")]
    finally:
        os.umask(before)
    assert len(found) > 3
    assert not [path for path in found if path.stat().st_mode & 0o077]
