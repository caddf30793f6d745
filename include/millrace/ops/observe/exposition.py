"""All of Millrace's metrics in one Prometheus text: the read model's own, the append host's, and those of a job's endpoint.

A family that several of them report is one family here; of two samples with the same labels that of the process itself
stands. Counters that the WAL table keeps (rows by PChannel) come from it: they survive every restart.
"""

from __future__ import annotations

import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator
from typing import Final

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from millrace.metrics import Metrics
from millrace.ops.observe.models import Overview

JOB_SECONDS: Final = 0.5
"""How long a job's endpoint may take."""
MOST_JOB_BYTES: Final = 8 << 20


class _Merged:
    """Families of several expositions, as a collector."""

    def __init__(self, families: Iterable[Metric]) -> None:
        self._families: dict[str, Metric] = {}
        seen: set[tuple[str, tuple[tuple[str, str], ...]]] = set()
        for family in families:
            known = self._families.get(family.name)
            if known is None:
                known = self._families[family.name] = Metric(family.name, family.documentation, family.type)
            for sample in family.samples:
                key = (sample.name, tuple(sorted(sample.labels.items())))
                if key not in seen:
                    seen.add(key)
                    known.samples.append(sample)

    def collect(self) -> Iterator[Metric]:
        yield from (family for family in self._families.values() if family.samples)


def exposition(overview: Overview, *, host: str, job: str) -> bytes:
    """The text, from the overview and what append host and job say themselves."""
    registry = CollectorRegistry()
    texts = [job, host, of_overview(overview).decode()]
    registry.register(_Merged(family for text in texts for family in text_string_to_metric_families(text)))
    return generate_latest(registry)


def of_overview(overview: Overview) -> bytes:
    """What the read model knows by itself."""
    metrics = Metrics()
    for each in overview.pchannels:
        name = each.name
        metrics.wal_committed_rows_total.labels(name, "message").inc(each.messages)
        metrics.wal_committed_rows_total.labels(name, "rejection").inc(each.rejections)
        metrics.wal_last_confirmed_time_tick.labels(name).set(int(each.time_tick))
        metrics.recovery_persisted_time_tick.labels(name).set(int(each.flushed_tick))
        metrics.wal_inflight_txn.labels(name).set(each.open_transactions)
        metrics.wal_growing_segment_rows_total.labels(name).set(each.growing_rows)
        metrics.wal_growing_segment_bytes.labels(name).set(each.growing_bytes)
        metrics.wal_parked.labels(name).set(bool(each.parked))
        metrics.vchannel_total.labels(name).set(each.vchannels)
        if each.owner is not None:
            metrics.pchannel_info.labels(name, str(each.term), "streaming-node").set(1)
        if each.lag_seconds is not None:
            metrics.wal_lag_seconds.labels(name).set(each.lag_seconds)
    return metrics.render()


def job_metrics(port: int) -> str:
    """What a job serves on this machine; "" where none does."""
    if not port:
        return ""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=JOB_SECONDS) as answer:
            data: bytes = answer.read(MOST_JOB_BYTES)
        return data.decode()
    except (urllib.error.URLError, OSError, ValueError):
        return ""
