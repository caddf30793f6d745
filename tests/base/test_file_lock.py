"""One at a time by a lock file: others wait until their deadline, and no longer; who dies lets go."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from millrace.base.deadline import Deadline
from millrace.base.errors import DeadlineExceeded, LogBusy
from millrace.base.file_lock import (
    PROCESSES,
    LockedFile,
    NamedLocks,
    ProcessRegistration,
    exclusive_lock,
    is_locked,
    is_report_live,
    read_locked_file,
)

HOLDER = """
import sys, time
from pathlib import Path
from millrace.base.deadline import Deadline
from millrace.base.file_lock import PROCESSES, LockedFile, ProcessRegistration
from millrace.base.file_lock import exclusive_lock, is_locked, is_report_live, read_locked_file
with exclusive_lock(Path(sys.argv[1]), deadline=Deadline.after(10)):
    print("held", flush=True)
    time.sleep(60)
"""


def test_who_waits_is_told_at_its_deadline_as_it_wants_it_told(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with exclusive_lock(path, deadline=Deadline.after(0)):
        with pytest.raises(LogBusy, match="another process"), exclusive_lock(path, deadline=Deadline.after(0.05)):
            pytest.fail("two had it")
        with (
            pytest.raises(DeadlineExceeded, match="mine"),
            exclusive_lock(path, deadline=Deadline.after(0), busy=DeadlineExceeded("mine")),
        ):
            pytest.fail("two had it")
    with exclusive_lock(path, deadline=Deadline.after(0)):
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
    with pytest.raises(LogBusy), exclusive_lock(path, deadline=Deadline.after(0)):
        pytest.fail("two had it")
    holder.send_signal(signal.SIGKILL)
    with exclusive_lock(path, deadline=Deadline.after(20)):
        pass
    holder.communicate(timeout=20)


def test_a_held_file_is_held_until_it_is_closed_and_its_copy_never(tmp_path: Path) -> None:
    path, copy = tmp_path / "record", tmp_path / "copy"
    published = LockedFile(path, {"a": 1})
    shutil.copy2(path, copy)
    assert read_locked_file(path) == (b'{"a": 1}\n', True)
    assert read_locked_file(copy) == (b'{"a": 1}\n', False)
    assert path.stat().st_mode & 0o777 == 0o600
    replaced, former = LockedFile(path, {"a": 2}), published
    former.close()
    assert read_locked_file(path) == (b'{"a": 2}\n', True), "a record that is replaced stays held"
    replaced.close()
    replaced.close()
    assert not read_locked_file(path)[1]
    assert not is_locked(tmp_path / "absent")


def test_a_held_file_that_nobody_refers_to_is_let_go(tmp_path: Path) -> None:
    published = LockedFile(tmp_path / "record", {})
    assert is_locked(tmp_path / "record")
    del published
    assert not is_locked(tmp_path / "record")


REPORTER = """
import sys
from pathlib import Path
from millrace.base.file_lock import ProcessRegistration
reporter = ProcessRegistration(Path(sys.argv[1]))
print("reports", flush=True)
sys.stdin.readline()
"""


def test_reports_count_while_their_process_lives_and_only_in_its_own_folder(tmp_path: Path) -> None:
    run, copy = tmp_path / "run", tmp_path / "copy"
    now = time.time() + 1.0
    with subprocess.Popen(
        [sys.executable, "-c", REPORTER, str(run)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "reports\n"
        shutil.copytree(run, copy)
        assert is_report_live(run, child.pid, now)
        assert not is_report_live(copy, child.pid, now)
        assert not is_report_live(run, child.pid, time.time() - 3600.0), "an older process had its id"
        assert not is_report_live(run, os.getpid(), now), "this one does not report there"
        child.kill()
    assert not is_report_live(run, child.pid, now)
    first, second = ProcessRegistration(run), ProcessRegistration(run)
    assert not list((run / PROCESSES).glob(f"{child.pid}.*")), "what a killed process left is removed"
    del first
    assert is_report_live(run, os.getpid(), now)
    del second
    assert not is_report_live(run, os.getpid(), now)
    assert not list((run / PROCESSES).iterdir())


def test_many_names_are_locked_by_few_open_files(tmp_path: Path) -> None:
    names = [f"group {number}" for number in range(2_000)]
    before = len(os.listdir("/proc/self/fd"))
    one, other = NamedLocks(tmp_path / "locks"), NamedLocks(tmp_path / "locks")
    assert all(one.acquire(name) for name in names)
    assert len(os.listdir("/proc/self/fd")) <= before + 2 * NamedLocks.FILES
    assert not one.acquire(names[7]), "nobody has a lock twice"
    assert names[7] in one
    assert not any(other.acquire(name) for name in names), "another object of the same process has none of them"
    other.release(names[7])
    assert not other.acquire(names[7]), "nobody releases another's"
    one.release(names[7])
    assert other.acquire(names[7])
    assert not one.acquire(names[7])
    one.close()
    one.close()
    assert names[0] not in one
    with pytest.raises(ValueError, match="closed"):
        one.acquire("new")
    assert other.acquire(names[0]), "a closed one has none"
    other.close()


def test_the_locks_of_a_process_that_is_killed_are_free(tmp_path: Path) -> None:
    program = f"""
import time
from pathlib import Path
from millrace.base.file_lock import NamedLocks
locks = NamedLocks(Path({str(tmp_path / "locks")!r}))
assert locks.acquire("a") and locks.acquire("b")
print("held", flush=True)
time.sleep(60)
"""
    holder = subprocess.Popen(
        [sys.executable, "-c", program], env={"PYTHONPATH": ":".join(sys.path)}, stdout=subprocess.PIPE
    )
    assert holder.stdout is not None
    assert holder.stdout.readline() == b"held\n"
    here = NamedLocks(tmp_path / "locks")
    try:
        assert not here.acquire("a")
        assert here.acquire("c")
        holder.kill()
        holder.wait(timeout=20)
        assert here.acquire("a")
        assert here.acquire("b")
    finally:
        holder.kill()
        holder.wait(timeout=20)
        holder.stdout.close()
        here.close()
