"""kill -9 of the log's server under load: nothing acknowledged is lost, nothing is there twice, order holds."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from millrace.log.protocol import Log
from millrace.message.ids import EARLIEST, LogId
from millrace.rpc.discovery import read_record
from millrace.rpc.launch import ServerLaunch
from millrace.rpc.remote_log import RemoteLogService
from tests.prefork import started_as_by_users  # noqa: F401 - a fixture
from tests.processes import end_processes
from tests.waiting import until

pytestmark = pytest.mark.usefixtures("started_as_by_users")

PATIENCE = 60.0
LAUNCH = ServerLaunch(idle_timeout=60.0, settings=(("segment_bytes", str(1 << 20)),))

PRODUCER = """
import functools
import select
import sys
from millrace.base.errors import LogUnavailable
from millrace.rpc.remote_log import RemoteLogService

folder, name, way = sys.argv[1:4]
padding = b"." * 700

def say(word, number, ids=()):
    sys.stdout.write(f"{word} {number} {','.join(str(each.entry) for each in ids)}\\n")
    sys.stdout.flush()

def batch(number):
    return [f"{name}:{number}:{part}:".encode() + padding for part in range(2)]

with RemoteLogService.connect(folder) as service:
    log = service.open("p0")
    number = 0
    pipeline = log.pipeline(appends=8) if way == "pipelined" else None
    while True:
        flight = []
        for _ in range(8 if pipeline else 1):
            say("sent", number)
            values = batch(number)
            result = pipeline.submit(values).result if pipeline else functools.partial(log.append, values)
            flight.append((number, result))
            number += 1
        for sent, result in flight:
            try:
                say("acked", sent, result())
            except LogUnavailable:
                say("unknown", sent)
        if select.select([sys.stdin], [], [], 0)[0]:
            break
    if pipeline:
        pipeline.close()
say("end", number)
"""


class Producer:
    """A process that appends until told to stop, and tells what became of each append."""

    def __init__(self, folder: Path, name: str, way: str) -> None:
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        self.name = name
        self.lines: list[str] = []
        self._process = subprocess.Popen(
            [sys.executable, "-c", PRODUCER, str(folder), name, way],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        self._reading = threading.Thread(target=self._read, daemon=True)
        self._reading.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.lines.append(line)

    def acknowledged(self) -> int:
        return sum(line.startswith("acked") for line in list(self.lines))

    def finish(self) -> None:
        """Let it end its round and go."""
        assert self._process.stdin is not None
        self._process.stdin.write("stop\n")
        self._process.stdin.close()
        assert self._process.wait(PATIENCE) == 0
        self._reading.join(PATIENCE)
        assert self._process.stdout is not None
        self._process.stdout.close()

    def kill(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait(PATIENCE)

    def results(self) -> tuple[dict[int, list[int]], set[int]]:
        """What was acknowledged, with its entries, and what is unknown."""
        acked: dict[int, list[int]] = {}
        unknown: set[int] = set()
        for line in self.lines:
            word, number, ids = line.rstrip("\n").split(" ")
            if word == "acked":
                acked[int(number)] = [int(each) for each in ids.split(",")]
            elif word == "unknown":
                unknown.add(int(number))
        return acked, unknown


def everything(log: Log) -> dict[LogId, bytes]:
    position, found = EARLIEST, {}
    while (entries := log.read(position)).batch.num_rows:
        for row in entries.batch.to_pylist():
            entry = LogId(row["ledger"], row["entry"])
            assert entry not in found
            found[entry] = row["value"]
        position = entries.next
    return found


@contextmanager
def producers(folder: Path, *named: tuple[str, str]) -> Iterator[list[Producer]]:
    running = [Producer(folder, name, way) for name, way in named]
    try:
        yield running
    finally:
        for producer in running:
            producer.kill()


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path
    end_processes(tmp_path)


def kill_server(folder: Path) -> bool:
    record = read_record(folder)
    if record is None or not record.alive():
        return False
    os.kill(record.pid, signal.SIGKILL)
    return True


def check(log: Log, running: list[Producer]) -> int:
    """The log against what its producers were told; how many appends are unknown to them."""
    found = everything(log)
    assert list(found) == sorted(found)
    ambiguous = 0
    for producer in running:
        acked, unknown = producer.results()
        ambiguous += len(unknown)
        mine = [
            (entry, value.split(b":"))
            for entry, value in found.items()
            if value.startswith(producer.name.encode() + b":")
        ]
        parts = [(int(number), int(part)) for _, (_, number, part, _) in mine]
        # In the order in which they were sent, each batch whole and once.
        numbers = [number for number, _ in parts[::2]]
        assert parts == [(number, part) for number in numbers for part in (0, 1)]
        assert numbers == sorted(set(numbers))
        # What was acknowledged is there, under its ids; what else is there was not refused.
        assert set(acked) <= set(numbers) <= set(acked) | unknown
        where = {number: [entry.entry for entry, value in mine if int(value[1]) == number] for number in acked}
        assert where == acked
    return ambiguous


@pytest.mark.parametrize("kills", [3])
def test_kill_9_under_load_loses_no_acknowledged_append_and_doubles_none(folder: Path, kills: int) -> None:
    dice = random.Random(20_251_121)
    with RemoteLogService.connect(folder, launch=LAUNCH) as service:
        service.create("p0")
        log = service.open("p0")
        with producers(folder, ("a", "plain"), ("b", "plain"), ("c", "pipelined")) as running:
            for _ in range(kills):
                before = [producer.acknowledged() for producer in running]
                until(
                    lambda before=before: all(  # type: ignore[misc]
                        now.acknowledged() > then + 5 for now, then in zip(running, before, strict=True)
                    ),
                    "every producer gets through",
                )
                threading.Event().wait(dice.random() * 0.05)  # somewhere in a group commit, a write, an answer
                assert kill_server(folder)
            before = [producer.acknowledged() for producer in running]
            until(
                lambda: all(now.acknowledged() > then + 5 for now, then in zip(running, before, strict=True)),
                "every producer gets through after the last kill",
            )
            for producer in running:
                producer.finish()
            ambiguous = check(log, running)
    # Only what was on its way at a kill is unknown: one append of each plain producer, eight of the pipelined one.
    assert ambiguous <= kills * (1 + 1 + 8)


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_hundred_kills_under_load(folder: Path) -> None:
    test_kill_9_under_load_loses_no_acknowledged_append_and_doubles_none(folder, 100)


def test_a_producer_that_is_killed_leaves_whole_batches_in_order(folder: Path) -> None:
    with RemoteLogService.connect(folder, launch=LAUNCH) as service:
        service.create("p0")
        log = service.open("p0")
        with producers(folder, ("a", "pipelined")) as running:
            until(lambda: running[0].acknowledged() > 20, "appends go through")
            running[0].kill()
            running[0]._reading.join(PATIENCE)
        service.open("p0").append([b"next"])
        found = list(everything(log).values())
        acked, _ = running[0].results()
        parts = [tuple(map(int, value.split(b":")[1:3])) for value in found if value.startswith(b"a:")]
        numbers = [number for number, _ in parts[::2]]
        assert parts == [(number, part) for number in numbers for part in (0, 1)]
        assert numbers == list(range(len(numbers)))
        assert set(acked) <= set(numbers)


def test_a_waiting_read_goes_on_across_a_kill(folder: Path) -> None:
    with RemoteLogService.connect(folder, launch=LAUNCH) as service:
        service.create("p0")
        log = service.open("p0")
        last = log.append([b"a"])[-1]
        found: list[bytes] = []
        reading = threading.Thread(
            target=lambda: found.extend(log.read(last.following(), timeout=PATIENCE).batch.column("value").to_pylist())
        )
        reading.start()
        with RemoteLogService.connect(folder) as other:
            assert kill_server(folder)
            until(lambda: _works(other), "another client brings it back")
            other.open("p0").append([b"b"])
        reading.join(PATIENCE)
        assert found == [b"b"]


def _works(service: RemoteLogService) -> bool:
    return service.names() == ["p0"]
