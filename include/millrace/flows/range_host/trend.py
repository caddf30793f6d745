"""A flow's last quarter of an hour, as rates for charts: samples from its worker in its folder's ``samples.jsonl``.

A sample has the counts of all tasks since they began, and the current lag and latency. Nothing decides by it; History
bounds the file.
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
"""Of the end of the file: more than a sample every few seconds fills in that time."""
_COUNTS: Final = ("records_in", "records_out", "records_error")


class Trend(BaseModel):
    """By buckets of so many seconds, the newest last; null where nothing was said."""

    start: float = Field(description="seconds since 1970")
    step: float
    records_in: list[float] = Field(description="records a second")
    records_out: list[float]
    records_error: list[float]
    lag: list[float | None] = Field(description="records that were not read yet, at most")
    p95_ms: list[float | None] = Field(description="95 of 100 records were acknowledged within it, of the slowest task")


def samples_path(settings: Settings, flow: str) -> Path:
    return flow_folder(settings, flow) / "samples.jsonl"


def sample_of(status: PipelineStatus) -> dict[str, Any]:
    """What is kept of a status."""
    late = [each.latency_ms["p95"] for each in status.tasks if "p95" in each.latency_ms]
    counts = {name: sum(getattr(each, name) for each in status.tasks) for name in _COUNTS}
    return {**counts, "lag": sum(each.lag for each in status.tasks), "p95_ms": max(late, default=None)}


def read_trend(settings: Settings, flow: str, *, now: float) -> Trend:
    """The last quarter of an hour; zeros where no worker ran."""
    step = SECONDS / BUCKETS
    start = now // step * step - SECONDS  # whole buckets, which stand still between two looks
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
        except (ValueError, KeyError):  # cut by a crash, or by where the reading began
            continue
    return found
