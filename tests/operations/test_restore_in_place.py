"""A restore in place that is cut off anywhere and run again has one effect.

Without Spark, on rows as it is given them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from millrace.base.errors import TickTooOld
from millrace.base.settings import Settings
from millrace.catalog.collection import CollectionInfo
from millrace.client.database import Database, connect
from millrace.message.schema import CollectionSchema, FieldSpec
from millrace.node.flush.definition import flush_to_end
from millrace.node.ingest.definition import ingest_to_end
from millrace.node.publish.definition import publish
from millrace.operations.backfill import importer
from millrace.operations.compaction.declaration import CompactionParams
from millrace.operations.compaction.run import compact
from millrace.operations.restore import in_place
from millrace.operations.restore.declaration import RestoreParams
from millrace.operations.verification import verify_collections
from millrace.runtime.progress import Progress
from millrace.storage.local import local_path
from millrace.storage.published import PublishedTable
from millrace.storage.store import store_at
from millrace.storage.table import table_at
from millrace.tables.collections.data_tables import earliest_readable_tick, published_uri, rows_uri
from millrace.tables.key_index.index import KeyIndex
from millrace.tables.read.arrow import read_arrow
from millrace.tables.read.plan import plan_read
from millrace.tables.wal.reader import WalSnapshot
from tests.failpoints import at_failpoints
from tests.node.publish.published_maker import rows_in
from tests.storage.published_world import ENGINES

KILLS = ("publish.planned", "publish.vectors", "publish.checked", "publish.committed", "publish.indexed")
SCHEMA = CollectionSchema((FieldSpec("id", "int64", False), FieldSpec("name", "string", True)), "id")


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Database]:
    with connect(settings=Settings(data_dir=tmp_path_factory.mktemp("in-place") / "data")) as made:
        made.catalog.ensure_pchannels(2)
        yield made
        made.connection.service.shutdown()


@pytest.fixture
def things(client: Database) -> CollectionInfo:
    """Three VChannels; the keys 1 to 3 leave one of them without rows, or not, as it falls out."""
    name = f"things_{len(client.catalog.collections())}"
    return client.catalog.create_collection(name, SCHEMA, vchannels=3, partitions=["even", "odd"])


def write(client: Database, things: CollectionInfo, *keys: int) -> None:
    for name, odd in (("even", 0), ("odd", 1)):
        chosen = [key for key in keys if key % 2 == odd]
        if chosen:
            client.new_producer().insert(things, pa.table({"id": chosen, "name": [name] * len(chosen)}), partition=name)


def ticks(client: Database) -> dict[str, int]:
    ingest_to_end(client.settings, client.log)
    return {name: client.connection.tick(name) for name in client.log.names()}


def content(client: Database, things: CollectionInfo, *, at: int | None = None) -> list[tuple[int, str]]:
    confirmed = ticks(client)
    ingest_to_end(client.settings, client.log)
    rows = read_arrow(client.settings, things.id, at=at, confirmed=confirmed, with_ticks=True).to_pylist()
    return sorted((row["id"], row["_partition"]) for row in rows)


def once(client: Database, things: CollectionInfo, tick: int, run_id: str = "run") -> in_place.ReplaceResult:
    """What the job does, but for reading with Spark and for comparing."""
    params = RestoreParams.parse({"collection": things.name, "in_place": True, "at": str(tick), "run_id": run_id})
    source = client.definition(things.name)
    done = in_place.finished_restore(client, source, params)
    if done is not None:
        return done
    plan = plan_read(client.settings, source.id, at=tick, confirmed=ticks(client))
    rows = read_arrow(client.settings, source.id, at=tick, with_ticks=True, confirmed=ticks(client))
    parts = [rows.slice(start, 4) for start in range(0, rows.num_rows, 4)]
    replaced = in_place.replace_rows(client, source, params, plan, parts, Progress())
    in_place.record_done(client, source, replaced)
    return replaced


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("place", ["restore.recorded", "import.noted", "import.appended"])
def test_a_restore_in_place_that_is_cut_off_anywhere_has_one_effect(
    client: Database, things: CollectionInfo, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(client, things, *range(1, 4))
    wanted = content(client, things)
    tick = max(ticks(client).values())
    client.new_producer().delete(things, pa.array([1, 2]))
    write(client, things, *range(10, 30))
    flush_to_end(client.settings)
    cuts, replaced = 0, None
    while replaced is None:
        with monkeypatch.context() as patch:
            for module in (importer, in_place):
                patch.setattr(module, "hit", dying_at(place, cuts))
            try:
                replaced = once(client, things, tick)
            except Killed:
                cuts += 1
    assert cuts == {"restore.recorded": 1, "import.noted": 2, "import.appended": 3}[place]
    assert set(replaced.ticks) == set(things.vchannels)
    assert content(client, things) == wanted
    write(client, things, 100)
    assert once(client, things, tick) == replaced
    assert len(content(client, things)) == len(wanted) + 1
    assert once(client, things, tick, "another").ticks != replaced.ticks
    assert content(client, things) == wanted
    snapshot = WalSnapshot.open(Path(client.settings.wal_uri))
    assert snapshot is not None
    mine = [
        rows.filter(pc.equal(rows["collection_id"], things.id)).num_rows
        for name in client.log.names()
        for rows in snapshot.messages(name, types=["IMPORT"])
    ]
    assert sum(mine) == 2 * 3, "one for each VChannel and run"
    flush_to_end(client.settings)
    report = verify_collections(client.settings)[things.id]
    assert report.ok, report


def publish_killed(client: Database, things: CollectionInfo, place: str) -> None:
    """Flush what is in the log, and publish it; a first publisher dies at `place`, if it comes there."""

    def die(name: str) -> None:
        if name == place:
            raise Killed

    ticks(client)
    flush_to_end(client.settings)
    with suppress(Killed), at_failpoints(die):
        publish(client.settings, things.id)
    assert publish(client.settings, things.id)


def check_published(client: Database, things: CollectionInfo) -> PublishedTable:
    """Compare each version that is still there, as each engine reads it, with a read at its tick."""
    store, confirmed = store_at(published_uri(client.settings, things.id)), ticks(client)
    table = PublishedTable.open(store)
    assert table is not None
    base = earliest_readable_tick(table_at(rows_uri(client.settings, things.id)))
    for version in range(table.version + 1):
        then = PublishedTable.open(store, version=version)
        if then is None or then.tick < max(1, base):
            continue
        wanted = read_arrow(client.settings, things.id, at=then.tick, confirmed=confirmed, use_published=False)
        based = read_arrow(client.settings, things.id, at=then.tick, confirmed=confirmed)
        assert rows_in(based) == rows_in(wanted)
        assert then.row_count == wanted.num_rows
        for name, engine in ENGINES.items():
            assert rows_in(engine(local_path(then.uri), version=version)) == rows_in(wanted), (name, version)
    return table


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("place", ["import.appended", "restore.recorded", "import.noted"])
def test_a_published_collection_that_is_restored_in_place_is_a_read_at_every_version(
    client: Database, things: CollectionInfo, place: str
) -> None:
    """Published between any two of its Imports, by publishers that are killed. Older versions stay as they were."""
    settings = client.settings
    KeyIndex.open(settings.key_index_path(things.id)).request()
    write(client, things, *range(20))
    client.new_producer().delete(things, pa.array([1, 2]))
    publish_killed(client, things, "publish.indexed")
    tick = max(ticks(client).values())
    wanted = content(client, things)
    client.new_producer().delete(things, pa.array(range(5, 15)))
    write(client, things, *range(100, 120))
    publish_killed(client, things, "publish.checked")
    before = check_published(client, things)
    cuts, replaced = 0, None
    while replaced is None:
        try:
            with at_failpoints(dying_at(place, cuts)):
                replaced = once(client, things, tick)
        except Killed:
            cuts += 1
        publish_killed(client, things, KILLS[cuts % len(KILLS)])
    assert cuts
    table = check_published(client, things)
    assert table.version > before.version
    assert content(client, things) == wanted
    client.new_producer().delete(things, pa.array([3]))
    publish_killed(client, things, "publish.committed")
    table = check_published(client, things)
    live = {file.path: file.rows for file in table_at(rows_uri(settings, things.id)).describe_files()}
    assert KeyIndex.open(settings.key_index_path(things.id)).covered(live) == set(live)
    assert set(client.collection(things.name).get([0, 3, 7, 110])["id"].to_pylist()) == {0, 7}
    compact(settings, CompactionParams(fold="always", keep_history_hours=0, min_files=2), Progress())
    publish_killed(client, things, "publish.planned")
    assert check_published(client, things).row_count == len(wanted) - 1
    with pytest.raises(TickTooOld):
        read_arrow(settings, things.id, at=tick, confirmed=ticks(client))


@pytest.mark.slow
def test_what_replaces_is_restored_and_replaces_then(client: Database) -> None:
    latest = client.catalog.create_collection("latest", replace(SCHEMA, on_duplicate="replace"), vchannels=3)
    for names in ("first", "second"):
        client.new_producer().insert(latest, pa.table({"id": [1, 2, 3], "name": [names] * 3}))
    wanted = content(client, latest)
    assert len(wanted) == 3
    tick = max(ticks(client).values())
    client.new_producer().delete(latest, pa.array([1, 2]))
    once(client, latest, tick)
    assert content(client, latest) == wanted
    client.new_producer().insert(latest, pa.table({"id": [2], "name": ["third"]}))
    assert content(client, latest) == wanted


def dying_at(place: str, visits: int) -> Callable[[str], None]:
    left = [visits]

    def come_by(name: str) -> None:
        if name == place:
            left[0] -= 1
            if left[0] < 0:
                raise Killed

    return come_by


class Killed(BaseException):
    """What a kill is here: nothing behind it runs."""
