"""A stream into a collection that is killed at each of its steps, and whose log server is.

The guarantee that was chosen holds.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

import millrace.testing
from millrace.base.deadline import Deadline, poll_until
from millrace.base.failpoint import VARIABLE
from millrace.testing import Deployment
from tests.crash import sink_process
from tests.crash.sink_process import ROWS

BATCHES = 4
POINTS = {
    "exactly once": ["sink.journaled", "sink.sent", "sink.done"],
    "at least once": ["sink.sent"],
    "at most once": ["sink.sent", "sink.done"],
}


@pytest.fixture(scope="module")
def db(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    with millrace.testing.deployment(tmp_path_factory.mktemp("kills") / "data") as made:
        yield made


class Stream:
    """The program and its folder."""

    def __init__(self, db: Deployment, folder: Path, guarantee: str) -> None:
        folder.mkdir()
        self.folder = folder
        self.db = db
        self.command = [
            sys.executable, sink_process.__file__, str(db.settings.data_dir), str(folder), guarantee, str(BATCHES)
        ]  # fmt: skip
        if "into" in db.collections():
            db.drop_collection("into")
        db.create_collection("into", {"id": "int64", "batch": "int64"}, key="id", vchannels=3)

    def begin(self, failpoint: str = "") -> subprocess.Popen[str]:
        paths = os.pathsep.join(["include", os.environ.get("PYTHONPATH", "")])
        env = os.environ | {VARIABLE: failpoint, "PYTHONPATH": paths, "MILLRACE_CACHE": str(self.db.settings.cache_dir)}
        return subprocess.Popen(self.command, env=env, stderr=subprocess.PIPE, text=True)

    def run(self, failpoint: str = "") -> int:
        with self.begin(failpoint) as process:
            _, said = process.communicate(timeout=60)
        assert process.returncode in (0, -9), said
        return process.returncode

    def committed(self) -> int:
        return int(json.loads((self.folder / "commits.json").read_text())["committed"])

    def found(self) -> Counter[int]:
        self.db.settle()
        return Counter(self.db.collection("into").read()["id"].to_pylist())


EVERY = list(range(BATCHES * ROWS))


@pytest.mark.parametrize(
    "point, visit",
    [
        pytest.param(point, visit, marks=[] if (point, visit) == ("sink.sent", 2) else pytest.mark.slow)
        for point in POINTS["exactly once"]
        for visit in (1, 2)
    ],
)
def test_exactly_once_across_a_kill_at_each_step(db: Deployment, tmp_path: Path, point: str, visit: int) -> None:
    stream = Stream(db, tmp_path / "stream", "exactly once")
    assert stream.run(f"{point}@{visit}") == -9
    assert stream.run(f"{point}@1") == -9, "and again where it goes on"
    assert stream.run() == 0
    assert stream.run() == 0, "with nothing left to do"
    assert stream.found() == Counter(EVERY)


@pytest.mark.slow
@pytest.mark.parametrize("point", POINTS["at least once"])
def test_at_least_once_leaves_nothing_out(db: Deployment, tmp_path: Path, point: str) -> None:
    stream = Stream(db, tmp_path / "stream", "at least once")
    assert stream.run(f"{point}@2") == -9
    assert stream.run() == 0
    found = stream.found()
    assert sorted(found) == EVERY
    assert {number for number, times in found.items() if times > 1} == set(range(ROWS, 2 * ROWS)), "its repeated batch"


@pytest.mark.slow
@pytest.mark.parametrize("point", POINTS["at most once"])
def test_at_most_once_repeats_nothing(db: Deployment, tmp_path: Path, point: str) -> None:
    stream = Stream(db, tmp_path / "stream", "at most once")
    assert stream.run(f"{point}@2") == -9
    assert stream.run() == 0
    lost = set(range(ROWS, 2 * ROWS)) if point == "sink.done" else set()
    assert stream.found() == Counter(set(EVERY) - lost)


@pytest.mark.slow
@pytest.mark.parametrize("point", ["sink.journaled", "sink.sent"])
def test_exactly_once_across_a_kill_of_the_log_server(db: Deployment, tmp_path: Path, point: str) -> None:
    stream = Stream(db, tmp_path / "stream", "exactly once")
    with stream.begin(f"{point}@2~") as process:
        state = psutil.Process(process.pid)
        assert poll_until(lambda: state.status() == psutil.STATUS_STOPPED, Deadline.after(60), interval=0.02)
        server = json.loads((db.settings.data_dir / "log" / "server.json").read_text())["pid"]
        os.kill(server, signal.SIGKILL)
        os.kill(process.pid, signal.SIGCONT)
        _, said = process.communicate(timeout=60)
    if process.returncode:  # it gave up before a server was there again: its supervisor starts it anew
        assert "LogUnavailable" in said or "AppendUnresolved" in said, said
        assert stream.run() == 0
    assert stream.found() == Counter(EVERY)
