"""Sockets as sources: what arrives becomes records, and what does not is counted."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import zmq
from pydantic import ValidationError

from millrace.base.errors import LogUnavailable, PipelineInvalid
from millrace.base.settings import Settings
from millrace.flows.declare.configuration import Reach
from millrace.flows.records import FAULT, PLACE, Record
from millrace.flows.registry import feeder_of, promise_of, reader_of, source_kinds, source_of
from millrace.flows.sinks.opensearch.model import OpenSearchSink
from millrace.flows.sources.capture import polling
from millrace.flows.sources.capture.spool import Spool
from millrace.flows.sources.direct.model import DirectSource
from millrace.flows.sources.direct.receiving import Arrived, DirectPoller, Receiver, UdpReceiver, receiving
from millrace.flows.sources.source import Limits, task_of
from millrace.pipelines.declaration import pipeline_of
from millrace.pipelines.deploy.reach import require_allowed
from tests.docs.code_facts import ROOT
from tests.msgstream.test_kill import environment
from tests.waiting import until

GROUP = "millrace-direct"


def free_port(kind: int = socket.SOCK_DGRAM) -> int:
    with socket.socket(socket.AF_INET, kind) as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def datagrams(port: int, *values: Any, host: str = "127.0.0.1") -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
        sender.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_IF, socket.inet_aton("127.0.0.1"))
        for value in values:
            sender.sendto(value if isinstance(value, bytes) else json.dumps(value).encode(), (host, port))


class Listened:
    """A declared socket, and what came of it."""

    def __init__(self, folder: Path, **declared: Any) -> None:
        self.settings = Settings(data_dir=folder / "data")
        self.declared = DirectSource(**declared)

    @contextmanager
    def running(self) -> Iterator[None]:
        feeder = feeder_of(self.declared, self.settings, group=GROUP)
        assert feeder is not None
        try:
            feeder.wait_complete(20.0)  # it listens
            yield
        finally:
            feeder.close()

    def counts(self) -> dict[str, int]:
        source = source_of(self.declared, self.settings, group=GROUP)
        try:
            lag = source.lag()
            assert lag is not None
            return dict(lag.counts)
        finally:
            source.close()

    def counted(self, **wanted: int) -> None:
        until(lambda: wanted.items() <= self.counts().items(), f"{wanted} of {self.counts()}")

    def records(self, step: int = 1000) -> list[Record]:
        topic = self.declared.names[0]
        source = source_of(self.declared, self.settings, group=GROUP)
        reader = reader_of(self.declared, self.settings, group=GROUP, topic=topic, partition=0)
        try:
            ends, found = source.ends()[task_of(topic, 0)], list[Record]()
            start = ends.low
            while start < ends.high:
                for batch in reader.batches(start, ends.high, Limits(step, 1 << 20, 0.1)):
                    found += batch.records or ()
                    start = batch.end
            return found
        finally:
            source.close()
            reader.close()

    @property
    def values(self) -> list[Any]:
        return [json.loads(each.value or b"") for each in self.records() if not fault_of(each)]

    @property
    def faults(self) -> list[str]:
        return [fault_of(each) for each in self.records() if fault_of(each)]


def fault_of(record: Record) -> str:
    return next(((value or b"").decode() for name, value in record.headers if name == FAULT), "")


def test_no_message_ends_the_reception_of_others(tmp_path: Path) -> None:
    """Neither one that nests too deep, nor one on several lines."""
    port = free_port()
    listened = Listened(tmp_path, address=f"127.0.0.1:{port}", sequence={"field": "n"})
    deep = b'{"n": 1, "a": ' + b"[" * 20_000 + b"]" * 20_000 + b"}"
    with listened.running():
        datagrams(port, deep, b"\xff", b'{"n": 1e999}', json.dumps({"n": 1, "a": [2]}, indent=1).encode(), {"n": 2})
        listened.counted(received=5, malformed=3)
        until(lambda: len(listened.values) == 2, "the others are in the spool")
    assert listened.values == [{"n": 1, "a": [2]}, {"n": 2}]
    assert ["not JSON" in each for each in listened.faults] == [True] * 3


def test_datagrams_become_records_with_their_sender_and_a_range_reads_the_same_again(tmp_path: Path) -> None:
    port = free_port()
    listened = Listened(tmp_path, address=f"127.0.0.1:{port}")
    with listened.running():
        datagrams(port, *({"n": number} for number in range(50)))
        listened.counted(received=50)
        until(lambda: len(listened.values) == 50, "all are in the spool")
    first = listened.records(7)
    assert [json.loads(each.value or b"")["n"] for each in first] == list(range(50))
    assert listened.records(1000) == first
    assert all(dict(each.headers)[PLACE].startswith(b"127.0.0.1:") for each in first if dict(each.headers)[PLACE])
    assert [each.offset for each in first] == sorted({each.offset for each in first})


def test_what_is_no_json_object_too_long_or_without_its_number_is_put_aside(tmp_path: Path) -> None:
    port = free_port()
    listened = Listened(tmp_path, address=f"127.0.0.1:{port}", max_bytes=64, sequence={"field": "s"})
    with listened.running():
        datagrams(port, {"s": 1}, b"no json", [1], {"s": "x"}, {"s": 2, "t": "x" * 100}, {"s": 4})
        listened.counted(received=6, truncated=1, malformed=3, lost=2)
        until(lambda: len(listened.records()) == 6, "all are in the spool")
    assert listened.values == [{"s": 1}, {"s": 4}]
    assert [
        word
        for each in listened.faults
        for word in ("not JSON:", "not a JSON object", "not a sequence number", "was cut")
        if word in each
    ] == [
        "not JSON:",
        "not a JSON object",
        "not a sequence number",
        "was cut",
    ]


def test_numbers_in_the_bytes_prove_what_is_lost_also_across_a_restart(tmp_path: Path) -> None:
    port = free_port()
    listened = Listened(tmp_path, address=f"127.0.0.1:{port}", format="bytes", sequence={"offset": 2, "width": 2})
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:

        def send(*numbers: int) -> None:
            for number in numbers:
                sender.sendto(b"\x80\x00" + (number % 65536).to_bytes(2, "big") + b"payload", ("127.0.0.1", port))

        with listened.running():
            send(65534, 65535, 1)
            listened.counted(received=3, lost=1)
        with listened.running():  # the same sender; 2 to 4 were sent while nobody listened
            send(5, 0)
            listened.counted(received=5, lost=4)
    assert len(listened.records()) == 5
    assert all(each["payload"] for each in listened.values)


def test_what_is_put_aside_with_its_number_is_not_lost(tmp_path: Path) -> None:
    port = free_port()
    listened = Listened(tmp_path, address=f"127.0.0.1:{port}", format="bytes", max_bytes=8, sequence={"width": 2})
    with listened.running():
        datagrams(port, *((number).to_bytes(2, "big") + b"x" * (20 if number == 2 else 1) for number in (1, 2, 3, 5)))
        listened.counted(received=4, truncated=1, lost=1)


def test_a_flow_that_is_behind_connects_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second PULL socket, opened to measure the lag, would take messages of its own and lose them."""
    monkeypatch.setattr(polling, "_LAG_SECONDS", 0.05)
    monkeypatch.setattr(polling.PollingFeeder, "_room", lambda feeder: feeder._stop.wait() and False)
    opened = []

    @contextmanager
    def connect() -> Iterator[Receiver]:
        opened.append(1)
        with receiving(declared) as found:
            yield found

    declared = DirectSource(transport="zeromq", address=f"127.0.0.1:{free_port()}", socket="pull")
    folder = tmp_path / "spool"
    feeder = polling.PollingFeeder(connect, "it", folder, DirectPoller(declared), every_seconds=0.0, max_bytes=1)
    try:
        with Spool(folder) as spool:
            until(lambda: spool.standing().lag_seconds, "the lag was measured")
    finally:
        feeder.close()
    assert opened == [1]


def test_a_multicast_group_is_joined_and_other_datagrams_of_its_port_do_not_come(tmp_path: Path) -> None:
    port = free_port()
    listened = Listened(tmp_path, address=f"239.255.41.7:{port}", interface="127.0.0.1")
    with listened.running():
        datagrams(port, {"to": "the host"})
        datagrams(port, {"to": "the group"}, host="239.255.41.7")
        listened.counted(received=1)
        until(lambda: len(listened.values) == 1, "it is in the spool")
    assert listened.values == [{"to": "the group"}]


class Flood(Receiver):
    """A socket that never waits."""

    def __init__(self, declared: DirectSource, count: int, size: int) -> None:
        super().__init__(declared)
        self.left, self._size = count, size

    def _receive(self) -> list[Arrived]:
        if not self.left:
            time.sleep(0.01)
            return []
        self.left -= 1
        return [Arrived("a", b"x" * self._size, 0)]

    def _release(self) -> None:
        pass


@pytest.mark.parametrize(("messages", "mib", "size", "kept"), [(100, 64, 10, 100), (10_000, 1, 1 << 10, 1024)])
def test_a_flood_fills_the_buffer_to_its_bound_and_the_rest_is_dropped_and_counted(
    messages: int, mib: int, size: int, kept: int
) -> None:
    declared = DirectSource(address="127.0.0.1:9", buffer_messages=messages, buffer_mib=mib)
    with Flood(declared, 5000, size) as flood:
        flood.start()
        until(lambda: not flood.left, "all were received")
        until(lambda: flood._counts["received"] == 5000, "all were counted")
        found, counts = flood.take(10_000)
        assert len(found) == kept
        assert (counts["received"], counts["dropped"]) == (5000, 5000 - kept)
        assert flood.take(10) == ([], {})


def test_what_the_kernel_drops_is_counted() -> None:
    declared = DirectSource(address=f"127.0.0.1:{free_port()}")
    with UdpReceiver(declared) as receiver:
        receiver._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        datagrams(declared.port, *([b"x" * 1000] * 100))
        receiver.start()
        until(lambda: bool(receiver._counts["received"]), "some were taken")
        time.sleep(0.3)
        datagrams(declared.port, b"the next one tells")
        until(lambda: receiver._counts["dropped_by_kernel"] > 0, "the kernel tells")
        until(lambda: receiver._counts["received"] + receiver._counts["dropped_by_kernel"] == 101, "none is missing")


@pytest.mark.parametrize("connect", [True, False])
@pytest.mark.parametrize("kind", ["sub", "pull"])
def test_messages_of_zeromq(tmp_path: Path, kind: str, connect: bool) -> None:
    port = free_port(socket.SOCK_STREAM)
    context = zmq.Context()
    sender = context.socket(zmq.PUB if kind == "sub" else zmq.PUSH)
    sender.setsockopt(zmq.LINGER, 0)
    (sender.bind if connect else sender.connect)(f"tcp://127.0.0.1:{port}")
    listened = Listened(
        tmp_path, transport="zeromq", address=f"127.0.0.1:{port}", socket=kind, connect=connect,
        subscriptions=("a",), sequence={"field": "n"}, max_bytes=1000,
    )  # fmt: skip
    try:
        with listened.running():
            first = 0
            while "received" not in listened.counts():  # a subscriber misses what was sent before it came
                sender.send_multipart([b"a", json.dumps({"n": first}).encode()])
                first += 1
                time.sleep(0.05)
            for number in (*range(first, first + 10), first + 12):
                sender.send_multipart([b"a", json.dumps({"n": number}).encode()])
                if kind == "sub":
                    sender.send_multipart([b"b", b"not subscribed"])
            listened.counted(lost=2)
        assert listened.values[-1] == {"n": first + 12}
        assert not listened.faults
    finally:
        sender.close()
        context.term()


def test_a_zeromq_peer_that_sends_more_than_the_limit_is_disconnected_and_nothing_of_it_comes(tmp_path: Path) -> None:
    port = free_port(socket.SOCK_STREAM)
    context = zmq.Context()
    listened = Listened(
        tmp_path, transport="zeromq", address=f"127.0.0.1:{port}", socket="pull", connect=False, max_bytes=100
    )
    big, good = context.socket(zmq.PUSH), context.socket(zmq.PUSH)
    try:
        with listened.running():
            for each, value in ((big, b"x" * 1000), (good, b'{"n": 1}')):
                each.setsockopt(zmq.LINGER, 0)
                each.connect(f"tcp://127.0.0.1:{port}")
                each.send(value)
            listened.counted(received=1)
            until(lambda: listened.values == [{"n": 1}], "the other one's message is there")
    finally:
        big.close()
        good.close()
        context.term()


def test_an_address_that_is_taken_is_an_error_that_says_so() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as other:
        other.bind(("127.0.0.1", 0))
        declared = DirectSource(address=f"127.0.0.1:{other.getsockname()[1]}")
        with pytest.raises(LogUnavailable, match="cannot listen"), receiving(declared):
            pass


def test_a_killed_process_keeps_what_is_in_the_spool(tmp_path: Path) -> None:
    port = free_port()
    listened = Listened(tmp_path, address=f"127.0.0.1:{port}", sequence={"field": "n"})
    program = (
        "import sys, time; from pathlib import Path; from tests.flows.sources.direct.test_receiving import Listened\n"
        "listened = Listened(Path(sys.argv[1]), address=sys.argv[2], sequence={'field': 'n'})\n"
        "with listened.running():\n    print('listens', flush=True)\n    time.sleep(60)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path), f"127.0.0.1:{port}"],
        cwd=ROOT, stdout=subprocess.PIPE, text=True, env=environment(),
    )  # fmt: skip
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "listens\n"
        datagrams(port, *({"n": number} for number in range(20)))
        until(lambda: len(listened.values) == 20, "all are in the spool")
    finally:
        process.kill()
        process.communicate(timeout=30)
    assert listened.counts()["received"] == 20
    with listened.running():
        datagrams(port, {"n": 30})
        listened.counted(received=21)
        until(lambda: len(listened.values) == 21, "it goes on")


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"address": "127.0.0.1"}, "add a port"),
    ({"address": "localhost:5000"}, "an IP address"),
    ({"address": "127.0.0.1:99999"}, "a port is 1 to 65535"),
    ({"address": "127.0.0.1:5000", "max_bytes": 1 << 20}, "at most 65535 bytes"),
    ({"address": "127.0.0.1:5000", "interface": "eth0"}, "IP address of a network interface"),
    ({"address": "239.1.1.1:5000", "transport": "zeromq"}, "multicast is not supported"),
    ({"address": "127.0.0.1:5000", "format": "bytes", "sequence": {"field": "n"}}, "have no fields"),
]


@pytest.mark.parametrize(("declared", "words"), WRONG, ids=lambda value: value if isinstance(value, str) else "")
def test_a_declaration_that_cannot_work_is_refused(declared: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        DirectSource(**declared)


def declared_pipeline(**source: Any) -> Any:
    return pipeline_of(
        {
            "id": "direct",
            "source": {"kind": "direct", **source},
            "sink": {"kind": "opensearch", "hosts": ["https://search:9200"], "index_base": "messages"},
            "errors": {"collection": "letters"},
        }
    )


@pytest.mark.parametrize("address", ["0.0.0.0:5000", "239.1.1.1:5000", "169.254.169.254:5000"])
def test_the_service_s_rules_of_reach_cover_what_it_listens_at(address: str) -> None:
    with pytest.raises(PipelineInvalid, match="forbidden address"):
        require_allowed(declared_pipeline(address=address), Reach())
    with pytest.raises(PipelineInvalid, match=r"reach\.hosts"):
        require_allowed(declared_pipeline(address="10.0.0.1:5000"), Reach(hosts=("search",)))


def test_it_promises_at_most_once() -> None:
    sink = OpenSearchSink(hosts=("https://search:9200",), index_base="messages")
    assert promise_of(DirectSource(address="127.0.0.1:5000"), sink).startswith("at most once")
    assert "is read once" in source_kinds()["direct"].words
