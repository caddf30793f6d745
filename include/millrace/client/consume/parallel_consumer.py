"""A consumer with a pool of workers: ordered by VChannel or by key, at least once, without acknowledging gaps.

    ParallelConsumer(consumer, handle, workers=8, by="key").run()

By VChannel, every unit goes to its VChannel's worker; by key, its rows go to the workers of their keys (a hash of the
primary key). A worker processes its work in order. A unit is acknowledged when all its work is done, so the group's
position stays below the oldest unit that is not. Failed work is retried; then it goes to `on_dead` and counts as done.
Without `on_dead`, processing stops with that error, and the next consumer gets the unit again.

An import's unit reaches `handle` as several pieces of work, in order. A retraction
(:class:`millrace.client.consume.delivery.Change`) is a piece of its own, which every worker gets if the order is by
key. The pieces and bytes in flight are bounded.
"""

from __future__ import annotations

import math
import queue
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Final, Literal, TypeAlias, get_args

import numpy as np
import pyarrow as pa

from millrace.base.backoff import jittered
from millrace.base.errors import Closed, InvalidArgument
from millrace.client.consume.consumer import Consumer
from millrace.client.consume.delivery import Change, Delivery
from millrace.message.keys import key_column, key_hashes
from millrace.message.types import DML

MAX_BYTES: Final = 64 << 20
"""Approximate limit of the bytes of rows in flight; one piece of work is always allowed."""

_WAIT: Final = 0.2


@dataclass(frozen=True, slots=True)
class Work:
    """A delivery, and those of its changes that belong to one worker."""

    delivery: Delivery
    changes: list[Change]


Order: TypeAlias = Literal["vchannel", "key"]
Handler = Callable[[Work], None]
DeadLetterHandler = Callable[[Work, Exception], None]


@dataclass(slots=True)
class _Out:
    """A delivery that workers process, and that may still be being dispatched."""

    delivery: Delivery
    left: int = 1
    """Shares that are not done; the dispatcher holds one until it has dispatched the last."""
    lock: threading.Lock = field(default_factory=threading.Lock)


@dataclass(slots=True)
class _Piece:
    """A part of a delivery that was dispatched at once, which takes up room until its last share is done."""

    bytes: int
    left: int


class _Room:
    """Limit of the pieces and bytes in flight."""

    def __init__(self, pieces: int, bytes: int) -> None:
        self._pieces = pieces
        self._bytes = bytes
        self._taken: tuple[int, int] = (0, 0)
        self._changed = threading.Condition()

    def take(self, bytes: int, *, timeout: float) -> bool:
        """Reserve room for a piece; False if there is none within `timeout` seconds.

        The first piece always has room.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: self._fits(bytes), timeout):
                return False
            self._taken = (self._taken[0] + 1, self._taken[1] + bytes)
            return True

    def give(self, bytes: int) -> None:
        with self._changed:
            self._taken = (self._taken[0] - 1, self._taken[1] - bytes)
            self._changed.notify_all()

    def _fits(self, bytes: int) -> bool:
        pieces, held = self._taken
        return not pieces or (pieces < self._pieces and held + bytes <= self._bytes)


class ParallelConsumer:
    """Runs `handle` for everything that `consumer` delivers. The caller closes `consumer`."""

    def __init__(
        self,
        consumer: Consumer,
        handle: Handler,
        *,
        workers: int = 4,
        by: Order = "vchannel",
        max_in_flight: int = 1000,
        attempts: int = 3,
        retry_delay: float = 0.1,
        on_dead: DeadLetterHandler | None = None,
    ) -> None:
        if workers < 1 or max_in_flight < 1 or attempts < 1:
            raise InvalidArgument("workers, max_in_flight and attempts are at least 1")
        if by not in get_args(Order):
            raise InvalidArgument(f"the order is by 'vchannel' or 'key', not {by!r}")
        if not 0 <= retry_delay < math.inf:
            raise InvalidArgument(f"retry_delay is a number of seconds from 0 on, not {retry_delay!r}")
        self._consumer = consumer
        self._handle = handle
        self._by = by
        self._attempts = attempts
        self._retry_delay = retry_delay
        self._on_dead = on_dead
        self._stop = threading.Event()
        self._failure: BaseException | None = None
        self._room = _Room(max_in_flight, MAX_BYTES)
        self._queues: list[queue.SimpleQueue[_Item | None]] = [queue.SimpleQueue() for _ in range(workers)]

    def run(self, *, until: Callable[[], bool] | None = None) -> None:
        """Deliver until the consumer ends, :meth:`stop` is called or `until` returns True.

        Then wait for the work in flight.

        Raises the error of work that failed for good, or of the consumer. What is no Exception, such as SystemExit,
        is not retried, and raised here.
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
        except Closed:
            pass  # another thread closed the consumer
        finally:
            for each in self._queues:
                each.put(None)
            for thread in threads:
                thread.join()
            self._consumer.commit()
        if self._failure is not None:
            raise self._failure

    def stop(self) -> None:
        """Stop delivering; `run` returns once the workers finish what they have started. Thread-safe."""
        self._stop.set()

    def _dispatch(self, delivery: Delivery) -> None:
        out = _Out(delivery)
        for changes in _pieces(delivery):
            size = sum(change.rows.nbytes for change in changes)
            while not self._room.take(size, timeout=_WAIT):
                if self._stop.is_set():
                    return
            shares = self._shares(delivery, changes)
            piece = _Piece(size, len(shares))
            with out.lock:
                out.left += len(shares)
            for worker, part in shares:
                self._queues[worker].put((out, piece, Work(delivery, part)))
        self._finished(out)

    def _shares(self, delivery: Delivery, changes: list[Change]) -> list[tuple[int, list[Change]]]:
        """Return the (worker, changes) of a piece of a delivery: at least one."""
        count = len(self._queues)
        home = stable_hash(delivery.vchannel or delivery.pchannel) % count
        if self._by == "vchannel" or not changes or count == 1:
            return [(home, changes)]
        found: dict[int, list[Change]] = {}
        for change in changes:
            if change.kind == "retract":  # it applies to every key
                for worker in range(count):
                    found.setdefault(worker, []).append(change)
                continue
            names = (change.key,) if isinstance(change.key, str) else change.key
            workers = (key_hashes(key_column(change.rows, names)) >> np.uint64(8)) % np.uint64(count)
            for worker in np.unique(workers).tolist():
                rows = change.rows.take(pa.array(np.flatnonzero(workers == worker)))
                part = Change(change.kind, change.vchannel, change.partition_id, rows, change.key)
                found.setdefault(int(worker), []).append(part)
        return list(found.items())

    def _work(self, mine: queue.SimpleQueue[_Item | None]) -> None:
        try:
            self._work_on(mine)
        except BaseException as error:  # a thread that ended without a word would stop its part of the group for good
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        if self._failure is None:
            self._failure = error
        self._stop.set()

    def _work_on(self, mine: queue.SimpleQueue[_Item | None]) -> None:
        while (item := mine.get()) is not None:
            out, piece, work = item
            # After a stop, no new work starts: it was not acknowledged, so it is delivered again.
            if self._stop.is_set() or not self._done(work):
                continue
            with out.lock:
                piece.left -= 1
                complete = not piece.left
            if complete:
                self._room.give(piece.bytes)
            self._finished(out)

    def _finished(self, out: _Out) -> None:
        """Note that a share of a delivery is done."""
        with out.lock:
            out.left -= 1
            complete = not out.left
        if complete:
            self._consumer.acknowledge(out.delivery)

    def _done(self, work: Work) -> bool:
        for attempt in range(1, self._attempts + 1):
            try:
                self._handle(work)
                return True
            except Exception as error:
                failure = error
            if attempt < self._attempts and self._stop.wait(jittered(self._retry_delay)):
                return False
        if self._on_dead is not None:
            try:
                self._on_dead(work, failure)
                return True
            except Exception as error:
                failure = error
        self._fail(failure)
        return False


_Item = tuple[_Out, _Piece, Work]


def _pieces(delivery: Delivery) -> Iterator[list[Change]]:
    """Yield a delivery's changes as dispatched: an import's or a drop's one by one, all others at once."""
    if all(message.type in DML for message in delivery.bodies):
        yield list(delivery.changes())
        return
    empty = True
    for change in delivery.changes():
        empty = False
        yield [change]
    if empty:
        yield []


def stable_hash(name: str) -> int:
    """Return a hash of a name that is the same in every process."""
    return int(key_hashes(pa.array([name]))[0])
