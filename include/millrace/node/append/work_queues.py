"""Work queues at the log's server: consumers of a group compete for single tasks, the rows of a collection.

This process is a member of the group, so it dispatches the VChannels that the group's division gives it: all of them,
unless another server has consumers of the queue too (millrace.node.append.queue_lanes). It delivers tasks under a lease
each, and counts what is acknowledged. What must be durable before it is answered (an acknowledgement, a repeated
delivery) waits for its write; calls that come meanwhile share the next one.

A server that was killed comes back as the same member, so it has its VChannels at once. Tasks that may be in a
consumer's hands stay there for a lease: their holders renew or acknowledge them at the new owner.

A take names the last answer that its consumer got. If there is a later one, its answer was lost: those tasks are given
back at once, uncounted. A consumer is known by its name and its principal, so nobody settles in the name of another's.
One that found no task may wait in a session, without a call of its own (millrace.node.append.task_sessions).

Bounds: MAX_CONSUMERS consumers, of one queue MAX_QUEUE_CONSUMERS.
"""

from __future__ import annotations

import hashlib
import itertools
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from prometheus_client import Gauge

from millrace.base.deadline import Deadline
from millrace.base.errors import CollectionNotFound, InvalidArgument, LogUnavailable, MillraceError, ServerFull
from millrace.base.job_pool import Job, JobPool
from millrace.base.metrics import Metrics
from millrace.client.consume.membership import GroupMember, boot_clock, require_group, require_name
from millrace.message.ids import tick_physical_ms
from millrace.node.append.consumer_groups import ConsumerGroups
from millrace.node.append.queue_lanes import Lane, QueueLanes, TaskSource, WindowMemory
from millrace.node.append.task_sessions import TaskSession, TaskSessions
from millrace.node.append.task_window import TaskNames
from millrace.rpc.tasks import LONGEST_LEASE, TaskNews

MAX_CONSUMERS: Final = 4096
MAX_QUEUE_CONSUMERS: Final = 1024
"""Consumers of one queue, so that it leaves room for others."""
MAX_TASKS: Final = 5000
"""Tasks in one answer, and in each list of a call that settles."""
MAX_LANES: Final = 1024
ANSWER_BYTES: Final = 8 << 20
"""Approximate bytes of rows in one answer."""
LEASE_SECONDS: Final = 30.0
SHORTEST_LEASE: Final = 0.5
MAX_WAIT: Final = 10.0
IDLE_SECONDS: Final = 60.0
"""How long a queue without calls and leases stays open."""
CLOSE_SECONDS: Final = 10.0
"""How long a call waits for a queue that is closing."""
SILENT_SECONDS: Final = 30.0
"""A consumer without calls for so long, and without leases, is forgotten."""

LOOK_SECONDS: Final = 1.0
"""How soon others are told of tasks that consumers were told of and did not take."""
THREADS: Final = 8
"""Most threads that read ahead for all queues, and most that renew their memberships and end their leases."""

_log: Final = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Consumer:
    number: int
    name: str
    client: str
    since: float
    seen: float
    answer: int = 0
    """Number of the last answer."""
    given: dict[Lane, TaskNames] = field(default_factory=dict)
    """Its deliveries."""
    turn: int = 0
    """Counts its calls: an older one that still waits gives up."""
    session: TaskSession | None = None
    """Where it waits for tasks without a call."""
    taken: int = 0
    acknowledged: int = 0


class WorkQueues:
    """Answers the calls ``append/queue`` and the read of tasks. Thread-safe."""

    def __init__(
        self,
        groups: ConsumerGroups,
        source: TaskSource,
        *,
        name: str,
        metrics: Metrics | None = None,
        clock: Callable[[], float] = boot_clock,
        lease: float | None = None,
        threads: int = THREADS,
    ) -> None:
        """`name` is that of this server among the group's members; it stays the same after a restart.

        `lease`: that of the claims to VChannels, in seconds (default: the groups'). `threads`: most that read ahead,
        and most that tend queues; with 0, the caller does.
        """
        self._groups = groups
        self._source = source
        self._name = name
        self._metrics = metrics
        self._clock = clock
        self._lease = lease
        # Apart, so that no queue loses its VChannels because others read.
        self._reading = JobPool("queue-read", threads=threads)
        self._tending = JobPool("queue-tend", threads=threads)
        self._guard = threading.Lock()
        self._ended = threading.Condition(self._guard)
        """Whoever needs a queue that is closing waits here."""
        self._queues: dict[str, WorkQueue] = {}
        self._closed = False
        self.memory = WindowMemory()
        self.sessions = TaskSessions(clock)
        self.numbers = itertools.count(1)

    def take(self, request: dict[str, Any], *, caller: str = "", may_wait: bool = True) -> TaskAnswer:
        """Answer a take: `{"queue": collection, "group", "consumer", "lanes", "client", "most", "lease", "wait",
        "last", "order", "start", "session"}`. `caller` is the consumer's principal.

        With `most` 0 a consumer that wants no tasks now has the queue dispatched, so that it can settle what it has.
        One that finds none waits in its `session` afterwards, if it names one: :meth:`news` tells of it.
        Raises InvalidArgument, ServerFull, LogUnavailable, and what ended the reading of a VChannel.
        """
        group, lanes = require_group(request.get("group")), _lanes_of(request)
        order = request.get("order") or ""
        if order not in ("", "key"):
            raise InvalidArgument(f"a queue's order is 'key' or none, not {order!r}")
        collection, consumer = str(request.get("queue", ""))[:200], require_name(request, "consumer")
        last, most = int(_number(request, "last", 0, 0, 1 << 62)), int(_number(request, "most", 1, 0, MAX_TASKS))
        lease = _number(request, "lease", LEASE_SECONDS, SHORTEST_LEASE, LONGEST_LEASE)
        wait = min(MAX_WAIT, _number(request, "wait", 0.0, 0.0, 3600.0)) if may_wait else 0.0
        client, start = str(request.get("client", ""))[:200], _start(request)
        named = None if request.get("session") is None else require_name(request, "session")
        end = Deadline.after(wait)
        while True:
            queue = self._queue(group, lanes, collection, order, start)
            session = None if named is None else self.sessions.of(caller, named)
            answer = queue.take(
                (caller, consumer), client=client, last=last, most=most, lease=lease, end=end, session=session
            )
            if answer is not None:
                return answer

    def news(self, request: dict[str, Any], *, caller: str = "", may_wait: bool = True) -> TaskNews:
        """Wait for tasks of all consumers in a session: `{"session", "last", "wait"}`.

        With `"end": true`, the session's calls that wait are answered, and it is forgotten: its client ends.
        Raises InvalidArgument, and LogUnavailable while the server stops.
        """
        name, last = require_name(request, "session"), int(_number(request, "last", 0, 0, 1 << 62))
        wait = min(MAX_WAIT, _number(request, "wait", 0.0, 0.0, 3600.0)) if may_wait else 0.0
        if request.get("end") is True:
            self.sessions.end(caller, name)
            return TaskNews(0, 0, [])
        return self.sessions.news(caller, name, last=last, end=Deadline.after(wait))

    def handle(self, request: dict[str, Any], *, caller: str = "") -> dict[str, Any]:
        """Answer `{"group", "consumer", "done", "renew", "release", "lease", "leave", "last"}`.

        `done`, `renew` and `release` are lists of `[VChannel, ticks, ordinals, deliveries]`; an element of `release`
        has two more: seconds until the tasks may be delivered again, and whether the deliveries were unused. What is
        done is durable when this returns. The answer has, by list, the places of deliveries that were `lost` and of
        those that the owner has not read yet (`unread`), as [element, place]. With `leave`, the consumer gives back
        everything; tasks of an answer after `last` never reached it, and their delivery does not count.
        """
        group, consumer = require_group(request.get("group")), (caller, require_name(request, "consumer"))
        with self._guard:
            queue = self._queues.get(group)
        lists = {each: _elements(request, each) for each in ("done", "renew", "release")}
        if queue is None:
            return {"lost": {}, "unread": {each: _all(elements) for each, elements in lists.items() if elements}}
        lease = _number(request, "lease", LEASE_SECONDS, SHORTEST_LEASE, LONGEST_LEASE)
        leaves, last = request.get("leave") is True, int(_number(request, "last", 1 << 62, 0, 1 << 62))
        answer = queue.settle(consumer, lists, lease=lease) if any(lists.values()) else {"lost": {}, "unread": {}}
        if leaves:
            queue.leave(consumer, last=last)
            if queue.is_idle(0.0):
                self._close([queue])
        return answer

    def forget(self, group: str) -> None:
        """Forget the counters of a group that was dropped."""
        if self._metrics is not None:
            for counter in (
                self._metrics.queue_deliveries_total,
                self._metrics.queue_redeliveries_total,
                self._metrics.queue_acknowledged_total,
                self._metrics.queue_expired_leases_total,
            ):
                with suppress(KeyError):
                    counter.remove(group)

    def describe(self) -> dict[str, dict[str, Any]]:
        """Return what this server has of each queue, by group; see :meth:`WorkQueue.describe`."""
        with self._guard:
            queues = dict(self._queues)
        return {group: queue.describe() for group, queue in queues.items()}

    def close(self) -> None:
        """Make durable what is not, and give the VChannels back. Idempotent."""
        with self._guard:
            self._closed = True
            queues = list(self._queues.values())
        self.sessions.close()
        self._close(queues)
        with self._guard:
            self._ended.wait_for(lambda: not self._queues, CLOSE_SECONDS)
        self._reading.close()
        self._tending.close()

    def _queue(self, group: str, lanes: frozenset[str], collection: str, order: str, start: str | int) -> WorkQueue:
        with self._guard:
            if not self._ended.wait_for(lambda: self._closed or not self._is_closing(group), CLOSE_SECONDS):
                raise LogUnavailable(f"queue {group!r} is closing: call again")
            if self._closed:
                raise LogUnavailable("the log's server is stopping: call again")
            queue = self._queues.get(group)
            if queue is None:
                member = GroupMember(
                    self._groups.handle, group, lanes, lease=self._lease, name=self._name, queue=True, order=order,
                    clock=self._clock,
                )  # fmt: skip
                lanes_here = QueueLanes(
                    group, member, self._groups, self._source, ordered=order == "key", start=start, clock=self._clock,
                    memory=self.memory, pool=self._reading,
                )  # fmt: skip
                queue = WorkQueue(
                    self, group, collection, lanes, lanes_here, order=order, clock=self._clock, metrics=self._metrics
                )
                self._queues[group] = queue
        queue.require(lanes, order, collection)
        try:
            if queue.lanes.join():
                queue.job = self._tending.start(queue.keep, name=f"queue {group!r}")
                if queue.closed:
                    queue.job.stop()
        except BaseException:
            if not queue.consumers:
                self._close([queue])
            raise
        return queue

    def _is_closing(self, group: str) -> bool:
        queue = self._queues.get(group)
        return queue is not None and queue.closed

    def close_idle(self) -> None:
        """Close the queues that have had no consumer and no call for IDLE_SECONDS."""
        with self._guard:
            idle = [queue for queue in self._queues.values() if queue.is_idle(IDLE_SECONDS)]
        self._close(idle)

    def _close(self, queues: Sequence[WorkQueue]) -> None:
        for queue in queues:
            with self._guard:
                if queue.closed:  # by another thread, which takes it away once it has left the group
                    continue
                queue.stop()
            try:
                queue.close()
            finally:
                with self._guard:  # only now: the next queue of the group is the same member
                    del self._queues[queue.group]
                    self._ended.notify_all()

    def admit(self, queue: WorkQueue) -> int:
        """Return a number for a new consumer of a queue. Raises ServerFull."""
        if queue.consumers >= MAX_QUEUE_CONSUMERS:
            raise ServerFull(
                f"queue {queue.group!r} has {MAX_QUEUE_CONSUMERS} consumers at this server, the limit: close idle ones"
            )
        with self._guard:
            if sum(queue.consumers for queue in self._queues.values()) >= MAX_CONSUMERS:
                raise ServerFull(f"the server has {MAX_CONSUMERS} consumers of work queues, the limit: close idle ones")
            return next(self.numbers)


@dataclass(frozen=True, slots=True)
class TaskPart:
    """Tasks of one VChannel and one schema in an answer."""

    lane: str
    names: TaskNames
    rows: pa.RecordBatch


@dataclass(frozen=True, slots=True)
class TaskAnswer:
    """The answer to a take."""

    number: int
    parts: Sequence[TaskPart]
    lanes: int
    """VChannels that this server dispatches now."""
    reason: str
    """Why it dispatches none, "" if it does."""
    session: int = 0
    """Number of the session in which the consumer waits now; 0 if in none."""


class WorkQueue:
    """The consumers of one queue at this server, and what they have. Made by WorkQueues."""

    def __init__(
        self,
        queues: WorkQueues,
        group: str,
        collection: str,
        vchannels: frozenset[str],
        lanes: QueueLanes,
        *,
        order: str,
        clock: Callable[[], float],
        metrics: Metrics | None,
    ) -> None:
        self._queues = queues
        self.group = group
        self._collection = collection
        self._vchannels = vchannels
        self.lanes = lanes
        self._order = order
        self._clock = clock
        self._metrics = metrics
        self._consumers: dict[tuple[str, str], _Consumer] = {}
        """By principal and name. Guarded by `lanes.changed`."""
        self._waiting: dict[tuple[str, str], _Consumer] = {}
        """Those that wait in sessions, in the order in which they are told."""
        lanes.on_offer = self._tell
        self._untaken = False
        """Whether there are tasks, and consumers that wait and were not told."""
        self._stopping = False
        self.job: Job | None = None
        """Tends it."""
        self._called = clock()
        self._reported: tuple[int, int, float] | None = None
        """What the gauges show."""
        self._gone: CollectionNotFound | None = None
        """That the collection was dropped, once its last task is done."""
        if metrics is not None:  # so that an alert sees that nothing is acknowledged
            metrics.queue_acknowledged_total.labels(group)
        self._turns = 0
        """Rotates the VChannels that a take begins with."""

    # --- life ---------------------------------------------------------------------------------------------------------

    def require(self, vchannels: frozenset[str], order: str, collection: str = "") -> None:
        """Raise InvalidArgument if the queue is another than the caller means."""
        if vchannels != self._vchannels:
            if collection and collection == self._collection:
                raise InvalidArgument(
                    f"group {self.group!r} is still the queue of an earlier collection {collection}: close its"
                    " consumers, or use another group"
                )
            raise InvalidArgument(
                f"group {self.group!r} is the queue of {self._collection or 'other channels'}: use another group"
            )
        if order != self._order:
            raise InvalidArgument(
                f"other consumers of queue {self.group!r} have the order {self._order or 'none'!r}, not"
                f" {order or 'none'!r}: use the same everywhere"
            )

    @property
    def closed(self) -> bool:
        return self._stopping

    @property
    def consumers(self) -> int:
        return len(self._consumers)

    def is_idle(self, seconds: float) -> bool:
        """Return whether there is no consumer, and was no call for `seconds`."""
        with self.lanes.changed:
            return not self._consumers and self._clock() - self._called >= seconds

    def stop(self) -> None:
        """Answer no more takes."""
        self._stopping = True
        if self.job is not None:
            self.job.stop()

    def close(self) -> None:
        """Make durable what is not, and leave the group."""
        try:
            self.lanes.close()
        finally:
            if self._metrics is not None:  # series of queues that are gone would add up
                with self.lanes.changed:
                    for gauge in self._gauges(self._metrics):
                        with suppress(KeyError):
                            gauge.remove(self.group)

    def keep(self) -> float | None:
        """Tend the queue; return the seconds until the next time."""
        try:
            self.tend()
        except MillraceError as error:
            _log.info("queue %r: %s: %s", self.group, error.code, error)
        except Exception:
            _log.exception("queue %r", self.group)
        if self.closed:
            return None
        return min(LOOK_SECONDS, self.lanes.pause()) if self._untaken else self.lanes.pause()

    def tend(self) -> None:
        """Do what time asks for: renew the membership, end leases, write progress, forget consumers, close if idle."""
        self.expire()
        self._tell_again()
        self.lanes.tend()
        self._gauge()
        try:
            self.lanes.require()
        except CollectionNotFound as error:
            with self.lanes.changed:
                self._gone = error
                self.lanes.offer()
        if self.is_idle(IDLE_SECONDS):
            self._queues.close_idle()

    # --- calls --------------------------------------------------------------------------------------------------------

    def take(
        self,
        name: tuple[str, str],
        *,
        client: str,
        last: int,
        most: int,
        lease: float,
        end: Deadline,
        session: TaskSession | None = None,
    ) -> TaskAnswer | None:
        """Lease tasks to a consumer; see :meth:`WorkQueues.take`. Returns None if the queue is closing."""
        waits = 0
        with self._known(name) as consumer:
            self._end_wait(name, tell=False)
            consumer.client = client
            self._take_back(consumer, last)
            consumer.turn += 1
            turn = consumer.turn
            parts: list[TaskPart] = []
            must: dict[Lane, int] = {}
            while True:
                consumer.seen = self._called = self._clock()
                if consumer.turn != turn:  # it left, or a later call of it has come: nobody reads this answer
                    break
                if self.closed:
                    return None
                parts, must = self._lease_tasks(consumer, most, lease)
                errors = [lane.error for lane in self.lanes if lane.error is not None]
                if not parts and errors and (not errors[0].retriable or end.expired()):
                    raise errors[0]
                if not parts and self._gone is not None:
                    raise self._gone
                if parts or not most or end.expired() or (session is not None and session.closed):
                    break
                now = self._clock()
                following = min((lane.window.next_time(now) for lane in self.lanes), default=now + 1.0)
                self._expire(now)
                end.wait(self.lanes.available, maximum=max(0.005, min(1.0, following - now)))
            if consumer.turn == turn:
                consumer.answer = last + 1
                if session is not None and not session.closed and most and not parts:
                    waits = self._wait_in(session, name, consumer)
        if must:
            lost = self.lanes.save(list(must))
            if lost:
                parts = [part for part in parts if part.lane not in lost]
        return TaskAnswer(last + 1, parts, len(self.lanes), self.lanes.reason, waits)

    def _wait_in(self, session: TaskSession, name: tuple[str, str], consumer: _Consumer) -> int:
        """Let a consumer wait in a session; return the session's number."""
        session.wait()
        consumer.session = session
        self._waiting[name] = consumer
        if self.job is not None:  # no thread of the consumer watches the time
            now = self._clock()
            self.job.wake(max(0.0, min((lane.window.next_time(now) for lane in self.lanes), default=now + 1.0) - now))
        return session.number

    def _end_wait(self, name: tuple[str, str], *, tell: bool) -> None:
        consumer = self._waiting.pop(name, None)
        if consumer is not None and consumer.session is not None:
            consumer.session.end_wait(self.group, name[1], tell=tell)
            consumer.session = None
            consumer.seen = self._clock()

    def _tell(self, count: int | None) -> None:
        """Tell consumers that wait in sessions that there may be tasks, as many as there are tasks; None: all."""
        if self._waiting:
            for name in list(itertools.islice(self._waiting, count)):
                self._end_wait(name, tell=True)

    def _tell_again(self) -> None:
        """Tell of tasks that are there although consumers wait: a delay is over, or who was told does not come."""
        with self.lanes.changed:
            now = self._clock()
            ready = sum(lane.window.ready(now) for lane in self.lanes) if self._waiting else 0
            if ready:
                self._tell(ready)
            self._untaken = bool(ready and self._waiting)

    def _lease_tasks(self, consumer: _Consumer, most: int, lease: float) -> tuple[list[TaskPart], dict[Lane, int]]:
        now = self._clock()
        lanes = [lane for lane in self.lanes if lane.drain_until is None and self.lanes.owns(lane)]
        if not lanes:
            return [], {}
        self._turns += 1
        first = self._turns % len(lanes)
        lanes = lanes[first:] + lanes[:first]
        ready = sum(lane.window.ready(now) for lane in lanes)
        # Few tasks are divided among the consumers: none takes all of them ahead of the others.
        left = min(most, max(1, -(-ready // len(self._consumers))))
        left_bytes = ANSWER_BYTES
        parts: list[TaskPart] = []
        must: dict[Lane, int] = {}
        for lane in lanes:
            if left <= 0 or left_bytes <= 0:
                break
            places, saves = lane.window.take(now, holder=consumer.number, lease=lease, most=left, max_bytes=left_bytes)
            if not len(places):
                continue
            if saves:
                lane.generation += 1
                lane.promised = lane.generation
            # An earlier write may have failed. With an order, an acknowledgement frees the next task of its key.
            if lane.promised > lane.saved or (self._order and lane.generation > lane.saved):
                must[lane] = lane.generation
            consumer.given[lane] = lane.window.names(places)
            for rows, part in lane.window.rows(places):
                parts.append(TaskPart(lane.name, lane.window.names(part), rows))
                left_bytes -= rows.nbytes
            left -= len(places)
            consumer.taken += len(places)
            if self._metrics is not None:
                again = int(np.count_nonzero(consumer.given[lane].deliveries > 1))
                self._metrics.queue_deliveries_total.labels(self.group).inc(len(places))
                self._metrics.queue_redeliveries_total.labels(self.group).inc(again)
        return parts, must

    def settle(self, name: tuple[str, str], lists: Mapping[str, Sequence[_Element]], *, lease: float) -> dict[str, Any]:
        """Acknowledge, renew and release deliveries of a consumer; see :meth:`WorkQueues.handle`."""
        lost: dict[str, list[list[int]]] = {}
        unread: dict[str, list[list[int]]] = {}
        touched: list[Lane] = []
        freed = 0
        with self._known(name) as consumer:
            now = self._called = consumer.seen = self._clock()
            for kind, elements in lists.items():
                for place, element in enumerate(elements):
                    lane = self.lanes.get(element.lane)
                    # Another server's, or not taken yet.
                    if lane is None or (kind == "renew" and not self.lanes.owns(lane)):
                        unread.setdefault(kind, []).extend([place, each] for each in range(element.count))
                        continue
                    if kind == "done":
                        outcomes = lane.window.acknowledge(element.names, consumer.number)
                        if outcomes.changed:
                            lane.generation += 1
                            freed += outcomes.changed if self._order else 0
                            self.lanes.weigh(lane)
                        touched.append(lane)
                        done = element.count - len(outcomes.lost) - len(outcomes.unread)
                        consumer.acknowledged += done
                        if self._metrics is not None:
                            self._metrics.queue_acknowledged_total.labels(self.group).inc(done)
                    elif kind == "renew":
                        outcomes = lane.window.renew(element.names, consumer.number, now + lease)
                        if lane.window.promise(now, lease):
                            lane.generation += 1
                            touched.append(lane)
                    else:
                        at = now + element.delay if element.delay else 0.0
                        outcomes = lane.window.release(element.names, consumer.number, at=at, unused=element.unused)
                        freed += element.count
                        if element.delay and self.job is not None:
                            self.job.wake(element.delay)
                    for found, into in ((outcomes.lost, lost), (outcomes.unread, unread)):
                        if found:
                            into.setdefault(kind, []).extend([place, each] for each in found)
            self.lanes.changed.notify_all()
            self.lanes.wake_readers()
            if freed:
                self.lanes.available.notify_all()  # they look when the next delay ends
                self._tell(freed)
        if touched:
            gone = self.lanes.save(touched)
            for place, element in enumerate(lists.get("done", ())):
                if element.lane in gone:  # it was another's before this was durable
                    known = {tuple(each) for each in lost.get("done", ())}
                    extra = [[place, each] for each in range(element.count) if (place, each) not in known]
                    unread.setdefault("done", []).extend(extra)
        return {"lost": lost, "unread": unread}

    @contextmanager
    def _known(self, name: tuple[str, str]) -> Iterator[_Consumer]:
        """Enclose a call of a consumer, which is one from now on. Raises ServerFull."""
        number = 0 if name in self._consumers else self._queues.admit(self)
        with self.lanes.changed:
            consumer = self._consumers.get(name)
            if consumer is None:
                number = number or next(self._queues.numbers)  # it was forgotten just now
                consumer = self._consumers[name] = _Consumer(number, name[1], "", time.time(), self._clock())
            yield consumer

    def leave(self, name: tuple[str, str], *, last: int) -> None:
        """Forget a consumer; what it still has is delivered again at once."""
        with self.lanes.changed:
            self._end_wait(name, tell=False)
            consumer = self._consumers.pop(name, None)
            if consumer is not None:
                consumer.turn += 1
                self._take_back(consumer, last)
                freed = sum(lane.window.free(consumer.number, 0.0) for lane in self.lanes)
                self.lanes.available.notify_all()
                self._tell(freed)

    def _take_back(self, consumer: _Consumer, last: int) -> None:
        """Take back the tasks of an answer after `last`, which was lost; their delivery does not count."""
        if consumer.answer > last:
            for lane, names in consumer.given.items():
                if not lane.gone:
                    lane.window.release(names, consumer.number, at=0.0, unused=True)
            self.lanes.offer(sum(len(names.ticks) for names in consumer.given.values()))
        consumer.given = {}

    def expire(self) -> None:
        """End leases that are over, and forget consumers that are silent."""
        with self.lanes.changed:
            now = self._clock()
            self._expire(now)
            for name, consumer in list(self._consumers.items()):
                seen = consumer.seen if consumer.session is None else max(consumer.seen, consumer.session.seen)
                if now - seen > SILENT_SECONDS and not any(lane.window.held_by(consumer.number) for lane in self.lanes):
                    self._end_wait(name, tell=False)
                    del self._consumers[name]

    def _expire(self, now: float) -> None:
        ended = sum(lane.window.expire(now) for lane in self.lanes)
        if ended:
            if self._metrics is not None:
                self._metrics.queue_expired_leases_total.labels(self.group).inc(ended)
            self.lanes.offer(ended)

    # --- what it shows ------------------------------------------------------------------------------------------------

    def describe(self) -> dict[str, Any]:
        """Return `{"collection", "order", "consumers": [...], "lanes": {lane: {...}}}`.

        A consumer has `consumer`, `client`, `since`, `in_flight`, `taken` and `acknowledged`. A lane has the counts of
        its window, `read_tick`, `oldest_tick` (null without a task), `full` and `error`.
        """
        with self.lanes.changed:
            lanes = {}
            for lane in self.lanes:
                counts = lane.window.counts()
                lanes[lane.name] = {
                    **counts._asdict(),
                    "read_tick": lane.window.read_tick,
                    "oldest_tick": lane.window.oldest_tick,
                    "full": not self.lanes.has_room(lane),
                    "error": "" if lane.error is None else f"{lane.error.code}: {lane.error}"[:500],
                }
            consumers = [
                {
                    "consumer": each.name,
                    "client": each.client,
                    "since": round(each.since, 3),
                    "in_flight": sum(lane.window.held_by(each.number) for lane in self.lanes),
                    "taken": each.taken,
                    "acknowledged": each.acknowledged,
                }
                for each in sorted(self._consumers.values(), key=lambda each: (each.since, each.name))
            ]
        return {"collection": self._collection, "order": self._order, "consumers": consumers, "lanes": lanes}

    def _gauge(self) -> None:
        if self._metrics is None:
            return
        with self.lanes.changed:
            counts = [lane.window.counts() for lane in self.lanes]
            oldest = [tick for lane in self.lanes if (tick := lane.window.oldest_tick) is not None]
            age = max(0.0, time.time() - tick_physical_ms(min(oldest)) / 1000) if oldest else 0.0
            ready, in_flight = (
                sum(each.ready + each.blocked for each in counts),
                sum(each.in_flight for each in counts),
            )
            figures = ready, in_flight, age
            if not self.closed and figures != self._reported:
                self._reported = figures
                for gauge, value in zip(self._gauges(self._metrics), (ready, in_flight, age), strict=True):
                    gauge.labels(self.group).set(value)

    @staticmethod
    def _gauges(metrics: Metrics) -> tuple[Gauge, ...]:
        return metrics.queue_ready_tasks, metrics.queue_in_flight_tasks, metrics.queue_oldest_task_seconds


@dataclass(frozen=True, slots=True)
class _Element:
    """Deliveries of one VChannel in a call."""

    lane: str
    names: TaskNames
    delay: float = 0.0
    unused: bool = False

    @property
    def count(self) -> int:
        return len(self.names.ticks)


def dispatcher_name(data_dir: Path) -> str:
    """Return the name under which the server of a data folder dispatches queues; the same after a restart.

    A data folder has one server at a time, so nobody else has the name.
    """
    identity = f"{socket.gethostname()}\n{data_dir.absolute()}"
    return f"queue-{hashlib.sha256(identity.encode()).hexdigest()[:24]}"


def _all(elements: Sequence[_Element]) -> list[list[int]]:
    return [[place, each] for place, element in enumerate(elements) for each in range(element.count)]


def _elements(request: dict[str, Any], key: str) -> list[_Element]:
    said = request.get(key) or []
    try:
        found: list[_Element] = []
        for element in said:
            lane, ticks, ordinals, deliveries, *rest = element
            names = TaskNames(_column(ticks), _column(ordinals), _column(deliveries))
            if not len(names.ticks) == len(names.ordinals) == len(names.deliveries):
                raise ValueError("columns of different lengths")
            if len(rest) not in (0, 2):
                raise ValueError("a delay, and whether the deliveries were unused, go together")
            delay, unused = (float(rest[0]), rest[1] is True) if rest else (0.0, False)
            if not 0.0 <= delay <= LONGEST_LEASE:
                raise ValueError(f"a delay lasts 0 to {LONGEST_LEASE:.0f} s, not {delay}")
            found.append(_Element(str(lane), names, delay, unused))
        if sum(max(1, element.count) for element in found) > MAX_TASKS:
            raise ValueError(f"more than {MAX_TASKS} tasks in a call")
        return found
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidArgument(f"{key!r} needs lists of [VChannel, ticks, ordinals, deliveries]: {error}") from error


def _column(values: object) -> npt.NDArray[np.int64]:
    if not isinstance(values, list) or not all(type(value) is int for value in values):
        raise ValueError("a column is a list of whole numbers")
    return np.array(values, np.int64)


def _lanes_of(request: dict[str, Any]) -> frozenset[str]:
    lanes = request.get("lanes")
    if (
        not isinstance(lanes, list)
        or not 0 < len(lanes) <= MAX_LANES
        or not all(isinstance(lane, str) and lane for lane in lanes)
    ):
        raise InvalidArgument(f"a take needs 'lanes', the VChannels of a collection, at most {MAX_LANES}")
    return frozenset(lanes)


def _start(request: dict[str, Any]) -> str | int:
    start = request.get("start", "earliest")
    if start in ("earliest", "latest") or (type(start) is int and 0 <= start < 1 << 63):
        return start
    raise InvalidArgument(f"a queue starts at 'earliest', 'latest' or after a tick, not at {str(start)[:100]!r}")


def _number(request: dict[str, Any], key: str, default: float, least: float, most: float) -> float:
    value = request.get(key)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not least <= value <= most:
        raise InvalidArgument(f"{key!r} is a number from {least:g} to {most:g}, not {value!r}")
    return value
