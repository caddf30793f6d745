"""Broadcasts of messages: what is refused before anything is stored, who may submit them, and what waits for them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from millrace.access.grants import Caller, Grant, Principal, Role
from millrace.base.errors import (
    AppendRejected,
    BroadcastRefused,
    CallbackFailed,
    CollectionNotFound,
    EntryTooLarge,
    InvalidArgument,
    InvalidSettings,
    LogUnavailable,
    MillraceError,
    PermissionDenied,
    TooManyBroadcasts,
    UnsupportedVersion,
)
from millrace.base.settings import Settings
from millrace.catalog.broadcast import MAX_DATA_BYTES, MAX_MESSAGE_BYTES, MAX_MESSAGES
from millrace.catalog.calls import RemoteCatalog
from millrace.client.produce.broadcast import Broadcast
from millrace.client.produce.producer_recovery import AppliedMessage
from millrace.coord.broadcast import messages as message_room
from millrace.coord.broadcast.kinds import GROUP, BroadcastKind, SubmittedBroadcast, find_kind
from millrace.coord.broadcast.messages import MAX_OPEN
from millrace.coord.concurrency import ThreadRunner
from millrace.coord.coordinator import Coordinator
from millrace.message import builders
from millrace.message.ids import COORDINATOR_ID, MessageId
from millrace.message.model import MutableMessage
from millrace.message.schema import FieldSpec
from millrace.message.schema_changes import AddField
from millrace.rpc.outcome import AppendResult
from millrace.wal.reasons import Reason
from tests.coord.ddl.rig import SCHEMA, ChainLog
from tests.coord.test_aliases import Connection
from tests.coord.test_messages_property import messages_for
from tests.failpoints import at_failpoints
from tests.waiting import until


class AwayLog(ChainLog):
    """A chain log of which some PChannels are away."""

    def __init__(self) -> None:
        super().__init__()
        self.away: set[str] = set()
        self.lock = threading.Lock()

    def append_one(self, pchannel: str, entry: bytes, *, principal: str = "") -> int:
        if pchannel in self.away:
            raise LogUnavailable(f"{pchannel} is away")
        with self.lock:
            return super().append_one(pchannel, entry, principal=principal)

    def judge(self, pchannel: str, entry: bytes) -> int:
        with self.lock:
            return super().judge(pchannel, entry)

    def inserts(self) -> list[dict[str, Any]]:
        return [row for _, row in self.accepted if row["type"] == "INSERT"]


@pytest.fixture
def log() -> AwayLog:
    return AwayLog()


@pytest.fixture
def coordinator(tmp_path: Path, log: AwayLog) -> Iterator[Coordinator]:
    where = Settings(data_dir=tmp_path, cache_dir=tmp_path / "cache")
    with Coordinator(where, log=log, append=log, applied=log_lookup(log)) as made:  # type: ignore[arg-type]
        made.ensure_pchannels(2)
        for name in ("users", "orders"):
            made.create_collection(name, SCHEMA, vchannels=2)
        yield made


def log_lookup(log: ChainLog) -> Callable[[str, int, int], Iterable[AppliedMessage]]:
    """What the ``wal`` table would say, from the chain's own answers."""

    def applied(pchannel: str, producer_id: int, after: int) -> Iterator[AppliedMessage]:
        for name, row in log.accepted:
            if name == pchannel and row["producer_id"] == producer_id and row["time_tick"] > after:
                result = AppendResult(MessageId(0, 0, 0, 0), None, row["time_tick"], duplicate=True)
                yield AppliedMessage(row["vchannel"], row["epoch"], row["sequence"], row["payload"], result)

    return applied


@pytest.fixture
def register(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Registers objects as another package's kinds."""

    def registered(*found: object) -> None:
        points = [SimpleNamespace(name="mine", value="package:MINE", load=lambda each=each: each) for each in found]
        monkeypatch.setattr("importlib.metadata.entry_points", lambda group: points if group == GROUP else [])

    return registered


def client(coordinator: Coordinator, *patterns: str, role: Role = Role.OPERATE, name: str = "ada") -> RemoteCatalog:
    grant = Grant(role, patterns) if patterns else Grant(role)
    return RemoteCatalog(Connection(coordinator, Caller(Principal(name, (grant,)))))


ROWS = {"id": list(range(20)), "name": ["x"] * 20}


def test_rows_deletes_and_flushes_of_several_collections_reach_every_vchannel(
    coordinator: Coordinator, log: AwayLog
) -> None:
    catalog = client(coordinator)
    with Broadcast(catalog) as sent:
        sent.insert("users", ROWS).upsert("orders", ROWS)
    assert sent.result is not None
    assert set(sent.result.ticks) == {*catalog.collection("users").vchannels, *catalog.collection("orders").vchannels}
    assert sent.submit() == sent.result
    rows = {row["vchannel"]: row for _, row in log.accepted if row["rows"]}
    assert {name: row["time_tick"] for name, row in rows.items()} == sent.result.ticks
    assert {(row["epoch"], row["principal"]) for row in rows.values()} == {(sent.result.id, "ada")}
    assert sum(row["rows"] for row in rows.values()) == 40
    flushed = Broadcast(catalog).flush("users").submit()
    assert all(flushed.ticks.values())
    assert set(Broadcast(catalog).flush("users").submit().ticks.values()) == {0}, "nothing grows"
    deleted = Broadcast(catalog).delete("users", list(range(20))).submit()
    assert deleted.id > flushed.id
    assert coordinator.open_broadcasts() == []


def test_what_one_vchannel_would_refuse_none_gets(coordinator: Coordinator, log: AwayLog) -> None:
    messages = messages_for(coordinator, ("users", "orders"), 0)
    before = len(log.accepted)
    wrong = [*messages[:-1], replace(messages[-1], partition_id=77)]
    with pytest.raises(AppendRejected, match=r"nothing was sent, because .* would refuse") as refused:
        coordinator.broadcast(wrong)
    assert refused.value.reason == Reason.PARTITION_NOT_FOUND
    swapped = [replace(messages[0], payload=messages[1].payload, rows=messages[1].rows)]
    with pytest.raises(AppendRejected) as refused:
        coordinator.broadcast(swapped)
    assert refused.value.reason == Reason.WRONG_VCHANNEL
    assert len(log.accepted) == before
    assert coordinator.open_broadcasts() == []


@pytest.mark.parametrize(
    ("messages", "error", "match"),
    [
        (lambda made: [], InvalidArgument, "1 to 1,024 messages, not 0"),
        (lambda made: made[:1] * (MAX_MESSAGES + 1), InvalidArgument, "not 1,025"),
        (lambda made: made[:1] * 2, InvalidArgument, "one message for each VChannel, and two for"),
        (lambda made: [replace(made[0], txn_id=3)], InvalidArgument, "in no transaction"),
        (lambda made: [replace(made[0], producer_id=COORDINATOR_ID)], InvalidArgument, "has no producer"),
        (lambda made: [replace(made[0], payload=b"x" * (MAX_MESSAGE_BYTES + 1))], EntryTooLarge, "262,145 bytes"),
        (lambda made: [replace(made[0], collection_id=99)], CollectionNotFound, "no collection 99"),
        (lambda made: [replace(made[0], vchannel="dml_0_9v9")], InvalidArgument, "is not a VChannel of collection"),
        (
            lambda made: [builders.drop_collection(vchannel=made[0].vchannel, collection_id=1, term=0)],
            InvalidArgument,
            "DROP_COLLECTION cannot be broadcast",
        ),
    ],
)
def test_what_is_no_broadcast_is_refused_in_words(
    coordinator: Coordinator,
    log: AwayLog,
    messages: Callable[[list[MutableMessage]], list[MutableMessage]],
    error: type[MillraceError],
    match: str,
) -> None:
    made = messages(messages_for(coordinator, ("users",), 0))
    before = len(log.accepted)
    with pytest.raises(error, match=match):
        coordinator.broadcast(made)
    assert len(log.accepted) == before


def test_data_is_a_small_json_object(coordinator: Coordinator) -> None:
    messages = messages_for(coordinator, ("users",), 0)
    data: list[Any] = [{"x": "y" * MAX_DATA_BYTES}, {"x": float("nan")}, {"x": object()}]
    for each in data:
        with pytest.raises(InvalidArgument, match="JSON object"):
            coordinator.broadcast(messages, data=each)
    no_object: Any = [1]
    with pytest.raises(InvalidArgument, match="JSON object"):
        Broadcast(client(coordinator), data=no_object)


def test_only_who_operates_every_collection_may_broadcast(coordinator: Coordinator, log: AwayLog) -> None:
    messages = messages_for(coordinator, ("users", "orders"), 0)
    before = len(log.accepted)
    for narrow in (client(coordinator, "users"), client(coordinator, role=Role.PRODUCE), client(coordinator, "other")):
        with pytest.raises(PermissionDenied, match="operate"):
            narrow.broadcast(messages)
    assert len(log.accepted) == before
    assert client(coordinator, "users", "orders").broadcast(messages).id


@pytest.mark.parametrize("change", [{"type": "NOPE"}, {"payload": "%%"}, {"rows": -1}, {"rows": None}, {"vchannel": 3}])
def test_messages_of_an_attacker_are_no_messages(coordinator: Coordinator, change: dict[str, Any]) -> None:
    (first, *_) = messages_for(coordinator, ("users",), 0)
    catalog = client(coordinator)
    sent = message_room.message_to_json(first) | change
    with pytest.raises(MillraceError) as refused:
        catalog._call(message_room_call(), messages=[sent], request="")
    assert refused.value.code in ("INVALID_ARGUMENT", "PERMISSION_DENIED")
    with pytest.raises(InvalidArgument):
        catalog._call(message_room_call(), messages=[7], request="")


def message_room_call() -> Any:
    from millrace.rpc import calls

    return calls.BROADCAST


def test_a_request_is_one_broadcast_however_often_it_is_submitted(coordinator: Coordinator, log: AwayLog) -> None:
    messages = messages_for(coordinator, ("users",), 0)
    first = coordinator.broadcast(messages, request="a")
    assert coordinator.broadcast(messages, request="a") == first
    assert len(log.inserts()) == 2
    with pytest.raises(InvalidArgument, match="used for another change"):
        coordinator.broadcast(messages_for(coordinator, ("users",), 1), request="a")
    with pytest.raises(InvalidArgument, match="used for another change"):
        coordinator.create_partition("users", "p", request="a")


def test_it_waits_for_a_vchannel_that_is_away_and_stands_in_the_way_of_nothing_else(
    coordinator: Coordinator, log: AwayLog
) -> None:
    messages = messages_for(coordinator, ("users",), 0)
    away = messages[1].vchannel.rpartition("_")[0]
    log.away = {away}
    with pytest.raises(LogUnavailable):
        coordinator.broadcast(messages)
    (task,) = coordinator.open_broadcasts()
    assert [len(task.ticks), task.reason] == [1, f"LOG_UNAVAILABLE: {away} is away"]
    # The VChannel that has it, and DDL of the collection, wait for the one that lacks it.
    with pytest.raises(LogUnavailable):
        coordinator.broadcast(messages_for(coordinator, ("users",), 1)[:1])
    with pytest.raises(LogUnavailable):
        coordinator.alter("users", [AddField(FieldSpec("more", "string", True))])
    # Another collection on the same PChannels does not.
    here = [each for each in messages_for(coordinator, ("orders",), 0) if not each.vchannel.startswith(away)]
    assert coordinator.broadcast(here).ticks
    log.away = set()
    assert coordinator.resume() == 1
    assert coordinator.alter("users", [AddField(FieldSpec("more", "string", True))]) == 2
    assert len(log.inserts()) == 3


def test_a_collection_dropped_past_the_coordinator_lets_its_broadcast_end(
    coordinator: Coordinator, log: AwayLog
) -> None:
    messages = messages_for(coordinator, ("users", "orders"), 0)
    away = next(each.vchannel for each in messages[1:] if not each.vchannel.startswith("dml_0"))
    log.away = {"dml_1"}
    with pytest.raises(LogUnavailable):
        coordinator.broadcast(sorted(messages, key=lambda each: each.vchannel))
    log.away = set()
    there = coordinator.collection("users" if away in coordinator.collection("users").vchannels else "orders")
    log.write(builders.drop_collection(vchannel=away, collection_id=there.id, term=0))
    coordinator.resume()
    coordinator.resume()
    assert coordinator.open_broadcasts() == []
    tasks = coordinator._store.broadcasts.list_recent(limit=1)
    assert tasks[0].task.targets[away] == 0


def test_open_broadcasts_are_bounded(coordinator: Coordinator, log: AwayLog, monkeypatch: pytest.MonkeyPatch) -> None:
    assert MAX_OPEN == 64
    monkeypatch.setattr(message_room, "MAX_OPEN", 2)
    messages = messages_for(coordinator, ("users", "orders"), 0)
    log.away = {"dml_0", "dml_1"}
    for each in messages[:2]:
        with pytest.raises(LogUnavailable):
            coordinator.broadcast([each])
    with pytest.raises(TooManyBroadcasts, match="2 broadcasts are open"):
        coordinator.broadcast(messages[2:3])
    log.away = set()
    coordinator.resume()
    assert coordinator.broadcast(messages[2:3]).ticks


def test_a_forgotten_number_is_looked_up_and_never_sent_twice(coordinator: Coordinator, log: AwayLog) -> None:
    messages = messages_for(coordinator, ("users",), 0)
    seen: list[str] = []

    class Dead(Exception): ...

    def dies_after_the_first(name: str) -> None:
        if name == "ddl.sent":
            seen.append(name)
            raise Dead

    coordinator.open_term("dml_0", config={"max_producers": 2})
    coordinator.open_term("dml_1", config={"max_producers": 2})
    with at_failpoints(dies_after_the_first), pytest.raises(Dead):
        coordinator.broadcast(messages)
    sent = len(log.inserts())
    assert sent == 1
    # Other producers push the coordinator's number out of the chain's memory, on both VChannels.
    for each, producer in ((each, number) for number in (7, 8, 9) for each in messages):
        log.write(replace(each, producer_id=producer, epoch=0, sequence=0))
    assert not any(
        COORDINATOR_ID in each.producers
        for each in log.channels()
        if each.name in {message.vchannel for message in messages}
    )
    assert coordinator.resume() == 1
    assert coordinator.open_broadcasts() == []
    own = [row for row in log.inserts() if row["producer_id"] == COORDINATOR_ID]
    assert sorted(row["vchannel"] for row in own) == sorted(each.vchannel for each in messages)
    (done,) = (each.task for each in coordinator._store.broadcasts.list_recent(limit=1))
    assert done.targets == {row["vchannel"]: row["time_tick"] for row in own}


# -- kinds of other packages ------------------------------------------------------------------------------------------


def test_a_kind_s_check_refuses_before_anything_is_stored(
    coordinator: Coordinator, log: AwayLog, register: Callable[..., None]
) -> None:
    def check(broadcast: SubmittedBroadcast) -> None:
        assert broadcast.id
        assert not broadcast.ticks
        if broadcast.data["day"] != "friday":
            raise ValueError("only on fridays")

    register(BroadcastKind("weekly", check))
    messages = messages_for(coordinator, ("users",), 0)
    with pytest.raises(BroadcastRefused, match=r"the check of weekly refused it.*only on fridays"):
        coordinator.broadcast(messages, kind="weekly", data={"day": "monday"})
    with pytest.raises(BroadcastRefused, match="KeyError"):
        coordinator.broadcast(messages, kind="weekly")
    assert log.inserts() == []
    assert coordinator.broadcast(messages, kind="weekly", data={"day": "friday"}).ticks
    assert coordinator.open_broadcasts() == []


def test_a_callback_that_fails_is_called_again(
    coordinator: Coordinator, log: AwayLog, register: Callable[..., None]
) -> None:
    called: list[SubmittedBroadcast] = []

    def callback(broadcast: SubmittedBroadcast) -> None:
        called.append(broadcast)
        if len(called) == 1:
            raise OSError("the mail server is away")

    register(BroadcastKind("mail", on_acknowledged=callback))
    messages = messages_for(coordinator, ("users",), 0)
    with pytest.raises(CallbackFailed, match=r"every VChannel has the broadcast.*the mail server is away"):
        coordinator.acting_for("ada").broadcast(messages, kind="mail", data={"to": "bo"}, request="a")
    assert coordinator.open_broadcasts()[0].reason.startswith("CALLBACK_FAILED")
    done = coordinator.broadcast(messages, kind="mail", data={"to": "bo"}, request="a")
    assert [each.id for each in called] == [done.id, done.id]
    assert (called[1].data, called[1].principal, called[1].ticks) == ({"to": "bo"}, "ada", done.ticks)
    assert len(log.inserts()) == 2


def test_a_callback_that_does_not_return_keeps_nothing_else_back(
    coordinator: Coordinator, log: AwayLog, register: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("millrace.coord.broadcast.kinds.CALLBACK_SECONDS", 0.05)
    monkeypatch.setattr("millrace.base.bounded_call.LATE_SECONDS", 0.05)
    gate = threading.Event()
    called: list[int] = []

    def callback(broadcast: SubmittedBroadcast) -> None:
        called.append(broadcast.id)
        gate.wait(60)

    register(BroadcastKind("mail", on_acknowledged=callback))
    users, orders = messages_for(coordinator, ("users",), 0), messages_for(coordinator, ("orders",), 0)
    with pytest.raises(CallbackFailed, match=r"every VChannel has the broadcast.*not returned within 0.05 s"):
        coordinator.broadcast(users, kind="mail")
    try:
        log.away = {"dml_0", "dml_1"}
        with pytest.raises(LogUnavailable):
            coordinator.broadcast(orders)
        log.away = set()
        assert coordinator.resume() == 2
        (left,) = coordinator.open_broadcasts()
        with pytest.raises(CallbackFailed):
            coordinator.create_partition("users", "p")
        assert left.reason.startswith("CALLBACK_FAILED")
    finally:
        gate.set()
    until(lambda: bool(coordinator.resume()) and not coordinator.open_broadcasts(), "the callback's end is seen")
    assert called == [left.id], "called once, and waited for"


def test_a_check_that_does_not_return_refuses_its_broadcast(
    coordinator: Coordinator, log: AwayLog, register: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("millrace.coord.broadcast.kinds.CHECK_SECONDS", 0.05)
    gate = threading.Event()

    def check(broadcast: SubmittedBroadcast) -> None:
        gate.wait(60)

    register(BroadcastKind("mail", check))
    try:
        with pytest.raises(BroadcastRefused, match=r"nothing was sent.*not returned within 0.05 s"):
            coordinator.broadcast(messages_for(coordinator, ("users",), 0), kind="mail")
    finally:
        gate.set()
    assert log.inserts() == []
    coordinator.create_partition("users", "p")


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt()])
def test_a_callback_that_ends_its_thread_ends_none_of_the_servers(
    coordinator: Coordinator, register: Callable[..., None], error: BaseException
) -> None:
    def callback(broadcast: SubmittedBroadcast) -> None:
        raise error

    register(BroadcastKind("mail", on_acknowledged=callback))
    with pytest.raises(CallbackFailed, match=type(error).__name__):
        coordinator.broadcast(messages_for(coordinator, ("users",), 0), kind="mail")
    assert coordinator.resume() == 1


def test_an_unknown_kind_is_refused_and_one_that_was_removed_waits_for_its_package(
    coordinator: Coordinator, log: AwayLog, register: Callable[..., None]
) -> None:
    messages = messages_for(coordinator, ("users",), 0)
    with pytest.raises(InvalidArgument, match="unknown kind of broadcast 'mail'; known are message"):
        coordinator.broadcast(messages, kind="mail")
    with pytest.raises(InvalidArgument, match="unknown kind"):
        coordinator.broadcast(messages, kind="drop_collection")
    register(BroadcastKind("mail"))
    log.away = {"dml_0", "dml_1"}
    with pytest.raises(LogUnavailable):
        coordinator.broadcast(messages, kind="mail")
    log.away = set()
    register()
    assert coordinator.resume() == 1
    (task,) = coordinator.open_broadcasts()
    assert task.reason.startswith(UnsupportedVersion.code)
    register(BroadcastKind("mail"))
    coordinator.resume()
    assert coordinator.open_broadcasts() == []


@pytest.mark.parametrize("found", [object(), BroadcastKind("Not A Name")])
def test_an_entry_point_that_is_no_kind_is_named(register: Callable[..., None], found: object) -> None:
    register(found)
    with pytest.raises((InvalidSettings, InvalidArgument), match=r"package:MINE|Not A Name"):
        find_kind("mail")


def test_broadcasts_that_overlap_in_any_order_all_complete(tmp_path: Path, log: AwayLog) -> None:
    """Resources are taken all at once or not at all, so no two broadcasts wait for each other."""
    where = Settings(data_dir=tmp_path, cache_dir=tmp_path / "cache")
    with ThreadRunner("sends") as together, Coordinator(where, log=log, append=log, run_all=together) as made:  # type: ignore[arg-type]
        made.ensure_pchannels(2)
        for name in ("users", "orders"):
            made.create_collection(name, SCHEMA, vchannels=3)
        done: list[dict[str, int]] = []
        failed: list[BaseException] = []

        def work(number: int) -> None:
            try:
                order = ("users", "orders") if number % 2 else ("orders", "users")
                for turn in range(3):
                    messages = messages_for(made, order, number * 10 + turn)
                    done.append(made.broadcast(messages if turn else messages[::-1]).ticks)
                    made.create_partition(order[0], f"p{number}_{turn}")
            except BaseException as error:
                failed.append(error)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
        for each in threads:
            each.start()
        for each in threads:
            each.join(60)
        assert failed == []
        assert len(done) == 12
        assert made.open_broadcasts() == []
    got = [(row["vchannel"], row["time_tick"]) for row in log.inserts()]
    assert sorted(got) == sorted(chain.from_iterable(each.items() for each in done))
