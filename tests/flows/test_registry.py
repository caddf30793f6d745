"""Kinds that other packages add: the example packages, installed, have a place wherever kinds have one."""

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
from millrace.flows.registry import SINKS, SOURCES, sink_kinds, source_kinds

ROOT = Path(__file__).parents[2]
EXAMPLES = ("file_sink", "lines_source")
DECLARED = """
id: example
source: {kind: lines, folder: FOLDER/in}
sink: {kind: file, folder: FOLDER/out}
errors: {cluster: {bootstrap: ["127.0.0.1:1"]}}
"""
PROGRAM = """
import json, sys
from pathlib import Path
from millrace.base.settings import Settings
from millrace.flows.batch import Batch
from millrace.flows.records import Action
from millrace.flows.sources.source import Limits
from millrace.flows.registry import reader_of, sink_of, source_of
from millrace.pipelines.declaration import pipeline_of
from millrace.flows.declare.flow import Flow
folder, out = Path(sys.argv[1]) / "in", Path(sys.argv[1]) / "out"
folder.mkdir()
(folder / "in.jsonl").write_text('{"n":0}\\n{"n":1}\\n{"n":2}\\n{"n":')
pipeline = pipeline_of({
    "id": "example",
    "source": {"kind": "lines", "folder": str(folder)},
    "sink": {"kind": "file", "folder": str(out)},
    "errors": {"cluster": {"bootstrap": ["127.0.0.1:1"]}},
})
settings = Settings(data_dir=out)
source = source_of(pipeline.source, settings, group="g")
[(topic, partition)] = source.partitions()
[(lane, (low, high))] = source.ends().items()
reader = reader_of(pipeline.source, settings, group="g", topic=topic, partition=partition)
[batch] = reader.batches(low, high, Limits(10, 1 << 20, 1.0))
assert batch.end == high == 24
sink = sink_of(pipeline.sink, settings, flow=pipeline.name, flush=pipeline.flush)
sink.open()
documents = [Action(each, each.position, each.value, None) for each in batch.records]
for _ in range(2):
    assert sink.write(Batch(lane, low, high, documents=documents)).acknowledged == 3
sink.close()
print(json.dumps(Flow.model_json_schema()))
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that the example packages are installed in, apart from the environment's own."""
    folder = tmp_path_factory.mktemp("packages")
    copies = [shutil.copytree(ROOT / "examples" / each, folder / each) for each in EXAMPLES]
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    command = [*pip, "--target", str(folder / "site"), *map(str, copies)]
    subprocess.run(command, check=True, capture_output=True, timeout=100)
    return folder / "site"


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


@pytest.mark.parametrize("example", EXAMPLES)
def test_the_example_is_short(example: str) -> None:
    files = [each for each in (ROOT / "examples" / example).rglob("*") if each.suffix in (".py", ".toml")]
    assert sum(len(each.read_text().splitlines()) for each in files) < 100


def test_an_installed_package_adds_a_kind_to_the_command_line_the_checks_and_the_schema(
    installed: Path, tmp_path: Path
) -> None:
    kinds = json.loads(run(installed, "-m", "millrace", "flows", "kinds", "--json"))
    assert {(each["part"], each["kind"]): each["package"] for each in kinds} == {
        **{("source", each.name): "millrace" for each in SOURCES},
        ("source", "lines"): "millrace-lines-source",
        **{("sink", each.name): "millrace" for each in SINKS},
        ("sink", "file"): "millrace-file-sink",
    }
    file = tmp_path / "example.yaml"
    file.write_text(DECLARED.replace("FOLDER", str(tmp_path)))
    checked = json.loads(run(installed, "-m", "millrace", "flows", "check", str(file), "--json"))
    assert (checked["source"], checked["sink"]) == ("lines", "file")
    assert checked["guarantee"].startswith("at least once")
    schema = json.loads(run(installed, "-c", PROGRAM, str(tmp_path)))
    assert schema["$defs"]["FileSink"]["properties"]["folder"]["type"] == "string"
    assert schema["$defs"]["LinesSource"]["properties"]["start"]["enum"] == ["earliest", "latest"]
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

    points = [Point(ImportError("no such module")), Point(SINKS[0]), Point("no kind")]
    monkeypatch.setattr(registry, "entry_points", lambda group: points)
    for kinds, ours in ((sink_kinds, SINKS), (source_kinds, SOURCES)):
        kinds.cache_clear()
        caplog.clear()
        try:
            assert list(kinds()) == [each.name for each in ours]
        finally:
            kinds.cache_clear()
        assert len(caplog.records) == 3
