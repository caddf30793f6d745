"""Flows and captures go on from a restored backup, and no row is lost or doubled.

What flows keep fits the tables and the log of the same backup, whatever they do while it is made.
"""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

import millrace.testing
from millrace.base.errors import BackupBusy, BackupDamaged
from millrace.base.settings import Settings
from millrace.flows import hold
from millrace.flows.batch import Batch
from millrace.flows.hold import KEY, flows_held, process_store, wait_while_held
from millrace.flows.range_host.documents import SKIP, SUSPECTS, WANTED, DocumentCopies, change_document
from millrace.flows.range_host.positions import change_positions, positions_of
from millrace.flows.range_host.status import flow_folder
from millrace.flows.sinks.collection.sink import CollectionSink
from millrace.flows.sources.capture import shared_spool as shared_module
from millrace.flows.sources.capture.lane import CapturedRows
from millrace.flows.sources.capture.shared_spool import shared_spool
from millrace.flows.sources.capture.spool import Mark, Spool
from millrace.flows.sources.capture.ticks import spool_folder
from millrace.flows.sources.source import Limits
from millrace.flows.spark_host.incarnations import Incarnations
from millrace.operations.backup import flow_state
from millrace.operations.backup.bucket import backup_place
from millrace.operations.backup.declaration import BackupParams
from millrace.operations.backup.manifest import list_backups
from millrace.operations.backup.restore import restore_backup
from millrace.operations.backup.run import backup, run
from millrace.operations.backup.safe_paths import check_paths
from millrace.runtime.progress import Progress
from millrace.storage.store import list_below, store_at
from millrace.testing import Deployment
from tests.failpoints import at_failpoints
from tests.flows.sinks.collection.test_lane import documents
from tests.flows.sources.capture.test_spool import line
from tests.operations.backup_world import World, settings_in
from tests.operations.test_backup import take
from tests.s3_server import bucket

GROUP = "millrace-shop"


@pytest.fixture(params=["one machine", "cluster"])
def world(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[World]:
    """A deployment that has a meta store, or has none."""
    made = World(of_kind(request.param, settings_in(tmp_path / "data")))
    made.step("insert", 0)
    yield made
    made.close()


def of_kind(kind: str, settings: Settings) -> Settings:
    return replace(settings, meta_store=f"sqlite:///{settings.data_dir}-meta.db" if kind == "cluster" else "")


def again(world: World, tmp_path: Path) -> Settings:
    """Restore the newest backup, and return the settings of the deployment."""
    kind = "cluster" if world.settings.meta_store else "one machine"
    restored = of_kind(kind, settings_in(tmp_path / "restored"))
    restore_backup(restored, tmp_path / "backups")
    return restored


# --- documents -------------------------------------------------------------------------------------------------------


def test_a_flow_is_still_paused_and_skips_its_records_after_a_restore(world: World, tmp_path: Path) -> None:
    bodies = {WANTED: b'{"paused": true}', SKIP: b'{"in-0": [7]}', f"{SUSPECTS}/in%2F0.json": b'{"range": [3, 9]}'}
    for name, body in bodies.items():
        change_document(world.settings, "flights", name, lambda _, body=body: body)  # type: ignore[misc]
    change_positions(world.settings, "flights", {"in-0": 7})
    take(world, tmp_path / "backups")
    ((folder, _),) = list_backups(tmp_path / "backups")
    assert json.loads((folder / "manifest.json").read_text())["version"] == 4
    restored = again(world, tmp_path)
    # Another machine, with an empty data folder, finds them, too.
    other = replace(restored, data_dir=tmp_path / "other") if restored.meta_store else restored
    with DocumentCopies(other, "flights") as copies:
        copies.refresh()
    assert {name: (flow_folder(other, "flights") / name).read_bytes() for name in bodies} == bodies
    assert positions_of(restored, "flights")["in-0"].position == 7


def test_a_restore_that_was_killed_leaves_nothing_of_its_flows_in_the_meta_store(tmp_path: Path) -> None:
    world = World(of_kind("cluster", settings_in(tmp_path / "data")))
    world.step("insert", 0)
    change_document(world.settings, "flights", WANTED, lambda _: b"first")
    take(world, tmp_path / "backups")
    restored = of_kind("cluster", settings_in(tmp_path / "restored"))

    class Killed(BaseException):
        pass

    def die(name: str) -> None:
        if name == "restore_backup.complete":
            raise Killed

    with at_failpoints(die), pytest.raises(Killed):
        restore_backup(restored, tmp_path / "backups")
    change_document(world.settings, "flights", WANTED, lambda _: None)
    change_document(world.settings, "other", SKIP, lambda _: b"second")
    take(world, tmp_path / "backups")
    world.close()
    restore_backup(restored, tmp_path / "backups")
    found = process_store(restored.meta_store).list("flow-documents/").entries
    assert [(each.key, each.value) for each in found] == [("flow-documents/other/skip.json", b"second")]


@pytest.mark.parametrize(
    "name",
    ["flow-documents/f/declared.json", "flow-documents/f/suspects/a/b.json", "captures/f/lock", "captures/spool.db"],
)
def test_a_backup_brings_no_other_file_into_the_folder_of_a_flow(name: str) -> None:
    """A declaration there would run code."""
    check_paths(
        "manifest", ["flow-documents/f/skip.json", "flow-documents/f/suspects/in%2F0.json", "captures/f/spool.db"]
    )
    with pytest.raises(BackupDamaged, match="which no backup contains"):
        check_paths("manifest", [name])


# --- journals of lanes -----------------------------------------------------------------------------------------------


@pytest.fixture
def db(tmp_path: Path) -> Iterator[Deployment]:
    with millrace.testing.deployment(tmp_path / "data", append_retry_delay=0.01) as made:
        yield made


def test_a_lane_that_writes_while_a_backup_is_made_has_each_document_once_after_it(
    db: Deployment, tmp_path: Path
) -> None:
    """The journal is copied before the log's end is read; a batch of between must not be sent."""
    db.create_collection("into", {"id": "string", "n": "int16"}, key="id", vchannels=2)
    ended, written = threading.Event(), [0]

    def batch(start: int, end: int) -> Batch:
        return Batch("in-0", start, end, documents=documents(start, end))

    def write() -> None:
        with CollectionSink(db.settings, "into", flow="flow") as sink:
            while not ended.is_set():
                sink.write(batch(written[0], written[0] + 5))
                written[0] += 5

    def act(name: str) -> None:
        if name == "backup.held":
            before = written[0]
            time.sleep(0.3)
            assert written[0] <= before + 5, "it ends the batch in hand at most"

    writer = threading.Thread(target=write)
    writer.start()
    try:
        while written[0] < 50:
            time.sleep(0.01)
        with at_failpoints(act):
            run(db.settings, BackupParams.parse({"to": str(tmp_path / "backups")}), Progress())
        last = written[0]
        while written[0] < last + 20:
            time.sleep(0.01)
    finally:
        ended.set()
        writer.join()
    restore_backup(settings_in(tmp_path / "restored"), tmp_path / "backups")
    with millrace.testing.deployment(tmp_path / "restored") as made:
        with CollectionSink(made.settings, "into", flow="flow") as sink:
            for start in range(0, written[0], 25):  # from the beginning: the sink knows what it has
                sink.write(batch(start, start + 25))
        made.settle()
        changes = made.collection("into").changes_between().read_all().to_pylist()
    found = Counter(row["n"] for row in changes if row["_change"] != "delete")
    assert set(found.values()) == {1}
    assert set(found) >= set(range(written[0]))


@pytest.mark.parametrize("kind", ["one machine", "cluster"])
def test_a_flow_waits_for_a_backup_that_is_suspended_or_dies_no_longer_than_a_hold(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hold, "HOLD_SECONDS", 0.4)
    monkeypatch.setattr(hold, "_TAKE_SECONDS", 0.1)
    settings = of_kind(kind, settings_in(tmp_path / "data"))
    (tmp_path / "data").mkdir()
    begun = time.monotonic()
    with pytest.raises(BackupBusy), flows_held(settings):
        wait_while_held(settings)  # this is the flow; the backup goes on when it has gone on
    assert time.monotonic() - begun >= 0.4
    wait_while_held(settings)
    with flows_held(settings), pytest.raises(BackupBusy, match="another backup"), flows_held(settings):
        pass
    if settings.meta_store:
        assert process_store(settings.meta_store).get(KEY) is None


# --- spools of captures ----------------------------------------------------------------------------------------------


class Capture:
    """A capture whose lane passes, and trims, what it has."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.spool = Spool(spool_folder(settings, GROUP), write=True, shared=shared_spool(settings, GROUP))
        self.next = self.spool.standing().next

    def feed(self, count: int) -> None:
        lines = [line(self.next + each) for each in range(count)]
        offset = {"at": self.next + count}
        self.spool.append(lines, [Mark(count, f"0-1-{self.next}", 7)], partition={}, offset=offset, complete=True)
        self.next += count

    def pass_all(self) -> None:
        change_positions(self.settings, "shop", {"d.t-0": self.next})
        self.spool.trim("d.t", self.next)

    def close(self) -> None:
        self.spool.close()


def rest(settings: Settings) -> list[int]:
    """Return the changes that the flow reads after its position."""
    position, found = positions_of(settings, "shop")["d.t-0"].position, []
    rows = CapturedRows(spool_folder(settings, GROUP), "d.t")
    with Spool(spool_folder(settings, GROUP)) as spool:
        high = spool.end_of("d.t", spool.standing().high)
    while position < high:
        for batch in rows.batches(position, high, Limits(10, 1 << 20, 0.0)):
            found += [json.loads(each.key or b"") for each in batch.records or ()]
            position = batch.end
    rows.close()
    return found


def test_a_capture_goes_on_from_a_backup_that_was_made_while_its_lane_passed_and_trimmed_changes(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_module, "BASE_FILES", 2)
    monkeypatch.setattr(shared_module, "SMALL_BYTES", 64)
    capture = Capture(world.settings)
    capture.spool.begin_epoch()
    for _ in range(4):
        capture.feed(5)
    capture.pass_all()

    def act(name: str) -> None:
        if name in ("backup.pinned", "backup.held"):
            for _ in range(4):
                capture.feed(5)
                capture.pass_all()

    take(world, tmp_path / "backups", act=act)
    assert capture.next == 60
    for _ in range(4):
        capture.feed(5)
        capture.pass_all()
    with Spool(spool_folder(world.settings, GROUP)) as spool:
        assert spool.low("d.t") == 80, "trims go on after the backup"
    capture.close()
    restored = again(world, tmp_path)
    # On the machine of the restore, and on another one: they share the spool by the meta store.
    other = replace(restored, data_dir=tmp_path / "other", tables=restored.tables_uri)
    machine = other if restored.meta_store else restored
    goes_on = Capture(machine)
    standing = goes_on.spool.standing()
    assert (standing.next, standing.offset, standing.complete) == (60, {"at": 60}, True)
    goes_on.feed(5)
    goes_on.close()
    assert positions_of(machine, "shop")["d.t-0"].position == 20
    assert rest(machine) == list(range(20, 65))


def test_a_spool_that_was_shared_once_begins_a_deployment_that_shares_it_again(tmp_path: Path) -> None:
    """Its file names the shared spool of then, which the other deployment does not have."""
    shared = of_kind("cluster", settings_in(tmp_path / "data"))
    capture = Capture(shared)
    capture.spool.begin_epoch()
    capture.feed(5)
    capture.close()
    world = World(settings_in(tmp_path / "data"))
    change_positions(world.settings, "shop", {"d.t-0": 2})
    take(world, tmp_path / "backups")
    world.close()
    restored = of_kind("cluster", settings_in(tmp_path / "restored"))
    restore_backup(restored, tmp_path / "backups")
    goes_on = Capture(restored)
    goes_on.feed(2)
    goes_on.close()
    assert rest(restored) == [2, 3, 4, 5, 6]


def test_the_hold_on_a_spool_ends_by_itself(tmp_path: Path) -> None:
    with Spool(tmp_path, write=True) as spool:
        spool.begin_epoch()
        spool.append([line(0)], [Mark(1, "", 1)], partition={}, offset={}, complete=True)
        spool.hold(seconds=0.2)
        spool.trim("d.t", 1)
        assert spool.low("d.t") == 0
        time.sleep(0.25)
        spool.trim("d.t", 1)
        assert spool.low("d.t") == 1
        spool.note(held=1e12)  # of before the machine was started again
        spool.append([line(1)], [Mark(1, "", 1)], partition={}, offset={})
        spool.trim("d.t", 2)
        assert spool.low("d.t") == 2


# --- checkpoints of Spark's streams ----------------------------------------------------------------------------------


@pytest.fixture(params=["disk", "bucket", "bucket and meta store"])
def places(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Settings]]:
    """Settings of a deployment, and of the one that it is restored as."""
    plain = [settings_in(tmp_path / name) for name in ("data", "restored")]
    with ExitStack() as stack:
        if request.param != "disk":
            uri = stack.enter_context(bucket(monkeypatch))
            plain = [replace(each, tables=f"{uri}/{each.data_dir.name}") for each in plain]
        if request.param == "bucket and meta store":
            plain = [of_kind("cluster", each) for each in plain]
        yield plain


def test_a_checkpoint_is_restored_as_of_one_micro_batch(places: list[Settings], tmp_path: Path) -> None:
    """Whatever Spark does meanwhile: a batch may end and the next one begin, but not reach the sink."""
    first, second = places
    world = World(first)
    world.step("insert", 0)
    kept = Incarnations(first, "one")
    kept._change(lambda state: replace(state, incarnation=2, fingerprint="f", handed=True, place=place(kept)))
    files = store_at(kept.checkpoint(kept.state))

    def batch(number: int, *, ended: bool) -> None:
        files.replace(f"offsets/{number}", b"v1")
        files.replace(f"state/0/0/{number + 1}.delta", b"state")
        files.replace("millrace-sink/taken.json", b'{"batch": %d, "rows": 1, "rejected": 0}' % number)
        if ended:
            files.replace(f"commits/{number}", b"v1")

    for number in range(6):
        batch(number, ended=number < 5)
    files.replace("metadata", b'{"id": "1"}')
    files.replace("millrace-sink/staged/0.arrow", b"rows")
    files.replace("millrace-sink/kafka-stream.json", b'{"name": "old"}')
    files.replace("millrace-sink/late/opensearch.json", b'{"begun": 7}')
    store_at(kept.folder).replace("1/offsets/9", b"of an earlier incarnation")
    store_at(kept.folder).replace("skipped.json", b"{}")

    def act(name: str) -> None:
        if name == "backup.held":  # what was copied is of before
            batch(5, ended=True)
            batch(6, ended=False)

    root = f"{first.tables.rpartition('/')[0]}/backups" if first.tables else str(tmp_path / "backups")
    with at_failpoints(act):
        backup(first, world.log, BackupParams.parse({"to": root, "verify": True}), Progress())
    world.close()
    report = restore_backup(second, backup_place(root))
    restored = Incarnations(second, "one")
    assert restored.state == replace(kept.state, place=place(restored))
    assert restored.folder == restored.home
    found = store_at(restored.checkpoint(restored.state))
    names = {name for name in list_below(found) if name != "state.json"}
    assert {name for name in names if name.startswith(("offsets", "commits"))} == {
        "offsets/3", "offsets/4", "offsets/5", "commits/3", "commits/4",
    }  # fmt: skip
    assert {f"state/0/0/{number}.delta" for number in range(1, 7)} <= names
    assert not any("staged" in name for name in names)
    assert found.read("millrace-sink/taken.json") == b'{"batch": 5, "rows": 1, "rejected": 0}'
    assert json.loads(found.read("millrace-sink/kafka-stream.json") or b"")["name"] != "old"
    assert json.loads(found.read("millrace-sink/late/opensearch.json") or b"")["begun"] > 7
    assert set(store_at(restored.folder).folders()) == {"2"}
    assert store_at(restored.folder).read("skipped.json") == b"{}"
    assert len(report.notes) == 2, "one for each sink that is not in the backup"
    assert all(note.startswith("one: its sink is not in the backup") for note in report.notes)


def place(kept: Incarnations) -> str:
    return kept.home if isinstance(kept.home, str) else ""


def test_a_stream_that_goes_on_for_too_long_while_its_state_is_copied_makes_the_backup_begin_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Spark removes the state of older micro-batches: what is copied then may lack a file."""
    monkeypatch.setattr(flow_state, "_RETAINED", 3)
    world = World(settings_in(tmp_path / "data"))
    kept = Incarnations(world.settings, "one")
    kept._change(lambda state: replace(state, fingerprint="f", handed=True))
    files = store_at(kept.checkpoint(kept.state))
    files.replace("commits/0", b"v1")
    attempts = []

    def act(name: str) -> None:
        if name == "backup.held" and len(attempts) < 2:
            attempts.append(name)
            for number in range(len(attempts) * 10, len(attempts) * 10 + 5):
                files.replace(f"commits/{number}", b"v1")

    take(world, tmp_path / "backups", act=act)
    assert len(attempts) == 2
    world.close()
