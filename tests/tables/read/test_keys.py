"""The rows of keys, by the index where it covers a file, equal what a read with a predicate on the key returns."""

from __future__ import annotations

import shutil
import tempfile
from datetime import date
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from millrace.base.errors import InvalidArgument
from millrace.base.settings import Settings
from millrace.node.flush.definition import flush_to_end
from millrace.node.publish.definition import publish
from millrace.operations.compaction.declaration import CompactionParams
from millrace.operations.compaction.run import compact
from millrace.rpc.selection import Selection
from millrace.storage.published import PublishedTable
from millrace.storage.store import store_at
from millrace.storage.table import TableHandle, open_table
from millrace.tables.collections.data_tables import published_uri, rows_uri
from millrace.tables.key_index.index import KeyIndex
from millrace.tables.read.arrow import read_arrow
from millrace.tables.read.keys import read_keys
from millrace.tables.read.plan import plan_read
from millrace.testing import deployment
from tests.laws.profile import examples, nightly_example, spread
from tests.tables.read.test_at_tick import ACROSS, IMPORTS, PARTITIONS, as_counter, made, tick_everywhere
from tests.tables.read_model import OPERATIONS, play
from tests.tables.wal_maker import SCHEMA

FOLDS = CompactionParams(min_files=2, fold="always", keep_history_hours=0, segments=False, vacuum=False)


def catch_up(settings: Settings) -> None:
    table = open_table(rows_uri(settings, 1))
    if table is not None:
        KeyIndex.open(settings.key_index_path(1)).catch_up(table, SCHEMA)


def keys_of(*keys: int) -> pa.RecordBatch:
    return pa.RecordBatch.from_pylist([{"id": each} for each in keys], pa.schema([pa.field("id", pa.int64(), False)]))


@example(PARTITIONS, 0, [0, 2, 3])
@nightly_example(ACROSS, 1, [1])
@example(IMPORTS, 0, [5, 8, 3])
@given(
    st.lists(OPERATIONS, max_size=25),
    st.integers(0, 2),
    st.lists(st.integers(0, 9), min_size=1, max_size=3),
)
@examples(4)
def test_rows_of_keys_are_those_of_a_read_with_a_predicate_at_every_tick(
    operations: list[tuple[Any, ...]], covered: int, keys: list[int]
) -> None:
    """`covered`: of three flushes, which are indexed at once."""
    folder = Path(tempfile.mkdtemp())
    try:
        settings = Settings(data_dir=folder / "data")
        maker, collection = made(settings)

        def flushed(number: int) -> None:
            if number % 3 != covered:
                catch_up(settings)
            if number % 2 == covered % 2:
                publish(settings, 1, confirm=lambda names: {name: maker.last_tick(name) for name in names})

        play(collection, operations, flushed=flushed)
        tick_everywhere(maker)
        inside = maker.readable_ticks()

        def check(at: list[int]) -> None:
            for tick in at:
                found = read_keys(plan_read(settings, 1, at=tick), keys_of(*keys))
                where = f"id IN ({', '.join(map(str, keys))})"
                wanted = read_arrow(settings, 1, at=tick, selection=Selection(where=where))
                assert found.schema.equals(wanted.schema)
                assert as_counter(found) == as_counter(wanted), f"at {tick}"

        check(spread(5, inside, first=covered))
        flush_to_end(settings)
        check(inside[-1:])
        publish(settings, 1, confirm=lambda names: {name: maker.last_tick(name) for name in names})
        check(spread(5, inside, first=covered))
        compact(settings, FOLDS)  # rewritten files are unknown to the index
        check(inside[-1:])
        catch_up(settings)
        check(inside[-1:])
    finally:
        shutil.rmtree(folder)


def test_a_key_of_a_covered_file_reads_one_row_group_of_it(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    maker, collection = made(settings)
    vchannel = collection.vchannels[0]
    keys = collection.keys_of(vchannel, 6)
    for part in (keys[0:6:2], keys[1:6:2]):  # neither file's bounds exclude the middle
        collection.append(vchannel, collection.insert({"id": part, "body": ["x"] * 3}, vchannel=vchannel))
        tick_everywhere(maker)
        flush_to_end(settings)
    read: list[str] = []

    def taken(table: TableHandle, name: str, *given: Any, **named: Any) -> Any:
        read.append(name)
        return whole(table, name, *given, **named)

    whole = TableHandle.take_rows
    monkeypatch.setattr(TableHandle, "take_rows", taken)
    catch_up(settings)
    assert read_keys(plan_read(settings, 1), keys_of(keys[2])).to_pylist() == [{"id": keys[2], "body": "x"}]
    assert len(read) == 1


def test_columns_of_rows_of_keys_are_those_that_were_asked_for(settings: Settings) -> None:
    maker, collection = made(settings)
    vchannel = collection.vchannels[0]
    (key,) = collection.keys_of(vchannel, 1)
    collection.append(vchannel, collection.insert({"id": [key], "body": ["x"]}, vchannel=vchannel))
    tick_everywhere(maker)
    plan = plan_read(settings, 1)
    assert read_keys(plan, keys_of(key), columns=["body"]).to_pylist() == [{"body": "x"}]
    assert read_keys(plan, keys_of(), columns=["body"]).num_rows == 0
    with pytest.raises(InvalidArgument, match="no column 'nowhere'"):
        read_keys(plan, keys_of(key), columns=["nowhere"])


def test_a_row_that_the_published_version_masks_as_not_visible_yet_is_there(settings: Settings) -> None:
    """Its PChannel was ahead of the other one, which decides the published tick. A deleted row beside it stays away."""
    maker, collection = made(settings)
    vchannel = collection.vchannels[0]
    early, late = collection.keys_of(vchannel, 2)
    collection.append(vchannel, collection.insert({"id": [early], "body": ["early"]}, vchannel=vchannel))
    collection.append(vchannel, collection.delete([early], vchannel=vchannel))
    tick_everywhere(maker)
    collection.append(vchannel, collection.insert({"id": [late], "body": ["late"]}, vchannel=vchannel))
    maker.commit()
    flush_to_end(settings)
    catch_up(settings)
    tick = publish(settings, 1, confirm=lambda names: {})
    published = PublishedTable.open(store_at(published_uri(settings, 1)))
    assert published is not None
    assert (published.row_count, len(published.files)) == (0, 1), "both rows are masked"
    tick_everywhere(maker)
    plan = plan_read(settings, 1)
    assert plan.tick > tick
    assert read_keys(plan, keys_of(early, late)).to_pylist() == [{"id": late, "body": "late"}]
    assert read_keys(plan_read(settings, 1, at=tick), keys_of(early, late)).num_rows == 0


def test_keys_of_several_fields_are_found_by_get_and_by_a_predicate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also after a field of the key was renamed. The second column decides: each symbol is in each file."""
    days = [date(2026, 11, day) for day in (1, 2, 3)]
    with deployment() as db:
        quotes = db.create_collection(
            "quotes", {"close": "int32", "day": "date", "symbol": "string"}, key=("symbol", "day"), vchannels=2
        )
        KeyIndex.open(db.settings.key_index_path(quotes.id)).request()
        for number, day in enumerate(days):
            quotes.insert([{"symbol": name, "day": day, "close": number} for name in "ABC"])
            db.settle()
        quotes.delete([("B", days[0])])
        db.settle()
        publish(db.settings, quotes.id)
        quotes.alter(rename={"symbol": "ticker"})
        db.settle()
        publish(db.settings, quotes.id)
        taken: list[int] = []
        take = TableHandle.take_rows

        def take_rows(table: TableHandle, name: str, positions: Any, **named: Any) -> tuple[pa.Table, int]:
            taken.append(len(positions))
            return take(table, name, positions, **named)

        def refused(*given: Any, **named: Any) -> None:
            raise AssertionError("a file was scanned")

        monkeypatch.setattr(TableHandle, "take_rows", take_rows)
        monkeypatch.setattr(TableHandle, "scan_rows", refused)
        for where, wanted in (
            ("ticker = 'A' and day = '2026-11-02'", [("A", days[1])]),
            ("day in ('2026-11-01', '2026-11-03') and ticker in ('B', 'C') and close >= 0", [
                ("C", days[0]), ("B", days[2]), ("C", days[2]),
            ]),
            ("ticker = 'Z' and day = '2026-11-02'", []),
        ):  # fmt: skip
            taken.clear()
            rows = quotes.read(where=where, order_by="day, ticker").to_pylist()
            assert [(row["ticker"], row["day"]) for row in rows] == wanted
            assert sum(taken) == len(wanted)
        assert quotes.get([("A", days[1]), ("B", days[0])])["close"].to_pylist() == [1]
        monkeypatch.undo()
        assert quotes.read(where="ticker = 'A' and day > '2026-11-01'").num_rows == 2, "no such keys"
