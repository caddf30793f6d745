"""Processes that share a group: one is killed, one is stopped beyond its lease, one joins. Nothing is lost.

What each does goes to a file of its own, before it is acknowledged; so the files say what was processed and by whom.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pyarrow as pa
import pytest

from millrace.base.settings import Settings
from millrace.client.database import Database, connect
from millrace.message.schema import CollectionSchema, FieldSpec
from tests.waiting import until

SCHEMA = CollectionSchema((FieldSpec("id", "int64", False), FieldSpec("body", "string", True)), "id")
LEASE = 2.0
ROOT = Path(__file__).resolve().parents[2]


def member_main(data: str, out: str) -> None:
    """One member, in a process of its own: writes what it is assigned and what came, then acknowledges."""
    settings = Settings(data_dir=Path(data))
    with ExitStack() as closing:
        file = closing.enter_context(open(out, "a", buffering=1))
        database = closing.enter_context(connect(settings=settings, start=False))

        def tells(what: str) -> Callable[[frozenset[str]], None]:
            return lambda lanes: print(json.dumps({what: sorted(lanes), "at": time.time()}), file=file)

        consumer = closing.enter_context(
            database.consumer(
                "users",
                group="mail",
                lease=LEASE,
                on_assigned=tells("assigned"),
                on_revoked=tells("revoked"),
                on_lost=tells("lost"),
            )
        )
        while not Path(data, "stop").exists():
            delivery = consumer.poll(timeout=0.2)
            if delivery is not None:
                keys = [key for each in delivery.changes() for key in each.rows["id"].to_pylist()]
                if keys:
                    file.write(json.dumps({"lane": delivery.vchannel, "keys": keys}) + "\n")
                consumer.acknowledge(delivery)


class Members:
    """The processes."""

    def __init__(self, folder: Path, data: Path) -> None:
        self.folder, self.data = folder, data
        self.running: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str) -> None:
        arguments = f"{str(self.data)!r}, {str(self.out(name))!r}"
        code = f"from tests.crash.test_group_processes import member_main; member_main({arguments})"
        env = {**os.environ, "PYTHONPATH": f"{ROOT / 'include'}:{ROOT}"}
        self.out(name).touch()
        self.running[name] = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, env=env)

    def out(self, name: str) -> Path:
        return self.folder / f"{name}.jsonl"

    def lines(self, name: str) -> list[dict[str, object]]:
        return [json.loads(line) for line in self.out(name).read_text().splitlines(True) if line.endswith("\n")]

    def keys(self) -> Counter[int]:
        found: Counter[int] = Counter()
        for path in self.folder.glob("*.jsonl"):
            for line in self.lines(path.stem):
                found.update(line.get("keys", ()))  # type: ignore[arg-type]
        return found

    def stop(self) -> None:
        (self.data / "stop").touch()
        for each in self.running.values():
            if each.poll() is None:
                each.send_signal(signal.SIGCONT)
                try:
                    each.wait(20)
                except subprocess.TimeoutExpired:
                    each.kill()


def lanes_of(database: Database) -> dict[str, int]:
    """By member's process id the number of lanes that it has."""
    found = [each for each in database.consumer_groups() if each["group"] == "mail"]
    return {int(m["client"].rpartition(":")[2]): len(m["lanes"]) for each in found for m in each["members"]}


@pytest.fixture
def members(tmp_path: Path) -> Iterator[Members]:
    (tmp_path / "out").mkdir()
    made = Members(tmp_path / "out", tmp_path / "data")
    yield made
    made.stop()


def settled(database: Database, members: Members, *names: str, begun: float) -> float:
    """Wait until these members have the lanes, divided evenly; return how long that took since `begun`."""
    pids = {members.running[name].pid for name in names}

    def even() -> bool:
        held = lanes_of(database)
        sizes = [held.get(pid, 0) for pid in pids]
        return sum(sizes) == 8 and max(sizes) - min(sizes) <= 1

    until(even, f"{names} divide the lanes")
    return time.monotonic() - begun


def play(tmp_path: Path, members: Members, rows: int) -> None:
    settings = Settings(data_dir=tmp_path / "data", cache_dir=tmp_path / "cache")
    took: dict[str, float] = {}
    with connect(settings=settings, create=True) as database:
        database.catalog.ensure_pchannels(4)
        users = database.catalog.create_collection("users", SCHEMA, vchannels=8)
        producer, sent = database.new_producer(), 0

        def send(to: int) -> None:
            nonlocal sent
            for first in range(sent, to, 20):
                ids = list(range(first, min(first + 20, to)))
                producer.insert(users, pa.table({"id": ids, "body": ["x"] * len(ids)}))
            sent = to

        begun = time.monotonic()
        for name in ("a", "b", "c", "d"):
            members.start(name)
        took["start of four"] = settled(database, members, "a", "b", "c", "d", begun=begun)
        send(rows // 4)
        until(lambda: members.keys(), "rows come")
        members.running["a"].kill()
        members.running["a"].wait()
        begun = time.monotonic()
        sending = threading.Thread(target=send, args=(rows // 2,))
        sending.start()
        took["one killed"] = settled(database, members, "b", "c", "d", begun=begun)
        sending.join()
        os.kill(members.running["b"].pid, signal.SIGSTOP)
        begun = time.monotonic()
        sending = threading.Thread(target=send, args=(rows * 3 // 4,))
        sending.start()
        took["one stopped beyond its lease"] = settled(database, members, "c", "d", begun=begun)
        sending.join()
        os.kill(members.running["b"].pid, signal.SIGCONT)
        begun = time.monotonic()
        took["and back"] = settled(database, members, "b", "c", "d", begun=begun)
        begun = time.monotonic()
        members.start("e")
        took["one joined"] = settled(database, members, "b", "c", "d", "e", begun=begun)
        send(rows)
        until(lambda: len(members.keys()) == rows, "every row is processed")
        assert any("lost" in line for line in members.lines("b")), "the stopped one knew that it had lost its lanes"
        again = sum(count > 1 for count in members.keys().values())
        assert again <= rows // 4, f"{again} rows came more than once"
        members.stop()
        group = next(each for each in database.consumer_groups() if each["group"] == "mail")
        assert set(group["positions"]) == set(users.vchannels)
        end = database.current_tick(users.pchannels)
        with database.consumer("users", group="mail", until=end) as after:
            assert [key for each in after for change in each.changes() for key in change.rows["id"].to_pylist()] == []
        database.connection.service.shutdown()
    print(f"time to rebalance: {', '.join(f'{what} {seconds:.1f} s' for what, seconds in took.items())}; {again} again")
    # A lease, a heartbeat, and a pass of the server: the rest is a slow machine.
    assert took["one killed"] < LEASE + 20
    assert took["one joined"] < 20


@pytest.mark.slow
def test_four_processes_share_eight_vchannels_through_a_kill_a_stop_and_a_join(
    tmp_path: Path, members: Members
) -> None:
    play(tmp_path, members, 4000)
