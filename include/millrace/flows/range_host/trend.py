"""A flow's last quarter of an hour, as rates for charts: samples from its worker in its folder's ``samples.jsonl``.

A sample has the counts of all tasks since their beginning, and the current lag and latency. It is for display only;
History bounds the file.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

from pydantic import BaseModel, Field

from millrace.base.settings import Settings
from millrace.flows.range_host.status import PipelineStatus, flow_folder

EVERY_SECONDS: Final = 5.0
SECONDS: Final = 900
BUCKETS: Final = 60
_MOST_BYTES: Final = 256 << 10
"""Bytes read from the end of the file: more than samples every few seconds fill in that time."""
_COUNTS: Final = ("records_in", "records_out", "records_error")


class Trend(BaseModel):
    """Values in buckets of `step` seconds, the newest last; null for a bucket without a sample."""

    start: float = Field(description="seconds since 1970")
    step: float
    records_in: list[float] = Field(description="records a second")
    records_out: list[float]
    records_error: list[float]
    lag: list[float | None] = Field(description="the most unread records")
    p95_ms: list[float | None] = Field(
        description="95th percentile of the time to acknowledgement, of the slowest task"
    )


def samples_path(settings: Settings, flow: str) -> Path:
    return flow_folder(settings, flow) / "samples.jsonl"


def sample_of(status: PipelineStatus) -> dict[str, Any]:
    """Return the sample of a status: counts of all tasks, lag, and the slowest task's p95 latency."""
    late = [each.latency_ms["p95"] for each in status.tasks if "p95" in each.latency_ms]
    counts = {name: sum(getattr(each, name) for each in status.tasks) for name in _COUNTS}
    return {**counts, "lag": sum(each.lag for each in status.tasks), "p95_ms": max(late, default=None)}


def read_trend(settings: Settings, flow: str, *, now: float) -> Trend:
    """Return the rates of the last quarter of an hour before `now`; zero while no worker ran."""
    step = SECONDS / BUCKETS
    start = now // step * step - SECONDS  # whole buckets, which do not shift between two calls
    rates = {name: [0.0] * BUCKETS for name in _COUNTS}
    most: dict[str, list[float | None]] = {name: [None] * BUCKETS for name in ("lag", "p95_ms")}
    before: dict[str, Any] | None = None
    for sample in _samples(samples_path(settings, flow)):
        place = int((sample["at"] - start) // step)
        if 0 <= place < BUCKETS:
            for name, sums in rates.items():
                came = 0 if before is None else max(0, sample.get(name, 0) - before.get(name, 0))
                sums[place] += came / step
            for name, values in most.items():
                if sample.get(name) is not None:
                    values[place] = max(values[place] or 0.0, float(sample[name]))
        before = sample
    rounded = {name: [round(value, 3) for value in sums] for name, sums in rates.items()}
    return Trend.model_validate({"start": start, "step": step, **rounded, **most})


def _samples(path: Path) -> list[dict[str, Any]]:
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _MOST_BYTES))
            lines = file.read(_MOST_BYTES).splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        try:
            value = json.loads(line)
            if isinstance(value, dict) and isinstance(value["at"], int | float):
                found.append(value)
        except (ValueError, KeyError):  # truncated by a crash, or by the start of the read
            continue
    return found
