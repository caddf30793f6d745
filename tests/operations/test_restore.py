"""A collection at an earlier tick becomes a new one, whole and once, whatever dies in between."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession

from millrace.base.errors import CollectionExists, CollectionNotFound, InvalidArgument, MillraceError
from millrace.base.failpoint import VARIABLE
from millrace.base.settings import Settings
from millrace.client.database import Database, connect
from millrace.message.schema import CollectionSchema, FieldSpec
from millrace.message.schema_changes import AddField
from millrace.node.flush.definition import flush_to_end
from millrace.node.ingest.definition import ingest_to_end
from millrace.operations.restore.declaration import RestoreParams
from millrace.operations.restore.run import CollectionRestoreReport, run
from millrace.runtime.progress import Progress
from millrace.tables.read.arrow import read_arrow
from millrace.tables.wal.reader import WalSnapshot

SCHEMA = CollectionSchema((FieldSpec("id", "int64", False), FieldSpec("name", "string", True)), "id")
ROOT = Path(__file__).resolve().parents[2]
Rows = list[tuple[int, str | None]]


@pytest.fixture
def client(settings: Settings) -> Iterator[Database]:
    with connect(settings=settings) as made:
        made.catalog.ensure_pchannels(2)
        made.catalog.create_collection("c", SCHEMA, vchannels=2, partitions=["even", "odd"])
        yield made
        made.connection.service.shutdown()


def write(client: Database, *keys: int) -> None:
    for name, chosen in (("even", [k for k in keys if k % 2 == 0]), ("odd", [k for k in keys if k % 2])):
        if chosen:
            names = [f"n{key}" if key % 3 else None for key in chosen]
            rows = pa.table({"id": chosen, "name": names})
            client.new_producer().insert(client.definition("c"), rows, partition=name)


def settle(client: Database) -> int:
    """Everything flushed; a tick behind all of it."""
    ingest_to_end(client.settings, client.log)
    flush_to_end(client.settings)
    return max(client.connection.tick(name) for name in client.log.names())


def content(client: Database, name: str, at: int | None = None) -> Rows:
    return sorted((row["id"], row["name"]) for row in client.collection(name).read(at=at).to_pylist())


Engine = Callable[[Settings, RestoreParams], CollectionRestoreReport]


def with_arrow(settings: Settings, params: RestoreParams) -> CollectionRestoreReport:
    """A few rows without a JVM, as they are restored."""

    def none_needed() -> AbstractContextManager[SparkSession]:
        raise AssertionError("a JVM for a few rows")

    return run(settings, params, Progress(), session_factory=none_needed)


@pytest.fixture(params=["arrow", pytest.param("spark", marks=pytest.mark.spark)])
def engine(request: pytest.FixtureRequest) -> Engine:
    """Without a JVM; and the same with Spark, as if the rows were many. For tests in which rows are brought over."""

    def with_spark(settings: Settings, params: RestoreParams) -> CollectionRestoreReport:
        spark: SparkSession = request.getfixturevalue("spark")
        return run(settings, params, Progress(), session_factory=lambda: nullcontext(spark), max_bytes_without_spark=-1)

    return with_arrow if request.param == "arrow" else with_spark


def restore(client: Database, engine: Engine, **params: object) -> CollectionRestoreReport:
    return engine(client.settings, RestoreParams.parse({"collection": "c", "into": "restored", **params}))


@pytest.mark.quick_cases(1)
def test_the_rows_of_a_tick_come_back_with_their_partitions_and_the_source_stays(
    client: Database, engine: Engine
) -> None:
    write(client, *range(40))
    tick = settle(client)
    before = content(client, "c", tick)
    client.new_producer().delete(client.definition("c"), pa.array(range(20)))
    write(client, *range(100, 110))
    now = content(client, "c", settle(client))
    planned = restore(client, engine, at=str(tick), dry_run=True)
    assert (planned.rows, planned.into_id) == (len(before), None)
    assert [each.name for each in client.catalog.collections()] == ["c"]
    report = restore(client, engine, at=str(tick), rows_per_slice=7)
    assert (report.rows, report.tick) == (len(before), tick)
    settle(client)
    assert content(client, "restored") == before
    made = client.definition("restored")
    assert sorted(made.partitions) == ["even", "odd"]
    rows = read_arrow(client.settings, made.id, with_ticks=True).to_pylist()
    assert {(row["id"] % 2, row["_partition"]) for row in rows} == {(0, "even"), (1, "odd")}
    assert content(client, "c") == now
    with pytest.raises(CollectionExists, match="another name"):
        restore(client, engine, at=str(tick))


@pytest.mark.slow
def test_what_cannot_be_restored_is_said_and_nothing_is_made(client: Database) -> None:
    write(client, 1)
    settle(client)
    with pytest.raises(CollectionNotFound):
        restore(client, with_arrow, collection="nobody")
    with pytest.raises(MillraceError):
        restore(client, with_arrow, at="1")
    in_place = {"into": "", "in_place": True}
    dropped = client.catalog.create_collection("dropped", SCHEMA)
    tick = settle(client)
    client.catalog.drop_collection("dropped")
    with pytest.raises(CollectionNotFound, match="new collection"):
        restore(client, with_arrow, collection=str(dropped.id), at=str(tick), **in_place)
    for wrong in (
        {"at": "yesterday"},
        {"into": "a b"},
        {"speed": 1},
        in_place,
        {"into": ""},
        {"in_place": True, "at": "9"},
    ):
        with pytest.raises(InvalidArgument):
            restore(client, with_arrow, **wrong)
    assert [each.name for each in client.catalog.collections()] == ["c"]


def killed(client: Database, params: str, place: str) -> None:
    """Run the job in a process that dies at `place`."""
    environment = {
        **os.environ,
        **client.settings.environment(),
        VARIABLE: place,
        "PYTHONPATH": str(ROOT / "include"),
    }
    command = [sys.executable, "-m", "millrace.operations", "restore", "--params", params]
    log = client.settings.data_dir / "killed.log"
    with log.open("w") as output:  # no pipe: the driver's JVM would hold it open for a moment
        ended = subprocess.run(command, env=environment, timeout=110, stdout=output, stderr=output, check=False)
    assert ended.returncode == -signal.SIGKILL, log.read_text()


@pytest.mark.slow
@pytest.mark.parametrize("place", ["restore.recorded", "restore.inserted", "restore.inserted@3"])
def test_a_restore_that_is_killed_is_made_anew_by_the_next(client: Database, place: str) -> None:
    write(client, *range(40))
    tick = settle(client)
    before = content(client, "c", tick)
    params = f'{{"collection": "c", "into": "restored", "at": "{tick}", "rows_per_slice": 10}}'
    killed(client, params, place)
    report = restore(client, with_arrow, at=str(tick), rows_per_slice=10)
    assert report.rows == len(before)
    settle(client)
    assert content(client, "restored") == before


@pytest.mark.slow
def test_the_rows_of_a_tick_take_the_place_of_all_that_is_there(client: Database, engine: Engine) -> None:
    write(client, *range(40))
    client.new_producer().delete(client.definition("c"), pa.array(range(5)))
    tick = settle(client)
    before = content(client, "c", tick)
    client.new_producer().delete(client.definition("c"), pa.array(range(20)))
    write(client, *range(100, 130))
    client.catalog.alter("c", [AddField(FieldSpec("later", "int64", True))])
    client.catalog.drop_partition("c", "odd")
    spoilt_tick = settle(client)
    spoilt = content(client, "c", spoilt_tick)
    params = {"into": "", "in_place": True, "at": str(tick), "rows_per_slice": 7, "run_id": "r1"}
    planned = restore(client, engine, **params, dry_run=True)
    assert (planned.rows, planned.ticks) == (len(before), {})
    assert content(client, "c") == spoilt
    report = restore(client, engine, **params)
    assert (report.rows, report.tick, report.into_id) == (len(before), tick, client.definition("c").id)
    assert set(report.ticks) == set(client.definition("c").vchannels)
    settle(client)
    assert content(client, "c") == before
    assert content(client, "c", spoilt_tick) == spoilt, "what was replaced can still be read"
    rows = read_arrow(client.settings, client.definition("c").id, with_ticks=True).to_pylist()
    assert {(row["id"] % 2, row["_partition"]) for row in rows} == {(0, "even"), (1, "odd")}
    write(client, 200)
    assert restore(client, engine, **params).ticks == report.ticks
    settle(client)
    assert len(content(client, "c")) == len(before) + 1, "a run that is done is not done again"
    assert restore(client, engine, **{**params, "run_id": "r2"}).ticks != report.ticks
    settle(client)
    assert content(client, "c") == before


@pytest.mark.quick_cases(1)
def test_a_moment_without_rows_leaves_none(client: Database, engine: Engine) -> None:
    tick = settle(client)
    write(client, *range(10))
    settle(client)
    report = restore(client, engine, into="", in_place=True, at=str(tick))
    assert (report.rows, len(report.ticks)) == (0, 2)
    settle(client)
    assert content(client, "c") == []


@pytest.mark.slow
@pytest.mark.parametrize("place", ["restore.recorded", "import.appended"])
def test_a_restore_in_place_that_is_killed_goes_on_with_the_same_messages(client: Database, place: str) -> None:
    write(client, *range(40))
    tick = settle(client)
    before = content(client, "c", tick)
    write(client, *range(50, 60))
    params = f'{{"collection": "c", "in_place": true, "at": "{tick}"}}'
    killed(client, params, place)
    report = restore(client, with_arrow, into="", in_place=True, at=str(tick))
    assert report.rows == len(before)
    settle(client)
    assert content(client, "c") == before
    snapshot = WalSnapshot.open(Path(client.settings.wal_uri))
    assert snapshot is not None
    imports = [rows.num_rows for name in client.log.names() for rows in snapshot.messages(name, types=["IMPORT"])]
    assert sum(imports) == 2, "one for each VChannel"
