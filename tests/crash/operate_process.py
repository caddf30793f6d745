"""Every operator at once under Spark, over files, to their end.

python operate_process.py <folder> <data folder> <Kafka's address>. The driver that is killed, with its workers.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pyarrow as pa

from millrace.base.settings import Settings
from millrace.flows.sinks.collection.sink import CollectionSink
from millrace.flows.sinks.delta.sink import DeltaSink
from millrace.flows.sinks.kafka.sink import KafkaSink
from millrace.flows.sinks.sink import Sink
from millrace.flows.spark_host import incarnations, micro_batches
from millrace.flows.spark_host.into import KeyedInto
from millrace.flows.spark_host.keyed import KeyedFrames
from millrace.streams.keyed.operator import Operator
from millrace.streams.operators.joins import AsOf, Distinct
from millrace.streams.operators.patterns import Patterns
from millrace.streams.operators.windows import Windows
from millrace.streams.patterns.sql import parse

SCHEMA = pa.schema([("k", pa.utf8()), ("t", pa.int64()), ("v", pa.int64()), ("right", pa.bool_())])
COLUMNS = "k string, t long, v long, right boolean"
DELAY, SHARDS, BATCHES, ROWS = 4, 2, 6, 60
OPERATORS: dict[str, Operator] = {
    "windows": Windows(("k",), "t", {"n": ("count", None), "total": ("sum", "v")}, size=6, slide=3),
    "sessions": Windows(("k",), "t", {"n": ("count", None)}, gap=3),
    "as_of": AsOf(("k",), "t", "right", ("k", "t", "v"), (("v", "last"), ("t", "since")), 20),
    "distinct": Distinct(("k", "v"), "t", 9),
    "patterns": Patterns(
        parse(
            "PARTITION BY k ORDER BY t MEASURES A.t AS a, LAST(B.t) AS b, MATCH_NUMBER() AS m PATTERN (A B+) WITHIN 9"
            " DEFINE B AS v > PREV(v)"
        ),
        "t",
    ),
}


def rows(batch: int) -> pa.Table:
    """Of each batch 60 rows of 20 times, some of them late, some before their time."""
    numbers = range(ROWS * batch, ROWS * batch + ROWS)
    return pa.Table.from_pylist(
        [
            {
                "k": f"k{n % 7}",
                "t": n // 3 + n * 5 % 4 - (40 if n % 17 == 16 else 0),
                "v": n * n % 11,
                "right": n % 4 == 0,
            }
            for n in numbers
        ],
        SCHEMA,
    )


SINKS = {"windows": "collection", "sessions": "kafka", "as_of": "delta", "distinct": "collection", "patterns": "kafka"}
"""Of which kind each operator's is; the late rows of `distinct` go to a collection, too."""


def main(folder: Path, data: Path, kafka: str) -> None:
    from millrace.runtime.spark.session import session

    settings = Settings(data_dir=data, append_retry_delay=0.05)
    spark = session("operate-kills", settings=settings)
    queries = []
    for name, operator in OPERATORS.items():
        place = folder / "checkpoints" / name
        frame = spark.readStream.schema(COLUMNS).option("maxFilesPerTrigger", 1).parquet(str(folder / "input"))
        memory = incarnations.sink_folder(place)
        keyed = KeyedFrames(
            memory, str(folder / name), operator, micro_batches.columns_of(frame), delay=DELAY, shards=SHARDS
        )
        sink: Sink
        if SINKS[name] == "collection":
            sink = CollectionSink(settings, name, memory=memory, guarantee="exactly once")
        elif SINKS[name] == "kafka":
            sink = KafkaSink.of_rows(memory, f"{folder.name}-{name}", kafka)
        else:
            sink = DeltaSink(str(folder / f"{name}_sink"), memory=memory)
        late = CollectionSink(settings, f"{name}_late", memory=memory / "late") if name == "distinct" else None
        into = KeyedInto(keyed, sink, late)
        queries.append(micro_batches.start(frame, into, place, name=name, available_now=True))
    for query in queries:
        query.awaitTermination()
    spark.stop()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
