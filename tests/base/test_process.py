"""Who a process is, whatever became of its id."""

from __future__ import annotations

import subprocess
import sys
import time

import psutil
import pytest

from millrace.base.process import all_processes, current_process, find_process, is_alive, is_writer_alive
from tests.waiting import until

FIRST_THREAD_ENDS = (
    "import ctypes, threading, time\n"
    "threading.Thread(target=lambda: (print('on', flush=True), time.sleep(600))).start()\n"
    "ctypes.CDLL(None).pthread_exit(None)\n"
)


def test_a_process_is_its_id_and_its_start_as_psutil_says_them() -> None:
    me = current_process()
    process = psutil.Process()
    assert (me.pid, me.parent) == (process.pid, process.ppid())
    assert me.seconds_since_boot == pytest.approx(process.create_time() - psutil.boot_time(), abs=1.5)
    assert me.alive()
    assert all_processes()[me.pid] == me


def test_another_start_or_another_boot_under_the_same_id_is_another_process() -> None:
    me = current_process()
    boot, _, started = me.start.partition(":")
    assert is_alive(me.pid, me.start)
    assert not me._replace(start_ticks=me.start_ticks - 1).alive()
    for start in (f"{boot}:{int(started) - 1}", f"another:{started}", None):
        assert not is_alive(me.pid, start)


def test_what_was_written_before_a_process_began_is_another_ones() -> None:
    before = time.time() - 5.0
    with subprocess.Popen(["sleep", "600"]) as child:
        assert is_writer_alive(child.pid, time.time() + 1.0)
        assert not is_writer_alive(child.pid, before)
        child.kill()
    assert not is_writer_alive(child.pid, time.time() + 1.0)


def test_a_zombie_is_gone_and_one_whose_first_thread_ended_is_not() -> None:
    with subprocess.Popen(["sleep", "600"]) as child:
        child.kill()
        until(lambda: find_process(child.pid) is None, "killed, and not waited for yet")
    with subprocess.Popen([sys.executable, "-c", FIRST_THREAD_ENDS], stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        until(lambda: psutil.Process(child.pid).status() == psutil.STATUS_ZOMBIE, "its first thread ended")
        assert find_process(child.pid) is not None, "its other thread works on"
        child.kill()
