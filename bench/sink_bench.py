"""The streaming node against Spark's own Delta sink: the same log, one with the whole chain, one without any.

The baseline is bench.plain_source into ``writeStream.format("delta")``.
"""

from __future__ import annotations

import shutil
import statistics
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from bench.node_bench import fill
from bench.plain_source import PlainSource
from millrace.brokers.kafka import KafkaBroker
from millrace.errors import LogUnavailable
from millrace.log.remote import RemoteLogService
from millrace.metrics import Metrics
from millrace.node.source import connect, source_options
from millrace.node.streaming import QUERY_NAME, start_query
from millrace.settings import Settings
from millrace.spark import session

DEADLINE = 600


def node_on_kafka(folder: Path, *, message_bytes: int, total_bytes: int, pairs: int = 7) -> dict[str, Any]:
    """The same from a Kafka broker of its own."""
    with KafkaBroker(folder / "broker", settings=Settings(), heap="512m").start() as broker:
        return node_against_sink(
            folder / "data", message_bytes=message_bytes, total_bytes=total_bytes, pairs=pairs, log=broker.url
        )


def node_against_sink(
    folder: Path, *, message_bytes: int, total_bytes: int, pairs: int = 7, log: str = "rocksmq"
) -> dict[str, Any]:
    """MB/s and messages/s of both on one backlog, in turn, in one warm session; each time into new tables."""
    settings = Settings(data_dir=folder, cache_dir=Settings.load().cache_dir, max_bytes_per_trigger=1 << 30, log=log)
    names = ["p0", "p1"]
    place = source_options(settings)["log"]
    with connect(place) as service:
        for name in names:
            service.create(name)
        messages = sum(
            fill(service.open(name), name, message_bytes=message_bytes, total_bytes=total_bytes // 2) for name in names
        )
        spark = session("bench-sink", settings=settings)
        try:
            spark.dataSource.register(PlainSource)
            ours: list[float] = []
            theirs: list[float] = []
            for _ in range(pairs + 1):
                shutil.rmtree(settings.wal_path, ignore_errors=True)
                shutil.rmtree(settings.spark_checkpoint_path(QUERY_NAME), ignore_errors=True)
                start = time.perf_counter()
                query = start_query(spark, settings=settings, metrics=Metrics(), available_now=True)
                query.awaitTermination(DEADLINE)
                ours.append(total_bytes / 1e6 / (time.perf_counter() - start))
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
                theirs.append(total_bytes / 1e6 / (time.perf_counter() - start))
                plain.stop()
        finally:
            spark.stop()
            with suppress(LogUnavailable), RemoteLogService.connect(settings.log_path, start=False) as server:
                server.shutdown()
    ratios = [mine / other for mine, other in zip(ours, theirs, strict=True)][1:]  # the first pair warms both up
    return {
        "message_bytes": message_bytes,
        "total_mb": round(total_bytes / 1e6),
        "pairs": pairs,
        "node_mb_per_s": round(statistics.median(ours[1:]), 1),
        "node_messages_per_s": round(statistics.median(ours[1:]) * 1e6 / total_bytes * messages),
        "sink_mb_per_s": round(statistics.median(theirs[1:]), 1),
        "ratio": round(statistics.median(ratios), 2),
        "ratio_min": round(min(ratios), 2),
        "ratio_max": round(max(ratios), 2),
    }
