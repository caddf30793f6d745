"""Consumers of a work queue at a real server: competing, with leases, releases, dead letters and order by key."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from millrace.base.errors import CollectionNotFound, GroupBusy, InvalidArgument, TaskLeaseLost
from millrace.catalog.collection import CollectionInfo
from millrace.client.consume.async_consumer import AsyncQueueConsumer
from millrace.client.consume.consumer import DROP_SECONDS, Consumer
from millrace.client.consume.dead_letters import LETTERS, MAX_TEXT, SHORT
from millrace.client.consume.queue_consumer import QueueConsumer, Task
from millrace.client.database import Database
from millrace.wal.scanner import Latest
from tests.client.conftest import ITEMS, item_rows, own_name
from tests.waiting import until

Make = Callable[..., QueueConsumer]


@pytest.fixture
def jobs(shop: Database, request: pytest.FixtureRequest) -> CollectionInfo:
    """A collection of four VChannels on two PChannels."""
    return shop.catalog.create_collection(own_name(request), ITEMS, vchannels=4)


@pytest.fixture
def make(shop: Database, jobs: CollectionInfo) -> Iterator[Make]:
    """Make consumers of the queue, which are closed in the end."""
    with ExitStack() as closing:

        def made(**options: Any) -> QueueConsumer:
            options = {"group": f"of-{jobs.name}", **options}
            return closing.enter_context(shop.consumer(jobs.name, mode="queue", **options))

        yield made


def drained(queue: QueueConsumer, count: int) -> list[Task]:
    """Poll so many tasks."""
    found: list[Task] = []

    def came() -> bool:
        task = queue.poll(timeout=0.2)
        if task is not None:
            found.append(task)
        return len(found) >= count

    until(came, f"{count} tasks")
    return found


def test_a_task_of_another_consumer_is_refused(shop: Database, jobs: CollectionInfo, make: Make) -> None:
    """In another group its name is that of a task which nobody may have worked on."""
    shop.collection(jobs).insert(item_rows(1))
    one, two = make(), make(group=f"other-of-{jobs.name}")
    [task] = drained(one, 1)
    for settle in (two.acknowledge, two.release, two.renew):
        with pytest.raises(InvalidArgument, match="another consumer"):
            settle(task)
    one.acknowledge(task)
    one.commit()
    assert [each.row["id"] for each in drained(two, 1)] == [1]


def test_a_queue_of_a_collection_that_was_made_again_says_what_is_in_its_way(shop: Database) -> None:
    name = "jobs-made-again"
    shop.catalog.create_collection(name, ITEMS)
    with shop.consumer(name, group=name, mode="queue"):
        shop.drop_collection(name)
        shop.catalog.create_collection(name, ITEMS)
        with pytest.raises(InvalidArgument, match="still the queue of an earlier collection"):
            shop.consumer(name, group=name, mode="queue")
    with shop.consumer(name, group=name, mode="queue") as after:
        assert after.poll(timeout=0.0) is None


def test_consumers_compete_and_what_is_acknowledged_never_comes_again(
    shop: Database, jobs: CollectionInfo, make: Make
) -> None:
    rows = item_rows(*range(40))
    shop.collection(jobs).insert(rows)
    one, two = make(prefetch=5), make(prefetch=5)
    seen: dict[str, list[int]] = {"one": [], "two": []}

    def work(name: str, queue: QueueConsumer) -> None:
        for task in queue:
            seen[name].append(task.row["id"])
            queue.acknowledge(task)

    threads = [threading.Thread(target=work, args=each, daemon=True) for each in (("one", one), ("two", two))]
    for thread in threads:
        thread.start()
    until(lambda: len(seen["one"]) + len(seen["two"]) == 40, "all tasks come")
    one.commit()
    two.commit()
    assert sorted(seen["one"] + seen["two"]) == list(range(40))
    assert all(seen.values()), "both had a part"
    one.close()
    two.close()
    for thread in threads:
        thread.join(5.0)
    with shop.consumer(jobs.name, mode="queue", group=one.group) as after:
        assert after.poll(timeout=0.5) is None


def test_a_task_that_is_not_acknowledged_comes_again_after_its_lease(
    shop: Database, jobs: CollectionInfo, make: Make
) -> None:
    shop.collection(jobs).insert(item_rows(1))
    one = make(lease=1.0, prefetch=1)
    [first] = drained(one, 1)
    two = make(lease=30.0, prefetch=1)
    begun = time.monotonic()
    [again] = drained(two, 1)
    assert time.monotonic() - begun < 10.0
    assert (again.id, again.deliveries) == (first.id, 2)
    assert again.row == first.row
    one.acknowledge(first)
    with pytest.raises(TaskLeaseLost, match="longer lease"):
        one.commit()
    with pytest.raises(TaskLeaseLost, match="stop working"):
        one.renew(first)
    assert one.lost == 1
    two.acknowledge(again)
    two.commit()


def test_a_renewed_lease_keeps_the_task_and_release_gives_it_back(
    shop: Database, jobs: CollectionInfo, make: Make
) -> None:
    shop.collection(jobs).insert(item_rows(1))
    one, two = make(lease=1.0, prefetch=1), make(lease=30.0, prefetch=1)
    holder = one if (task := one.poll(timeout=2.0)) is not None else two
    if task is None:
        [task] = drained(two, 1)
    other = two if holder is one else one
    for _ in range(8):
        holder.renew(task)
        assert other.poll(timeout=0.2) is None
    assert task.lease_left > 0
    holder.release(task, delay=0.3)
    holder.commit()
    found: list[Task] = []
    until(lambda: bool(found.extend(t for q in (one, two) if (t := q.poll(timeout=0.1)) is not None) or found), "again")
    assert found[0].id == task.id
    assert found[0].deliveries == 2


def test_tasks_that_were_never_polled_go_to_others_at_once_and_uncounted(
    shop: Database, jobs: CollectionInfo, make: Make
) -> None:
    shop.collection(jobs).insert(item_rows(*range(20)))
    one = make(lease=60.0, prefetch=50)
    [polled] = drained(one, 1)
    one.close()
    found = drained(make(lease=60.0, prefetch=50), 20)
    assert {task.deliveries for task in found if task.id != polled.id} == {1}
    assert next(task.deliveries for task in found if task.id == polled.id) <= 2


def test_what_fails_too_often_is_a_dead_letter_and_a_redrive_makes_it_a_task_again(
    shop: Database, jobs: CollectionInfo, make: Make
) -> None:
    shop.collection(jobs).insert(item_rows(1, 2))
    dead = f"{jobs.name}_dead"
    queue = make(lease=5.0, prefetch=4, dead_letters=dead, max_deliveries=2)
    tried: list[int] = []

    def poisoned() -> bool:
        task = queue.poll(timeout=0.2)
        if task is not None:
            tried.append(task.row["id"])
            (queue.release if task.row["id"] == 1 else queue.acknowledge)(task)
        return dead in shop and shop[dead].count() == 1

    until(poisoned, "the task is a dead letter")
    assert sorted(tried) == [1, 1, 2], "so many times, and no more"
    [letter] = shop[dead].read().to_pylist()
    assert letter["stream"] == queue.group
    assert "delivered 2 times" in letter["reason"]
    assert '"id": 1' in letter["row"]
    assert shop[dead].definition.schema.arrow() == LETTERS.arrow()
    assert shop.redrive_tasks(dead, group=queue.group, into=jobs.name) == 1
    assert shop[dead].count() == 0
    [again] = drained(queue, 1)
    assert (again.row["id"], again.deliveries) == (1, 1)
    queue.reject(again, reason="no such customer")
    queue.commit()
    assert [each["reason"] for each in shop[dead].read().to_pylist()] == ["no such customer"]


def test_a_task_too_large_for_a_letter_is_one_without_its_row_and_keeps_no_other_back(
    shop: Database, jobs: CollectionInfo, make: Make
) -> None:
    one = shop.catalog.create_collection(f"{jobs.name}_one", ITEMS, vchannels=1)
    shop.collection(one).insert(item_rows(1, name="x" * (9 << 20))).checked()
    shop.collection(one).insert(item_rows(2, name="x" * ((16 << 20) - 600))).checked()
    shop.collection(one).insert(item_rows(3)).checked()
    dead = f"{jobs.name}_dead"
    with shop.consumer(one, mode="queue", group=f"{jobs.name}-large", dead_letters=dead) as queue:
        for _ in range(3):
            queue.reject(*drained(queue, 1), reason="too much")
        queue.commit()
        assert queue.poll(timeout=0.0) is None
        letters = shop[dead].read(order_by=["batch"]).to_pylist()
        assert [len(each["row"]) for each in letters[:2]] == [MAX_TEXT, SHORT]
        assert [bool(each["payload"]) for each in letters] == [True, False, True]
        assert shop.redrive_tasks(dead, group=queue.group, into=one.name) == 2
        assert shop[dead].count() == 1, "the one without its row stays"
        again = [task for _ in range(2) for task in drained(queue, 1)]
        assert {task.row["id"] for task in again} == {1, 3}


def test_with_order_by_key_a_row_comes_when_the_earlier_ones_of_its_key_are_done(
    shop: Database, jobs: CollectionInfo, make: Make
) -> None:
    items = shop.collection(jobs)
    for _ in range(3):
        items.upsert(item_rows(1, 2))
    queue = make(order="key", prefetch=10)
    first = drained(queue, 2)
    assert sorted(task.row["id"] for task in first) == [1, 2]
    assert queue.poll(timeout=0.5) is None, "the next of each key waits"
    queue.acknowledge(next(task for task in first if task.row["id"] == 1))
    [second] = drained(queue, 1)
    assert second.row["id"] == 1
    with pytest.raises(InvalidArgument, match="order"):
        make()


def test_a_group_is_a_queue_or_a_stream(shop: Database, jobs: CollectionInfo, make: Make) -> None:
    shop.collection(jobs).insert(item_rows(1))
    queue = make()
    [task] = drained(queue, 1)
    queue.acknowledge(task)
    queue.close()
    with pytest.raises(InvalidArgument, match="is a work queue"):
        shop.consumer(jobs.name, group=queue.group)
    with pytest.raises(InvalidArgument, match="is a work queue"):
        shop.consumer(jobs.name, group=queue.group, exclusive=True)
    with shop.consumer(jobs.name, group="a-stream"), pytest.raises(InvalidArgument, match="as a stream"):
        make(group="a-stream")
    shop.drop_group(queue.group)
    with shop.consumer(jobs.name, group=queue.group) as stream:
        assert stream.poll(timeout=5.0) is not None


def test_reset_and_drop_forget_what_was_done(shop: Database, jobs: CollectionInfo, make: Make) -> None:
    shop.collection(jobs).insert(item_rows(1, 2, 3))
    queue = make(start=Latest())
    assert queue.poll(timeout=0.5) is None
    with pytest.raises(GroupBusy):
        shop.reset_group(queue.group, to="earliest")
    queue.close()
    shop.reset_group(queue.group, to="earliest")
    with pytest.raises(InvalidArgument, match="is a work queue"):
        shop.consumer(jobs.name, group=queue.group)
    assert {each["mode"] for each in shop.consumer_groups() if each["group"] == queue.group} == {"queue"}
    assert len(drained(make(), 3)) == 3


def test_wrong_options_say_what_is_right(shop: Database, jobs: CollectionInfo, make: Make) -> None:
    for options, word in (
        ({"prefetch": 0}, "prefetch"),
        ({"prefetch": "3"}, "prefetch"),
        ({"prefetch": 1.5}, "prefetch"),
        ({"prefetch": True}, "prefetch"),
        ({"dead_letters": 5}, "collection"),
        ({"dead_letters": ""}, "collection"),
        ({"dead_letters": "a b"}, "collection"),
        ({"dead_letters": jobs.name}, "dead letters"),
        ({"max_deliveries": "5", "dead_letters": "dead"}, "max_deliveries"),
        ({"group": "x" * 10_000}, "150 characters"),
        ({"group": "\ud800"}, "UTF-8"),
        ({"group": b"workers"}, "group"),
        ({"lease": 0.1}, "lease"),
        ({"order": "date"}, "order"),
        ({"max_deliveries": 3}, "dead_letters"),
        ({"exclusive": True}, "exclusive"),
    ):
        with pytest.raises(InvalidArgument, match=word):
            make(**options)
    with pytest.raises(InvalidArgument, match="mode"):
        shop.consumer(jobs.name, order="key")
    for mode in ("stream", "queue"):
        for wrong, word in (("\ud800", "UTF-8"), (b"workers", "group"), ("x" * 10_000, "150 characters")):
            with pytest.raises(InvalidArgument, match=word):
                shop.consumer(jobs.name, mode=mode, group=wrong)  # type: ignore[call-overload]
    with pytest.raises(InvalidArgument, match="group"):
        shop.consumer(jobs.name, mode="queue")  # type: ignore[call-overload]
    make(group="of-other")
    shop.catalog.create_collection(f"{jobs.name}_2", ITEMS, vchannels=1)
    with pytest.raises(InvalidArgument, match="is the queue of"):
        shop.consumer(f"{jobs.name}_2", mode="queue", group="of-other")
    queue = make()
    with pytest.raises(InvalidArgument, match="dead_letters"):
        queue.reject(reason="why")


def test_for_asyncio_a_poll_waits_without_a_thread(shop: Database, jobs: CollectionInfo, make: Make) -> None:
    queue = make(prefetch=3)

    async def run() -> list[int]:
        found = []
        async with AsyncQueueConsumer(queue) as consumer:
            assert await consumer.poll(timeout=0.1) is None
            shop.collection(jobs).insert(item_rows(*range(10)))
            async for task in consumer:
                found.append(task.row["id"])
                consumer.acknowledge(task)
                if len(found) == 10:
                    await consumer.commit()
                    return found
        return found

    assert sorted(asyncio.run(run())) == list(range(10))


def test_what_the_server_shows_of_a_queue(shop: Database, jobs: CollectionInfo, make: Make) -> None:
    shop.collection(jobs).insert(item_rows(*range(6)))
    queue = make(prefetch=4)
    drained(queue, 2)

    def shown() -> dict[str, Any]:
        return next(each for each in shop.consumer_groups() if each["group"] == queue.group)

    def tasks() -> int:
        return sum(lane["in_flight"] + lane["ready"] for lane in shown()["queue"]["lanes"].values())

    until(lambda: tasks() == 6, "everything is read")
    until(lambda: shown()["queue"]["consumers"][0]["in_flight"] == 4, "as many as it holds at a time")
    group = shown()
    assert group["mode"] == "queue"
    lanes = group["queue"]["lanes"]
    assert set(lanes) == set(jobs.vchannels)
    assert any(lane["oldest_tick"] for lane in lanes.values())


def test_a_consumer_of_a_dropped_collection_is_told_once_its_tasks_are_done(
    shop: Database, jobs: CollectionInfo, make: Make
) -> None:
    shop.collection(jobs).insert(item_rows(1, 2, 3))
    queue = make()
    tasks = drained(queue, 3)
    queue.acknowledge(*tasks[:2])
    shop.drop_collection(jobs.name)
    assert queue.poll(timeout=0.5) is None, "a task is not done, so it may come again"
    queue.acknowledge(tasks[2])

    for _ in range(2):
        with pytest.raises(CollectionNotFound, match=f"{jobs.name}.* was dropped"):
            queue.poll(timeout=30.0)


def test_a_lane_without_a_drop_counts_as_past_it_only_after_a_while(shop: Database, jobs: CollectionInfo) -> None:
    """Its drop may be decided later than that of another lane, although it is read to its end now."""
    with shop.consumer(jobs.name, group=f"past-drops-of-{jobs.name}") as consumer:
        until(lambda: consumer.poll(timeout=0.1) is None and consumer.lag == 0.0, "it has read everything")
        first, *others = sorted(consumer.assignment)
        assert others
        consumer._places[first].dropped = True
        consumer._drops[jobs.id], consumer._dropped_at = 5, time.monotonic()
        consumer._ready.clear()  # marks of an idle log
        assert not consumer._dropped()
        consumer._dropped_at -= DROP_SECONDS
        until(lambda: consumer._ready.clear() or consumer._dropped(), "it counts as past its drop")


def test_a_group_on_a_dropped_collection_is_told_after_its_last_unit(shop: Database, jobs: CollectionInfo) -> None:
    shop.collection(jobs).insert(item_rows(1, 2, 3))
    group = f"stream-of-{jobs.name}"
    with shop.consumer(jobs.name, group=group) as one, shop.consumer(jobs.name, group=group) as two:
        until(lambda: bool(one.assignment and two.assignment) and len(one.assignment) == 2, "they share its VChannels")
        shop.drop_collection(jobs.name)
        for each in (one, two):
            kinds: list[str] = []

            def consume(consumer: Consumer = each, kinds: list[str] = kinds) -> None:
                for delivery in consumer:
                    kinds += [change.kind for change in delivery.changes()]
                    consumer.acknowledge(delivery)

            for _ in range(2):
                with pytest.raises(CollectionNotFound, match=f"dropped at tick.*drop {group}"):
                    consume()
            assert kinds.count("retract") == 2, "the drop of each VChannel is delivered before"
