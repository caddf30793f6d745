"""Consumers share a stream: each gets what a reader of its own would get, and a slow one keeps nothing."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.base.errors import LogUnavailable
from millrace.base.job_pool import Job, JobPool
from millrace.client.consume import shared_tail
from millrace.client.consume.consumer import Consumer
from millrace.client.consume.scan import Scan, scan
from millrace.client.consume.shared_tail import SharedTail
from millrace.message import builders
from millrace.message.ids import LogId, MessageId
from millrace.message.types import MessageType
from millrace.message.wire.encode import encode_entry
from millrace.node.append.tail_buffer import TailBuffer, TailLimits
from millrace.rpc.tail import Evicted, TailBatch, TimeTick
from millrace.wal.scanner import (
    Filter,
    Latest,
    Scanner,
    StartAfterTick,
    TickAboveFilter,
    TypeFilter,
    VChannelFilter,
    visible_units,
)
from tests.node.append.samples import PCHANNEL, VCHANNELS, insert, judged, keys_of, open_log, opening, transaction
from tests.waiting import until

V0, V1 = VCHANNELS
SELECTIONS: tuple[tuple[Filter, ...], ...] = (
    (),
    (VChannelFilter({V0}),),
    (VChannelFilter({V1}), TypeFilter({MessageType.INSERT})),
    (TypeFilter({MessageType.INSERT, MessageType.COMMIT_TXN}),),
)


@pytest.fixture(scope="module")
def messages(tmp_path_factory: pytest.TempPathFactory) -> pa.RecordBatch:
    """Messages of both VChannels: inserts, transactions that overlap others or are rolled back, a drop."""
    ours, theirs = keys_of(V0, 40), keys_of(V1, 20)
    begin, *rest, commit = transaction(5, ours[4:8], vchannel=V0)
    appended = [
        *([insert(key)] for key in ours[:4]),
        [begin, rest[0]],
        [insert(theirs[0]), insert(theirs[1])],
        [*rest[1:], insert(ours[8])],
        transaction(6, theirs[2:4], vchannel=V1, commit=False),
        [commit],
        *([insert(key)] for key in ours[9:25]),
        transaction(7, theirs[4:6], vchannel=V1),
        *([insert(key)] for key in theirs[6:12]),
        transaction(8, ours[25:27], vchannel=V0)[:-1],
        [builders.drop_collection(vchannel=V0, collection_id=1, term=1)],
        *([insert(key)] for key in theirs[12:18]),
    ]
    with open_log(tmp_path_factory.mktemp("shared"), PCHANNEL) as service:
        log = service.open(PCHANNEL)
        log.append([*opening(), *map(encode_entry, appended)])
        found = judged(service)
        assert found.messages.num_rows >= 60
        return found.messages


class World:
    """A server of `messages`, of which it has published some; its tail is small, and its table has the rest."""

    def __init__(self, messages: pa.RecordBatch, *, limits: TailLimits | None = None) -> None:
        self.ticks: list[int] = messages.column("time_tick").to_pylist()
        self.messages = messages
        self.published = 0
        self.stored = 0
        """Messages in the table: all that were ever published."""
        self.calls = 0
        self.failing = 0
        self.during: Callable[[], None] = lambda: None
        """Runs within a call, before it is answered."""
        self._limits = limits or TailLimits(max_bytes=5 * 17_000, keep_bytes=0)
        self._buffer = TailBuffer(start_tick=0, limits=self._limits)

    def publish(self, count: int) -> None:
        end = min(len(self.ticks), self.published + count)
        if end > self.published:
            rows = self.messages.slice(self.published, end - self.published)
            self.published = end
            self.stored = max(self.stored, end)
            self._buffer.publish(
                lambda: rows, rows=rows.num_rows, confirmed_tick=self.ticks[end - 1], bytes=100 * rows.num_rows
            )

    def restart(self, back: int) -> None:
        """Another server begins `back` messages before the end, and has not come to the end yet."""
        start = max(0, self.published - back)
        self._buffer = TailBuffer(start_tick=self.ticks[start - 1] if start else 0, limits=self._limits)
        self.published = start

    # --- TailSource ---

    def tail(self, pchannel: str, after_tick: int, *, timeout: float, max_bytes: int = 8 << 20) -> TailBatch | Evicted:
        self.calls += 1
        self.during()
        if self.failing:
            self.failing -= 1
            raise LogUnavailable("lost")
        found = self._buffer.tail(after_tick, timeout=timeout, max_bytes=max_bytes)
        if isinstance(found, Evicted) or not found.batches:
            return found
        # As the server does: one batch, whose rows were published one by one.
        return TailBatch(pa.Table.from_batches(found.batches).combine_chunks().to_batches(), found.confirmed_tick)

    def time_tick(self, pchannel: str, *, persist: bool = True, deadline: float = 30.0) -> TimeTick:
        tick, begin = self.ticks[self.published - 1] if self.published else 0, MessageId(0, 0, 0, 0)
        return TimeTick(tick, begin, begin, persist)

    # --- for its table ---

    def confirmed_at(self, pchannel: str, tick: int) -> MessageId:
        rows = self.messages.filter(pc.less_equal(self.messages.column("time_tick"), tick)).to_pylist()
        if not rows:
            return MessageId(0, 0, 0, 0)
        return MessageId(*(rows[-1][f"lc_{name}"] for name in ("ledger", "entry", "index", "ordinal")))

    def messages_from(self, start: MessageId) -> int:
        ids = [
            MessageId(row["ledger"], row["entry"], row["index"], row["ordinal"]) for row in self.messages.to_pylist()
        ]
        return next((place for place, each in enumerate(ids) if each >= start), len(ids))


class Table:
    """The WalView of a world."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._end = self.version = world.stored

    def refreshed(self) -> Table:
        return Table(self._world)

    def last_tick(self, pchannel: str) -> int:
        return self._world.ticks[self._end - 1] if self._end else 0

    def trimmed(self, pchannel: str) -> tuple[int, LogId]:
        return 0, LogId(0, 0)

    def confirmed_at(self, pchannel: str, tick: int) -> MessageId:
        return self._world.confirmed_at(pchannel, tick)

    def messages(
        self,
        pchannel: str,
        *,
        start: MessageId | None = None,
        after_tick: int = 0,
        columns: Sequence[str] | None = None,
    ) -> Iterator[pa.Table]:
        world = self._world
        first = (
            world.messages_from(start)
            if start is not None
            else next((place for place, tick in enumerate(world.ticks) if tick > after_tick), len(world.ticks))
        )
        if first < self._end:
            yield pa.Table.from_batches([world.messages.slice(first, self._end - first)])


class Reader:
    """A scan that continues after errors and seeks, and everything that it delivered since."""

    def __init__(self, world: World, shared: SharedTail, filters: tuple[Filter, ...], after: int) -> None:
        self._world, self._shared, self._filters = world, shared, filters
        self.got: list[MessageId] = []
        self.seek(after)

    def seek(self, after: int) -> None:
        self.close()
        self.after, self.got = after, []
        self._open(after)

    def _open(self, after: int) -> None:
        self._scan = Scan(
            PCHANNEL,
            StartAfterTick(after),
            wal=lambda: Table(self._world),
            tail=self._shared,
            filters=self._filters,
            until_tick=None,
        )

    def poll(self) -> bool:
        """Take what is there; whether there was anything."""
        position = self._scan.confirmed_tick
        try:
            parts = self._scan.poll_parts(timeout=0.0)
        except LogUnavailable:
            self._scan.close()
            self._open(position)
            return True
        self.got += [unit.id for part in parts for unit in part.units()]
        return bool(parts) or self._scan.confirmed_tick > position

    def close(self) -> None:
        found = getattr(self, "_scan", None)
        if found is not None:
            found.close()

    def expected(self) -> list[MessageId]:
        """What a reader alone gets."""
        rows = Scanner(after_tick=self.after, filters=self._filters).push(self._world.messages)
        return [unit.id for unit in visible_units(rows)]


NUMBERS = st.integers(0, 5)
SPECIAL = st.one_of(
    st.tuples(st.just("seek"), NUMBERS, st.integers(0, 59)),
    st.tuples(st.just("fail"), NUMBERS, st.just(0)),
    st.tuples(st.just("restart"), NUMBERS, st.just(0)),
    st.tuples(st.just("publish"), NUMBERS, st.just(0)),
    st.tuples(st.just("poll"), NUMBERS, st.just(0)),
    st.tuples(st.just("poll"), NUMBERS, st.just(0)),
)
Action = tuple[str, int, int]


@settings(max_examples=50)
@given(
    readers=st.lists(
        st.tuples(st.sampled_from(SELECTIONS), st.integers(0, 30), st.integers(1, 7)), min_size=1, max_size=6
    ),
    rounds=st.lists(st.tuples(st.integers(1, 6), st.lists(SPECIAL, max_size=3)), max_size=30),
    window=st.sampled_from([1, 60_000, 16 << 20]),
    rows=st.sampled_from([2, 256]),
)
def test_each_reader_gets_what_it_would_get_alone(
    messages: pa.RecordBatch,
    readers: list[tuple[tuple[Filter, ...], int, int]],
    rounds: list[tuple[int, list[Action]]],
    window: int,
    rows: int,
) -> None:
    """At any speed, with evictions, restarts, errors and seeks, also while another reader's call is under way."""
    world = World(messages)
    world.publish(5)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shared_tail, "WINDOW_BYTES", window)
        patch.setattr(shared_tail, "_PIECE_ROWS", rows)
        shared = SharedTail(world)
        made = [Reader(world, shared, filters, world.ticks[start]) for filters, start, _ in readers]
        polling: set[int] = set()

        def act(name: str, number: int, more: int = 0) -> None:
            place = number % len(made)
            if name == "publish":
                world.publish(number)
            elif name == "fail":
                world.failing = number % 3
            elif name == "restart":
                world.restart(2 * number)
            elif place not in polling:  # one thread reads
                polling.add(place)
                if name == "poll":
                    made[place].poll()
                else:
                    made[place].seek(world.ticks[more])
                polling.discard(place)

        for turn, (count, specials) in enumerate([*rounds, *[(3, [])] * 20]):
            pending = list(specials)

            def during(pending: list[Action] = pending) -> None:
                if pending:
                    act(*pending.pop())

            world.during = during
            act("publish", count)
            for place, (_, _, pace) in enumerate(readers):
                if turn % pace == 0:
                    act("poll", place)
        world.during = lambda: None
        world.failing = 0
        world.publish(1000)
        for _ in range(2):
            for reader in made:
                while reader.poll():
                    pass
        for reader in made:
            assert reader.got == reader.expected()
            reader.close()
        assert shared.held_bytes() == 0
        assert not shared._windows, "a window ends with its last reader"


def test_consumers_that_wait_get_what_they_would_get_alone(messages: pa.RecordBatch) -> None:
    """Whatever their filters are, and however little room they have."""
    world = World(messages, limits=TailLimits())
    world.publish(2)
    shared = SharedTail(world)
    options = [(filters, prefetch) for filters in SELECTIONS for prefetch in (1, 16 << 20)]
    consumers = [
        Consumer(
            [PCHANNEL],
            wal=lambda: None,
            tail=shared,
            filters=[*filters, TickAboveFilter(world.ticks[1])],
            prefetch_bytes=prefetch,
        )
        for filters, prefetch in options
    ]
    with ThreadPoolExecutor(len(consumers)) as pool:
        ended = threading.Event()

        def read(found: Consumer) -> list[MessageId]:
            ids: list[MessageId] = []
            while not (ended.is_set() and found.positions[PCHANNEL] >= world.ticks[-1]):
                delivery = found.poll(timeout=0.05)
                if delivery is not None:
                    ids.append(delivery.unit.id)
                    found.acknowledge(delivery)
            return ids

        reads = [pool.submit(read, each) for each in consumers]
        while world.published < len(world.ticks):
            world.publish(1)
            threading.Event().wait(0.005)
        ended.set()
        for (filters, _), found in zip(options, reads, strict=True):
            rows = Scanner(after_tick=world.ticks[1], filters=filters).push(messages)
            assert found.result(30) == [unit.id for unit in visible_units(rows)]
    for each in consumers:
        each.close()


@pytest.mark.parametrize("where", ["units", "waker"])
def test_a_consumer_that_cannot_take_fails_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    world = World(stream(tmp_path, inserts(10)), limits=TailLimits())
    world.publish(4)
    shared = SharedTail(world)
    consumers = [consumer(world, shared) for _ in range(4)]
    until(lambda: len(next(iter(shared._windows.values()))._parked) == 4, "all wait for news")
    broken = consumers[1]

    def fail(*args: object) -> None:
        raise ZeroDivisionError

    if where == "units":
        monkeypatch.setattr(broken, "_portions", fail)
    else:
        broken.on_ready(fail)  # as that of an event loop that was closed
    world.publish(3)
    with pytest.raises(ZeroDivisionError):
        polled(broken, 4)  # what was queued before, at most
    for each in consumers:
        if each is not broken:
            assert polled(each, 3) == world.ticks[4:7]
        each.close()


def inserts(count: int, *, size: int = 200) -> list[bytes]:
    key = keys_of(V0, 1)[0]
    return [encode_entry([insert(key, body=bytes(size))]) for _ in range(count)]


def stream(folder: Path, entries: list[bytes]) -> pa.RecordBatch:
    with open_log(folder / "log", PCHANNEL) as service:
        service.open(PCHANNEL).append([*opening(), *entries])
        return judged(service).messages


def consumer(world: World, shared: SharedTail, **options: int) -> Consumer:
    return Consumer(
        [V0],
        wal=lambda: None,
        tail=shared,
        policy=Latest(),
        filters=[TypeFilter({MessageType.INSERT})],
        **options,  # type: ignore[arg-type]
    )


def test_forty_consumers_make_one_stream(tmp_path: Path) -> None:
    world = World(stream(tmp_path, inserts(300)), limits=TailLimits())
    world.publish(4)
    shared = SharedTail(world)
    consumers = [consumer(world, shared) for _ in range(40)]
    try:
        with ThreadPoolExecutor(40) as pool:
            # One that has come to the end calls by itself until it has joined, at the next call of the leader.
            until(lambda: len(shared._windows[PCHANNEL]._positions) == 40, "each has joined")
            before = world.calls
            polls = [pool.submit(polled, each, 100) for each in consumers]
            for _ in range(100):
                world.publish(1)
                threading.Event().wait(0.005)
            found = [poll.result(30) for poll in polls]
        assert all(ticks == world.ticks[4:104] for ticks in found)
        assert world.calls - before <= 101, "each message is one call for all"
    finally:
        for each in consumers:
            each.close()
    assert not shared._windows


def polled(consumer: Consumer, count: int) -> list[int]:
    ticks: list[int] = []
    while len(ticks) < count:
        delivery = consumer.poll(timeout=10.0)
        assert delivery is not None, f"only {len(ticks)} came"
        ticks.append(delivery.tick)
    return ticks


def test_a_slow_consumer_delays_nobody_and_keeps_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_tail, "WINDOW_BYTES", 400_000)
    world = World(stream(tmp_path, inserts(200, size=8_000)), limits=TailLimits())
    world.publish(4)
    shared = SharedTail(world)
    slow = consumer(world, shared, prefetch_bytes=10_000)
    quick = consumer(world, shared)
    with slow, quick:
        while slow.lag or quick.lag:
            threading.Event().wait(0.01)
        for place in range(4, 204):
            world.publish(1)
            assert polled(quick, 1) == [world.ticks[place]]
            assert shared.held_bytes() <= 400_000 + 40_000, "the window, and its newest piece"
        assert shared.held_bytes() > 200_000, "the slow one stands still: the test shows nothing"
        assert polled(slow, 200) == world.ticks[4:204]


def test_a_reader_that_is_closed_keeps_nothing(tmp_path: Path) -> None:
    world = World(stream(tmp_path, inserts(10)), limits=TailLimits())
    world.publish(4)
    shared = SharedTail(world)
    first, second, third = (shared.reader(PCHANNEL) for _ in range(3))
    for reader in (first, second, third):
        reader.tail(world.ticks[3], timeout=0.0)
    world.publish(2)
    first.tail(world.ticks[3], timeout=0.0)
    second.tail(world.ticks[3], timeout=0.0)
    assert shared.held_bytes() > 0, "the third has not taken it"
    third.close()
    assert shared.held_bytes() == 0
    assert third.tail(world.ticks[3], timeout=0.0) == TailBatch([], world.ticks[3])
    for reader in (first, second):
        reader.close()


def test_an_answer_that_was_asked_for_before_a_reader_joined_is_not_for_it(tmp_path: Path) -> None:
    world = World(stream(tmp_path, inserts(10)), limits=TailLimits())
    world.publish(4)
    shared = SharedTail(world)
    leader, other = shared.reader(PCHANNEL), shared.reader(PCHANNEL)
    for reader in (leader, other):
        reader.tail(world.ticks[3], timeout=0.0)
    asked, answer = threading.Event(), threading.Event()

    def during() -> None:
        world.during = lambda: None
        asked.set()
        assert answer.wait(10)

    world.during = during
    with ThreadPoolExecutor(1) as pool:
        leads = pool.submit(leader.tail, world.ticks[3], timeout=10.0)
        assert asked.wait(10)
        late = shared.reader(PCHANNEL)
        late.tail(world.ticks[3], timeout=0.0)
        world.publish(1)
        answer.set()
        leads.result(10)
    calls = world.calls
    assert isinstance(other.tail(world.ticks[3], timeout=0.0), shared_tail.SharedBatch)
    assert world.calls == calls
    late.tail(world.ticks[3], timeout=0.0)
    assert world.calls == calls + 1
    for reader in (leader, other, late):
        reader.close()


def test_an_error_reaches_each_reader_that_waits_for_the_same_answer(tmp_path: Path) -> None:
    world = World(stream(tmp_path, inserts(10)), limits=TailLimits())
    world.publish(4)
    shared = SharedTail(world)
    readers = [shared.reader(PCHANNEL) for _ in range(5)]
    for reader in readers:
        reader.tail(world.ticks[3], timeout=0.0)  # it joins
    world.calls = 0
    asked, answer = threading.Event(), threading.Event()

    def during() -> None:
        asked.set()
        assert answer.wait(10)
        world.failing = 1

    world.during = during
    with ThreadPoolExecutor(5) as pool:
        waits = [pool.submit(reader.tail, world.ticks[3], timeout=20.0) for reader in readers]
        assert asked.wait(10)
        while sum(len(window._changed._waiters) for window in shared._windows.values()) < 4:  # type: ignore[attr-defined]
            threading.Event().wait(0.01)
        answer.set()
        for wait in waits:
            with pytest.raises(LogUnavailable):
                wait.result(10)
    assert world.calls == 1
    for reader in readers:
        reader.close()


def test_a_reader_takes_only_what_was_fetched_after_it_had_joined(tmp_path: Path) -> None:
    """Its token may have got its rights since, so the server must answer for what comes before."""
    world = World(stream(tmp_path, inserts(10)), limits=TailLimits())
    world.publish(4)
    shared = SharedTail(world)
    first, second = shared.reader(PCHANNEL), shared.reader(PCHANNEL)
    for reader in (first, second):
        assert reader.tail(0, timeout=0.0) is not None
    world.publish(2)
    first.tail(world.ticks[3], timeout=0.0)
    third = shared.reader(PCHANNEL)
    calls = world.calls
    third.tail(world.ticks[3], timeout=0.0)
    assert world.calls == calls + 1
    second.tail(world.ticks[3], timeout=0.0)
    assert world.calls == calls + 1, "it had joined before"
    for reader in (first, second, third):
        reader.close()


def test_what_readers_share_is_made_once(tmp_path: Path) -> None:
    world = World(stream(tmp_path, inserts(10)), limits=TailLimits())
    world.publish(4)
    shared = SharedTail(world)
    readers = [shared.reader(PCHANNEL) for _ in range(3)]
    for reader in readers:
        reader.tail(world.ticks[3], timeout=0.0)
    world.publish(5)
    found = []
    for reader in readers:
        batch = reader.tail(world.ticks[3], timeout=0.0)
        assert isinstance(batch, shared_tail.SharedBatch)
        (piece,) = batch.pieces
        assert isinstance(piece, shared_tail.SharedRows)
        found.append(piece.visible(Scanner(filters=[VChannelFilter({V0})])).units())
    assert found[0] is found[1] is found[2]
    for reader in readers:
        reader.close()


def test_readers_without_threads_share_one_call_and_get_everything(messages: pa.RecordBatch) -> None:
    """Hundreds that wait cost one call a second and no run, and all of them meet an error of it."""
    world = World(messages, limits=TailLimits())
    world.publish(4)
    shared = SharedTail(world)
    scans = [scan(PCHANNEL, StartAfterTick(0), wal=lambda: None, tail=shared) for _ in range(300)]
    got: list[list[int]] = [[] for _ in scans]
    parked, failed, jobs = [False] * len(scans), set[int](), list[Job]()

    def step(place: int) -> float | None:
        if place >= len(jobs):
            return 0.01
        parked[place] = False
        try:
            while (parts := scans[place].poll_once()) is not None:
                for part in parts:
                    got[place] += part.rows.column("time_tick").to_pylist()
        except LogUnavailable:
            failed.add(place)
            return 0.0
        pause = scans[place].on_news(jobs[place].wake)
        parked[place] = pause is None
        return pause

    with JobPool("scan", threads=2) as pool:
        for place in range(len(scans)):
            jobs.append(pool.start(partial(step, place)))
        until(lambda: all(parked), "all wait")
        begun, calls, runs = time.monotonic(), world.calls, pool.runs
        until(lambda: world.calls >= calls + 3, "the calls of the waiting ones go on")
        assert pool.runs == runs, "none of them runs"
        assert world.calls - calls <= 2 + (time.monotonic() - begun) / shared_tail._LISTEN_SECONDS
        for _ in range(3):
            world.publish(1)
            until(lambda: all(each[-1] == world.ticks[world.published - 1] for each in got), "all have it")
            until(lambda: all(parked), "they wait again")
        assert len({tuple(each) for each in got}) == 1
        assert len(got[0]) == 7
        calls = world.calls
        world.failing = 1
        until(lambda: len(failed) == len(scans) and all(parked), "each meets the error")
        assert world.calls - calls <= 5, "which one call got"
    for found in scans:
        found.close()
    until(lambda: not any(each.name == f"tail-{PCHANNEL}" for each in threading.enumerate()), "no thread stays")
