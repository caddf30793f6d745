"""Imports: rows of staged files are a collection's rows, the same wherever they are read.

A file that is not what was said stops one PChannel.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from millrace.base.errors import StagedFileDamaged, UnsupportedVersion
from millrace.base.settings import Settings
from millrace.message.bodies import ImportFile
from millrace.node.flush.definition import flush_to_end
from millrace.operations.verification import verify_collections
from millrace.storage.table import open_table
from millrace.tables.collections import staged_files
from millrace.tables.collections.data_tables import rows_uri
from millrace.tables.collections.flush_tables import read_checkpoints, read_segments
from millrace.tables.read.arrow import read_arrow
from millrace.wal.visible.catalog import WalCatalog
from tests.tables.read.test_at_tick import made, tick_everywhere
from tests.tables.staged_files import stage
from tests.tables.wal_maker import SCHEMA, Collection

PLACING = ["id", "body", "_partition", "_vchannel", "_segment_id", "_time_tick", "_write_tick"]


def rows_of(keys: list[int], word: str) -> dict[str, list[object]]:
    return {"id": list(keys), "body": [f"{word} {key}" for key in keys]}


def insert(collection: Collection, vchannel: str, keys: list[int], word: str) -> None:
    collection.append(vchannel, collection.insert(rows_of(keys, word), vchannel=vchannel))


def load(collection: Collection, vchannel: str, files: list[ImportFile], *, replace: bool = False) -> int:
    """Append an Import, have it decided; its tick."""
    collection.append(vchannel, collection.imported(files, vchannel=vchannel, replace=replace))
    maker = collection.maker
    maker.commit()
    assert not maker.rejected
    [*_, row] = [row for row in maker.accepted[collection.homes[vchannel]] if row["type"] == "IMPORT"]
    return int(row["time_tick"])


def contents(settings: Settings, at: int | None = None) -> list[dict[str, Any]]:
    rows = read_arrow(settings, 1, at=at, with_ticks=True).select(PLACING).to_pylist()
    return sorted(rows, key=lambda row: (row["id"], row["_time_tick"], row["body"]))


def bodies(settings: Settings, at: int | None = None) -> list[str]:
    return [row["body"] for row in contents(settings, at)]


def test_imported_rows_are_read_alike_before_and_after_the_flush(settings: Settings) -> None:
    maker, collection = made(settings)
    vchannel = collection.vchannels[0]
    first, second, *others = collection.keys_of(vchannel, 9)
    insert(collection, vchannel, [first], "inserted")
    files = [
        collection.stage("a/0.parquet", rows_of(others[:4], "red")),
        collection.stage("a/1.parquet", rows_of(others[4:], "blue"), partition=2),
        collection.stage("a/2.parquet", rows_of([second], "red")),
    ]
    tick = load(collection, vchannel, files)
    tick_everywhere(maker)
    before = contents(settings)
    assert len(before) == 9
    imported = [row for row in before if row["body"].split()[0] in ("red", "blue")]
    assert {(row["_time_tick"], row["_write_tick"]) for row in imported} == {(tick, tick)}
    assert all(row["_partition"] == row["body"].split()[0] for row in imported)
    assert bodies(settings, tick - 1) == [f"inserted {first}"]
    flush_to_end(settings)
    assert contents(settings) == before
    segments = {
        row["segment_id"]: (row["state"], row["policy"], row["rows"])
        for row in read_segments(open_table(Path(settings.segments_uri))).to_pylist()
    }
    assert {row["_segment_id"]: segments[row["_segment_id"]] for row in before} == {
        row["_segment_id"]: (
            "flushed", "import", sum(each["_segment_id"] == row["_segment_id"] for each in before)
        )
        for row in before
    }  # fmt: skip


@pytest.mark.parametrize("flushed", [False, True])
def test_a_replacement_hides_what_was_there_from_its_tick_on_and_not_before(settings: Settings, flushed: bool) -> None:
    maker, collection = made(settings)
    one, other = collection.vchannels[:2]
    keys = collection.keys_of(one, 4)
    insert(collection, one, keys, "old")
    insert(collection, other, collection.keys_of(other, 1), "kept")
    load(collection, one, [collection.stage("a/0.parquet", rows_of(keys[:2], "loaded"))])
    tick = load(collection, one, [collection.stage("b/0.parquet", rows_of(keys[:1], "new"))], replace=True)
    insert(collection, one, keys[1:2], "later")
    tick_everywhere(maker)
    if flushed:
        flush_to_end(settings)
    kept = f"kept {collection.keys_of(other, 1)[0]}"
    assert sorted(bodies(settings, tick)) == sorted([f"new {keys[0]}", kept])
    assert sorted(bodies(settings)) == sorted([f"new {keys[0]}", f"later {keys[1]}", kept])
    assert len(bodies(settings, tick - 1)) == 7


def test_the_segments_of_replaced_rows_are_dropped_and_those_of_the_import_are_not(settings: Settings) -> None:
    maker, collection = made(settings)
    vchannel = collection.vchannels[0]
    keys = collection.keys_of(vchannel, 4)
    insert(collection, vchannel, keys, "old")
    load(collection, vchannel, [collection.stage("a/0.parquet", rows_of(keys, "loaded"))])
    maker.commit()
    flush_to_end(settings)
    tick = load(collection, vchannel, [collection.stage("b/0.parquet", rows_of(keys, "new"))], replace=True)
    # The range ends between the Import and the Flush behind it: its segment still grows there, and is not dropped.
    flush_to_end(settings, up_to_tick=tick)
    flush_to_end(settings)
    rows = read_segments(open_table(Path(settings.segments_uri)), vchannels=[vchannel]).to_pylist()
    assert [row["state"] for row in rows] == ["dropped", "dropped", "flushed"]
    assert [row["time_tick"] == tick for row in rows] == [True, True, False]
    load(collection, vchannel, [], replace=True)
    flush_to_end(settings)
    rows = read_segments(open_table(Path(settings.segments_uri)), vchannels=[vchannel]).to_pylist()
    assert {row["state"] for row in rows} == {"dropped"}


def test_every_imported_row_is_accounted_for(settings: Settings) -> None:
    maker, collection = made(settings)
    vchannel = collection.vchannels[0]
    keys = collection.keys_of(vchannel, 6)
    insert(collection, vchannel, keys[:2], "old")
    load(collection, vchannel, [collection.stage("a/0.parquet", rows_of(keys[:3], "loaded"))])
    load(collection, vchannel, [collection.stage("b/0.parquet", rows_of(keys, "new"))], replace=True)
    collection.append(vchannel, collection.delete(keys[:1], vchannel=vchannel))
    collection.append("p0_1v0", collection.imported([lost(settings, partition=9)], vchannel="p0_1v0"))
    maker.commit()
    flush_to_end(settings)
    report = verify_collections(settings)[1]
    assert report.ok
    assert (report.inserted, report.visible, report.deleted) == (11, 5, 6)
    assert report.rejected == {"PARTITION_NOT_FOUND": 3}


def lost(settings: Settings, *, partition: int = 1) -> ImportFile:
    """A file that is not there."""
    return {"path": "a/none.parquet", "partition_id": partition, "rows": 3, "bytes": 9, "digest": "0" * 64}


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        (Path.unlink, "cannot be read"),
        (lambda path: path.write_bytes(path.read_bytes()[:-1]), "bytes, not"),
        (flip, "has the sha256"),
    ],
    ids=["missing", "shorter", "altered"],
)
def test_a_file_that_is_not_what_was_staged_parks_its_pchannel_alone_until_it_is_put_back(
    settings: Settings, harm: Callable[[Path], object], words: str
) -> None:
    maker, collection = made(settings)
    one, other = collection.vchannels[:2]
    assert collection.homes[one] != collection.homes[other]
    keys = collection.keys_of(one, 5)
    file = collection.stage("a/0.parquet", rows_of(keys, "loaded"))
    load(collection, one, [file])
    insert(collection, other, collection.keys_of(other, 1), "elsewhere")
    tick_everywhere(maker)
    path = settings.staged_path / file["path"]
    whole = path.read_bytes()
    harm(path)
    with pytest.raises(StagedFileDamaged, match=words) as caught:
        read_arrow(settings, 1)
    assert "put the file back" in str(caught.value)
    with pytest.raises(StagedFileDamaged, match=words):
        flush_to_end(settings)
    reached = {name: each.time_tick for name, each in checkpoints(settings).items()}
    assert reached == {collection.homes[other]: maker.last_tick(collection.homes[other])}
    path.write_bytes(whole)
    flush_to_end(settings)
    assert len(bodies(settings)) == 6
    assert len(checkpoints(settings)) == 2


def checkpoints(settings: Settings) -> dict[str, Any]:
    return read_checkpoints(open_table(Path(settings.checkpoints_uri)))


def table(keys: list[int | None], schema: pa.Schema | None = None) -> pa.Table:
    columns = {"id": keys, "body": [None] * len(keys)}
    return pa.table(columns, schema=schema or pa.schema([each.with_nullable(True) for each in SCHEMA.arrow()]))


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize(
    ("rows", "said", "words"),
    [
        (lambda own, foreign: table([*own, foreign]), {}, "another VChannel"),
        (lambda own, _: table([*own, None]), {}, "null in 'id'"),
        (lambda own, _: table(own), {"rows": 1}, "has 3 rows, not 1"),
        (lambda own, _: table(own).select(["id"]), {}, "columns id int64, not"),
        (
            lambda own, _: table(own, pa.schema([("id", pa.int32()), ("body", pa.utf8())])),
            {},
            "columns id int32",
        ),
    ],
    ids=["foreign key", "null key", "other count", "column missing", "other type"],
)
def test_a_file_that_does_not_fit_its_message_gives_no_row(
    settings: Settings, rows: Callable[[Any, Any], pa.Table], said: dict[str, int], words: str
) -> None:
    maker, collection = made(settings)
    vchannel, other = collection.vchannels[:2]
    chosen = rows(collection.keys_of(vchannel, 3), collection.keys_of(other, 1)[0])
    file = stage(settings.staged_path, "a/0.parquet", chosen, group=100)
    load(collection, vchannel, [{**file, **said}])  # type: ignore[typeddict-item]
    tick_everywhere(maker)
    with pytest.raises(StagedFileDamaged, match=words):
        read_arrow(settings, 1)
    with pytest.raises(StagedFileDamaged, match=words):
        flush_to_end(settings)
    assert open_table(Path(rows_uri(settings, 1))) is None, "there is no row yet"


def test_a_file_is_read_in_bounded_pieces(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = pa.table({"id": range(4000), "body": [f"{number:0100d}" for number in range(4000)]}, schema=SCHEMA.arrow())
    file = stage(settings.staged_path, "a/0.parquet", rows, group=4000)
    monkeypatch.setattr(staged_files, "BATCH_BYTES", rows.nbytes // 10)
    pieces = list(staged_files.read_staged_file(settings.staged_path, file, SCHEMA, vchannel="v", vchannels=["v"]))
    assert len(pieces) >= 10
    assert max(piece.nbytes for piece in pieces) <= rows.nbytes // 4
    assert pa.concat_tables(pieces).equals(rows)


def test_staged_files_are_synced_with_the_folders_that_hold_them(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = stage(settings.staged_path, "a/b/0.parquet", table([1]))
    synced: list[str] = []
    monkeypatch.setattr(staged_files, "sync", lambda path: synced.append(str(path.relative_to(settings.data_dir))))
    staged_files.sync_staged_files(settings.staged_path, [file])
    assert synced == ["staged/a/b/0.parquet", "staged/a/b", "staged/a", "staged", "."]


def test_a_stored_catalog_of_before_is_read_and_one_that_hides_by_an_import_says_so(settings: Settings) -> None:
    _, collection = made(settings)
    vchannel = collection.vchannels[0]
    flush_to_end(settings)
    old = checkpoints(settings)[collection.homes[vchannel]].catalog_bytes
    assert json.loads(old)["version"] == 1
    assert b"replace" not in old
    assert WalCatalog.from_bytes(old).to_bytes() == old
    tick = load(collection, vchannel, [], replace=True)
    flush_to_end(settings)
    new = checkpoints(settings)[collection.homes[vchannel]].catalog_bytes
    assert json.loads(new)["version"] == 2
    assert WalCatalog.from_bytes(new).to_bytes() == new
    assert WalCatalog.from_bytes(new).vchannels[vchannel].replace_ticks == [tick]
    with pytest.raises(UnsupportedVersion):
        WalCatalog.from_bytes(new.replace(b'"version":2', b'"version":3'))
