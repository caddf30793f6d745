"""Spark reads a collection by its name, and the tables of published collections, without a call that registers them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest

import pyspark_millrace
from millrace.base.errors import InvalidArgument, TableNotFound
from millrace.flows.sources.collection.named import NamedSource
from millrace.spark import register_published
from millrace.storage.local import LocalStore
from millrace.storage.published import AddedFile, PublishedChange, PublishedTable
from millrace.storage.table import table_at
from millrace.tables.collections.data_tables import published_uri, rows_uri
from millrace.testing import Deployment, deployment
from tests.storage.published_world import positions

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SCHEMA = pa.schema([pa.field("id", pa.int64(), nullable=False), pa.field("name", pa.string())])


@pytest.fixture(scope="module")
def db() -> Iterator[Deployment]:
    with deployment() as made:
        users = made.create_collection("users", {"id": "int64", "name": "string?"}, key="id")
        users.insert([{"id": 1, "name": "Ada"}, {"id": 2, "name": "Bo"}, {"id": 3}])
        users.delete([2])
        made.settle()
        yield made


def options(db: Deployment, **more: str) -> dict[str, str]:
    return {"data": str(db.settings.data_dir), **more}


def publish(db: Deployment, name: str) -> None:
    """Publish a collection whose rows table has one file, of which the second row is deleted."""
    number = db.collection(name).definition.id
    [(path, size)] = table_at(rows_uri(db.settings, number)).live_files().items()
    table = PublishedTable.create(LocalStore(published_uri(db.settings, number)), SCHEMA, collection_id=number)
    added = AddedFile(f"_rows/{path}", size, 3, masked=positions([1]))
    table.commit(PublishedChange(tick=1 << 18, schema_version=1, add=[added]))


def test_importing_the_package_that_spark_looks_for_imports_nothing_of_millrace() -> None:
    program = "import sys, pyspark_millrace; print([each for each in sys.modules if each.startswith('millrace')])"
    environment = {**os.environ, "PYTHONPATH": str(Path(pyspark_millrace.__file__).parents[1])}
    found = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
    assert pyspark_millrace.DefaultSource.name() == "millrace"


@pytest.mark.parametrize(
    ("given", "words"),
    [({}, "reads a collection"), ({"path": "users", "read": "all"}, "rows or changes")],
)
def test_a_wrong_option_says_what_to_give(given: dict[str, str], words: str) -> None:
    with pytest.raises(InvalidArgument, match=words):
        NamedSource(given)


def test_a_stream_asks_for_changes(db: Deployment) -> None:
    source = NamedSource(options(db, path="users"))
    with pytest.raises(InvalidArgument, match="changes"):
        source.streamReader(source.schema())


@pytest.mark.parametrize("name", ["users", "COLLECTION"])
def test_the_rows_at_a_tick_are_read_in_one_task(db: Deployment, name: str) -> None:
    given = {"path": "users"} if name == "users" else {"COLLECTION": "users"}
    source = NamedSource(options(db, **given, columns="name", where="id < 3"))
    assert source.schema().fieldNames() == ["name"]
    reader = source.reader(source.schema())
    [part] = reader.partitions()
    assert pa.Table.from_batches(reader.read(part)).to_pylist() == [{"name": "Ada"}]


def test_the_uri_of_a_published_table_is_its_own(db: Deployment) -> None:
    later = db.create_collection("later", {"id": "int64", "name": "string?"}, key="id")
    with pytest.raises(TableNotFound, match="later is not published yet"):
        later.delta_uri()
    later.insert([{"id": 1}, {"id": 2}, {"id": 3}])
    db.settle()
    publish(db, "later")
    assert Path(later.delta_uri()) == db.settings.data_dir / "tables" / str(later.definition.id)
    assert (db.settings.data_dir / "tables/by-name/later").resolve() == Path(later.delta_uri()).resolve()


@pytest.mark.spark
def test_spark_finds_the_format_by_itself(db: Deployment, spark: SparkSession) -> None:
    def read(**more: str) -> list[Any]:
        frame = spark.read.format("millrace").options(**options(db, **more))
        return [row.asDict() for row in frame.load("users").orderBy("id").collect()]

    assert read() == [{"id": 1, "name": "Ada"}, {"id": 3, "name": None}]
    assert read(where="name is not null") == [{"id": 1, "name": "Ada"}]
    changes = spark.read.format("millrace").options(**options(db, read="changes")).load("users")
    assert {row["_change"] for row in changes.collect()} == {"insert", "delete"}


@pytest.mark.spark
def test_published_tables_are_in_the_sessions_catalog(db: Deployment, spark: SparkSession) -> None:
    made = db.create_collection("shown", {"id": "int64", "name": "string?"}, key="id")
    made.insert([{"id": 1, "name": "Ada"}, {"id": 2}, {"id": 3}])
    db.create_collection("with-a-dash", {"id": "int64"}, key="id")
    db.settle()
    publish(db, "shown")
    for _ in range(2):
        assert "millrace.shown" in register_published(spark, settings=db.settings)
    found = spark.sql("select id, name from millrace.shown order by id").collect()
    assert [tuple(row) for row in found] == [(1, "Ada"), (3, None)]
    with pytest.raises(TableNotFound, match="not published yet"):
        register_published(spark, ["with-a-dash"], settings=db.settings)
    spark.sql("drop table millrace.shown")
    assert made.count() == 3
    spark.sql("create table millrace.shown (n int) using parquet")
    try:
        with pytest.raises(InvalidArgument, match="another database"):
            register_published(spark, ["shown"], settings=db.settings)
    finally:
        spark.sql("drop table millrace.shown")
