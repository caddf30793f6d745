"""A worker ends when the supervisor that started it is killed, since nobody else would end it."""

from __future__ import annotations

import subprocess
import sys

import pytest

WORKER = """
import os, threading
from millrace.pipelines.worker.supervisor import SupervisorWatch
stop = threading.Event()
SupervisorWatch(os.getppid(), stop, patience={patience}).start()
print("up", flush=True)
stop.wait()
print("told", flush=True)
if {hangs}:
    threading.Event().wait()
"""
SUPERVISOR = """
import subprocess, sys
subprocess.run([sys.executable, "-c", sys.argv[1]], start_new_session=True)
"""


@pytest.mark.parametrize(("hangs", "patience"), [(False, 60.0), (True, 0.2)], ids=["ends", "hangs"])
def test_a_worker_ends_when_its_supervisor_is_killed(hangs: bool, patience: float) -> None:
    worker = WORKER.format(hangs=hangs, patience=patience)
    with subprocess.Popen([sys.executable, "-c", SUPERVISOR, worker], stdout=subprocess.PIPE, text=True) as supervisor:
        assert supervisor.stdout is not None
        assert supervisor.stdout.readline() == "up\n"
        supervisor.kill()
        # The worker holds the other end of this pipe: the text ends when it does.
        assert supervisor.stdout.read() == "told\n"
