"""A consumer for asyncio: ``async for``, without a thread per call.

    async with AsyncConsumer(client.consumer("users", group="mailer")) as consumer:
        async for delivery in consumer:
            ...
            consumer.acknowledge(delivery)

The consumer wakes the event loop when a unit is ready (:meth:`Consumer.on_ready`).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from functools import partial

from millrace.base.closeable import AsyncCloseable
from millrace.base.errors import Closed
from millrace.client.consume.consumer import Consumer
from millrace.client.consume.delivery import Delivery
from millrace.client.consume.queue_consumer import QueueConsumer, Task


class AsyncConsumer(AsyncCloseable):
    """Awaitable deliveries of `consumer`, which it closes. Use it from one event loop."""

    def __init__(self, consumer: Consumer) -> None:
        self.consumer = consumer
        self._ready = _Ready(consumer)

    async def poll(self, *, timeout: float) -> Delivery | None:
        """Await the next unit; see :meth:`Consumer.poll`."""
        loop = asyncio.get_running_loop()
        end = loop.time() + timeout
        while True:
            delivery = self.consumer.poll(timeout=0)
            left = end - loop.time()
            if delivery is not None or left <= 0 or self.consumer.ended:
                return delivery
            await self._ready.wait(left)  # then poll once more
            if self.consumer.closed:  # during the wait
                return None

    def acknowledge(self, delivery: Delivery) -> None:
        """Acknowledge a unit as :meth:`Consumer.acknowledge` does.

        A due commit runs here and takes about a millisecond.
        """
        self.consumer.acknowledge(delivery)

    async def __aiter__(self) -> AsyncIterator[Delivery]:
        while not self.consumer.ended:
            try:
                delivery = await self.poll(timeout=1.0)
            except Closed:  # another thread closed it just now
                return
            if delivery is not None:
                yield delivery

    async def close(self) -> None:
        """Close the consumer as :meth:`Consumer.close` does."""
        await asyncio.to_thread(self.consumer.close)


class AsyncQueueConsumer(AsyncCloseable):
    """Awaitable tasks of a work queue's `consumer`, which it closes. Use it from one event loop."""

    def __init__(self, consumer: QueueConsumer) -> None:
        self.consumer = consumer
        self._ready = _Ready(consumer)

    async def poll(self, *, timeout: float) -> Task | None:
        """Await the next task; see :meth:`QueueConsumer.poll`."""
        loop = asyncio.get_running_loop()
        end = loop.time() + timeout
        while True:
            task = self.consumer.poll(timeout=0)
            left = end - loop.time()
            if task is not None or left <= 0:
                return task
            await self._ready.wait(left)  # then poll once more
            if self.consumer.closed:  # during the wait
                return None

    async def __aiter__(self) -> AsyncIterator[Task]:
        while not self.consumer.closed:
            try:
                task = await self.poll(timeout=1.0)
            except Closed:  # another task closed it just now
                return
            if task is not None:
                yield task

    def acknowledge(self, *tasks: Task) -> None:
        """Acknowledge tasks as :meth:`QueueConsumer.acknowledge` does; this does not wait."""
        self.consumer.acknowledge(*tasks)

    def release(self, *tasks: Task, delay: float = 0.0) -> None:
        """Give tasks back as :meth:`QueueConsumer.release` does; this does not wait."""
        self.consumer.release(*tasks, delay=delay)

    def reject(self, *tasks: Task, reason: str) -> None:
        """Put tasks into the dead letters as :meth:`QueueConsumer.reject` does; this does not wait."""
        self.consumer.reject(*tasks, reason=reason)

    async def renew(self, *tasks: Task) -> None:
        """Renew leases as :meth:`QueueConsumer.renew` does."""
        await asyncio.to_thread(self.consumer.renew, *tasks)

    async def commit(self) -> None:
        """Wait until everything so far is durable, as :meth:`QueueConsumer.commit` does."""
        await asyncio.to_thread(self.consumer.commit)

    async def close(self) -> None:
        """Close the consumer as :meth:`QueueConsumer.close` does."""
        await asyncio.to_thread(self.consumer.close)


class _Ready:
    """Lets an event loop wait until a consumer has something. However often that is, the consumer holds one call."""

    def __init__(self, consumer: Consumer | QueueConsumer) -> None:
        self._consumer = consumer
        self._woken: asyncio.Future[None] | None = None

    async def wait(self, seconds: float) -> None:
        """Wait until a poll may return something, for up to `seconds`."""
        loop = asyncio.get_running_loop()
        if self._woken is None or self._woken.done() or self._woken.get_loop() is not loop:
            self._woken = loop.create_future()
            self._consumer.on_ready(partial(_wake, loop, self._woken))
        await asyncio.wait({self._woken}, timeout=seconds)


def _wake(loop: asyncio.AbstractEventLoop, ready: asyncio.Future[None]) -> None:
    with suppress(RuntimeError):  # the loop is closed: nobody waits
        loop.call_soon_threadsafe(_set, ready)


def _set(ready: asyncio.Future[None]) -> None:
    if not ready.done():
        ready.set_result(None)
