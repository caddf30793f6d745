"""Charts from the samples that streaming queries write (millrace.node.range_loop.samples): rates, lags and freshness.

Counters start at zero with each process. A rate is the increase within a bucket divided by its seconds. A bucket
without a finished micro-batch has the rate 0 and no lag. The query's progress file adds the last point, because the
last micro-batches of a burst may have no sample.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

from millrace.base.settings import Settings
from millrace.node.range_loop.samples import RETENTION_SECONDS, samples_file
from millrace.observe.models import HistoryView, JobView, Series

BUCKETS: Final = 120
WINDOWS: Final = {"15m": 900, "1h": 3600, "6h": 21600, "24h": 86400}
"""Windows that a chart can show, in seconds."""
MAX_READ_BYTES: Final = 16 << 20
"""Only this much of the end of a larger file is read. Millrace itself writes no such file."""


class SamplePoint(NamedTuple):
    """One sample."""

    at: float
    pid: int
    batches: int
    rows: int
    bytes: int
    lag: float | None


@dataclass
class _Read:
    """The part of a file that was read so far."""

    inode: int = 0
    offset: int = 0
    points: list[SamplePoint] = field(default_factory=list)


class SampleFiles:
    """The samples of each query. Reads only what was appended since the last call. Thread-safe."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._lock = threading.Lock()
        self._read: dict[str, _Read] = {}

    def points(self, query: str) -> list[SamplePoint]:
        """Return the samples of a query in time order."""
        path = samples_file(self._settings, query)
        with self._lock:
            read = self._read.setdefault(query, _Read())
            try:
                _grow(path, read)
            except OSError:
                self._read[query] = read = _Read()
            return list(read.points)


def _grow(path: Path, read: _Read) -> None:
    with path.open("rb") as file:
        status = path.stat()
        if status.st_ino != read.inode or status.st_size < read.offset:
            read.inode, read.offset, read.points = status.st_ino, max(0, status.st_size - MAX_READ_BYTES), []
        file.seek(read.offset)
        data = file.read(MAX_READ_BYTES)
    whole = data[: data.rfind(b"\n") + 1]
    read.offset += len(whole)
    read.points += filter(None, map(_point, whole.splitlines()))
    if read.points and read.points[0].at < read.points[-1].at - 2 * RETENTION_SECONDS:
        read.points = [each for each in read.points if each.at > read.points[-1].at - RETENTION_SECONDS]


def _point(line: bytes) -> SamplePoint | None:
    try:
        value: dict[str, Any] = json.loads(line)
        lags = [float(each) for each in dict(value.get("lag") or {}).values()]
        return SamplePoint(
            float(value["at"]),
            int(value["pid"]),
            int(value["batches"]),
            int(value["rows"]),
            int(value.get("bytes", 0)),
            max(lags, default=None),
        )
    except (ValueError, KeyError, TypeError):
        return None


def with_current(points: list[SamplePoint], job: JobView) -> list[SamplePoint]:
    """Return the samples, followed by the query's current progress."""
    if job.at is None or job.pid is None or (points and points[-1].at >= job.at):
        return points
    return [*points, SamplePoint(job.at, job.pid, job.batches, job.rows, job.log_bytes, None)]


def build_charts(node: list[SamplePoint], flusher: list[SamplePoint], *, now: float, seconds: int) -> HistoryView:
    """Return the series of the overview's charts over the last `seconds`."""
    step = seconds / BUCKETS
    end = now // step * step  # whole buckets, so that they do not move between two requests
    start = end - seconds
    buckets = range(BUCKETS)

    def series(name: str, label: str, unit: Any, values: Iterable[float | None]) -> Series:
        return Series(name=name, label=label, unit=unit, values=[_rounded(value) for value in values])

    rows, size = _rates(node, start, step, "rows"), _rates(node, start, step, "bytes")
    flushed = _rates(flusher, start, step, "rows")
    wal, tables = _lags(node, start, step), _lags(flusher, start, step)
    return HistoryView(
        start=start,
        step=step,
        seconds=seconds,
        series=[
            series("wal_messages", "into the WAL", "messages/s", (rows[each] for each in buckets)),
            series("table_rows", "into collections", "rows/s", (flushed[each] for each in buckets)),
            series("log_bytes", "read from the log", "B/s", (size[each] for each in buckets)),
            series("wal_lag", "WAL", "s", (wal[each] for each in buckets)),
            series("table_lag", "collections' tables", "s", (tables[each] for each in buckets)),
        ],
    )


def _rates(points: list[SamplePoint], start: float, step: float, name: str) -> list[float]:
    sums = [0.0] * BUCKETS
    before: SamplePoint | None = None
    for point in points:
        count = getattr(point, name)
        if before is not None and before.pid == point.pid:
            came = max(0, count - getattr(before, name))
        else:  # a process's first sample covers its first micro-batch, unless that sample was thinned out
            came = count if point.batches == 1 else 0
        before = point
        place = int((point.at - start) // step)
        if 0 <= place < BUCKETS:
            sums[place] += came
    return [each / step for each in sums]


def _lags(points: list[SamplePoint], start: float, step: float) -> list[float | None]:
    found: list[float | None] = [None] * BUCKETS
    for point in points:
        place = int((point.at - start) // step)
        if point.lag is not None and 0 <= place < BUCKETS:
            found[place] = max(found[place] or 0.0, point.lag)
    return found


def current_rates(points: list[SamplePoint], *, now: float, seconds: float = 10.0) -> tuple[float, float]:
    """Return rows and bytes per second over the last `seconds`."""
    rows = size = 0
    before: SamplePoint | None = None
    for point in points[-64:]:
        if before is not None and point.at > now - seconds and before.pid == point.pid:
            rows += max(0, point.rows - before.rows)
            size += max(0, point.bytes - before.bytes)
        before = point
    return rows / seconds, size / seconds


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)
