"""Pulsar's client and DuckDB in one process: each keeps its own types of errors."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import {first}
import {second}
import gc
import sys
import duckdb, pulsar
from millrace.log.pulsar import _interpreter_dictionary

known = sys.getrefcount(_interpreter_dictionary())
gc.collect()
try:
    duckdb.sql("SELECT 9223372036854775807 + 1").fetchall()
except duckdb.Error as error:
    print(type(error).__name__)
print(hasattr(duckdb.sql("SELECT 1"), "mapInArrow"))
try:
    pulsar.MessageId.deserialize(b"")
except Exception as error:
    print(type(error).__name__)
print(sys.getrefcount(_interpreter_dictionary()) == known > 1)
"""


@pytest.mark.parametrize(
    ("first", "second"), [("duckdb", "millrace.log.pulsar.reader"), ("millrace.log.pulsar.reader", "duckdb")]
)
def test_errors_keep_their_types(first: str, second: str) -> None:
    program = PROGRAM.format(first=first, second=second)
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert ran.stdout.split() == ["OutOfRangeException", "False", "ValueError", "True"]
