"""What a task of Millrace fails with: one class for each way in which a retry should behave.

A job says `code` and `retriable` of its error itself; :func:`raise_for` turns them into an exception that Airflow and
the retry policy of :mod:`millrace_airflow.defaults` understand.
"""

from __future__ import annotations

from typing import Final, NoReturn

from airflow.sdk.exceptions import AirflowException, AirflowFailException


class JobError(AirflowException):
    """A job failed with an error that a retry may cure."""

    def __init__(self, message: str, *, code: str = "JOB_FAILED") -> None:
        super().__init__(message)
        self.code = code


class JobConflict(JobError):
    """Somebody else was first (another committer, another holder of the log): soon again."""


class JobUnavailable(JobError):
    """Something that the job needs does not answer, or has not come far enough: again after a while."""


class JobLost(JobError):
    """The job's process is gone without a word (killed, out of memory): again after a while."""


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
    """Raise for a job's error: AirflowFailException where a retry cannot help, else a JobError of its class."""
    words = f"{code}: {message}"
    if not retriable:
        raise AirflowFailException(words)
    raise _CLASSES.get(code, JobError)(words, code=code)
