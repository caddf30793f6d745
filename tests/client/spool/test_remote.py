"""A producer on another host outlives its server.

What it appends meanwhile is spooled there, and sent once, in order.
"""

from __future__ import annotations

import os
import signal
import socket
from pathlib import Path

import pyarrow as pa
import pytest

from millrace.base.settings import Settings
from millrace.client.database import connect
from millrace.message.schema import CollectionSchema, FieldSpec
from millrace.node.flush.definition import flush_to_end
from millrace.node.ingest.definition import ingest_to_end
from millrace.rpc.discovery import read_record
from millrace.tables.read.arrow import read_arrow

SCHEMA = CollectionSchema((FieldSpec("id", "int64", False), FieldSpec("body", "string", True)), "id")
TOKEN = "a-token-that-both-sides-have"


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def rows(*keys: int, body: str) -> pa.Table:
    return pa.table({"id": list(keys), "body": [body] * len(keys)})


@pytest.mark.slow
def test_a_remote_producer_spools_while_its_server_is_gone_and_sends_each_row_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MILLRACE_SERVER_TOKEN", TOKEN)
    settings = Settings(data_dir=tmp_path / "data", cache_dir=tmp_path / "cache", log_port=free_port())
    with connect(settings=settings) as local:
        local.catalog.ensure_pchannels(2)
        local.catalog.create_collection("users", SCHEMA, vchannels=2)
    record = read_record(settings.log_path)
    assert record is not None
    with connect(record.address, settings=settings, deadline=2.0) as remote:
        users = remote.definition("users")
        producer = remote.new_producer(spool=tmp_path / "spool")
        assert producer.insert(users, rows(*range(20), body="first")).rows == 20
        os.kill(record.pid, signal.SIGKILL)
        written = producer.insert(users, rows(*range(20, 40), body="second"))
        assert written.spooled_rows == 20
        producer.delete(users, list(range(10)))
        with connect(settings=settings) as local:
            assert producer.spool is not None
            assert producer.spool.wait_empty(timeout=30)
            assert producer.spool.error is None
            remote.catalog.flush("users")
            ingest_to_end(settings, local.log)
            flush_to_end(settings)
            found = read_arrow(settings, users.id).sort_by("id")
            assert found["id"].to_pylist() == list(range(10, 40))
            assert found["body"].to_pylist() == ["first"] * 10 + ["second"] * 20
            local.connection.service.shutdown()
