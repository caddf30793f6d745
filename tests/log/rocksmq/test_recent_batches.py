"""What a reader finds in memory of the newest appends is what stands in the files."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from itertools import product
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.log.rocksmq.service import RocksMQ, RocksMQLog
from millrace.message.ids import LOGICAL_BITS, LogId
from millrace.message.log_entries import LogEntries
from tests.log.crash_images import CHANNEL, SETTINGS

_VALUES = st.lists(st.binary(max_size=60), min_size=1, max_size=5)
_APPENDS = st.lists(st.tuples(_VALUES, st.booleans(), st.integers(0, 2)), min_size=1, max_size=12)
"""Batches, whether each comes as an Arrow array, and the milliseconds that the clock moves before it."""

Entry = tuple[int, int, bytes]


def entries(found: LogEntries) -> list[Entry]:
    names = ("entry", "physical_ms", "value")
    return list(zip(*(found.batch.column(name).to_pylist() for name in names), strict=True))


def everything(log: RocksMQLog, start: int, end: int | None, max_bytes: int) -> tuple[list[Entry], LogId]:
    """All runs from `start` on, and where the last one ended."""
    found: list[Entry] = []
    position = LogId(0, start)
    while True:
        run = log.read(position, end=None if end is None else LogId(0, end), max_bytes=max_bytes)
        part = entries(run)
        assert run.next >= position
        assert len(part) <= 1 or sum(len(value) for _, _, value in part) <= max_bytes
        if not part:
            return found, run.next
        assert run.next == LogId(0, part[-1][0] + 1)
        found += part
        position = run.next


@settings(max_examples=100, deadline=None)
@given(appends=_APPENDS, recent=st.sampled_from([1 << 20, 20_000, 9_000, 0]), data=st.data())
def test_reads_at_every_position_are_those_of_the_files(
    appends: list[tuple[list[bytes], bool, int]], recent: int, data: st.DataObject
) -> None:
    clock = [1_000]
    with tempfile.TemporaryDirectory() as folder:
        chosen = replace(SETTINGS, recent_bytes=recent, segment_bytes=4096)
        with RocksMQ(Path(folder), settings=chosen, now_ms=lambda: clock[0]) as service:
            service.create(CHANNEL)
            log = service.open(CHANNEL)
            for values, arrow, wait in appends:
                clock[0] += wait
                log.append(pa.array([b"?", *values], pa.large_binary())[1:] if arrow else values)
            first, last = 1_000 << LOGICAL_BITS, log.describe().end.entry
            known, _ = everything(log, 0, None, 1 << 20)
            places = sorted({0, first, last - 1, last, *(entry + step for entry, _, _ in known for step in (-1, 0, 1))})
            asked = data.draw(
                st.lists(
                    st.tuples(
                        st.sampled_from(places),
                        st.none() | st.sampled_from(places),
                        st.sampled_from([1, 70, 400, 1 << 20]),
                    ),
                    min_size=1,
                    max_size=30,
                )
            )
            near = [everything(log, *each) for each in asked]
        with RocksMQ(Path(folder), settings=chosen, now_ms=lambda: clock[0]) as service:
            log = service.open(CHANNEL)
            assert [everything(log, *each) for each in asked] == near
            assert everything(log, 0, None, 1 << 20)[0] == known
    assert [value for _, _, value in known] == [value for values, _, _ in appends for value in values]


@pytest.mark.parametrize("kinds", list(product([True, False], repeat=4)))
def test_a_batch_that_is_not_kept_is_no_gap_between_those_that_are(tmp_path: Path, kinds: tuple[bool, ...]) -> None:
    with RocksMQ(tmp_path, settings=SETTINGS) as service:
        service.create(CHANNEL)
        log = service.open(CHANNEL)
        ids = []
        for number, arrow in enumerate(kinds):
            values = [b"%d" % number]
            ids += log.append(pa.array(values, pa.large_binary()) if arrow else values)
        for place, entry_id in enumerate(ids):
            found, _ = everything(log, entry_id.entry, None, 1 << 20)
            assert [value for _, _, value in found] == [b"%d" % number for number in range(place, len(kinds))]


def test_an_entry_that_follows_closely_is_the_array_that_was_appended(tmp_path: Path) -> None:
    with RocksMQ(tmp_path, settings=SETTINGS) as service:
        service.create(CHANNEL)
        log = service.open(CHANNEL)
        start = log.describe().end
        batch = pa.array([b"a" * 5_000], pa.large_binary())
        log.append(batch)
        read = log.read(start).batch.column("value")
        assert read.buffers()[2].address == batch.buffers()[2].address  # no copy, and no file was read
