"""Pulsar as the log, on a real broker: what the conformance suite cannot ask of every backend."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from typing import Any

import pytest

from millrace.base.errors import (
    ChannelNotFound,
    EntryTooLarge,
    InvalidSettings,
    LogCorrupted,
    LogFenced,
    LogUnavailable,
    PositionTruncated,
)
from millrace.log.pulsar.service import PulsarLog, PulsarService
from millrace.log.pulsar.settings import PulsarSettings, topic_of
from millrace.log.pulsar.writer import BATCH_BITS, LostId, PulsarWriter, _Chunk
from millrace.log.registry import open_service
from millrace.message.ids import EARLIEST, LogId
from tests import running_brokers
from tests.conformance.reading import read_all
from tests.waiting import until

pytestmark = pytest.mark.slow

OPENED: list[PulsarService] = []


@pytest.fixture
def prefix() -> Iterator[str]:
    yield f"t{uuid.uuid4().hex[:12]}"
    while OPENED:
        OPENED.pop().close()


def opened(prefix: str, *, namespace: str = "log", **options: object) -> PulsarService:
    broker = running_brokers.pulsar()
    location = f"{broker.address}/millrace/{namespace}/{prefix}"
    OPENED.append(PulsarService(PulsarSettings.of(location, {"admin": broker.admin_url} | options)))
    return OPENED[-1]


def made(service: PulsarService) -> PulsarLog:
    service.create("p")
    return service.open("p")


def test_the_url_of_the_broker_opens_a_log() -> None:
    with open_service(running_brokers.pulsar().url) as service:
        name = uuid.uuid4().hex
        service.create(name)
        assert name in service.names()
        largest = os.urandom(16 << 20)  # as large as the embedded log takes
        ids = service.open(name).append([largest])
        assert read_all(service.open(name)) == [(ids[0], largest)]
        service.drop(name)


def test_a_newer_writer_fences_the_older_one_and_both_read(prefix: str) -> None:
    old, new = opened(prefix), opened(prefix)
    first = made(old)
    ids = first.append([b"a"])
    second = new.open("p")
    assert read_all(second) == [(ids[0], b"a")]
    ids += first.append([b"b"])  # reading took nothing over
    ids += second.append([b"c"])
    for _ in range(2):
        with pytest.raises(LogFenced) as raised:
            first.append([b"never"])
        assert not raised.value.retriable
    ids += second.append([b"d"])
    assert read_all(first) == read_all(second) == list(zip(ids, [b"a", b"b", b"c", b"d"], strict=True))


def test_a_log_that_is_opened_again_takes_it_back_and_the_fenced_handle_stays_fenced(prefix: str) -> None:
    old, new = opened(prefix), opened(prefix)
    first, second = made(old), new.open("p")
    first.append([b"a"])
    second.append([b"b"])
    with pytest.raises(LogFenced):
        first.append([b"never"])
    again = old.open("p")
    again.append([b"c"])
    with pytest.raises(LogFenced):
        first.append([b"never"])
    with pytest.raises(LogFenced):
        second.append([b"never"])
    assert [value for _, value in read_all(again)] == [b"a", b"b", b"c"]


def test_appends_of_many_threads_through_a_small_window_are_whole_and_in_order(prefix: str) -> None:
    log = made(opened(prefix, pending_bytes=100_000, batch_bytes=20_000))
    found: dict[int, list[LogId]] = {}

    def write(writer: int) -> None:
        found[writer] = [each for batch in range(5) for each in log.append([b"%d" % writer + b"x" * 700] * 200)]

    threads = [threading.Thread(target=write, args=(writer,)) for writer in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    wanted = sorted((entry_id, b"%d" % writer + b"x" * 700) for writer, ids in found.items() for entry_id in ids)
    assert len(wanted) == 3 * 5 * 200
    assert read_all(log) == wanted
    for ids in found.values():
        assert ids == sorted(ids)


def test_a_reader_of_large_entries_fetches_few_ahead_and_reads_all(prefix: str) -> None:
    log = made(opened(prefix))
    small, large = [b"%d" % number for number in range(3000)], [os.urandom(1 << 20) for _ in range(12)]
    ids = log.append(small) + log.append(large)
    entries = list(zip(ids, small + large, strict=True))
    assert read_all(log, max_bytes=1 << 14) == entries
    assert read_all(log, max_bytes=3 << 20) == entries


@pytest.mark.parametrize("last", [1, 5], ids=["a message alone", "a batch"])
def test_a_reader_that_had_read_all_and_connects_again_knows_that_there_is_no_more(prefix: str, last: int) -> None:
    service = opened(prefix, operation_timeout=5)
    log = made(service)
    values = [b"%d" % number for number in range(20 + last)]
    ids = [each for value in values[:20] for each in log.append([value])] + log.append(values[20:])
    entries = list(zip(ids, values, strict=True))
    middle, end = log.read(EARLIEST, max_bytes=1).next, ids[-1].following()
    assert read_all(log) == entries
    admin, topic = service._admin, topic_of(prefix, "p")
    admin._call("PUT", f"{admin._topic(topic)}/unload")  # the topic's clients lose it
    until(lambda: all(cursor._reader.is_connected() for cursor in service._channels["p"]._cursors._idle.values()))
    for timeout in (0.0, 0.3):
        begun = time.monotonic()
        assert log.read(end, timeout=timeout).batch.num_rows == 0
        assert time.monotonic() - begun < timeout + 2, "it waited for a message that it had read before"
    assert read_all(log, middle) == entries[1:]
    ids += log.append([b"more"])
    assert read_all(log, end) == [(ids[-1], b"more")]


def test_truncation_of_another_process_is_seen_and_a_reader_under_way_goes_on(prefix: str) -> None:
    mine, other = opened(prefix), opened(prefix)
    log = made(mine)
    ids = log.append([b"%d" % number for number in range(10)])
    following = other.open("p").read(EARLIEST, max_bytes=3)
    log.truncate(ids[6])
    behind = other.open("p")
    assert behind.describe().begin == ids[6]
    with pytest.raises(PositionTruncated) as raised:
        behind.read(following.next)
    assert raised.value.earliest == ids[6]
    assert [value for _, value in read_all(behind, ids[6])] == [b"6", b"7", b"8", b"9"]


def test_truncated_ledgers_are_deleted_and_nothing_before_the_cut_is(prefix: str) -> None:
    service = opened(prefix)
    log = made(service)
    admin, topic = service._admin, topic_of(prefix, "p")
    ids = [log.append([os.urandom(50_000)] * 20) for _ in range(2)]
    admin._call("PUT", f"{admin._topic(topic)}/unload")  # closes the ledger; the next append opens another
    ids += [log.append([os.urandom(50_000)] * 20)]
    assert ids[2][0].ledger > ids[1][-1].ledger
    entries = read_all(log)
    before = log.describe().bytes
    log.truncate(ids[1][3])
    assert read_all(log, ids[1][3]) == entries[23:]
    log.truncate(ids[2][0])
    until(lambda: log.describe().bytes < before - 1_900_000)  # Pulsar deletes in the background
    assert log.describe().begin == ids[2][0]
    assert read_all(log, ids[2][0]) == entries[40:]


def test_a_ledger_that_the_brokers_lost_is_an_error_and_never_a_skip(prefix: str) -> None:
    service = opened(prefix)
    log = made(service)
    admin, topic = service._admin, topic_of(prefix, "p")
    first = log.append([b"a"] * 3)
    admin._call("PUT", f"{admin._topic(topic)}/unload")
    second = log.append([b"b"] * 3)
    assert second[0].ledger > first[0].ledger
    # Somebody skips the subscription that keeps the log: Pulsar then deletes what it held.
    admin.reset_cursor(topic, "millrace", second[0].ledger, 0)
    admin.trim(topic)
    until(lambda: str(first[0].ledger) not in str((admin.internal_stats(topic) or {})["ledgers"]))
    fresh = opened(prefix).open("p")
    for position in (EARLIEST, first[0], first[2].following()):
        with pytest.raises(PositionTruncated) as raised:
            fresh.read(position)
        assert raised.value.earliest == (second[0].ledger, 0)
    assert fresh.describe().begin == (second[0].ledger, 0)
    with pytest.raises((PositionTruncated, LogCorrupted)):
        read_all(log)


def test_the_namespace_lets_nothing_be_deleted_doubled_or_made_by_accident(prefix: str) -> None:
    service = opened(prefix, namespace="policies")
    assert service._admin.policies() is not None
    service._admin.namespace_call("POST", "messageTTL", 1)
    service._admin.namespace_call("POST", "deduplication", False)
    with pytest.raises(InvalidSettings, match="unsafe"):
        opened(prefix, namespace="policies", manage_policies=False)
    policies = opened(prefix, namespace="policies")._admin.policies() or {}
    assert policies["message_ttl_in_seconds"] == 0
    assert policies["deduplicationEnabled"] is True
    assert {each["policy"] for each in policies["backlog_quota_map"].values()} == {"producer_exception"}
    opened(prefix, namespace="policies", manage_policies=False)
    with pytest.raises(InvalidSettings, match="namespace"):
        opened(prefix, namespace="nowhere", manage_policies=False)


def test_any_client_of_pulsar_reads_what_was_appended(prefix: str) -> None:
    import pulsar

    service = opened(prefix)
    log = made(service)
    ids = log.append([b"a", b"", b"\0c"])
    client: Any = pulsar.Client(f"pulsar://{running_brokers.pulsar().address}")
    try:
        topic = f"persistent://millrace/log/{topic_of(prefix, 'p')}"
        reader = client.create_reader(topic, pulsar.MessageId.earliest)
        found = [reader.read_next(10_000) for _ in ids]
        assert [message.data() for message in found] == [b"a", b"", b"\0c"]
        with pytest.raises(pulsar.PulsarException):
            client.create_producer(topic)  # the writer has it alone
    finally:
        client.close()


def test_a_log_that_another_process_dropped_is_not_found(prefix: str) -> None:
    mine, other = opened(prefix, operation_timeout=5, send_timeout=5.0), opened(prefix)
    log = made(mine)
    log.append([b"a"])
    other.drop("p")
    with pytest.raises((ChannelNotFound, LogUnavailable)):
        log.append([b"b"])
    with pytest.raises(ChannelNotFound):
        log.describe()
    with pytest.raises(ChannelNotFound):
        mine.open("p")


def test_an_entry_beyond_the_limit_is_refused_before_anything_is_sent(prefix: str) -> None:
    log = made(opened(prefix, max_entry_bytes=1000))
    with pytest.raises(EntryTooLarge, match="max_entry_bytes"):
        log.append([b"small", b"x" * 1001])
    assert log.describe().end == EARLIEST


def test_brokers_that_are_not_there_are_unavailable_by_the_deadline() -> None:
    with pytest.raises(LogUnavailable):
        PulsarService(
            PulsarSettings.of("127.0.0.1:1/millrace/log", {"admin": "http://127.0.0.1:1", "operation_timeout": 1})
        )


def test_a_batch_that_the_broker_had_already_has_no_id_in_any_of_its_messages() -> None:
    """Sent again after a broken connection and dropped, it is acknowledged as ledger -1,
    its messages with their index.
    """
    import _pulsar

    known = [(7, 3, 0), (7, 3, 1), (7, 3, 2)]
    lost = [(-1, -1, 0), (-1, -1, 1), (-1, -1, 2)]
    chunk = _Chunk(9, 0, lambda chunk: None)
    for ledger, entry, index in [*known, *lost, (9, 0, 0), (9, 0, 1), (9, 0, 2)]:
        chunk.callback(_pulsar.Result.Ok, _pulsar.MessageId(-1, ledger, entry, index))
    ids: list[LogId | LostId] = []
    PulsarWriter.__new__(PulsarWriter)._collect(chunk, ids)
    last = LogId(7, 3 << BATCH_BITS | 2)
    assert ids[:3] == [LogId(7, 3 << BATCH_BITS | index) for index in range(3)]
    assert ids[3:6] == [LostId(last.following(), skip) for skip in range(3)]
    assert ids[6:] == [LogId(9, index) for index in range(3)]


SERVED = """
import os, sys, threading
from pyarrow import flight
from millrace.log.registry import open_service

class Server(flight.FlightServerBase):
    log = None

    def do_action(self, context, action):
        if action.type == "open":
            service = open_service(sys.argv[1])
            service.create(sys.argv[2])
            Server.log = service.open(sys.argv[2])
        else:
            Server.log.append([b"x"])
        return [str(threading.get_native_id()).encode()]

server = Server("grpc://127.0.0.1:0")
threading.Thread(target=server.serve, daemon=True).start()
client = flight.connect(f"grpc://127.0.0.1:{server.port}")
threads = [
    next(iter(client.do_action(flight.Action(name, b"")))).body.to_pybytes() for name in ["open"] + ["append"] * 50
]
print("appends from the thread that opened:", threads[1:].count(threads[0]), flush=True)
os._exit(0)
"""


def test_a_server_that_meets_its_first_pulsar_in_a_call_goes_on_appending(prefix: str) -> None:
    """As the log's server does where a running log is switched.

    GRPC's threads come and go for Python with each call.
    """
    command = [sys.executable, "-c", SERVED, running_brokers.pulsar().url, prefix]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    _, _, count = ended.stdout.strip().rpartition(": ")
    assert int(count) > 0, "no append came by the thread that matters"
