"""What every job of ours does around its queries: settings, metrics, session, signals, a clean end.

jobs/ holds one thin file an entry point; this is what they share.
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Sequence
from typing import Protocol

from pyspark.sql import SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from millrace.metrics import Metrics
from millrace.node.streaming import await_queries, stop_on_signals, write_started
from millrace.settings import Settings
from millrace.spark import session


class StartQuery(Protocol):
    """Starts one streaming query on a session; with `available_now` one that ends at what there is now."""

    def __call__(
        self, spark: SparkSession, *, settings: Settings, metrics: Metrics, available_now: bool = False
    ) -> StreamingQuery: ...


def parser(description: str | None) -> argparse.ArgumentParser:
    """The arguments that all jobs have."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--available-now", action="store_true", help="end at what there is now")
    return made


def run(app_name: str, queries: Sequence[StartQuery], *, available_now: bool) -> None:
    """Run `queries` in one driver until SIGTERM, SIGINT or the first failure.

    With `available_now` each runs to its end before the next starts: a later one reads what an earlier one wrote.
    """
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    logging.getLogger("py4j").setLevel(logging.WARNING)
    stop = stop_on_signals()
    settings = Settings.load()
    metrics = Metrics()
    server = metrics.serve(settings.metrics_port) if settings.metrics_port else None
    spark = session(app_name, settings=settings)

    def start(query: StartQuery) -> StreamingQuery:
        return query(spark, settings=settings, metrics=metrics, available_now=available_now)

    try:
        if available_now:
            for query in queries:
                await_queries([start(query)], stop=stop)
        else:
            started = [start(query) for query in queries]
            write_started(settings, app_name)
            await_queries(started, stop=stop)
    finally:
        spark.stop()
        if server is not None:
            server.close()
