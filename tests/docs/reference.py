"""The tables of docs/operating.md that are made from the code: settings, metrics, thresholds of the chain.

python -m tests.docs.reference    # rewrites them; a test fails where the page has anything else
"""

from __future__ import annotations

import re

from millrace.metrics import FAMILIES, NAMESPACE
from millrace.settings import describe
from millrace.wal.config import BOUNDS, ChainConfig
from tests.docs.code_facts import ROOT, settings_read

PAGE = "docs/operating.md"


def _row(*cells: str) -> str:
    return "| " + " | ".join(cells) + " |\n"


def settings_table() -> str:
    """A row a setting; says which ones no code reads yet."""
    read = settings_read()
    text = _row("setting", "variable", "default", "meaning") + "|---|---|---|---|\n"
    for name, env, default, words in describe():
        note = "" if name in read else " **Not read yet.**"
        text += _row(f"`{name}`", f"`{env}`", f"`{default or '(empty)'}`", words + note)
    return text


def metrics_table() -> str:
    """A row a family."""
    text = _row("metric", "kind", "labels", "meaning") + "|---|---|---|---|\n"
    for name, family in FAMILIES.items():
        text += _row(f"`{NAMESPACE}_{name}`", family.kind, ", ".join(family.labels) or "-", family.words)
    return text


def thresholds_table() -> str:
    """A row for each key of the chain's configuration."""
    text = _row("key", "default", "least", "greatest") + "|---|---|---|---|\n"
    for key, value in ChainConfig().to_json().items():
        text += _row(f"`{key}`", str(value), *map(str, BOUNDS[key]))
    return text


TABLES = {"Settings": settings_table, "Metrics": metrics_table, "Thresholds of the chain": thresholds_table}
"""By heading of the page: what makes the first table under it."""


def with_table(page: str, heading: str, table: str) -> str:
    """`page` with `table` as the first table under `heading`."""
    start = re.search(rf"^#+ {re.escape(heading)}$", page, re.MULTILINE)
    assert start is not None, f"{PAGE} has no heading {heading!r}"
    old = re.compile(r"(?:^\|.*\n)+", re.MULTILINE).search(page, start.end())
    assert old is not None, f"{PAGE} has no table under {heading!r}"
    return page[: old.start()] + table + page[old.end() :]


def main() -> None:
    """Rewrite the page."""
    path = ROOT / PAGE
    text = path.read_text(encoding="utf-8")
    for heading, make in TABLES.items():
        text = with_table(text, heading, make())
    path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
