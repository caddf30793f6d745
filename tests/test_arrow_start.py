"""pyarrow leaves pandas alone where Millrace says so, and nowhere else; DataFrames work there all the same."""

from __future__ import annotations

import subprocess
import sys

import pytest

MADE = "import sys, pyarrow as pa; pa.array([1]); print('pandas' in sys.modules)"


def said(program: str, *before: str) -> list[str]:
    ended = subprocess.run(
        [sys.executable, *before, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    return ended.stdout.splitlines()


def as_main(module: str, program: str) -> str:
    """`program` in a process that runs `module`, by its name."""
    spec = f"import sys, types; sys.modules['__main__'].__spec__ = types.SimpleNamespace(name={module!r})\n"
    return spec + program


@pytest.mark.parametrize(
    ("module", "imported"),
    [
        ("pyspark.sql.streaming.python_streaming_source_runner", "False"),
        ("pyspark.daemon", "False"),
        ("millrace.log.server.main", "False"),
        ("millrace.node.cluster.__main__", "False"),
        ("somebody.elses", "True"),
    ],
)
def test_pandas_is_left_out_of_workers_and_servers_and_of_nothing_else(module: str, imported: str) -> None:
    assert said(as_main(module, f"import millrace.runtime.arrow_start\n{MADE}")) == [imported]


@pytest.mark.parametrize(
    "source",
    [
        "millrace.node.ingest.definition",
        "millrace.node.flush.definition",
        "millrace.node.range.source",
        "millrace.streams.reader",
    ],
)
def test_a_sparks_worker_that_imports_a_source_of_ours_imports_no_pandas(source: str) -> None:
    runner = "pyspark.sql.streaming.python_streaming_source_runner"
    assert said(as_main(runner, f"import {source}\n{MADE}")) == ["False"]


@pytest.mark.parametrize(
    "program",
    [
        "millrace.log.server.main",
        "millrace.node.cluster.__main__",
        "millrace.operations.__main__",
        "millrace.pipelines.worker.__main__",
        "millrace.service.__main__",
        "millrace.service.pipelines",
    ],
)
def test_a_program_of_ours_imports_no_pandas(program: str) -> None:
    assert said(as_main(program, f"import {program}\n{MADE}")) == ["False"]


def test_frames_come_and_go_where_pandas_was_left_out() -> None:
    program = """
from millrace.runtime.arrow_start import leave_pandas_out
leave_pandas_out()
import pyarrow as pa
frame = pa.table({"a": [1, None, 3]}).to_pandas()
print(pa.Table.from_pandas(frame).column("a").to_pylist())
import pandas
print(pa.array(pandas.Series([1.5, float("nan")]), from_pandas=True).to_pylist())
leave_pandas_out()
"""
    assert said(program) == ["[1.0, None, 3.0]", "[1.5, None]"]


def test_a_command_imports_no_pandas() -> None:
    program = """
import sys
from typer.testing import CliRunner
from millrace.commands.main import app
result = CliRunner().invoke(app, ["collections", "list", "--data", "/nowhere"])
import pyarrow as pa
pa.array([1])
print("pandas" in sys.modules)
"""
    assert said(program) == ["False"]
