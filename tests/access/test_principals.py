"""Who wrote it: the server that takes an append names its caller in each entry, whatever the client says.

The name goes through the log, the chain, the ``wal`` table and the tail to readers and searches.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pyarrow as pa
import pytest

from millrace.access.grants import Grant, Role
from millrace.base.deadline import Deadline
from millrace.base.errors import PermissionDenied
from millrace.catalog.collection import CollectionInfo
from millrace.client.consume.scan import scan
from millrace.message.builders import insert
from millrace.message.keys import vchannel_index
from millrace.message.model import ImmutableMessage
from millrace.message.schema import FieldSpec
from millrace.message.schema_changes import AddField
from millrace.message.types import MessageType
from millrace.message.wire.decode import decode_entries
from millrace.message.wire.encode import encode_entry
from millrace.node.ingest.definition import ingest_to_end
from millrace.observe.broadcasts import broadcast_rows
from millrace.observe.observer import Observer
from millrace.observe.wal_search import WalQuery
from millrace.operations.verification import verify_channel
from millrace.rpc.append_pipeline import as_values
from millrace.rpc.tail import TailBatch, from_wire_rows
from millrace.tables.wal.reader import WalSnapshot
from millrace.tables.wal.table import WalTable
from millrace.wal.scanner import All, Filter, VChannelFilter, message_from_row
from millrace.wal.schema import ROW_SCHEMA
from tests.access.conftest import SCHEMA, Guarded
from tests.access.test_remote_clients import connected, own, rows

__all__ = ["own"]


def written_by(guarded: Guarded, collection: CollectionInfo, principal: str) -> list[Any]:
    """The accepted messages of a principal and collection that a search finds, after they are in the table."""
    ingest_to_end(guarded.client.settings, guarded.client.log)
    query = WalQuery("message", principal=principal, collection_id=collection.id, types=("INSERT",))
    return Observer(guarded.client.settings).messages(query).items


def home_of(collection: CollectionInfo, key: int) -> str:
    return collection.vchannels[int(vchannel_index(pa.array([key]), len(collection.vchannels))[0])]


def forged(collection: CollectionInfo, key: int, principal: str) -> tuple[str, bytes]:
    """An entry that says that somebody else wrote it, and its PChannel."""
    vchannel = home_of(collection, key)
    message = insert(
        pa.RecordBatch.from_pylist([{"id": key, "body": "x"}], schema=SCHEMA.arrow()),
        vchannel=vchannel,
        collection_id=collection.id,
        partition_id=collection.partitions["_default"],
        term=1,
    )
    return vchannel.rpartition("_")[0], encode_entry([replace(message, schema_version=1)], principal=principal)


def test_a_message_names_the_token_that_wrote_it_for_readers_and_searches(
    guarded: Guarded, own: CollectionInfo
) -> None:
    token = guarded.add(f"etl-{own.id}", Grant(Role.PRODUCE, (own.name,)))
    with connected(guarded, token) as client:
        client.new_producer().insert(client.definition(own.name), rows(*range(100)))
    guarded.client.new_producer().insert(guarded.client.definition(own.name), rows(100))
    found = written_by(guarded, own, f"etl-{own.id}")
    assert sum(each.rows for each in found) == 100
    assert {each.principal for each in found} == {f"etl-{own.id}"}
    assert sum(each.rows for each in written_by(guarded, own, "machine")) == 1
    filters: list[Filter] = [VChannelFilter(set(own.vchannels))]
    for pchannel in ("dml_0", "dml_1"):
        tail = guarded.client.connection
        with scan(
            pchannel,
            All(),
            wal=guarded.client.settings.wal_uri,
            tail=tail,
            filters=filters,
            until_tick=tail.tick(pchannel),
        ) as units:
            names = {each.principal for each in units if isinstance(each, ImmutableMessage) and each.rows}
        assert names <= {f"etl-{own.id}", "machine"}
        assert f"etl-{own.id}" in names
    uri = guarded.client.settings.wal_uri
    snapshot = WalSnapshot.open(uri)
    assert snapshot is not None
    for pchannel in ("dml_0", "dml_1"):
        verified = verify_channel(snapshot, WalTable.open(uri), guarded.client.log, pchannel)
        assert verified.committed == verified.stored == verified.replayed
        assert verified.same_state


def test_rows_of_the_tail_name_their_principal_before_they_are_in_the_table(
    guarded: Guarded, own: CollectionInfo
) -> None:
    tail = guarded.client.connection
    begin = {name: tail.tick(name) for name in ("dml_0", "dml_1")}
    token = guarded.add(f"tail-{own.id}", Grant(Role.PRODUCE, (own.name,)))
    with connected(guarded, token) as client:
        client.new_producer().insert(client.definition(own.name), rows(*range(20)))
    found = set()
    for name, after in begin.items():
        tail.tick(name)
        newest = tail.tail(name, after, timeout=0.0)
        assert isinstance(newest, TailBatch)
        for batch in newest.batches:
            found |= {message_from_row(row).principal for row in batch.to_pylist() if row["rows"]}
    assert found == {f"tail-{own.id}"}


@pytest.mark.parametrize("pipelined", [False, True])
def test_a_client_cannot_write_in_another_one_s_name(guarded: Guarded, own: CollectionInfo, pipelined: bool) -> None:
    name = f"eve-{own.id}-{pipelined}"
    token = guarded.add(name, Grant(Role.PRODUCE, (own.name,)))
    with connected(guarded, token) as client:
        for key in range(3):
            pchannel, entry = forged(own, key, "admin")
            if pipelined:
                with client.connection.append_stream(pchannel) as stream:
                    assert stream.submit([entry]).result().results()
            else:
                client.connection.append(pchannel, [entry]).results()
    assert len(written_by(guarded, own, name)) == 3
    assert written_by(guarded, own, "admin") == []
    assert written_by(guarded, own, "asserted:admin") == []


def test_the_deployment_s_own_servers_alone_append_in_the_name_of_another(
    guarded: Guarded, own: CollectionInfo
) -> None:
    """As the log's server does at the node that owns a PChannel, for who asked it for DDL."""
    admin = guarded.add(f"root-{own.id}", Grant(Role.ADMIN))
    pchannel, entry = forged(own, 1, "nobody")
    with connected(guarded, admin) as client, pytest.raises(PermissionDenied, match="in the name of"):
        client.connection.router.route(pchannel).append(as_values([entry]), Deadline.after(10), principal="ada")
    for key, name in enumerate((f"ada-{own.id}", f"bo-{own.id}", "")):
        pchannel, entry = forged(own, key, "nobody")
        route = guarded.client.connection.router.route(pchannel)
        assert len(route.append(as_values([entry]), Deadline.after(10), principal=name)) == 1
    for name in (f"ada-{own.id}", f"bo-{own.id}", "machine"):
        assert sum(each.rows for each in written_by(guarded, own, name)) == 1


def test_an_append_past_the_host_is_stamped_too(guarded: Guarded, own: CollectionInfo) -> None:
    token = guarded.add(f"past-{own.id}", Grant(Role.ADMIN))
    pchannel, entry = forged(own, 1, "somebody")
    with connected(guarded, token) as client:
        client.connection.service.open(pchannel).append([entry])
    assert len(written_by(guarded, own, f"past-{own.id}")) == 1
    assert written_by(guarded, own, "asserted:somebody") == []


def test_ddl_names_who_asked_for_it_whatever_the_request_says(guarded: Guarded, own: CollectionInfo) -> None:
    name = f"ops-{own.id}"
    token = guarded.add(name, Grant(Role.ADMIN, (own.name,)))
    with connected(guarded, token) as client:
        client.catalog.create_partition(own.name, "eu")
        client.catalog.alter(own.name, [AddField(FieldSpec("more", "string", True))])
        client.new_producer().insert(client.definition(own.name), pa.table({"id": [1], "body": ["x"], "more": ["y"]}))
        client.catalog.flush(own.name)
        # An attacker names somebody else, in each place that a request has.
        arguments = {"name": own.name, "partition": "us", "request": "r1", "principal": "admin"}
        client.connection.catalog("create_partition", arguments, repeat=False)
        client.catalog.drop_partition(own.name, "us")
    ingest_to_end(guarded.client.settings, guarded.client.log)
    look = Observer(guarded.client.settings)
    found = look.messages(WalQuery("message", principal=name, collection_id=own.id)).items
    expected = {"CREATE_PARTITION", "SCHEMA_CHANGE", "MANUAL_FLUSH", "DROP_PARTITION", "INSERT"}
    assert {each.type for each in found} == expected
    for other in ("admin", "asserted:admin"):
        assert look.messages(WalQuery("message", principal=other, collection_id=own.id)).items == []
    listed = [each for each in broadcast_rows(guarded.client.settings, limit=50) if each.collection == own.name]
    assert {each.principal for each in listed if each.kind != "create_collection"} == {name}


def test_a_broadcast_names_who_submitted_it_on_every_vchannel(guarded: Guarded, own: CollectionInfo) -> None:
    name = f"caster-{own.id}"
    token = guarded.add(name, Grant(Role.OPERATE, (own.name,)))
    with connected(guarded, token) as client:
        with client.broadcast(request=f"cast-{own.id}") as sent:
            sent.insert(own.name, rows(*range(50)))
        assert sent.result is not None
        assert set(sent.result.ticks) == set(own.vchannels)
        with client.broadcast(request=f"cast-{own.id}") as again:
            again.insert(own.name, rows(*range(50)))
        assert again.result == sent.result
        with pytest.raises(PermissionDenied), client.broadcast() as denied:
            denied.flush(guarded.client.definition("orders"))
    narrow = guarded.add(f"writer-{own.id}", Grant(Role.PRODUCE, (own.name,)))
    with connected(guarded, narrow) as client, pytest.raises(PermissionDenied, match="operate"):
        client.broadcast().insert(own.name, rows(1)).submit()
    found = written_by(guarded, own, name)
    assert sum(each.rows for each in found) == 50
    assert {each.vchannel for each in found} == set(own.vchannels)


@pytest.mark.parametrize("place", ["tail", "table"])
def test_changes_name_who_wrote_each_on_request_alone(guarded: Guarded, own: CollectionInfo, place: str) -> None:
    ada, bo = (guarded.add(f"{name}-{place}-{own.id}", Grant(Role.OPERATE, (own.name,))) for name in ("ada", "bo"))
    with connected(guarded, ada) as client:
        client.new_producer().insert(client.definition(own.name), rows(*range(20)))
    with connected(guarded, bo) as client:
        client.new_producer().upsert(client.definition(own.name), rows(*range(5)))
        with client.new_producer().transaction(client.definition(own.name)) as transaction:
            mine = [key for key in range(20) if home_of(own, key) == own.vchannels[0]]
            transaction.delete(mine[-2:])
    guarded.client.catalog.drop_partition(own.name, "_default")
    if place == "table":
        ingest_to_end(guarded.client.settings, guarded.client.log)
    there = guarded.client.collection(own.name)
    assert "_principal" not in there.changes_between().read_all().column_names
    found = there.changes_between(principals=True).read_all()
    assert found.column_names[-1] == "_principal"
    assert found.drop_columns(["_principal"]).equals(there.changes_between().read_all())
    by = {(row["_change"], row["_principal"]) for row in found.to_pylist()}
    assert by == {
        ("insert", f"ada-{place}-{own.id}"),
        ("delete", f"bo-{place}-{own.id}"),
        ("insert", f"bo-{place}-{own.id}"),
        ("retract", "machine"),
    }
    with guarded.client.consumer(own.name) as consumer:
        told = {
            (change.kind, change.principal)
            for _ in range(len(by) * 10)
            if (delivery := consumer.poll(timeout=0.2)) is not None
            for change in delivery.changes()
        }
    assert told == by


def test_a_rejection_names_who_wrote_what_was_refused(guarded: Guarded, own: CollectionInfo) -> None:
    name = f"wrong-{own.id}"
    token = guarded.add(name, Grant(Role.PRODUCE, (own.name,)))
    vchannel = home_of(own, 7)
    other = next(each for each in own.vchannels if each != vchannel)
    message = insert(
        pa.RecordBatch.from_pylist([{"id": 7, "body": "x"}], schema=SCHEMA.arrow()),
        vchannel=other,
        collection_id=own.id,
        partition_id=own.partitions["_default"],
        term=1,
    )
    with connected(guarded, token) as client:
        client.connection.append(other.rpartition("_")[0], [encode_entry([replace(message, schema_version=1)])])
    ingest_to_end(guarded.client.settings, guarded.client.log)
    [found] = Observer(guarded.client.settings).rejections(WalQuery("rejection", principal=name)).items
    assert (found.reason, found.principal) == ("WRONG_VCHANNEL", name)


def test_the_log_itself_holds_the_name_and_the_server_s_own_messages_hold_none(guarded: Guarded) -> None:
    log = guarded.client.log.open("dml_0")
    found = decode_entries(log.read(log.describe().begin, max_bytes=1 << 30).batch).to_pylist()
    created = [row["principal"] for row in found if row["type"] == MessageType.CREATE_COLLECTION]
    assert set(created) == {"machine"}, "who asked for it"
    assert found[0]["type"] == MessageType.TERM_OPENING
    assert found[0]["principal"] is None, "the first term's own opening says that its chain knows stamps"


def test_a_client_of_an_earlier_build_gets_the_columns_that_it_knows(guarded: Guarded, own: CollectionInfo) -> None:
    guarded.client.new_producer().insert(guarded.client.definition(own.name), rows(1))
    ingest_to_end(guarded.client.settings, guarded.client.log)
    service = guarded.client.connection.service
    for ticket in ({"tail": "dml_0", "after": 0}, {"history": "dml_0"}):
        request = {"extension": "append", **ticket}
        for asked in (False, True):
            batches, _ = service.call_with_retry(
                lambda link, deadline, request=request, asked=asked: link.get(  # type: ignore[misc]
                    request | ({"principals": True} if asked else {}), timeout=20.0
                ),
                seconds=20.0,
            )
            assert all(("principal" in batch.schema.names) == asked for batch in batches)
            assert {from_wire_rows(batch).schema for batch in batches} <= {ROW_SCHEMA}
