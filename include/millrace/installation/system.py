"""The whole system on one machine: Airflow, the embedded log and the streaming jobs, started, found and stopped as one.

    installation = Installation(Settings.load())
    running = installation.start()          # or attach to a running one; returns once the keeper runs
    installation.wait_airflow(running)      # until each component is healthy
    installation.wait_streaming(running)    # until the DAG `streaming` is active and the streaming job runs
    installation.stop()                     # stop everything, and verify that nothing is left

A keeper (keeper.py) runs Airflow in its own session. The DAG `streaming` runs the jobs. The log server starts on
demand. An inherited mark assigns each process to its installation (processes.py). A start after kill -9 ends orphans
and leaves alone what still works: its DAG adopts a running job. Every wait has a deadline.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from millrace.base.data_folder import prepare_data_folder
from millrace.base.deadline import Deadline, poll_until
from millrace.base.errors import AirflowUnavailable, DeadlineExceeded
from millrace.base.file_lock import exclusive_lock
from millrace.base.files import rotate_log
from millrace.base.process import ProcessInfo, all_processes, find_process
from millrace.base.settings import Settings
from millrace.installation.airflow_api import AirflowApi
from millrace.installation.config import (
    COMPONENT_COUNT,
    STANDALONE,
    airflow_environment,
    airflow_root,
    checked_airflow_home,
    choose_bind_address,
)
from millrace.installation.keeper import LOG_FILE, KeeperRecord, read_record
from millrace.installation.processes import installation_processes
from millrace.installation.secrets import USER, Secrets, load_secrets
from millrace.rpc.discovery import running_server as running_log_server
from millrace.runtime.child_processes import JobFailed
from millrace.runtime.launch.folder import read_json
from millrace.runtime.launch.launcher import Launcher, RunStatus, log_tail
from millrace.runtime.processes import (
    POLL_SECONDS,
    kill_all,
    send_signal,
    terminate,
    wait_for_exit,
    with_descendants,
)

START_LOCK: Final = "start.lock"
KEEPER_LOG: Final = "keeper.log"
KEEPER_LOG_BYTES: Final = 1 << 20
STREAMING_DAG: Final = "streaming"
STREAMING_JOB: Final = "streaming_node"
KILL_SECONDS: Final = 10.0
AIRFLOW_START_SECONDS: Final = 180.0
"""Additional time for Airflow beyond `start_deadline`: 20 s on two idle cores become minutes on busy ones."""
MAX_FAILED_STARTS: Final = 3
"""Failed starts of Airflow after which waiting for it ends with an error."""
SLOW_START_FACTOR: Final = 4
"""Multiple of the expected time to wait for a start. A slow start is reported, but the wait goes on."""
TASK_RETRY_SECONDS: Final = 90.0
"""Additional seconds until a streaming job runs after a crash.

Airflow tries a task again only once it has missed the task's heartbeat.
"""

ProgressListener = Callable[[str], None]


def _nothing() -> None:
    """Do nothing: the default callback."""


def _silent(_words: str) -> None:
    """Ignore the words: the default listener."""


@dataclass(frozen=True, slots=True)
class RunningInstallation:
    """An installation with a running keeper."""

    record: KeeperRecord
    started_now: bool
    """False if it was already running."""

    @property
    def address(self) -> str:
        return self.record.address


@dataclass(frozen=True, slots=True)
class StopResult:
    """The result of a stop."""

    ended: int
    """The processes that were running."""
    killed: int
    """Number of those processes that did not end on their own in time."""


class Installation:
    """The installation of one data folder. It has no state of its own: create one wherever it is needed."""

    def __init__(
        self,
        settings: Settings,
        *,
        command: Sequence[str] = STANDALONE,
        components: int = COMPONENT_COUNT,
        settle: float | None = None,
    ) -> None:
        """Describe the installation; `start` starts it.

        The keeper runs `command`, which has `components` children once it is complete, at most `settle` seconds after
        its start. Raises InvalidSettings if the checkout is not found, or the data folder is inside it.
        """
        self.settings = settings
        self.root = airflow_root()
        self.state = checked_airflow_home(settings, root=self.root)
        self._command = list(command)
        self._components = components
        # A component that ends during Airflow's start ends the start; a slow one is awaited.
        self._settle = (
            SLOW_START_FACTOR * (settings.start_deadline + AIRFLOW_START_SECONDS) if settle is None else settle
        )
        self._mark = settings.data_dir.resolve()

    @property
    def log_file(self) -> Path:
        """The file with the output of Airflow's components."""
        return self.state / LOG_FILE

    def secrets(self) -> Secrets:
        """Return its secrets; generate missing ones."""
        return load_secrets(self.state)

    def api(self, address: str) -> AirflowApi:
        """Return a client of its Airflow."""
        return AirflowApi(address, user=USER, password=self.secrets().password)

    def environment(self) -> dict[str, str]:
        """Return the environment of a command beside the running Airflow, such as `airflow backfill create`."""
        found = self.running()
        env = {**os.environ, **({"AIRFLOW__API__BASE_URL": found.address} if found is not None else {})}
        return airflow_environment(self.settings, self.secrets(), root=self.root, state=self.state, bind=None, env=env)

    def running(self) -> RunningInstallation | None:
        """Return the installation if its keeper runs, otherwise None."""
        record = read_record(self.state)
        return (
            RunningInstallation(record, started_now=False)
            if record is not None and record.process() is not None
            else None
        )

    def processes(self) -> list[ProcessInfo]:
        """Return every process of the installation, including the log server."""
        everything = all_processes()
        found = {each.pid: each for each in installation_processes(self._mark)}
        server = self.log_server()
        for pid in with_descendants([server.pid] if server else [], everything):
            found.setdefault(pid, everything[pid])
        return sorted(found.values(), key=lambda each: (each.start_ticks, each.pid))

    # --- start ----------------------------------------------------------------------------------------------------

    def start(self, *, port: int | None = None, env: Mapping[str, str] | None = None) -> RunningInstallation:
        """Start Airflow unless it runs. `port` overrides [api] port; 0 takes a free one.

        Raises InvalidSettings (the port is taken, the secrets are damaged), DeadlineExceeded, JobFailed.
        """
        prepare_data_folder(self.settings.data_dir)
        secrets = self.secrets()
        with self._start_lock():
            found = self.running()
            if found is not None:
                return found
            self.end_orphans()
            env = os.environ if env is None else env
            bind = choose_bind_address(self.root, port=port, env=env)
            environment = airflow_environment(
                self.settings, secrets, root=self.root, state=self.state, bind=bind, env=env
            )
            options = [f"--state={self.state}", f"--address={bind.address}", f"--components={self._components}"]
            options += [f"--deadline={self.settings.stop_deadline}", f"--settle={self._settle}"]
            with (self.state / KEEPER_LOG).open("ab") as output:
                rotate_log(self.state / KEEPER_LOG, KEEPER_LOG_BYTES)
                keeper = subprocess.Popen(
                    [sys.executable, "-m", "millrace.installation.keeper", *options, "--", *self._command],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env=environment,
                    cwd=self.state,
                    start_new_session=True,
                )
            return RunningInstallation(self._await_record(keeper), started_now=True)

    def end_orphans(self) -> list[ProcessInfo]:
        """End the processes that a killed installation left: those whose session has no leader. Return them.

        These are Airflow's components without their keeper, and a JVM without its driver. A running job leads its
        session, and the log server is known by its record: both are left alone.
        """
        everything = all_processes()
        server = self.log_server()
        spared = with_descendants([server.pid] if server else [], everything)
        left = [
            each
            for each in installation_processes(self._mark)
            if each.session not in everything and each.pid not in spared
        ]
        terminate(left, deadline=KILL_SECONDS)
        return left

    def wait_airflow(
        self,
        running: RunningInstallation,
        *,
        check: Callable[[], None] = _nothing,
        on_progress: ProgressListener = _silent,
    ) -> None:
        """Wait until each of Airflow's components is healthy.

        Calls `check` repeatedly; an error that it raises ends the wait. Reports each step to `say`, and that one takes
        long: a slow start continues. Raises JobFailed if Airflow ends meanwhile, and DeadlineExceeded after
        SLOW_START_FACTOR times the expected time; the start then still continues.
        """
        api = self.api(running.address)

        def describe_missing(record: KeeperRecord) -> str:
            sick = {name: state for name, state in api.health(since=record.at).items() if state != "healthy"}
            return f"waiting for Airflow's {', '.join(sick)}" if sick else ""

        self._wait(describe_missing, check, on_progress, seconds=self.settings.start_deadline + AIRFLOW_START_SECONDS)

    def wait_streaming(
        self,
        running: RunningInstallation,
        *,
        check: Callable[[], None] = _nothing,
        on_progress: ProgressListener = _silent,
    ) -> None:
        """Activate the DAG `streaming`, and wait until the streaming job runs. Raises as `wait_airflow` does."""
        api = self.api(running.address)
        dags = f"Airflow is parsing the DAGs ({STREAMING_DAG} is not ready yet)"
        self._wait(
            lambda _: "" if api.has_dag(STREAMING_DAG) else dags,
            check,
            on_progress,
            seconds=self.settings.start_deadline,
        )
        api.set_paused(STREAMING_DAG, False)
        try:
            seconds = self.settings.start_deadline + TASK_RETRY_SECONDS
            self._wait(lambda _: self._streaming_step(), check, on_progress, seconds=seconds)
        except DeadlineExceeded as error:
            runs = [each for each in Launcher(self.settings).runs() if each.job == STREAMING_JOB]
            last = f"the job's log is {runs[0].log}" if runs else f"see {running.address}/dags/{STREAMING_DAG}"
            why = f"{runs[0].error}; " if runs and runs[0].error is not None else ""
            raise DeadlineExceeded(f"{error}; Airflow keeps running at {running.address}; {why}{last}") from None

    def _streaming_step(self) -> str:
        """Describe what is left to do until the streaming job runs; empty if it runs."""
        if self.streaming_job_running():
            return ""
        if not self._streaming_jobs():
            return f"Airflow is starting the DAG {STREAMING_DAG}"
        return "the streaming job is starting its JVM and its queries"

    def streaming_job_running(self) -> bool:
        """Return whether a streaming job runs whose queries have started, according to its heartbeat."""
        beat = read_json(self.settings.run_path / "millrace-streaming-node.heartbeat.json") or {}
        return bool(beat.get("queries")) and beat.get("pid") in {each.pid for each in self._streaming_jobs()}

    def _streaming_jobs(self) -> list[RunStatus]:
        return [each for each in Launcher(self.settings).runs() if each.active and each.job == STREAMING_JOB]

    def _wait(
        self, left: Callable[[KeeperRecord], str], check: Callable[[], None], say: ProgressListener, *, seconds: float
    ) -> None:
        """Wait until `left` returns ""; `seconds` is the expected time."""
        slow, stop = Deadline.after(seconds), Deadline.after(SLOW_START_FACTOR * seconds)
        known = read_record(self.state)
        before = known.restarts if known is not None else 0
        said = ""
        while True:
            check()
            record = read_record(self.state)
            if record is None or record.process() is None:
                raise JobFailed(
                    f"Airflow was stopped during its start:\n{log_tail(self.log_file)}\n(log: {self.log_file})"
                )
            try:
                words = left(record)
                if not words:
                    return
            except AirflowUnavailable as error:
                words = _airflow_step(record) if error.status is None else f"Airflow does not answer yet ({error})"
            if record.restarts - before >= MAX_FAILED_STARTS:
                raise JobFailed(f"{record.reason}, repeatedly:\n{log_tail(self.log_file)}\n(log: {self.log_file})")
            if record.reason:
                words += f" ({record.reason}; restarted)"
            if words != said:
                say(words)
                said = words
            if slow.expired():
                say(f"this takes longer than {seconds:.0f} s and continues: {words} (log: {self.log_file})")
                slow = Deadline.after(seconds)
            if not stop.pause(5 * POLL_SECONDS):
                raise DeadlineExceeded(
                    f"after {SLOW_START_FACTOR * seconds:.0f} s: {words}; the start continues: `millrace system status`"
                    f" shows its state, `millrace system down` stops it; its log: {self.log_file}"
                )

    def _await_record(self, keeper: subprocess.Popen[bytes]) -> KeeperRecord:
        stop = Deadline.after(self.settings.start_deadline)
        while True:
            record = read_record(self.state)
            if record is not None and record.pid == keeper.pid and record.process() is not None:
                return record
            if keeper.poll() is not None:
                log = self.state / KEEPER_LOG
                raise JobFailed(f"the keeper ended with {keeper.returncode}:\n{log_tail(log)}\n(log: {log})")
            if not stop.pause(POLL_SECONDS):
                keeper.kill()
                keeper.wait()
                raise DeadlineExceeded(f"the keeper did not start; its log: {self.state / KEEPER_LOG}")

    # --- stop -----------------------------------------------------------------------------------------------------

    def stop(self, *, on_progress: ProgressListener = lambda words: None) -> StopResult:
        """Stop everything: Airflow, then the jobs (each finishes its micro-batch), then the log server.

        Nothing runs when it returns. Raises DeadlineExceeded, which names the process, if one cannot be ended.
        """
        deadline = self.settings.stop_deadline
        if not self.state.exists() and not self.processes():
            return StopResult(ended=0, killed=0)
        self.state.mkdir(parents=True, exist_ok=True)
        with self._start_lock():
            before = self.processes()
            killed: list[ProcessInfo] = []
            found = self.running()
            keeper = found.record.process() if found else None
            if found is not None and self._streaming_jobs():
                on_progress("stopping the streaming job")
                self._pause_streaming(found)
            if keeper is not None and send_signal(keeper, signal.SIGTERM):
                on_progress("stopping Airflow")
                # The keeper has its own deadlines, after which it kills.
                killed += wait_for_exit([keeper], deadline=deadline + 3 * KILL_SECONDS)
                kill_all(lambda: [each for each in self._jobs() if each.session == keeper.pid], deadline=KILL_SECONDS)
            self._announce_stop()
            jobs = self._jobs()
            leaders = [each for each in jobs if each.pid == each.session]
            if leaders:
                on_progress("stopping jobs")
                killed += terminate(leaders, deadline=deadline)
            killed += terminate(self._jobs(), deadline=KILL_SECONDS)
            server = self.log_server()
            if server is not None:
                on_progress("stopping the log server")
                killed += terminate([server], deadline=deadline)
            left = kill_all(self.processes, deadline=3 * KILL_SECONDS)
            if left:
                words = ", ".join(str(each.pid) for each in left)
                raise DeadlineExceeded(f"processes of the installation cannot be ended: {words}")
            return StopResult(ended=len(before), killed=len({each.pid for each in killed}))

    def _announce_stop(self) -> None:
        """Record a stop request for each running job.

        A job that ends before it can report its end then counts as stopped, not as lost.
        """
        launcher = Launcher(self.settings)
        for each in launcher.runs():
            if each.active:
                launcher.announce_stop(each.run_id)

    def _pause_streaming(self, running: RunningInstallation) -> None:
        """Pause the DAG: it stops its job between two micro-batches and ends its task, for which Airflow would wait.

        If Airflow does not answer or takes too long, the job is stopped later without it.
        """
        stop = Deadline.after(self.settings.stop_deadline)
        try:
            self.api(running.address).set_paused(STREAMING_DAG, True)
        except AirflowUnavailable:
            return
        poll_until(
            lambda: not self._streaming_jobs() or running.record.process() is None, stop, interval=5 * POLL_SECONDS
        )

    def _jobs(self) -> list[ProcessInfo]:
        """Return the marked processes without the log server and its descendants."""
        server = self.log_server()
        spared = with_descendants([server.pid] if server else [], all_processes())
        return [each for each in installation_processes(self._mark) if each.pid not in spared]

    def log_server(self) -> ProcessInfo | None:
        """Return the server of the embedded log, if it runs."""
        record = running_log_server(self.settings.log_path)
        return find_process(record.pid) if record is not None else None

    @contextmanager
    def _start_lock(self) -> Iterator[None]:
        """Allow one start or stop at a time, by a lock that dies with its process. Raises DeadlineExceeded."""
        path = self.state / START_LOCK
        busy = DeadlineExceeded(f"another start or stop holds {path}")
        with exclusive_lock(path, deadline=Deadline.after(self.settings.start_deadline), busy=busy):
            yield


def _airflow_step(record: KeeperRecord) -> str:
    """Describe what Airflow is doing while its web server does not answer yet.

    `airflow standalone` has no children while it creates its tables.
    """
    everything = all_processes()
    group = {pid for pid, each in everything.items() if each.parent == record.pid}
    if any(each.parent in group for each in everything.values()):
        return "Airflow's web server is starting"
    return "Airflow is preparing its database"
