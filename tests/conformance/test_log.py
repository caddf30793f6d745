"""What log/protocol.py promises of one log, on every backend."""

from __future__ import annotations

import struct
import threading
import time

import pyarrow as pa
import pytest

from millrace.base.errors import EntryTooLarge, InvalidArgument, LogUnavailable, PositionTruncated
from millrace.log.protocol import Log
from millrace.message.ids import EARLIEST, LogId
from tests.conformance.backends import MAX_ENTRY_BYTES
from tests.conformance.conftest import Deployment
from tests.conformance.reading import read_all, stamps

DEADLINE = 20.0


def test_a_new_log_is_empty_and_accepts_the_earliest_position(log: Log) -> None:
    described = log.describe()
    assert described.begin == described.end == EARLIEST
    run = log.read(EARLIEST)
    assert (run.batch.num_rows, run.next) == (0, EARLIEST)


def test_what_was_appended_is_read_in_order_with_the_ids_that_append_gave(log: Log) -> None:
    batches = [[b"%d.%d" % (batch, index) for index in range(batch + 1)] for batch in range(20)]
    ids = [log.append(batch) for batch in batches]
    flat = [entry_id for batch in ids for entry_id in batch]
    assert flat == sorted(set(flat))
    assert read_all(log) == list(zip(flat, [value for batch in batches for value in batch], strict=True))
    assert log.describe().end == log.end() == flat[-1].following()


@pytest.mark.parametrize("cut", [slice(None), slice(1, 5), slice(4, None), slice(2, 3)])
def test_an_arrow_array_is_appended_as_its_values_even_where_it_is_a_slice(log: Log, cut: slice) -> None:
    values = [b"a", b"", b"ccc" * 999, b"d\0", b"", b"f"]
    array = pa.array(values, pa.large_binary())[cut]
    ids = log.append(array)
    assert read_all(log) == list(zip(ids, values[cut], strict=True))


def test_an_arrow_array_with_a_null_is_refused_and_nothing_is_appended(log: Log) -> None:
    with pytest.raises(InvalidArgument):
        log.append(pa.array([b"a", None], pa.large_binary()))
    assert read_all(log) == []


@pytest.mark.parametrize("values", [[], pa.array([], pa.large_binary())])
def test_an_empty_batch_appends_nothing(log: Log, values: list[bytes]) -> None:
    assert log.append(values) == []
    assert log.describe().end == EARLIEST


def hostile_values() -> list[bytes]:
    header = struct.pack("<I4sQQQQII", 0, b"RMQ1", 1, 1, 1, 1, 1, 0)
    return [
        b"",
        b"\0",
        b"\0" * 4096,
        b"\xff" * 100,
        header,
        header * 50,
        b"RMQ1" * 100,
        b"\n",
        "ä€".encode(),
        bytes(range(256)),
    ]


def test_hostile_bytes_are_values_like_others_across_a_restart(deployment: Deployment, log: Log) -> None:
    values = hostile_values()
    ids = log.append(values) + [entry_id for value in values for entry_id in log.append([value])]
    assert read_all(log) == list(zip(ids, values * 2, strict=True))
    deployment.restart()
    assert read_all(deployment.service.open("dml_0")) == list(zip(ids, values * 2, strict=True))


def test_an_entry_of_the_largest_size_is_taken_and_a_larger_one_is_refused_with_its_whole_batch(log: Log) -> None:
    largest = b"x" * MAX_ENTRY_BYTES
    ids = log.append([b"before", largest])
    for values in ([b"small", largest + b"x"], pa.array([b"small", largest + b"x"], pa.large_binary())):
        with pytest.raises(EntryTooLarge):
            log.append(values)
    ids += log.append([b"after"])
    assert read_all(log) == list(zip(ids, [b"before", largest, b"after"], strict=True))


def test_a_batch_larger_than_a_file_is_one_batch(log: Log) -> None:
    values = [bytes([index]) * 300_000 for index in range(8)]
    ids = log.append(values)
    ids += log.append([b"after"])
    assert read_all(log, max_bytes=1) == list(zip(ids, [*values, b"after"], strict=True))


def test_reading_starts_at_every_kind_of_position(deployment: Deployment, log: Log) -> None:
    ids = [entry_id for batch in range(30) for entry_id in log.append([b"%d" % batch] * 3)]
    entries = read_all(log)
    for place, entry_id in enumerate(ids):
        assert read_all(log, entry_id) == entries[place:]
        assert read_all(log, entry_id.following()) == entries[place + 1 :]
        assert log.read(entry_id, max_bytes=1).batch.num_rows == 1
    assert read_all(log, LogId(0, 1)) == entries[1 if deployment.promises.dense else 0 :]
    beyond = LogId(ids[-1].ledger, ids[-1].entry + 1_000_000)
    run = log.read(beyond)
    assert (run.batch.num_rows, run.next) == (0, beyond)


def test_the_end_is_not_read_and_an_exhausted_range_says_where_it_stands(deployment: Deployment, log: Log) -> None:
    ids = [entry_id for batch in range(12) for entry_id in log.append([b"%d" % batch] * 3)]
    entries = read_all(log)
    for start in range(0, len(ids), 5):
        for stop in range(len(ids)):
            assert read_all(log, ids[start], end=ids[stop]) == entries[start : max(start, stop)]
    assert read_all(log, EARLIEST, end=LogId(0, 1)) == entries[: 1 if deployment.promises.dense else 0]
    assert read_all(log, EARLIEST, end=log.describe().end) == entries
    assert read_all(log, EARLIEST, end=LogId(ids[-1].ledger, ids[-1].entry + 1000)) == entries


def test_a_range_that_is_known_to_be_empty_is_answered_without_waiting(log: Log) -> None:
    first, last = log.append([b"a"])[0], log.append([b"b"])[0]
    started = time.monotonic()
    assert log.read(last, end=last, timeout=DEADLINE).batch.num_rows == 0
    assert log.read(first.following(), end=first.following(), timeout=DEADLINE).batch.num_rows == 0
    assert time.monotonic() - started < DEADLINE / 2


@pytest.mark.quick_cases(10)
@pytest.mark.parametrize("max_bytes", [0, 1, 100, 5_000, 1 << 30])
def test_runs_are_bounded_yet_always_go_on(log: Log, max_bytes: int) -> None:
    values = [bytes([index]) * (index * 37 % 900) for index in range(120)]
    ids = [entry_id for start in range(0, 120, 8) for entry_id in log.append(values[start : start + 8])]
    position, got = EARLIEST, []
    while (run := log.read(position, max_bytes=max_bytes)).batch.num_rows:
        sizes = [len(value) for value in run.batch.column("value").to_pylist()]
        assert sum(sizes) <= max_bytes or len(sizes) == 1 or sum(sizes[:-1]) <= max_bytes + 64 * 1024
        got += run.batch.column("entry").to_pylist()
        position = run.next
    assert got == [entry_id.entry for entry_id in ids]


def test_stamps_are_wall_clock_milliseconds_and_never_decrease(deployment: Deployment, log: Log) -> None:
    before = time.time_ns() // 1_000_000
    for _ in range(50):
        log.append([b"x"] * 3)
    after = time.time_ns() // 1_000_000
    found = stamps(log)
    assert found == sorted(found)
    assert before - 1 <= found[0]
    assert found[-1] <= after + 1
    deployment.restart()
    assert stamps(deployment.service.open("dml_0")) == found


def test_a_blocked_reader_wakes_when_something_is_appended(log: Log) -> None:
    got: list[bytes] = []
    started = threading.Event()

    def tail() -> None:
        started.set()
        got.extend(log.read(EARLIEST, timeout=DEADLINE).batch.column("value").to_pylist())

    reader = threading.Thread(target=tail)
    reader.start()
    started.wait()
    begun = time.monotonic()
    log.append([b"news"])
    reader.join(DEADLINE)
    assert got == [b"news"]
    assert time.monotonic() - begun < DEADLINE / 2


def test_a_reader_that_waited_in_vain_gets_an_empty_run(log: Log) -> None:
    begun = time.monotonic()
    run = log.read(EARLIEST, timeout=0.05)
    assert (run.batch.num_rows, run.next) == (0, EARLIEST)
    assert time.monotonic() - begun >= 0.04


def test_truncation_makes_earlier_positions_an_error_that_names_the_earliest(log: Log) -> None:
    ids = [entry_id for _ in range(60) for entry_id in log.append([b"x" * 3000] * 3)]
    entries = read_all(log)
    for place in (0, 1, 50, 51, 120):
        log.truncate(ids[place])
        assert log.describe().begin == ids[place]
        earlier = [EARLIEST, *ids[max(0, place - 3) : place]]
        for position in [each for each in earlier if each < ids[place]]:
            with pytest.raises(PositionTruncated) as raised:
                log.read(position)
            assert raised.value.earliest == tuple(ids[place])
        assert read_all(log, ids[place]) == entries[place:]


def test_truncating_again_at_or_before_the_beginning_frees_nothing(log: Log) -> None:
    ids = [log.append([b"x" * 1000])[0] for _ in range(10)]
    log.truncate(ids[5])
    assert log.truncate(ids[5]) == log.truncate(ids[2]) == log.truncate(EARLIEST) == 0
    assert log.describe().begin == ids[5]


def test_truncation_says_what_it_freed_and_the_embedded_log_frees_whole_files_at_once(
    deployment: Deployment, log: Log
) -> None:
    ids = [log.append([b"x" * 50_000])[0] for _ in range(20)]
    before = log.describe().bytes
    freed = log.truncate(ids[-1])
    assert (freed > 0) == deployment.promises.declared.retains
    assert log.describe().bytes == before - freed


def test_a_log_can_be_truncated_to_its_end_and_goes_on_with_greater_ids(deployment: Deployment, log: Log) -> None:
    ids = [log.append([b"x" * 50_000])[0] for _ in range(5)]
    end = log.describe().end
    log.truncate(end)
    assert read_all(log, end) == []
    reopened = deployment.restart().open("dml_0")
    assert reopened.describe().begin == reopened.describe().end == end
    reopened.truncate(end)
    new = reopened.append([b"new"])[0]
    assert new > ids[-1]
    assert read_all(reopened, end) == [(new, b"new")]


def test_truncating_beyond_the_end_is_refused(log: Log) -> None:
    last = log.append([b"x"])[0]
    with pytest.raises(InvalidArgument):
        log.truncate(LogId(last.ledger, last.entry + 2))
    assert len(read_all(log)) == 1


def test_a_reader_that_waits_where_truncation_passes_gets_the_error(log: Log) -> None:
    first = log.append([b"a"])[0]
    position = LogId(first.ledger, first.entry + 1)
    errors: list[BaseException] = []

    def tail() -> None:
        try:
            while log.read(position, end=position.following(), timeout=DEADLINE).batch.num_rows == 0:
                pass
        except PositionTruncated as error:
            errors.append(error)

    reader = threading.Thread(target=tail, daemon=True)
    reader.start()
    last = log.append([b"b"])[0]
    if last > position:  # otherwise the reader has it, and is right to
        log.truncate(last)
        reader.join(DEADLINE)
        assert len(errors) == 1
    reader.join(DEADLINE)
    assert not reader.is_alive()


def test_a_restart_keeps_entries_and_the_beginning_and_ids_go_on(deployment: Deployment, log: Log) -> None:
    ids: list[LogId] = []
    values: list[bytes] = []
    begin = EARLIEST
    for round_ in range(4):
        log = deployment.service.open("dml_0")
        batch = [b"%d.%d" % (round_, index) * 500 for index in range(20)]
        ids += log.append(batch)
        values += batch
        assert ids == sorted(set(ids))
        if round_ == 2:
            begin = ids[25]
            log.truncate(begin)
        deployment.restart()
    log = deployment.service.open("dml_0")
    assert log.describe().begin == begin
    assert read_all(log, begin) == list(zip(ids, values, strict=True))[25:]
    with pytest.raises(PositionTruncated):
        log.read(EARLIEST)


def test_several_writers_and_readers_at_once_see_every_batch_whole_once_and_in_order(log: Log) -> None:
    writers, batches = 4, 25
    acknowledged: list[list[tuple[LogId, bytes]]] = [[] for _ in range(writers)]
    seen: list[list[tuple[LogId, bytes]]] = [[] for _ in range(3)]
    total = writers * batches * 3

    def write(writer: int) -> None:
        for batch in range(batches):
            values = [b"%d.%d.%d" % (writer, batch, index) for index in range(3)]
            acknowledged[writer] += zip(log.append(values), values, strict=True)

    def follow(reader: int) -> None:
        position, deadline = EARLIEST, time.monotonic() + DEADLINE
        while len(seen[reader]) < total and time.monotonic() < deadline:
            run = log.read(position, max_bytes=200 * (reader + 1), timeout=1.0)
            rows = run.batch.to_pylist()
            seen[reader] += [(LogId(row["ledger"], row["entry"]), row["value"]) for row in rows]
            position = run.next

    threads = [threading.Thread(target=write, args=(writer,)) for writer in range(writers)]
    threads += [threading.Thread(target=follow, args=(reader,)) for reader in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE * 2)
    expected = sorted(entry for entries in acknowledged for entry in entries)
    assert len(expected) == total
    assert seen == [expected] * 3
    for entries in acknowledged:
        assert entries == sorted(entries)
    for start in range(0, total, 3):  # a batch lies together
        assert len({value.rpartition(b".")[0] for _, value in expected[start : start + 3]}) == 1


def test_a_closed_handle_refuses_and_others_of_the_log_go_on(deployment: Deployment, log: Log) -> None:
    other = deployment.service.open("dml_0")
    log.append([b"a"])
    log.close()
    log.close()
    with pytest.raises(LogUnavailable):
        log.append([b"b"])
    with pytest.raises(LogUnavailable):
        log.read(EARLIEST)
    other.append([b"c"])
    assert [value for _, value in read_all(other)] == [b"a", b"c"]
