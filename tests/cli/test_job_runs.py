"""Jobs that run detached, from the command line: started, listed, stopped, read."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from millrace.base.settings import Settings
from millrace.runtime.launch.launcher import Launcher
from tests.cli.deployment import Deployment


@pytest.fixture
def there(settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Deployment]:
    """A data folder, and a checkout whose jobs/ has the light job."""
    jobs = tmp_path / "home" / "jobs"
    jobs.mkdir(parents=True)
    shutil.copy(Path(__file__).parents[1] / "runtime" / "light_job.py", jobs / "light.py")
    (jobs / "streaming_node.py").touch()
    monkeypatch.setenv("MILLRACE_HOME", str(jobs.parent))
    yield Deployment(settings)
    launcher = Launcher(settings)
    for status in launcher.runs():
        launcher.stop(status.run_id, deadline=0.1)


def test_a_job_is_started_waited_for_and_its_report_printed(there: Deployment) -> None:
    answer = there.ok("jobs", "start", "light", "--params", json.dumps({"write": "hello"}), "--wait", "60")
    assert json.loads(answer) == {"said": "hello", "number": 1}


def test_an_error_of_the_job_is_an_error_of_the_command(there: Deployment) -> None:
    words = there.fails("JOB_FAILED", "jobs", "start", "light", "--params", '{"fail": "TickTooOld"}', "--wait", "60")
    assert "TICK_TOO_OLD: as asked" in words


def test_a_running_job_is_listed_and_stopped(there: Deployment, tmp_path: Path) -> None:
    assert "No runs yet." in there.ok("jobs", "list")
    params = json.dumps({"wait_for": str(tmp_path / "never")})
    (started,) = there.as_json("jobs", "start", "light", "--run", "mine", "--params", params)
    (listed,) = there.as_json("jobs", "list")
    assert (listed["run_id"], listed["state"], listed["pid"]) == ("mine", "running", started["pid"])
    (stopped,) = there.as_json("jobs", "stop", "mine")
    assert (stopped["state"], stopped["pid"]) == ("stopped", None)


def test_the_log_of_a_run_is_printed(there: Deployment) -> None:
    there.fails("JOB_FAILED", "jobs", "start", "light", "--params", '{"fail": "Odd"}', "--wait", "60")
    assert "ValueError: as asked" in there.ok("jobs", "log", "light")
    there.fails("RUN_NOT_FOUND", "jobs", "log", "heavy")


def test_wrong_parameters_are_said_before_anything_starts(there: Deployment) -> None:
    there.fails("INVALID_ARGUMENT", "jobs", "start", "light", "--params", "{")
    there.fails("INVALID_ARGUMENT", "jobs", "start", "light", "--params", "[1]")
    assert "colour" in there.fails("INVALID_ARGUMENT", "jobs", "start", "compaction", "--params", '{"colour": 1}')
    assert there.as_json("jobs", "list") == []
    assert ", light, load_files," in there.fails("INVALID_ARGUMENT", "jobs", "start", "heavy")
    assert there.as_json("jobs", "list") == []
