"""A worker that lives and does not speak, or that one document holds, is ended and started again."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from millrace.base.settings import Settings
from millrace.flows.hosts import Pulse
from millrace.flows.range_host.in_hand import LATE_SECONDS
from millrace.flows.range_host.observed import run_id
from millrace.flows.range_host.supervision import last_pulse
from millrace.flows.status import ProcessRecord, records_of, supervised_folder
from tests.pipelines.api.test_routes import DECLARED
from tests.waiting import until

SPEAKS = """#!{python}
import os, sys, threading, time
from pathlib import Path
from millrace.base.settings import Settings
from millrace.flows.range_host.status import pulse_path
from millrace.runtime.child_processes import SupervisorWatch
stop = threading.Event()
SupervisorWatch(os.getppid(), stop, patience=60.0, pulse=pulse_path(Settings.load(), "p")).start()
stop.wait()
"""
HOLDS = """#!{python}
import os, sys, threading
from pathlib import Path
sys.path[:0] = {path!r}
from millrace.base.settings import Settings
from millrace.flows.range_host.status import pulse_path
from millrace.runtime.child_processes import SupervisorWatch
from millrace.flows.range_host.task import Task
from tests.flows.samples.test_trying import HOSTILE, _pipeline, _records
step, document, _ = HOSTILE["a pattern of the document's own"]
settings, stop, mild = Settings.load(), threading.Event(), dict(l=[], r="")
SupervisorWatch(os.getppid(), stop, patience=60.0, pulse=pulse_path(settings, "p")).start()
task = Task(settings, _pipeline(step), "in", 0, open_rows=None)
made = task.process_json(_records(mild, {{**document, "l": document["l"] * 4}}, mild))
failures = [(each.record.offset, each.step, each.kind) for each in made.failures]
told = [each.record.offset for each in made.actions], failures
Path(sys.argv[0] + ".told").write_text(str(told))
stop.wait()
"""
SUPERVISES = """
import sys
from pathlib import Path
from millrace.base.settings import Settings
from millrace.flows.hosts import WorkerHost
from millrace.flows.supervisor import supervise
from millrace.runtime.process_setup import stop_on_signals
sys.executable = sys.argv[1]
host = WorkerHost(Settings.load(), Path(sys.argv[2]), silent_seconds=float(sys.argv[3]))
sys.exit(supervise(Settings.load(), host, stop_on_signals()).code != 0)
"""


def _record(settings: Settings) -> ProcessRecord:
    return records_of(supervised_folder(settings, run_id("p"))).get(0, ProcessRecord())


@pytest.mark.slow
def test_a_worker_that_does_not_speak_is_ended_and_started_again_so_many_times(tmp_path: Path) -> None:
    settings = Settings(data_dir=tmp_path / "data")
    worker, declared = tmp_path / "worker", tmp_path / "p.json"
    worker.write_text(SPEAKS.format(python=sys.executable))
    worker.chmod(0o700)
    declared.write_text(json.dumps({"id": "p", **DECLARED, "recovery": {"interval_minutes": 0.01, "attempts": 1}}))
    command = [sys.executable, "-c", SUPERVISES, str(worker), str(declared), "4"]
    with subprocess.Popen(command, env={**os.environ, **settings.environment()}) as supervisor:
        seen: list[int] = []
        try:
            for ends in (1, 2):
                until(lambda: last_pulse(settings, "p") > time.time() - 1, "it speaks")
                (child,) = psutil.Process(supervisor.pid).children()
                assert child.pid not in seen
                seen.append(child.pid)
                threading.Event().wait(5)  # more than it may be silent for
                assert _record(settings).ends == ends - 1
                child.suspend()
                until(lambda ends=ends: _record(settings).ends == ends, "it is ended", seconds=30)
                assert f"it was silent for 4 s (process {child.pid})" in _record(settings).cause
                assert not child.is_running()
            assert supervisor.wait(30) == 1, "it gives up"
        finally:
            supervisor.kill()


@pytest.mark.parametrize(
    ("looks", "silent"),
    [([(0.2, 1)] * 5, 1.0), ([(0.2, 1), (60.0, 1)], 1.2), ([(0.5, 1), (0.5, 2), (0.3, 2)], 0.3)],
    ids=["by looks", "not where nobody looked", "since it spoke"],
)
def test_for_how_long_it_has_not_spoken(tmp_path: Path, looks: list[tuple[float, int]], silent: float) -> None:
    path, now = tmp_path / "pulse", 0.0
    path.touch()
    os.utime(path, ns=(1, 1))
    pulse = Pulse(path, lambda: now)
    for passed, touched in looks:
        now += passed
        os.utime(path, ns=(touched, touched))
        found = pulse.silent()
    assert found == pytest.approx(silent)


@pytest.mark.slow
def test_steps_that_let_no_thread_run_are_ended_and_the_next_worker_does_without_the_document(tmp_path: Path) -> None:
    settings = Settings(data_dir=tmp_path / "data")
    worker, declared, told = tmp_path / "worker", tmp_path / "p.json", tmp_path / "worker.told"
    worker.write_text(HOLDS.format(python=sys.executable, path=[path for path in sys.path if path]))
    worker.chmod(0o700)
    declared.write_text(json.dumps({"id": "p", **DECLARED, "recovery": {"interval_minutes": 0.01, "attempts": 1}}))
    begun = time.monotonic()
    command = [sys.executable, "-c", SUPERVISES, str(worker), str(declared), "30"]
    with subprocess.Popen(command, env={**os.environ, **settings.environment()}) as supervisor:
        try:
            until(lambda: _record(settings).ends == 1, "it is ended", seconds=90)
            assert time.monotonic() - begun > LATE_SECONDS
            assert _record(settings).cause.startswith("in-0 has had the record at offset 1 in hand for 2")
            until(told.exists, "the others go on", seconds=90)
            until(lambda: told.read_text() == "([0, 2], [(1, '0.compute', 'TOO_MUCH_WORK')])", "all of them")
            assert _record(settings).ends == 1
        finally:
            supervisor.terminate()
            supervisor.wait(60)
