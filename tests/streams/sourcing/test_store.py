"""The event store on a real log and real tables: versions, loading, history, snapshots, erasure and rebuilds."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any
from uuid import uuid4

import duckdb
import pytest

import millrace.testing
from millrace.base.errors import (
    AppendRejected,
    EntryTooLarge,
    EventStreamDamaged,
    EventUndecodable,
    InvalidArgument,
    LogUnavailable,
    PermissionDenied,
    TickTooOld,
    VersionConflict,
)
from millrace.message import builders
from millrace.message.wire.encode import encode_entry
from millrace.streams.sourcing.aggregate import Aggregate
from millrace.streams.sourcing.events import EventTypes
from millrace.streams.sourcing.groups import EVENT_SCHEMA, Appended, Command
from millrace.streams.sourcing.snapshots import Snapshot
from millrace.streams.sourcing.store import EventStore, Loaded
from tests.streams.sourcing.conftest import Open
from tests.streams.sourcing.flying import AIRCRAFT, EVENTS, Aircraft, Flown, Registered, after, flown


@dataclass
class _Sold:
    to: str


@dataclass
class _Unstable:
    """Its JSON form gives another state."""

    name: str = "a"

    def __post_init__(self) -> None:
        self.name += "!"


@dataclass
class _FlownFirst:
    flight: str
    distance: int
    delay: int | None


def test_events_are_appended_at_their_expected_version_and_folded(opened: Open) -> None:
    store = opened()
    first = store.append("N1", Registered("Ada"), flown(1), expected_version=0)
    assert (first.version, first.repeated) == (2, False)
    assert store.append("N1", flown(20), expected_version=2).version == 3
    assert store.load("N1") == replace(store.load("N1"), state=Aircraft("Ada", 2, 200, 1, "BOS"), version=3)
    assert store.load("N1", at=first.tick).state == Aircraft("Ada", 1, 100, 0, "BOS")
    assert store.load("N2").version == 0
    assert store.load("N2").state == Aircraft()


def test_the_loser_gets_the_current_version_and_changes_nothing(opened: Open) -> None:
    one, other = opened(), opened()
    one.append("N1", flown(1))
    other.append("N1", flown(2), flown(3), expected_version=1)
    for store, expected in ((one, 1), (one, 0), (other, 2), (other, 7)):
        with pytest.raises(VersionConflict, match="has version 3, not") as caught:
            store.append("N1", flown(4), expected_version=expected)
        assert (caught.value.key, caught.value.expected_version, caught.value.current_version) == ("N1", expected, 3)
    assert one.load("N1").state.flights == 3
    assert one.append("N1", flown(4), expected_version=3).version == 4


def test_of_many_commands_with_one_expected_version_one_wins(opened: Open) -> None:
    stores = [opened(vchannels=2) for _ in range(8)]
    begin, lost = threading.Barrier(8), []

    def run(store: EventStore[Aircraft]) -> list[int]:
        won = []
        for version in range(6):
            begin.wait(30)
            try:
                won.append(store.append("N1", flown(version), expected_version=version).version)
            except VersionConflict:
                lost.append(version)
            begin.wait(30)
        return won

    with ThreadPoolExecutor(8) as pool:
        assert sorted(version for won in pool.map(run, stores) for version in won) == [1, 2, 3, 4, 5, 6]
    assert sorted(lost) == sorted(list(range(6)) * 7)
    assert stores[0].load("N1").version == 6


def test_a_command_without_an_expected_version_follows_what_is_there(opened: Open) -> None:
    one, other = opened(), opened()
    one.append("N1", flown(1))
    assert other.append("N1", flown(2)).version == 2
    assert one.append("N1", flown(3)).version == 3


def test_a_decision_is_made_again_after_a_conflict(opened: Open) -> None:
    one, other = opened(), opened()
    one.append("N1", flown(1))
    seen = []

    def decide(state: Aircraft) -> list[Flown]:
        seen.append(state.flights)
        if len(seen) == 1:
            other.append("N1", flown(2))
        return [flown(3)] if state.flights < 3 else []

    assert one.execute("N1", decide).state.flights == 3
    assert seen == [1, 2]
    assert one.execute("N1", decide).version == 3  # nothing to do: no event
    assert one.execute("N1", lambda state: None).version == 3
    with pytest.raises(VersionConflict):
        one.execute("N1", lambda state: [other.append("N1", flown(4)), flown(5)][1:], attempts=1)


def test_a_batch_has_an_outcome_for_each_command(opened: Open) -> None:
    store = opened(vchannels=2)
    store.append("N0", flown(1))
    commands = [Command(f"N{number}", [flown(number)], 0) for number in range(50)]
    found = store.append_all([*commands, Command("N1", [flown(7)]), Command("N1", [flown(8)])])
    assert isinstance(found[0], VersionConflict)
    assert [each.version for each in found[1:]] == [1] * 49 + [2, 3]  # type: ignore[union-attr]
    again = store.append_all(commands[1:])
    assert all(each.repeated for each in again)  # type: ignore[union-attr]
    assert store.rebuild().events == 52


def test_bad_commands_are_refused_before_anything_is_sent(opened: Open) -> None:
    store = opened()
    for bad, words in [
        (Command("", [flown(1)]), "the key of an aggregate is a text"),
        (Command("N1", []), "has none"),
        (Command("N1", [Aircraft()]), "Aircraft is no registered event type"),
        (Command("N1", [flown(1)], -1), "an expected version is 0 to"),
    ]:
        with pytest.raises(InvalidArgument, match=words):
            store.append_all([Command("N1", [flown(1)]), bad])
    assert store.load("N1").version == 0


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (Command("N1", [flown(1)], True), "an expected version is 0 to"),
        (Command("N1", [flown(1)], "1"), "an expected version is 0 to"),  # type: ignore[arg-type]
        (Command(5, [flown(1)]), "the key of an aggregate is a text"),  # type: ignore[arg-type]
        (Command("\ud800", [flown(1)]), "the key of an aggregate is a text"),
        (Command("N1", [flown(1)], at=datetime(2026, 1, 1)), "needs a time zone"),  # noqa: DTZ001
        (Command("N1", [flown(1)], metadata=[1]), "metadata has names and values"),  # type: ignore[arg-type]
        (Command("N1", [flown(1)], metadata={"by": object()}), "has no JSON form"),
    ],
    ids=range(7),
)
def test_bad_input_is_a_typed_error(opened: Open, bad: Command, words: str) -> None:
    with pytest.raises(InvalidArgument, match=words):
        opened().append_all([bad])


def test_a_batch_larger_than_an_entry_is_split_and_a_command_too_large_is_refused_alone(opened: Open) -> None:
    store = opened()
    large = [Command(f"N{number}", [Flown("x" * (3 << 20), 1, 1, "B")]) for number in range(7)]
    found = store.append_all([*large, Command("N9", [Flown("x" * (17 << 20), 1, 1, "B")]), Command("N8", [flown(1)])])
    assert [isinstance(each, Appended) for each in found] == [True] * 7 + [False, True]
    assert isinstance(found[7], EntryTooLarge)


def test_an_aggregate_that_cannot_be_loaded_fails_its_own_command_alone(opened: Open) -> None:
    first = EventTypes()
    first.register(name="Sold")(_Sold)
    opened(aggregate=Aggregate(events=first, initial=Aircraft, fold=lambda state, event: state)).append(
        "N1", _Sold("B")
    )
    found = opened().append_all([Command("N0", [flown(1)]), Command("N1", [flown(1)]), Command("N2", [flown(1)])])
    assert isinstance(found[1], EventUndecodable)
    assert [isinstance(each, Appended) for each in found] == [True, False, True]


def test_a_fold_that_fails_on_stored_events_fails_the_commands_of_its_aggregate_alone(opened: Open) -> None:
    def fold(state: Aircraft, event: Flown) -> Aircraft:
        if event.distance < 0:
            raise ValueError("negative")
        return after(state, event)

    opened().append("N1", flown(1, distance=-1))
    store = opened(aggregate=Aggregate(events=EVENTS, initial=Aircraft, fold=fold))
    found = store.append_all([Command("N0", [flown(1)]), Command("N1", [flown(2)]), Command("N2", [flown(3)])])
    assert [isinstance(each, Appended) for each in found] == [True, False, True]
    assert isinstance(found[1], EventUndecodable)
    assert "ValueError: negative" in str(found[1])
    with pytest.raises(ValueError, match="negative"):
        store.load("N1")


@pytest.mark.parametrize("key", [" ", "a\x00b", "a\nb", "é", "e\u0301", "🛩", "$erased", "x" * 20_000])
def test_any_text_is_a_key(opened: Open, key: str) -> None:
    store = opened(vchannels=2)
    assert store.append(key, flown(1), expected_version=0).version == 1
    other = opened()
    assert other.execute(key, lambda state: [flown(state.flights)]).version == 2
    assert [each.key for each in other.history(key)] == [key] * 2
    assert store.rebuild().digest == store.digest([other.load(key)])


def test_a_fold_that_fails_after_its_events_are_in_the_log_is_no_failure_of_the_command(opened: Open) -> None:
    def fold(state: Aircraft, event: Flown) -> Aircraft:
        if event.distance < 0:
            raise ValueError("negative")
        return after(state, event)

    store = opened(aggregate=Aggregate(events=EVENTS, initial=Aircraft, fold=fold))
    assert store.append("N1", flown(1, distance=-1)).version == 1
    with pytest.raises(ValueError, match="negative"):
        store.load("N1")


# --- the collection ---------------------------------------------------------------------------------------------------


def test_by_an_alias_a_store_has_the_snapshots_of_its_collection(
    opened: Open, deployment: millrace.testing.Deployment
) -> None:
    store = opened(snapshot_every=2)
    store.append("N1", flown(1), flown(2))
    deployment.create_alias("planes", store.collection.name)
    other = EventStore.open(deployment, "planes", AIRCRAFT, snapshot_every=2)
    assert other.append("N1", flown(1), flown(2), expected_version=2).version == 4
    assert [each["version"] for each in snapshots_of(store)] == [4]
    assert "planes_snapshots" not in list(deployment)


def test_a_collection_may_have_further_columns_that_are_null(opened: Open) -> None:
    store = opened()
    store.append("N1", flown(1))
    store.collection.add_field("region", "string?")
    assert store.append("N1", flown(2), expected_version=1).version == 2
    other = opened()
    assert other.append("N1", flown(3), expected_version=2).version == 3
    assert store.rebuild().digest == other.rebuild().digest


# --- answers that are lost --------------------------------------------------------------------------------------------


def losing(monkeypatch: pytest.MonkeyPatch, store: EventStore[Aircraft], lose: Callable[[int], bool]) -> None:
    """The answer to the n-th append from now on is lost if `lose(n)`."""
    connection, count = store._database.connection, iter(range(10**6))
    append = connection.append

    def lossy(*args: Any, **options: Any) -> Any:
        found = append(*args, **options)
        if lose(next(count)):
            raise LogUnavailable("the answer was lost")
        return found

    monkeypatch.setattr(connection, "append", lossy)


@pytest.mark.parametrize("expected", [0, None])
def test_a_lost_answer_is_found_again(opened: Open, monkeypatch: pytest.MonkeyPatch, expected: int | None) -> None:
    store = opened()
    losing(monkeypatch, store, lambda number: number == 0)
    found = store.append("N1", flown(1), flown(2), expected_version=expected)
    assert (found.version, found.repeated) == (2, True)
    assert store.load("N1").version == 2


@pytest.mark.parametrize("expected", [0, None])
def test_a_call_whose_outcome_is_unknown_is_repeated_with_its_id(
    opened: Open, monkeypatch: pytest.MonkeyPatch, expected: int | None
) -> None:
    store, command = opened(), uuid4()
    with monkeypatch.context() as patched:
        losing(patched, store, lambda number: True)
        with pytest.raises(LogUnavailable):
            store.append("N1", flown(1), expected_version=expected, command=command)
    other = opened()
    other.append("N1", flown(2))
    again = store.append("N1", flown(1), expected_version=expected, command=command)
    assert (again.version, again.repeated) == (1, True)
    assert store.load("N1").version == 2
    with pytest.raises(VersionConflict):
        store.append("N1", flown(1), expected_version=0)


def test_a_repeated_decision_has_one_effect(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    store, command = opened(), uuid4()
    with monkeypatch.context() as patched:
        losing(patched, store, lambda number: True)
        with pytest.raises(LogUnavailable):
            store.execute("N1", lambda state: [flown(1)], command=command)
    for each in (store, opened()):
        assert each.execute("N1", lambda state: [flown(1)], command=command).version == 1
    assert store.execute("N1", lambda state: [flown(1)]).version == 2


# --- decisions on an old state ----------------------------------------------------------------------------------------


def test_to_do_nothing_is_decided_on_what_is_there_now(opened: Open) -> None:
    away, other = opened(), opened()
    away.append("N1", flown(1))
    other.append("N1", flown(2))
    assert away.execute("N1", lambda state: [flown(3)] if state.flights == 2 else []).state.flights == 3


def test_to_refuse_is_decided_on_what_is_there_now(opened: Open) -> None:
    away, other = opened(), opened()
    away.append("N1", flown(1))
    other.append("N1", flown(2))
    seen = []

    def decide(state: Aircraft) -> list[Flown]:
        seen.append(state.flights)
        if state.flights != 2:
            raise ValueError(f"{state.flights} flights")
        return [flown(3)]

    assert away.execute("N1", decide).version == 3
    assert seen == [1, 2]
    with pytest.raises(ValueError, match="3 flights"):
        away.execute("N1", decide)


def test_after_a_conflict_only_the_new_events_are_read(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    away, other = opened(), opened()
    for number in range(10):
        away.append("N1", flown(number))
    other.append("N1", flown(10), flown(11))
    seen = decoded(monkeypatch)
    assert (away.load("N1").version, len(seen)) == (12, 2)
    other.erase("N1")
    assert (away.load("N1").state, away.load("N1").version) == (Aircraft(), 13)
    other.append("N1", flown(1))
    monkeypatch.setattr(away.collection, "get", None)  # whole aggregates are not read
    commands = [Command("N1", [flown(2)], 13 + number) for number in range(20)]
    outcomes = away.append_all(commands)
    assert isinstance(outcomes[0], VersionConflict)
    assert outcomes[0].current_version == 14
    assert [each.version for each in outcomes[1:]] == list(range(15, 34))  # type: ignore[union-attr]


# --- what the chain forgets and refuses -------------------------------------------------------------------------------


def limit_producers(deployment: millrace.testing.Deployment, store: EventStore[Aircraft], most: int) -> None:
    for name in store.collection.definition.pchannels:
        term = deployment.catalog.term(name)
        deployment.connection.append(name, [encode_entry([builders.config({"max_producers": most}, term=term)])])


def test_more_aggregates_than_the_chain_remembers(opened: Open, deployment: millrace.testing.Deployment) -> None:
    one, other = opened(), opened()
    limit_producers(deployment, one, 2)
    try:
        for turn in range(3):
            for number in range(5):
                one.append(f"N{number}", flown(turn), expected_version=2 * turn)
                other.append(f"N{number}", flown(turn), expected_version=2 * turn + 1)
        for number in range(5):  # this store has not read the last event of each, and the chain has forgotten most
            with pytest.raises(VersionConflict):
                one.append(f"N{number}", flown(1), expected_version=5)
        assert one.rebuild().events == 30
    finally:
        limit_producers(deployment, one, 1024)


def test_a_batch_of_more_aggregates_than_the_chain_remembers(
    opened: Open, deployment: millrace.testing.Deployment
) -> None:
    store = opened()
    limit_producers(deployment, store, 2)
    try:
        found = store.append_all([Command(f"N{number}", [flown(1)], 0) for number in range(60)])
        assert [isinstance(each, Appended) for each in found] == [True] * 60
    finally:
        limit_producers(deployment, store, 1024)


def test_a_refused_command_does_not_block_the_next(opened: Open, deployment: millrace.testing.Deployment) -> None:
    store = opened()
    store.append("N1", flown(1))
    number = store._appender._sender._partition
    for _ in range(20):  # more than the results that the chain remembers
        store._appender._sender._partition = 999
        with pytest.raises(AppendRejected, match="PARTITION_NOT_FOUND"):
            store.append("N1", flown(2), expected_version=1)
        store._appender._sender._partition = number
    assert store.append("N1", flown(2), expected_version=1).version == 2


# --- reading ----------------------------------------------------------------------------------------------------------


def test_history_is_as_of_and_between_as_duckdb_says(opened: Open, deployment: millrace.testing.Deployment) -> None:
    store, ticks = opened(vchannels=2), []
    for number in range(12):
        done = store.append(f"N{number % 3}", flown(number), metadata={"by": "Ada"} if number % 2 else None)
        ticks.append(done.tick)
    deployment.settle()
    changes = store.collection.changes_between().read_all()
    with duckdb.connect() as engine:
        engine.register("changes", changes)
        for key in ("N0", "N1", "N2"):
            for begin in (None, 3, 7):
                for end in (4, 8, 11):
                    wanted = engine.execute(
                        """select version from changes where aggregate = ? and _time_tick <= ?
                        and _time_tick > ? order by version""",
                        [key, ticks[end], -1 if begin is None else ticks[begin]],
                    ).fetchall()
                    found = store.history(key, at=ticks[end], after=None if begin is None else ticks[begin])
                    assert [each.version for each in found] == [version for (version,) in wanted]
    [first, second, *_] = store.history("N1")
    assert (first.data, first.type, first.metadata) == (flown(1), "Flown", {"by": "Ada"})
    assert second.metadata == {}
    assert abs((datetime.now(UTC) - first.at).total_seconds()) < 600


def test_old_versions_are_upcast_and_unknown_ones_are_named(opened: Open) -> None:
    first = EventTypes()
    first.register(name="Flown")(_FlownFirst)
    first.register(name="Sold")(_Sold)
    older = opened(aggregate=Aggregate(events=first, initial=Aircraft, fold=lambda state, event: state))
    older.append("N1", _FlownFirst("F1", 10, None))
    assert opened().load("N1").state == Aircraft(flights=1, miles=10, at="?")
    older.append("N2", _Sold("Bob"))
    with pytest.raises(EventUndecodable, match="no event type 'Sold'"):
        opened().load("N2")


def test_rows_that_no_store_wrote_are_found(opened: Open) -> None:
    store = opened()
    store.append("N1", flown(1), flown(2))
    row = store.collection.get("N1").to_pylist()[0]
    store.collection.insert([row | {"version": 4}])
    with pytest.raises(EventStreamDamaged, match="version 4 comes where 3 should"):
        store.load("N1")
    with pytest.raises(EventStreamDamaged, match="'N1'"):
        store.rebuild()
    store.collection.insert([row | {"aggregate": "N2", "version": 1}] * 2)
    with pytest.raises(EventStreamDamaged, match="version 1 comes where 2 should"):
        store.load("N2")


def test_a_collection_with_other_columns_is_refused(deployment: millrace.testing.Deployment) -> None:
    made = deployment.create_collection("no_events", {"id": "int64"}, key="id")
    with pytest.raises(InvalidArgument, match="has not the columns of events"):
        EventStore(deployment, made, AIRCRAFT)


def test_the_cache_is_bounded_and_changes_nothing(opened: Open) -> None:
    store = opened(cache=2)
    for number in range(8):
        store.append(f"N{number % 4}", flown(number), expected_version=number // 4)
        assert len(store._states) <= 2
    assert [store.load(f"N{number}").version for number in range(4)] == [2] * 4


def test_a_fold_may_change_its_state_and_no_caller_sees_it(opened: Open) -> None:
    def fold(state: list[int], event: Flown) -> list[int]:
        state.append(event.distance)
        return state

    store = opened(aggregate=Aggregate(events=EVENTS, initial=list, fold=fold))
    first = store.execute("N1", lambda state: [flown(1, distance=1)])
    second = store.execute("N1", lambda state: [flown(1, distance=2)])
    loaded = store.load("N1")
    store.append("N1", flown(1, distance=3))
    assert (first.state, second.state, loaded.state) == ([1], [1, 2], [1, 2])  # type: ignore[comparison-overlap]
    assert store.load("N1").state == [1, 2, 3]  # type: ignore[comparison-overlap]


# --- snapshots --------------------------------------------------------------------------------------------------------


def decoded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the events that are decoded from now on."""
    found: list[str] = []
    decode = EventTypes.decode

    def counted(self: EventTypes, name: str, version: int, text: str) -> Any:
        found.append(name)
        return decode(self, name, version, text)

    monkeypatch.setattr(EventTypes, "decode", counted)
    return found


def snapshots_of(store: EventStore[Aircraft]) -> list[dict[str, Any]]:
    return store._database.collection(f"{store.collection.name}_snapshots").read(order_by="aggregate").to_pylist()


def test_a_snapshot_saves_the_fold_of_the_events_before_it(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    store = opened(snapshot_every=5)
    ticks = [store.append("N1", flown(number)).tick for number in range(12)]
    assert [(each["aggregate"], each["version"]) for each in snapshots_of(store)] == [("N1", 10)]
    plain, seen = opened().load("N1"), decoded(monkeypatch)
    assert opened(snapshot_every=5).load("N1").state == plain.state
    assert len(seen) == 2
    assert [opened(snapshot_every=5).load("N1", at=tick).version for tick in ticks] == list(range(1, 13))


def test_there_is_one_snapshot_for_each_aggregate(opened: Open) -> None:
    store = opened(snapshot_every=1)
    for number in range(20):
        store.append(f"N{number % 2}", flown(number))
    assert len(snapshots_of(store)) == 2


def test_a_snapshot_of_other_code_is_not_used_and_replaced(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    store = opened(snapshot_every=2)
    store.append("N1", flown(1), flown(2))

    def doubled(state: Aircraft, event: Flown) -> Aircraft:
        return replace(after(state, event), miles=state.miles + 2 * event.distance)

    newer = opened(snapshot_every=2, aggregate=Aggregate(events=EVENTS, initial=Aircraft, fold=doubled))
    assert newer.load("N1").state.miles == 400
    newer.append("N1", flown(1), flown(2))
    assert newer.load("N1").state.miles == 800
    seen = decoded(monkeypatch)
    assert newer.load("N1").state.miles == 800
    assert seen == []


@pytest.mark.parametrize(
    "damage",
    [
        {"state": '{"miles": "none"}'},
        {"state": "[]"},
        {"command": "00000000-0000-0000-0000-000000000000", "state": "{}"},
        {"version": 9, "state": "{}"},
    ],
)
def test_a_snapshot_that_is_not_of_these_events_is_not_used(opened: Open, damage: dict[str, Any]) -> None:
    store = opened(snapshot_every=2)
    store.append("N1", flown(1), flown(2))
    wanted = opened().load("N1").state
    collection = store._database.collection(f"{store.collection.name}_snapshots")
    collection.upsert([snapshots_of(store)[0] | damage])
    assert store.load("N1").state == wanted


def test_a_state_that_json_changes_has_no_snapshot(opened: Open) -> None:
    kept = Aggregate(events=EVENTS, initial=lambda: {"at": ()}, fold=lambda state, event: {"at": {1: 2}})
    store = opened(snapshot_every=1, aggregate=kept)
    store.append("N1", flown(1))  # a number as a key comes back as a text, and is the same text again
    tuples = opened(
        snapshot_every=1,
        aggregate=Aggregate(events=EVENTS, initial=_Unstable, fold=lambda state, event: _Unstable("b")),
    )
    assert tuples.append("N3", flown(1)).version == 1, "its events are in the log"
    assert tuples.snapshots is not None
    assert tuples.snapshots.skipped == 1
    limited = opened(
        snapshot_every=1, aggregate=Aggregate(events=EVENTS, initial=str, fold=lambda s, e: "x" * (2 << 20))
    )
    limited.append("N2", flown(1))
    assert limited.snapshots is not None
    assert limited.snapshots.skipped == 1
    assert [each["aggregate"] for each in snapshots_of(limited)] == ["N1"]


def test_without_snapshots_that_can_be_read_the_events_tell_the_same(
    opened: Open, deployment: millrace.testing.Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = opened(snapshot_every=2)
    done = store.append("N1", flown(1), flown(2))
    other = opened(snapshot_every=2)

    def refused(*args: Any, **options: Any) -> Any:
        raise TickTooOld("compaction folded them")

    monkeypatch.setattr(other.snapshots._collection, "get", refused)  # type: ignore[union-attr]
    assert other.load("N1", at=done.tick).version == 2
    deployment.drop_collection(f"{store.collection.name}_snapshots")
    assert store.load("N1", at=done.tick).version == 2
    assert store.append("N1", flown(3), flown(4), expected_version=2).version == 4


def test_who_may_not_delete_a_snapshot_of_erased_events_may_load_the_aggregate(
    opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = opened(snapshot_every=1)
    store.append("N1", flown(1))
    monkeypatch.setattr(store.snapshots, "forget", lambda key: None)
    store.erase("N1")

    def denied(*args: Any, **options: Any) -> None:
        raise PermissionDenied("no role may delete")

    reader = opened(snapshot_every=1)
    monkeypatch.setattr(reader.snapshots._collection, "delete", denied)  # type: ignore[union-attr]
    assert (reader.load("N1").state, reader.load("N1").version) == (Aircraft(), 2)


# --- erasure ----------------------------------------------------------------------------------------------------------


def test_an_erased_aggregate_goes_on_with_its_version(opened: Open) -> None:
    store = opened(snapshot_every=1)
    before = store.append("N1", Registered("Ada"), flown(1))
    with pytest.raises(VersionConflict):
        store.erase("N1", expected_version=1)
    erased = store.erase("N1", expected_version=2)
    assert erased.version == 3
    assert (store.load("N1").state, store.load("N1").version) == (Aircraft(), 3)
    assert snapshots_of(store) == []
    store.snapshots.write([store.snapshots.row(Snapshot("N1", 2, uuid4(), Aircraft("Ada")))])  # type: ignore[union-attr]
    assert opened(snapshot_every=1).load("N1").state == Aircraft()
    assert snapshots_of(store) == [], "an erasure that stopped before its snapshot is finished by the next load"
    assert store.append("N1", Registered("Bob"), expected_version=3).version == 4
    assert store.load("N1").state == Aircraft("Bob")
    assert [each.type for each in store.history("N1")] == ["$erased", "Registered"]
    assert [each.type for each in store.history("N1", after=before.tick)] == ["$erased", "Registered"]
    assert store.load("N1", at=before.tick).state.owner == "Ada"
    assert store.rebuild().digest == store.digest([store.load("N1")])
    assert "Ada" not in str(store.collection.read().to_pylist())


# --- rebuilds ---------------------------------------------------------------------------------------------------------


def states_by_hand(events: Sequence[tuple[int, str, Any]], tick: int) -> list[Loaded[Aircraft]]:
    found: dict[str, tuple[Aircraft, int]] = {}
    for at, key, event in events:
        if at <= tick:
            state, version = found.get(key, (Aircraft(), 0))
            found[key] = after(state, event), version + 1
    return [Loaded(key, state, version, tick) for key, (state, version) in found.items()]


def test_a_rebuild_at_any_tick_has_the_digest_of_the_states_then(
    opened: Open, deployment: millrace.testing.Deployment
) -> None:
    store, done = opened(vchannels=2, snapshot_every=3), []
    for number in range(40):
        key, event = f"N{number % 7}", flown(number, distance=number)
        done.append((store.append(key, event).tick, key, event))
    wanted = {tick: store.digest(states_by_hand(done, tick)) for tick, _, _ in done[::10]}
    assert len(set(wanted.values())) == len(wanted)
    for _ in range(2):
        assert {tick: store.rebuild(at=tick).digest for tick in wanted} == wanted
        assert {tick: store.rebuild(at=tick, passes=3).digest for tick in wanted} == wanted
        deployment.settle()
    assert (store.rebuild().aggregates, store.rebuild().events) == (7, 40)
    assert (
        store.digest(store.states())
        == store.rebuild().digest
        == store.digest(map(store.load, map("N{}".format, range(7))))
    )
    with pytest.raises(InvalidArgument, match="1 or more passes"):
        store.rebuild(passes=0)


def test_the_columns_of_events_are_those_of_the_docs() -> None:
    assert [f"{each.name} {each.type}" for each in EVENT_SCHEMA.fields] == [
        "aggregate string",
        "version int64",
        "type string",
        "type_version int32",
        "data json",
        "command uuid",
        "at timestamp",
        "metadata json",
    ]
