"""Operators under Spark with a Delta sink behind each, killed at seeded moments: the driver at its commits and between them, Python workers at any time."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from millrace.base.deadline import Deadline, until
from millrace.base.failpoint import VARIABLE
from millrace.storage.table import table_at
from millrace.streams.keyed.in_process import Run
from millrace.streams.keyed.store import KeyedTable
from millrace.streams.sinks.frames import sink_folder
from millrace.streams.sinks.sink import name_in
from tests.crash import operate_process
from tests.crash.operate_process import BATCHES, DELAY, OPERATORS, SCHEMA, SHARDS, rows

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def counted(found: pa.Table) -> Counter[tuple[Any, ...]]:
    return Counter(tuple(sorted(row.items())) for row in found.to_pylist())


def begin(folder: Path, failpoint: str = "") -> subprocess.Popen[bytes]:
    paths = os.pathsep.join([os.path.abspath("include"), os.getcwd(), os.environ.get("PYTHONPATH", "")])
    env = os.environ | {VARIABLE: failpoint, "PYTHONPATH": paths}
    with (folder / "said.log").open("ab") as said:
        return subprocess.Popen(
            [sys.executable, operate_process.__file__, str(folder)], env=env, stdout=said, stderr=said
        )


def kill_workers(process: subprocess.Popen[bytes], dice: random.Random, times: int) -> int:
    """SIGKILL Python workers of its tasks, one now and then; how many were killed."""
    killed, end = 0, Deadline.after(300)
    driver = psutil.Process(process.pid)
    while process.poll() is None and end.left() > 0:
        time.sleep(dice.uniform(0.3, 1.5))  # the dice of the test, no wait for anything
        if killed == times:
            continue
        try:
            found = [each for each in driver.children(recursive=True) if "pyspark.daemon" in " ".join(each.cmdline())]
            workers = [each for each in found if each.ppid() in {other.pid for other in found}]
            if workers:
                dice.choice(workers).kill()
                killed += 1
        except psutil.Error:
            continue
    process.wait(60)
    return killed


@pytest.mark.parametrize("seed", [1, 2])
def test_every_operator_across_kills_of_driver_and_workers(tmp_path: Path, seed: int) -> None:
    dice = random.Random(seed)
    (tmp_path / "input").mkdir()
    for number in range(BATCHES):
        path = tmp_path / "input" / f"{number}.parquet"
        pq.write_table(rows(number), path)
        os.utime(path, (1_700_000_000 + number, 1_700_000_000 + number))
    most = len(OPERATORS) * BATCHES
    for point in (f"keyed.committed@{dice.randrange(1, most // 3)}", f"into.operated@{dice.randrange(1, most // 3)}"):
        process = begin(tmp_path, point)
        children: list[psutil.Process] = []

        def ended(process: subprocess.Popen[bytes] = process, children: list[psutil.Process] = children) -> bool:
            if process.poll() is None:
                children[:] = psutil.Process(process.pid).children(recursive=True)
            return process.poll() is not None

        assert until(ended, Deadline.after(240), every=0.2)
        assert process.returncode == -signal.SIGKILL, (tmp_path / "said.log").read_text()[-3000:]
        _, alive = psutil.wait_procs(children, timeout=30)  # Spark's JVM ends when its driver is gone
        for each in alive:
            each.kill()
    process = begin(tmp_path)
    assert kill_workers(process, dice, 3) > 0
    if process.returncode:  # more attempts of one task than Spark makes: whoever supervises starts it anew
        assert begin(tmp_path).wait(300) == 0, (tmp_path / "said.log").read_text()[-3000:]
    for name, operator in OPERATORS.items():
        run = Run(operator, SCHEMA, DELAY)
        steps = [run.batch(rows(each)) for each in range(BATCHES)]
        assert sum(step.counts.late for step in steps) > 3
        stream = name_in(sink_folder(tmp_path / "checkpoints" / name), "keyed-stream.json")
        table = KeyedTable(str(tmp_path / name), operator, SCHEMA, placement=f"spark/{SHARDS}", stream=stream)
        wanted = counted(pa.concat_tables([step.output for step in steps]))
        assert wanted, name
        assert counted(table.answers()) == wanted, name
        assert counted(table.late()) == counted(pa.concat_tables([step.late for step in steps])), name
        sink = table_at(str(tmp_path / f"{name}_sink")).dataset().to_table()
        assert counted(sink) == wanted, f"{name}: what its Delta sink has"
