"""How soon an append is visible: in ``wal``, to a read, at 2,000 messages a second of 1 KB with the flusher running."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np

from bench.deployment import deployment, rows, spark_job
from millrace.base.settings import Settings
from millrace.message import builders
from millrace.message.ids import pchannel_of
from millrace.message.keys import vchannel_index
from millrace.tables.read.arrow import read_arrow
from millrace.tables.wal.table import WalTable

RATE = 2000
CALL_MESSAGES = 40
WARM_UP_SECONDS = 15.0


def _nothing(_settings: Settings) -> AbstractContextManager[object]:
    return nullcontext()


def freshness(
    folder: Path,
    *,
    seconds: float = 40.0,
    background: Callable[[Settings], AbstractContextManager[object]] = _nothing,
    tables: str = "",
) -> dict[str, Any]:
    """Return percentiles in seconds: from append to the commit in ``wal``, and to a read that starts then.

    What is measured is measured inside the context that `beside` makes.
    """
    with deployment(folder, tables=tables) as (settings, client, collection), spark_job(settings, "--with-flusher"):
        stop = threading.Event()
        appended: dict[str, list[tuple[float, int]]] = {}
        ids = iter(range(0, 1 << 40, CALL_MESSAGES))
        producer = client.new_producer()

        def append() -> None:
            start, calls = time.monotonic(), 0
            while not stop.is_set():
                due = start + calls * CALL_MESSAGES / RATE
                if (wait := due - time.monotonic()) > 0:
                    stop.wait(wait)
                table = rows(next(ids), CALL_MESSAGES)
                homes = vchannel_index(table.column("id"), len(collection.vchannels))
                messages = [
                    builders.insert(
                        table.slice(row, 1).to_batches()[0],
                        vchannel=collection.vchannels[int(homes[row])],
                        collection_id=collection.id,
                        partition_id=1,
                        term=0,
                    )
                    for row in range(CALL_MESSAGES)
                ]
                sent = time.monotonic()
                written = producer.send(messages)
                for vchannel in collection.vchannels:
                    appended.setdefault(pchannel_of(vchannel), []).append((sent, written.last_tick))
                calls += 1

        thread = threading.Thread(target=append)
        thread.start()
        try:
            stop.wait(WARM_UP_SECONDS)
            with background(settings):
                visible = _watch(settings.wal_uri, appended, seconds / 2)
                reads = _read(settings, collection.id, appended, seconds / 2)
        finally:
            stop.set()
            thread.join()
    return {
        "rate_messages_per_s": RATE,
        "wal_visible": _percentiles(visible),
        "read_returned": _percentiles(reads),
    }


def _watch(uri: str, appended: dict[str, list[tuple[float, int]]], seconds: float) -> list[float]:
    table = WalTable.open(uri)
    first = {pchannel: len(calls) for pchannel, calls in appended.items()}
    seen = dict(first)
    waits: list[float] = []
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        table.refresh()
        now = time.monotonic()
        for pchannel, calls in appended.items():
            tick = table.last_tick(pchannel)
            while seen[pchannel] < len(calls) and calls[seen[pchannel]][1] <= tick:
                waits.append(now - calls[seen[pchannel]][0])
                seen[pchannel] += 1
        time.sleep(0.02)  # a look costs CPU that the node needs; the error is half of this
    return waits


def _read(
    settings: Any, collection_id: int, appended: dict[str, list[tuple[float, int]]], seconds: float
) -> list[float]:
    waits: list[float] = []
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        tick = min(calls[-1][1] for calls in appended.values())
        start = time.monotonic()
        read_arrow(settings, collection_id, at=tick, deadline=30.0)
        waits.append(time.monotonic() - start)
    return waits


def _percentiles(values: list[float]) -> dict[str, float]:
    if not values:
        return {"n": 0}
    p50, p99 = np.percentile(values, [50, 99])
    return {"n": len(values), "p50_s": round(float(p50), 3), "p99_s": round(float(p99), 3)}
