"""The history of keys is what the stream of changes says of them, wherever flushes, indexes and compactions were."""

from __future__ import annotations

import shutil
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from millrace.base.errors import InvalidArgument, TickTooOld
from millrace.base.settings import Settings
from millrace.node.flush.definition import flush_to_end
from millrace.node.publish.definition import publish
from millrace.operations.compaction.run import compact
from millrace.storage.table import TableHandle, open_table
from millrace.tables.collections.changes import table_changes
from millrace.tables.collections.data_tables import earliest_readable_tick, rows_uri
from millrace.tables.read.key_history import HISTORY_COLUMNS, read_key_history
from millrace.tables.read.plan import plan_read
from tests.laws.profile import examples, nightly_example, spread
from tests.tables.read.test_at_tick import ACROSS, ALL, IMPORTS, PARTITIONS, made, tick_everywhere
from tests.tables.read.test_keys import FOLDS, catch_up, keys_of
from tests.tables.read_model import OPERATIONS, play

REPLACED = [
    ("insert", ALL, 1, 0),
    ("import", [(key, 1) for key in ALL[2:]], True),
    ("import", [], True),
]
"""Two retractions: the first removes keys that the second finds gone."""

Change = tuple[int, int, str, Any, int]
"""Time tick, write tick, kind, body, partition."""


def by_stream(settings: Settings, pchannels: list[str], keys: list[int]) -> dict[int, list[Change]]:
    """The changes of each key by the stream of changes, in which an upsert is two and a retraction has no key."""
    found: defaultdict[int, list[Change]] = defaultdict(list)
    for pchannel in pchannels:
        live: list[tuple[int, str, int]] = []  # key, VChannel, partition
        upserts: set[tuple[int, int]] = set()  # key, write tick
        for batch in table_changes(settings, 1, pchannel):
            for row in batch.rows.to_pylist():
                key, partition, channel = row["id"], row["_partition_id"], row["_vchannel"]
                time, write = row["_time_tick"], row["_write_tick"]
                if row["_change"] == "retract":
                    gone = {one for one, its, number in live if its == channel and partition in (0, number)}
                    for each in gone:
                        found[each].append((time, time, "retract", None, partition))
                    live = [one for one in live if one[1] != channel or partition not in (0, one[2])]
                elif row["_change"] == "delete":
                    found[key].append((time, write, "delete", None, partition))
                    live = [one for one in live if one[0] != key or partition not in (0, one[2])]
                else:
                    mine = found[key]
                    if mine and mine[-1][1:3] == (write, "delete"):
                        mine.pop()
                        upserts.add((key, write))
                    kind = "upsert" if (key, write) in upserts else "insert"
                    mine.append((time, write, kind, row["body"], partition))
                    live.append((key, channel, partition))
    return {key: found[key] for key in keys}


def by_history(rows: pa.Table, keys: list[int]) -> dict[int, list[Change]]:
    found: dict[int, list[Change]] = {key: [] for key in keys}
    for row in rows.to_pylist():
        place = (row["_time_tick"], row["_write_tick"], row["_change"], row["body"], row["_partition_id"])
        found[row["id"]].append(place)
    return found


def ordered(changes: dict[int, list[Change]], after: int, until: int) -> dict[int, list[Change]]:
    """Changes between two ticks; rows of one message have no order."""
    return {key: sorted((one for one in every if after < one[0] <= until), key=str) for key, every in changes.items()}


@example(PARTITIONS, 0, [0, 2, 3])
@nightly_example(ACROSS, 1, [1, 0])
@example(IMPORTS, 0, [5, 8, 3])
@example(REPLACED, 0, [0, 5])
@given(
    st.lists(OPERATIONS, max_size=25),
    st.integers(0, 2),
    st.lists(st.integers(0, 5), min_size=1, max_size=3, unique=True),
)
@examples(4)
def test_the_history_of_keys_is_their_part_of_the_changes_between_any_ticks(
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

        play(collection, operations, flushed=flushed)
        tick_everywhere(maker)
        wanted = by_stream(settings, list(maker.pchannels), keys)
        inside = maker.readable_ticks()

        def check(base: int = 0) -> None:
            for until in [each for each in spread(4, inside, first=covered) if each >= base]:
                plan = plan_read(settings, 1, at=until)
                for after in (0, *spread(4, inside, first=1)):
                    if base <= after <= until:
                        found = by_history(read_key_history(plan, keys_of(*keys), after=after), keys)
                        assert ordered(found, 0, until) == ordered(wanted, after, until), (after, until)

        check()
        flush_to_end(settings)
        check()
        publish(settings, 1, confirm=lambda names: {name: maker.last_tick(name) for name in names})
        check()
        compact(settings, FOLDS)
        check(earliest_readable_tick(open_table(rows_uri(settings, 1))))
        catch_up(settings)
        check(earliest_readable_tick(open_table(rows_uri(settings, 1))))
    finally:
        shutil.rmtree(folder)


def test_a_history_that_compaction_folded_names_the_tick_from_which_it_is_whole(settings: Settings) -> None:
    maker, collection = made(settings)
    vchannel = collection.vchannels[0]
    (key,) = collection.keys_of(vchannel, 1)
    for body in ("a", "b"):
        collection.append(vchannel, collection.insert({"id": [key], "body": [body]}, vchannel=vchannel, upsert=True))
    tick_everywhere(maker)
    flush_to_end(settings)
    whole = read_key_history(plan_read(settings, 1), keys_of(key))
    assert whole["body"].to_pylist() == ["a", "b"]
    compact(settings, FOLDS)
    base = earliest_readable_tick(open_table(rows_uri(settings, 1)))
    assert base > 0
    for after in (None, base - 1):
        with pytest.raises(TickTooOld, match=f"the changes up to .*{base}.* are gone"):
            read_key_history(plan_read(settings, 1), keys_of(key), after=after)
    collection.append(vchannel, collection.delete([key], vchannel=vchannel))
    tick_everywhere(maker)
    assert read_key_history(plan_read(settings, 1), keys_of(key), after=base)["_change"].to_pylist() == ["delete"]
    assert read_key_history(plan_read(settings, 1, at=base), keys_of(key), after=base + 1).num_rows == 0


def test_columns_of_a_history_are_those_that_were_asked_for(settings: Settings) -> None:
    maker, collection = made(settings)
    vchannel = collection.vchannels[0]
    (key,) = collection.keys_of(vchannel, 1)
    collection.append(vchannel, collection.insert({"id": [key], "body": ["x"]}, vchannel=vchannel))
    tick_everywhere(maker)
    plan = plan_read(settings, 1)
    found = read_key_history(plan, keys_of(key), columns=["body"])
    assert found.column_names == ["body", *HISTORY_COLUMNS.names]
    assert found.select(HISTORY_COLUMNS.names).schema == HISTORY_COLUMNS
    assert found["_time"].to_pylist()[0].timestamp() * 1000 == found["_time_tick"].to_pylist()[0] >> 18
    assert read_key_history(plan, keys_of()).num_rows == 0
    with pytest.raises(InvalidArgument, match="no column 'nowhere'"):
        read_key_history(plan, keys_of(key), columns=["nowhere"])


def test_the_cost_of_a_history_follows_the_key_and_the_ticks(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of an index of eight files it reads one row each, and only of those with ticks in the range."""
    maker, collection = made(settings)
    vchannel = collection.vchannels[0]
    keys = sorted(collection.keys_of(vchannel, 100))
    ticks = []
    for number in range(8):
        rows = {"id": keys, "body": [str(number)] * len(keys)}
        collection.append(vchannel, collection.insert(rows, vchannel=vchannel, upsert=number == 7))
        tick_everywhere(maker)
        ticks.append(maker.last_tick(vchannel.split("_")[0]))
        flush_to_end(settings)
    catch_up(settings)
    taken: list[int] = []
    take = TableHandle.take_rows

    def counted(table: TableHandle, name: str, positions: Any, **named: Any) -> tuple[pa.Table, int]:
        taken.append(len(positions))
        return take(table, name, positions, **named)

    monkeypatch.setattr(TableHandle, "take_rows", counted)
    read = TableHandle.read_rows

    def scanned(table: TableHandle, names: Any, *given: Any, **named: Any) -> pa.Table:
        assert table.uri != rows_uri(settings, 1) or not list(names), "a file was scanned"
        return read(table, names, *given, **named)

    monkeypatch.setattr(TableHandle, "read_rows", scanned)
    plan = plan_read(settings, 1)
    found = read_key_history(plan, keys_of(keys[50]))
    assert found["body"].to_pylist() == [str(number) for number in range(8)]
    assert taken == [1] * 8
    taken.clear()
    found = read_key_history(plan, keys_of(keys[50]), after=ticks[5])
    assert found.select(["_change", "body"]).to_pylist() == [
        {"_change": "insert", "body": "6"},
        {"_change": "upsert", "body": "7"},
    ]
    assert taken == [1] * 2
    assert np.all(np.diff(found["_time_tick"].to_numpy()) > 0)
