"""A name that leads elsewhere by the time that somebody connects: nothing is sent to an address that no pipeline may reach."""

from __future__ import annotations

import http.server
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from millrace.base.errors import SinkBusy
from millrace.pipelines.model.addresses import is_forbidden
from millrace.pipelines.model.pipeline import Pipeline
from millrace.pipelines.model.sinks import OpenSearchSink
from millrace.pipelines.sinks.opensearch import connection
from millrace.pipelines.sinks.opensearch.index import client_of, exists


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
    sink = Pipeline.parse(
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
    with pytest.raises(SinkBusy, match="no pipeline may reach"):
        exists(client_of(sink), sink)
    assert set(looked) <= {"127.0.0.1", ""}
    assert keys.asked == (scheme == "http"), "nothing was said to it"


@pytest.mark.parametrize(
    "host", ["169.254.169.254", "::ffff:169.254.169.254", "fe80::1%eth0", "224.0.0.1", "0.0.0.0", "::"]
)
def test_addresses_that_no_pipeline_may_reach(host: str) -> None:
    assert is_forbidden(host)
    assert not is_forbidden("keys.test"), "a name is looked at where it leads"
    assert not is_forbidden("127.0.0.1")
