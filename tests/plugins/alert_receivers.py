"""Receivers of alerts, and runs of a DAG that end."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from typing import Any

import pytest
from airflow.callbacks.callback_requests import DagCallbackRequest
from airflow.dag_processing.processor import _execute_dag_callbacks
from airflow.providers.standard.operators.empty import EmptyOperator
from structlog import get_logger

from millrace_airflow import listener
from millrace_airflow.defaults import millrace_dag
from millrace_airflow.errors import JobLost


def _connections(listening: socket.socket) -> Iterator[socket.socket]:
    """Yield connections until the socket is shut."""
    while True:
        try:
            yield listening.accept()[0]
        except OSError:
            return


@contextmanager
def http_receiver(status: int = 200) -> Iterator[tuple[int, list[tuple[str, Any, str | None]]]]:
    """A server that keeps each POST: (path, JSON, Authorization)."""
    received: list[tuple[str, Any, str | None]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            received.append((self.path, json.loads(body), self.headers["Authorization"]))
            self.send_response(status)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server.server_port, received
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)


@contextmanager
def slow_receiver() -> Iterator[int]:
    """A server that sends one byte of an endless header ten times a second, for up to 20 s."""
    stop = threading.Event()

    def drip(connection: socket.socket) -> None:
        with connection:
            connection.sendall(b"HTTP/1.1 500 Slow\r\nX-Slow: ")
            for _ in range(200):
                if stop.wait(0.1):
                    return
                try:
                    connection.sendall(b"x")
                except OSError:
                    return

    listening = socket.create_server(("127.0.0.1", 0))
    threads: list[threading.Thread] = []

    def serve() -> None:
        for connection in _connections(listening):
            threads.append(threading.Thread(target=drip, args=(connection,), daemon=True))
            threads[-1].start()

    threads.append(threading.Thread(target=serve, daemon=True))
    threads[0].start()
    try:
        yield listening.getsockname()[1]
    finally:
        stop.set()
        listening.shutdown(socket.SHUT_RDWR)
        listening.close()
        for each in threads:
            each.join(10)


@contextmanager
def mailbox() -> Iterator[tuple[int, list[bytes]]]:
    """An SMTP server that keeps the mails of one connection after another."""
    mails: list[bytes] = []
    listening = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        for connection in _connections(listening):
            with connection, connection.makefile("rwb", buffering=0) as lines:
                lines.write(b"220 ready\r\n")
                for line in lines:
                    verb = line.split(b" ")[0].strip().upper()
                    if verb == b"DATA":
                        lines.write(b"354 go on\r\n")
                        mails.append(b"".join(iter(lines.readline, b".\r\n")))
                    lines.write(b"221 bye\r\n" if verb == b"QUIT" else b"250 ok\r\n")
                    if verb == b"QUIT":
                        break

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield listening.getsockname()[1], mails
    finally:
        listening.shutdown(socket.SHUT_RDWR)
        listening.close()
        thread.join(10)


def declare(monkeypatch: pytest.MonkeyPatch, *notifiers: Any) -> None:
    monkeypatch.setenv("AIRFLOW__MILLRACE__NOTIFIERS", json.dumps(notifiers))


def end_run(run_id: str, *, failed: bool) -> None:
    """Do what the DAG processor does once a run of the DAG `nightly` has ended."""
    with millrace_dag("nightly", doc="Every night.") as dag:
        EmptyOperator(task_id="only")
    request = DagCallbackRequest(
        filepath="nightly.py",
        dag_id="nightly",
        run_id=run_id,
        bundle_name="dags-folder",
        bundle_version=None,
        is_failure_callback=failed,
        msg="task_failure" if failed else "success",
    )
    _execute_dag_callbacks(SimpleNamespace(dags={"nightly": dag}), request, get_logger())  # type: ignore[arg-type]


def fail_task(run_id: str) -> None:
    dag = SimpleNamespace(tags={"millrace"})
    task = SimpleNamespace(
        task=SimpleNamespace(dag=dag), dag_id="nightly", task_id="only", run_id=run_id, try_number=1, state="failed"
    )
    listener.on_task_instance_failed("running", task, JobLost("its process is gone", code="JOB_LOST"))
