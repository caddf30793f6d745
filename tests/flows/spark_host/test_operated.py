"""A declared stream with an operator: the same content as its batch, late rows beside it, each row accounted for."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pytest
from pyspark.errors import StreamingQueryException

import millrace.testing
from millrace.base.metrics import Metrics
from millrace.flows.declare.flow import Flow
from millrace.flows.declare.stream import From, Into, Stream, Table, Watermark
from millrace.flows.sinks.collection.poison import LETTERS
from millrace.flows.spark_host.frames import batch_of, found_by_spark
from millrace.message.ids import tick_physical_ms
from millrace.testing import Deployment
from tests.flows.spark_host.test_running import exposition, heard, run

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.timeout(300)]
DAY = datetime(2026, 11, 24, tzinfo=UTC)
END = "zz"
"""The key of the rows that move the watermark behind all others."""


@pytest.fixture(scope="module")
def db(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    with millrace.testing.deployment(tmp_path_factory.mktemp("operated") / "data") as made:
        yield made


def events(*rows: tuple[int, str, float | None, int]) -> list[dict[str, Any]]:
    return [
        {"id": number, "k": k, "at": None if at is None else DAY + timedelta(minutes=at), "v": v}
        for number, k, at, v in rows
    ]


def declared(name: str, operator: dict[str, Any], source: dict[str, Any] | None = None, **changes: Any) -> Flow:
    given = {"columns": ("id", "k", "at", "v"), "watermark": Watermark(column="at", delay="20 minutes")}
    return Stream(
        name=name,
        source=From(collection=f"{name}_events", **(given | (source or {}))),
        operator=operator,
        **({"sink": Into(collection=name)} | changes),
    )


def content(rows: Any) -> Counter[tuple[Any, ...]]:
    return Counter(tuple(str(each) for each in row) for row in rows if END not in row)


def of_collection(db: Deployment, name: str, columns: list[str]) -> Counter[tuple[Any, ...]]:
    return content(tuple(row[each] for each in columns) for row in db.collection(name).read().to_pylist())


def of_batch(spark: SparkSession, db: Deployment, stream: Flow, columns: list[str]) -> Counter[tuple[Any, ...]]:
    frame = batch_of(spark, db.settings, stream).select(columns)
    return content(tuple(row.values()) for row in frame.toArrow().to_pylist())


ROWS = [(n, "abc"[n % 3], n * 7 % 60 + 20 * (n // 10), n * n % 11) for n in range(60)]


def through(spark: SparkSession, db: Deployment, stream: Flow, metrics: Metrics | None = None) -> None:
    source = db.create_collection(
        f"{stream.name}_events", {"id": "int64", "k": "string", "at": "timestamp?", "v": "int64"}, key="id"
    )
    # Sorted by time, but for what the watermark forgives.
    rows = sorted(ROWS, key=lambda row: row[2] + row[0] % 4 * 4)
    for number, begin in enumerate(range(0, 60, 20)):
        source.insert(events(*rows[begin : begin + 20]))
        run(spark, db, stream, metrics)
        source.insert(events((1000 + number, END, 0.0 if number < 2 else 10_000.0, 0))) if number == 2 else None
    run(spark, db, stream, metrics)
    source.insert(events((2000, END, 20_000.0, 0)))
    run(spark, db, stream, metrics)


WINDOWS = {
    "windows": {"keys": ["k"], "size": "30 minutes", "lateness": "5 minutes",
        "aggregates": {"n": "count(*)", "high": "max(v)"}}
}  # fmt: skip
ANSWER = {"k": "string", "window_start": "timestamp", "window_end": "timestamp", "n": "int64", "high": "int64?"}


@pytest.mark.slow
def test_windows_are_those_of_the_batch_and_what_is_late_goes_where_it_is_told(
    spark: SparkSession, db: Deployment
) -> None:
    db.create_collection("windowed", ANSWER, key=("k", "window_start"))
    late = {"id": "int64", "k": "string", "at": "timestamp?", "v": "int64", "late_by": "int64", "reason": "string"}
    db.create_collection("windowed_late", late | {"window_start": "timestamp?"}, key="id")
    stream = declared("windowed", WINDOWS, late="windowed_late", seconds=0.0)
    metrics = Metrics()
    through(spark, db, stream, metrics)
    wanted = of_batch(spark, db, stream, list(ANSWER))
    assert len(wanted) > 9
    assert of_collection(db, "windowed", list(ANSWER)) == wanted

    source = db.collection("windowed_events")
    source.insert(events((3000, "a", 1.0, 1), (3001, "b", None, 1), (3002, END, 30_000.0, 1)))
    run(spark, db, stream, metrics)
    assert of_collection(db, "windowed", list(ANSWER)) == wanted, "what was answered stays"
    aside = db.collection("windowed_late").read().to_pylist()
    assert {(row["id"], row["reason"], row["window_start"]) for row in aside} == {
        (3000, "late", DAY), (3001, "no time", None),
    }  # fmt: skip
    told = heard(db, stream, lambda each: each.rows == 3)
    assert told.operated is not None
    assert (told.rows, told.late, told.operated["taken"], told.operated["rejected"]) == (3, 1, 1, 1)
    assert told.state_rows == 2, "the windows of the two newest rows"
    assert told.state_bytes is not None
    assert told.state_bytes > 0
    assert told.watermark == (DAY + timedelta(minutes=30_000 - 20)).isoformat()
    exposed = exposition(metrics)
    for outcome, count in (("taken", 63.0), ("late", 1.0), ("rejected", 1.0), ("corrected", 0.0)):
        sample = f'millrace_flow_operated_total{{flow="windowed",outcome="{outcome}"}}'
        assert f"{sample} {count}" in exposed, (outcome, exposed)
    plan, findings = found_by_spark(spark, db.settings, stream)
    assert "Operator windows, keyed by k, in 2 shards, 20 minutes behind the newest at" in plan
    assert "answers: k string, window_start" in plan
    assert findings == []


@pytest.mark.slow
def test_letters_of_late_rows_count_into_the_limit(spark: SparkSession, db: Deployment) -> None:
    db.create_collection("limited", ANSWER, key=("k", "window_start"))
    late = {"id": "int64", "k": "string", "at": "timestamp?", "v": "int8", "late_by": "int64", "reason": "string"}
    db.create_collection("limited_late", late | {"window_start": "timestamp?"}, key="id")
    db.catalog.create_collection("limited_dead", LETTERS)
    plain = declared("limited", WINDOWS, late="limited_late", seconds=0.0)
    stream = Flow.of(plain.to_json() | {"errors": {"collection": "limited_dead", "limit": {"count": 0}}})
    source = db.create_collection(
        "limited_events", {"id": "int64", "k": "string", "at": "timestamp?", "v": "int64"}, key="id"
    )
    source.insert(events((1, "a", 1.0, 1), (2, "a", 10_000.0, 1)))
    run(spark, db, stream)
    source.insert(events((3, "a", 2.0, 1), (4, "a", 3.0, 1000), (5, "a", 20_000.0, 1)))
    with pytest.raises(StreamingQueryException, match=r"ErrorLimitExceeded: limited: 1 records failed"):
        run(spark, db, stream)
    assert db.collection("limited_dead").read()["stream"].to_pylist() == ["limited/late"]
    assert db.collection("limited_late").read()["id"].to_pylist() == [3]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "operator", "columns"),
    [
        ("distinct_", {"distinct": {"keys": ["k", "v"], "within": "90 minutes"}},
            {"id": "int64", "k": "string", "at": "timestamp", "v": "int64"}),
        (
            "rising",
            {"pattern": {"match_recognize": "PARTITION BY k ORDER BY at, id MEASURES A.id AS first, LAST(B.id) AS"
                " last PATTERN (A B B) WITHIN INTERVAL '2' HOUR DEFINE B AS v > PREV(v)"}},
            {"k": "string", "first": "int64", "last": "int64"},
        ),
    ],
)  # fmt: skip
def test_operators_declared_give_what_their_batch_gives(
    spark: SparkSession, db: Deployment, name: str, operator: dict[str, Any], columns: dict[str, str]
) -> None:
    db.create_collection(name, columns, key=next(each for each in ("id", "first") if each in columns))
    stream = declared(name, operator, seconds=0.0)
    through(spark, db, stream)
    wanted = of_batch(spark, db, stream, list(columns))
    assert wanted
    assert of_collection(db, name, list(columns)) == wanted


@pytest.mark.slow
def test_an_as_of_join_waits_for_the_side_that_is_behind_and_rows_ahead_of_the_log_move_nothing(
    spark: SparkSession, db: Deployment
) -> None:
    fields = {"id": "int64", "k": "string", "at": "timestamp", "v": "int64"}
    source = db.create_collection("measured_events", fields, key="id")
    measures = db.create_collection("measures", {"k": "string", "at": "timestamp", "temp": "int64"}, key=("k", "at"))
    columns = fields | {"temp": "int64?"}
    db.create_collection("measured", columns, key="id")
    late = {"late_by": "int64", "reason": "string", "window_start": "timestamp?"}
    both = {
        "id": "int64?",
        "k": "string",
        "at": "timestamp",
        "v": "int64?",
        "right_side": "bool",
        "right_temp": "int64?",
    }
    db.create_collection("measured_late", both | late, generated_key="key")
    joined = {"collection": "measures", "keys": ["k"], "time": "at", "columns": {"temp": "temp"}}
    mark = Watermark(column="at", delay="1 minute", max_ahead="100 days")
    given = {"columns": ("id", "k", "at", "v", "_time_tick"), "watermark": mark}
    stream = declared("measured", {"as_of": joined}, given, late="measured_late", seconds=0.0)

    def measured(*each: tuple[str, float, int]) -> None:
        measures.insert([{"k": k, "at": DAY + timedelta(minutes=at), "temp": temp} for k, at, temp in each])

    source.insert(events(*[(n, "ab"[n % 2], 10.0 * n, 0) for n in range(6)], (99, "a", 600_000.0, 0)))
    run(spark, db, stream)
    measured(("a", 5, 1), ("b", 25, 2))
    run(spark, db, stream)
    measured(("a", 35, 3))
    for number, at in enumerate((10_000.0, 20_000.0)):
        source.insert(events((1000 + number, END, at, 0)))
        measured((END, at, 0))
        run(spark, db, stream)
    found = {row["id"]: row["temp"] for row in db.collection("measured").read().to_pylist() if row["k"] != END}
    assert found == {0: None, 1: None, 2: 1, 3: 2, 4: 3, 5: 2}
    assert of_collection(db, "measured", list(columns)) == of_batch(spark, db, stream, list(columns))
    measured(("a", 100, 4))
    run(spark, db, stream)
    aside = db.collection("measured_late").read().to_pylist()
    assert {(row["id"], row["reason"], row["right_side"], row["right_temp"]) for row in aside} == {
        (99, "ahead of the log", False, None), (None, "late", True, 4),
    }  # fmt: skip


@pytest.mark.slow
def test_windows_go_by_the_time_of_the_log(spark: SparkSession, db: Deployment) -> None:
    source = db.create_collection("arrived_events", {"id": "int64", "k": "string"}, key="id")
    answer = {"k": "string", "window_start": "timestamp", "window_end": "timestamp", "n": "int64"}
    db.create_collection("arrived", answer, key=("k", "window_start"))
    windows = {"windows": {"keys": ["k"], "size": "1 second", "aggregates": {"n": "count(*)"}}}
    given = {"columns": ("k",), "watermark": Watermark(column="_log_time", delay="1 second")}
    stream = declared("arrived", windows, given, seconds=0.0)
    for number in range(4):
        source.insert([{"id": 10 * number + each, "k": "ab"[each % 2]} for each in range(10)])
        run(spark, db, stream)
    found = of_collection(db, "arrived", list(answer))
    assert found
    assert found <= of_batch(spark, db, stream, list(answer))


@pytest.mark.slow
def test_a_collection_has_the_time_of_the_log_as_a_field(spark: SparkSession, db: Deployment) -> None:
    source = db.create_collection("first_arrived_events", {"id": "int64", "k": "string"}, key="id")
    db.create_collection("first_arrived", {"k": "string", "log_time": "timestamp"}, key="k")
    late = {
        "k": "string?",
        "log_time": "timestamp?",
        "late_by": "int64",
        "window_start": "timestamp?",
        "reason": "string",
    }
    db.create_collection("arrived_late", late, generated_key="key")
    given = {"columns": ("k",), "watermark": Watermark(column="_log_time", delay="1 second")}
    distinct = {"distinct": {"keys": ["k"], "within": "1 day"}}
    stream = declared("first_arrived", distinct, given, seconds=0.0, late=Into(collection="arrived_late"))
    written = []
    for number in range(3):  # a run takes longer than the watermark's delay
        written.append(source.insert([{"id": 10 * number + each, "k": "ab"[each]} for each in range(2)]))
        run(spark, db, stream)
    found = db.collection("first_arrived").read(order_by="k").to_pylist()
    assert [each["k"] for each in found] == ["a", "b"]
    arrived = datetime.fromtimestamp(tick_physical_ms(written[0].last_tick) / 1000, UTC)
    assert [each["log_time"] for each in found] == [arrived, arrived]
    assert db.collection("arrived_late").count() == 0


@pytest.mark.slow
def test_a_temporal_join_has_the_version_that_was_valid_and_a_table_that_of_its_moment(
    spark: SparkSession, db: Deployment
) -> None:
    source = db.create_collection(
        "priced_events", {"id": "int64", "k": "string", "at": "timestamp", "v": "int64"}, key="id"
    )
    prices = db.create_collection("prices", {"k": "string", "price": "int64"}, key="k")
    columns = {"id": "int64", "k": "string", "at": "timestamp", "v": "int64", "price": "int64?"}
    db.create_collection("priced", columns, key="id")
    db.create_collection("joined", {"id": "int64", "price": "int64"}, key="id")
    moments = []

    def moment() -> None:
        time.sleep(0.05)  # between two ticks of the log's clock, which is this machine's
        moments.append(datetime.now(UTC))
        time.sleep(0.05)

    moment()
    prices.upsert([{"k": "a", "price": 10}, {"k": "b", "price": 7}])
    moment()
    prices.upsert([{"k": "a", "price": 20}])
    moment()
    prices.delete(["a"])
    moment()
    prices.upsert([{"k": "a", "price": 30}])
    moment()
    source.insert([{"id": n, "k": "a", "at": each, "v": 0} for n, each in enumerate(moments)])
    source.insert([{"id": 10 + n, "k": "b", "at": each, "v": 0} for n, each in enumerate(moments)])
    versions = {"collection": "prices", "keys": ["k"], "time": "_log_time", "columns": {"price": "price"}}
    stream = declared("priced", {"as_of": versions}, seconds=0.0)
    run(spark, db, stream)
    source.insert([{"id": 99, "k": END, "at": datetime.now(UTC) + timedelta(hours=2), "v": 0}])
    run(spark, db, stream)
    source.insert([{"id": 100, "k": END, "at": datetime.now(UTC) + timedelta(hours=3), "v": 0}])
    run(spark, db, stream)
    found = {row["id"]: row["price"] for row in db.collection("priced").read().to_pylist() if row["k"] != END}
    assert found == {
        **dict(enumerate([None, 10, 20, None, 30])), **{10 + n: each for n, each in enumerate([None, 7, 7, 7, 7])},
    }  # fmt: skip
    assert of_collection(db, "priced", list(columns)) == of_batch(spark, db, stream, list(columns))
    told = heard(db, stream, lambda each: each.rows == 1)
    assert told.operated is not None
    assert told.operated["late"] == 0

    table = Table(collection="prices", at=moments[2].isoformat())
    at_once = Stream(
        name="joined", source="priced_events", sink=Into(collection="joined", mode="upsert"),
        tables={"prices_then": table},
        sql="select e.id, p.price from priced_events e join prices_then p on e.k = p.k", seconds=0.0,
    )  # fmt: skip
    run(spark, db, at_once)
    rows = {row["id"]: row["price"] for row in db.collection("joined").read().to_pylist()}
    assert rows == {**dict.fromkeys(range(5), 20), **dict.fromkeys(range(10, 15), 7)}
