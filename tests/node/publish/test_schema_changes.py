"""A published table has the fields of its tick, by their names and types, whatever columns the files have."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from datetime import date
from typing import Any

import pyarrow as pa
import pytest

from millrace.client.collection import Collection
from millrace.node.publish.definition import publish
from millrace.node.publish.shape import PARTITION
from millrace.operations.published_verification import verify_published
from millrace.storage.local import local_path
from millrace.storage.published import CONVERTED, PublishedTable
from millrace.storage.published_log import physical_names
from millrace.storage.store import store_at
from millrace.tables.collections.data_tables import published_uri
from millrace.tables.read.arrow import read_arrow
from millrace.testing import Deployment, deployment
from tests.node.publish.published_maker import rows_in
from tests.storage.published_world import ENGINES


@pytest.fixture(scope="module")
def db() -> Iterator[Deployment]:
    with deployment(pchannels=2) as made:
        yield made


def published(made: Collection) -> PublishedTable:
    table = PublishedTable.open(store_at(published_uri(made.database.settings, made.id)))
    assert table is not None
    return table


def publish_and_check(db: Deployment, made: Collection, **settings: Any) -> PublishedTable:
    """Publish, and compare each engine that can read it with a read at the published tick, now and before."""
    db.settle()
    assert publish(replace(db.settings, **settings), made.id)
    table = published(made)
    for version in range(1, table.version + 1):
        check(db, made, version)
    return table


def check(db: Deployment, made: Collection, version: int) -> None:
    table = PublishedTable.open(store_at(published_uri(db.settings, made.id)), version=version)
    assert table is not None
    names = table.schema.names
    wanted = made.read(at=table.tick)
    if PARTITION in names:
        confirmed = dict.fromkeys(made.definition.pchannels, table.tick)
        wanted = read_arrow(
            db.settings, made.id, at=table.tick, confirmed=confirmed, with_ticks=True, use_published=False
        ).select([*wanted.column_names, PARTITION])
    mapped = any(name != physical for name, physical in physical_names(table.schema).items())
    for name, engine in ENGINES.items():
        if name == "Polars" and (mapped or "delta.columnMapping.mode" in table.properties):
            continue  # it refuses column mapping
        found = engine(local_path(table.uri), version=version)
        assert found.column_names == wanted.column_names
        assert rows_in(found.cast(plain(wanted.schema))) == rows_in(wanted.cast(plain(wanted.schema))), (name, version)


def plain(schema: pa.Schema) -> pa.Schema:
    """The schema with nullable fields, as engines return them."""
    return pa.schema([each.with_nullable(True).remove_metadata() for each in schema])


def write(made: Collection, rows: list[dict[str, Any]]) -> None:
    made.upsert(rows)


def test_fields_are_added_dropped_and_renamed(db: Deployment) -> None:
    made = db.create_collection("fields", {"id": "int64", "price": "int32", "note": "string?"}, key="id", vchannels=2)
    write(made, [{"id": number, "price": number, "note": f"n{number}"} for number in range(20)])
    publish_and_check(db, made)
    made.alter(add={"city": "string?"})
    write(made, [{"id": 3, "price": 30, "note": None, "city": "Oslo"}])
    publish_and_check(db, made)
    made.alter(drop="note", order="id, city")
    write(made, [{"id": 4, "price": 40, "city": "Rome"}])
    table = publish_and_check(db, made)
    assert table.schema.names == ["id", "city", "price"]
    made.alter(rename={"price": "cents"})
    write(made, [{"id": 5, "cents": 50, "city": "Bern"}])
    table = publish_and_check(db, made)
    assert physical_names(table.schema)["cents"] == "price"
    made.alter(add={"note": "int64?"})  # another field of a name that was used before
    write(made, [{"id": 6, "cents": 60, "city": "Paris", "note": 7}])
    made.delete([7, 8])
    table = publish_and_check(db, made)
    assert physical_names(table.schema)["note"] == "note__2"
    assert not any(path.startswith(CONVERTED) for path in table.files), "no file is written for this"


def test_values_of_widened_fields_move_in_a_copy(db: Deployment) -> None:
    made = db.create_collection(
        "widened", {"id": "int64", "n": "int32?", "day": "date?", "place": "struct<a: int32, b: string>?"}, key="id"
    )
    write(made, [{"id": k, "n": k, "day": date(2026, 1, 1 + k), "place": {"a": k, "b": f"b{k}"}} for k in range(12)])
    write(made, [{"id": 1, "n": None, "day": None, "place": None}])
    made.delete([2])
    publish_and_check(db, made)
    made.alter(widen={"n": "int64"})
    table = publish_and_check(db, made)
    assert any(path.startswith(CONVERTED) for path in table.files)
    write(made, [{"id": 3, "n": 5_000_000_000, "day": None, "place": {"a": 1, "b": "x"}}])
    made.delete([4])
    publish_and_check(db, made)
    made.alter(widen={"day": "timestamp"})
    made.alter(rename={"place.b": "c"})
    publish_and_check(db, made)
    made.alter(add={"place.d": "int64"}, drop="n")
    write(made, [{"id": 6, "day": None, "place": {"a": 2, "c": "y", "d": 9}}])
    made.delete([5, 9])
    table = publish_and_check(db, made)
    assert table.row_count == made.read(at=table.tick).num_rows


def test_the_partition_is_a_column_while_the_option_is_on(db: Deployment) -> None:
    made = db.create_collection("placed", {"id": "int64", "n": "int32?"}, key="id", partitions=["red", "blue"])

    def insert(start: int, partition: str) -> None:
        made.insert([{"id": k, "n": k} for k in range(start, start + 9)], partition=partition)

    insert(0, "red")
    insert(100, "blue")
    made.delete([2, 101])
    assert PARTITION not in publish_and_check(db, made).schema.names
    assert published(made).tick == publish_and_check(db, made, publish_partition=True).tick, "nothing else is new"
    table = published(made)
    assert table.schema.names == ["id", "n", PARTITION]
    assert not any(path.startswith(CONVERTED) for path in table.files), "no file is written for this"
    for widened, on in ((True, False), (False, True), (False, False)):  # the copies lack the column, then have it
        made.alter(widen={"n": "int64"}) if widened else made.delete([3])
        insert(200 + 10 * table.version, "blue")
        table = publish_and_check(db, made, publish_partition=on)
        assert (PARTITION in table.schema.names) == on
        assert any(path.startswith(CONVERTED) for path in table.files)
        found = verify_published(db.settings, db.connection.service)[made.id]
        assert found.ok, found
        assert found.rows == made.count() > 0
