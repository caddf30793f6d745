"""Appends of several threads share a write and a sync; alone, an append has its own at once."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from pathlib import Path

from millrace.errors import LogUnavailable
from millrace.log.disk import Buffer, OsDisk
from millrace.log.rocksmq import RocksMQ
from tests.log.crash_images import CHANNEL, SETTINGS, append, read

DEADLINE = 20.0


class GatedDisk(OsDisk):
    """Counts writes and syncs of segment files; while the gate is shut, a sync waits in front of it."""

    def __init__(self) -> None:
        self.writes = self.syncs = 0
        self.gate = threading.Event()
        self.gate.set()
        self.waiting = threading.Event()

    def write(self, fd: int, buffers: Sequence[Buffer], offset: int) -> None:
        self.writes += 1
        super().write(fd, buffers, offset)

    def sync(self, fd: int) -> None:
        self.waiting.set()
        assert self.gate.wait(DEADLINE)
        self.syncs += 1
        super().sync(fd)


def test_what_gathers_while_the_disk_works_goes_with_one_write_and_one_sync(tmp_path: Path) -> None:
    disk = GatedDisk()
    with RocksMQ(tmp_path, settings=SETTINGS, disk=disk) as service:
        service.create(CHANNEL)
        log = service.open(CHANNEL)
        entries = append(log, [b"first"])
        before = (disk.writes, disk.syncs)
        disk.gate.clear()
        disk.waiting.clear()
        results: list[list[tuple[object, bytes]]] = []
        threads = [
            threading.Thread(target=lambda name=name: results.append(append(log, [b"%d" % name] * 3)))
            for name in range(9)
        ]
        threads[0].start()
        assert disk.waiting.wait(DEADLINE)
        for thread in threads[1:]:
            thread.start()
        deadline = time.monotonic() + DEADLINE
        while len(log._open()._commit._queue) < 8:
            assert time.monotonic() < deadline
            time.sleep(0.001)  # between two looks at the condition: nothing tells that an append has queued up
        assert read(log) == entries  # nothing shows before it is synced
        disk.gate.set()
        for thread in threads:
            thread.join(DEADLINE)
        assert (disk.writes - before[0], disk.syncs - before[1]) == (2, 2)
        assert read(log) == sorted(entries + [entry for result in results for entry in result])


def test_alone_an_append_is_one_write_and_one_sync(tmp_path: Path) -> None:
    disk = GatedDisk()
    with RocksMQ(tmp_path, settings=SETTINGS, disk=disk) as service:
        service.create(CHANNEL)
        log = service.open(CHANNEL)
        append(log, [b"first"])
        before = (disk.writes, disk.syncs)
        for _ in range(10):
            log.append([b"x"] * 10)
        assert (disk.writes - before[0], disk.syncs - before[1]) == (10, 10)


def test_closing_finishes_the_append_under_way_and_refuses_those_behind_it(tmp_path: Path) -> None:
    disk = GatedDisk()
    service = RocksMQ(tmp_path, settings=SETTINGS, disk=disk)
    service.create(CHANNEL)
    log = service.open(CHANNEL)
    outcomes: dict[str, str] = {}

    def work(name: str) -> None:
        try:
            log.append([name.encode()])
            outcomes[name] = "acknowledged"
        except LogUnavailable:
            outcomes[name] = "refused"

    disk.gate.clear()
    disk.waiting.clear()
    first = threading.Thread(target=work, args=("first",))
    first.start()
    assert disk.waiting.wait(DEADLINE)
    closing = threading.Thread(target=service.close)
    closing.start()
    disk.gate.set()
    closing.join(DEADLINE)
    first.join(DEADLINE)
    work("late")
    assert outcomes == {"first": "acknowledged", "late": "refused"}
    with RocksMQ(tmp_path, settings=SETTINGS) as again:
        assert [value for _, value in read(again.open(CHANNEL))] == [b"first"]
