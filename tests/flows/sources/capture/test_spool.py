"""The spool of a capture against a model: random batches, snapshots that are cut off, commits that are killed."""

from __future__ import annotations

import random
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.base.errors import LogRegressed, LogUnavailable, PositionTruncated, StreamBusy, UnsupportedVersion
from millrace.flows.sources.capture import lane
from millrace.flows.sources.capture import spool as spool_module
from millrace.flows.sources.capture.lane import CapturedRows, CapturedTables
from millrace.flows.sources.capture.spool import Mark, Spool
from millrace.flows.sources.source import Limits
from tests.failpoints import at_failpoints


class Killed(BaseException):
    """What a failpoint raises in place of a kill."""


def _kill(name: str) -> None:
    raise Killed(name)


TABLES = ("d.t", "d.u", "d.v")


def line(number: int, table: str = "d.t") -> tuple[str, bytes]:
    return table, b'{"o":"c","t":"%s","k":{"id":%d},"a":{"id":%d}}' % (table.encode(), number, number)


def read(folder: Path, start: int, records: int = 3, table: str = "d.t") -> list[int]:
    """The ids of the records from `start` on, read in batches; each batch begins at the end of the last one."""
    lanes, rows = CapturedTables(folder, [table]), CapturedRows(folder, table)
    try:
        end, found = lanes.ends()[f"{table}-0"].high, []
        while start < end:
            for batch in rows.batches(start, end, Limits(records, 1 << 20, 0.0)):
                assert batch.start == start < batch.end <= end
                found += [int(each.key or b"") for each in batch.records or ()]
                start = batch.end
        return found
    finally:
        lanes.close()
        rows.close()


STEPS = st.lists(
    st.one_of(
        st.tuples(
            st.just("batch"),
            st.lists(st.sampled_from(TABLES), max_size=6),
            st.lists(st.integers(0, 6), max_size=3),
            st.booleans(),
        ),
        st.tuples(st.just("complete"), st.lists(st.sampled_from(TABLES), max_size=3)),
        st.tuples(st.just("epoch")),
        st.tuples(st.just("trim"), st.sampled_from(TABLES), st.integers(0, 30)),
        st.tuples(st.just("reopen")),
    ),
    max_size=25,
)


@settings(deadline=None, max_examples=60)
@given(steps=STEPS, records=st.integers(1, 4))
def test_readers_see_whole_transactions_of_whole_snapshots_once(
    steps: list[tuple[Any, ...]], records: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("spool")
    spool = Spool(folder, write=True)
    spool.begin_epoch()
    changes: dict[int, tuple[str, int]] = {}
    """Of the model: number -> table and id of what is kept."""
    offset = identity = number = boundary = visible = 0
    trimmed = dict.fromkeys(TABLES, 0)
    complete = False
    try:
        for step in steps:
            match step:
                case ("batch", names, ends, killed):
                    places = sorted({min(each, len(names)) for each in ends})
                    marks = [Mark(each, f"0-1-{number + each}", 7) for each in places]
                    lines = [line(identity + place, name) for place, name in enumerate(names)]
                    if killed:
                        with pytest.raises(Killed), at_failpoints(_kill):
                            spool.append(lines, marks, partition={}, offset={"at": offset + 1})
                        spool.close()
                        spool = Spool(folder, write=True)
                    else:
                        spool.append(lines, marks, partition={}, offset={"at": offset + 1})
                        offset += 1
                        changes |= {number + place: (name, identity + place) for place, name in enumerate(names)}
                        boundary = number + places[-1] if places else boundary
                        number += len(names)
                    identity += len(names)
                case ("complete", names):
                    lines = [line(identity + place, name) for place, name in enumerate(names)]
                    end = [Mark(len(names), "", 7)]
                    spool.append(lines, end, partition={}, offset={"at": offset + 1}, complete=True)
                    changes |= {number + place: (name, identity + place) for place, name in enumerate(names)}
                    number, identity, offset, complete = number + len(names), identity + len(names), offset + 1, True
                    boundary = number
                case ("epoch",):
                    if not complete:
                        changes = {place: each for place, each in changes.items() if place < visible}
                    visible = boundary if complete else visible
                    complete, offset = False, 0
                    spool.begin_epoch()
                case ("trim", name, position):
                    spool.trim(name, min(position, visible))
                    now = spool.low(name)
                    assert now <= max(trimmed[name], min(position, visible))
                    trimmed[name] = now
                case _:
                    spool.close()
                    spool = Spool(folder, write=True)
            visible = boundary if complete else visible
            now = spool.standing()
            assert (now.high, now.next) == (visible, number)
            assert (now.offset or {"at": 0})["at"] == offset, "the offset is that of what the spool holds"
            for name in TABLES:
                wanted = [each for place, (of, each) in sorted(changes.items()) if of == name and place < visible]
                wanted = wanted[len([p for p, (of, _) in changes.items() if of == name and p < trimmed[name]]) :]
                assert read(folder, trimmed[name], records, name) == wanted
        assert (spool.standing().bytes > 0) == any(spool.next_of(name, 0) is not None for name in TABLES), (
            "what is trimmed is counted"
        )
    finally:
        spool.close()


def test_lanes_that_reach_a_mark_give_a_tick_and_wait_for_each_other(tmp_path: Path) -> None:
    """Transactions write one id into all tables: at a recorded tick, each lane has passed the same ids."""
    dice = random.Random(7)
    positions = {f"{name}-0": 0 for name in TABLES}
    passed: dict[str, list[int]] = {f"{name}-0": [] for name in TABLES}
    at: dict[int, dict[str, list[int]]] = {}
    clock = 0

    def tick() -> int:
        nonlocal clock
        clock += 1
        if dice.random() < 0.2:
            raise LogUnavailable("the server restarts")
        at[clock] = {lane: list(ids) for lane, ids in passed.items()}
        return clock

    with Spool(tmp_path, write=True) as spool:
        spool.begin_epoch()
        spool.append([], [Mark(0, "", 1)], partition={}, offset={}, complete=True)
        rows = {f"{name}-0": CapturedRows(tmp_path, name) for name in TABLES}
        lanes = CapturedTables(tmp_path, TABLES)
        for number in range(90):
            if number < 40:
                lines = [line(number, name) for name in dice.sample(TABLES, k=3)]
                cut = dice.randrange(4)
                spool.append(lines[:cut], [], partition={}, offset={})
                if dice.random() < 0.2:  # the rest is killed on its way, and comes again
                    with pytest.raises(Killed), at_failpoints(_kill):
                        spool.append(lines[cut:], [Mark(3 - cut, f"0-1-{number}", 1)], partition={}, offset={})
                spool.append(lines[cut:], [Mark(3 - cut, f"0-1-{number}", 1)], partition={}, offset={})
            limits = lanes.settle(positions, tick)
            for lane in dice.sample(sorted(rows), k=dice.randrange(1, 4)):  # the others are slow, or were killed
                end = min(lanes.ends()[lane].high, limits[lane])
                if positions[lane] < end:
                    (batch,) = rows[lane].batches(positions[lane], end, Limits(dice.randrange(1, 4), 1 << 20, 0.0))
                    passed[lane] += [int(each.key or b"") for each in batch.records or ()]
                    positions[lane] = batch.end
                    lanes.mirror([(lane.removesuffix("-0"), 0, batch.end)])
            if dice.random() < 0.2:
                lanes.close()
                lanes = CapturedTables(tmp_path, TABLES)
        recorded = spool.ticks()
        assert len(recorded) > 5
        for each in recorded:
            newest = int(each.mark.source.rpartition("-")[2] or -1)
            assert all(ids == list(range(newest + 1)) for ids in at[each.tick].values())
        assert all(ids == list(range(40)) for ids in passed.values())
        lanes.close()
        for reader in rows.values():
            reader.close()


def test_a_lane_that_stands_still_stops_the_ticks_and_not_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    monkeypatch.setattr(lane.time, "monotonic", lambda: now)
    with Spool(tmp_path, write=True) as spool, closing(CapturedTables(tmp_path, TABLES[:2])) as lanes:
        spool.begin_epoch()
        spool.append([line(1), line(1, "d.u")], [Mark(2, "a", 1)], partition={}, offset={}, complete=True)
        lanes.settle({"d.t-0": 0, "d.u-0": 0}, lambda: 1)
        spool.append([line(2), line(2, "d.u")], [Mark(2, "b", 1)], partition={}, offset={})
        lanes.settle({"d.t-0": 1, "d.u-0": 0}, lambda: 2)
        assert lanes.settle({"d.t-0": 1, "d.u-0": 0}, lambda: 2)["d.t-0"] == 1, "it waits for the other"
        now = lane.LONGEST_WAIT + 1
        lanes.settle({"d.t-0": 1, "d.u-0": 0}, lambda: 3)
        assert lanes.settle({"d.t-0": 1, "d.u-0": 0}, lambda: 3) == {}, "it does not wait for ever"
        lanes.settle({"d.t-0": 3, "d.u-0": 0}, lambda: 4)
        assert spool.ticks() == []
        lanes.settle({"d.t-0": 3, "d.u-0": 2}, lambda: 5)  # it follows again
        lanes.settle({"d.t-0": 3, "d.u-0": 4}, lambda: 6)
        assert [(each.tick, each.mark.source) for each in spool.ticks()] == [(6, "b")]


def test_recorded_ticks_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spool_module, "MAX_TICKS", 5)
    with Spool(tmp_path, write=True) as spool:
        for number in range(20):
            spool.record(number, Mark(number, f"0-1-{number}", 1))
        assert [each.tick for each in spool.ticks()] == [15, 16, 17, 18, 19]
        assert [each.mark.source for each in spool.ticks(limit=1)] == ["0-1-19"]


def test_marks_and_columns_leave_with_the_changes_before_them(tmp_path: Path) -> None:
    with Spool(tmp_path, write=True) as spool:
        spool.begin_epoch()
        for number in range(100):
            columns = [("d.t", {"number": number}, 0)]
            spool.append([line(number)], [Mark(1, str(number), 1)], partition={}, offset={}, columns=columns)
        spool.trim("d.t", 90)
        (marks,) = spool._db.execute("select count(*) from marks").fetchone()
        (columns,) = spool._db.execute("select count(*) from columns").fetchone()
        assert (marks, columns) == (11, 10)
        assert spool.columns("d.t", 95) == ({"number": 95}, 96)


def test_a_lane_that_is_behind_keeps_its_columns_while_another_is_trimmed(tmp_path: Path) -> None:
    with Spool(tmp_path, write=True) as spool:
        spool.begin_epoch()
        for number in range(10):
            columns = [(name, {"number": number}, 0) for name in ("d.t", "d.u")]
            lines = [line(number), line(number, "d.u")]
            spool.append(lines, [Mark(2, "", 1)], partition={}, offset={}, columns=columns)
        spool.trim("d.t", 17)
        assert spool.columns("d.u", 1) == ({"number": 0}, 2)


def test_positions_of_a_spool_are_not_those_of_another(tmp_path: Path) -> None:
    """Numbers of a spool that was made anew begin at 0: a flow that went on at its old position would miss rows."""
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        Spool(folder).close()  # whoever looks first makes the file, too
        Spool(folder, write=True).close()
    lanes = [CapturedTables(folder, TABLES) for folder in (*folders, folders[0])]
    first, second, again = [each.ids() for each in lanes]
    for each in lanes:
        each.close()
    assert first == again
    assert first.keys() == set(TABLES)
    assert not set(first.values()) & set(second.values())


def test_a_batch_ends_with_a_transaction_if_one_fits(tmp_path: Path) -> None:
    with Spool(tmp_path, write=True) as spool:
        spool.begin_epoch()
        lines = [line(each, name) for each, name in enumerate(("d.t", "d.u", "d.t", "d.t", "d.t", "d.t", "d.u"))]
        spool.append(lines, [Mark(3, "a", 1), Mark(7, "b", 1)], partition={}, offset={}, complete=True)
        rows = CapturedRows(tmp_path, "d.t")
        ends = [next(rows.batches(0, 6, Limits(records, 1 << 20, 0.0))).end for records in (1, 2, 3, 4, 5)]
        rows.close()
    assert ends == [1, 3, 3, 3, 6], "one of two changes of the first transaction, that one whole, and both of them"


def test_batches_have_the_columns_of_their_rows(tmp_path: Path) -> None:
    def described(*names: str) -> dict[str, Any]:
        columns = [{"name": each, "type": "int32", "meaning": None, "parameters": {}} for each in names]
        return {"key": ["id"], "columns": columns}

    with Spool(tmp_path, write=True) as spool:
        spool.begin_epoch()
        spool.append([line(0, "d.u")], [], partition={}, offset={})
        lines = [line(1), line(2), line(3, "d.u"), line(4), line(5)]
        columns = [("d.t", described("id"), 0), ("d.t", described("id", "a"), 3)]
        spool.append(lines, [Mark(5, "", 1)], partition={}, offset={}, columns=columns, complete=True)
        rows = CapturedRows(tmp_path, "d.t")
        end = spool.end_of("d.t", spool.standing().high)
        found, start = [], 0
        while start < end:
            for batch in rows.batches(start, end, Limits(100, 1 << 20, 0.0)):
                assert batch.columns is not None
                found.append(([each.key for each in batch.records or ()], list(batch.columns.types)))
                start = batch.end
        rows.close()
    assert found == [([b"1", b"2"], ["id"]), ([b"4", b"5"], ["id", "a"])]


def test_a_spool_of_an_earlier_build_goes_on(tmp_path: Path) -> None:
    """The file of version 1: one table, and its changes numbered without gaps."""
    body = b"\n".join(line(each)[1] for each in range(3))
    db = sqlite3.connect(tmp_path / "spool.db")
    db.executescript("""
        create table state (name text primary key, value text not null);
        create table history (number integer primary key, record text not null);
        create table columns (number integer primary key, name text not null, description text not null);
        create table changes (first integer primary key, count integer not null, boundary integer not null,
            size integer not null, bytes integer not null, body blob not null);
        insert into columns (name, description) values ('d.t', '{"columns": [], "key": []}');
        insert into state values ('offset', '{"at": 9}'), ('complete', 'true'), ('boundary', '12'), ('next', '13'),
            ('trimmed', '10'), ('epoch', '1');
        pragma user_version = 1;
    """)
    packed = pa.Codec("zstd").compress(body, asbytes=True)
    db.execute("insert into changes values (10, 3, 2, ?, ?, ?)", (len(body), len(packed), packed))
    db.commit()
    db.close()
    with Spool(tmp_path, write=True) as spool:
        now = spool.standing()
        assert (now.high, now.next, now.offset, now.bytes) == (12, 13, {"at": 9}, len(packed))
        assert read(tmp_path, 10) == [0, 1]
        spool.append([line(3)], [Mark(1, "0-1-1", 1)], partition={}, offset={"at": 10})
        assert read(tmp_path, 11) == [1, 2, 3]
        with pytest.raises(PositionTruncated, match="earliest is 10"):
            read(tmp_path, 9)


def test_a_position_outside_of_what_is_kept_is_an_error(tmp_path: Path) -> None:
    with Spool(tmp_path, write=True) as spool:
        spool.begin_epoch()
        spool.append([line(1), line(2)], [Mark(2, "", 1)], partition={}, offset={}, complete=True)
        spool.append([line(3)], [Mark(1, "", 1)], partition={}, offset={})
        spool.trim("d.t", 2)
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
        spool._db.execute("pragma user_version = 3")
    with pytest.raises(UnsupportedVersion, match="version 3"):
        Spool(tmp_path)


def test_what_is_trimmed_frees_its_place(tmp_path: Path) -> None:
    dice = random.Random(1)
    with Spool(tmp_path, write=True) as spool:
        spool.begin_epoch()
        spool.append([], [Mark(0, "", 1)], partition={}, offset={}, complete=True)
        for _ in range(200):
            lines = [("d.t", dice.randbytes(2000).hex().encode()) for _ in range(20)]
            spool.trim("d.t", spool.append(lines, [Mark(20, "", 1)], partition={}, offset={}))
        size = sum(path.stat().st_size for path in tmp_path.iterdir())
    assert size < 6 << 20, "of 8 MB; SQLite's own log is 4 MB before it is used again"
