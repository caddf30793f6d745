"""A real OpenSearch whose disk is full, that is too slow, that has no room for another request.

The worker waits, nothing is lost and nothing old comes back.
"""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from opensearchpy import OpenSearch

from millrace.base.settings import Settings
from millrace.brokers.opensearch import OpenSearchServer
from millrace.flows.range_host.definition import FlowRun
from millrace.flows.range_host.host import run
from millrace.flows.range_host.positions import positions_of
from millrace.flows.range_host.supervision import read_tasks, tasks_path
from tests import running_brokers
from tests.flows.faulty import Faulty, Handler
from tests.flows.range_host.flights import Flights
from tests.flows.range_host.test_kills import _check, _records

pytestmark = pytest.mark.slow


@contextmanager
def _running(flights: Flights) -> Iterator[None]:
    stop = threading.Event()
    thread = threading.Thread(target=run, args=(FlowRun(flights.settings, flights.pipeline),), kwargs={"stop": stop})
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(90)
    assert not thread.is_alive()


def _until(done: object, seconds: float = 90) -> None:
    deadline = time.monotonic() + seconds
    while not done():  # type: ignore[operator]
        assert time.monotonic() < deadline
        time.sleep(0.1)


def _position(flights: Flights) -> int:
    return sum(place.position for place in positions_of(flights.settings, flights.id).values())


@pytest.mark.timeout(300)
def test_a_full_disk_holds_the_worker_up_until_there_is_room(tmp_path: Path) -> None:
    # What a full disk does: the node's own monitor makes every index read-only at its flood stage,
    # and writable again below it.
    with OpenSearchServer(tmp_path / "opensearch", settings=Settings()) as server:
        client = OpenSearch(server.url, timeout=30)
        flights = Flights(tmp_path, opensearch=server, sink={"patience_ms": 300}, failure_threshold=1000)
        told = _records(random.Random(5), 200)
        flights.send(told[:100])
        with _running(flights):
            _until(lambda: _position(flights) == 100)
            _watermarks(client, "999999gb")
            _until(lambda: _read_only(client, flights.id))
            flights.send(told[100:])
            failed = tasks_path(flights.settings, flights.id)
            _until(lambda: any(task.code == "SINK_BUSY" for task in read_tasks(failed).values()))
            assert "block" in next(iter(read_tasks(failed).values())).cause
            assert _position(flights) == 100
            _watermarks(client, "1b")
            _until(lambda: _position(flights) == 200)
        _check(flights, told)


def _watermarks(client: OpenSearch, free: str) -> None:
    name = "cluster.routing.allocation.disk"
    marks = {f"{name}.watermark.{mark}": free for mark in ("low", "high", "flood_stage")}
    settings = {f"{name}.threshold_enabled": True, "cluster.info.update.interval": "10s", **marks}
    client.cluster.put_settings(body={"transient": settings})


def _read_only(client: OpenSearch, index: str) -> bool:
    found = client.indices.get_settings(index=index)[index]["settings"]["index"]
    return "read_only_allow_delete" in found.get("blocks", {})


@pytest.mark.timeout(300)
def test_a_server_without_room_for_another_request_gets_smaller_ones(tmp_path: Path) -> None:
    # Its own limit of what it holds of bulks at once: what is beyond is 429, whole requests and single items.
    small = {
        "indexing_pressure.memory.limit": "256kb",
        "thread_pool.write.size": "1",
        "thread_pool.write.queue_size": "1",
    }
    with OpenSearchServer(tmp_path / "opensearch", settings=Settings(), properties=small) as server:
        flights = Flights(
            tmp_path, opensearch=server, sink={"requests": 8, "patience_ms": 60_000}, failure_threshold=1000
        )
        told = [(f"k{n}", {"flight": n, "note": "x" * 1000}) for n in range(4000)]
        flights.send(told)
        with _running(flights):
            _until(lambda: _position(flights) == 4000)
        places = positions_of(flights.settings, flights.id).values()
        assert sum(place.retries for place in places) > 0, "it was told to wait"
        assert {key: value["flight"] for key, value in flights.index().items()} == {f"k{n}": n for n in range(4000)}


def test_what_a_slow_server_does_late_brings_nothing_old_back(tmp_path: Path) -> None:
    proxy = Faulty(running_brokers.opensearch().address)
    late: list[threading.Thread] = []

    def slow(handler: Handler, body: bytes) -> bool:
        """It is done, long after the client gave up, and behind what that sent since."""
        command, path, upstream = handler.command, handler.path, handler.upstream

        def forward() -> None:
            import http.client

            time.sleep(4.0)
            connection = http.client.HTTPConnection(*upstream, timeout=30)
            connection.request(command, path, body, {"content-type": "application/x-ndjson"})
            connection.getresponse().read()
            connection.close()

        late.append(threading.Thread(target=forward))
        late[-1].start()
        time.sleep(1.5)
        handler.close_connection = True
        return True

    flights = Flights(tmp_path, sink={"hosts": [proxy.url], "timeout_ms": 1000, "requests": 1}, failure_threshold=1000)
    told = [(f"k{n % 20}", {"flight": n}) for n in range(300)]
    proxy.faults += [slow, slow, slow]
    flights.send(told[:100])
    with _running(flights):
        _until(lambda: _position(flights) == 100)
        flights.send(told[100:])
        _until(lambda: _position(flights) == 300)
        for each in late:
            each.join(60)
    assert len(late) == 3
    assert {key: value["flight"] for key, value in flights.index().items()} == {f"k{n}": 280 + n for n in range(20)}
    assert json.loads(json.dumps(flights.errors(), default=str)) == []
    proxy.close()
