"""A producer's rows go where their keys belong, once, in order, and its errors say what to do."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pyarrow as pa
import pytest

from millrace.base.errors import AppendRejected, InvalidArgument, LogUnavailable, TickNotReached
from millrace.base.settings import Settings
from millrace.catalog.collection import CollectionInfo
from millrace.client.database import Database, connect
from millrace.log.protocol import Log
from millrace.message.ids import pchannel_of
from millrace.message.keys import vchannel_index
from millrace.message.schema import CollectionSchema, FieldSpec
from millrace.node.flush.definition import flush_to_end
from millrace.node.ingest.definition import ingest_to_end
from millrace.tables.read import freshness
from millrace.tables.read.freshness import lacks_rows
from millrace.tables.wal.table import WalTable
from tests.client.conftest import own_name, streaming_node
from tests.waiting import until

SCHEMA = CollectionSchema(
    (FieldSpec("id", "int64", False), FieldSpec("city", "string", False), FieldSpec("note", "string", True)), "id"
)


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Database]:
    folder: Path = tmp_path_factory.mktemp("producer")
    settings = Settings(data_dir=folder, cache_dir=folder / "cache", append_retry_delay=0.05)
    with connect(settings=settings) as made:
        made.catalog.ensure_pchannels(2)
        yield made
        made.connection.service.shutdown()


@pytest.fixture
def collection(client: Database, request: pytest.FixtureRequest) -> CollectionInfo:
    name = own_name(request)
    return client.catalog.create_collection(name, SCHEMA, vchannels=3, partitions=["rome", "oslo"])


def rows(*keys: int, city: str = "rome") -> pa.Table:
    return pa.table({"id": list(keys), "city": [city] * len(keys)})


def stored(client: Database, collection: CollectionInfo) -> dict[int, str]:
    ingest_to_end(client.settings, client.log)
    flush_to_end(client.settings)
    table = client.collection(collection.name).read(deadline=10.0)
    return dict(zip(table["id"].to_pylist(), table["city"].to_pylist(), strict=True))


@pytest.mark.slow
def test_rows_go_to_the_vchannel_of_their_key_and_the_partition_of_their_column(
    client: Database, collection: CollectionInfo
) -> None:
    both = pa.concat_tables([rows(*range(100)), rows(*range(100, 200), city="oslo")])
    for given, why in (
        ({"partition_by": "nowhere"}, "names no column"),
        ({"partition_by": "city", "partition": "Rome"}, "give one of them"),
    ):
        with pytest.raises(InvalidArgument, match=why):
            client.new_producer().insert(collection, both, **given)
    written = client.new_producer().insert(collection, both, partition_by="city")
    assert (written.rows, written.rejections) == (200, [])
    found = stored(client, collection)
    assert {key: found[key] for key in range(200)} == {key: "rome" if key < 100 else "oslo" for key in range(200)}


def test_deletes_hit_earlier_rows_alone(client: Database, collection: CollectionInfo) -> None:
    producer = client.new_producer()
    producer.insert(collection, rows(1, 2, 3), partition="rome")
    producer.delete(collection, [2, 3, 99])
    producer.insert(collection, rows(3, city="oslo"), partition="oslo")
    found = stored(client, collection)
    assert {key: found.get(key) for key in (1, 2, 3)} == {1: "rome", 2: None, 3: "oslo"}


def _fail_after(written: object) -> None:
    raise ZeroDivisionError(written)


def test_a_transaction_is_visible_as_a_whole_or_not_at_all(client: Database, collection: CollectionInfo) -> None:
    producer = client.new_producer()
    mine = [key for key in range(100) if vchannel_index(pa.array([key]), 3)[0] == 1][:4]
    with producer.transaction(collection, vchannel=1) as txn:
        txn.insert(rows(*mine[:2]), partition="rome")
        txn.keep_alive()
        txn.delete([mine[0]])
    with pytest.raises(ZeroDivisionError), producer.transaction(collection, vchannel=1) as other:
        _fail_after(other.insert(rows(*mine[2:]), partition="rome"))
    assert txn.commit_tick is not None
    found = stored(client, collection)
    assert [key for key in mine if key in found] == [mine[1]]


def test_a_transaction_refuses_keys_of_another_vchannel(client: Database, collection: CollectionInfo) -> None:
    producer = client.new_producer()
    with pytest.raises(InvalidArgument, match="one VChannel"), producer.transaction(collection) as txn:
        txn.insert(rows(*range(50)), partition="rome")


def test_a_producer_that_takes_over_an_id_fences_the_older_one(client: Database, collection: CollectionInfo) -> None:
    older = client.new_producer(producer_id=77)
    older.insert(collection, rows(*range(30)), partition="rome")
    newer = client.new_producer(producer_id=77)
    written = newer.insert(collection, rows(*range(30, 60)), partition="rome")
    assert not any(result.duplicate for result in written.results)
    with pytest.raises(AppendRejected) as caught:
        older.insert(collection, rows(*range(60, 90)), partition="rome")
    assert caught.value.reason == "PRODUCER_FENCED"
    assert set(range(60)) <= set(stored(client, collection))


def test_a_new_term_is_asked_for_and_nothing_is_lost(client: Database, collection: CollectionInfo) -> None:
    producer = client.new_producer()
    producer.insert(collection, rows(1, 2, 3), partition="rome")
    for name in {pchannel_of(vchannel) for vchannel in collection.vchannels}:
        client.catalog.open_term(name)
    producer.insert(collection, rows(4, 5, 6), partition="rome")
    assert {1, 2, 3, 4, 5, 6} <= set(stored(client, collection))


class LosesAnswers:
    """An append host whose every second answer is lost after the append took effect."""

    def __init__(self, client: Database) -> None:
        self._client = client
        self.calls = 0

    def append_stream(self, pchannel, *, deadline=None):  # type: ignore[no-untyped-def]
        return self._client.connection.append_stream(pchannel, deadline=deadline)

    def append(self, pchannel, entries, *, deadline=None):  # type: ignore[no-untyped-def]
        outcome = self._client.connection.append(pchannel, entries, deadline=deadline)
        self.calls += 1
        if self.calls % 2:
            raise LogUnavailable("the answer got lost")
        return outcome


def test_an_append_whose_answer_was_lost_is_repeated_without_a_second_effect(
    client: Database, collection: CollectionInfo, monkeypatch: pytest.MonkeyPatch
) -> None:
    from millrace.client.produce.producer import Producer

    producer = Producer(LosesAnswers(client), client.catalog, client.settings)
    for first in range(0, 50, 10):
        written = producer.insert(collection, rows(*range(first, first + 10)), partition="rome")
        assert written.rejections == []
    producer.close()
    ingest_to_end(client.settings, client.log)
    assert sorted(client.collection(collection.name).read()["id"].to_pylist()) == list(range(50))


@pytest.mark.slow
def test_a_channel_on_which_nothing_happens_does_not_hold_a_read_back(
    client: Database, collection: CollectionInfo
) -> None:
    for key in range(3):
        written = client.new_producer().insert(collection, rows(key), partition="rome")
        ingest_to_end(client.settings, client.log)
        assert client.collection(collection.name).read()["id"].to_pylist() == list(range(key + 1))
        assert len(client.collection(collection.name).read(at=written.last_tick)) == key + 1


def test_a_read_that_the_streaming_node_has_not_come_up_to_says_so(
    client: Database, collection: CollectionInfo, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(freshness, "DECIDED_BYTES", 0)  # the append host has less than the tables lack
    ingest_to_end(client.settings, client.log)
    client.new_producer().insert(collection, rows(1), partition="rome")
    with streaming_node(client.settings), pytest.raises(TickNotReached, match="streaming node"):
        client.collection(collection.name).read(deadline=0.2)


def test_a_read_that_waits_looks_into_the_log_again_only_where_the_table_moved(
    client: Database, collection: CollectionInfo, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(freshness, "DECIDED_BYTES", 0)
    ingest_to_end(client.settings, client.log)
    client.new_producer().insert(collection, rows(1), partition="rome")
    looked: list[tuple[str, int, int]] = []

    def counted(wal: WalTable | None, log: Log, pchannel: str, *, up_to: int) -> bool:
        looked.append((pchannel, -1 if wal is None else wal.version, up_to))
        return lacks_rows(wal, log, pchannel, up_to=up_to)

    monkeypatch.setattr(freshness, "lacks_rows", counted)
    with streaming_node(client.settings), ThreadPoolExecutor(1) as pool:
        reading = pool.submit(client.collection(collection).read, deadline=20.0)
        until(lambda: len(looked) >= len(collection.pchannels))
        ingest_to_end(client.settings, client.log)
        assert reading.result()["id"].to_pylist() == [1]
    assert len(looked) == len(set(looked)), "a PChannel was asked for twice at one tick and version of the table"


@pytest.mark.parametrize(
    ("table", "words"),
    [
        (pa.table({"id": [1], "town": ["x"]}), "no column 'town'"),
        (pa.table({"id": [1]}), "'city' is missing"),
        (pa.table({"id": ["x"], "city": ["y"]}), "'id' is not int64"),
        (pa.table({"id": [1], "city": pa.array([None], pa.string())}), "'city' has nulls"),
    ],
)
def test_rows_that_do_not_fit_are_refused_before_anything_is_sent(
    client: Database, table: pa.Table, words: str, request: pytest.FixtureRequest
) -> None:
    name = "refused"
    known = {each.name for each in client.catalog.collections()}
    made = client.definition(name) if name in known else client.catalog.create_collection(name, SCHEMA)
    with pytest.raises(InvalidArgument, match=words):
        client.new_producer().insert(made, table)


@pytest.mark.slow
def test_a_new_partition_changes_nothing_for_writers_that_name_none(
    client: Database, request: pytest.FixtureRequest
) -> None:
    before = client.catalog.create_collection(own_name(request), SCHEMA)
    client.catalog.create_partition(before.name, "oslo")
    after = client.definition(before.name)
    producer = client.new_producer()
    for key, each in enumerate((before, after)):
        producer.insert(each, rows(key))
        producer.upsert(each, rows(10 + key))
        producer.insert(each, iter([rows(20 + key)]))  # type: ignore[arg-type]
        with producer.transaction(each) as txn:
            txn.insert(rows(30 + key))
    producer.insert(after, rows(50), partition="oslo")
    assert set(stored(client, after)) == {0, 1, 10, 11, 20, 21, 30, 31, 50}
    client.catalog.drop_partition(after.name, "_default")
    assert set(stored(client, after)) == {50}
    client.catalog.create_partition(after.name, "rome")
    with pytest.raises(InvalidArgument, match="name the partition"):
        producer.insert(client.definition(after.name), rows(1))


def test_a_partition_must_be_named_where_there_are_several_without_a_default(
    client: Database, collection: CollectionInfo
) -> None:
    with pytest.raises(InvalidArgument, match="name the partition"):
        client.new_producer().insert(collection, rows(1))
    with pytest.raises(InvalidArgument, match="no partition 'paris'"):
        client.new_producer().insert(collection, rows(1), partition="paris")
