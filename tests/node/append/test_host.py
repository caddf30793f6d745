"""The append host gives each caller what the chain says about its messages, and nothing else."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from millrace.base.deadline import Deadline
from millrace.base.errors import (
    AppendRejected,
    ChannelNotFound,
    DeadlineExceeded,
    InvalidArgument,
    LogRegressed,
    LogUnavailable,
    Malformed,
    MillraceError,
    UnsupportedVersion,
)
from millrace.base.metrics import Metrics
from millrace.log.rocksmq.service import RocksMQ, RocksMQLog
from millrace.message import builders
from millrace.message.ids import LogId, MessageId, compose_tick
from millrace.message.log_entries import LogEntries
from millrace.message.wire.encode import encode_entry
from millrace.node.append.host import AppendHost, HostSettings
from millrace.node.append.tail_buffer import TailLimits
from millrace.rpc.outcome import OUTCOME_SCHEMA, AppendOutcome, AppendResult, outcome_rows, parse_duplicate
from millrace.rpc.tail import Evicted
from millrace.wal.chain import CHAIN_VERSION
from millrace.wal.state import ChannelState
from tests.node.append.samples import PCHANNEL, insert, judged, keys_of, open_log, opening, transaction

V0, V1 = "p0_1v0", "p0_1v1"


@pytest.fixture
def service(tmp_path: Path) -> Iterator[RocksMQ]:
    with open_log(tmp_path / "log", PCHANNEL, "p1") as opened:
        yield opened


@pytest.fixture
def host(service: RocksMQ) -> Iterator[AppendHost]:
    with AppendHost(service, ChannelState.new) as opened:
        opened.append(PCHANNEL, opening()).results()
        yield opened


def eventually(condition: Callable[[], bool], *, seconds: float = 10.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "the condition did not come true in time"
        threading.Event().wait(0.005)


def types_behind(host: AppendHost, tick: int) -> list[str]:
    found = host.tail(PCHANNEL, tick, timeout=0)
    assert not isinstance(found, Evicted)
    return [name for batch in found.batches for name in batch.column("type").to_pylist()]


def test_a_description_of_all_says_where_news_ended_and_what_failed_of_each(
    host: AppendHost, service: RocksMQ, monkeypatch: pytest.MonkeyPatch
) -> None:
    key, *_ = keys_of(V0, 1)
    host.append(PCHANNEL, encode_entry([insert(key)])).results()
    found = host.describe_all()[PCHANNEL]
    assert found["host"] == host.describe(PCHANNEL)
    assert found["host"]["news_end"] == list(found["log"]["end"])
    rejected = encode_entry([insert(key, vchannel=V1)])
    for entry, is_news in ((rejected, True), (None, False)):
        before = host.describe_all()[PCHANNEL]["host"]["news_end"]
        if entry is None:
            host.tick(PCHANNEL)
        else:
            host.append(PCHANNEL, entry)
        after = host.describe_all()[PCHANNEL]
        assert (after["host"]["news_end"] > before) is is_news
        assert (after["host"]["news_end"] == list(after["log"]["end"])) is is_news

    class Damaged:
        def describe(self) -> None:
            raise LogUnavailable("the disk is gone")

        def close(self) -> None:
            """Nothing is open."""

    plain = service.open
    monkeypatch.setattr(service, "open", lambda name: Damaged() if name == "p1" else plain(name))
    failed = host.describe_all()
    assert failed["p1"]["log_error"] == "LOG_UNAVAILABLE: the disk is gone"
    assert failed[PCHANNEL]["log"] == after["log"]


def test_results_of_concurrent_clients_are_the_chains_own_answer(host: AppendHost, service: RocksMQ) -> None:
    def client(number: int) -> list[AppendOutcome]:
        wrong = [insert(key, producer=number, sequence=key + 5) for key in (100, 101)]  # a gap
        found = [host.append(PCHANNEL, encode_entry(wrong))]
        sequences = {V0: 0, V1: 0}
        for vchannel in (V0, V1):
            for key in keys_of(vchannel, 10):
                message = insert(key, producer=number, sequence=sequences[vchannel], vchannel=vchannel)
                sequences[vchannel] += 1
                found.append(host.append(PCHANNEL, encode_entry([message])))
        return found

    with ThreadPoolExecutor(8) as pool:
        outcomes = [outcome for found in pool.map(client, range(1, 9)) for outcome in found]
    own = judged(service)
    expected = {_key(row): row for row in outcome_rows(own.messages, own.rejections).to_pylist()}
    given = [row for outcome in outcomes for row in outcome.rows.to_pylist()]
    assert len(given) == 8 * (2 + 20)
    assert all(expected[_key(row)] == row for row in given)
    assert sum(1 for row in given if row["reason"]) == 8 * 2


def _key(row: dict[str, int]) -> tuple[int, ...]:
    return row["ledger"], row["entry"], row["index"]


def test_a_rejection_is_raised_with_its_reason(host: AppendHost) -> None:
    (key,) = keys_of(V0, 1)
    outcome = host.append(PCHANNEL, encode_entry([insert(key, vchannel=V1)]))
    with pytest.raises(AppendRejected) as caught:
        outcome.result()
    assert caught.value.reason == "WRONG_VCHANNEL"
    assert outcome.rejected == 1


def test_one_append_of_several_entries_is_answered_in_order_whatever_stands_in_them(host: AppendHost) -> None:
    keys = keys_of(V0, 3)
    entries = [
        encode_entry([insert(keys[0]), insert(keys[1])]),
        encode_entry([insert(keys[2])])[:-1] + b"?",  # framed as an entry, with another checksum
        encode_entry([insert(keys[2]), insert(keys[2], vchannel=V1), builders.time_tick(term=1)]),
    ]
    outcome = host.append(PCHANNEL, entries)
    reasons = [each.reason if isinstance(each, AppendRejected) else "" for each in outcome.message_outcomes()]
    assert reasons == ["", "", "MALFORMED", "", "WRONG_VCHANNEL", ""]
    assert outcome.column("index").tolist() == [0, 1, 0, 0, 1, 2]
    accepted = [each for each in outcome.message_outcomes() if isinstance(each, AppendResult)]
    assert [each.time_tick for each in accepted] == sorted({each.time_tick for each in accepted})


@pytest.mark.parametrize("place", [0, 1, 2])
def test_bytes_that_are_no_entry_are_refused_counted_and_nothing_of_their_append_is_stored(
    service: RocksMQ, place: int
) -> None:
    metrics = Metrics()
    entries = [encode_entry([insert(key)]) for key in keys_of(V0, 2)]
    later = entries[0][:8] + b"\x03" + entries[0][9:]
    with AppendHost(service, ChannelState.new, metrics=metrics) as host:
        host.append(PCHANNEL, opening()).results()
        end = service.open(PCHANNEL).describe().end
        for value, error in ((b"no entry", Malformed), (b"", Malformed), (later, UnsupportedVersion)):
            with pytest.raises(error, match=f"entry {place} of the append .* nothing was appended"):
                host.append(PCHANNEL, [*entries[:place], value, *entries[place:], value])
            with pytest.raises(error):
                host.append(PCHANNEL, value)
        assert service.open(PCHANNEL).describe().end == end
        assert host.append(PCHANNEL, entries).rejected == 0
    assert metrics.registry.get_sample_value("millrace_log_refused_entries_total", {"pchannel": PCHANNEL}) == 9


def test_a_repeated_sequence_gets_the_first_ones_result(host: AppendHost) -> None:
    (key,) = keys_of(V0, 1)
    entry = encode_entry([insert(key, producer=7, sequence=0)])
    first = host.append(PCHANNEL, entry).result()
    again = host.append(PCHANNEL, entry).result()
    assert (again.message_id, again.time_tick) == (first.message_id, first.time_tick)
    assert again.duplicate
    assert not first.duplicate


def test_a_repeated_sequence_whose_first_was_rejected_gets_that_rejection(host: AppendHost) -> None:
    keys = keys_of(V0, 2)
    host.append(PCHANNEL, encode_entry([insert(keys[0], producer=7, sequence=0)])).results()
    wrong = replace(insert(keys[1], producer=7, sequence=1), partition_id=9)
    for _ in range(2):
        with pytest.raises(AppendRejected) as caught:
            host.append(PCHANNEL, encode_entry([wrong])).result()
        assert caught.value.reason == "PARTITION_NOT_FOUND"


def test_a_duplicates_detail_names_the_first_one() -> None:
    assert parse_duplicate("1:2:3:4@99") == (MessageId(1, 2, 3, 4), 99, "")
    assert parse_duplicate("1:2:3:4@99 NO_EFFECT") == (MessageId(1, 2, 3, 4), 99, "NO_EFFECT")


def test_messages_of_a_transaction_name_it_and_begin_at_its_begin(host: AppendHost) -> None:
    keys = keys_of(V0, 2)
    results = host.append(PCHANNEL, encode_entry(transaction(5, keys, vchannel=V0))).results()
    begin, first, second, commit = results
    assert first.last_confirmed == second.last_confirmed == begin.message_id
    assert commit.last_confirmed == commit.message_id
    assert [each.txn_context.txn_id for each in results if each.txn_context] == [5, 5, 5, 5]


def test_a_time_tick_that_becomes_no_row_is_answered_too(host: AppendHost, service: RocksMQ) -> None:
    ticks = [host.tick(PCHANNEL) for _ in range(3)]
    assert ticks == sorted(set(ticks))
    rows = judged(service).messages.column("type").to_pylist()
    assert rows.count("TIME_TICK") == 1, "only the first follows a message"
    tail = host.tail(PCHANNEL, ticks[-1] - 1, timeout=0)
    assert not isinstance(tail, Evicted)
    assert tail.confirmed_tick >= ticks[-1]


def test_last_confirmed_of_an_unpersisted_tick_is_not_past_an_open_begin(host: AppendHost) -> None:
    begin = builders.begin_txn(5, vchannel=V0, collection_id=1, term=1)
    opened = host.append(PCHANNEL, encode_entry([begin])).result()
    ticks = encode_entry([builders.time_tick(term=1)])
    for _ in range(2):
        result = host.append(PCHANNEL, ticks).result()
        assert result.last_confirmed is not None
        assert result.last_confirmed <= opened.message_id


def test_an_entry_that_cannot_be_processed_parks_its_pchannel_and_no_other(host: AppendHost, service: RocksMQ) -> None:
    host.append("p1", opening("p1")).results()
    (key,) = keys_of(V0, 1)
    newer = builders.term_opening(term=2, chain_version=99, config={})
    good = host.submit(PCHANNEL, encode_entry([insert(key)]))
    with pytest.raises(UnsupportedVersion):
        host.append(PCHANNEL, encode_entry([newer]))
    assert good.outcome(timeout=10).rejected == 0, "what stands before it is decided"
    end = service.open(PCHANNEL).describe().end
    with pytest.raises(UnsupportedVersion):
        host.append(PCHANNEL, encode_entry([insert(key)]))
    assert service.open(PCHANNEL).describe().end == end, "nothing is appended to a parked PChannel"
    assert str(host.describe(PCHANNEL)["parked"]).startswith("UNSUPPORTED_VERSION")
    with pytest.raises(UnsupportedVersion):
        host.tail(PCHANNEL, compose_tick(1 << 43), timeout=5)
    assert host.append("p1", encode_entry([insert(key, pchannel="p1")])).rejected == 0


def test_a_log_that_lost_committed_entries_parks_its_pchannel(service: RocksMQ) -> None:
    service.open("p1").append([b"something else"])
    ahead = ChannelState.new("p1")
    ahead.position = LogId(0, service.open("p1").describe().end.entry + 1)
    with AppendHost(service, lambda pchannel: ahead) as host, pytest.raises(LogRegressed):
        host.append("p1", opening("p1"))


def test_a_host_that_starts_from_a_committed_state_goes_on_as_if_it_had_followed_all_along(
    host: AppendHost, service: RocksMQ
) -> None:
    (key,) = keys_of(V0, 1)
    entry = encode_entry([insert(key, producer=3, sequence=0)])
    first = host.append(PCHANNEL, entry).result()
    committed = ChannelState.from_bytes(host.state(PCHANNEL).to_bytes())
    host.append(PCHANNEL, encode_entry([insert(key, producer=3, sequence=1)])).results()
    with AppendHost(service, lambda pchannel: committed) as other:
        again = other.append(PCHANNEL, entry).result()
        assert again.message_id == first.message_id
        eventually(lambda: host.state(PCHANNEL).position == other.state(PCHANNEL).position)
        assert host.state(PCHANNEL).to_bytes() == other.state(PCHANNEL).to_bytes()


class _Blocked:
    """A log whose reads find nothing until they are let through."""

    def __init__(self, service: RocksMQ) -> None:
        self._log = service.open(PCHANNEL)
        self.open_again = threading.Event()
        self._woken = threading.Event()

    def open(self, pchannel: str) -> _Blocked:
        return self

    def read(self, position: LogId, *, end: LogId | None = None, max_bytes: int = 1, timeout: float = 0) -> LogEntries:
        deadline = Deadline.after(timeout)
        while not self.open_again.wait(deadline.remaining(maximum=0.02)):
            if self._woken.is_set() or deadline.expired():
                self._woken.clear()
                return LogEntries(pa.RecordBatch.from_pylist([], schema=self._schema()), position)
        return self._log.read(position, end=end, max_bytes=max_bytes, timeout=timeout)

    def wake(self) -> None:
        self._woken.set()
        self._log.wake()

    def _schema(self) -> pa.Schema:
        return self._log.read(LogId(0, 0), max_bytes=1).batch.schema

    def __getattr__(self, name: str) -> object:
        return getattr(self._log, name)


def test_a_decision_that_is_late_is_deadline_exceeded_and_comes_all_the_same(service: RocksMQ) -> None:
    blocked = _Blocked(service)
    with AppendHost(blocked, ChannelState.new) as host:  # type: ignore[arg-type]
        pending = host.submit(PCHANNEL, opening())
        with pytest.raises(DeadlineExceeded, match="in the log"):
            pending.outcome(timeout=0.05)
        blocked.open_again.set()
        assert len(pending.outcome(timeout=10)) == 3


class _Faltering:
    """A service whose log cannot be reached twice, and only once it is opened anew after that."""

    def __init__(self, service: RocksMQ) -> None:
        self._service = service
        self.opened = self.failed = 0

    def open(self, pchannel: str) -> _Faltering:
        self.opened += 1
        self._log = self._service.open(pchannel)
        return self

    def read(self, position: LogId, *, end: LogId | None = None, max_bytes: int = 1, timeout: float = 0) -> LogEntries:
        if self.failed < 2:
            self.failed += 1
            raise LogUnavailable("not now")
        return self._log.read(position, end=end, max_bytes=max_bytes, timeout=timeout)

    def __getattr__(self, name: str) -> object:
        return getattr(self._log, name)


def test_a_log_that_cannot_be_reached_for_a_while_is_opened_and_followed_again(service: RocksMQ) -> None:
    faltering = _Faltering(service)
    with AppendHost(faltering, ChannelState.new) as host:  # type: ignore[arg-type]
        assert host.append(PCHANNEL, opening()).rejected == 0
    assert faltering.failed == 2
    assert faltering.opened >= 3


def _refusal(host: AppendHost) -> type[Exception] | None:
    try:
        host.append(PCHANNEL, b"entry")
    except MillraceError as error:
        return type(error)
    return None


def test_a_pchannel_that_is_dropped_and_made_again_is_followed_from_its_beginning(
    host: AppendHost, service: RocksMQ
) -> None:
    service.drop(PCHANNEL)
    eventually(lambda: _refusal(host) is ChannelNotFound)
    service.create(PCHANNEL)
    assert host.append(PCHANNEL, opening()).rejected == 0


def test_who_waits_when_the_host_closes_is_told_to_append_again(service: RocksMQ) -> None:
    blocked = _Blocked(service)
    host = AppendHost(blocked, ChannelState.new)  # type: ignore[arg-type]
    pending = host.submit(PCHANNEL, opening())
    host.close()
    with pytest.raises(LogUnavailable):
        pending.outcome(timeout=10)
    with pytest.raises(LogUnavailable):
        host.append(PCHANNEL, opening())


def test_appends_to_no_pchannel_or_of_nothing_are_refused(host: AppendHost) -> None:
    with pytest.raises(ChannelNotFound):
        host.append("elsewhere", b"entry")
    with pytest.raises(InvalidArgument):
        host.append(PCHANNEL, [])


# --- time ticks -------------------------------------------------------------------------------------------------------


def test_an_open_transaction_expires_though_nobody_appends_any_more(host: AppendHost) -> None:
    begin = builders.begin_txn(5, vchannel=V0, collection_id=1, term=1, keepalive_ms=30)
    opened = host.append(PCHANNEL, encode_entry([begin])).result()
    eventually(lambda: "ROLLBACK_TXN" in types_behind(host, opened.time_tick))


def test_a_pchannel_that_took_messages_gets_one_tick_when_it_falls_idle(service: RocksMQ) -> None:
    with AppendHost(service, ChannelState.new, settings=HostSettings(tick_interval=0.2)) as host:
        last = host.append(PCHANNEL, opening()).last_tick
        eventually(lambda: types_behind(host, last) == ["TIME_TICK"])
        confirmed = host.tail(PCHANNEL, last, timeout=0)
        assert not isinstance(confirmed, Evicted)
        later = host.tail(PCHANNEL, confirmed.confirmed_tick, timeout=0.8)
        assert not isinstance(later, Evicted)
        assert later.confirmed_tick == confirmed.confirmed_tick, "nothing came since: no further tick"


def test_an_idle_pchannel_costs_nothing_and_wakes_for_an_entry_a_timer_and_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads: list[str] = []
    read = RocksMQLog.read

    def counted(log: RocksMQLog, position: LogId, **options: Any) -> LogEntries:
        reads.append(threading.current_thread().name)
        return read(log, position, **options)

    monkeypatch.setattr(RocksMQLog, "read", counted)
    names = [f"p{number}" for number in range(16)]
    with open_log(tmp_path / "log", *names) as service:
        host = AppendHost(service, ChannelState.new, settings=HostSettings(tick_interval=0.3))
        term = encode_entry([builders.term_opening(term=1, chain_version=CHAIN_VERSION, config={})])
        for name in names:
            host.append(name, opening() if name == PCHANNEL else term).results()
        eventually(lambda: not any(state.dirty for state in host.states().values()))
        time.sleep(0.2)
        reads.clear()
        time.sleep(1.5)
        assert not reads, "nothing is due and nothing came"
        service.open(PCHANNEL).append([encode_entry([insert(1, vchannel=V0)])])
        eventually(lambda: host.state(PCHANNEL).position == service.open(PCHANNEL).end(), seconds=5)
        begun = time.monotonic()
        host.close()
        assert time.monotonic() - begun < 5, "no thread waits out its time"


def test_a_read_at_a_tick_that_nothing_has_reached_yet_is_confirmed_by_a_tick(host: AppendHost) -> None:
    ahead = compose_tick(time.time_ns() // 1_000_000 + 150)
    assert host.confirm(PCHANNEL, ahead, deadline=10) >= ahead
    with pytest.raises(DeadlineExceeded):
        host.confirm(PCHANNEL, compose_tick(time.time_ns() // 1_000_000 + 60_000), deadline=0.1)


def test_no_tick_before_a_term_is_open(service: RocksMQ) -> None:
    with AppendHost(service, ChannelState.new) as host, pytest.raises(InvalidArgument, match="term"):
        host.tick(PCHANNEL)


def test_a_tick_that_is_asked_for_before_the_host_has_read_its_log_waits_for_it(service: RocksMQ) -> None:
    log = service.open(PCHANNEL)
    log.append(opening())
    for key in range(200):
        log.append([encode_entry([insert(key)])])
    with AppendHost(service, ChannelState.new) as host:
        tick = host.tick(PCHANNEL)
        assert host.state(PCHANNEL).last_tick >= tick
    assert judged(service).messages.num_rows > 200


# --- the tail ---------------------------------------------------------------------------------------------------------


def test_the_tail_holds_the_chains_messages_and_confirms_them(host: AppendHost, service: RocksMQ) -> None:
    keys = keys_of(V0, 20)
    for key in keys:
        host.append(PCHANNEL, encode_entry([insert(key)])).result()
    whole = judged(service)
    found = host.tail(PCHANNEL, 0, timeout=0)
    assert not isinstance(found, Evicted)
    rows = [row for batch in found.batches for row in batch.to_pylist()]
    assert rows == whole.messages.to_pylist()
    assert found.confirmed_tick == whole.state.last_tick
    middle = rows[len(rows) // 2]["time_tick"]
    behind = host.tail(PCHANNEL, middle, timeout=0)
    assert not isinstance(behind, Evicted)
    assert [row for batch in behind.batches for row in batch.to_pylist()] == rows[len(rows) // 2 + 1 :]


def test_a_reader_that_waits_at_the_end_gets_the_next_message(host: AppendHost) -> None:
    tick = host.tick(PCHANNEL)
    (key,) = keys_of(V0, 1)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(host.tail, PCHANNEL, tick, timeout=10)
        result = host.append(PCHANNEL, encode_entry([insert(key)])).result()
        found = waiting.result()
    assert not isinstance(found, Evicted)
    assert found.batches[-1].column("time_tick").to_pylist()[-1] == result.time_tick


def test_who_asks_for_what_is_gone_is_told_where_the_tail_begins(service: RocksMQ) -> None:
    small = HostSettings(tail=TailLimits(max_bytes=200_000, keep_bytes=0))
    with AppendHost(service, ChannelState.new, settings=small) as host:
        host.append(PCHANNEL, opening()).results()
        keys = keys_of(V0, 30)
        results = [host.append(PCHANNEL, encode_entry([insert(key, body=bytes(20_000))])).result() for key in keys]
        found = host.tail(PCHANNEL, 0, timeout=0)
        assert isinstance(found, Evicted)
        assert results[0].time_tick < found.earliest <= results[-1].time_tick
        rest = host.tail(PCHANNEL, found.earliest, timeout=0)
        assert not isinstance(rest, Evicted)
        kept = [tick for batch in rest.batches for tick in batch.column("time_tick").to_pylist()]
        assert kept == [each.time_tick for each in results if each.time_tick > found.earliest]


def test_an_outcome_has_the_documented_columns(host: AppendHost) -> None:
    assert host.append(PCHANNEL, encode_entry([insert(keys_of(V0, 1)[0])])).rows.schema == OUTCOME_SCHEMA
