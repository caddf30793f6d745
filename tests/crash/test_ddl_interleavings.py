"""Two coordinators of one deployment, phase-locked: every order in which their steps can fall, one by one.

A coordinator stops where it has planned, before what it has kept is sent, between an append and its
acknowledgement, and before the catalog changes. A step lets one of them run on to its next stop; all schedules are
enumerated, and behind each the catalog must be what the chain has, each call must have had its effect once, and
nothing must be left under way.
"""

from __future__ import annotations

import itertools
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from millrace.base.errors import MillraceError
from millrace.base.settings import Settings
from millrace.coord.catalog.store import CatalogStore
from millrace.coord.catalog.sync import chain_definitions, reconcile
from millrace.coord.coordinator import Coordinator
from millrace.message.schema import FieldSpec
from millrace.message.schema_changes import AddField
from tests.coord.ddl.rig import SCHEMA, ChainLog
from tests.failpoints import at_failpoints

PATIENCE = 20.0

Call = Callable[[Coordinator], Any]


class Actor:
    """A coordinator in a thread that runs only while it is given a step."""

    def __init__(self, settings: Settings, log: ChainLog, call: Call) -> None:
        self._go, self._stopped = threading.Semaphore(0), threading.Semaphore(0)
        self.result: Any = None
        self.error: BaseException | None = None
        self.finished = False
        self._coordinator = Coordinator(settings, log=log, append=log)  # type: ignore[arg-type]
        self._thread = threading.Thread(target=self._run, args=(call,), daemon=True)
        self._thread.start()

    def step(self) -> None:
        """Run to the next stop, or to the end."""
        self._go.release()
        assert self._stopped.acquire(timeout=PATIENCE), "a coordinator waits for the other one"

    def _stop(self, name: str) -> None:
        if name.startswith("ddl."):
            self._stopped.release()
            assert self._go.acquire(timeout=PATIENCE)

    def _run(self, call: Call) -> None:
        assert self._go.acquire(timeout=PATIENCE)
        try:
            with at_failpoints(self._stop):
                self.result = call(self._coordinator)
        except BaseException as error:
            self.error = error
        self._coordinator.close()
        self.finished = True
        self._stopped.release()


def schedules(run: Callable[[str], str]) -> Iterator[str]:
    """Every schedule once.

    `run` follows a prefix, lets A go first behind it, and says what it did (in lower case: no choice).
    """
    pending = [""]
    while pending:
        prefix = pending.pop()
        taken = run(prefix)
        yield taken
        pending += [taken[:place] + "B" for place in range(len(prefix), len(taken)) if taken[place] == "A"]


def drive(actors: Sequence[Actor], prefix: str) -> str:
    """Run both along `prefix`, then A to its end and B to its; the steps that were taken."""
    taken = ""
    while not all(actor.finished for actor in actors):
        choice = not any(actor.finished for actor in actors)
        wanted = prefix[len(taken)] if len(taken) < len(prefix) else "A"
        letter = wanted if choice else "a" if actors[1].finished else "b"
        actors["AB".index(letter.upper())].step()
        taken += letter
    return taken


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[], tuple[Settings, ChainLog]]]:
    """Copies of one deployment with a collection, on an SQLite without its syncs: no process dies here."""
    folder = tmp_path_factory.mktemp("ddl")
    numbers = itertools.count()
    first, log = Settings(data_dir=folder / "first", cache_dir=folder), ChainLog()
    with pytest.MonkeyPatch.context() as patch:
        made = CatalogStore.__init__

        def unsynced(self: CatalogStore, path: Path, **given: Any) -> None:
            made(self, path, **given)
            self._db.execute("pragma synchronous=off")

        patch.setattr(CatalogStore, "__init__", unsynced)
        with Coordinator(first, log=log, append=log) as coordinator:  # type: ignore[arg-type]
            coordinator.ensure_pchannels(1)
            coordinator.create_collection("c", SCHEMA)

        def copy() -> tuple[Settings, ChainLog]:
            settings = Settings(data_dir=folder / str(next(numbers)), cache_dir=folder)
            (settings.data_dir / "coord").mkdir(parents=True)
            shutil.copy(first.data_dir / "coord" / "coord.db", settings.data_dir / "coord")
            copied = ChainLog()
            copied.states, copied.appends = dict(log.states), log.appends
            return settings, copied

        yield copy


def add(name: str) -> Call:
    return lambda coordinator: coordinator.alter("c", [AddField(FieldSpec(name, "string", True))])


def partition(name: str) -> Call:
    return lambda coordinator: coordinator.create_partition("c", name)


def drop_partition(name: str) -> Call:
    return lambda coordinator: coordinator.drop_partition("c", name)


def drop(coordinator: Coordinator) -> None:
    coordinator.drop_collection("c")


def create(coordinator: Coordinator) -> Any:
    return coordinator.create_collection("d", SCHEMA)


def drop_created(coordinator: Coordinator) -> None:
    coordinator.drop_collection("d")


QUICK = [
    (partition("p"), partition("p"), {"AppendRejected"}),
    (partition("p"), drop_partition("p"), {"AppendRejected"}),
    (create, drop_created, {"CollectionNotFound"}),
]
"""Two calls at once, and the errors that one of them may end with."""

MORE = [
    (add("x"), add("y"), set()),
    (add("x"), add("x"), {"InvalidArgument"}),
    (add("x"), partition("p"), set()),
    (partition("p"), partition("q"), set()),
    (add("x"), drop, {"CollectionNotFound"}),
    (drop, drop, {"CollectionNotFound"}),
    (create, create, {"CollectionExists"}),
]


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("first", "second", "allowed"), [*QUICK, *(pytest.param(*each, marks=pytest.mark.slow) for each in MORE)]
)
def test_ddl_of_two_coordinators_is_in_catalog_and_chain_alike_in_any_order(
    deployment: Callable[[], tuple[Settings, ChainLog]], first: Call, second: Call, allowed: set[str]
) -> None:
    def run(prefix: str) -> str:
        settings, log = deployment()
        actors = [Actor(settings, log, call) for call in (first, second)]
        taken = drive(actors, prefix)
        check(settings, log, actors, allowed)
        shutil.rmtree(settings.data_dir)
        return taken

    seen = list(schedules(run))
    assert len(seen) == len(set(seen)) >= 20, "each order once"


def check(settings: Settings, log: ChainLog, actors: Sequence[Actor], allowed: set[str]) -> None:
    errors = [actor.error for actor in actors if actor.error is not None]
    assert all(isinstance(error, MillraceError) for error in errors), errors
    assert {type(error).__name__ for error in errors} <= allowed, errors
    assert len(errors) < 2, "one of them had its way"
    with Coordinator(settings, log=log, append=log) as after:  # type: ignore[arg-type]
        assert after.resume() == 0, "nothing is left under way"
        assert after.differences() == []
        for each in after.collections():
            assert reconcile(each, chain_definitions(each, log.definitions)) == each
            assert len({spec.name for spec in each.schema.fields}) == len(each.schema.fields)
        fields = {spec.name for each in after.collections() for spec in each.schema.fields}
        for actor, name in zip(actors, ("x", "y"), strict=True):
            if isinstance(actor.result, int) and actor.error is None and len(fields) > 2 and name in fields:
                assert after.collection("c").schemas[actor.result - 1].fields[-1].name == name, "its own version"
