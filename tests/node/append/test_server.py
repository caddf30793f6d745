"""Clients in other processes get through the server what the host would tell them, whatever happens to the server."""

from __future__ import annotations

import math
import os
import signal
import struct
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import psutil
import pyarrow as pa
import pytest
from prometheus_client.parser import text_string_to_metric_families

from millrace.base.deadline import Deadline
from millrace.base.errors import (
    AppendRejected,
    ChannelNotFound,
    InvalidArgument,
    LogUnavailable,
    Malformed,
    MillraceError,
    UnsupportedVersion,
)
from millrace.base.settings import Settings
from millrace.client.append_client import AppendClient
from millrace.client.consume.scan import scan
from millrace.client.database import connect
from millrace.log.rocksmq.service import RocksMQ
from millrace.message import builders
from millrace.message.types import MessageType
from millrace.message.wire.encode import encode_entry
from millrace.observe.log_probe import host_metrics
from millrace.rpc.link import ExchangeStream
from millrace.rpc.outcome import AppendResult, outcome_rows
from millrace.rpc.tail import Evicted
from millrace.wal.scanner import All, ImmutableTxn
from tests.log.server_rig import PATIENCE
from tests.node.append.samples import PCHANNEL, insert, judged, keys_of, opening
from tests.waiting import until

V0, V1 = "p0_1v0", "p0_1v1"


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("served")
    with AppendClient.connect(folder) as client:
        client.service.create(PCHANNEL)
        client.service.create("p1")
        client.append(PCHANNEL, opening()).results()
        yield folder
        client.service.shutdown()


@pytest.fixture
def client(data_dir: Path) -> Iterator[AppendClient]:
    with AppendClient.connect(data_dir) as connected:
        yield connected


def test_a_client_gets_results_rejections_and_first_results(client: AppendClient) -> None:
    (key,) = keys_of(V0, 1)
    entry = encode_entry([insert(key, producer=1, sequence=0)])
    first = client.append(PCHANNEL, entry, deadline=10).result()
    assert client.append(PCHANNEL, entry, deadline=10).result().message_id == first.message_id
    with pytest.raises(AppendRejected) as caught:
        client.append(PCHANNEL, encode_entry([insert(key, vchannel=V1)])).result()
    assert caught.value.reason == "WRONG_VCHANNEL"


def test_errors_cross_the_wire_typed(client: AppendClient) -> None:
    with pytest.raises(ChannelNotFound):
        client.append("elsewhere", b"entry")
    with pytest.raises(InvalidArgument):
        client.append(PCHANNEL, [])
    client.append("p1", opening("p1")).results()
    newer = encode_entry([builders.term_opening(term=2, chain_version=99, config={})])
    with pytest.raises(UnsupportedVersion):
        client.append("p1", newer)
    with pytest.raises(UnsupportedVersion):
        client.append("p1", newer)
    assert str(client.describe("p1")["parked"]).startswith("UNSUPPORTED_VERSION")
    assert client.describe(PCHANNEL)["parked"] is None


@pytest.mark.parametrize("pipelined", [True, False])
@pytest.mark.parametrize("metadata", [b"1234567", b"123456789", struct.pack("<d", math.nan), struct.pack("<d", -1.0)])
def test_metadata_that_is_no_time_to_wait_ends_its_stream_with_a_typed_error_and_leaves_no_thread(
    client: AppendClient, metadata: bytes, pipelined: bool
) -> None:
    deadline = Deadline.after(PATIENCE)
    link = client.service.link(deadline)
    server = psutil.Process(link.record.pid)
    before = _stream_threads(server)
    (key,) = keys_of(V0, 1)
    good = pa.array([encode_entry([insert(key)])], pa.large_binary())
    streams = []
    for _ in range(5):
        stream = ExchangeStream(link, {"extension": "append", "pchannel": PCHANNEL, "pipelined": pipelined})
        stream.request(good, struct.pack("<d", 10.0), deadline=deadline)
        stream.request(good, metadata, deadline=deadline)
        streams.append(stream)
    for stream in streams:
        assert stream.answer(deadline=deadline).data is not None
        with pytest.raises(InvalidArgument, match="seconds to wait"):
            stream.answer(deadline=deadline)
    # The clients keep their ends open: the server lets go by itself.
    until(lambda: _stream_threads(server) <= before, "the threads of these streams end")
    for stream in streams:
        stream.close()


@pytest.mark.parametrize(
    ("action", "request_"),
    [
        ("tick", {"pchannel": PCHANNEL, "deadline": "soon"}),
        ("tick", {"pchannel": PCHANNEL, "deadline": -1}),
        ("confirm", {"pchannel": PCHANNEL, "tick": None}),
        ("confirm", {"pchannel": PCHANNEL, "tick": [1]}),
        ("describe", {"pchannel": {}}),
        ("catalog", {"call": "collections", "arguments": [1]}),
        ("catalog", {"call": "collection", "arguments": {"name": ["x"]}}),
        ("catalog", {"call": "collection", "arguments": {}}),
        ("catalog", {"call": 7}),
        ("no-such", {"pchannel": PCHANNEL}),
    ],
)
def test_an_action_that_makes_no_sense_is_an_invalid_argument(
    client: AppendClient, action: str, request_: dict[str, object]
) -> None:
    link = client.service.link(Deadline.after(PATIENCE))
    with pytest.raises(InvalidArgument):
        link.act(f"append/{action}", request_, timeout=PATIENCE)


def _stream_threads(server: psutil.Process) -> int:
    """Threads of the server that serve a pipelined stream, by their names."""
    names = (Path(f"/proc/{server.pid}/task/{thread.id}/comm") for thread in server.threads())
    return sum(name.read_text().startswith("append-stream") for name in names if name.exists())


def test_a_stream_answers_in_order_and_one_appends_failure_leaves_the_others(client: AppendClient) -> None:
    keys = keys_of(V0, 200)
    with client.append_stream(PCHANNEL, appends=64) as stream:
        futures = [
            stream.submit([] if place == 50 else encode_entry([insert(key, producer=2, sequence=place - (place > 50))]))
            for place, key in enumerate(keys)
        ]
        with pytest.raises(InvalidArgument):
            futures[50].result()
        found = [future.result().result() for place, future in enumerate(futures) if place != 50]
    assert [each.time_tick for each in found] == sorted(each.time_tick for each in found)
    assert not any(each.duplicate for each in found)


def test_no_way_into_a_log_that_the_chain_reads_takes_bytes_that_are_no_entry(client: AppendClient) -> None:
    (key,) = keys_of(V0, 1)
    good, junk = encode_entry([insert(key)]), b"no entry"
    client.service.create("own_form")
    client.service.open("own_form").append([junk])  # no chain reads it: a message stream's form is its own matter
    log, before = client.service.open(PCHANNEL), refused(client)
    end = log.describe().end
    with pytest.raises(Malformed):
        client.append(PCHANNEL, [good, junk])
    with pytest.raises(Malformed):
        log.append([good, junk])
    assert good not in log.read(end).batch.column("value").to_pylist()
    with client.append_stream(PCHANNEL, appends=64) as stream:
        answers = [stream.submit(junk if place == 20 else good) for place in range(40)]
        with pytest.raises(Malformed):
            answers[20].result()
        assert all(answer.result().rejected == 0 for answer in answers[:20] + answers[21:])
    with log.pipeline() as pipeline:
        acknowledged = [pipeline.submit([junk] if place == 20 else [good]) for place in range(40)]
        with pytest.raises(Malformed):
            acknowledged[20].result()
        assert all(len(answer.result()) == 1 for answer in acknowledged[:20] + acknowledged[21:])
    written = log.read(end).batch.column("value").to_pylist()
    assert (written.count(good), written.count(junk)) == (78, 0)
    assert refused(client) - before == 4, "each once, whatever it was merged with"


@pytest.mark.slow
def test_a_pchannel_that_nobody_asked_the_host_to_follow_yet_takes_entries_alone(tmp_path: Path) -> None:
    with connect(settings=Settings(data_dir=tmp_path)) as made:
        made.catalog.ensure_pchannels(1)
        made.connection.service.create("own_form")
        made.connection.service.shutdown()
    with AppendClient.connect(tmp_path) as client:
        log = client.service.open("dml_0")
        end = log.end()
        with pytest.raises(Malformed):
            log.append([b"no entry"])
        assert log.end() == end
        client.service.open("own_form").append([b"no entry"])
        assert not client.describe("dml_0")["parked"]
        client.service.shutdown()


def refused(client: AppendClient) -> float:
    """Entries that the server refused on PCHANNEL, as its metrics say."""
    for family in text_string_to_metric_families(host_metrics(client)):
        for sample in family.samples:
            if sample.name == "millrace_log_refused_entries_total" and sample.labels == {"pchannel": PCHANNEL}:
                return sample.value
    raise AssertionError("the family is not reported")


def test_concurrent_clients_share_one_tail_that_holds_what_all_of_them_appended(
    client: AppendClient, data_dir: Path
) -> None:
    before = client.tick(PCHANNEL)

    def work(number: int) -> list[AppendResult]:
        with AppendClient.connect(data_dir) as own:
            return [
                own.append(PCHANNEL, encode_entry([insert(key, producer=number, sequence=place)])).result()
                for place, key in enumerate(keys_of(V1, 10))
            ]

    with ThreadPoolExecutor(4) as pool:
        results = [result for found in pool.map(work, range(10, 14)) for result in found]
    last = max(result.time_tick for result in results)
    assert client.confirm(PCHANNEL, last) >= last
    ticks: list[int] = []
    confirmed = before
    while confirmed < last:
        found = client.tail(PCHANNEL, confirmed, timeout=5)
        assert not isinstance(found, Evicted)
        ticks += [
            tick
            for batch in found.batches
            for tick, kind in zip(batch.column("time_tick").to_pylist(), batch.column("type").to_pylist(), strict=True)
            if kind == "INSERT"
        ]
        confirmed = found.confirmed_tick
    assert ticks == sorted(result.time_tick for result in results)


def test_the_hosts_metrics_say_how_many_messages_ended_how(client: AppendClient) -> None:
    def counted(status: str) -> float:
        lines = [
            line for line in host_metrics(client).splitlines() if line.startswith("millrace_wal_append_message_total{")
        ]
        wanted = [line for line in lines if f'status="{status}"' in line and 'type="INSERT"' in line]
        return sum(float(line.rpartition(" ")[2]) for line in wanted)

    accepted, rejected = counted("accepted"), counted("rejected")
    (key,) = keys_of(V0, 1)
    client.append(PCHANNEL, encode_entry([insert(key), insert(key), insert(key, vchannel=V1)]))
    assert (counted("accepted"), counted("rejected")) == (accepted + 2, rejected + 1)


def test_a_scan_works_through_the_client(client: AppendClient, data_dir: Path) -> None:
    (key,) = keys_of(V0, 1)
    result = client.append(PCHANNEL, encode_entry([insert(key)])).result()
    with scan(V0, All(), wal=data_dir / "wal", tail=client, until_tick=result.time_tick) as found:
        assert [unit.id for unit in found][-1] == result.message_id


def append_until_answered(client: AppendClient, entry: bytes, *, seconds: float) -> AppendResult:
    """Append `entry`, again after each retriable error, as a producer does."""
    deadline = Deadline.after(seconds)
    while True:
        try:
            return client.append(PCHANNEL, entry, deadline=seconds).result()
        except MillraceError as error:
            if not error.retriable or not deadline.pause(0.05):
                raise


@pytest.mark.slow
def test_appends_repeated_through_kills_of_the_server_have_one_effect_each(tmp_path: Path) -> None:
    keys = keys_of(V0, 60)
    results: list[AppendResult] = []
    half, stop = threading.Event(), threading.Event()

    def produce() -> None:
        with AppendClient.connect(tmp_path) as own:
            for place, key in enumerate(keys):
                entry = encode_entry([insert(key, producer=9, sequence=place)])
                results.append(append_until_answered(own, entry, seconds=60))
                if place in (15, 35):
                    half.set()
        stop.set()
        half.set()

    with AppendClient.connect(tmp_path) as client:
        client.service.create(PCHANNEL)
        client.append(PCHANNEL, opening()).results()
        with ThreadPoolExecutor(2) as pool:
            producing = pool.submit(produce)
            scanning = pool.submit(_inserts, tmp_path, len(keys))
            while half.wait(60) and not stop.is_set():
                half.clear()
                os.kill(client.service.ping()["pid"], signal.SIGKILL)
            producing.result(timeout=60)
            scanned = scanning.result(timeout=60)
        client.service.ping()  # finds the server that lives now, which the next line stops
        client.service.shutdown()
    with RocksMQ(tmp_path / "log") as service:
        own = judged(service)
    accepted = outcome_rows(own.messages, own.rejections).to_pylist()
    inserts = [row for row in own.messages.to_pylist() if row["type"] == "INSERT"]
    assert [row["sequence"] for row in inserts] == list(range(60)), "each once, in order"
    assert [each.time_tick for each in results] == [row["time_tick"] for row in inserts]
    assert scanned == [row["time_tick"] for row in inserts], "a scan that ran all along has delivered each once"
    assert {row["reason"] for row in accepted} <= {"", "DUPLICATE"}


def _inserts(data_dir: Path, count: int) -> list[int]:
    """Ticks of the first inserts, by a scan with a client of its own."""
    ticks: list[int] = []
    with AppendClient.connect(data_dir) as own, scan(V0, All(), wal=data_dir / "wal", tail=own) as found:
        for unit in found:
            if not isinstance(unit, ImmutableTxn) and unit.type == MessageType.INSERT:
                ticks.append(unit.time_tick)
            if len(ticks) == count:
                break
    return ticks


def test_an_append_whose_answer_is_lost_is_ambiguous_and_its_repeat_gets_the_first_result(tmp_path: Path) -> None:
    (key,) = keys_of(V0, 1)
    with AppendClient.connect(tmp_path) as client:
        client.service.create(PCHANNEL)
        client.append(PCHANNEL, opening()).results()
        pid = client.service.ping()["pid"]
        entry = encode_entry([insert(key, producer=9, sequence=0)])
        os.kill(pid, signal.SIGSTOP)  # takes nothing more, and then dies with the append on its way
        with ThreadPoolExecutor(1) as pool:
            lost = pool.submit(client.append, PCHANNEL, entry, deadline=20)
            os.kill(pid, signal.SIGKILL)
            with suppress(LogUnavailable):
                lost.result(timeout=30)  # answered, where the append was not on its way yet when the server died
        again = append_until_answered(client, entry, seconds=20)
        assert client.append(PCHANNEL, entry, deadline=20).result().message_id == again.message_id
        client.service.shutdown()
