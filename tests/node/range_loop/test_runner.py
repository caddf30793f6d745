"""The supervised loop in a process, over plain lists: all of it, or what a node of a cluster owns."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from dataclasses import replace

import pytest
from prometheus_client import CollectorRegistry

from millrace.base.deadline import Deadline, poll_until
from millrace.base.errors import InvalidSettings
from millrace.base.metrics import Metrics
from millrace.base.settings import Settings
from millrace.node.range_loop import runner as loop
from millrace.node.range_loop.ownership import FullOwnership, assigned_path, write_assigned
from millrace.node.range_loop.runner import run_loop
from tests.node.range_loop.lists import Lists, World, unavailable


@contextmanager
def running(lists: Lists, ownership: FullOwnership | None = None) -> Iterator[None]:
    stop = threading.Event()
    metrics = Metrics(registry=CollectorRegistry())
    thread = threading.Thread(
        target=run_loop, args=(lists,), kwargs={"metrics": metrics, "stop": stop, "ownership": ownership}, daemon=True
    )
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(20)
        assert not thread.is_alive()


def seen(what: Callable[[], bool]) -> bool:
    return poll_until(what, Deadline.after(20), interval=0.01)


@pytest.fixture
def world() -> World:
    return World(read={"a": [1, 2, 3, 4, 5], "b": [10, 20, 30]})


def test_it_goes_on_with_what_comes_until_it_is_told_to_stop(settings: Settings, world: World) -> None:
    with running(Lists(settings, world, batch=2)):
        assert seen(lambda: world.table == world.read)
        world.read["b"].append(40)
        assert seen(lambda: world.table == world.read)
    world.read["b"].append(50)
    assert world.table["b"] == [10, 20, 30, 40]


def test_what_may_pass_is_tried_again(settings: Settings, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "RETRY_SECONDS", 0.01)
    failing = iter([True, True, False])

    def before() -> None:
        if next(failing, False):
            unavailable()

    world.commits_before = before
    with running(Lists(settings, world)):
        assert seen(lambda: world.table == world.read)


def test_what_may_not_pass_ends_it(settings: Settings, world: World) -> None:
    def before() -> None:
        raise InvalidSettings("no use")

    world.commits_before = before
    with pytest.raises(InvalidSettings):
        run_loop(Lists(settings, world), metrics=Metrics(registry=CollectorRegistry()), stop=threading.Event())


class Gives(FullOwnership):
    """Lets nothing of `refused` be committed."""

    def __init__(self, *refused: str) -> None:
        self.refused = set(refused)

    @contextmanager
    def committing(self, channels: AbstractSet[str], /) -> Iterator[AbstractSet[str]]:
        yield channels - self.refused


def test_a_node_plans_what_it_is_assigned_and_commits_what_it_owns(settings: Settings, world: World) -> None:
    mine = replace(settings, node="n1")
    write_assigned(assigned_path(mine), ["b"])
    world.poisoned.add(("a", 2))
    ownership = Gives("a")
    ran: set[str] = set()
    world.runs = lambda work: ran.add(work.channel)
    with running(Lists(mine, world), ownership):
        assert seen(lambda: world.table == {"b": [10, 20, 30]})
        assert ran == {"b"}, "nothing is made of what others have"
        write_assigned(assigned_path(mine), ["a", "b"])
        world.read["b"].append(40)
        assert seen(lambda: world.table == {"b": [10, 20, 30, 40]})
        assert not settings.parked_path.exists(), "what is not its own it does not park either"
        ownership.refused.clear()
        assert seen(lambda: world.table == {"a": [1, 2], "b": [10, 20, 30, 40]})
        assert seen(lambda: settings.parked_path.exists())
    assert mine.progress_path("lists").parent == settings.run_path / "nodes" / "n1"
