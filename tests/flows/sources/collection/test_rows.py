"""A collection's rows between any two places are its changes there, row for row, however
they are cut, flushed and planned.
"""

from __future__ import annotations

import itertools
import shutil
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import example, given
from hypothesis import settings as profile
from hypothesis import strategies as st

from millrace.base.errors import (
    ChangesRefused,
    CollectionNotFound,
    InvalidArgument,
    PositionTruncated,
    SchemaChanged,
)
from millrace.base.settings import Settings
from millrace.flows.sources.collection import rows as streamed
from millrace.flows.sources.collection.rows import Place, RowsOf, RowsPlanner, SnapshotPart, Stretch, Task, rows_of
from millrace.message.ids import pchannel_of
from millrace.message.schema import CollectionSchema
from millrace.node.flush.definition import flush_to_end
from millrace.storage.table import open_table
from millrace.tables.collections.flush_tables import read_checkpoints
from millrace.tables.wal.reader import WalSnapshot
from millrace.wal.visible.catalog import newest_schema
from tests.tables.collections.test_changes import changes_of, fold, written
from tests.tables.collections.test_changes import rows_of as plain
from tests.tables.read.test_at_tick import ACROSS, IMPORTS, PARTITIONS, made
from tests.tables.read_model import ADDED, OPERATIONS, do, expected
from tests.tables.wal_maker import SCHEMA, WalMaker

Row = dict[str, Any]


def rows_source(maker: WalMaker, schema: CollectionSchema | None = None, **options: Any) -> RowsOf:
    """The source of the collection 1 of a maker, in the newest schema that its checkpoints know."""
    if schema is None:
        checkpoints = read_checkpoints(open_table(maker.settings.checkpoints_uri)).values()
        infos = [info for each in checkpoints for info in each.catalog.collection_vchannels(1).values()]
        schema = newest_schema(infos) if infos else SCHEMA
    return RowsOf(
        settings=maker.settings, collection_id=1, name="c", pchannels=maker.pchannels, schema=schema, **options
    )


def read(source: RowsOf, tasks: Iterable[Task]) -> list[Row]:
    return [{ADDED.name: None, **row} for task in tasks for batch in rows_of(source, task) for row in batch.to_pylist()]


def of(rows: Iterable[Row], pchannel: str) -> list[Row]:
    return [row for row in rows if row["_vchannel"].startswith(f"{pchannel}_")]


def drained(source: RowsOf, place: Place, *, max_bytes: int = 1 << 62) -> tuple[list[Row], list[Place]]:
    """What a stream gives from a place on until there is nothing more, and the places it came by."""
    planner, found, places = RowsPlanner(source), [], [place]
    while (following := planner.next(places[-1], max_bytes=max_bytes)) != places[-1]:
        found += read(source, planner.tasks(places[-1], following))
        assert Place.from_json(following.to_json()) == following
        places.append(following)
    return found, places


@example(PARTITIONS, 1, 1, 50)
@example(ACROSS, 1 << 20, 1, 0)
@example(IMPORTS, 1, 1 << 20, 90)
@given(
    st.lists(OPERATIONS, max_size=20),
    st.sampled_from([1, 3000, 1 << 20]),
    st.sampled_from([1, 1 << 20]),
    st.integers(0, 100),
)
@profile(max_examples=12, deadline=None)
def test_a_stream_a_batch_and_a_snapshot_with_what_follows_are_the_changes(
    operations: list[tuple[Any, ...]], max_bytes: int, task_bytes: int, at: int
) -> None:
    folder = Path(tempfile.mkdtemp())
    try:
        maker = written(Settings(data_dir=folder / "data"), operations, dropped=False)
        source = rows_source(maker)
        every = {name: plain(changes_of(maker.settings, name)) for name in maker.pchannels}
        source = rows_source(maker, _newest(maker))
        with patch.object(streamed, "TASK_BYTES", task_bytes):
            found, places = drained(source, Place.behind(source), max_bytes=max_bytes)
            for name in maker.pchannels:
                assert _in_fields(of(found, name)) == _in_fields(every[name]), "the stream"
            # Begun anew at any place by another planner, after everything was flushed: the very same rows.
            flush_to_end(maker.settings)
            parts = list(itertools.pairwise(places))
            for start, end in parts[:: max(1, len(parts) // 3)]:
                again = read(source, RowsPlanner(source).tasks(start, end))
                assert _in_fields(again) == _in_fields(
                    row
                    for name in maker.pchannels
                    for row in every[name]
                    if start.ticks[name] < row["_time_tick"] <= end.ticks[name]
                ), "a batch"
            tick = _some_tick(maker, at)
            if tick:
                shown, _ = drained(source, Place.behind(source, snapshot=tick), max_bytes=max_bytes)
                taken = sum(expected(maker, tick, SCHEMA).values())
                assert {row["_change"] for row in shown[:taken]} <= {"insert"}
                last = min(maker.last_tick(name) for name in maker.pchannels)
                assert fold(shown, last) == expected(maker, last, SCHEMA), "a snapshot, and what follows it"
    finally:
        shutil.rmtree(folder)


def _newest(maker: WalMaker) -> CollectionSchema:
    flush_to_end(maker.settings)
    return rows_source(maker).schema


def _some_tick(maker: WalMaker, percent: int) -> int:
    """A tick at which the collection is there on all its VChannels and all PChannels have come to."""
    ticks = maker.readable_ticks()
    return int(ticks[(len(ticks) - 1) * percent // 100]) if ticks else 0


def _in_fields(rows: Iterable[Row]) -> list[Row]:
    return [dict(sorted(row.items())) for row in rows]


def history(settings: Settings, *operations: tuple[Any, ...]) -> WalMaker:
    maker, collection = made(settings)
    for number, operation in enumerate(operations):
        do(collection, operation, number)
    maker.commit()
    return maker


@pytest.mark.parametrize("flushed", [False, True], ids=["in the tail", "in the table"])
def test_a_snapshot_cut_at_any_ticks_has_each_row_once(settings: Settings, flushed: bool) -> None:
    maker = history(
        settings, ("insert", [0, 1, 2], 1, 0), ("delete", [0], 1, 0), ("insert", [3, 4], 1, 0), ("insert", [5], 2, 0)
    )
    if flushed:
        flush_to_end(settings)
    source = rows_source(maker, SCHEMA)
    tick = min(maker.last_tick(name) for name in maker.pchannels)
    whole = read(source, [SnapshotPart(tick, 0, tick)])
    cuts = [0, *sorted({row["_time_tick"] for row in whole}), tick]
    parts = read(source, [SnapshotPart(tick, low, high) for low, high in itertools.pairwise(cuts)])
    assert len(whole) >= 3
    assert sorted(map(str, parts)) == sorted(map(str, whole))
    for columns in (("_change",), ("_time_tick", "id"), tuple(reversed(source.arrow().names))):
        some = read(rows_source(maker, SCHEMA, columns=columns), [SnapshotPart(tick, 0, tick)])
        in_both = [sorted(str([row[name] for name in columns]) for row in rows) for rows in (some, whole)]
        assert in_both[0] == in_both[1]


def test_a_source_that_takes_inserts_alone_stops_at_any_other_change(settings: Settings) -> None:
    maker = history(settings, ("insert", [0, 1, 2], 1, 0), ("delete", [0], 1, 0))
    source = rows_source(maker, kinds="inserts")
    with pytest.raises(ChangesRefused, match=r"'c' has a delete at tick \d+ .* takes only inserts"):
        drained(source, Place.behind(source))
    found, _ = drained(rows_source(maker, kinds="skip others"), Place.behind(source))
    assert sorted(row["id"] for row in found) == [0, 1, 2]


@pytest.mark.slow
@pytest.mark.parametrize("flushed", [False, True], ids=["in the tail", "in the table"])
def test_each_vchannel_has_its_own_rows_and_all_of_them_those_of_the_collection(
    settings: Settings, flushed: bool
) -> None:
    operations = [
        ("insert", [0, 1, 2, 3, 4, 5], 1, 0), ("begin", 0, 1), ("insert", [0, 1, 2, 3], 2, 1), ("delete", [4], 1, 0),
        ("commit", 0, 1), ("import", [(0, 1), (1, 2), (5, 2)], True), ("insert", [2, 3, 4], 2, 0),
        ("drop_partition", 0, 2),
    ]  # fmt: skip
    maker = written(settings, operations, dropped=False)
    if flushed:
        flush_to_end(settings)
    whole = rows_source(maker, SCHEMA)
    every, _ = drained(whole, Place.behind(whole))
    vchannels = sorted({row["_vchannel"] for row in every})
    assert len(vchannels) >= 2
    for vchannel in vchannels:
        source = rows_source(maker, SCHEMA, vchannels=(vchannel,))
        found, places = drained(source, Place.behind(source), max_bytes=1)
        assert found == [row for row in every if row["_vchannel"] == vchannel]
        assert {name for place in places for name in place.ticks} == {pchannel_of(vchannel)}, "no other log is read"
    tick = min(maker.last_tick(name) for name in maker.pchannels)
    shown = [rows_source(maker, SCHEMA, vchannels=(each,)) for each in vchannels]
    parts = [row for source in shown for row in read(source, [SnapshotPart(tick, 0, tick)])]
    assert sorted(map(str, parts)) == sorted(map(str, read(whole, [SnapshotPart(tick, 0, tick)])))


def test_a_reader_of_some_vchannels_does_not_go_on_with_others(settings: Settings) -> None:
    maker = history(settings, ("insert", [0, 1, 2], 1, 0))
    first, second = (rows_source(maker, vchannels=(f"{name}_1v{n}",)) for n, name in enumerate(maker.pchannels[:2]))
    with pytest.raises(InvalidArgument, match=r"has read \w+ and cannot continue with \w+: start a new stream"):
        RowsPlanner(second).next(Place.behind(first))
    whole = rows_source(maker)
    with pytest.raises(InvalidArgument, match="cannot continue with all channels"):
        RowsPlanner(whole).next(Place.behind(first))
    old = {name: value for name, value in Place.behind(whole).to_json().items() if name != "vchannels"}
    assert Place.from_json(old) == Place.behind(whole), "a checkpoint of before there were such readers"


def test_columns_are_chosen_and_unknown_ones_refused(settings: Settings) -> None:
    maker = history(settings, ("insert", [0, 1], 1, 0))
    source = rows_source(maker, columns=("_change", "id"))
    [task, *_] = RowsPlanner(source).tasks(Place.behind(source), RowsPlanner(source).next(Place.behind(source)))
    assert {tuple(batch.schema.names) for batch in rows_of(source, task)} <= {("_change", "id")}
    with pytest.raises(InvalidArgument, match="'c' has no column 'nothing'; its changes have id, body"):
        rows_source(maker, columns=("nothing",))
    with pytest.raises(InvalidArgument, match="kinds is one of 'all'"):
        rows_source(maker, kinds="some")


def test_a_change_of_the_schema_stops_a_reader_of_the_one_before(settings: Settings) -> None:
    maker = history(
        settings, ("insert", [0, 1], 1, 0), *(("schema_change", number) for number in range(4)), ("insert", [0], 1, 0)
    )
    source = rows_source(maker, SCHEMA)
    with pytest.raises(SchemaChanged, match="open a new reader at the current position"):
        drained(source, Place.behind(source))


def test_a_place_in_another_collection_of_the_name_is_refused(settings: Settings) -> None:
    maker = history(settings, ("insert", [0], 1, 0))
    source = rows_source(maker)
    other = Place(7, dict.fromkeys(maker.pchannels, 0))
    with pytest.raises(CollectionNotFound, match="it was dropped and created again"):
        RowsPlanner(source).next(other)


def test_a_place_that_retention_removed_is_an_error_that_names_the_earliest(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    maker = history(settings, ("insert", [0, 1, 2], 1, 0))
    source = rows_source(maker)
    trimmed = {name: (maker.last_tick(name), 0, 1 << 20) for name in maker.pchannels}
    told = WalSnapshot.trimmed

    def trims(wal: WalSnapshot, pchannel: str) -> Any:
        tick, ledger, entry = trimmed[pchannel]
        return tick, type(told(wal, pchannel)[1])(ledger, entry)

    monkeypatch.setattr(WalSnapshot, "trimmed", trims)
    with pytest.raises(PositionTruncated, match="was trimmed up to tick"):
        RowsPlanner(source).stretches(dict.fromkeys(maker.pchannels, 0), trimmed_ticks(trimmed))


def trimmed_ticks(trimmed: Mapping[str, tuple[int, int, int]]) -> dict[str, int]:
    return {name: tick for name, (tick, *_) in trimmed.items()}


def test_a_stream_whose_first_batch_was_planned_by_another_start_reads_that_ones_rows(settings: Settings) -> None:
    maker = history(settings, ("insert", [0, 1, 2], 1, 0))
    source = rows_source(maker)
    end = RowsPlanner(source).next(Place.behind(source))
    later = Place.behind(source, {name: maker.last_tick(name) for name in maker.pchannels})
    assert later.begins
    assert not end.begins
    assert end.start() == Place.behind(source)
    assert all(isinstance(task, Stretch) for task in RowsPlanner(source).tasks(end.start(), end))


def test_a_deployment_without_rows_gives_nothing(settings: Settings) -> None:
    source = rows_source(WalMaker(settings))
    assert drained(source, Place.behind(source)) == ([], [Place.behind(source)])
