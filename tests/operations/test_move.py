"""Moves of the tables between disks and buckets: nothing is lost or doubled, wherever a move is killed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import pytest

from millrace.base.errors import (
    BackupBusy,
    InvalidArgument,
    InvalidSettings,
    MoveRefused,
    StoreCannotPublish,
    StreamBusy,
    TablesMoved,
)
from millrace.base.settings import Settings, following
from millrace.base.settings.place import placed, read_place
from millrace.flows.declare.stream import stream_of
from millrace.flows.sinks.collection.lane import LANES
from millrace.flows.sources.capture.shared_spool import FOLDER as SPOOLS
from millrace.flows.sources.capture.shared_spool import shared_spool
from millrace.flows.sources.capture.spool import Mark, Spool
from millrace.flows.spark_host.incarnations import Incarnations
from millrace.node.publish.definition import publish_to_end
from millrace.node.retention.removal_lock import LOCK as REMOVAL_LOCK
from millrace.operations.move import run as module
from millrace.operations.move.declaration import MoveParams
from millrace.operations.move.run import LOCK, MOVING_MARK, MoveReport, run
from millrace.operations.verification import verify_channel, verify_collections
from millrace.runtime.progress import Progress
from millrace.storage import objects
from millrace.storage.closing import MOVED_MARK
from millrace.storage.pins import TablePins
from millrace.storage.published import PublishedTable
from millrace.storage.store import list_below, store_at
from millrace.tables.collections.data_tables import published_uri
from millrace.tables.wal.reader import WalSnapshot
from millrace.tables.wal.table import WalTable
from tests.failpoints import Act, at_failpoints
from tests.flows.sources.capture.test_shared_spool import small_files
from tests.flows.sources.capture.test_spool import line, read
from tests.operations.backup_world import World, settings_in
from tests.s3_server import bucket

STEPS = ["insert", "insert", "insert", "flush", "begin", "body", "delete", "import", "field", "insert", "node"]


class Killed(BaseException):
    pass


def killed(*args: object) -> None:
    raise Killed


@pytest.fixture
def box(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[str]:
    monkeypatch.setenv("MILLRACE_CACHE", str(tmp_path / "cache"))
    with bucket(monkeypatch) as uri:
        yield uri


def move(settings: Settings, act: Act = lambda name: None, **params: object) -> MoveReport:
    with at_failpoints(act):
        return run(settings, MoveParams.parse(params), Progress())


def current(settings: Settings) -> Settings:
    """Return the settings as a process has them that starts now."""
    return replace(settings, tables=placed(settings.data_dir, settings.tables))


def publish(world: World) -> None:
    publish_to_end(world.settings, confirm=lambda names: {})


def opened(settings: Settings) -> World:
    world = World(settings)
    for number, kind in enumerate(STEPS):
        world.step(kind, number)
    publish(world)
    return world


def again(world: World) -> World:
    """Start the deployment's processes again."""
    model, epoch = deepcopy(world.model), world.epoch
    world.close()
    return World.of(current(world.settings), model, epoch=epoch)


def digests(settings: Settings, world: World) -> object:
    """Of WAL, collections and published tables, by code that knows nothing of moves."""
    published = {}
    for each in world.coordinator.collections():
        table = PublishedTable.open(store_at(published_uri(settings, each.id)))
        assert table is not None
        rows = [row for part in table.read_by_delta_rs() for row in part.to_pylist()]
        published[each.id] = table.tick, sorted(map(str, rows))
    snapshot, wal = WalSnapshot.open(settings.wal_uri), WalTable.open(settings.wal_uri)
    assert snapshot is not None
    channels = {name: verify_channel(snapshot, wal, world.log, name) for name in wal.pchannels()}
    collections = verify_collections(settings)
    assert all(each.ok for each in channels.values())
    assert all(each.matches_flushed for each in collections.values())
    return (
        {name: (each.stored, each.last_tick, each.messages) for name, each in channels.items()},
        {name: (each.stored, each.table_digest) for name, each in collections.items()},
        published,
    )


def prove(world: World) -> None:
    """The deployment holds what it had acknowledged, once, and continues."""
    for number in range(3):
        world.step("insert", number)
    world.step("import", 1)
    world.settle()
    publish(world)
    assert world.content() == world.model.rows
    digests(world.settings, world)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("source", "target"),
    [("data", "s3"), ("s3", "data"), ("disk", "s3"), ("s3", "s3"), ("data", "disk"), ("disk", "data")],
)
def test_tables_are_moved_with_equal_digests(source: str, target: str, box: str, tmp_path: Path) -> None:
    places = {"s3": f"{box}/{{}}", "disk": str(tmp_path / "{}"), "data": ""}
    first, then = places[source].format("old"), places[target].format("new")
    world = opened(replace(settings_in(tmp_path / "data"), tables=first))
    store_at(world.settings.tables_uri).replace(f"{LANES}/flow/lane/{1:020}.arrow", b"journal")
    before, reader = digests(world.settings, world), following(world.settings)
    report = move(world.settings, to=then or str(world.settings.data_dir))
    assert (report.tables > 4, report.passes, report.dry_run) == (True, 2, False)
    moved = current(world.settings)
    assert moved.tables == then
    assert digests(moved, world) == before
    assert digests(world.settings, world) == before, "nothing was removed"
    assert store_at(moved.tables_uri).read(f"{LANES}/flow/lane/{2:020}.arrow") == b"journal"
    assert store_at(moved.tables_uri).read(MOVING_MARK) is None
    world = again(world)
    try:
        prove(world)
        assert move(world.settings, remove_old=True).removed_files > 0
        prove(world)
        assert reader.tables_uri == moved.tables_uri, "a process that runs all the time follows"
        if first:
            assert not list_below(store_at(first))
        else:
            assert not list(world.settings.data_dir.rglob("_delta_log"))
    finally:
        world.close()


def busy(world: World, number: int) -> None:
    """What runs beside a move: producers, the node and the flusher, which may be fenced."""
    try:
        world.settings.check_place()  # as an import does before it appends what it staged
        kind = ("insert", "delete", "import", "insert")[number % 4]
    except TablesMoved:
        kind = "insert"
    world.step(kind, number)
    try:
        world.step("flush", 0)
        publish(world)
    except TablesMoved:
        pass


def lives(world: World, to: str, kill: int | None) -> tuple[World, list[str]]:
    """Move the tables while `busy`; with `kill`, the move is killed at that failpoint, and run again to its end."""
    passed: list[str] = []

    def act(name: str) -> None:
        if not name.startswith("move."):
            return
        passed.append(name)
        busy(world, len(passed))
        if kill == len(passed):
            raise Killed

    for _ in range(2):
        try:
            move(world.settings, act, to=to)
        except Killed:
            kill = None
            busy(world, 0)
            world = again(world)
            busy(world, 1)
            continue
        break
    return again(world), passed


POINTS = 13


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("kill", [None, *range(1, POINTS + 1)])
@pytest.mark.parametrize("to", ["s3", "data"])
def test_a_move_is_killed_at_each_step_while_everything_writes(
    to: str, kill: int | None, box: str, tmp_path: Path
) -> None:
    world = opened(replace(settings_in(tmp_path / "data"), tables="" if to == "s3" else f"{box}/old"))
    world, passed = lives(world, f"{box}/new" if to == "s3" else str(world.settings.data_dir), kill)
    try:
        assert kill is not None or len(passed) == POINTS, passed
        assert world.settings.tables == (f"{box}/new" if to == "s3" else "")
        place = read_place(world.settings.data_dir)
        assert place is not None
        assert (place.target, place.closed, len(place.earlier)) == (None, False, 1)
        assert store_at(world.settings.tables_uri).read(MOVING_MARK) is None
        prove(world)
    finally:
        world.close()


def test_a_cancelled_move_leaves_everything_as_it_was(box: str, tmp_path: Path) -> None:
    world = opened(settings_in(tmp_path / "data"))

    def act(name: str) -> None:
        if name == "move.copied":
            raise Killed

    with pytest.raises(Killed):
        move(world.settings, act, to=f"{box}/new")
    with pytest.raises(TablesMoved):
        world.settings.check_place()
    with pytest.raises(TablesMoved):
        world.settle()
    with pytest.raises(MoveRefused, match="unfinished"):
        move(world.settings, to=f"{box}/other")
    with pytest.raises(MoveRefused, match="unfinished"):
        move(world.settings, remove_old=True)
    assert move(world.settings, cancel=True).removed_files > 0
    try:
        assert not list_below(store_at(f"{box}/new"))
        world.settings.check_place()
        prove(world)
        move(world.settings, to=f"{box}/new")
        world = again(world)
        prove(world)
    finally:
        world.close()


def elsewhere(settings: Settings, **params: object) -> MoveReport:
    """Run the operation as another machine does, whose locks do not exclude this one's."""
    for name in (LOCK, REMOVAL_LOCK):
        (settings.run_path / name).unlink(missing_ok=True)
    return run(settings, MoveParams.parse(params), Progress())


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("point", ["move.copied", "move.pass", "move.closed", "move.file"])
def test_a_move_that_another_machine_cancelled_does_not_switch(point: str, box: str, tmp_path: Path) -> None:
    world = opened(settings_in(tmp_path / "data"))
    done: list[MoveReport] = []

    def act(name: str) -> None:
        if name == point and not done:
            done.append(elsewhere(world.settings, cancel=True))

    try:
        with pytest.raises(MoveRefused, match="another machine"):
            move(world.settings, act, to=f"{box}/new")
        place = read_place(world.settings.data_dir)
        assert place is not None
        assert (place.uri, place.target, place.closed) == ("", None, False)
        prove(world)
        move(world.settings, to=f"{box}/other")
        world = again(world)
        prove(world)
    finally:
        world.close()


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("point", ["move.pass", "move.file", "move.claimed", "move.closed", "move.copied"])
def test_a_move_that_sleeps_while_another_machine_ends_it_removes_nothing(point: str, box: str, tmp_path: Path) -> None:
    world = opened(settings_in(tmp_path / "data"))
    asleep: list[str] = []

    def act(name: str) -> None:
        nonlocal world
        if name == point and not asleep:
            asleep.append(name)
            elsewhere(world.settings, to=f"{box}/new")
            world = again(world)
            prove(world)
            store = store_at(f"{world.settings.data_dir}/pins")
            store.delete(store.list(""))  # of this one, which sleeps longer than they last
            elsewhere(world.settings, remove_old=True)

    try:
        with pytest.raises(MoveRefused, match="another machine"):
            move(world.settings, act, to=f"{box}/new")
        place = read_place(world.settings.data_dir)
        assert place is not None
        assert (place.uri, place.target, place.closed) == (f"{box}/new", None, False)
        prove(world)
    finally:
        world.close()


def test_a_cancellation_that_is_killed_forgets_what_it_has_removed(
    box: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = opened(settings_in(tmp_path / "data"))

    def act(name: str) -> None:
        if name == "move.pass":
            raise Killed

    try:
        with pytest.raises(Killed):
            move(world.settings, act, to=f"{box}/new")
        delete = objects.ObjectStore.delete

        def killed(store: objects.ObjectStore, names: list[str]) -> None:
            data = [each for each in names if each.endswith(".parquet")]
            delete(store, data)
            if data:
                raise Killed

        with monkeypatch.context() as patch:
            patch.setattr(objects.ObjectStore, "delete", killed)
            with pytest.raises(Killed):
                move(world.settings, cancel=True)
        move(world.settings, to=f"{box}/new")
        world = again(world)
        prove(world)
    finally:
        world.close()


def test_a_removal_that_is_killed_before_the_record_ends_when_it_is_repeated(
    box: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = opened(settings_in(tmp_path / "data"))

    try:
        move(world.settings, to=f"{box}/new")
        world = again(world)
        with monkeypatch.context() as patch:
            patch.setattr(module, "change_place", killed)
            with pytest.raises(Killed):
                move(world.settings, remove_old=True)
        assert move(world.settings, remove_old=True).removed_files == 0
        place = read_place(world.settings.data_dir)
        assert place is not None
        assert place.earlier == ()
        move(world.settings, to=str(world.settings.data_dir))
    finally:
        world.close()


def test_a_claim_that_is_killed_before_the_record_holds_no_place(
    box: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = opened(settings_in(tmp_path / "data"))

    try:
        with monkeypatch.context() as patch:
            patch.setattr(module, "change_place", killed)
            with pytest.raises(Killed):
                move(world.settings, to=f"{box}/first")
        move(world.settings, to=f"{box}/second")
        world = again(world)
        move(world.settings, to=f"{box}/first")
        world = again(world)
        prove(world)
    finally:
        world.close()


def test_a_place_that_is_not_free_is_refused(box: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world, other = opened(settings_in(tmp_path / "data")), opened(settings_in(tmp_path / "other"))
    try:
        store_at(f"{box}/full").replace("notes.txt", b"mine")
        with pytest.raises(MoveRefused, match=r"has files \(notes.txt\)"):
            move(world.settings, to=f"{box}/full")
        move(other.settings, to=f"{box}/taken")
        with pytest.raises(MoveRefused, match="another deployment"):
            move(world.settings, to=f"{box}/taken")
        with pytest.raises(MoveRefused, match="lies in the data folder"):
            move(world.settings, to=str(world.settings.data_dir / "inner"))
        with monkeypatch.context() as patch:
            patch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 10})())
            with pytest.raises(MoveRefused, match="room for"):
                move(world.settings, to=str(tmp_path / "disk"))
        with pytest.raises(MoveRefused, match="there is no unfinished move"):
            move(world.settings)
        with pytest.raises(InvalidArgument, match="names no bucket"):
            move(world.settings, to="s3://")
        assert read_place(world.settings.data_dir) is None
        with pytest.raises(MoveRefused, match="earlier move left"):
            move(current(other.settings), to=str(other.settings.data_dir))
    finally:
        world.close()
        other.close()


def test_a_bucket_without_conditional_puts_is_refused(
    tmp_path: Path, box: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = opened(settings_in(tmp_path / "data"))
    monkeypatch.setattr(objects, "_put_new", lambda store, name, data: "tag")
    try:
        with pytest.raises(StoreCannotPublish):
            move(world.settings, to=f"{box}/lax")
        assert read_place(world.settings.data_dir) is None
    finally:
        world.close()


def test_what_an_earlier_move_left_is_removed_when_nobody_reads_it(box: str, tmp_path: Path) -> None:
    world = opened(settings_in(tmp_path / "data"))
    try:
        move(world.settings, to=f"{box}/new")
        kept = [
            each for each in world.settings.data_dir.rglob("*") if "_index" in each.parts or each.name == "coord.db"
        ]
        with TablePins(world.settings.pins_uri).pinned(), pytest.raises(BackupBusy):
            move(current(world.settings), remove_old=True)
        store = store_at(world.settings.tables_uri)
        mark = store.read(MOVED_MARK)
        store.replace(MOVED_MARK, json.dumps({"deployment": "another"}).encode())
        with pytest.raises(MoveRefused, match="by hand"):
            move(current(world.settings), remove_old=True)
        store.replace(MOVED_MARK, mark or b"")
        would = move(current(world.settings), remove_old=True, dry_run=True).removed_files
        assert would == move(current(world.settings), remove_old=True).removed_files > 0
        assert all(each.exists() for each in kept)
        place = read_place(world.settings.data_dir)
        assert place is not None
        assert place.earlier == ()
    finally:
        world.close()


def test_a_place_with_a_streams_checkpoint_stays_until_the_stream_has_taken_it_along(box: str, tmp_path: Path) -> None:
    world = opened(replace(settings_in(tmp_path / "data"), tables=f"{box}/old"))
    try:
        kept = Incarnations(world.settings, "one")
        flow = stream_of({"name": "one", "source": "flights", "sink": "into"})
        with kept.locked():
            store_at(kept.checkpoint(kept.admitted(flow))).replace("offsets/0", b"place")
        move(world.settings, to=f"{box}/new")
        with pytest.raises(MoveRefused, match=r"checkpoints of streams lie at .*/old: one\. .* start each once"):
            move(current(world.settings), remove_old=True)
        kept = Incarnations(current(world.settings), "one")
        with kept.locked():
            assert store_at(kept.checkpoint(kept.admitted(flow))).read("offsets/0") == b"place"
        assert str(kept.folder).startswith(f"{box}/new/")
        assert move(current(world.settings), remove_old=True).removed_files > 0
    finally:
        world.close()


def test_the_file_decides_where_the_tables_are(box: str, tmp_path: Path) -> None:
    world = opened(settings_in(tmp_path / "data"))
    data = world.settings.data_dir
    reader = following(world.settings)
    assert reader.wal_uri == world.settings.wal_uri
    move(world.settings, to=f"{box}/new")
    try:
        environment = {"MILLRACE_DATA": str(data)}
        assert Settings.load(env=environment).tables == f"{box}/new"
        assert Settings.load(env=environment | {"MILLRACE_TABLES": f"{box}/new"}).tables == f"{box}/new"
        with pytest.raises(InvalidSettings, match="were moved"):
            Settings.load(env=environment | {"MILLRACE_TABLES": f"{box}/elsewhere"})
        assert reader.wal_uri == f"{box}/new/wal"
        assert reader.environment()["MILLRACE_TABLES"] == f"{box}/new"
        with pytest.raises(TablesMoved):
            reader.check_place()
    finally:
        world.close()


def test_spools_that_machines_share_move_with_the_tables(box: str, tmp_path: Path) -> None:
    here = Settings(data_dir=tmp_path / "data", meta_store=f"sqlite:///{tmp_path}/meta.db")
    there = replace(here, data_dir=tmp_path / "other", tables=f"{box}/tables")
    spool = shared(here)
    with small_files():
        spool.append([line(n) for n in range(50)], [Mark(50, "", 1)], partition={}, offset={"at": 1}, complete=True)
    move(here, to=there.tables)
    with pytest.raises(StreamBusy, match="taken over"):
        spool.append([line(50)], [], partition={}, offset={"at": 2})
    spool.close()
    with shared(there) as spool:
        assert read(spool.folder, 0, 20) == list(range(50))
        with small_files():
            spool.append([line(n) for n in range(50, 90)], [Mark(40, "", 1)], partition={}, offset={"at": 2})
    assert move(current(here), remove_old=True).removed_files > 0
    assert not list_below(store_at(here.data_dir), SPOOLS)
    move(current(here), to=str(here.data_dir))
    with shared(current(here)) as spool:
        assert read(spool.folder, 0, 20) == list(range(90)), "the file that this machine had goes on"


def shared(settings: Settings) -> Spool:
    """The spool of a capture, fed by a machine with these settings."""
    return Spool(settings.data_dir / "captures" / "shop", write=True, shared=shared_spool(settings, "shop"))
