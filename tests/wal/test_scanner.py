"""The scanner's pure part delivers what a plain list of units says, wherever the rows are cut into runs."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.base.errors import WalGap
from millrace.message.ids import MessageId
from millrace.message.types import MessageType
from millrace.wal import scanner
from millrace.wal.scanner import (
    Filter,
    ImmutableTxn,
    Scanner,
    TickAboveFilter,
    TickFromFilter,
    TypeFilter,
    VChannelFilter,
    visible_units,
)
from tests.node.wal_samples import wal_rows

VCHANNELS = ("p0_1v0", "p0_1v1")


@dataclass(frozen=True)
class Unit:
    """What a reader is to get: a message, or a transaction with its bodies; by their ticks."""

    tick: int
    vchannel: str
    types: frozenset[str]
    bodies: tuple[int, ...] | None = None


@dataclass
class History:
    """Rows of a PChannel and the units they make, built by the rules and not by the code under test."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    units: list[Unit] = field(default_factory=list)
    open: dict[tuple[str, int], list[dict[str, Any]]] = field(default_factory=dict)

    def add(self, kind: str, vchannel: str, txn_id: int = 0) -> dict[str, Any]:
        number = len(self.rows)
        # A transaction's own id is not its tick: several messages stand in one entry.
        row = {
            "time_tick": 1000 + 3 * number,
            "entry": 500 + number // 3,
            "index": number % 3,
            "type": kind,
            "vchannel": vchannel,
            "txn_id": txn_id,
            "rows": 1,
            "payload": b"%d" % number,
        }
        self.rows.append(row)
        return row

    def plain(self, kind: str, vchannel: str) -> None:
        row = self.add(kind, vchannel)
        self.units.append(Unit(row["time_tick"], vchannel, frozenset({kind})))

    def begin(self, vchannel: str, txn_id: int) -> None:
        if (vchannel, txn_id) not in self.open:
            self.add("BEGIN_TXN", vchannel, txn_id)
            self.open[vchannel, txn_id] = []

    def body(self, kind: str, vchannel: str, txn_id: int) -> None:
        if (vchannel, txn_id) in self.open:
            self.open[vchannel, txn_id].append(self.add(kind, vchannel, txn_id))

    def end(self, vchannel: str, txn_id: int, *, commit: bool) -> None:
        bodies = self.open.pop((vchannel, txn_id), None)
        if bodies is None:
            return
        row = self.add("COMMIT_TXN" if commit else "ROLLBACK_TXN", vchannel, txn_id)
        if commit:
            types = frozenset({"COMMIT_TXN", *(body["type"] for body in bodies)})
            ticks = tuple(body["time_tick"] for body in bodies)
            self.units.append(Unit(row["time_tick"], vchannel, types, ticks))

    def id_at(self, tick: int) -> MessageId:
        row = next(row for row in self.rows if row["time_tick"] == tick)
        return MessageId(0, row["entry"], row["index"], 0)


@st.composite
def histories(draw: st.DrawFn) -> History:
    history = History()
    for _ in range(draw(st.integers(1, 30))):
        vchannel = draw(st.sampled_from(VCHANNELS))
        txn_id = draw(st.integers(1, 2))
        match draw(st.sampled_from(["plain", "whole", "begin", "body", "body", "commit", "rollback"])):
            case "plain":
                history.plain(draw(st.sampled_from(["INSERT", "UPSERT", "DELETE"])), vchannel)
            case "whole":
                history.plain(draw(st.sampled_from(["TIME_TICK", "FLUSH_ALL"])), "")
            case "begin":
                history.begin(vchannel, txn_id)
            case "body":
                history.body(draw(st.sampled_from(["INSERT", "DELETE"])), vchannel, txn_id)
            case end:
                history.end(vchannel, txn_id, commit=end == "commit")
    return history


def scanned(scanner: Scanner, rows: list[dict[str, Any]], cuts: list[int]) -> list[Unit]:
    bounds = [0, *sorted({cut for cut in cuts if 0 < cut < len(rows)}), len(rows)]
    units = []
    for start, stop in pairwise(bounds):
        for delivered in visible_units(scanner.push(wal_rows(rows[start:stop]))):
            if isinstance(delivered, ImmutableTxn):
                types = {MessageType(each.type).name for each in (delivered.commit, *delivered.bodies)}
                bodies = tuple(body.time_tick for body in delivered.bodies)
                units.append(Unit(delivered.time_tick, delivered.vchannel, frozenset(types), bodies))
            else:
                kind = frozenset({MessageType(delivered.type).name})
                units.append(Unit(delivered.time_tick, delivered.vchannel, kind))
    return units


CUTS = st.lists(st.integers(0, 40), max_size=6)


@given(history=histories(), cuts=CUTS, place=st.integers(0, 40))
def test_units_after_a_tick_are_the_model_list_whatever_the_runs(history: History, cuts: list[int], place: int) -> None:
    after = 999 + 3 * min(place, len(history.rows))
    found = scanned(Scanner(after_tick=after), history.rows, cuts)
    assert found == [unit for unit in history.units if unit.tick > after]


@given(history=histories(), cuts=CUTS, data=st.data())
def test_filters_hold_a_transaction_against_its_commit_and_deliver_it_whole(
    history: History, cuts: list[int], data: st.DataObject
) -> None:
    names = data.draw(st.sets(st.sampled_from(VCHANNELS)))
    kinds = data.draw(st.sets(st.sampled_from(["INSERT", "DELETE", "COMMIT_TXN", "TIME_TICK"]), min_size=1))
    tick = data.draw(st.integers(999, 1000 + 3 * len(history.rows)))
    bound = data.draw(st.sampled_from([TickAboveFilter(tick), TickFromFilter(tick)]))
    filters: list[Filter] = [VChannelFilter(names), TypeFilter({MessageType[kind] for kind in kinds}), bound]
    expected = [
        unit
        for unit in history.units
        if unit.vchannel in {"", *names}
        and unit.types & kinds
        and (unit.tick > tick if isinstance(bound, TickAboveFilter) else unit.tick >= tick)
    ]
    assert scanned(Scanner(filters=filters), history.rows, cuts) == expected


@given(history=histories(), cuts=CUTS, place=st.integers(0, 40))
def test_a_least_id_is_held_against_the_message_that_makes_a_unit_visible(
    history: History, cuts: list[int], place: int
) -> None:
    first = MessageId(0, 500 + place // 3, place % 3, 0)
    expected = [unit for unit in history.units if history.id_at(unit.tick) >= first]
    assert scanned(Scanner(first_id=first), history.rows, cuts) == expected


@given(history=histories().filter(lambda history: history.rows), place=st.integers(0, 40))
def test_rows_that_come_twice_are_an_error_and_never_delivered_twice(history: History, place: int) -> None:
    scanner = Scanner()
    scanner.push(wal_rows(history.rows))
    with pytest.raises(WalGap):
        scanner.push(wal_rows(history.rows[min(place, len(history.rows) - 1) :]))


def test_a_delivered_message_has_what_was_appended_and_what_the_chain_stamped() -> None:
    history = History()
    history.plain("INSERT", VCHANNELS[0])
    (message,) = visible_units(Scanner().push(pa.Table.from_batches([wal_rows(history.rows)])))
    assert (message.id, message.time_tick, message.vchannel) == (MessageId(0, 500, 0, 0), 1000, VCHANNELS[0])
    assert not isinstance(message, ImmutableTxn)
    assert (message.type, message.payload, message.rows) == (MessageType.INSERT, b"0", 1)


def test_a_few_rows_are_the_same_objects_as_many(monkeypatch: pytest.MonkeyPatch) -> None:
    history = History()
    for place in range(3):
        history.plain("INSERT", VCHANNELS[place % 2])
    rows = Scanner().push(wal_rows(history.rows))
    found = list(visible_units(rows))
    monkeypatch.setattr(scanner, "_FEW", 0)
    assert list(visible_units(rows)) == found
    assert len(found) == 3


def test_the_old_names_of_the_filters_warn_and_work() -> None:
    for old, new in {"VChannels": "VChannelFilter", "TickAbove": "TickAboveFilter", "Types": "TypeFilter"}.items():
        with pytest.warns(DeprecationWarning, match=f"use {new}"):
            assert getattr(scanner, old) is getattr(scanner, new)
    with pytest.raises(AttributeError):
        scanner.Nothing  # noqa: B018
