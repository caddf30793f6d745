"""A log over several backends beyond what the conformance suite asks.

The durable list, ids, what a switch does to handles.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from millrace.base.deadline import Deadline
from millrace.base.errors import (
    ChannelNotFound,
    InvalidArgument,
    InvalidSettings,
    LogBusy,
    LogCorrupted,
    LogUnavailable,
    PositionTruncated,
    UnsupportedVersion,
)
from millrace.base.file_lock import exclusive_lock
from millrace.log.generations.generation_file import FILE, LOCK, GenerationFile
from millrace.log.generations.service import GenerationsService, open_deployment_log
from millrace.message.builders import alter_wal
from millrace.message.ids import EARLIEST, LogId, LogIds, generation_start
from millrace.message.wire.encode import encode_entry
from tests.conformance.reading import read_all

DEADLINE = 20.0
BARRIER = encode_entry([alter_wal(term=1, generation=1, log="rocksmq")])


@pytest.fixture
def service(tmp_path: Path) -> Iterator[GenerationsService]:
    with open_deployment_log(tmp_path) as opened:
        opened.create("p")
        yield opened


def add_generation(service: GenerationsService, **since: LogId) -> None:
    service.file.change(lambda list_: list_.with_next("rocksmq", since))
    service.backend(service.file.generations.newest).create("p")


def switch(service: GenerationsService) -> LogId:
    """Let `p` go on in a new generation; where its log ended, in that generation's own ids."""
    number = service.file.generations.newest
    add_generation(service)
    end = service.backend(number).open("p").describe().end
    service.file.change(lambda list_: list_.with_end(number, "p", end).with_closed(number))
    return end


# --- the list ---------------------------------------------------------------------------------------------------------


def test_a_deployment_that_never_switched_has_the_backends_own_ids(tmp_path: Path) -> None:
    with open_deployment_log(tmp_path) as service:
        service.create("p")
        log = service.open("p")
        assert log.append([b"a"])[0].ledger == 0
        assert isinstance(log.append([b"b", b"c"]), LogIds)


def test_from_its_first_channel_on_a_log_is_where_it_is_whatever_the_settings_say(tmp_path: Path) -> None:
    elsewhere = f"rocksmq://{tmp_path / 'elsewhere'}"
    with open_deployment_log(tmp_path / "log") as service:
        service.file.ensure_written()
    (tmp_path / "log" / FILE).unlink()  # nothing was made yet: the settings may still change
    with open_deployment_log(tmp_path / "log", elsewhere) as service:
        assert not (tmp_path / "log" / FILE).exists()
        service.create("p")
        service.open("p").append([b"a"])
    with pytest.raises(InvalidSettings, match=f"MILLRACE_LOG={elsewhere}"):
        open_deployment_log(tmp_path / "log")
    with open_deployment_log(tmp_path / "log", elsewhere) as service:
        assert service.names() == ["p"]


def test_who_makes_the_first_channel_by_other_settings_than_another_process_is_refused(tmp_path: Path) -> None:
    one, other = GenerationFile(tmp_path, ""), GenerationFile(tmp_path, "kafka://b:9092/p")
    one.ensure_written()
    with pytest.raises(InvalidSettings, match="MILLRACE_LOG=rocksmq"):
        other.ensure_written()
    one.ensure_written()
    assert [item.url for item in GenerationFile(tmp_path, "").generations.items] == ["rocksmq"]


def test_brokers_that_have_other_addresses_now_hold_the_same_log(tmp_path: Path) -> None:
    GenerationFile(tmp_path, "kafka://b:9092/p?acks=all").ensure_written()
    moved = "kafka://c:9093,d:9093/p?acks=1"
    assert [item.url for item in GenerationFile(tmp_path, moved).generations.items] == [moved]
    for url in ("kafka://b:9092/q", "pulsar://b:9092/p", "rocksmq"):
        with pytest.raises(InvalidSettings, match="MILLRACE_LOG=kafka://b:9092/p"):
            GenerationFile(tmp_path, url)
    GenerationFile(tmp_path, moved).change(lambda list_: list_.with_next("kafka://e:9092/p", {}))
    GenerationFile(tmp_path, "kafka://e:9092/p")
    with pytest.raises(InvalidSettings):  # of which of the two clusters, nobody can say
        GenerationFile(tmp_path, "kafka://f:9092/p")


def test_the_list_survives_a_restart_and_another_process_notices_a_change(tmp_path: Path) -> None:
    one, other = GenerationFile(tmp_path, ""), GenerationFile(tmp_path, "rocksmq")
    assert other.refresh() is other.refresh()
    one.change(lambda list_: list_.with_next("kafka://b:9092/p", {"p": LogId(0, 3)}).with_end(0, "p", LogId(0, 5)))
    assert other.refresh() == one.generations
    again = GenerationFile(tmp_path, "").generations
    assert again.items[0].since == {"p": LogId(0, 3)}
    assert again.items[0].ends == {"p": LogId(0, 5)}
    assert [item.url for item in again.items] == ["rocksmq", "kafka://b:9092/p"]


def test_an_end_that_is_kept_is_never_replaced(tmp_path: Path) -> None:
    file = GenerationFile(tmp_path, "")
    file.change(lambda list_: list_.with_next("rocksmq", {}).with_end(0, "p", LogId(0, 5)))
    before = (tmp_path / FILE).stat()
    file.change(lambda list_: list_.with_end(0, "p", LogId(0, 9)))
    assert file.generations.items[0].ends == {"p": LogId(0, 5)}
    assert (tmp_path / FILE).stat().st_ino == before.st_ino


def test_a_damaged_list_is_an_error_and_never_an_empty_one(tmp_path: Path) -> None:
    GenerationFile(tmp_path, "").change(lambda list_: list_.with_next("rocksmq", {}))
    path = tmp_path / FILE
    whole = path.read_text()
    document = json.loads(whole)
    damaged = [whole[:40], "", "[]", whole.replace('"closed": false', '"closed": true', 1)]
    for text in damaged:
        path.write_text(text)
        with pytest.raises(LogCorrupted, match="restore it"):
            GenerationFile(tmp_path, "")
    path.write_text(json.dumps(document | {"version": 3}))
    with pytest.raises(UnsupportedVersion):
        GenerationFile(tmp_path, "")


def test_a_setting_that_names_none_of_the_backends_is_refused_with_what_to_do(tmp_path: Path) -> None:
    file = GenerationFile(tmp_path, "")
    file.change(lambda list_: list_.with_next("kafka://b:9092/p?security.protocol=SSL", {}))
    for url in ("", "rocksmq", "kafka://b:9092/p", "kafka://b:9092/p?acks=all"):
        GenerationFile(tmp_path, url)
    for url in ("kafka://b:9092/q", "pulsar://b:6650/t/n"):
        with pytest.raises(InvalidSettings, match="MILLRACE_LOG=kafka://b:9092/p"):
            GenerationFile(tmp_path, url)


def test_the_settings_options_go_over_those_of_the_list(tmp_path: Path) -> None:
    GenerationFile(tmp_path, "").change(lambda list_: list_.with_next("kafka://b:9092/p?a=1", {}))
    assert GenerationFile(tmp_path, "kafka://b:9092/p?a=2").generations.items[1].url == "kafka://b:9092/p?a=2"
    assert GenerationFile(tmp_path, "kafka://b:9092/p").generations.items[1].url == "kafka://b:9092/p?a=1"


def test_who_must_not_open_an_embedded_log_is_sent_to_its_server(tmp_path: Path) -> None:
    GenerationFile(tmp_path, "").change(lambda list_: list_.with_next("rocksmq", {}))
    with pytest.raises(LogUnavailable, match="server"):
        open_deployment_log(tmp_path, embedded=False)
    assert not (tmp_path / "generation-1").exists()


def test_two_writers_of_the_list_take_turns(tmp_path: Path) -> None:
    file = GenerationFile(tmp_path, "")
    with exclusive_lock(tmp_path / LOCK, deadline=Deadline.after(1)), pytest.raises(LogBusy):
        file.change(lambda list_: list_.with_next("rocksmq", {}), timeout=0.05)
    assert not (tmp_path / FILE).exists()


# --- reading and appending across a switch ----------------------------------------------------------------------------


def test_entries_of_all_generations_are_one_log_in_order_with_ids_of_their_own(service: GenerationsService) -> None:
    log, wanted = service.open("p"), []
    for number in range(3):
        values = [b"%d.%d" % (number, place) for place in range(4)]
        ids = log.append(values)
        assert {entry_id.generation for entry_id in ids} == {number}
        wanted += zip(ids, values, strict=True)
        switch(service)
    assert read_all(log) == wanted
    assert wanted == sorted(wanted)
    assert log.describe().begin == EARLIEST
    assert log.describe().end == generation_start(3)
    for place, (entry_id, _) in enumerate(wanted):
        assert read_all(log, entry_id) == wanted[place:]
        assert read_all(log, end=entry_id) == wanted[:place]


def test_what_stands_behind_the_end_of_a_generation_is_not_read(service: GenerationsService) -> None:
    log = service.open("p")
    log.append([b"a"])
    end = switch(service)
    service.backend(0).open("p").append([b"raced"])
    last = log.append([b"b"])[0]
    assert [value for _, value in read_all(log)] == [b"a", b"b"]
    assert read_all(log, end) == [(last, b"b")]


def test_a_reader_that_waits_is_woken_by_an_append_to_the_next_generation(
    service: GenerationsService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("millrace.log.generations.log.LOCAL_WAIT_SLICE", 0.25)
    log = service.open("p")
    position = log.append([b"a"])[0].following()
    found: list[bytes] = []
    reader = threading.Thread(
        target=lambda: found.extend(log.read(position, timeout=DEADLINE).batch.column("value").to_pylist())
    )
    reader.start()
    switch(service)
    service.open("p").append([b"b"])
    reader.join(DEADLINE)
    assert found == [b"b"]


def test_a_reader_of_an_empty_new_generation_waits_in_vain_and_then_stands_there(service: GenerationsService) -> None:
    log = service.open("p")
    position = log.append([b"a"])[0].following()
    switch(service)
    run = log.read(position, timeout=0.05)
    assert (run.batch.num_rows, run.next) == (0, generation_start(1))


def test_a_generation_that_is_not_in_the_list_is_unavailable_until_it_is(service: GenerationsService) -> None:
    log = service.open("p")
    with pytest.raises(LogUnavailable, match="millrace log switch"):
        log.read(generation_start(1), timeout=0.05)
    switch(service)
    ids = log.append([b"a"])
    assert read_all(log, generation_start(1)) == [(ids[0], b"a")]


def test_an_append_that_a_switch_overtook_is_not_acknowledged(service: GenerationsService) -> None:
    log = service.open("p")
    log.append([b"before"])
    add_generation(service, p=EARLIEST)
    assert log.append([b"still inside"])[0].generation == 0
    service.backend(0).open("p").append([BARRIER])
    with pytest.raises(LogUnavailable, match="append again"):
        log.append([b"behind"])  # though nobody has kept yet where the log ended
    end = log.read(EARLIEST).batch.column("entry")[2].as_py() + 1
    assert log.record_end(LogId(0, end))
    assert log.append([b"behind"])[0].generation == 1
    assert [value for _, value in read_all(log)] == [b"before", b"still inside", BARRIER, b"behind"]


def test_a_pchannel_passes_by_itself_while_others_stay(service: GenerationsService) -> None:
    service.create("q")
    service.file.change(lambda list_: list_.with_next("rocksmq", {}))
    service.backend(1).create("p")
    service.file.change(lambda list_: list_.with_end(0, "p", EARLIEST))
    assert service.open("p").append([b"a"])[0].generation == 1
    assert service.open("q").append([b"a"])[0].generation == 0
    assert service.names() == ["p", "q"]


def test_a_log_that_passes_is_made_in_the_new_backend_where_the_switch_did_not_know_it_yet(
    service: GenerationsService,
) -> None:
    service.create("late")
    log = service.open("late")
    log.append([b"a"])
    service.file.change(lambda list_: list_.with_next("rocksmq", {}))
    assert log.record_end(log.describe().end)
    assert log.append([b"b"])[0].generation == 1
    assert [value for _, value in read_all(service.open("late"))] == [b"a", b"b"]


def test_a_log_that_is_missing_in_a_backend_that_all_have_passed_to_is_an_error(service: GenerationsService) -> None:
    service.open("p").append([b"a"])
    switch(service)
    service.backend(1).drop("p")
    with pytest.raises(ChannelNotFound):
        service.open("p")


def test_a_log_that_is_made_while_a_switch_is_under_way_begins_in_the_new_generation(
    service: GenerationsService,
) -> None:
    add_generation(service)
    service.create("late")
    log = service.open("late")
    assert log.describe().end == EARLIEST
    ids = log.append([b"a"])
    assert ids[0].generation == 1
    assert read_all(log) == [(ids[0], b"a")]


# --- truncation, dropping, groups -------------------------------------------------------------------------------------


def test_truncation_gives_up_older_generations_whole_and_names_the_earliest_position(
    service: GenerationsService, tmp_path: Path
) -> None:
    log = service.open("p")
    first = log.append([b"a" * 1000])[0]
    switch(service)
    second = log.append([b"b"] * 2)
    assert log.truncate(second[1]) > 0
    assert log.describe().begin == second[1]
    for position in (EARLIEST, first, first.following(), second[0]):
        with pytest.raises(PositionTruncated) as raised:
            log.read(position)
        assert raised.value.earliest == tuple(second[1])
    assert log.truncate(first) == 0
    service.close()
    with open_deployment_log(tmp_path) as again:
        assert again.open("p").describe().begin == second[1]
        assert 0 not in again._backends  # the old backend is not needed any more
        assert again.groups() == []
        assert 0 not in again._backends


def test_truncating_beyond_the_end_is_refused(service: GenerationsService) -> None:
    log = service.open("p")
    with pytest.raises(InvalidArgument):
        log.truncate(generation_start(1))


def test_a_log_that_was_dropped_and_made_again_is_new(service: GenerationsService) -> None:
    log = service.open("p")
    log.append([b"a"])
    service.move_group("g", "p", EARLIEST)
    switch(service)
    log.append([b"b"])
    service.drop("p")
    assert service.names() == []
    with pytest.raises(ChannelNotFound):
        service.open("p")
    service.create("p")
    again = service.open("p")
    assert again.describe().end == EARLIEST
    assert read_all(again) == []
    assert service.group_position("g", "p") is None


def test_a_group_goes_on_in_the_next_generation_and_back(service: GenerationsService, tmp_path: Path) -> None:
    log = service.open("p")
    old = log.append([b"a", b"b"])
    service.move_group("g", "p", old[1])
    switch(service)
    new = log.append([b"c", b"d"])
    assert service.group_position("g", "p") == old[1]
    for position in (new[1], old[0], new[0].following(), old[1].following(), EARLIEST):
        service.move_group("g", "p", position)
        assert service.group_position("g", "p") == position
        assert read_all(log, service.group_position("g", "p") or EARLIEST) == read_all(log, position)
    service.move_group("g", "p", generation_start(1))
    assert read_all(log, service.group_position("g", "p") or EARLIEST) == list(zip(new, [b"c", b"d"], strict=True))
    service.drop_group("g")
    assert service.groups() == []
    assert service.group_position("g", "p") is None
