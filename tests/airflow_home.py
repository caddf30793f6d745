"""An Airflow of the test run's own.

Its environment must stand before anything imports airflow, so conftest files import this.

The whole test run is one process: whoever imports this first decides, and all others find the same folder.
"""

from __future__ import annotations

import atexit
import json
import os
import shutil
import sys
import tempfile
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BUNDLE = "airflow.dag_processing.bundles.local.LocalDagBundle"
"""Two folders of DAGs: Millrace's own, and those that the tests bring."""


def _prepare() -> Path:
    home = Path(tempfile.mkdtemp(prefix="millrace-airflow-"))
    owner = os.getpid()

    def remove() -> None:
        if os.getpid() == owner:
            shutil.rmtree(home, ignore_errors=True)

    atexit.register(remove)
    os.environ |= {
        "AIRFLOW_HOME": str(home),
        "AIRFLOW_CONFIG": str(home / "airflow.cfg"),
        "AIRFLOW__CORE__DAGS_FOLDER": str(ROOT / "dags"),
        "AIRFLOW__DAG_PROCESSOR__DAG_BUNDLE_CONFIG_LIST": json.dumps(
            [
                {"name": "dags-folder", "classpath": BUNDLE, "kwargs": {}},
                {"name": "tests", "classpath": BUNDLE, "kwargs": {"path": str(ROOT / "tests" / "dags" / "own")}},
            ]
        ),
        "AIRFLOW__CORE__PLUGINS_FOLDER": str(ROOT / "plugins"),
        "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
        "AIRFLOW__CORE__DAGS_ARE_PAUSED_AT_CREATION": "False",
        "AIRFLOW__CORE__UNIT_TEST_MODE": "False",
        "AIRFLOW__API_AUTH__JWT_SECRET": "a secret of the test run, long enough for its algorithm to take: 0123456789"
        * 2,
        "AIRFLOW__USAGE_DATA_COLLECTION__ENABLED": "False",
        "AIRFLOW__LOGGING__LOGGING_LEVEL": "INFO",
    }
    return home


if "airflow" in sys.modules:
    raise RuntimeError("airflow was imported before its environment stood: import tests.airflow_home in that conftest")
HOME = _prepare()
"""AIRFLOW_HOME of this run; removed at its end."""


@cache
def database() -> None:
    """The metadata database in :data:`HOME`, made where a test first needs it.

    By this process, which has Airflow loaded for its tests anyway.
    """
    from airflow.utils.db import initdb

    initdb()
