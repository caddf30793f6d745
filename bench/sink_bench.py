"""The streaming node against Spark's own Delta sink: the same log, one with the whole chain, one without any.

The baseline is bench.plain_source into ``writeStream.format("delta")``.
"""

from __future__ import annotations

import shutil
import statistics
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from pyspark.sql.streaming.query import StreamingQuery

from bench.node_bench import fill
from bench.plain_source import PlainSource
from millrace.base.errors import LogUnavailable
from millrace.base.log_backends import is_in_data_folder
from millrace.base.metrics import Metrics
from millrace.base.settings import Settings
from millrace.brokers.kafka import KafkaBroker
from millrace.node.ingest.definition import IngestLoop
from millrace.node.ingest.log_connection import LogConnection
from millrace.node.range_loop.query import start_query
from millrace.rpc.remote_log import RemoteLogService
from millrace.runtime.spark.session import session

DEADLINE = 600


def node_on_kafka(folder: Path, *, message_bytes: int, total_bytes: int, pairs: int = 7) -> dict[str, Any]:
    """Measure the same from a Kafka broker of its own."""
    with KafkaBroker(folder / "broker", settings=Settings(), heap="512m").start() as broker:
        return node_against_sink(
            folder / "data", message_bytes=message_bytes, total_bytes=total_bytes, pairs=pairs, log=broker.url
        )


def node_against_sink(
    folder: Path, *, message_bytes: int, total_bytes: int, pairs: int = 7, log: str = "rocksmq"
) -> dict[str, Any]:
    """Return MB/s and messages/s of both on one backlog, alternating in one warm session, each time into new tables.

    `ratio` includes the start of the query, 1 to 2 s of either for a process that Spark starts. `batches_ratio` covers
    only the micro-batches: the ratio of a long-running query.
    """
    settings = Settings(data_dir=folder, cache_dir=Settings.load().cache_dir, max_bytes_per_trigger=1 << 30, log=log)
    names = ["p0", "p1"]
    place = str(settings.log_path) if is_in_data_folder(log) else log
    with LogConnection(settings).service() as service:
        for name in names:
            service.create(name)
        messages = sum(
            fill(service.open(name), name, message_bytes=message_bytes, total_bytes=total_bytes // 2) for name in names
        )
        spark = session("bench-sink", settings=settings)
        try:
            spark.dataSource.register(PlainSource)
            ours: list[_Seconds] = []
            theirs: list[_Seconds] = []
            for _ in range(pairs + 1):
                shutil.rmtree(settings.wal_uri, ignore_errors=True)
                shutil.rmtree(settings.spark_checkpoint_path(IngestLoop.name), ignore_errors=True)
                start = time.perf_counter()
                query = start_query(spark, IngestLoop(settings), metrics=Metrics(), available_now=True)
                query.awaitTermination(DEADLINE)
                ours.append(_Seconds.of(query, start))
                shutil.rmtree(folder / "plain", ignore_errors=True)
                start = time.perf_counter()
                plain = (
                    spark.readStream.format("bench_plain_log")
                    .options(log=place, names=",".join(names))
                    .load()
                    .writeStream.format("delta")
                    .option("checkpointLocation", str(folder / "plain" / "checkpoint"))
                    .trigger(processingTime="0 seconds")
                    .start(str(folder / "plain" / "table"))
                )
                plain.processAllAvailable()
                theirs.append(_Seconds.of(plain, start))
                plain.stop()
        finally:
            spark.stop()
            with suppress(LogUnavailable), RemoteLogService.connect(settings.log_path, start=False) as server:
                server.shutdown()
    del ours[0], theirs[0]  # the first pair warms both up
    speed = statistics.median(total_bytes / each.whole for each in ours)
    return {
        "message_bytes": message_bytes,
        "total_mb": round(total_bytes / 1e6),
        "pairs": pairs,
        "node_mb_per_s": round(speed / 1e6, 1),
        "node_messages_per_s": round(speed / total_bytes * messages),
        "sink_mb_per_s": round(statistics.median(total_bytes / each.whole for each in theirs) / 1e6, 1),
        **_ratios("ratio", [sink.whole / node.whole for node, sink in zip(ours, theirs, strict=True)]),
        "node_batches_mb_per_s": round(statistics.median(total_bytes / each.batches for each in ours) / 1e6, 1),
        "sink_batches_mb_per_s": round(statistics.median(total_bytes / each.batches for each in theirs) / 1e6, 1),
        **_ratios("batches_ratio", [sink.batches / node.batches for node, sink in zip(ours, theirs, strict=True)]),
    }


@dataclass(frozen=True, slots=True)
class _Seconds:
    """How long one run of a query took: from its start on, and its micro-batches alone, as Spark reports them."""

    whole: float
    batches: float

    @classmethod
    def of(cls, query: StreamingQuery, start: float) -> Self:
        whole = time.perf_counter() - start
        worked = [item.durationMs["triggerExecution"] for item in query.recentProgress if item.numInputRows]
        return cls(whole, sum(worked) / 1e3)


def _ratios(name: str, ratios: list[float]) -> dict[str, float]:
    return {
        name: round(statistics.median(ratios), 2),
        f"{name}_min": round(min(ratios), 2),
        f"{name}_max": round(max(ratios), 2),
    }
