"""kill -9 in the middle of the work.

The system heals by itself, every row is there once, and nothing orphaned is left.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from millrace.base.process import ProcessInfo, all_processes
from millrace.installation.system import STREAMING_DAG
from millrace.runtime.launch.launcher import Launcher, RunStatus
from tests.e2e.flown import START, days, derived, fly, hourly, read
from tests.e2e.system import Airflow, System, kill, until

pytestmark = [pytest.mark.slow, pytest.mark.system, pytest.mark.spark, pytest.mark.timeout(1800)]


def streaming_job(system: System, *, behind: int = 0) -> RunStatus | None:
    """The streaming job, once its queries run; `behind`: an attempt after that one."""
    found = [each for each in Launcher(system.settings).runs() if each.active and each.job == "streaming_node"]
    there = found and found[0].pid and found[0].attempt > behind and system.installation.streaming_job_running()
    return found[0] if there else None


def pid_of(job: RunStatus) -> int:
    """Its process. (Without one a signal would go to whoever sends it.)"""
    assert job.pid, job
    return job.pid


def title(process: ProcessInfo) -> str:
    """What a process calls itself; "" where it is gone."""
    try:
        return Path(f"/proc/{process.pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


def session_of(leader: int) -> list[ProcessInfo]:
    return [each for each in all_processes().values() if each.session == leader]


def batches(system: System) -> float:
    """When the streaming node wrote its last commit."""
    try:
        return system.settings.progress_path("streaming-node").stat().st_mtime
    except FileNotFoundError:
        return 0.0


def test_the_streaming_job_is_killed_while_the_demo_runs(system: System, airflow: Airflow) -> None:
    job = until(lambda: streaming_job(system), seconds=300, what="the streaming job runs")
    demo = [sys.executable, "-m", "millrace.demo.running", "--rows", "20000", "--seconds", "20", "--times", "2"]
    running = subprocess.Popen(demo, env=system.env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    began = time.time()
    until(lambda: batches(system) > began, seconds=300, what="the demo's rows are being committed", poll=0.05)
    os.kill(pid_of(job), signal.SIGKILL)
    killed = time.time()
    again = until(
        lambda: streaming_job(system, behind=job.attempt), seconds=400, what="the DAG has started the job again"
    )
    assert (again.run_id, again.attempt) == (job.run_id, job.attempt + 1)
    until(lambda: batches(system) > killed, seconds=300, what="the job commits again")
    print(f"\nstreaming job: commits again {batches(system) - killed:.1f} s after kill -9")
    assert session_of(pid_of(job)) == [], "the JVM and the Python workers of the killed driver are gone"
    output, _ = running.communicate(timeout=600)
    assert running.returncode == 0, output
    assert output.count("✓") == 5
    system.verified()


def test_the_worker_that_watches_the_streaming_job_is_killed(system: System, airflow: Airflow) -> None:
    job = until(lambda: streaming_job(system), seconds=300, what="the streaming job runs")
    (run,) = [each for each in airflow.runs(STREAMING_DAG) if each["state"] == "running"]
    (task,) = airflow.tasks(STREAMING_DAG, run["dag_run_id"])
    everything = all_processes()
    worker = everything[everything[task["pid"]].parent]
    assert "LocalExecutor" in title(worker), title(worker)
    killed = time.time()
    kill([worker, everything[task["pid"]]])

    def watched_again() -> bool:
        now = airflow.tasks(STREAMING_DAG, run["dag_run_id"])[0]
        return now["try_number"] > task["try_number"] and now["state"] == "running"

    rows = days(1, first=20)
    fly(system.settings, rows)  # nobody watches the job, and it works
    until(watched_again, seconds=400, what="another worker watches the job")
    print(f"\nworker: the job is watched again {time.time() - killed:.1f} s after kill -9")
    now = until(lambda: streaming_job(system), seconds=60, what="the streaming job runs")
    assert (now.pid, now.attempt) == (job.pid, job.attempt), "the job was adopted, not started again"
    assert system.status()["healthy"]


def test_a_jobs_process_and_the_triggerer_are_killed_in_the_middle_of_a_backfill(
    system: System, airflow: Airflow
) -> None:
    rows = days(3)
    fly(system.settings, rows)
    launcher = Launcher(system.settings)
    conf = {"start": START.isoformat(), "end": START.replace(day=START.day + 3).isoformat()}
    run_id = airflow.start("backfill_range", conf)

    def rebuilding() -> RunStatus | None:
        found = [
            each
            for each in launcher.runs()
            # A moment passes between the start of a job's process and the record that says which it is.
            if each.active and each.pid and "backfill_range.rebuild" in each.run_id
        ]
        return found[0] if found else None

    job = until(rebuilding, seconds=400, what="a slice is being rebuilt", poll=0.1)
    os.kill(pid_of(job), signal.SIGKILL)
    triggerers = [each for each in system.installation.processes() if "triggerer" in title(each)]
    assert triggerers
    restarts = system.status()["restarts"]
    kill(triggerers)
    killed = time.time()
    until(lambda: system.status()["restarts"] > restarts, seconds=300, what="the keeper starts Airflow anew")

    def healthy() -> bool:
        status = system.status() if system.installation.streaming_job_running() else {"healthy": False}
        return bool(status["healthy"])

    until(healthy, seconds=300, what="the system is healthy again")
    print(f"\ntriggerer: all is healthy {time.time() - killed:.1f} s after kill -9")
    ran = airflow.wait("backfill_range", run_id, seconds=400).succeeded()
    print(f"backfill: ended {time.time() - killed:.1f} s after kill -9 of a slice's job")
    assert [ran.tasks[f"rebuild[{index}]"] for index in range(3)] == ["success"] * 3
    assert session_of(pid_of(job)) == []
    flights = read(system.settings)
    made, _ = derived(system.settings)
    assert made == hourly(flights, first=0, count=3)
    system.verified()
