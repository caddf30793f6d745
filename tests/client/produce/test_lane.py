"""What a producer promises whatever the way to the log does: answers lost, appends that arrive late, terms that change.

The chain and the log are the real ones, in process; only the way between is at fault, by a drawn plan.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from millrace.base.errors import (
    AppendRejected,
    AppendUnresolved,
    LogRegressed,
    LogUnavailable,
    MillraceError,
    ProducerFenced,
    RateLimited,
)
from millrace.base.metrics import Metrics
from millrace.base.settings import Settings
from millrace.catalog.collection import CollectionInfo
from millrace.client.produce.producer import Producer
from millrace.client.produce.rows import delete_message
from millrace.client.produce.sequencer import WINDOW, OutboundEntry
from millrace.coord.append_port import SingleEntryAppender
from millrace.coord.coordinator import Coordinator
from millrace.log.rocksmq.service import RocksMQ
from millrace.message.ids import EARLIEST
from millrace.message.keys import vchannel_index
from millrace.message.model import MutableMessage
from millrace.message.payload.rows import decode_rows
from millrace.message.schema import CollectionSchema, FieldSpec
from millrace.node.append.host import AppendHost
from millrace.rpc.outcome import AppendOutcome
from millrace.wal.state import ChannelState

SCHEMA = CollectionSchema((FieldSpec("id", "int64", False),), "id")


class Fault(Enum):
    NONE = "none"
    LOST_BEFORE = "lost before"
    LOST_AFTER = "lost after"
    LATE = "late"
    """The answer is lost, and the append takes place behind a later one."""
    LIMITED = "limited"
    NEW_TERM = "new term"
    STOPPED_BEFORE = "stopped before"
    """The caller is interrupted while it sends: before the append took place, or behind it."""
    STOPPED_AFTER = "stopped after"
    STOPPED_WAITING = "stopped waiting"
    """The caller is interrupted while it waits for the answer."""


class Stopped(BaseException):
    """As Ctrl-C is."""


LOST = [fault for fault in Fault if not fault.name.startswith("STOPPED")]


class Way:
    """The way to the host, with a fault for each append."""

    def __init__(self, host: AppendHost, coordinator: Coordinator) -> None:
        self._host = host
        self._coordinator = coordinator
        self.plan: deque[Fault] = deque()
        self.in_flight = self.most_in_flight = 0
        """Entries that were sent and whose answers were not read yet."""
        self._late: list[tuple[str, bytes]] = []

    def append(self, pchannel: str, entries: Sequence[bytes], *, deadline: float | None = None) -> AppendOutcome:
        (entry,) = entries
        fault = self.plan.popleft() if self.plan else Fault.NONE
        if fault in (Fault.LOST_BEFORE, Fault.LATE):
            if fault == Fault.LATE:
                self._late.append((pchannel, entry))
            raise LogUnavailable(f"{fault}")
        if fault == Fault.LIMITED:
            raise RateLimited("not now", retry_after=0.0)
        if fault == Fault.NEW_TERM:
            self._coordinator.open_term(pchannel)
        if fault == Fault.STOPPED_BEFORE:
            raise Stopped
        outcome = self._host.append(pchannel, entry)
        self.arrive()
        if fault == Fault.LOST_AFTER:
            raise LogUnavailable(f"{fault}")
        if fault in (Fault.STOPPED_AFTER, Fault.STOPPED_WAITING):
            raise Stopped(fault)
        return outcome

    def arrive(self) -> None:
        """What was late comes now."""
        late, self._late = self._late, []
        for name, entry in late:
            self._host.append(name, entry)

    def append_stream(self, pchannel: str, *, deadline: float | None = None) -> Any:
        return Stream(self, pchannel)


@dataclass
class Stream:
    """Appends in flight: made in order as they are sent; their answers are read later."""

    way: Way
    pchannel: str

    def submit(self, entry: bytes) -> Any:
        self.way.in_flight += 1
        self.way.most_in_flight = max(self.way.most_in_flight, self.way.in_flight)
        try:
            return Answer(self.way, self.way.append(self.pchannel, [entry]), None)
        except MillraceError as error:
            return Answer(self.way, None, error)
        except Stopped as error:
            if error.args == (Fault.STOPPED_WAITING,):
                return Answer(self.way, None, error)
            raise

    def close(self) -> None:
        pass


@dataclass
class Answer:
    way: Way
    outcome: AppendOutcome | None
    error: BaseException | None

    def result(self) -> AppendOutcome:
        self.way.in_flight -= 1
        if self.error is not None:
            raise self.error
        assert self.outcome is not None
        return self.outcome


class Rig:
    """A log, a chain and a collection in this process."""

    def __init__(self, folder: Path) -> None:
        self.settings = Settings(data_dir=folder, cache_dir=folder, append_retry_delay=0.0)
        self.service = RocksMQ(folder / "log")
        self.host = AppendHost(self.service, ChannelState.new)
        self.coordinator = Coordinator(self.settings, log=self.service, append=SingleEntryAppender(self.host, 30.0))
        self.coordinator.ensure_pchannels(1)
        self.collection: CollectionInfo = self.coordinator.create_collection("c", SCHEMA, vchannels=2)
        self.way = Way(self.host, self.coordinator)

    def producer(self, **options: Any) -> Producer:
        return Producer(self.way, self.coordinator, self.settings, **options)

    def keys(self, vchannel: int, count: int, start: int = 0) -> list[int]:
        found = []
        while len(found) < count:
            if vchannel_index(pa.array([start]), 2)[0] == vchannel:
                found.append(start)
            start += 1
        return found

    def message(self, key: int) -> MutableMessage:
        home = int(vchannel_index(pa.array([key]), 2)[0])
        return delete_message(pa.array([key]), self.collection, vchannel=self.collection.vchannels[home])

    def accepted(self, producer: Producer, after: int) -> dict[str, list[int]]:
        """By VChannel the keys that took effect, in their order."""
        self.host.tick("dml_0")
        tailed = self.host.tail("dml_0", after, timeout=5.0, max_bytes=1 << 30)
        found: dict[str, list[int]] = {name: [] for name in self.collection.vchannels}
        for batch in tailed.batches:  # type: ignore[union-attr]
            for row in batch.to_pylist():
                if row["producer_id"] == producer.id:
                    found[row["vchannel"]] += decode_rows(row["payload"], SCHEMA.key_arrow())["id"].to_pylist()
        return found

    def close(self) -> None:
        self.coordinator.close()
        self.host.close()
        self.service.close()


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    made = Rig(tmp_path_factory.mktemp("lane"))
    yield made
    made.close()


@settings(max_examples=25, suppress_health_check=[HealthCheck.too_slow])
@given(
    calls=st.lists(st.sampled_from([1, 2, 3, 5, 12, 48]), min_size=1, max_size=6),
    plan=st.lists(st.sampled_from(LOST), max_size=25),
    pipelined=st.booleans(),
    owned=st.booleans(),
)
def test_every_message_takes_effect_once_and_in_order_whatever_the_way_does(
    rig: Rig, calls: list[int], plan: list[Fault], pipelined: bool, owned: bool
) -> None:
    after = rig.host.tick("dml_0")
    rig.way.plan = deque(plan)
    number = 0
    expected: dict[str, list[int]] = {name: [] for name in rig.collection.vchannels}
    with rig.producer(producer_id=4242 if owned else None) as producer:
        lane = producer.lane("dml_0")
        for count in calls:
            messages = [rig.message(key) for key in range(number, number + count)]
            number += count
            for key, message in zip(range(number - count, number), messages, strict=True):
                expected[message.vchannel].append(key)
            try:
                lane.send([[each] for each in messages] if pipelined else [messages])
            except AppendUnresolved:
                assert producer.unresolved
        while rig.way.plan and producer.unresolved:
            with suppress(AppendUnresolved):
                producer.settle()
        producer.settle()
        assert not producer.unresolved, "it goes on once nothing is at fault"
        rig.way.arrive()
        assert rig.accepted(producer, after) == expected


@settings(max_examples=25, suppress_health_check=[HealthCheck.too_slow])
@given(
    count=st.sampled_from([1, 4, 20, 45]),
    plan=st.lists(st.one_of(st.just(Fault.NONE), st.sampled_from(Fault)), max_size=25),
    raises=st.sets(st.integers(0, 44), max_size=3),
    pipelined=st.booleans(),
)
def test_an_interrupt_anywhere_and_a_source_that_raises_forget_nothing_that_was_drawn(
    rig: Rig, count: int, plan: list[Fault], raises: set[int], pipelined: bool
) -> None:
    after = rig.host.tick("dml_0")
    rig.way.plan = deque(plan)
    messages = [rig.message(key) for key in range(count)]
    waiting = deque(messages)
    trouble = set(raises)

    def source() -> OutboundEntry | None:
        if len(waiting) in trouble:
            trouble.remove(len(waiting))
            raise Stopped
        return OutboundEntry([waiting.popleft()]) if waiting else None

    with rig.producer() as producer:
        lane = producer.lane("dml_0")
        while waiting or lane.unresolved or rig.way.plan:
            with suppress(AppendUnresolved, Stopped):
                lane.deliver(source, pipelined=pipelined)
            if not waiting and not lane.unresolved:
                break
        rig.way.arrive()
        taken = rig.accepted(producer, after)
    assert taken == {name: [key for key, message in enumerate(messages) if message.vchannel == name] for name in taken}


def test_no_more_of_a_vchannel_is_in_flight_than_the_chain_remembers(rig: Rig) -> None:
    after = rig.host.tick("dml_0")
    keys = rig.keys(0, 3 * WINDOW)
    rig.way.in_flight = rig.way.most_in_flight = 0
    with rig.producer() as producer:
        producer.lane("dml_0").send([[rig.message(key)] for key in keys])
        assert rig.way.most_in_flight == WINDOW
        # All answers of a window are lost: each repeat gets the first one's result.
        rig.way.plan = deque([Fault.LOST_AFTER] * WINDOW)
        written = producer.lane("dml_0").send([[rig.message(key)] for key in keys])
        assert (len(written.results), written.rejections) == (len(keys), [])
        assert rig.accepted(producer, after)[rig.collection.vchannels[0]] == keys * 2


def test_what_a_call_had_not_sent_yet_is_held_too_where_the_log_is_gone(rig: Rig) -> None:
    after = rig.host.tick("dml_0")
    keys = rig.keys(0, 3 * WINDOW)
    rig.way.plan = deque([Fault.LOST_BEFORE] * 3 * WINDOW)
    with rig.producer() as producer:
        lane = producer.lane("dml_0")
        with pytest.raises(AppendUnresolved):
            lane.send([[rig.message(key)] for key in keys])
        assert len(lane.unresolved) == len(keys)
        rig.way.plan.clear()
        producer.settle()
        assert rig.accepted(producer, after)[rig.collection.vchannels[0]] == keys


def test_an_entry_that_may_have_taken_effect_is_not_numbered_anew_where_the_chain_forgot_its_producer(
    tmp_path: Path,
) -> None:
    rig = Rig(tmp_path)
    after = rig.host.tick("dml_0")
    rig.coordinator.open_term("dml_0", config={"max_producers": 1})
    first, second = rig.keys(0, 2)
    try:
        with rig.producer() as producer, rig.producer() as stranger:
            producer.send([rig.message(first)])
            rig.way.plan = deque([Fault.LOST_AFTER] * rig.settings.append_attempts)
            with pytest.raises(AppendUnresolved):
                producer.send([rig.message(second)])
            stranger.send([rig.message(first)])  # the chain forgets the producer, and with it that it has the entry
            lane = producer.lane("dml_0")
            (unresolved,) = lane.unresolved
            producer.settle()
            (answer,) = unresolved.answers
            assert isinstance(answer, AppendRejected)
            assert answer.reason == "UNKNOWN_PRODUCER"
            assert "whether these messages took effect" in str(answer)
            assert rig.accepted(producer, after)[rig.collection.vchannels[0]] == [first, second]
            producer.send([rig.message(first)])
            assert rig.accepted(producer, after)[rig.collection.vchannels[0]] == [first, second, first]
    finally:
        rig.close()


def test_an_entry_that_was_only_put_off_is_numbered_anew_where_the_chain_forgot_its_producer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = Rig(tmp_path)
    after = rig.host.tick("dml_0")
    rig.coordinator.open_term("dml_0", config={"max_producers": 1})
    first, second = rig.keys(0, 2)
    real, puts_off = rig.way.append, [True]
    try:
        with rig.producer() as producer, rig.producer() as stranger:
            producer.send([rig.message(first)])

            def append(pchannel: str, entries: Sequence[bytes], *, deadline: float | None = None) -> AppendOutcome:
                if puts_off:
                    puts_off.clear()
                    stranger.send([rig.message(first)])
                    raise RateLimited("not now", retry_after=0.0)
                return real(pchannel, entries, deadline=deadline)

            monkeypatch.setattr(rig.way, "append", append)
            producer.send([rig.message(second)])
            assert rig.accepted(producer, after)[rig.collection.vchannels[0]] == [first, second]
    finally:
        rig.close()


@pytest.mark.parametrize("together", [False, True])
def test_an_epoch_that_is_not_to_be_had_now_is_asked_for_again_and_no_number_is_lost(
    rig: Rig, together: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    after = rig.host.tick("dml_0")
    big = delete_message(pa.array(rig.keys(0, 3000)), rig.collection, vchannel=rig.collection.vchannels[0])
    here, there = rig.keys(0, 2, start=100_000), rig.keys(1, 2, start=100_000)
    rig.coordinator.open_term("dml_0", config={"max_message_bytes": 4096})
    real, refusals = rig.coordinator.next_epoch, [3]

    def next_epoch(producer_id: int, *, held: int | None = None) -> int:
        if held is not None and refusals[0]:
            refusals[0] -= 1
            raise LogUnavailable("the coordinator is restarting")
        return real(producer_id, held=held)

    monkeypatch.setattr(rig.coordinator, "next_epoch", next_epoch)
    try:
        with rig.producer(producer_id=777 + together) as producer:
            lane = producer.lane("dml_0")
            lane.send([[rig.message(here[0])], [big]])
            messages = [rig.message(key) for key in (there[0], here[0], here[1], there[1])]
            with suppress(AppendUnresolved):
                lane.send([messages] if together else [[each] for each in messages])
            producer.settle()
            assert refusals == [0]
            assert list(rig.accepted(producer, after).values()) == [[here[0], *here], there]
    finally:
        rig.coordinator.open_term("dml_0", config={"max_message_bytes": 16 << 20})


def test_attempts_after_the_first_are_counted(rig: Rig) -> None:
    metrics = Metrics()
    rig.way.plan = deque([Fault.LOST_BEFORE, Fault.LOST_AFTER])
    with rig.producer(metrics=metrics) as producer:
        producer.send([rig.message(1)])
        producer.send([rig.message(2)])
    assert metrics.registry.get_sample_value("millrace_wal_append_retry_total", {"pchannel": "dml_0"}) == 2


def test_a_producer_that_flow_control_refuses_says_so_and_not_that_nothing_is_known(rig: Rig) -> None:
    producer = Producer(rig.way, rig.coordinator, replace(rig.settings, append_deadline=0.05))
    known = "nothing of the newest appends to dml_0 was accepted: RATE_LIMITED"
    for key, lost, words in zip(
        rig.keys(0, 2), ([], [Fault.LOST_AFTER]), (known, "the outcome is unknown of"), strict=True
    ):
        rig.way.plan.extend([*lost, *[Fault.LIMITED] * 60])
        with pytest.raises(AppendUnresolved, match=words) as caught:
            producer.send([rig.message(key)])
        assert isinstance(caught.value.__cause__, RateLimited)
        rig.way.plan.clear()
        producer.settle()


def test_a_message_that_is_refused_without_using_its_number_holds_up_nothing_behind_it(rig: Rig) -> None:
    after = rig.host.tick("dml_0")
    big = delete_message(pa.array(rig.keys(0, 3000)), rig.collection, vchannel=rig.collection.vchannels[0])
    rig.coordinator.open_term("dml_0", config={"max_message_bytes": 4096})
    first, second = rig.keys(0, 2, start=100_000)
    try:
        with rig.producer() as producer:
            written = producer.send([rig.message(first), big, rig.message(second)], raise_rejected=False)
            assert [each.reason for each in written.rejections] == ["TOO_LARGE"]
            assert len(written.results) == 2
            producer.send([rig.message(first)])
            assert rig.accepted(producer, after)[rig.collection.vchannels[0]] == [first, second, first]
    finally:
        rig.coordinator.open_term("dml_0", config={"max_message_bytes": 16 << 20})


def test_a_producer_that_the_chain_forgot_goes_on_in_a_new_epoch(rig: Rig) -> None:
    after = rig.host.tick("dml_0")
    rig.coordinator.open_term("dml_0", config={"max_producers": 1})
    key = rig.keys(0, 1)[0]
    try:
        with rig.producer() as one, rig.producer() as other:
            for _ in range(3):
                one.send([rig.message(key)])
                other.send([rig.message(key)])
            assert rig.accepted(one, after)[rig.collection.vchannels[0]] == [key] * 3
            assert rig.accepted(other, after)[rig.collection.vchannels[0]] == [key] * 3
    finally:
        rig.coordinator.open_term("dml_0", config={"max_producers": 1024})


def test_an_older_producer_of_an_id_stays_fenced_where_the_chain_forgot_the_newer_one(rig: Rig) -> None:
    key = rig.keys(0, 1)[0]
    rig.coordinator.open_term("dml_0", config={"max_producers": 1})
    try:
        with rig.producer(producer_id=99) as older:
            older.send([rig.message(key)])
            with rig.producer(producer_id=99) as newer, rig.producer() as stranger:
                newer.send([rig.message(key)])
                with pytest.raises(ProducerFenced, match="close this one"):
                    older.send([rig.message(key)])
                stranger.send([rig.message(key)])  # the chain forgets the id
                with pytest.raises(ProducerFenced):
                    older.send([rig.message(key)])
                newer.send([rig.message(key)])
    finally:
        rig.coordinator.open_term("dml_0", config={"max_producers": 1024})


def test_a_log_that_lost_what_it_acknowledged_is_told_and_nothing_more_is_sent(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    try:
        key = rig.keys(0, 1)[0]
        with rig.producer() as producer:
            producer.send([rig.message(key)])
            before = rig.service.open("dml_0").describe().end
            kept = rig.service.open("dml_0").read(EARLIEST, end=before)
            producer.send([rig.message(key)])
            producer.send([rig.message(key)])
            # The broker came back without its tail: the same log, up to `before`.
            rig.host.close()
            rig.service.drop("dml_0")
            rig.service.create("dml_0")
            rig.service.open("dml_0").append(kept.batch.column("value"))
            rig.way._host = rig.host = AppendHost(rig.service, ChannelState.new)
            with pytest.raises(LogRegressed, match="lost its tail"):
                producer.send([rig.message(key)])
    finally:
        rig.close()


def test_deliveries_of_one_lane_take_turns_in_the_order_of_the_calls(rig: Rig) -> None:
    after = rig.host.tick("dml_0")
    keys = rig.keys(0, 40)
    with rig.producer() as producer, ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda key: producer.send([rig.message(key)]), keys))
        assert sorted(rig.accepted(producer, after)[rig.collection.vchannels[0]]) == keys


def test_a_term_that_the_coordinator_does_not_know_is_a_rejection_in_the_end(rig: Rig) -> None:
    key = rig.keys(0, 1)[0]
    with rig.producer() as producer:
        producer.send([rig.message(key)])
        lane = producer.lane("dml_0")
        lane.sequencer.term += 5
        real, rig.coordinator.term = rig.coordinator.term, lambda name: lane.sequencer.term  # type: ignore[method-assign]
        try:
            with pytest.raises(AppendRejected) as caught:
                producer.send([rig.message(key)])
            assert caught.value.reason == "TERM_NOT_OPENED"
        finally:
            rig.coordinator.term = real  # type: ignore[method-assign]
        producer.send([rig.message(key)])
