"""The backend of a running deployment is switched, with kill -9 at each step.

Nothing lost, nothing doubled, order kept.

Producers write and the append host answers all the while; a node commits. The switch dies at each of its failpoints in
turn, then the same command completes it; the log's server and the node are killed in between. The oracle stands outside
of the system: one key a writer, its sequences kept in the test.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from uuid import uuid4

import pytest

from millrace.base.failpoint import VARIABLE
from millrace.base.settings import Settings
from millrace.client.database import Database, connect
from millrace.message.ids import LogId
from millrace.node.range_loop.schedule import START
from millrace.rpc.discovery import read_record
from millrace.runtime.child_processes import ChildProcess
from millrace.tables.wal.table import WalTable
from tests import running_brokers
from tests.crash.commit_loop import commit_what_is_there
from tests.crash.kill_rig import end_server
from tests.crash.switch_oracle import PATIENCE, SCHEMA, KeyWriter, check
from tests.node.schedules import log_schedule

ROOT = Path(__file__).parents[2]
FAILPOINTS = [
    "switch.created",
    "switch.listed",
    "switch.appended",
    "switch.appended@2",
    "switch.passed",
    "switch.closed",
]


def wait_until(condition: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, what
        time.sleep(0.02)  # the poll interval of a wait with a deadline


class Deployment:
    """A deployment under load."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.writers: list[KeyWriter] = []
        self.node: ChildProcess | None = None
        self.node_command = [str(ROOT / "tests/crash/commit_loop.py"), str(settings.data_dir)]

    def start(self) -> None:
        with connect(settings=self.settings) as client:
            client.catalog.ensure_pchannels(2)
            collection = client.catalog.create_collection("keys", SCHEMA, vchannels=2)
        self.writers = [KeyWriter(self.settings, collection, collection.vchannels[n % 2], n) for n in range(4)]
        self.start_node()
        for writer in self.writers:
            writer.start()
        self.progress()

    def start_node(self) -> None:
        log_file = self.settings.data_dir.parent / "node.log"
        self.node = ChildProcess([sys.executable, *self.node_command], log_file=log_file, env=self.environment())

    def environment(self) -> dict[str, str]:
        path = os.pathsep.join([str(ROOT / "include"), str(ROOT)])
        return {**self.settings.environment(), "PYTHONPATH": path}

    def kill_node(self) -> None:
        assert self.node is not None
        assert self.node.running(), self.node.tail()
        self.node.kill()
        self.start_node()

    def kill_server(self) -> None:
        record = read_record(self.settings.log_path)
        if record is not None and record.alive():
            os.kill(record.pid, signal.SIGKILL)

    def progress(self) -> None:
        """Until each writer got something acknowledged from now on."""
        before = [writer.acknowledged for writer in self.writers]

        def all_moved() -> bool:
            for writer in self.writers:
                if writer.error is not None:
                    raise writer.error
            return all(writer.acknowledged > count for writer, count in zip(self.writers, before, strict=True))

        wait_until(all_moved, "a writer makes no progress")

    def switch(self, to: str, *, dies_at: str = "", options: tuple[str, ...] = ()) -> None:
        """Run the command; it must be killed at `dies_at`, and succeed without."""
        done = subprocess.run(
            [sys.executable, "-m", "millrace", "log", "switch", "--to", to, *options],
            env={**os.environ, **self.environment(), VARIABLE: dies_at},
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == (-signal.SIGKILL if dies_at else 0), (to, dies_at, done.stdout, done.stderr)

    def drain(self, client: Database) -> None:
        """Stop the writers and commit all that the log holds."""
        for writer in self.writers:
            writer.stop()
        assert self.node is not None
        assert self.node.running(), self.node.tail()
        self.node.kill()
        planner = log_schedule(
            client.log, WalTable.create(Path(self.settings.wal_uri)), parked=self.settings.parked_path
        )
        ends = {name: client.log.open(name).end() for name in client.log.names()}
        until = time.monotonic() + PATIENCE
        while time.monotonic() < until:
            commit_what_is_there(self.settings, client.log, planner)
            positions = WalTable.open(Path(self.settings.wal_uri)).positions(sorted(ends))
            left = {name: end for name, end in ends.items() if (positions[name].position or LogId(0, 0)) < end}
            if not left or planner.next_offset(START) is START:
                return
        raise AssertionError(f"not committed in time: {left}")

    def stop(self) -> None:
        for writer in self.writers:
            writer.stopping.set()
        if self.node is not None and self.node.running():
            self.node.kill()
        end_server(self.settings)


@pytest.fixture
def deployment(tmp_path: Path) -> Iterator[Deployment]:
    made = Deployment(Settings(data_dir=tmp_path / "data", tick_interval=0.2))
    try:
        yield made
    finally:
        made.stop()


def run_switches(deployment: Deployment, folder: Path, failpoints: list[str]) -> None:
    """Switch once for each failpoint, with a death there; kill the server and the node in turn in between."""
    deployment.start()
    for number, failpoint in enumerate(failpoints):
        to = f"rocksmq://{folder}/backend-{number}"
        deployment.switch(to, dies_at=failpoint)
        deployment.progress()  # also where it died between an AlterWAL and its record: the append host keeps that, too
        if number % 3 == 0:
            deployment.kill_server()
        if number % 3 == 1:
            deployment.kill_node()
        deployment.switch(to)
        deployment.progress()
    with connect(settings=deployment.settings) as client:
        deployment.drain(client)
        ends = [client.log.open(name).describe().end.generation for name in client.log.names()]
        assert ends == [len(failpoints)] * 2
        check(deployment.settings, client, deployment.writers)


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_switch_that_dies_behind_an_alter_wal_is_completed_and_nothing_is_lost_or_doubled(
    deployment: Deployment, tmp_path: Path
) -> None:
    run_switches(deployment, tmp_path, ["switch.appended"])


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_switch_that_dies_at_any_step_is_completed_by_the_next_run_and_nothing_is_lost_or_doubled(
    deployment: Deployment, tmp_path: Path
) -> None:
    run_switches(deployment, tmp_path, FAILPOINTS)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_running_deployment_goes_to_kafka_and_back_with_kills_and_nothing_is_lost_or_doubled(
    deployment: Deployment,
) -> None:
    deployment.start()
    kafka = f"kafka://{running_brokers.kafka().address}/switch{uuid4().hex[:12]}"
    for number, (to, failpoint) in enumerate([(kafka, "switch.appended@2"), ("rocksmq", "switch.appended")], 1):
        deployment.switch(to, dies_at=failpoint)
        deployment.progress()
        deployment.kill_server()
        deployment.kill_node()
        deployment.switch(to)
        deployment.progress()
        with connect(settings=deployment.settings) as client:
            assert {client.log.open(name).describe().end.generation for name in client.log.names()} == {number}
    with connect(settings=deployment.settings) as client:
        deployment.drain(client)
        check(deployment.settings, client, deployment.writers)
