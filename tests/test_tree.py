"""What is pinned, what each library comes with, and what no file of the tree holds."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

from millrace.base.extras import EXTRAS

ROOT = Path(__file__).resolve().parent.parent
SKIPPED_FOLDERS = {".git", ".venv", "__pycache__", ".mypy_cache", ".pytest_cache", ".ruff_cache", ".hypothesis"}


def _modules(folder: Path) -> list[Path]:
    return [folder] if folder.is_file() else sorted(folder.rglob("*.py"))


@cache
def _imports(path: Path) -> frozenset[str]:
    """Dotted names of all modules that `path` imports, at any depth, those for type checking included."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.relative_to(ROOT)} imports relatively"
            assert node.module is not None
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
    return frozenset(found)


def _files() -> Iterator[Path]:
    for path in ROOT.rglob("*"):
        inside = path.relative_to(ROOT)
        if not SKIPPED_FOLDERS.intersection(inside.parts) and path.is_file() and not path.is_symlink():
            yield path


def _names(requirements: Path) -> dict[str, str | None]:
    """Normalised name -> exact version (None: no exact pin) of each line that names a distribution."""
    found: dict[str, str | None] = {}
    for line in requirements.read_text(encoding="utf-8").splitlines():
        match = re.match(r"([A-Za-z0-9][A-Za-z0-9._-]*)(?:==([^\s;\\]+))?", line)
        if match:
            found[_normal(match[1])] = match[2]
    return found


def _normal(name: str) -> str:
    """A distribution's name as all its spellings have it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def _libraries(folder: str) -> dict[str, set[str]]:
    """What the code in `folder` imports that is not Python's and not ours.

    By top-level module the distributions that bring it.
    """
    distributions = packages_distributions()
    tops = {name.split(".")[0] for path in _modules(ROOT / folder) for name in _imports(path)}
    tops -= sys.stdlib_module_names | {"millrace", "jobs"}
    return {top: {_normal(name) for name in distributions.get(top, [top])} for top in tops}


def _brought() -> dict[str, set[str]]:
    """By extra of the package, "" for none, the distributions that it brings, those of
    the extras that it takes in too.
    """
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    parts: dict[str, list[str]] = {"": project["dependencies"], **project["optional-dependencies"]}

    def brought(extra: str) -> set[str]:
        found: set[str] = set()
        for each in parts[extra]:
            inside = re.fullmatch(r"millrace\[(.*)\]", each)
            found |= (
                set().union(*map(brought, inside[1].split(","))) if inside else {_normal(re.split(r"[\[=<>]", each)[0])}
            )
        return found

    return {extra: brought(extra) for extra in parts}


def test_no_file_names_a_place_on_somebodys_machine_or_a_package_index() -> None:
    folders = "|".join(("work", "farm", "root", "home", "tmp/v"))
    place = re.compile(rf"(?:^|[^A-Za-z0-9_.])/(?:{folders})/[A-Za-z0-9._]")
    index = re.compile("|".join(("--(?:extra-)?index" + "-url", "--find" + "-links", "pypi" + r"\.org/simple")))
    found = []
    for path in _files():
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        found += [
            f"{path.relative_to(ROOT)}:{number}: {line.strip()[:120]}"
            for number, line in enumerate(text.splitlines(), 1)
            if place.search(line) or index.search(line)
        ]
    assert not found, "\n".join(found)


def test_the_lock_holds_every_requirement_at_its_pin_and_everything_exactly() -> None:
    asked, locked = _names(ROOT / "requirements.in"), _names(ROOT / "requirements.txt")
    assert not [name for name, version in locked.items() if version is None]
    assert asked.keys() <= locked.keys()
    assert not {name: version for name, version in asked.items() if version not in (None, locked[name])}


@pytest.mark.slow
def test_every_library_that_the_package_imports_is_asked_for_by_name() -> None:
    asked = _names(ROOT / "requirements.in")
    libraries = _libraries("include") | _libraries("jobs")
    assert not {top for top, names in libraries.items() if not names & asked.keys()}


@pytest.mark.slow
def test_every_library_comes_with_the_package_or_by_the_extra_that_is_named_where_it_is_missing() -> None:
    brought = _brought()
    extra_of = {module: extra for extra, modules in EXTRAS.items() for module in modules}
    wrong = {
        top
        for top, names in _libraries("include").items()
        if not names & (brought[""] | brought.get(extra_of.get(top, ""), set()))
    }
    assert not wrong
    assert EXTRAS.keys() | {"", "all"} == brought.keys()
    assert brought["all"] == set().union(*brought.values()) - brought[""]
