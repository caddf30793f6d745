"""A consumer with a pool of workers: order by VChannel or by key, at least once, and no gap ever acknowledged.

    ParallelConsumer(consumer, handle, workers=8, by="key").run()

Every unit goes to the worker of its VChannel, or, by key, its rows to the workers of their keys (a hash of the primary key);
a worker takes one piece of work after the other, in order. A unit is acknowledged when all its work is done, and the group's
position stays below the oldest unit that is not. Work that fails is tried again by a policy; then it goes to `on_dead` and
counts as done, or, without one, everything stops with that error and the unit is delivered again to the next consumer.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, Literal

import numpy as np
import pyarrow as pa

from millrace.client.consumer import Change, Consumer, Delivery
from millrace.errors import InvalidArgument
from millrace.message.keys import key_hashes

_WAIT: Final = 0.2


@dataclass(frozen=True, slots=True)
class Work:
    """What a worker gets: a delivery, and those of its changes that are the worker's."""

    delivery: Delivery
    changes: list[Change]


Handler = Callable[[Work], None]
OnDead = Callable[[Work, Exception], None]


@dataclass(slots=True)
class _Out:
    """A delivery that workers have."""

    delivery: Delivery
    left: int
    lock: threading.Lock = field(default_factory=threading.Lock)


class ParallelConsumer:
    """Runs `handle` for everything that `consumer` delivers, which stays the caller's to close."""

    def __init__(
        self,
        consumer: Consumer,
        handle: Handler,
        *,
        workers: int = 4,
        by: Literal["vchannel", "key"] = "vchannel",
        max_in_flight: int = 1000,
        attempts: int = 3,
        retry_delay: float = 0.1,
        on_dead: OnDead | None = None,
    ) -> None:
        if workers < 1 or max_in_flight < 1 or attempts < 1:
            raise InvalidArgument("workers, max_in_flight and attempts are at least 1")
        self._consumer = consumer
        self._handle = handle
        self._by = by
        self._attempts = attempts
        self._retry_delay = retry_delay
        self._on_dead = on_dead
        self._stop = threading.Event()
        self._failure: Exception | None = None
        self._room = threading.BoundedSemaphore(max_in_flight)
        self._queues: list[queue.SimpleQueue[tuple[_Out, Work] | None]] = [queue.SimpleQueue() for _ in range(workers)]

    def run(self, *, until: Callable[[], bool] | None = None) -> None:
        """Deliver until the consumer ends, :meth:`stop` is called or `until` says so; then wait for what is in flight.

        Raises the error of work that failed for good, or of the consumer.
        """
        threads = [
            threading.Thread(target=self._work, args=(each,), name=f"worker-{number}", daemon=True)
            for number, each in enumerate(self._queues)
        ]
        for thread in threads:
            thread.start()
        try:
            while not self._stop.is_set() and not self._consumer.ended and not (until is not None and until()):
                delivery = self._consumer.poll(timeout=_WAIT)
                if delivery is not None:
                    self._dispatch(delivery)
        finally:
            for each in self._queues:
                each.put(None)
            for thread in threads:
                thread.join()
            self._consumer.commit()
        if self._failure is not None:
            raise self._failure

    def stop(self) -> None:
        """Deliver nothing more; `run` returns once the workers are done with what they have begun. From any thread."""
        self._stop.set()

    def _dispatch(self, delivery: Delivery) -> None:
        while not self._room.acquire(timeout=_WAIT):
            if self._stop.is_set():
                return
        shares = self._shares(delivery)
        out = _Out(delivery, len(shares))
        for worker, changes in shares:
            self._queues[worker].put((out, Work(delivery, changes)))

    def _shares(self, delivery: Delivery) -> list[tuple[int, list[Change]]]:
        """(worker, changes) of a delivery: at least one."""
        count = len(self._queues)
        changes = list(delivery.changes())
        home = hash_of(delivery.vchannel or delivery.pchannel) % count
        if self._by == "vchannel" or not changes or count == 1:
            return [(home, changes)]
        found: dict[int, list[Change]] = {}
        for change in changes:
            workers = (key_hashes(change.rows.column(change.key)) >> np.uint64(8)) % np.uint64(count)
            for worker in np.unique(workers).tolist():
                rows = change.rows.take(pa.array(np.flatnonzero(workers == worker)))
                part = Change(change.kind, change.vchannel, change.partition_id, rows, change.key)
                found.setdefault(int(worker), []).append(part)
        return list(found.items())

    def _work(self, mine: queue.SimpleQueue[tuple[_Out, Work] | None]) -> None:
        while (item := mine.get()) is not None:
            out, work = item
            # After a stop nothing new is begun: it was not acknowledged, and comes again.
            if self._stop.is_set() or not self._done(work):
                continue
            with out.lock:
                out.left -= 1
                complete = not out.left
            if complete:
                self._consumer.acknowledge(out.delivery)
                self._room.release()

    def _done(self, work: Work) -> bool:
        for attempt in range(1, self._attempts + 1):
            try:
                self._handle(work)
                return True
            except Exception as error:
                failure = error
            if attempt < self._attempts and self._stop.wait(self._retry_delay):
                return False
        if self._on_dead is not None:
            try:
                self._on_dead(work, failure)
                return True
            except Exception as error:
                failure = error
        if self._failure is None:
            self._failure = failure
        self._stop.set()
        return False


def hash_of(name: str) -> int:
    """A number of a name that is the same in every process."""
    return int(key_hashes(pa.array([name]))[0])
