"""A client on another host: a server with TLS and a token, reached by its address alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest

from millrace.base.errors import (
    AppendRejected,
    CollectionExists,
    CollectionNotFound,
    InvalidArgument,
    InvalidSettings,
    LogUnavailable,
    ProducerFenced,
)
from millrace.base.settings import Settings
from millrace.client.consume.delivery import CHANGES
from millrace.client.database import Database, connect
from millrace.message.ids import EARLIEST
from millrace.message.schema import CollectionSchema, FieldSpec
from millrace.message.schema_changes import AddField
from millrace.node.flush.definition import flush_to_end
from millrace.node.ingest.definition import ingest_to_end
from millrace.rpc.discovery import read_record
from millrace.tables.read.arrow import read_arrow
from tests.certificates import certificate

SCHEMA = CollectionSchema((FieldSpec("id", "int64", False), FieldSpec("body", "string", True)), "id")
TOKEN = "a-token-that-both-sides-have"
NAME = "log.example.net"


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Settings:
    folder = tmp_path_factory.mktemp("remote")
    cert, key = certificate(folder, NAME)
    return Settings(
        data_dir=folder / "data",
        cache_dir=folder / "cache",
        log_tls_cert=str(cert),
        log_tls_key=str(key),
        log_tls_name=NAME,
    )


@pytest.fixture(scope="module")
def local(settings: Settings) -> Iterator[Database]:
    """A client on the server's own host, which starts it, with TLS and the token in its environment."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MILLRACE_SERVER_TOKEN", TOKEN)
        client = connect(settings=settings)
    with client:
        client.catalog.ensure_pchannels(2)
        yield client
        client.connection.service.shutdown()


@pytest.fixture
def address(local: Database, settings: Settings) -> str:
    record = read_record(settings.log_path)
    assert record is not None
    assert record.address.startswith("grpc+tls://127.0.0.1:")
    return record.address


def connected(
    address: str, settings: Settings, token: str = TOKEN, *, deadline: float = 30.0, **options: object
) -> Database:
    here = Settings.load(env={"HOME": str(settings.cache_dir)})
    return connect(address, token=token, roots=settings.log_tls_cert, settings=here, deadline=deadline, **options)  # type: ignore[arg-type]


def test_rows_that_are_appended_from_elsewhere_are_in_the_tables_once(
    address: str, settings: Settings, local: Database
) -> None:
    with connected(address, settings) as client:
        made = client.catalog.create_collection("users", SCHEMA, vchannels=2, partitions=["eu", "us"])
        assert made == client.definition("users") == local.definition("users")
        rows = pa.table({"id": list(range(1000)), "body": [f"row {key}" for key in range(1000)]})
        written = client.new_producer().insert(made, rows, partition="eu")
        assert written.rows == 1000
        assert all(result.time_tick for result in written.results)
        client.new_producer().delete(made, [1, 2, 3])
        client.catalog.flush("users")
    ingest_to_end(settings, local.log)
    flush_to_end(settings)
    assert sorted(read_arrow(settings, made.id)["id"].to_pylist()) == [0, *range(4, 1000)]


def test_a_collection_is_read_from_elsewhere_as_on_the_spot(address: str, settings: Settings, local: Database) -> None:
    with connected(address, settings) as client:
        made = client.catalog.create_collection("read", SCHEMA, vchannels=2)
        producer = client.new_producer()
        producer.insert(made, pa.table({"id": list(range(3000)), "body": ["x" * 5000] * 3000}))
        ingest_to_end(settings, local.log)
        flush_to_end(settings)
        then = max(local.connection.tick(name) for name in made.pchannels)
        producer.delete(made, list(range(1000)))
        producer.insert(made, pa.table({"id": [7], "body": ["again"]}))
        ingest_to_end(settings, local.log)
        for at in (None, then):
            here, there = (each.collection("read").read(at=at, deadline=20.0).sort_by("id") for each in (local, client))
            assert there == here
            assert there.num_rows == (3000 if at else 2001)
        for options in (
            {"where": "id < 9 or id > 2990", "columns": ["body", "id"]},
            {"order_by": "id desc", "limit": 3},
        ):
            here, there = (each.collection("read").read(**options, deadline=20.0) for each in (local, client))  # type: ignore[arg-type]
            assert there.sort_by("id") == here.sort_by("id")
            assert there.num_rows in (3, 10)
        with client.collection("read").stream(at=then, deadline=20.0) as rows:
            assert next(iter(rows)).num_rows < 3000  # the rest is not sent
        assert client.collection("read").stream(limit=2000, deadline=20.0).read_all().num_rows == 2000
        assert client.collection("read").count() == local.collection("read").count() == 2001
        assert client.collection("read").count(where="id >= 2000", at=then) == 1000
        for wrong in ({"where": "size > 1"}, {"columns": "size"}, {"order_by": "size"}):
            with pytest.raises(InvalidArgument, match="no column 'size'"):
                client.collection("read").stream(**wrong, deadline=20.0)  # type: ignore[arg-type]
        assert producer.delete_where(made, "body == 'again'").keys == 1
        client.catalog.create_collection("empty", SCHEMA)
        ingest_to_end(settings, local.log)
        assert client.collection("empty").read(deadline=20.0) == local.collection("empty").read()
        with pytest.raises(CollectionNotFound):
            client.collection("nobody").read()
        producer.insert(made, pa.table({"id": [8], "body": ["the tables lack it"]}))
        assert client.collection("read").count(where="id = 8", deadline=0.1) == 1, "the append host has it"


def test_a_group_elsewhere_goes_on_on_the_spot(address: str, settings: Settings, local: Database) -> None:
    with connected(address, settings) as client:
        made = client.catalog.create_collection("mail", SCHEMA)
        client.new_producer().insert(made, pa.table({"id": list(range(50)), "body": ["x"] * 50}))
        ingest_to_end(settings, local.log)
        end = client.new_producer().insert(made, pa.table({"id": [50], "body": ["x"]})).last_tick
        found: list[int] = []
        for reader in (client, local):
            with reader.consumer("mail", group="tls", filters=[CHANGES], until=end) as consumer:
                for delivery in consumer:
                    found += [key for each in delivery.changes() for key in each.rows["id"].to_pylist()]
                    consumer.acknowledge(delivery)
                    if reader is client:
                        break
        assert sorted(found) == list(range(51)), "each once"


def test_errors_are_those_of_a_client_on_the_spot(address: str, settings: Settings) -> None:
    with connected(address, settings) as client:
        with pytest.raises(CollectionNotFound):
            client.definition("nobody")
        made = client.catalog.create_collection("once", SCHEMA)
        with pytest.raises(CollectionExists):
            client.catalog.create_collection("once", replace_key(SCHEMA))
        client.catalog.drop_collection("once")
        with pytest.raises(AppendRejected) as refused:
            client.new_producer().insert(made, pa.table({"id": [1], "body": ["x"]}))
        assert refused.value.reason == "COLLECTION_NOT_FOUND"
        with pytest.raises(InvalidArgument, match="has no call 'rm'"):
            client.connection.catalog("rm", {}, repeat=False)
        with pytest.raises(InvalidArgument, match="argument 'name'"):
            client.connection.catalog("collection", {"nme": "users"}, repeat=True)


def replace_key(schema: CollectionSchema) -> CollectionSchema:
    return replace(schema, fields=(*schema.fields, FieldSpec("more", "int64", True)))


def test_ddl_of_every_kind_can_be_done_from_elsewhere(address: str, settings: Settings) -> None:
    with connected(address, settings) as client:
        catalog = client.catalog
        catalog.create_collection("ddl", SCHEMA)
        assert catalog.create_partition("ddl", "new") == catalog.collection("ddl").partitions["new"]
        catalog.drop_partition("ddl", "new")
        assert catalog.alter("ddl", [AddField(FieldSpec("extra", "int64", True))]) == 2
        assert [each.name for each in catalog.collections() if each.name == "ddl"] == ["ddl"]
        assert catalog.collection("ddl").schema.arrow().names == ["id", "body", "extra"]


def test_a_program_that_makes_its_collection_where_it_is_missing_can_run_again(
    address: str, settings: Settings
) -> None:
    with connected(address, settings) as client:
        catalog = client.catalog
        made = catalog.create_collection("again", SCHEMA, exist_ok=True)
        assert catalog.create_collection("again", SCHEMA, exist_ok=True) == made
        with pytest.raises(CollectionExists, match="another schema"):
            catalog.create_collection("again", replace_key(SCHEMA), exist_ok=True)
        catalog.alter("again", [AddField(FieldSpec("more", "int64", True))])
        assert catalog.create_collection("again", SCHEMA, exist_ok=True).schema_version == 2, (
            "it had this schema before"
        )


def test_a_fenced_producer_takes_no_newer_epoch_of_its_id(address: str, settings: Settings, local: Database) -> None:
    with connected(address, settings) as client:
        older = client.catalog.next_epoch(77)
        newer = local.catalog.next_epoch(77)
        with pytest.raises(ProducerFenced):
            client.catalog.next_epoch(77, held=older)
        assert client.catalog.next_epoch(77, held=newer) == newer + 1, "the one that runs may go on"


@pytest.mark.parametrize("token", ["", "another-token-altogether"])
def test_without_the_token_nothing_is_answered(address: str, settings: Settings, token: str) -> None:
    with pytest.raises((InvalidSettings, LogUnavailable)):
        connected(address, settings, token, deadline=1.0)


@pytest.mark.slow
def test_a_server_whose_certificate_is_not_trusted_gets_no_token(
    address: str, settings: Settings, tmp_path: Path
) -> None:
    other, _ = certificate(tmp_path, "somebody.else")
    with pytest.raises(LogUnavailable):
        connected(address, replace(settings, log_tls_cert=str(other)), deadline=1.0)
    with pytest.raises(LogUnavailable):
        connected(address, settings, tls_name="not.the.name", deadline=1.0)
    with pytest.raises(InvalidArgument, match="grpc"):
        connected("http://127.0.0.1:1", settings)


def test_a_server_elsewhere_is_not_stopped_from_here(address: str, settings: Settings) -> None:
    with connected(address, settings) as client:
        with pytest.raises(InvalidArgument, match="stop it there"):
            client.connection.service.shutdown()
        assert client.connection.service.open("dml_0").describe().begin == EARLIEST


def test_a_certificate_without_its_key_is_no_setting(tmp_path: Path) -> None:
    with pytest.raises(InvalidSettings, match="set both"):
        Settings(data_dir=tmp_path, log_tls_cert="cert.pem")
