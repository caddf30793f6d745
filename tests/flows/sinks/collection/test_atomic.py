"""A batch of whole transactions of its source changes each VChannel at one tick, whatever is killed."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from itertools import pairwise
from unittest.mock import patch

import pyarrow as pa
import pytest

import millrace.testing
from millrace.base.errors import MillraceError
from millrace.client.database import Database
from millrace.flows.batch import Batch
from millrace.flows.records import Action, Record
from millrace.flows.sinks.collection import atomic
from millrace.flows.sinks.collection.atomic import in_transactions
from millrace.flows.sinks.collection.journal import InFlight
from millrace.flows.sinks.collection.lane import LaneJournal
from millrace.flows.sinks.collection.sink import CollectionSink
from millrace.message.keys import vchannel_index
from millrace.message.model import MutableMessage
from millrace.message.types import MessageType
from millrace.testing import Deployment
from tests.failpoints import at_failpoints
from tests.flows.sinks.collection.test_lane import lost

KEYS = 12
POINTS = ("sink.journaled", "sink.uncommitted", "sink.sent", "sink.renumbered")


class Killed(BaseException):
    """A process ends."""


@pytest.fixture(scope="module")
def db(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    with millrace.testing.deployment(tmp_path_factory.mktemp("atomic") / "data", append_retry_delay=0.01) as made:
        yield made


def change(offset: int, key: int, n: int | None) -> Action:
    name = f"k{key}"
    body = None if n is None else json.dumps({"id": name, "n": n}).encode()
    return Action(Record("in", 0, offset, name.encode(), body, 0), name, body, None)


class Bank:
    """Transactions of a source that move an amount between rows, make rows and remove some: the sum is the same."""

    def __init__(self, dice: random.Random, transactions: int, vchannels: int) -> None:
        rows: dict[str, int] = {}
        self.changes: list[Action] = []
        self.ends: list[int] = []
        homes = vchannel_index(pa.array([f"k{key}" for key in range(KEYS)]), vchannels)
        self._home = {f"k{key}": int(homes[key]) for key in range(KEYS)}
        self.states: list[set[tuple[tuple[str, int], ...]]] = [{()} for _ in range(vchannels)]
        """By VChannel the rows that it has after each transaction."""
        for number in range(transactions):
            for key in dice.sample(range(KEYS), dice.randrange(1, 6)):
                gone = dice.random() < 0.3
                rows.pop(f"k{key}", None)
                if not gone:
                    rows[f"k{key}"] = number
                self.changes.append(change(len(self.changes), key, None if gone else number))
            self.ends.append(len(self.changes))
            for home, states in enumerate(self.states):
                states.add(self.of(home, rows))
        self.rows = rows

    def of(self, home: int, rows: dict[str, int]) -> tuple[tuple[str, int], ...]:
        return tuple(sorted((key, n) for key, n in rows.items() if self._home[key] == home))

    def seen(self, db: Deployment, name: str) -> dict[str, int]:
        """Check that each VChannel is in the state after a transaction at each tick; return the rows at the end."""
        db.settle()
        vchannels = list(db.definition(name).vchannels)
        rows: list[dict[str, int]] = [{} for _ in vchannels]
        found = db.collection(name).changes_between().read_all().to_pylist()
        for place, each in enumerate(found):
            mine = rows[vchannels.index(each["_vchannel"])]
            mine.pop(each["id"], None)
            if each["_change"] != "delete":
                mine[each["id"]] = each["n"]
            after = found[place + 1] if place + 1 < len(found) else None
            if after is None or (after["_vchannel"], after["_time_tick"]) != (each["_vchannel"], each["_time_tick"]):
                home = vchannels.index(each["_vchannel"])
                assert self.of(home, mine) in self.states[home], f"half a transaction at {each['_time_tick']}"
        return {key: n for mine in rows for key, n in mine.items()}


@pytest.mark.parametrize(
    ("seed", "vchannels"),
    [(0, 1), (1, 2), *(pytest.param(seed, 1 + seed % 2, marks=pytest.mark.slow) for seed in range(2, 60))],
)
def test_a_reader_sees_whole_transactions_through_kills_lost_answers_and_flushes(
    db: Deployment, seed: int, vchannels: int
) -> None:
    dice = random.Random(seed)
    name = f"bank{seed}v{vchannels}"
    db.create_collection(name, {"id": "string", "n": "int32"}, key="id", vchannels=vchannels)
    bank = Bank(dice, 25, vchannels)
    position, sink, faults = 0, CollectionSink(db.settings, name, flow=name), 0
    while position < len(bank.changes):
        ahead = [end for end in bank.ends if end > position]
        end = ahead[min(dice.randrange(3), len(ahead) - 1)]
        fault, point = dice.random() if faults < 30 else 1.0, dice.choice(POINTS)

        def act(passed: str, point: str = point, fault: float = fault) -> None:
            if passed == point and fault < 0.3:
                raise Killed
            if passed == "sink.uncommitted" and 0.3 <= fault < 0.45:
                db.collection(name).flush()  # ends open transactions of the VChannel

        with ExitStack() as stack:
            stack.enter_context(at_failpoints(act))
            if 0.45 <= fault < 0.6:
                stack.enter_context(lost(taken=dice.random() < 0.5))
            batch = Batch("in-0", position, end, documents=bank.changes[position:end], atomic=True)
            try:
                sink.write(batch)
            except (Killed, MillraceError):
                faults += 1
                if dice.random() < 0.5:
                    with suppress(MillraceError):
                        sink.close()
                sink = CollectionSink(db.settings, name, flow=name)
                continue
        if dice.random() < 0.7:  # else the position was not recorded
            position = end
    sink.close()
    assert faults > 3
    assert bank.seen(db, name) == bank.rows
    assert {row["id"]: row["n"] for row in db.collection(name).read().to_pylist()} == bank.rows


def test_without_the_source_s_word_a_reader_may_see_half(db: Deployment) -> None:
    """What the test above would find."""
    db.create_collection("halves", {"id": "string", "n": "int32"}, key="id")
    bank = Bank(random.Random(1), 25, 1)
    with CollectionSink(db.settings, "halves", flow="halves") as sink:
        for start, end in pairwise((0, *bank.ends)):
            sink.write(Batch("in-0", start, end, documents=bank.changes[start:end]))
    with pytest.raises(AssertionError, match="half a transaction"):
        bank.seen(db, "halves")


def test_rows_that_the_log_refuses_leave_the_others_at_one_tick(db: Deployment) -> None:
    """The definition that this sink knows is older than the check that the log has."""
    made = db.create_collection("refused", {"id": "string", "n": "int32"}, key="id")
    made.insert([{"id": f"k{key}", "n": 0} for key in (1, 2)])
    older = db.definition("refused")
    made.alter(add_check={"small": "n < 100"})
    changes = [change(0, 1, None), *(change(place, place + 1, 99 + place % 2) for place in range(1, 9))]
    with (
        patch.object(Database, "definition", return_value=older),
        CollectionSink(db.settings, "refused", flow="r") as to,
    ):
        done = to.write(Batch("in-0", 0, 9, documents=changes, atomic=True))
    assert sorted(each.record.offset for each in done.failures) == [1, 3, 5, 7]
    db.settle()
    found = made.changes_between().read_all().to_pylist()
    assert len({each["_time_tick"] for each in found if each["n"] != 0 or each["_change"] == "delete"}) == 1
    assert {row["id"]: row["n"] for row in made.read().to_pylist()} == {
        "k2": 0, **{f"k{place + 1}": 99 for place in (2, 4, 6, 8)},
    }  # fmt: skip


@pytest.mark.parametrize("atomic", [False, True], ids=["rows", "transactions"])
@pytest.mark.parametrize("killed", [False, True], ids=["", "killed before it is sent"])
def test_of_a_key_the_last_document_that_the_log_takes_counts(db: Deployment, atomic: bool, killed: bool) -> None:
    name = f"last_{atomic}_{killed}"
    made = db.create_collection(name, {"id": "string", "n": "int32"}, key="id")
    made.insert([{"id": f"k{key}", "n": 0} for key in range(6)])
    older = db.definition(name)
    made.alter(add_check={"small": "n < 100"})
    given = [(1, 1), (1, 100), (2, 2), (2, 102), (2, 101), (3, None), (3, 103), (4, 4), (4, 44), (5, 105), (5, None)]
    changes = [change(place, *each) for place, each in enumerate(given)]
    batch = Batch("in-0", 0, len(changes), documents=changes, atomic=atomic)
    with patch.object(Database, "definition", return_value=older):
        if killed:
            with at_failpoints(_killed_at("sink.journaled")), pytest.raises(Killed):
                CollectionSink(db.settings, name, flow=name).write(batch)
        with CollectionSink(db.settings, name, flow=name) as to:
            # The next owner's ranges begin and end elsewhere.
            parts = [replace(batch, end=2, documents=changes[:2]), batch] if killed else [batch]
            failures = [each.record.offset for part in parts for each in to.write(part).failures]
    assert sorted(set(failures)) == [1, 3, 4, 6]
    db.settle()
    assert {row["id"]: row["n"] for row in made.read().to_pylist()} == {"k0": 0, "k1": 1, "k2": 2, "k4": 44}
    if atomic and not killed:
        ticks = {each["_time_tick"] for each in made.changes_between().read_all().to_pylist() if each["n"] != 0}
        assert len(ticks) == 1


def _killed_at(point: str) -> Callable[[str], None]:
    def act(passed: str) -> None:
        if passed == point:
            raise Killed

    return act


def test_documents_that_the_log_takes_in_no_transaction_go_in_without_one_and_it_ends_at_once(db: Deployment) -> None:
    made = db.create_collection("split", {"id": "string", "n": "int32"}, key="id")
    made.insert([{"id": "k0", "n": 0}])
    (pchannel,) = made.definition.pchannels
    db.catalog.open_term(pchannel, config={"max_txn_bytes": 600})
    changes = [change(0, 0, None), *(change(place, place, place) for place in range(1, 300))]
    sent: list[MutableMessage] = []
    keep = LaneJournal.keep

    def kept(self: LaneJournal, batch: InFlight) -> None:
        sent[:] = batch.messages()
        keep(self, batch)

    with patch.object(LaneJournal, "keep", kept), CollectionSink(db.settings, "split", flow="split") as to:
        assert to.write(Batch("in-0", 0, 300, documents=changes, atomic=True)).acknowledged == 300
    assert sorted(each.type.name for each in sent) == ["DELETE", "ROLLBACK_TXN", "UPSERT"]
    db.settle()
    assert {row["id"]: row["n"] for row in made.read().to_pylist()} == {f"k{place}": place for place in range(1, 300)}


def test_more_than_a_transaction_holds_goes_without_one(monkeypatch: pytest.MonkeyPatch) -> None:
    one = MutableMessage(type=MessageType.INSERT, vchannel="a", collection_id=1, payload=b"12345")
    other = replace(one, vchannel="b")

    def types(messages: Sequence[MutableMessage]) -> list[MessageType]:
        return [each.type for each in in_transactions(messages)]

    begin, commit = MessageType.BEGIN_TXN, MessageType.COMMIT_TXN
    assert types([one, other, one]) == [begin, one.type, one.type, commit, other.type]
    assert types([one, other]) == [one.type, other.type], "a message is one tick"
    monkeypatch.setattr(atomic, "TXN_BYTES", 9)
    assert types([one, other, one]) == [one.type, one.type, other.type]
