"""Laws 2 and 4, and the life of a segment.

Order of ticks, atomic transactions, what a reader from LastConfirmed sees.
"""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import dataclass, field
from itertools import pairwise

from hypothesis import given

from tests.laws.parts import Row
from tests.laws.profile import examples
from tests.laws.real import confirmed_id, row_id, run
from tests.laws.scribe import LOGS, Scribe

Delivered = tuple[int, tuple[tuple[int, int, int, int], ...]]


@dataclass
class Reader:
    """A reader of the WAL as docs/chain.md lets one be written.

    Assembles transactions, delivers at the commit's tick.
    """

    open: dict[tuple[str, int], list[Row]] = field(default_factory=dict)
    delivered: list[Delivered] = field(default_factory=list)
    strays: list[Row] = field(default_factory=list)  # bodies and ends without the Begin before them

    def take(self, row: Row) -> None:
        key = (row["vchannel"], row["txn_id"])
        if row["type"] == "BEGIN_TXN":
            assert key not in self.open, "a transaction begins while it is open"
            self.open[key] = [row]
        elif row["txn_id"] == 0:
            self.delivered.append((row["time_tick"], (row_id(row),)))
        elif key not in self.open:
            self.strays.append(row)
        elif row["type"] == "ROLLBACK_TXN":
            del self.open[key]
        else:
            self.open[key].append(row)
            if row["type"] == "COMMIT_TXN":
                self.delivered.append((row["time_tick"], tuple(row_id(each) for each in self.open.pop(key))))


def read_from(rows: list[Row], begin: tuple[int, int, int, int]) -> Reader:
    reader = Reader()
    for row in rows:
        if row_id(row) >= begin:
            reader.take(row)
    return reader


def accepted(rows: list[Row]) -> list[Row]:
    return [row for row in rows if row["reason"] is None]


@examples(60)
@given(LOGS)
def test_time_ticks_strictly_increase_in_the_order_of_ids(log: Scribe) -> None:
    ran = run(log.written)
    ticks = [row["time_tick"] for row in accepted(ran.rows)]
    assert all(one < other for one, other in pairwise(ticks))
    assert all(tick >= row["physical_ms"] << 18 for tick, row in zip(ticks, accepted(ran.rows), strict=True))
    assert max(ticks, default=0) <= ran.state.last_tick


@examples(60)
@given(LOGS)
def test_a_transaction_is_visible_whole_or_never(log: Scribe) -> None:
    ran = run(log.written)
    reader = read_from(accepted(ran.rows), (0, 0, 0, 0))
    assert not reader.strays, "a body or an end outside its transaction"
    still_open = {(name, txn_id) for name, channel in ran.state.vchannels.items() for txn_id in channel.txns}
    assert set(reader.open) == still_open


@examples(80)
@given(LOGS)
def test_reading_from_last_confirmed_misses_nothing_that_becomes_visible_later(log: Scribe) -> None:
    rows = accepted(run(log.written).rows)
    everything = read_from(rows, (0, 0, 0, 0)).delivered
    for row in rows:
        later = [thing for thing in everything if thing[0] > row["time_tick"]]
        assert confirmed_id(row) <= row_id(row)
        seen = read_from(rows, confirmed_id(row)).delivered
        assert [thing for thing in seen if thing[0] > row["time_tick"]] == later


@examples(60)
@given(LOGS)
def test_a_segment_is_created_then_filled_then_flushed_once(log: Scribe) -> None:
    ran = run(log.written)
    filled: dict[int, int] = {}
    flushed: set[int] = set()
    touched: dict[tuple[str, int], set[int]] = defaultdict(set)
    for row in accepted(ran.rows):
        segment = row["segment_id"]
        if row["type"] == "CREATE_SEGMENT":
            assert segment == row["time_tick"]
            assert segment not in filled
            filled[segment] = 0
        elif row["type"] in ("INSERT", "UPSERT"):
            assert segment not in flushed
            filled[segment] += row["rows"]
            if row["txn_id"]:
                touched[row["vchannel"], row["txn_id"]].add(segment)
        elif row["type"] == "IMPORT":
            for one, rows in imported(row).items():
                assert filled[one] == 0, "an Import's segment takes its rows alone"
                filled[one] = rows
        elif row["type"] == "FLUSH":
            assert segment not in flushed
            assert not any(segment in segments for segments in touched.values()), "flushed under an open transaction"
            assert row["rows"] == filled[segment]
            flushed.add(segment)
        elif row["type"] in ("COMMIT_TXN", "ROLLBACK_TXN"):
            touched.pop((row["vchannel"], row["txn_id"]), None)
    alive = {
        s.id for channel in ran.state.vchannels.values() for s in (*channel.growing.values(), *channel.sealed.values())
    }
    assert set(filled) - flushed == alive


@examples(60)
@given(LOGS)
def test_an_import_ends_what_grew_and_is_flushed_whole_before_anything_else(log: Scribe) -> None:
    rows = accepted(run(log.written).rows)
    growing: dict[str, set[int]] = defaultdict(set)
    for place, row in enumerate(rows):
        if row["type"] == "CREATE_SEGMENT":
            growing[row["vchannel"]].add(row["segment_id"])
        elif row["type"] == "FLUSH":
            growing[row["vchannel"]].discard(row["segment_id"])
        elif row["type"] == "IMPORT":
            made = list(imported(row))
            assert sorted(growing[row["vchannel"]]) == made
            behind = rows[place + 1 : place + 1 + len(made)]
            assert [(each["type"], each["segment_id"]) for each in behind] == [("FLUSH", number) for number in made]
            assert {json.loads(each["payload"])["policy"] for each in behind} <= {"import"}
            assert row["rows"] == sum(each["rows"] for each in behind)


def imported(row: Row) -> dict[int, int]:
    """An Import's rows by segment: the first one's id is the message's own, the others' follow it by partition."""
    files = json.loads(row["payload"])["files"]
    partitions = sorted({file["partition_id"] for file in files})
    return {
        row["segment_id"] + place: sum(file["rows"] for file in files if file["partition_id"] == partition)
        for place, partition in enumerate(partitions)
    }
