"""The coordinator: how long a moving PChannel stands still, a broadcast over 64 VChannels, discovery of changes.

A PChannel moves on purpose, or because its node was killed. The nodes run the range loop in their processes. Baselines
of the same run: the time between two commits of a PChannel that does not move, the same messages appended one after the
other, a poll that finds nothing new.
"""

from __future__ import annotations

import itertools
import os
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.deployment import SCHEMA, deployment, rows
from millrace.base.settings import Settings
from millrace.brokers.registry import create_server
from millrace.catalog.collection import CollectionInfo
from millrace.client.database import Database
from millrace.coord import control
from millrace.coord.assignment_source import MetaStoreAssignmentSource
from millrace.coord.channels.record import ChannelRecord
from millrace.coord.clock import SystemClock
from millrace.coord.session import INGEST
from millrace.coord.store_factory import open_cluster_store
from millrace.demo.cluster import LocalCluster, MoveObserver, ObservedMove
from millrace.message import builders
from millrace.message.ids import pchannel_of
from millrace.message.wire.encode import encode_entry
from millrace.meta.store import Put
from millrace.rpc.assignments import AssignmentCache

SESSION_SECONDS = 5.0
PCHANNELS = 4
WAIT = 120.0


@contextmanager
def meta_store(folder: Path, kind: str) -> Iterator[str]:
    """Return the URL of a new etcd or MariaDB; "" for the embedded store, which needs no server."""
    if not kind:
        yield ""
        return
    with create_server(kind, folder, settings=Settings.load()).start() as server:
        os.environ.update(server.client_environment)  # for the processes that this one starts
        yield server.url


def moves(folder: Path, *, rounds: int, meta: str = "") -> dict[str, Any]:
    """Measure moves between two nodes, one of which has all `PCHANNELS` while 1,000 rows/s stream.

    The owner is drained, then (in a second part) killed; the other node takes over; and back, `rounds` times each.
    `meta` is the kind of the meta store, "" for the embedded one.
    """
    with (
        meta_store(folder / "meta", meta) as url,
        deployment(folder / "data", pchannels=PCHANNELS, meta_store=url) as (found, client, collection),
    ):
        settings = replace(found, session_seconds=SESSION_SECONDS)
        with LocalCluster(settings) as cluster, ThreadPoolExecutor(1) as pool:
            cluster.coordinator()
            cluster.node("n1")
            cluster.wait_owned({"n1"}, pchannels=PCHANNELS, deadline=WAIT)
            ended = threading.Event()
            streaming = pool.submit(_stream, client, collection, ended)
            try:
                rest = MoveObserver(settings, cluster.store)
                rest.start()
                time.sleep(10.0 if rounds > 1 else 3.0)  # how long a micro-batch is where nothing moves is measured
                rest.stop()
                cluster.node("n2")
                control.freeze(cluster.store, frozen=True)  # a node that comes back gets nothing for balance
                control.drain(cluster.store, "n1")
                cluster.wait_owned({"n2"}, pchannels=PCHANNELS, deadline=WAIT)
                graceful = _watched(settings, cluster, rounds, _drained)
                crashed = _watched(settings, cluster, rounds, _killed)
            finally:
                ended.set()
                streaming.result()
            gaps = [b - a for times in rest.commits().values() for a, b in itertools.pairwise(times)]
            return {
                "micro_batch_s": _spread(gaps),
                "session_s": SESSION_SECONDS,
                "graceful": _told(graceful, "drain"),
                "crash": _told(crashed, "lost"),
            }


def _stream(client: Database, collection: CollectionInfo, ended: threading.Event) -> None:
    producer = client.new_producer()
    for first in itertools.count(0, 20):
        if ended.wait(0.02):
            return
        producer.insert(collection, rows(first, 20))


def _watched(
    settings: Settings, cluster: LocalCluster, rounds: int, move: Callable[[LocalCluster, str, str], None]
) -> list[ObservedMove]:
    watching = MoveObserver(settings, cluster.store)
    watching.start()
    for _, (source, to) in zip(range(2 * rounds), itertools.cycle([("n2", "n1"), ("n1", "n2")]), strict=False):
        time.sleep(3.0)  # commits before the move, so that the time without them is seen
        move(cluster, source, to)
        cluster.wait_owned({to}, pchannels=PCHANNELS, deadline=WAIT)
    time.sleep(3.0)
    watching.stop()
    return list(watching.observed())


def _drained(cluster: LocalCluster, source: str, to: str) -> None:
    control.undrain(cluster.store, to)
    control.drain(cluster.store, source)


def _killed(cluster: LocalCluster, source: str, to: str) -> None:
    control.undrain(cluster.store, to)
    cluster.jobs.pop(source).kill()
    cluster.wait_owned({to}, pchannels=PCHANNELS, deadline=WAIT)
    cluster.node(source)
    end = time.monotonic() + WAIT
    while not cluster.session(source):
        if time.monotonic() > end:
            raise TimeoutError(cluster.log_tails())
        time.sleep(0.05)


def _told(found: Sequence[ObservedMove], cause: str) -> dict[str, Any]:
    mine = [move for move in found if move.cause == cause]
    return {
        "moves": len(mine),
        "handed_over_s": _spread([move.assigned_at - move.decided_at for move in mine]),
        "stood_still_s": _spread([move.downtime_seconds for move in mine if move.downtime_seconds is not None]),
    }


def _spread(values: Sequence[float]) -> dict[str, float]:
    ordered = sorted(values)
    p99 = ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]
    return {"p50": round(statistics.median(ordered), 4), "p99": round(p99, 4), "max": round(ordered[-1], 4)}


def broadcast(folder: Path, *, vchannels: int = 64, times: int) -> dict[str, Any]:
    """Measure the creation of a partition on `vchannels` VChannels of 16 PChannels, as a client requests it.

    The time ends when all of them and the catalog have it. The baseline appends the same messages one after the other
    and records nothing.
    """
    with deployment(folder, pchannels=16) as (_, client, _):
        client.catalog.create_collection("wide", SCHEMA, vchannels=vchannels)
        plainly = client.catalog.create_collection("plainly", SCHEMA, vchannels=vchannels)
        plain, whole = [], []
        for number in range(times):
            term = {name: client.catalog.term(name) for name in plainly.pchannels}
            start = time.perf_counter()
            for target in plainly.vchannels:
                pchannel = pchannel_of(target)
                message = builders.create_partition(
                    f"p{number}",
                    vchannel=target,
                    collection_id=plainly.id,
                    partition_id=1_000 + number,
                    term=term[pchannel],
                )
                client.connection.append(pchannel, [encode_entry([message])]).result()
            plain.append(time.perf_counter() - start)
            start = time.perf_counter()
            client.catalog.create_partition("wide", f"p{number}")
            whole.append(time.perf_counter() - start)
    return {"vchannels": vchannels, "one_by_one_s": _spread(plain), "broadcast_s": _spread(whole)}


def discovery(folder: Path, *, times: int, every: float = 0.1, meta: str = "") -> dict[str, Any]:
    """Measure the time from the commit of a change to one of 16 assignments until a follower has it.

    The follower polls every `every` seconds. Also measures a poll that finds nothing.
    """
    clock = SystemClock()
    with ExitStack() as opened:
        settings = Settings(
            data_dir=folder / "data", meta_store=opened.enter_context(meta_store(folder / "meta", meta))
        )
        store, other = (opened.enter_context(open_cluster_store(settings, clock)) for _ in range(2))
        records = [
            ChannelRecord(f"dml_{number}", INGEST).begin_assignment("n1@1", "grpc://n1", "") for number in range(16)
        ]
        store.commit([Put(each.key, each.complete_assignment().encode()) for each in records])
        follower = AssignmentCache(MetaStoreAssignmentSource(other))
        follower.refresh()
        idle = []
        for _ in range(times):
            start = time.perf_counter()
            follower.refresh()
            idle.append(time.perf_counter() - start)
        ended, seen = threading.Event(), threading.Condition()

        def follow() -> None:
            while not ended.wait(every):
                follower.refresh()
                with seen:
                    seen.notify_all()

        thread = threading.Thread(target=follow)
        thread.start()
        latencies = []
        for number in range(times):
            record = records[number % 16] = records[number % 16].begin_assignment("n2@1", "grpc://n2", "")
            store.commit([Put(record.key, record.complete_assignment().encode())])
            start = time.perf_counter()
            with seen:
                while (known := follower.get(record.pchannel, INGEST)) is None or known.term < record.term:
                    if not seen.wait(WAIT):
                        raise TimeoutError(record.pchannel)
            latencies.append(time.perf_counter() - start)
        ended.set()
        thread.join()
    return {"every_s": every, "look_s": _spread(idle), "seen_s": _spread(latencies)}
