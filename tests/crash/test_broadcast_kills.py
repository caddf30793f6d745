"""Broadcasts of messages through a server that dies at every step, and for callers that die.

What was stored reaches every VChannel once, and the caller that asks again under its request gets that result.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from millrace.base.errors import MillraceError
from millrace.base.settings import Settings
from millrace.catalog.broadcast import BroadcastResult
from millrace.client.database import Database, connect
from millrace.coord.broadcast.task import TaskState
from millrace.message.schema import CollectionSchema, FieldSpec
from millrace.observe.broadcasts import broadcast_rows
from millrace.rpc.discovery import read_record
from tests.waiting import until

SCHEMA = CollectionSchema((FieldSpec("id", "int64", False), FieldSpec("name", "string", True)), "id")
ROWS = 60
CALLER = """
import sys
import millrace
with millrace.connect(sys.argv[1]) as db:
    with db.broadcast(request="a") as messages:
        for name in ("users", "orders"):
            messages.insert(name, {"id": list(range(60)), "name": ["x"] * 60})
"""


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    found = Settings(data_dir=tmp_path / "data", cache_dir=tmp_path / "cache", append_deadline=5.0, start_deadline=20.0)
    with connect(settings=found) as db:
        db.catalog.ensure_pchannels(2)
        for name in ("users", "orders"):
            db.catalog.create_collection(name, SCHEMA, vchannels=3)
        db.connection.service.shutdown()
    return found


def submit(db: Database) -> BroadcastResult:
    sent = db.broadcast(request="a")
    for name in ("users", "orders"):
        sent.insert(name, {"id": list(range(ROWS)), "name": ["x"] * ROWS})
    return sent.submit()


def require_whole(db: Database, result: BroadcastResult) -> None:
    """Each row is there once, at its VChannel's tick."""
    for name in ("users", "orders"):
        there = db.definition(name)
        assert db[name].count() == ROWS
        changes = list(db[name].changes(until=db.current_tick(there.pchannels)))
        found = {(row["_vchannel"], row["_time_tick"]) for batch in changes for row in batch.rows.to_pylist()}
        assert found == {(each, result.ticks[each]) for each in there.vchannels}
    assert all(each.state is TaskState.DONE for each in broadcast_rows(db.settings, limit=50))


@pytest.mark.parametrize(
    "point",
    [pytest.param(each, marks=pytest.mark.slow) for each in ("ddl.kept", "ddl.sent", "ddl.called")] + ["ddl.sent@4"],
)
def test_a_server_killed_at_any_step_leaves_a_broadcast_whole(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    monkeypatch.setenv("MILLRACE_TEST_FAILPOINTS", point)
    with connect(settings=settings) as db:
        record = read_record(settings.log_path)
        assert record is not None
        monkeypatch.delenv("MILLRACE_TEST_FAILPOINTS")
        try:
            first = submit(db)  # the client starts another server and asks again
        except MillraceError as error:
            if not error.retriable:
                raise
            first = submit(db)
        after = read_record(settings.log_path)
        assert after is not None
        assert after.pid != record.pid, "the server was not killed"
        assert submit(db) == first
        require_whole(db, first)
        db.connection.service.shutdown()


@pytest.mark.slow
def test_a_killed_caller_s_broadcast_is_completed(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MILLRACE_TEST_FAILPOINTS", "ddl.kept~")
    with connect(settings=settings) as db:
        record = read_record(settings.log_path)
        assert record is not None
        monkeypatch.delenv("MILLRACE_TEST_FAILPOINTS")
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        caller = subprocess.Popen([sys.executable, "-c", CALLER, str(settings.data_dir)], env=env)
        try:
            until(lambda: [each for each in broadcast_rows(settings, limit=50) if each.open], seconds=30)
        finally:
            caller.kill()
            caller.wait()
            os.kill(record.pid, signal.SIGCONT)
        until(lambda: not any(each.open for each in broadcast_rows(settings, limit=50)), seconds=30)
        require_whole(db, submit(db))
        db.connection.service.shutdown()
