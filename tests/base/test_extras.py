"""A library that is missing is told with the extra of the package that brings it (tests/test_tree.py: which that is)."""

from __future__ import annotations

import sys

import pytest

from millrace.base.errors import InvalidSettings
from millrace.base.extras import EXTRAS, need, not_installed


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
