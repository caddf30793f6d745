"""Every operation is declared once, lightly, and rightly; a folder with a declaration is all that a new one takes."""

from __future__ import annotations

import inspect
import json
import os
import shutil
import subprocess
import sys
import typing
from pathlib import Path

import pytest

from millrace.base.errors import InvalidArgument, InvalidSettings
from millrace.base.settings import Settings
from millrace.base.settings.place import TablesPlace
from millrace.coord.machine.tables_place import change_place
from millrace.operations.entry import _settings
from millrace.operations.operation import Operation, OperationParams, OperationReport
from millrace.operations.registry import find_job, find_operation, operations
from tests.airflow_home import HOME, ROOT

FOLDERS = ROOT / "include" / "millrace" / "operations"
HEAVY = ("pyspark", "delta", "deltalake", "pyarrow", "numpy", "airflow", "great_expectations", "pandas", "duckdb")

DECLARED = '''
"""The operation `greet`: what a new folder holds."""

from pydantic import Field

from millrace.operations.operation import Operation, OperationParams, OperationReport


class GreetParams(OperationParams):
    """Whom to greet."""

    name: str = Field("world", description="Who is greeted.")


class GreetReport(OperationReport):
    """What was said."""

    said: str


def run(settings, params, progress):
    return GreetReport(said=f"Hello {params.name}")


GREET = Operation(name="greet", title="Greet", summary="Says hello.", params=GreetParams, run=run)
'''

DAG_FILE = '''
"""Greet: says hello."""

from millrace.operations.greet.declaration import GREET
from millrace_airflow.defaults import operation_dag
from millrace_airflow.operators import JobOperator

with operation_dag(GREET, doc=__doc__) as dag:
    JobOperator(task_id="greet", operation=GREET)
'''

COMMAND = """
from millrace.commands.parts.command_line import DATA_PANEL, root


@root.command(rich_help_panel=DATA_PANEL)
def wave() -> None:
    print("Bye")
"""

SEEN = """
import json, runpy, sys
from millrace_airflow.roles import DAG_ROLES
from millrace_airflow.ui.actions import ACTIONS
dag = runpy.run_path(sys.argv[1])["dag"]
print(json.dumps({
    "actions": [each.title for each in ACTIONS if each.dag_id == "greet"],
    "role": DAG_ROLES["greet"],
    "dag": [dag.dag_id, dag.description, sorted(dag.tags), list(dag.params), [task.task_id for task in dag.tasks]],
}))
"""


def python(*command: str, **more: str) -> str:
    environment = {**os.environ, "AIRFLOW_HOME": str(HOME), **more}
    done = subprocess.run(
        [sys.executable, *command], env=environment, capture_output=True, text=True, check=False, timeout=110
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_declaration_imports_nothing_heavy() -> None:
    code = "import sys; from millrace.operations.registry import operations; operations(); print(*sys.modules)"
    loaded = {name.split(".")[0] for name in python("-c", code, PYTHONPATH=str(ROOT / "include")).split()}
    assert not loaded & set(HEAVY)
    assert not {name for name in loaded if name.startswith("millrace_airflow")}


def test_every_folder_declares_an_operation() -> None:
    declared = {each.params.__module__.split(".")[2] for each in operations().values()}
    folders = {path.parent.name for path in FOLDERS.glob("*/__init__.py")}
    assert folders == declared


@pytest.mark.parametrize("name", sorted(operations()))
def test_what_an_operation_declares_is_what_its_function_takes_and_gives(name: str) -> None:
    operation = operations()[name]
    run = operation.load()
    hints = typing.get_type_hints(run, vars(sys.modules[run.__module__]) | {"SparkSession": object})
    takes = list(inspect.signature(run).parameters)
    assert takes == [*(["spark"] if operation.needs_spark else []), "settings", "params", "progress"]
    assert hints["params"] is operation.params
    assert issubclass(hints["return"], OperationReport)
    assert operation.summary.endswith(".")
    assert all(field.description for field in operation.params.model_fields.values())


@pytest.mark.slow
def test_a_folder_and_a_dag_file_are_all_that_a_new_operation_takes_and_a_file_a_new_command(tmp_path: Path) -> None:
    """In a copy of the package: one folder and one file more, nothing else changed."""
    package = ROOT / "include" / "millrace"
    shutil.copytree(package, tmp_path / "millrace", ignore=shutil.ignore_patterns("__pycache__"))
    new = tmp_path / "millrace" / "operations" / "greet"
    new.mkdir()
    (new / "__init__.py").touch()
    (new / "declaration.py").write_text(DECLARED)
    (tmp_path / "greet.py").write_text(DAG_FILE)
    (tmp_path / "millrace" / "commands" / "wave.py").write_text(COMMAND)

    there = {
        "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT / "plugins")]),
        "MILLRACE_DATA": str(tmp_path / "data"),
    }
    job = python("-m", "millrace.operations", "greet", "--params", '{"name": "Ada"}', **there)
    assert json.loads(job) == {"ok": True, "report": {"said": "Hello Ada"}}
    assert json.loads(python("-m", "millrace", "operations", "greet", "--name", "Bob", "--json", **there)) == {
        "said": "Hello Bob"
    }
    assert python("-m", "millrace", "wave", **there) == "Bye\n"
    launched = python("-m", "millrace", "jobs", "start", "greet", "--wait", "60", **there)
    assert json.loads(launched) == {"said": "Hello world"}
    assert json.loads(python("-c", SEEN, str(tmp_path / "greet.py"), **there).splitlines()[-1]) == {
        "actions": ["Greet"],
        "role": "operate",
        "dag": ["greet", "Greet: says hello.", ["greet", "millrace"], ["name"], ["greet"]],
    }


def test_an_operation_of_a_machine_on_which_nothing_else_runs_finds_tables_that_moved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    meta = f"sqlite:///{tmp_path}/meta.db"
    for name, value in {"DATA": str(tmp_path / "there"), "META_STORE": meta, "TABLES": str(tmp_path / "old")}.items():
        monkeypatch.setenv(f"MILLRACE_{name}", value)
    here = Settings(data_dir=tmp_path / "here", meta_store=meta, tables=str(tmp_path / "old"))
    new = str(tmp_path / "new")
    change_place(here, lambda place: TablesPlace(new, (place.uri,)))
    assert _settings().tables == new


def test_a_job_that_nobody_declares_is_refused_with_those_there_are() -> None:
    with pytest.raises(InvalidArgument, match=r"jobs are backfill, .*compaction, flusher, .*streaming_node"):
        find_job("compact")
    with pytest.raises(InvalidArgument, match="may only name parameters"):
        Operation(name="wrong", summary="Wrong.", params=OperationParams, run="a:b", set_by_dag=("nothing",))


def test_a_package_registers_an_operation_and_one_that_does_not_load_stops_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    metadata = tmp_path / "elsewhere-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: elsewhere\nVersion: 1.0\n")
    points = metadata / "entry_points.txt"
    points.write_text("[millrace.operations]\ngreet = greeting:GREET\n")
    (tmp_path / "greeting.py").write_text(DECLARED)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert find_operation("greet").summary == "Says hello."
    assert find_job("greet").command[1:] == ("-m", "millrace.operations", "greet")
    assert set(operations()) > {"greet", "backup"}
    points.write_text("[millrace.operations]\ngreet = greeting:NOBODY\n")
    assert find_job("backup").name == "backup"
    with pytest.raises(InvalidSettings, match=r"greet = greeting:NOBODY .* does not load"):
        find_job("greet")
    (tmp_path / "greeting.py").write_text(DECLARED.replace('"greet"', '"backup"'))
    points.write_text("[millrace.operations]\nbackup = greeting:GREET\n")
    monkeypatch.delitem(sys.modules, "greeting")
    with pytest.raises(InvalidArgument, match="several operations are named backup"):
        operations()


def test_the_old_names_of_a_declaration_and_a_report_warn_and_work() -> None:
    with pytest.warns(DeprecationWarning, match="use low_priority"):
        old = Operation(name="mine", summary="Mine.", params=OperationParams, run="a:b", stands_behind=True)
    with pytest.warns(DeprecationWarning, match="use set_by_dag"):
        Operation(name="mine", summary="Mine.", params=OperationParams, run="a:b", of_the_run=())
    assert old.low_priority
    with pytest.warns(DeprecationWarning, match="name it succeeded"):

        class Report(OperationReport):
            @property
            def holds(self) -> bool:
                return False

    assert not Report().succeeded
