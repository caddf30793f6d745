"""The whole system on a data folder of a test's own, driven as a user drives it.

`millrace system`, and Airflow's REST API.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

from millrace.base.errors import AirflowUnavailable
from millrace.base.process import ProcessInfo
from millrace.base.settings import Settings
from millrace.installation.airflow_api import AirflowApi
from millrace.installation.system import Installation

ROOT: Final = Path(__file__).parents[2]
POLL_SECONDS: Final = 0.5
RUN_SECONDS: Final = 600.0
"""How long a run of a DAG may take here, its wait for a worker and for the run before it included."""
ENDED: Final = ("success", "failed")


def until(condition: Callable[[], Any], *, seconds: float, what: str, poll: float = POLL_SECONDS) -> Any:
    """Wait until `condition` gives something true, and give that."""
    end = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < end, f"{what}: not within {seconds:.0f} s"
        time.sleep(poll)  # the poll interval of a wait with a deadline
    return found


class System:
    """`millrace system` on a data folder."""

    def __init__(self, data: Path, **settings: Any) -> None:
        self.settings = Settings(data_dir=data, start_deadline=240.0, stop_deadline=30.0, **settings)
        self.installation = Installation(self.settings)
        self.env = {
            **os.environ,
            **self.settings.environment(),
            "PYTHONPATH": str(ROOT / "include"),
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
        }
        # Airflow's tests in this process have an Airflow of their own.
        self.env = {name: value for name, value in self.env.items() if not name.startswith("AIRFLOW")}

    def popen(self, *arguments: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "millrace", "system", *arguments]
        return subprocess.Popen(command, env=self.env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    def run(self, *arguments: str) -> str:
        """A command of `millrace system` that has to succeed; what it said."""
        output, code = self.tried(*arguments)
        assert code == 0, output
        return output

    def tried(self, *arguments: str) -> tuple[str, int]:
        """A command of `millrace system`: what it said, and its exit code."""
        running = self.popen(*arguments)
        output, _ = running.communicate(timeout=600)
        return output, running.returncode

    def millrace(self, *arguments: str, module: str = "millrace") -> str:
        """Another command of ours that has to succeed; what it said."""
        command = [sys.executable, "-m", module, *arguments]
        done = subprocess.run(command, env=self.env, capture_output=True, text=True, timeout=600, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def up(self) -> Airflow:
        """Start it; the Airflow that answers then."""
        address, password = said(self.run("up", "--detach", "--port", "0"))
        return Airflow(AirflowApi(address, user="admin", password=password), address, password)

    def status(self) -> dict[str, Any]:
        """What `status` says, be all well (exit code 0) or not (3)."""
        output, code = self.tried("status", "--json")
        assert code in (0, 3), output
        return json.loads(output)

    def verified(self) -> dict[str, Any]:
        """What `millrace verify` says: log, WAL and tables hold the same, each row once."""
        found = json.loads(self.millrace("verify", "--json"))
        assert found["holds"], found
        return found

    def kill_everything(self) -> None:
        kill(self.installation.processes())


def kill(victims: list[ProcessInfo]) -> None:
    """SIGKILL, and wait until they are gone."""
    for each in victims:
        os.kill(each.pid, signal.SIGKILL)
    until(
        lambda: not any(each.alive() for each in victims), seconds=20, what="the killed processes are gone", poll=0.05
    )


def said(output: str) -> tuple[str, str]:
    """The address and the password that `up` printed."""
    address = re.search(r"^Address +(\S+)$", output, re.MULTILINE)
    password = re.search(r"^User +admin, password (\S+) ", output, re.MULTILINE)
    assert address is not None, output
    assert password is not None, output
    return address[1], password[1]


@dataclass(frozen=True)
class Ran:
    """A run of a DAG that has ended."""

    dag_id: str
    run_id: str
    state: str
    tasks: dict[str, str]
    """Task id (with its map index, where it has one) -> state."""
    seconds: float
    """From its creation to its end."""
    interval: tuple[str | None, str | None] = field(default=(None, None))

    def succeeded(self) -> Ran:
        assert self.state == "success", self
        return self


class Airflow:
    """Airflow's REST API, as a user's script uses it."""

    def __init__(self, api: AirflowApi, address: str, password: str) -> None:
        self.api = api
        self.address = address
        self.password = password

    def start(self, dag_id: str, conf: dict[str, Any] | None = None, *, run_id: str = "") -> str:
        """Create a run; its id. A repeat of the call creates no second one."""
        run_id = run_id or f"test-{dag_id}-{time.time_ns()}"
        body = {"dag_run_id": run_id, "logical_date": None, "conf": conf or {}}
        try:
            self.api.call("POST", f"/api/v2/dags/{dag_id}/dagRuns", body)
        except AirflowUnavailable as error:
            if error.status != 409:
                raise
        return run_id

    def run(self, dag_id: str, conf: dict[str, Any] | None = None, *, seconds: float = RUN_SECONDS) -> Ran:
        """Create a run and wait until it has ended."""
        return self.wait(dag_id, self.start(dag_id, conf), seconds=seconds)

    def wait(self, dag_id: str, run_id: str, *, seconds: float = RUN_SECONDS) -> Ran:
        """Wait until the run has ended."""

        def ended() -> dict[str, Any] | None:
            found: dict[str, Any] = self.dag_run(dag_id, run_id)
            return found if found["state"] in ENDED else None

        found = until(ended, seconds=seconds, what=f"the run {run_id} of {dag_id} has ended")
        tasks = {self._key(each): str(each["state"]) for each in self.tasks(dag_id, run_id)}
        return Ran(
            dag_id,
            run_id,
            found["state"],
            tasks,
            _seconds(found["queued_at"], found["end_date"]),
            (found["data_interval_start"], found["data_interval_end"]),
        )

    def get(self, path: str) -> Any:
        """A GET; an api-server that does not answer in time on a busy machine is asked again."""
        for left in reversed(range(4)):
            try:
                return self.api.call("GET", path)
            except AirflowUnavailable as error:
                if error.status is not None or not left:
                    raise
        raise AssertionError("the last attempt returns or raises")

    def dag_run(self, dag_id: str, run_id: str) -> dict[str, Any]:
        return self.get(f"/api/v2/dags/{dag_id}/dagRuns/{_part(run_id)}")

    def runs(self, dag_id: str) -> list[dict[str, Any]]:
        """The newest 100 runs of a DAG, newest first."""
        return self.get(f"/api/v2/dags/{dag_id}/dagRuns?order_by=-run_after&limit=100")["dag_runs"]

    def tasks(self, dag_id: str, run_id: str) -> list[dict[str, Any]]:
        path = f"/api/v2/dags/{dag_id}/dagRuns/{_part(run_id)}/taskInstances?limit=200"
        return self.get(path)["task_instances"]

    def result(self, ran: Ran, task_id: str, *, index: int = -1) -> Any:
        """What a task of the run returned."""
        path = f"/api/v2/dags/{ran.dag_id}/dagRuns/{_part(ran.run_id)}/taskInstances/{task_id}/xcomEntries/return_value"
        return self.get(f"{path}?map_index={index}&deserialize=false&stringify=false")["value"]

    def wait_task(self, dag_id: str, run_id: str, task_id: str, *states: str, seconds: float = RUN_SECONDS) -> None:
        """Wait until a task of the run is in one of `states`."""

        def there() -> bool:
            found = {each["task_id"]: each["state"] for each in self.tasks(dag_id, run_id)}
            return found.get(task_id) in states

        until(there, seconds=seconds, what=f"{task_id} of {run_id} is {' or '.join(states)}")

    def approve(self, dag_id: str, run_id: str, task_id: str = "approve") -> None:
        """What a person does who is asked: read the question, and say yes.

        Nobody reads it in less than five seconds, and Airflow 3.3 fails a task that is answered before its scheduler
        has heard that it waits (apache/airflow#67287; millrace_airflow.triggers has the same pause).
        """
        path = f"/api/v2/dags/{dag_id}/dagRuns/{_part(run_id)}/taskInstances/{task_id}/-1/hitlDetails"
        self.wait_task(dag_id, run_id, task_id, "awaiting_input", "deferred")
        asked = datetime.fromisoformat(self.api.call("GET", path)["created_at"])
        until(lambda: (datetime.now(UTC) - asked).total_seconds() > 5, seconds=60, what="the question was read")
        self.api.call("PATCH", path, {"chosen_options": ["Approve"], "params_input": {}})

    def pause(self, dag_id: str, paused: bool) -> None:
        self.api.set_paused(dag_id, paused)

    @staticmethod
    def _key(task: dict[str, Any]) -> str:
        return str(task["task_id"]) if task["map_index"] < 0 else f"{task['task_id']}[{task['map_index']}]"


def _part(value: str) -> str:
    return quote(value, safe="")


def _seconds(start: str, end: str) -> float:
    return (datetime.fromisoformat(end) - datetime.fromisoformat(start)).total_seconds()
