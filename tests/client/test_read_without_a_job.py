"""Without a running streaming node, a read of a data folder takes from the log what the tables lack."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from millrace.base.errors import CollectionNotFound, TickNotReached
from millrace.base.settings import Settings
from millrace.client.collection import Collection
from millrace.client.database import Database, connect
from millrace.node.flush.definition import flush_to_end
from millrace.node.ingest.definition import ingest_to_end
from millrace.rpc.discovery import read_record
from millrace.runtime.heartbeat import STREAMING_NODE, query_runs
from millrace.tables.read import freshness
from millrace.tables.read.plan import ReadPlan, plan_read
from tests.client.conftest import opened_shop, streaming_node
from tests.waiting import until

FIELDS = {"id": "int64", "name": "string?"}


@pytest.fixture(scope="module")
def db(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Database]:
    yield from opened_shop(tmp_path_factory.mktemp("alone"))


@pytest.fixture
def users(db: Database, request: pytest.FixtureRequest) -> Collection:
    name = "".join(each if each.isalnum() else "_" for each in request.node.name)
    return db.create_collection(name, FIELDS, key="id", vchannels=2)


def rows_of(read: pa.Table) -> dict[int, str]:
    found = dict(zip(read["id"].to_pylist(), read["name"].to_pylist(), strict=True))
    assert len(found) == read.num_rows, "a key is there twice"
    return found


def ingested(db: Database) -> None:
    ingest_to_end(db.settings, db.log)


def flushed(db: Database) -> None:
    ingest_to_end(db.settings, db.log)
    flush_to_end(db.settings)


@pytest.mark.parametrize("between", [lambda db: None, ingested, flushed], ids=["log", "wal", "tables"])
def test_a_read_is_the_same_wherever_the_first_half_of_the_rows_is(
    db: Database, users: Collection, between: Callable[[Database], None]
) -> None:
    users.insert([{"id": number, "name": "first"} for number in range(10)])
    half = db.current_tick(users.definition.pchannels)
    between(db)
    users.upsert([{"id": 3, "name": "second"}])
    users.delete([4])
    users.alter(add={"size": "int64?"})
    with users.transaction() as txn:
        mine = [key for key in range(100, 140) if rows_on(users, key) == txn.vchannel]
        txn.insert([{"id": key, "name": "together", "size": 1} for key in mine])
    wanted = {number: "first" for number in range(10) if number != 4} | {3: "second"} | dict.fromkeys(mine, "together")
    read = users.read(deadline=5.0)
    assert rows_of(read) == wanted
    assert users.count() == len(wanted)
    assert rows_of(users.stream().read_all()) == wanted
    assert rows_of(users.dataset().to_table()) == wanted
    assert rows_of(users.read(at=half)) == dict.fromkeys(range(10), "first")
    assert users.read(columns=["size"], where="size = 1").num_rows == len(mine)
    flushed(db)
    assert users.read().sort_by("id") == read.sort_by("id")


def rows_on(users: Collection, key: int) -> str:
    from millrace.client.produce.rows import key_rows, split_keys

    [(vchannel, _)] = split_keys(key_rows([key], users.definition), users.definition)
    return vchannel


def test_a_transaction_that_began_in_the_table_ends_in_the_log(db: Database, users: Collection) -> None:
    with users.transaction() as txn:
        key = next(key for key in range(100) if rows_on(users, key) == txn.vchannel)
        txn.insert([{"id": key, "name": "a"}])
        ingested(db)
        assert users.count() == 0
    assert rows_of(users.read()) == {key: "a"}


def test_a_collection_that_no_table_knows_is_read(tmp_path: Path) -> None:
    for made in opened_shop(tmp_path):
        users = made.create_collection("users", FIELDS, key="id")
        assert users.read().num_rows == 0
        users.insert([{"id": 1, "name": "Ada"}])
        assert users.read().to_pylist() == [{"id": 1, "name": "Ada"}]
        assert not Path(made.settings.wal_uri).exists(), "a read writes no table"


def test_a_read_of_the_future_and_of_what_is_gone_stay_errors(db: Database, users: Collection) -> None:
    users.insert([{"id": 1, "name": "Ada"}])
    with pytest.raises(TickNotReached, match="ahead of the log's clock"):
        users.read(at=datetime.now(UTC) + timedelta(hours=1))
    before = db.current_tick(users.definition.pchannels)
    db.drop_collection(users.name)
    with pytest.raises(CollectionNotFound):
        users.read()
    with pytest.raises(CollectionNotFound):
        db.create_collection(users.name, FIELDS, key="id", vchannels=2).read(at=before)


def test_more_than_memory_may_take_is_refused(db: Database, users: Collection, monkeypatch: pytest.MonkeyPatch) -> None:
    other = db.create_collection(users.name + "_other", FIELDS, key="id", vchannels=2)
    other.insert([{"id": number, "name": "x" * 100} for number in range(2_000)])
    users.insert([{"id": 1, "name": "Ada"}])
    monkeypatch.setattr(freshness, "DECIDED_BYTES", 0)
    monkeypatch.setattr(freshness, "UNCOMMITTED_BYTES", 100_000)
    assert users.count() == 1, "rows of other collections take none"
    with pytest.raises(TickNotReached, match="no streaming node runs: start one"):
        other.read()


def counts(users: Collection) -> int | None:
    try:
        return users.count(deadline=1.0)
    except TickNotReached:  # a timer of the chain fired meanwhile
        return None


def test_with_a_streaming_node_a_read_waits_for_what_the_append_host_does_not_have(
    db: Database, users: Collection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(freshness, "DECIDED_BYTES", 0)
    users.insert([{"id": 1, "name": "Ada"}])
    assert not query_runs(db.settings, STREAMING_NODE)
    with streaming_node(db.settings):
        with pytest.raises(TickNotReached, match="that the wal table lacks"):
            users.read(deadline=0.1)
        until(lambda: ingested(db) or counts(users) == 1)


def test_a_read_at_a_server_needs_no_streaming_node_either(db: Database, users: Collection, tmp_path: Path) -> None:
    users.insert([{"id": 1, "name": "Ada"}])
    record = read_record(db.settings.log_path)
    assert record is not None
    there = Settings(data_dir=tmp_path / "nothing")
    far = connect(record.address, token=record.token, settings=there)
    with far:
        assert far[users.name].read(deadline=0.1).to_pylist() == [{"id": 1, "name": "Ada"}]


def test_rows_that_reach_the_table_during_a_read_are_read_once(
    db: Database, users: Collection, monkeypatch: pytest.MonkeyPatch
) -> None:
    users.insert([{"id": number, "name": "a"} for number in range(20)])

    def late(*arguments: Any, **options: Any) -> ReadPlan:
        ingested(db)
        return plan_read(*arguments, **options)

    monkeypatch.setattr(freshness, "plan_read", late)
    assert rows_of(users.stream().read_all()) == dict.fromkeys(range(20), "a")
