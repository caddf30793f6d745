"""Imports each DAG file named on the command line and says what CPU time it took beyond airflow.sdk, and what is loaded by then.

airflow.sdk is imported once, then each file in a fork of its own: what another file, or another test, has imported would
hide what this one imports.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import time
import traceback
from pathlib import Path
from typing import Any

_started = time.process_time()
import airflow.sdk  # noqa: E402 - measured

SDK_SECONDS = time.process_time() - _started
"""The measure of this machine at this moment: what importing airflow.sdk itself takes."""

HEAVY = ("pyspark", "delta", "deltalake", "great_expectations", "pandas", "pyarrow", "duckdb", "fastapi")


def look(path: Path) -> dict[str, Any]:
    """What importing the DAG file costs, and what its DAGs have."""
    before = set(sys.modules)
    start = time.process_time()
    spec = importlib.util.spec_from_file_location(f"dag_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    seconds = time.process_time() - start
    dags = [value for value in vars(module).values() if isinstance(value, airflow.sdk.DAG)]
    return {
        "seconds": seconds,
        "sdk_seconds": SDK_SECONDS,
        "heavy": sorted({name.split(".")[0] for name in set(sys.modules) - before} & set(HEAVY)),
        "dags": [
            {
                "dag_id": dag.dag_id,
                "docs": dag.doc_md,
                "description": dag.description,
                "tags": sorted(dag.tags),
                "owners": sorted({task.owner for task in dag.tasks}),
                "params": {name: dag.params.get_param(name).description for name in dag.params},
                "policies": [type(task.retry_policy).__name__ for task in dag.tasks],
                "deadlines": dag.deadline is not None,
                "manual": dag.timetable.can_be_scheduled is False,
            }
            for dag in {id(dag): dag for dag in dags}.values()
        ],
    }


def forked(path: Path) -> dict[str, Any]:
    """:func:`look` in a fork; ``{"error": ...}`` where the import fails."""
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        try:
            found = look(path)
        except BaseException:  # whatever it is, the parent says it
            found = {"error": traceback.format_exc()}
        with os.fdopen(writer, "w") as out:
            json.dump(found, out)
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as told:
        answer = told.read()
    os.waitpid(child, 0)
    return json.loads(answer)


if __name__ == "__main__":
    # The quickest of three: the first pays for a cold disk, and any for what else the machine is doing.
    looked = {name: [forked(Path(name)) for _ in range(3)] for name in sys.argv[1:]}
    sys.stdout.write(
        json.dumps({name: min(each, key=lambda one: one.get("seconds", 0)) for name, each in looked.items()})
    )
