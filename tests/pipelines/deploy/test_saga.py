"""A pipeline's saga: whatever fails and wherever its process dies, all of it is there at
the end, or nothing that it made.
"""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.base.errors import InvalidArgument, LogUnavailable, PipelineNotFound
from millrace.base.settings import Settings
from millrace.pipelines.deploy.runner import run
from millrace.pipelines.deploy.saga import STEPS, Saga
from millrace.pipelines.store.records import Phase, Record
from millrace.pipelines.store.store import PipelineStore, open_pipelines


class Died(BaseException):
    """The process is gone."""


THINGS = {"index_base": ("index",), "topics": ("in", "out", "err"), "deployment": ("worker",)}


class World:
    """Things by name; what happens at each call, before or behind its effect, is drawn."""

    def __init__(self, there: set[str], happens: list[str]) -> None:
        self.there, self.happens = set(there), happens
        self.undone: set[str] = set()

    def _befalls(self, place: str) -> None:
        what = self.happens.pop(0) if self.happens else "well"
        if what == f"dies {place}":
            raise Died
        if what == f"fails {place}":
            raise LogUnavailable("no answer")

    def plan(self, step: str, record: Record) -> tuple[str, ...]:
        self._befalls("before")
        found = tuple(each for each in THINGS.get(step, ()) if each not in self.there)
        self._befalls("behind")
        return found

    def make(self, step: str, record: Record, things: tuple[str, ...]) -> None:
        self._befalls("before")
        for thing in things:
            self.there.add(thing)
            self._befalls("behind")

    def undo(self, step: str, record: Record, things: tuple[str, ...]) -> tuple[str, ...]:
        self._befalls("before")
        for thing in things:
            self.there.discard(thing)
            self.undone.add(thing)
            self._befalls("behind")
        return ()


def to_the_end(store: PipelineStore, world: World) -> Record | None:
    """As the service does it: again behind each crash, until it is ready or gone."""
    for _ in range(200):
        try:
            record = store.get("flights")
        except PipelineNotFound:
            return None
        if record.phase is Phase.READY:
            return record
        try:
            run(store, record, world)
        except (Died, LogUnavailable):
            continue
    raise AssertionError("it comes to no end")


HAPPENS = st.lists(
    st.sampled_from(["well"] * 6 + ["dies before", "dies behind", "fails before", "fails behind"]), max_size=30
)
OTHERS = st.sets(st.sampled_from(["index", "in", "out", "err"]))


@settings(max_examples=25)
@given(others=OTHERS, making=HAPPENS, unmaking=HAPPENS)
def test_all_or_nothing_and_a_delete_undoes_just_what_was_made(
    others: set[str], making: list[str], unmaking: list[str]
) -> None:
    with TemporaryDirectory() as folder, open_pipelines(Settings(data_dir=Path(folder)), env={}) as store:
        world = World(others, making)
        store.create({"id": "flights"}, secrets={}, who="ada", saga=Saga(who="ada").to_json())
        record = to_the_end(store, world)
        if record is None:
            assert world.there == others
            assert not world.undone & others
            return
        assert world.there == others | {"index", "in", "out", "err", "worker"}
        world.happens = unmaking
        saga = Saga.from_json(record.saga).deleting("bob")
        store.move(record, phase=Phase.DELETING, saga=saga.to_json())
        assert to_the_end(store, world) is None
        assert world.there == others
        assert not world.undone & others


@pytest.mark.parametrize("step", STEPS)
def test_a_step_that_cannot_be_is_told_with_its_cause(step: str, settings: Settings) -> None:
    class Refuses(World):
        def plan(self, at: str, record: Record) -> tuple[str, ...]:
            if at == step:
                raise InvalidArgument(f"not {step}")
            return super().plan(at, record)

    with open_pipelines(settings, env={}) as store:
        world = Refuses({"in"}, [])
        made = store.create({"id": "flights"}, secrets={}, who="ada", saga=Saga(who="ada").to_json())
        assert run(store, made, world) is None
        assert world.there == {"in"}
        assert store.events("flights")[0].detail["cause"] == f"not {step}"


def test_a_saga_is_as_it_was_read() -> None:
    saga = Saga(at=3, back=True, planned={"topics": ("in",)}, cause="c", code="C", who="ada")
    assert Saga.from_json(saga.to_json()) == saga
