"""Jobs of a pool: each runs at its time or when it is woken, never twice at once, in few threads."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator

import pytest

from millrace.base import job_pool as module
from millrace.base.job_pool import JobPool
from tests.waiting import until


@pytest.fixture
def pool() -> Iterator[JobPool]:
    with JobPool("test", threads=3) as made:
        yield made


def test_a_thousand_idle_jobs_need_no_thread_and_no_run(pool: JobPool) -> None:
    ran = Counter[int]()

    def run(number: int) -> None:
        ran[number] += 1

    jobs = [pool.start(lambda number=number: run(number)) for number in range(1000)]  # type: ignore[misc]
    until(lambda: len(ran) == 1000, "each has run once")
    until(lambda: pool.runs == 1000, "they are counted")
    jobs[7].wake()
    until(lambda: ran[7] == 2, "the woken one has run again")
    assert pool.runs == 1001
    assert pool.threads <= 3
    for job in jobs:
        job.stop()
    assert len(pool) == 0


def test_a_job_that_is_woken_while_it_runs_runs_again_and_never_twice_at_once(pool: JobPool) -> None:
    inside, most, runs = 0, 0, 0
    guard, go = threading.Lock(), threading.Event()

    def run() -> None:
        nonlocal inside, most, runs
        with guard:
            inside += 1
            most = max(most, inside)
        go.wait(10.0)
        with guard:
            inside, runs = inside - 1, runs + 1

    job = pool.start(run)
    until(lambda: inside == 1, "it runs")
    for _ in range(5):
        job.wake()
    go.set()
    until(lambda: runs == 2, "it runs again")
    assert most == 1


def test_jobs_that_always_have_work_take_turns_with_the_others(pool: JobPool) -> None:
    busy = [pool.start(lambda: time.sleep(0.001) or 0.0) for _ in range(6)]
    other = threading.Event()
    pool.start(lambda: other.set())
    assert other.wait(10.0)
    for job in busy:
        job.stop()


def test_each_runs_at_its_time_though_an_earlier_one_comes_later(pool: JobPool) -> None:
    ran: list[tuple[str, float]] = []
    begun = time.monotonic()

    def after(name: str, seconds: float) -> None:
        waits = [seconds]

        def run() -> float | None:
            if waits:
                return waits.pop()
            ran.append((name, time.monotonic() - begun))
            return None

        pool.start(run)

    for name, seconds in (("late", 0.4), ("later", 0.5), ("early", 0.1)):
        after(name, seconds)
    until(lambda: len(ran) == 3, "all ran")
    assert [name for name, _ in ran] == ["early", "late", "later"]
    assert ran[0][1] < 0.35, "it does not wait for the time of another"


def test_a_job_that_fails_runs_again_and_one_that_is_stopped_does_not(
    pool: JobPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "FAILED_PAUSE", 0.01)
    runs = 0

    def run() -> float:
        nonlocal runs
        runs += 1
        raise ValueError("a fault")

    job = pool.start(run)
    until(lambda: runs >= 3, "it runs again")
    job.stop()
    job.wake()
    until(lambda: not job.running, "the last run ends")
    before = runs
    pool.start(lambda: None)
    until(lambda: pool.runs > before, "another runs")
    assert runs == before


def test_a_pool_without_threads_runs_nothing() -> None:
    with JobPool("test", threads=0) as pool:
        pool.start(lambda: pytest.fail("it ran"))
        assert (pool.runs, pool.threads, len(pool)) == (0, 0, 1)


def test_a_job_that_is_woken_again_and_again_leaves_a_bounded_number_of_places() -> None:
    """Each run asks for another one in an hour, which the next call to wake it makes void."""
    with JobPool("test", threads=0) as pool:
        job = pool.start(lambda: None)
        for _ in range(2000):
            assert pool._following() is job
            with pool._changed:
                job.running = False
                pool._put(job, 3600.0)
            job.wake()
        assert len(pool._heap) <= 2 + module._SPARE + 1
        assert pool._following() is job


def test_a_thread_that_cannot_be_started_is_not_counted(pool: JobPool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit of threads of a container: jobs run once there is a thread again."""
    start = threading.Thread.start

    def refused(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    ran = threading.Event()
    monkeypatch.setattr(threading.Thread, "start", refused)
    for _ in range(5):
        with pytest.raises(RuntimeError, match="can't start new thread"):
            pool.start(ran.set)
    assert pool.threads == 0
    monkeypatch.setattr(threading.Thread, "start", start)
    job = pool.start(lambda: None)
    assert ran.wait(10.0), "the jobs that waited run, too"
    job.stop()
