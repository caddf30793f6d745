"""Tests bite: each nasty change of ``mutants.toml`` is found by the test that is named for it (`make mutants`)."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

from tests.mutants.catalogue import ROOT, DoesNotApply, Mutant, mutants

MUTANTS = mutants()
FOLDERS = ("include", "plugins", "jobs", "dags", "tests", "docs")
FILES = ("pyproject.toml", "airflow.cfg")
SECONDS = 110
"""The longest that a test may take to fail; what it takes longer is not found by whoever breaks the code."""


def test_every_mutant_applies_and_its_test_is_there() -> None:
    assert not [name for name, count in Counter(each.name for each in MUTANTS).items() if count > 1]
    for mutant in MUTANTS:
        path = ROOT / mutant.file
        assert mutant.old != mutant.new, mutant.name
        ast.parse(mutant.changed(path.read_text(encoding="utf-8")))
        file, _, name = mutant.test.partition("::")
        assert name.partition("[")[0] in _functions(file), f"mutant {mutant.name!r}: there is no test {mutant.test}"


@cache
def _functions(file: str) -> set[str]:
    return {
        node.name
        for node in ast.walk(ast.parse((ROOT / file).read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }


def test_a_mutant_whose_text_is_gone_or_there_twice_says_so() -> None:
    mutant = Mutant("m", "f.py", "a < b", "a <= b", "t.py::t", "why")
    assert mutant.changed("if a < b:") == "if a <= b:"
    for text in ("if a > b:", "a < b < c and a < b"):
        with pytest.raises(DoesNotApply, match="'m'"):
            mutant.changed(text)


@pytest.fixture(scope="session")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the code and its tests, which mutants are put into; compiled files stay out of it."""
    copy = tmp_path_factory.mktemp("mutants") / "tree"
    for name in FOLDERS:
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in FILES:
        shutil.copy(ROOT / name, copy / name)
    return copy


def run(tree: Path, tests: list[str]) -> subprocess.CompletedProcess[str]:
    """The tests, run on the code of `tree` by a Python that keeps no compiled files."""
    env = {**os.environ, "PYTHONPATH": str(tree / "include"), "PYTHONDONTWRITEBYTECODE": "1", "TEST_PROFILE": "ci"}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", f"--timeout={SECONDS}", *tests]
    return subprocess.run(command, cwd=tree, env=env, capture_output=True, text=True, check=False)


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_the_tests_of_the_mutants_pass_on_the_code_as_it_is(tree: Path) -> None:
    done = run(tree, sorted({mutant.test for mutant in MUTANTS}))
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.soak
@pytest.mark.timeout(300)
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_is_killed_by_its_test(mutant: Mutant, tree: Path) -> None:
    with mutant.applied(tree):
        done = run(tree, [mutant.test])
    assert done.returncode != 0, f"{mutant.test} passes although {mutant.why}"
    assert done.returncode == 1, f"{mutant.test} did not run:\n{done.stdout}{done.stderr}"
