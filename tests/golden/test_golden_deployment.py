"""A deployment that an earlier build wrote opens, holds what it held, and goes on.

No format changes under its users.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

from millrace.base.errors import TickTooOld
from millrace.client.database import Database
from millrace.commands.verify import check_channels, check_collections
from millrace.log.generations.service import open_deployment_log
from millrace.message import builders
from millrace.message.ids import pchannel_of
from millrace.message.schema import FieldSpec
from millrace.message.schema_changes import AddField
from millrace.message.wire.encode import encode_entry
from millrace.node.flush.definition import flush_to_end
from millrace.node.ingest.definition import ingest_to_end
from millrace.node.range_loop.parking import read_parked, unpark
from millrace.observe.observer import Observer
from millrace.observe.wal_search import WalQuery
from millrace.operations.backup.manifest import find_backup
from millrace.operations.backup.restore import restore_backup
from millrace.operations.backup.verify import verify_backup
from millrace.operations.checkpoint.declaration import CheckpointParams
from millrace.operations.checkpoint.run import checkpoint
from millrace.rpc.outcome import AppendResult
from millrace.runtime.progress import Progress
from millrace.tables.wal.table import WalTable
from tests.golden.deployment import (
    GROUP,
    LOG,
    PATIENCE,
    WRITER,
    facts,
    of_catalog,
    of_log,
    of_positions,
    of_streams,
    of_wal,
    people_rows,
    rows,
    served,
    settings_of,
    streams,
    unpacked,
)
from tests.golden.make_deployment import keys_of, one_row, stamps
from tests.msgstream.messages import append as append_to_stream
from tests.operations.log_maker import Things

ROOT = Path(__file__).resolve().parents[2]
FACTS = facts()
READS: list[dict[str, Any]] = FACTS["reads"]


@pytest.fixture(scope="module")
def untouched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy for tests that only look."""
    return unpacked(tmp_path_factory.mktemp("golden"))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return unpacked(tmp_path / "golden")


@pytest.fixture
def within(untouched: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The same from inside: the log's second generation has a relative URL."""
    monkeypatch.chdir(untouched)
    return untouched


@pytest.fixture
def restored(untouched: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What its backup holds, as a deployment."""
    monkeypatch.chdir(untouched)
    report = restore_backup(settings_of(tmp_path), untouched / "backups")
    assert report.id == FACTS["backup"]["id"]
    return tmp_path


def holds(client: Database) -> None:
    """`millrace verify` finds nothing wrong, and nothing behind."""
    found = [*check_channels(client.settings, log=client.log), *check_collections(client.settings)]
    assert all(each["holds"] for each in found), found
    assert {each.get("state", "whole") for each in found} == {"whole"}


def ids(client: Database) -> set[int]:
    """Keys of `people`. What has run out since (transactions, idle segments) is told by a
    tick first, in rows of its own.
    """
    for number in range(2):
        client.connection.tick(f"dml_{number}")
    up_to_date(client)
    return set(client.collection("people").read()["id"].to_pylist())


def repeated(client: Database) -> AppendResult:
    """The first insert of a producer that there was, sent again."""
    people = client.catalog.collection("people")
    vchannel = people.vchannels[0]
    old = replace(people, schemas=people.schemas[:1])
    message = builders.insert(
        one_row(old, keys_of(people, 0, (700, 800))[0]),
        **stamps(client, people, vchannel),
        partition_id=people.partitions["eu"],
        schema_version=1,
        producer_id=99,
        epoch=1,
        sequence=0,
    )
    return client.connection.append(pchannel_of(vchannel), [encode_entry([message])], deadline=20.0).result()


def up_to_date(client: Database) -> None:
    ingest_to_end(client.settings, client.log)
    flush_to_end(client.settings)


def test_the_wal_holds_what_was_committed_with_its_states_byte_for_byte(untouched: Path) -> None:
    assert of_wal(settings_of(untouched)) == FACTS["wal"]


@pytest.mark.parametrize("read", READS, ids=lambda read: read["what"])
def test_a_read_at_each_tick_finds_what_it_found(untouched: Path, read: dict[str, Any]) -> None:
    settings = settings_of(untouched)
    if read["rows"] is None:
        with pytest.raises(TickTooOld):
            rows(settings, read["collection"], at=read["at"])
    else:
        assert rows(settings, read["collection"], at=read["at"]) == read["rows"]


MOVE = """
import sys
from pathlib import Path
from millrace.base.settings import Settings
from millrace.tables.collections.data_tables import rows_uri
rows_uri(Settings(data_dir=Path(sys.argv[1])), 1)
"""


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("point", ["layout.moved", "layout.renamed", "layout.recorded", "layout.emptied"])
def test_its_rows_tables_are_moved_wherever_the_move_is_killed(root: Path, point: str) -> None:
    settings = settings_of(root)
    files = {path.stat().st_ino for path in (settings.data_dir / "collections").rglob("*.parquet")}
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "include"), "MILLRACE_TEST_FAILPOINTS": point}
    moving = subprocess.run([sys.executable, "-c", MOVE, str(settings.data_dir)], env=environment, timeout=60)
    assert moving.returncode == -signal.SIGKILL
    for read in READS:
        if read["rows"] is not None:
            assert rows(settings, read["collection"], at=read["at"]) == read["rows"]
    assert (settings.data_dir / "collections").is_file()
    assert files == {path.stat().st_ino for path in (settings.data_dir / "tables").rglob("*.parquet")}


def test_the_log_run_through_the_chain_again_gives_every_row_and_state(within: Path) -> None:
    settings = settings_of(within)
    with open_deployment_log(settings.log_path, settings=LOG) as log:
        assert of_log(log) == FACTS["log"]
        channels = check_channels(settings, log=log)
        assert [each["holds"] for each in channels] == [True] * 3
        assert all(each["replayed"] == FACTS["wal"][each["pchannel"]]["digest"] for each in channels)
    collections = check_collections(settings)
    assert {each["collection"]: each["holds"] for each in collections}["people"]
    assert all(each["holds"] for each in collections)


@pytest.mark.slow
def test_what_the_coordinator_the_groups_and_the_parked_say_is_read_as_it_was(root: Path) -> None:
    settings = settings_of(root)
    assert of_positions(settings) == FACTS["positions"]
    assert [(each.pchannel, each.code) for each in read_parked(settings.parked_path)] == [
        ("dml_2", "UNSUPPORTED_VERSION")
    ]
    with served(root) as client:
        assert of_catalog(client) == FACTS["catalog"]


def test_its_backup_verifies_and_restores_to_a_deployment_that_goes_on(untouched: Path, restored: Path) -> None:
    folder, _ = find_backup(untouched / "backups")
    assert verify_backup(folder).ok
    settings = settings_of(restored)
    last = next(read for read in READS if read["what"] == "the log in its third")
    assert rows(settings, last["collection"], at=last["at"]) == last["rows"]
    with served(restored) as client:
        assert of_catalog(client) == FACTS["backup"]["catalog"]
        people = client.definition("people")
        client.new_producer(producer_id=WRITER).insert(
            people, people_rows(1001, age=pa.nulls(1, pa.int32())), partition="eu"
        )
        up_to_date(client)
        holds(client)
        assert 1001 in ids(client)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_real_jobs_go_on_with_it(restored: Path) -> None:
    settings = settings_of(restored)
    with served(restored) as client:
        client.catalog.alter("people", [AddField(FieldSpec("email", "string", True))])
        people = client.definition("people")
        more = {"age": pa.nulls(1, pa.int32()), "email": ["a@b"]}
        client.new_producer(producer_id=WRITER).insert(people, people_rows(1001, **more), partition="eu")
        driver = [sys.executable, str(ROOT / "jobs" / "streaming_node.py"), "--available-now", "--with-flusher"]
        environment = {**os.environ, **settings.environment(), "PYTHONPATH": str(ROOT / "include")}
        subprocess.run(driver, env=environment, check=True, timeout=300, cwd=restored)
        table = WalTable.open(Path(settings.wal_uri))
        assert all(table.last_tick(name) > FACTS["wal"][name]["flushed_tick"] for name in ("dml_0", "dml_1"))
        up_to_date(client)  # the flusher's look may have come before the node's last commit
        holds(client)
        assert 1001 in ids(client)


@pytest.mark.slow
def test_the_spool_is_sent_and_everything_goes_on(root: Path) -> None:
    known = {row["id"] for row in READS[-1]["rows"]}
    with served(root) as client:
        spooled = client.new_producer(producer_id=WRITER + 1, spool=root / "spool")
        assert spooled.spool is not None
        assert spooled.spool.wait_empty(timeout=PATIENCE)
        assert spooled.spool.error is None
        up_to_date(client)
        known |= {501, 502, 601, 602, 603, 604}
        assert ids(client) == known, "what was in the log alone, and in the spool"
        holds(client)
        assert repeated(client).duplicate, "the chain knows what it has accepted before"

        people = client.definition("people")
        writer = client.new_producer(producer_id=WRITER)
        writer.insert(people, people_rows(1001, 1002, age=pa.array([1, 2], pa.int32())), partition="eu")
        writer.delete(people, [1, 306, 601])
        client.catalog.alter("people", [AddField(FieldSpec("email", "string", True))])
        client.catalog.create_partition("people", "africa")
        client.catalog.create_collection("later", people.schemas[0], vchannels=2)
        people = client.definition("people")
        (key,) = keys_of(people, 0, (1100, 1200))[:1]
        with writer.transaction(people) as txn:
            txn.insert(people_rows(key, age=pa.nulls(1, pa.int32()), email=["a@b"]), partition="africa")
        client.catalog.drop_partition("people", "us")
        up_to_date(client)
        kept = {row["id"] for row in READS[-1]["rows"] if row["city"] not in ("Lima", "Rome", "in the WAL")}
        found = ids(client)
        assert {1002, 1001, key} <= found <= (kept | {1002, 1001, key}) - {1, 306}
        assert checkpoint(client.settings, client.log, CheckpointParams(), Progress()).ok
        holds(client)
        with client.consumer("people", group=GROUP, until=txn.commit_tick) as consumer:
            for delivery in consumer:
                consumer.acknowledge(delivery)
        # Those of PChannels stay as the earlier build left them.
        positions = of_positions(client.settings)[GROUP]
        lanes = client.definition("people").vchannels
        assert min(positions[name] for name in lanes) >= (txn.commit_tick or 0)
    with served(root) as client:
        assert ids(client) == found, "and opens again"
        # The entry that parked it says version 2, which the build that wrote it did not know. This one does, and
        # rejects it, because it has no stamp.
        unpark(client.settings.parked_path, "dml_2")
        ingest_to_end(client.settings, client.log)
        refused = WalQuery("rejection", pchannel="dml_2", reason="MALFORMED")
        [rejected] = Observer(client.settings).rejections(refused).items
        assert "stamp" in (rejected.detail or "")


def test_streams_and_their_groups_go_on(root: Path) -> None:
    with streams(root) as service:
        assert of_streams(service) == FACTS["streams"]
        name = min(FACTS["streams"]["channels"])
        append_to_stream(service, name, ["60#12", "t70"])
        assert of_streams(service)["left"]["plain"] == [*FACTS["streams"]["left"]["plain"], 12]


def test_a_trimmed_wal_with_its_base_goes_on(root: Path) -> None:
    known = FACTS["trimmed"]
    things = Things(root / "trimmed", before=SimpleNamespace(next=known["next"]))  # type: ignore[arg-type]
    try:
        assert of_wal(things.settings) == known["wal"]
        assert rows(things.settings, 1) == known["rows"]
        things.fill(2, size=50)
        assert checkpoint(things.settings, things.log, CheckpointParams(), Progress()).ok
        assert len(rows(things.settings, 1)) > len(known["rows"])
        found = [*check_channels(things.settings, log=things.log), *check_collections(things.settings)]
        assert all(each["holds"] for each in found), found
    finally:
        things.close()
