"""The errors and failpoints of the code, for the tests that compare the pages with it."""

from __future__ import annotations

import ast
import re
from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "include" / "millrace"


class _Names(NamedTuple):
    """A module's own classes that have bases, with these, and its failpoints."""

    classes: frozenset[tuple[str, frozenset[str]]]
    failpoints: frozenset[str]


@cache
def _names(path: Path) -> _Names:
    classes, places = set(), set()
    text = path.read_text(encoding="utf-8")
    derives, hits = re.search(r"^class \w+\(", text, re.MULTILINE), "hit(" in text
    # Most modules have neither, and need not be parsed.
    module = ast.parse(text if derives or hits else "")
    for node in module.body:
        if isinstance(node, ast.ClassDef):
            classes.add((node.name, frozenset(ast.unparse(base).rpartition(".")[2] for base in node.bases)))
    for node in ast.walk(module) if hits else ():
        if isinstance(node, ast.Call) and _called(node) == "hit":
            places |= {str(each.value) for each in node.args if isinstance(each, ast.Constant)}
    return _Names(frozenset(classes), frozenset(places))


def error_codes() -> set[str]:
    """Return the code of every error class of the package, including the roots."""
    known = {"MillraceError"}
    homes = {name: (path, bases) for path in PACKAGE.rglob("*.py") for name, bases in _names(path).classes}
    while more := {name for name, (_, bases) in homes.items() if bases & known} - known:
        known |= more
    return {getattr(_module(homes[name][0]), name).code for name in known}


def _module(path: Path) -> ModuleType:
    return import_module(".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts))


def failpoints() -> set[str]:
    """Return the failpoints with a fixed name."""
    return {name for path in PACKAGE.rglob("*.py") for name in _names(path).failpoints}


def _called(node: ast.Call) -> str:
    return getattr(node.func, "attr", "") or getattr(node.func, "id", "")
