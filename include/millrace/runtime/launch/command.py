"""The command line and environment of a launched job: this Python, a module or a file of jobs/, settings as variables.

With the setting ``spark_master`` the same command submits to that master: pyspark starts Spark through its own
``bin/spark-submit`` in client mode (millrace.runtime.spark.session). The Python process still receives the signals, so
a job stops between two micro-batches on a cluster as it does locally.
"""

from __future__ import annotations

import json
import os
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from millrace.base.errors import InvalidArgument, InvalidSettings
from millrace.base.package import ROOT
from millrace.base.settings import Settings
from millrace.runtime.launch.folder import RUN_FOLDER_VARIABLE, RunFolder

_OF_AIRFLOW: Final = ("AIRFLOW__", "_AIRFLOW")
"""Airflow's settings and secrets. No job needs them, and they should not stay in a long-lived process."""


def home_folder() -> Path:
    """Return the folder with jobs/, dags/, plugins/ and airflow.cfg.

    MILLRACE_HOME names it; else it is the checkout that holds this package, or what the wheel installed. Raises
    InvalidSettings if there is none.
    """
    home = os.environ.get("MILLRACE_HOME")
    folders = [Path(home)] if home else [ROOT.parent, *_installed_folders()]
    for folder in folders:
        if (folder / "jobs" / "streaming_node.py").is_file():
            return folder
    what = "set MILLRACE_HOME to a checkout of Millrace" + ("" if home else ", or install the wheel again")
    raise InvalidSettings(f"{folders[0]} has no jobs/streaming_node.py: {what}")


def jobs_folder() -> Path:
    """Return the folder of the Spark entry points. Raises InvalidSettings if it is missing."""
    return home_folder() / "jobs"


def _installed_folders() -> Iterator[Path]:
    """Yield where the wheel's data files may be: ``share/millrace`` of the scheme that installed this package."""
    for scheme in sysconfig.get_scheme_names():
        if Path(sysconfig.get_path("purelib", scheme)).resolve() == ROOT:
            yield Path(sysconfig.get_path("data", scheme), "share", "millrace")
    yield ROOT / "share" / "millrace"  # pip install --target


@dataclass(frozen=True, slots=True)
class JobSpec:
    """A job to launch: its name in the run's records, and its command line without what a run adds."""

    name: str
    command: tuple[str, ...]


def module_job(name: str, *command: str) -> JobSpec:
    """Return a job that runs a module of this Python (``python -m``) with leading arguments."""
    return JobSpec(name, (sys.executable, "-m", *command))


def script_job(name: str, *, folder: Path | None = None, others: Iterable[str] = ()) -> JobSpec:
    """Return a job that runs a file of jobs/. Raises InvalidArgument, which lists the jobs (with `others`)."""
    root = folder if folder is not None else jobs_folder()
    script = root / f"{name}.py"
    if not name.isidentifier() or not script.is_file():
        known = sorted({path.stem for path in root.glob("*.py")} | set(others))
        raise InvalidArgument(f"no job {name!r}; jobs are {', '.join(known)}")
    return JobSpec(name, (sys.executable, str(script)))


def command_of(
    job: JobSpec, folder: RunFolder, *, params: Mapping[str, Any] | None, arguments: Sequence[str]
) -> list[str]:
    """Return the job's command line: parameters, paths of result and progress, then `arguments`."""
    command = [*job.command]
    if params is not None:
        command += ["--params", json.dumps(params)]
    return [*command, "--result", str(folder.result), "--progress", str(folder.progress), *arguments]


def environment_of(settings: Settings, folder: RunFolder) -> dict[str, str]:
    """Return the job's environment: this process's without Airflow's settings, plus settings, path and run folder."""
    package = str(ROOT)
    inherited = [part for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if part and part != package]
    return {
        **{name: value for name, value in os.environ.items() if not name.startswith(_OF_AIRFLOW)},
        **settings.environment(),
        "PYTHONPATH": os.pathsep.join([package, *inherited]),
        "PYTHONUNBUFFERED": "1",
        RUN_FOLDER_VARIABLE: str(folder.path),
    }
