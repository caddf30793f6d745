"""Samples behind micro-batches: bounded on the disk, and charts that show every row once."""

from __future__ import annotations

import itertools
import json
import os
from contextlib import closing
from pathlib import Path

import pytest

from millrace.base.settings import Settings
from millrace.node.flush.definition import FlushLoop
from millrace.node.ingest.definition import IngestLoop
from millrace.node.range_loop.samples import (
    RETENTION_SECONDS,
    THIN_SECONDS,
    UNTHINNED_SECONDS,
    SampleFile,
    samples_file,
)
from millrace.observe.charts import BUCKETS, SampleFiles, build_charts, current_rates, with_current
from millrace.observe.models import JobView
from millrace.observe.observer import Observer
from tests.node.range_loop.host import Host
from tests.observe.observe_world import close_world, make_world

NOW = 1_800_000_000.0


class Clock:
    """Time that a test sets."""

    def __init__(self, now: float) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


def _lines(path: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_at_most_one_sample_a_second_is_written(tmp_path: Path) -> None:
    clock = Clock(NOW)
    history = SampleFile(tmp_path / "history" / "q.jsonl", clock=clock)
    for _ in range(100):
        history.add({"batches": 1, "rows": 1})
        clock.now += 0.1
    assert 9 <= len(_lines(tmp_path / "history" / "q.jsonl")) <= 11


@pytest.mark.slow
def test_a_long_run_of_samples_stays_small_and_keeps_the_last_day(tmp_path: Path) -> None:
    path, clock = tmp_path / "q.jsonl", Clock(NOW)
    history = SampleFile(path, clock=clock)
    for number in range(32_000):  # more than a day, a sample every three seconds
        clock.now = NOW + 3.0 * number
        history.add({"batches": number + 1, "rows": number})
    times = [line["at"] for line in _lines(path)]
    assert times == sorted(times)
    assert times[0] >= clock.now - RETENTION_SECONDS - 2 * 3600
    old = [at for at in times if at < clock.now - UNTHINNED_SECONDS - 2 * 3600]
    assert len(old) > 9_000
    assert min(behind - before for before, behind in itertools.pairwise(old)) >= THIN_SECONDS
    assert path.stat().st_size < 3 << 20


def test_a_full_disk_and_a_torn_line_cost_a_piece_of_a_chart(tmp_path: Path, settings: Settings) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    SampleFile(blocked / "q.jsonl").add({"batches": 1, "rows": 1})  # a folder that cannot be made
    path = samples_file(settings, "flusher")
    path.parent.mkdir(parents=True)
    path.write_text('{"at": 1, "pid": 1, "batches": 1, "rows": 5}\nnonsense\n{"at": 2, "pid": 1, "ba')
    files = SampleFiles(settings)
    assert [point.rows for point in files.points("flusher")] == [5]
    path.write_text(path.read_text() + 'tches": 2, "rows": 9}\n')
    assert [point.rows for point in files.points("flusher")] == [5, 9], "read on from where it stood"
    assert files.points("streaming-node") == []


def test_every_row_is_in_one_bucket_across_restarts(settings: Settings) -> None:
    path = samples_file(settings, "streaming-node")
    path.parent.mkdir(parents=True)
    lines = []
    for pid, rows in ((1, (10, 30, 60)), (2, (5, 25))):
        for number, count in enumerate(rows):
            at = NOW - 600 + pid * 100 + number * 10
            lines.append(
                {"at": at, "pid": pid, "batches": number + 1, "rows": count, "bytes": 2 * count, "lag": {"a": pid}}
            )
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    points = SampleFiles(settings).points("streaming-node")
    job = JobView(name="streaming-node", state="running", pid=2, at=NOW - 300, batches=9, rows=100, log_bytes=200)
    view = build_charts(with_current(points, job), [], now=NOW, seconds=900)
    series = {each.name: each.values for each in view.series}
    assert all(len(values) == BUCKETS for values in series.values())
    assert sum(value or 0 for value in series["wal_messages"]) * view.step == pytest.approx(60 + 100, rel=1e-3)
    assert sum(value or 0 for value in series["log_bytes"]) * view.step == pytest.approx(320, rel=1e-3)
    assert set(series["wal_lag"]) == {None, 1.0, 2.0}
    assert set(series["table_rows"]) == {0.0}
    # A process whose first samples were thinned away does not show all its rows at once.
    assert set(build_charts(points[1:2], [], now=NOW, seconds=900).series[0].values) == {0.0}


def test_the_rate_now_is_of_the_last_seconds(settings: Settings) -> None:
    clock = Clock(NOW)
    history = SampleFile(samples_file(settings, "streaming-node"), clock=clock)
    for number in range(20):
        clock.now = NOW + number
        history.add({"batches": number + 1, "rows": 100 * number, "bytes": 1000 * number})
    rows, size = current_rates(SampleFiles(settings).points("streaming-node"), now=clock.now)
    assert (rows, size) == (100.0, 1000.0)
    assert current_rates(SampleFiles(settings).points("streaming-node"), now=clock.now + 60) == (0.0, 0.0)
    assert _lines(samples_file(settings, "streaming-node"))[0]["pid"] == os.getpid()


@pytest.mark.slow
def test_both_queries_leave_samples_that_the_charts_show(settings: Settings) -> None:
    world = make_world(settings)
    try:
        world.client.new_producer().insert(world.users, world.rows(7000, 7100))
        for definition in (IngestLoop(settings), FlushLoop(settings)):
            with closing(Host(definition)) as host:
                assert host.step()
    finally:
        close_world(world)
    observer = Observer(settings)
    series = {each.name: each for each in observer.history().series}
    now = observer.overview()
    observer.close()
    for query_name, job in zip(("streaming-node", "flusher"), now.jobs, strict=True):
        (last,) = SampleFiles(settings).points(query_name)[-1:]
        assert (last.rows, last.pid, job.state) == (job.rows, os.getpid(), "running")
        assert last.lag is not None
        assert last.rows >= 1
    assert {each.unit for each in series.values()} == {"messages/s", "rows/s", "B/s", "s"}
