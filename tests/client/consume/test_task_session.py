"""Queue consumers of one connection: idle ones share a waiting call and a few threads, and none ends another."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from millrace.base.errors import CollectionNotFound, LogUnavailable
from millrace.client.consume import task_session as module
from millrace.client.consume.queue_consumer import QueueConsumer
from millrace.client.consume.task_session import DIRECT_TAKES, THREADS, TaskSession
from millrace.rpc.tasks import LeasedTasks
from tests.client.consume.queue_server import Direct, polled
from tests.waiting import until


def lane(number: int) -> str:
    return f"dml_{number % 2}_{100 + number}v0"


class Rig:
    """A server, and a client with consumers of a queue each, which have a VChannel each."""

    def __init__(self, folder: Path) -> None:
        self.server = Direct(folder, 0)
        self.session = TaskSession(self.server)
        self.consumers: list[QueueConsumer] = []

    def add(self, count: int, **options: Any) -> list[QueueConsumer]:
        first = len(self.consumers)
        made = [
            QueueConsumer(
                self.server, collection="jobs", lanes=[lane(number)], group=f"g{number}", session=self.session,
                **options,
            )
            for number in range(first, first + count)
        ]  # fmt: skip
        self.consumers += made
        return made

    @property
    def waiting(self) -> int:
        """Consumers that wait in the session, as the server sees it."""
        return sum(session._waiting for session in self.server.queues.sessions._sessions.values())

    def close(self) -> None:
        for consumer in self.consumers:
            consumer.close()
        self.session.close()
        self.server.queues.close()


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    with ExitStack() as closing:
        made = Rig(tmp_path)
        closing.callback(made.close)
        yield made


def threads() -> int:
    return sum(each.name.startswith(("queue-take", "queue-settle", "queue-news")) for each in threading.enumerate())


def test_idle_consumers_share_one_call_and_have_no_threads(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_WAIT", 0.02)
    before = threads()
    rig.add(200)
    assert rig.waiting == 200
    assert threads() - before == 1, "the one that waits"
    until(lambda: rig.server.calls["news"] >= 30)
    assert rig.server.calls["take"] == 200, "the first of each: nobody asks by itself meanwhile"
    assert rig.server.calls["settle"] == 0
    rig.server.publish(lane(7))
    [task] = polled(rig.consumers[7], 1)
    rig.consumers[7].acknowledge(task)
    rig.consumers[7].commit()
    until(lambda: rig.waiting >= 199)
    assert rig.server.calls["take"] <= 203, "and no other one takes"
    assert rig.server.calls["settle"] == 1


def test_busy_consumers_share_a_few_threads(rig: Rig) -> None:
    before = threads()
    rig.add(60, prefetch=4)
    for number in range(60):
        rig.server.publish(lane(number), 20)
    done = 0
    most = 0
    while done < 60 * 20:
        for consumer in rig.consumers:
            while (task := consumer.poll(timeout=0.0)) is not None:
                consumer.acknowledge(task)
                done += 1
        most = max(most, threads() - before)
    for consumer in rig.consumers:
        consumer.commit()
    assert most <= 2 * THREADS + 1
    assert not rig.session._direct._value < 0
    assert all(consumer.lost == 0 for consumer in rig.consumers)


def test_a_few_consumers_wait_in_calls_of_their_own(rig: Rig) -> None:
    rig.add(DIRECT_TAKES + 3)
    for number, consumer in enumerate(rig.consumers):
        rig.server.publish(lane(number))
        consumer.acknowledge(*polled(consumer, 1))
    until(lambda: rig.waiting == 3, "the others wait together")


def test_a_consumer_that_closes_while_the_call_waits_ends_no_other(rig: Rig) -> None:
    one, two = rig.add(2)
    until(lambda: rig.server.calls["news"] == 1)
    one.close()
    assert rig.waiting == 1
    assert list(rig.server.queues.describe()) == ["g1"], "it has left at once"
    rig.server.publish(lane(1))
    two.acknowledge(*polled(two, 1))
    two.close()
    assert len(rig.session._members) == 0


def test_after_a_restart_of_the_server_all_consumers_go_on(rig: Rig) -> None:
    rig.add(30)
    until(lambda: rig.server.calls["news"] == 1)
    rig.server.kill()
    for number, consumer in enumerate(rig.consumers):
        rig.server.publish(lane(number))
        [task] = polled(consumer, 1)
        consumer.acknowledge(task)
        consumer.commit()
        assert task.deliveries == 1


def test_an_answer_that_is_lost_is_told_again(rig: Rig) -> None:
    [consumer] = rig.add(1)
    rig.server.loses_news = 2
    rig.server.publish(lane(0))
    consumer.acknowledge(*polled(consumer, 1))
    assert rig.server.loses_news == 0


def test_an_error_of_one_consumer_ends_no_other(rig: Rig) -> None:
    bad, good = rig.add(2)
    queue = rig.server.queues._queues["g0"]

    def dropped() -> None:
        raise CollectionNotFound("the collection of g0 was dropped")

    queue.lanes.require = dropped  # type: ignore[method-assign]
    queue.tend()

    def raises() -> bool:
        try:
            return bad.poll(timeout=0.1) is not None
        except CollectionNotFound:
            return True

    until(raises)
    for _ in range(3):
        rig.server.publish(lane(1))
        good.acknowledge(*polled(good, 1))
    good.commit()


def test_a_server_that_is_away_for_long_is_raised_by_all_that_wait(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PATIENCE", 0.3)
    monkeypatch.setattr(module, "_WAIT", 0.1)
    rig.add(5)
    rig.server.away = LogUnavailable("nobody is there")
    takes = rig.server.calls["take"]
    for consumer in rig.consumers:

        def raises(consumer: QueueConsumer = consumer) -> bool:
            try:
                consumer.poll(timeout=0.2)
            except LogUnavailable:
                return True
            return False

        until(raises, "it is raised")
    assert rig.server.calls["take"] == takes, "nobody calls a server that is away by itself"
    rig.server.away = None
    for number, consumer in enumerate(rig.consumers):
        rig.server.publish(lane(number))

        def comes(consumer: QueueConsumer = consumer) -> bool:
            try:
                return consumer.poll(timeout=0.2) is not None
            except LogUnavailable:  # that was noted before
                return False

        until(comes, "it goes on")


def test_a_server_of_an_earlier_build_is_asked_by_turns(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    take: Callable[..., LeasedTasks] = rig.server.take_tasks

    def older(request: dict[str, Any], *, seconds: float) -> LeasedTasks:
        return take({key: value for key, value in request.items() if key != "session"}, seconds=seconds)

    monkeypatch.setattr(rig.server, "take_tasks", older)
    rig.add(DIRECT_TAKES + 6)
    for number, consumer in enumerate(rig.consumers):
        rig.server.publish(lane(number))
        consumer.acknowledge(*polled(consumer, 1))
    assert rig.server.calls["news"] == 0


def test_a_delay_is_told_though_nobody_calls_meanwhile(rig: Rig) -> None:
    [consumer] = rig.add(1, prefetch=1)
    rig.server.publish(lane(0))
    [task] = polled(consumer, 1)
    direct = rig.session._direct
    for _ in range(DIRECT_TAKES):
        assert direct.acquire(blocking=False)
    consumer.release(task, delay=0.3)
    consumer.commit()
    [again] = polled(consumer, 1)
    assert again.deliveries == 2
    consumer.acknowledge(again)
    for _ in range(DIRECT_TAKES):
        direct.release()
