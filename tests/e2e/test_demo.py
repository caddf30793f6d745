"""``make run`` as its user sees it: it checks what it claims, continues, and stops in good order."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from millrace.base.errors import LogUnavailable
from millrace.base.settings import Settings
from millrace.rpc.remote_log import RemoteLogService

ROOT = Path(__file__).parents[2]
SMALL = ["--rows", "3000", "--seconds", "2", "--times", "1"]


@pytest.fixture
def env(tmp_path: Path) -> Iterator[dict[str, str]]:
    settings = Settings(data_dir=tmp_path / "data")
    yield {**os.environ, "MILLRACE_DATA": str(settings.data_dir), "PYTHONPATH": str(ROOT / "include")}
    if settings.log_path.exists():
        with RemoteLogService.connect(settings.log_path) as service:  # whatever the test left running
            service.shutdown()


def demo(env: dict[str, str], *arguments: str, timeout: float = 220) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "millrace.demo", *arguments]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=timeout, check=False)


@pytest.mark.spark
@pytest.mark.timeout(240)
@pytest.mark.parametrize("runs", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_run_checks_itself_and_a_second_one_continues(env: dict[str, str], runs: int) -> None:
    appended = []
    for _ in range(runs):
        # One run asks every engine but Spark, whose JVM takes half a minute, and which tests/storage asks.
        done = demo(env, *SMALL, *(["--engines", "DuckDB", "Polars", "delta-rs"] if runs == 1 else []))
        assert done.returncode == 0, done.stdout + done.stderr
        assert done.stdout.count("✓") == 6
        assert "✗" not in done.stdout
        row = next(line for line in done.stdout.splitlines() if line.startswith("│ appended "))
        in_wal, of_this_run = (int(cell.replace(",", "")) for cell in row.split("│")[2:4])
        assert of_this_run > 6000
        assert in_wal == sum(appended) + of_this_run
        appended.append(of_this_run)
    assert not [
        each for each in psutil.process_iter(["cmdline"]) if env["MILLRACE_DATA"] in (each.info["cmdline"] or [])
    ]


@pytest.mark.slow
@pytest.mark.spark
@pytest.mark.timeout(120)
def test_ctrl_c_ends_it_in_good_order(env: dict[str, str]) -> None:
    command = [sys.executable, "-m", "millrace.demo", "--seconds", "300"]
    running = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    started = Path(env["MILLRACE_DATA"]) / "run" / "millrace-streaming-node.started.json"
    deadline = time.monotonic() + 80
    while not started.exists():
        assert running.poll() is None, running.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.1)  # the poll interval of a wait with a deadline
    children = psutil.Process(running.pid).children(recursive=True)
    running.send_signal(signal.SIGINT)
    output, _ = running.communicate(timeout=60)
    assert running.returncode == 130, output
    assert "Everything that was acknowledged is in the log" in output
    gone, alive = psutil.wait_procs(children, timeout=10)
    assert not alive, (gone, alive)
    with pytest.raises(LogUnavailable):
        RemoteLogService.connect(Settings(data_dir=Path(env["MILLRACE_DATA"])).log_path, start=False, deadline=2.0)


@pytest.mark.slow
@pytest.mark.spark
@pytest.mark.timeout(480)
def test_streams_are_held_against_duckdb_and_begin_anew(env: dict[str, str]) -> None:
    for _ in range(2):
        done = demo(env, "--streams", "--rows", "4000", "--seconds", "3", timeout=220)
        assert done.returncode == 0, done.stdout + done.stderr
        assert done.stdout.count("✓") == 3
        assert "every row is accounted for" in done.stdout


@pytest.mark.slow
def test_wrong_arguments_are_refused_with_a_sentence(env: dict[str, str]) -> None:
    done = demo(env, "--seconds", "0")
    assert done.returncode == 2
    assert "must be positive" in done.stderr


@pytest.mark.slow
def test_a_folder_that_is_not_millraces_is_never_removed(env: dict[str, str]) -> None:
    folder = Path(env["MILLRACE_DATA"])
    folder.mkdir()
    (folder / "thesis.tex").touch()
    done = demo(env, "--fresh")
    assert done.returncode == 1
    assert "thesis.tex" in done.stderr
    assert (folder / "thesis.tex").exists()
