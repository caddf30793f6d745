"""A job for the tests of the launcher and of the operators.

Says it is at work, waits for a file, ends as it is told.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

from pydantic import Field

from millrace.base import errors
from millrace.base.settings import Settings
from millrace.operations.entry import main
from millrace.operations.operation import Operation, OperationParams, OperationReport
from millrace.runtime.progress import Progress


class LightParams(OperationParams):
    """What the job is told."""

    wait_for: Path | None = Field(None, description="A file to wait for.")
    fail: str | None = Field(None, description="The error to end with, by the name of its class.")
    stubborn: bool = Field(False, description="Hear no SIGTERM, and have a child that goes on.")
    write: str = Field("done", description="What the report says.")
    number: int = Field(1, ge=1, le=9, description="A number.")


class LightReport(OperationReport):
    """What it says at its end."""

    said: str
    number: int


def work(settings: Settings, params: LightParams, progress: Progress) -> LightReport:
    """Do as told."""
    if params.stubborn:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    progress.update("at work", done=0.5, rows=7)
    while params.wait_for is not None and not params.wait_for.exists():
        time.sleep(0.01)
    if params.fail is not None:
        raise getattr(errors, params.fail, ValueError)("as asked")
    return LightReport(said=params.write, number=params.number)


LIGHT = Operation(name="light", summary="Does as it is told.", params=LightParams, run=work)

if __name__ == "__main__":
    sys.exit(main(LIGHT))
