"""pyarrow leaves pandas alone in Millrace's own programs and Spark's workers, and nowhere else.

DataFrames work there all the same.
"""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

WORKER = "pyspark.sql.streaming.python_streaming_source_runner"
PROGRAMS = (
    "millrace.log.server.main",
    "millrace.node.cluster.__main__",
    "millrace.operations.__main__",
    "millrace.flows.range_host.__main__",
    "millrace.service.__main__",
    "millrace.service.pipelines",
)
SOURCES = (
    "millrace.node.ingest.definition",
    "millrace.node.flush.definition",
    "millrace.node.range_loop.source",
    "millrace.flows.sources.collection.spark_source",
)
"""Modules that one of Spark's Python workers imports for a source."""
CASES = (
    ("somebody.elses", "millrace.runtime.arrow_without_pandas", True),
    ("pyspark.daemon", "millrace.runtime.arrow_without_pandas", False),
    *((program, program, False) for program in PROGRAMS),
    *((WORKER, source, False) for source in SOURCES),
)

FORKS = """
import importlib, json, os, sys, types
import numpy, pyarrow, pydantic, fastapi, typer  # what the cases share; none of these makes an array
assert "pandas" not in sys.modules
for main, module, loads in json.loads(sys.argv[1]):
    if (child := os.fork()) == 0:
        sys.modules["__main__"].__spec__ = types.SimpleNamespace(name=main)
        importlib.import_module(module)
        pyarrow.array([1])
        os._exit(int("pandas" in sys.modules) + 10)
    ended = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if ended != int(loads) + 10:
        print(main, module, ended)
from typer.testing import CliRunner
from millrace.commands.main import app
CliRunner().invoke(app, ["collections", "list", "--data", "/nowhere"])
pyarrow.array([1])
if "pandas" in sys.modules:
    print("a command")
"""

FRAMES = """
from millrace.runtime.arrow_without_pandas import hide_pandas_from_arrow
hide_pandas_from_arrow()
import pyarrow as pa
frame = pa.table({"a": [1, None, 3]}).to_pandas()
print(pa.Table.from_pandas(frame).column("a").to_pylist())
import pandas
print(pa.array(pandas.Series([1.5, float("nan")]), from_pandas=True).to_pylist())
hide_pandas_from_arrow()
"""


def printed(program: str, *arguments: str) -> list[str]:
    command = [sys.executable, "-c", program, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout.splitlines()


@pytest.mark.slow
def test_programs_and_workers_of_ours_import_no_pandas_and_other_programs_do() -> None:
    assert printed(FORKS, json.dumps(CASES)) == []


@pytest.mark.slow
def test_frames_come_and_go_where_pandas_was_left_out() -> None:
    assert printed(FRAMES) == ["[1.0, None, 3.0]", "[1.5, None]"]
