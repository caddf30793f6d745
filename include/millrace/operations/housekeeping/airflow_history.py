"""Airflow's history in the installation's own Airflow home: rows of its metadata database.

``millrace_airflow.housekeeping`` does it in a process of its own, with Airflow's configuration. The launcher hands no
secrets of Airflow to a job, so a database that only an environment variable names is not found here; the report says
so. An Airflow outside of the data folder is somebody else's, with other people's DAGs, and is left alone.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import suppress
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from millrace.base.package import ROOT
from millrace.base.settings import Settings
from millrace.runtime.child_processes import JobFailed
from millrace.runtime.launch.command import home_folder

MODULE: Final = "millrace_airflow.housekeeping"
STOP_SECONDS: Final = 20.0
"""Time that the process may take to end its transaction when the run is stopped."""
_DATABASE: Final = "AIRFLOW__DATABASE__SQL_ALCHEMY_CONN"
_BLOCKED: Final = "airflow-db-not-allowed"
"""Scheme of the address that Airflow gives to processes of tasks instead of the database's."""


def airflow_home(settings: Settings) -> Path:
    """Return the Airflow home of this installation (millrace.installation.config)."""
    return settings.data_dir.resolve() / "airflow"


def trim_database(settings: Settings, *, before: float, dry_run: bool) -> dict[str, Any]:
    """Remove rows of runs, tasks and events that ended before `before` (Unix seconds).

    Returns ``{"rows": {table: count}, "bytes": freed, "words": why not, or what stayed}``. Raises JobFailed.
    """
    home = airflow_home(settings)
    if not home.is_dir() or find_spec("airflow") is None:
        return {"rows": {}, "bytes": 0, "words": "Airflow has not run here"}
    moment = datetime.fromtimestamp(before, UTC).isoformat()
    command = [sys.executable, "-m", MODULE, "--before", moment, *(["--dry-run"] if dry_run else [])]
    with subprocess.Popen(command, env=_environment(settings, home), stdout=subprocess.PIPE, text=True) as process:
        try:
            output, _ = process.communicate()
        except BaseException:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(STOP_SECONDS)
            process.kill()
            raise
    if process.returncode:
        raise JobFailed(f"{MODULE} ended with {process.returncode}: see the lines before this one")
    found: dict[str, Any] = json.loads(output.splitlines()[-1])
    return found


def _environment(settings: Settings, home: Path) -> dict[str, str]:
    root = home_folder()
    paths = [str(ROOT), str(root / "plugins"), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    inherited = {
        name: value for name, value in os.environ.items() if name != _DATABASE or not value.startswith(_BLOCKED)
    }
    return {
        **inherited,
        **settings.environment(),
        "MILLRACE_HOME": str(root),
        "AIRFLOW_CONFIG": str(root / "airflow.cfg"),
        "AIRFLOW_HOME": str(home),
        "PYTHONPATH": os.pathsep.join(dict.fromkeys(paths)),
    }
