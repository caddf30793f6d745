"""A crash at every interesting byte of the last file: after the restart the log is exactly what was acknowledged.

An enumeration, not a dice roll: each record boundary, each part of a record, both with zeros and with the records of a
recycled file's former life behind the tear.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import pytest

from millrace.base.errors import LogCorrupted
from millrace.log.rocksmq import segment
from millrace.log.rocksmq.disk import Buffer, OsDisk
from millrace.log.rocksmq.manifest import ChannelManifest, encode_file_name
from millrace.log.rocksmq.record import HEADER_BYTES, frame_batch, parse_header
from millrace.log.rocksmq.segment import find_durable_end
from millrace.log.rocksmq.service import RocksMQ
from tests.log.crash_images import CHANNEL, SETTINGS, Image, append, begin, make_image, opened, read, records_of


@pytest.fixture(scope="module", params=["fresh file", "recycled file"])
def image(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Image:
    return make_image(tmp_path_factory.mktemp("image"), stale=request.param == "recycled file")


@pytest.fixture(scope="module")
def behind(image: Image) -> bytes:
    """What stood in the last file before this life of it: the bytes that a torn write leaves behind its tear."""
    data = image.tail.read_bytes()
    former = sorted((image.directory / "channels" / encode_file_name(CHANNEL)).glob("spare-*"))
    return former[0].read_bytes() if former and data[image.records[-1].end :].strip(b"\0") else bytes(len(data))


def check(directory: Path, expected: list[tuple[object, bytes]]) -> None:
    """The log holds `expected`, takes appends, and holds both after one more crash and two more restarts."""
    with opened(directory) as log:
        first = begin(log)
        assert read(log, first) == expected
        assert log.verify().first_bad is None
        new = append(log, [b"new", b""])
        assert new[0][0] > expected[-1][0]
        crashed = directory.with_name(directory.name + "-again")
        shutil.rmtree(crashed, ignore_errors=True)
        shutil.copytree(directory, crashed, ignore=shutil.ignore_patterns("index"))
    for again in (directory, crashed):
        with opened(again) as log:
            assert read(log, first) == expected + new
            assert log.verify().first_bad is None


def test_a_crash_right_after_the_acknowledgement_loses_nothing(image: Image, tmp_path: Path) -> None:
    check(image.copy(tmp_path / "data", image.tail.read_bytes()), image.entries(len(image.records)))


def test_a_write_torn_at_any_point_leaves_exactly_the_acknowledged_records(
    image: Image, behind: bytes, tmp_path: Path
) -> None:
    data = image.tail.read_bytes()
    for count, record in enumerate(image.records):
        cuts = {record.offset + 1, record.end - 1} | {start for start, _ in record.places().values()}
        for cut in sorted(cuts if count in (1, len(image.records) - 1) else {record.offset, record.offset + 60}):
            torn = data[:cut] + behind[cut:]
            if count:
                check(image.copy(tmp_path / "data", torn), image.entries(count))
            else:  # the first write of a file: the file goes, and with it nothing that was acknowledged
                check(image.copy(tmp_path / "data", torn), image.before)


def test_the_last_record_garbled_in_any_part_is_a_torn_tail(image: Image, tmp_path: Path) -> None:
    last = image.records[-1]
    for start, stop in last.places().values():
        data = bytearray(image.tail.read_bytes())
        data[start:stop] = bytes(byte ^ 0x5A for byte in data[start:stop])
        check(image.copy(tmp_path / "data", bytes(data)), image.entries(len(image.records) - 1))


def test_damage_before_an_acknowledged_record_is_an_error_and_nothing_is_cut(image: Image, tmp_path: Path) -> None:
    for record in image.records[:-1]:
        for start, stop in record.places().values():
            data = bytearray(image.tail.read_bytes())
            data[start:stop] = bytes(byte ^ 0x5A for byte in data[start:stop])
            directory = image.copy(tmp_path / "data", bytes(data))
            with pytest.raises(LogCorrupted), opened(directory):
                pass
            assert (directory / image.tail.relative_to(image.directory)).read_bytes() == bytes(data)


def test_a_file_that_lost_its_end_is_cut_at_its_last_whole_record(image: Image, tmp_path: Path) -> None:
    data = image.tail.read_bytes()
    for count, record in enumerate(image.records[1:], start=1):
        check(image.copy(tmp_path / "data", data[: record.offset + 30]), image.entries(count))


def test_a_closed_file_that_lost_its_end_is_an_error(image: Image, tmp_path: Path) -> None:
    directory = image.copy(tmp_path / "data", image.tail.read_bytes())
    closed = sorted((directory / "channels" / encode_file_name(CHANNEL)).glob("*.log"))[-2]
    closed.write_bytes(closed.read_bytes()[:30_000])
    with RocksMQ(directory, settings=SETTINGS) as service, pytest.raises(LogCorrupted):
        service.open(CHANNEL)


def test_a_garbled_opening_of_a_file_is_an_error_wherever_it_is_garbled(image: Image, tmp_path: Path) -> None:
    for path in sorted((image.directory / "channels" / encode_file_name(CHANNEL)).glob("*.log"))[-2:]:
        data = path.read_bytes()
        size = HEADER_BYTES + int.from_bytes(data[32:40], "little")
        for place in range(size):
            directory = image.copy(tmp_path / "data", image.tail.read_bytes())
            garbled = directory / path.relative_to(image.directory)
            garbled.write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
            with pytest.raises(LogCorrupted), opened(directory):
                pass


def test_files_that_a_truncation_gave_up_and_could_not_remove_go_with_the_next_opening(
    image: Image, tmp_path: Path
) -> None:
    directory = image.copy(tmp_path / "data", image.tail.read_bytes())
    channel = directory / "channels" / encode_file_name(CHANNEL)
    shutil.copytree(channel, tmp_path / "before")
    with opened(directory) as log:
        log.truncate(image.records[0].entries[0][0])
    kept = {path.name for path in channel.glob("*.log")}
    gone = {path.name for path in (tmp_path / "before").glob("*.log")} - kept
    assert gone
    for name in gone:  # as a crash right behind the manifest leaves them
        shutil.copy(tmp_path / "before" / name, channel / name)
    for spare in channel.glob("spare-*"):
        spare.unlink()
    with opened(directory) as log:
        assert read(log, begin(log)) == image.entries(len(image.records))[len(image.before) :]
    assert {path.name for path in channel.glob("*.log")} == kept


def test_a_truncated_log_whose_files_are_all_missing_is_an_error(image: Image, tmp_path: Path) -> None:
    directory = image.copy(tmp_path / "data", image.tail.read_bytes())
    with opened(directory) as log:
        log.truncate(image.records[1].entries[0][0])
    for path in (directory / "channels" / encode_file_name(CHANNEL)).glob("*.log"):
        path.unlink()
    with pytest.raises(LogCorrupted, match="missing"), opened(directory):
        pass


def test_a_proof_of_what_was_synced_is_found_wherever_the_search_cuts_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(segment, "_SEARCH_WINDOW", 100)
    path = tmp_path / "file"
    for offset in range(250):
        header = frame_batch([b"x"], max_entry_bytes=9).header(salt=7, base=1, durable=77, offset=offset)
        path.write_bytes(bytes(offset) + header + bytes(300))
        with path.open("rb") as file:
            assert find_durable_end(file.fileno(), 7, 0) == 77, f"at {offset}"


def test_a_closed_file_that_is_missing_is_an_error(image: Image, tmp_path: Path) -> None:
    for which in (0, -2):
        directory = image.copy(tmp_path / "data", image.tail.read_bytes())
        sorted((directory / "channels" / encode_file_name(CHANNEL)).glob("*.log"))[which].unlink()
        with RocksMQ(directory, settings=SETTINGS) as service, pytest.raises(LogCorrupted):
            service.open(CHANNEL)


def test_a_garbled_record_in_a_closed_file_is_an_error_for_its_readers_alone(image: Image, tmp_path: Path) -> None:
    directory = image.copy(tmp_path / "data", image.tail.read_bytes())
    closed = sorted((directory / "channels" / encode_file_name(CHANNEL)).glob("*.log"))[-2]
    data = bytearray(closed.read_bytes())
    place = data.rindex(b"filler", 0, data.rindex(b"filler") - 5_000)
    data[place] ^= 1
    closed.write_bytes(bytes(data))
    with RocksMQ(directory, settings=SETTINGS) as service:
        log = service.open(CHANNEL)
        with pytest.raises(LogCorrupted):
            read(log, begin(log))
        report = log.verify()
        assert report.first_bad is not None
        good = [entry for entry in image.before if entry[0] < report.first_bad]
        run = log.read(begin(log), end=report.first_bad)
        assert run.batch.column("value").to_pylist() == [value for _, value in good][: run.batch.num_rows]
        tail = image.records[0].entries[0][0]
        assert read(log, tail) == image.entries(len(image.records))[len(image.before) :]
        append(log, [b"goes on"])


def test_a_record_behind_the_cut_does_not_come_back_to_life(image: Image, tmp_path: Path) -> None:
    # Two batches of one write: the first is torn, the second is whole. Neither was acknowledged.
    data = bytearray(image.tail.read_bytes())
    torn, whole = image.records[-2], image.records[-1]
    unacknowledged = _with_durable(image, bytes(data[whole.offset : whole.end]), whole.offset, torn.offset)
    data[whole.offset : whole.end] = unacknowledged
    data[torn.end - 1] ^= 1
    directory = image.copy(tmp_path / "data", bytes(data))
    with RocksMQ(directory, settings=SETTINGS) as service:
        log = service.open(CHANNEL)
        expected = image.entries(len(image.records) - 2)
        assert read(log, begin(log)) == expected
        # The same shape as the torn one: in the old file it would end exactly where the whole one begins.
        new = append(log, [b"x" * len(value) for _, value in torn.entries])
        crashed = tmp_path / "crashed"
        shutil.copytree(directory, crashed, ignore=shutil.ignore_patterns("index"))
    for again in (directory, crashed):
        with RocksMQ(again, settings=SETTINGS) as service:
            log = service.open(CHANNEL)
            assert read(log, begin(log)) == expected + new


def test_records_of_a_files_former_life_are_not_live_even_where_they_stand_exactly_behind_the_tail(
    tmp_path: Path,
) -> None:
    data, batch = tmp_path / "data", [b"same size" * 500, b""]
    channel = data / "channels" / encode_file_name(CHANNEL)
    with RocksMQ(data, settings=SETTINGS) as service:
        service.create(CHANNEL)
        log = service.open(CHANNEL)
        entries = [entry for _ in range(60) for entry in append(log, batch)]
        log.truncate(entries[-1][0])
        entries = entries[-1:]
        manifest, aligned = ChannelManifest.load(channel), 0
        files = len(list(channel.glob("*.log")))
        while len(list(channel.glob("*.log"))) == files:  # on into a recycled file
            entries += append(log, batch)
        for _ in range(5):
            entries += append(log, batch)
            tail = sorted(channel.glob("*.log"))[-1]
            content = tail.read_bytes()
            end = records_of(tail, channel, entries)[-1].end
            former = int.from_bytes(content[end + 8 : end + 16], "little")
            aligned += former != manifest.salt(int(tail.stem)) and bool(
                parse_header(content, end, salt=former, offset=end)
            )
            shutil.rmtree(tmp_path / "crashed", ignore_errors=True)
            shutil.copytree(data, tmp_path / "crashed", ignore=shutil.ignore_patterns("index"))
            with opened(tmp_path / "crashed") as crashed:
                assert read(crashed, begin(crashed)) == entries
    assert aligned == 5


def test_the_tail_that_nothing_proves_is_written_again_before_it_is_synced_and_served(
    image: Image, tmp_path: Path
) -> None:
    class Recorder(OsDisk):
        calls: ClassVar[list[tuple[str, int, int]]] = []

        def write(self, fd: int, buffers: Sequence[Buffer], offset: int) -> None:
            self.calls.append(("write", offset, sum(map(len, buffers))))
            super().write(fd, buffers, offset)

        def sync(self, fd: int) -> None:
            self.calls.append(("sync", 0, 0))
            super().sync(fd)

    Recorder.calls.clear()
    with opened(image.copy(tmp_path / "data", image.tail.read_bytes()), disk=Recorder()):
        last = image.records[-1]
        assert Recorder.calls == [("write", last.offset, last.size), ("sync", 0, 0)]


def _with_durable(image: Image, record: bytes, offset: int, durable: int) -> bytes:
    """The record as if it had been written in one group with the one before it."""
    from crc32c import crc32c

    rest = record[4:24] + durable.to_bytes(8, "little") + record[32:48]
    return crc32c(rest, offset & 0xFFFFFFFF).to_bytes(4, "little") + rest + record[48:]
