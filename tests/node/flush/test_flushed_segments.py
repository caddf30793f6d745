"""The file of the newest flushed segments.

What the flusher's commit brought to an end, made anew from the table at a start.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

import pyarrow as pa
import pytest

from millrace.base.settings import Settings
from millrace.client.database import Database, connect
from millrace.message.schema import CollectionSchema, FieldSpec
from millrace.node.flush.committer import FlushCommitter
from millrace.node.flush.flushed_segments import FlushedSegments, flushed_segments_path
from millrace.node.flush.flusher import run_flush
from millrace.node.ingest.definition import ingest_to_end
from tests.node.flush.plans import plans_of

SCHEMA = CollectionSchema((FieldSpec("id", "int64", False),), "id")


@pytest.fixture
def client(settings: Settings) -> Iterator[Database]:
    with connect(settings=settings) as made:
        try:
            made.catalog.ensure_pchannels(1)
            made.catalog.create_collection("c", SCHEMA)
            yield made
        finally:
            made.connection.service.shutdown()


def named(settings: Settings) -> list[tuple[str, int]]:
    return [
        (each["pchannel"], each["rows"]) for each in json.loads(flushed_segments_path(settings).read_text())["segments"]
    ]


def flush_once(client: Database, settings: Settings, flushed: FlushedSegments, rows: int) -> None:
    client.new_producer().insert(client.definition("c"), pa.table({"id": list(range(rows))}))
    client.catalog.flush("c")
    ingest_to_end(settings, client.log)
    reports = [run_flush(settings, plan) for plan in plans_of(settings)]
    flushed.record(FlushCommitter(settings).commit(reports).committed)


@pytest.mark.slow
def test_the_file_names_what_was_flushed_also_after_a_restart(client: Database, settings: Settings) -> None:
    flushed = FlushedSegments(settings)
    assert named(settings) == []
    flush_once(client, settings, flushed, 5)
    flush_once(client, settings, flushed, 7)
    assert named(settings) == [("dml_0", 5), ("dml_0", 7)]
    flushed_segments_path(settings).unlink()
    FlushedSegments(settings)
    assert named(settings) == [("dml_0", 5), ("dml_0", 7)]
