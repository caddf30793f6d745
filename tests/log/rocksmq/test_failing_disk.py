"""A write or sync that fails stops appends until the log is reopened.

Reads go on, and nothing unacknowledged is served.
"""

from __future__ import annotations

import errno
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from millrace.base.errors import LogUnavailable
from millrace.log.rocksmq.disk import Buffer, OsDisk
from millrace.log.rocksmq.service import RocksMQ
from tests.log.crash_images import CHANNEL, SETTINGS, append, read


class FailingDisk(OsDisk):
    """Fails the call of one kind that it was told to; a failed write leaves half of its bytes."""

    def __init__(self) -> None:
        self.fail: str | None = None
        self.full = errno.ENOSPC

    def _maybe(self, kind: str, code: int = errno.EIO) -> None:
        if self.fail == kind:
            self.fail = None
            raise OSError(code, f"injected failure of {kind}")

    def write(self, fd: int, buffers: Sequence[Buffer], offset: int) -> None:
        if self.fail == "write":
            data = b"".join(buffers)
            super().write(fd, [data[: len(data) // 2]], offset)
        self._maybe("write")
        super().write(fd, buffers, offset)

    def sync(self, fd: int) -> None:
        self._maybe("sync")
        super().sync(fd)

    def allocate(self, fd: int, size: int) -> None:
        self._maybe("allocate", self.full)
        super().allocate(fd, size)

    def sync_directory(self, path: Path) -> None:
        self._maybe("sync_directory")
        super().sync_directory(path)


@pytest.fixture
def disk() -> FailingDisk:
    return FailingDisk()


@pytest.fixture
def service(tmp_path: Path, disk: FailingDisk) -> Iterator[RocksMQ]:
    with RocksMQ(tmp_path / "data", settings=SETTINGS, disk=disk) as service:
        service.create(CHANNEL)
        yield service


@pytest.mark.parametrize("kind", ["write", "sync"])
@pytest.mark.parametrize("before", [0, 1, 5])
def test_a_failure_stops_appends_until_the_log_is_reopened_and_reads_go_on(
    service: RocksMQ, disk: FailingDisk, kind: str, before: int
) -> None:
    log = service.open(CHANNEL)
    entries = [entry for index in range(before) for entry in append(log, [b"%d" % index * 99])]
    disk.fail = kind
    with pytest.raises(LogUnavailable):
        log.append([b"lost" * 20])
    for _ in range(3):  # a failed sync is not tried again as if it were fine
        with pytest.raises(LogUnavailable):
            log.append([b"refused"])
    assert read(log) == entries
    entries += append(service.open(CHANNEL), [b"after", b"the failure"])
    entries += append(log, [b"through the old handle"])
    assert read(log) == entries


@pytest.mark.parametrize("kind", ["write", "sync"])
def test_after_a_failure_and_a_restart_the_failed_batch_is_there_whole_or_not_at_all(
    service: RocksMQ, disk: FailingDisk, kind: str, tmp_path: Path
) -> None:
    log = service.open(CHANNEL)
    entries = append(log, [b"a" * 50, b"b"])
    disk.fail = kind
    with pytest.raises(LogUnavailable):
        log.append([b"maybe", b"me too"])
    shutil.copytree(tmp_path / "data", tmp_path / "crashed", ignore=shutil.ignore_patterns("index"))
    service.close()
    for directory in (tmp_path / "data", tmp_path / "crashed"):
        with RocksMQ(directory, settings=SETTINGS) as again:
            log = again.open(CHANNEL)
            found = read(log)
            assert found[:2] == entries
            assert [value for _, value in found[2:]] in ([], [b"maybe", b"me too"])
            assert append(log, [b"on"])[0][0] > found[-1][0]


@pytest.mark.parametrize("rolls", [False, True])
def test_what_failed_is_gone_once_the_log_takes_appends_again(
    service: RocksMQ, disk: FailingDisk, rolls: bool, tmp_path: Path
) -> None:
    log = service.open(CHANNEL)
    entries = append(log, [b"x" * 60_000])
    disk.fail = "sync"
    with pytest.raises(LogUnavailable):
        log.append([b"refused" * (8_000 if rolls else 1)])
    service.open(CHANNEL)
    shutil.copytree(tmp_path / "data", tmp_path / "crashed", ignore=shutil.ignore_patterns("index"))
    with RocksMQ(tmp_path / "crashed", settings=SETTINGS) as again:
        assert read(again.open(CHANNEL)) == entries


def test_a_failure_while_rolling_into_a_new_file_loses_nothing(service: RocksMQ, disk: FailingDisk) -> None:
    log = service.open(CHANNEL)
    entries = append(log, [b"x" * 60_000])
    for kind in ("sync_directory", "write", "sync"):
        disk.fail = kind
        with pytest.raises(LogUnavailable):
            log.append([b"y" * 60_000])
        log = service.open(CHANNEL)
        entries += append(log, [kind.encode() * 1_000, b"z" * 50_000])
    assert read(log) == entries


@pytest.mark.parametrize("full", [errno.ENOSPC, errno.EDQUOT], ids=errno.errorcode.get)
def test_a_full_disk_refuses_the_append_and_the_log_goes_on_when_there_is_room(
    service: RocksMQ, disk: FailingDisk, full: int
) -> None:
    disk.full = full
    log = service.open(CHANNEL)
    entries = append(log, [b"x" * 60_000])
    disk.fail = "allocate"
    with pytest.raises(LogUnavailable):
        log.append([b"y" * 60_000])
    entries += append(log, [b"z" * 60_000])
    assert read(log) == entries


def test_a_truncation_whose_manifest_does_not_sync_gives_up_nothing(service: RocksMQ, disk: FailingDisk) -> None:
    log = service.open(CHANNEL)
    entries = [entry for _ in range(4) for entry in append(log, [b"x" * 50_000])]
    disk.fail = "sync"
    with pytest.raises(LogUnavailable):
        log.truncate(entries[-1][0])
    assert read(log) == entries
    assert log.truncate(entries[-1][0]) > 0


def test_a_position_that_does_not_sync_is_told(service: RocksMQ, disk: FailingDisk) -> None:
    service.create_consumer_group("g")
    service.seek("g", CHANNEL, 5)
    disk.fail = "sync"
    with pytest.raises(LogUnavailable):
        service.seek("g", CHANNEL, 7)
    assert service.current_id("g", CHANNEL) == 5


def test_many_waiting_appends_all_learn_of_the_failure(service: RocksMQ, disk: FailingDisk) -> None:
    import threading

    log = service.open(CHANNEL)
    outcomes: list[str] = []

    def work() -> None:
        try:
            log.append([b"x"])
            outcomes.append("acknowledged")
        except LogUnavailable:
            outcomes.append("unavailable")

    disk.fail = "sync"
    threads = [threading.Thread(target=work) for _ in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert outcomes == ["unavailable"] * 12
    assert read(log) == []
