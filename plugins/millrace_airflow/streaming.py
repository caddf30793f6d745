"""The operator that keeps a streaming job running.

It is an ordinary, synchronous task on airflow.sdk's ResumableJobMixin, and holds one worker slot. A deferred task would
hold none, but a triggerer cannot ask whether its DAG is paused, and the scheduler wakes no task of a paused DAG, so
nothing could stop the job. The job itself is detached and has a fixed run id, so only the watching ends with a worker:
the next try finds the job running and continues to watch it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from airflow.sdk import BaseOperator, ResumableJobMixin
from airflow.sdk.exceptions import AirflowRuntimeError

from millrace.base.deadline import Deadline
from millrace_airflow.errors import raise_for
from millrace_airflow.hooks import MillraceHook
from millrace_airflow.job_monitor import StreamingJobMonitor, WatchedJob, restart_backoff
from millrace_airflow.links import JobLogLink, SparkUiLink

if TYPE_CHECKING:
    from airflow.sdk import Context

    from millrace.runtime.launch.command import JobSpec
    from millrace.runtime.launch.launcher import Launcher, RunStatus
    from millrace.runtime.supervisor import Supervisor


class StreamingJobOperator(ResumableJobMixin, BaseOperator):
    """Starts a streaming job or adopts the one that runs, watches it for a while, and leaves it running.

    One job for each run id and data folder. While it watches: progress in the task's log; a job that
    failed, was lost, or hangs (no heartbeat, or one micro-batch for too long) is started again, after a pause that
    doubles up to five minutes and is remembered over tasks; an error that a restart cannot cure fails the task. When
    the DAG is paused, or the task is killed, the job is stopped between two micro-batches. The task ends after
    `watch_for`, with the job running: the next run of the DAG goes on, and no log grows without end.

    :param job: the file of jobs/ without its suffix.
    :param arguments: its arguments.
    :param job_run_id: the run id in run/operations.
    :param app_name: under which the job writes its heartbeat.
    :param watch_for: how long one task watches, in seconds (templated), or as a timedelta.
    :param stale_after: a heartbeat older than this is a hang; also the time that a start may take on top of
    `start_deadline`.
    :param stuck_after: a micro-batch that takes longer than this is a hang.
    :param supervised: the run is the supervisor of a flow (millrace.flows.supervisor). It sees to hangs and ends of the
    job by itself; this task sees to the supervisor.
    """

    template_fields: Sequence[str] = ("arguments", "data_dir", "watch_for")
    operator_extra_links = (JobLogLink(), SparkUiLink())
    ui_color = "#e3f1e1"
    external_id_key = "millrace_run_id"

    def __init__(
        self,
        *,
        job: str = "streaming_node",
        arguments: Sequence[str] = ("--with-flusher",),
        job_run_id: str = "streaming-node",
        app_name: str = "millrace-streaming-node",
        watch_for: timedelta | float | str = timedelta(hours=1),
        stale_after: timedelta = timedelta(seconds=60),
        stuck_after: timedelta = timedelta(minutes=15),
        poll_seconds: float = 2.0,
        say_every: timedelta = timedelta(seconds=15),
        data_dir: str | None = None,
        supervised: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.supervised = supervised
        self.job = job
        self.arguments = list(arguments)
        self.job_run_id = job_run_id
        self.app_name = app_name
        self.watch_for = watch_for.total_seconds() if isinstance(watch_for, timedelta) else watch_for
        self.stale_after = stale_after
        self.stuck_after = stuck_after
        self.poll_seconds = poll_seconds
        self.say_every = say_every
        self.data_dir = data_dir
        self._watching: StreamingJobMonitor | None = None

    def execute(self, context: Context) -> dict[str, Any]:
        """Watch the job for a while; return its restarts and figures."""
        context["ti"].xcom_push(key="millrace_run_id", value=self.job_run_id)
        MillraceHook(data_dir=self.data_dir).launcher().clean()
        return self.execute_resumable(context)

    def submit_job(self, context: Context) -> str:
        """Start the job, or adopt a running one, after the pause that follows a failure."""
        watch, launcher = self._watch(), MillraceHook(data_dir=self.data_dir).launcher()
        supervisor, ends = self._supervisor(watch, launcher, paused=_asks_whether_paused(context))
        self._say_pause(watch)
        supervisor.start(ends)
        return self.job_run_id

    def get_job_status(self, external_id: Any, context: Context) -> str:
        from millrace.base.errors import RunNotFound

        try:
            return str(MillraceHook(data_dir=self.data_dir).launcher().poll(str(external_id)).state)
        except RunNotFound:
            return "lost"

    def is_job_active(self, status: str) -> bool:
        return status == "running"

    def is_job_succeeded(self, status: str) -> bool:
        """Return False: a streaming job that has ended is always restarted."""
        return False

    def get_job_result(self, external_id: Any, context: Context) -> dict[str, Any]:
        return self._watch().summary()

    def poll_until_complete(self, external_id: Any, context: Context) -> dict[str, Any]:  # type: ignore[override]
        """Watch until `watch_for` has passed or the DAG is paused; restart the job if it ends or hangs."""
        watch, launcher = self._watch(), MillraceHook(data_dir=self.data_dir).launcher()
        paused = _asks_whether_paused(context)
        job = WatchedJob(launcher, self.job_run_id, watch, self.log)
        end = Deadline.after(float(self.watch_for))
        supervisor, ends = self._supervisor(watch, launcher, job, until=end, paused=paused)
        if not ends(0):  # paused before it was started: there may be no run
            supervisor.run(ends, job)
        watch.restarts = supervisor.restarts
        if job.last is not None and not job.last.retriable:
            raise_for(job.last.code, job.last.message, retriable=False)
        if paused():
            self.log.info("the DAG is paused: stopping the job between two micro-batches")
            self._stop(launcher)
        return watch.summary()

    def on_kill(self) -> None:
        """Stop the job between two micro-batches: the task was marked failed or cleared, or Airflow stops."""
        self._stop(MillraceHook(data_dir=self.data_dir).launcher())

    def _watch(self) -> StreamingJobMonitor:
        """Return the monitor of this try, created at its start."""
        if self._watching is None:
            settings = MillraceHook(data_dir=self.data_dir).settings
            self._watching = StreamingJobMonitor(
                settings,
                app_name=self.app_name,
                backoff=restart_backoff(settings, self.job_run_id),
                stale_after=self.stale_after.total_seconds(),
                stuck_after=self.stuck_after.total_seconds(),
                say_every=self.say_every.total_seconds(),
                supervised=self.supervised,
            )
        return self._watching

    def _supervisor(
        self,
        watch: StreamingJobMonitor,
        launcher: Launcher,
        job: WatchedJob | None = None,
        *,
        until: Deadline | None = None,
        paused: Callable[[], bool],
    ) -> tuple[Supervisor[WatchedJob], Callable[[float], bool]]:
        """Return the job's supervisor, and a function that waits between checks until `until` or a pause of the DAG."""
        from millrace.runtime.supervisor import Supervisor

        watched = job or WatchedJob(launcher, self.job_run_id, watch, self.log)
        end = until or Deadline.never()

        def start() -> WatchedJob | None:
            return watched if self._start(watch, launcher, until=until, paused=paused) else None

        def ends(seconds: float) -> bool:
            if seconds and not (end.expired() or paused()):
                watch.sleep(end.remaining(maximum=min(seconds, self.poll_seconds)))
            return end.expired() or paused()

        supervisor = Supervisor(
            start,
            backoff=watch.backoff,
            stop_deadline=watch.stop_seconds,
            poll=self.poll_seconds,
            detached=True,  # the job outlives its task
            on_fault=lambda fault: self._say_pause(watch),
        )
        return supervisor, ends

    def _start(
        self,
        watch: StreamingJobMonitor,
        launcher: Launcher,
        *,
        until: Deadline | None = None,
        paused: Callable[[], bool] = lambda: False,
    ) -> bool:
        """Start the job, or adopt a running one; return False if `until` or a pause of the DAG came first."""
        if paused() or (until is not None and until.expired()):
            return False
        foreign = None if self._launched(launcher) else watch.foreign_process()
        if foreign is not None:
            words = f"process {foreign} is a streaming job on this data folder that Airflow did not start: stop it"
            raise_for("JOB_RUNS_ALREADY", words, retriable=True)
        status = launcher.start(self.job_run_id, self._job(), arguments=self.arguments)
        self._say(status)
        return True

    def _job(self) -> JobSpec | str:
        """Return the job for the launcher."""
        return self.job

    def _stop(self, launcher: Launcher) -> None:
        """Stop the job, if there is one: the pause before a restart may have been interrupted."""
        if self._launched(launcher):
            self._say(launcher.stop(self.job_run_id))

    def _launched(self, launcher: Launcher) -> bool:
        """Return whether a job that the launcher started runs and can be adopted."""
        from millrace.base.errors import RunNotFound

        try:
            return launcher.poll(self.job_run_id).active
        except RunNotFound:
            return False

    def _say_pause(self, watch: StreamingJobMonitor) -> None:
        if pause := watch.backoff.remaining_pause():
            self.log.info("waiting %.0f s before the job is restarted", pause)

    def _say(self, status: RunStatus) -> None:
        self.log.info(
            "job %s: run %s, attempt %d, process %s, %s; log %s",
            status.job,
            status.run_id,
            status.attempt,
            status.pid,
            status.state,
            status.log,
        )


def _asks_whether_paused(context: Context) -> Callable[[], bool]:
    """Return a function that asks the execution API whether the DAG is paused, at most every five seconds.

    If the API does not respond, the last answer is used.
    """
    ti: Any = context["ti"]
    known = {"asked": 0.0, "paused": False}

    def paused() -> bool:
        now = time.monotonic()
        if now - known["asked"] > 5.0:
            known["asked"] = now
            try:
                known["paused"] = bool(ti.get_dag(ti.dag_id).is_paused)
            except AirflowRuntimeError as error:  # for example, the API server restarts
                ti.log.warning("cannot ask whether the DAG is paused: %s", error)
        return bool(known["paused"])

    return paused
