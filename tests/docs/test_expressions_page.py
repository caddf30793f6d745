"""The example of docs/expressions.md runs as pasted, and its table lists every function and bound."""

from __future__ import annotations

import re
from typing import Any

import pytest

from millrace.message.expression.kernels import MAX_TEXT
from millrace.message.expression.rules import MAX_CHECKS, MAX_OPERATIONS
from millrace.message.expression.tree import FUNCTIONS, MAX_LEVELS, MAX_LITERAL, MAX_NODES
from tests.docs.pages import python_blocks, table, text
from tests.docs.test_examples import run


@pytest.mark.slow
def test_the_example_fills_computes_and_refuses() -> None:
    names: dict[str, Any] = {}
    [rows, refused] = "".join(run(block.text, names) for block in python_blocks("docs/expressions.md")).splitlines()
    assert rows == ("[{'id': 1, 'qty': 1, 'total': Decimal('9.90')}, {'id': 2, 'qty': 3, 'total': Decimal('7.50')}]")
    assert refused == "row 0: check 'some' does not hold; none was sent"


def test_the_table_names_every_function_and_the_page_every_bound() -> None:
    cells = " ".join(" ".join(row) for row in table("docs/expressions.md", "What an expression has"))
    assert set(FUNCTIONS) <= set(re.findall(r"[a-z_]+", cells))
    page = text("docs/expressions.md")
    assert f"at most {MAX_LITERAL:,} characters" in page
    assert f"At most {MAX_NODES} operations in {MAX_LEVELS} levels in one expression, {MAX_CHECKS} checks" in page
    assert f"{MAX_OPERATIONS:,} operations in a schema" in page
    assert f"{MAX_TEXT >> 10} KiB" in page
