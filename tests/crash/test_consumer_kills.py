"""SIGKILL of the server while a group consumes, or changes are followed, from elsewhere.

It goes on by itself, each row once.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
from pathlib import Path

import pyarrow as pa
import pytest

from millrace.base.settings import Settings
from millrace.client.consume.delivery import CHANGES
from millrace.client.database import Database, connect
from millrace.client.produce.rows import conform, split_rows
from millrace.message.schema import CollectionSchema, FieldSpec
from millrace.node.flush.definition import flush_to_end
from millrace.node.ingest.definition import ingest_to_end
from millrace.operations.backfill.importer import append_imports
from millrace.operations.backfill.staging_folder import StagingFolder
from millrace.rpc.discovery import read_record
from millrace.runtime.progress import Progress
from tests.waiting import until

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
    with connect(settings=settings) as client:
        client.connection.service.ping()


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Settings, str]:
    """A deployment with half of the rows, and its server's address, at which it comes back."""
    monkeypatch.setenv("MILLRACE_SERVER_TOKEN", TOKEN)
    settings = Settings(data_dir=tmp_path / "data", cache_dir=tmp_path / "cache", log_port=free_port())
    with connect(settings=settings) as local:
        local.catalog.ensure_pchannels(2)
        local.catalog.create_collection("users", SCHEMA, vchannels=2)
        for first in range(0, ROWS // 2, 250):
            insert(local, first, first + 250)
            ingest_to_end(settings, local.log)
    record = read_record(settings.log_path)
    assert record is not None
    return settings, record.address


def insert(client: Database, begin: int, end: int) -> None:
    users, producer = client.definition("users"), client.new_producer()
    for first in range(begin, end, 50):
        producer.insert(users, pa.table({"id": list(range(first, first + 50)), "body": ["x" * 3000] * 50}))


def test_a_group_elsewhere_has_each_row_once_though_its_server_is_killed(served: tuple[Settings, str]) -> None:
    settings, address = served
    seen: list[int] = []
    enough = threading.Event()

    def consume() -> None:
        """Two consumers of the group, one after the other; each closes in the midst of things."""
        with connect(address, token=TOKEN, settings=settings) as remote:
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
    with connect(settings=settings) as local:
        insert(local, ROWS // 2, ROWS)
        consuming.join(60)
        assert enough.is_set(), f"{len(seen)} of {ROWS} rows came"
        assert sorted(seen) == list(range(ROWS)), "each once, though nobody started it again"
        with local.consumer("users", group="mailer", filters=[CHANGES]) as here:
            assert here.poll(timeout=1.0) is None, "the group stands behind them, for a consumer on the spot too"
        local.connection.service.shutdown()


@pytest.mark.slow
def test_changes_elsewhere_come_once_though_the_server_is_killed(served: tuple[Settings, str]) -> None:
    settings, address = served
    with connect(settings=settings) as local:
        users = local.definition("users")
        folder = StagingFolder(settings, "load", users, slice_bytes=None)
        big = pa.table({"id": list(range(ROWS, ROWS + 40)), "body": ["x" * 500_000] * 40})
        for vchannel, partition_id, batch in split_rows(conform(big, users), users, None, None):
            folder.add(vchannel, partition_id, batch)
        append_imports(local, folder.publish({}), replace=False, progress=Progress())
        ingest_to_end(settings, local.log)
        flush_to_end(settings)
        insert(local, ROWS // 2, ROWS)
    seen: list[int] = []

    def follow() -> None:
        """Streams one after the other, each from the positions that were kept with what came."""
        positions: dict[str, list[int]] = {}
        with connect(address, token=TOKEN, settings=settings) as remote:
            while len(seen) < ROWS + 40:
                with remote.collection("users").changes(after=positions) as stream:
                    for _ in range(3):
                        batch = stream.poll(timeout=1.0)
                        seen.extend([] if batch is None else batch.rows["id"].to_pylist())
                        positions = {name: list(place) for name, place in stream.positions.items()}

    following = threading.Thread(target=follow)
    following.start()
    for kill in range(KILLS):
        until(lambda kill=kill: len(seen) >= ROWS // 6 * kill or not following.is_alive(), "changes come")  # type: ignore[misc]
        kill_and_start(settings)
    following.join(60)
    assert sorted(seen) == list(range(ROWS + 40)), "each once"
    with connect(settings=settings) as local:
        local.connection.service.shutdown()
