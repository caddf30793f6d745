"""The history of keys: whatever order changes come in, its rows are what DuckDB makes of all changes at once."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from typing import Any, NamedTuple
from unittest.mock import patch

import duckdb
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import millrace.testing
from millrace.base.errors import LogUnavailable, PipelineInvalid, SinkBusy, SinkRefused
from millrace.base.predicate.arrow import parse_predicate
from millrace.catalog.collection import CollectionInfo
from millrace.client.append_client import AppendClient
from millrace.flows.batch import Batch
from millrace.flows.records import OPERATION, Action, Record
from millrace.flows.sinks.collection import history as rules
from millrace.flows.sinks.collection import sink as sink_module
from millrace.flows.sinks.collection.history import KeyHistory, Row, history_schema
from millrace.flows.sinks.collection.model import History
from millrace.flows.sinks.collection.sink import CollectionSink
from millrace.message.schema import CollectionSchema, FieldSpec
from millrace.pipelines.declaration import pipeline_of
from millrace.testing import Deployment
from tests.docs.code_facts import ROOT
from tests.docs.pages import python_blocks
from tests.docs.test_examples import run as run_block

PLAIN = CollectionSchema(
    (
        FieldSpec("id", "string", nullable=False),
        FieldSpec("city", "string", nullable=True),
        FieldSpec("rank", "float64", nullable=True),
    ),
    "id",
)
SHOWN = ("id", "city", "rank", "valid_from", "valid_to", "current")

BASE = duckdb.connect(config={"threads": 1})
ANSWER = """
with last as (
    select * from feed qualify row_number() over (partition by id, moment order by place desc) = 1
), marked as (
    select *, not gone and not coalesce(lag(gone) over w, true) and {unchanged} as same from last
    window w as (partition by id order by moment)
), runs as (
    select *, sum(case when same then 0 else 1 end) over (partition by id order by moment) as run from marked
), versions as (
    select id, run, gone, arg_max(struct_pack(city := city, rank := rank), moment) as v, min(moment) as valid_from
    from runs group by id, run, gone
), ended as (
    select *, lead(valid_from) over (partition by id order by valid_from) as valid_to from versions
)
select id, v.city as city, v.rank as rank, valid_from, valid_to, valid_to is null as current from ended where not gone
order by id, valid_from
"""
UNCHANGED = {
    (): "false",
    ("city",): "city is not distinct from lag(city) over w",
    ("*",): "city is not distinct from lag(city) over w and rank is not distinct from lag(rank) over w",
}


FOREIGN = History(sequence="at", deletes={"op": ("D",)})


class Told(NamedTuple):
    """A change of a feed."""

    id: str
    at: int
    city: str | None
    rank: float | None
    gone: bool

    def action(self, place: int) -> Action:
        body = {"id": self.id, "at": self.at, "city": self.city, "rank": self.rank, "op": "D" if self.gone else "U"}
        return Action(Record("in", 0, place, b"", b"", 0), self.id, json.dumps(body).encode(), place)


changes = st.builds(
    Told,
    st.sampled_from("ab"),
    st.integers(0, 12),
    st.sampled_from([None, "Bergen", "Oslo"]),
    st.sampled_from([None, 1.0, 2.5]),
    st.sampled_from([False, False, False, True]),
)


def answer(feed: Sequence[Told], columns: tuple[str, ...]) -> list[Row]:
    """What DuckDB makes of the whole feed."""
    columns_of = [(place, *each) for place, each in enumerate(feed)]
    names = ("place", "id", "moment", "city", "rank", "gone")
    types = (pa.int64(), pa.string(), pa.int64(), pa.string(), pa.float64(), pa.bool_())
    rows = zip(*columns_of, strict=True)
    told = pa.table([pa.array(list(each), kind) for each, kind in zip(rows, types, strict=True)], names=names)
    with BASE.cursor() as base:
        base.register("feed", told)
        found = base.execute(ANSWER.format(unchanged=UNCHANGED[columns]))
        return [dict(zip(SHOWN, row, strict=True)) for row in found.fetchall()]


def shown(rows: Sequence[Row]) -> list[Row]:
    """The versions, without rows of changes that made none."""
    versions = [row for row in rows if row["valid_to"] != row["valid_from"]]
    return sorted(({name: row[name] for name in SHOWN} for row in versions), key=lambda r: (r["id"], r["valid_from"]))


class Table:
    """A collection in memory, by its primary key."""

    def __init__(self, history: History, clock: str = "int64") -> None:
        schema = history_schema(PLAIN, history, clock=clock)
        self.rules = KeyHistory(history, CollectionInfo(1, "h", "active", ("c_1v0",), (schema,), {"_default": 1}, 2))
        self.rows: dict[tuple[str, int], Row] = {}
        self.read = 0

        self.late = 0

    def write(self, documents: Sequence[Action], *, again: bool = False) -> int:
        def find(keys: Sequence[Row]) -> Sequence[Row]:
            found = [self.rows[key] for row in keys if (key := (row["id"], row["version"])) in self.rows]
            self.read += len(found)
            return found

        taken, failures = self.rules.changes(documents)
        assert not failures
        written, self.late = self.rules.revise(taken, find, again=again)
        self.rows |= {(each.row["id"], each.row["version"]): each.row for each in written}
        return len(written)


@settings(max_examples=60, deadline=None)
@given(
    feed=st.lists(changes, min_size=1, max_size=25),
    doubles=st.lists(st.integers(0, 24), max_size=8),
    cuts=st.sets(st.integers(1, 32), max_size=6),
    columns=st.sampled_from(sorted(UNCHANGED)),
)
def test_a_history_is_what_duckdb_makes_of_all_changes(
    feed: list[Told], doubles: list[int], cuts: set[int], columns: tuple[str, ...]
) -> None:
    feed = [*feed, *(feed[number % len(feed)] for number in doubles)]
    table = Table(History(sequence="at", deletes={"op": ("D",)}, columns=columns))
    documents = [each.action(place) for place, each in enumerate(feed)]
    bounds = [0, *sorted(each for each in cuts if each < len(feed)), len(feed)]
    for start, end in pairwise(bounds):
        table.write(documents[start:end])
        rows = list(table.rows.values())
        assert shown(rows) == answer(feed[:end], columns)
        for row in rows:
            if row["version"] == 0:
                others = [each["version"] for each in rows if each["id"] == row["id"] and each["version"]]
                assert sorted(others) == list(range(1, row["versions"] + 1))
    before = dict(table.rows)
    last = {(each.id, each.at): action for each, action in zip(feed, documents, strict=True)}
    assert table.write(list(last.values())) == 0, "what comes again changes nothing"
    assert table.rows == before


DAYS = 10
BOUNDED = History(sequence="at", deletes={"op": ("D",)}, horizon_days=DAYS)


class Bounded(Table):
    """The same with a horizon, at a time of the test's."""

    def __init__(self, history: History) -> None:
        super().__init__(history, "timestamp")
        self.history = history
        self.in_hand = 1_000_000

    def at(self, day: int) -> None:
        info = self.rules._collection
        self.rules = KeyHistory(self.history, info, now=day * 86_400.0)

    def expire(self) -> None:
        schema = self.rules._collection.schema.arrow()

        def select(where: str, columns: Sequence[str], limit: int | None) -> list[pa.RecordBatch]:
            whole = pa.Table.from_pylist(list(self.rows.values()), schema=schema)
            found = whole.filter(parse_predicate(where, schema)).select(list(columns)).slice(0, limit)
            return list(found.combine_chunks().to_batches(max_chunksize=2))

        turn, turns = 0, 1
        with patch.object(rules, "ROWS_IN_HAND", self.in_hand), patch.object(rules, "BUCKETS", 8):
            while turn < turns:
                gone, buckets = self.rules.expired(select, most=1000, turn=turn)
                for row in gone.to_pylist():
                    del self.rows[row["id"], row["version"]]
                turn, turns = turn + 1, max(turns, buckets)

    def shown(self) -> list[Row]:
        found = shown(list(self.rows.values()))
        return [
            row | {name: row[name] and round(row[name].timestamp() / 86_400) for name in ("valid_from", "valid_to")}
            for row in found
        ]


def after(rows: Sequence[Row], day: int) -> list[Row]:
    """What rows say about the moments after a day."""
    open_ = [row for row in rows if row["valid_to"] is None or row["valid_to"] > day]
    return [row | {"valid_from": max(row["valid_from"], day)} for row in open_]


def dated(each: Told, place: int) -> Action:
    found = each.action(place)
    body = json.loads(found.body or b"") | {"at": _at(each.at * 86_400_000).isoformat()}
    return found._replace(body=json.dumps(body).encode())


@settings(max_examples=60, deadline=None)
@given(
    batches=st.lists(st.tuples(st.integers(0, 12), st.booleans(), st.lists(changes, max_size=6)), max_size=10),
    shift=st.integers(1, 2),
    columns=st.sampled_from(sorted(UNCHANGED)),
    in_hand=st.sampled_from([1, 3, 1_000_000]),
)
def test_from_the_horizon_on_a_history_is_what_duckdb_makes_of_all_changes(
    batches: list[tuple[int, bool, list[Told]]], shift: int, columns: tuple[str, ...], in_hand: int
) -> None:
    """Changes come late by any time, also before the horizon; rows beyond it are removed at any time."""
    table, feed, day = Bounded(BOUNDED.model_copy(update={"columns": columns})), list[Told](), 0
    table.in_hand = in_hand
    for ahead, expire, some in batches:
        day += ahead
        some = [each._replace(at=max(0, day - shift * each.at)) for each in some]
        table.at(day)
        if some:
            table.write([dated(each, len(feed) + place) for place, each in enumerate(some)])
            feed += some
        if expire:
            table.expire()
            for key in "ab":
                old = [row for row in table.rows.values() if row["id"] == key and row["changed_at"] <= _day(day - DAYS)]
                assert len(old) <= 1, "of each key the newest change at the horizon alone is there"
        if feed:
            assert after(table.shown(), day - DAYS) == after(answer(feed, columns), day - DAYS)


def _day(number: int) -> datetime:
    return _at(number * 86_400_000)


def test_a_change_beyond_the_horizon_is_counted_and_old_rows_of_a_key_that_rests_are_changes_like_others() -> None:
    table = Bounded(BOUNDED)
    table.at(100)
    table.write([dated(Told("a", 5, "Oslo", None, False), 0)])
    assert [row["valid_from"] for row in table.shown()] == [5], "it is valid now, however long ago it began"
    table.write([dated(Told("a", at, "Rome", None, False), at) for at in (80, 95)])
    table.expire()
    assert [(row["valid_from"], row["valid_to"]) for row in table.shown()] == [(80, 95), (95, None)]
    before = dict(table.rows)
    assert table.write([dated(Told("a", 79, "Bergen", None, False), 0)]) == 0
    assert (table.late, table.rows) == (1, before)
    table.write([dated(Told("a", 85, "Bergen", None, False), 0)])
    assert table.late == 0
    assert [(row["valid_from"], row["valid_to"]) for row in table.shown()] == [(80, 85), (85, 95), (95, None)]


def test_a_delete_or_a_change_without_a_version_counts_as_the_newest_at_the_horizon() -> None:
    table = Bounded(BOUNDED.model_copy(update={"columns": ("city",)}))
    table.at(100)
    for at, key, city in ((50, "a", "Oslo"), (95, "a", "Oslo"), (50, "b", "Oslo"), (70, "b", ""), (95, "b", "Rome")):
        table.write([dated(Told(key, at, city or None, None, not city), at)])
    table.expire()
    assert len(table.rows) == 4
    table.write([dated(Told("b", 60, "Bergen", None, False), 0), dated(Told("a", 94, "Bergen", None, False), 0)])
    assert table.late == 1, "a delete came after it"
    assert [(row["id"], row["city"], row["valid_from"], row["valid_to"]) for row in table.shown()] == [
        ("a", "Oslo", 50, 94), ("a", "Bergen", 94, 95), ("a", "Oslo", 95, None), ("b", "Rome", 95, None),
    ]  # fmt: skip


def test_a_late_change_asks_for_no_rows_that_were_removed_long_ago() -> None:
    table, asked = Bounded(BOUNDED), list[int]()
    for day in range(300):
        table.at(day)
        table.write([dated(Told("a", day, "Oslo", None, False), day)])
        if day % 10 == 9:
            table.expire()
    assert len(table.rows) == DAYS + 1
    for late in (297, 296):
        taken, _ = table.rules.changes([dated(Told("a", late, "Rome", None, False), late)])

        def find(wanted: Sequence[Row]) -> Sequence[Row]:
            asked.append(len(wanted))
            return [table.rows[key] for row in wanted if (key := (row["id"], row["version"])) in table.rows]

        with patch.object(rules, "ROWS_AT_ONCE", 200):
            for each in table.rules.revise(taken, find).rows:
                table.rows[each.row["id"], each.row["version"]] = each.row
    assert asked == [1, 200, 99, 1, 10], "then the newest row knows where the others begin"
    table.expire()
    assert len(table.rows) == DAYS + 1


def test_a_change_in_order_reads_one_row_and_a_late_one_those_of_its_key() -> None:
    table = Table(FOREIGN)
    for at in range(100):
        table.write([Told(key, 10 * at, "Oslo", 1.0, False).action(at) for key in "ab"])
    table.read = 0
    assert table.write([Told("a", 1000, "Bergen", None, False).action(100)]) == 2
    assert table.read == 1
    table.read = 0
    assert table.write([Told("a", 5, "Bergen", None, False).action(101)]) == 3, "it, the one before, and their number"
    assert table.read == 101
    late = next(row for row in table.rows.values() if row["changed_at"] == 5)
    assert (late["valid_from"], late["valid_to"], late["id"]) == (5, 10, "a")


def test_rows_of_many_versions_are_read_in_portions() -> None:
    table = Table(FOREIGN)
    keys = "abcdef"
    for at in range(10, 20):
        table.write([Told(key, at, "Oslo", None, False).action(at) for key in keys])
    asked: list[int] = []
    taken, _ = table.rules.changes([Told(key, 0, "Rome", None, False).action(99) for key in keys])

    def find(wanted: Sequence[Row]) -> Sequence[Row]:
        asked.append(len(wanted))
        return [table.rows[row["id"], row["version"]] for row in wanted]

    with patch.object(rules, "ROWS_AT_ONCE", 20):
        table.rules.revise(taken, find)
    assert asked == [6, 18, 18, 18]


def _at(milliseconds: int) -> datetime:
    return datetime(1970, 1, 1, tzinfo=UTC) + timedelta(milliseconds=milliseconds)


def _of_source(place: int, milliseconds: int, city: str | None) -> Action:
    body = None if city is None else json.dumps({"id": "a", "city": city}).encode()
    return Action(Record("in", 0, place, b"a", body, milliseconds), "a", body, place)


def test_without_a_sequence_the_order_of_the_source_counts_though_its_clock_goes_back() -> None:
    table = Table(History(), "timestamp")
    told = [(1000, "Oslo"), (3000, "Rome"), (2000, "Bergen"), (4000, None), (4000, "Kiel"), (5000, "Ulm")]
    for place, (milliseconds, city) in enumerate(told):
        table.write([_of_source(place, milliseconds, city)])
    found = [(row["city"], row["valid_from"], row["valid_to"]) for row in shown(list(table.rows.values()))]
    assert found == [
        ("Oslo", _at(1000), _at(3000)), ("Bergen", _at(3000), _at(4000)), ("Kiel", _at(4000), _at(5000)),
        ("Ulm", _at(5000), None),
    ]  # fmt: skip
    table.write([_of_source(1, 3000, "Rome"), _of_source(9, 3500, "Lund")], again=True)
    assert [row["city"] for row in shown(list(table.rows.values()))] == ["Oslo", "Bergen", "Lund", "Kiel", "Ulm"]


@pytest.mark.parametrize(
    ("document", "reason"),
    [
        ({"id": "a", "city": "Oslo"}, "no place in the history"),
        ({"id": "a", "at": 1, "current": True}, "is the history's"),
        ({"id": "a", "at": "soon"}, "is not a valid int64"),
        ({"id": "a", "at": 1, "town": "Oslo"}, "has no column 'town'"),
        (None, "a tombstone has no sequence"),
    ],
)
def test_a_document_that_has_no_place_is_its_own_failure(document: Any, reason: str) -> None:
    table = Table(FOREIGN)
    bad = Action(Record("in", 0, 1, b"a", b"", 0), "a", None if document is None else json.dumps(document).encode(), 1)
    good = [Told("b", place, "Oslo", None, False).action(place) for place in (0, 2)]
    taken, (failure,) = table.rules.changes([good[0], bad, good[1]])
    assert [each.place for each in taken] == [0, 2]
    assert failure.record.offset == 1
    assert reason in failure.reason


def test_a_collection_without_the_columns_of_a_history_is_refused_with_what_is_missing() -> None:
    def made(schema: CollectionSchema, history: History | None = None) -> KeyHistory:
        info = CollectionInfo(1, "h", "active", ("c_1v0",), (schema,), {"_default": 1}, 2)
        return KeyHistory(history or History(sequence="at"), info)

    whole = history_schema(PLAIN, clock="int64")
    made(whole)
    with pytest.raises(SinkRefused, match="no field 'version' of type int64"):
        made(PLAIN)
    with pytest.raises(SinkRefused, match="primary key"):
        made(CollectionSchema(whole.fields, "id"))
    with pytest.raises(SinkRefused, match="no field 'valid_to' of type int64"):
        made(CollectionSchema(tuple(each for each in whole.fields if each.name != "valid_to"), whole.primary_key))
    strict = (FieldSpec("city", "string", nullable=False), *(e for e in whole.fields if e.name != "city"))
    with pytest.raises(SinkRefused, match="'city' is not nullable"):
        made(CollectionSchema(strict, whole.primary_key))
    with pytest.raises(SinkRefused, match="'changed_at' is string"):
        made(history_schema(PLAIN, clock="string"), History())
    with pytest.raises(SinkRefused, match=r"'town', which history\.columns"):
        made(whole, History(columns=("town",)))


def _declared(**more: Any) -> dict[str, Any]:
    return {
        "id": "x",
        "source": {"kind": "kafka", "bootstrap": ["h:1"], "topics": ["in"]},
        "sink": {"kind": "collection", "collection": "h", "history": {"sequence": "at"}},
        **more,
    }


def test_changes_of_a_key_come_by_one_lane() -> None:
    sink = pipeline_of(_declared()).sink
    assert getattr(sink, "history", None) == History(sequence="at")
    several = {"kind": "kafka", "bootstrap": ["h:1"], "topics": ["in", "other"]}
    with pytest.raises(PipelineInvalid, match="one topic"):
        pipeline_of(_declared(source=several))
    with pytest.raises(PipelineInvalid, match="same name"):
        pipeline_of(_declared(sink={"kind": "collection", "collection": "h", "history": {"valid_to": "current"}}))


# --- in a real collection ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def db(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    with millrace.testing.deployment(tmp_path_factory.mktemp("history") / "data", append_retry_delay=0.01) as made:
        yield made


HISTORY = History(sequence="at", deletes={"op": ("D",)}, columns=("*",))


def _sink(db: Deployment, history: History = HISTORY) -> CollectionSink:
    return CollectionSink(db.settings, "h", flow=f"history-{db['h'].id}", history=history)


def _create(db: Deployment, history: History = HISTORY) -> None:
    if "h" in db.collections():
        db.drop_collection("h")
    db.create_collection("h", history_schema(PLAIN, history, clock="int64"), vchannels=2)


def test_batches_whose_answers_are_lost_and_owners_that_change_make_one_history(db: Deployment) -> None:
    _create(db)
    feed = [Told("ab"[n % 2], at, "Oslo" if n % 3 else "Rome", float(n // 4), n == 8) for n, at in
            enumerate([10, 10, 30, 20, 5, 40, 30, 15, 40, 50, 1, 60])]  # fmt: skip
    documents = [each.action(place) for place, each in enumerate(feed)]
    told = AppendClient.append

    def lost(self: AppendClient, *args: Any, **options: Any) -> Any:
        told(self, *args, **options)
        raise LogUnavailable("the answer was lost")

    owners = [_sink(db), _sink(db)]
    for turn, start in enumerate(range(0, len(feed), 3)):
        batch = Batch("in-0", start, start + 3, documents=documents[start : start + 3])
        with patch.object(AppendClient, "append", lost), pytest.raises(SinkBusy):
            owners[turn % 2].write(batch)
        assert owners[(turn + 1) % 2].write(batch).acknowledged == 3
    found = db["h"].read().to_pylist()
    assert shown(found) == answer(feed, ("*",))
    versions = db["h"].changes_between().read_all().num_rows
    assert owners[0].write(Batch("in-0", 0, 12, documents=documents)).acknowledged == 12
    assert db["h"].changes_between().read_all().num_rows == versions
    for each in owners:
        each.close()


def test_a_redrive_beside_the_running_flow_changes_no_version_twice(db: Deployment) -> None:
    _create(db)
    feed = [Told("a", at, city, None, False) for at, city in [(10, "Oslo"), (20, "Rome"), (15, "Kiel"), (30, "Ulm")]]
    documents = [each.action(place) for place, each in enumerate(feed)]
    with _sink(db) as flow, _sink(db) as redrive:
        flow.write(Batch("in-0", 0, 2, documents=documents[:2], generation=3))
        redrive.write(Batch("in-0", 2, 2, documents=documents[2:3]))
        with pytest.raises(SinkBusy, match="taken it over"):
            flow.write(Batch("in-0", 3, 4, documents=documents[3:], generation=3))
        flow.write(Batch("in-0", 3, 4, documents=documents[3:], generation=3))
        assert flow.standing(["in-0"]) == {"in-0": 4}
    assert shown(db["h"].read().to_pylist()) == answer(feed, ("*",))


def test_a_truncation_closes_what_is_current(db: Deployment) -> None:
    history = History()
    _create(db, history)

    def document(place: int, key: str, city: str) -> Action:
        return Action(Record("in", 0, place, b"", b"", 0), key, json.dumps({"id": key, "city": city}).encode(), None)

    emptied = Action(Record("in", 0, 2, None, None, 0, [(OPERATION, b"t")]), "", None, None)
    with _sink(db, history) as sink:
        sink.write(Batch("in-0", 0, 2, documents=[document(0, "a", "Oslo"), document(1, "b", "Rome")]))
        sink.write(Batch("in-0", 2, 4, documents=[emptied, document(3, "b", "Kiel")]))
    found = [(row["id"], row["city"], row["valid_from"], row["valid_to"]) for row in shown(db["h"].read().to_pylist())]
    assert found == [("a", "Oslo", 0, 2), ("b", "Rome", 1, 2), ("b", "Kiel", 3, None)]
    with _sink(db, History(sequence="at")) as sink, pytest.raises(SinkRefused, match=r"leave out history\.sequence"):
        sink.write(Batch("in-9", 2, 3, documents=[emptied]))


def test_a_flow_removes_what_is_beyond_the_horizon_and_counts_what_comes_later(db: Deployment) -> None:
    if "h" in db.collections():
        db.drop_collection("h")
    db.create_collection("h", history_schema(PLAIN, BOUNDED, clock="timestamp"), vchannels=2)
    today = int(time.time() // 86_400)
    told = [
        *(Told(key, today - ago, "Oslo", float(ago), False) for ago in (40, 30, 20, 5) for key in "ab"),
        Told("c", today - 30, None, None, True), Told("c", today - 15, "Kiel", None, False),
        Told("a", today - 25, "Rome", None, False), Told("a", today - 8, "Rome", None, False),
    ]  # fmt: skip
    documents = [dated(each, place) for place, each in enumerate(told)]
    with patch.object(sink_module, "EXPIRED_SECONDS", 0.0), patch.object(sink_module, "EXPIRED_A_BATCH", 3):
        with _sink(db, BOUNDED) as sink:
            assert sink.write(Batch("in-0", 0, 10, documents=documents[:10])).stale == 0
            late = sink.write(Batch("in-0", 10, 11, documents=documents[10:11]))
            assert (late.acknowledged, late.stale, late.failures) == (1, 1, [])
            assert sink.write(Batch("in-0", 11, 12, documents=documents[11:])).stale == 0
        with _sink(db, BOUNDED) as other:
            assert other.write(Batch("in-0", 11, 12, documents=documents[11:])).repeated == 1
            again = dated(Told("b", today - 5, "Oslo", 5.0, False), 12)
            other.write(Batch("in-0", 12, 13, documents=[again]))
    found = db["h"].read().to_pylist()
    ages = sorted((row["id"], today - round(row["changed_at"].timestamp() / 86_400)) for row in found)
    assert ages == [("a", 5), ("a", 8), ("a", 20), ("b", 5), ("b", 20), ("c", 15)]
    named = db["h"].read(where="current = true", columns=["id"])["id"].to_pylist()
    assert sorted(named) == ["a", "b", "c"]


def test_a_look_beyond_the_horizon_takes_memory_for_a_bounded_number_of_rows_however_many_keys_there_are() -> None:
    """100,000 keys, each with a change without a version and a newer one."""
    history = BOUNDED.model_copy(update={"columns": ("city",)})
    schema = history_schema(PLAIN, history, clock="timestamp")
    made = KeyHistory(history, CollectionInfo(1, "h", "active", ("c_1v0",), (schema,), {"_default": 1}, 2))
    old = datetime(2020, 1, 1, tzinfo=UTC)

    held = [0]

    class Watched(rules._Bucket):
        def _mine(self, rows: pa.Table) -> pa.Table:
            held[0] = max(held[0], self.rows)
            return super()._mine(rows)

    def taken(keys: int) -> tuple[set[str], int]:
        def select(where: str, columns: Sequence[str], limit: int | None) -> Iterator[pa.RecordBatch]:
            hidden = "`valid_to` = `valid_from`" in where
            for first in range(0, 0 if limit is not None else keys, 1000):
                names = [f"key {each}" for each in range(first, first + 1000)]
                values = {"id": pa.array(names), "version": pa.array([1] * 1000)}
                values["changed_at"] = pa.array([old - timedelta(days=hidden)] * 1000, pa.timestamp("us", "UTC"))
                yield pa.record_batch([values[each] for each in columns], names=list(columns))

        found: set[str] = set()
        turn, turns = 0, 1
        while turn < turns:
            gone, turns = made.expired(select, most=1000, turn=turn)
            found |= set(gone["id"].to_pylist())
            turn += 1
        return found, turns

    with patch.object(rules, "ROWS_IN_HAND", 10_000), patch.object(rules, "_Bucket", Watched):
        found, turns = taken(100_000)
    assert len(found) == 100_000
    assert turns >= 16
    assert held[0] <= 10_000 + 1_000, "and a batch of the table"


def test_a_horizon_needs_times_and_its_column() -> None:
    def made(schema: CollectionSchema, history: History) -> KeyHistory:
        info = CollectionInfo(1, "h", "active", ("c_1v0",), (schema,), {"_default": 1}, 2)
        return KeyHistory(history, info)

    for clock in ("timestamp", "timestamp_ntz", "date"):
        made(history_schema(PLAIN, BOUNDED, clock=clock), BOUNDED)
    with pytest.raises(SinkRefused, match=r"'changed_at' is int64, and history\.horizon_days needs one of timestamp"):
        made(history_schema(PLAIN, BOUNDED, clock="int64"), BOUNDED)
    with pytest.raises(
        SinkRefused, match=r"no field 'oldest' of type int64.*collections alter h --add 'oldest:int64\?'"
    ):
        made(history_schema(PLAIN, clock="date"), BOUNDED)


def test_the_page_s_collection_and_predicates(db: Deployment, monkeypatch: pytest.MonkeyPatch) -> None:
    create, valid = python_blocks("docs/history.md")
    monkeypatch.chdir(db.settings.data_dir.parent)
    run_block(create.text, {})
    rows = db["customers_history"]
    history = History(sequence="updated_at", deletes={"op": ("D",)})
    told = [("2026-02-01", "Oslo"), ("2026-04-01", "Rome"), ("2026-05-01", "")]
    documents = [
        Action(Record("in", 0, place, b"", b"", 0), "c17", json.dumps(body).encode(), None)
        for place, (at, city) in enumerate(told)
        if (body := {"id": "c17", "city": city, "updated_at": f"{at}T00:00:00Z", "op": "U" if city else "D"})
    ]
    with CollectionSink(db.settings, "customers_history", flow="page", history=history) as sink:
        sink.write(Batch("in-0", 0, 3, documents=documents))
    with patch.object(type(rows), "read", autospec=True, side_effect=type(rows).read) as read:
        run_block(valid.text, {"db": db})
    where = read.call_args.kwargs["where"]
    assert rows.read(where=where)["city"].to_pylist() == ["Oslo"]
    assert rows.get(("c17", 0))["deleted"].to_pylist() == [True]
    for text, cities in (
        ("current = true", set()),
        ("id = 'c17' AND (valid_to > valid_from OR valid_to IS NULL)", {"Oslo", "Rome"}),
    ):
        assert text in (ROOT / "docs/history.md").read_text()
        assert set(rows.read(where=text)["city"].to_pylist()) == cities
