"""A restore in place that is cut off anywhere and run again has one effect.

Without Spark, on rows as it is given them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from millrace.base.settings import Settings
from millrace.catalog.collection import CollectionInfo
from millrace.client.database import Database, connect
from millrace.message.schema import CollectionSchema, FieldSpec
from millrace.node.flush.definition import flush_to_end
from millrace.node.ingest.definition import ingest_to_end
from millrace.operations.backfill import importer
from millrace.operations.restore import in_place
from millrace.operations.restore.declaration import RestoreParams
from millrace.operations.verification import verify_collections
from millrace.runtime.progress import Progress
from millrace.tables.read.arrow import read_arrow
from millrace.tables.read.plan import plan_read
from millrace.tables.wal.reader import WalSnapshot

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
