"""Operators under Spark, a collection, a Kafka topic or a Delta table behind each, killed at seeded moments.

The driver at its commits and between them, Python workers and the log's server at any time.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import millrace.testing
from millrace.base.deadline import Deadline, poll_until
from millrace.base.failpoint import VARIABLE
from millrace.flows.sinks.memory import name_in
from millrace.flows.spark_host.incarnations import sink_folder
from millrace.storage.table import table_at
from millrace.streams.keyed.in_process import Run
from millrace.streams.keyed.store import KeyedTable
from millrace.testing import Deployment
from tests import running_brokers
from tests.crash import operate_process
from tests.crash.operate_process import BATCHES, DELAY, OPERATORS, SCHEMA, SHARDS, SINKS, rows
from tests.flows.sinks.test_rows import Topic

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def counted(found: pa.Table) -> Counter[tuple[Any, ...]]:
    return Counter(tuple(sorted(row.items())) for row in found.to_pylist())


def begin(folder: Path, db: Deployment, kafka: str, failpoint: str = "") -> subprocess.Popen[bytes]:
    paths = os.pathsep.join([os.path.abspath("include"), os.getcwd(), os.environ.get("PYTHONPATH", "")])
    env = os.environ | {VARIABLE: failpoint, "PYTHONPATH": paths}
    command = [sys.executable, operate_process.__file__, str(folder), str(db.settings.data_dir), kafka]
    with (folder / "said.log").open("ab") as said:
        return subprocess.Popen(command, env=env, stdout=said, stderr=said)


def kill_others(process: subprocess.Popen[bytes], db: Deployment, dice: random.Random, times: int) -> dict[str, int]:
    """SIGKILL Python workers of its tasks and the log's server, one now and then; how many of each were killed."""
    killed, end = {"worker": 0, "server": 0}, Deadline.after(300)
    driver = psutil.Process(process.pid)
    while process.poll() is None and end.remaining() > 0:
        time.sleep(dice.uniform(0.3, 1.5))  # the dice of the test, no wait for anything
        workers = workers_of(driver)
        able = [name for name in killed if killed[name] < times and (workers or name == "server")]
        if not able:
            continue
        victim = min(able, key=lambda each: killed[each])
        with suppress(psutil.Error, ProcessLookupError, FileNotFoundError):
            if victim == "server":
                os.kill(json.loads((db.settings.data_dir / "log" / "server.json").read_text())["pid"], signal.SIGKILL)
            else:
                dice.choice(workers).kill()
            killed[victim] += 1
    process.wait(60)
    return killed


def workers_of(driver: psutil.Process) -> list[psutil.Process]:
    """Its Python workers: children of Spark's daemon for them. One that ends meanwhile is none, and hides no other."""
    parents: dict[psutil.Process, int] = {}
    with suppress(psutil.Error):
        for each in driver.children(recursive=True):
            with suppress(psutil.Error):
                if "pyspark.daemon" in " ".join(each.cmdline()):
                    parents[each] = each.ppid()
    daemons = {each.pid for each in parents}
    return [each for each, parent in parents.items() if parent in daemons]


@pytest.fixture(scope="module")
def db(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    with millrace.testing.deployment(tmp_path_factory.mktemp("operate") / "data") as made:
        yield made


def places(db: Deployment, folder: Path, kafka: str) -> dict[str, Topic]:
    """Makes the sinks' collections anew, and topics."""
    for name in ("windows", "distinct", "distinct_late"):
        if name in db.collections():
            db.drop_collection(name)
    fields = {
        each.name: "string" if each.type == pa.utf8() else "bool" if each.type == pa.bool_() else "int64"
        for each in SCHEMA
    }
    window = {"window_start": "int64", "window_end": "int64", "n": "int64", "total": "int64"}
    db.create_collection("windows", {"k": "string"} | window, key=("k", "window_start"), vchannels=2)
    db.create_collection("distinct", fields, key=("k", "v", "t"), vchannels=2)
    late = {"late_by": "int64", "window_start": "int64?", "reason": "string"}
    db.create_collection("distinct_late", fields | late, key=("k", "v", "t"))
    return {name: Topic(kafka, None, f"{folder.name}-{name}") for name, kind in SINKS.items() if kind == "kafka"}


def in_sink(db: Deployment, folder: Path, topics: dict[str, Topic], name: str) -> Counter[tuple[Any, ...]]:
    """What the sink of an operator has, as its reader sees it."""
    if SINKS[name] == "kafka":
        values = [json.loads(each.value()) for each in topics[name].first_of_each()]
        return Counter(tuple(sorted(each.items())) for each in values)
    if SINKS[name] == "collection":
        return counted(db.collection(name).read())
    return counted(table_at(str(folder / f"{name}_sink")).dataset().to_table())


def micro_batches(place: Path) -> list[pa.Table]:
    """The rows of each micro-batch of the query at `place`, all files among them.

    One is of two files where the driver was killed when Spark had noted the next file and no batch with it.
    """
    logs = sorted((place / "offsets").glob("[0-9]*"), key=lambda each: int(each.name))
    ends = [json.loads(each.read_text().splitlines()[-1])["logOffset"] for each in logs]
    assert ends[-1] == BATCHES - 1
    return [
        pa.concat_tables([rows(number) for number in range(before + 1, end + 1)])
        for before, end in pairwise([-1, *ends])
    ]


@pytest.mark.parametrize("seed", [1, 2])
def test_every_operator_across_kills_of_driver_workers_and_log_server(
    db: Deployment, tmp_path: Path, seed: int
) -> None:
    dice = random.Random(seed)
    kafka = running_brokers.kafka().address
    topics = places(db, tmp_path, kafka)
    (tmp_path / "input").mkdir()
    for number in range(BATCHES):
        path = tmp_path / "input" / f"{number}.parquet"
        pq.write_table(rows(number), path)
        os.utime(path, (1_700_000_000 + number, 1_700_000_000 + number))
    most = len(OPERATORS) * BATCHES
    points = ["keyed.committed", "into.operated", "sink.sent"]
    for point in points:
        process = begin(tmp_path, db, kafka, f"{point}@{dice.randrange(1, most // 5)}")
        children: list[psutil.Process] = []

        def ended(process: subprocess.Popen[bytes] = process, children: list[psutil.Process] = children) -> bool:
            if process.poll() is None:
                children[:] = psutil.Process(process.pid).children(recursive=True)
            return process.poll() is not None

        assert poll_until(ended, Deadline.after(240), interval=0.2)
        assert process.returncode == -signal.SIGKILL, (tmp_path / "said.log").read_text()[-3000:]
        _, alive = psutil.wait_procs(children, timeout=30)  # Spark's JVM ends when its driver is gone
        for each in alive:
            each.kill()
    process = begin(tmp_path, db, kafka)
    killed = kill_others(process, db, dice, 3)
    said = (tmp_path / "said.log").read_text()[-3000:]
    assert min(killed.values()) > 0, (killed, process.returncode, said)
    if (
        process.returncode
    ):  # more attempts of one task than Spark makes, or no server in time: whoever supervises starts it anew
        assert begin(tmp_path, db, kafka).wait(300) == 0, (tmp_path / "said.log").read_text()[-3000:]
    db.settle()
    for name, operator in OPERATORS.items():
        run = Run(operator, SCHEMA, DELAY)
        steps = [run.batch(each) for each in micro_batches(tmp_path / "checkpoints" / name)]
        assert sum(step.counts.late for step in steps) > 3
        stream = name_in(sink_folder(tmp_path / "checkpoints" / name), "keyed-stream.json")
        table = KeyedTable(str(tmp_path / name), operator, SCHEMA, placement=f"spark/{SHARDS}", stream=stream)
        wanted = counted(pa.concat_tables([step.output for step in steps]))
        assert wanted, name
        assert counted(table.answers()) == wanted, name
        late = counted(pa.concat_tables([step.late for step in steps]))
        assert counted(table.late()) == late, name
        assert in_sink(db, tmp_path, topics, name) == wanted, f"{name}: what its {SINKS[name]} sink has"
        if name == "distinct":
            assert counted(db.collection("distinct_late").read()) == late
