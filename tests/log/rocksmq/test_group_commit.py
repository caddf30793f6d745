"""Appends of several threads share a write and a sync; alone, an append has its own at once."""

from __future__ import annotations

import errno
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from millrace.base.errors import LogUnavailable
from millrace.log.protocol import stamp_floor
from millrace.log.rocksmq.disk import Buffer, OsDisk
from millrace.log.rocksmq.group_commit import PendingAppend
from millrace.log.rocksmq.id_allocator import TickIdAllocator
from millrace.log.rocksmq.manifest import encode_file_name
from millrace.log.rocksmq.service import RocksMQ, RocksMQLog
from millrace.message.ids import LOGICAL_BITS
from tests.log.crash_images import CHANNEL, SETTINGS, Entry, append, opened, read, records_of

DEADLINE = 20.0


class GatedDisk(OsDisk):
    """Counts writes and syncs of segment files; while the gate is shut, a sync waits in front of it."""

    def __init__(self) -> None:
        self.writes = self.syncs = 0
        self.at_sync: Callable[[], None] = lambda: None
        self.gate = threading.Event()
        self.gate.set()
        self.waiting = threading.Event()

    def write(self, fd: int, buffers: Sequence[Buffer], offset: int) -> None:
        self.writes += 1
        super().write(fd, buffers, offset)

    def sync(self, fd: int) -> None:
        self.waiting.set()
        assert self.gate.wait(DEADLINE)
        self.at_sync()
        self.syncs += 1
        super().sync(fd)


@dataclass
class Gathered:
    """Appends that queued up behind one whose sync waits at the gate."""

    queued: list[PendingAppend]
    results: list[list[Entry] | LogUnavailable]

    def entries(self) -> list[Entry]:
        """What was acknowledged."""
        return [entry for result in self.results if not isinstance(result, LogUnavailable) for entry in result]


@contextmanager
def gathering(log: RocksMQLog, disk: GatedDisk, batches: Sequence[list[bytes]]) -> Iterator[Gathered]:
    """`batches`, each appended by a thread of its own, the first one leading.

    At the end the gate opens and all are back.
    """
    found = Gathered([], [])

    def work(values: list[bytes]) -> None:
        try:
            found.results.append(append(log, values))
        except LogUnavailable as error:
            found.results.append(error)

    threads = [threading.Thread(target=work, args=(values,)) for values in batches]
    disk.gate.clear()
    disk.waiting.clear()
    threads[0].start()
    assert disk.waiting.wait(DEADLINE)
    for count, thread in enumerate(threads[1:], 1):
        thread.start()
        deadline = time.monotonic() + DEADLINE
        while len(queue := log._open()._commit._queue) < count:
            assert time.monotonic() < deadline
            time.sleep(0.001)  # between two looks at the condition: nothing tells that an append has queued up
    found.queued = list(queue)
    yield found
    disk.gate.set()
    for thread in threads:
        thread.join(DEADLINE)
    assert len(found.results) == len(batches)


def test_what_gathers_while_the_disk_works_goes_with_one_write_and_one_sync(tmp_path: Path) -> None:
    disk = GatedDisk()
    with RocksMQ(tmp_path, settings=SETTINGS, disk=disk) as service:
        service.create(CHANNEL)
        log = service.open(CHANNEL)
        entries = append(log, [b"first"])
        before = (disk.writes, disk.syncs)
        with gathering(log, disk, [[b"%d" % name] * 3 for name in range(9)]) as gathered:
            assert read(log) == entries  # nothing shows before it is synced
        assert (disk.writes - before[0], disk.syncs - before[1]) == (2, 2)
        assert read(log) == sorted(entries + gathered.entries())


def test_nobody_of_a_group_is_answered_and_nothing_of_it_shows_before_its_sync(tmp_path: Path) -> None:
    disk = GatedDisk()
    with RocksMQ(tmp_path, settings=SETTINGS, disk=disk) as service:
        service.create(CHANNEL)
        log = service.open(CHANNEL)
        append(log, [b"first"])
        seen: list[tuple[list[bool], object]] = []
        with gathering(log, disk, [[b"leads"], [b"a"], [b"b"], [b"c"]]) as gathered:
            end = log.describe().end
            disk.at_sync = lambda: seen.append(([each.done for each in gathered.queued], log.describe().end))
        leader = next(entry_id for entry_id, value in gathered.entries() if value == b"leads")
        assert seen == [([False] * 3, end), ([False] * 3, leader.following())]
        assert all(each.done for each in gathered.queued)


def test_where_the_sync_of_a_group_fails_all_of_it_and_all_behind_it_learn_so(tmp_path: Path) -> None:
    disk = GatedDisk()
    settings = replace(SETTINGS, group_bytes=200)
    failures = [OSError("injected")]

    def fail() -> None:
        if disk.syncs > before and failures:
            raise failures.pop()

    with RocksMQ(tmp_path, settings=settings, disk=disk) as service:
        service.create(CHANNEL)
        log = service.open(CHANNEL)
        entries = append(log, [b"first"])
        before = disk.syncs
        batches = [[b"leads"], *([b"%d" % number] for number in range(8))]  # three of them are a group
        with gathering(log, disk, batches) as gathered:
            disk.at_sync = fail
        assert [value for _, value in gathered.entries()] == [b"leads"]
        assert read(log) == entries + gathered.entries()
        with pytest.raises(LogUnavailable, match="reopen"):
            log.append([b"refused"])


def test_a_group_that_is_torn_in_any_of_its_records_is_a_torn_tail_and_no_damage(tmp_path: Path) -> None:
    disk = GatedDisk()
    data = tmp_path / "data"
    with RocksMQ(data, settings=SETTINGS, disk=disk) as service:
        service.create(CHANNEL)
        log = service.open(CHANNEL)
        entries = append(log, [b"first"])
        with gathering(log, disk, [[b"leads"], *([b"%d" % number * 40] for number in range(4))]) as gathered:
            pass
        entries = sorted(entries + gathered.entries())
        shutil.copytree(data, tmp_path / "crashed", ignore=shutil.ignore_patterns("index"))
    channel = Path("channels") / encode_file_name(CHANNEL)
    tail = max((tmp_path / "crashed" / channel).glob("*.log"))
    whole = tail.read_bytes()
    records = records_of(tail, tail.parent, entries)
    for place in range(2, 6):  # behind the first append and the one that led; what follows in the group is whole
        torn = bytearray(whole)
        torn[records[place].end - 1] ^= 1
        shutil.rmtree(tmp_path / "torn", ignore_errors=True)
        shutil.copytree(tmp_path / "crashed", tmp_path / "torn")
        (tmp_path / "torn" / channel / tail.name).write_bytes(torn)
        with opened(tmp_path / "torn") as log:
            assert read(log) == entries[:place]
            assert append(log, [b"goes on"])[0][0] > entries[place - 1][0]


def test_a_group_holds_so_many_bytes_and_what_is_larger_goes_alone(tmp_path: Path) -> None:
    disk = GatedDisk()
    settings = replace(SETTINGS, group_bytes=1_000)
    with RocksMQ(tmp_path, settings=settings, disk=disk) as service:
        service.create(CHANNEL)
        log = service.open(CHANNEL)
        entries = append(log, [b"first"])
        before = disk.syncs
        sizes = (1, 400, 400, 400, 5_000, 10, 10)  # (1) (400 400) (400) (5000) (10 10)
        with gathering(log, disk, [[b"x" * size] for size in sizes]) as gathered:
            pass
        assert disk.syncs - before == 5
        assert read(log) == sorted(entries + gathered.entries())


def test_a_floor_is_not_past_a_group_that_has_its_ids_and_does_not_show_yet(tmp_path: Path) -> None:
    disk = GatedDisk()
    with RocksMQ(tmp_path, settings=SETTINGS, disk=disk) as service:
        service.create(CHANNEL)
        log = service.open(CHANNEL)
        append(log, [b"first"])
        with gathering(log, disk, [[b"leads"], [b"follows"]]) as gathered:
            time.sleep(0.005)  # the clock goes on while the group is written
            floor = log.stamp_floor()
        assert floor is not None
        leads, follows = sorted(entry_id for entry_id, _ in gathered.entries())
        assert floor.end <= leads
        assert floor.ms == leads.entry >> LOGICAL_BITS <= follows.entry >> LOGICAL_BITS
        after = log.stamp_floor()
        assert after is not None
        assert after.end == follows.following()
        assert after.ms > floor.ms, "once the group shows, the clock tells"


def test_a_log_whose_write_failed_promises_nothing_until_it_is_reopened(tmp_path: Path) -> None:
    disk = GatedDisk()

    def fail() -> None:
        raise OSError("injected")

    with RocksMQ(tmp_path, settings=SETTINGS, disk=disk) as service:
        service.create(CHANNEL)
        log = service.open(CHANNEL)
        append(log, [b"first"])
        disk.at_sync = fail
        with pytest.raises(LogUnavailable):
            log.append([b"in the file or not"])
        assert log.stamp_floor() is None
        disk.at_sync = lambda: None
        floor = service.open(CHANNEL).stamp_floor()
        assert floor is not None
        (after,) = service.open(CHANNEL).append([b"goes on"])
        assert floor.ms <= after.entry >> LOGICAL_BITS


def test_a_log_with_a_foreign_clock_or_foreign_ids_promises_nothing(tmp_path: Path) -> None:
    for name, given in (("clock", {"now_ms": lambda: 7}), ("ids", {"id_allocator": TickIdAllocator()})):
        with RocksMQ(tmp_path / name, settings=SETTINGS, **given) as service:  # type: ignore[arg-type]
            service.create(CHANNEL)
            assert stamp_floor(service.open(CHANNEL)) is None


def test_a_full_disk_refuses_its_group_alone_and_what_waits_behind_it_is_tried(tmp_path: Path) -> None:
    class Full(GatedDisk):
        def allocate(self, fd: int, size: int) -> None:
            if self.full:
                self.full = False
                raise OSError(errno.ENOSPC, "injected")
            super().allocate(fd, size)

        full = False

    disk = Full()
    settings = replace(SETTINGS, group_bytes=30_000, spare_files=0)
    with RocksMQ(tmp_path, settings=settings, disk=disk) as service:
        service.create(CHANNEL)
        log = service.open(CHANNEL)
        append(log, [b"x" * 40_000])
        with gathering(log, disk, [[b"leads"], [b"refused" * 4_000], [b"behind it" * 3_000]]) as gathered:
            disk.full = True
        assert {value[:6] for _, value in gathered.entries()} == {b"leads", b"behind"}
        append(log, [b"goes on"])
        floor = log.stamp_floor()
        time.sleep(0.002)
        after = log.stamp_floor()
        assert floor is not None
        assert after is not None
        assert after.ms > floor.ms, "no group that was refused holds it back"


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
