"""Consumers and change streams miss no row of a collection.

Written, imported or restored, what was replaced and dropped too.
"""

from __future__ import annotations

import gc
import json
import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from threading import current_thread
from typing import Any

import pyarrow as pa
import pytest

from millrace.base.errors import InvalidArgument, StagedFileDamaged
from millrace.catalog.collection import CollectionInfo
from millrace.client.consume.delivery import CHANGES, Change
from millrace.client.consume.parallel_consumer import ParallelConsumer, Work
from millrace.client.database import Database
from millrace.client.produce.rows import conform, split_rows
from millrace.node.ingest.definition import ingest_to_end
from millrace.operations.backfill.importer import append_imports
from millrace.operations.backfill.staging_folder import StagingFolder, StagingManifest
from millrace.runtime.progress import Progress
from millrace.tables.collections import staged_files
from millrace.wal.visible.changes import ChangeBatch
from tests.client.conftest import ITEMS, item_rows, own_name
from tests.tables.collections.test_changes import fold


@pytest.fixture
def items(shop: Database, request: pytest.FixtureRequest) -> CollectionInfo:
    """A collection of three VChannels on two PChannels, and of two partitions."""
    return shop.catalog.create_collection(
        f"changes_{own_name(request)}", ITEMS, vchannels=3, partitions=["_default", "other"]
    )


def load(
    shop: Database, items: CollectionInfo, rows: pa.Table, *, partition: str = "_default", replace: bool = False
) -> StagingManifest:
    """What a file load and a restore in place do: stage, and one Import a VChannel."""
    folder = StagingFolder(shop.settings, f"load-{items.id}-{rows.num_rows}-{replace}", items, slice_bytes=None)
    for vchannel, partition_id, batch in split_rows(conform(rows, items), items, partition, None):
        folder.add(vchannel, partition_id, batch)
    manifest = folder.publish({})
    append_imports(
        shop, manifest, replace=replace, all_vchannels=items.vchannels if replace else (), progress=Progress()
    )
    return manifest


def now(shop: Database) -> int:
    return max(shop.connection.tick(name) for name in ("dml_0", "dml_1"))


def lived(shop: Database, items: CollectionInfo) -> int:
    """A collection's life, half of it in the table and half in the tail; the tick at its end."""
    producer = shop.new_producer()
    producer.insert(items, item_rows(*range(20)), partition="_default")
    producer.insert(items, item_rows(*range(20, 30)), partition="other")
    load(shop, items, item_rows(*range(100, 140), name="loaded"))
    producer.delete(items, [3, 101])
    ingest_to_end(shop.settings, shop.log)
    load(shop, items, item_rows(*range(200, 260), name="restored"), partition="other", replace=True)
    producer.upsert(items, item_rows(200, 300, name="upserted"), partition="_default")
    shop.catalog.create_partition(items.name, "short")
    items = shop.definition(items.name)
    producer.insert(items, item_rows(400), partition="short")
    shop.catalog.drop_partition(items.name, "short")
    return now(shop)


def kept(batches: Iterable[ChangeBatch], tick: int) -> dict[int, str]:
    rows = [row for batch in batches for row in batch.rows.to_pylist()]
    found = fold([{**row, "body": row["name"], "extra": None} for row in rows], tick)
    assert set(found.values()) <= {1}, "a key is there twice"
    return {key: name for key, name, _ in found}


def test_a_stream_folds_to_what_a_read_gives(
    shop: Database, reader: Database, items: CollectionInfo, stored: Callable[..., dict[int, str]]
) -> None:
    end = lived(shop, items)
    with reader.collection(items.name).changes(until=end) as stream:
        batches = list(stream)
    assert stream.ended
    found = kept(batches, end)
    assert found == stored(items, at=end)
    assert Counter(found.values()) == {"restored": 59, "upserted": 2}
    kinds = Counter(kind for batch in batches for kind in batch.rows["_change"].to_pylist())
    assert kinds == {"insert": 20 + 10 + 40 + 60 + 2 + 1, "delete": 2 + 2, "retract": 3 + 3}


@pytest.mark.slow
def test_a_stream_goes_on_from_positions_that_were_kept_amid_an_imports_rows(
    shop: Database, items: CollectionInfo, monkeypatch: pytest.MonkeyPatch
) -> None:
    end = lived(shop, items)
    monkeypatch.setattr(staged_files, "BATCH_BYTES", 1)
    with shop.collection(items).changes(until=end) as stream:
        whole = [row for batch in stream for row in batch.rows.to_pylist()]
    found: list[dict[str, Any]] = []
    positions: dict[str, list[int]] = {}
    rounds = amid = 0
    while True:
        with shop.collection(items).changes(after=positions, until=end) as stream:
            for batch, _ in zip(stream, range(9), strict=False):
                found += batch.rows.to_pylist()
                kept_at = stream.positions
            positions = json.loads(json.dumps(kept_at))
            amid += any(rows for _, rows in positions.values())
            rounds += 1
            if stream.ended:
                break
    assert rounds > 5
    assert amid > 3, "stops in the midst of an import were among them"
    order = lambda row: (row["_vchannel"], row["_time_tick"], row["_write_tick"])  # noqa: E731
    assert sorted(found, key=order) == sorted(whole, key=order), "each change once, in the order of its VChannel"


def test_a_client_holds_what_its_user_has_closed_no_longer_than_until_the_next(
    shop: Database, items: CollectionInfo
) -> None:
    made: list[weakref.ref[Any]] = []
    for _ in range(3):
        with (
            shop.collection(items).changes() as changes,
            shop.consumer(items) as consumer,
            shop.new_producer() as producer,
        ):
            for _ in range(2):
                with producer.batch() as batch:
                    made.append(weakref.ref(batch))
            made += map(weakref.ref, (changes, consumer, producer))
    del changes, consumer, producer, batch
    gc.collect()
    assert [each() is not None for each in made] == [False] * 11 + [True] * 4


def test_positions_amid_an_import_count_here_and_elsewhere(
    shop: Database, reader: Database, items: CollectionInfo
) -> None:
    load(shop, items, item_rows(*range(30), name="x" * 1_000_000))
    end = now(shop)
    for first, then in ((reader, shop), (shop, reader)):
        found: list[int] = []
        amid = 0
        positions: dict[str, list[int]] = {}
        ended = False
        while not ended:  # each takes one batch, then the other goes on behind it
            with first.collection(items).changes(after=positions, until=end) as stream:
                batch = stream.poll(timeout=10.0)
                found += [] if batch is None else batch.rows["id"].to_pylist()
                positions, ended = json.loads(json.dumps(stream.positions)), stream.ended
            amid += any(rows for _, rows in positions.values())
            first, then = then, first
        assert sorted(found) == list(range(30)), "each once"
        assert amid or reader is shop, "a server sends an import in pieces of 4 MiB"


def test_a_stream_begins_behind_a_snapshot_and_follows_what_comes(
    shop: Database, reader: Database, items: CollectionInfo, stored: Callable[..., dict[int, str]]
) -> None:
    begin = lived(shop, items)
    with reader.collection(items.name).changes(after=begin) as stream:
        load(shop, items, item_rows(900, 901, name="late"))
        found: list[int] = []
        while len(found) < 2:
            batch = stream.poll(timeout=10.0)
            assert batch is not None
            found += batch.rows["id"].to_pylist()
        assert sorted(found) == [900, 901]
        assert stream.poll(timeout=0.1) is None


def test_what_is_no_position_is_refused(shop: Database, reader: Database, items: CollectionInfo) -> None:
    for wrong in ({"dml_9": [1]}, {"dml_0": [-1]}, {"dml_0": ["x"]}, {"dml_0": []}):
        with pytest.raises(InvalidArgument, match="position"):
            reader.collection(items).changes(after=wrong)  # type: ignore[arg-type]


def applied(changes: Iterable[Change], copy: dict[int, tuple[str, int, str]]) -> None:
    """A consumer that keeps a copy: by key its VChannel, partition and name."""
    for change in changes:
        if change.kind == "insert":
            for row in change.rows.to_pylist():
                copy[row["id"]] = (change.vchannel, change.partition_id, row["name"])
            continue
        gone = set(change.rows["id"].to_pylist()) if change.kind == "delete" else set(copy)
        for key in gone & copy.keys():
            if copy[key][0] == change.vchannel and change.partition_id in (0, copy[key][1]):
                del copy[key]


def test_a_consumers_changes_make_a_copy_of_the_collection(
    shop: Database, reader: Database, items: CollectionInfo, stored: Callable[..., dict[int, str]]
) -> None:
    end = lived(shop, items)
    copy: dict[int, tuple[str, int, str]] = {}
    with reader.consumer(items.name, filters=[CHANGES], until=end) as consumer:
        for delivery in consumer:
            applied(delivery.changes(), copy)
    assert {key: name for key, (_, _, name) in copy.items()} == stored(items, at=end)


@pytest.mark.slow
@pytest.mark.parametrize("by", ["vchannel", "key"])
def test_a_pool_of_workers_applies_imports_piece_by_piece_and_retractions_to_every_key(
    shop: Database,
    items: CollectionInfo,
    stored: Callable[..., dict[int, str]],
    by: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    end = lived(shop, items)
    monkeypatch.setattr(staged_files, "BATCH_BYTES", 200)
    copy: dict[int, tuple[str, int, str]] = {}
    sizes: list[int] = []

    def handle(work: Work) -> None:
        own = copies.setdefault(current_thread().name, {})
        sizes.append(sum(change.rows.num_rows for change in work.changes if change.kind == "insert"))
        applied(work.changes, own)

    copies: dict[str, dict[int, tuple[str, int, str]]] = {}
    with shop.consumer(items.name, group=f"pool {by}", filters=[CHANGES], until=end) as consumer:
        ParallelConsumer(consumer, handle, workers=3, by=by, max_in_flight=4).run()  # type: ignore[arg-type]
        assert min(consumer.positions.values()) >= end, "everything is done"
    for own in copies.values():
        assert not copy.keys() & own.keys()
        copy |= own
    assert {key: name for key, (_, _, name) in copy.items()} == stored(items, at=end)
    assert max(sizes) <= 20, "the 60 rows of an import came in pieces"


def test_a_missing_staged_file_stops_a_stream_and_a_consumer_until_it_is_back(
    shop: Database, reader: Database, items: CollectionInfo
) -> None:
    manifest = load(shop, items, item_rows(*range(5)))
    path: Path = shop.settings.staged_path / manifest.slices[0].files[0]["path"]
    data = path.read_bytes()
    path.unlink()
    end = now(shop)
    with reader.collection(items).changes(until=end) as stream:
        found: list[ChangeBatch] = []
        with pytest.raises(StagedFileDamaged, match="put the file back"):
            found.extend(stream)
        with reader.consumer(items, filters=[CHANGES], until=end) as consumer:
            deliveries = [delivery for delivery in consumer if delivery.vchannel == manifest.slices[0].vchannel]
        with pytest.raises(StagedFileDamaged):
            list(deliveries[0].changes())
        path.write_bytes(data)
        found.extend(stream)
    assert sorted(key for batch in found for key in batch.rows["id"].to_pylist()) == list(range(5))
