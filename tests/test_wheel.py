"""The package as a wheel: what it asks for, and that it serves alone in an empty environment."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Callable
from importlib.metadata import distributions
from pathlib import Path

import pytest

from millrace.client.database import Database
from millrace.testing import deployment
from tests.docs import as_pasted

ROOT = Path(__file__).resolve().parents[1]
UV = Path(sys.executable).with_name("uv")

PROGRAM = """
import sys
import millrace

with millrace.connect(sys.argv[1], token=sys.argv[2]) as db:
    users = db["users"]
    users.upsert([{"id": 1, "name": "Ada"}, {"id": 2}])
    users.delete([2])
print(sorted({name for name in sys.modules} & {"pyspark", "airflow", "deltalake", "pandas"}))
"""

HERE = """
import sys
import millrace.testing

with millrace.testing.deployment() as db:
    made = db.create_collection("pots", {"id": "int64"}, key="id")
    made.insert([{"id": 7}])
    print(made.read().to_pylist())
"""


def _asked() -> dict[str, list[str]]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return {"": project["dependencies"]} | project["optional-dependencies"]


def test_what_the_wheel_asks_for_is_what_the_lock_was_made_from() -> None:
    known = (ROOT / "requirements.in").read_text(encoding="utf-8")
    lines = {re.split(r"\s", line)[0] for line in known.splitlines() if line and not line.startswith("#")}
    wanted = {each for part in _asked().values() for each in part if not each.startswith("millrace[")}
    assert wanted <= lines
    assert wanted & {"pyspark==4.2.0", "kafka-python==3.0.12", "apache-airflow==3.3.2"}
    assert not {"pyspark", "pandas", "apache-airflow", "kafka-python"} & {
        re.split(r"[=<>\[]", each)[0] for each in _asked()[""]
    }


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of a copy of the checkout: setuptools packs what an earlier build left in its folder, too."""
    folder = tmp_path_factory.mktemp("wheel")
    copy = folder / "checkout"
    for name in ("include", "jobs", "dags", "plugins"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    for name in ("pyproject.toml", "airflow.cfg", "README.md", "LICENSE", "NOTICE"):
        shutil.copy(ROOT / name, copy / name)
    subprocess.run([UV, "build", "-q", "--wheel", "--out-dir", folder, copy], check=True, timeout=300)
    (found,) = folder.glob("*.whl")
    return found


def test_the_wheel_holds_what_runs_and_neither_the_demo_nor_servers_for_tests(wheel: Path) -> None:
    inside = set(zipfile.ZipFile(wheel).namelist())
    assert {"millrace/py.typed", "millrace/runtime/spark/log4j2.properties"} <= inside
    assert not [name for name in inside if name.startswith(("millrace/demo", "millrace/brokers", "tests", "bench"))]
    package = {path.relative_to(ROOT / "include") for path in (ROOT / "include" / "millrace").rglob("*.py")}
    package -= {path for path in package if path.parts[1] in ("demo", "brokers")}
    assert {path.as_posix() for path in package} <= inside
    files = [path for name in ("jobs", "dags", "plugins") for path in (ROOT / name).rglob("*") if path.is_file()]
    wanted = {path.relative_to(ROOT).as_posix() for path in files if "__pycache__" not in path.parts} | {"airflow.cfg"}
    prefix = next(name for name in inside if name.endswith("/share/millrace/airflow.cfg")).removesuffix("airflow.cfg")
    assert {name.removeprefix(prefix) for name in inside if name.startswith(prefix)} == wanted


Install = Callable[[str], Path]


@pytest.fixture(scope="module")
def install(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Install:
    """Installs the wheel with extras into an environment of its own; the folder of its programs."""

    def installed(extras: str) -> Path:
        folder = tmp_path_factory.mktemp("environment")
        # What is installed here, as constraints: what is tested is what is pinned.
        pins = folder / "pins.txt"
        pins.write_text("\n".join(f"{each.name}=={each.version}" for each in distributions()))
        subprocess.run([UV, "venv", "-q", "--python", sys.executable, folder / "alone"], check=True, timeout=300)
        programs = folder / "alone" / "bin"
        # Without compiled code a Python worker of Spark on a busy machine comes up later than Spark waits.
        command = [UV, "pip", "install", "-q", "--compile-bytecode", "--python", programs / "python", "-c", pins]
        subprocess.run([*command, f"{wheel}{extras}"], check=True, timeout=900)
        return programs

    return installed


class Alone:
    """Programs of an environment, run in an empty folder with an empty home, and no checkout in sight."""

    def __init__(self, programs: Path, folder: Path) -> None:
        self._programs, self._folder = programs, folder
        (folder / "home").mkdir()
        cache = os.environ.get("XDG_CACHE_HOME", str(Path.home() / ".cache"))  # jars are fetched once
        ours = {name: value for name, value in os.environ.items() if not name.startswith(("MILLRACE_", "PYTHON"))}
        self._environment = {**ours, "HOME": str(folder / "home"), "XDG_CACHE_HOME": cache}
        self._environment |= {"MILLRACE_DATA": str(folder / "data"), "COLUMNS": "120"}

    def __call__(self, program: str, *arguments: object, seconds: float = 300, **environment: str) -> str:
        done = subprocess.run(
            [self._programs / program, *map(str, arguments)],
            cwd=self._folder,
            env=self._environment | environment,
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
        )
        assert done.returncode == 0, f"{program} {arguments}: {done.stdout}{done.stderr}"
        return done.stdout


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_wheel_alone_serves_in_an_empty_environment(install: Install, tmp_path: Path) -> None:
    run = Alone(install(""), tmp_path)
    (tmp_path / "program.py").write_text(PROGRAM)
    (tmp_path / "here.py").write_text(HERE)
    with deployment(tmp_path / "served") as db:
        db.create_collection("users", {"id": "int64", "name": "string?"}, key="id")
        address, token = _server(db)
        assert run("python", "program.py", address, token).strip() == "[]"
        assert db["users"].read().to_pylist() == [{"id": 1, "name": "Ada"}]
    assert run("python", "here.py").strip() == "[{'id': 7}]"
    assert "millrace" in run("millrace", "--help")


STREAM = """
streams:
  - name: copies
    source: {collection: users}
    sink: {collection: people, mode: upsert, create: true, key: id}
"""


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_wheel_runs_the_quickstart_jobs_operations_and_streams_with_spark(install: Install, tmp_path: Path) -> None:
    programs = install("[coord,spark]")
    as_pasted.run("docs/quickstart.md", programs=programs, seconds=600)
    run = Alone(programs, tmp_path)
    (tmp_path / "streams.yaml").write_text(STREAM)
    (tmp_path / "users.json").write_text('{"id": 1, "name": "Ada"}\n')
    try:
        run("millrace", "collections", "create", "users", "--key=id", "--field=id:int64", "--field=name:string")
        run("millrace", "produce", "users", "users.json")
        run("millrace", "jobs", "run", "--with-flusher", "--available-now", seconds=600)
        assert "Ada" in run("millrace", "read", "users")
        assert json.loads(run("millrace", "operations", "checkpoint", "--json"))["ok"] is True
        declared = {"MILLRACE_STREAM_DECLARATIONS": str(tmp_path / "streams.yaml")}
        run("millrace", "flows", "run", "copies", "--available-now", seconds=600, **declared)
        run("millrace", "jobs", "run", "--with-flusher", "--available-now", seconds=600)
        assert "Ada" in run("millrace", "read", "people")
    finally:
        run("millrace", "log", "stop")


@pytest.mark.slow
@pytest.mark.system
@pytest.mark.timeout(3000)
def test_the_wheel_runs_the_whole_system_with_airflow(install: Install, tmp_path: Path) -> None:
    run = Alone(install("[airflow]"), tmp_path)
    try:
        run("millrace", "system", "up", "--detach", "--port", 0, seconds=2000)
        assert json.loads(run("millrace", "system", "status", "--json"))["healthy"] is True
        assert run("millrace", "system", "airflow", "dags", "list-import-errors").strip().endswith("No data found")
    finally:
        assert "none is left" in run("millrace", "system", "down", seconds=300)


def _server(db: Database) -> tuple[str, str]:
    record = json.loads((db.settings.log_path / "server.json").read_text())
    return record["address"], record["token"]
