"""The example of docs/schema-evolution.md runs as pasted, and its tables match the code."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from millrace.client.collection import Collection
from tests.docs.pages import python_blocks, table
from tests.docs.test_examples import run


@pytest.mark.slow
def test_the_example_reads_both_schemas() -> None:
    names: dict[str, Any] = {}
    printed = "".join(run(block.text, names) for block in python_blocks("docs/schema-evolution.md"))
    now, then, grown = printed.splitlines()
    assert now == "[{'id': 1, 'city': None, 'cents': 250}, {'id': 2, 'city': 'Oslo', 'cents': 5000000000}]"
    assert grown == "<Collection 'things' (id: int64, n: int64, city: string?), key 'id'>"
    assert then == "[{'id': 1, 'price': 250, 'note': 'gift'}]"


def test_the_table_has_the_options_of_alter_in_their_order() -> None:
    options = [name for name in inspect.signature(Collection.alter).parameters if name != "self"]
    assert [row[0].strip("`") for row in table("docs/schema-evolution.md", "Changing a schema")] == options
