"""Clients elsewhere with limited tokens.

They do what they are there for, from end to end, and stop when they are told to.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest

from millrace.access.grants import Grant, Role
from millrace.base.deadline import Deadline
from millrace.base.errors import CollectionNotFound, InvalidArgument, LogUnavailable, MillraceError, PermissionDenied
from millrace.catalog.collection import CollectionInfo
from millrace.client.database import Database, connect
from millrace.client.produce.written import Written
from millrace.message.schema import FieldSpec
from millrace.message.schema_changes import AddField
from millrace.node.flush.definition import flush_to_end
from millrace.node.ingest.definition import ingest_to_end
from millrace.node.range_loop.parking import restart_follower
from millrace.rpc.link import ConnectionLost, ExchangeStream
from millrace.rpc.selection import Selection
from tests.access.conftest import SCHEMA, Guarded
from tests.client.conftest import own_name
from tests.waiting import until

REVOKED_SECONDS = 2.0
"""docs/access.md: how long an open stream may outlive its token."""


@contextmanager
def connected(guarded: Guarded, token: str, *, deadline: float = 20.0) -> Iterator[Database]:
    settings = replace(guarded.client.settings, append_retry_delay=0.05)
    with connect(guarded.address, token=token, settings=settings, deadline=deadline) as client:
        yield client


@pytest.fixture
def own(guarded: Guarded, request: pytest.FixtureRequest) -> CollectionInfo:
    """A collection of this test alone, with a VChannel on each PChannel."""
    return guarded.client.catalog.create_collection(own_name(request), SCHEMA, vchannels=2)


@pytest.fixture
def producing(guarded: Guarded, own: CollectionInfo) -> str:
    return guarded.add(f"for-{own.id}", Grant(Role.PRODUCE, (own.name,)))


def rows(*keys: int, body: str = "x") -> pa.Table:
    return pa.table({"id": list(keys), "body": [body] * len(keys)})


def stored(guarded: Guarded, collection: CollectionInfo) -> list[int]:
    """The keys that a reader on the spot finds."""
    guarded.client.catalog.flush(collection.name)
    ingest_to_end(guarded.client.settings, guarded.client.log)
    flush_to_end(guarded.client.settings)
    found: list[int] = guarded.client.collection(collection.name).read(deadline=20.0)["id"].to_pylist()
    return sorted(found)


def test_a_producer_inserts_deletes_and_commits_transactions_with_a_produce_token(
    guarded: Guarded, own: CollectionInfo, producing: str
) -> None:
    with connected(guarded, producing) as client:
        found = client.definition(own.name)
        producer = client.new_producer()
        assert producer.insert(found, rows(*range(2000))).rows == 2000
        producer.delete(found, [0, 1])
        with producer.transaction(found, vchannel=0) as transaction:
            transaction.insert(_of(found, 0, 5000))
        with suppress(KeyError), producer.transaction(found, vchannel=0) as transaction:
            transaction.insert(_of(found, 0, 6000))
            raise KeyError
    kept = stored(guarded, own)
    assert kept[:1998] == list(range(2, 2000))
    assert len(kept) == 1998 + 10
    assert 5000 <= kept[-1] < 6000


def _of(collection: CollectionInfo, vchannel: int, first: int) -> pa.Table:
    """Ten rows that belong to one VChannel."""
    from millrace.message.keys import vchannel_index

    keys = pa.array(range(first, first + 200))
    homes = vchannel_index(keys, len(collection.vchannels))
    return rows(*[key for key, home in zip(keys.to_pylist(), homes, strict=True) if home == vchannel][:10])


def test_what_a_produce_token_is_not_for_is_refused_and_its_own_rows_go_on(
    guarded: Guarded, own: CollectionInfo, producing: str
) -> None:
    orders = guarded.client.definition("orders")
    with connected(guarded, producing) as client:
        producer = client.new_producer()
        for place in range(3):
            with pytest.raises(PermissionDenied, match="'for-"):
                producer.insert(orders, rows(place))
            assert producer.insert(own, rows(place)).rows == 1
        catalog = client.catalog
        for call in (
            lambda: catalog.create_collection("mine", SCHEMA),
            lambda: catalog.drop_collection(own.name),
            lambda: catalog.alter(own.name, [AddField(FieldSpec("more", "int64", True))]),
            lambda: catalog.create_partition(own.name, "more"),
            lambda: catalog.drop_partition(own.name, "_default"),
            lambda: catalog.flush(own.name),
            lambda: client.connection.service.drop("dml_0"),
            lambda: restart_follower(client.connection, "dml_0"),
            lambda: client.connection.tail("dml_0", 0, timeout=0),
            lambda: client.collection(own.name).read(),
            lambda: client.connection.service.open("dml_0").append([b"x"]),
        ):
            with pytest.raises(PermissionDenied):
                call()
        assert [each.name for each in catalog.collections()] == [own.name]
    assert stored(guarded, own) == [0, 1, 2]


def test_a_batch_says_of_each_row_whether_the_token_let_it_in_and_goes_on(
    guarded: Guarded, own: CollectionInfo, producing: str
) -> None:
    def let_in(ticket: Future[Written]) -> bool:
        try:
            ticket.result(timeout=20).checked()
        except PermissionDenied:
            return False
        return True

    orders = guarded.client.definition("orders")
    with connected(guarded, producing) as client, client.new_producer().batch() as batch:
        mixed = {place: batch.insert(rows(place), collection=own if place % 3 else orders) for place in range(30)}
        held = [place for place, ticket in mixed.items() if let_in(ticket)]
        assert all(place % 3 for place in held), "rows that share an entry share its fate"
        behind = [batch.insert(rows(place), collection=own) for place in range(100, 110)]
        assert all(map(let_in, behind))
    assert stored(guarded, own) == [*held, *range(100, 110)]


def test_a_reader_that_appends_is_refused_each_time_and_at_once(guarded: Guarded, own: CollectionInfo) -> None:
    with connected(guarded, guarded.add(f"only-reads-{own.id}", Grant(Role.READ))) as client:
        for pipelined in (True, False, True):
            answers = []
            if pipelined:
                with client.connection.append_stream("dml_0") as stream:
                    answers = [stream.submit(b"x") for _ in range(5)]
                    for answer in answers:
                        with pytest.raises(PermissionDenied):
                            answer.result()
            else:
                with pytest.raises(PermissionDenied):
                    client.connection.append("dml_0", b"x")


def test_an_operator_changes_the_catalog_and_drops_nothing(guarded: Guarded, request: pytest.FixtureRequest) -> None:
    name = own_name(request)
    with connected(guarded, guarded.add("operator", Grant(Role.OPERATE, (f"{name}*",)))) as client:
        catalog = client.catalog
        made = catalog.create_collection(name, SCHEMA)
        catalog.create_partition(name, "more")
        catalog.alter(name, [AddField(FieldSpec("more", "int64", True))])
        client.new_producer().insert(
            catalog.collection(name), pa.table({"id": [1], "body": ["x"], "more": [1]}), partition="more"
        )
        catalog.flush(name)
        for call in (lambda: catalog.drop_collection(name), lambda: catalog.drop_partition(name, "more")):
            with pytest.raises(PermissionDenied):
                call()
        with pytest.raises(PermissionDenied):
            catalog.create_collection("another", SCHEMA)
    assert guarded.client.definition(name).id == made.id


def test_a_reader_consumes_what_others_append_and_writes_nothing(
    guarded: Guarded, own: CollectionInfo, producing: str
) -> None:
    reading = guarded.add(f"reads-{own.id}", Grant(Role.READ, (own.name,)))
    with connected(guarded, producing) as writer, connected(guarded, reading) as client:
        writer.new_producer().insert(own, rows(*range(100)))
        guarded.client.new_producer().insert(guarded.client.definition("orders"), rows(*range(7)))
        ingest_to_end(guarded.client.settings, guarded.client.log)
        writer.new_producer().insert(own, rows(*range(100, 200)))
        until_tick = max(guarded.client.connection.tick(name) for name in ("dml_0", "dml_1"))
        with client.consumer(own.name, until=until_tick) as consumer:
            seen = [
                key for delivery in consumer for change in delivery.changes() for key in change.rows["id"].to_pylist()
            ]
        assert sorted(seen) == list(range(200))
        ingest_to_end(guarded.client.settings, guarded.client.log)
        assert sorted(client.collection(own.name).read(deadline=20.0)["id"].to_pylist()) == list(range(200))
        with pytest.raises(PermissionDenied, match="group:mailer"):
            client.consumer(own.name, group="mailer")
        with pytest.raises(PermissionDenied):
            client.consumer("orders")
    mixed = guarded.add(f"mixed-{own.id}", Grant(Role.PRODUCE, (own.name,)), Grant(Role.READ, ("orders",)))
    with connected(guarded, mixed) as client:
        assert client.collection("orders").count() == client.collection("orders").read().num_rows
        handle = client.collection(own)
        for read in (handle.read, handle.count, handle.stream):
            with pytest.raises(PermissionDenied, match="a read of its rows"):
                read()


def test_a_consumer_of_a_group_has_that_group_alone_and_no_others_rows(
    guarded: Guarded, own: CollectionInfo, producing: str
) -> None:
    reading = guarded.add(f"mails-{own.id}", Grant(Role.READ, (own.name, f"group:mails-{own.id}")))
    orders = guarded.client.definition("orders")
    guarded.client.new_producer().insert(orders, rows(*range(50)))
    with connected(guarded, producing) as writer, connected(guarded, reading) as client:
        writer.new_producer().insert(own, rows(*range(20)))
        ingest_to_end(guarded.client.settings, guarded.client.log)
        until_tick = max(guarded.client.connection.tick(name) for name in ("dml_0", "dml_1"))
        seen: list[int] = []
        for _ in range(2):
            with client.consumer(
                [*own.vchannels, *orders.vchannels], group=f"mails-{own.id}", until=until_tick
            ) as consumer:
                for delivery in consumer:
                    seen += [key for change in delivery.changes() for key in change.rows["id"].to_pylist()]
                    consumer.acknowledge(delivery)
        assert sorted(seen) == list(range(20)), "its own rows once, and none of another collection"
        with pytest.raises(PermissionDenied):
            client.consumer(own.name, group="another")
        with pytest.raises(PermissionDenied, match="append/drop_group"):
            client.drop_group(f"mails-{own.id}")
        with pytest.raises(PermissionDenied):
            client.connection.read(orders, at=None, seconds=1.0, selection=Selection())
        with pytest.raises(PermissionDenied):
            client.new_producer().insert(own, rows(1))


def test_a_group_is_dropped_by_its_admin_alone(guarded: Guarded, own: CollectionInfo) -> None:
    own_admin = guarded.add(f"drops-{own.id}", Grant(Role.ADMIN, (f"group:drops-{own.id}",)))
    with guarded.client.consumer(own.name, group=f"drops-{own.id}") as consumer:
        consumer.poll(timeout=0.1)
    with connected(guarded, own_admin) as client:
        client.drop_group(f"drops-{own.id}")
        with pytest.raises(PermissionDenied):
            client.drop_group("mails")


def test_changes_are_for_who_may_read_the_collection(guarded: Guarded, own: CollectionInfo, producing: str) -> None:
    reading = guarded.add(f"copies-{own.id}", Grant(Role.READ, (own.name,)))
    other = guarded.add(f"copies-another-{own.id}", Grant(Role.READ, ("users",)))
    producer = guarded.client.new_producer()
    producer.insert(own, rows(*range(40)))
    producer.insert(guarded.client.definition("orders"), rows(*range(40)))
    ingest_to_end(guarded.client.settings, guarded.client.log)
    flush_to_end(guarded.client.settings)
    producer.delete(own, [3])
    until_tick = max(guarded.client.connection.tick(name) for name in ("dml_0", "dml_1"))
    with connected(guarded, reading) as client:
        with client.collection(own.name).changes(until=until_tick) as stream:
            kinds = [row["_change"] for batch in stream for row in batch.rows.to_pylist()]
            positions = stream.positions
        assert sorted(kinds) == ["delete", *["insert"] * 40]  # there is no order between PChannels
        with client.collection(own).changes(after=positions, until=until_tick) as stream:
            assert list(stream) == []
        with (
            client.collection(guarded.client.definition("orders")).changes() as stream,
            pytest.raises(PermissionDenied),
        ):
            stream.poll(timeout=5.0)
        with pytest.raises(PermissionDenied):
            client.collection("orders").changes()
    for token in (other, producing):
        with connected(guarded, token) as client:
            for after in (None, until_tick):
                with client.collection(own).changes(after=after) as stream, pytest.raises(PermissionDenied, match="'"):
                    stream.poll(timeout=5.0)


def test_where_changes_begin_is_asked_with_sound_words_alone(guarded: Guarded, own: CollectionInfo) -> None:
    with guarded.link(guarded.add(f"asks-{own.id}", Grant(Role.READ))) as link:
        for wrong in (None, "1", [1], True, -1, 2.0**70, {"id": 1}):
            with pytest.raises(InvalidArgument, match="collection_id"):
                link.act("append/checkpointed", {"pchannel": "dml_0", "collection_id": wrong}, timeout=20)
        with pytest.raises(CollectionNotFound, match="no collection 999999"):
            link.act("append/checkpointed", {"pchannel": "dml_0", "collection_id": 999_999}, timeout=20)
        for wrong in (None, 1, "", ["dml_0"]):
            with pytest.raises(InvalidArgument, match="pchannel"):
                link.act("append/checkpointed", {"pchannel": wrong, "collection_id": own.id}, timeout=20)
        for nowhere in ("dml_9", "../x", "dml_0/trimmed"):
            said = link.act("append/checkpointed", {"pchannel": nowhere, "collection_id": own.id}, timeout=20)
            assert said == {"time_tick": 0, "vchannels": {}}


def test_a_readers_tail_has_the_messages_of_its_collections_alone(
    guarded: Guarded, own: CollectionInfo, producing: str
) -> None:
    reading = guarded.add(f"tails-{own.id}", Grant(Role.READ, (own.name,)))
    with connected(guarded, producing) as writer:
        writer.new_producer().insert(own, rows(*range(100)))
    guarded.client.new_producer().insert(guarded.client.definition("orders"), rows(*range(100)))
    shown: dict[str, set[str]] = {}
    for name, token in (("narrow", reading), ("all", guarded.add(f"all-{own.id}", Grant(Role.READ)))):
        with connected(guarded, token) as client:
            shown[name] = set()
            for pchannel in ("dml_0", "dml_1"):
                for batch in client.connection.tail(pchannel, 0, timeout=0, max_bytes=64 << 20).batches:
                    shown[name] |= set(batch.column("vchannel").cast(pa.string()).to_pylist())
    assert shown["narrow"] <= {*own.vchannels, ""}
    assert set(own.vchannels) <= shown["narrow"]
    assert set(guarded.client.definition("orders").vchannels) & shown["all"]


@pytest.mark.slow
def test_a_spool_keeps_what_a_token_opens_no_more_and_a_new_token_sends_it(
    guarded: Guarded, own: CollectionInfo, tmp_path: Path
) -> None:
    token = guarded.add(f"first-{own.id}", Grant(Role.PRODUCE, (own.name,)))
    with connected(guarded, token, deadline=1.0) as client:
        producer = client.new_producer(producer_id=4711, spool=tmp_path / "spool")
        assert producer.insert(own, rows(*range(10))).rows == 10
        guarded.tokens.revoke(f"first-{own.id}")
        until(lambda: not _lives(client), "the token opens nothing")
        written = producer.insert(own, rows(*range(10, 20)))
        assert written.spooled_rows == 10
    with connected(guarded, guarded.add(f"second-{own.id}", Grant(Role.PRODUCE, (own.name,)))) as client:
        producer = client.new_producer(producer_id=4711, spool=tmp_path / "spool")
        assert producer.spool is not None
        assert producer.spool.wait_empty(timeout=30)
        producer.insert(own, rows(*range(20, 30)))
    assert stored(guarded, own) == list(range(30))


def _lives(client: Database) -> bool:
    try:
        client.connection.service.ping()
    except MillraceError:
        return False
    return True


@pytest.mark.parametrize("end", ["revoked", "ran out"])
def test_streams_and_waiting_reads_end_with_their_token(guarded: Guarded, own: CollectionInfo, end: str) -> None:
    name = f"ends-{own.id}"
    token = guarded.add(
        name, Grant(Role.OPERATE), expires=time.time() + 3.0 if end == "ran out" else time.time() + 3600
    )
    over: dict[str, float] = {}
    begun = threading.Barrier(4)

    def waiting(what: str) -> None:
        with guarded.link(token) as link:
            link.act("ping", {}, timeout=10)
            try:
                if what == "tail":
                    begun.wait(20)
                    while True:
                        tail = {"extension": "append", "tail": "dml_0", "after": 1 << 62, "timeout": 10.0}
                        link.get(tail, timeout=20)
                stream = ExchangeStream(
                    link, {"extension": "append", "pchannel": "dml_0", "pipelined": what == "pipelined"}
                )
                begun.wait(20)
                stream.answer(deadline=Deadline.after(30))
            except (ConnectionLost, PermissionDenied):
                over[what] = time.time()

    threads = [threading.Thread(target=waiting, args=(what,)) for what in ("plain", "pipelined", "tail")]
    for thread in threads:
        thread.start()
    begun.wait(20)
    expires = next(each.expires for each in guarded.tokens.tokens() if each.principal.name == name)
    assert expires is not None
    if end == "revoked":
        guarded.tokens.revoke(name)
        expires = time.time()
    for thread in threads:
        thread.join(30)
    assert over.keys() == {"plain", "pipelined", "tail"}
    assert max(over.values()) - expires < 3 * REVOKED_SECONDS, "the machine is loaded: the bound is 2 s"
    assert min(over.values()) >= expires - 0.5


def test_a_stream_that_goes_on_sending_ends_with_its_token(guarded: Guarded, own: CollectionInfo) -> None:
    token = guarded.add(f"busy-{own.id}", Grant(Role.PRODUCE))
    with connected(guarded, token, deadline=1.0) as client:
        producer = client.new_producer()
        producer.insert(own, rows(0))
        guarded.tokens.revoke(f"busy-{own.id}")
        revoked = time.monotonic()

        def refused() -> bool:
            try:
                producer.insert(own, rows(1))
            except (PermissionDenied, LogUnavailable):
                return True
            return False

        until(refused, "an append is refused")
        assert time.monotonic() - revoked < 10
    assert own.name
