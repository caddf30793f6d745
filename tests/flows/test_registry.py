"""A kind of sink that another package adds: the example package, installed, has a place wherever kinds have one."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from millrace.flows import registry
from millrace.flows.registry import BUILT_IN, sink_kinds

ROOT = Path(__file__).parents[2]
DECLARED = """
id: example
source: {kind: kafka, bootstrap: ["127.0.0.1:1"], topics: [in]}
sink: {kind: file, folder: FOLDER}
"""
PROGRAM = """
import json, sys
from pathlib import Path
from millrace.base.settings import Settings
from millrace.flows.batch import Batch
from millrace.flows.records import Action, Record
from millrace.flows.registry import sink_of
from millrace.flows.declare.pipeline import Pipeline
declared = {"kind": "file", "folder": sys.argv[1]}
source = {"kind": "kafka", "bootstrap": ["127.0.0.1:1"], "topics": ["in"]}
pipeline = Pipeline.parse({"id": "example", "source": source, "sink": declared})
sink = sink_of(pipeline.sink, Settings(data_dir=Path(sys.argv[1])), flow=pipeline.id, flush=pipeline.flush)
sink.open()
documents = [Action(Record("in", 0, n, None, b"{}", 0), f"in-0-{n}", b'{"n":%d}' % n, None) for n in range(3)]
for _ in range(2):
    assert sink.write(Batch("in-0", 0, 3, documents=documents)).acknowledged == 3
sink.close()
print(json.dumps(Pipeline.model_json_schema()))
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that the package is installed in, apart from the environment's own."""
    copy = tmp_path_factory.mktemp("package") / "file_sink"
    shutil.copytree(ROOT / "examples" / "file_sink", copy)
    target = copy.parent / "site"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*pip, "--target", str(target), str(copy)], check=True, capture_output=True, timeout=100)
    return target


def run(installed: Path, *arguments: str) -> str:
    paths = os.pathsep.join([str(ROOT / "include"), str(installed)])
    done = subprocess.run(
        [sys.executable, *arguments],
        env=os.environ | {"PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_example_is_short() -> None:
    files = [each for each in (ROOT / "examples" / "file_sink").rglob("*") if each.suffix in (".py", ".toml")]
    assert sum(len(each.read_text().splitlines()) for each in files) < 100


def test_an_installed_package_adds_a_kind_to_the_command_line_the_checks_and_the_schema(
    installed: Path, tmp_path: Path
) -> None:
    kinds = json.loads(run(installed, "-m", "millrace", "pipelines", "kinds", "--json"))
    assert {each["sink"]: each["package"] for each in kinds} == {
        **dict.fromkeys((each.name for each in BUILT_IN), "millrace"),
        "file": "millrace-file-sink",
    }
    file = tmp_path / "example.yaml"
    file.write_text(DECLARED.replace("FOLDER", str(tmp_path / "out")))
    checked = json.loads(run(installed, "-m", "millrace", "pipelines", "check", str(file), "--json"))
    assert checked["sink"] == "file"
    assert checked["guarantee"].startswith("at least once")
    schema = json.loads(run(installed, "-c", PROGRAM, str(tmp_path / "out")))
    assert schema["$defs"]["FileSink"]["properties"]["folder"]["type"] == "string"
    [written] = (tmp_path / "out" / "example" / "in-0").iterdir()
    assert written.read_text() == '{"n":0}\n{"n":1}\n{"n":2}\n'


def test_an_entry_point_that_cannot_be_loaded_or_takes_a_known_name_is_left_out(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Point:
        def __init__(self, found: Any) -> None:
            self.name, self.value, self.dist, self._found = "mine", "mine:KIND", None, found

        def load(self) -> Any:
            if isinstance(self._found, Exception):
                raise self._found
            return self._found

    points = [Point(ImportError("no such module")), Point(BUILT_IN[0]), Point("no kind")]
    monkeypatch.setattr(registry, "entry_points", lambda group: points)
    sink_kinds.cache_clear()
    try:
        assert list(sink_kinds()) == [each.name for each in BUILT_IN]
    finally:
        sink_kinds.cache_clear()
    assert len(caplog.records) == 3
