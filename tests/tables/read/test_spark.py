"""Reads through Spark: the rows that read_arrow gives, from tables and from the WAL's tail, small and large."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Iterator
from datetime import UTC, date, datetime
from decimal import Decimal
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest

import millrace.spark as face
import millrace.tables.read.spark as reader
from millrace.base.errors import InvalidArgument, TableDamaged
from millrace.base.predicate.language import parse_condition
from millrace.base.settings import Settings
from millrace.client.collection import Collection as OfUsers
from millrace.client.database import connect
from millrace.message import builders
from millrace.message.schema import CollectionSchema, FieldSpec
from millrace.node.flush.definition import flush_to_end
from millrace.node.ingest.definition import ingest_to_end
from millrace.node.publish.definition import publish
from millrace.storage.published import PublishedTable
from millrace.storage.table import table_at
from millrace.tables.collections.data_tables import deletes_uri, earliest_readable_tick, rows_uri
from millrace.tables.read.arrow import read_arrow
from millrace.tables.read.base import PublishedBase
from millrace.tables.read.spark_predicate import spark_predicate
from millrace.testing import Deployment, deployment
from tests.node.publish.published_maker import PublishedMaker, rows_in
from tests.node.publish.test_published_reads import AHEAD, END, FOLDED, published
from tests.tables.read.test_at_tick import ACROSS, ALL, IMPORTS, PARTITIONS, tick_everywhere
from tests.tables.read.test_base import run
from tests.tables.read_model import do
from tests.tables.test_every_type import rows as every_rows
from tests.tables.test_every_type import schema as every_schema
from tests.tables.wal_maker import Collection, WalMaker

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = pytest.mark.spark

HISTORY = [
    ("insert", [0, 1, 2, 3, 4, 5], 1, 0),
    ("begin", 0, 1),
    ("begin", 1, 1),
    ("insert", [0, 1, 2], 2, 1),
    ("delete", [0, 1, 2, 3], 2, 1),
    ("insert", [0, 3], 2, 1),
    ("delete", [4], 1, 0),
    ("commit", 0, 1),
    ("commit", 1, 1),
    ("import", [(0, 1), (1, 2), (5, 2)], False),
    ("schema_change", 0),
    ("schema_change", 1),
    ("import", [(2, 1), (3, 2), (4, 2)], True),
    ("insert", [4, 5], 2, 0),
    ("drop_partition", 0, 2),
]


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("local", [True, False], ids=["local tail", "tail by tasks"])
def test_spark_reads_at_every_stage_what_arrow_reads(
    spark: SparkSession, settings: Settings, local: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not local:
        monkeypatch.setattr(reader, "SMALL_BYTES", 0)
    maker = WalMaker(settings)
    maker.open()
    collection = Collection(maker)
    collection.create()
    for number, operation in enumerate(HISTORY):
        do(collection, operation, number)
    for name in maker.pchannels:
        maker.append(name, [builders.time_tick(term=1)])
    maker.commit()
    assert [row["reason"] for row in maker.rejected] == []
    ticks = sorted(m["time_tick"] for m in maker.accepted["p0"])
    last = min(maker.last_tick(name) for name in maker.pchannels)
    middle = ticks[len(ticks) * 2 // 3]
    for up_to, at in ((0, middle), (middle, last)) if local else ((middle, last),):
        flush_to_end(settings, up_to_tick=up_to)
        wanted = read_arrow(settings, 1, at=at, with_ticks=True)
        found = reader.read_spark(spark, settings, 1, at=at, with_ticks=True)
        assert found.columns == wanted.column_names
        assert Counter(map(tuple, found.collect())) == Counter(tuple(row.values()) for row in wanted.to_pylist())


def _with_rows(settings: Settings) -> Collection:
    """A collection with its first rows committed to ``wal``."""
    maker = WalMaker(settings)
    maker.open()
    collection = Collection(maker)
    collection.create()
    do(collection, HISTORY[0], 0)
    maker.commit()
    return collection


@pytest.mark.slow
def test_what_was_read_stays_what_it_was(spark: SparkSession, settings: Settings) -> None:
    collection = _with_rows(settings)
    maker = collection.maker
    flush_to_end(settings)
    frame = reader.read_spark(spark, settings, 1)
    before = frame.count()
    do(collection, HISTORY[0], 1)
    maker.commit()
    flush_to_end(settings)
    assert (frame.count(), before > 0) == (before, True)
    assert read_arrow(settings, 1).num_rows > before


@pytest.mark.slow
def test_columns_that_place_a_row_are_scanned_only_where_a_row_may_be_hidden(
    spark: SparkSession, settings: Settings
) -> None:
    collection = _with_rows(settings)
    maker = collection.maker
    first = min(maker.last_tick(name) for name in maker.pchannels)
    for operation in (("import", [(0, 1), (1, 2)], False), ("insert", [2, 3], 1, 0)):
        do(collection, operation, 1)
    for name in maker.pchannels:
        maker.append(name, [builders.time_tick(term=1)])
    maker.commit()
    flush_to_end(settings)
    assert _scanned(reader.read_spark(spark, settings, 1)) == (False, False)
    assert _scanned(reader.read_spark(spark, settings, 1, at=first)) == (False, True)  # later rows are left out
    do(collection, ("import", [(4, 1)], True), 2)  # takes the place of all rows before it
    maker.commit()
    flush_to_end(settings)
    frame = reader.read_spark(spark, settings, 1)
    assert _scanned(frame)[0]
    assert frame.count() == read_arrow(settings, 1).num_rows


def _plan_of(frame: DataFrame) -> str:
    return str(frame._jdf.queryExecution().executedPlan().toString())


def _scanned(frame: DataFrame) -> tuple[bool, bool]:
    """Whether the plan reads ``_vchannel``, and ``_time_tick``."""
    plan = _plan_of(frame)
    return "_vchannel" in plan, "_time_tick" in plan


@pytest.mark.slow
def test_times_and_dates_come_through_tasks_as_they_were_written(
    spark: SparkSession, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader, "SMALL_BYTES", 0)
    moment = datetime(2013, 1, 1, 5, 15, 0, 1, tzinfo=UTC)
    schema = CollectionSchema(
        (
            FieldSpec("id", "int64", False),
            FieldSpec("at", "timestamp", True),
            FieldSpec("day", "date", True),
            FieldSpec("stops", "list<timestamp>", True),
        ),
        "id",
    )
    rows = pa.table(
        {"id": [1, 2], "at": [moment, None], "day": [moment.date(), None], "stops": [[moment, moment], None]},
        schema=schema.arrow(),
    )
    with connect(settings=settings) as client:
        made = client.catalog.create_collection("c", schema)
        client.new_producer().insert(made, rows)
        ingest_to_end(settings, client.log)
        client.connection.service.shutdown()
    found = reader.read_spark(spark, settings, made.id).toArrow().sort_by("id")
    assert found.to_pylist() == rows.to_pylist() == read_arrow(settings, made.id).sort_by("id").to_pylist()


@pytest.fixture
def bases(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The ticks of the published versions that Spark's reads took as their base."""
    found: list[int] = []
    real = reader._published_frame

    def published_frame(spark: SparkSession, base: PublishedBase, target: pa.Schema) -> DataFrame | None:
        frame = real(spark, base, target)
        found.extend([] if frame is None else [base.tick])
        return frame

    monkeypatch.setattr(reader, "_published_frame", published_frame)
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    "operations",
    [
        AHEAD,
        FOLDED,
        [*published(PARTITIONS), *END],
        [*published(ACROSS), *END],
        [*published(IMPORTS), ("compact", 60), *END, ("compact", 100), *END],
    ],
    ids=["ahead", "folded", "partitions", "across", "imports"],
)
def test_spark_reads_on_a_published_version_what_arrow_reads(
    spark: SparkSession, settings: Settings, operations: list[tuple[Any, ...]], bases: list[int]
) -> None:
    """At the ticks of the published versions, between them, and after the last; with a tail after each."""
    made = PublishedMaker(settings, start_ms=time.time_ns() // 10**6)  # Spark refuses a version of long ago
    for number, operation in enumerate(operations):
        run(made, operation, number)
    for number, last in enumerate([("upsert", [1, 2], 1, 0), ("delete", [3], 0, 0), ("wal_commit", 0)]):
        run(made, last, 100 + number)
    table = made.table()
    assert table is not None
    confirmed = made.maker.confirmed()
    newest = max(confirmed.values())
    first = earliest_readable_tick(table_at(rows_uri(settings, 1)))
    for at in sorted({max(first, table.tick - (1 << 18)), table.tick, newest}):
        wanted = read_arrow(settings, 1, at=at, confirmed=confirmed, use_published=False)
        found = reader.read_spark(spark, settings, 1, at=at, confirmed=confirmed)
        assert found.columns == wanted.column_names
        assert Counter(map(tuple, found.collect())) == Counter(tuple(row.values()) for row in wanted.to_pylist())
    assert bases, "no read had a base"


DELETED = [("delete", [0, 1], 0, 0), ("wal_commit", 0), ("flush", 100)]


@pytest.mark.slow
@pytest.mark.parametrize(
    "since",
    [
        [("delete", [0, 1, 2], 1, 0), ("wal_commit", 0)],
        [("delete", [0, 1, 2], 1, 0), ("wal_commit", 0), ("flush", 100)],
        [("drop_partition", 0, 1), ("drop_partition", 1, 1), ("wal_commit", 0)],
        [("import", [(0, 1), (1, 2)], True), ("wal_commit", 0), ("flush", 100)],
        [*DELETED, ("compact", 100), ("delete", [2], 0, 0), ("wal_commit", 0)],
    ],
    ids=["a delete in a partition", "flushed", "a drop", "a replacing import", "a folded delete"],
)
def test_spark_takes_no_base_whose_rows_something_hides_by_more_than_their_key(
    spark: SparkSession, settings: Settings, since: list[tuple[Any, ...]], bases: list[int]
) -> None:
    made = PublishedMaker(settings)
    for number, operation in enumerate([("upsert", ALL, 1, 0), ("insert", ALL, 2, 0), ("delete", [9], 0, 0), *END]):
        run(made, operation, number)
    confirmed = made.maker.confirmed()
    assert reader.read_spark(spark, settings, 1, confirmed=confirmed).count() == 18
    assert len(bases) == 1
    for number, operation in enumerate(since):
        run(made, operation, 10 + number)
        tick_everywhere(made.maker)
    confirmed = made.maker.confirmed()
    wanted = rows_in(read_arrow(settings, 1, confirmed=confirmed, use_published=False))
    assert wanted.total() < 18
    assert rows_in(pa.table(reader.read_spark(spark, settings, 1, confirmed=confirmed).toArrow())) == wanted
    assert len(bases) == 1


@pytest.mark.slow
def test_spark_takes_each_row_once_if_the_version_is_newer_than_the_pinned_tables(
    spark: SparkSession, settings: Settings, bases: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = PublishedMaker(settings)
    for number, operation in enumerate([("upsert", ALL, 1, 0), ("upsert", ALL, 2, 0), *END]):
        run(made, operation, number)
    made.write(ALL[:5], "later")
    wanted = rows_in(read_arrow(settings, 1, confirmed=made.maker.confirmed(), use_published=False))
    find = PublishedBase.find

    def after_a_publish(*given: Any) -> PublishedBase | None:
        made.flush()
        made.publish()
        return find(*given)

    monkeypatch.setattr(PublishedBase, "find", after_a_publish)
    found = reader.read_spark(spark, settings, 1, confirmed=made.maker.confirmed())
    table = made.table()
    assert table is not None
    assert bases == [table.tick]
    assert rows_in(pa.table(found.toArrow())) == wanted


def _remove_stored_deletes(settings: Settings) -> None:
    """Remove the files of the deletes table: a read that takes one of them fails."""
    table = table_at(deletes_uri(settings, 1))
    table.store.delete(list(table.live_files()))


def test_spark_takes_no_delete_of_before_the_published_version(
    spark: SparkSession, settings: Settings, bases: list[int]
) -> None:
    made = PublishedMaker(settings, vchannels=1)
    made.write(range(20), "old")
    made.write(range(10), "new")
    made.flush()
    version = made.publish()
    _remove_stored_deletes(settings)
    confirmed = made.maker.confirmed()
    frame = reader.read_spark(spark, settings, 1, confirmed=confirmed)
    assert (bases, "deletes" in _plan_of(frame)) == ([version], False)
    assert sorted(frame.toArrow()["body"].to_pylist())[0] == "new:0"
    made.write([3], "newest")
    made.delete([4])
    made.flush(percent=90)
    frame = reader.read_spark(spark, settings, 1, confirmed=made.maker.confirmed())
    rows = dict(zip(*frame.toArrow().to_pydict().values(), strict=True))
    assert (len(rows), rows[3], 4 in rows) == (19, "newest:3", False)
    assert bases == [version] * 2
    with pytest.raises(TableDamaged, match="are missing"):
        reader.read_spark(spark, settings, 1, confirmed=made.maker.confirmed(), with_ticks=True)


@pytest.mark.slow
def test_spark_takes_no_base_that_it_cannot_read(
    spark: SparkSession, settings: Settings, bases: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    """A version of longer ago than Spark allows, and one that lacks a file, say, because the rows were repaired."""
    made = PublishedMaker(settings, vchannels=1)
    for number in range(2):
        made.write(range(number, 10 + number), f"v{number}")
        made.flush()
        made.publish()
    table = made.table()
    assert table is not None
    older = PublishedTable.open(table.store, version=table.version - 1)
    assert older is not None
    assert reader.read_spark(spark, settings, 1, at=older.tick).count() == made.read(older.tick).num_rows
    run(made, ("compact", 0), 0)
    wanted = made.read(table.tick)
    table.store.delete([next(iter(table.files))])
    assert rows_in(pa.table(reader.read_spark(spark, settings, 1, at=table.tick).toArrow())) == rows_in(wanted)
    assert (bases, "are missing" in caplog.text) == ([], True)


@pytest.fixture(scope="module")
def db() -> Iterator[Deployment]:
    """One for the module: a test takes collections of its own."""
    with deployment() as made:
        yield made


@pytest.mark.slow
def test_spark_reads_every_type_as_it_was_written(spark: SparkSession, db: Deployment) -> None:
    every = db.create_collection("every", every_schema())
    every.insert(every_rows().slice(0, 2))
    db.settle()
    every.insert(every_rows().slice(2))
    ingest_to_end(db.settings, db.log)
    found = [row.asDict(recursive=True) for row in face.read(spark, "every", settings=db.settings).collect()]
    by_key = [sorted(rows, key=lambda row: row["id"]) for rows in (found, every.read().to_pylist())]
    assert len(found) == 3
    for spark_row, row in zip(*by_key, strict=True):
        for name, value in row.items():
            # Spark's rows have maps as dicts, and moments in the session's zone without one.
            assert plain(spark_row[name]) == plain(value), name
    frame = face.read(spark, "every", settings=db.settings)
    again = db.create_collection("every_again", frame, key="id")
    assert again.schema.arrow().names == every.schema.arrow().names
    again.insert(frame)
    assert again.read().sort_by("id").cast(every.schema.arrow()).equals(every.read().sort_by("id"))
    changed = face.changes_between(spark, "every", settings=db.settings).orderBy("id").drop("_change")
    rows = [row.asDict(recursive=True) for row in changed.collect()]
    assert [{name: plain(row[name]) for name in every.schema.arrow().names} for row in rows] == [
        {name: plain(value) for name, value in row.items()} for row in by_key[1]
    ]


@pytest.mark.slow
def test_spark_leaves_files_out_by_a_key_that_is_a_moment_and_no_row_with_them(
    spark: SparkSession, db: Deployment
) -> None:
    made = db.create_collection("moments", {"at": "timestamp", "n": "int64"}, key="at")
    moments = [datetime(2026, 1, 1, microsecond=each, tzinfo=UTC) for each in (0, 1, 999, 1_000, 1_001, 2_000)]
    for place, each in enumerate(moments):  # a file each
        made.insert([{"at": each, "n": place}])
        db.settle()
    for op in ("=", ">=", "<"):
        for each in moments:
            where = f"at {op} '{each.isoformat()}'"
            wanted = sorted(made.read(where=where)["n"].to_pylist())
            assert (
                sorted(row["n"] for row in face.read(spark, "moments", where=where, settings=db.settings).collect())
                == wanted
            )
            stored = spark.read.format("delta").load(rows_uri(db.settings, made.id)).where(where)
            assert sorted(row["n"] for row in stored.collect()) == wanted


@pytest.mark.slow
@pytest.mark.parametrize("on_published", [False, True], ids=["", "on a published version"])
def test_spark_reads_a_table_whose_schema_changed(
    spark: SparkSession, db: Deployment, on_published: bool, bases: list[int]
) -> None:
    def settle() -> None:
        db.settle()
        if on_published:
            assert publish(db.settings, made.id)

    name = f"changed_{on_published}"
    first = {"id": "int64", "n": "int32", "gone": "string?", "f": "float32?", "day": "date?", "wall": "date?"}
    first |= {
        "d": "decimal(6,2)?",
        "at": "struct<x: int8>?",
        "many": "list<struct<x: int8>>?",
        "by": "map<string, float32>?",
    }
    row = {"n": 1, "gone": "x", "f": 0.5, "day": date(2026, 1, 2), "wall": date(1960, 1, 2), "d": Decimal("1.25")}
    row |= {"at": {"x": 1}, "many": [{"x": 1}, None], "by": {"a": 0.5}}
    wide = {"count": "int64", "f": "float64", "day": "timestamp", "wall": "timestamp_ntz", "d": "decimal(9,4)"}
    wide |= {
        "at": "struct<y: string, x: int64>",
        "many": "list<struct<x: int8, y: string>>",
        "by": "map<string, float64>",
    }
    made = db.create_collection(name, first, key="id")
    then = made.insert([{"id": 1, **row}, {"id": 2, "n": 2}]).last_tick
    older = OfUsers(db, made.definition)
    made.insert([{"id": 7, "n": 7}])
    made.delete([7])
    settle()
    made.alter(
        drop="gone",
        rename={"id": "key", "n": "count"},
        widen=wide,
        relax="count",
        add={"gone": "int64?"},
        order="count",
    )
    made.insert([{"key": 3, "count": 1 << 40, "at": {"y": "a"}, "gone": 3}, {"key": 4}])
    made.alter(drop="at.y", rename={"at.x": "w", "many.y": "z", "at": "place"})
    made.alter(add={"place.y": "bool"})
    made.insert([{"key": 6, "place": {"w": 6, "y": True}, "many": [{"z": "b"}]}])
    older.insert([{"id": 5, **row}])
    made.delete([2])
    for _ in range(2):  # from the tail, and from the tables
        ingest_to_end(db.settings, db.log)
        found = face.read(spark, name, settings=db.settings)
        wanted = made.read().sort_by("key")
        assert found.columns == wanted.column_names
        rows = sorted((each.asDict(recursive=True) for each in found.collect()), key=itemgetter("key"))
        assert [{name: plain(each[name]) for name in each} for each in rows] == [
            {name: plain(each[name]) for name in each} for each in wanted.to_pylist()
        ]
        settle()
    assert bool(bases) == on_published
    before = face.read(spark, name, settings=db.settings, at=then).collect()
    assert [(each["id"], each["n"], each["gone"]) for each in sorted(before)] == [(1, 1, "x"), (2, 2, None)]


@pytest.mark.slow
def test_spark_leaves_out_what_was_deleted_by_a_key_of_several_fields(spark: SparkSession, db: Deployment) -> None:
    days = [date(2026, 11, 23), date(2026, 11, 24)]
    quotes = db.create_collection(
        "quotes",
        {"close": "decimal(10,2)", "day": "date", "symbol": "string"},
        key=("symbol", "day"),
        on_duplicate="replace",
        vchannels=2,
    )
    quotes.insert([{"symbol": name, "day": day, "close": Decimal(1)} for name in "ABC" for day in days])
    db.settle()
    quotes.insert([{"symbol": "A", "day": days[0], "close": Decimal(2)}])
    quotes.alter(rename={"symbol": "ticker"})
    quotes.delete([("B", days[1]), ("C", days[0])])
    wanted = {("A", days[0], 2), ("A", days[1], 1), ("B", days[0], 1), ("C", days[1], 1)}
    for _ in range(2):  # from the tail, and from the tables
        ingest_to_end(db.settings, db.log)
        frame = face.read(spark, "quotes", settings=db.settings)
        assert {(row.ticker, row.day, row.close) for row in frame.collect()} == wanted
        db.settle()


@pytest.mark.slow
def test_spark_selects_as_every_read_does_and_has_views_and_changes(spark: SparkSession, db: Deployment) -> None:
    fields = {"id": "int64", "x": "float64?", "day": "date?", "name": "string?", "n": "int32?", "at": "timestamp?"}
    fields |= {"wall": "timestamp_ntz?", "place": "struct<zip: int64>?", "d": "decimal(6,2)?"}
    moment = datetime(2026, 1, 1, 12, 0, 0, 1, tzinfo=UTC)
    row = {"day": date(2026, 1, 2), "name": "a_b", "n": 3, "at": moment, "wall": moment.replace(tzinfo=None)}
    row |= {"place": {"zip": 7}, "d": Decimal("1.25")}
    made = db.create_collection("mixed", fields, key="id", vchannels=2)
    numbers = [None, 0.5, float("nan"), 7.0]
    first = made.insert([{"id": id, "x": x, **row} for id, x in enumerate(numbers)]).last_tick
    made.insert([{"id": 9}])
    db.settle()
    made.delete([1])
    made.alter(rename={"n": "count"}, widen={"count": "int64"})
    made.insert([{"id": 10, "x": 8.0, "count": 1 << 40}])
    db.settle()
    wheres = (
        "x > 5", "not (x > 5)", "x != 7", "not (x != 7)", "x = x or id = 9", "x in (7, 8)", "not (x <= 7.0)",
        "name like 'a\\_%'",
        "name like 'a!_%' escape '!'", "name = 'a\\_b' or id = 0",
        "day = '2026-01-02' and id >= 2", "at <= '2026-01-01T12:00:00.000001Z'", "wall > '2026-01-01 12:00:00'",
        "d > 1.2 and d < 2",
        "place.zip = 7 and id in (0, 1, 9)", "count > 1000000 or count is null", "id > 1.5 and count < 4",
        "d = 1.25 or not (5 < x)",
    )  # fmt: skip
    frame = face.read(spark, "mixed", settings=db.settings)
    truths = [
        spark_predicate(parse_condition(each), made.schema.arrow()).alias(str(n)) for n, each in enumerate(wheres)
    ]
    found = frame.select("id", *truths).collect()
    for number, where in enumerate(wheres):
        hit = sorted(each["id"] for each in found if each[str(number)])
        assert hit == sorted(made.read(where=where, columns="id")["id"].to_pylist()), where
    pushed = face.read(spark, "mixed", where="x > 5 and id > 3", columns="id", settings=db.settings)
    plan = pushed._jdf.queryExecution().executedPlan().toString()
    assert re.search(r"Filter \(.*x#\d+ > 5\.0.*\n.*FileScan parquet \[id#\d+L,x#\d+,_part", plan), (
        plan
    )  # past the deletes
    assert "PushedFilters: [GreaterThan(id,3)]" in plan, plan  # of the deletes, too
    assert [tuple(each) for each in pushed.collect()] == [(10,)]
    with pytest.raises(InvalidArgument, match="no column 'nowhere'"):
        face.read(spark, "mixed", where="nowhere = 1", settings=db.settings)
    copy = db.create_collection("copy", made.schema, vchannels=1)
    assert copy.insert(face.read(spark, "mixed", settings=db.settings).repartition(2)).rows == 5
    copy.upsert(face.read(spark, "mixed", where="id = 10", settings=db.settings), evolve=True)
    ingest_to_end(db.settings, db.log)
    assert repr(copy.read(order_by="id").to_pylist()) == repr(made.read(order_by="id").to_pylist())
    tick = face.register(spark, ["mixed"], settings=db.settings)
    made.insert([{"id": 11}])
    ingest_to_end(db.settings, db.log)
    assert spark.sql("select count(*) from mixed").collect()[0][0] == made.count(at=tick) == 5
    wanted = made.changes_between(first).read_all()
    found = face.changes_between(spark, "mixed", first, settings=db.settings).toArrow()
    names = [name for name in wanted.column_names if name not in ("at", "wall", "_change")]
    by_place = [("_vchannel", "ascending"), ("_time_tick", "ascending"), ("_write_tick", "ascending")]
    assert found.select(names).sort_by(by_place).to_pylist() == wanted.select(names).sort_by(by_place).to_pylist()
    assert Counter(found["_change"].to_pylist()) == {"insert": 3, "delete": 1}


def plain(value: object) -> object:
    """A value without what differs between the two libraries: bytes, maps and moments by one form each."""
    if isinstance(value, bytearray):
        return bytes(value)
    if isinstance(value, datetime):
        return value.replace(tzinfo=None)
    if isinstance(value, dict):
        return {key: plain(each) for key, each in value.items()}
    if isinstance(value, list):
        pairs = bool(value) and all(isinstance(each, tuple) for each in value)
        return plain(dict(value)) if pairs else [plain(each) for each in value]
    return value
