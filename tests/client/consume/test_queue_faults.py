"""A consumer of a work queue whose server restarts, cannot wait or refuses: the server's code, without a network."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from millrace.base.errors import Closed, InvalidArgument, LogUnavailable, PermissionDenied
from millrace.client.consume.async_consumer import AsyncQueueConsumer
from millrace.client.consume.dead_letters import DeadTask
from millrace.client.consume.queue_consumer import QueueConsumer, Task
from tests.client.consume.queue_server import LANES, Direct, polled
from tests.waiting import until

Make = Callable[..., tuple[Direct, QueueConsumer]]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    with ExitStack() as closing:

        def made(count: int = 6, **options: Any) -> tuple[Direct, QueueConsumer]:
            server = Direct(tmp_path, count)
            queue = QueueConsumer(server, collection="jobs", lanes=LANES, group="workers", **options)
            closing.callback(server.queues.close)
            closing.callback(queue.close)
            return server, queue

        yield made


def test_a_long_task_is_renewed_across_a_kill_of_the_server_though_its_consumer_wants_no_other(make: Make) -> None:
    server, queue = make(count=1, prefetch=1, lease=20.0)
    [task] = polled(queue, 1)
    server.kill()

    def renewed() -> bool:
        try:
            queue.renew(task)
        except LogUnavailable:  # it is asked to dispatch the queue
            return False
        return True

    until(renewed, "the lease begins anew", seconds=5.0)
    assert task.lease_left > 15
    queue.acknowledge(task)
    queue.commit(timeout=5.0)


def test_a_server_that_cannot_wait_is_not_asked_in_a_hot_loop(make: Make) -> None:
    server, queue = make(count=0)
    server.may_wait = False
    before = server.calls["take"] + server.calls["news"]
    time.sleep(1.0)
    assert server.calls["take"] + server.calls["news"] - before < 15
    assert queue.poll(timeout=0.0) is None


def test_acknowledgements_one_by_one_go_together(make: Make) -> None:
    """Each call costs the server a durable write."""
    server, queue = make(count=500, prefetch=2000)
    for task in polled(queue, 1000):
        queue.acknowledge(task)
    queue.commit()
    assert server.calls["settle"] <= 20


def test_a_task_that_nobody_settles_takes_no_room_once_its_lease_is_over(make: Make) -> None:
    _, queue = make(count=2, prefetch=2, lease=1.0)
    forgotten = {task.id for task in polled(queue, 2)}
    assert queue.unsettled == 2
    later = polled(queue, 4)  # without room for them it would wait for good
    assert {task.id for task in later} | forgotten >= {f"{lane}/1/{row}" for lane in LANES for row in (0, 1)}


def test_a_consumer_that_asks_for_nothing_leaves_its_lost_tasks_to_another(make: Make) -> None:
    server, stuck = make(count=1, prefetch=2, lease=1.0)
    lost = {task.id for task in polled(stuck, 2)}
    time.sleep(2.0)  # their leases are over, and nobody else waits for them
    other = QueueConsumer(server, collection="jobs", lanes=LANES, group="workers", lease=30.0)
    again = polled(other, 2)
    other.close()
    assert {task.id: task.deliveries for task in again} == dict.fromkeys(lost, 2)


def test_what_the_server_refuses_for_good_is_raised_and_not_collected(make: Make) -> None:
    server, queue = make(count=2)
    [task, _] = polled(queue, 2)
    server.refuses = PermissionDenied("the grant was taken away")
    queue.acknowledge(task)
    with pytest.raises(PermissionDenied):
        queue.commit(timeout=20.0)
    time.sleep(1.5)
    assert len(queue._errors) <= 10
    with pytest.raises(PermissionDenied):
        queue.close()
    assert queue.closed


class Written:
    """Letters in memory (implements Letters)."""

    def __init__(self) -> None:
        self.fails: Exception | None = None
        self.reasons: list[str] = []

    def write(self, tasks: Sequence[tuple[DeadTask, str]]) -> None:
        if self.fails is not None:
            raise self.fails
        self.reasons += [reason for _, reason in tasks]


@pytest.mark.parametrize("delay", [-1.0, float("nan"), float("inf"), 43_201.0, "1", True])
def test_a_wrong_delay_keeps_no_acknowledgement_back(make: Make, delay: Any) -> None:
    _, queue = make(count=1)
    first, second = polled(queue, 2)
    with pytest.raises(InvalidArgument, match="0 to 43200"):
        queue.release(first, delay=delay)
    queue.acknowledge(second)
    queue.commit(timeout=5.0)
    queue.release(first)
    queue.commit(timeout=5.0)


def test_letters_that_cannot_be_written_keep_no_acknowledgement_back(make: Make) -> None:
    letters = Written()
    _, queue = make(count=1, letters=letters)
    first, second = polled(queue, 2)
    with pytest.raises(InvalidArgument, match="a text"):
        queue.reject(first, reason=ValueError("why"))  # type: ignore[arg-type]
    letters.fails = ValueError("no such column")
    queue.reject(first, reason="why")
    queue.acknowledge(second)
    queue.commit(timeout=5.0)
    with pytest.raises(ValueError, match="no such column"):
        queue.poll(timeout=5.0)
    letters.fails = None
    [again] = polled(queue, 1)
    assert (again.id, again.deliveries) == (first.id, 1)
    queue.reject(again, reason="why")
    queue.commit(timeout=5.0)
    assert letters.reasons == ["why"]


def test_polls_of_an_event_loop_leave_nothing_and_no_error_once_it_is_closed(make: Make) -> None:
    server, queue = make(count=0)
    consumer = AsyncQueueConsumer(queue)

    async def run() -> None:
        for _ in range(20):
            assert await consumer.poll(timeout=0.002) is None

    for _ in range(2):
        asyncio.run(run())
    assert len(queue._wakers) <= 2, "one for each loop"
    server.publish(LANES[0])
    polled(queue, 1)
    assert not queue._errors


def test_what_is_settled_after_the_close_says_that_it_comes_again(make: Make) -> None:
    _, queue = make(count=1, letters=Written())
    first, second = polled(queue, 2)
    queue.acknowledge(first)
    queue.close()
    queue.acknowledge(first)  # it was
    for settle in (
        queue.acknowledge,
        queue.release,
        queue.renew,
        lambda task: queue.reject(task, reason="why"),
    ):
        with pytest.raises(Closed, match="delivered again"):
            settle(second)
    queue.commit(timeout=1.0)


def test_an_error_that_nobody_expects_is_raised_and_ends_no_thread(make: Make) -> None:
    server, queue = make(count=2, prefetch=2)
    first = polled(queue, 2)
    server.refuses = server.away = ValueError("an answer that cannot be read")
    queue.acknowledge(first[0])
    with pytest.raises(ValueError, match="cannot be read"):
        queue.commit(timeout=20.0)
    with pytest.raises(ValueError, match="cannot be read"):
        queue.poll(timeout=20.0)
    server.refuses = None
    until(lambda: queue._failed is None, "the thread sends it again")
    queue.acknowledge(first[1])
    queue.commit(timeout=20.0)
    calls = server.calls["take"]
    until(lambda: server.calls["take"] > calls)
    queue._errors.clear()
    server.away = None

    def comes() -> bool:
        try:
            return queue.poll(timeout=1.0) is not None
        except ValueError:  # of a call that was under way
            return False

    until(comes)


def test_an_answer_that_comes_while_the_consumer_closes_gives_its_tasks_back_uncounted(make: Make) -> None:
    server, queue = make(count=3, prefetch=10)
    polled_one = polled(queue, 1)[0]
    queue.close()
    other = QueueConsumer(server, collection="jobs", lanes=LANES, group="workers")
    counts = {task.id: task.deliveries for task in polled(other, 6)}
    other.close()
    assert counts.pop(polled_one.id) == 2
    assert set(counts.values()) == {1}


def test_a_server_that_is_away_for_a_while_ends_no_loop_over_tasks(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    server, queue = make(count=3, prefetch=1)
    back = threading.Timer(1.0, setattr, (server, "away", None))
    came: list[Task] = []
    for task in queue:
        queue.acknowledge(task)
        came.append(task)
        if len(came) == 2:
            server.away = LogUnavailable("the log's server is stopping: call again")
            back.start()
        if len({each.id for each in came}) == 6:
            break
    back.join()
    monkeypatch.setattr("millrace.client.consume.queue_consumer.PATIENCE", 0.5)
    monkeypatch.setattr("millrace.client.consume.task_session.PATIENCE", 0.5)
    server.away = LogUnavailable("nobody is there")

    def raises() -> bool:
        try:
            queue.poll(timeout=0.2)
        except LogUnavailable:
            return True
        return False

    until(raises, "what lasts is raised", seconds=20)
