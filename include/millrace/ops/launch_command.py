"""The command line and the environment of a launched job: this Python, a file of jobs/, the settings as variables.

With the setting ``spark_master`` the same command submits to that master: pyspark starts Spark through its own
``bin/spark-submit`` (client mode), with SPARK_HOME and PYSPARK_PYTHON of this Python (millrace.spark). The Python process
stays the one that gets the signals, so a job stops between two micro-batches on a cluster as it does here.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import millrace
from millrace.errors import InvalidArgument, InvalidSettings
from millrace.ops.launch_folder import RunFolder
from millrace.ops.launch_process import RUN_FOLDER
from millrace.settings import Settings

_OF_AIRFLOW: Final = ("AIRFLOW__", "_AIRFLOW")
"""Airflow's own settings, its secrets among them: no job needs them, and a long-lived process is no place for them."""


def jobs_folder() -> Path:
    """The folder with the Spark entry points. Raises InvalidSettings where there is none."""
    home = os.environ.get("MILLRACE_HOME")
    root = Path(home) if home else Path(millrace.__file__).resolve().parents[2]
    if not (root / "jobs" / "streaming_node.py").is_file():
        raise InvalidSettings(f"{root} has no jobs/streaming_node.py: set MILLRACE_HOME to the checkout of Millrace")
    return root / "jobs"


def job_script(job: str, *, folder: Path | None = None) -> Path:
    """The entry point of `job`. Raises InvalidArgument that names the jobs there are."""
    root = folder if folder is not None else jobs_folder()
    script = root / f"{job}.py"
    if not job.isidentifier() or not script.is_file():
        raise InvalidArgument(f"no job {job!r}; jobs are {', '.join(sorted(path.stem for path in root.glob('*.py')))}")
    return script


def command_of(
    script: Path, folder: RunFolder, *, params: Mapping[str, Any] | None, arguments: Sequence[str]
) -> list[str]:
    """The job's command line: its parameters, where its result and its progress go, then `arguments`."""
    command = [sys.executable, str(script)]
    if params is not None:
        command += ["--params", json.dumps(params)]
    return [*command, "--result", str(folder.result), "--progress", str(folder.progress), *arguments]


def environment_of(settings: Settings, folder: RunFolder) -> dict[str, str]:
    """The job's environment: this process's without Airflow's settings, ours, this package's path, the mark of the run."""
    package = str(Path(millrace.__file__).resolve().parent.parent)
    inherited = [part for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if part and part != package]
    return {
        **{name: value for name, value in os.environ.items() if not name.startswith(_OF_AIRFLOW)},
        **settings.environment(),
        "PYTHONPATH": os.pathsep.join([package, *inherited]),
        "PYTHONUNBUFFERED": "1",
        RUN_FOLDER: str(folder.path),
    }
