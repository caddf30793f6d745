"""A declared stream over a Kafka topic: windows, patterns and rows as they are, out of JSON records."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake
from pyspark.errors import StreamingQueryException

import millrace.testing
from millrace.base.errors import ErrorLimitExceeded, InvalidStream
from millrace.base.metrics import Metrics
from millrace.flows.declare.flow import Flow
from millrace.flows.declare.stream import stream_of
from millrace.flows.errors.letter import Redriven, stream_letters
from millrace.flows.errors.selection import Selection
from millrace.flows.sinks.collection.poison import LETTERS
from millrace.flows.spark_host.error_window import reset_window
from millrace.flows.spark_host.frames import batch_of, found_by_spark
from millrace.flows.spark_host.incarnations import Begun, Incarnations
from millrace.flows.spark_host.query import StreamQuery, require_startable
from millrace.flows.spark_host.redrive import redrive
from millrace.flows.spark_host.status import status
from millrace.flows.spark_host.undecoded import Undecoded, again_folder
from millrace.testing import Deployment
from tests.flows.brokers_in_process import Brokers, brokers

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark

DAY = datetime(2013, 1, 1, tzinfo=UTC)


@pytest.fixture(scope="module")
def db(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    with millrace.testing.deployment(tmp_path_factory.mktemp("topics") / "data") as made:
        yield made


@pytest.fixture(scope="module")
def kafka() -> Iterator[Brokers]:
    with brokers() as found:
        yield found


def reached(kafka: Brokers) -> dict[str, Any]:
    """Brokers of tests know no ids of topics, and do not say so."""
    return {"bootstrap": [kafka.address], "socket_timeout_ms": 300}


def send(kafka: Brokers, topic: str, documents: list[Any], partition: int = 0) -> None:
    values = [each if isinstance(each, bytes) or each is None else json.dumps(each).encode() for each in documents]
    kafka.send(topic, [(b"k", value, [("source", b"test")]) for value in values], partition)


def run(spark: SparkSession, db: Deployment, stream: Flow) -> None:
    """Up to now, as the job does."""
    db.settle()
    query = StreamQuery(stream)
    try:
        query(spark, settings=db.settings, metrics=Metrics(), available_now=True).awaitTermination()
    finally:
        query.close()
    db.settle()


def test_a_topic_through_sql_windows_into_a_collection(spark: SparkSession, db: Deployment, kafka: Brokers) -> None:
    db.create_collection(
        "by_hour", {"origin": "string", "hour": "timestamp", "flights": "int64"}, key=("origin", "hour")
    )
    db.catalog.create_collection("undecoded", LETTERS)
    stream = stream_of(
        {
            "name": "hours",
            "source": {
                "kafka": reached(kafka),
                "topics": ["flights"],
                "columns": {"origin": "string", "at": "timestamp"},
                "dead_letters": "undecoded",
                "watermark": {"column": "at", "delay": "1 day"},
                "max_records": 5,
            },
            "sql": "select origin, window.start as hour, count(*) as flights from flights"
            " group by origin, window(at, '1 hour')",
            "sink": {"collection": "by_hour", "mode": "upsert"},
            "output_mode": "update",
            "seconds": 0.0,
        }
    )

    def flights(count: int, origin: str) -> list[dict[str, Any]]:
        return [{"origin": origin, "at": str(DAY + timedelta(minutes=20 * n)), "other": 1.0} for n in range(count)]

    def counted() -> dict[tuple[str, int], int]:
        found = db.collection("by_hour").read().to_pylist()
        return {(each["origin"], each["hour"].hour): each["flights"] for each in found}

    send(kafka, "flights", [*flights(4, "EWR"), b"no json", {"origin": "EWR"}])
    send(kafka, "flights", flights(3, "JFK"), partition=1)
    run(spark, db, stream)
    assert counted() == {("EWR", 0): 3, ("EWR", 1): 1, ("JFK", 0): 3}
    letters = db.collection("undecoded").read(order_by="id").to_pylist()
    assert [each["id"] for each in letters] == ["hours/source/flights-0-4", "hours/source/flights-0-5"]
    assert "malformed" in letters[0]["reason"]
    assert "missing required field `at`" in letters[1]["reason"]
    assert json.loads(letters[0]["row"])["_value"] == "no json"
    told = status(db.settings, stream)
    assert (told.source, told.reads, told.lag_records) == ("kafka:flights", ("kafka:flights",), 0)
    assert (told.rows, told.rejected) == (9, 2)
    send(kafka, "flights", flights(7, "JFK"), partition=2)
    run(spark, db, stream)
    assert counted() == {("EWR", 0): 3, ("EWR", 1): 1, ("JFK", 0): 6, ("JFK", 1): 3, ("JFK", 2): 1}
    assert kafka.position("millrace-hours", "flights", 2) == 7


@pytest.mark.slow
def test_records_as_they_are_go_on_at_their_offsets_and_a_replay_at_a_time(
    spark: SparkSession, db: Deployment, kafka: Brokers
) -> None:
    stream = stream_of(
        {
            "name": "plain",
            "source": {"kafka": reached(kafka), "topics": ["raw"], "record": ["_offset", "_key", "_headers", "_value"]},
            "sql": "select _offset as number, decode(_key, 'utf-8') as key, _headers[0].name as header,"
            " decode(_value, 'utf-8') as value from raw",
            "sink": {"collection": "plain", "create": True},
        }
    )

    def values() -> list[tuple[str, str, str]]:
        rows = db.collection("plain").read(order_by="number").to_pylist()
        return [(each["key"], each["header"], each["value"]) for each in rows]

    send(kafka, "raw", [b"one", b"two"])
    run(spark, db, stream)
    assert values() == [("k", "source", "one"), ("k", "source", "two")]
    send(kafka, "raw", [b"three"])
    kept = Incarnations(db.settings, "plain")
    assert kept.upgrade(stream, keep_state=False).begun.ticks == {
        "raw-0": 2, "raw-1": 0, "raw-2": 0, "raw-3": 0
    }  # fmt: skip
    run(spark, db, stream)
    assert values()[2:] == [("k", "source", "three")]
    with pytest.raises(InvalidStream, match="reads topics, which have no snapshot"):
        kept.replay(stream, Begun(snapshot="now"))
    frame, findings = found_by_spark(spark, db.settings, stream)
    assert findings == []
    assert kafka.address not in frame, "options may hold secrets, and no plan shows them"
    assert batch_of(spark, db.settings, stream).count() == 3


@pytest.mark.slow
def test_a_pattern_over_a_topic(spark: SparkSession, db: Deployment, kafka: Brokers) -> None:
    stream = stream_of(
        {
            "name": "delays",
            "source": {
                "kafka": reached(kafka),
                "topics": ["departures"],
                "columns": {"tail": "string", "at": "timestamp", "delay": "int64"},
                "watermark": {"column": "at", "delay": "1 hour"},
            },
            "operator": {
                "pattern": {
                    "match_recognize": "PARTITION BY tail ORDER BY at MEASURES A.at AS since, A.delay AS before,"
                    " LAST(C.delay) AS worst PATTERN (A B C) WITHIN INTERVAL '1' DAY"
                    " DEFINE B AS delay > A.delay, C AS delay > B.delay"
                }
            },
            "sink": {"collection": "rising", "create": True, "mode": "upsert", "key": "tail, since"},
        }
    )
    delays = {"N1": [0, 5, 20, 45, 10], "N2": [30, 20, 25, 15, 40]}
    for partition, (tail, each) in enumerate(delays.items()):
        rows = [{"tail": tail, "at": str(DAY + timedelta(hours=3 * n)), "delay": delay} for n, delay in enumerate(each)]
        send(kafka, "departures", rows, partition)
    run(spark, db, stream)
    send(kafka, "departures", [{"tail": "end", "at": str(DAY + timedelta(days=day)), "delay": 0} for day in (8, 9)])
    run(spark, db, stream)
    send(kafka, "departures", [{"tail": "end", "at": str(DAY + timedelta(days=10)), "delay": 0}])
    run(spark, db, stream)
    found = db.collection("rising").read().to_pylist()
    assert [(each["tail"], each["before"], each["worst"]) for each in found] == [("N1", 0, 20)]


def test_failed_records_are_letters_and_too_many_stop_the_flow(
    spark: SparkSession, db: Deployment, kafka: Brokers, tmp_path: Path
) -> None:
    db.catalog.create_collection("dead", LETTERS)
    write_deltalake(tmp_path / "table", pa.table({"n": pa.array([], pa.int8())}))
    stream = Flow.of(
        {
            "name": "limited",
            "host": "spark",
            "source": {"kind": "kafka", **reached(kafka), "topics": ["limited"], "columns": {"n": "int64"}},
            "sink": {"kind": "delta", "path": str(tmp_path / "table")},
            "errors": {"collection": "dead", "limit": {"count": 2}, "skip": [{"lane": "limited-0", "position": 0}]},
            "seconds": 0.0,
        }
    )
    send(kafka, "limited", [{"n": 1}, b"no json", {"n": 3}, {"n": 1000}, {"n": 5}])
    with pytest.raises(StreamingQueryException, match=r"ErrorLimitExceeded: limited: 3 records failed .* in dead"):
        run(spark, db, stream)
    with pytest.raises(ErrorLimitExceeded):
        run(spark, db, stream)
    with pytest.raises(ErrorLimitExceeded):
        require_startable(db.settings, [stream])
    reset_window(db.settings, stream)
    send(kafka, "limited", [{"n": 7}, {"n": 2000}])
    run(spark, db, stream)
    assert sorted(DeltaTable(tmp_path / "table").to_pyarrow_table()["n"].to_pylist()) == [3, 5, 7]
    found = db.collection("dead").read().to_pylist()
    assert sorted((each["stream"], each["reason"].partition(":")[0]) for each in found) == [
        ("limited", "INVALID_ARGUMENT"),
        ("limited", "INVALID_ARGUMENT"),
        ("limited/source", "JSON is malformed"),
        ("limited/source", "SKIPPED"),
    ]


def test_letters_of_the_source_are_read_again_once_through_the_transform(
    spark: SparkSession, db: Deployment, kafka: Brokers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    db.catalog.create_collection("bad", LETTERS)

    def declared(column: str) -> Flow:
        return Flow.of(
            {
                "name": "again",
                "host": "spark",
                "source": {"kind": "kafka", **reached(kafka), "topics": ["again"], "columns": {"n": column}},
                "transform": {"sql": "select concat('n', n) as n from again"},
                "sink": {"kind": "delta", "path": str(tmp_path / "table")},
                "errors": {"collection": "bad"},
                "seconds": 0.0,
            }
        )

    def rows() -> list[str]:
        return sorted(DeltaTable(tmp_path / "table").to_pyarrow_table()["n"].to_pylist())

    def letters() -> list[str]:
        return sorted(db.collection("bad").read()["id"].to_pylist())

    numbers, texts = declared("int64"), declared("string")
    send(kafka, "again", [{"n": 1}, {"n": "two"}, b"no json", {"n": "four"}])
    run(spark, db, numbers)
    mine = [f"again/source/again-0-{offset}" for offset in (1, 2, 3)]
    assert (rows(), letters()) == (["n1"], mine)
    low = Selection(lane="again-0", low=1, high=2)
    assert redrive(db.settings, numbers, low, dry_run=True) == Redriven(looked_at=3, selected=2)
    assert redrive(db.settings, numbers, low) == Redriven(looked_at=3, selected=2, queued=2)
    assert redrive(db.settings, numbers) == Redriven(looked_at=3, selected=3, queued=1), "two wait already"
    run(spark, db, numbers)
    assert (rows(), letters()) == (["n1"], mine), "they fail again, and each is one letter"
    Incarnations(db.settings, "again").upgrade(texts, keep_state=True)
    assert redrive(db.settings, texts).queued == 3

    def killed(self: Undecoded) -> None:
        raise RuntimeError("killed before Spark notes the batch")

    with monkeypatch.context() as patch:
        patch.setattr(Undecoded, "done", killed)
        with pytest.raises(StreamingQueryException, match="killed before Spark"):
            run(spark, db, texts)
    run(spark, db, texts)
    assert (rows(), letters()) == (["n1", "nfour", "ntwo"], mine[1:2])
    send(kafka, "again", [{"n": "5"}])
    run(spark, db, texts)
    assert rows() == ["n1", "n5", "nfour", "ntwo"]
    assert not list(again_folder(db.settings, "again").iterdir()), "nothing stays of a redrive"


def test_letters_in_a_topic_are_listed_and_redriven_once(
    spark: SparkSession, db: Deployment, kafka: Brokers, tmp_path: Path
) -> None:
    db.create_collection("narrow", {"id": "int64", "n": "int8"}, key="id")
    kafka.producer.list_topics("topical.dead", timeout=20)  # brokers in a process make no topics on request

    def declared(column: str) -> Flow:
        return Flow.of(
            {
                "name": "topical",
                "host": "spark",
                "source": {
                    "kind": "kafka",
                    **reached(kafka),
                    "topics": ["topical"],
                    "columns": {"id": column, "n": "int64"},
                },
                "transform": {
                    "sql": "select cast(replace(cast(id as string), 'n', '') as bigint) as id, n from topical"
                },
                "sink": {"kind": "collection", "collection": "narrow"},
                "errors": {"topic": "topical.dead", "limit": {"count": 2}},
                "seconds": 0.0,
            }
        )

    def rows() -> list[tuple[int, int]]:
        return sorted((row["id"], row["n"]) for row in db.collection("narrow").read().to_pylist())

    stream, texts = declared("int64"), declared("string")
    send(kafka, "topical", [{"id": 1, "n": 1}, {"id": 2, "n": 1000}, {"id": "n3", "n": 3}, b"no json"])
    with pytest.raises(
        StreamingQueryException, match=r"ErrorLimitExceeded: topical: 3 records failed .* topical\.dead"
    ):
        run(spark, db, stream)
    reset_window(db.settings, stream)
    run(spark, db, stream)
    assert rows() == [(1, 1)]
    found = {(each.lane, each.position): each.stage for each in stream_letters(db.settings, stream)}
    assert found == {
        ("stream-topical", 0): "TASK_PUT",
        ("topical-0", 2): "VALUE_CONVERTER",
        ("topical-0", 3): "VALUE_CONVERTER",
    }
    db.collection("narrow").alter(widen={"n": "int16"})
    Incarnations(db.settings, "topical").upgrade(texts, keep_state=True)
    done = redrive(db.settings, texts)
    assert (done.written, done.queued, done.selected - done.repeated) == (1, 2, 3)
    for _ in range(2):
        run(spark, db, texts)
        assert rows() == [(1, 1), (2, 1000), (3, 3)]
    assert redrive(db.settings, texts).queued == 1, "no JSON is a letter again"
