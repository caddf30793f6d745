"""The ledger of broadcasts: what is kept once, what waits for what, what is closed once, and what is forgotten."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from millrace.coord.broadcast.ledger import StalePlan
from millrace.coord.broadcast.sqlite_ledger import MAX_ABANDONED, MAX_CLOSED, SqliteLedger
from millrace.coord.broadcast.task import (
    CLUSTER,
    COLLECTION,
    BroadcastDraft,
    BroadcastTask,
    ResourceKey,
    TaskState,
    collection_keys,
    normalize_keys,
)
from millrace.coord.catalog.database import CoordinatorDb


@pytest.fixture
def database() -> Iterator[CoordinatorDb]:
    with CoordinatorDb(":memory:") as made:
        yield made


@pytest.fixture
def ledger(database: CoordinatorDb) -> SqliteLedger:
    return SqliteLedger(database, max_closed=3)


def drafted(collection: int = 1, *, request: str = "", **other: Any) -> BroadcastDraft:
    targets = (f"dml_0_{collection}v0", f"dml_1_{collection}v1")
    return replace(BroadcastDraft("ddl", collection, {"a": 1}, targets, collection_keys(collection), request), **other)


def fine(task: BroadcastTask, seen: Any) -> None:
    """A check that finds nothing."""


def kept(ledger: SqliteLedger, draft: BroadcastDraft) -> BroadcastTask:
    found = ledger.add(draft, fine)
    assert isinstance(found, BroadcastTask), found
    return found


def close(ledger: SqliteLedger, task: BroadcastTask) -> BroadcastTask:
    ledger.acknowledge(task.id, dict.fromkeys(task.targets, 5))
    done = ledger.finish(task.id, lambda task: None)
    assert done is not None
    return done


def test_what_works_on_the_same_resource_is_in_the_way_until_it_is_closed(ledger: SqliteLedger) -> None:
    first, other = kept(ledger, drafted(1)), kept(ledger, drafted(2))
    whole = drafted(3, keys=normalize_keys([ResourceKey(CLUSTER)]))
    assert ledger.add(drafted(1), fine) == (first,)
    assert ledger.add(whole, fine) == (first, other)
    close(ledger, first)
    ledger.abandon(other.id, "refused", lambda task: None)
    assert kept(ledger, whole).id > kept_id(first, other)
    assert isinstance(ledger.add(drafted(1), fine), tuple), "the cluster is somebody's"


def kept_id(*tasks: BroadcastTask) -> int:
    return max(task.id for task in tasks)


def test_shared_resources_are_no_obstacle_to_each_other(ledger: SqliteLedger) -> None:
    shared = normalize_keys([ResourceKey(COLLECTION, "1", shared=True)])
    kept(ledger, drafted(1, keys=shared))
    second = kept(ledger, drafted(1, keys=shared))
    found = ledger.add(drafted(1), fine)
    assert isinstance(found, tuple)
    assert second in found
    assert second.keys == shared, "as it was kept"


def test_a_request_is_one_broadcast_however_often_it_is_made(ledger: SqliteLedger) -> None:
    first = kept(ledger, drafted(1, request="mine"))
    assert kept(ledger, drafted(1, request="mine")) == first
    done = close(ledger, first)
    assert kept(ledger, drafted(1, request="mine")) == done == ledger.find_request("mine")
    assert kept(ledger, drafted(1)).id != kept(ledger, drafted(2)).id, "what has no name is another each time"


@pytest.mark.parametrize("error", [StalePlan, ValueError])
def test_what_the_check_raises_keeps_nothing_of_it(
    ledger: SqliteLedger, database: CoordinatorDb, error: type[Exception]
) -> None:
    def check(task: BroadcastTask, seen: Any) -> None:
        database.execute("insert into pchannel values ('made by the check', 1, 1)")
        raise error

    with pytest.raises(error):
        ledger.add(drafted(1), check)
    assert ledger.open_tasks() == []
    assert database.execute("select * from pchannel") == []
    kept(ledger, drafted(1))


def test_an_effect_is_made_once_when_all_have_it_and_with_the_closing_or_not_at_all(
    ledger: SqliteLedger, database: CoordinatorDb
) -> None:
    made: list[int] = []
    task = kept(ledger, drafted(1))
    first, second = task.targets
    ledger.acknowledge(task.id, {first: 7})
    waits = ledger.finish(task.id, lambda task: made.append(task.id))
    assert waits is not None
    assert (waits.state, waits.pending_targets, made) == (TaskState.PENDING, [second], [])
    ledger.acknowledge(task.id, {first: 3, second: 9})

    def broken(task: BroadcastTask) -> None:
        database.execute("insert into pchannel values ('half an effect', 1, 1)")
        raise ValueError

    with pytest.raises(ValueError):
        ledger.finish(task.id, broken)
    assert [each.state for each in ledger.open_tasks()] == [TaskState.ACKNOWLEDGED]
    assert database.execute("select * from pchannel") == []
    for _ in range(2):
        done = ledger.finish(task.id, lambda task: made.append(task.id))
        assert done is not None
        assert (done.state, done.ticks, made) == (TaskState.DONE, {first: 7, second: 9}, [task.id])
    assert ledger.abandon(task.id, "too late", lambda task: None) is None
    ledger.note_reason(task.id, "too late")
    assert ledger.task(task.id) == done


def test_what_is_given_up_has_no_effect_any_more_and_its_undoing_is_kept_with_that(ledger: SqliteLedger) -> None:
    task = kept(ledger, drafted(1))
    undoing = ledger.abandon(task.id, "refused", lambda task: drafted(1, kind="undo"))
    assert undoing is not None
    assert ledger.open_tasks() == [undoing]
    assert undoing.id > task.id
    ledger.acknowledge(task.id, dict.fromkeys(task.targets, 5))
    there = ledger.finish(task.id, lambda task: pytest.fail("it had its effect"))
    assert there is not None
    assert (there.state, there.reason) == (TaskState.ABANDONED, "refused")


def test_closed_ones_are_forgotten_but_for_the_newest_and_open_ones_never(
    ledger: SqliteLedger, database: CoordinatorDb
) -> None:
    waits = kept(ledger, drafted(9))
    tasks = [close(ledger, kept(ledger, drafted(1, request=f"r{number}"))) for number in range(6)]
    kept(ledger, drafted(2))
    assert [ledger.task(task.id) for task in tasks] == [None, None, None, *tasks[3:]]
    assert ledger.find_request("r0") is None
    assert waits in ledger.open_tasks()
    for table in ("broadcast", "request", "begun"):
        assert database.fetch_one(f"select count(*) from {table}") == (5,), table
    assert database.fetch_one("select count(*) from target") == (10,)
    assert MAX_CLOSED == 1_000


def test_reasons_are_kept_for_the_newest_alone_and_what_was_given_up_stays_that(database: CoordinatorDb) -> None:
    ledger = SqliteLedger(database)
    tasks = [kept(ledger, drafted(1))]
    for _ in range(MAX_ABANDONED):
        ledger.abandon(tasks[-1].id, "refused", lambda task: None)
        tasks.append(kept(ledger, drafted(1)))
    ledger.abandon(tasks[-1].id, "refused", lambda task: None)
    assert len(ledger.list_unresolved()) == MAX_ABANDONED
    first = ledger.task(tasks[0].id)
    assert first is not None
    assert (first.state, first.reason) == (TaskState.ABANDONED, "")


def test_ids_rise_when_the_clock_does_not(database: CoordinatorDb) -> None:
    ledger = SqliteLedger(database, wall=lambda: 0.0)
    ids = [close(ledger, kept(ledger, drafted(1))).id for _ in range(3)]
    assert ids == sorted(set(ids))
    assert kept(SqliteLedger(database, wall=lambda: 2e9), drafted(1)).id == int(2e9) - 1_577_836_800, (
        "above a newer copy's"
    )


def test_what_earlier_builds_left_is_taken_as_they_meant_it(ledger: SqliteLedger, database: CoordinatorDb) -> None:
    for number, done, words in ((1, 1, ""), (2, 1, "refused"), (3, 0, ""), (4, 0, "dml_0 is away")):
        database.execute("insert into broadcast values (?, 7, 'ddl', '{}', ?)", (number, done))
        database.execute("insert into target values (?, 'dml_0_7v0', 'dml_0', ?, ?)", (number, done, 5 * done))
        if words:
            database.execute("insert into trouble values (?, 1, ?)", (number, words))
    states = [(each.task.id, each.task.state) for each in ledger.list_recent(limit=10)]
    assert states == [
        (4, TaskState.PENDING), (3, TaskState.PENDING), (2, TaskState.ABANDONED), (1, TaskState.DONE)
    ]  # fmt: skip
    assert [each.keys for each in ledger.open_tasks()] == [collection_keys(7)] * 2
    found = ledger.add(drafted(7), fine)
    assert isinstance(found, tuple)
    assert [each.id for each in found] == [3, 4]
