"""Reads out: collections as datasets that engines ask for columns and rows, and the changes
between two ticks as one stream.
"""

from __future__ import annotations

from collections.abc import Callable

import duckdb
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc
import pytest

from millrace.base.errors import CheckViolated, InvalidArgument
from millrace.catalog.collection import CollectionInfo as Definition
from millrace.client.database import Database
from millrace.client.dataset import polars_scan, referenced_columns
from millrace.message.expression.rules import CheckConstraint, UntypedExpression
from millrace.message.schema import CollectionSchema
from millrace.message.schema_changes import AddField, RenameField, WidenField
from millrace.node.flush.definition import flush_to_end
from millrace.node.ingest.definition import ingest_to_end
from tests.cli.deployment import Deployment
from tests.client.conftest import item_rows

Stored = Callable[..., dict[int, str]]


@pytest.fixture
def sold(shop: Database, items: Definition) -> Definition:
    """Rows in the tables and behind them, some deleted, one replaced."""
    producer = shop.new_producer()
    producer.insert(items, item_rows(*range(20), name="old"))
    ingest_to_end(shop.settings, shop.log)
    flush_to_end(shop.settings)
    producer.delete(items, [1, 2, 3])
    producer.upsert(items, item_rows(4, 30, name="new", price=float("nan")))
    ingest_to_end(shop.settings, shop.log)
    return items


@pytest.mark.quick_cases(1)
def test_a_dataset_gives_what_a_read_gives_as_often_as_it_is_asked(
    shop: Database, reader: Database, sold: Definition
) -> None:
    found = reader.collection(sold.name).dataset()
    wanted = reader.collection(sold.name).read().sort_by("id")
    shop.new_producer().insert(sold, item_rows(77))
    ingest_to_end(shop.settings, shop.log)
    for _ in range(2):
        assert repr(found.to_table().sort_by("id").to_pylist()) == repr(wanted.to_pylist())  # NaN equals nothing
    assert found.schema.equals(wanted.schema)
    assert (found.count_rows(), found.scanner([]).to_table().num_rows) == (18, 18)
    assert found.head(5).num_rows == 5
    some = found.to_table(columns=["name"], filter=(pc.field("id") > 3) & (pc.field("price") != 1.0))
    assert some.to_pydict() == {"name": ["new", "new"]}  # NaN, which the bounds of files leave out
    assert sum(map(len, found.to_batches(filter=pc.field("id").isin([0, 1, 4])))) == 2


def test_a_dataset_refuses_what_it_cannot_do(reader: Database, items: Definition, stored: Stored) -> None:
    stored(items)
    found = reader.collection(items.name).dataset()
    for call in (found.get_fragments, lambda: found.filter(pc.field("id") > 1), lambda: found.sort_by("id")):
        with pytest.raises(InvalidArgument, match="scanned as a whole"):
            call()
    with pytest.raises(InvalidArgument, match="columns must be names"):
        found.scanner({"twice": pc.field("id") * 2})
    with pytest.raises(InvalidArgument, match="does not fit the columns"):
        found.to_table(filter=pc.field("nowhere") > 1)


def test_what_an_expression_looks_at_is_known() -> None:
    schema = pa.schema([("a", pa.int64()), ("b", pa.struct([("a", pa.int64())])), ("c", pa.utf8())])
    assert referenced_columns(None, schema) == []
    assert referenced_columns((pc.field("a") > 1) | pc.field("c").is_null(), schema) == ["a", "c"]
    assert referenced_columns(pc.field("b", "a") == 1, schema) == ["b"]


@pytest.mark.slow
def test_duckdb_has_views_of_all_collections_at_one_tick(reader: Database, shop: Database, sold: Definition) -> None:
    with duckdb.connect() as connection:
        tick = reader.attach(connection, [sold.name])
        shop.new_producer().insert(sold, item_rows(78))
        ingest_to_end(shop.settings, shop.log)
        query = f"select id, name from {sold.name} where name = 'new' or id < 5 order by id"
        assert connection.sql(query).fetchall() == [(0, "old"), (4, "new"), (30, "new")]
        assert connection.sql(f"select count(*) from {sold.name} a join {sold.name} b using (id)").fetchall() == [(18,)]
        assert reader.attach(connection, [sold.name], at=tick) == tick
        assert connection.sql(f"select count(*) from {sold.name} where id = 78").fetchall() == [(0,)]


def test_polars_pushes_its_columns_and_filters_down(shop: Database, reader: Database, sold: Definition) -> None:
    found = reader.collection(sold.name).scan_polars()
    rows = found.filter((pl.col("id") > 3) & pl.col("name").is_in(["new", "x"])).select("id").sort("id").collect()
    assert rows.to_dict(as_series=False) == {"id": [4, 30]}


NAN_FILTERS = [
    pl.col("price") > 3, pl.col("price") >= float("nan"), pl.col("price").is_nan(), ~(pl.col("price") < 3),
    pl.col("price") != 1.0,
    (pl.col("price") > 3) & (pl.col("id") > 2), (pl.col("price") <= 3) | (pl.col("name") == "new"),
    pl.col("price").is_in([1.0, float("nan")]),
    (pl.col("id") > 3) & pl.col("name").is_not_null() & (pl.col("price") > -1), pl.col("price").is_null(),
]  # fmt: skip


@pytest.mark.quick_cases(1)
def test_a_lazy_frame_of_polars_has_the_rows_that_polars_finds_in_all_of_them(
    shop: Database, reader: Database, items: Definition
) -> None:
    """Of NaN too, which Polars takes for the greatest number and Arrow for none."""
    prices = [1.0, 5.0, float("nan"), None, float("inf"), -1.0, float("nan")]
    rows = {"id": list(range(7)), "name": ["old", "new"] * 3 + ["new"], "price": prices}
    shop.new_producer().insert(items, rows)
    ingest_to_end(shop.settings, shop.log)
    flush_to_end(shop.settings)
    collection = reader.collection(items.name)
    lazy, whole = collection.scan_polars(), collection.to_polars()
    for each in NAN_FILTERS:
        found = lazy.filter(each).select("name", "id").sort("id").collect()
        assert found.to_dicts() == whole.filter(each).select("name", "id").sort("id").to_dicts(), str(each)
    assert len(lazy.head(3).collect()) == 3
    assert lazy.filter(pl.col("price") > 3).head(2).collect()["id"].len() == 2
    with duckdb.connect() as connection:
        reader.attach(connection, [items.name])
        collection.to_duckdb(connection).create_view("bought")
        for source in (items.name, "bought"):
            query = f"select id from {source} where price > 3 and name <> 'none' order by id"
            assert connection.sql(query).fetchall() == [(1,), (2,), (4,), (6,)], source
            query = f"select id from {source} where price = 'nan'::double order by id"
            assert connection.sql(query).fetchall() == [(2,), (6,)], source


def test_polars_asks_a_collection_for_the_rows_that_it_can_tell_apart(sold: Definition, shop: Database) -> None:
    dataset = shop.collection(sold.name).dataset()
    asked: list[object] = []
    scanner = dataset.scanner

    def watched(columns: object = None, filter: object = None) -> object:
        asked.append((columns, str(filter)))
        return scanner(columns, filter)  # type: ignore[arg-type]

    dataset.scanner = watched  # type: ignore[method-assign, assignment]
    lazy = polars_scan(pl, dataset).filter((pl.col("id") > 3) & (pl.col("price") > 3)).select("name")
    assert len(lazy.collect()) == 2  # NaN
    assert asked == [(["id", "name", "price"], "(id > 3)")]


@pytest.mark.slow
def test_changes_between_two_ticks_are_one_stream_in_the_newest_schema(
    shop: Database, reader: Database, items: Definition
) -> None:
    producer = shop.new_producer()
    first = producer.insert(items, item_rows(1, 2)).last_tick
    producer.delete(items, [1])
    producer.upsert(items, item_rows(2))
    shop.catalog.alter(
        items.name, [RenameField("price", "cost"), AddField(type(items.schema.fields[0])("more", "int32", True))]
    )
    last = producer.insert(
        shop.definition(items.name), {"id": [3], "name": ["x"], "cost": [2.5], "more": [1]}
    ).last_tick
    shop.catalog.alter(items.name, [WidenField("more", "int64")])
    ingest_to_end(shop.settings, shop.log)
    collection = reader.collection(items.name)
    behind = collection.changes_between(first, last).read_all().sort_by("_write_tick")
    assert behind.schema.names[:5] == ["id", "name", "cost", "sold", "more"]
    assert behind.schema.field("more").type == pa.int64()
    found = zip(*(behind[name].to_pylist() for name in ("_change", "id", "cost", "more")), strict=True)
    assert list(found) == [
        ("delete", 1, None, None), ("delete", 2, None, None), ("insert", 2, 1.0, None), ("insert", 3, 2.5, 1)
    ]  # fmt: skip
    assert collection.changes_between(until=first).read_all()["cost"].to_pylist() == [1.0, 1.0]
    assert collection.changes_between(last).read_all().num_rows == 0


def test_a_schema_without_room_for_what_was_widened_since_is_refused(shop: Database, items: Definition) -> None:
    shop.catalog.alter(items.name, [AddField(type(items.schema.fields[0])("more", "int32", True))])
    narrow = shop.definition(items.name)
    shop.catalog.alter(items.name, [WidenField("more", "int64")])
    shop.new_producer().insert(shop.definition(items.name), {"id": [1], "name": ["x"], "more": [1 << 40]})
    ingest_to_end(shop.settings, shop.log)
    with (
        shop.collection(items.name).changes(schema=narrow.schema) as stream,
        pytest.raises(InvalidArgument, match="'more' is int64 in these rows, and was int32"),
    ):
        stream.poll(timeout=5)


@pytest.mark.slow
def test_collections_whose_names_differ_by_case_alone_are_not_one_view(shop: Database, sold: Definition) -> None:
    other = shop.catalog.create_collection(sold.name.upper(), sold.schema)
    with duckdb.connect() as connection:
        with pytest.raises(InvalidArgument, match="the same name in SQL"):
            shop.attach(connection, [sold.name, other.name])
        ingest_to_end(shop.settings, shop.log)
        shop.attach(connection, [sold.name, sold.name])
        assert connection.sql(f'select count(*) from "{sold.name}"').fetchall() == [(18,)]
    shop.catalog.drop_collection(other.name)


BACKSLASHES = ["100%", "100 apples", "1000", r"C:\temp", r"a\b", "ab", "it's", r"10\0%", "a_b"]
WHERES = [r"name like '100\%'", r"name = 'C:\temp'", r"name = 'a\b'", r"name not like '%\%%'", r"name like '10\0!%'"
    r" escape '!'",
          "name in ('it''s', 'ab')", r'name = "a\\b"', r"name like 'a\_b'", r"name like '%\\%'"]  # fmt: skip


@pytest.mark.quick_cases(1)
def test_a_backslash_means_one_thing_through_every_door(shop: Database, reader: Database, items: Definition) -> None:
    left = dict(enumerate(BACKSLASHES))
    shop.new_producer().insert(items, {"id": list(left), "name": BACKSLASHES})
    ingest_to_end(shop.settings, shop.log)
    collection, deployment = reader.collection(items.name), Deployment(shop.settings)
    hit: dict[str, set[int]] = {}
    with duckdb.connect() as connection:
        reader.attach(connection, [items.name])
        for where in WHERES:
            said = where.replace(r'"a\\b"', r"'a\b'")
            theirs = said if "escape" in said or " like " not in said else rf"{said} escape '\'"
            hit[where] = {row[0] for row in connection.sql(f"select id from {items.name} where {theirs}").fetchall()}
    for where, wanted in hit.items():
        assert 0 < len(wanted) < len(BACKSLASHES)
        assert set(collection.read(where=where)["id"].to_pylist()) == wanted
        assert collection.count(where=where) == len(wanted)
    assert {row["id"] for row in deployment.lines("read", items.name, "--where", where, "--json")} == wanted
    for where in WHERES[:3]:
        assert collection.delete_where(where).keys == len(hit[where] & set(left))
        left = {number: name for number, name in left.items() if number not in hit[where]}
        ingest_to_end(shop.settings, shop.log)
        assert set(collection.read()["id"].to_pylist()) == set(left)


def test_a_backslash_in_a_check_means_what_it_means_in_a_read(shop: Database, items: Definition) -> None:
    check = CheckConstraint("whole", UntypedExpression(r"name not like '%\%%'"))
    schema = CollectionSchema(items.schema.fields, "id", checks=(check,))
    checked = shop.catalog.create_collection(f"{items.name}_checked", schema)
    shop.new_producer().insert(checked, {"id": [1], "name": ["100 apples"]})
    with pytest.raises(CheckViolated):
        shop.new_producer().insert(checked, {"id": [2], "name": ["100%"]})
