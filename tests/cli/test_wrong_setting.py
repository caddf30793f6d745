"""A variable that is no setting is said in a line by whatever the Makefile runs, before anything else happens."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

PROGRAMS = (
    "millrace.runtime.spark.jars",
    "millrace.brokers.jars kafka",
    "millrace.brokers kafka --data {folder}",
    "millrace.demo",
    "millrace.demo.running",
    "millrace status",
    "millrace system up",
)


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("program", PROGRAMS)
def test_it_is_one_line_with_the_name_that_was_meant(program: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("data")
    ended = subprocess.run(
        [sys.executable, "-m", *program.format(folder=folder).split()],
        env=os.environ | {"MILLRACE_DATE": str(folder), "COLUMNS": "200"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=60,
    )
    assert ended.returncode == 1, ended.stdout
    assert ended.stdout == "INVALID_SETTINGS: MILLRACE_DATE is not a setting; did you mean MILLRACE_DATA?\n"
    assert list(folder.iterdir()) == []
