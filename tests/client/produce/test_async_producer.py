"""Awaited appends: tasks share messages and wake-ups, and nothing blocks the event loop."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from millrace.base.errors import AppendRejected, AppendUnresolved, BufferFull, CollectionNotFound
from millrace.client.produce.async_producer import AsyncProducer
from millrace.client.produce.batch_appender import BatchLimits
from tests.client.produce.test_lane import Fault, Rig

TASKS = 200


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    made = Rig(tmp_path_factory.mktemp("async"))
    yield made
    made.close()


@pytest.fixture(autouse=True)
def nothing_at_fault(rig: Rig) -> None:
    rig.way.plan = deque()


def slow(rig: Rig, monkeypatch: pytest.MonkeyPatch, seconds: float) -> list[int]:
    """Let each append take a while; return the threads that they are made in."""
    threads: list[int] = []
    append = rig.way.append

    def waits(*given: Any, **options: Any) -> Any:
        threads.append(threading.get_ident())
        time.sleep(seconds)  # what an append takes: calls gather meanwhile
        return append(*given, **options)

    monkeypatch.setattr(rig.way, "append", waits)
    return threads


def test_tasks_share_messages_and_wake_the_loop_once_for_each(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    appends = slow(rig, monkeypatch, 0.05)
    woken: list[object] = []

    async def run() -> set[object]:
        loop = asyncio.get_running_loop()
        call_soon = loop.call_soon_threadsafe
        monkeypatch.setattr(
            loop, "call_soon_threadsafe", lambda *given, **more: woken.append(given[0]) or call_soon(*given, **more)
        )
        async with AsyncProducer(producer) as awaited:
            keys = rig.keys(0, TASKS)
            found = await asyncio.gather(*(awaited.insert(rig.collection, [{"id": key}]) for key in keys))
            mine = len(woken)
        assert mine <= 2 * len(appends), "one wake-up for a group, not one for each call"
        return {each.results[0].message_id for each in found}

    with rig.producer() as producer:
        messages = asyncio.run(run())
    assert len(messages) <= TASKS / 10, "three, unless the machine is busy"
    assert len(appends) <= TASKS / 10


def test_a_task_that_is_alone_waits_for_no_other(rig: Rig) -> None:
    async def run() -> None:
        async with AsyncProducer(producer) as awaited:
            for key in range(20):
                await awaited.insert(rig.collection, [{"id": key}])

    with rig.producer() as producer:
        entries = producer.sender("dml_0")
        asyncio.run(run())
        assert entries._due == float("inf"), "no call was given a time to wait for"


def test_nothing_that_may_block_runs_in_the_event_loop(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    threads = slow(rig, monkeypatch, 0.02)
    for name in ("collection", "term", "next_epoch", "alter"):
        real = getattr(rig.coordinator, name)

        def asked(*given: Any, real: Any = real, **options: Any) -> Any:
            threads.append(threading.get_ident())
            return real(*given, **options)

        monkeypatch.setattr(rig.coordinator, name, asked)

    async def run() -> None:
        async with AsyncProducer(producer, limits=BatchLimits(delay=0.0, buffer_bytes=400)) as awaited:
            calls: list[Any] = [awaited.insert("c", [{"id": key}]) for key in range(40)]
            calls += [awaited.upsert(rig.collection, {"id": list(range(20))}), awaited.delete("c", [1])]
            calls += [awaited.insert("c", [{"id": key} for key in range(2_000)])]
            await asyncio.gather(*calls)
            with pytest.raises(CollectionNotFound):
                await awaited.insert("nobody", [{"id": 1}])

    with rig.producer(producer_id=77) as producer:
        threads.clear()
        asyncio.run(run())
    assert threads
    assert threading.get_ident() not in threads, "a call that may block ran in the event loop"


def test_the_loop_goes_on_while_the_log_is_slow(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    slow(rig, monkeypatch, 0.5)

    async def run() -> int:
        beats = 0
        async with AsyncProducer(producer) as awaited:
            call = asyncio.create_task(awaited.insert(rig.collection, [{"id": 1}]))
            while not call.done():
                await asyncio.sleep(0.005)
                beats += 1
        return beats

    with rig.producer() as producer:
        assert asyncio.run(run()) > 10


def test_a_failure_reaches_the_task_whose_call_it_was(rig: Rig) -> None:
    foreign = {"id": 1, "unknown": 2}

    async def run() -> list[object]:
        async with AsyncProducer(producer) as awaited:
            calls = [awaited.insert(rig.collection, [{"id": 1}]), awaited.insert(rig.collection, [foreign])]
            found: list[object] = await asyncio.gather(*calls, return_exceptions=True)
            rig.way.plan = deque([Fault.LOST_BEFORE] * 100)
            found += await asyncio.gather(awaited.insert(rig.collection, [{"id": 2}]), return_exceptions=True)
            rig.way.plan.clear()
            producer.settle()
            return found

    with rig.producer() as producer:
        good, bad, lost = asyncio.run(run())
    assert getattr(good, "rows", 0) == 1
    assert "has no column 'unknown'" in str(bad)
    assert isinstance(lost, AppendUnresolved)
    assert not isinstance(lost, AppendRejected | BufferFull)


def test_a_task_that_is_cancelled_leaves_the_others_alone(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    slow(rig, monkeypatch, 0.05)

    async def run() -> list[object]:
        async with AsyncProducer(producer) as awaited:
            tasks = [asyncio.create_task(awaited.insert(rig.collection, [{"id": key}])) for key in range(6)]
            await asyncio.sleep(0)
            tasks[2].cancel()
            return list(await asyncio.gather(*tasks, return_exceptions=True))

    with rig.producer() as producer:
        found = asyncio.run(run())
    assert isinstance(found.pop(2), asyncio.CancelledError)
    assert [getattr(each, "rows", 0) for each in found] == [1] * 5


def test_a_producer_outlives_the_event_loop_of_a_task_that_waited_for_room(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow(rig, monkeypatch, 0.3)

    async def given_up() -> None:
        tasks = [asyncio.create_task(awaited.insert(rig.collection, [{"id": key}])) for key in range(3)]
        await asyncio.sleep(0.05)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def goes_on() -> int:
        return (await asyncio.wait_for(awaited.insert(rig.collection, [{"id": 9}]), 10.0)).rows

    with rig.producer() as producer:
        awaited = AsyncProducer(producer, limits=BatchLimits(delay=0.0, buffer_bytes=1))
        asyncio.run(given_up())
        assert asyncio.run(goes_on()) == 1
        asyncio.run(awaited.close())


def test_batches_threads_and_tasks_share_one_queue(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    try:
        with rig.producer() as producer, producer.batch(limits=BatchLimits(delay=60.0)) as batch:
            waiting = batch.insert([{"id": 1}], collection=rig.collection)
            producer.insert(rig.collection, [{"id": 2}])
            assert waiting.done(), "a call that is sent takes those before it along"
            waiting = batch.insert([{"id": 3}], collection=rig.collection)

            async def run() -> None:
                async with AsyncProducer(producer) as awaited:
                    await awaited.insert(rig.collection, [{"id": 1}])

            asyncio.run(run())
            assert waiting.done()
    finally:
        rig.close()
