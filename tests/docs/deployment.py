"""A deployment in one process, so that a page's examples have tables to read. jobs/ does the same with Spark."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

from millrace.base.settings import Settings
from millrace.client.database import Database, connect
from millrace.node.flush.definition import flush_to_end
from millrace.node.ingest.definition import ingest_to_end


def commit_what_the_logs_hold(client: Database, settings: Settings) -> None:
    """Commit everything that the logs hold now to the ``wal`` table."""
    ingest_to_end(settings, client.log)


@contextmanager
def streaming(settings: Settings) -> Iterator[None]:
    """Run a streaming node beside the body: it commits what arrives in the logs."""
    ended = threading.Event()

    def work() -> None:
        with connect(settings=settings) as client:
            while not ended.wait(0.05):
                commit_what_the_logs_hold(client, settings)

    with ThreadPoolExecutor(1) as pool:
        node = pool.submit(work)
        try:
            yield
        finally:
            ended.set()
        node.result(60)


def flush_what_is_committed(settings: Settings) -> None:
    """Flush everything in the ``wal`` table to the collections' tables."""
    flush_to_end(settings)
