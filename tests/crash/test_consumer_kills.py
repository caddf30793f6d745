"""SIGKILL of the server while a group consumes from elsewhere: it goes on by itself, and has each row once."""

from __future__ import annotations

import os
import signal
import socket
import threading
from pathlib import Path

import pyarrow as pa
import pytest

from millrace.base.settings import Settings
from millrace.client.client import Client
from millrace.client.consume.delivery import CHANGES
from millrace.message.schema import CollectionSchema, FieldSpec
from millrace.node.ingest.in_process import catch_up
from millrace.rpc.discovery import read_record
from tests.log.server_rig import until

SCHEMA = CollectionSchema((FieldSpec("id", "int64", False), FieldSpec("body", "string", True)), "id")
TOKEN = "a-token-that-both-sides-have"
ROWS = 3000
KILLS = 4


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def kill_and_start(settings: Settings) -> None:
    record = read_record(settings.log_path)
    assert record is not None
    os.kill(record.pid, signal.SIGKILL)
    with Client.connect(settings) as client:
        client.append.service.ping()


def test_a_group_elsewhere_has_each_row_once_though_its_server_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MILLRACE_SERVER_TOKEN", TOKEN)
    settings = Settings(data_dir=tmp_path / "data", cache_dir=tmp_path / "cache", log_port=free_port())
    with Client.connect(settings) as local:
        local.catalog.ensure_pchannels(2)
        users = local.catalog.create_collection("users", SCHEMA, vchannels=2)
        producer = local.producer()
        for first in range(0, ROWS // 2, 50):
            producer.insert(users, pa.table({"id": list(range(first, first + 50)), "body": ["x" * 3000] * 50}))
            if first % 250 == 0:
                catch_up(settings, local.log)
    record = read_record(settings.log_path)
    assert record is not None
    seen: list[int] = []
    enough = threading.Event()

    def consume() -> None:
        """Two consumers of the group, one after the other; each closes in the midst of things."""
        with Client.at(record.address, token=TOKEN, settings=settings) as remote:
            for most in (ROWS // 3, ROWS):
                with remote.consumer("users", group="mailer", filters=[CHANGES]) as consumer:
                    while len(seen) < most:
                        delivery = consumer.poll(timeout=1.0)
                        if delivery is not None:
                            keys = [key for each in delivery.changes() for key in each.rows["id"].to_pylist()]
                            seen.extend(keys)
                            consumer.acknowledge(delivery)
        enough.set()

    consuming = threading.Thread(target=consume)
    consuming.start()
    for kill in range(KILLS):
        until(lambda kill=kill: len(seen) >= ROWS // 8 * kill or not consuming.is_alive(), "rows come")  # type: ignore[misc]
        kill_and_start(settings)
    with Client.connect(settings) as local:
        producer = local.producer()
        for first in range(ROWS // 2, ROWS, 50):
            producer.insert(users, pa.table({"id": list(range(first, first + 50)), "body": ["x" * 3000] * 50}))
        consuming.join(60)
        assert enough.is_set(), f"{len(seen)} of {ROWS} rows came"
        assert sorted(seen) == list(range(ROWS)), "each once, though nobody started it again"
        with local.consumer("users", group="mailer", filters=[CHANGES]) as here:
            assert here.poll(timeout=1.0) is None, "the group stands behind them, for a consumer on the spot too"
        local.append.service.shutdown()
