"""A deployment of real processes under load, each of which may be killed and started again, and
what its tables must hold then.

The log's server, one Spark driver with streaming node and flusher (as `make run` starts it), and producers of inserts
and of transactions. The oracle stands outside of the system: each producer notes, synced, what became of its plain
inserts and its transactions (kill_producer.py). Every acknowledged row is in its collection once, no row of a
transaction that was rolled back is, one whose answer was lost is there whole or not at all, the order of each key's
VChannel is the producer's; log, WAL and table agree by digest.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path

import duckdb

from millrace.base.errors import MillraceError
from millrace.base.settings import Settings
from millrace.brokers.server import LocalServer
from millrace.client.append_client import AppendClient
from millrace.client.database import Database
from millrace.message.ids import pchannel_of
from millrace.message.schema import CollectionSchema, FieldSpec
from millrace.operations.verification import verify_channel, verify_collections
from millrace.rpc.discovery import read_record
from millrace.runtime.child_processes import ChildProcess
from millrace.runtime.queries import started_path
from millrace.storage.table import open_table
from millrace.tables.collections.data_tables import rows_uri
from millrace.tables.collections.flush_tables import read_checkpoints
from millrace.tables.wal.reader import WalSnapshot
from millrace.tables.wal.table import WalTable

ROOT = Path(__file__).parents[2]
SCHEMA = CollectionSchema((FieldSpec("id", "int64", False), FieldSpec("word", "string", True)), "id")
PRODUCERS = 2
ROWS_A_CALL = 50
START_SECONDS = 240.0
"""Spark comes up beside producers that leave it no more than a share of two cores."""
SPACE = 1 << 32
"""Ids that one producer process may use; each new process gets its own."""


class Deployment:
    """The processes of one deployment, each of which may be killed and started again."""

    def __init__(
        self, settings: Settings, broker: LocalServer | None = None, *, collections: Sequence[str] = ("kills",)
    ) -> None:
        self.settings = settings
        self.broker = broker
        self.collections = collections
        self.journals = settings.data_dir.parent / "journals"
        self.journals.mkdir()
        self._started = 0
        self.job: ChildProcess | None = None
        self.producers: list[ChildProcess] = []

    def start_job(self) -> None:
        ready = started_path(self.settings, "millrace-streaming-node")
        ready.unlink(missing_ok=True)
        command = [sys.executable, str(ROOT / "jobs" / "streaming_node.py"), "--with-flusher"]
        log_file = self.settings.data_dir.parent / "job.log"
        self.job = ChildProcess(command, log_file=log_file, env=self.environment())
        self.job.wait_ready(ready.exists, deadline=START_SECONDS)

    def start_producer(self) -> None:
        self._started += 1
        journal = self.journals / f"{self._started}.txt"
        arguments = [str(journal), str(self._started * SPACE), str(ROWS_A_CALL), *self.collections]
        command = [sys.executable, str(Path(__file__).with_name("kill_producer.py")), *arguments]
        self.producers.append(
            ChildProcess(
                command,
                log_file=self.settings.data_dir.parent / f"producer-{self._started}.log",
                env=self.environment(),
            )
        )

    def environment(self) -> dict[str, str]:
        return {**self.settings.environment(), "PYTHONPATH": str(ROOT / "include")}

    def kill(self, victim: str, chance: random.Random) -> None:
        if victim == "producer":
            self.producers.pop(chance.randrange(len(self.producers))).kill()
            self.start_producer()
        elif victim == "log server":
            record = read_record(self.settings.log_path)
            if record is not None and record.alive():
                os.kill(record.pid, signal.SIGKILL)
        elif victim == "broker":
            assert self.broker is not None
            self.broker.kill()
            self.broker.start()
        else:
            assert self.job is not None
            self.job.kill()
            self.start_job()

    def noted(self) -> list[tuple[int, str, list[int]]]:
        """What became of each call, in order: the number of its process, the last word on it, and its ids."""
        calls: dict[tuple[int, int], tuple[int, str, list[int]]] = {}
        for journal in sorted(self.journals.iterdir()):
            for line in journal.read_text(encoding="ascii").splitlines(keepends=True):
                if line.endswith("\n"):
                    what, *words = line.split()
                    ids = [int(word) for word in words]
                    calls[int(journal.stem), ids[0]] = (int(journal.stem), what, ids)
        return list(calls.values())

    def acknowledged(self) -> int:
        """Calls whose end is known."""
        return sum(what != "unknown" for _, what, _ in self.noted())

    def stop(self) -> None:
        for producer in self.producers:
            producer.kill()
        if self.job is not None and self.job.running():
            self.job.stop(deadline=60)


@contextmanager
def deployed(
    folder: Path, *, broker: LocalServer | None = None, collections: Sequence[str] = ("kills",)
) -> Iterator[Deployment]:
    """A deployment on the embedded log, or on a broker that is started and stopped with it."""
    # Many flushes, so that kills fall into them and into folds.
    settings = Settings(data_dir=folder / "data", cache_dir=Settings.load().cache_dir, flush_interval=1.0)
    with broker or nullcontext():
        wanted = settings if broker is None else replace(settings, log=broker.url)
        made = Deployment(wanted, broker, collections=collections)
        try:
            yield made
        finally:
            made.stop()
            end_server(made.settings)


def end_server(settings: Settings) -> None:
    """Stop the log's server where one runs. One that does not answer is killed, and the error raised all the same."""
    record = read_record(settings.log_path)
    if record is None or not record.alive():
        return
    try:
        with AppendClient.connect(settings.data_dir, start=False, now=False) as client:
            client.service.shutdown()
    except MillraceError:
        os.kill(record.pid, signal.SIGKILL)
        raise


def wait_for_progress(deployment: Deployment, before: int, *, deadline: float = 90.0) -> None:
    """Until producers got more than `before` calls acknowledged."""
    end = time.monotonic() + deadline
    while deployment.acknowledged() <= before + 5:
        assert time.monotonic() < end, "no producer makes progress:\n" + "\n".join(
            producer.tail(15) for producer in deployment.producers
        )
        time.sleep(0.05)  # the poll interval of a wait with a deadline


def wait_flushed(deployment: Deployment, ticks: dict[str, int], *, deadline: float = START_SECONDS) -> None:
    path = Path(deployment.settings.checkpoints_uri)
    end = time.monotonic() + deadline
    while True:
        found = read_checkpoints(open_table(path))
        if all(found[pchannel_of(v)].time_tick >= tick for v, tick in ticks.items() if pchannel_of(v) in found) and len(
            found
        ) == len({pchannel_of(v) for v in ticks}):
            return
        assert deployment.job is not None
        assert deployment.job.running(), deployment.job.tail()
        assert time.monotonic() < end, f"not flushed in time: {found} for {ticks}\n{deployment.job.tail()}"
        time.sleep(0.1)  # the poll interval of a wait with a deadline


def check(
    settings: Settings,
    client: Database,
    noted: list[tuple[int, str, list[int]]],
    seed: int,
    *,
    collections: Sequence[str] = ("kills",),
) -> None:
    stored = []
    for place, name in enumerate(collections):
        table = open_table(Path(rows_uri(settings, client.definition(name).id)))
        if table is None:
            continue  # it has no rows
        with duckdb.connect() as db:
            found = db.execute(
                "select id, _vchannel, _time_tick, _write_tick from read_parquet(?, hive_partitioning=false)",
                [table.file_uris()],
            ).fetchall()
        strange = [row[0] for row in found if row[0] % SPACE // ROWS_A_CALL % len(collections) != place]
        assert not strange, f"seed {seed}: rows of other collections in {name}: {strange[:5]}"
        stored += found
    there = Counter(row[0] for row in stored)
    assert not [key for key, count in there.items() if count > 1], f"seed {seed}: rows stored twice"
    for process, what, ids in noted:
        found = sum(key in there for key in ids)
        wanted = {"acknowledged": {len(ids)}, "rolled-back": {0}}.get(what, set(range(len(ids) + 1)))
        assert found in wanted, f"seed {seed}: of {what} rows {ids} of producer {process}, {found} are there"
    known = {key for _, _, ids in noted for key in ids}
    assert set(there) <= known, f"seed {seed}: rows that nobody appended"
    last: dict[tuple[int, str], int] = {}
    for key, vchannel, _, write_tick in sorted(stored):
        lane = (key // SPACE, vchannel)
        assert write_tick >= last.get(lane, 0), f"seed {seed}: row {key} stands before an earlier one of its producer"
        last[lane] = write_tick
    snapshot = WalSnapshot.open(Path(settings.wal_uri))
    wal = WalTable.open(Path(settings.wal_uri))
    assert snapshot is not None
    for pchannel in snapshot.pchannels():
        report = verify_channel(snapshot, wal, client.log, pchannel)
        assert report.ok, f"seed {seed}: {report}"
    for collection in verify_collections(settings).values():
        assert collection.ok, f"seed {seed}: {collection}"
