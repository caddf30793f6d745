"""All metrics of Millrace as one Prometheus text.

It merges those of the read model, the log server with its append host, and the jobs.

A family that several sources report is merged into one. Of two samples with the same labels, the one of the process
itself is kept. A 0 is replaced by another value, because every process reports 0 for unlabelled metrics that do not
concern it. Counters that the WAL table stores (rows by PChannel) come from it, so they survive restarts.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from millrace.base.file_lock import is_report_live
from millrace.base.metrics import METRICS_SUFFIX, Metrics
from millrace.base.settings import Settings
from millrace.flows.range_host.status import metrics_path, status_path, workers_of
from millrace.observe.jobs import node_settings
from millrace.observe.models import Overview

_log: Final = logging.getLogger(__name__)


class _Merged:
    """A collector for the merged families of several expositions."""

    def __init__(self, families: Iterable[Metric]) -> None:
        self._families: dict[str, Metric] = {}
        seen: dict[tuple[str, tuple[tuple[str, str], ...]], Sample] = {}
        for family in families:
            known = self._families.get(family.name)
            if known is None:
                known = self._families[family.name] = Metric(family.name, family.documentation, family.type)
            for sample in family.samples:
                key = (sample.name, tuple(sorted(sample.labels.items())))
                if (there := seen.setdefault(key, sample)) is sample:
                    known.samples.append(sample)
                elif not there.value and sample.value:
                    seen[key] = known.samples[known.samples.index(there)] = sample

    def collect(self) -> Iterator[Metric]:
        yield from (family for family in self._families.values() if family.samples)


def render_exposition(overview: Overview, *, host: str, jobs: Sequence[str], backlogs: bytes) -> bytes:
    """Render the overview, the groups' backlogs, and the metrics of append host and jobs."""
    return merge_expositions([*jobs, host, overview_metrics(overview).decode(), backlogs.decode()])


def merge_expositions(texts: Iterable[str]) -> bytes:
    """Merge several expositions into one."""
    registry = CollectorRegistry()
    registry.register(_Merged(family for text in texts for family in text_string_to_metric_families(text)))
    return generate_latest(registry)


def overview_metrics(overview: Overview) -> bytes:
    """Return the metrics of the read model itself."""
    metrics = Metrics()
    for found in overview.findings:
        metrics.health_findings.labels(found.severity, found.kind).inc()
    for each in overview.pchannels:
        name = each.name
        metrics.wal_committed_rows_total.labels(name, "message").inc(each.messages)
        metrics.wal_committed_rows_total.labels(name, "rejection").inc(each.rejections)
        metrics.wal_committed_time_tick.labels(name).set(int(each.time_tick))
        metrics.recovery_persisted_time_tick.labels(name).set(int(each.flushed_tick))
        metrics.wal_inflight_txn.labels(name).set(each.open_transactions)
        metrics.wal_growing_segment_rows_total.labels(name).set(each.growing_rows)
        metrics.wal_growing_segment_bytes.labels(name).set(each.growing_bytes)
        metrics.wal_parked.labels(name).set(bool(each.parked))
        metrics.vchannel_total.labels(name).set(each.vchannels)
        if each.owner is not None:
            metrics.pchannel_info.labels(name, str(each.term), "streaming-node").set(1)
        if each.log_bytes is not None:
            metrics.log_stored_bytes.labels(name).set(each.log_bytes)
        if each.lag_seconds is not None:
            metrics.wal_lag_seconds.labels(name).set(each.lag_seconds)
    return metrics.render()


def job_metrics(settings: Settings) -> list[str]:
    """Return the metrics of running streaming jobs, which each writes beside its heartbeat, and of pipeline workers."""
    beats = [path for each in node_settings(settings) for path in each.node_run_path.glob("*.heartbeat.json")]
    found = [_left_by(settings, path, path.with_suffix(METRICS_SUFFIX)) for path in beats]
    return [*filter(None, found), *pipeline_metrics(settings)]


def pipeline_metrics(settings: Settings) -> list[str]:
    """Return the metrics of running pipeline workers."""
    names = sorted(path.parent.name for path in (settings.data_dir / "pipelines").glob("*/status.json"))
    workers = [(name, worker) for name in names for worker in workers_of(settings, name)]
    found = [_left_by(settings, status_path(settings, *each), metrics_path(settings, *each)) for each in workers]
    return [*filter(None, found)]


def _left_by(settings: Settings, heartbeat: Path, left: Path) -> str:
    """Return the metrics that a process wrote, or "" if it no longer runs or wrote none."""
    try:
        beat = json.loads(heartbeat.read_text(encoding="utf-8"))
        if is_report_live(settings.run_path, int(beat["pid"]), float(beat["at"])):
            return left.read_text(encoding="utf-8")
    except (OSError, ValueError, KeyError, TypeError):
        pass
    return ""


def backlog_metrics(lags: Mapping[tuple[str, str], tuple[int, float]]) -> bytes:
    """Return by consumer group and PChannel the messages in the ``wal`` table after its positions, and their age."""
    metrics = Metrics()
    for (group, pchannel), (count, seconds) in lags.items():
        metrics.consumer_backlog_messages.labels(group, pchannel).set(count)
        metrics.consumer_group_lag_seconds.labels(group, pchannel).set(seconds)
    return metrics.render()
