"""An S3 for tests: moto in a process of its own, one for all tests of a process, and a proxy that breaks requests.

moto keeps its objects in memory. It is no S3, but it has what stores need of one: conditional puts, uploads in parts,
ranges, listings. versitygw, which keeps objects on a disk, passes the same tests (docs/object-stores.md).
"""

from __future__ import annotations

import http.client
import re
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from millrace.brokers.server import free_ports
from tests.waiting import until

KEYS = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "testtest", "AWS_REGION": "us-east-1"}
_SERVER = "from moto.server import main; import sys; main(sys.argv[1:])"


_running: list[tuple[subprocess.Popen[bytes], int]] = []


def address() -> str:
    """Start the server, unless it runs; return host and port. It ends with the run (`stop`)."""
    if not _running:
        (port,) = free_ports(1)
        command = [sys.executable, "-c", _SERVER, "-H", "127.0.0.1", "-p", str(port)]
        server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        _running.append((server, port))
        until(lambda: _answers(port) or server.poll() is not None, "moto answers", seconds=60)
        assert server.poll() is None, "moto ended"
    return f"127.0.0.1:{_running[0][1]}"


def stop() -> None:
    """End the server."""
    while _running:
        server, _ = _running.pop()
        server.kill()
        server.wait()


def _answers(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@contextmanager
def bucket(monkeypatch: pytest.MonkeyPatch, at: str | None = None) -> Iterator[str]:
    """Yield the URI of a new bucket; processes reach it by the environment, through `at` if given."""
    name = f"box-{uuid.uuid4().hex}"
    connection = http.client.HTTPConnection(address(), timeout=30)
    connection.request("PUT", f"/{name}")
    assert connection.getresponse().status == 200
    connection.close()
    for key, value in {**KEYS, "AWS_ALLOW_HTTP": "true", "AWS_ENDPOINT_URL": f"http://{at or address()}"}.items():
        monkeypatch.setenv(key, value)
    yield f"s3://{name}"


class Faults(ThreadingHTTPServer):
    """A proxy before the server. `break_request` says for each request what becomes of it; `requests` counts them."""

    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of a client that went away. A traceback made in this thread breaks one that pytest makes."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Passing)
        self.requests: Counter[str] = Counter()
        self.signers: Counter[str] = Counter()
        """Access keys that signed requests."""
        self.encryptions: Counter[str] = Counter()
        """What was asked for in puts: algorithm and key."""
        self.break_request: Callable[[str, str], str] = lambda method, path: ""
        """Of method and path: "" passes, a number is answered so, "reset" is not passed, "lost" has no answer,
        "slow" has its answer in pieces, "torn" half of it, "blind" passes without its condition. A put of a new name
        has the method "PUT NEW"."""

    @property
    def at(self) -> str:
        return f"127.0.0.1:{self.server_address[1]}"

    def __enter__(self) -> Faults:
        threading.Thread(target=self.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self.server_close()


class _Passing(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # headers and body are two writes: else each answer waits 40 ms for an ACK
    server: Faults

    def _pass(self) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        body = self.rfile.read(length)
        listing = self.command == "GET" and "list-type=" in self.path
        self.server.requests["LIST" if listing else self.command] += 1
        signed = re.search(r"Credential=([^/]+)/", self.headers.get("Authorization") or "")
        if signed is not None:
            self.server.signers[signed[1]] += 1
        if self.command == "PUT":
            names = ("x-amz-server-side-encryption", "x-amz-server-side-encryption-aws-kms-key-id")
            self.server.encryptions[" ".join(filter(None, map(self.headers.get, names)))] += 1
        conditional = self.command == "PUT" and self.headers.get("If-None-Match") is not None
        fault = self.server.break_request("PUT NEW" if conditional else self.command, self.path)
        if fault.isdigit():
            refusal = b"<?xml version='1.0'?><Error><Code>AccessDenied</Code><Message>it said no</Message></Error>"
            self.send_response(int(fault))
            self.send_header("Content-Length", str(len(refusal)))
            self.end_headers()
            self.wfile.write(refusal)
            return
        if fault == "reset":
            self._hang_up()
            return
        headers = dict(self.headers.items())
        if fault == "blind":
            conditions = ("if-none-match", "if-match")
            headers = {name: value for name, value in headers.items() if name.lower() not in conditions}
        connection = http.client.HTTPConnection(address(), timeout=60)
        try:
            connection.request(self.command, self.path, body, headers)
            answer = connection.getresponse()
            data = answer.read()
        finally:
            connection.close()
        if fault == "lost":
            self._hang_up()
            return
        self.send_response(answer.status)
        for name, value in answer.getheaders():
            if name.lower() not in ("transfer-encoding", "connection", "content-length", "date", "server"):
                self.send_header(name, value)
        length = answer.getheader("Content-Length") if self.command == "HEAD" else str(len(data))
        self.send_header("Content-Length", length or "0")
        self.end_headers()
        if fault == "slow":
            for place in range(0, len(data), max(1, len(data) // 4)):
                time.sleep(0.02)
                self.wfile.write(data[place : place + max(1, len(data) // 4)])
                self.wfile.flush()
        elif fault == "torn" and self.command == "GET":
            self.wfile.write(data[: len(data) // 2])
            self._hang_up()
        else:
            self.wfile.write(data)

    def _hang_up(self) -> None:
        self.close_connection = True
        self.connection.shutdown(socket.SHUT_RDWR)

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _pass

    def log_message(self, format: str, *args: Any) -> None:
        pass
