"""The journal of a Spark query's sink in an object store, with drivers that are suspended at any moment."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest

from millrace.base.errors import StreamBusy
from millrace.flows.sinks.collection import journal
from millrace.flows.sinks.collection.journal import FolderJournal, InFlight
from millrace.flows.sinks.memory import Noted
from millrace.storage.objects import ObjectStore
from millrace.storage.store import StoreUnreachable
from tests.s3_server import Faults, bucket

DRIVERS = 3
BATCHES = 6
"""That each driver wants to journal."""


class Schedule:
    """Lets one driver go on at a time, from one request to its next, as a seed says: the others are suspended."""

    def __init__(self, seed: int) -> None:
        self._chosen = random.Random(seed)
        self._changed = threading.Condition()
        self._waiting: set[str] = set()
        self._running: set[str] = set()
        self._turn = ""

    @contextmanager
    def driver(self) -> Iterator[None]:
        name = threading.current_thread().name
        with self._changed:
            self._running.add(name)
            self._changed.wait_for(lambda: len(self._running) == DRIVERS or self._turn)
        try:
            yield
        finally:
            with self._changed:
                self._running.discard(name)
                self._choose()

    def pause(self) -> None:
        """Wait for the turn of the calling driver."""
        name = threading.current_thread().name
        with self._changed:
            self._waiting.add(name)
            self._choose()
            assert self._changed.wait_for(lambda: self._turn == name, timeout=60)
            self._waiting.discard(name)
            self._turn = "-"

    def _choose(self) -> None:
        if self._running and self._waiting >= self._running:
            self._turn = self._chosen.choice(sorted(self._waiting))
        self._changed.notify_all()


@pytest.mark.parametrize("seed", range(12))
def test_each_number_is_journaled_by_one_driver_whoever_is_suspended(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A driver continues after the batch that it found. So two that journaled one number would both have sent it."""
    schedule, lost = Schedule(seed), random.Random(seed)

    class Scheduled(ObjectStore):
        def read_tagged(self, name: str) -> tuple[bytes, str] | None:
            schedule.pause()
            return super().read_tagged(name)

        def put_new(self, name: str, data: bytes) -> str | None:
            schedule.pause()
            return super().put_new(name, data)

        def replace_tagged(self, name: str, data: bytes, tag: str) -> str | None:
            schedule.pause()
            return super().replace_tagged(name, data, tag)

    def broken(method: str, path: str) -> str:
        return lost.choice(["", "", "", "lost"]) if "PUT" in method and path.endswith("batch.arrow") else ""

    journaled: list[int] = []

    def drive(folder: str) -> int:
        busy = 0
        with schedule.driver():
            mine = 0
            while mine < BATCHES:
                try:
                    files = FolderJournal(folder, "one")
                    found = files.load()
                    number = -1 if found is None else found.noted.batch_id
                    while mine < BATCHES:
                        number += 1
                        files.keep(InFlight(Noted(number), {"dml_0": number}))
                        journaled.append(number)
                        mine += 1
                except (StreamBusy, StoreUnreachable):
                    busy += 1
        return busy

    with Faults() as faults, bucket(monkeypatch, faults.at) as box:
        folder = f"{box}/streams/one/1/millrace-sink"
        FolderJournal(folder, "one").close()  # what a process tries once is tried
        faults.break_request = broken
        monkeypatch.setattr(journal, "store_at", lambda uri: Scheduled(str(uri)))
        with ThreadPoolExecutor(DRIVERS, thread_name_prefix="driver") as pool:
            busy = sum(pool.map(drive, [folder] * DRIVERS))
        assert len(journaled) == DRIVERS * BATCHES
        assert len({*journaled}) == len(journaled)
        assert busy > 0, "they met"
        faults.break_request = lambda method, path: ""
        monkeypatch.undo()


def test_a_batch_is_journaled_with_one_request(monkeypatch: pytest.MonkeyPatch) -> None:
    with Faults() as faults, bucket(monkeypatch, faults.at) as box:
        files = FolderJournal(f"{box}/streams/one/1/millrace-sink", "one")
        for number in range(3):
            faults.requests.clear()
            files.keep(InFlight(Noted(number), {}))
            assert dict(faults.requests) == {"PUT": 1}


@pytest.mark.parametrize("answer", ["409", "412", "503", "reset"])
def test_a_put_that_fails_though_nobody_else_has_the_journal_is_no_loss_of_it(
    answer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Faults() as faults, bucket(monkeypatch, faults.at) as box:
        files = FolderJournal(f"{box}/streams/one/1/millrace-sink", "one")
        faults.break_request = lambda method, path: answer if method == "PUT" else ""
        with pytest.raises(StoreUnreachable):
            files.keep(InFlight(Noted(1), {}))
        faults.break_request = lambda method, path: ""
        files.keep(InFlight(Noted(1), {}))
        found = files.load()
        assert found is not None
        assert found.noted.batch_id == 1


def test_drivers_that_begin_a_sink_at_once_agree_on_its_producer(monkeypatch: pytest.MonkeyPatch) -> None:
    with bucket(monkeypatch) as box:
        folder = f"{box}/streams/one/1/millrace-sink"
        met = threading.Barrier(2)
        read: Any = journal.create_note

        def together(*arguments: Any) -> Any:
            met.wait(30)
            return read(*arguments)

        monkeypatch.setattr(journal, "create_note", together)
        with ThreadPoolExecutor(2) as pool:
            made = [each.producer_id for each in pool.map(lambda _: FolderJournal(folder, "one"), range(2))]
        assert len(set(made)) == 1
