"""Laws 3, 4 and 8 under many callers: what each of 64 callers was told is what the log says, whoever was killed.

Callers in threads and tasks share messages, answers are lost, the log's server and the callers' process are killed at
seeded moments, a producer's id is taken over, the schema changes and transactions come in between
(many_callers_process.py). The truth is the log itself: read from its files once every process has ended, and judged by
the chain from its beginning.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from millrace.base.settings import Settings
from millrace.client.database import connect
from millrace.client.schemas import schema
from millrace.log.rocksmq.service import RocksMQ
from millrace.message.ids import LogId
from millrace.message.payload.rows import decode_rows
from millrace.rpc.discovery import read_record
from millrace.runtime.child_processes import ChildProcess
from millrace.wal.chain import Chain
from millrace.wal.state import ChannelState
from tests.crash.many_callers_process import (
    BATCHING,
    CALLERS,
    CALLS,
    COLLECTION,
    THREADS_BY_DEFINITION,
    THREADS_BY_NAME,
    TRANSACTIONS,
)

SCHEMA = schema({"id": "int64", "caller": "int64", "call": "int64", "size": "int64"}, key="id")
CHECK = {"small": "size < 1000"}
"""Added after the callers' definition: the chain alone judges rows of that by it, in messages that callers share."""
BATCHED = range(THREADS_BY_DEFINITION + THREADS_BY_NAME, THREADS_BY_DEFINITION + THREADS_BY_NAME + BATCHING)
"""Callers of batch(), in which calls that share a message share its rejection."""
NO_EFFECT = {"rejected", "invalid", "rolled-back"}

Call = tuple[int, int]
"""(caller, number of its call)"""


@dataclass
class Told:
    """What a caller was told about a call: the last word on it, and its lines."""

    kind: str
    order: int
    """Its place among all lines, by its beginning."""
    what: str = "begin"
    settled: bool = False
    more: dict[str, Any] = field(default_factory=dict)


@dataclass
class Found:
    """A row or key in an accepted message."""

    pchannel: str
    id: tuple[int, ...]
    tick: int
    txn_id: int
    kind: str


class Rig:
    """A log server and a process of callers, each killed and started again."""

    def __init__(self, folder: Path, pchannels: int) -> None:
        self.pchannels = pchannels
        self.settings = Settings(
            data_dir=folder / "data",
            cache_dir=folder / "cache",
            append_attempts=2,
            append_retry_delay=0.05,
            append_deadline=8.0,
        )
        self.folder = folder
        self.callers: ChildProcess | None = None
        self._started = 0

    def start_callers(self, seed: int) -> None:
        self._started += 1
        script = str(Path(__file__).with_name("many_callers_process.py"))
        journal = self.folder / f"journal-{self._started}.jsonl"
        first = self._started * (CALLERS + TRANSACTIONS)
        self.callers = ChildProcess(
            [sys.executable, script, str(journal), str(first), str(seed)],
            log_file=self.folder / f"callers-{self._started}.log",
            env={**self.settings.environment(), "PYTHONPATH": os.pathsep.join(sys.path)},
        )

    def kill(self, victim: str, seed: int) -> None:
        if victim in ("server", "both"):
            record = read_record(self.settings.log_path)
            if record is not None and record.alive():
                os.kill(record.pid, signal.SIGKILL)
        if victim in ("callers", "both"):
            assert self.callers is not None
            self.callers.kill()
            self.start_callers(seed)

    def lines(self) -> list[dict[str, Any]]:
        """The lines of all journals, in order within each."""
        return [
            json.loads(line)
            for journal in sorted(self.folder.glob("journal-*.jsonl"))
            for line in journal.read_bytes().splitlines(keepends=True)
            if line.endswith(b"\n")
        ]

    def acked(self) -> int:
        journals = list(self.folder.glob("journal-*.jsonl"))
        return sum(journal.read_bytes().count(b'{"what": "acked"') for journal in journals)

    def progress(self, calls: int, *, seconds: float = 90.0) -> None:
        """Wait until `calls` more calls are acknowledged."""
        before, end = self.acked(), time.monotonic() + seconds
        while self.acked() < before + calls:
            assert self.callers is not None
            assert self.callers.running(), self.callers.tail()
            assert time.monotonic() < end, f"{self.acked() - before} of {calls} calls\n{self.callers.tail()}"
            time.sleep(0.02)  # the poll interval of a wait with a deadline

    def told(self) -> dict[Call, Told]:
        found: dict[Call, Told] = {}
        for order, line in enumerate(self.lines()):
            what, call = line.pop("what"), (line.pop("caller"), line.pop("call"))
            if what == "bundled":
                continue
            if what == "begin":
                found[call] = Told(line["kind"], order)
            elif what == "settled":
                found[call].settled = True
            else:
                found[call].what, found[call].more = what, line
        return found

    def end(self) -> None:
        if self.callers is not None and self.callers.running():
            self.callers.stop(deadline=90)
        with connect(settings=self.settings) as client:
            client.connection.service.shutdown()


@pytest.fixture(params=[12, 2], ids=["bundles", "few PChannels"])
def rig(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Rig]:
    """On two PChannels callers share messages; on many, messages of several PChannels are bundled besides."""
    made = Rig(tmp_path, request.param)
    try:
        with connect(settings=made.settings) as client:
            client.catalog.ensure_pchannels(made.pchannels)
            client.catalog.create_collection(COLLECTION, SCHEMA, vchannels=2 * made.pchannels)
            client.collection(COLLECTION).alter(add_check=CHECK)
        yield made
    finally:
        if made.callers is not None and made.callers.running():
            made.callers.kill()
        with connect(settings=made.settings) as client:
            client.connection.service.shutdown()


@dataclass
class Truth:
    """What the log says, by call; and the transactions whose commit the chain accepted, with its tick."""

    accepted: dict[Call, list[Found]] = field(default_factory=lambda: defaultdict(list))
    rejected: dict[Call, list[str]] = field(default_factory=lambda: defaultdict(list))
    committed: dict[int, int] = field(default_factory=dict)

    @classmethod
    def of(cls, settings: Settings) -> Truth:
        truth = cls()
        with RocksMQ(settings.log_path) as service:
            for name in service.names():
                whole = service.open(name).read(LogId(0, 0), max_bytes=1 << 31)
                truth._add(name, Chain().process(ChannelState.new(name), whole))
        return truth

    def _add(self, pchannel: str, outcome: Any) -> None:
        for batch in (outcome.messages, outcome.rejections):
            for row in batch.to_pylist():
                if row["type"] == "COMMIT_TXN" and row["reason"] is None:
                    self.committed[row["txn_id"]] = row["time_tick"]
                if row["type"] not in ("INSERT", "UPSERT", "DELETE"):
                    continue
                channel = outcome.state.vchannels[row["vchannel"]]
                written = channel.schemas[row["schema_version"] - 1]
                keys_alone = row["type"] == "DELETE"
                rows = decode_rows(row["payload"], written.key_arrow() if keys_alone else written.arrow()).to_pylist()
                for each in rows:
                    call = divmod(each["id"], CALLS) if keys_alone else (each["caller"], each["call"])
                    if row["reason"] is not None:
                        self.rejected[call].append(row["reason"])
                        continue
                    place = tuple(row[part] for part in ("ledger", "entry", "index", "ordinal"))
                    self.accepted[call].append(Found(pchannel, place, row["time_tick"], row["txn_id"], row["type"]))


def check(told: dict[Call, Told], truth: Truth) -> Counter[str]:
    """Hold what each caller was told against the log. Returns the calls by what was said."""
    for call, said in told.items():
        found, place = truth.accepted.get(call, []), f"call {call} ({said.kind}), of which was said {said.what}"
        if said.kind == "transaction":
            _check_transaction(place, said, found, truth)
            continue
        assert len(found) <= 1, f"{place}, took effect {len(found)} times: {found}"
        if said.what in NO_EFFECT:
            assert not found, f"{place} {said.more}, took effect: {found}"
        elif said.what == "acked":
            assert found, f"{place}, is not there; rejections: {truth.rejected.get(call)}"
            assert found[0].tick == said.more["tick"], f"{place}, is at another tick: {found} {said.more}"
            assert list(found[0].id) == said.more["id"], f"{place}, is in another message: {found} {said.more}"
        elif said.settled:
            assert found or truth.rejected.get(call), f"{place} and then settled, was not decided"
        if said.kind in ("bad", "unknown"):
            assert said.what in ("invalid", "begin", "failed"), place
        elif said.kind in ("large", "outdated"):
            assert said.what != "acked", place
        elif said.what == "rejected":
            # A batch shares the verdict of a message if a later call of the batch, here another thread's, took effect.
            shared = {"CHECK_VIOLATED"} if call[0] % (CALLERS + TRANSACTIONS) in BATCHED else set()
            own = {"PRODUCER_FENCED"} | shared
            assert said.more["reason"] in own, f"{place}, failed for another caller's row: {said.more}"
    unknown = set(truth.accepted) - set(told)
    assert not unknown, f"rows that nobody appended: {sorted(unknown)[:5]}"
    _check_order(told, truth)
    return Counter(said.what for said in told.values())


def _check_transaction(place: str, said: Told, found: list[Found], truth: Truth) -> None:
    ticks = {truth.committed[each.txn_id] for each in found if each.txn_id in truth.committed}
    visible = sum(each.txn_id in truth.committed for each in found)
    assert visible in (0, 2), f"{place}, is visible in part: {found}"
    if said.what == "committed":
        assert ticks == {said.more["tick"]}, f"{place}, is not visible at its tick: {found} {said.more}"
    elif said.what in NO_EFFECT:
        assert not visible, f"{place}, is visible: {found}"


def _check_order(told: dict[Call, Told], truth: Truth) -> None:
    """The acknowledged calls of a caller stand in each PChannel in their order."""
    last: dict[tuple[int, str], tuple[int, Call]] = {}
    for call, said in sorted(told.items()):
        if said.what != "acked":
            continue
        [found] = truth.accepted[call]
        tick, before = last.get((call[0], found.pchannel), (0, call))
        assert tick < found.tick, f"call {call} stands before {before}, which was acknowledged earlier"
        last[call[0], found.pchannel] = found.tick, call


def run(rig: Rig, *, seed: int, victims: list[str], calls: int) -> None:
    chance = random.Random(seed)
    rig.start_callers(seed)
    rig.progress(calls)
    for victim in victims:
        time.sleep(chance.uniform(0, 0.3))  # the random moment is what this test is about
        rig.kill(victim, seed)
        rig.progress(calls)
    rig.end()
    told = rig.told()
    truth = Truth.of(rig.settings)
    said = check(told, truth)
    messages = Counter(found.id for rows in truth.accepted.values() for found in rows)
    assert max(messages.values()) > 1, "no callers shared a message"
    assert rig.pchannels == 2 or any(line["what"] == "bundled" for line in rig.lines())
    assert said["acked"] >= calls * (len(victims) + 1)
    assert {"rejected", "invalid"} <= set(said), said
    assert said["committed"] + said["rolled-back"], said  # few calls may see only one of the two


@pytest.mark.timeout(180)
@pytest.mark.quick_cases(1)
def test_what_64_callers_are_told_is_true_when_the_server_is_killed(rig: Rig) -> None:
    run(rig, seed=1, victims=["server"], calls=120)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", range(2, 8))
def test_what_64_callers_are_told_is_true_when_server_and_callers_are_killed(rig: Rig, seed: int) -> None:
    victims = random.Random(seed).choices(["server", "callers", "both"], weights=[3, 1, 1], k=5)
    run(rig, seed=seed, victims=[*victims, "callers"], calls=500)
