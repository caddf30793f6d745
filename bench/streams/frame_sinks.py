"""The cost of the guarantees of the other sinks: functions, Delta and Kafka.

The baselines are Spark's own foreachBatch and Delta sink, and a Kafka producer of the same messages.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pyarrow.parquet as pq
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from bench.streams.on_spark import session_of, turns
from bench.tables.orders import calls_of, orders
from millrace.base.settings import Settings
from millrace.brokers.kafka import KafkaBroker
from millrace.flows.batch import Batch
from millrace.flows.sinks.delta.sink import DeltaSink
from millrace.flows.sinks.function.sink import FunctionSink
from millrace.flows.sinks.kafka.sink import KafkaSink
from millrace.flows.sinks.sink import Sink
from millrace.flows.spark_host import incarnations, micro_batches

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

PARTITIONS: Final = 3


def under_spark(folder: Path, *, rows: int, size: int, pairs: int) -> dict[str, Any]:
    """Rows a second of orders (about 150 bytes each), `size` a micro-batch, Parquet in; the function counts them."""
    given = folder / "input"
    given.mkdir(parents=True)
    table = orders(np.arange(rows))
    for number in range(rows // size):
        path = given / f"{number:05}.parquet"
        pq.write_table(table.slice(number * size, size), path)
        os.utime(path, (time.time() - 10_000 + number,) * 2)
    with session_of(Settings(data_dir=folder / "data")) as spark:
        schema = spark.read.parquet(str(given)).schema

        def frame() -> DataFrame:
            return spark.readStream.schema(schema).option("maxFilesPerTrigger", 1).parquet(str(given))

        def count(batch: DataFrame, number: int) -> None:
            batch.write.format("noop").mode("overwrite").save()

        def anew(run: Callable[[Path], Any]) -> Callable[[], None]:
            def act() -> None:
                shutil.rmtree(folder / "turn", ignore_errors=True)
                run(folder / "turn").awaitTermination()

            return act

        def ours(sink: Callable[[Path, Path], Sink]) -> Callable[[], None]:
            def run(place: Path) -> Any:
                memory = incarnations.sink_folder(place / "checkpoint")
                return micro_batches.start(frame(), sink(memory, place), place / "checkpoint", available_now=True)

            return anew(run)

        def own(place: Path, *, delta: bool) -> Any:
            writer = frame().writeStream.option("checkpointLocation", str(place / "checkpoint"))
            writer = writer.trigger(availableNow=True)
            return writer.format("delta").start(str(place / "table")) if delta else writer.foreachBatch(count).start()

        functions = {
            "foreachBatch": anew(lambda place: own(place, delta=False)),
            "function, at least once": ours(lambda memory, place: FunctionSink(memory, count)),
            "function, at most once": ours(lambda memory, place: FunctionSink(memory, count, guarantee="at most once")),
        }
        deltas = {
            "Spark's Delta sink": anew(lambda place: own(place, delta=True)),
            "Delta, at least once": ours(
                lambda memory, place: DeltaSink(str(place / "table"), memory=memory, guarantee="at least once")
            ),
            "Delta, exactly once": ours(lambda memory, place: DeltaSink(str(place / "table"), memory=memory)),
        }
        return {
            "batch": size,
            "function": turns(functions, rows=rows, pairs=pairs, base="foreachBatch"),
            "delta": turns(deltas, rows=rows, pairs=pairs, base="Spark's Delta sink"),
        }


def into_kafka(folder: Path, *, rows: int, size: int, pairs: int) -> dict[str, Any]:
    """Return rows/s as JSON: the sink with numbered messages, and a producer with equal acknowledgements."""
    folder.mkdir(parents=True)
    calls = list(calls_of(orders(np.arange(rows)), size))
    rates: dict[str, list[float]] = {"producer": [], "sink": []}
    with KafkaBroker(folder / "kafka", settings=Settings(), heap="512m").start() as broker:
        admin = AdminClient({"bootstrap.servers": broker.address})
        for turn in range(pairs):
            for each in rates:
                topic = f"{each}{turn}"
                admin.create_topics([NewTopic(topic, PARTITIONS, 1)])[topic].result(60)
                begun = time.perf_counter()
                if each == "sink":
                    sink = KafkaSink.of_rows(folder / topic, topic, broker.address)
                    for number, batch in enumerate(calls):
                        sink.write(Batch.of_rows("query", number, [batch]))
                    sink.close()
                else:
                    _produce(broker.address, topic, calls)
                rates[each].append(rows / (time.perf_counter() - begun))
    return {
        "rows": rows,
        "batch": size,
        "rows_per_s": {each: round(statistics.median(found)) for each, found in rates.items()},
        "of_the_producer": round(
            statistics.median(a / b for a, b in zip(rates["sink"], rates["producer"], strict=True)), 2
        ),
    }


def _produce(address: str, topic: str, calls: list[Any]) -> None:
    options = {"bootstrap.servers": address, "enable.idempotence": True, "acks": "all", "linger.ms": 5}
    producer = Producer(options)
    for batch in calls:
        for row in batch.to_pylist():
            while True:
                try:
                    producer.produce(topic, json.dumps(row, default=str))
                    break
                except BufferError:
                    producer.poll(0.1)
            producer.poll(0)
        assert producer.flush(60) == 0
