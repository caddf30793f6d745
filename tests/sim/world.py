"""The simulator's ground: virtual time, processes that run real code, clocks of their own, a network.

One seed decides all.

Real code runs in greenlets, one at a time; where it sleeps or calls outwards it gives way to the world, which goes on
with the earliest thing that is due. A process can be killed (what it runs never goes on) and paused (it goes on later).
"""

from __future__ import annotations

import heapq
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from greenlet import GreenletExit, getcurrent, greenlet

from millrace.base.errors import NodeUnreachable

T = TypeVar("T")


class Broken(AssertionError):
    """An invariant does not hold."""


@dataclass(eq=False)
class Process:
    """Something that can die, sleep and have a clock that is wrong."""

    name: str
    rate: float = 1.0
    """Seconds of its clock in a second of the world."""
    offset: float = 0.0
    paused_until: float = 0.0
    alive: bool = True
    tasks: list[greenlet] = field(default_factory=list)


class World:
    """One run."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.random = random.Random(seed)
        self.now = 0.0
        self.events = 0
        self.faults: Counter[str] = Counter()
        self.log: list[str] = []
        """What happened, for who looks into a seed."""
        self.failure: BaseException | None = None
        self._due: list[tuple[float, int, Process | None, Any]] = []
        self._turn = 0
        self._hub = getcurrent()
        self._all: list[greenlet] = []
        self._closed = False

    def say(self, text: str) -> None:
        self.log.append(f"{self.now:8.3f} {text}")

    def at(self, moment: float, process: Process | None, what: Any) -> None:
        """Call `what`, or go on with it where it is a greenlet, at `moment`, while `process` lives."""
        self._turn += 1
        heapq.heappush(self._due, (moment, self._turn, process, what))

    def later(self, seconds: float, call: Callable[[], None]) -> None:
        """Something outside of all processes: it happens whoever dies."""
        self.at(self.now + seconds, None, call)

    def spawn(self, process: Process, call: Callable[[], object], delay: float = 0.0) -> None:
        def run() -> None:
            try:
                call()
            except GreenletExit:
                pass
            except BaseException as error:
                self.failure = self.failure or error

        task = greenlet(run, self._hub)
        self._all.append(task)
        self.at(self.now + delay, process, task)

    def sleep(self, process: Process, seconds: float) -> None:
        """The current greenlet of `process` goes on in `seconds` of the world."""
        self.at(self.now + seconds, process, getcurrent())
        self.give_way()

    def wake(self, process: Process) -> None:
        """End a pause, also for what was due in it."""
        slept_until, process.paused_until = process.paused_until, 0.0
        self._due[:] = [
            (self.now if each is process and moment == slept_until else moment, turn, each, what)
            for moment, turn, each, what in self._due
        ]
        heapq.heapify(self._due)

    def give_way(self) -> None:
        if self._closed:
            raise GreenletExit
        self._hub.switch()
        if self._closed:
            raise GreenletExit

    def run(self, until: float) -> None:
        """Go on to the moment `until`. Raises what failed first."""
        due = self._due
        while due and due[0][0] <= until:
            moment, _, process, what = heapq.heappop(due)
            self.now = max(self.now, moment)
            if process is not None:
                if not process.alive:
                    continue
                if process.paused_until > self.now:
                    self.at(process.paused_until, process, what)
                    continue
            self.events += 1
            if isinstance(what, greenlet):
                what.switch()
            else:
                what()
            if self.failure is not None:
                raise self.failure
        self.now = until

    def close(self) -> None:
        """End what still runs, none of which does anything any more."""
        self._closed = True
        for task in self._all:
            if task and not task.dead:
                try:
                    task.throw(GreenletExit)
                except BaseException:
                    continue  # it only had to end


@dataclass
class Clock:
    """A process's own clock (millrace.coord.clock.Clock)."""

    world: World
    process: Process

    def monotonic(self) -> float:
        return self.process.offset + self.world.now * self.process.rate

    def wall(self) -> float:
        return 1_700_000_000 + self.world.now

    def sleep(self, seconds: float) -> None:
        self.world.sleep(self.process, max(seconds, 0.001) / self.process.rate)


class Answer:
    """What a call waits for: the first of a value, an error, or the time that it gives it."""

    def __init__(self, world: World, process: Process) -> None:
        self._world = world
        self._process = process
        self._waiter: greenlet | None = None
        self.done = False
        self._value: Any = None
        self._error: BaseException | None = None

    def give(self, value: Any = None, error: BaseException | None = None) -> None:
        if not self.done:
            self.done, self._value, self._error = True, value, error
            if self._waiter is not None:
                self._world.at(self._world.now, self._process, self._waiter)

    def wait(self, seconds: float, late: Callable[[], BaseException]) -> Any:
        if not self.done:
            self._world.later(seconds, lambda: self.give(error=late()))
            self._waiter = getcurrent()
            self._world.give_way()
        if self._error is not None:
            raise self._error
        return self._value


@dataclass
class Network:
    """Messages between processes, and from them to the store and the log."""

    world: World
    delay: float = 0.004
    loss: float = 0.0
    doubling: float = 0.0
    cut: set[tuple[str, str]] = field(default_factory=set)
    """From whom to whom nothing passes."""

    def passes(self, source: str, target: str) -> bool:
        if (source, target) in self.cut:
            self.world.faults["partition"] += 1
            return False
        if self.loss and self.world.random.random() < self.loss:
            self.world.faults["drop"] += 1
            return False
        return True

    def latency(self) -> float:
        return self.delay * (0.5 + self.world.random.random())

    def call(self, source: Process, target: Process | None, call: Callable[[], T], *, seconds: float = 1.0) -> T:
        """Run `call` in the process `target`, and wait for its answer. Raises NodeUnreachable: it may have run."""
        world = self.world
        answer = Answer(world, source)
        if target is not None and self.passes(source.name, target.name):
            times = 1
            if self.doubling and world.random.random() < self.doubling:
                world.faults["duplicate"] += 1
                times = 2

            def serve() -> None:
                value, error = None, None
                try:
                    value = call()
                except Broken:
                    raise
                except GreenletExit:
                    raise
                except Exception as raised:
                    error = raised
                if self.passes(target.name, source.name):
                    world.later(self.latency(), lambda: answer.give(value, error))

            for _ in range(times):
                world.spawn(target, serve, self.latency() * world.random.choice((1, 1, 1, 5)))
        name = "nobody" if target is None else target.name
        return answer.wait(seconds, lambda: NodeUnreachable(f"{name} did not answer"))

    def together(self, process: Process, calls: Sequence[Callable[[], None]]) -> None:
        """All of them at the same time, each in a task of `process`; returns when all have."""
        if not calls:
            return
        left = len(calls)
        finished = Answer(self.world, process)

        def run(call: Callable[[], None]) -> None:
            nonlocal left
            call()
            left -= 1
            if left == 0:
                finished.give()

        for call in calls:
            self.world.spawn(process, lambda call=call: run(call))
        finished.wait(10_000.0, lambda: AssertionError("a call never ended"))
