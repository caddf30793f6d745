"""SIGKILL of an event store's writers and of the log's server, at failpoints and at seeded moments.

The oracle stands outside: the writers' journals say what they asked for and were told, and the rows of the collection
what is there. The events of each acknowledged command are there once, at the versions that it was told; those of a
command that lost are not; those of another are all there or none. No version is there twice. A rebuild has the digest
of a fold that knows nothing of event stores.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

from millrace.base.errors import VersionConflict
from millrace.base.failpoint import VARIABLE
from millrace.base.settings import Settings
from millrace.client.database import Database, connect
from millrace.node.flush.definition import flush_to_end
from millrace.node.ingest.definition import ingest_to_end
from millrace.rpc.discovery import read_record
from millrace.runtime.child_processes import ChildProcess
from millrace.streams.sourcing.store import EventStore, Loaded
from tests.crash.sourcing_writer import ACCOUNTS, EVERY, KEYS, Account, Paid, lines_of
from tests.crash.sourcing_writer import after as fold
from tests.processes import end_processes
from tests.waiting import until

ROOT = Path(__file__).parents[2]


class Rig:
    """Writers and a log server, each killed and started again."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.settings = Settings(
            data_dir=folder / "data", cache_dir=folder / "cache", append_deadline=5.0, append_retry_delay=0.02
        )
        self.writers: dict[int, ChildProcess] = {}
        self.starts = 0

    def environment(self, failpoint: str = "") -> dict[str, str]:
        paths = f"{ROOT / 'include'}{os.pathsep}{ROOT}"
        return {**os.environ, **self.settings.environment(), "PYTHONPATH": paths, VARIABLE: failpoint}

    def start_server(self, failpoint: str) -> int:
        """Start a server in a process with its own failpoint; return its process id."""
        assert self.server() is None, "a server without the failpoint runs"
        code = "from millrace.client.database import connect; connect(create=True).close()"
        subprocess.run([sys.executable, "-c", code], env=self.environment(failpoint), check=True, timeout=60)
        pid = self.server()
        assert pid is not None
        return pid

    def server(self) -> int | None:
        record = read_record(self.settings.log_path)
        return record.pid if record is not None and record.alive() else None

    def kill_server(self) -> None:
        pid = self.server()
        if pid is not None:
            os.kill(pid, signal.SIGKILL)

    def start(self, number: int, *, failpoint: str = "") -> None:
        self.starts += 1
        script = str(Path(__file__).with_name("sourcing_writer.py"))
        journal = self.journal(number)
        journal.touch()
        self.writers[number] = ChildProcess(
            [sys.executable, script, str(journal), f"{number}/{self.starts}"],
            log_file=self.folder / f"writer-{number}.log",
            env=self.environment(failpoint),
        )

    def journal(self, number: int) -> Path:
        return self.folder / f"journal-{number}.jsonl"

    def told(self, number: int) -> int:
        return sum("done" in line for line in lines_of(self.journal(number)))

    def wait_progress(self, number: int, more: int = 5, *, deadline: float = 60.0) -> None:
        """Until a writer was told of so many further commands."""
        wanted, end = self.told(number) + more, time.monotonic() + deadline
        while self.told(number) < wanted:
            assert self.writers[number].running(), self.writers[number].tail()
            assert time.monotonic() < end, f"writer {number} does not go on\n{self.writers[number].tail()}"
            time.sleep(0.02)  # the poll interval of a wait with a deadline

    def wait_dead(self, number: int) -> None:
        until(lambda: not self.writers[number].running(), "the writer comes by its failpoint")

    def wait_server_dead(self, pid: int) -> None:
        until(lambda: self.server() != pid, "the server comes by its failpoint")

    def stop(self) -> None:
        for each in self.writers.values():
            if each.running():
                each.kill()

    def check(self, *, samples: int = 3) -> None:
        with connect(settings=self.settings) as database:
            self.check_log(database, samples)
            ingest_to_end(self.settings, database.log)
            flush_to_end(self.settings)
            self.check_log(database, samples)

    def check_log(self, database: Database, samples: int) -> None:
        rows = database["accounts"].changes_between().read_all().to_pylist()
        by_command: defaultdict[str, list[tuple[str, int, int]]] = defaultdict(list)
        for row in rows:
            assert row["_change"] == "insert"
            amount = int(row["data"].split(":")[1].rstrip("}"))
            by_command[str(row["command"]).replace("-", "")].append((row["aggregate"], row["version"], amount))
        found = Counter((key, version) for events in by_command.values() for key, version, _ in events)
        assert not [each for each, count in found.items() if count > 1], "a version is there twice"
        tried, done, lost = {}, {}, {}
        for number in self.writers:
            for line in lines_of(self.journal(number)):
                if "tried" in line:
                    tried[line["tried"]] = line
                elif "done" in line:
                    done[line["done"]] = line["version"]
                else:
                    lost[line["lost"]] = line["current"]
        assert by_command.keys() <= tried.keys()
        assert done.keys() <= by_command.keys(), "events of an acknowledged command are lost"
        assert not lost.keys() & by_command.keys(), "a command that lost has events"
        last: Counter[str] = Counter()
        for identity, events in by_command.items():
            asked = tried[identity]
            begin = min(version for _, version, _ in events)
            assert sorted(events) == [
                (asked["key"], begin + place, amount) for place, amount in enumerate(asked["amounts"])
            ], "a command's events are there whole, once, and together"
            assert asked["expected"] in (None, begin - 1)
            last[asked["key"]] = max(last[asked["key"]], max(version for _, version, _ in events))
            if done.get(identity) is not None:
                assert done[identity] == max(version for _, version, _ in events)
        for identity, current in lost.items():
            assert current != tried[identity]["expected"]
            assert current <= last[tried[identity]["key"]]
        store = EventStore.open(database, "accounts", ACCOUNTS, snapshot_every=EVERY)
        ticks = sorted({row["_time_tick"] for row in rows})
        for tick in [*random.Random(1).sample(ticks, min(samples, len(ticks))), ticks[-1]]:
            states: dict[str, Account] = {}
            for row in sorted(rows, key=lambda row: row["version"]):
                if row["_time_tick"] <= tick:
                    key = row["aggregate"]
                    states[key] = fold(states.get(key, Account()), Paid(int(row["data"].split(":")[1].rstrip("}"))))
            wanted = store.digest(Loaded(key, state, state.payments, tick) for key, state in states.items())
            assert store.rebuild(at=tick).digest == wanted
        assert store.rebuild().digest == wanted
        assert store.digest(store.load_all(states).values()) == wanted, "snapshots and the cache give the same states"
        for key in (f"a{number}" for number in range(KEYS)):
            with pytest.raises(VersionConflict) as caught:
                store.append(key, Paid(1), expected_version=last[key] + 1)
            assert caught.value.current_version == last[key]


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    made = Rig(tmp_path)
    try:
        yield made
    finally:
        made.stop()
        end_processes(tmp_path)


def test_a_writer_and_the_server_die_with_events_in_the_log_that_nobody_was_told_of(rig: Rig) -> None:
    server = rig.start_server("append.durable@40")
    rig.start(0)
    rig.start(1, failpoint="sourcing.appended@8")
    rig.wait_dead(1)
    rig.start(1)
    rig.wait_server_dead(server)
    rig.wait_progress(0, 10)
    rig.wait_progress(1, 10)
    rig.stop()
    rig.check(samples=2)


@pytest.mark.slow
def test_an_erasure_that_dies_before_its_snapshot_is_finished_by_the_next_load(rig: Rig) -> None:
    with connect(settings=rig.settings, create=True) as database:
        store = EventStore.open(database, "accounts", ACCOUNTS, snapshot_every=1)
        store.append("a1", Paid(7))
        code = (
            "from millrace.client.database import connect; from tests.crash.sourcing_writer import ACCOUNTS;"
            "from millrace.streams.sourcing.store import EventStore;"
            "EventStore.open(connect(), 'accounts', ACCOUNTS, snapshot_every=1).erase('a1')"
        )
        died = subprocess.run([sys.executable, "-c", code], env=rig.environment("sourcing.erased"), check=False)
        assert died.returncode == -signal.SIGKILL
        snapshots = database["accounts_snapshots"]
        assert snapshots.count() == 1
        assert EventStore.open(database, "accounts", ACCOUNTS, snapshot_every=1).load("a1").state == Account()
        assert snapshots.count() == 0


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("server", ["append.durable@60", "append.durable@61", "clock.promised@2"])
@pytest.mark.parametrize("visit", [1, 2, 15])
def test_writers_and_servers_die_at_their_failpoints(rig: Rig, server: str, visit: int) -> None:
    for _ in range(2):
        pid = rig.start_server(server)
        for number in range(3):
            rig.start(number, failpoint=f"sourcing.appended@{visit}" if number else "")
        for number in (1, 2):
            rig.wait_dead(number)
            rig.start(number)
        rig.wait_server_dead(pid)
        for number in range(3):
            rig.wait_progress(number)
        rig.stop()  # first: a writer would start a server again
        rig.kill_server()
        end_processes(rig.folder)  # also servers that wait for its lock, which have no failpoint
        until(lambda: rig.server() is None, "the server is gone")
    rig.check()


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("seed", [1, 2, *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(3, 20))])
def test_writers_and_the_server_die_at_any_moment(rig: Rig, seed: int) -> None:
    chance = random.Random(seed)
    for number in range(4):
        rig.start(number)
    rig.wait_progress(0, 1)
    for _ in range(12):
        victim = chance.choice(["server", "writer", "writer", "both"])
        if victim != "writer":
            rig.kill_server()
        number = chance.randrange(4)
        if victim != "server":
            rig.writers[number].kill()
            rig.start(number)
        rig.wait_progress(number, 2)
        time.sleep(chance.uniform(0, 0.3))  # the random moment is what this test is about
    rig.stop()
    rig.check()
