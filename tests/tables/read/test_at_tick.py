"""A collection read at a time tick equals the plain model, wherever WAL commits and flushes were cut."""

from __future__ import annotations

import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from millrace.base.errors import CollectionNotFound, TickNotReached
from millrace.base.settings import Settings
from millrace.message import builders
from millrace.node.flush.definition import flush_to_end
from millrace.storage.store import TableStore
from millrace.storage.table import open_table
from millrace.tables.collections.flush_tables import read_segments
from millrace.tables.read import plan
from millrace.tables.read.arrow import read_arrow, read_pieces
from millrace.tables.read.plan import plan_read
from millrace.tables.wal import reader
from tests.failpoints import at_failpoints
from tests.laws.profile import examples, nightly_example, spread
from tests.tables.read_model import ADDED, OPERATIONS, expected, play, schema_known
from tests.tables.wal_maker import SCHEMA, Collection, WalMaker


def made(settings: Settings) -> tuple[WalMaker, Collection]:
    """A deployment with one collection, committed."""
    maker = WalMaker(settings)
    maker.open()
    collection = Collection(maker, vchannels=4)
    collection.create()
    maker.commit()
    return maker, collection


def as_counter(table: pa.Table) -> Counter[tuple[Any, ...]]:
    rows = table.to_pylist()
    return Counter((row["id"], row["body"], row.get(ADDED.name)) for row in rows)


def tick_everywhere(maker: WalMaker) -> None:
    """Move the clock of all PChannels, so that every message before is readable."""
    for name in maker.pchannels:
        maker.append(name, [builders.time_tick(term=1)])
    for name in maker.pchannels:
        maker.append(name, [builders.manual_flush(vchannel="", collection_id=0, term=1)])
    maker.commit()


ALL = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]
PARTITIONS = [
    ("insert", ALL, 1, 0),
    ("insert", ALL, 2, 0),
    ("delete", [0, 1, 2], 1, 0),
    ("drop_partition", 0, 2),
    ("flush", 50),
    ("drop_partition", 1, 1),
    ("create_partition", 1, 1),
    ("insert", [0, 1], 1, 0),
    ("delete", [3, 4, 5], 2, 0),
]
"""Deletes that name a partition hit that one alone; a drop hides what came before it, not what comes after."""

ACROSS = [
    *(("begin", number, 1) for number in range(4)),
    ("insert", ALL, 1, 1),
    ("insert", ALL, 2, 0),
    ("schema_change", 2),
    ("schema_change", 3),
    ("drop_partition", 3, 2),
    ("insert", ALL, 1, 0),
    ("wal_commit", 0),
    ("flush", 100),
    ("insert", ALL, 1, 0),
    ("delete", [0, 1, 2], 0, 0),
    ("wal_commit", 0),
    ("flush", 80),
    ("commit", 0, 1),
    ("commit", 1, 1),
]
"""Transactions stay open over flushes, so that each begins to read before DDL that the catalog has already."""


IMPORTS = [
    ("insert", ALL, 1, 0),
    ("import", [(key, 1 + key % 2) for key in ALL], False),
    ("delete", [0, 1], 0, 0),
    ("flush", 60),
    ("begin", 0, 1),
    ("insert", ALL, 2, 1),
    ("import", [(key, 2) for key in ALL[2:]], True),
    ("commit", 0, 1),
    ("schema_change", 1),
    ("wal_commit", 0),
    ("insert", [3, 4], 1, 0),
    ("import", [(5, 1), (6, 1), (7, 2)], False),
    ("delete", [5], 2, 0),
    ("drop_partition", 1, 2),
    ("flush", 70),
    ("import", [], True),
    ("insert", [8], 1, 0),
]
"""Files beside inserts, in place of everything, of a newer schema, into a partition that is dropped.

And an empty replacement.
"""


@example(PARTITIONS, 0)
@nightly_example(ACROSS, 0)
@example(IMPORTS, 0)
@given(st.lists(OPERATIONS, max_size=25), st.integers(0, 4))
@examples(6)
def test_every_tick_reads_as_the_model_says(operations: list[tuple[Any, ...]], first: int) -> None:
    folder = Path(tempfile.mkdtemp())
    try:
        settings = Settings(data_dir=folder / "data")
        maker, collection = made(settings)
        play(collection, operations)
        tick_everywhere(maker)
        inside = maker.readable_ticks()
        for tick in spread(5, inside, first=first):
            found = read_arrow(settings, 1, at=tick)
            assert as_counter(found) == expected(maker, tick, SCHEMA), f"at {tick}"
            assert (ADDED.name in found.column_names) == schema_known(maker, tick)
            pieces = list(read_pieces(plan_read(settings, 1, at=tick), max_bytes=1))
            assert as_counter(pa.concat_tables(pieces)) == as_counter(found), "in pieces of a file each"
        before = as_counter(read_arrow(settings, 1, at=inside[-1]))
        flush_to_end(settings)
        assert as_counter(read_arrow(settings, 1, at=inside[-1])) == before
    finally:
        shutil.rmtree(folder)


class _Died(BaseException):
    """Ends the flusher where it stands."""


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize("place", ["flush.deletes", "flush.rows"])
@pytest.mark.parametrize("last", range(4))
def test_rows_of_a_flush_that_died_before_its_checkpoint_are_read_once_and_those_behind_it_too(
    settings: Settings, place: str, last: int
) -> None:
    maker, collection = made(settings)
    vchannel = collection.vchannels[0]
    keys = collection.keys_of(vchannel, 3)
    flush_to_end(settings)
    for key in keys:  # in one file of the WAL
        collection.append(vchannel, collection.insert({"id": [key], "body": ["x"]}, vchannel=vchannel))
    collection.append(vchannel, collection.delete(keys[:1], vchannel=vchannel))
    tick_everywhere(maker)
    ticks = [m["time_tick"] for m in maker.accepted[collection.homes[vchannel]] if m["type"] in ("INSERT", "DELETE")]

    def die(name: str) -> None:
        if name == place:
            raise _Died

    with pytest.raises(_Died), at_failpoints(die):
        flush_to_end(settings, up_to_tick=ticks[last])
    assert sorted(read_arrow(settings, 1)["id"].to_pylist()) == sorted(keys[1:])


@pytest.mark.parametrize("flushed", [False, True])
def test_a_transaction_applies_its_own_writes_in_order(settings: Settings, flushed: bool) -> None:
    maker, collection = made(settings)
    vchannel = collection.vchannels[0]
    first, second = collection.keys_of(vchannel, 2)
    collection.append(vchannel, collection.insert({"id": [second], "body": ["old"]}, vchannel=vchannel))
    for message in (
        collection.begin(vchannel, 1),
        collection.insert({"id": [first], "body": ["gone"]}, vchannel=vchannel, txn=1),
        collection.delete([first, second], vchannel=vchannel, txn=1),
        collection.insert({"id": [second], "body": ["new"]}, vchannel=vchannel, txn=1),
        collection.end(vchannel, 1),
    ):
        collection.append(vchannel, message)
    tick_everywhere(maker)
    if flushed:
        flush_to_end(settings)
    assert read_arrow(settings, 1).to_pylist() == [{"id": second, "body": "new"}]


def test_a_tick_that_is_still_to_come_is_an_error_that_can_be_tried_again(settings: Settings) -> None:
    maker, _ = made(settings)
    with pytest.raises(TickNotReached) as error:
        read_arrow(settings, 1, at=maker.last_tick("p0") + (1 << 40), deadline=0.05)
    assert error.value.retriable


def test_a_tick_before_the_collection_finds_none(settings: Settings) -> None:
    made(settings)
    with pytest.raises(CollectionNotFound):
        read_arrow(settings, 1, at=1)
    with pytest.raises(CollectionNotFound):
        read_arrow(settings, 2)


@pytest.mark.parametrize("flushed", [False, True])
def test_a_dropped_collection_is_readable_before_its_drop_and_refused_from_then_on(
    settings: Settings, flushed: bool
) -> None:
    maker, collection = made(settings)
    vchannel = collection.vchannels[0]
    collection.append(
        vchannel, collection.insert({"id": collection.keys_of(vchannel, 1), "body": ["a"]}, vchannel=vchannel)
    )
    tick_everywhere(maker)
    before = min(maker.last_tick(name) for name in maker.pchannels)
    for name in collection.vchannels:
        collection.append(name, builders.drop_collection(vchannel=name, collection_id=1, term=1))
    tick_everywhere(maker)
    if flushed:
        flush_to_end(settings)
        table = read_segments(open_table(Path(settings.segments_uri)))
        assert table["state"].to_pylist() == ["dropped"]
    assert read_arrow(settings, 1, at=before).num_rows == 1
    with pytest.raises(CollectionNotFound):
        read_arrow(settings, 1)


def test_a_read_opens_each_file_of_its_tail_once(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    maker, collection = made(settings)
    flush_to_end(settings)
    for number in range(3):
        for vchannel in collection.vchannels:
            [key] = collection.keys_of(vchannel, 1)
            rows: dict[str, list[object]] = {"id": [key], "body": [f"{number}"]}
            collection.append(vchannel, collection.insert(rows, vchannel=vchannel, upsert=True))
        maker.commit()
    opened: Counter[str] = Counter()
    batches = reader._batches

    def counted(store: TableStore, file: reader.WalFile, *rest: Any) -> Iterator[pa.Table]:
        opened[file.path] += 1
        return batches(store, file, *rest)

    monkeypatch.setattr(reader, "_batches", counted)
    found = read_arrow(settings, 1, confirmed=maker.confirmed())
    assert found["body"].to_pylist() == ["2"] * len(collection.vchannels)
    assert len(opened) >= 6
    assert set(opened.values()) == {1}
    monkeypatch.setattr(plan, "HELD_BYTES", 0)
    assert sorted(read_arrow(settings, 1, confirmed=maker.confirmed()).to_pylist(), key=str) == sorted(
        found.to_pylist(), key=str
    ), "a tail that is too large to hold is read for each use"
