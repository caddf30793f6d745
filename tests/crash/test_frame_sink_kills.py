"""Streams under Spark into functions and Delta tables, their driver killed in each.

What was chosen of a repeated micro-batch holds.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from millrace.base.failpoint import VARIABLE
from millrace.storage.table import table_at
from tests.crash import frame_sinks_process
from tests.crash.frame_sinks_process import BATCHES, ROWS, SINKS

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

KILLS = [
    "sink.done@2",  # at most once: its second batch is noted, and the function not called
    "sink.sent@1",  # its third: the function was called, and Spark has not noted it
    "sink.sent@3",  # it has one left; of the next sink the second batch
    "sink.sent@5",  # that one has three left, for its second comes again
    "sink.sent@5",
    "sink.sent@5",
]


def run(folder: Path, failpoint: str = "") -> int:
    paths = os.pathsep.join([os.path.abspath("include"), os.getcwd(), os.environ.get("PYTHONPATH", "")])
    env = os.environ | {VARIABLE: failpoint, "PYTHONPATH": paths}
    command = [sys.executable, frame_sinks_process.__file__, str(folder)]
    children: list[psutil.Process] = []
    with (folder / "said.log").open("ab") as said, subprocess.Popen(command, env=env, stdout=said, stderr=said) as one:
        while one.poll() is None:
            children = psutil.Process(one.pid).children(recursive=True) or children
            try:
                one.wait(0.5)
            except subprocess.TimeoutExpired:
                continue
    _, alive = psutil.wait_procs(children, timeout=30)  # Spark's JVM ends when its driver is gone
    for each in alive:
        each.kill()
    return one.returncode


def found(folder: Path, name: str) -> Counter[int]:
    into = folder / name.replace(", ", "_").replace(" ", "_") / "into"
    if name.startswith("Delta"):
        return Counter(table_at(str(into)).dataset().to_table()["id"].to_pylist())
    return Counter(number for path in into.glob("*.json") for number in json.loads(path.read_text()))


def test_functions_and_delta_tables_keep_what_was_chosen_across_kills_of_the_driver(tmp_path: Path) -> None:
    (tmp_path / "input").mkdir()
    batches = [range(each * ROWS, (each + 1) * ROWS) for each in range(BATCHES)]
    for number, rows in enumerate(batches):
        path = tmp_path / "input" / f"{number}.parquet"
        pq.write_table(pa.table({"id": list(rows)}), path)
        os.utime(path, (1_700_000_000 + number, 1_700_000_000 + number))
    for failpoint in KILLS:
        assert run(tmp_path, failpoint) == -signal.SIGKILL, (tmp_path / "said.log").read_text()[-3000:]
    assert run(tmp_path) == 0, (tmp_path / "said.log").read_text()[-3000:]
    every = Counter(number for rows in batches for number in rows)
    assert {name: found(tmp_path, name) for name in SINKS} == {
        "function, at most once": every - Counter(batches[1]),
        "function, at least once": every + Counter(batches[1]),
        "function, by number": every,
        "Delta, exactly once": every,
        "Delta, at least once": every + Counter(batches[1]),
    }
