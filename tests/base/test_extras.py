"""A missing library is reported with the extra that brings it (tests/test_tree.py holds the list)."""

from __future__ import annotations

import sys

import pytest

from millrace.base.errors import InvalidSettings
from millrace.base.extras import EXTRAS, missing_extra_error, require_extras


def test_a_library_that_is_missing_is_told_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    require_extras(*EXTRAS)
    monkeypatch.setitem(sys.modules, "duckdb", None)
    with pytest.raises(InvalidSettings, match=r"duckdb is not installed: pip install 'millrace\[operations\]'"):
        require_extras("coord", "operations")
    with pytest.raises(ModuleNotFoundError) as caught:
        import duckdb  # noqa: F401
    assert "millrace[operations]" in str(missing_extra_error(caught.value))


def test_a_module_of_nobodys_is_not_told_as_a_library() -> None:
    with pytest.raises(ModuleNotFoundError) as caught:
        import nobodys_module  # type: ignore[import-not-found]  # noqa: F401
    assert missing_extra_error(caught.value) is None
