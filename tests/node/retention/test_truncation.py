"""The log gives up what the tables hold durably, never more, and whatever dies in between."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest

from millrace.base.errors import PositionTruncated
from millrace.base.settings import Settings
from millrace.catalog.collection import CollectionInfo
from millrace.client.database import Database, connect
from millrace.message.ids import EARLIEST
from millrace.message.schema import CollectionSchema, FieldSpec
from millrace.node.flush.definition import flush_to_end
from millrace.node.ingest.definition import ingest_to_end
from millrace.node.retention import truncation
from millrace.node.retention.truncation import truncate_log
from millrace.operations.verification import verify_channel
from millrace.tables.read.arrow import read_arrow
from millrace.tables.wal.reader import WalSnapshot
from millrace.tables.wal.table import WalTable

SCHEMA = CollectionSchema((FieldSpec("id", "int64", False), FieldSpec("body", "binary", True)), "id")
P = "dml_0"


class Died(BaseException):
    """Ends the process where it stands."""


@pytest.fixture
def client(tmp_path: Path) -> Iterator[Database]:
    settings = Settings(data_dir=tmp_path / "data", cache_dir=tmp_path / "cache", log_file_bytes=1 << 20)
    with connect(settings=settings) as made:
        made.catalog.ensure_pchannels(1)
        made.catalog.create_collection("c", SCHEMA)
        yield made
        made.connection.service.shutdown()


def fill(client: Database, first: int, count: int = 20) -> CollectionInfo:
    collection = client.definition("c")
    for key in range(first, first + count):
        client.new_producer().insert(collection, pa.table({"id": [key], "body": [b"x" * 200_000]}))
    return collection


def keys(client: Database, collection: CollectionInfo) -> list[int]:
    return sorted(read_arrow(client.settings, collection.id)["id"].to_pylist())


@pytest.mark.slow
def test_nothing_goes_before_the_flusher_has_it(client: Database) -> None:
    fill(client, 0)
    ingest_to_end(client.settings, client.log)
    assert truncate_log(client.settings, client.log) == []
    assert client.log.open(P).describe().begin == EARLIEST


def test_what_both_checkpoints_have_passed_goes_and_everything_works_on(client: Database) -> None:
    collection = fill(client, 0)
    ingest_to_end(client.settings, client.log)
    flush_to_end(client.settings)
    before = client.log.open(P).describe().bytes
    (planned,) = truncate_log(client.settings, client.log, dry_run=True)
    assert client.log.open(P).describe().begin == EARLIEST, "a dry run changes nothing"
    (done,) = truncate_log(client.settings, client.log)
    assert (planned.position, done.advances) == (done.position, True)
    log = client.log.open(P)
    assert log.describe().begin == done.position
    assert log.describe().bytes < before
    with pytest.raises(PositionTruncated) as caught:
        log.read(EARLIEST)
    assert caught.value.earliest == done.position
    fill(client, 20)
    ingest_to_end(client.settings, client.log)
    flush_to_end(client.settings)
    assert keys(client, collection) == list(range(40))
    snapshot = WalSnapshot.open(Path(client.settings.wal_uri))
    assert snapshot is not None
    report = verify_channel(snapshot, WalTable.open(Path(client.settings.wal_uri)), client.log, P)
    assert report.ok
    assert report.replayed is None, "the log's beginning is gone, and the report says so"


def test_an_open_transaction_keeps_its_begin_in_the_log(client: Database) -> None:
    collection = client.definition("c")
    producer = client.new_producer()
    with producer.transaction(collection) as txn:
        txn.insert(pa.table({"id": [1], "body": [b"y"]}))
        fill(client, 100)
        ingest_to_end(client.settings, client.log)
        flush_to_end(client.settings)
        (found,) = truncate_log(client.settings, client.log)
        rows = WalSnapshot.open(Path(client.settings.wal_uri))
        assert rows is not None
        begin = next(rows.messages(P, types=["BEGIN_TXN"]))
        assert found.position.entry <= begin["entry"][0].as_py()
    ingest_to_end(client.settings, client.log)
    flush_to_end(client.settings)
    assert keys(client, collection) == [1, *range(100, 120)]


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("moment", ["truncation.before", "truncation.after"])
def test_a_death_around_truncation_loses_nothing(
    client: Database, moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    collection = fill(client, 0)
    ingest_to_end(client.settings, client.log)
    flush_to_end(client.settings)

    def die(name: str) -> None:
        if name == moment:
            raise Died

    monkeypatch.setattr(truncation, "hit", die)
    with pytest.raises(Died):
        truncate_log(client.settings, client.log)
    monkeypatch.undo()
    fill(client, 20, 5)
    ingest_to_end(client.settings, client.log)
    flush_to_end(client.settings)
    truncate_log(client.settings, client.log)
    assert keys(client, collection) == list(range(25))
