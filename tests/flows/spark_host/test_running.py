"""A declared stream at work.

Windows into a collection, the same as its batch and as DuckDB has it; lag, late rows, redrive, back-pressure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import duckdb
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from prometheus_client import generate_latest
from pyspark.errors import StreamingQueryException

import millrace.testing
from millrace.base.deadline import Deadline, poll_until
from millrace.base.errors import InvalidStream
from millrace.base.metrics import Metrics
from millrace.demo.streams import HOURLY, flights_hourly
from millrace.flows.declare.flow import Flow
from millrace.flows.declare.stream import From, Into, Stream, Table, Watermark
from millrace.flows.errors.letter import Redriven
from millrace.flows.sinks.collection.poison import LETTERS
from millrace.flows.spark_host.frames import batch_of, found_by_spark
from millrace.flows.spark_host.incarnations import Begun, Incarnations
from millrace.flows.spark_host.query import StreamQuery
from millrace.flows.spark_host.redrive import redrive
from millrace.flows.spark_host.status import StreamStatus, status
from millrace.runtime.job import error_json
from millrace.testing import Deployment

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = pytest.mark.spark

FLIGHTS = {
    "id": "int64", "origin": "string", "time_hour": "timestamp", "dep_delay": "float64?", "dep_time": "float64?",
    "arr_delay": "float64?", "carrier": "string?",
}  # fmt: skip
DAY = datetime(2013, 1, 1, tzinfo=UTC)


@pytest.fixture(scope="module")
def db(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    with millrace.testing.deployment(tmp_path_factory.mktemp("streams") / "data") as made:
        yield made


def flights(start: int, count: int, *, day: int = 0) -> pa.Table:
    numbers = range(start, start + count)
    return pa.table(
        {
            "id": list(numbers),
            "origin": [("EWR", "JFK")[n % 2] for n in numbers],
            "time_hour": [DAY + timedelta(days=day, hours=n % 5) for n in numbers],
            "dep_delay": [None if n % 7 == 0 else float(n % 40 - 5) for n in numbers],
            "dep_time": [None if n % 7 == 0 else 900.0 for n in numbers],
            "arr_delay": [float(n % 30) for n in numbers],
            "carrier": [f"c{n % 3}" for n in numbers],
        }
    )


def hourly(into: str, source: str, **changes: Any) -> Flow:
    return Stream(
        name=into,
        source=From(collection=source, watermark=Watermark(column="time_hour", delay="1 day")),
        transform=flights_hourly,
        sink=Into(collection=into, mode="upsert"),
        output_mode="update",
        **changes,
    )


def run(spark: SparkSession, db: Deployment, stream: Flow, metrics: Metrics | None = None) -> None:
    """Up to now, as the job does."""
    db.settle()
    query = StreamQuery(stream)
    try:
        query(spark, settings=db.settings, metrics=metrics or Metrics(), available_now=True).awaitTermination()
    finally:
        query.close()
    db.settle()


def heard(db: Deployment, stream: Flow, condition: Callable[[StreamStatus], bool]) -> StreamStatus:
    """How a stream is doing, once its last micro-batch was heard of: Spark tells that behind the batch."""
    seen: list[StreamStatus] = []

    def look() -> bool:
        seen.append(status(db.settings, stream))
        return condition(seen[-1])

    assert poll_until(look, Deadline.after(30), interval=0.05), seen[-1]
    return seen[-1]


def exposition(metrics: Metrics) -> str:
    return generate_latest(metrics.registry).decode()


def counted(rows: Any) -> Counter[tuple[Any, ...]]:
    return Counter(tuple(round(each, 6) if isinstance(each, float) else each for each in row) for row in rows)


def rows_of(db: Deployment, name: str) -> Counter[tuple[Any, ...]]:
    table = db.collection(name).read()
    table = table.set_column(1, "hour", table["hour"].cast(pa.timestamp("us")))
    return counted(row.values() for row in table.to_pylist())


def by_duckdb(flights: pa.Table) -> Counter[tuple[Any, ...]]:
    """The same question, by another engine."""
    flights = flights.set_column(2, "time_hour", flights["time_hour"].cast(pa.timestamp("us")))
    found = (
        duckdb.connect()
        .from_arrow(flights)
        .query(
            "f",
            "select origin, date_trunc('hour', time_hour), count(*), count(dep_time), count(*) - count(dep_time),"
            " count(*) filter (dep_delay >= 15), avg(dep_delay), max(dep_delay), avg(arr_delay), count(distinct"
            " carrier)"
            " from f group by 1, 2",
        )
    )
    return counted(found.fetchall())


@pytest.mark.slow
def test_windows_are_the_same_as_a_stream_as_a_batch_and_by_duckdb(
    spark: SparkSession, db: Deployment, tmp_path: Path
) -> None:
    source = db.create_collection("flights", FLIGHTS, key="id", vchannels=2)
    db.create_collection("by_hour", HOURLY, key=("origin", "hour"), vchannels=2)
    stream = hourly("by_hour", "flights", seconds=0.0)
    plan, findings = found_by_spark(spark, db.settings, stream)
    assert "EventTimeWatermark" in plan
    assert findings == []
    metrics = Metrics()
    begun = source.insert(flights(0, 100)).last_tick
    run(spark, db, stream, metrics)
    source.insert(flights(100, 100))
    source.insert(flights(1000, 10, day=9))
    run(spark, db, stream, metrics)
    wanted = by_duckdb(source.read())
    assert len(wanted) == 20
    assert rows_of(db, "by_hour") == wanted, "started again, it goes on with its state"
    batch = batch_of(spark, db.settings, stream).selectExpr("* except (hour)", "cast(hour as timestamp_ntz) as hour")
    assert counted(batch.select(*HOURLY).collect()) == wanted, "one way to declare, two ways to run"
    for bounds, first in ({"until": begun}, True), ({"after": begun}, False):
        part = source.read().filter((pc.field("id") < 100) if first else (pc.field("id") >= 100))
        asked = batch_of(spark, db.settings, stream, **bounds).selectExpr(
            "* except (hour)", "cast(hour as timestamp_ntz) as hour"
        )
        assert counted(asked.select(*HOURLY).collect()) == by_duckdb(part), bounds
    told = heard(db, stream, lambda each: each.rows == 110)
    assert (told.rows, told.rejected, told.incarnation) == (110, 0, 1)
    assert told.lag_seconds is not None
    assert told.watermark is not None
    rows_in = 'millrace_flow_rows_total{flow="by_hour",lane="stream-by_hour",outcome="in"} 210.0'
    assert poll_until(lambda: rows_in in exposition(metrics), Deadline.after(30), interval=0.05), (
        "the file is written before it is counted"
    )
    exposed = exposition(metrics)
    for sample in (
        "flow_lag_seconds",
        "flow_watermark_seconds",
        "flow_state_rows",
        "flow_state_bytes",
    ):
        assert f'millrace_{sample}{{flow="by_hour"}}' in exposed
    assert 'millrace_flow_batches_total{flow="by_hour",lane="stream-by_hour"}' in exposed
    # Late rows: Spark drops them behind the watermark, and they are counted.
    source.insert(flights(2000, 10))
    run(spark, db, stream)
    heard(db, stream, lambda each: each.late > 0)
    assert rows_of(db, "by_hour") != by_duckdb(source.read())
    # A replay comes to the same by upserts, now with what was late.
    Incarnations(db.settings, "by_hour").replay(stream, Begun(snapshot="now"))
    run(spark, db, stream)
    assert rows_of(db, "by_hour") == by_duckdb(source.read())


@pytest.mark.slow
def test_a_corrected_declaration_runs_and_makes_its_sink_s_collection(spark: SparkSession, db: Deployment) -> None:
    db.create_collection("made_from", FLIGHTS, key="id").insert(flights(0, 20))
    into = Into(collection="made", mode="upsert", create=True, key="origin")

    def declared(column: str, **changes: Any) -> Flow:
        sql = f"select origin, max({column}) as latest from made_from group by origin"
        return Stream(name="corrected", source="made_from", sql=sql, sink=into, output_mode="update", **changes)

    with pytest.raises(InvalidStream, match="no_such_column"):
        run(spark, db, declared("no_such_column"))
    assert not Incarnations(db.settings, "corrected").state.handed
    assert "made" not in [each.name for each in db.catalog.collections()]
    run(spark, db, declared("id"))
    db.settle()
    made = db.collection("made")
    assert counted(row.values() for row in made.read().to_pylist()) == Counter([("EWR", 18), ("JFK", 19)])
    assert list(made.definition.schema.key_names) == ["origin"]
    with pytest.raises(InvalidStream, match="upgrade corrected --keep-state"):
        run(spark, db, declared("id", version=2))


@pytest.mark.slow
def test_without_a_watermark_it_is_said_that_state_grows(spark: SparkSession, db: Deployment) -> None:
    if "grows" not in db.collections():
        db.create_collection("grows", FLIGHTS, key="id")
    unbounded = Stream(
        name="unbounded", source="grows", sql="select origin, count(*) n from grows group by origin", sink="grows"
    )
    _, findings = found_by_spark(spark, db.settings, unbounded)
    assert any("its state grows without a bound" in str(each) for each in findings), findings
    assert any(each.level == "error" and each.field == "sink" and "no column 'n'" in each.words for each in findings)
    timed = From(collection="grows", watermark=Watermark(column="time_hour", delay="1 day"))
    if "names" not in db.collections():
        db.create_collection("names", {"origin": "string", "name": "string"}, key="origin")
    for sql, words in (
        ("select origin, count(*) n from grows group by origin", "Aggregate by [origin], without an event time"),
        ("select distinct id from grows", "by [id], without an event time"),
        ("select a.id from grows a join grows b on a.id = b.id", "Join by [(id = id)], without an event time"),
        ("select origin, count(*) n from grows group by origin, window(time_hour, '1 hour')", ""),
        ("select distinct id, time_hour from grows", ""),
        ("select a.id from grows a join grows b on a.id = b.id and a.time_hour between b.time_hour and b.time_hour +"
            " interval 1 hour", ""),
        ("select a.id, b.name from grows a join names b using (origin)", ""),
    ):  # fmt: skip
        tables = {"names": Table(collection="names")} if "join names" in sql else {}
        asked = Stream(name="asked", source=timed, sql=sql, sink={"function": "builtins:print"}, tables=tables)
        said = [each.words for each in found_by_spark(spark, db.settings, asked)[1]]
        assert len(said) == (1 if words else 0), (sql, said)
        assert words in "".join(said), (sql, said)
    plain = Stream(
        name="plain",
        source="grows",
        sql="select a.id from grows a join names using (origin)",
        sink={"function": "builtins:print"},
        tables={"names": Table(collection="names")},
    )
    assert found_by_spark(spark, db.settings, plain)[1] == [], "a join with a table has no state"
    wrong = Stream(name="wrong", source="grows", sql="select nothing from grows", sink="grows")
    [finding] = found_by_spark(spark, db.settings, wrong)[1]
    assert (finding.level, finding.field) == ("error", "sql")


def halves(frame: DataFrame) -> DataFrame:
    """Some of the rows are too large for the sink's field."""
    return frame.selectExpr("id", "id * 100 as small")


@pytest.mark.slow
def test_poison_rows_wait_as_letters_and_go_in_once_the_sink_takes_them(spark: SparkSession, db: Deployment) -> None:
    source = db.create_collection("numbers", {"id": "int64"}, key="id")
    db.create_collection("strict", {"id": "int64", "small": "int8?"}, key="id")
    db.catalog.create_collection("letters", LETTERS)
    stream = Stream(
        name="poison",
        source="numbers",
        transform=halves,
        sink=Into(collection="strict", mode="upsert", dead_letters="letters"),
    )
    source.insert({"id": [1, 2, 3]})
    run(spark, db, stream)
    told = heard(db, stream, lambda each: each.rows == 3)
    assert (told.rows, told.out, told.rejected) == (3, 1, 2), "in = out + rejected"
    assert redrive(db.settings, stream) == Redriven(looked_at=2, selected=2, failed_again=2)
    db.collection("strict").alter(widen={"small": "int16"})
    db.settle()
    assert redrive(db.settings, stream) == Redriven(looked_at=2, selected=2, written=2)
    assert redrive(db.settings, stream) == Redriven()
    db.settle()
    assert sorted(db.collection("strict").read()["small"].to_pylist()) == [100, 200, 300]


@pytest.mark.slow
def test_a_change_of_the_source_s_schema_ends_the_query_and_the_next_start_goes_on(
    spark: SparkSession, db: Deployment
) -> None:
    source = db.create_collection("changing", {"id": "int64"}, key="id")
    db.create_collection("changed", {"id": "int64"}, key="id")
    stream = Stream(
        name="changing", source=From(collection="changing", max_bytes=1), sql="select id from changing", sink="changed"
    )
    source.insert({"id": [1]})
    run(spark, db, stream)
    query = StreamQuery(stream)
    started = query(spark, settings=db.settings, metrics=Metrics())
    source.insert([{"id": 2, "more": "x"}], evolve=True)
    db.settle()
    try:
        with pytest.raises(StreamingQueryException) as ended:
            started.awaitTermination(90)
        assert error_json(ended.value)["code"] == "SCHEMA_CHANGED"
        assert error_json(ended.value)["retriable"], "so whoever supervises it starts it again"
    finally:
        started.stop()
        query.close()
    run(spark, db, stream)
    assert sorted(db.collection("changed").read()["id"].to_pylist()) == [1, 2]


def test_a_session_keeps_no_listener_of_a_query_that_has_ended(spark: SparkSession, db: Deployment) -> None:
    def listeners() -> int:
        return sum("Python" in each.getClass().getName() for each in spark.streams._jsqm.listListeners())

    db.create_collection("heard", {"id": "int64"}, key="id")
    db.create_collection("heard_of", {"id": "int64"}, key="id")
    stream = Stream(name="heard", source=From(collection="heard"), sql="select id from heard", sink="heard_of")
    query = StreamQuery(stream)
    try:
        for _ in range(2):  # as a job starts it again
            assert poll_until(lambda: listeners() == 0, Deadline.after(60), interval=0.05), listeners()
            started = query(spark, settings=db.settings, metrics=Metrics())
            assert listeners() == 1
            started.stop()
    finally:
        query.close()
    assert poll_until(lambda: listeners() == 0, Deadline.after(60), interval=0.05), listeners()


@pytest.mark.slow
def test_what_waits_is_taken_in_batches_of_bounded_size_and_upgrades_go_on_from_there(
    spark: SparkSession, db: Deployment
) -> None:
    source = db.create_collection("many", {"id": "int64"}, key="id")
    db.create_collection("taken", {"id": "int64"}, key="id")
    for part in range(4):
        source.insert({"id": list(range(part * 10, part * 10 + 10))})
        db.settle()
    stream = Stream(name="bounded", source=From(collection="many", max_bytes=1, columns=("id",)), sink="taken")
    run(spark, db, stream)
    heard(db, stream, lambda each: each.out == 40)
    kept = Incarnations(db.settings, "bounded")
    batches = list((kept.checkpoint(kept.state) / "commits").glob("[0-9]*"))
    assert len(batches) >= 2, "a batch takes no more than it is told to"
    for version, keep_state in ((2, True), (3, False)):
        changed = stream.model_copy(update={"version": version})
        with pytest.raises(InvalidStream, match="upgrade bounded"):
            run(spark, db, changed)
        kept.upgrade(changed, keep_state=keep_state)
        source.insert({"id": list(range(version * 20, version * 20 + 20))})
        run(spark, db, changed)
        found = sorted(db.collection("taken").read()["id"].to_pylist())
        assert found == list(range(version * 20 + 20)), "it goes on where it was, with its checkpoint or a new one"


@pytest.mark.slow
def test_a_stream_of_one_channel_has_the_rows_of_that_one_alone(spark: SparkSession, db: Deployment) -> None:
    source = db.create_collection("parted", {"id": "int64"}, key="id", vchannels=3)
    db.create_collection("of_one", {"id": "int64"}, key="id")
    channel = source.definition.vchannels[1]
    given = From(collection="parted", channels=(channel,), columns=("id",))
    stream = Stream(name="of_one", source=given, sink="of_one", seconds=0.0)
    for part in range(2):
        source.insert({"id": list(range(part * 20, part * 20 + 20))})
        run(spark, db, stream)
    own = sorted(source.changes_between(channels=[channel]).read_all()["id"].to_pylist())
    assert 0 < len(own) < 40
    assert sorted(db.collection("of_one").read()["id"].to_pylist()) == own
    assert sorted(row["id"] for row in batch_of(spark, db.settings, stream).collect()) == own
