"""What `make up` asks of Airflow.

Repeated while Airflow's database is busy, refused at once where a repeat cannot help.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from millrace.base.errors import AirflowUnavailable
from millrace.installation import airflow_api as installation_api
from millrace.installation.airflow_api import AirflowApi


class Answers(HTTPServer):
    """Answers the calls that follow the login with `statuses`, one after the other; `login` is the login's."""

    statuses: list[int]
    login: int
    calls: list[str]


class Handler(BaseHTTPRequestHandler):
    server: Answers

    def _answer(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.server.calls.append(f"{self.command} {self.path}")
        status = self.server.login if self.path == "/auth/token" else self.server.statuses.pop(0)
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps({"access_token": "t"}).encode())

    do_GET = do_PATCH = do_POST = _answer

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Answers]:
    monkeypatch.setattr(installation_api, "PAUSE_SECONDS", 0.0)
    made = Answers(("127.0.0.1", 0), Handler)
    made.statuses, made.login, made.calls = [], 201, []
    thread = threading.Thread(target=made.serve_forever)
    thread.start()
    yield made
    made.shutdown()
    thread.join(timeout=10)
    made.server_close()


def api(server: Answers) -> AirflowApi:
    return AirflowApi(f"http://127.0.0.1:{server.server_port}", user="admin", password="p")


def test_a_locked_database_is_asked_again(server: Answers) -> None:
    server.statuses = [500, 503, 200]
    api(server).set_paused("streaming", False)
    assert [call.split()[0] for call in server.calls] == ["POST", "PATCH", "PATCH", "PATCH"]


def test_a_database_that_stays_locked_is_an_error_in_the_end(server: Answers) -> None:
    server.statuses = [500] * installation_api.ATTEMPTS
    with pytest.raises(AirflowUnavailable) as caught:
        api(server).set_paused("streaming", False)
    assert (caught.value.status, server.statuses) == (500, [])


def test_a_token_that_has_run_out_is_replaced_and_a_wrong_password_is_not_tried_again(server: Answers) -> None:
    server.statuses = [401, 200]
    api(server).set_paused("streaming", True)
    assert [call.split()[0] for call in server.calls] == ["POST", "PATCH", "POST", "PATCH"]
    server.calls.clear()
    server.login = 401
    with pytest.raises(AirflowUnavailable):
        api(server).set_paused("streaming", True)
    assert server.calls == ["POST /auth/token"]


def test_what_is_not_there_is_not_asked_for_again(server: Answers) -> None:
    server.statuses = [404]
    assert not api(server).has_dag("nothing")
