"""LastConfirmed on every backend: a reader that starts there misses nothing that becomes visible after the message.

On a broker, positions are its own (offsets with gaps, ledgers), and its entries come in an order that no appender
chose. So answers of a real append host are held against what the backend gives back.
"""

from __future__ import annotations

import threading
from random import Random

import pyarrow as pa
import pytest

from millrace.base.errors import AppendRejected
from millrace.log.protocol import LogService
from millrace.message import builders
from millrace.message.ids import EARLIEST, LogId
from millrace.message.keys import vchannel_index
from millrace.message.log_entries import ENTRY_SCHEMA, LogEntries
from millrace.message.model import MutableMessage
from millrace.message.schema import CollectionSchema, FieldSpec
from millrace.message.wire.encode import encode_entry
from millrace.node.append.host import AppendHost
from millrace.rpc.outcome import AppendResult
from millrace.wal.chain import CHAIN_VERSION, Chain
from millrace.wal.state import ChannelState
from tests.conformance.conftest import Deployment
from tests.laws.real import confirmed_id, row_id
from tests.laws.test_law_visibility import read_from

PCHANNEL = "dml_0"
VCHANNELS = ("dml_0_1v0", "dml_0_1v1")
SCHEMA = CollectionSchema((FieldSpec("id", "int64", False),), "id")
KEYS = [[key for key in range(40) if vchannel_index(pa.array([key]), 2)[0] == home] for home in (0, 1)]
THREADS = 3
TURNS = 12


class Writer(threading.Thread):
    """Appends plain messages and transactions, of which some roll back and some stay open."""

    def __init__(self, host: AppendHost, seed: int, term: int) -> None:
        super().__init__()
        self.host, self.random, self.term = host, Random(seed), term
        self.txn = seed * 1_000
        self.answers: list[AppendResult] = []
        self.failed: BaseException | None = None

    def append(self, message: MutableMessage) -> None:
        self.answers.append(self.host.append(PCHANNEL, encode_entry([message]), deadline=60.0).result())

    def insert(self, home: int, txn: int = 0) -> None:
        rows = pa.record_batch([pa.array([self.random.choice(KEYS[home])])], schema=SCHEMA.arrow())
        self.append(
            builders.insert(rows, vchannel=VCHANNELS[home], collection_id=1, partition_id=1, term=self.term, txn_id=txn)
        )

    def run(self) -> None:
        try:
            for number in range(TURNS):
                self.turn(last=number == TURNS - 1)
        except BaseException as error:
            self.failed = error

    def turn(self, *, last: bool) -> None:
        # One that stays open keeps LastConfirmed at its begin from there on.
        ends = ["open", "plain"] if last else ["plain", "commit", "commit", "rollback"]
        home, end = self.random.randrange(2), self.random.choice(ends)
        if end == "plain":
            self.insert(home)
            return
        self.txn += 1
        given = {"vchannel": VCHANNELS[home], "collection_id": 1, "term": self.term}
        self.append(builders.begin_txn(self.txn, **given))
        for _ in range(self.random.randrange(4)):
            self.insert(home, self.txn)
        if end != "open":
            self.append({"commit": builders.commit_txn, "rollback": builders.rollback_txn}[end](self.txn, **given))


def life(service: LogService, seed: int, term: int) -> list[AppendResult]:
    """One process' appends, in its own term."""
    with AppendHost(service, ChannelState.new) as host:
        opening = builders.term_opening(term=term, chain_version=CHAIN_VERSION, config={})
        first = [opening]
        if term == 1:
            first += [
                builders.create_collection(
                    "c", SCHEMA, vchannel=each, vchannels=VCHANNELS, collection_id=1, partitions={"p": 1}, term=1
                )
                for each in VCHANNELS
            ]
        for message in first:
            host.append(PCHANNEL, encode_entry([message]), deadline=60.0).result()
        writers = [Writer(host, seed * 100 + term * 10 + number, term) for number in range(THREADS)]
        for each in writers:
            each.start()
        for each in writers:
            each.join()
        failed = [each.failed for each in writers if each.failed is not None]
        assert all(isinstance(each, AppendRejected) for each in failed), failed
        return [answer for each in writers for answer in each.answers]


def everything_from(service: LogService, position: LogId) -> LogEntries:
    log = service.open(PCHANNEL)
    try:
        end, batches = log.describe().end, []
        while position < end:
            found = log.read(position, max_bytes=1 << 16)
            batches += [found.batch] if found.batch.num_rows else []
            position = found.next
        rows = pa.Table.from_batches(batches, ENTRY_SCHEMA).combine_chunks().to_batches()
        return LogEntries(rows[0] if rows else pa.RecordBatch.from_pylist([], ENTRY_SCHEMA), position)
    finally:
        log.close()


@pytest.mark.parametrize("seed", [1, 2])
def test_reading_from_last_confirmed_misses_nothing_that_becomes_visible_later(
    deployment: Deployment, seed: int
) -> None:
    deployment.service.create(PCHANNEL)
    answers = life(deployment.service, seed, 1) + life(deployment.restart(), seed, 2)
    whole = everything_from(deployment.service, EARLIEST)
    rows = Chain().process(ChannelState.new(PCHANNEL), whole).messages.to_pylist()
    known = {row_id(row): row for row in rows}
    everything = read_from(rows, (0, 0, 0, 0)).delivered
    assert len(answers) >= THREADS * TURNS
    starts: set[tuple[int, ...]] = set()
    for answer in answers:
        row = known[tuple(answer.message_id)]
        assert answer.last_confirmed is not None
        assert tuple(answer.last_confirmed) == confirmed_id(row), "the host answers what the log says"
        assert answer.last_confirmed <= answer.message_id
        later = [thing for thing in everything if thing[0] > answer.time_tick]
        seen = read_from(rows, confirmed_id(row)).delivered
        assert [thing for thing in seen if thing[0] > answer.time_tick] == later
        starts.add(tuple(answer.last_confirmed[:2]))
    assert len(starts) > 3
    # The backend gives back everything from such a position on.
    places = list(zip(*(whole.batch.column(name).to_pylist() for name in ("ledger", "entry", "value")), strict=True))
    for start in sorted(starts)[:: max(1, len(starts) // 8)]:
        batch = everything_from(deployment.service, LogId(*start)).batch
        found = list(zip(*(batch.column(name).to_pylist() for name in ("ledger", "entry", "value")), strict=True))
        assert found == [each for each in places if each[:2] >= start]
