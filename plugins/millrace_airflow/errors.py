"""The errors of Millrace's tasks: one class for each retry behaviour.

A job reports `code` and `retriable` of its error; :func:`raise_for` turns them into an exception that Airflow and the
retry policy of :mod:`millrace_airflow.defaults` understand.
"""

from __future__ import annotations

from typing import Final, NoReturn

from airflow.sdk.exceptions import AirflowException, AirflowFailException


class JobError(AirflowException):
    """A job failed with an error that a retry may fix."""

    def __init__(self, message: str, *, code: str = "JOB_FAILED") -> None:
        super().__init__(message)
        self.code = code


class JobConflict(JobError):
    """Another process was first (another committer, another holder of the log). Retry soon."""


class JobUnavailable(JobError):
    """A service that the job needs does not respond, or is not ready. Retry after a while."""


class JobLost(JobError):
    """The job's process ended without a report (killed, out of memory). Retry after a while."""


_CLASSES: Final[dict[str, type[JobError]]] = {
    "COMMIT_FENCED": JobConflict,
    "LOG_BUSY": JobConflict,
    "DeltaError": JobConflict,
    "CommitFailedError": JobConflict,
    "LOG_UNAVAILABLE": JobUnavailable,
    "TICK_NOT_REACHED": JobUnavailable,
    "DEADLINE_EXCEEDED": JobUnavailable,
    "JOB_LOST": JobLost,
}


def raise_for(code: str, message: str, *, retriable: bool) -> NoReturn:
    """Raise for a job's error: AirflowFailException if a retry cannot help, else a JobError of its class."""
    words = f"{code}: {message}"
    if not retriable:
        raise AirflowFailException(words)
    raise _CLASSES.get(code, JobError)(words, code=code)
