"""One at a time by a lock file: others wait until their deadline, and no longer; who dies lets go."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from millrace.base.deadline import Deadline
from millrace.base.errors import DeadlineExceeded, LogBusy
from millrace.base.file_lock import held

HOLDER = """
import sys, time
from pathlib import Path
from millrace.base.deadline import Deadline
from millrace.base.file_lock import held
with held(Path(sys.argv[1]), deadline=Deadline.after(10)):
    print("held", flush=True)
    time.sleep(60)
"""


def test_who_waits_is_told_at_its_deadline_as_it_wants_it_told(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with held(path, deadline=Deadline.after(0)):
        with pytest.raises(LogBusy, match="another process"), held(path, deadline=Deadline.after(0.05)):
            pytest.fail("two had it")
        with (
            pytest.raises(DeadlineExceeded, match="mine"),
            held(path, deadline=Deadline.after(0), busy=DeadlineExceeded("mine")),
        ):
            pytest.fail("two had it")
    with held(path, deadline=Deadline.after(0)):
        pass


def test_who_is_killed_lets_go(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(path)],
        env={"PYTHONPATH": ":".join(sys.path)},
        stdout=subprocess.PIPE,
    )
    assert holder.stdout is not None
    assert holder.stdout.readline() == b"held\n"
    with pytest.raises(LogBusy), held(path, deadline=Deadline.after(0)):
        pytest.fail("two had it")
    holder.send_signal(signal.SIGKILL)
    with held(path, deadline=Deadline.after(20)):
        pass
    holder.communicate(timeout=20)
