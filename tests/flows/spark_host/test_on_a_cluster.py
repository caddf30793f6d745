"""Declared streams on workers that share nothing with the driver, which goes with its folder and begins elsewhere."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import duckdb
import psutil
import pyarrow as pa
import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

import millrace
from millrace.base.deadline import Deadline, poll_until
from millrace.base.settings import Settings
from millrace.brokers.kafka import KafkaBroker
from millrace.client.database import Database, connect
from millrace.flows.sinks.collection.poison import LETTERS
from millrace.flows.sinks.delta.sink import OUTPUTS
from millrace.flows.spark_host.incarnations import newest_batch
from millrace.message.schema import CollectionSchema, FieldSpec
from millrace.rpc.wire import TOKEN_VARIABLE
from millrace.runtime.child_processes import ChildProcess
from millrace.storage.table import table_at
from tests.flows.spark_host.four_streams import PATTERN, write_declarations
from tests.spark_cluster import Cluster, Drivers, cluster, command_of, tasks_run_in

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

SCHEMA = CollectionSchema(
    (
        FieldSpec("id", "int64", False),
        FieldSpec("k", "string", False),
        FieldSpec("at", "timestamp", False),
        FieldSpec("v", "int64", False),
    ),
    "id",
)
ROWS = 8000
START = datetime(2024, 3, 1, tzinfo=UTC)


@contextmanager
def streams(spark: Cluster, folder: Path, **more: Any) -> Iterator[tuple[Drivers, Database]]:
    """Yield a deployment with the streams' collections and topic, and a database; `more` are settings."""
    with ExitStack() as stack:
        rig = Drivers(
            spark,
            folder,
            stack,
            flow_declarations=str(write_declarations(folder, kafka=spark.kafka.address, topic="sent")),
            **more,
        )
        db = stack.enter_context(connect(settings=rig.plain))
        db.catalog.ensure_pchannels(2)
        db.catalog.create_collection("numbers", SCHEMA, vchannels=2)
        db.catalog.create_collection("dead", LETTERS)
        admin = AdminClient({"bootstrap.servers": spark.kafka.address})
        admin.create_topics([NewTopic("sent", 2, 1)])["sent"].result(30)
        bad = Producer({"bootstrap.servers": spark.kafka.address})
        bad.produce("sent", b"no json")
        assert bad.flush(60) == 0
        yield rig, db


def numbers(ids: range) -> pa.Table:
    return pa.table(
        {
            "id": list(ids),
            "k": [f"k{each % 7}" if each < ROWS else "end" for each in ids],
            "at": pa.array([_time(each) for each in ids], pa.timestamp("us", "UTC")),
            "v": [each * each % 101 for each in ids],
        }
    )


def _time(number: int) -> datetime:
    """Return the time of a row; those after ROWS are far behind, so that the watermark passes all others."""
    return START + (timedelta(seconds=3 * number) if number < ROWS else timedelta(days=number - ROWS + 2))


def send(db: Database, kafka: KafkaBroker, ids: range, *, step: int = 500) -> None:
    for first in range(ids.start, ids.stop, step):
        db["numbers"].insert(numbers(range(first, min(first + step, ids.stop))))
    producer = Producer({"bootstrap.servers": kafka.address, "acks": "all"})
    for each in ids:
        producer.produce("sent", json.dumps({"n": each}), str(each))
        producer.poll(0)
    assert producer.flush(60) == 0


def batches(settings: Settings) -> dict[str, int]:
    """Return the newest completed micro-batch of each stream."""
    names = ("copied", "hourly", "rises", "arrived")
    return {name: newest_batch(f"{settings.tables_uri}/streams/{name}/1") for name in names}


def wait_for_more(settings: Settings, before: dict[str, int], process: ChildProcess) -> dict[str, int]:
    """Wait until each stream has completed another micro-batch."""

    def more() -> bool:
        assert process.running(), process.tail()
        return all(number > before[name] for name, number in batches(settings).items())

    assert poll_until(more, Deadline.after(240), interval=1.0), f"{batches(settings)}\n{process.tail()}"
    return batches(settings)


def copied_ids(settings: Settings) -> list[int]:
    table = table_at(settings.table_uri(f"{OUTPUTS}/copied"))
    return sorted(table.dataset().to_table(["id"])["id"].to_pylist())


def test_a_driver_goes_with_its_folder_and_its_streams_go_on_elsewhere(
    tmp_path: Path, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Windows by Spark's state, a keyed operator, a topic and a Delta table: nothing lost, nothing doubled."""
    monkeypatch.setenv(TOKEN_VARIABLE, "a-token-that-all-machines-have")
    with cluster(tmp_path, settings, monkeypatch) as (spark, _), streams(spark, tmp_path) as (rig, db):
        send(db, spark.kafka, range(3000))
        done = dict.fromkeys(batches(rig.home), -1)
        with rig.driver("first", "stream", "all") as process:
            done = wait_for_more(rig.home, done, process)
            commands = [command_of(each) for each in psutil.process_iter()]
            assert not any(os.environ["AWS_SECRET_ACCESS_KEY"] in each for each in commands)
            send(db, spark.kafka, range(3000, 4000))
        send(db, spark.kafka, range(4000, 6000))
        with rig.driver("second", "stream", "all") as process:
            done = wait_for_more(rig.home, done, process)
            send(db, spark.kafka, range(6000, 7000))
            done = wait_for_more(rig.home, done, process)
            send(db, spark.kafka, range(7000, ROWS))
            db["numbers"].insert(numbers(range(ROWS, ROWS + 1)))
            wait_for_more(rig.home, done, process)
        for number, name in enumerate(("third", "fourth"), ROWS + 1):
            # The third may take the rows of two later days at once: the watermark passes the others in the next batch.
            db["numbers"].insert(numbers(range(number, number + 1)))
            with rig.driver(name, "stream", "all", "--available-now") as process:
                assert process.wait(deadline=300) == 0, process.tail()
        check(db, rig.home, numbers(range(ROWS + 3)))
        assert all(tasks_run_in(folder) for folder in spark.folders)


def check(db: Database, settings: Settings, sent: pa.Table) -> None:
    assert copied_ids(settings) == list(range(ROWS + 3))
    assert sorted(db["arrived"].read()["n"].to_pylist()) == list(range(ROWS))
    assert [each["stream"] for each in db["dead"].read().to_pylist()] == ["arrived/source"]
    asked = duckdb.connect().from_arrow(sent)
    wanted = asked.query("f", "select k, date_trunc('hour', \"at\"), count(*), sum(v) from f group by 1, 2").fetchall()
    assert rows(db["hourly"].read(columns="k, hour, rows, total")) == sorted(wanted)
    matches = millrace.match_recognize(sent, PATTERN)
    assert matches.num_rows > 100
    assert rows(db["rises"].read(columns="k, first, last")) == rows(matches.select(["k", "first", "last"]))


def rows(table: pa.Table) -> list[tuple[Any, ...]]:
    return sorted(tuple(row.values()) for row in table.to_pylist())
