"""What the code itself says about settings, metrics and errors, for the tests that hold the pages against it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

from millrace.metrics import FAMILIES
from millrace.settings import describe

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "include" / "millrace"


class _Names(NamedTuple):
    """What a module mentions: attributes by name, modules it imports from, codes of its classes, places it comes by."""

    attributes: frozenset[str]
    imports: frozenset[str]
    codes: frozenset[str]
    places: frozenset[str]


@cache
def _names(path: Path) -> _Names:
    attributes, imports, codes, places = set(), set(), set(), set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Attribute):
            attributes.add(node.attr)
        elif isinstance(node, ast.ImportFrom):
            imports.add(node.module or "")
        elif isinstance(node, ast.ClassDef):
            codes |= {_code(item) for item in node.body} - {""}
        elif isinstance(node, ast.Call) and _called(node) in {"hit", "seam", "_seam"}:
            places |= {str(each.value) for each in node.args if isinstance(each, ast.Constant)}
    return _Names(frozenset(attributes), frozenset(imports), frozenset(codes), frozenset(places))


def _modules(*, without: str) -> Iterator[Path]:
    """The package and the jobs, but for the module where the names themselves stand."""
    for folder in (PACKAGE, ROOT / "jobs"):
        yield from (path for path in sorted(folder.rglob("*.py")) if path != PACKAGE / without)


_BY_PROPERTY = {"spark_cores": "cores"} | dict.fromkeys(("log_tls_cert", "log_tls_key", "log_tls_name"), "log_tls")
"""Settings that others read through a property of Settings."""


def settings_read() -> set[str]:
    """Settings that some module reads as an attribute."""
    used: set[str] = set()
    for names in map(_names, _modules(without="settings.py")):
        if "millrace.settings" in names.imports:  # other objects have fields of the same names
            used |= names.attributes
    return {name for name, *_ in describe() if _BY_PROPERTY.get(name, name) in used}


def metrics_reported() -> set[str]:
    """Families that some module touches."""
    return {
        name for names in map(_names, _modules(without="metrics.py")) for name in names.attributes & FAMILIES.keys()
    }


def error_codes() -> set[str]:
    """The `code` of every class of the package that has one (roots of families included)."""
    return {code for path in PACKAGE.rglob("*.py") for code in _names(path).codes}


def failpoints() -> set[str]:
    """Places that millrace.failpoint can stop at, those with a fixed name."""
    return {name for path in PACKAGE.rglob("*.py") for name in _names(path).places}


def _called(node: ast.Call) -> str:
    return getattr(node.func, "attr", "") or getattr(node.func, "id", "")


def _code(item: ast.stmt) -> str:
    if isinstance(item, ast.AnnAssign):
        target, value = item.target, item.value
    elif isinstance(item, ast.Assign) and len(item.targets) == 1:
        target, value = item.targets[0], item.value
    else:
        return ""
    if isinstance(target, ast.Name) and target.id == "code" and isinstance(value, ast.Constant):
        return str(value.value)
    return ""
