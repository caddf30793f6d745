"""The health route, which probes ask without a token."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from millrace.service import application
from millrace.service.application import HEALTH, add_health


def test_health_says_whether_the_store_answers_and_asks_it_once_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    now, asked, ready = [100.0], [], [True]
    monkeypatch.setattr(application.time, "monotonic", lambda: now[0])

    def is_ready() -> bool:
        asked.append(now[0])
        return ready[0]

    app = FastAPI()
    add_health(app, "millrace-coordinator", is_ready)
    with TestClient(app) as client:
        for _ in range(50):  # anybody may ask
            found = client.get(HEALTH)
            assert (found.status_code, found.json()) == (200, {"service": "millrace-coordinator", "ready": True})
        assert len(asked) == 1
        now[0], ready[0] = 101.5, False
        assert client.get(HEALTH).status_code == 503
        assert len(asked) == 2


def test_one_caller_waits_for_a_store_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(application, "READY_SECONDS", -1.0)  # each call is due to ask
    begun, going_on, slow = threading.Event(), threading.Event(), threading.Event()

    def is_ready() -> bool:
        if slow.is_set():
            begun.set()
            assert going_on.wait(30)
        return True

    app = FastAPI()
    add_health(app, "millrace-coordinator", is_ready)
    with TestClient(app) as client, ThreadPoolExecutor(2) as callers:
        assert client.get(HEALTH).status_code == 200
        slow.set()
        waiting = callers.submit(client.get, HEALTH)
        try:
            assert begun.wait(30)
            assert callers.submit(client.get, HEALTH).result(timeout=10).status_code == 200
            assert not waiting.done()
        finally:
            going_on.set()
        assert waiting.result(timeout=10).status_code == 200
