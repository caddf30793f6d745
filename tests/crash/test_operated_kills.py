"""An operator with sinks behind it that is killed between any two of its commits, and whose log server is.

Content equal to one run that nobody disturbed.
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
from typing import Any

import psutil
import pytest

import millrace.testing
from millrace.base.deadline import Deadline, poll_until
from millrace.base.failpoint import VARIABLE
from millrace.streams.keyed.in_process import Run
from millrace.testing import Deployment
from tests.crash import operated_process
from tests.crash.operated_process import BATCHES, DELAY, OPERATOR, SCHEMA, rows

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def db(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    with millrace.testing.deployment(tmp_path_factory.mktemp("operated") / "data") as made:
        yield made


def wanted() -> tuple[Counter[tuple[Any, ...]], Counter[tuple[Any, ...]]]:
    """Answers and late rows of a run in this process."""
    run = Run(OPERATOR, SCHEMA, DELAY)
    steps = [run.batch(rows(each)) for each in range(BATCHES)]
    assert sum(step.counts.came for step in steps) == BATCHES * 40
    late = [row for step in steps for row in step.late.to_pylist()]
    assert len(late) > 10
    return counted([row for step in steps for row in step.output.to_pylist()]), counted(late)


def counted(found: list[dict[str, Any]]) -> Counter[tuple[Any, ...]]:
    return Counter(tuple(sorted(row.items())) for row in found)


class Stream:
    def __init__(self, db: Deployment, folder: Path) -> None:
        folder.mkdir()
        self.folder, self.db = folder, db
        for name in ("answers", "late"):
            if name in db.collections():
                db.drop_collection(name)
        window = {"window_start": "int64", "window_end": "int64"}
        db.create_collection(
            "answers", {"k": "string", **window, "n": "int64", "total": "int64"}, key=("k", "window_start")
        )
        late = {"id": "int64", "k": "string", "t": "int64", "v": "int64", "late_by": "int64", "reason": "string"}
        db.create_collection("late", late | {"window_start": "int64"}, key="id", vchannels=2)

    def begin(self, failpoint: str = "") -> subprocess.Popen[str]:
        paths = os.pathsep.join(["include", ".", os.environ.get("PYTHONPATH", "")])
        env = os.environ | {VARIABLE: failpoint, "PYTHONPATH": paths, "MILLRACE_CACHE": str(self.db.settings.cache_dir)}
        command = [sys.executable, operated_process.__file__, str(self.db.settings.data_dir), str(self.folder)]
        return subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True)

    def run(self, failpoint: str = "") -> int:
        with self.begin(failpoint) as process:
            _, said = process.communicate(timeout=200)
        assert process.returncode in (0, -9), said
        return process.returncode

    def check(self) -> None:
        self.db.settle()
        answers, late = wanted()
        assert counted(self.db.collection("answers").read().to_pylist()) == answers
        assert counted(self.db.collection("late").read().to_pylist()) == late


POINTS = [
    "keyed.written",
    "keyed.committed",
    "into.operated",
    "sink.journaled",
    "sink.sent",
    "into.answered",
    "sink.done",
]


@pytest.mark.parametrize(
    "first, second",
    [
        ("into.operated@2", "into.answered@3"),
        *(
            pytest.param(f"{point}@{visit}", f"{other}@1", marks=pytest.mark.slow)
            for point, other in zip(POINTS, [*POINTS[3:], *POINTS[:3]], strict=True)
            for visit in (2, 4)
        ),
    ],
)
def test_content_is_the_same_across_kills_between_any_two_commits(
    db: Deployment, tmp_path: Path, first: str, second: str
) -> None:
    stream = Stream(db, tmp_path / "stream")
    assert stream.run(first) == -9
    assert stream.run(second) == -9, "and again where it goes on"
    assert stream.run() == 0
    stream.check()


@pytest.mark.slow
def test_a_run_with_nothing_left_to_do_changes_nothing(db: Deployment, tmp_path: Path) -> None:
    stream = Stream(db, tmp_path / "stream")
    for _ in range(2):
        assert stream.run() == 0
        stream.check()


@pytest.mark.slow
@pytest.mark.parametrize("point", ["keyed.committed@2~", "into.answered@3~"])
def test_content_is_the_same_across_a_kill_of_the_log_server(db: Deployment, tmp_path: Path, point: str) -> None:
    stream = Stream(db, tmp_path / "stream")
    with stream.begin(point) as process:
        state = psutil.Process(process.pid)
        assert poll_until(lambda: state.status() == psutil.STATUS_STOPPED, Deadline.after(60), interval=0.02)
        server = json.loads((db.settings.data_dir / "log" / "server.json").read_text())["pid"]
        os.kill(server, signal.SIGKILL)
        os.kill(process.pid, signal.SIGCONT)
        _, said = process.communicate(timeout=200)
    if process.returncode:  # it gave up before a server was there again: its supervisor starts it anew
        assert "LogUnavailable" in said or "AppendUnresolved" in said, said
        assert stream.run() == 0
    stream.check()
