"""Processes that change one collection at once, some of them killed in it.

Catalog and chain are the same in the end.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from millrace.base.settings import Settings
from millrace.client.database import Database, connect
from millrace.coord.broadcast.task import TaskState
from millrace.coord.catalog.store import CatalogStore
from millrace.coord.coordinator import Coordinator
from millrace.message.schema import FieldSpec
from tests.coord.ddl.rig import SCHEMA, ConnectionAppender

TURNS = 3


@pytest.fixture
def client(tmp_path: Path) -> Iterator[Database]:
    with connect(settings=Settings(data_dir=tmp_path / "data", cache_dir=tmp_path / "cache")) as made:
        made.catalog.ensure_pchannels(2)
        made.catalog.create_collection("c", SCHEMA, vchannels=2)
        yield made
        made.connection.service.shutdown()


def start(settings: Settings, number: int, failpoint: str = "") -> subprocess.Popen[bytes]:
    env = {**os.environ, "MILLRACE_DATA": str(settings.data_dir), "MILLRACE_TEST_FAILPOINTS": failpoint}
    env["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    command = [sys.executable, str(Path(__file__).with_name("ddl_process.py")), str(number), str(TURNS)]
    return subprocess.Popen(command, env=env)


def test_processes_that_change_a_collection_at_once_and_die_leave_catalog_and_chain_alike(client: Database) -> None:
    dying = ["ddl.planned@3", "ddl.kept@2", "ddl.sent@5", "ddl.acknowledged@4"]
    processes = [start(client.settings, number, point) for number, point in enumerate(["", "", *dying])]
    ended = [process.wait(timeout=120) for process in processes]
    assert ended == [0, 0, *[-signal.SIGKILL] * 4]
    append = ConnectionAppender(client.connection, client.settings.append_deadline)
    with Coordinator(client.settings, log=client.log, append=append) as coordinator:
        coordinator.resume()
        assert coordinator.differences() == []
    found = client.catalog.collection("c")
    fields = {each.name for each in found.schema.fields}
    assert {f"f{number}_{turn}" for number in (0, 1) for turn in range(TURNS)} <= fields
    assert {f"shared{turn}" for turn in range(TURNS)} <= set(found.partitions)
    assert len(set(found.partitions.values())) == len(found.partitions)
    with CatalogStore(client.settings.data_dir / "coord" / "coord.db") as store:
        assert store.broadcasts.open_tasks() == []


@pytest.mark.slow
def test_what_a_killed_process_left_is_completed_by_the_servers_next_start(client: Database, tmp_path: Path) -> None:
    process = start(client.settings, 0, "ddl.sent")
    assert process.wait(timeout=60) == -signal.SIGKILL
    client.connection.service.shutdown()
    with connect(settings=client.settings) as again:
        again.connection.service.ping()
        with CatalogStore(client.settings.data_dir / "coord" / "coord.db") as store:
            end = time.monotonic() + 60
            while store.broadcasts.open_tasks():
                assert time.monotonic() < end, store.broadcasts.open_tasks()
                threading.Event().wait(0.05)
            assert store.collection("c").schema.fields[-1] == FieldSpec("f0_0", "string", True)


@pytest.mark.slow
@pytest.mark.parametrize("point", ["ddl.kept", "ddl.sent", "ddl.acknowledged"])
def test_what_a_killed_process_left_is_completed_by_the_server_that_runs(client: Database, point: str) -> None:
    process = start(client.settings, 0, point)
    assert process.wait(timeout=60) == -signal.SIGKILL
    with CatalogStore(client.settings.data_dir / "coord" / "coord.db") as store:
        (left,) = store.broadcasts.open_tasks()
        end = time.monotonic() + 60
        while store.broadcasts.open_tasks():
            assert time.monotonic() < end, store.broadcasts.open_tasks()
            threading.Event().wait(0.05)
        done = store.broadcasts.task(left.id)
        assert done is not None
        assert done.state is TaskState.DONE
        assert store.collection("c").schema.fields[-1] == FieldSpec("f0_0", "string", True)
