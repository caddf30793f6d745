"""Run many small recurring jobs in a few threads: each at its time, or once something wakes it.

    pool = JobPool("queue", threads=4)
    job = pool.start(tend)  # tend() returns the seconds until its next run, or None: once it is woken
    job.wake()
    job.stop()

A thousand idle jobs cost no thread and no wake-up. A job never runs twice at a time; one that is woken while it runs
runs again. Jobs run in the order in which they became due, so a job that always has work takes turns with the others.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import threading
import time
from collections.abc import Callable
from typing import Final

from millrace.base.closeable import Closeable

EARLY_SECONDS: Final = 0.05
"""Time by which a job may run early if it asked for a second or more: a thread that is awake also runs jobs due
soon."""
FAILED_PAUSE: Final = 1.0
"""Seconds until a job runs again that raised an error."""
_SPARE: Final = 64
"""Places that the heap may have besides two for each job."""
_IDLE_SECONDS: Final = 10.0
"""Time after which a thread without work ends. One always stays while there are jobs."""

_log: Final = logging.getLogger(__name__)


class Job:
    """A job of a pool. Thread-safe."""

    __slots__ = ("_pool", "due", "early", "name", "run", "running", "stopped", "version", "woken")

    def __init__(self, pool: JobPool, run: Callable[[], float | None], name: str) -> None:
        self._pool = pool
        self.run = run
        self.name = name
        self.version = 0
        """Counts its places in the pool's heap; only the newest counts."""
        self.due: float | None = None
        self.early = 0.0
        self.running = self.woken = self.stopped = False

    def wake(self, seconds: float = 0.0) -> None:
        """Run the job in so many seconds if it was to run later, as soon as a thread is free."""
        self._pool.schedule(self, seconds)

    def stop(self) -> None:
        """Start no further run of this job. A run that has begun goes on. Idempotent."""
        self._pool.remove(self)


class JobPool(Closeable):
    """At most `threads` threads that run jobs. Without threads, nothing runs: a test calls the jobs itself."""

    def __init__(self, name: str, *, threads: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._name = name
        self._most = threads
        self._clock = clock
        self._changed = threading.Condition()
        self._heap: list[tuple[float, int, int, Job]] = []
        self._order = itertools.count()
        self._jobs: set[Job] = set()
        self._threads = self._idle = 0
        self._closed = False
        self._timer: object | None = None
        """The thread that sleeps until the next job is due."""
        self.runs = 0
        """Number of runs of all jobs."""

    @property
    def threads(self) -> int:
        """The number of its threads now."""
        return self._threads

    def __len__(self) -> int:
        return len(self._jobs)

    def start(self, run: Callable[[], float | None], *, name: str = "", at_once: bool = True) -> Job:
        """Add a job, which runs at once, or else when it is woken first.

        It returns the seconds until its next run, or None to wait for `wake`. A run in a second or later may begin up
        to EARLY_SECONDS early.
        """
        job = Job(self, run, name)
        with self._changed:
            if not self._closed:
                self._jobs.add(job)
        if at_once:
            job.wake()
        return job

    def schedule(self, job: Job, seconds: float) -> None:
        """Run a job in so many seconds, or earlier if it was to run earlier."""
        with self._changed:
            if job not in self._jobs:
                return
            if job.running:
                job.woken = True
                return
            self._put(job, seconds)

    def _put(self, job: Job, seconds: float) -> None:
        at = self._clock() + max(0.0, seconds)
        if job.due is not None and job.due <= at:
            return
        job.due = at
        job.early = EARLY_SECONDS if seconds >= 1.0 else 0.0
        job.version += 1
        heapq.heappush(self._heap, (at, next(self._order), job.version, job))
        if len(self._heap) > 2 * len(self._jobs) + _SPARE:  # a job that is woken leaves its later place behind
            self._heap = [each for each in self._heap if each[2] == each[3].version and each[3].due is not None]
            heapq.heapify(self._heap)
        if self._idle:
            self._changed.notify()
        elif self._threads < self._most:
            self._begin()

    def _begin(self) -> None:
        """Start a thread. Raises RuntimeError if the system has none and the pool neither."""
        self._threads += 1
        try:
            threading.Thread(target=self._work, name=f"{self._name}-{self._threads}", daemon=True).start()
        except RuntimeError:  # the limit of the process or of its container
            self._threads -= 1
            if not self._threads:
                raise

    def remove(self, job: Job) -> None:
        """Stop a job."""
        with self._changed:
            job.stopped = True
            job.due = None
            self._jobs.discard(job)

    def close(self) -> None:
        """Start no further runs. Runs that have begun go on. Idempotent."""
        with self._changed:
            self._closed = True
            self._jobs.clear()
            self._heap.clear()
            self._changed.notify_all()

    def _work(self) -> None:
        while (job := self._following()) is not None:
            seconds: float | None
            try:
                seconds = job.run()
            except Exception:
                _log.exception("the job %r failed", job.name)
                seconds = FAILED_PAUSE
            with self._changed:
                job.running = False
                self.runs += 1
                if job not in self._jobs:
                    continue
                if job.woken:
                    job.woken, seconds = False, 0.0
                if seconds is not None:
                    self._put(job, seconds)

    def _following(self) -> Job | None:
        """Wait for the next job; None: the thread ends."""
        me = object()
        with self._changed:
            end = self._clock() + _IDLE_SECONDS
            while not self._closed:
                now = self._clock()
                while self._heap and (self._heap[0][2] != self._heap[0][3].version or self._heap[0][3].due is None):
                    heapq.heappop(self._heap)
                if self._heap and self._heap[0][0] - self._heap[0][3].early <= now:
                    _, _, _, job = heapq.heappop(self._heap)
                    job.due, job.running, job.woken = None, True, False
                    if self._timer is me:
                        self._timer = None
                    if self._idle and self._heap and self._timer is None:
                        self._changed.notify()  # another one watches the time meanwhile
                    return job
                if not self._jobs or (self._threads > 1 and now >= end and self._timer is not me):
                    break
                # One thread sleeps until the next job is due, the others until they are needed.
                wait = _IDLE_SECONDS
                if self._timer in (None, me):
                    self._timer = me
                    wait = self._heap[0][0] - now if self._heap else _IDLE_SECONDS
                self._idle += 1
                notified = self._changed.wait(max(0.001, min(wait, _IDLE_SECONDS)))
                self._idle -= 1
                if notified:
                    self._timer = me  # the next job may have become another
            if self._timer is me:
                self._timer = None
            self._threads -= 1
            return None
