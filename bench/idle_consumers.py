"""What idle consumers cost: a thousand queues or groups of one process, each with a consumer for which nothing comes.

    python -m bench --only messaging --part "idle consumers"

Each consumer has a group of its own, over collections of one VChannel each on four PChannels. Measured are the process
that has the consumers (threads, memory, CPU, requests/s) and the log's server (threads, memory, CPU), once nothing
changes any more, and how long a row takes to the consumer that waits for it.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import numpy as np
import psutil
import pyarrow as pa

from bench.deployment import ROOT, SCHEMA
from millrace.base.settings import Settings
from millrace.client.database import Database, connect
from millrace.rpc.discovery import read_record
from millrace.rpc.link import Link

_SETTLE_SECONDS = 10.0
_ROWS = 40


def idle_consumers(folder: Path, *, mode: str, consumers: int, lanes: int, seconds: float) -> dict[str, Any]:
    """Measure so many consumers of `mode` "queue" or "stream", over collections of so many VChannels in all."""
    settings = Settings(data_dir=folder / f"idle-{mode}", cache_dir=Settings.load().cache_dir)
    with connect(settings=settings, create=True) as database:
        database.catalog.ensure_pchannels(4)
        for number in range(lanes):
            database.catalog.create_collection(f"tasks{number}", SCHEMA, vchannels=1)
        command = [sys.executable, "-m", "bench.idle_consumers", str(settings.data_dir), mode]
        try:
            done = subprocess.run(
                [*command, str(consumers), str(lanes), str(seconds)],
                cwd=ROOT, stdout=subprocess.PIPE, text=True, timeout=900, check=True,
            )  # fmt: skip
        finally:
            database.connection.service.shutdown()
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def _measure(data: str, mode: str, consumers: int, lanes: int, seconds: float) -> dict[str, Any]:
    settings = Settings(data_dir=Path(data))
    with connect(settings=settings, start=False) as database, _counted() as requests:
        record = read_record(settings.log_path)
        assert record is not None
        here, server = psutil.Process(), psutil.Process(record.pid)
        before = _held(here), _held(server)
        start = time.perf_counter()
        made = [
            database.consumer(f"tasks{number % lanes}", group=f"group{number}", mode=mode)  # type: ignore[call-overload]
            for number in range(consumers)
        ]
        opened = time.perf_counter() - start
        time.sleep(_SETTLE_SECONDS)
        held = _held(here), _held(server)
        requests.clear()
        cpu, start = [_cpu(here), _cpu(server)], time.perf_counter()
        time.sleep(seconds)
        passed = time.perf_counter() - start
        spent = [_cpu(here) - cpu[0], _cpu(server) - cpu[1]]
        asked = Counter(requests)
        found = {
            "consumers": consumers,
            "seconds to open": round(opened, 1),
            "client threads": held[0]["threads"],
            "client KiB a consumer": round((held[0]["KiB"] - before[0]["KiB"]) / consumers, 1),
            "client CPU percent": round(100 * spent[0] / passed, 1),
            "requests_per_s": round(asked.total() / passed, 1),
            "by call": {name: round(count / passed, 1) for name, count in asked.most_common(4)},
            "server threads": held[1]["threads"],
            "server KiB a consumer": round((held[1]["KiB"] - before[1]["KiB"]) / consumers, 1),
            "server CPU percent": round(100 * spent[1] / passed, 1),
            "row to its consumer_ms, p50": _delay(database, made[-1], f"tasks{(consumers - 1) % lanes}"),
        }
        start = time.perf_counter()
        for each in made:
            each.close()
        return found | {"seconds to close": round(time.perf_counter() - start, 1)}


def _delay(database: Database, consumer: Any, name: str) -> float:
    """Return the median of milliseconds from the begin of an insert to its delivery, one row after the other."""
    delays = []
    collection = database[name]
    for number in range(_ROWS):
        row = pa.table({"id": [number], "body": pa.array([np.random.default_rng(number).bytes(100)], pa.binary())})
        start = time.perf_counter()
        collection.insert(row)
        while (came := consumer.poll(timeout=30.0)) is not None:
            consumer.acknowledge(came)
            if not hasattr(came, "changes") or any(True for _ in came.changes()):
                break
        assert came is not None
        delays.append(1000 * (time.perf_counter() - start))
    return round(median(delays), 1)


@contextmanager
def _counted() -> Iterator[Counter[str]]:
    """Count this process's requests to the server, by name."""
    found = Counter[str]()
    act, parts = Link.act, Link.parts

    def counted_act(self: Link, name: str, *given: Any, **more: Any) -> Any:
        found[name] += 1
        return act(self, name, *given, **more)

    def counted_parts(self: Link, request: dict[str, Any], **more: Any) -> Any:
        found[next((key for key in ("tail", "queue", "history", "read") if key in request), "read")] += 1
        return parts(self, request, **more)

    with patch.object(Link, "act", counted_act), patch.object(Link, "parts", counted_parts):
        yield found


def _held(process: psutil.Process) -> dict[str, float]:
    return {"KiB": process.memory_info().rss / 1024, "threads": process.num_threads()}


def _cpu(process: psutil.Process) -> float:
    used = process.cpu_times()
    return float(used.user + used.system)


if __name__ == "__main__":
    folder, kind, *numbers = sys.argv[1:]
    print(json.dumps(_measure(folder, kind, int(numbers[0]), int(numbers[1]), float(numbers[2]))))
