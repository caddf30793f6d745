"""Documents of a lane in a collection: each takes effect once, whoever owns the lane and however its ranges are cut."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any
from unittest.mock import patch

import pytest

import millrace.testing
from millrace.base.errors import LogUnavailable, SinkBusy, SinkRefused
from millrace.client.append_client import AppendClient
from millrace.client.database import Database
from millrace.flows.batch import Batch
from millrace.flows.records import TASK_PUT, Action, Failure, Record
from millrace.flows.sinks.collection.lane import LANES
from millrace.flows.sinks.collection.sink import CollectionSink
from millrace.storage.store import store_at
from millrace.testing import Deployment


@pytest.fixture(scope="module")
def db(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    with millrace.testing.deployment(tmp_path_factory.mktemp("lanes") / "data", append_retry_delay=0.01) as made:
        yield made


@pytest.fixture
def name(db: Deployment, request: pytest.FixtureRequest) -> str:
    made = f"c{abs(hash(request.node.name)) % 10**9}"
    db.create_collection(made, {"id": "string", "n": "int16"}, key="id", vchannels=3)
    return made


def sink(db: Deployment, name: str) -> CollectionSink:
    return CollectionSink(db.settings, name, flow=f"flow-{name}")


def documents(start: int, end: int, *, keys: int = 1000, bad: Sequence[int] = ()) -> list[Action]:
    """The document at offset n has the key of n modulo `keys`; the numbers of `bad` ones do not fit."""
    return [
        Action(
            Record("in", 0, n, b"", b"", 0),
            f"k{n % keys}",
            json.dumps({"id": f"k{n % keys}", "n": n + (1 << 20 if n in bad else 0)}).encode(),
            n,
        )
        for n in range(start, end)
    ]


def lane(start: int, end: int, name: str = "in-0", *, generation: int = 0, **more: Any) -> Batch:
    return Batch(name, start, end, documents=documents(start, end, **more), generation=generation)


def effects(db: Deployment, name: str) -> Counter[int]:
    """How often each document took effect."""
    db.settle()
    changes = db.collection(name).changes_between().read_all()
    return Counter(row["n"] for row in changes.to_pylist() if row["_change"] != "delete")


def lost(taken: bool) -> Any:
    told = AppendClient.append

    def append(self: AppendClient, *args: Any, **options: Any) -> Any:
        if taken:
            told(self, *args, **options)
        raise LogUnavailable("the answer was lost")

    return patch.object(AppendClient, "append", append)


def test_a_range_that_is_repeated_in_other_cuts_has_no_second_effect(db: Deployment, name: str) -> None:
    for cuts in ((0, 10, 30), (0, 5, 25, 40), (10, 40, 41)):
        with sink(db, name) as to:
            for start, end in pairwise(cuts):
                assert to.write(lane(start, end)).acknowledged == end - start
            assert to.standing(["in-0", "other-0"]) == {"in-0": max(30, cuts[-1])}
    assert effects(db, name) == Counter(range(41))


@pytest.mark.parametrize("taken", [True, False], ids=["the log had it", "the log had it not"])
def test_the_next_owner_sends_what_the_former_one_journaled(db: Deployment, name: str, taken: bool) -> None:
    former, owner = sink(db, name), sink(db, name)
    former.write(lane(0, 10))
    with lost(taken), pytest.raises(SinkBusy):
        former.write(lane(10, 20))
    assert owner.write(lane(10, 25)).repeated == 10
    former.close()
    owner.close()
    assert effects(db, name) == Counter(range(25))


def test_a_former_owner_writes_nothing_more_and_other_lanes_go_on(db: Deployment, name: str) -> None:
    former, owner = sink(db, name), sink(db, name)
    former.write(lane(0, 10))
    former.write(Batch("in-1", 0, 1, documents=documents(500, 501)))
    owner.write(lane(10, 20))
    with pytest.raises(SinkBusy, match="taken it over"):
        former.write(lane(10, 15))
    former.write(Batch("in-1", 1, 700, documents=documents(501, 502)))
    assert owner.write(lane(20, 30)).acknowledged == 10
    assert former.write(lane(10, 31)).repeated == 20, "it may own the lane again, and finds what was written meanwhile"
    for each in (former, owner):
        each.close()
    assert effects(db, name) == Counter([*range(31), 500, 501])


def test_a_former_owner_that_was_suspended_before_its_first_message_sends_none(db: Deployment, name: str) -> None:
    """It has journaled, stops, and its successor and the one after that write newer documents of its keys."""
    former, owner = sink(db, name), sink(db, name)
    former.write(lane(0, 5, keys=5))
    journal = former._lanes["in-0"].journal
    settle = journal._settle

    def suspended(*args: Any) -> Any:
        for end in (20, 30):
            owner.write(lane(5, end, keys=5))
            owner.close()
        return settle(*args)

    with patch.object(journal, "_settle", suspended), pytest.raises(SinkBusy, match="another worker"):
        former.write(lane(5, 10, keys=5))
    former.close()
    db.settle()
    assert sorted(row["n"] for row in db.collection(name).read().to_pylist()) == [25, 26, 27, 28, 29]
    assert set(effects(db, name).values()) == {1}


def test_a_document_that_does_not_fit_fails_again_when_its_range_is_repeated(db: Deployment, name: str) -> None:
    for _ in range(2):
        with sink(db, name) as to:
            done = to.write(lane(0, 60, keys=50, bad=(7, 55)))
            assert (done.acknowledged, [each.record.offset for each in done.failures]) == (58, [7, 55])
            assert all("int16" in each.reason for each in done.failures)
    assert effects(db, name) == Counter({5, *range(10, 60)} - {55}), "of a key the last that fits"


def test_rows_that_the_log_refuses_are_set_apart_one_by_one(db: Deployment, name: str) -> None:
    """The definition that this sink knows is older than the check that the log has."""
    older = db.definition(name)
    db.collection(name).alter(add_check={"small": "n < 100"})
    with patch.object(Database, "definition", return_value=older), sink(db, name) as to:
        done = to.write(lane(90, 103))
    assert done.acknowledged == 10
    assert {each.record.offset for each in done.failures} == {100, 101, 102}
    with sink(db, name) as to:
        again = to.write(lane(90, 105))
    assert {each.record.offset for each in again.failures} == {100, 101, 102, 103, 104}
    assert again.repeated == 10
    assert effects(db, name) == Counter(range(90, 100))


@pytest.mark.parametrize("atomic", [False, True], ids=["alone", "in a transaction"])
def test_a_row_that_is_larger_than_an_entry_is_set_apart_from_those_after_it(
    db: Deployment, name: str, atomic: bool
) -> None:
    """The log refuses it without its number, so all messages after it have none that follows."""
    rows = [{"id": f"k{n}" + "x" * ((17 << 20) if n == 1 else 0), "n": n} for n in range(6)]
    actions = [Action(Record("in", 0, n, b"", b"", 0), "", json.dumps(row).encode(), n) for n, row in enumerate(rows)]
    with sink(db, name) as to:
        done = to.write(Batch("in-0", 0, 6, documents=actions, atomic=atomic))
    assert [each.record.offset for each in done.failures] == [1]
    assert "exceeds the log's limit" in done.failures[0].reason
    assert effects(db, name) == Counter({0, 2, 3, 4, 5})


def test_a_batch_of_which_nothing_fits_is_no_loss_once_the_collection_takes_it(db: Deployment, name: str) -> None:
    older = db.definition(name)
    db.collection(name).alter(add_check={"small": "n < 100"})
    with sink(db, name) as to:
        to.write(lane(50, 60))
        with patch.object(Database, "definition", return_value=older), pytest.raises(SinkRefused, match="none of 30"):
            to.write(lane(200, 230))
        db.collection(name).alter(drop_check=["small"])
        assert to.write(lane(200, 230)).acknowledged == 30
    assert effects(db, name) == Counter([*range(50, 60), *range(200, 230)])


def test_positions_that_were_set_by_hand_make_an_older_journal_worth_nothing(db: Deployment, name: str) -> None:
    with sink(db, name) as to:
        to.write(lane(0, 10))
        assert to.write(lane(0, 10, generation=1)).repeated == 0
        with pytest.raises(SinkBusy, match="by hand"):
            to.write(lane(10, 20))
        assert to.write(lane(0, 20, generation=1)).repeated == 10
    assert effects(db, name) == Counter({n: 2 if n < 10 else 1 for n in range(20)})


def test_a_lane_keeps_one_file(db: Deployment, name: str) -> None:
    store = store_at(db.settings.table_uri(f"{LANES}/flow-{name}"))
    with sink(db, name) as to:
        for number in range(5):
            to.write(lane(number * 10, number * 10 + 10))
            assert len(store.list("in-0")) == 1
    assert len(store.list("in-0")) == 1
    assert len(store.read(f"in-0/{store.list('in-0')[0]}") or b"") < 2_000, "a lane that is idle keeps no messages"


def test_a_redrive_moves_no_position_and_claims_no_lane(db: Deployment, name: str) -> None:
    with sink(db, name) as to, sink(db, name) as redriven:
        to.write(lane(0, 10))
        assert redriven.write(Batch("in-0", 3, 3, documents=documents(3, 4))).acknowledged == 1
        to.write(lane(10, 20))
    assert effects(db, name)[3] == 2


def part(start: int, end: int, *, recorded: int, aside: Sequence[int] = (), **more: Any) -> Batch:
    """A part of a range that began at `recorded`, after records that are dead letters."""
    letters = [Failure(each.record, TASK_PUT, "sink", "ODD", "odd") for n in aside for each in documents(n, n + 1)]
    return replace(lane(start, end, **more), recorded=recorded, aside=letters)


def test_a_range_that_is_repeated_after_its_parts_has_the_same_failures(db: Deployment, name: str) -> None:
    """A runner that halved it was killed before it recorded anything."""
    with sink(db, name) as to:
        assert to.write(part(0, 10, recorded=0, bad=(4,))).acknowledged == 9
        assert to.write(part(11, 15, recorded=0, aside=(10,))).acknowledged == 4
        assert to.write(part(15, 20, recorded=0, aside=(10,))).acknowledged == 5
    with sink(db, name) as to:
        done = to.write(lane(0, 25, bad=(4,)))
    assert sorted((each.record.offset, each.kind) for each in done.failures) == [(4, "INVALID_ARGUMENT"), (10, "ODD")]
    assert (done.acknowledged, done.repeated) == (23, 18)
    with sink(db, name) as to:
        assert to.write(lane(20, 30)).failures == [], "what the runner has recorded is not asked for again"
        to.write(lane(30, 31))
        assert to._lanes["in-0"].files.failures == {}
    assert effects(db, name) == Counter(set(range(31)) - {4, 10})


def test_a_batch_of_which_nothing_fits_leaves_what_was_refused_before_it(db: Deployment, name: str) -> None:
    older = db.definition(name)
    db.collection(name).alter(add_check={"small": "n < 95"})
    with sink(db, name) as to:
        to.write(part(80, 90, recorded=80, aside=()))
        to.write(part(91, 95, recorded=80, aside=(90,)))
        with patch.object(Database, "definition", return_value=older), pytest.raises(SinkRefused, match="none of 30"):
            to.write(part(95, 125, recorded=80, aside=(90,)))
    with sink(db, name) as to:
        assert [each.record.offset for each in to.write(lane(80, 95)).failures] == [90]
    assert effects(db, name) == Counter(set(range(80, 95)) - {90})
