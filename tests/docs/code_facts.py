"""What the code itself says about settings, metrics and errors, for the tests that hold the pages against it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

from millrace.base.metrics import FAMILIES
from millrace.base.settings import describe

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "include" / "millrace"


class _Names(NamedTuple):
    """What a module mentions: attributes by name, modules it imports from, classes with their bases, places it comes by."""

    attributes: frozenset[str]
    imports: frozenset[str]
    classes: frozenset[tuple[str, frozenset[str]]]
    places: frozenset[str]


@cache
def _names(path: Path) -> _Names:
    attributes, imports, classes, places = set(), set(), set(), set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Attribute):
            attributes.add(node.attr)
        elif isinstance(node, ast.ImportFrom):
            imports.add(node.module or "")
        elif isinstance(node, ast.ClassDef):
            classes.add((node.name, frozenset(ast.unparse(base).rpartition(".")[2] for base in node.bases)))
        elif isinstance(node, ast.Call) and _called(node) in {"hit", "seam", "_seam"}:
            places |= {str(each.value) for each in node.args if isinstance(each, ast.Constant)}
    return _Names(frozenset(attributes), frozenset(imports), frozenset(classes), frozenset(places))


def _modules(*, without: str) -> Iterator[Path]:
    """The package and the jobs, but for the module where the names themselves stand."""
    for folder in (PACKAGE, ROOT / "jobs"):
        yield from (path for path in sorted(folder.rglob("*.py")) if path != PACKAGE / without)


_BY_PROPERTY = {"spark_cores": "cores"} | dict.fromkeys(("log_tls_cert", "log_tls_key", "log_tls_name"), "log_tls")
"""Settings that others read through a property of Settings."""


def settings_read() -> set[str]:
    """Settings that some module reads as an attribute."""
    used: set[str] = set()
    for names in map(_names, _modules(without="base/settings/__init__.py")):
        if "millrace.base.settings" in names.imports:  # other objects have fields of the same names
            used |= names.attributes
    return {name for name, *_ in describe() if _BY_PROPERTY.get(name, name) in used}


def metrics_reported() -> set[str]:
    """Families that some module touches."""
    return {
        name
        for names in map(_names, _modules(without="base/metrics.py"))
        for name in names.attributes & FAMILIES.keys()
    }


def error_codes() -> set[str]:
    """The code of every class of the package that is of the family (its roots included)."""
    known = {"MillraceError"}
    homes = {name: (path, bases) for path in PACKAGE.rglob("*.py") for name, bases in _names(path).classes}
    while more := {name for name, (_, bases) in homes.items() if bases & known} - known:
        known |= more
    return {getattr(_module(homes[name][0]), name).code for name in known}


def _module(path: Path) -> ModuleType:
    return import_module(".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts))


def failpoints() -> set[str]:
    """Places that millrace.base.failpoint can stop at, those with a fixed name."""
    return {name for path in PACKAGE.rglob("*.py") for name in _names(path).places}


def _called(node: ast.Call) -> str:
    return getattr(node.func, "attr", "") or getattr(node.func, "id", "")
