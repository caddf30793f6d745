"""Tables on an S3 of this host beside tables on its disk: node, flusher, publisher, reads, compaction, freshness.

Both sides have the same rows and are measured in turn, without Spark but for freshness. The store is versitygw, whose
objects lie on the same disk. Its own limit is measured beside it, by obstore alone: requests a second and MB/s.
Requests are those of its access log. Prices are S3's in us-east-1.
"""

from __future__ import annotations

import os
import re
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from bench.deployment import NAME, SCHEMA, rows
from bench.freshness_bench import freshness
from millrace.base.settings import Settings
from millrace.brokers.versitygw import VersityGateway
from millrace.client.database import Database
from millrace.node.flush.definition import flush_to_end
from millrace.node.ingest.definition import ingest_to_end
from millrace.node.publish.definition import publish
from millrace.operations.compaction.declaration import CompactionParams
from millrace.operations.compaction.run import compact
from millrace.storage.objects import PART_BYTES
from millrace.storage.store import TableStore, list_below, store_at

DOLLARS: Final = {"Put": 5e-6, "List": 5e-6, "Get": 4e-7, "Delete": 0.0}
"""Of a request."""
_REQUEST: Final = re.compile(r" s3_(\w+) ")
_KINDS: Final = {"GetObject": "Get", "HeadObject": "Get", "DeleteObjects": "Delete", "DeleteObject": "Delete"}
_COMPACTION: Final = CompactionParams(min_files=2, fold="always", keep_history_hours=0, vacuum=False)
ROW_BYTES: Final = 1000


def parts(folder: Path, quick: bool) -> dict[str, Callable[[], dict[str, Any]]]:
    """Return the parts of the section by name."""
    return {
        "steps": lambda: _steps(folder / "steps", rounds=3 if quick else 7, count=5_000 if quick else 50_000),
        "freshness": lambda: _freshness(folder / "freshness", seconds=16.0 if quick else 40.0),
    }


@contextmanager
def _gateway(folder: Path) -> Iterator[tuple[str, Path]]:
    """Run the store; yield the URI for tables, and its access log. This process and its children reach it.

    The URI is the folder's own: a process keeps the clients of a URI, with the port of the server that it had.
    """
    log = folder / "requests.log"
    folder.mkdir(parents=True)
    settings = replace(Settings.load(), data_dir=folder / "server")
    with VersityGateway(folder / "s3", settings=settings, properties={"access-log": str(log)}) as running:
        before = dict(os.environ)
        os.environ.update(running.client_environment)
        try:
            yield f"{running.url}-{folder.name}", log
        finally:
            os.environ.clear()
            os.environ.update(before)


class _Side:
    """One deployment, with its log on the disk, and its seconds by step."""

    def __init__(self, folder: Path, tables: str, stack: ExitStack) -> None:
        self.settings = replace(Settings.load(env={}), data_dir=folder, tables=tables, pchannels=2)
        self.db = stack.enter_context(Database.in_folder(self.settings))
        stack.callback(self.db.connection.service.shutdown)
        self.db.catalog.ensure_pchannels(2)
        self.number = self.db.catalog.create_collection(NAME, SCHEMA, vchannels=2).id
        self.seconds: dict[str, list[float]] = {}

    def timed(self, step: str, act: Callable[[], object]) -> None:
        start = time.perf_counter()
        act()
        self.seconds.setdefault(step, []).append(time.perf_counter() - start)

    def round(self, first: int, count: int) -> None:
        self.db[NAME].insert(rows(first, count, size=ROW_BYTES))
        self.timed("node", lambda: ingest_to_end(self.settings, self.db.log))
        self.timed("flusher", lambda: flush_to_end(self.settings))
        self.timed("publish", lambda: publish(self.settings, self.number))
        self.timed("first read", lambda: self.db[NAME].read(columns=["id"]))
        self.timed("read", self.db[NAME].read)
        self.timed("read of a key", lambda: self.db[NAME].get(first + 1))


def _steps(folder: Path, *, rounds: int, count: int) -> dict[str, Any]:
    with _gateway(folder) as (uri, log), ExitStack() as stack:
        disk = _Side(folder / "disk", "", stack)
        store = _Side(folder / "store", uri, stack)
        asked: dict[str, Counter[str]] = {}
        for turn in range(rounds):
            for side in (disk, store) if turn % 2 else (store, disk):
                place = _lines(log)
                side.round(turn * count, count)
                if side is store:
                    asked["rounds"] = asked.get("rounds", Counter()) + _requests(log, place)
        for side in (disk, store):
            place = _lines(log)
            side.timed("compaction", lambda side=side: compact(side.settings, _COMPACTION))  # type: ignore[misc]
            if side is store:
                asked["compaction"] = _requests(log, place)
        gigabytes = rounds * count * ROW_BYTES / 1e9
        dollars = sum(DOLLARS[kind] * each for kind, each in asked["rounds"].items())
        held = sum(list_below(store_at(uri)).values())
        return {
            "rows_of_a_round": count,
            "rounds": rounds,
            "steps": {step: _beside(disk.seconds[step], store.seconds[step]) for step in disk.seconds},
            "requests_of_a_round": {kind: round(each / rounds) for kind, each in sorted(asked["rounds"].items())},
            "requests_of_the_compaction": dict(asked["compaction"]),
            "requests_dollars_per_gb": round(dollars / gigabytes, 5),
            "bytes_held_per_byte_of_rows": round(held / (gigabytes * 1e9), 2),
            "limit": _limit(store_at(f"{uri}-limit")),
        }


def _beside(disk: list[float], store: list[float]) -> dict[str, float]:
    """Return the medians, without the first round, which warms both sides up, and their ratio."""
    pairs = list(zip(disk, store, strict=True))[1:] or [(disk[0], store[0])]
    ratios = [b / a for a, b in pairs]
    return {
        "disk_s": round(statistics.median(a for a, _ in pairs), 3),
        "store_s": round(statistics.median(b for _, b in pairs), 3),
        "ratio": round(statistics.median(ratios), 2),
        "ratio_min": round(min(ratios), 2),
        "ratio_max": round(max(ratios), 2),
    }


def _limit(store: TableStore) -> dict[str, float]:
    """Return what obstore alone gets from the store: small objects and large ones, one after the other."""
    data, large = os.urandom(1024), os.urandom(PART_BYTES)
    puts = [_seconds(lambda number=number: store.replace(f"small/{number}", data)) for number in range(100)]  # type: ignore[misc]
    gets = [_seconds(lambda number=number: store.read(f"small/{number}")) for number in range(100)]  # type: ignore[misc]
    up = [_seconds(lambda number=number: store.replace(f"large/{number}", large)) for number in range(8)]  # type: ignore[misc]
    down = [_seconds(lambda number=number: store.read(f"large/{number}")) for number in range(8)]  # type: ignore[misc]
    return {
        "put_ms": round(1e3 * statistics.median(puts), 2),
        "get_ms": round(1e3 * statistics.median(gets), 2),
        "put_mb_per_s": round(PART_BYTES / 1e6 / statistics.median(up), 1),
        "get_mb_per_s": round(PART_BYTES / 1e6 / statistics.median(down), 1),
    }


def _seconds(act: Callable[[], object]) -> float:
    start = time.perf_counter()
    act()
    return time.perf_counter() - start


def _lines(log: Path) -> int:
    return log.read_text(encoding="utf-8").count("\n") if log.exists() else 0


def _requests(log: Path, after: int) -> Counter[str]:
    """Return the requests since a line of the access log, by kind."""
    found: Counter[str] = Counter()
    for line in log.read_text(encoding="utf-8").splitlines()[after:]:
        request = _REQUEST.search(line)
        if request is not None:
            name = request[1]
            found[_KINDS.get(name, "List" if name.startswith("List") else "Put")] += 1
    return found


def _freshness(folder: Path, *, seconds: float) -> dict[str, Any]:
    """Return how soon rows are visible with Spark's node and flusher, on a disk and on the store."""
    with _gateway(folder) as (uri, _):
        found = {"disk": freshness(folder / "disk", seconds=seconds)}
        found["store"] = freshness(folder / "store", seconds=seconds, tables=uri)
    ratios = {
        name: round(found["store"][name]["p50_s"] / found["disk"][name]["p50_s"], 2)
        for name in ("wal_visible", "read_returned")
    }
    return {**found, "p50_ratios": ratios}
