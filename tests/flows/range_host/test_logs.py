"""A worker's log: JSON with its pipeline and run, rotated and forgotten as configured.

And what it may take of its machine.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from millrace.base.correlation import REQUEST_ID
from millrace.base.metrics import Metrics
from millrace.flows.declare.configuration import Log
from millrace.flows.declare.worker import Resources
from millrace.flows.range_host.__main__ import _served
from millrace.flows.range_host.limits import over_memory, taken_by
from millrace.flows.range_host.logs import FILE, begin_log, forget


@pytest.fixture(autouse=True)
def root_as_it_was() -> object:
    root = logging.getLogger()
    before = (root.level, list(root.handlers))
    yield
    root.setLevel(before[0])
    for handler in [each for each in root.handlers if each not in before[1]]:
        root.removeHandler(handler)
        handler.close()


def test_a_line_is_json_that_says_whose_it_is(tmp_path: Path) -> None:
    begin_log(tmp_path, Log(), flow="flights", run="r1")
    logging.getLogger("a.b").info("två %d\nlines", 2)
    logging.getLogger("a.b").debug("not said")
    try:
        raise ValueError("no")
    except ValueError:
        logging.getLogger("a.b").exception("failed")
    lines = [json.loads(line) for line in (tmp_path / FILE).read_text(encoding="utf-8").splitlines()]
    assert [(line["pipeline"], line["run"], line["level"], line["message"]) for line in lines] == [
        ("flights", "r1", "info", "två 2\nlines"),
        ("flights", "r1", "error", "failed"),
    ]
    assert "ValueError: no" in lines[1]["error"]


def test_files_are_rotated_so_many_kept_and_old_ones_forgotten(tmp_path: Path) -> None:
    handler = begin_log(tmp_path, Log(maxSize=1, maxBackups=2, developMode=True), flow="p", run="r")
    for _ in range(50):
        logging.getLogger("x").debug("y" * 100_000)
    handler.close()
    files = sorted(tmp_path.iterdir())
    assert [file.name for file in files] == [FILE, f"{FILE}.1", f"{FILE}.2"]
    assert all(file.stat().st_size <= 1_000_000 for file in files)
    os.utime(files[2], (0, 0))
    forget(tmp_path / FILE, days=0)
    assert files[2].exists()
    forget(tmp_path / FILE, days=100)
    assert [file.exists() for file in files] == [True, True, False]


def test_what_is_too_old_goes_with_a_rotation_too_and_none_is_kept_where_none_is_to_be(tmp_path: Path) -> None:
    handler = begin_log(tmp_path, Log(maxSize=1, maxBackups=0, maxAge=7), flow="p", run="r")
    old = tmp_path / f"{FILE}.9"  # of a configuration that kept more
    old.write_text("")
    os.utime(old, (0, 0))
    for _ in range(25):
        logging.getLogger("x").info("y" * 100_000)
    handler.close()
    (left,) = tmp_path.iterdir()
    assert left.stat().st_size <= 1_000_000


def test_lines_of_one_request_bear_its_id(tmp_path: Path) -> None:
    begin_log(tmp_path, Log(), flow="", run="r")
    before = REQUEST_ID.set("abc")
    logging.getLogger("a").info("within")
    REQUEST_ID.reset(before)
    logging.getLogger("a").info("outside")
    lines = [json.loads(line) for line in (tmp_path / FILE).read_text(encoding="utf-8").splitlines()]
    assert [line.get("request") for line in lines] == ["abc", None]


def test_a_port_that_another_worker_has_ends_no_worker() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert _served(Metrics(), taken.getsockname()[1]) is None


def test_a_worker_keeps_to_its_cores_and_says_when_it_takes_too_much_memory() -> None:
    code = (
        "import os; from millrace.flows.declare.worker import Resources; from millrace.flows.range_host.limits"
        " import hold_to;"
        "hold_to(Resources(cpus=0.5)); print(len(os.sched_getaffinity(0)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "1"
    assert over_memory(Resources(memory_mib=128), 128 << 20) == ""
    assert "128" in over_memory(Resources(memory_mib=128), (128 << 20) + 1)


def test_what_a_worker_takes_is_its_own_and_that_of_the_processes_below_it() -> None:
    work = "kept = bytearray(b'x') * (96 << 20)\nfor _ in range(3_000_000): pass\nprint('up', flush=True)\ninput()"
    code = (
        "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]], check=True); print('ended',"
        " flush=True); input()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, work], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as worker:
        assert worker.stdin is not None
        assert worker.stdout is not None
        process = psutil.Process(worker.pid)
        assert worker.stdout.readline() == "up\n"
        alone, taken = taken_by(process, below=False), taken_by(process, below=True)
        worker.stdin.write("\n")
        worker.stdin.flush()
        assert worker.stdout.readline() == "ended\n"
        ended = taken_by(process, below=True)
        worker.communicate("\n")
    assert alone.memory_bytes < 64 << 20 < taken.memory_bytes - alone.memory_bytes
    assert taken.cpu_seconds > alone.cpu_seconds
    assert taken.jvm_bytes == 0
    assert ended.cpu_seconds >= taken.cpu_seconds - 0.02, "what has ended counts"
    assert ended.memory_bytes < 64 << 20


def test_memory_that_forked_processes_share_counts_once() -> None:
    code = (
        "import os, signal; kept = bytearray(b'x') * (64 << 20); child = os.fork(); child or signal.pause();"
        "print('up', flush=True); input(); os.kill(child, signal.SIGKILL); os.wait()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as worker:
        assert worker.stdout is not None
        assert worker.stdout.readline() == "up\n"
        process = psutil.Process(worker.pid)
        taken, [child] = taken_by(process, below=True), process.children()
        resident = child.memory_info().rss
        worker.communicate("\n")
    assert resident > 64 << 20
    assert 64 << 20 < taken.memory_bytes < 2 * resident
