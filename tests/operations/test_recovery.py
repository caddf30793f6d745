"""Each fault that recovery knows is put into a real deployment, found, rehearsed on a
clone, repaired, and proved gone.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable, write_deltalake

from millrace.base.errors import CollectionExists, CollectionNotFound
from millrace.base.failpoint import VARIABLE
from millrace.base.settings import Settings
from millrace.catalog.collection import CollectionInfo
from millrace.catalog.sqlite_file import catalog_path, read_collections
from millrace.client.database import Database, connect
from millrace.commands.parts.command_line import EXIT_VERIFICATION_FAILED
from millrace.coord.catalog.store import CatalogStore
from millrace.message import builders
from millrace.message.ids import LogId
from millrace.message.schema import CollectionSchema, FieldSpec
from millrace.message.schema_changes import AddField
from millrace.message.wire.encode import encode_entry
from millrace.node.flush.definition import flush_to_end
from millrace.node.ingest.definition import ingest_to_end
from millrace.node.range_loop.parking import Parked, park, parked_names
from millrace.node.retention.truncation import truncate_log
from millrace.operations.checkpoint.declaration import CheckpointParams
from millrace.operations.checkpoint.recovery_checkpoints import recovery_checkpoints_uri
from millrace.operations.checkpoint.run import checkpoint
from millrace.operations.compaction.declaration import CompactionParams
from millrace.operations.compaction.run import compact
from millrace.operations.recovery import catalog_repair
from millrace.operations.recovery.declaration import RecoveryParams
from millrace.operations.recovery.findings import RecoveryReport
from millrace.operations.recovery.run import run
from millrace.runtime.progress import Progress
from millrace.tables.collections.data_tables import rows_uri
from millrace.tables.read.arrow import read_arrow
from millrace.tables.wal.table import WalTable
from tests.cli.deployment import Deployment
from tests.tables.staged_files import stage

SCHEMA = CollectionSchema((FieldSpec("id", "int64", False), FieldSpec("name", "string", True)), "id")
P = "dml_0"
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A collection of 60 rows in three flushes, ten of them deleted; one row more in the WAL alone."""
    folder = tmp_path_factory.mktemp("made")
    settings = settings_in(folder)
    with connect(settings=settings) as made:
        made.catalog.ensure_pchannels(1)
        made.catalog.create_collection("c", SCHEMA)
        for first in (0, 20, 40):
            insert(made, range(first, first + 20))
            ingest_to_end(settings, made.log)
            flush_to_end(settings)
        made.new_producer().delete(made.definition("c"), pa.array(range(10)))
        ingest_to_end(settings, made.log)
        flush_to_end(settings)
        insert(made, [60])
        ingest_to_end(settings, made.log)
        made.connection.service.shutdown()
    return folder


@pytest.fixture
def client(made: Path, tmp_path: Path) -> Iterator[Database]:
    """A copy of what was made, of the test's own."""
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    with connect(settings=settings_in(tmp_path)) as client:
        yield client
        client.connection.service.shutdown()


def settings_in(folder: Path) -> Settings:
    return Settings(data_dir=folder / "data", cache_dir=folder / "cache", log_file_bytes=1 << 20)


def insert(client: Database, keys: range | list[int]) -> None:
    names = [f"n{key}" for key in keys]
    client.new_producer().insert(client.definition("c"), pa.table({"id": list(keys), "name": names}))


def recover(client: Database, mode: str, **more: object) -> RecoveryReport:
    return run(client.settings, RecoveryParams.parse({"mode": mode, **more}), Progress())


def keys(client: Database) -> list[int]:
    return sorted(read_arrow(client.settings, client.definition("c").id)["id"].to_pylist())


def live(path: Path, part: str = "") -> list[Path]:
    return sorted(path / name for name in DeltaTable(str(path)).file_uris() if part in name)


def found(report: RecoveryReport) -> list[str]:
    return [each.kind for each in report.findings]


@pytest.mark.slow
def test_a_sound_deployment_has_no_findings_at_any_depth(client: Database) -> None:
    before = sorted(client.settings.data_dir.rglob("*.parquet"))
    for depth in ("quick", "full"):
        for mode in ("diagnose", "rehearse", "repair"):
            report = recover(client, mode, depth=depth)
            assert (report.findings, report.healthy, report.repairs) == ((), True, ())
    assert sorted(client.settings.data_dir.rglob("*.parquet")) == before, "nothing was written, no clone is left"


def remove(path: Path) -> None:
    path.unlink()


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def garble(path: Path) -> None:
    """Same size, other bytes in the middle."""
    data = bytearray(path.read_bytes())
    middle = len(data) // 2
    data[middle : middle + 64] = os.urandom(64)
    path.write_bytes(data)


def alter(path: Path) -> None:
    """A file that reads well, has the same name, and holds other rows."""
    rows = pq.ParquetFile(path).read()
    place = rows.schema.get_field_index("physical_ms")
    changed = rows.set_column(place, rows.schema.field(place), pa.array([1] * rows.num_rows, pa.int64()))
    size = path.stat().st_size
    pq.write_table(changed, path, compression="none")
    with path.open("ab"):
        os.utime(path)
    assert path.stat().st_size != size


Harm = Callable[[Database], None]


def harm_wal(part: str, act: Callable[[Path], None]) -> Harm:
    return lambda client: act(live(Path(client.settings.wal_uri), part)[0])


def harm_table(path_of: Callable[[Settings], Path], act: Callable[[Path], None]) -> Harm:
    return lambda client: act(live(path_of(client.settings))[0])


FAULTS: dict[str, tuple[Harm, str]] = {
    "a WAL file is gone": (harm_wal("kind=message", remove), "wal_file_damaged"),
    "a WAL file is cut": (harm_wal("kind=message", cut), "wal_file_damaged"),
    "a WAL file is garbled": (harm_wal("kind=message", garble), "wal_rows_differ"),
    "a WAL file holds other rows": (harm_wal("kind=message", alter), "wal_file_damaged"),
    "the state row is gone": (harm_wal("kind=state", remove), "wal_state_damaged"),
    "the state row is garbled": (harm_wal("kind=state", garble), "wal_state_damaged"),
    "a row file is gone": (harm_table(lambda s: Path(rows_uri(s, 1)), remove), "table_file_damaged"),
    "a row file is cut": (harm_table(lambda s: Path(rows_uri(s, 1)), cut), "table_file_damaged"),
    "a delete file is gone": (harm_table(lambda s: Path(s.deletes_uri(1)), remove), "table_file_damaged"),
    "a file of segments is gone": (harm_table(lambda s: Path(s.segments_uri), remove), "table_file_damaged"),
    "the checkpoint is gone": (harm_table(lambda s: Path(s.checkpoints_uri), remove), "table_file_damaged"),
}


QUICK = ("a WAL file is gone", "the state row is gone", "a row file is cut", "the checkpoint is gone")


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    "fault", [fault if fault in QUICK else pytest.param(fault, marks=pytest.mark.slow) for fault in FAULTS]
)
def test_a_fault_is_found_rehearsed_repaired_and_every_row_is_there_once(client: Database, fault: str) -> None:
    harm, kind = FAULTS[fault]
    expected = keys(client)
    assert expected == list(range(10, 61))
    harm(client)
    files = {path: path.stat().st_mtime_ns for path in client.settings.data_dir.rglob("*.parquet")}
    looked = recover(client, "diagnose")
    assert (found(looked), looked.healthy) == ([kind], False)
    rehearsed = recover(client, "rehearse")
    assert (found(rehearsed), rehearsed.healthy) == ([kind], True), rehearsed.repairs
    assert {path: path.stat().st_mtime_ns for path in client.settings.data_dir.rglob("*.parquet")} == files
    repaired = recover(client, "repair")
    assert (found(repaired), repaired.healthy, repaired.remaining) == ([kind], True, ()), repaired.repairs
    assert keys(client) == expected
    insert(client, [100])
    client.new_producer().delete(client.definition("c"), pa.array([11]))
    ingest_to_end(client.settings, client.log)
    flush_to_end(client.settings)
    assert keys(client) == [key for key in expected if key != 11] + [100], "the flow goes on behind the repair"
    assert recover(client, "diagnose").healthy


@pytest.mark.slow
def test_a_collection_with_fewer_rows_than_became_visible_is_made_again(client: Database) -> None:
    path = Path(rows_uri(client.settings, 1))
    DeltaTable(str(path)).delete("id = 33")
    assert found(recover(client, "diagnose")) == ["collection_differs"]
    assert recover(client, "diagnose", depth="quick").healthy, "contents are not looked at"
    assert recover(client, "repair").healthy
    assert keys(client) == list(range(10, 61))


@pytest.mark.slow
def test_rows_that_nothing_backs_go_only_with_a_persons_word(client: Database) -> None:
    path = Path(rows_uri(client.settings, 1))
    table = DeltaTable(str(path))
    [first, *_] = table.to_pyarrow_table().slice(0, 1).to_pylist()
    row = pa.Table.from_pylist([{**first, "id": 777}], schema=table.to_pyarrow_table().schema)
    write_deltalake(str(path), row, mode="append")
    refused = recover(client, "repair")
    assert (found(refused), refused.healthy, refused.needs_approval) == (["collection_differs"], False, True)
    assert 777 in keys(client)
    allowed = recover(client, "repair", allow_destructive=True)
    assert allowed.healthy
    assert keys(client) == list(range(10, 61))


@pytest.mark.slow
def test_a_row_that_another_writer_changed_goes_only_with_a_persons_word(client: Database) -> None:
    DeltaTable(str(Path(rows_uri(client.settings, 1)))).update(updates={"name": "'other'"}, predicate="id = 33")
    refused = recover(client, "repair")
    assert (found(refused), refused.needs_approval) == (["collection_differs"], True)
    assert "their contents differ" in refused.findings[0].words
    assert recover(client, "repair", allow_destructive=True).healthy
    rows = read_arrow(client.settings, 1).filter(pc.equal(pc.field("id"), 33))
    assert rows["name"].to_pylist() == ["n33"]


@pytest.mark.slow
def test_a_parked_channel_is_tried_again_and_goes_on_once_the_cause_is_gone(client: Database) -> None:
    parked = Parked(P, "DISK", "no space", LogId(0, 0), "2026-01-01T00:00:00+00:00")
    park(client.settings.parked_path, parked)
    insert(client, [61])
    report = recover(client, "repair")
    assert (found(report), report.healthy) == (["channel_parked"], True)
    assert parked_names(client.settings.parked_path) == frozenset()
    assert keys(client) == list(range(10, 62))


@pytest.mark.slow
def test_a_job_that_is_gone_while_work_waits_is_found_and_its_work_done(client: Database) -> None:
    silent(client)
    assert recover(client, "diagnose").healthy, "nothing waits: a job that rests is no fault"
    insert(client, [61])
    end = time.monotonic() + 20
    while recover(client, "diagnose", stale_after=1).healthy:
        assert time.monotonic() < end, "what has waited for a second is no news any more"
        time.sleep(0.1)  # the poll interval of a wait with a deadline
    report = recover(client, "repair", stale_after=1)
    assert (found(report), report.healthy) == (["job_dead"], True)
    assert keys(client) == list(range(10, 62))


@pytest.mark.slow
def test_a_job_that_rests_is_no_fault_where_time_ticks_alone_or_fresh_rows_wait(client: Database) -> None:
    flush_to_end(client.settings)
    silent(client)
    for _ in range(3):
        client.connection.tick(P)
    assert recover(client, "diagnose", stale_after=1).healthy, "an idle system's ticks are nobody's work"
    insert(client, [61])
    assert recover(client, "diagnose").healthy, "a row that came just now is being taken by the job that rested"


def silent(client: Database) -> None:
    """A streaming job of an earlier life that has said nothing for years."""
    path = client.settings.progress_path("streaming-node")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"pid": 2**22 + 1}))
    os.utime(path, (0, 0))


@pytest.mark.slow
def test_a_transaction_past_its_lease_is_ended_by_a_tick(client: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("millrace.operations.recovery.diagnose._TXN_GRACE_MS", 0)
    collection = client.definition("c")
    state = WalTable.open(Path(client.settings.wal_uri)).position(P).state
    assert state is not None
    [vchannel] = [name for name in collection.vchannels if name in state.vchannels][:1]
    begin = builders.begin_txn(7, vchannel=vchannel, collection_id=collection.id, term=state.term, keepalive_ms=500)
    client.connection.append(P, [encode_entry([begin])])
    ingest_to_end(client.settings, client.log)
    over = time.time() + 1
    while time.time() < over:  # the lease runs by the clock
        time.sleep(0.1)
    report = recover(client, "repair")
    assert (found(report), report.healthy) == (["txn_stuck"], True)


def more_collections(client: Database) -> list[CollectionInfo]:
    """DDL of every kind on two PChannels, some of it behind the checkpoint.

    The catalog as it was then, dropped collections included.
    """
    settings, catalog = client.settings, client.catalog
    catalog.ensure_pchannels(2)
    for name in ("d", "gone", "made-again"):
        catalog.create_collection(name, SCHEMA, vchannels=3)
    catalog.create_partition("d", "p1")
    ingest_to_end(settings, client.log)
    flush_to_end(settings)
    catalog.drop_collection("gone")
    catalog.drop_collection("made-again")
    catalog.create_collection("made-again", SCHEMA)
    catalog.alter("d", [AddField(FieldSpec("age", "int64", True))])
    catalog.create_partition("d", "p2")
    catalog.drop_partition("d", "p1")
    return [replace(each, next_partition=0) for each in read_collections(settings.data_dir, dropped=True)]


@pytest.mark.parametrize(
    "server",
    [pytest.param("runs", marks=pytest.mark.slow), pytest.param("stopped", marks=pytest.mark.slow), "started since"],
)
def test_a_lost_catalog_is_found_and_made_again_from_log_and_wal(
    client: Database, monkeypatch: pytest.MonkeyPatch, server: str
) -> None:
    settings = client.settings
    before = more_collections(client)
    epoch = CatalogStore(catalog_path(settings.data_dir)).next_epoch(7)
    terms = {name: client.connection.describe(name)["term"] for name in (P, "dml_1")}
    if server != "runs":
        client.connection.service.shutdown()
    for path in (settings.data_dir / "coord").glob("coord.db*"):
        path.unlink()
    cli = Deployment(settings)
    if server == "started since":
        with pytest.raises(CollectionNotFound):
            client.definition("c")
    said = json.loads(cli.run("verify", "--json").stdout)
    assert not said["holds"]
    assert {each["collection"] for each in said["catalog"]} >= {"c", "d", "made-again"}
    assert cli.run("verify").exit_code == cli.run("operations", "recovery").exit_code == EXIT_VERIFICATION_FAILED
    rehearsal = recover(client, "rehearse")
    assert rehearsal.healthy, rehearsal.repairs
    assert recover(client, "diagnose").healthy is False, "a rehearsal changes nothing"
    report = recover(client, "repair")
    assert report.healthy, report.repairs
    assert "digest" in report.repairs[0].words
    assert [replace(each, next_partition=0) for each in read_collections(settings.data_dir, dropped=True)] == before
    assert cli.run("operations", "recovery").exit_code == 0
    insert(client, [70])
    client.catalog.create_collection("new", SCHEMA)
    with pytest.raises(CollectionExists):
        client.catalog.create_collection("d", SCHEMA)
    with CatalogStore(catalog_path(settings.data_dir)) as store:
        assert store.next_epoch(7) > epoch
        assert store.collection("new").id > max(each.id for each in before)
        assert {name: store.term(name) >= term for name, term in terms.items()} == {P: True, "dml_1": True}
    ingest_to_end(settings, client.log)
    flush_to_end(settings)
    assert json.loads(cli.run("verify", "--json").stdout)["holds"]


@pytest.mark.slow
def test_a_catalog_is_not_made_from_a_chain_that_the_wal_contradicts(
    client: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    for path in (client.settings.data_dir / "coord").glob("coord.db*"):
        path.unlink()
    monkeypatch.setattr(catalog_repair, "_collections", lambda settings, names: ([], []))
    report = recover(client, "repair")
    assert not report.healthy
    assert "repair the WAL first" in report.repairs[0].words
    assert not read_collections(client.settings.data_dir)


@pytest.mark.slow
def test_a_lost_staged_file_is_found_by_its_name_and_mends_by_being_put_back(client: Database) -> None:
    settings, collection = client.settings, client.definition("c")
    rows = pa.table({"id": [100, 101], "name": ["a", "b"]}, schema=SCHEMA.arrow())
    file = stage(settings.staged_path, "load/0.parquet", rows, partition=collection.partitions["_default"])
    loaded = builders.import_files(
        "load", [file], vchannel=collection.vchannels[0], collection_id=collection.id, term=1
    )
    client.connection.append(P, [encode_entry([loaded])]).result()
    ingest_to_end(settings, client.log)
    flush_to_end(settings)
    assert recover(client, "diagnose", depth="full").healthy
    path = settings.staged_path / "load/0.parquet"
    data = path.read_bytes()
    path.unlink()
    report = recover(client, "repair", depth="full")
    [finding] = report.findings
    assert finding.kind == "staged_file_damaged"
    assert str(path) in finding.words
    assert not report.healthy
    assert "put the file back" in report.repairs[0].words
    path.write_bytes(data)
    assert recover(client, "diagnose", depth="full").healthy
    assert keys(client) == [*range(10, 61), 100, 101]


@pytest.mark.slow
def test_a_damaged_wal_whose_log_was_truncated_is_not_repaired_and_says_what_to_do(client: Database) -> None:
    for start in range(1000, 1020):  # enough for the log to give up whole files
        client.new_producer().insert(client.definition("c"), pa.table({"id": [start], "name": ["x" * 200_000]}))
    ingest_to_end(client.settings, client.log)
    flush_to_end(client.settings)
    assert any(each.freed_bytes for each in truncate_log(client.settings, client.log))
    live(Path(client.settings.wal_uri), "kind=message")[0].unlink()
    report = recover(client, "repair")
    assert not report.healthy
    assert ["REPAIR_IMPOSSIBLE" in each.words and "backup" in each.words for each in report.repairs] == [True]
    assert found(report) == ["wal_file_damaged"]


def checkpointed(client: Database) -> list[Path]:
    """A log that reaches back to its checkpoint alone, and rows behind that; the WAL's files with those."""
    for start in range(1000, 1020):  # enough for the log to give up whole files
        client.new_producer().insert(client.definition("c"), pa.table({"id": [start], "name": ["x" * 200_000]}))
    ingest_to_end(client.settings, client.log)
    flush_to_end(client.settings)
    done = checkpoint(client.settings, client.log, CheckpointParams(), Progress())
    assert [each.freed_bytes > 0 for each in done.truncated] == [True]
    before = set(live(Path(client.settings.wal_uri), "kind=message"))
    insert(client, [2000, 2001])
    ingest_to_end(client.settings, client.log)
    return [path for path in live(Path(client.settings.wal_uri), "kind=message") if path not in before]


BEHIND = {"gone": (remove, "wal_file_damaged"), "garbled": (garble, "wal_rows_differ")}


@pytest.mark.parametrize("fault", ["gone", pytest.param("garbled", marks=pytest.mark.slow)])
def test_what_the_wal_has_behind_a_checkpoint_is_computed_again_from_the_log_that_truncation_left(
    client: Database, fault: str
) -> None:
    harm, kind = BEHIND[fault]
    [file] = checkpointed(client)
    expected = keys(client)
    harm(file)
    assert found(recover(client, "diagnose")) == [kind]
    rehearsed = recover(client, "rehearse")
    assert (found(rehearsed), rehearsed.healthy) == ([kind], True), rehearsed.repairs
    repaired = recover(client, "repair")
    assert (found(repaired), repaired.healthy) == ([kind], True), repaired.repairs
    assert keys(client) == expected


@pytest.mark.slow
def test_a_lost_state_row_is_computed_again_from_the_checkpoint_and_the_log_behind_it(client: Database) -> None:
    checkpointed(client)
    expected, position = keys(client), WalTable.open(Path(client.settings.wal_uri)).position(P)
    live(Path(client.settings.wal_uri), "kind=state")[0].unlink()
    repaired = recover(client, "repair")
    assert (found(repaired), repaired.healthy) == (["wal_state_damaged"], True), repaired.repairs
    again = WalTable.open(Path(client.settings.wal_uri)).position(P)
    assert (again.state_bytes, again.totals) == (position.state_bytes, position.totals)
    insert(client, [3000])
    ingest_to_end(client.settings, client.log)
    assert keys(client) == [*expected, 3000]


@pytest.mark.parametrize("harm", [remove, pytest.param(cut, marks=pytest.mark.slow)])
def test_a_damaged_checkpoint_is_found_given_up_and_written_anew(
    client: Database, harm: Callable[[Path], None]
) -> None:
    checkpointed(client)
    [file] = live(Path(recovery_checkpoints_uri(client.settings)))
    harm(file)
    report = recover(client, "repair")
    assert (found(report), report.healthy) == (["table_file_damaged"], True), report.repairs
    assert checkpoint(client.settings, client.log, CheckpointParams(), Progress()).ok
    assert len(live(Path(recovery_checkpoints_uri(client.settings)))) == 1
    assert recover(client, "diagnose").healthy


@pytest.mark.slow
@pytest.mark.parametrize(
    "fault",
    [
        "a WAL file is gone",
        pytest.param("the state row is gone", marks=pytest.mark.slow),
        pytest.param("a row file is cut", marks=pytest.mark.slow),
    ],
)
def test_a_repair_that_is_killed_before_its_commit_is_done_by_the_next(client: Database, fault: str) -> None:
    harm, _ = FAULTS[fault]
    expected = keys(client)
    harm(client)
    environment = {
        **os.environ,
        **client.settings.environment(),
        VARIABLE: "recovery.written",
        "PYTHONPATH": str(ROOT / "include"),
    }
    command = [sys.executable, "-m", "millrace.operations", "recovery", "--params", '{"mode": "repair"}']
    ended = subprocess.run(command, env=environment, timeout=60, capture_output=True, text=True, check=False)
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    clones = client.settings.run_path / "clones"
    assert any(clones.glob("*")) == (fault == "a row file is cut"), "that repair works on a clone"
    assert recover(client, "repair").healthy
    assert not any(clones.glob("*"))
    assert keys(client) == expected


@pytest.mark.slow
def test_a_collection_whose_deletes_were_folded_in_is_made_again_and_folds_again(client: Database) -> None:
    params = CompactionParams(min_files=2, fold="always", keep_history_hours=0, vacuum=False)
    flush_to_end(client.settings)
    compact(client.settings, params)
    expected = keys(client)
    live(Path(rows_uri(client.settings, 1)))[0].unlink()
    assert recover(client, "repair").healthy
    assert keys(client) == expected
    for _ in range(2):
        compact(client.settings, params)
        assert keys(client) == expected, "no deleted row came back with the repair"
    insert(client, [200])
    ingest_to_end(client.settings, client.log)
    flush_to_end(client.settings)
    assert keys(client) == [*expected, 200]
    assert recover(client, "diagnose").healthy
