"""The pages as data: their tables, their code, the links and files that they name."""

from __future__ import annotations

import re
from typing import NamedTuple

from tests.docs.code_facts import ROOT

PAGES = (
    "README.md",
    "SECURITY.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    *(str(path.relative_to(ROOT)) for path in sorted((ROOT / "docs").rglob("*.md"))),
)


class Code(NamedTuple):
    """A fenced block: what stands behind ```python on its first line, and its text."""

    mark: str
    text: str


def text(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def prose(page: str) -> list[str]:
    """The lines that are no code, no heading, no table's, and no element of HTML: those that can be broken anywhere."""
    without_code = re.sub(r"^\s*```.*?^\s*```", "", text(page), flags=re.MULTILINE | re.DOTALL)
    return [line for line in without_code.split("\n") if not line.startswith(("|", "#", "<", "    "))]


def section(page: str, heading: str) -> str:
    """What stands under a heading, up to the next one of any level."""
    parts = re.split(r"^#+ (.*)$", text(page), flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))[heading]


def tables(page: str, heading: str) -> list[list[list[str]]]:
    """The tables under a heading: rows of cells as text without backticks, the header left out."""
    found = re.findall(r"(?:^\|.*\n)+", section(page, heading), re.MULTILINE)
    return [[_cells(line) for line in lines.strip().split("\n")[2:]] for lines in found]


def table(page: str, heading: str) -> list[list[str]]:
    """The first table under a heading."""
    return tables(page, heading)[0]


def _cells(line: str) -> list[str]:
    return [cell.strip().replace("`", "") for cell in line.strip("|").split("|")]


def differences(found: list[list[str]], wanted: list[list[str]]) -> str:
    """What to change in a page's table so that it says what the code says; empty where it does, in the same order."""
    lines = [f"- {' | '.join(row)}" for row in found if row not in wanted]
    lines += [f"+ {' | '.join(row)}" for row in wanted if row not in found]
    return "\n".join(lines) or ("" if found == wanted else "the rows stand in another order")


class Block(NamedTuple):
    """A fenced block of any language."""

    language: str
    text: str


def blocks(page: str) -> list[Block]:
    return [Block(*found) for found in re.findall(r"^```(\w+)[^\n]*\n(.*?)^```", text(page), re.MULTILINE | re.DOTALL)]


def python_blocks(page: str) -> list[Code]:
    found = re.findall(r"^```python ?(\w*)\n(.*?)^```", text(page), re.MULTILINE | re.DOTALL)
    return [Code(mark, body) for mark, body in found]


def links(page: str) -> list[str]:
    """Targets of the page's links and pictures in the tree, anchors included."""
    found = re.findall(r"\]\(([^)\s]+)\)|\b(?:src|srcset)=\"([^\"]+)\"", text(page))
    return [target for pair in found for target in pair if target and "://" not in target]


def anchors(page: str) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", text(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def files_named(page: str) -> set[str]:
    """Files and folders that the page names in backticks, as paths from the root of the tree."""
    return set(re.findall(r"`((?:tests|jobs|include|bench|docs|tools)/[\w./-]*\w)/?`", text(page)))
