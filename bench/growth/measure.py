"""What a deployment of one size costs: appends, commits, reads, DDL, an idle server, a restart."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import psutil
from prometheus_client import CollectorRegistry

from bench.deployment import SCHEMA, rows
from bench.growth.deployment import Grown, spread
from millrace.base.metrics import Metrics
from millrace.base.settings import Settings
from millrace.client.database import connect
from millrace.message.ids import pchannel_of
from millrace.message.schema import FieldSpec
from millrace.message.schema_changes import AddField
from millrace.node.append.host import HostSettings
from millrace.node.flush.definition import FlushLoop, flush_to_end
from millrace.node.ingest.definition import IngestLoop
from millrace.node.range_loop.definition import commit_outcomes, run_range
from millrace.node.range_loop.runner import run_loop
from millrace.node.range_loop.schedule import START, RangeSchedule, StallBackoff
from millrace.observe.observer import Observer
from millrace.rpc.discovery import read_record
from millrace.tables.wal.table import WalTable

CALL_ROWS: Final = 10_000
LOAD_ROWS: Final = 20
"""Rows of a call while freshness is measured, over all PChannels of the wide collection."""
LOAD_SECONDS: Final = 0.1
"""Pause between two such calls."""


def measure(deployment: Grown, *, quick: bool = False, only: Sequence[str] = ()) -> dict[str, Any]:
    """Return the figures of one deployment (MEASURES; `only` some of them). Times are medians."""
    found: dict[str, Any] = {"vchannels": deployment.vchannels, "fill_s": deployment.fill_s}
    for name, act in MEASURES.items():
        if not only or name in only:
            found |= act(deployment, quick)
    return found


def p50(call: Callable[[int], object], times: int, *, warm_up: int = 1) -> float:
    """Return the median milliseconds of `call`, which gets the number of the call."""
    spent = []
    for number in range(times + warm_up):
        begun = time.perf_counter()
        call(number)
        spent.append(time.perf_counter() - begun)
    return round(float(np.median(spent[warm_up:])) * 1000, 2)


def appends(deployment: Grown, *, times: int) -> dict[str, Any]:
    """Measure one append of one row through the server, to ten collections in turn, and calls of many rows.

    Ten whatever the size: the first append to a collection creates its segment.
    """
    entries = [deployment.row(number % 10) for number in range(times + 10)]
    connection, ids = deployment.db.connection, deployment.ids

    def one(number: int) -> None:
        pchannel, entry = entries[number]
        connection.append(pchannel, [entry]).result()

    append_ms = p50(one, times, warm_up=10)
    tables = [rows(next(ids) + CALL_ROWS * number, CALL_ROWS, size=100) for number in range(6)]
    with deployment.db.new_producer() as producer:
        call_ms = p50(lambda number: producer.insert(deployment.wide, tables[number]), 5)
    return {"append_ms": append_ms, "call_ms": call_ms}


class InProcessNode:
    """The streaming node's loop in this process, micro-batch by micro-batch, with handles that stay open."""

    def __init__(self, deployment: Grown) -> None:
        settings = replace(deployment.settings, wal_linger=0.0)  # a commit for each row is what is measured
        self._loop = IngestLoop(settings, deployment.db.log, WalTable.create(settings.wal_uri))
        self._schedule = RangeSchedule(
            self._loop.planner(), parked=self._loop.parked, stalls=StallBackoff(sleep=lambda seconds: None)
        )
        self._committer = self._loop.committer(None)
        self._offset = START

    def batch(self) -> int:
        """Run one micro-batch. Return the PChannels that it committed."""
        following = self._schedule.next_offset(self._offset, max_bytes=self._loop.max_bytes)
        if following is self._offset:
            return 0
        outcomes = [run_range(self._loop, plan) for plan in self._schedule.plan(following)]
        result, again, ended = commit_outcomes(self._committer, outcomes)
        assert len(result.committed) == len(outcomes)
        assert not again | ended
        self._offset = following
        return len(result.committed)

    def close(self) -> None:
        self._schedule.close()


def commits(deployment: Grown, *, times: int) -> dict[str, Any]:
    """Measure micro-batches of one row, and of one row in each PChannel, and what a commit of one row writes."""
    settings, spent = deployment.settings, []
    wal = Path(settings.wal_uri)
    of_each = {pchannel_of(each.vchannels[0]): number for number, each in enumerate(deployment.narrow)}
    with closing(InProcessNode(deployment)) as node:
        while node.batch():
            pass
        files, size = usage(wal)
        _, state_size = usage(wal / "kind=state")
        for number in range(times):
            deployment.append_row(number)
            begun = time.perf_counter()
            assert node.batch() >= 1, "a tick of another PChannel may come with it"
            spent.append(time.perf_counter() - begun)
        files_after, size_after = usage(wal)
        _, state_size_after = usage(wal / "kind=state")
        all_spent = []
        for _ in range(3):
            for number in of_each.values():
                deployment.append_row(number)
            begun = time.perf_counter()
            while node.batch():
                pass
            all_spent.append(time.perf_counter() - begun)
    return {
        "batch_ms": round(float(np.median(spent)) * 1000, 1),
        "batch_many_ms": round(float(np.median(all_spent)) * 1000, 1),
        "batch_many_pchannels": len(of_each),
        "commit_files": round((files_after - files) / times, 2),
        "commit_bytes": round((size_after - size) / times),
        "state_bytes": round((state_size_after - state_size) / times),
    }


def flushes(deployment: Grown, *, times: int) -> dict[str, Any]:
    """Measure a flush of one row, and what it writes outside of the collection's own table."""
    settings = deployment.settings
    checkpoints = Path(settings.checkpoints_uri)
    with closing(InProcessNode(deployment)) as node:
        while node.batch():
            pass
        flush_to_end(settings)
        files, size = usage(checkpoints)
        spent = []
        for number in range(times):
            deployment.append_row(number)
            assert node.batch() >= 1, "a tick of another PChannel may come with it"
            begun = time.perf_counter()
            assert flush_to_end(settings)
            spent.append(time.perf_counter() - begun)
        files_after, size_after = usage(checkpoints)
    return {
        "flush_ms": round(float(np.median(spent)) * 1000, 1),
        "checkpoint_bytes": round((size_after - size) / times),
        "checkpoint_files": round((files_after - files) / times, 2),
    }


def definitions(deployment: Grown, *, times: int) -> dict[str, Any]:
    """Measure DDL by its calls, lists and the status of the whole deployment."""
    catalog = deployment.db.catalog
    made = []

    def create(number: int) -> None:
        made.append(catalog.create_collection(f"made_{number}", SCHEMA))

    create_ms = p50(create, times)
    changes = [AddField(FieldSpec("more", "int64", True))]
    alter_ms = p50(lambda number: catalog.alter(f"made_{number}", changes), times)
    get_ms = p50(lambda number: catalog.collection(f"narrow_{number % len(deployment.narrow)}"), times)
    list_ms = p50(lambda number: catalog.collections(), 3)
    drop_ms = p50(lambda number: catalog.drop_collection(f"made_{number}"), times)

    def status(_number: int) -> None:
        with closing(Observer(deployment.settings)) as observer:
            observer.overview()

    return {
        "create_ms": create_ms,
        "created_on": spread(made),
        "alter_ms": alter_ms,
        "get_ms": get_ms,
        "list_ms": list_ms,
        "drop_ms": drop_ms,
        "status_ms": p50(status, 3),
    }


@contextmanager
def loops(settings: Settings) -> Iterator[None]:
    """Run the node and the flusher in threads for as long as the block lasts."""
    stop, metrics = threading.Event(), Metrics(registry=CollectorRegistry())
    failed: list[BaseException] = []

    def run(loop: Any) -> None:
        try:
            run_loop(loop, metrics=metrics, stop=stop)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=partial(run, loop(settings))) for loop in (IngestLoop, FlushLoop)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    if failed:
        raise failed[0]


def freshness(deployment: Grown, *, seconds: float) -> dict[str, Any]:
    """Measure append → read beside a steady load of the same rows whatever the size, with node and flusher running."""
    settings, db, wide = deployment.settings, deployment.db, deployment.wide
    stop = threading.Event()
    failed: list[BaseException] = []

    def load() -> None:
        try:
            with db.new_producer() as producer:
                while not stop.wait(LOAD_SECONDS):
                    producer.insert(wide, rows(next(deployment.ids) << 20, LOAD_ROWS, size=100))
        except BaseException as error:
            failed.append(error)

    waits = []
    before = usage(Path(settings.wal_uri))
    with loops(settings):
        thread = threading.Thread(target=load)
        thread.start()
        try:
            end = time.monotonic() + seconds
            number = 0
            while time.monotonic() < end:
                number += 1
                begun = time.monotonic()
                _, tick = deployment.append_row(number)
                db.collection(deployment.narrow[number % len(deployment.narrow)].name).read(at=tick)
                waits.append(time.monotonic() - begun)
                stop.wait(0.2)
        finally:
            stop.set()
            thread.join()
    if failed:
        raise failed[0]
    after = usage(Path(settings.wal_uri))
    return {
        "fresh_ms": round(float(np.median(waits)) * 1000),
        "fresh_max_ms": round(max(waits) * 1000),
        "fresh_reads": len(waits),
        "wal_files_per_s": round((after[0] - before[0]) / seconds, 1),
    }


def idle(deployment: Grown, *, seconds: float) -> dict[str, Any]:
    """Measure the processor time and the memory of the log's server while nobody calls it, after its last ticks."""
    server = _server(deployment.settings)
    time.sleep(HostSettings().tick_interval + 5.0)
    begun = server.cpu_times()
    time.sleep(seconds)
    ended = server.cpu_times()
    spent = ended.user + ended.system - begun.user - begun.system
    return {
        "idle_cpu_percent": round(100 * spent / seconds, 2),
        "server_mib": round(server.memory_info().rss / (1 << 20), 1),
        "server_threads": server.num_threads(),
    }


def restart(deployment: Grown, *, times: int) -> dict[str, Any]:
    """Measure from SIGKILL of the server until an append to each of ten collections is acknowledged."""

    def once(number: int) -> None:
        server = _server(deployment.settings)
        os.kill(server.pid, signal.SIGKILL)
        psutil.wait_procs([server], timeout=30)
        begun = time.perf_counter()
        with connect(settings=deployment.settings) as db:
            for number in range(10):
                pchannel, entry = deployment.row(number)
                db.connection.append(pchannel, [entry]).result()
        spent.append(time.perf_counter() - begun)

    spent: list[float] = []
    for number in range(times):
        once(number)
    return {"restart_s": round(float(np.median(spent)), 2)}


MEASURES: Final[Mapping[str, Callable[[Grown, bool], dict[str, Any]]]] = {
    "appends": lambda deployment, quick: appends(deployment, times=50 if quick else 200),
    "commits": lambda deployment, quick: commits(deployment, times=5 if quick else 20),
    "flushes": lambda deployment, quick: flushes(deployment, times=3),
    "definitions": lambda deployment, quick: definitions(deployment, times=3 if quick else 10),
    "freshness": lambda deployment, quick: freshness(deployment, seconds=5.0 if quick else 15.0),
    "idle": lambda deployment, quick: idle(deployment, seconds=2.0 if quick else 5.0),
    "restart": lambda deployment, quick: restart(deployment, times=1 if quick else 3),
}
"""Groups of figures, in the order in which they are measured."""


def _server(settings: Settings) -> psutil.Process:
    record = read_record(settings.log_path)
    assert record is not None
    return psutil.Process(record.pid)


def usage(folder: Path) -> tuple[int, int]:
    """Return the files below `folder` and their bytes."""
    files = size = 0
    for place, _, names in os.walk(folder):
        for name in names:
            try:
                size += os.stat(os.path.join(place, name)).st_size
            except FileNotFoundError:
                continue
            files += 1
    return files, size
