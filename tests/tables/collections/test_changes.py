"""A collection's changes.

Folded from nothing to any tick they are what a read there gives, and every place in them is kept.
"""

from __future__ import annotations

import shutil
import tempfile
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from millrace.base.errors import CollectionNotFound, InvalidArgument, StagedFileDamaged
from millrace.base.settings import Settings
from millrace.message import builders
from millrace.node.flush.definition import flush_to_end
from millrace.tables.collections import staged_files
from millrace.tables.collections.changes import table_changes
from millrace.tables.read.arrow import read_arrow
from millrace.wal.visible import changes
from millrace.wal.visible.changes import CHANGES_BEGIN, ChangeBatch, ChangePosition, change_schema
from tests.laws.profile import examples, nightly_example, spread
from tests.tables.read.test_at_tick import ACROSS, IMPORTS, PARTITIONS, as_counter, made, tick_everywhere
from tests.tables.read_model import ADDED, OPERATIONS, expected, play
from tests.tables.wal_maker import SCHEMA, Collection, WalMaker

Row = dict[str, Any]


def changes_of(
    settings: Settings, pchannel: str, after: ChangePosition = CHANGES_BEGIN, **until: int
) -> list[ChangeBatch]:
    return list(table_changes(settings, 1, pchannel, after=after, **until))


def rows_of(batches: Iterable[ChangeBatch]) -> list[Row]:
    """All rows as objects; a batch without the added field has it as none."""
    return [{ADDED.name: None, **row} for batch in batches for row in batch.rows.to_pylist()]


def fold(rows: Iterable[Row], tick: int) -> Counter[tuple[Any, ...]]:
    """What rows of changes leave at `tick`, by the words of docs/how-to/follow-changes.md alone."""
    kept: list[Row] = []
    for row in rows:
        place = (row["_time_tick"], row["_write_tick"])
        if place[0] > tick:
            continue
        if row["_change"] == "insert":
            kept.append(row)
            continue
        kept = [
            each
            for each in kept
            if each["_vchannel"] != row["_vchannel"]
            or row["_partition_id"] not in (0, each["_partition_id"])
            or (
                each["_time_tick"] >= row["_time_tick"]
                if row["_change"] == "retract"
                else each["id"] != row["id"] or (each["_time_tick"], each["_write_tick"]) >= place
            )
        ]
    return Counter((row["id"], row["body"], row[ADDED.name]) for row in kept)


def written(settings: Settings, operations: Iterable[tuple[Any, ...]], *, dropped: bool) -> WalMaker:
    maker, collection = made(settings)
    play(collection, operations)
    tick_everywhere(maker)
    if dropped:
        for name in collection.vchannels:
            collection.append(name, builders.drop_collection(vchannel=name, collection_id=1, term=1))
        maker.commit()
    return maker


@example(PARTITIONS, 0, False, 1)
@nightly_example(ACROSS, 0, False, 3)
@example(IMPORTS, 0, True, 2)
@given(st.lists(OPERATIONS, max_size=25), st.integers(0, 4), st.booleans(), st.integers(1, 5))
@examples(4)
def test_changes_folded_from_nothing_to_any_tick_are_what_a_read_there_gives(
    operations: list[tuple[Any, ...]], first: int, dropped: bool, step: int
) -> None:
    folder = Path(tempfile.mkdtemp())
    try:
        settings = Settings(data_dir=folder / "data")
        maker = written(settings, operations, dropped=dropped)
        with patch.object(changes, "BATCH_BYTES", 300), patch.object(staged_files, "BATCH_BYTES", 8):
            batches = {name: changes_of(settings, name) for name in maker.pchannels}
            every = {name: rows_of(found) for name, found in batches.items()}
            for name, rows in every.items():
                places = [(row["_time_tick"], row["_write_tick"]) for row in rows]
                assert places == sorted(places)
                done = 0
                for number, batch in enumerate(batches[name]):
                    done += batch.rows.num_rows
                    if number % step == 0:
                        behind = rows_of(changes_of(settings, name, batch.position))
                        assert behind == rows[done:], "a reader goes on there"
        accepted = [m for name in maker.pchannels for m in maker.accepted[name]]
        drops = [m["time_tick"] for m in accepted if m["type"] == "DROP_COLLECTION"]
        inside = maker.readable_ticks()
        for tick in spread(5, inside, first=first):
            folded = fold([row for rows in every.values() for row in rows], tick)
            if not drops or tick < min(drops):
                assert folded == expected(maker, tick, SCHEMA)
                assert folded == as_counter(read_arrow(settings, 1, at=tick)), f"at {tick}"
            for name, rows in every.items():
                behind = rows_of(changes_of(settings, name, ChangePosition(tick)))
                assert behind == [row for row in rows if row["_time_tick"] > tick], "changes that begin at a tick"
                until = rows_of(changes_of(settings, name, until_tick=tick))
                assert until == [row for row in rows if row["_time_tick"] <= tick], "changes up to a tick"
        if dropped:
            assert fold([row for rows in every.values() for row in rows], max(drops)) == Counter()
        flush_to_end(settings)
        assert {name: rows_of(changes_of(settings, name)) for name in maker.pchannels} == every
    finally:
        shutil.rmtree(folder)


def named(keys: list[int], word: str) -> dict[str, list[object]]:
    return {"id": list(keys), "body": [f"{word} {key}" for key in keys]}


def loaded(settings: Settings, *, count: int = 9, replace: bool = False) -> tuple[WalMaker, Collection, str]:
    """A VChannel with one row written, then an Import of `count` rows in two files, then another row written."""
    maker, collection = made(settings)
    vchannel = collection.vchannels[0]
    keys = collection.keys_of(vchannel, count + 2)
    files = [
        collection.stage("a/0.parquet", named(keys[1:5], "red")),
        collection.stage("a/1.parquet", named(keys[5:-1], "blue"), partition=2),
    ]
    collection.append(vchannel, collection.insert(named(keys[:1], "first"), vchannel=vchannel))
    collection.append(vchannel, collection.imported(files, vchannel=vchannel, replace=replace))
    collection.append(vchannel, collection.insert(named(keys[-1:], "last"), vchannel=vchannel))
    tick_everywhere(maker)
    return maker, collection, vchannel


def test_imported_rows_are_changes_like_others(settings: Settings) -> None:
    maker, _, vchannel = loaded(settings)
    found = rows_of(changes_of(settings, maker.pchannels[0]))
    assert [row["body"].split()[0] for row in found] == ["first"] + ["red"] * 4 + ["blue"] * 5 + ["last"]
    assert {row["_change"] for row in found} == {"insert"}
    assert [row["_partition_id"] for row in found] == [1] * 5 + [2] * 5 + [1]
    assert {row["_vchannel"] for row in found} == {vchannel}
    [tick] = {row["_time_tick"] for row in found[1:-1]}
    assert found[0]["_time_tick"] < tick < found[-1]["_time_tick"]


def test_a_replacement_retracts_what_was_there_before_its_own_rows_come(settings: Settings) -> None:
    maker, _, vchannel = loaded(settings, replace=True)
    found = rows_of(changes_of(settings, maker.pchannels[0]))
    assert [row["_change"] for row in found] == ["insert", "retract", *["insert"] * 10]
    retraction = found[1]
    assert (retraction["id"], retraction["body"]) == (None, None)
    assert (retraction["_vchannel"], retraction["_partition_id"]) == (vchannel, 0)
    assert retraction["_time_tick"] == found[2]["_time_tick"]


@pytest.mark.slow
def test_a_reader_that_stops_amid_an_imports_rows_goes_on_with_the_next_row(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    maker, _, _ = loaded(settings, replace=True)
    name = maker.pchannels[0]
    every = rows_of(changes_of(settings, name))
    monkeypatch.setattr(staged_files, "BATCH_BYTES", 1)
    batches = changes_of(settings, name)
    assert len(batches) == len(every), "an import's rows come one by one"
    imported = [batch.position for batch in batches[1:-1]]
    assert [position.rows for position in imported] == [*range(1, 10), 0], "the last ends its unit"
    monkeypatch.undo()
    for done, position in enumerate(imported, start=2):
        flush_to_end(settings)
        assert rows_of(changes_of(settings, name, position)) == every[done:]
    with pytest.raises(InvalidArgument, match="is not a position of collection 1"):
        changes_of(settings, name, ChangePosition(imported[0].tick, 50))


def test_an_imports_rows_come_in_bounded_pieces(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    maker, collection = made(settings)
    vchannel = collection.vchannels[0]
    keys = collection.keys_of(vchannel, 2000)
    file = collection.stage("a/0.parquet", {"id": list(keys), "body": ["x" * 100] * len(keys)}, group=2000)
    collection.append(vchannel, collection.imported([file], vchannel=vchannel))
    tick_everywhere(maker)
    monkeypatch.setattr(staged_files, "BATCH_BYTES", 20_000)
    found = changes_of(settings, maker.pchannels[0])
    assert sum(batch.rows.num_rows for batch in found) == 2000
    assert max(batch.rows.nbytes for batch in found) < 60_000


@pytest.mark.slow
def test_what_many_messages_change_comes_in_bounded_batches(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    maker, collection = made(settings)
    vchannel = collection.vchannels[0]
    keys = collection.keys_of(vchannel, 40)
    for key in keys:
        collection.append(vchannel, collection.insert({"id": [key], "body": ["x" * 1000]}, vchannel=vchannel))
        collection.append(vchannel, collection.delete([key], vchannel=vchannel))
    tick_everywhere(maker)
    monkeypatch.setattr(changes, "BATCH_BYTES", 5_000)
    found = changes_of(settings, maker.pchannels[0])
    assert max(batch.rows.nbytes for batch in found) < 10_000
    rows = rows_of(found)
    assert [(row["_change"], row["id"]) for row in rows] == [
        (kind, key) for key in keys for kind in ("insert", "delete")
    ], "inserts and deletes in the order of the log"
    assert all(batch.rows.schema == change_schema(batch.schema) for batch in found)


def test_a_staged_file_that_is_missing_is_a_typed_error(settings: Settings) -> None:
    maker, _, _ = loaded(settings)
    (settings.staged_path / "a/1.parquet").unlink()
    found: list[ChangeBatch] = []
    with pytest.raises(StagedFileDamaged, match="put the file back"):
        found.extend(table_changes(settings, 1, maker.pchannels[0]))
    assert [row["body"].split()[0] for row in rows_of(found)] == ["first"], "what lies before it was given"


@pytest.mark.slow
def test_a_collection_under_the_id_of_a_dropped_one_has_changes_of_its_own(settings: Settings) -> None:
    maker, collection = made(settings)
    vchannel = collection.vchannels[0]
    keys = collection.keys_of(vchannel, 2)
    collection.append(vchannel, collection.insert(named(keys[:1], "old"), vchannel=vchannel))
    maker.commit()
    before = maker.last_tick(collection.homes[vchannel])
    collection.append(vchannel, collection.insert(named(keys[:1], "old"), vchannel=vchannel))
    for name in collection.vchannels:
        collection.append(name, builders.drop_collection(vchannel=name, collection_id=1, term=1))
    collection.create()
    collection.append(vchannel, collection.insert(named(keys[1:], "new"), vchannel=vchannel))
    tick_everywhere(maker)
    flush_to_end(settings)
    name = collection.homes[vchannel]
    everything = rows_of(changes_of(settings, name))
    assert [row["_change"] for row in everything if row["_vchannel"] == vchannel] == [
        "insert", "insert", "retract", "insert"
    ]  # fmt: skip
    with pytest.raises(CollectionNotFound, match="another one made under its id"):
        changes_of(settings, name, ChangePosition(before))
