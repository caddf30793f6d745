"""The whole system on one machine: Airflow, the embedded log, the streaming jobs; started, found and stopped as one.

    installation = Installation(Settings.load())
    running = installation.start()          # or what runs already; returns once Airflow's processes are being kept
    installation.wait_airflow(running)      # each of its components is well
    installation.wait_streaming(running)    # the DAG `streaming` is active, and the streaming job runs
    installation.stop()                     # everything, and proves that nothing is left

A keeper (installation_keeper) runs Airflow in a session of its own; the DAG `streaming` runs the jobs; the log's server
starts by itself. Whose a process is, is said by the mark that it inherited (installation_processes). A start after kill
-9 ends what was orphaned and leaves alone what still works: a job that runs is adopted by its DAG. Every wait has a
deadline.
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
STREAMING_DAG: Final = "streaming"
STREAMING_JOB: Final = "streaming_node"
KILL_SECONDS: Final = 10.0
AIRFLOW_START_SECONDS: Final = 180.0
"""How much longer than `start_deadline` Airflow may take: 20 s on two idle cores are minutes where they are busy."""
MAX_FAILED_STARTS: Final = 3
"""Starts of Airflow that fail before a wait for it gives up."""
SLOW_START_FACTOR: Final = 4
"""How many times longer than it should take a start is waited for: one that is slow is told of, not given up."""
TASK_RETRY_SECONDS: Final = 90.0
"""How much later a streaming job may come after a crash:

Airflow tries a task again when its heartbeat has been missed.
"""

ProgressListener = Callable[[str], None]


def _nothing() -> None:
    """What is called where nobody asks for more."""


def _silent(_words: str) -> None:
    """What is told where nobody listens."""


@dataclass(frozen=True, slots=True)
class RunningInstallation:
    """An installation whose keeper runs."""

    record: KeeperRecord
    started_now: bool
    """False where it ran already."""

    @property
    def address(self) -> str:
        return self.record.address


@dataclass(frozen=True, slots=True)
class StopResult:
    """What a stop did."""

    ended: int
    """Processes that ran."""
    killed: int
    """Of these, those that did not end by themselves in time."""


class Installation:
    """The installation of one data folder. Holds nothing itself: make one wherever it is needed."""

    def __init__(
        self,
        settings: Settings,
        *,
        command: Sequence[str] = STANDALONE,
        components: int = COMPONENT_COUNT,
        settle: float | None = None,
    ) -> None:
        """`command` is what the keeper keeps running, and `components` the children that it has when it is whole, which
        is `settle` seconds after its start at the latest.

        Raises InvalidSettings where the checkout is not to be found, or the data folder lies in it.
        """
        self.settings = settings
        self.root = airflow_root()
        self.state = checked_airflow_home(settings, root=self.root)
        self._command = list(command)
        self._components = components
        # A component that ends while Airflow starts ends the start; one that is slow is waited for.
        self._settle = (
            SLOW_START_FACTOR * (settings.start_deadline + AIRFLOW_START_SECONDS) if settle is None else settle
        )
        self._mark = settings.data_dir.resolve()

    @property
    def log_file(self) -> Path:
        """What Airflow's components print."""
        return self.state / LOG_FILE

    def secrets(self) -> Secrets:
        """Its secrets, generated where there are none yet."""
        return load_secrets(self.state)

    def api(self, address: str) -> AirflowApi:
        """Its Airflow over REST."""
        return AirflowApi(address, user=USER, password=self.secrets().password)

    def environment(self) -> dict[str, str]:
        """For a command beside the running Airflow, such as `airflow backfill create`."""
        found = self.running()
        env = {**os.environ, **({"AIRFLOW__API__BASE_URL": found.address} if found is not None else {})}
        return airflow_environment(self.settings, self.secrets(), root=self.root, state=self.state, bind=None, env=env)

    def running(self) -> RunningInstallation | None:
        """The keeper that runs, if one does."""
        record = read_record(self.state)
        return (
            RunningInstallation(record, started_now=False)
            if record is not None and record.process() is not None
            else None
        )

    def processes(self) -> list[ProcessInfo]:
        """Every process of the installation, the log's server included, whoever started that."""
        everything = all_processes()
        found = {each.pid: each for each in installation_processes(self._mark)}
        server = self.log_server()
        for pid in with_descendants([server.pid] if server else [], everything):
            found.setdefault(pid, everything[pid])
        return sorted(found.values(), key=lambda each: (each.start_ticks, each.pid))

    # --- start ----------------------------------------------------------------------------------------------------

    def start(self, *, port: int | None = None, env: Mapping[str, str] | None = None) -> RunningInstallation:
        """Have Airflow started, unless it runs; `port` goes over [api] port, and 0 takes a free one.

        Raises InvalidSettings (the port is taken, the secrets are damaged), DeadlineExceeded, JobFailed.
        """
        prepare_data_folder(self.settings.data_dir)
        secrets = self.secrets()
        with self._alone():
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
        """End what a killed installation left behind: processes whose session has lost its leader. What it ended.

        Airflow's components without their keeper, a JVM without its driver. A job that still runs leads its session,
        and the log's server is known by its record: both are left alone.
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
        """Wait until each of Airflow's components is well.

        `check` is called again and again; what it raises ends the wait. `say` is told each step, and that one takes
        long: a slow start goes on. Raises JobFailed where Airflow ends meanwhile, DeadlineExceeded after PATIENCE times
        the time that it should take; it goes on starting then.
        """
        api = self.api(running.address)

        def left(record: KeeperRecord) -> str:
            sick = {name: state for name, state in api.health(since=record.at).items() if state != "healthy"}
            return f"waiting for Airflow's {', '.join(sick)}" if sick else ""

        self._wait(left, check, on_progress, seconds=self.settings.start_deadline + AIRFLOW_START_SECONDS)

    def wait_streaming(
        self,
        running: RunningInstallation,
        *,
        check: Callable[[], None] = _nothing,
        on_progress: ProgressListener = _silent,
    ) -> None:
        """Have the DAG `streaming` run, and wait until the streaming job does. Raises as `wait_airflow` does."""
        api = self.api(running.address)
        dags = f"Airflow reads the DAGs ({STREAMING_DAG} is not among them yet)"
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
            last = f"the job's log is {runs[0].log}" if runs else f"look at {running.address}/dags/{STREAMING_DAG}"
            why = f"{runs[0].error}; " if runs and runs[0].error is not None else ""
            raise DeadlineExceeded(f"{error}; Airflow goes on at {running.address}; {why}{last}") from None

    def _streaming_step(self) -> str:
        """What is left to do until the streaming job runs; empty: it does."""
        if self.streaming_job_running():
            return ""
        if not self._streaming_jobs():
            return f"Airflow starts the DAG {STREAMING_DAG}"
        return "the streaming job starts its JVM and its queries"

    def streaming_job_running(self) -> bool:
        """Whether a streaming job runs whose queries have started: its heartbeat says so."""
        beat = read_json(self.settings.run_path / "millrace-streaming-node.heartbeat.json") or {}
        return bool(beat.get("queries")) and beat.get("pid") in {each.pid for each in self._streaming_jobs()}

    def _streaming_jobs(self) -> list[RunStatus]:
        return [each for each in Launcher(self.settings).runs() if each.active and each.job == STREAMING_JOB]

    def _wait(
        self, left: Callable[[KeeperRecord], str], check: Callable[[], None], say: ProgressListener, *, seconds: float
    ) -> None:
        """Wait until `left` says that nothing is left to do; `seconds`: how long that should take."""
        slow, stop = Deadline.after(seconds), Deadline.after(SLOW_START_FACTOR * seconds)
        known = read_record(self.state)
        before = known.restarts if known is not None else 0
        said = ""
        while True:
            check()
            record = read_record(self.state)
            if record is None or record.process() is None:
                raise JobFailed(
                    f"Airflow was stopped while it started:\n{log_tail(self.log_file)}\n(log: {self.log_file})"
                )
            try:
                words = left(record)
                if not words:
                    return
            except AirflowUnavailable as error:
                words = _airflow_step(record) if error.status is None else f"Airflow does not answer yet ({error})"
            if record.restarts - before >= MAX_FAILED_STARTS:
                raise JobFailed(f"{record.reason}, again and again:\n{log_tail(self.log_file)}\n(log: {self.log_file})")
            if record.reason:
                words += f" ({record.reason}; started anew)"
            if words != said:
                say(words)
                said = words
            if slow.expired():
                say(f"this takes longer than {seconds:.0f} s, and goes on: {words} (log: {self.log_file})")
                slow = Deadline.after(seconds)
            if not stop.pause(5 * POLL_SECONDS):
                raise DeadlineExceeded(
                    f"after {SLOW_START_FACTOR * seconds:.0f} s: {words}; it goes on starting: `millrace system status` shows how far"
                    f" it is, `millrace system down` stops it; its log: {self.log_file}"
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
                raise DeadlineExceeded(f"the keeper did not come up; its log: {self.state / KEEPER_LOG}")

    # --- stop -----------------------------------------------------------------------------------------------------

    def stop(self, *, on_progress: ProgressListener = lambda words: None) -> StopResult:
        """End everything: Airflow, then the jobs (each finishes its micro-batch), then the log's server.

        Nothing runs when it returns. Raises DeadlineExceeded where a process cannot be ended, and names it.
        """
        deadline = self.settings.stop_deadline
        if not self.state.exists() and not self.processes():
            return StopResult(ended=0, killed=0)
        self.state.mkdir(parents=True, exist_ok=True)
        with self._alone():
            before = self.processes()
            killed: list[ProcessInfo] = []
            found = self.running()
            keeper = found.record.process() if found else None
            if found is not None and self._streaming_jobs():
                on_progress("stopping the streaming job")
                self._pause_streaming(found)
            if keeper is not None and send_signal(keeper, signal.SIGTERM):
                on_progress("stopping Airflow")
                # The keeper has deadlines of its own, behind which it kills.
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
                on_progress("stopping the log's server")
                killed += terminate([server], deadline=deadline)
            left = kill_all(self.processes, deadline=3 * KILL_SECONDS)
            if left:
                words = ", ".join(str(each.pid) for each in left)
                raise DeadlineExceeded(f"processes of the installation cannot be ended: {words}")
            return StopResult(ended=len(before), killed=len({each.pid for each in killed}))

    def _announce_stop(self) -> None:
        """Record of each job that runs that it is asked to stop: what ends before it can say so was stopped, not
        lost."""
        launcher = Launcher(self.settings)
        for each in launcher.runs():
            if each.active:
                launcher.announce_stop(each.run_id)

    def _pause_streaming(self, running: RunningInstallation) -> None:
        """Have the DAG stop its job between two micro-batches, and its task end: Airflow waits for a task that runs.

        Where Airflow does not answer, or takes too long, the job is stopped without it later.
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
        """The marked processes but the log's server and what it runs."""
        server = self.log_server()
        spared = with_descendants([server.pid] if server else [], all_processes())
        return [each for each in installation_processes(self._mark) if each.pid not in spared]

    def log_server(self) -> ProcessInfo | None:
        """The server of the embedded log, whoever started it."""
        record = running_log_server(self.settings.log_path)
        return find_process(record.pid) if record is not None else None

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """One start or stop at a time; the kernel lets go with the process. Raises DeadlineExceeded."""
        path = self.state / START_LOCK
        busy = DeadlineExceeded(f"another start or stop holds {path}")
        with exclusive_lock(path, deadline=Deadline.after(self.settings.start_deadline), busy=busy):
            yield


def _airflow_step(record: KeeperRecord) -> str:
    """What Airflow does while its web server does not answer yet:

    `airflow standalone` has no children while it makes its tables.
    """
    everything = all_processes()
    group = {pid for pid, each in everything.items() if each.parent == record.pid}
    if any(each.parent in group for each in everything.values()):
        return "Airflow's web server starts"
    return "Airflow prepares its database"
