"""What Airflow loads, and at what cost, where nothing of it is loaded yet: each DAG file, and the plugin.

    python tests/airflow_loads.py dags/*.py       # one JSON object: a DAG file's path, or "plugin" -> what was found

airflow.sdk is imported once, then each of them in a fork of its own: what another file, or another test, has imported
would hide what this one imports.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

HEAVY = ("pyspark", "delta", "deltalake", "great_expectations", "pandas", "pyarrow", "duckdb", "fastapi")
LARGEST_SHARE = 0.2
"""Of what airflow.sdk itself takes to import, in CPU time of the same process: 2 s and more.

A guard against something heavy that HEAVY does not name, with room for a busy machine; on a quiet
one the largest share is 0.07.
"""
TRIES = 3
"""A file that took more than its share is looked at again.

The first look pays for a cold disk, and any for what else the machine is doing.
"""


@cache
def airflow_loads() -> dict[str, dict[str, Any]]:
    """What this module prints for all files of dags/, in a process of its own, once a run."""
    root = Path(__file__).resolve().parents[1]
    paths = os.pathsep.join(str(root / name) for name in ("include", "plugins", "dags"))
    done = subprocess.run(
        [sys.executable, __file__, *map(str, sorted((root / "dags").rglob("*.py")))],
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
        env=os.environ | {"PYTHONPATH": paths},
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return found


def _dag_file(path: Path) -> dict[str, Any]:
    """What importing the DAG file costs, and what its DAGs have."""
    import airflow.sdk

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


def _plugins() -> dict[str, Any]:
    """What Airflow's plugin manager finds in plugins/, and what is loaded behind that."""
    from airflow import plugins_manager

    return {
        "names": [each["name"] for each in plugins_manager.get_plugin_info()],
        "errors": {str(path): str(error) for path, error in plugins_manager.get_import_errors().items()},
        "modules": sorted({name.split(".")[0] for name in sys.modules}),
    }


def _forked(look: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What `look` answers in a fork; ``{"error": ...}`` where it raises."""
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        try:
            found = look()
        except BaseException:  # whatever it is, the parent says it
            found = {"error": traceback.format_exc()}
        with os.fdopen(writer, "w") as out:
            json.dump(found, out)
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as told:
        answer = told.read()
    os.waitpid(child, 0)
    made: dict[str, Any] = json.loads(answer)
    return made


def main(files: list[str]) -> None:
    started = time.process_time()
    import airflow.sdk  # noqa: F401 - measured

    measure = time.process_time() - started
    found = {"plugin": _forked(_plugins)}
    for name in files:
        for _ in range(TRIES):
            made = _forked(lambda name=name: _dag_file(Path(name)))
            made["share"] = made.get("seconds", 0.0) / measure
            if made["share"] < LARGEST_SHARE:
                break
        found[name] = made
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1:])
