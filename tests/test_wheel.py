"""The package as a wheel: what it asks for, and that it serves alone in an empty environment."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from importlib.metadata import distributions
from pathlib import Path

import pytest

from millrace.client.database import Database
from millrace.testing import deployment

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


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_wheel_alone_serves_in_an_empty_environment(wheel: Path, tmp_path: Path) -> None:
    def run(*command: str | Path, seconds: float = 300) -> str:
        done = subprocess.run(
            [str(each) for each in command], cwd=tmp_path, capture_output=True, text=True, timeout=seconds, check=False
        )
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout

    # What is installed here, as constraints: what is tested is what is pinned.
    pins = [f"{each.name}=={each.version}" for each in distributions()]
    (tmp_path / "pins.txt").write_text("\n".join(pins))
    run(UV, "venv", "-q", "--python", sys.executable, "alone")
    python = tmp_path / "alone" / "bin" / "python"
    run(UV, "pip", "install", "-q", "--python", python, "-c", "pins.txt", wheel)
    (tmp_path / "program.py").write_text(PROGRAM)
    (tmp_path / "here.py").write_text(HERE)

    with deployment(tmp_path / "data") as db:
        db.create_collection("users", {"id": "int64", "name": "string?"}, key="id")
        address, token = _server(db)
        assert run(python, "program.py", address, token).strip() == "[]"
        assert db["users"].read().to_pylist() == [{"id": 1, "name": "Ada"}]
    assert run(python, "here.py").strip() == "[{'id': 7}]"
    assert "millrace" in run(tmp_path / "alone" / "bin" / "millrace", "--help")


def _server(client: Database) -> tuple[str, str]:
    record = json.loads((client.settings.log_path / "server.json").read_text())
    return record["address"], record["token"]
