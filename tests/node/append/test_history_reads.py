"""Pieces of the ``wal`` table for clients elsewhere.

So many are read at once, and who comes then waits and misses nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from millrace.access.grants import LOCAL_ADMIN
from millrace.base.errors import ServerFull
from millrace.base.settings import Settings
from millrace.client.append_client import AppendClient
from millrace.node.append import history_reads
from millrace.node.append.history_reads import MAX_CONCURRENT_READS, HistoryReads
from millrace.rpc.wire import from_json
from millrace.wal.scanner import All
from tests.client.consume.test_scan import Deployment, NoCollections, deployed, fill
from tests.node.append.samples import PCHANNEL
from tests.waiting import until


class Gate:
    """Reads of the table wait here behind their first rows until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.inside = self.most = 0
        self.open = threading.Event()
        self._guard = threading.Lock()
        self._real = history_reads.read_range
        monkeypatch.setattr(history_reads, "read_range", self._read)

    def _read(self, *arguments: Any, **options: Any) -> Iterator[pa.Table]:
        with self._guard:
            self.inside += 1
            self.most = max(self.most, self.inside)
        try:
            for table in self._real(*arguments, **options):
                self.open.wait(60)
                yield table
        finally:
            with self._guard:
                self.inside -= 1


@pytest.fixture
def made(tmp_path: Path) -> Iterator[Deployment]:
    with deployed(tmp_path, "elsewhere") as deployment:
        fill(deployment)
        deployment.commit()
        yield deployment


def test_a_piece_too_many_is_refused_and_its_client_asks_again(
    made: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert isinstance(made.tail, AppendClient)
    model = made.ids()
    gate = Gate(monkeypatch)
    ticket = {"extension": "append", "history": PCHANNEL, "start": None, "after": 0}
    with ThreadPoolExecutor(MAX_CONCURRENT_READS + 4) as pool:
        readers = [
            pool.submit(lambda: [unit.id for unit in made.scan(PCHANNEL, All())][: len(model)])
            for _ in range(MAX_CONCURRENT_READS + 4)
        ]
        until(lambda: gate.inside == MAX_CONCURRENT_READS, "as many are read as may be")
        for _ in range(3):
            with pytest.raises(ServerFull, match=f"for {MAX_CONCURRENT_READS} clients at once"):
                made.tail.service.call_with_retry(lambda link, deadline: link.get(ticket, timeout=20), seconds=20)
        gate.open.set()
        assert [reader.result(timeout=60) for reader in readers] == [model] * (MAX_CONCURRENT_READS + 4), (
            "each the whole, once"
        )
    assert gate.most == MAX_CONCURRENT_READS
    assert gate.inside == 0


def test_clients_that_go_away_amid_a_piece_leave_their_room(made: Deployment, monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(made.tail, AppendClient)
    client = made.tail
    gate = Gate(monkeypatch)
    ticket = {"extension": "append", "history": PCHANNEL, "start": None, "after": 0}

    def broken_off() -> None:
        with pytest.raises(Exception):  # noqa: B017 - whatever the deadline is told as
            client.service.call_with_retry(lambda link, deadline: link.get(ticket, timeout=0.5), seconds=0.5)

    for _ in range(2):
        gate.open.clear()
        with ThreadPoolExecutor(MAX_CONCURRENT_READS) as pool:
            for each in [pool.submit(broken_off) for _ in range(MAX_CONCURRENT_READS)]:
                each.result()
        gate.open.set()
        until(lambda: gate.inside == 0, "what nobody waits for is read no further")
    assert [unit.id for unit in made.scan(PCHANNEL, All())][: len(made.ids())] == made.ids()


class Room:
    """Room for reads that records how many reads were open whenever room was released."""

    def __init__(self, gate: Gate) -> None:
        self._gate = gate
        self.open_reads: list[int] = []

    def acquire(self, *, blocking: bool) -> bool:
        return True

    def release(self) -> None:
        self.open_reads.append(self._gate.inside)


@pytest.mark.parametrize("end", ["piece is complete", "client disconnects"])
def test_a_read_is_closed_before_its_room_is_released(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    with deployed(tmp_path, "here") as made:
        fill(made)
        made.commit()
        gate = Gate(monkeypatch)
        gate.open.set()
        reads, room = HistoryReads(Settings(data_dir=tmp_path), NoCollections(), made.host), Room(gate)
        monkeypatch.setattr(reads, "_free", room)
        pieces: Any = reads.stream({"history": PCHANNEL, "start": None, "max_bytes": 1}, LOCAL_ADMIN).pieces
        next(pieces)
        assert gate.inside == 1
        if end == "client disconnects":
            pieces.close()
        else:
            while "next" not in from_json(next(pieces)[1]):
                pass
        assert room.open_reads == [0, 0], "released after planning, and after the read was closed"
