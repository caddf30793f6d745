"""Processes that share a group: one is killed, one is stopped beyond its lease, one joins. Nothing is lost."""

from __future__ import annotations

import json
import os
import signal
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
from tests.crash.consumer_rig import SCHEMA, ConsumerProcesses
from tests.waiting import until

LEASE = 2.0


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


class Members(ConsumerProcesses):
    """The processes, and what they wrote."""

    program = f"{__name__}:member_main"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.keys: Counter[int] = Counter()
        """How often each row was processed."""
        self.lost: set[str] = set()
        """Members that were told of lanes that they lost."""

    def read(self) -> int:
        """Read what was written since; return how many rows were processed."""
        for name in self.running:
            for line in map(json.loads, self.new_lines(name)):
                self.keys.update(line.get("keys", ()))
                if "lost" in line:
                    self.lost.add(name)
        return len(self.keys)


def lanes_of(database: Database) -> dict[str, int]:
    """By member's process id the number of lanes that it has."""
    found = [each for each in database.consumer_groups() if each["group"] == "mail"]
    return {int(m["client"].rpartition(":")[2]): len(m["lanes"]) for each in found for m in each["members"]}


@pytest.fixture
def members(tmp_path: Path) -> Iterator[Members]:
    made = Members(tmp_path)
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
        members.start("a", "b", "c", "d")
        took["start of four"] = settled(database, members, "a", "b", "c", "d", begun=begun)
        send(rows // 4)
        until(members.read, "rows come")
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
        until(lambda: members.read() == rows, "every row is processed")
        assert "b" in members.lost, "the stopped one knew that it had lost its lanes"
        again = sum(count > 1 for count in members.keys.values())
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
