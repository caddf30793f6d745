"""What a host holds is bounded by what it reads at once, however many messages a few bytes frame."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from millrace.log.protocol import Log
from millrace.log.rocksmq.recent_batches import RecentBatches
from millrace.log.rocksmq.service import RocksMQ
from millrace.log.rocksmq.settings import RocksMQSettings
from millrace.message.ids import LogId
from millrace.message.log_entries import ENTRY_OVERHEAD_BYTES, LogEntries
from millrace.message.types import MessageType
from millrace.message.wire.encode import encode_columns
from millrace.node.append.follower import READ_BYTES
from millrace.node.append.host import AppendHost
from millrace.node.append.tail_buffer import ROW_BYTES, TailBuffer, TailLimits
from millrace.node.ingest.ingester import IngestPlan, run_ingest
from millrace.rpc.tail import Evicted
from millrace.tables.wal.table import WalTable
from millrace.wal.chain import Chain
from millrace.wal.entry_chunks import MAX_CHUNK_MESSAGES, chunk_entries
from millrace.wal.interceptors.interceptor import Interceptor, Proceed
from millrace.wal.message_run import MAX_RUN, MIN_RUN, DecidedBatch, DecidedMessage, MessageRun
from millrace.wal.state import ChannelState
from tests.message.samples import entries
from tests.node.append.samples import PCHANNEL, VCHANNELS, insert, keys_of, opening
from tests.node.append.storms import MESSAGES, STORMS

ROOT = Path(__file__).parents[3]
MOST = (20 << 20) + MESSAGES * 4096
"""What a host may grow by for a storm of MESSAGES messages: 4 KiB a message, and its first use of everything."""


@pytest.mark.slow
@pytest.mark.parametrize("host", ["server", "task"])
def test_a_host_holds_at_most_four_kilobytes_for_each_message_of_a_storm(tmp_path: Path, host: str) -> None:
    path = os.pathsep.join([str(ROOT / "include"), str(ROOT)])
    ran = subprocess.run(
        [sys.executable, "-m", "tests.node.append.storms", str(tmp_path), host],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    found = [json.loads(line) for line in ran.stdout.splitlines()]
    assert [each["kind"] for each in found] == list(STORMS)
    assert all(each["judged"] in (MESSAGES, MESSAGES - 1) for each in found), found
    assert {each["kind"]: each["grown"] for each in found if each["grown"] > MOST} == {}


class _Looking:
    """Around the outermost link: how many messages each step looks at."""

    def __init__(self, link: Interceptor, looked: list[int]) -> None:
        self.name, self._link, self._looked = link.name, link, looked

    def decide(self, state: ChannelState, run: MessageRun, proceed: Proceed) -> None:
        if self.name == "redo":
            self._looked.append(run.count)
        self._link.decide(state, run, proceed)

    def evolve(self, state: ChannelState, rows: DecidedBatch) -> None:
        self._link.evolve(state, rows)

    def evolve_one(self, state: ChannelState, row: DecidedMessage) -> None:
        self._link.evolve_one(state, row)


@pytest.mark.slow
def test_what_the_chain_looks_at_grows_with_the_messages_and_not_with_their_square() -> None:
    looked: list[int] = []
    chain = Chain(wrap=lambda link: _Looking(link, looked))
    count = 6 * MIN_RUN
    outcome = chain.process(ChannelState.new(PCHANNEL), LogEntries(entries([b"garbage"] * count), LogId(0, count)))
    assert outcome.rejections.num_rows == len(looked) == count
    assert sum(looked) <= count * MIN_RUN + MAX_RUN


def test_entries_are_cut_into_portions_of_bounded_messages() -> None:
    half = _inserts(MAX_CHUNK_MESSAGES // 2)
    batch = entries([half, half, b"", half, _inserts(MAX_CHUNK_MESSAGES), half])
    whole = LogEntries(batch, LogId(7, 7))
    found = list(chunk_entries(whole))
    assert [each.batch["entry"].to_pylist() for each in found] == [[0, 1], [2, 3], [4], [5]]
    assert [each.next for each in found] == [LogId(0, 2), LogId(0, 4), LogId(0, 5), LogId(7, 7)]
    # What claims to hold more than its bytes can is no reason to cut.
    liar = b"MLRW" + bytes(8) + (1 << 16).to_bytes(4, "little") + bytes(60)
    assert len(list(chunk_entries(LogEntries(entries([liar] * 100), LogId(0, 100))))) == 1


@pytest.fixture
def log(tmp_path: Path) -> Iterator[Log]:
    with RocksMQ(tmp_path / "log") as service:
        service.create(PCHANNEL)
        yield service.open(PCHANNEL)


def test_a_task_writes_a_portion_at_a_time(log: Log, tmp_path: Path) -> None:
    wal = WalTable.create(tmp_path / "wal")
    log.append([*opening(), *[_inserts(30_000)] * 3])
    plan = IngestPlan(base=wal.position(PCHANNEL), end=log.end(), max_bytes=1 << 40)
    report = run_ingest(plan, log=log, table=Path(wal.uri))
    assert report.failure is None
    messages = next(action for action in report.actions if action.partition["kind"] == "message")
    footer = pq.ParquetFile(Path(wal.uri) / messages.path).metadata
    groups = [footer.row_group(number).num_rows for number in range(footer.num_row_groups)]
    assert len(groups) == 2
    assert max(groups) <= MAX_CHUNK_MESSAGES


def test_the_append_host_decides_a_portion_at_a_time(tmp_path: Path) -> None:
    with RocksMQ(tmp_path / "log") as service:
        service.create(PCHANNEL)
        with AppendHost(service, ChannelState.new) as host:
            host.append(PCHANNEL, opening()).results()
            assert len(host.append(PCHANNEL, [_inserts(30_000)] * 3)) == 90_000
            found = host.tail(PCHANNEL, 0, timeout=0.0, max_bytes=1 << 40)
            assert not isinstance(found, Evicted)
            assert (
                max(batch.num_rows for batch in found.batches) <= MAX_CHUNK_MESSAGES + 1
            )  # with the segment's opening


@pytest.mark.parametrize("recent_bytes", [0, 64 << 20], ids=["files", "memory"])
def test_a_read_of_entries_without_bytes_is_bounded(tmp_path: Path, recent_bytes: int) -> None:
    count = 3 * READ_BYTES // ENTRY_OVERHEAD_BYTES
    with RocksMQ(tmp_path / "log", settings=RocksMQSettings(recent_bytes=recent_bytes)) as service:
        service.create(PCHANNEL)
        log = service.open(PCHANNEL)
        position = log.append(pa.array([b""] * count, pa.large_binary()))[0]
        reads = []
        while (run := log.read(position, max_bytes=READ_BYTES)).batch.num_rows:
            reads.append(run.batch.num_rows)
            position = run.next
    assert reads == [READ_BYTES // ENTRY_OVERHEAD_BYTES] * 3


def test_what_is_kept_of_the_newest_appends_counts_entries_without_bytes() -> None:
    kept = RecentBatches(1 << 20)
    for number in range(40):
        values = pa.array([b""] * 1000, pa.large_binary())
        kept.add(previous=number * 1000 - 1, base=number * 1000, values=values, bytes=0)
    assert len(kept.run_batches(39_000, None, 1 << 30)) == 1
    assert not kept.run_batches(0, None, 1 << 30)


def test_the_tail_buffer_counts_messages_without_payload() -> None:
    rows = Chain().process(ChannelState.new(PCHANNEL), LogEntries(entries(opening()), LogId(0, 2))).messages
    many = pa.concat_batches([rows] * 1000)
    buffer = TailBuffer(start_tick=0, limits=TailLimits(max_bytes=4 * ROW_BYTES * many.num_rows, max_age=3600.0))
    for tick in range(1, 9):
        buffer.publish(lambda: many, rows=many.num_rows, confirmed_tick=tick, bytes=0)
    assert isinstance(buffer.tail(1, timeout=0.0), Evicted)
    assert buffer.bytes <= 4 * ROW_BYTES * many.num_rows


def _inserts(count: int) -> bytes:
    """One entry of `count` inserts of one row each."""
    payload = insert(keys_of(VCHANNELS[0], 1)[0]).payload
    return encode_columns(
        type=MessageType.INSERT,
        vchannel=VCHANNELS[0],
        payloads=[payload] * count,
        term=1,
        collection_id=1,
        partition_id=1,
        schema_version=1,
        rows=np.ones(count, dtype=np.int64),
    )
