"""The package as a wheel: what it asks for, and that it serves alone in an empty environment."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
import zipfile
from importlib.metadata import distributions
from pathlib import Path

import pytest

from millrace.client.client import Client
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


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_wheel_alone_serves_in_an_empty_environment(tmp_path: Path) -> None:
    def run(*command: str | Path, seconds: float = 300) -> str:
        done = subprocess.run(
            [str(each) for each in command], cwd=tmp_path, capture_output=True, text=True, timeout=seconds, check=False
        )
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout

    run(UV, "build", "-q", "--wheel", "--out-dir", tmp_path / "dist", ROOT)
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    inside = zipfile.ZipFile(wheel).namelist()
    assert {"millrace/py.typed", "millrace/runtime/spark/log4j2.properties"} <= set(inside)
    assert any(name.startswith("millrace/brokers/") and name.endswith(".lock") for name in inside)
    assert not [name for name in inside if name.startswith(("tests", "bench", "jobs", "dags"))]

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
        address, token = _server(db.client)
        assert run(python, "program.py", address, token).strip() == "[]"
        assert db["users"].read().to_pylist() == [{"id": 1, "name": "Ada"}]
    assert run(python, "here.py").strip() == "[{'id': 7}]"
    assert "millrace" in run(tmp_path / "alone" / "bin" / "millrace", "--help")


def _server(client: Client) -> tuple[str, str]:
    record = json.loads((client.settings.log_path / "server.json").read_text())
    return record["address"], record["token"]
