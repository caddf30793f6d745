"""Rows of several PChannels come in log time, however much of each lies in a batch.

Live, replayed and as a batch they come to the same.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import settings as profile
from hypothesis import strategies as st

from millrace.base.settings import Settings
from millrace.flows.sources.collection.rows import IDLE_MS, Place, RowsOf, RowsPlanner, rows_of
from millrace.message.ids import tick_physical_ms
from millrace.streams.keyed.in_process import Run
from millrace.streams.operators.windows import Windows
from tests.flows.sources.collection.test_rows import rows_source
from tests.streams.operators.cuts import alike
from tests.tables.wal_maker import SCHEMA, START_MS, Collection, WalMaker

DELAY = 2000
ROWS = pa.schema([("k", pa.int64()), ("t", pa.timestamp("ms", "UTC"))])
WINDOWS = Windows(("k",), "t", {"n": ("count", None)}, size=timedelta(seconds=4), slide=timedelta(seconds=2))

OPERATIONS = st.lists(
    st.fixed_dictionaries(
        {
            "home": st.integers(0, 1),
            "pause": st.sampled_from([0, 1, 700, 3000, 12_000]),
            "disorder": st.integers(0, DELAY),
            "bytes": st.sampled_from([1, 1, 4000]),
            "commits": st.sampled_from([(), (), (0,), (1,), (0, 1)]),
        }
    ),
    min_size=1,
    max_size=25,
)


class Deployment:
    """Two PChannels, whose rows are committed to the ``wal`` table one long after the other."""

    def __init__(self, folder: Path) -> None:
        self.maker = WalMaker(Settings(data_dir=folder / "data"))
        self.maker.open()
        self.collection = Collection(self.maker)
        self.collection.create()
        self.maker.commit()
        self.source = rows_source(self.maker, SCHEMA, columns=("id", "body", "_time_tick"))
        self.keys = [iter(self.collection.keys_of(each, 60)) for each in self.collection.vchannels]

    def insert(self, home: int, disorder: int, size: int) -> None:
        """A row whose event time is `disorder` ms before its log time. Its event time is the first word of its body."""
        at = f"{self.maker.ms + 1 - disorder} {'x' * size}"
        vchannel = self.collection.vchannels[home]
        row: dict[str, list[object]] = {"id": [next(self.keys[home])], "body": [at]}
        self.collection.append(vchannel, self.collection.insert(row, vchannel=vchannel))

    def lagging(self) -> Iterator[str]:
        """PChannels whose rows the ``wal`` table must have now.

        Those that wait long, or that were idle and are idle no more.
        """
        for name in self.maker.pchannels:
            if self.maker.pending[name]:
                waits = self.maker.ms - self.maker.pending[name][0][1]
                idle = self.maker.ms - tick_physical_ms(self.maker.last_tick(name))
                if max(waits, idle) > IDLE_MS - 3000:
                    yield name

    def batches(self, place: Place, **options: Any) -> Iterator[tuple[Place, pa.Table]]:
        planner = RowsPlanner(self.source)
        while (following := planner.next(place, **options)) != place:
            yield following, events(self.source, planner, place, following)
            place = following


def events(source: RowsOf, planner: RowsPlanner, start: Place, end: Place) -> pa.Table:
    rows = [row for task in planner.tasks(start, end) for batch in rows_of(source, task) for row in batch.to_pylist()]
    times = [datetime.fromtimestamp(int(row["body"].split()[0]) / 1000, UTC) for row in rows]
    return pa.Table.from_pylist([{"k": row["id"] % 2, "t": at} for row, at in zip(rows, times, strict=True)], ROWS)


def answers(batches: list[pa.Table]) -> tuple[list[dict[str, Any]], int]:
    """What windows make of the batches, and how many rows were late."""
    run = Run(WINDOWS, ROWS, timedelta(milliseconds=DELAY))
    steps = [*(run.batch(each) for each in batches), run.finish()]
    return alike([row for each in steps for row in each.output.to_pylist()]), sum(each.late.num_rows for each in steps)


def operation(home: int, pause: int, disorder: int, size: int, *commits: int) -> dict[str, Any]:
    return {"home": home, "pause": pause, "disorder": disorder, "bytes": size, "commits": commits}


@pytest.mark.slow
def test_a_replay_and_a_batch_give_what_the_stream_gave_and_make_no_row_late() -> None:
    """p0 has the bytes, and p1 comes into the ``wal`` table later.

    By bytes alone a replay would read p1 ahead, by commits alone the stream p0.
    """
    busy = [operation(0, 700, at * 500 % DELAY, 4000, 0) for at in range(8)]
    require_alike([*busy[:4], operation(1, 0, DELAY, 1), *busy[4:], operation(1, 700, DELAY, 1, 1), *busy[:2]])


@pytest.mark.slow
@given(OPERATIONS)
@profile(max_examples=30, deadline=None)
def test_any_bytes_and_any_skew_come_to_the_same(operations: list[dict[str, Any]]) -> None:
    require_alike(operations)


def require_alike(operations: list[dict[str, Any]]) -> None:
    folder = Path(tempfile.mkdtemp())
    try:
        made = Deployment(folder)
        live: list[pa.Table] = []
        place = start = Place.behind(made.source)
        for each in operations:
            made.maker.ms += each["pause"]
            for name in list(made.lagging()):
                made.maker.commit(name)
            made.insert(each["home"], each["disorder"], each["bytes"])
            for name in [*made.lagging(), *(made.maker.pchannels[at] for at in each["commits"])]:
                made.maker.commit(name)
            for reached, rows in made.batches(place, aligned=True):
                place = reached
                live.append(rows)
        made.maker.commit()
        for each in ({"aligned": True}, {"target": RowsPlanner(made.source).ends()}):
            for reached, rows in made.batches(place, **each):
                place = reached
                live.append(rows)
        whole = answers([pa.concat_tables(live)])
        assert (whole[1], sum(each.num_rows for each in live)) == (0, len(operations))
        assert answers(live) == whole, "live"
        for most in (1, 3000, 1 << 20):
            replayed = [rows for _, rows in made.batches(start, max_bytes=most, target=place.ticks)]
            assert answers(replayed) == whole, f"a replay by {most} bytes"
    finally:
        shutil.rmtree(folder)


def test_a_channel_without_rows_holds_the_others_back_until_it_is_idle_in_log_time(tmp_path: Path) -> None:
    made = Deployment(tmp_path)
    place = Place.behind(made.source, made.maker.last_tick("p1"))
    for pause, given_ in ((1000, 0), (IDLE_MS - 3000, 0), (4000, 3)):
        made.maker.ms += pause
        made.insert(0, 0, 1)
        made.maker.commit()
        assert sum(rows.num_rows for _, rows in made.batches(place, aligned=True)) == given_
        assert RowsPlanner(made.source).next(place) != place, "without a watermark nothing waits"
    assert made.maker.ms - START_MS > IDLE_MS
