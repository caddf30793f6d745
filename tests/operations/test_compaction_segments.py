"""Small segments are joined to the first of them, and what happens to it afterwards happens to all."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from millrace.base.settings import Settings
from millrace.message import builders
from millrace.node.flush.definition import flush_to_end
from millrace.operations.compaction.declaration import CompactionParams
from millrace.operations.compaction.run import compact
from millrace.operations.compaction.segments import joined_events
from millrace.storage.table import open_table
from millrace.tables.collections.flush_tables import read_segments
from millrace.wal.visible.catalog import SegmentEvent
from tests.crash.test_flusher_crash_points import stopping_at
from tests.failpoints import at_failpoints
from tests.tables.wal_maker import Collection, WalMaker

PARAMS = CompactionParams(files=False, fold="never", vacuum=False)


def segments(settings: Settings) -> list[dict[str, Any]]:
    return read_segments(open_table(Path(settings.segments_uri))).to_pylist()


def flushed_and_dropped(settings: Settings) -> None:
    """Three flushed segments of one partition, known to the flusher.

    The partition's drop stands in the WAL behind them.
    """
    maker = WalMaker(settings, pchannels=("p0",))
    maker.open()
    collection = Collection(maker, vchannels=1)
    collection.create()
    [vchannel] = collection.vchannels
    for number in range(3):
        collection.append(vchannel, collection.insert({"id": [number], "body": ["a"]}, vchannel=vchannel))
        collection.append(vchannel, builders.manual_flush(vchannel=vchannel, collection_id=1, term=1))
    collection.append(vchannel, collection.insert({"id": [9], "body": ["b"]}, vchannel=vchannel, partition=2))
    maker.commit()
    flush_to_end(settings)
    collection.append(vchannel, builders.drop_partition(partition_id=1, vchannel=vchannel, collection_id=1, term=1))
    collection.append(vchannel, collection.insert({"id": [10], "body": ["b"]}, vchannel=vchannel, partition=2))
    maker.commit()
    assert not maker.rejected


@pytest.mark.slow
def test_a_drop_finds_the_joined_segment_wherever_compaction_comes_between(tmp_path: Path) -> None:
    names: list[str] = []
    clean = Settings(data_dir=tmp_path / "clean")
    flushed_and_dropped(clean)
    assert compact(clean, PARAMS).segments_joined == 2
    with at_failpoints(names.append):
        flush_to_end(clean)
    first, *others = [row for row in segments(clean) if row["partition_id"] == 1]
    assert (first["state"], first["rows"], first["merged_into"]) == ("dropped", 3, 0)
    assert {row["state"] for row in others} == {"dropped"}
    for number, name in enumerate(names):
        settings = Settings(data_dir=tmp_path / str(number))
        flushed_and_dropped(settings)
        with at_failpoints(stopping_at(number, partial(compact, settings, PARAMS))):
            flush_to_end(settings)
        compact(settings, PARAMS)
        states = {row["segment_id"]: row["state"] for row in segments(settings) if row["partition_id"] == 1}
        assert set(states.values()) == {"dropped"}, f"compaction at {name} ({number}): {states}"


def test_a_joined_segment_has_the_rows_of_all_and_the_others_name_it() -> None:
    run = [SegmentEvent("p_1v0", 1, 1, 10 + number, "flushed", 5, 100, "manual", number, number) for number in range(3)]
    first, *others = joined_events(run, 50)
    assert (first.segment_id, first.state, first.rows, first.bytes, first.time_tick) == (10, "flushed", 15, 300, 50)
    assert [(each.state, each.merged_into, each.time_tick) for each in others] == [("dropped", 10, 50)] * 2
