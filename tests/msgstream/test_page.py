"""The examples of docs/msgstream.md run as they stand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.docs.pages import python_blocks


def test_the_examples_of_the_page_run_and_print_what_it_says(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    names: dict[str, Any] = {}
    blocks = python_blocks("docs/msgstream.md")
    assert len(blocks) == 2
    for block in blocks:
        exec(compile(block.text, "<page>", "exec"), names)
    # The second pack was not acknowledged when the first example's stream was closed, so it
    # comes to the second example.
    assert capsys.readouterr().out.split("\n") == ["[1, 2, 3] [4, 5, 6]", "3", ""]
