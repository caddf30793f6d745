"""What the package imports is what it asks for: by itself, or by an extra that is named where a library is missing."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

from millrace.base.errors import InvalidSettings
from millrace.base.extras import EXTRAS, need, not_installed

ROOT = Path(__file__).resolve().parents[2]
THE_USERS_OWN = {"polars"}
"""What a method gives to whoever has it, and is a typed error to whoever has not."""


def _distribution(requirement: str) -> str:
    return re.sub(r"[-_.]+", "-", re.split(r"[=<>\[ ;]", requirement)[0]).lower()


def _asked() -> dict[str, set[str]]:
    """By extra, "" for none, the distributions that it brings, those of the extras that it takes in too."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    parts: dict[str, list[str]] = {"": project["dependencies"], **project["optional-dependencies"]}

    def brought(extra: str) -> set[str]:
        found = set()
        for each in parts[extra]:
            inside = re.fullmatch(r"millrace\[(.*)\]", each)
            found |= set().union(*(brought(name) for name in inside[1].split(","))) if inside else {_distribution(each)}
        return found

    return {extra: brought(extra) for extra in parts}


def _imported() -> dict[str, str]:
    """Top-level modules that are not Python's and not ours, and a file that imports each."""
    found = {}
    for path in sorted((ROOT / "include").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [each.name for each in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            found |= {name.partition(".")[0]: str(path.relative_to(ROOT)) for name in names}
    return {name: path for name, path in found.items() if name not in sys.stdlib_module_names | {"millrace"}}


def test_every_library_comes_with_the_package_or_by_the_extra_that_is_named_where_it_is_missing() -> None:
    asked, distributions = _asked(), packages_distributions()
    of = {module: extra for extra, modules in EXTRAS.items() for module in modules}
    wrong = {}
    for module, path in _imported().items():
        names = {_distribution(each) for each in distributions[module]}
        if not names & asked[""] and module not in THE_USERS_OWN and not names & asked.get(of.get(module, ""), set()):
            wrong[module] = path
    assert not wrong
    assert EXTRAS.keys() | {"", "all"} == asked.keys()
    assert asked["all"] == set().union(*asked.values()) - asked[""]


def test_a_library_that_is_missing_is_told_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    need(*EXTRAS)
    monkeypatch.setitem(sys.modules, "duckdb", None)
    with pytest.raises(InvalidSettings, match=r"duckdb is not installed: pip install 'millrace\[operations\]'"):
        need("coord", "operations")
    with pytest.raises(ModuleNotFoundError) as caught:
        import duckdb  # noqa: F401
    assert "millrace[operations]" in str(not_installed(caught.value))


def test_a_module_of_nobodys_is_not_told_as_a_library() -> None:
    with pytest.raises(ModuleNotFoundError) as caught:
        import nobodys_module  # type: ignore[import-not-found]  # noqa: F401
    assert not_installed(caught.value) is None
