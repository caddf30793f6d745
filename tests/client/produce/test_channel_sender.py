"""Calls that share messages: every answer is true, one caller's calls keep their order, and each takes effect once."""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from millrace.base.errors import (
    AppendDenied,
    AppendRejected,
    AppendUnresolved,
    Closed,
    EntryTooLarge,
    LogUnavailable,
    PermissionDenied,
)
from millrace.client.produce.batch_appender import BatchLimits, FutureCall
from millrace.client.produce.channel_sender import WaitingCall
from millrace.client.produce.producer import Producer
from millrace.client.produce.written import Written
from millrace.message.log_entries import ENTRY_SCHEMA
from millrace.message.payload.rows import decode_rows
from millrace.message.types import MessageType
from millrace.message.wire.decode import decode_entries
from millrace.rpc.outcome import AppendOutcome
from tests.client.produce.test_lane import LOST, SCHEMA, Fault, Rig, Stopped
from tests.waiting import until

CALLERS = 64


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    made = Rig(tmp_path_factory.mktemp("sender"))
    yield made
    made.close()


@pytest.fixture(autouse=True)
def nothing_at_fault(rig: Rig) -> None:
    rig.way.plan = deque()


class Gate:
    """A way that counts appends and holds the first until the gate is opened."""

    def __init__(self, rig: Rig) -> None:
        self.appends: list[int] = []
        """The messages of each append."""
        self.opened = threading.Event()
        self.entered = threading.Event()
        self._append = rig.way.append

    def append(self, pchannel: str, entries: Sequence[bytes], *, deadline: float | None = None) -> AppendOutcome:
        self.appends.append(sum(len(messages_of(each)) for each in entries))
        self.entered.set()
        assert self.opened.wait(20)
        return self._append(pchannel, entries, deadline=deadline)


@pytest.fixture
def gate(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> Gate:
    made = Gate(rig)
    monkeypatch.setattr(rig.way, "append", made.append)
    return made


def messages_of(entry: bytes) -> list[dict[str, Any]]:
    columns = [pa.array([0]), pa.array([0]), pa.array([0]), pa.array([entry], pa.large_binary())]
    found: list[dict[str, Any]] = decode_entries(pa.record_batch(columns, schema=ENTRY_SCHEMA)).to_pylist()
    return found


def keys_of(entry: bytes) -> list[int]:
    return [key for each in messages_of(entry) for key in ids(each["payload"])]


def ids(payload: bytes) -> list[int]:
    found: list[int] = decode_rows(payload, SCHEMA.arrow())["id"].to_pylist()
    return found


def queued(producer: Producer) -> int:
    return len(producer.sender("dml_0")._queue.pieces)


def stored(rig: Rig, producer: Producer, after: int) -> list[int]:
    rig.way.arrive()
    return [key for keys in rig.accepted(producer, after).values() for key in keys]


def test_callers_that_wait_share_a_message(rig: Rig, gate: Gate) -> None:
    keys = rig.keys(0, CALLERS + 1)
    with rig.producer() as producer, ThreadPoolExecutor(CALLERS + 1) as pool:
        calls = [pool.submit(producer.insert, rig.collection, [{"id": keys[-1]}])]
        assert gate.entered.wait(20)
        calls += [pool.submit(producer.insert, rig.collection, [{"id": key}]) for key in keys[:-1]]
        until(lambda: queued(producer) == CALLERS)
        gate.opened.set()
        found = [each.result(timeout=20) for each in calls]
        assert producer.sender("dml_0")._thread is None, "a caller that waits leads next"
    assert gate.appends == [1, 1], "64 calls that waited are one message"
    assert [(each.rows, each.messages, len(each.results)) for each in found] == [(1, 1, 1)] * (CALLERS + 1)
    assert len({each.results[0].message_id for each in found}) == 2


def test_a_caller_that_is_alone_is_sent_at_once_by_its_own_thread(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[str] = []
    append = rig.way.append
    monkeypatch.setattr(
        rig.way, "append", lambda *of, **more: threads.append(threading.current_thread().name) or append(*of, **more)
    )
    with rig.producer() as producer:
        for key in rig.keys(0, 5):
            producer.insert(rig.collection, [{"id": key}])
        assert producer.sender("dml_0")._thread is None
    assert threads == [threading.current_thread().name] * 5


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    plan=st.lists(st.one_of(st.just(Fault.NONE), st.sampled_from(LOST)), max_size=20),
    callers=st.integers(2, 12),
    calls=st.integers(1, 6),
    batches=st.booleans(),
)
def test_every_answer_is_true_and_one_callers_calls_take_effect_once_in_their_order(
    rig: Rig, plan: list[Fault], callers: int, calls: int, batches: bool
) -> None:
    after = rig.host.tick("dml_0")
    rig.way.plan = deque(plan)
    told: dict[int, Written | BaseException] = {}
    with rig.producer() as producer:

        def call(caller: int) -> None:
            for number in range(calls):
                key = caller * 100 + number
                try:
                    told[key] = producer.insert(rig.collection, [{"id": key}])
                except AppendUnresolved as error:
                    told[key] = error

        def batch(caller: int) -> None:
            with producer.batch(limits=BatchLimits(delay=0.001)) as made:
                futures = {
                    key: made.insert([{"id": key}], collection=rig.collection)
                    for key in range(caller * 100, caller * 100 + calls)
                }
            for key, future in futures.items():
                told[key] = future.exception(timeout=20) or future.result()

        with ThreadPoolExecutor(callers) as pool:
            list(pool.map(lambda each: (batch if batches and each % 3 == 0 else call)(each), range(callers)))
        rig.way.plan.clear()
        producer.settle()
        taken = stored(rig, producer, after)
        by_vchannel = rig.accepted(producer, after)
    assert sorted(taken) == sorted(told), "each call takes effect once: those that are held, too"
    for keys in by_vchannel.values():
        for caller in range(callers):
            mine = [key for key in keys if key // 100 == caller]
            assert mine == sorted(mine)
    for key, each in told.items():
        if isinstance(each, Written):
            assert (each.rows, len(each.results), each.rejections) == (1, 1, []), key


@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(plan=st.lists(st.one_of(st.just(Fault.NONE), st.sampled_from(Fault)), min_size=1, max_size=12))
def test_an_interrupted_leader_leaves_what_it_took_for_others_to_the_next(rig: Rig, plan: list[Fault]) -> None:
    after = rig.host.tick("dml_0")
    rig.way.plan = deque(plan)
    told: dict[int, Written | BaseException] = {}

    def call(key: int) -> None:
        try:
            told[key] = producer.insert(rig.collection, [{"id": key}])
        except (AppendUnresolved, Stopped) as error:
            told[key] = error

    with rig.producer() as producer:
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(call, range(24)))
        rig.way.plan.clear()
        producer.settle()
        taken = Counter(stored(rig, producer, after))
    assert len(told) == 24, "nobody waits forever"
    assert max(taken.values()) == 1
    assert {key for key, each in told.items() if not isinstance(each, Stopped)} <= set(taken)


def test_whoever_is_interrupted_while_it_waits_takes_its_rows_along_and_stops_nobody(rig: Rig, gate: Gate) -> None:
    after = rig.host.tick("dml_0")
    first, left, last = rig.keys(0, 3)
    with rig.producer() as producer, ThreadPoolExecutor(3) as pool:
        calls = [pool.submit(producer.insert, rig.collection, [{"id": first}])]
        assert gate.entered.wait(20)
        call = WaitingCall()

        class Turn:
            def acquire(self) -> None:
                until(lambda: queued(producer) == 1)
                raise KeyboardInterrupt

        call.turn = Turn()  # type: ignore[assignment]
        pieces = producer._splitter.rows(call, MessageType.INSERT, rig.collection, [{"id": left}], None, None)
        with pytest.raises(KeyboardInterrupt):
            producer.run(call, pieces)
        calls.append(pool.submit(producer.insert, rig.collection, [{"id": last}]))
        until(lambda: queued(producer) == 1)
        gate.opened.set()
        assert [each.result(timeout=20).rows for each in calls] == [1, 1]
        assert stored(rig, producer, after) == [first, last]


@pytest.mark.parametrize("refusal", [PermissionDenied, EntryTooLarge])
def test_a_refused_entry_fails_the_call_that_is_at_fault_alone(
    rig: Rig, gate: Gate, monkeypatch: pytest.MonkeyPatch, refusal: type[Exception]
) -> None:
    after = rig.host.tick("dml_0")
    keys = rig.keys(0, 6)
    append = gate.append

    def judged(pchannel: str, entries: Sequence[bytes], *, deadline: float | None = None) -> AppendOutcome:
        if keys[3] in [key for each in entries for key in keys_of(each)]:
            raise refusal("not this one")
        return append(pchannel, entries, deadline=deadline)

    monkeypatch.setattr(rig.way, "append", judged)
    with rig.producer() as producer, ThreadPoolExecutor(6) as pool:
        calls = together(producer, gate, pool, rig, keys)
        for key, each in calls.items():
            if key == keys[3]:
                wanted = AppendDenied if refusal is PermissionDenied else AppendRejected
                assert isinstance(each.exception(timeout=20), wanted)
            else:
                assert each.result(timeout=20).rows == 1
        assert sorted(stored(rig, producer, after)) == sorted(set(keys) - {keys[3]})


@pytest.mark.parametrize("fault", [Fault.NONE, Fault.LOST_BEFORE, Fault.LOST_AFTER])
def test_a_rejected_message_fails_the_call_whose_row_is_at_fault_alone(rig: Rig, gate: Gate, fault: Fault) -> None:
    after = rig.host.tick("dml_0")
    rig.way.plan = deque([Fault.NONE, fault])
    keys, foreign = rig.keys(0, 4), rig.keys(1, 1)
    with rig.producer() as producer, ThreadPoolExecutor(6) as pool:
        split = producer._splitter

        def wrong() -> Written:
            call = WaitingCall()
            rows = pa.RecordBatch.from_pydict({"id": foreign}, SCHEMA.arrow())
            home = rig.collection.vchannels[0]
            return producer.run(call, [split.piece(call, MessageType.INSERT, rig.collection, home, 1, rows)])

        calls = together(producer, gate, pool, rig, keys, also=wrong)
        assert calls.pop(-1).result(timeout=20).rejected_by_reason == {"WRONG_VCHANNEL": 1}
        assert [each.result(timeout=20).rejections for each in calls.values()] == [[]] * 4
        assert sorted(stored(rig, producer, after)) == sorted(keys)
        producer.insert(rig.collection, [{"id": foreign[0]}])
        assert stored(rig, producer, after)[-1:] == foreign, "and the numbers go on"


@pytest.mark.parametrize("overtaken", [False, True], ids=["no later call", "a later call took effect"])
def test_a_batch_repeats_calls_of_a_rejected_message_unless_a_later_call_took_effect(
    rig: Rig, gate: Gate, overtaken: bool
) -> None:
    after = rig.host.tick("dml_0")
    keys, foreign = rig.keys(0, 3), rig.keys(1, 1)
    with rig.producer() as producer, producer.batch(collection=rig.collection) as batch:
        first = batch.insert([{"id": keys[0]}])
        assert gate.entered.wait(20)
        calls = [batch.insert([{"id": keys[1]}])]
        wrong = FutureCall(batch)
        rows = pa.RecordBatch.from_pydict({"id": foreign}, SCHEMA.arrow())
        home = rig.collection.vchannels[0]
        piece = producer._splitter.piece(wrong, MessageType.INSERT, rig.collection, home, 1, rows)
        batch.take(wrong, [piece], wait=True)
        calls.append(batch.insert([{"id": keys[2]}]))
        if overtaken:
            batch.delete([keys[1]])
        gate.opened.set()
        assert first.result(timeout=20).rows == 1
        assert wrong.result(timeout=20).rejected_by_reason == {"WRONG_VCHANNEL": 1}
        rejected = {"WRONG_VCHANNEL": 1} if overtaken else {}
        assert [each.result(timeout=20).rejected_by_reason for each in calls] == [rejected] * 2
    assert stored(rig, producer, after) == (keys[:2] if overtaken else keys), "the second is the delete's"


def together(
    producer: Producer, gate: Gate, pool: ThreadPoolExecutor, rig: Rig, keys: list[int], *, also: Any = None
) -> dict[int, Any]:
    """Start a call for each key, all but the first of which wait for one turn; `also` is one more, named -1."""
    calls = {keys[0]: pool.submit(producer.insert, rig.collection, [{"id": keys[0]}])}
    assert gate.entered.wait(20)
    for key in keys[1:]:
        calls[key] = pool.submit(producer.insert, rig.collection, [{"id": key}])
    if also is not None:
        calls[-1] = pool.submit(also)
    until(lambda: queued(producer) == len(calls) - 1)
    gate.opened.set()
    return calls


def test_while_the_log_is_gone_all_that_wait_are_told_at_once_and_held(rig: Rig) -> None:
    after = rig.host.tick("dml_0")
    keys = rig.keys(0, 20)
    rig.way.plan = deque([Fault.LOST_BEFORE] * 1000)
    with rig.producer() as producer:

        def call(key: int) -> object:
            with pytest.raises(AppendUnresolved):
                producer.insert(rig.collection, [{"id": key}])
            return key

        with ThreadPoolExecutor(len(keys)) as pool:
            assert list(pool.map(call, keys)) == keys
        assert producer.unresolved
        rig.way.plan.clear()
        producer.settle()
        assert sorted(stored(rig, producer, after)) == sorted(keys)


def test_a_closed_producer_keeps_no_caller_waiting(rig: Rig) -> None:
    producer = rig.producer()
    lane, (key, other) = producer.lane("dml_0"), rig.keys(0, 2)
    with ThreadPoolExecutor(2) as pool, lane.lock.held():
        first = pool.submit(producer.insert, rig.collection, [{"id": key}])
        until(lambda: producer.sender("dml_0")._leading)
        second = pool.submit(producer.insert, rig.collection, [{"id": other}])
        until(lambda: queued(producer) == 2)
        producer.close()
    for each in (first, second):
        assert isinstance(each.exception(timeout=20), LogUnavailable)
    with pytest.raises(Closed):
        producer.insert(rig.collection, [{"id": key}])
