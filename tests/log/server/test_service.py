"""The log's server over a log in memory, in one process: what it merges, refuses, passes on and finishes."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import flight

from millrace.base.deadline import Deadline
from millrace.base.errors import (
    AppendRejected,
    ChannelExists,
    ChannelNotFound,
    EntryTooLarge,
    InvalidArgument,
    LogUnavailable,
    PositionTruncated,
)
from millrace.log.server.flight import ReadLimits
from millrace.message.ids import EARLIEST, LogId
from millrace.message.log_entries import ENTRY_OVERHEAD_BYTES, ENTRY_SCHEMA, LogDescription, LogEntries
from millrace.rpc import calls
from millrace.rpc.discovery import write_record
from millrace.rpc.remote_log import RemoteLogService
from tests.log.server_rig import LARGEST, PATIENCE, MemoryLog, Rig, values_of
from tests.waiting import until


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    rig = Rig(tmp_path)
    yield rig
    rig.close()


def test_what_was_appended_is_read_back_with_its_ids(rig: Rig) -> None:
    log, _ = rig.log()
    assert log.append([b"a", b"", b"c"]) == [LogId(0, 0), LogId(0, 1), LogId(0, 2)]
    assert log.append(pa.array([b"d", b"e"], pa.large_binary()).slice(1)) == [LogId(0, 3)]
    assert log.append([]) == []
    with pytest.raises(InvalidArgument):
        log.append(["text"])  # type: ignore[list-item]
    with pytest.raises(InvalidArgument):
        log.append([b"a", None])  # type: ignore[list-item]
    entries = log.read(EARLIEST)
    assert entries.batch.schema == ENTRY_SCHEMA
    assert values_of(entries) == [b"a", b"", b"c", b"e"]
    assert entries.next == LogId(0, 4)
    assert values_of(log.read(LogId(0, 1), end=LogId(0, 3))) == [b"", b"c"]


def test_a_read_beyond_the_end_is_an_empty_run_at_its_position(rig: Rig) -> None:
    log, _ = rig.log()
    log.append([b"a"])
    entries = log.read(LogId(0, 1), timeout=0.1)
    assert entries.batch.schema == ENTRY_SCHEMA
    assert (entries.batch.num_rows, entries.next) == (0, LogId(0, 1))


def test_a_large_read_crosses_in_pieces_and_comes_out_whole(tmp_path: Path) -> None:
    rig = Rig(tmp_path, ReadLimits(chunk_bytes=1000))
    try:
        log, _ = rig.log()
        sent = [bytes([number]) * 100 for number in range(200)]
        log.append(sent)
        assert values_of(log.read(EARLIEST)) == sent
        some = values_of(log.read(EARLIEST, max_bytes=5000))
        assert some == sent[: len(some)]
        assert 4500 <= sum(len(value) + ENTRY_OVERHEAD_BYTES for value in some) <= 5000
        assert len(values_of(log.read(EARLIEST, max_bytes=1))) == 1
    finally:
        rig.close()


def test_errors_cross_the_wire_as_what_they_are(rig: Rig) -> None:
    log, _ = rig.log()
    with pytest.raises(ChannelExists):
        rig.service.create("p0")
    with pytest.raises(ChannelNotFound):
        rig.service.open("elsewhere")
    with pytest.raises(ChannelNotFound):
        rig.service.drop("elsewhere")
    with pytest.raises(InvalidArgument), rig.link() as link:
        link.act("no such action", {}, timeout=PATIENCE)
    log.append([b"a", b"b", b"c"])
    assert log.truncate(LogId(0, 2)) == 2
    with pytest.raises(PositionTruncated) as caught:
        log.read(EARLIEST)
    assert caught.value.earliest == (0, 2)
    assert log.describe() == LogDescription(LogId(0, 2), LogId(0, 3), 3)


def test_an_append_that_is_refused_leaves_its_stream_usable(rig: Rig) -> None:
    log, _ = rig.log()
    with pytest.raises(EntryTooLarge, match="split it"):
        log.append([bytes(LARGEST + 1)])
    assert log.append([b"a"]) == [LogId(0, 0)]


def test_an_append_to_a_dropped_log_says_so_and_works_once_it_is_there_again(rig: Rig) -> None:
    log, _ = rig.log()
    log.append([b"a"])
    rig.service.drop("p0")
    assert rig.service.names() == []
    with pytest.raises(ChannelNotFound):
        log.append([b"b"])
    rig.service.create("p0")
    assert log.append([b"c"]) == [LogId(0, 0)]


def test_appends_that_arrive_while_the_log_is_busy_are_merged_in_order(rig: Rig) -> None:
    log, engine = rig.log()
    engine.may_append.clear()
    with log.pipeline() as pipeline:
        pending = [pipeline.submit([b"%d" % number, b"+"]) for number in range(40)]
        assert engine.arrived.acquire(timeout=PATIENCE)
        engine.may_append.set()
        got = [each.result() for each in pending]
    assert got == [[LogId(0, 2 * number), LogId(0, 2 * number + 1)] for number in range(40)]
    assert len(engine.append_sizes) < 40
    assert values_of(log.read(EARLIEST))[::2] == [b"%d" % number for number in range(40)]


def test_one_bad_append_among_merged_ones_fails_alone_and_none_is_doubled(rig: Rig) -> None:
    log, engine = rig.log()
    engine.may_append.clear()
    with log.pipeline() as pipeline:
        first = pipeline.submit([b"first"])
        assert engine.arrived.acquire(timeout=PATIENCE)
        good = pipeline.submit([b"good"])
        bad = pipeline.submit([b"never", bytes(LARGEST + 1)])
        last = pipeline.submit([b"last"])
        engine.may_append.set()
        assert last.result() == [LogId(0, 2)]
        assert (first.result(), good.result()) == ([LogId(0, 0)], [LogId(0, 1)])
        with pytest.raises(EntryTooLarge):
            bad.result()
    assert values_of(log.read(EARLIEST)) == [b"first", b"good", b"last"]


def test_a_pipeline_takes_no_more_than_its_room(rig: Rig) -> None:
    log, _ = rig.log()
    with log.pipeline(appends=2) as pipeline:
        assert pipeline.submit([]).result() == []
        pending = [pipeline.submit([b"%d" % number]) for number in range(10)]
        assert all(each.done for each in pending[:8])
        pipeline.flush()
        assert all(each.done for each in pending)


def test_a_log_that_stopped_itself_is_opened_again_for_the_next_append(rig: Rig) -> None:
    log, engine = rig.log()
    engine.failure = LogUnavailable("the disk is full")
    with pytest.raises(LogUnavailable, match="disk is full"):
        log.append([b"a"])
    rig.engine.logs["p0"] = MemoryLog()
    assert log.append([b"b"]) == [LogId(0, 0)]
    assert engine.append_sizes == []


def test_an_internal_failure_of_an_append_is_ambiguous(rig: Rig) -> None:
    log, engine = rig.log()
    engine.failure = ZeroDivisionError("by zero")
    with pytest.raises(LogUnavailable, match="by zero"):
        log.append([b"a"])


@pytest.mark.parametrize("token", ["", "wrong", "almost"])
def test_a_call_without_the_token_is_refused(rig: Rig, token: str) -> None:
    log, _ = rig.log()
    log.append([b"a"])
    given = (rig.record.token[:-1] if token == "almost" else token).encode()
    options = flight.FlightCallOptions(timeout=PATIENCE, headers=[(b"authorization", b"Bearer " + given)])
    ticket = flight.Ticket(b'{"pchannel":"p0","position":[0,0]}')
    with flight.FlightClient(rig.record.address) as client:
        for bad in (options, flight.FlightCallOptions(timeout=PATIENCE)):
            with pytest.raises(flight.FlightUnauthenticatedError):
                list(client.do_action(flight.Action("drop", b'{"pchannel":"p0"}'), bad))
            with pytest.raises(flight.FlightUnauthenticatedError):
                client.do_get(ticket, bad).read_all()
            with pytest.raises(flight.FlightUnauthenticatedError):
                # Refused at the opening or at the first read, as the network has it.
                client.do_exchange(flight.FlightDescriptor.for_command(b'{"append":"p0"}'), bad)[1].read_chunk()
    assert rig.service.names() == ["p0"]


def test_one_call_says_where_several_logs_end(rig: Rig) -> None:
    for number in range(3):
        rig.service.create(f"e{number}")
        rig.service.open(f"e{number}").append([b"x"] * number)
    names = ["e0", "e1", "e2"]
    assert rig.service.ends(names) == {name: rig.service.open(name).end() for name in names}
    assert rig.service.ends([]) == {}
    with pytest.raises(ChannelNotFound):
        rig.service.ends(["e0", "nowhere"])
    for wrong in ({}, {"pchannels": "e0"}, {"pchannels": [5]}):
        with pytest.raises(InvalidArgument, match="name"):
            rig.service.call(calls.ENDS, wrong)


def test_a_client_with_an_old_token_says_that_it_was_not_let_in(rig: Rig, tmp_path: Path) -> None:
    folder = tmp_path / "old"
    folder.mkdir()
    _published = write_record(folder, replace(rig.record, token="of an earlier start"))
    with pytest.raises(LogUnavailable, match="token"):
        RemoteLogService.connect(folder, start=False, deadline=0.3)


@pytest.mark.parametrize(
    "batch",
    [
        pa.record_batch({"value": pa.array(["text"])}),
        pa.record_batch({"other": pa.array([b"x"], pa.large_binary())}),
        pa.record_batch({"value": pa.array([None], pa.large_binary())}),
    ],
)
def test_a_batch_of_another_form_is_refused_and_not_appended(rig: Rig, batch: pa.RecordBatch) -> None:
    _, engine = rig.log()
    with rig.link() as link:
        writer, reader = link.client.do_exchange(
            flight.FlightDescriptor.for_command(b'{"append":"p0"}'), link.options(PATIENCE)
        )
        writer.begin(batch.schema)
        writer.write_batch(batch)
        assert b"INVALID_ARGUMENT" in reader.read_chunk().app_metadata.to_pybytes()
        writer.done_writing()
        writer.close()
    assert engine.append_sizes == []


def test_a_waiting_read_returns_when_an_entry_comes(rig: Rig) -> None:
    log, _ = rig.log()
    found: list[LogEntries] = []
    reading = threading.Thread(target=lambda: found.append(log.read(EARLIEST, timeout=PATIENCE)))
    reading.start()
    log.append([b"at last"])
    reading.join(PATIENCE)
    assert [values_of(entries) for entries in found] == [[b"at last"]]


def test_more_waiting_reads_than_the_server_waits_for_all_get_their_entry(tmp_path: Path) -> None:
    rig = Rig(tmp_path, ReadLimits(waiting=2, wait_slice=0.05))
    try:
        log, _ = rig.log()
        other, _ = rig.log("p1")
        found: list[list[bytes]] = []
        threads = [
            threading.Thread(target=lambda: found.append(values_of(log.read(EARLIEST, timeout=PATIENCE))))
            for _ in range(6)
        ]
        for thread in threads:
            thread.start()
        # The server goes on serving others while they wait.
        assert other.append([b"meanwhile"]) == [LogId(0, 0)]
        log.append([b"x"])
        for thread in threads:
            thread.join(PATIENCE)
        assert found == [[b"x"]] * 6
    finally:
        rig.close()


def test_a_wait_longer_than_the_server_allows_goes_on_in_the_client(tmp_path: Path) -> None:
    rig = Rig(tmp_path, ReadLimits(max_wait=0.05, wait_slice=0.01))
    try:
        log, engine = rig.log()
        reading = threading.Thread(target=lambda: found.append(values_of(log.read(EARLIEST, timeout=PATIENCE))))
        found: list[list[bytes]] = []
        reading.start()
        reading.join(0.3)
        assert reading.is_alive()
        engine.append([b"x"])
        reading.join(PATIENCE)
        assert found == [[b"x"]]
    finally:
        rig.close()


def test_a_server_that_does_not_answer_costs_no_more_than_the_deadline(tmp_path: Path) -> None:
    rig = Rig(tmp_path, deadline=0.5)
    try:
        log, engine = rig.log()
        engine.may_append.clear()
        with pytest.raises(LogUnavailable, match="unknown"):
            log.append([b"slow"])
        engine.may_append.set()
    finally:
        rig.close()


def test_a_stopping_server_finishes_what_it_took_and_takes_no_more(rig: Rig) -> None:
    log, engine = rig.log()
    log.append([b"before"])
    engine.may_append.clear()
    acknowledged: list[list[LogId]] = []
    appending = threading.Thread(target=lambda: acknowledged.append(log.append([b"under way"])))
    while engine.arrived.acquire(blocking=False):
        pass
    appending.start()
    assert engine.arrived.acquire(timeout=PATIENCE)
    with rig.link() as link, link.stream("p0") as idle:
        closing = threading.Thread(target=rig.server.close)
        closing.start()
        while not rig.server.gate.closed:
            closing.join(0.01)
        idle.send(pa.array([b"too late"], pa.large_binary()), deadline=Deadline.never())
        with pytest.raises(Exception) as refused:
            idle.receive(deadline=Deadline.never())
        assert type(refused.value).__name__ == "NotAccepted"
        assert not rig.engine.closed
        engine.may_append.set()
        appending.join(PATIENCE)
        closing.join(PATIENCE)
    assert acknowledged == [[LogId(0, 1)]]
    assert rig.engine.closed
    assert rig.extension.closed
    assert values_of(engine.read(EARLIEST)) == [b"before", b"under way"]


def test_an_extension_hears_what_a_caller_had_the_log_give_up(rig: Rig) -> None:
    log, _ = rig.log()
    log.append([b"a", b"b", b"c"])
    freed = log.truncate(LogId(0, 2))
    assert rig.extension.freed == [("p0", freed)]


def test_an_extension_is_served_by_the_same_process(rig: Rig) -> None:
    with rig.link() as link:
        assert link.act("echo/back", {"a": 1}, timeout=PATIENCE) == {"a": 1}
        with pytest.raises(AppendRejected) as caught:
            link.act("echo/refuse", {}, timeout=PATIENCE)
        assert caught.value.reason == "TOO_LARGE"
        with pytest.raises(InvalidArgument, match="extension"):
            link.act("absent/back", {}, timeout=PATIENCE)
        command = b'{"extension":"echo","more":1}'
        table = link.client.do_get(flight.Ticket(command), link.options(PATIENCE)).read_all()
        assert table.column("ticket").to_pylist() == [command]
        writer, reader = link.client.do_exchange(flight.FlightDescriptor.for_command(command), link.options(PATIENCE))
        writer.begin(pa.schema([]))
        writer.write_metadata(pa.py_buffer(b"hello"))
        assert reader.read_chunk().app_metadata.to_pybytes() == b"hello"
        writer.done_writing()
        writer.close()


@pytest.mark.parametrize("way", ["action", "stream"])
def test_what_an_extension_has_not_answered_is_work_under_way(rig: Rig, way: str) -> None:
    gate = rig.server.gate
    with rig.link() as link:
        command = flight.FlightDescriptor.for_command(b'{"extension":"echo"}')
        writer, reader = link.client.do_exchange(command, link.options(PATIENCE))
        writer.begin(pa.schema([]))
        until(lambda: gate.idle_seconds > 0.01, "an open stream is no work")
        rig.extension.may_answer.clear()
        acting = threading.Thread(target=lambda: link.act("echo/back", {}, timeout=PATIENCE))
        if way == "action":
            acting.start()
        else:
            writer.write_metadata(pa.py_buffer(b"hello"))
        until(lambda: gate.idle_seconds == 0.0, "the request is work")
        rig.extension.may_answer.set()
        if way == "action":
            acting.join(PATIENCE)
        else:
            reader.read_chunk()
        until(lambda: gate.idle_seconds > 0.0, "it is answered")
        writer.done_writing()
        writer.close()


def test_many_threads_share_one_log_and_lose_nothing(rig: Rig) -> None:
    log, _ = rig.log()
    got: dict[LogId, bytes] = {}

    def work(name: int) -> None:
        for number in range(50):
            value = b"%d-%d" % (name, number)
            got[log.append([value])[0]] = value

    threads = [threading.Thread(target=work, args=(name,)) for name in range(4)]
    with ExitStack() as stack:
        for thread in threads:
            thread.start()
            stack.callback(thread.join, PATIENCE)
    entries = log.read(EARLIEST)
    assert values_of(entries) == [got[LogId(0, entry)] for entry in range(200)]
    for name in range(4):
        mine = [value for value in values_of(entries) if value.startswith(b"%d-" % name)]
        assert mine == [b"%d-%d" % (name, number) for number in range(50)]
