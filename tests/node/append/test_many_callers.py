"""Many callers at once: each is answered what the log says about its messages, whoever shared its group.

An answer is a pure function of the log. `Chain().process` over the whole log, from its beginning, must decide each
message as its caller was told while 64 callers, ticks, confirmations and tails ran beside each other.
"""

from __future__ import annotations

import random
import threading
import time
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from millrace.base.errors import Malformed
from millrace.client.append_client import AppendClient
from millrace.log.protocol import LogService
from millrace.message import builders
from millrace.message.ids import LogId, MessageId, compose_tick
from millrace.message.model import MutableMessage
from millrace.message.schema import FieldSpec
from millrace.message.schema_changes import AddField
from millrace.message.types import MessageType
from millrace.message.wire.decode import decode_entries
from millrace.message.wire.encode import encode_entry
from millrace.message.wire.stamp import stamp_entries
from millrace.node.append.host import AppendHost
from millrace.rpc.append_pipeline import as_values
from millrace.rpc.outcome import AppendOutcome, outcome_rows
from millrace.rpc.tail import Evicted
from millrace.wal.chain import CHAIN_VERSION, Chain
from millrace.wal.state import ChannelState
from tests.in_memory import folder_in_memory
from tests.node.append.samples import SCHEMA, VCHANNELS, home, insert, judged, keys_of, open_log, opening, transaction

PCHANNELS = ("p0", "p1", "p2", "p3")
CALLERS = 64
LIMITS = {
    "segment_rows": 40,
    "dedup_results": 3,
    "default_txn_keepalive_ms": 150,
    "max_open_txns": 8,
    "max_partitions": 3,
    "max_producers": 40,
}
"""Limits that a few hundred messages reach."""

Append = list[bytes]
"""The entries of one append."""
Way = Callable[[str, list[Append]], list[AppendOutcome]]
"""Makes a caller's appends to a PChannel, in order, and returns the outcome of each."""
Row = dict[str, Any]


@dataclass
class Answered:
    """An append, and what its caller was told."""

    pchannel: str
    entries: Append
    messages: int
    rows: list[Row]


@dataclass
class Caller:
    """Seeded appends of one caller: most are valid, some are rejected, and a few are refused."""

    number: int
    chance: random.Random
    ways: list[Way]
    answered: list[Answered] = field(default_factory=list)
    _sent: dict[str, list[MutableMessage]] = field(default_factory=lambda: defaultdict(list))
    _sequences: Counter[str] = field(default_factory=Counter)
    _open: dict[str, int] = field(default_factory=dict)
    """By PChannel the transaction that this caller has begun."""

    @property
    def epoch(self) -> int:
        """Every eighth caller takes over the producer id of the caller before it."""
        return 2 if self.number % 8 == 7 else 1

    @property
    def producer(self) -> int:
        return self.number + 1 - (self.epoch - 1)

    def run(self, calls: int) -> None:
        for _ in range(calls):
            pchannel = self.chance.choice(PCHANNELS)
            way = self.chance.choice(self.ways)
            made = [self._append(pchannel) for _ in range(self.chance.choice([1, 1, 1, 2, 3]))]
            if self.chance.random() < 0.05:
                with pytest.raises(Malformed):
                    way(pchannel, [[*made[0][0], b"no entry"]])
            outcomes = way(pchannel, [entries for entries, _ in made])
            for (entries, messages), outcome in zip(made, outcomes, strict=True):
                self.answered.append(Answered(pchannel, entries, messages, outcome.rows.to_pylist()))

    def _append(self, pchannel: str) -> tuple[Append, int]:
        """The entries of an append, and the number of answers that it gets."""
        entries, messages = [], 0
        for _ in range(self.chance.choice([1, 1, 1, 2])):
            made = [each for _ in range(self.chance.choice([1, 1, 1, 4])) for each in self._messages(pchannel)]
            entry = encode_entry(made)
            if self.chance.random() < 0.03:
                entries.append(entry[:-1] + bytes([entry[-1] ^ 1]))  # framed as an entry, with another checksum
                messages += 1
            else:
                entries.append(entry)
                messages += len(made)
        return entries, messages

    def _messages(self, pchannel: str) -> list[MutableMessage]:
        kinds = {self._row: 30, self._wrong: 4, self._again: 3, self._transaction: 4, self._ddl: 1, self._tick: 1}
        (kind,) = self.chance.choices(list(kinds), weights=list(kinds.values()))
        return kind(pchannel)

    def _numbered(self, message: MutableMessage, pchannel: str) -> MutableMessage:
        sequence = self._sequences[message.vchannel]
        self._sequences[message.vchannel] += 1
        made = replace(message, producer_id=self.producer, epoch=self.epoch, sequence=sequence)
        self._sent[pchannel].append(made)
        return made

    def _row(self, pchannel: str) -> list[MutableMessage]:
        key = self.chance.randrange(1000)
        kind = self.chance.choice(["insert", "insert", "upsert", "delete", "unnumbered"])
        made = insert(key, pchannel=pchannel, body=bytes(self.chance.randrange(200)))
        if kind == "upsert":
            made = replace(made, type=MessageType.UPSERT)
        elif kind == "delete":
            vchannel = home(key, pchannel)
            made = builders.delete([key], schema=SCHEMA, vchannel=vchannel, collection_id=1, term=1)
        return [made if kind == "unnumbered" else self._numbered(made, pchannel)]

    def _wrong(self, pchannel: str) -> list[MutableMessage]:
        here, there = (name.replace("p0", pchannel) for name in VCHANNELS)
        (key,) = keys_of(here, 1)
        right = insert(key, pchannel=pchannel)
        return [
            self.chance.choice(
                [
                    lambda: self._numbered(replace(right, vchannel=there), pchannel),
                    lambda: self._numbered(replace(right, partition_id=9), pchannel),
                    lambda: replace(right, term=9),
                    lambda: replace(right, schema_version=9),
                    lambda: replace(right, producer_id=self.producer, epoch=1, sequence=self._sequences[here] + 5),
                ]
            )()
        ]

    def _again(self, pchannel: str) -> list[MutableMessage]:
        sent = self._sent[pchannel]
        return [self.chance.choice(sent[-8:])] if sent else self._row(pchannel)

    def _transaction(self, pchannel: str) -> list[MutableMessage]:
        vchannel = VCHANNELS[self.number % 2].replace("p0", pchannel)
        keys = self.chance.sample(keys_of(vchannel, 20), 2)
        open_txn = self._open.pop(pchannel, None)
        if open_txn is not None:
            _, *rest = transaction(open_txn, keys, vchannel=vchannel, commit=self.chance.random() < 0.7)
            return rest
        txn_id = self.chance.randrange(1, 1 << 60)
        whole = transaction(txn_id, keys, vchannel=vchannel)
        if self.chance.random() < 0.5:
            return whole
        self._open[pchannel] = txn_id  # goes on in a later append, if its lease has not run out
        return whole[:2]

    def _ddl(self, pchannel: str) -> list[MutableMessage]:
        vchannel = self.chance.choice(VCHANNELS).replace("p0", pchannel)
        on: dict[str, Any] = {"vchannel": vchannel, "collection_id": 1, "term": 1}
        added, number = AddField(FieldSpec(f"f{self.number}", "int64", True)), self.chance.randrange(2, 4)
        return [
            self.chance.choice(
                [
                    lambda: builders.create_partition(f"part{number}", partition_id=number, **on),
                    lambda: builders.drop_partition(partition_id=number, **on),
                    lambda: builders.schema_change([added], schema_version=number, **on),
                    lambda: builders.manual_flush(**on),
                    lambda: builders.flush_all(term=1),
                ]
            )()
        ]

    def _tick(self, pchannel: str) -> list[MutableMessage]:
        return [builders.time_tick(term=1)]


# --- what the answers must be -----------------------------------------------------------------------------------------


def place(row: Row) -> tuple[int, int, int]:
    return row["ledger"], row["entry"], row["index"]


def check(service: LogService, pchannel: str, callers: list[Caller]) -> Counter[str]:
    """Hold every answer against the chain's own decisions; returns the number of messages by reason."""
    whole = service.open(pchannel).read(LogId(0, 0), max_bytes=1 << 30)
    own = Chain().process(ChannelState.new(pchannel), whole)
    expected = {place(row): row for row in outcome_rows(own.messages, own.rejections).to_pylist()}
    places = sorted(expected)
    ids = list(zip(whole.batch.column("ledger").to_pylist(), whole.batch.column("entry").to_pylist(), strict=True))
    values = dict(zip(ids, whole.batch.column("value").to_pylist(), strict=True))
    reasons: Counter[str] = Counter()
    seen: set[tuple[int, int]] = set()
    for caller in callers:
        mine = [each for each in caller.answered if each.pchannel == pchannel]
        for answer in mine:
            assert len(answer.rows) == answer.messages, "one answer for each message"
            entries = sorted({place(row)[:2] for row in answer.rows})
            stamped = stamp_entries(pa.array(answer.entries, pa.large_binary()), "machine").to_pylist()
            assert [values[each] for each in entries] in (answer.entries, stamped), "the answer is another append's"
            assert not seen & set(entries), "two appends have the same place in the log"
            seen |= set(entries)
            for row in answer.rows:
                if place(row) in expected:
                    assert row == expected[place(row)]
                else:
                    # A time tick that became no row. Its answer says how far its whole run was decided.
                    before = expected[places[bisect_left(places, place(row)) - 1]]
                    assert not row["reason"]
                    assert before["time_tick"] < row["time_tick"] <= own.state.last_tick
                    confirmed = MessageId(row["lc_ledger"], row["lc_entry"], row["lc_index"], row["lc_ordinal"])
                    assert confirmed <= MessageId(*place(row), 0)
                reasons[row["reason"]] += 1
        firsts = [place(row) for answer in mine for row in answer.rows]
        assert all(before < after for before, after in pairwise(firsts)), "a caller's appends changed their order"
    left = whole.batch.filter(pa.array([each not in seen for each in ids]))
    others = set(decode_entries(left).column("type").to_pylist())
    assert others <= {MessageType.TERM_OPENING, MessageType.CREATE_COLLECTION, MessageType.TIME_TICK}, (
        "an entry that nobody appended, or whose caller was told of a failure"
    )
    return reasons


def run_all(callers: list[Caller], calls: int, beside: list[Callable[[threading.Event], None]]) -> None:
    """Run all callers at once, with `beside` until they end. Raises the first failure."""
    together, ended = threading.Barrier(len(callers)), threading.Event()

    def run(caller: Caller) -> None:
        together.wait(30)
        caller.run(calls)

    with ThreadPoolExecutor(len(callers) + len(beside)) as pool:
        watching = [pool.submit(each, ended) for each in beside]
        calling = [pool.submit(run, each) for each in callers]
        try:
            for each in calling:
                each.result(90)
        finally:
            ended.set()
        for each in watching:
            each.result(30)


def accounted(found: Counter[str], calls: int) -> None:
    """The run was worth its time: most messages were accepted, and the usual rejections came up."""
    assert found[""] > calls
    assert {"WRONG_VCHANNEL", "PARTITION_NOT_FOUND", "SCHEMA_MISMATCH", "SEQUENCE_GAP", "DUPLICATE"} <= set(found)


# --- one host in this process -----------------------------------------------------------------------------------------


class Tail:
    """A reader of one PChannel's tail, and what it has got."""

    def __init__(self, host: AppendHost, pchannel: str) -> None:
        self.host, self.pchannel = host, pchannel
        self.tick = 0
        self.rows: list[Row] = []

    def follow(self, ended: threading.Event) -> None:
        while not ended.is_set():
            self.read(timeout=0.05)
        last = self.host.tick(self.pchannel)
        while self.tick < last:
            self.read(timeout=1.0)

    def read(self, *, timeout: float) -> None:
        found = self.host.tail(self.pchannel, self.tick, timeout=timeout)
        assert not isinstance(found, Evicted)
        rows = [row for batch in found.batches for row in batch.to_pylist()]
        assert all(self.tick < row["time_tick"] <= found.confirmed_tick for row in rows)
        self.rows += rows
        self.tick = max(self.tick, found.confirmed_tick)

    def check(self, service: LogService) -> None:
        whole = judged(service, self.pchannel).messages.to_pylist()
        assert self.rows == [row for row in whole if row["time_tick"] <= self.tick]


def ways_into(host: AppendHost) -> list[Way]:
    def answered(pchannel: str, outcomes: list[AppendOutcome]) -> list[AppendOutcome]:
        """A message whose outcome is known is in the tail."""
        for outcome in outcomes:
            found = host.tail(pchannel, outcome.last_tick, timeout=0)
            assert isinstance(found, Evicted) or found.confirmed_tick >= outcome.last_tick
        return outcomes

    def alone(pchannel: str, appends: list[Append]) -> list[AppendOutcome]:
        return answered(pchannel, [host.append(pchannel, each, deadline=30) for each in appends])

    def ahead(pchannel: str, appends: list[Append]) -> list[AppendOutcome]:
        pending = [host.submit(pchannel, each) for each in appends]
        return answered(pchannel, [each.outcome(timeout=30) for each in pending])

    def merged(pchannel: str, appends: list[Append]) -> list[AppendOutcome]:
        pending = host.submit_all(pchannel, [as_values(each) for each in appends])
        return answered(pchannel, [each.outcome(timeout=30) for each in reversed(pending)][::-1])

    return [alone, alone, ahead, merged]


def confirming(host: AppendHost, seed: int) -> Callable[[threading.Event], None]:
    def run(ended: threading.Event) -> None:
        chance = random.Random(seed)
        while not ended.wait(0.02):
            pchannel, tick = chance.choice(PCHANNELS), compose_tick(time.time_ns() // 1_000_000 + chance.randrange(10))
            confirmed = host.confirm(pchannel, tick, deadline=30)
            found = host.tail(pchannel, confirmed, timeout=0)
            assert confirmed >= tick
            assert isinstance(found, Evicted) or found.confirmed_tick >= confirmed

    return run


def begun(pchannel: str) -> Append:
    """The entries that open a term of the newest chain and make collection 1."""
    term = builders.term_opening(term=1, chain_version=CHAIN_VERSION, config=LIMITS)
    return [encode_entry([term]), opening(pchannel)[1]]


@contextmanager
def hosted(folder: Path) -> Iterator[tuple[LogService, AppendHost]]:
    with open_log(folder, *PCHANNELS) as service, AppendHost(service, ChannelState.new) as host:
        for name in PCHANNELS:
            host.append(name, begun(name)).results()
        yield service, host


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("seed", range(12))
def test_the_answers_of_64_threads_are_what_the_chain_decides_about_the_log(seed: int) -> None:
    calls = 4
    with folder_in_memory() as folder, hosted(folder / "log") as (service, host):
        ways = ways_into(host)
        callers = [Caller(number, random.Random(seed * 1000 + number), ways) for number in range(CALLERS)]
        tails = [Tail(host, name) for name in PCHANNELS]
        run_all(callers, calls, [*(each.follow for each in tails), confirming(host, seed)])
        found = sum((check(service, name, callers) for name in PCHANNELS), Counter())
        for tail in tails:
            tail.check(service)
        for name in PCHANNELS:
            state = host.state(name)
            entries = service.open(name).read(LogId(0, 0), end=state.position, max_bytes=1 << 30)
            assert Chain().process(ChannelState.new(name), entries).state.to_bytes() == state.to_bytes()
    accounted(found, CALLERS * calls)


# --- connections to a server ------------------------------------------------------------------------------------------


def alone_on(client: AppendClient) -> Way:
    return lambda pchannel, appends: [client.append(pchannel, each, deadline=30) for each in appends]


def stream_on(client: AppendClient, opened: ExitStack) -> Way:
    """Pipelined appends, on one stream for each PChannel, which all callers of this way share."""
    streams = {name: opened.enter_context(client.append_stream(name, deadline=30)) for name in PCHANNELS}

    def send(pchannel: str, appends: list[Append]) -> list[AppendOutcome]:
        pending = [streams[pchannel].submit(each) for each in appends]
        return [each.result() for each in pending]

    return send


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("seed", range(5))
def test_the_answers_on_lone_and_merged_streams_are_what_the_chain_decides_about_the_log(
    seed: int, tmp_path: Path
) -> None:
    calls = 3
    with ExitStack() as opened:
        shared = opened.enter_context(AppendClient.connect(tmp_path))
        opened.callback(shared.service.shutdown)
        for name in PCHANNELS:
            shared.service.create(name)
            shared.append(name, begun(name)).results()
        own = [opened.enter_context(AppendClient.connect(tmp_path)) for _ in range(4)]
        ways = [alone_on(shared), stream_on(shared, opened), *(stream_on(each, opened) for each in own)]
        callers = [
            Caller(number, random.Random(seed * 1000 + number), [ways[number % len(ways)]]) for number in range(CALLERS)
        ]
        run_all(callers, calls, [])
        found = sum((check(shared.service, name, callers) for name in PCHANNELS), Counter())
    accounted(found, CALLERS * calls)
