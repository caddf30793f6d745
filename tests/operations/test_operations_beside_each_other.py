"""Every operation beside every other.

One stops wherever it looks at a table or at the log, the other runs there as a whole.

An operation sees the world through opened tables and calls of the log; whatever else may run between two such looks. So
each look is a place to stop at: the first, the last and some between them, for every pair. What stands behind the pair
must be what the model says, and neither may fail, nor find a fault that is none.
"""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from deltalake import DeltaTable

from millrace.base.errors import BackupBusy, MillraceError
from millrace.log.generations.log import GenerationLog
from millrace.observe.observer import Observer
from millrace.operations.backup.declaration import BackupParams
from millrace.operations.backup.run import backup
from millrace.operations.checkpoint.declaration import CheckpointParams
from millrace.operations.checkpoint.run import checkpoint
from millrace.operations.compaction.run import compact
from millrace.operations.quality.results import record_run
from millrace.operations.quality.snapshot import take_snapshot
from millrace.operations.recovery.diagnose import diagnose
from millrace.operations.verification import verify_channel, verify_collections
from millrace.runtime.progress import Progress
from millrace.tables.wal.reader import WalSnapshot
from millrace.tables.wal.table import WalTable
from tests.operations.backup_world import COMPACTION, World, settings_in

PLACES = 6
"""Places of an operation at which each of the others runs, in the slow test."""


class Places:
    """The looks of an operation, counted; at the chosen one `beside` runs, once and as a whole."""

    def __init__(self, chosen: int = -1, beside: Callable[[], None] = lambda: None) -> None:
        self.seen = 0
        self._chosen = chosen
        self._beside = beside
        self._inside = False

    def look(self) -> None:
        if self._inside:
            return
        if self.seen == self._chosen:
            self._inside = True
            try:
                self._beside()
            finally:
                self._inside = False
        self.seen += 1


@contextmanager
def watched(places: Places) -> Iterator[None]:
    """Every table opened or refreshed, and every call of a log, is a place."""
    with pytest.MonkeyPatch.context() as patch:
        for owner, name in (
            (DeltaTable, "__init__"),
            (DeltaTable, "update_incremental"),
            (DeltaTable, "create_write_transaction"),
            *((GenerationLog, name) for name in ("read", "describe", "end", "truncate")),
        ):
            patch.setattr(owner, name, _stopping(getattr(owner, name), places))
        patch.setattr("millrace.operations.backup.run.WAIT_SECONDS", 0.05)  # what it would wait for stands still here
        yield


def _stopping(real: Callable[..., object], places: Places) -> Callable[..., object]:
    def call(*args: object, **kwargs: object) -> object:
        places.look()
        return real(*args, **kwargs)

    return call


# -- Operations --------------------------------------------------------------------------------------------------------


def a_checkpoint(world: World) -> None:
    report = checkpoint(world.settings, world.log, CheckpointParams(), Progress())
    assert report.ok, [each.problem for each in (*report.channels, *report.trimmed)]


def a_trim(world: World) -> None:
    short = replace(world.settings, wal_retention=0.001)
    report = checkpoint(short, world.log, CheckpointParams(), Progress())
    assert report.ok, [each.problem for each in (*report.channels, *report.trimmed)]


def a_diagnosis(world: World) -> None:
    found = diagnose(world.settings, world.log, depth="full", stale_after=60.0, progress=Progress())
    assert found == []


def a_compaction(world: World) -> None:
    compact(world.settings, COMPACTION, history=1 << 62)


def a_verification(world: World) -> None:
    wal = WalTable.open(Path(world.settings.wal_uri))
    snapshot = WalSnapshot(wal.table)
    for name in wal.pchannels():
        assert verify_channel(snapshot, wal, world.log, name).ok
    for report in verify_collections(world.settings).values():
        assert report.matches_flushed, report


def a_look_of_quality(world: World) -> None:
    """What its suites hold against each other.

    No checkpoint ahead of the WAL, what was flushed is in the pinned tables.
    """
    pinned = take_snapshot(world.settings)
    assert pinned is not None
    assert all(tick <= pinned.wal.committed_ticks[name] for name, tick in pinned.flushed_ticks.items())
    assert pinned.checkpoints.keys() <= pinned.wal.table.positions(pinned.wal.table.pchannels()).keys()


def a_release(world: World) -> None:
    record_run(world.settings, "run", [])


def a_backup(world: World) -> None:
    target = world.settings.data_dir.parent / "backups"
    params = BackupParams.parse({"to": str(target), "keep": 1})
    backup(world.settings, world.log, params, Progress())


def an_overview(world: World) -> None:
    observer = Observer(world.settings)
    try:
        observer.overview()
        observer.maintenance()
        observer.collections()
    finally:
        observer.close()


def writes(world: World) -> None:
    for number in range(3):
        world.step("insert", number)
    world.step("delete", 0)
    world.step("flush", 0)


def an_import(world: World) -> None:
    world.step("import", 0)
    world.step("replace", 1)
    world.step("flush", 0)


def ddl(world: World) -> None:
    world.step("field", 0)
    world.step("partition", 0)
    world.step("collection", 0)
    writes(world)


def a_drop(world: World) -> None:
    name = sorted(world.model.rows)[-1]
    world.coordinator.drop_collection(name)
    del world.model.rows[name]
    world.model.open = {place: txn for place, txn in world.model.open.items() if place[0] != name}
    writes(world)


def all_behind_a_checkpoint(world: World) -> None:
    writes(world)
    a_checkpoint(world)


def all_folded(world: World) -> None:
    writes(world)
    a_compaction(world)


Operation = Callable[[World], None]
STOPPED: tuple[Operation, ...] = (
    a_checkpoint,
    a_trim,
    a_diagnosis,
    a_compaction,
    a_verification,
    a_look_of_quality,
    a_backup,
    an_overview,
)
BESIDE: tuple[Operation, ...] = (
    writes,
    an_import,
    ddl,
    a_drop,
    all_behind_a_checkpoint,
    all_folded,
    a_trim,
    a_compaction,
    a_diagnosis,
    a_verification,
    a_release,
    a_backup,
)

QUICK: tuple[Operation, ...] = (all_behind_a_checkpoint, all_folded, ddl)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A deployment with two collections, rows in files and in the WAL alone, deletes, an Import, a checkpoint."""
    folder = tmp_path_factory.mktemp("beside")
    world = World(settings_in(folder / "data"))
    for kind in ("insert", "insert", "flush", "insert", "delete", "collection", "import", "flush", "checkpoint"):
        world.step(kind, 0)
    for number in range(4):
        world.step("insert", number)
    world.step("node", 0)
    _models[folder] = world
    world.close()
    return folder


_models: dict[Path, World] = {}


@contextmanager
def world_of(made: Path, folder: Path) -> Iterator[World]:
    """A copy of the deployment."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(made, folder, symlinks=True)  # the name of a collection leads nowhere before its first row
    world = World.of(settings_in(folder / "data"), _models[made].model, epoch=_models[made].epoch)
    try:
        yield world
    finally:
        world.close()


def places_of(made: Path, folder: Path, stopped: Operation) -> int:
    places = Places()
    with world_of(made, folder) as world, watched(places):
        stopped(world)
    return places.seen


def beside_each_other(made: Path, folder: Path, stopped: Operation, beside: Operation, place: int) -> None:
    with world_of(made, folder) as world:

        def runs() -> None:
            try:
                beside(world)
            except BackupBusy:
                return

        with watched(Places(place, runs)):
            try:
                stopped(world)
            except MillraceError as error:
                raise AssertionError(f"{stopped.__name__} failed beside {beside.__name__} at {place}") from error
        world.settle()
        assert world.content() == world.model.rows
        a_verification(world)
        a_diagnosis(world)


def some(places: int, count: int) -> list[int]:
    """The first place, the last one, and some between them."""
    return sorted({round((places - 1) * number / (count - 1)) for number in range(count)})


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("stopped", STOPPED, ids=lambda each: each.__name__)
def test_an_operation_runs_wherever_another_one_stops(made: Path, tmp_path: Path, stopped: Operation) -> None:
    """Each of the others once, each at another place; a short look is stopped at each of its places."""
    seen = places_of(made, tmp_path / "counted", stopped)
    places = some(seen, seen if stopped is a_look_of_quality else len(QUICK))
    for place, beside in zip(places, itertools.cycle(QUICK), strict=False):
        beside_each_other(made, tmp_path / "beside", stopped, beside, place)


@pytest.mark.slow
@pytest.mark.parametrize("beside", BESIDE, ids=lambda each: each.__name__)
@pytest.mark.parametrize("stopped", STOPPED, ids=lambda each: each.__name__)
def test_every_operation_beside_every_other(made: Path, tmp_path: Path, stopped: Operation, beside: Operation) -> None:
    for place in some(places_of(made, tmp_path / "counted", stopped), PLACES):
        beside_each_other(made, tmp_path / "beside", stopped, beside, place)
