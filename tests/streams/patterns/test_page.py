"""The page about patterns does what it says."""

from __future__ import annotations

from typing import Any

from tests.docs.pages import python_blocks


def test_the_page_runs() -> None:
    names: dict[str, Any] = {}
    for block in python_blocks("docs/patterns.md"):
        exec(block.text, names)
