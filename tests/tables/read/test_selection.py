"""Selecting while a collection is read gives what selecting from all of it afterwards gives, at every tick."""

from __future__ import annotations

import shutil
import tempfile
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from millrace.base.predicate.arrow import filter_table, parse_predicate
from millrace.base.settings import Settings
from millrace.client.dataset import referenced_columns
from millrace.message import builders
from millrace.message.schema import CollectionSchema, FieldSpec
from millrace.node.flush.definition import flush_to_end
from millrace.node.publish.definition import publish
from millrace.rpc.selection import Selection
from millrace.tables.key_index.index import KeyIndex
from millrace.tables.read.arrow import ArrowFilter, count_rows, read_arrow, read_pieces, read_stream
from millrace.tables.read.plan import plan_read
from tests.laws.profile import examples, spread
from tests.tables.wal_maker import Collection, WalMaker

SCHEMA = CollectionSchema(
    (
        FieldSpec("id", "int64", False),
        FieldSpec("amount", "float64", True),
        FieldSpec("name", "string", True),
        FieldSpec("at", "timestamp", True),
        FieldSpec("sold", "bool", True),
    ),
    "id",
)
KEYS = st.integers(0, 9)
LONG = "x" * 70
AMOUNTS = st.sampled_from([None, 0.0, -0.0, 1.0, 5.0, 5.0, float("nan"), float("inf")])
NAMES = st.sampled_from([None, "", "a", "ab", "b", LONG, LONG + "a", LONG + "b", "é"])
MOMENTS = [None, *(datetime(2026, 1, 1, microsecond=micro, tzinfo=UTC) for micro in (0, 1_999, 2_000, 2_001))]
ROW = st.tuples(KEYS, AMOUNTS, NAMES, st.sampled_from(MOMENTS), st.sampled_from([None, True, False]))
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("insert"), st.lists(ROW, min_size=1, max_size=4), st.integers(0, 1)),
        st.tuples(st.just("delete"), st.lists(KEYS, min_size=1, max_size=3), st.integers(0, 1)),
        st.tuples(st.sampled_from(["begin", "commit"]), st.just([]), st.just(1)),
        st.tuples(st.just("flush"), st.integers(1, 100), st.integers(0, 1)),  # and publish
    ),
    min_size=2,
    max_size=14,
)

ATOMS = st.one_of(
    st.builds("id {} {}".format, st.sampled_from(["=", "!=", "<", "<=", ">", ">="]), KEYS),
    st.builds("amount {} {}".format, st.sampled_from(["=", "!=", "<", "<=", ">", ">="]), st.sampled_from([0, 1, 5])),
    st.builds("name {} '{}'".format, st.sampled_from(["=", "<", ">", "!=", "like"]), NAMES.filter(bool)),
    st.builds("at {} '2026-01-01T00:00:00.{}Z'".format, st.sampled_from(["=", "<", ">", "!="]),
        st.sampled_from(["001999", "002", "002001"])),
    st.sampled_from(
        ["sold", "id in (1, 3)", "amount in (5)", "name is null", "at is not null", "id between 2 and 4",
            "name not in ('a')"]
    ),
)  # fmt: skip
PREDICATES = st.recursive(
    ATOMS,
    lambda inner: st.one_of(
        st.builds("({} and {})".format, inner, inner),
        st.builds("({} or {})".format, inner, inner),
        st.builds("not ({})".format, inner),
    ),
    max_leaves=4,
)


def counted(table: pa.Table) -> Counter[str]:
    return Counter(map(repr, table.to_pylist()))


def committed(maker: WalMaker, collection: Collection, steps: list[tuple[Any, ...]]) -> list[int]:
    """Do `steps`; the ticks that can be read."""
    opened = 0
    for kind, what, txn in steps:
        if kind == "flush":
            maker.commit()
            flush_to_end(maker.settings, up_to_tick=maker.tick_at(what))
            if txn:
                publish(maker.settings, 1, confirm=lambda names: {name: maker.last_tick(name) for name in names})
            continue
        if kind == "begin" or (kind == "commit" and opened):
            opened = 1 if kind == "begin" else 0
            for each in collection.vchannels:
                made = collection.begin(each, 1) if opened else collection.end(each, 1, commit=True)
                collection.append(each, made)
            continue
        for each in collection.vchannels:
            if kind == "insert":
                mine = [row for row in what if collection.home(row[0]) == each]
                if mine:
                    columns = dict(zip(SCHEMA.arrow().names, map(list, zip(*mine, strict=True)), strict=True))
                    collection.append(each, collection.insert(columns, vchannel=each, partition=1, txn=txn * opened))
            elif kind == "delete":
                keys = [key for key in what if collection.home(key) == each]
                if keys:
                    collection.append(each, collection.delete(keys, vchannel=each, partition=0, txn=txn * opened))
    for made in (builders.time_tick(term=1), builders.manual_flush(vchannel="", collection_id=0, term=1)):
        for name in maker.pchannels:  # moves the clock of both behind every message
            maker.append(name, [made])
    maker.commit()
    return maker.readable_ticks()


@given(STEPS, PREDICATES, st.sets(st.sampled_from(SCHEMA.arrow().names), min_size=1), st.integers(0, 4))
@examples(8)
def test_a_selection_is_that_of_the_whole_at_every_tick(
    steps: list[tuple[Any, ...]], where: str, names: set[str], limit: int
) -> None:
    folder = Path(tempfile.mkdtemp())
    try:
        maker = WalMaker(Settings(data_dir=folder / "data"))
        maker.open()
        collection = Collection(maker, vchannels=2, schema=SCHEMA)
        collection.create()
        maker.commit()
        if limit % 2:
            KeyIndex.open(maker.settings.key_index_path(1)).request()
        ticks = committed(maker, collection, steps)
        for tick in spread(4, ticks, first=limit):
            settings = maker.settings
            hit = filter_table(read_arrow(settings, 1, at=tick), where)
            wanted = hit.select(sorted(names))
            plan = plan_read(settings, 1, at=tick)
            chosen = Selection.of(columns=sorted(names), where=where)
            assert counted(read_arrow(settings, 1, at=tick, selection=chosen)) == counted(wanted), where
            assert counted(read_stream(plan, selection=chosen).read_all()) == counted(wanted), where
            small = pa.concat_tables(read_pieces(plan, selection=chosen, max_bytes=1))
            assert counted(small) == counted(wanted), where
            asked = parse_predicate(where, SCHEMA.arrow())
            engine = ArrowFilter(asked, tuple(referenced_columns(asked, SCHEMA.arrow())))
            found = read_stream(plan, selection=Selection.of(columns=sorted(names)), arrow_filter=engine)
            assert counted(found.read_all()) == counted(wanted), where
            assert count_rows(plan, where=where) == hit.num_rows
            assert count_rows(plan) == read_arrow(settings, 1, at=tick).num_rows
            some = read_arrow(
                settings, 1, at=tick, selection=Selection.of(columns=sorted(names), where=where, limit=limit)
            )
            assert some.num_rows == min(limit, hit.num_rows)
            assert not counted(some) - counted(wanted)
            ordered = Selection.of(columns="id", where=where, order_by="name desc, id", limit=limit)
            keys = hit.sort_by([("name", "descending"), ("id", "ascending")])["id"].to_pylist()[:limit]
            assert read_arrow(settings, 1, at=tick, selection=ordered)["id"].to_pylist() == keys
    finally:
        shutil.rmtree(folder)
