"""A node without Spark: session, orders, and the loops log → wal → collections for its channels, in this process.

    MILLRACE_NODE=n1 python -m millrace.node.cluster

Runs until SIGTERM or SIGINT, which end it between two micro-batches. `millrace node NAME` starts it. A Spark driver is
a node as well if MILLRACE_NODE is set (jobs/streaming_node.py).
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from contextlib import suppress
from functools import partial

import millrace.runtime.arrow_without_pandas  # noqa: F401 - first, before an array is made
from millrace.base.data_folder import prepare_data_folder
from millrace.base.errors import MillraceError
from millrace.base.metrics import Metrics
from millrace.base.settings import Settings
from millrace.node.cluster.member import Member
from millrace.node.flush.definition import FlushLoop
from millrace.node.ingest.definition import IngestLoop
from millrace.node.publish.definition import publishing
from millrace.node.range_loop.runner import run_loop
from millrace.runtime.process_setup import set_up_service


def run(settings: Settings, *, stop: threading.Event, metrics: Metrics) -> None:
    """Run the node `settings.node` until `stop` is set.

    Raises errors that end a loop, and what :class:`Member` raises.
    """
    failures: list[BaseException] = []
    ready = threading.Barrier(3)

    def come() -> None:
        ready.wait()

    def loop(definition: IngestLoop | FlushLoop, member: Member) -> None:
        try:
            ownership, threads = member.owned, settings.cores
            run_loop(definition, metrics=metrics, stop=stop, ownership=ownership, threads=threads, on_started=come)
        except BaseException as error:
            failures.append(error)
        finally:
            stop.set()
            ready.abort()

    with publishing(settings, metrics), Member(settings) as member:
        loops = [
            threading.Thread(target=partial(loop, definition, member), name=definition.name)
            for definition in (IngestLoop(settings), FlushLoop(settings))
        ]
        for each in loops:
            each.start()
        with suppress(threading.BrokenBarrierError):
            ready.wait()
            member.start()
        for each in loops:
            each.join()
    for failure in failures:
        raise failure


def main() -> int:
    """Run until a signal arrives. Returns 1 after an error, which is printed to stderr."""
    stop = set_up_service()
    try:
        settings = Settings.load_for_writing()
        prepare_data_folder(settings.data_dir)
        metrics = Metrics()
        server = metrics.serve(settings.metrics_port) if settings.metrics_port else None
        try:
            run(settings, stop=stop, metrics=metrics)
        finally:
            if server is not None:
                server.close()
    except MillraceError as error:
        sys.stderr.write(f"{error.code}: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    code = main()
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    # Clients may hold append streams open, whose threads would keep the interpreter alive. Nothing is left to wait
    # for.
    os._exit(code)
