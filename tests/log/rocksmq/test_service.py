"""Chapter 4's API: channels, consumer groups, produce, consume, seek; and ids, retention, settings."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.base.errors import (
    ChannelExists,
    ChannelNotFound,
    InvalidArgument,
    InvalidSettings,
    LogUnavailable,
    PositionTruncated,
)
from millrace.log.registry import open_service
from millrace.log.rocksmq.id_allocator import TickIdAllocator
from millrace.log.rocksmq.segment import SegmentFiles
from millrace.log.rocksmq.service import RocksMQ
from millrace.log.rocksmq.settings import RocksMQSettings
from millrace.message.ids import LOGICAL_BITS, LogId
from tests.log.crash_images import SETTINGS, append, read


@pytest.fixture
def service(tmp_path: Path) -> Iterator[RocksMQ]:
    with RocksMQ(tmp_path / "data", settings=SETTINGS) as service:
        service.create_channel("c")
        service.create_consumer_group("g")
        yield service


def test_a_group_consumes_each_message_once_in_order(service: RocksMQ) -> None:
    ids = service.produce("c", [b"%d" % index for index in range(25)])
    got = [message for _ in range(9) for message in service.consume("g", "c", 3)]
    assert got == list(zip(ids, [b"%d" % index for index in range(25)], strict=True))
    assert service.current_id("g", "c") == service.end_id("c") == ids[-1] + 1
    assert service.consume("g", "c", 3) == []


def test_groups_and_channels_have_positions_of_their_own(service: RocksMQ) -> None:
    service.create_channel("d")
    service.create_consumer_group("h")
    first, *_ = service.produce("c", [b"a", b"b"])
    service.produce("d", [b"x"])
    assert [message.payload for message in service.consume("g", "c", 1)] == [b"a"]
    assert [message.payload for message in service.consume("h", "c", 9)] == [b"a", b"b"]
    assert [message.payload for message in service.consume("g", "d", 9)] == [b"x"]
    assert service.current_id("g", "c") == first + 1


def test_seek_moves_a_group_back_and_forth(service: RocksMQ) -> None:
    ids = service.produce("c", [b"a", b"b", b"c"])
    service.consume("g", "c", 3)
    service.seek("g", "c", ids[1])
    assert [message.payload for message in service.consume("g", "c", 9)] == [b"b", b"c"]
    service.seek("g", "c", 0)
    assert len(service.consume("g", "c", 9)) == 3


def test_positions_survive_a_restart_and_the_loss_of_the_index(service: RocksMQ, tmp_path: Path) -> None:
    import shutil

    service.produce("c", [b"a", b"b", b"c"])
    service.consume("g", "c", 2)
    shutil.copytree(tmp_path / "data", tmp_path / "crashed", ignore=shutil.ignore_patterns("index"))
    with RocksMQ(tmp_path / "crashed", settings=SETTINGS) as again:
        assert [message.payload for message in again.consume("g", "c", 9)] == [b"c"]


def test_a_position_file_torn_in_its_newest_slot_holds_the_former_position(service: RocksMQ, tmp_path: Path) -> None:
    for position in (11, 22, 33):
        service.seek("g", "c", position)
    service.close()
    path = tmp_path / "data" / "groups" / "~g" / "~c"
    data = bytearray(path.read_bytes())
    newest = data.index((33).to_bytes(8, "little"))
    data[newest] ^= 0xFF
    path.write_bytes(bytes(data))
    with RocksMQ(tmp_path / "data", settings=SETTINGS) as again:
        assert again.current_id("g", "c") == 22


def test_a_group_whose_position_was_truncated_is_told_so(service: RocksMQ) -> None:
    ids = service.produce("c", [b"a", b"b", b"c"])
    service.consume("g", "c", 1)
    service.open("c").truncate(LogId(0, ids[2]))
    assert service.begin_id("c") == ids[2]
    with pytest.raises(PositionTruncated) as raised:
        service.consume("g", "c", 1)
    service.seek("g", "c", raised.value.earliest[1])
    assert [message.payload for message in service.consume("g", "c", 9)] == [b"c"]


def test_groups_and_channels_are_made_once_and_found_or_not(service: RocksMQ) -> None:
    with pytest.raises(ChannelExists):
        service.create_channel("c")
    with pytest.raises(ChannelExists):
        service.create_consumer_group("g")
    for call in (
        lambda: service.consume("nobody", "c", 1),
        lambda: service.consume("g", "nowhere", 1),
        lambda: service.seek("g", "nowhere", 1),
        lambda: service.produce("nowhere", [b""]),
        lambda: service.destroy_channel("nowhere"),
        lambda: service.destroy_consumer_group("nobody"),
    ):
        with pytest.raises(ChannelNotFound):
            call()


def test_what_is_destroyed_leaves_no_position_behind(service: RocksMQ) -> None:
    service.produce("c", [b"a"])
    service.consume("g", "c", 1)
    service.destroy_channel("c")
    service.create_channel("c")
    assert service.current_id("g", "c") == 0
    service.produce("c", [b"b"])
    service.consume("g", "c", 1)
    service.destroy_consumer_group("g")
    service.create_consumer_group("g")
    assert service.current_id("g", "c") == 0


@pytest.mark.parametrize("name", ["", "a/b", "x" * 81, "a\0"])
def test_names_that_are_none_are_refused(service: RocksMQ, name: str) -> None:
    with pytest.raises(InvalidArgument):
        service.create_channel(name)
    with pytest.raises(InvalidArgument):
        service.create_consumer_group(name)


@pytest.mark.parametrize("name", [".", "..", "~", "new-x", "drop-x", "%2F", "ü", "0" * 20])
def test_odd_names_are_names(service: RocksMQ, tmp_path: Path, name: str) -> None:
    service.create_channel(name)
    service.produce(name, [b"x"])
    service.close()
    with RocksMQ(tmp_path / "data", settings=SETTINGS) as again:
        assert again.names() == sorted(["c", name])
        assert [value for _, value in read(again.open(name))] == [b"x"]


def test_what_a_crash_left_goes_and_what_is_not_the_logs_stays(service: RocksMQ, tmp_path: Path) -> None:
    service.produce("c", [b"x"])
    service.close()
    channels, groups = tmp_path / "data" / "channels", tmp_path / "data" / "groups"
    for name in ("new-~half", "drop-~gone", "lost+found", "c.bak"):
        (channels / name).mkdir()
        (channels / name / "file").write_text("bytes")
    (channels / "README").write_text("words")
    (groups / "lost+found").mkdir()
    channel = next(each for each in channels.iterdir() if each.name == "~c")
    for name in ("notes.log", "spare-part", "spare-1.bak"):
        (channel / name).write_text("words")
    with RocksMQ(tmp_path / "data", settings=SETTINGS) as again:
        assert again.names() == ["c"]
        assert again.consumer_groups() == ["g"]
        assert [value for _, value in read(again.open("c"))] == [b"x"]
    assert sorted(each.name for each in channels.iterdir()) == ["README", "c.bak", "lost+found", "~c"]
    assert {"notes.log", "spare-part", "spare-1.bak"} <= {each.name for each in channel.iterdir()}


class Clock:
    def __init__(self, now: int) -> None:
        self.now = now

    def __call__(self) -> int:
        return self.now


def test_ids_are_a_timestamp_and_a_counter_and_never_go_back_even_where_the_clock_does(tmp_path: Path) -> None:
    clock = Clock(1_000_000)
    ids: list[int] = []
    for now in (1_000_000, 1_000_005, 900_000, 1, 1_000_005, 1_000_006):
        clock.now = now
        with RocksMQ(tmp_path, settings=SETTINGS, now_ms=clock) as service:
            if not ids:
                service.create("c")
            ids += service.produce("c", [b"x"] * 3)
            ids += service.produce("c", [b"y"])
            stamps = service.open("c").read(LogId(0, 0)).batch.column("physical_ms").to_pylist()
            assert stamps == sorted(stamps)
            assert stamps == [entry >> LOGICAL_BITS for entry in ids]
    assert ids == sorted(set(ids))
    assert (ids[0], ids[4]) == (1_000_000 << LOGICAL_BITS, 1_000_005 << LOGICAL_BITS)
    assert ids[-4] == 1_000_006 << LOGICAL_BITS


def test_an_id_allocator_numbers_the_entries_of_all_channels(tmp_path: Path) -> None:
    clock = Clock(1000)
    ids = TickIdAllocator(now_ms=clock)
    with RocksMQ(tmp_path / "log", now_ms=clock, id_allocator=ids) as service:
        given = []
        for turn, channel in enumerate(("a", "b", "a", "b")):
            if turn < 2:
                service.create_channel(channel)
            given += service.produce(channel, [b"x"] * 3)
        assert given == list(range(1000 << 18, (1000 << 18) + 12)), "each number once, over both channels"
        assert ids.alloc_one() == given[-1] + 1
        given += service.produce("a", [b"y"])
        assert service.begin_id("a") <= given[0]
        service.create_consumer_group("g")
        assert [each.message_id for each in service.consume("g", "a", 99)] == [*given[:3], *given[6:9], given[-1]]
    # A new allocator whose clock was set back: what the folder holds is not numbered again.
    clock.now = 900
    behind = TickIdAllocator(now_ms=clock)
    with RocksMQ(tmp_path / "log", now_ms=clock, id_allocator=behind) as service:
        with pytest.raises(LogUnavailable, match="must begin above those in the folder"):
            service.produce("a", [b"z"])
        clock.now = 2000
        assert service.produce("a", [b"z"]) == [2000 << 18]
    with pytest.raises(InvalidArgument, match="at least 1"):
        behind.alloc(0)


def test_ids_do_not_go_back_when_everything_was_truncated_and_the_clock_was_set_back(tmp_path: Path) -> None:
    clock = Clock(1_000_000)
    with RocksMQ(tmp_path, settings=SETTINGS, now_ms=clock) as service:
        service.create("c")
        last = service.produce("c", [b"x" * 60_000] * 3)[-1]
    with RocksMQ(tmp_path, settings=SETTINGS, now_ms=clock) as service:
        service.open("c").truncate(LogId(0, last + 1))
    clock.now = 5
    with RocksMQ(tmp_path, settings=SETTINGS, now_ms=clock) as service:
        assert service.produce("c", [b"y"]) == [last + 1]


def segments(service: RocksMQ, count: int) -> list[LogId]:
    log = service.open("c")
    return [append(log, [b"x" * 60_000])[0][0] for _ in range(count)]


def test_files_grow_with_what_a_channel_takes(tmp_path: Path) -> None:
    settings = RocksMQSettings(segment_bytes=8 << 20)

    def sizes(name: str, *entries: bytes) -> list[int]:
        """The sizes of the channel's files in MiB, once it was opened again and took `entries`."""
        with RocksMQ(tmp_path / name, settings=settings) as service:
            if not service.names():
                service.create("p")
            for entry in entries:
                service.open("p").append([entry])
            [folder] = (tmp_path / name / "channels").iterdir()
            return [path.stat().st_size >> 20 for _, path in sorted(SegmentFiles.list_files(folder).items())]

    assert sizes("busy", *[bytes(400 << 10)] * 40) == [1, 3, 8, 8]
    assert sizes("idle", b"one") == [1]
    assert sizes("idle", b"two")[-1] == 1


def test_retention_by_size_gives_up_the_oldest_files_but_nothing_that_a_checkpoint_needs(tmp_path: Path) -> None:
    with RocksMQ(tmp_path, settings=replace(SETTINGS, retention_bytes=200_000)) as service:
        service.create("c")
        log, ids = service.open("c"), segments(service, 8)
        assert log.enforce_retention(allowed=LogId(0, 0)) == 0
        assert log.enforce_retention(allowed=ids[1]) > 0
        assert log.describe().begin == ids[1]
        log.enforce_retention(allowed=log.describe().end)
        assert ids[4] <= log.describe().begin <= ids[5]
        assert log.describe().bytes <= 200_000
        assert log.enforce_retention(allowed=log.describe().end) == 0


def test_retention_by_time_gives_up_what_is_older(tmp_path: Path) -> None:
    clock = Clock(1_000_000)
    with RocksMQ(tmp_path, settings=replace(SETTINGS, retention_ms=1_000), now_ms=clock) as service:
        service.create("c")
        log, old = service.open("c"), segments(service, 3)
        clock.now += 900
        new = segments(service, 3)
        assert log.enforce_retention(allowed=log.describe().end) == 0
        clock.now += 200
        assert log.enforce_retention(allowed=old[1]) > 0
        assert log.describe().begin == old[1]
        log.enforce_retention(allowed=log.describe().end)
        assert old[-1] < log.describe().begin <= new[0]


def test_without_retention_settings_everything_is_kept(service: RocksMQ) -> None:
    segments(service, 4)
    assert service.open("c").enforce_retention(allowed=service.open("c").describe().end) == 0


def test_truncated_files_are_reused_and_superfluous_ones_give_their_space_back(tmp_path: Path) -> None:
    def files() -> tuple[int, int]:
        channel = tmp_path / "channels" / "~c"
        return len(list(channel.glob("*.log"))), len(list(channel.glob("spare-*")))

    with RocksMQ(tmp_path, settings=replace(SETTINGS, spare_files=2)) as service:
        service.create("c")
        ids = segments(service, 8)
        assert files() == (8, 0)
        service.open("c").truncate(ids[6])
        assert files() == (2, 2)
        segments(service, 1)
        assert files() == (3, 1)


def test_a_file_is_not_handed_on_while_a_reader_copies_from_it(
    service: RocksMQ, monkeypatch: pytest.MonkeyPatch
) -> None:
    from millrace.log.rocksmq import channel_log

    log = service.open("c")
    entries = [entry for index in range(4) for entry in append(log, [bytes([index]) * 60_000])]

    def read_while_it_is_truncated(*args: object, **options: object) -> object:
        monkeypatch.undo()
        log.truncate(entries[-1][0])
        for _ in range(4):  # these go into the files that truncation gave up
            append(log, [b"new" * 20_000])
        return read_run(*args, **options)

    read_run = channel_log.read_run
    monkeypatch.setattr(channel_log, "read_run", read_while_it_is_truncated)
    run = log.read(entries[0][0], max_bytes=1)
    assert run.batch.column("value").to_pylist() == [entries[0][1]]
    with pytest.raises(PositionTruncated):
        log.read(run.next)


def test_the_registry_opens_a_service_by_url_or_by_name(tmp_path: Path) -> None:
    with open_service(f"rocksmq://{tmp_path}/a%20b", {"segment_bytes": "65536"}) as service:
        service.create("c")
    assert (tmp_path / "a b").is_dir()
    with open_service("rocksmq", {"path": str(tmp_path / "a b")}) as service:
        assert service.names() == ["c"]


@pytest.mark.parametrize(
    "url, settings",
    [
        ("carrier-pigeon://x", {}),
        ("rocksmq", {}),
        ("rocksmq:///x", {"segment_bits": 1}),
        ("rocksmq:///x", {"segment_bytes": "many"}),
        ("rocksmq:///x", {"segment_bytes": -1}),
        ("rocksmq:///x", {"max_entry_bytes": 0}),
    ],
)
def test_wrong_settings_are_refused_before_anything_is_made(url: str, settings: dict[str, object]) -> None:
    with pytest.raises(InvalidSettings):
        open_service(url, settings)


@given(name=st.sampled_from(["segment_bytes", "spare_files", "group_bytes"]), value=st.integers(1 << 12, 1 << 40))
def test_settings_read_from_text_are_the_numbers(name: str, value: int) -> None:
    assert getattr(RocksMQSettings.of({name: str(value)}), name) == value


def test_one_read_goes_on_across_the_files_that_restarts_begin(tmp_path: Path) -> None:
    entries = []
    for index in range(5):
        with RocksMQ(tmp_path, settings=SETTINGS) as service:
            if not index:
                service.create("c")
            log = service.open("c")
            entries += append(log, [b"%d" % index] * 2)
            run = log.read(LogId(0, 0))
            assert run.batch.column("entry").to_pylist() == [entry_id.entry for entry_id, _ in entries]
            assert run.next == entries[-1][0].following()
            assert log.read(LogId(0, 0), end=entries[-1][0]).batch.num_rows == len(entries) - 1
