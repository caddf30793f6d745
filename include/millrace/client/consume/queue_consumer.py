"""A consumer of a work queue: competing consumers, each task leased to one of them and acknowledged by itself.

    with database.consumer("jobs", group="workers", mode="queue", lease=60) as queue:
        for task in queue:
            work(task.row)
            queue.acknowledge(task)

A task is a row that was inserted into the collection. A task that is not acknowledged when its lease is over is
delivered again, to any consumer of the group: at least once. The log's server keeps which tasks are done
(millrace.node.append.work_queues). The consumer holds up to `prefetch` tasks that are not settled; those that wait for
`poll` have their leases renewed. An acknowledgement is sent in the background, together with others; `commit` and
`close` return when it is durable.

The consumers of a connection share a few threads (millrace.client.consume.task_session). One without tasks costs none.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import uuid
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, Protocol, Required, TypedDict

import pyarrow as pa

from millrace.base.backoff import jittered
from millrace.base.closeable import Closeable
from millrace.base.deadline import Deadline
from millrace.base.errors import Closed, DeadlineExceeded, InvalidArgument, LogUnavailable, MillraceError, TaskLeaseLost
from millrace.client.consume.dead_letters import DeadTask
from millrace.client.consume.membership import CLOCK_DRIFT, boot_clock
from millrace.client.consume.task_session import PATIENCE, QueueServer, TaskSession, passes
from millrace.rpc.tasks import LONGEST_LEASE, LeasedTasks
from millrace.wal.scanner import DeliverPolicy

LEASE_SECONDS: Final = 30.0
PREFETCH: Final = 100
MAX_PREFETCH: Final = 5000
MAX_DELIVERIES: Final = 5
"""Deliveries of a task after which it becomes a dead letter, if the queue has a place for them."""
COMMIT_SECONDS: Final = 30.0
_WAIT: Final = 0.5
_LONGEST_CALL: Final = 5.0
_PAUSE: Final = 0.2
_LONGEST_PAUSE: Final = 5.0
"""Longest pause after errors, and between calls to a server of an earlier build that find nothing."""
_LOOK_SECONDS: Final = 300.0
"""How often a consumer takes by itself while it waits in its session."""
_MOST: Final = 5000
_SETTLE_TASKS: Final = 1000
_SETTLE_PAUSE: Final = 0.004
"""How long acknowledgements wait for others, up to _SETTLE_TASKS: each call costs the server a durable write."""
_MAX_ERRORS: Final = 10
"""Errors that wait for `poll`; of more, the oldest are dropped."""

_log: Final = logging.getLogger(__name__)


class QueueOptions(TypedDict, total=False):
    """Options of a consumer of a work queue (:meth:`Database.consumer`)."""

    group: Required[str]
    start: DeliverPolicy | None
    lease: float | None
    prefetch: int
    order: Literal["key"] | None
    dead_letters: str | None
    max_deliveries: int | None


class _Rows:
    """The rows of one answer; they become Python objects together, once."""

    __slots__ = ("_objects", "batch")

    def __init__(self, batch: pa.RecordBatch) -> None:
        self.batch = batch
        self._objects: list[dict[str, Any]] | None = None

    def row(self, place: int) -> dict[str, Any]:
        if self._objects is None:
            self._objects = self.batch.to_pylist()
        return self._objects[place]


@dataclass(slots=True, eq=False)
class Task:
    """A leased task."""

    vchannel: str
    tick: int
    """Of the message or transaction that inserted the row."""
    ordinal: int
    """Number of the row in it."""
    deliveries: int
    """How often the task was delivered, with this time."""
    expires: float
    """When the lease is over, by the clock of the consumer."""
    _rows: _Rows
    _place: int
    _clock: Callable[[], float]
    _consumer: str
    settled: bool = False
    """Whether it was acknowledged, released or rejected here."""

    @property
    def row(self) -> dict[str, Any]:
        """The row as a dict."""
        return self._rows.row(self._place)

    @property
    def rows(self) -> pa.RecordBatch:
        """The row as an Arrow batch of one row."""
        return self._rows.batch.slice(self._place, 1)

    @property
    def id(self) -> str:
        """The task's name, the same in every delivery: use it to recognise a repeated one."""
        return f"{self.vchannel}/{self.tick}/{self.ordinal}"

    @property
    def lease_left(self) -> float:
        """Seconds until the lease is over; 0 if it is."""
        return max(0.0, self.expires - self._clock())


class Letters(Protocol):
    """Where dead letters go."""

    def write(self, tasks: Sequence[tuple[DeadTask, str]]) -> None: ...


@dataclass(slots=True)
class _Outbox:
    """What is to be sent about tasks."""

    done: list[Task] = field(default_factory=list)
    renew: list[Task] = field(default_factory=list)
    release: list[tuple[Task, float, bool]] = field(default_factory=list)
    """With the delay in seconds, and whether the delivery was unused."""
    dead: list[tuple[Task, str]] = field(default_factory=list)
    """Tasks to write as dead letters, with the reason; then they are done."""

    def __bool__(self) -> bool:
        return bool(self.done or self.renew or self.release or self.dead)


class QueueConsumer(Closeable):
    """Consumes tasks of a collection in competition with the other consumers of `group`. Thread-safe.

    Made by :meth:`Database.consumer` with ``mode="queue"``.
    """

    def __init__(
        self,
        server: QueueServer,
        *,
        collection: str,
        lanes: Sequence[str],
        group: str,
        lease: float = LEASE_SECONDS,
        prefetch: int = PREFETCH,
        order: str | None = None,
        start: str | int = "earliest",
        letters: Letters | None = None,
        max_deliveries: int | None = None,
        session: TaskSession | None = None,
        clock: Callable[[], float] = boot_clock,
    ) -> None:
        """`session`: that of the connection to `server`; None: one of its own."""
        if type(prefetch) is not int or not 1 <= prefetch <= MAX_PREFETCH:
            raise InvalidArgument(f"prefetch is a number from 1 to {MAX_PREFETCH}, not {prefetch!r}")
        if max_deliveries is not None and letters is None:
            raise InvalidArgument("max_deliveries needs dead_letters, the collection for tasks that exceed it")
        if max_deliveries is not None and (type(max_deliveries) is not int or not 1 <= max_deliveries <= 250):
            raise InvalidArgument(f"max_deliveries is a number from 1 to 250, not {max_deliveries!r}")
        self.group = group
        self.collection = collection
        self.name = uuid.uuid4().hex
        self.lost = 0
        """Tasks whose lease was over before they were acknowledged: they are delivered again."""
        self.idle_reason = ""
        """Why the server has no VChannel of the queue; "" if it has one."""
        self._server = server
        self._session = session or TaskSession(server)
        self._closes_session = session is None
        self._lease = lease
        self._prefetch = prefetch
        self._least_room = max(1, prefetch // 2)
        self._letters = letters
        self._most = MAX_DELIVERIES if letters is not None and max_deliveries is None else max_deliveries
        self._clock = clock
        self._asking: dict[str, Any] = {
            "queue": collection,
            "group": group,
            "consumer": self.name,
            "lanes": sorted(lanes),
            "client": f"{socket.gethostname()}:{os.getpid()}",
            "lease": lease,
            "order": order,
            "start": start,
            "session": self._session.name,
        }
        self._changed = threading.Condition(threading.RLock())
        """Polls, commits and `close` wait here."""
        self._committing = 0
        """Calls that wait until everything is sent."""
        self._ready: deque[Task] = deque()
        self._out: set[Task] = set()
        """Tasks that `poll` returned and that are not settled.

        Those with no lease leave it when `poll` has no other task: who does not ask for more leaves them to others.
        """
        self._outbox = _Outbox()
        self._first_done = 0.0
        """When the first acknowledgement in the outbox came."""
        self._send_after = 0.0
        """What failed is sent again from then on."""
        self._sending = False
        self._taking = True
        """Whether a take is under way."""
        self._full = False
        """Whether the next take waits for room."""
        self._last = 0
        self._failing: float | None = None
        """Since when takes fail."""
        self._pause = 0.0
        self._errors: deque[Exception] = deque(maxlen=_MAX_ERRORS)
        self._failed: Exception | None = None
        """Why what is to be sent could not be sent, if it could not."""
        self._unknown = False
        """Whether the server has not read the tasks that this consumer has: it must dispatch the queue."""
        self._late: list[str] = []
        """Tasks that were acknowledged too late since the last commit."""
        self._wakers: list[Callable[[], None]] = []
        self._closed = False
        self._renewed = clock()
        named = f"queue {group!r}"
        self._take_job = self._session.taking.start(self._take, name=named, at_once=False)
        self._settle_job = self._session.settling.start(self._settle, name=named, at_once=False)
        self._session.add(group, self.name, self._take_job, self._wait_failed)
        # The first call is made here, so that a wrong use raises at once.
        try:
            answer = self._ask(wait=0.0)
        except BaseException:
            self._leave_session()
            raise
        self._receive(answer)
        with self._changed:
            self._taking = False
            waits = answer[1].session and not self._unknown
        if not waits:
            self._take_job.wake()

    # --- public methods -----------------------------------------------------------------------------------------------

    def poll(self, *, timeout: float) -> Task | None:
        """Return the next task; None after `timeout` seconds, or while `prefetch` tasks are not settled.

        At least half of its lease is left. Raises Closed, and what the queue's reading raises: a retriable error once
        it has lasted for PATIENCE seconds; the next poll continues. So a server may restart.
        """
        end = Deadline.after(timeout)
        with self._changed:
            if self._closed:
                raise Closed("this consumer is closed: make a new one")
            while True:
                if self._errors:
                    raise self._errors.popleft()
                if (task := self._next()) is not None:
                    return task
                if end.expired() or self._closed:
                    return None
                end.wait(self._changed, maximum=_WAIT)

    def _next(self) -> Task | None:
        while self._ready:
            task = self._ready.popleft()
            if task.expires - self._clock() < self._lease / 2:  # it comes again, here or elsewhere
                self._take_if_room()
                continue
            self._out.add(task)
            return task
        if self._prefetch <= len(self._out):
            now = self._clock()  # what is not this consumer's any more takes no room
            self._out = {task for task in self._out if task.expires > now}
            self._take_if_room()
        return None

    def __iter__(self) -> Iterator[Task]:
        """Yield tasks until the consumer is closed."""
        while not self._closed:
            try:
                task = self.poll(timeout=_WAIT)
            except Closed:  # another thread closed it just now
                return
            if task is not None:
                yield task

    @property
    def closed(self) -> bool:
        return self._closed

    def _is_closed(self) -> bool:
        return self._closed  # another thread may have closed it

    @property
    def ended(self) -> bool:
        """Whether the consumer will deliver no more tasks."""
        return self._closed

    @property
    def unsettled(self) -> int:
        """Tasks that `poll` returned and that are not settled."""
        return len(self._out)

    def acknowledge(self, *tasks: Task) -> None:
        """Mark tasks as done: they are not delivered again. Durable after :meth:`commit` or :meth:`close`.

        An acknowledgement that comes after the end of a lease still counts, unless the task was delivered again; then
        the next `commit` raises TaskLeaseLost. Raises Closed. As all calls with tasks, it raises InvalidArgument for a
        task of another consumer.
        """
        with self._changed:
            self._require_open(tasks)
            first = not self._outbox.done
            self._outbox.done.extend(self._settled(tasks))
            if first:
                self._first_done = self._clock()
                self._settle_job.wake(_SETTLE_PAUSE)
            elif len(self._outbox.done) == _SETTLE_TASKS:
                self._settle_job.wake()
            self._take_if_room()

    def release(self, *tasks: Task, delay: float = 0.0) -> None:
        """Give tasks back, to be delivered again to any consumer after `delay` seconds, at most 12 hours.

        Raises InvalidArgument, Closed.
        """
        if type(delay) not in (int, float) or not 0.0 <= delay <= LONGEST_LEASE:
            raise InvalidArgument(f"a delay is a number of seconds from 0 to {LONGEST_LEASE:.0f}, not {delay!r}")
        with self._changed:
            self._require_open(tasks)
            self._outbox.release.extend((task, delay, False) for task in self._settled(tasks))
            self._settle_job.wake()
            self._take_if_room()

    def reject(self, *tasks: Task, reason: str) -> None:
        """Put tasks into the dead letters with a reason, and count them as done. Durable as an acknowledgement is.

        Raises InvalidArgument if the consumer was made without `dead_letters`, or if the reason is no text. Raises
        Closed.
        """
        if self._letters is None:
            raise InvalidArgument(
                'this consumer has no place for dead letters: make it with dead_letters="<collection>", or release the'
                " task"
            )
        if not isinstance(reason, str):
            raise InvalidArgument(f"the reason of a rejection is a text, not {type(reason).__name__}: use str()")
        with self._changed:
            self._require_open(tasks)
            self._outbox.dead.extend((task, reason) for task in self._settled(tasks))
            self._settle_job.wake()
            self._take_if_room()

    def renew(self, *tasks: Task) -> None:
        """Let the leases of tasks begin anew; returns once they have.

        Raises TaskLeaseLost if another consumer has one of them, LogUnavailable if the server cannot tell now. Raises
        Closed.
        """
        with self._changed:
            self._require_open(tasks)
        for first in range(0, len(tasks), _MOST):
            part = tasks[first : first + _MOST]
            asked = self._clock()
            answer = self._call(renew=_elements(part))
            gone, unread = (_named(part, answer, "renew", outcome) for outcome in ("lost", "unread"))
            exempt = {id(task) for task in (*gone, *unread)}
            for task in part:
                if id(task) not in exempt:
                    task.expires = asked + self._lease * (1 - CLOCK_DRIFT)
            if gone:
                for task in gone:
                    task.expires = asked
                raise TaskLeaseLost(
                    f"another consumer of queue {self.group!r} has task {gone[0].id} by now: stop working on it"
                )
            if unread:
                self._ask_to_dispatch()
                raise LogUnavailable(
                    f"the server of queue {self.group!r} has changed and is not ready: renew {unread[0].id} again"
                )

    def commit(self, *, timeout: float = COMMIT_SECONDS) -> None:
        """Wait until all acknowledgements so far, releases and rejections are durable.

        Raises TaskLeaseLost if some of the acknowledgements since the last commit came too late: these tasks are
        delivered again. The others are durable. Raises DeadlineExceeded if the server does not answer in time, and what
        it answers if that is an error which repetition does not mend.
        """
        end = Deadline.after(timeout)
        with self._changed:
            self._committing += 1
            self._settle_job.wake()
            try:
                while self._outbox or self._sending:
                    if self._failed is not None and not passes(self._failed):
                        raise self._failed
                    if end.expired():
                        raise DeadlineExceeded(
                            f"the queue's server did not answer within {timeout:.0f} s: acknowledgements are repeated"
                            " until it does"
                        )
                    end.wait(self._changed, maximum=_WAIT)
            finally:
                self._committing -= 1
            late, self._late = self._late, []
        if late:
            raise TaskLeaseLost(
                f"{len(late)} tasks of queue {self.group!r} were acknowledged after another consumer had got them, the"
                f" first is {late[0]}: use a longer lease, or renew it"
            )

    def on_ready(self, call: Callable[[], None]) -> None:
        """Call `call` once, from any thread, when a poll would return at once or the consumer is closed."""
        with self._changed:
            if not self._ready and not self._errors and not self._closed:
                self._wakers.append(call)
                return
        call()

    def close(self) -> None:
        """Send what is acknowledged, give back all other tasks, and leave the queue. Idempotent.

        Raises what prevented the acknowledgements from becoming durable; the consumer is closed then too.
        """
        with self._changed:
            if self._closed:
                return
            self._closed = True
            self._wake()
        self._take_job.stop()
        self._settle_job.stop()
        try:
            self._send_rest()
            with self._changed:
                taking = self._taking
            try:
                self._call(leave=True, last=self._last)  # which ends a take that waits
                if taking:
                    end = Deadline.after(_LONGEST_CALL + 10.0)
                    with self._changed:
                        while self._taking and not end.expired():
                            end.wait(self._changed)
                    self._call(leave=True, last=self._last)  # and gives back what a late one took
            except MillraceError as error:
                _log.warning("tasks of queue %r are free once their leases are over: %s", self.group, error)
        finally:
            self._leave_session()
        if self._failed is not None:
            raise self._failed

    def _send_rest(self) -> None:
        """Send what is acknowledged, and give the rest back; set why not if that fails."""
        end = Deadline.after(_LONGEST_CALL + 10.0)
        with self._changed:
            while self._sending and not end.expired():
                end.wait(self._changed)
            self._outbox.renew.clear()
            self._outbox.release.extend((task, 0.0, True) for task in self._ready)
            self._ready.clear()
            sent, self._outbox = self._outbox, _Outbox()
        self._failed = None
        try:
            while sent and not self._send(sent):
                if not end.pause(jittered(_PAUSE)):
                    raise LogUnavailable(
                        f"the server of queue {self.group!r} has changed and is not ready: {len(sent.done)}"
                        " acknowledgements are not durable, and these tasks may be delivered again"
                    )
                self._server.take_tasks(self._taking_request() | {"most": 0}, seconds=_LONGEST_CALL)
        except Exception as error:
            if sent.done or sent.dead:  # leaving gives the others back
                self._failed = error

    def _leave_session(self) -> None:
        self._take_job.stop()
        self._settle_job.stop()
        self._session.remove(self.group, self.name)
        if self._closes_session:
            self._session.close()

    # --- taking -------------------------------------------------------------------------------------------------------

    def _take(self) -> float | None:
        """Take tasks once if there is room; return the seconds until the next time, None: once something wakes it."""
        with self._changed:
            if self._closed:
                return None
            if self._taking:  # the first one
                self._unknown = True
                return None
            self._full = not self._unknown and self._room() < self._least_room
            if self._full:
                return None
            self._unknown, self._taking = False, True
        try:
            with self._session.direct() as may_wait:
                wait = min(_LONGEST_CALL, self._lease / 4) if may_wait else 0.0
                answer = self._ask(wait=wait)
            self._receive(answer)
        except Exception as error:  # any other, too, ends no thread without a word
            with self._changed:
                self._failing = self._failing or self._clock()
                if not passes(error) or (not self._errors and self._clock() - self._failing >= PATIENCE):
                    self._errors.append(error)
                    self._wake()
                self._pause = min(2 * self._pause or (_PAUSE if passes(error) else 1.0), _LONGEST_PAUSE)
                return jittered(self._pause)
        finally:
            with self._changed:
                self._taking = False
                self._changed.notify_all()
        asked, found = answer
        if not found.parts and not found.session and not 0.0 < wait < 2 * (self._clock() - asked):
            self._pause = min(2 * self._pause or _PAUSE, _LONGEST_PAUSE)  # it cannot wait now: no hot loop
            return jittered(self._pause)
        self._pause = 0.0
        return jittered(_LOOK_SECONDS) if found.session else 0.0

    def _wait_failed(self, error: Exception) -> None:
        """Note an error that lasts while this consumer waits in its session."""
        with self._changed:
            if not self._errors:
                self._errors.append(error)
                self._wake()

    def _take_if_room(self) -> None:
        if self._full and self._room() >= self._least_room:
            self._full = False
            self._take_job.wake()

    def _room(self) -> int:
        return self._prefetch - len(self._ready) - len(self._out)

    def _ask_to_dispatch(self) -> None:
        """Have the server dispatch the queue, even if this consumer has no room for more tasks."""
        with self._changed:
            self._unknown = True
            self._take_job.wake()

    def _ask(self, *, wait: float) -> tuple[float, LeasedTasks]:
        asked = self._clock()
        found = self._server.take_tasks(self._taking_request() | {"wait": wait}, seconds=wait + _LONGEST_CALL)
        return asked, found

    def _taking_request(self) -> dict[str, Any]:
        with self._changed:
            return {**self._asking, "last": self._last, "most": max(0, self._room()), "wait": 0.0}

    def _receive(self, answer: tuple[float, LeasedTasks]) -> None:
        asked, found = answer
        expires = asked + self._lease * (1 - CLOCK_DRIFT)
        with self._changed:
            if self._is_closed():  # as if the answer was lost: leaving gives its tasks back
                return
            self._last = found.number
            self.idle_reason = found.reason
            self._failing = None
            while len(self._errors) and passes(self._errors[0]):
                self._errors.popleft()  # it is over
            if found.parts and not self._ready:
                self._renewed = self._clock()
                self._settle_job.wake(self._lease / 4)
            for batch, lanes, ticks, ordinals, deliveries in found.parts:
                rows = _Rows(batch)
                names = (lane for lane, count in lanes for _ in range(count))
                for place, (lane, tick, ordinal, count) in enumerate(
                    zip(names, ticks, ordinals, deliveries, strict=True)
                ):
                    task = Task(lane, tick, ordinal, count, expires, rows, place, self._clock, self.name)
                    if self._most is not None and count > self._most:
                        task.settled = True
                        self._outbox.dead.append((task, f"delivered {self._most} times and not acknowledged"))
                    else:
                        self._ready.append(task)
            self._wake()
        self._session.took(self.group, self.name, found.session)

    # --- settling -----------------------------------------------------------------------------------------------------

    def _require_open(self, tasks: Sequence[Task]) -> None:
        """Raise Closed if tasks that are not settled came after `close`, which has given them back.

        Raises InvalidArgument for a task of another consumer: in this one's group, its name may be that of a task that
        nobody has worked on.
        """
        for task in tasks:
            if task._consumer != self.name:
                raise InvalidArgument(
                    f"task {task.id} came from another consumer than this one of queue {self.group!r}: settle it there"
                )
        if self._closed and not all(task.settled for task in tasks):
            raise Closed("this consumer is closed, and has given its tasks back: they are delivered again")

    def _settled(self, tasks: Sequence[Task]) -> list[Task]:
        """Return the tasks that are settled now and were not before."""
        found = []
        for task in tasks:
            if not task.settled:
                task.settled = True
                self._out.discard(task)
                found.append(task)
        return found

    def _settle(self) -> float | None:
        """Send what is to be sent; return the seconds until the next time, None: once something wakes it."""
        with self._changed:
            now = self._clock()
            if self._closed:  # which sends the rest
                return None
            if now < self._send_after:
                return self._send_after - now
            if 0 < len(self._outbox.done) < _SETTLE_TASKS and not self._committing and not self._asking["order"]:
                left = self._first_done + _SETTLE_PAUSE - now
                if left > 0:
                    return left
            if now >= self._renewed + self._lease / 4:
                self._renewed = now
                self._outbox.renew.extend(self._ready)
            if not self._outbox:
                return self._until_renewal(now)
            sent, self._outbox = self._outbox, _Outbox()
            self._sending = True
        failed: Exception | None = None
        done = False
        try:
            done = self._send(sent)
        except Exception as error:
            failed = error
        with self._changed:
            self._sending = False
            self._failed = failed
            if not done:  # again, before what has come since; a renewal only if it is still of use
                self._outbox.done[:0] = sent.done
                self._outbox.release[:0] = sent.release
                self._outbox.dead[:0] = sent.dead
                self._send_after = self._clock() + jittered(_PAUSE)
            if failed is not None and not passes(failed):
                self._errors.append(failed)
                self._wake()
            self._changed.notify_all()
            return 0.0 if self._outbox else self._until_renewal(self._clock())

    def _until_renewal(self, now: float) -> float | None:
        if not self._ready:
            return None
        # Short, because a suspension of the machine, which a wait does not count, may have ended leases.
        return max(0.001, min(_WAIT, self._renewed + self._lease / 4 - now))

    def _send(self, sent: _Outbox) -> bool:
        """Send all of `sent`, and remove from it what was answered.

        Returns False if the VChannels' owner has changed and has not read some tasks yet: they are to be sent again.
        """
        if sent.dead:
            self._bury(sent)
        unread: list[Task] = []
        try:
            self._send_all(sent, unread)
        finally:
            sent.done[:0] = unread
        if unread:
            self._ask_to_dispatch()
        return not unread

    def _send_all(self, sent: _Outbox, unread: list[Task]) -> None:
        while sent.done or sent.renew or sent.release:
            done, renew, release = sent.done[:_MOST], sent.renew[:_MOST], sent.release[:_MOST]
            asked = self._clock()
            answer = self._call(done=_elements(done), renew=_elements(renew), release=_released(release))
            gone = {id(task) for each in ("lost", "unread") for task in _named(renew, answer, "renew", each)}
            for task in renew:
                if id(task) not in gone:
                    task.expires = asked + self._lease * (1 - CLOCK_DRIFT)
            late = _named(done, answer, "done", "lost")
            again = _named(done, answer, "done", "unread")
            # Later, as long as it is of use.
            now = self._clock()
            late += [task for task in again if now > task.expires + self._lease]
            unread += [task for task in again if now <= task.expires + self._lease]
            with self._changed:
                if late:
                    self.lost += len(late)
                    self._late += [task.id for task in late]
                    del self._late[:-1000]
            sent.done, sent.renew, sent.release = sent.done[_MOST:], sent.renew[_MOST:], sent.release[_MOST:]

    def _bury(self, sent: _Outbox) -> None:
        """Write dead letters; then they are done."""
        assert self._letters is not None
        try:
            self._letters.write(sent.dead)
        except Exception as error:  # one that lasts must not keep the acknowledgements back
            if isinstance(error, MillraceError) and error.retriable:
                raise
            sent.release += [(task, 1.0, True) for task, _ in sent.dead]
            sent.dead = []
            with self._changed:
                self._errors.append(error)
                self._wake()
            return
        sent.done += [task for task, _ in sent.dead]
        sent.dead = []

    def _call(self, **what: Any) -> dict[str, Any]:
        request = {"group": self.group, "consumer": self.name, "lease": self._lease}
        return self._server.settle_tasks(request | {key: value for key, value in what.items() if value}, seconds=10.0)

    def _wake(self) -> None:
        self._changed.notify_all()
        if self._outbox:
            self._settle_job.wake()
        wakers, self._wakers = self._wakers, []
        for call in wakers:
            call()


def _elements(tasks: Sequence[Task]) -> list[list[Any]]:
    """Return tasks as the server's calls name them, one element for all of a VChannel."""
    found: dict[str, list[list[int]]] = {}
    for task in tasks:
        columns = found.setdefault(task.vchannel, [[], [], []])
        columns[0].append(task.tick)
        columns[1].append(task.ordinal)
        columns[2].append(task.deliveries)
    return [[lane, *columns] for lane, columns in found.items()]


def _released(tasks: Sequence[tuple[Task, float, bool]]) -> list[list[Any]]:
    found: dict[tuple[float, bool], list[Task]] = {}
    for task, delay, unused in tasks:
        found.setdefault((delay, unused), []).append(task)
    return [[*element, delay, unused] for (delay, unused), each in found.items() for element in _elements(each)]


def _named(tasks: Sequence[Task], answer: dict[str, Any], kind: str, outcome: str) -> list[Task]:
    """Return the tasks that an answer names, by element and place."""
    places = answer.get(outcome, {}).get(kind, [])
    if not places:
        return []
    by_lane: dict[str, list[Task]] = {}
    for task in tasks:
        by_lane.setdefault(task.vchannel, []).append(task)
    elements = list(by_lane.values())
    return [elements[element][place] for element, place in places]
