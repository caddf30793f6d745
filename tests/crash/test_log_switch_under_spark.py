"""The backend of a deployment is switched under its real Spark driver, which is killed around the switch.

Nothing is lost or doubled.

Streaming node and flusher run as `make run` starts them, producers of inserts and of transactions write all the
while, and `millrace log switch` moves the log. Two oracles stand outside of the system: the producers' journals
(kill_rig.py), and writers that count the sequences of one key each (switch_oracle.py); both are held against the
rows in the collections' tables.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from uuid import uuid4

import duckdb
import pytest

from millrace.base.failpoint import VARIABLE
from millrace.client.database import connect
from millrace.storage.table import open_table
from millrace.tables.collections.data_tables import rows_uri
from millrace.tables.wal.table import WalTable
from tests import running_brokers
from tests.crash import kill_rig, switch_oracle
from tests.crash.kill_rig import Deployment, deployed, wait_flushed, wait_for_progress
from tests.crash.switch_oracle import KeyWriter

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.timeout(900)]

WRITERS = 2
Moment = Callable[["Switched", str], None]


class Switched:
    """A deployment on the embedded log, with producers, writers and the Spark driver at work."""

    def __init__(self, deployment: Deployment, chance: random.Random) -> None:
        self.deployment = deployment
        self.chance = chance
        self.settings = deployment.settings
        self.generation = 0
        with connect(settings=self.settings) as client:
            client.catalog.ensure_pchannels(2)
            client.catalog.create_collection("kills", kill_rig.SCHEMA, vchannels=2)
            self.keys = client.catalog.create_collection("keys", switch_oracle.SCHEMA, vchannels=2)
        self.writers = [KeyWriter(self.settings, self.keys, self.keys.vchannels[n % 2], n) for n in range(WRITERS)]
        deployment.start_job()
        deployment.start_producer()
        for writer in self.writers:
            writer.start()
        self.progress()

    def progress(self) -> None:
        """Until every producer that is outside got something acknowledged from now on."""
        before = [writer.acknowledged for writer in self.writers]
        wait_for_progress(self.deployment, self.deployment.acknowledged())
        end = time.monotonic() + switch_oracle.PATIENCE
        for writer, count in zip(self.writers, before, strict=True):
            while writer.acknowledged <= count:
                assert writer.error is None, writer.error
                assert time.monotonic() < end, f"{writer} makes no progress"
                time.sleep(0.02)  # the poll interval of a wait with a deadline

    def begin_switch(self, to: str, *, dies_at: str = "") -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "millrace", "log", "switch", "--to", to, "--json"]
        env = {**os.environ, **self.deployment.environment(), VARIABLE: dies_at}
        return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def end_switch(self, switching: subprocess.Popen[str]) -> None:
        """Wait for the command, which has to succeed, and look that every PChannel has passed."""
        said, complained = switching.communicate(timeout=120)
        assert switching.returncode == 0, said + complained
        self.generation += 1
        print(f"\nswitch {self.generation}: {[(each['pchannel'], each['seconds']) for each in json.loads(said)]} s")
        with connect(settings=self.settings) as client:
            generations = {client.log.open(name).describe().end.generation for name in client.log.names()}
        assert generations == {self.generation}

    def check(self) -> None:
        """Stop the producers, let the driver finish, and hold the tables against what the producers were told."""
        self.progress()
        for producer in self.deployment.producers:
            producer.kill()
        for writer in self.writers:
            writer.stop()
        with connect(settings=self.settings) as client:
            for name in ("kills", "keys"):
                wait_flushed(self.deployment, client.catalog.flush(name))
            assert self.deployment.job is not None
            assert self.deployment.job.stop(deadline=60) == 0
            wal, pchannels = WalTable.open(Path(self.settings.wal_uri)), client.log.names()
            reached = {wal.position(name).position.generation for name in pchannels}  # type: ignore[union-attr]
            assert reached == {self.generation}, "the WAL goes on in the new backend"
            noted = self.deployment.noted()
            assert {what for _, what, _ in noted} >= {"acknowledged", "rolled-back"}
            kill_rig.check(self.settings, client, noted, seed=0)
            switch_oracle.check(self.settings, client, self.writers)
        files = open_table(Path(rows_uri(self.settings, self.keys.id))).file_uris()  # type: ignore[union-attr]
        with duckdb.connect() as db:
            query = "select sequence from read_parquet(?, hive_partitioning=false) where id = ? order by _time_tick"
            for writer in self.writers:
                stored = [row[0] for row in db.execute(query, [files, writer.key]).fetchall()]
                assert stored == list(range(len(stored))), f"key {writer.key}: lost, doubled or out of order"
                assert len(stored) - writer.acknowledged in (0, 1), f"key {writer.key}: {len(stored)} for {writer}"

    def kill_job(self) -> None:
        assert self.deployment.job is not None
        self.deployment.job.kill()


@pytest.fixture
def switched(tmp_path: Path) -> Iterator[Switched]:
    with deployed(tmp_path) as deployment:
        made = Switched(deployment, random.Random(7))
        try:
            yield made
        finally:
            for writer in made.writers:
                writer.stopping.set()


def while_the_job_is_down(switched: Switched, to: str) -> None:
    """Its backlog lies on both sides of the switch."""
    switched.kill_job()
    switched.progress()
    switched.end_switch(switched.begin_switch(to))
    switched.progress()
    switched.deployment.start_job()


def half_way(switched: Switched, to: str) -> None:
    """One PChannel has passed, the other one has not, and the command is dead; so is the job, a moment later."""
    switching = switched.begin_switch(to, dies_at="switch.appended")
    switching.communicate(timeout=120)
    assert switching.returncode == -9
    switched.progress()
    switched.kill_job()
    switched.deployment.start_job()
    switched.progress()
    switched.end_switch(switched.begin_switch(to))


def under_way(switched: Switched, to: str) -> None:
    """The job dies at some moment of the switch's run."""
    switching = switched.begin_switch(to)
    listed = switched.settings.log_path / "generations.json"
    before = listed.read_bytes() if listed.exists() else b""
    while (listed.read_bytes() if listed.exists() else b"") == before:
        assert switching.poll() is None, switching.communicate()
        time.sleep(0.005)  # the poll interval of a wait that ends with the command
    time.sleep(switched.chance.uniform(0, 0.2))  # the random moment is what this test is about
    switched.kill_job()
    switched.end_switch(switching)
    switched.deployment.start_job()


def kafka() -> str:
    return f"kafka://{running_brokers.kafka().address}/switch{uuid4().hex[:12]}"


def pulsar() -> str:
    broker = running_brokers.pulsar()
    return f"{broker.namespace_url}/switch{uuid4().hex[:12]}?admin={broker.admin_url}"


@pytest.mark.parametrize("moment", [while_the_job_is_down, half_way, under_way])
@pytest.mark.parametrize("target", [kafka, pulsar])
def test_the_driver_is_killed_around_a_switch_to_a_broker_and_every_row_is_there_once_and_in_order(
    switched: Switched, target: Callable[[], str], moment: Moment
) -> None:
    moment(switched, target())
    switched.check()


def test_the_driver_is_killed_around_switches_to_kafka_and_back_and_every_row_is_there_once_and_in_order(
    switched: Switched,
) -> None:
    under_way(switched, kafka())
    switched.progress()
    half_way(switched, "rocksmq")
    switched.check()
