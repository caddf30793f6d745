"""A way to a real OpenSearch on which things go wrong.

A bulk is refused, held up, cut off behind its effect, or taken in part.
"""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Fault = Callable[["Handler", bytes], bool]
"""What is done to a bulk instead of handing it on; whether anything was."""


class Handler(BaseHTTPRequestHandler):
    """Hands everything on but what a fault takes."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # headers and body are two writes: else each answer waits 40 ms for an ACK
    upstream: tuple[str, int]
    faults: list[Fault]
    lasting: list[Fault]
    bulks: list[int]

    def forward(self, body: bytes) -> tuple[int, bytes]:
        """What the server answers to this request with `body`."""
        connection = http.client.HTTPConnection(*self.upstream, timeout=30)
        try:
            connection.request(
                self.command,
                self.path,
                body or None,
                {"content-type": self.headers.get("content-type", "application/json")},
            )
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()

    def answer(self, status: int, body: bytes) -> None:
        """Send it back."""
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _serve(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length") or 0))
        if "/_bulk" in self.path:
            self.bulks.append(sum(line.startswith((b'{"index":', b'{"delete":')) for line in body.splitlines()))
            if self.faults and self.faults.pop(0)(self, body):
                return
            if any(fault(self, body) for fault in self.lasting):
                return
        self.answer(*self.forward(body))

    do_GET = do_POST = do_PUT = do_HEAD = do_DELETE = _serve

    def log_message(self, format: str, *args: Any) -> None:
        """Says nothing."""


def refused(status: int, kind: str) -> Fault:
    """The whole request is answered so."""

    def fault(handler: Handler, body: bytes) -> bool:
        handler.answer(status, json.dumps({"error": {"type": kind, "reason": "told to"}, "status": status}).encode())
        return True

    return fault


def html(handler: Handler, body: bytes) -> bool:
    """A proxy that does not know the way answers, and no OpenSearch."""
    handler.answer(400, b"<html><body>400 Bad Request</body></html>")
    return True


def trips_over(key: str, *, whole: bool) -> Fault:
    """A document fails with 500: the `whole` request with it, or by itself."""
    fault = {"type": "null_pointer_exception", "reason": "of this document"}

    def trips(handler: Handler, body: bytes) -> bool:
        if f'"{key}"'.encode() not in body:
            return False
        if whole:
            handler.answer(500, json.dumps({"error": fault, "status": 500}).encode())
            return True
        lines = body.splitlines()
        places = range(0, len(lines), 2)
        good = [place for place in places if f'"{key}"'.encode() not in lines[place]]
        told = b""
        if good:
            _, told = handler.forward(b"\n".join(line for place in good for line in lines[place : place + 2]) + b"\n")
        done = iter(json.loads(told or b"{}").get("items") or [{"index": {"status": 200}} for _ in good])
        items = [next(done) if place in good else {"index": {"status": 500, "error": fault}} for place in places]
        handler.answer(200, json.dumps({"errors": True, "items": items}).encode())
        return True

    return trips


def cut_off(handler: Handler, body: bytes) -> bool:
    """It is done, and nobody hears of it."""
    handler.forward(body)
    handler.close_connection = True
    return True


def in_part(handler: Handler, body: bytes) -> bool:
    """Every second action is refused with 429, the others are done; what was answered is whole."""
    lines = body.splitlines()
    actions, place = [], 0
    while place < len(lines):
        size = 1 if lines[place].startswith(b'{"delete"') else 2
        actions.append(lines[place : place + size])
        place += size
    _, told = handler.forward(b"\n".join(line for action in actions[::2] for line in action) + b"\n")
    done = iter(json.loads(told).get("items") or [{"index": {"status": 200}} for _ in actions[::2]])
    busy = {"status": 429, "error": {"type": "rejected_execution_exception", "reason": "told to"}}
    items = [next(done) if number % 2 == 0 else {"index": busy} for number, _ in enumerate(actions)]
    handler.answer(200, json.dumps({"errors": True, "items": items}).encode())
    return True


class Faulty:
    """The proxy; `faults` are what happens to the next bulks, one each."""

    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        self.faults: list[Fault] = []
        self.lasting: list[Fault] = []
        """What happens to each bulk that it is for."""
        self.bulks: list[int] = []
        """Actions of each bulk that came."""
        known = {"faults": self.faults, "lasting": self.lasting, "bulks": self.bulks}
        kind = type("Bound", (Handler,), {"upstream": (host, int(port)), **known})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), kind)
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
