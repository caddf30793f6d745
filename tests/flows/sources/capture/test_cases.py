"""The page of cases names tests that are there."""

from __future__ import annotations

import re
from pathlib import Path

_ROOT = Path(__file__).parents[4]


def test_each_case_has_a_test() -> None:
    page = (_ROOT / "docs" / "internals" / "capture-cases.md").read_text(encoding="utf-8")
    rows = [line for line in page.splitlines() if line.startswith("| ") and "**" not in line][1:]
    assert len(rows) > 30
    for row in rows:
        named = re.findall(r"`(\w+/\w+\.py)::(\w+)`", row.rsplit(" | ", 1)[1])
        assert named, row
        for path, name in named:
            source = (_ROOT / "tests" / "flows" / "sources" / path).read_text(encoding="utf-8")
            assert f"\ndef {name}(" in source, f"{path} has no {name}"
