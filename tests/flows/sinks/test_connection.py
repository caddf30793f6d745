"""A name that leads elsewhere by the time that somebody connects.

Nothing is sent to an address that no pipeline may reach.
"""

from __future__ import annotations

import gzip
import http.server
import itertools
import socket
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest

from millrace.base.errors import SinkBusy
from millrace.flows.declare.addresses import is_forbidden
from millrace.flows.sinks.opensearch import connection
from millrace.flows.sinks.opensearch.index import client_of, cluster_of, exists
from millrace.flows.sinks.opensearch.model import OpenSearchSink
from millrace.pipelines.declaration import pipeline_of


class Keys(http.server.ThreadingHTTPServer):
    """A server that is nobody's business; it counts those who ask."""

    asked = 0


class _Handler(http.server.BaseHTTPRequestHandler):
    def do_HEAD(self) -> None:
        assert isinstance(self.server, Keys)
        self.server.asked += 1
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def keys() -> Iterator[Keys]:
    with Keys(("127.0.0.1", 0), _Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.mark.parametrize("scheme", ["http", "https"])
def test_a_name_that_leads_elsewhere_meanwhile_is_not_followed(
    keys: Keys, monkeypatch: pytest.MonkeyPatch, scheme: str
) -> None:
    looked: list[str] = []

    def resolved(host: str, port: int, *_: Any, **__: Any) -> list[Any]:
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", port))]

    def forbidden(host: str) -> bool:
        looked.append(host)
        return len(looked) > 1

    monkeypatch.setattr(socket, "getaddrinfo", resolved)
    monkeypatch.setattr(connection, "is_forbidden", forbidden)
    sink = pipeline_of(
        {
            "id": "x",
            "source": {"kind": "kafka", "bootstrap": ["b:1"], "topics": ["in"]},
            "sink": {"kind": "opensearch", "hosts": [f"{scheme}://rebound.test:{keys.server_port}"], "index_base": "i"},
        }
    ).sink
    assert isinstance(sink, OpenSearchSink)
    if scheme == "http":
        assert exists(client_of(sink), sink), "the first time its name led where it may"
        assert keys.asked == 1
    else:
        looked.append("")
    with pytest.raises(SinkBusy, match="forbidden address"):
        exists(client_of(sink), sink)
    assert set(looked) <= {"127.0.0.1", ""}
    assert keys.asked == (scheme == "http"), "nothing was said to it"


def _endless() -> Iterator[bytes]:
    yield b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n\r\n"
    yield from itertools.repeat(b" " * (1 << 20))


def _bomb() -> Iterator[bytes]:
    packed = gzip.compress(b" " * (256 << 20), 1)
    return iter(
        [f"HTTP/1.1 200 OK\r\ncontent-encoding: gzip\r\ncontent-length: {len(packed)}\r\n\r\n".encode() + packed]
    )


def _slowly(head: bytes) -> Iterator[bytes]:
    yield head
    while True:
        time.sleep(0.05)
        yield b"x"


@pytest.mark.parametrize(
    ("says", "told"),
    [
        (_endless, "more than 64 MiB"),
        (_bomb, "more than 64 MiB"),
        (lambda: _slowly(b"HTTP/1.1 200 OK\r\nx: "), "does not answer"),
        (lambda: _slowly(b"HTTP/1.1 200 OK\r\ncontent-length: 100000\r\n\r\n"), "does not answer"),
    ],
    ids=["an answer without end", "one that unpacks to much", "headers byte by byte", "a body byte by byte"],
)
def test_what_is_no_opensearch_takes_neither_memory_nor_time(says: Callable[[], Iterator[bytes]], told: str) -> None:
    seconds = 1.0 if told == "does not answer" else 8.0  # the bound on bytes has to come first, on a busy machine too
    parts = says()
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            asked, _ = listener.accept()
            with asked, suppress(OSError):
                asked.recv(1 << 16)
                for part in parts:
                    asked.sendall(part)

        thread = threading.Thread(target=serve)
        thread.start()
        sink = OpenSearchSink(hosts=(f"http://127.0.0.1:{listener.getsockname()[1]}",), index_base="i")
        begun = time.monotonic()
        tracemalloc.start()
        try:
            with pytest.raises(SinkBusy, match=told):
                cluster_of(client_of(sink, seconds=seconds), sink)
            assert time.monotonic() - begun < 10
            assert tracemalloc.get_traced_memory()[1] < 160 << 20
        finally:
            tracemalloc.stop()
        thread.join(20)
        assert not thread.is_alive(), "it was hung up on"


@pytest.mark.parametrize(
    "host",
    [
        "169.254.169.254", "::ffff:169.254.169.254", "2002:a9fe:a9fe::1", "64:ff9b::a9fe:a9fe", "fe80::1%eth0",
        "224.0.0.1", "0.0.0.0", "::",
        "fd00:ec2::254", "fd20:ce::254", "100.100.100.200", "168.63.129.16", "192.0.0.192", "::ffff:100.100.100.200",
    ],
)  # fmt: skip
def test_addresses_that_no_pipeline_may_reach(host: str) -> None:
    assert is_forbidden(host)
    assert not is_forbidden("keys.test"), "a name is looked at where it leads"
    assert not any(map(is_forbidden, ("127.0.0.1", "10.0.0.1", "2001:db8::1", "64:ff9b::10.0.0.1")))
