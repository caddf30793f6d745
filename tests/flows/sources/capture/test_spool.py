"""The spool of a capture against a model: random batches, snapshots that are cut off, commits that are killed."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.base.errors import LogRegressed, PositionTruncated, StreamBusy, UnsupportedVersion
from millrace.flows.sources.capture.lane import CapturedRows, CapturedTable
from millrace.flows.sources.capture.spool import Spool
from millrace.flows.sources.source import Limits
from tests.failpoints import at_failpoints


class Killed(BaseException):
    """What a failpoint raises in place of a kill."""


def _kill(name: str) -> None:
    raise Killed(name)


def line(number: int) -> bytes:
    return b'{"o":"c","t":"d.t","k":{"id":%d},"a":{"id":%d}}' % (number, number)


def read(folder: Path, start: int, records: int = 3) -> list[int]:
    """The ids of the records from `start` on, read in batches; each batch begins at the end of the last one."""
    table, rows = CapturedTable(folder, "d.t"), CapturedRows(folder, "d.t")
    try:
        end, found = table.ends()["d.t-0"].high, []
        while start < end:
            for batch in rows.batches(start, end, Limits(records, 1 << 20, 0.0)):
                assert batch.start == start < batch.end <= end
                found += [int(each.key or b"") for each in batch.records or ()]
                start = batch.end
        return found
    finally:
        table.close()
        rows.close()


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("batch"), st.integers(0, 6), st.one_of(st.none(), st.integers(0, 6)), st.booleans()),
        st.tuples(st.just("complete"), st.integers(0, 3)),
        st.tuples(st.just("epoch")),
        st.tuples(st.just("trim"), st.integers(0, 30)),
        st.tuples(st.just("reopen")),
    ),
    max_size=25,
)


@settings(deadline=None, max_examples=60)
@given(steps=STEPS)
def test_readers_see_whole_transactions_of_whole_snapshots_once(
    steps: list[tuple[Any, ...]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("spool")
    spool = Spool(folder, write=True)
    spool.begin_epoch()
    changes: dict[int, int] = {}
    """Of the model: number -> id of what is kept."""
    offset = identity = number = boundary = visible = trimmed = 0
    complete = False
    try:
        for step in steps:
            match step:
                case ("batch", count, ends, killed):
                    ends = None if ends is None else min(ends, count)
                    lines = [line(identity + place) for place in range(count)]
                    if killed:
                        with pytest.raises(Killed), at_failpoints(_kill):
                            spool.append(lines, ends, partition={}, offset={"at": offset + 1})
                        spool.close()
                        spool = Spool(folder, write=True)
                    else:
                        spool.append(lines, ends, partition={}, offset={"at": offset + 1})
                        offset += 1
                        changes |= {number + place: identity + place for place in range(count)}
                        boundary = boundary if ends is None else number + ends
                        number += count
                    identity += count
                case ("complete", count):
                    lines = [line(identity + place) for place in range(count)]
                    spool.append(lines, count, partition={}, offset={"at": offset + 1}, complete=True)
                    changes |= {number + place: identity + place for place in range(count)}
                    number, identity, offset, complete = number + count, identity + count, offset + 1, True
                    boundary = number
                case ("epoch",):
                    if not complete:
                        changes = {place: each for place, each in changes.items() if place < visible}
                    visible = boundary if complete else visible
                    complete, offset = False, 0
                    spool.begin_epoch()
                case ("trim", position):
                    spool.trim(min(position, visible))
                    now = spool.standing().low
                    assert now <= max(trimmed, min(position, visible))
                    trimmed = now
                case _:
                    spool.close()
                    spool = Spool(folder, write=True)
            visible = boundary if complete else visible
            now = spool.standing()
            assert (now.high, now.next, now.low) == (visible, number, trimmed)
            assert (now.offset or {"at": 0})["at"] == offset, "the offset is that of what the spool holds"
            assert read(folder, trimmed) == [changes[each] for each in sorted(changes) if trimmed <= each < visible]
    finally:
        spool.close()


def test_a_position_outside_of_what_is_kept_is_an_error(tmp_path: Path) -> None:
    with Spool(tmp_path, write=True) as spool:
        spool.begin_epoch()
        spool.append([line(1), line(2)], 2, partition={}, offset={}, complete=True)
        spool.append([line(3)], 1, partition={}, offset={})
        spool.trim(2)
        rows = CapturedRows(tmp_path, "d.t")
        with pytest.raises(PositionTruncated, match="earliest is 2"):
            list(rows.batches(1, 3, Limits(1, 1, 0.0)))
        with pytest.raises(LogRegressed, match="after the newest"):
            list(rows.batches(4, 5, Limits(1, 1, 0.0)))
        rows.close()
        with pytest.raises(StreamBusy, match="stop it first"):
            Spool(tmp_path, write=True)
    assert read(tmp_path, 2) == [3]


def test_a_newer_spool_is_refused(tmp_path: Path) -> None:
    with Spool(tmp_path) as spool:
        spool._db.execute("pragma user_version = 2")
    with pytest.raises(UnsupportedVersion, match="version 2"):
        Spool(tmp_path)


def test_what_is_trimmed_frees_its_place(tmp_path: Path) -> None:
    dice = random.Random(1)
    with Spool(tmp_path, write=True) as spool:
        spool.begin_epoch()
        spool.append([], 0, partition={}, offset={}, complete=True)
        for _ in range(200):
            end = spool.append([dice.randbytes(2000).hex().encode() for _ in range(20)], 20, partition={}, offset={})
            spool.trim(end)
        size = sum(path.stat().st_size for path in tmp_path.iterdir())
    assert size < 6 << 20, "of 8 MB; SQLite's own log is 4 MB before it is used again"
